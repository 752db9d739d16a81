//! Ranks that meet over real sockets: several hubs in threads of one process, each with a
//! connection of its own.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::fd::AsRawFd,
    os::unix::process::CommandExt,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use crate::bootstrap::common::{LONG, Place, SOON, Signal, death, each, identity, place, timeouts, world};
use sidelane::{
    bootstrap::{LauncherPipe, Secret, connect, interruptible},
    error::{BootstrapError, Cause, LostReason},
};

#[test]
fn ranks_meet_and_agree() {
    let seen = each(world(4), |hub| {
        let me = hub.rank();
        if me == 2 {
            hub.set("color", b"green").unwrap();
        }
        assert_eq!(hub.get("color", LONG).unwrap(), b"green");
        hub.barrier("all here", me, 4, LONG).unwrap();
        let pair = hub.gather(&format!("pair {}", me % 2), me / 2, 2, &[me as u8], LONG).unwrap();
        assert_eq!(pair, [[(me % 2) as u8], [(me % 2) as u8 + 2]]);
        let big = vec![me as u8; 1 << 20];
        let blobs = hub.gather("big", me, 4, &big, LONG).unwrap();
        assert!(blobs.iter().zip(0u8..).all(|(blob, rank)| *blob == vec![rank; 1 << 20]));
        let own = |to: u8| vec![me as u8, to];
        let exchanged = hub.exchange("each", me, (0..4).map(own).collect(), LONG).unwrap();
        assert_eq!(exchanged, [0, 1, 2, 3].map(|from: u8| vec![from, me as u8]));
        // The end of a step is not its end for all ranks: leave together.
        hub.barrier("done", me, 4, LONG).unwrap();
        hub.health().check()
    });
    assert_eq!(seen, [Ok(()), Ok(()), Ok(()), Ok(())]);
}

#[test]
fn step_deadline_names_missing_ranks_to_waiting_and_late_ranks() {
    let step = Duration::from_millis(300);
    let errors = each(world(4), |hub| match hub.rank() {
        me @ (0 | 2) => {
            let deadline = if me == 0 { step } else { LONG };
            let error = hub.gather("half", me, 4, &[], deadline).unwrap_err();
            hub.health().check().unwrap();
            hub.barrier("told", me / 2, 2, LONG).unwrap();
            // The late comers learn it too.
            hub.set("go", &[]).unwrap();
            hub.barrier("end", me, 4, LONG).unwrap();
            error
        }
        me => {
            hub.get("go", LONG).unwrap();
            let error = hub.gather("half", me, 4, &[], LONG).unwrap_err();
            hub.barrier("end", me, 4, LONG).unwrap();
            error
        }
    });
    for error in errors {
        assert!(
            matches!(&error, BootstrapError::Deadline { step, missing, .. } if step == "half" && *missing == [1, 3]),
            "{error}"
        );
    }
}

#[test]
fn a_value_that_is_never_set_ends_with_the_deadline() {
    let hubs = world(1);
    let error = hubs[0].get("nothing", Duration::from_millis(50)).unwrap_err();
    assert!(matches!(&error, BootstrapError::Deadline { step, .. } if step == "nothing"), "{error}");
}

#[test]
fn a_rendezvous_names_the_rank_that_did_not_come() {
    let place = place();
    let timeouts = timeouts().with_rendezvous(Duration::from_millis(700));
    let errors = each(vec![0, 2], |rank| connect(&identity(rank, 3, &place), None, timeouts).err().unwrap());
    for error in errors {
        assert!(matches!(&error, BootstrapError::Deadline { missing, .. } if *missing == [1]), "{error}");
    }
}

#[test]
fn user_who_stops_ends_the_rendezvous_of_either_side() {
    let place = place();
    for rank in [0, 1] {
        let alone = || connect(&identity(rank, 2, &place), None, timeouts()).err();
        let error = interruptible(|| true, alone).unwrap();
        let step = "rendezvous".to_owned();
        assert_eq!(error, BootstrapError::Interrupted { step }, "rank {rank}");
    }
}

#[test]
fn user_interrupt_ends_step_and_rebuild_and_names_missing_rank() {
    let seen = each(world(2), |hub| {
        if hub.rank() == 1 {
            let error = interruptible(|| true, || hub.barrier("half", 1, 2, LONG)).unwrap_err();
            hub.set("stopped", b"").unwrap();
            // It stays, or the rebuild would not wait for it.
            return (error, hub);
        }
        hub.get("stopped", LONG).unwrap();
        let error = interruptible(|| true, || hub.rebuild(LONG, 1).map(drop)).unwrap_err();
        assert_eq!(error, BootstrapError::Interrupted { step: "rebuild".to_owned() });
        (hub.health().check().unwrap_err().into(), hub)
    });
    let seen: Vec<_> = seen.into_iter().map(|(error, _)| error).collect();
    let cancelled = BootstrapError::World(Cause::Cancelled { by: 0 });
    assert_eq!(seen, [cancelled, BootstrapError::Interrupted { step: "half".to_owned() }]);
}

#[test]
fn unanswered_rendezvous_address_is_error_that_names_it() {
    let place = place();
    let timeouts = timeouts().with_rendezvous(Duration::from_millis(200));
    let error = connect(&identity(1, 2, &place), None, timeouts).err().unwrap();
    let BootstrapError::NoRendezvous { address, .. } = &error else { panic!("{error}") };
    assert!(address.contains("127.0.0.1") && address.contains(&place.ports[0].to_string()), "{address}");
}

#[test]
fn master_whose_name_has_no_address_is_error_that_names_it() {
    let timeouts = timeouts().with_rendezvous(Duration::from_millis(200));
    let identity = identity(1, 2, &place()).with_local_size(None).with_master_addr("nowhere.invalid".into());
    let error = connect(&identity, Some(Secret::random().unwrap()), timeouts).err().unwrap();
    assert!(matches!(&error, BootstrapError::NoAddress { name, .. } if name == "nowhere.invalid"), "{error}");
}

#[test]
fn job_of_another_name_at_the_address_is_named() {
    let place = place();
    let timeouts = timeouts().with_rendezvous(Duration::from_millis(700));
    let other = Place { job: "another".to_owned(), ports: place.ports.clone() };
    let errors = each(vec![(0, &place), (1, &other)], |(rank, place)| {
        connect(&identity(rank, 2, place), None, timeouts).err().unwrap()
    });
    let BootstrapError::NoRendezvous { other_job: Some(seen), .. } = &errors[1] else { panic!("{errors:?}") };
    assert!(seen.starts_with("127.0.0.1:"), "{seen}");
    assert!(errors[1].to_string().contains("SIDELANE_JOB"), "{}", errors[1]);
}

#[test]
fn rank_0_that_waits_in_vain_reports_joins_with_another_secret() {
    let place = place();
    let timeouts = timeouts().with_rendezvous(Duration::from_millis(1500));
    let errors = each(vec![(0, "right"), (1, "wrong")], |(rank, secret)| {
        connect(&identity(rank, 2, &place), Some(Secret::from_bytes(secret)), timeouts).err().unwrap()
    });
    let BootstrapError::Deadline { missing, refused: Some(refused), .. } = &errors[0] else {
        panic!("{errors:?}")
    };
    assert_eq!((missing.as_slice(), refused.last.to_string()), (&[1][..], "127.0.0.1".to_owned()));
    assert!(refused.joins > 0);
}

#[test]
fn second_process_of_rank_0_is_refused_at_once() {
    let place = place();
    let began = Instant::now();
    let refused = Signal::default();
    let results = each(vec![0u32, 0, 1], |rank| {
        if rank == 1 {
            // Until then both processes of rank 0 run.
            refused.wait_for(1);
        }
        let hub = connect(&identity(rank, 2, &place), None, timeouts()).inspect_err(|_| refused.raise())?;
        hub.barrier("met", hub.rank(), 2, LONG)
    });
    let refused = Err(BootstrapError::RankRefused { rank: 0, size: 2 });
    assert!(results[..2].contains(&refused) && results[..2].contains(&Ok(())), "{results:?}");
    assert_eq!(results[2], Ok(()));
    assert!(began.elapsed() < timeouts().rendezvous, "{:?}", began.elapsed());
}

#[test]
fn a_wrong_secret_is_refused_while_the_right_ones_go_on() {
    let place = place();
    let secret = Secret::from_bytes("right");
    let refused = Signal::default();
    let results = each(vec![0u32, 1, 2], |rank| {
        if rank == 2 {
            let wrong = Some(Secret::from_bytes("wrong"));
            let error = connect(&identity(1, 2, &place), wrong, timeouts()).err().unwrap();
            refused.raise();
            return Err(error);
        }
        if rank == 1 {
            // The liar comes first.
            refused.wait_for(1);
        }
        let hub = connect(&identity(rank, 2, &place), Some(secret.clone()), timeouts())?;
        hub.barrier("met", rank, 2, LONG)
    });
    assert!(
        matches!(&results[2], Err(BootstrapError::WrongSecret { peer }) if peer.starts_with("127.0.0.1:"))
    );
    assert_eq!(results[..2], [Ok(()), Ok(())]);
}

#[test]
fn jobs_that_share_ports_and_a_name_meet_by_their_secrets() {
    let place = place();
    let ranks = [("one", 0), ("two", 0), ("one", 1), ("two", 1)];
    let results = each(ranks.to_vec(), |(name, rank)| {
        let secret = Some(Secret::from_bytes(name));
        let hub = connect(&identity(rank, 2, &place), secret, timeouts())?;
        let said = hub.gather("secret", rank, 2, name.as_bytes(), LONG)?;
        hub.barrier("end", rank, 2, LONG)?;
        Ok::<_, BootstrapError>(said == [name.as_bytes(), name.as_bytes()])
    });
    assert_eq!(results, [Ok(true), Ok(true), Ok(true), Ok(true)]);
}

/// Joins as rank 1 of the job that the environment names.
#[test]
#[ignore = "a process of another user, started by the test below"]
fn process_of_another_user() {
    let ports = std::env::var("SIDELANE_TEST_PORTS").unwrap();
    let ports = ports.split(',').map(|port| port.parse().unwrap()).collect();
    let place = Place { job: std::env::var("SIDELANE_TEST_JOB").unwrap(), ports };
    let error = connect(&identity(1, 2, &place), None, timeouts()).err().unwrap();
    assert!(matches!(error, BootstrapError::WrongSecret { .. }), "{error}");
    println!("refused");
}

#[test]
fn job_without_a_secret_refuses_processes_of_other_users() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: only root can start processes of other users");
        return;
    }
    let place = place();
    let refused = Signal::default();
    // Where the other user finds it.
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let program = folder.path().join("bootstrap");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let results = each(vec![0u32, 1, 2], |rank| {
        if rank == 2 {
            let ports: Vec<_> = place.ports.iter().map(u16::to_string).collect();
            let said = Command::new(&program)
                .args(["--exact", "bootstrap::tcp::process_of_another_user", "--ignored", "--nocapture"])
                .envs([("SIDELANE_TEST_JOB", &place.job), ("SIDELANE_TEST_PORTS", &ports.join(","))])
                .uid(65534)
                .gid(65534)
                .output()
                .unwrap();
            refused.raise();
            let text = String::from_utf8_lossy(&said.stdout).into_owned();
            assert!(said.status.success() && text.contains("refused"), "{text}");
            return Ok(());
        }
        if rank == 1 {
            // The stranger comes first.
            refused.wait_for(1);
        }
        connect(&identity(rank, 2, &place), None, timeouts())?.barrier("met", rank, 2, LONG)
    });
    assert_eq!(results, [Ok(()), Ok(()), Ok(())]);
}

#[test]
fn strangers_do_not_hold_up_the_rendezvous() {
    let place = place();
    let stranger = || {
        let start = Instant::now();
        while start.elapsed() < LONG {
            if let Ok(stream) = TcpStream::connect(("127.0.0.1", place.ports[0])) {
                return stream;
            }
            thread::yield_now();
        }
        panic!("nobody listens");
    };
    let results = each(vec![0u32, 1], |rank| {
        let mut strangers = Vec::new();
        if rank == 1 {
            strangers.push(stranger());
            strangers.push(stranger());
            strangers[1].write_all(b"GET / HTTP/1.1\r\nHost: you\r\n\r\n").unwrap();
            // The one that talks nonsense is shown out.
            let mut answer = Vec::new();
            strangers[1].set_read_timeout(Some(LONG)).unwrap();
            let _ = strangers[1].read_to_end(&mut answer);
        }
        let hub = connect(&identity(rank, 2, &place), None, timeouts())?;
        // The silent one is still connected.
        hub.barrier("met", rank, 2, LONG)
    });
    assert_eq!(results, [Ok(()), Ok(())]);
}

#[test]
fn the_right_port_is_found_among_those_of_others() {
    let stranger = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = stranger.local_addr().unwrap().port();
    let mut place = place();
    place.ports.insert(0, taken);
    let results = each(vec![0u32, 1], |rank| {
        connect(&identity(rank, 2, &place), None, timeouts())?.barrier("met", rank, 2, LONG)
    });
    assert_eq!(results, [Ok(()), Ok(())]);
}

#[test]
fn two_processes_of_one_rank_are_one_too_many() {
    let place = place();
    let hubs: Vec<_> =
        each(vec![0u32, 1], |rank| connect(&identity(rank, 2, &place), None, timeouts()).unwrap());
    let error = connect(&identity(1, 2, &place), None, timeouts()).err().unwrap();
    assert_eq!(error, BootstrapError::RankRefused { rank: 1, size: 2 });
    assert!(hubs.iter().all(|hub| hub.health().check().is_ok()));
    each(hubs, drop);
}

#[test]
fn listening_beyond_loopback_needs_a_secret() {
    let open = identity(0, 2, &place()).with_local_size(None).with_master_addr("192.0.2.1".into());
    let error = connect(&open, None, timeouts()).err().unwrap();
    assert_eq!(error, BootstrapError::NoSecret { address: "192.0.2.1".into() });
}

#[test]
fn a_killed_rank_is_named_to_everybody_and_ends_their_waits() {
    for victim in [2, 0] {
        let seen = each(world(4), |hub| {
            let me = hub.rank();
            hub.barrier("start", me, 4, LONG).unwrap();
            if me == victim {
                hub.abandon();
                return None;
            }
            let start = Instant::now();
            let error = hub.gather("never", me, 4, &[], LONG).unwrap_err();
            assert_eq!(hub.health().cause().map(BootstrapError::World), Some(error.clone()));
            assert!(hub.health().is_absent(victim));
            assert_ne!(hub.health().status(), 0);
            Some((error, start.elapsed()))
        });
        for (error, after) in seen.into_iter().flatten() {
            assert_eq!(error, BootstrapError::World(Cause::Lost { rank: victim, how: LostReason::Closed }));
            assert!(after < SOON, "{after:?}");
        }
    }
}

#[test]
fn a_rank_that_panics_is_lost_and_one_that_leaves_is_not() {
    let seen = each(world(3), |hub| {
        let me = hub.rank();
        hub.barrier("start", me, 3, LONG).unwrap();
        if me == 1 {
            drop(hub);
            return None;
        }
        let error = hub.gather("needs all", me, 3, &[], LONG).unwrap_err();
        assert_eq!(hub.health().check(), Ok(()), "leaving is no failure");
        hub.barrier("told", me / 2, 2, LONG).unwrap();
        if me == 2 {
            let unwinding = thread::spawn(move || {
                let _hub = hub;
                std::panic::resume_unwind(Box::new("on purpose"));
            });
            assert!(unwinding.join().is_err());
            return Some((error, None));
        }
        Some((error, Some(death(&*hub))))
    });
    let left = || BootstrapError::Left { rank: 1, step: "needs all".into() };
    assert_eq!(seen[1], None);
    assert_eq!(seen[2], Some((left(), None)));
    assert_eq!(seen[0], Some((left(), Some(Cause::Lost { rank: 2, how: LostReason::Closed }))));
}

#[test]
fn ranks_that_outlive_rank_0_are_told_that_it_left() {
    let seen = each(world(2), |hub| {
        let me = hub.rank();
        hub.barrier("start", me, 2, LONG).unwrap();
        if me == 0 {
            drop(hub);
            return None;
        }
        Some((hub.gather("late", me, 2, &[], LONG).unwrap_err(), hub.health().check()))
    });
    assert_eq!(seen[1], Some((BootstrapError::Left { rank: 0, step: "late".into() }, Ok(()))));
}

#[test]
fn cancel_reaches_everybody() {
    let cause = Cause::Stalled { rank: 1, by: 2, waited: Duration::from_millis(5) };
    let seen = each(world(3), |hub| {
        hub.barrier("start", hub.rank(), 3, LONG).unwrap();
        if hub.rank() == 2 {
            hub.cancel(Cause::Stalled { rank: 1, by: 2, waited: Duration::from_millis(5) });
        }
        let cause = death(&*hub);
        assert_eq!(hub.set("a", &[]), Err(BootstrapError::World(cause.clone())), "new calls are refused");
        cause
    });
    assert_eq!(seen, vec![cause; 3]);
}

#[test]
fn the_end_of_the_launcher_ends_the_world() {
    let place = place();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let launcher_pipe = Some(LauncherPipe { fd: reader.as_raw_fd() as u32, pid: 4711 });
    let hubs = each(vec![0, 1], |rank| {
        let mut identity = identity(rank, 2, &place);
        identity.launcher_pipe = launcher_pipe;
        connect(&identity, None, timeouts()).unwrap()
    });
    assert!(hubs.iter().all(|hub| hub.health().check().is_ok()));
    drop(writer);
    let seen = each(hubs, |hub| (death(&*hub), hub.rebuild(LONG, 1).map(|_| ()).unwrap_err()));
    let gone = Cause::LauncherGone { pid: 4711 };
    assert_eq!(seen, vec![(gone.clone(), BootstrapError::World(gone)); 2]);
}
