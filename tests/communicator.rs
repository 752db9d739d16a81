//! All-reduce, broadcast, all-to-all and messages, against what they mean.

mod support;

use half::{bf16, f16};
use sidelane::collective::{Communicator, Sums};
use sidelane::dtype::Wire;
use sidelane::error::{CallError, CallKind, Cause, Error, LaneError, MemoryError, PlanError};
use sidelane::plan::{Pipeline, PipelineStep};
use sidelane::{Element, Options, World};
use support::{To, on_ranks, tiny};

/// Ranks by node: alone, on one, two and three nodes, even and not.
const SHAPES: [&[u32]; 6] = [&[0], &[0; 3], &[0, 1], &[0, 1, 0, 2, 1], &[0, 0, 0, 1, 1, 1, 1, 1], &[0, 1, 2]];
/// Elements: none, fewer than ranks, a line and a bit, more than a round, and no multiple of anything.
const LENGTHS: [usize; 5] = [0, 1, 37, 1000, 4321];

/// Rounds of a kilobyte or two, so that small tensors take many.
fn communicator(world: &World, sums: Sums) -> Communicator {
    let group = world.all().unwrap();
    let chunk = 1024.max(128 * u64::from(world.size()));
    Communicator::builder(&group).chunk(chunk).whole(96).sums(sums).build().unwrap()
}

/// Of different sizes, so that the order of a sum shows.
fn element<E>(rank: usize, at: usize, seed: usize) -> E
where
    f32: To<E>,
{
    let mixed = (rank * 7919 + at * 104_729 + seed * 1_299_709) % 65_521;
    ((mixed as f32 - 32_760.0) * [1.0, 0.01, 37.0][mixed % 3] / 512.0).to()
}

fn tensor<E>(rank: usize, len: usize, seed: usize) -> Vec<E>
where
    f32: To<E>,
{
    (0..len).map(|at| element(rank, at, seed)).collect()
}

trait Wide: Element + PartialEq + std::fmt::Debug {
    fn wide(self) -> f32;
}
impl Wide for f32 {
    fn wide(self) -> f32 {
        self
    }
}
impl Wide for bf16 {
    fn wide(self) -> f32 {
        self.to_f32()
    }
}
impl Wide for f16 {
    fn wide(self) -> f32 {
        self.to_f32()
    }
}

fn bits<E: Element>(of: &[E]) -> &[u8] {
    bytemuck::cast_slice(of)
}

/// By ascending rank from +0, rounded once.
fn summed<E: Wide>(ranks: usize, len: usize, seed: usize) -> Vec<E>
where
    f32: To<E>,
{
    (0..len)
        .map(|at| (0..ranks).fold(0.0, |sum, rank| sum + element::<E>(rank, at, seed).wide()).to())
        .collect()
}

fn reduces<E: Wide>(world: &World, communicator: &mut Communicator, len: usize)
where
    f32: To<E>,
{
    let (me, ranks) = (world.rank() as usize, world.size() as usize);
    for seed in 0..2 {
        let mut data = tensor::<E>(me, len, seed);
        communicator.all_reduce(&mut data).unwrap();
        assert!(bits(&data) == bits(&summed::<E>(ranks, len, seed)), "{len} {:?} of rank {me}", E::DTYPE);
    }
}

#[test]
fn sums_are_made_by_ascending_rank_wherever_ranks_are() {
    for nodes in SHAPES {
        on_ranks(nodes, &tiny(), |world| {
            let mut communicator = communicator(&world, Sums::Direct);
            for len in LENGTHS {
                reduces::<f32>(&world, &mut communicator, len);
                reduces::<bf16>(&world, &mut communicator, len);
                reduces::<f16>(&world, &mut communicator, len);
            }
        });
    }
}

/// A round's share `s` in the order s + 1, s + 2, ... s; each partial sum in the wire's type.
fn around<E: Wide>(ranks: usize, len: usize, round: usize, round_to: fn(f32) -> f32) -> Vec<E>
where
    f32: To<E>,
{
    let size = size_of::<E>();
    let of = |at: usize| -> E {
        let (first, within) = (at / round * round, at % round);
        let width = (((len - first).min(round) * size).div_ceil(ranks)).next_multiple_of(64) / size;
        let share = within / width;
        let partial = |sum: Option<f32>, rank: usize| {
            let own = element::<E>(rank, at, 0).wide();
            sum.map_or(own, |sum| round_to(sum) + own)
        };
        let total =
            (1..=ranks).map(|step| (share + step) % ranks).fold(None, |sum, rank| Some(partial(sum, rank)));
        (total.unwrap() + 0.0).to()
    };
    (0..len).map(of).collect()
}

#[test]
fn a_ring_adds_from_rank_to_rank_and_rounds_partial_sums_to_the_wire() {
    let wide: fn(f32) -> f32 = |sum| sum;
    let narrow: fn(f32) -> f32 = |sum| bf16::from_f32(sum).to_f32();
    for nodes in SHAPES {
        for (wire, round_to) in [(Wire::F32, wide), (Wire::Bf16, narrow)] {
            on_ranks(nodes, &tiny(), |world| {
                let (me, ranks) = (world.rank() as usize, world.size() as usize);
                let mut communicator = communicator(&world, Sums::Ring(wire));
                let bytes = 1024.max(128 * ranks) / ranks / 128 * 64 * ranks;
                for len in LENGTHS {
                    let mut data = tensor::<bf16>(me, len, 0);
                    communicator.all_reduce(&mut data).unwrap();
                    let right = around::<bf16>(ranks, len, bytes / 2, round_to);
                    assert!(bits(&data) == bits(&right), "{nodes:?} {wire:?} {len}");
                }
                if wire == Wire::F32 {
                    let mut data = tensor::<f32>(me, 1000, 0);
                    communicator.all_reduce(&mut data).unwrap();
                    assert!(bits(&data) == bits(&around::<f32>(ranks, 1000, bytes / 4, round_to)));
                }
            });
        }
    }
}

#[test]
fn everybody_has_what_the_root_has() {
    for nodes in SHAPES {
        on_ranks(nodes, &tiny(), |world| {
            let mut communicator = communicator(&world, Sums::Direct);
            for (root, len) in (0..world.size()).flat_map(|root| LENGTHS.map(|len| (root, len))) {
                let mut data = tensor::<f32>(world.rank() as usize, len, 1);
                communicator.broadcast(root, &mut data).unwrap();
                assert!(bits(&data) == bits(&tensor::<f32>(root as usize, len, 1)), "{nodes:?} {root} {len}");
            }
            // From leader to leader, in parts and rounds.
            let mut data = tensor::<u8>(world.rank() as usize, 70_001, 1);
            communicator.broadcast(world.size() - 1, &mut data).unwrap();
            assert!(data == tensor::<u8>(world.size() as usize - 1, 70_001, 1), "{nodes:?}");
        });
    }
}

#[test]
fn parts_go_to_their_ranks_in_equal_and_in_any_lengths() {
    for nodes in SHAPES {
        on_ranks(nodes, &tiny(), |world| {
            let (me, ranks) = (world.rank() as usize, world.size() as usize);
            let mut communicator = communicator(&world, Sums::Direct);
            for part in [0, 3, 700] {
                let mine = tensor::<f32>(me, ranks * part, 2);
                let mut came = vec![f32::NAN; ranks * part];
                communicator.all_to_all(&mine, &mut came).unwrap();
                let of = |rank: usize| tensor::<f32>(rank, ranks * part, 2)[me * part..][..part].to_vec();
                assert!(
                    bits(&came) == bits(&(0..ranks).map(of).collect::<Vec<_>>().concat()),
                    "{nodes:?} {part}"
                );
            }
            let mut came = Vec::new();
            for factor in [0, 1, 400] {
                let counts =
                    |rank: usize| (0..ranks).map(|to| (rank * 3 + to * 5) % 4 * factor).collect::<Vec<_>>();
                let all = |rank: usize| tensor::<bf16>(rank, counts(rank).iter().sum(), factor);
                let from = communicator.all_to_all_v(&all(me), &counts(me), &mut came).unwrap();
                assert_eq!(from, (0..ranks).map(|rank| counts(rank)[me]).collect::<Vec<_>>());
                let of = |rank: usize| {
                    let first: usize = counts(rank)[..me].iter().sum();
                    all(rank)[first..][..counts(rank)[me]].to_vec()
                };
                assert!(
                    bits(&came) == bits(&(0..ranks).map(of).collect::<Vec<_>>().concat()),
                    "{nodes:?} {factor}"
                );
            }
        });
    }
}

#[test]
fn messages_of_a_pair_come_in_order_and_longer_ones_than_their_slots_pass_each_other() {
    for nodes in [&[0, 0, 0][..], &[0, 1, 1]] {
        on_ranks(nodes, &tiny(), |world| {
            let mut communicator = communicator(&world, Sums::Direct);
            let (me, next, from) = (world.rank(), (world.rank() + 1) % 3, (world.rank() + 2) % 3);
            // Short ones lie unread; nobody waits.
            communicator.send(next, &tensor::<f32>(me as usize, 5, 0)).unwrap();
            communicator.send::<f32>(next, &[]).unwrap();
            let mut first = vec![0.0f32; 5];
            communicator.receive(from, &mut first).unwrap();
            communicator.receive::<f32>(from, &mut []).unwrap();
            assert_eq!(first, tensor::<f32>(from as usize, 5, 0));
            // A long one and a short one between two ranks, at once; the third stays out of it.
            if me < 2 {
                let lens = [4000, 7];
                let mut came = vec![bf16::ZERO; lens[1 - me as usize]];
                communicator.exchange(1 - me, &tensor(me as usize, lens[me as usize], 3), &mut came).unwrap();
                assert!(came == tensor::<bf16>(1 - me as usize, lens[1 - me as usize], 3));
                communicator.flush(1 - me).unwrap();
            }
            reduces::<f32>(&world, &mut communicator, 40);
        });
    }
}

#[test]
fn a_message_of_another_length_is_refused_on_both_sides_and_the_next_one_comes() {
    for len in [3, 3000] {
        on_ranks(&[0, 1], &tiny(), |world| {
            let mut communicator = communicator(&world, Sums::Direct);
            if world.rank() == 0 {
                let sent = communicator.send(1, &vec![1.0f32; len]);
                let heard = sent.and_then(|()| communicator.flush(1));
                let Err(Error::Call(CallError::MessageRefused { rank: 0, peer: 1, count: 1 })) = heard else {
                    panic!("{heard:?}");
                };
                communicator.send(1, &[2.0f32; 4]).unwrap();
                communicator.flush(1).unwrap();
            } else {
                let mut data = [0.5f32; 4];
                let error = communicator.receive(0, &mut data).unwrap_err();
                let Error::Call(CallError::Disagree {
                    kind: CallKind::Receive,
                    what: "bytes",
                    mine: 16,
                    theirs,
                    ..
                }) = error
                else {
                    panic!("{error}");
                };
                assert_eq!(theirs, 4 * len as u64);
                assert_eq!(data, [0.5; 4]);
                communicator.receive(0, &mut data).unwrap();
                assert_eq!(data, [2.0; 4]);
            }
            let itself = communicator.send(world.rank(), &[1.0f32]).unwrap_err();
            assert!(
                matches!(itself, Error::Plan(PlanError::BadParameter { parameter: "peer", .. })),
                "{itself}"
            );
        });
    }
}

#[test]
fn a_refusal_that_comes_with_a_wrong_message_is_told_by_the_next_call() {
    on_ranks(&[0, 1], &tiny(), |world| {
        let mut communicator = communicator(&world, Sums::Direct);
        let (me, peer) = (world.rank(), 1 - world.rank());
        // So long that each hears of the refusal before all has passed.
        let error = communicator.exchange(peer, &[1.0f32; 3000], &mut [0.0; 2000]).unwrap_err();
        assert!(matches!(error, Error::Call(CallError::Disagree { what: "bytes", .. })), "{error}");
        let heard = communicator.flush(peer).unwrap_err();
        let Error::Call(CallError::MessageRefused { rank, peer: by, count: 1 }) = heard else {
            panic!("{heard}")
        };
        assert_eq!((rank, by), (me, peer));
        communicator.flush(peer).unwrap();
    });
}

#[test]
fn all_of_more_refusals_than_a_byte_counts_are_told() {
    const MESSAGES: u32 = 600;
    on_ranks(&[0, 1], &tiny(), |world| {
        let mut communicator = communicator(&world, Sums::Direct);
        let told = |result| match result {
            Ok(()) => 0,
            Err(Error::Call(CallError::MessageRefused { count, .. })) => count,
            Err(error) => panic!("{error}"),
        };
        let mut refused = 0;
        for _ in 0..MESSAGES {
            match world.rank() {
                0 => refused += told(communicator.send(1, &[1.0f32])),
                _ => drop(communicator.receive(0, &mut [0.0f32; 2]).unwrap_err()),
            }
        }
        if world.rank() == 0 {
            refused += told(communicator.flush(1));
            assert_eq!(refused, MESSAGES);
        }
    });
}

/// What a rank gets if rank 2 makes another call.
fn odd_one_out(
    nodes: &[u32],
    odd: impl Fn(&mut Communicator) -> Error + Sync,
    right: impl Fn(u32, Error) + Sync,
) {
    on_ranks(nodes, &tiny(), |world| {
        let mut communicator = communicator(&world, Sums::Direct);
        let error = match world.rank() {
            2 => odd(&mut communicator),
            _ => {
                let mut data = vec![7.0f32; 500];
                let error = communicator.all_reduce(&mut data).unwrap_err();
                assert_eq!(data, vec![7.0; 500], "nothing is visible");
                error
            }
        };
        right(world.rank(), error);
        reduces::<f32>(&world, &mut communicator, 300);
    });
}

#[test]
fn ranks_that_differ_are_told_on_all_ranks_and_the_next_call_works() {
    for nodes in [&[0; 4][..], &[0, 0, 1, 1]] {
        odd_one_out(
            nodes,
            |c| c.all_reduce(&mut [1.0f32; 400]).unwrap_err(),
            |rank, error| {
                let Error::Call(CallError::Disagree { what: "bytes", mine, theirs, .. }) = error else {
                    panic!("{error}")
                };
                assert_eq!((mine, theirs), if rank == 2 { (1600, 2000) } else { (2000, 1600) });
            },
        );
        odd_one_out(
            nodes,
            |c| c.all_reduce(&mut [bf16::ONE; 1000]).unwrap_err(),
            |_, error| {
                assert!(matches!(error, Error::Call(CallError::Disagree { what: "options", .. })), "{error}")
            },
        );
        odd_one_out(
            nodes,
            |c| c.broadcast(0, &mut [1.0f32; 500]).unwrap_err(),
            |_, error| assert!(matches!(error, Error::Call(CallError::KindsDiffer { .. })), "{error}"),
        );
        odd_one_out(
            nodes,
            |c| c.all_to_all_v(&[1.0f32; 8], &[2, 2, 2, 2], &mut Vec::new()).unwrap_err(),
            |_, error| assert!(matches!(error, Error::Call(CallError::KindsDiffer { .. })), "{error}"),
        );
    }
}

#[test]
fn wrong_input_is_refused_where_it_is_and_told_to_the_others() {
    on_ranks(&[0, 1, 0], &tiny(), |world| {
        let mut communicator = communicator(&world, Sums::Direct);
        let wrong = world.rank() == 1;
        let told = |error: Error| {
            assert!(matches!(error, Error::Call(CallError::PeerRefused { peer: 1, .. })), "{error}");
        };
        let send = vec![1.0f32; if wrong { 4 } else { 6 }];
        match communicator.all_to_all(&send, &mut [0.0; 6]).unwrap_err() {
            Error::Plan(PlanError::WrongShape { what: "elements to send", seen: 4, .. }) if wrong => {}
            error => told(error),
        }
        let counts: &[usize] = if wrong { &[1, 1, 9] } else { &[2, 2, 2] };
        match communicator.all_to_all_v(&[1.0f32; 6], counts, &mut Vec::new()).unwrap_err() {
            Error::Plan(PlanError::WrongShape { what: "elements to send", seen: 6, .. }) if wrong => {}
            error => told(error),
        }
        match communicator.broadcast(if wrong { 3 } else { 0 }, &mut [1.0f32; 6]).unwrap_err() {
            Error::Plan(PlanError::BadParameter { parameter: "root", seen: 3, .. }) if wrong => {}
            error => told(error),
        }
        let error = communicator.all_reduce(&mut [1u8; 6]).unwrap_err();
        assert!(matches!(error, Error::Plan(PlanError::NoArithmetic { .. })), "{error}");
        reduces::<f16>(&world, &mut communicator, 77);
    });
}

#[test]
fn settings_that_differ_are_named() {
    on_ranks(&[0, 0], &tiny(), |world| {
        let builder = world.all().unwrap();
        let builder = Communicator::builder(&builder).chunk(if world.rank() == 1 { 2048 } else { 1024 });
        let error = builder.build().unwrap_err();
        assert!(matches!(error, Error::Call(CallError::ConfigsDiffer { what: "chunk", .. })), "{error}");
    });
}

#[test]
fn chunks_that_no_window_can_hold_are_refused() {
    on_ranks(&[0], &tiny(), |world| {
        for chunk in [0, 127, u64::MAX / 10 + 1, u64::MAX] {
            let error = Communicator::builder(&world.all().unwrap()).chunk(chunk).build().unwrap_err();
            let Error::Plan(PlanError::BadParameter { parameter: "chunk", seen, .. }) = error else {
                panic!("{error}")
            };
            assert_eq!(seen, chunk);
        }
        // What 64 bits can say, but no heap has.
        let error = Communicator::builder(&world.all().unwrap()).chunk(u64::MAX / 10).build().unwrap_err();
        assert!(matches!(error, Error::Memory(MemoryError::OutOfSpace { .. })), "{error}");
    });
}

#[test]
fn a_rank_that_does_not_come_is_named_when_the_deadline_is_over() {
    let mut options: Options = tiny();
    // It bounds the rendezvous of what is built too, on a machine that may be busy.
    options.clocks.deadline = std::time::Duration::from_secs(5);
    on_ranks(&[0, 0, 1], &options, |world| {
        let mut communicator = communicator(&world, Sums::Direct);
        if world.rank() == 2 {
            // It stays until the others have given up.
            while world.health().check().is_ok() {
                std::thread::park_timeout(std::time::Duration::from_millis(10));
            }
            return;
        }
        let error = communicator.all_reduce(&mut [1.0f32; 500]).unwrap_err();
        match error {
            Error::Lane(LaneError::Deadline { peer: 2, .. })
            | Error::World(Cause::Stalled { rank: 2, .. }) => {}
            error => panic!("{error}"),
        }
    });
}

#[test]
fn a_rank_that_gives_up_is_named_by_all_others() {
    on_ranks(&[0, 0, 1], &tiny(), |world| {
        let mut communicator = communicator(&world, Sums::Direct);
        reduces::<f32>(&world, &mut communicator, 50);
        // All have their sums before one of them gives up.
        world.all().unwrap().gather(&[]).unwrap();
        if world.rank() == 2 {
            return world.cancel();
        }
        let error = communicator.all_reduce(&mut [1.0f32; 500]).unwrap_err();
        assert!(matches!(error, Error::World(Cause::Cancelled { by: 2 })), "{error}");
    });
}

/// A pipeline that multiplies, on the real lanes: every stage follows its order.
#[test]
fn a_pipeline_in_its_order_ends_with_messages_longer_than_their_slots() {
    const LEN: usize = 3000;
    for nodes in [&[0; 4][..], &[0, 0, 1, 1]] {
        on_ranks(nodes, &tiny(), |world| {
            let mut communicator = communicator(&world, Sums::Direct);
            let me = world.rank();
            let pipeline = Pipeline::one_forward_one_backward(4, 6).unwrap();
            let (mut input, mut gradient) = (vec![0.0f32; LEN], vec![0.0f32; LEN]);
            let mut done = Vec::new();
            for &step in pipeline.stage(me) {
                match step {
                    PipelineStep::ReceiveForward(_) => communicator.receive(me - 1, &mut input).unwrap(),
                    PipelineStep::Forward(of) if me == 0 => input.fill(1.0 + of as f32),
                    PipelineStep::Forward(_) => input.iter_mut().for_each(|x| *x *= 2.0),
                    PipelineStep::SendForward(_) => communicator.send(me + 1, &input).unwrap(),
                    PipelineStep::ReceiveBackward(_) => communicator.receive(me + 1, &mut gradient).unwrap(),
                    PipelineStep::Backward(_) => {
                        match me {
                            3 => gradient.clone_from(&input),
                            _ => gradient.iter_mut().for_each(|g| *g *= 3.0),
                        }
                        done.push(gradient[LEN - 1]);
                    }
                    PipelineStep::SendBackward(_) => communicator.send(me - 1, &gradient).unwrap(),
                    PipelineStep::ExchangeNext { .. } => {
                        communicator.exchange(me + 1, &input, &mut gradient).unwrap();
                    }
                    PipelineStep::ExchangePrevious { .. } => {
                        communicator.exchange(me - 1, &gradient, &mut input).unwrap();
                    }
                }
            }
            let factor = 8.0 * 3.0f32.powi(3 - me as i32);
            assert_eq!(done, (0..6).map(|of| (1.0 + of as f32) * factor).collect::<Vec<_>>());
        });
    }
}

/// Windows of a communicator that is gone are used again, and only when all others are done with them.
#[test]
fn communicators_come_and_go_without_waiting_for_each_other() {
    on_ranks(&[0, 0, 1, 0], &tiny(), |world| {
        let (me, ranks) = (world.rank() as usize, world.size() as usize);
        let group = world.all().unwrap();
        for seed in 0..12 {
            let mut communicator = Communicator::builder(&group).chunk(16 << 10).whole(0).build().unwrap();
            let mut data = tensor::<f32>(me, 40_000, seed);
            communicator.all_reduce(&mut data).unwrap();
            drop(communicator);
            assert!(bits(&data) == bits(&summed::<f32>(ranks, 40_000, seed)), "{seed}");
        }
    });
}

/// Rank 0 has sent and gone when rank 2 receives: the answer, for which nobody waits, must not meet what others keep there.
#[test]
fn windows_are_held_until_ranks_of_other_nodes_are_done_with_them() {
    on_ranks(&[0, 0, 1], &tiny(), |world| {
        let all = world.all().unwrap();
        let build = || Communicator::builder(&all).chunk(16 << 10).build().unwrap();
        let mut communicator = build();
        if world.rank() == 2 {
            all.gather(&[]).unwrap();
            let mut came = [0.0f32; 5];
            communicator.receive(0, &mut came).unwrap();
            assert_eq!(came, [1.0; 5]);
            drop(communicator);
        } else {
            if world.rank() == 0 {
                communicator.send(2, &[1.0f32; 5]).unwrap();
            }
            drop(communicator);
            // More than there is beside the window.
            let error = world.group(&[0, 1]).unwrap().window(150_000).unwrap_err();
            assert!(matches!(error, Error::Memory(MemoryError::OutOfSpace { .. })), "{error}");
            all.gather(&[]).unwrap();
        }
        // All are done: there is room again.
        drop(build());
        assert_eq!(all.window(150_000).unwrap().len(), 150_000);
    });
}
