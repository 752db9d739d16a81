//! The one-sided face, within a node and between nodes.

#[allow(dead_code, reason = "its `main` is for those who run it by hand")]
#[path = "../../examples/one_sided.rs"]
mod one_sided;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use crate::roomy;
use crate::support::{on_ranks, small};
use half::bf16;
use rustix::fs::{MemfdFlags, SealFlags};
use sidelane::bootstrap::Timeouts;
use sidelane::error::{Error, LaneError, MemoryError};
use sidelane::gate::Routing;
use sidelane::topology::Route;
use sidelane::{ExpertParallel, Window};

/// All on one node; all apart; both.
const NODES: [[u32; 3]; 3] = [[0, 0, 0], [0, 1, 2], [0, 1, 0]];

fn bytes(window: &Window, offset: u64, len: usize) -> Vec<u8> {
    let mut seen = vec![0; len];
    window.read(offset, &mut seen).unwrap();
    seen
}

/// Memory of a caller's: a descriptor to register, and a view of the same bytes.
fn memory(len: u64, seals: SealFlags) -> (OwnedFd, File) {
    let fd =
        rustix::fs::memfd_create("sidelane-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    let view = File::from(fd.try_clone().unwrap());
    (fd, view)
}

#[test]
fn put_bytes_are_visible_once_their_signal_is() {
    for nodes in NODES {
        on_ranks(&nodes, &roomy(), |world| {
            let mut window = world.all().unwrap().window(3 << 20).unwrap();
            let (me, n) = (world.rank(), world.size());
            let (right, left) = ((me + 1) % n, (me + n - 1) % n);
            for round in 1..=20u64 {
                let len = 1 + round as usize * 100_003 % (2 << 20);
                let tone = |rank: u32| (rank as u8 + 1) * 10 + round as u8;
                window.put(right, round, &vec![tone(me); len]).unwrap();
                window.put_signal(right, 0, &[tone(me)], 2 * round).unwrap();
                window.wait_until(left, 2 * round).unwrap();
                assert_eq!(bytes(&window, 0, 1), [tone(left)]);
                assert!(bytes(&window, round, len).iter().all(|&byte| byte == tone(left)));
                // The grant for the next round: I have read.
                window.signal(left, 2 * round + 1).unwrap();
                window.wait_until(right, 2 * round + 1).unwrap();
            }
        });
    }
}

#[test]
fn bytes_of_own_part_put_without_a_wait_are_there_after_quiet() {
    const LEN: usize = 300_000;
    for nodes in NODES {
        on_ranks(&nodes, &roomy(), |world| {
            let mut window = world.all().unwrap().window(2 << 20).unwrap();
            let (me, n) = (world.rank(), world.size());
            let (right, left) = ((me + 1) % n, (me + n - 1) % n);
            for round in 1..=3u8 {
                let tone = |rank: u32| (rank as u8 + 1) * 10 + round;
                window.write(1, &vec![tone(me); LEN]).unwrap();
                window.put_nbi(right, 1 << 20, 1, LEN as u64 - 1).unwrap();
                window.put_nbi(right, (1 << 20) + LEN as u64 - 1, LEN as u64, 1).unwrap();
                window.quiet().unwrap();
                window.write(1, &vec![0; LEN]).unwrap();
                window.barrier().unwrap();
                assert!(bytes(&window, 1 << 20, LEN).iter().all(|&byte| byte == tone(left)));
                window.barrier().unwrap();
            }
        });
    }
}

#[test]
fn everything_put_before_a_barrier_is_there_behind_it() {
    for nodes in NODES {
        on_ranks(&nodes, &small(), |world| {
            let mut window = world.all().unwrap().window(64).unwrap();
            for round in 1..=50u8 {
                for peer in 0..3 {
                    window.put(peer, u64::from(world.rank()), &[round + 60 * world.rank() as u8]).unwrap();
                }
                window.barrier().unwrap();
                assert_eq!(bytes(&window, 0, 4), [round, round + 60, round + 120, 0]);
                window.barrier().unwrap();
            }
        });
    }
}

#[test]
fn quiet_returns_when_puts_have_landed_without_any_signal() {
    for nodes in NODES {
        on_ranks(&nodes, &roomy(), |world| {
            let group = world.all().unwrap();
            let mut window = group.window(2 << 20).unwrap();
            if world.rank() == 0 {
                for peer in 1..3 {
                    window.put(peer, 1, &vec![peer as u8; 2_000_000]).unwrap();
                }
                window.quiet().unwrap();
            }
            group.gather(&[]).unwrap();
            assert!(bytes(&window, 1, 2_000_000).iter().all(|&byte| u32::from(byte) == world.rank()));
            group.gather(&[]).unwrap();
        });
    }
}

#[test]
fn accesses_outside_a_window_are_refused_and_move_nothing() {
    for nodes in NODES {
        on_ranks(&nodes, &small(), |world| {
            let group = world.all().unwrap();
            let (mut below, mut window, above) =
                (group.window(64).unwrap(), group.window(100).unwrap(), group.window(64).unwrap());
            assert_eq!((window.len(), window.is_empty()), (100, false));
            for peer in 0..3 {
                for (offset, len) in
                    [(100, 1), (0, 101), (99, 2), (u64::MAX, 1), (u64::MAX - 1, 100), (101, 0)]
                {
                    let error = window.put(peer, offset, &vec![1; len]).unwrap_err();
                    let expected = MemoryError::OutOfBounds { peer, offset, len: len as u64, size: 100 };
                    assert_eq!(error, Error::Memory(expected));
                    assert!(
                        window.put_signal(peer, offset, &vec![1; len], 1).is_err(),
                        "and raises no signal"
                    );
                }
                for from in [100, u64::MAX] {
                    assert!(
                        window.put_nbi(peer, 0, from, 1).is_err()
                            && window.put_nbi(peer, from, 0, 1).is_err()
                    );
                }
                window.put(peer, 100, &[]).unwrap();
            }
            assert!(window.read(99, &mut [0; 2]).is_err() && window.write(99, &[0; 2]).is_err());
            let missing =
                [window.put(3, 0, &[1]), window.signal(3, 1), window.wait_until(3, 1), below.signal(9, 1)];
            for error in missing.map(Result::unwrap_err) {
                assert!(matches!(error, Error::Lane(LaneError::NoLane { peer: 3 | 9, .. })), "{error:?}");
            }
            window.barrier().unwrap();
            for (window, len) in [(&below, 64), (&window, 100), (&above, 64)] {
                assert!(bytes(window, 0, len).iter().all(|&byte| byte == 0));
            }
        });
    }
}

#[test]
fn window_reaches_ranks_that_layer_reaches_only_by_relays() {
    on_ranks(&[0, 0, 1, 1], &small(), |world| {
        let group = world.all().unwrap();
        let builder = ExpertParallel::builder(&group).experts(4).hidden(8).route(Route::Pxn);
        let mut ep = builder.build().unwrap();
        let routing = Routing::new(1, vec![0, 3], vec![1.0; 2]).unwrap();
        let mut window = group.window(4).unwrap();
        for round in 1..=3u8 {
            (0..4).for_each(|peer| window.put(peer, u64::from(world.rank()), &[round]).unwrap());
            window.barrier().unwrap();
            assert_eq!(bytes(&window, 0, 4), [round; 4]);
            let (rows, _) = ep.dispatch(&[bf16::ONE; 16], &routing).unwrap();
            assert_eq!(rows.len(), if [0, 3].contains(&world.rank()) { 4 } else { 0 });
        }
    });
}

#[test]
fn a_silent_peer_is_named_by_the_deadline() {
    let timeouts = Timeouts::default().with_deadline(Duration::from_secs(1));
    on_ranks(&[0, 1], &small().with_timeouts(timeouts), |world| {
        let group = world.all().unwrap();
        let mut window = group.window(64).unwrap();
        if world.rank() == 0 {
            let error = window.wait_until(1, 3).unwrap_err();
            let Error::Lane(LaneError::Deadline { rank: 0, peer: 1, lane, awaited: 3, seen: 0, .. }) = error
            else {
                panic!("{error:?}");
            };
            assert_eq!(lane, "loopback");
            window.signal(1, 1).unwrap();
        } else {
            while window.wait_until(0, 1).is_err() {}
        }
        window.barrier().unwrap();
    });
}

#[test]
fn a_window_may_be_empty() {
    on_ranks(&NODES[2], &small(), |world| {
        let mut window = world.all().unwrap().window(0).unwrap();
        assert!(window.is_empty());
        window.put((world.rank() + 1) % 3, 0, &[]).unwrap();
        window.barrier().unwrap();
    });
}

#[test]
fn a_window_keeps_its_world_alive() {
    for nodes in NODES {
        on_ranks(&nodes, &roomy(), |world| {
            let me = world.rank();
            let mut window = world.all().unwrap().window(2 << 20).unwrap();
            drop(world);
            for round in 1..=3 {
                window.put_signal((me + 1) % 3, 0, &vec![round as u8; 2 << 20], round).unwrap();
                window.wait_until((me + 2) % 3, round).unwrap();
                assert_eq!(bytes(&window, (2 << 20) - 1, 1), [round as u8]);
                window.barrier().unwrap();
            }
        });
    }
}

#[test]
fn memory_of_the_callers_becomes_a_window() {
    for nodes in NODES {
        on_ranks(&nodes, &small(), |world| {
            let group = world.all().unwrap();
            let (fd, view) = memory(1 << 20, SealFlags::SHRINK);
            let mut window = group.register(fd).unwrap();
            assert_eq!(window.len(), 1 << 20);
            let mut other = group.window(64).unwrap();
            for peer in (0..3).filter(|&peer| peer != world.rank()) {
                let tone = (1 + world.rank()) as u8;
                window.put(peer, u64::from(world.rank()) * 300_001, &vec![tone; 300_001]).unwrap();
            }
            window.barrier().unwrap();
            let mut seen = vec![0; 3 * 300_001];
            view.read_exact_at(&mut seen, 0).unwrap();
            for (rank, part) in seen.chunks_exact(300_001).enumerate() {
                let tone = if rank == world.rank() as usize { 0 } else { 1 + rank as u8 };
                assert!(part.iter().all(|&byte| byte == tone), "from rank {rank}");
            }
            assert!(window.put(0, 1 << 20, &[1]).is_err());
            other.barrier().unwrap();
        });
    }
}

#[test]
fn unsealed_window_memory_is_refused_and_all_ranks_are_told() {
    for nodes in NODES {
        on_ranks(&nodes, &small(), |world| {
            let group = world.all().unwrap();
            let seals = if world.rank() == 1 { SealFlags::empty() } else { SealFlags::SHRINK };
            let error = group.register(memory(4096, seals).0).unwrap_err();
            match error {
                Error::Memory(MemoryError::NotSealed { rank: 1, .. }) => assert_eq!(world.rank(), 1),
                Error::Memory(MemoryError::NotUsable { rank: 1 }) => assert_ne!(world.rank(), 1),
                other => panic!("{other:?}"),
            }
            let file = if world.rank() == 2 {
                File::open("/dev/null").unwrap().into()
            } else {
                memory(64, SealFlags::SHRINK).0
            };
            let error = group.register(file).unwrap_err();
            match error {
                Error::Memory(MemoryError::System { call: "fcntl(F_GET_SEALS)", .. }) => {
                    assert_eq!(world.rank(), 2)
                }
                Error::Memory(MemoryError::NotUsable { rank: 2 }) => assert_ne!(world.rank(), 2),
                other => panic!("{other:?}"),
            }
            let len = 4096 * (1 + u64::from(world.rank() == 0));
            let error = group.register(memory(len, SealFlags::SHRINK).0).unwrap_err();
            assert!(matches!(error, Error::Memory(MemoryError::SizesDiffer { .. })), "{error:?}");
            group.register(memory(4096, SealFlags::SHRINK).0).unwrap().barrier().unwrap();
        });
    }
}

#[test]
fn late_put_into_dropped_registered_window_is_harmless() {
    on_ranks(&[0, 1, 1], &small(), |world| {
        let group = world.all().unwrap();
        let mut control = group.window(64).unwrap();
        let (own, file) = memory(4096, SealFlags::SHRINK);
        let mut window = group.register(own).unwrap();
        if world.rank() == 0 {
            control.wait_until(1, 1).unwrap();
            window.put(1, 0, &[1]).unwrap();
            window.quiet().unwrap();
        } else {
            drop(window);
            if world.rank() == 1 {
                control.signal(0, 1).unwrap();
            }
        }
        control.barrier().unwrap();
        let mut seen = [9];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut seen, 0).unwrap();
        assert_eq!(seen, [0], "nothing was written where the window had been");
    });
}

#[test]
fn the_example_sums_rightly_on_every_rank() {
    let said = one_sided::on_threads().unwrap();
    assert_eq!(said.len(), 4);
    assert!(said.iter().all(|line| line.ends_with("the sum is right")), "{said:?}");
}
