//! Experts that fail, and peers that leave: all ranks get a typed error, none hangs, and after a
//! rebuild the next step is right. Tests begin in order of their names, so these, which wait
//! longest, are at work beside all others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Signal, getpid, kill_process};
use sidelane::error::{Cause, ExpertKind, ExpertPass, LayerError, OverlapError, StreamId};
use sidelane::layer::{ExpertError, Input, MoeLayer};
use sidelane::{Dtype, Error, World};

use crate::pipeline::case::{Case, Cut, HIDDEN, Seen, WHOLE, gate, step, swiglu, tensors};
use crate::pipeline::meddled::{Meddled, Meddler};
use crate::support::processes::run_ranks;
use crate::support::{cases, failed, on_ranks, small};

const LONG: Duration = Duration::from_secs(60);
/// How long a node of a rank with slow experts may take: longer than any transfer here, on a busy
/// machine too.
const PATIENCE: Duration = Duration::from_secs(15);
const COUNTS: [usize; 3] = [9, 4, 14];
/// The rank with bad experts, and the call of a pass in which they are bad.
const CULPRIT: u32 = 1;
const CALL: u32 = 1;

/// What experts do instead of their work.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    TooFew,
    Fails,
    Panics,
    /// Comes back when the world is dead.
    Overruns,
    /// Its process ends.
    Dies,
}

struct Faulty {
    fault: Fault,
    in_pass: ExpertPass,
    calls: AtomicU32,
    world: Arc<World>,
}

impl Faulty {
    /// Whether this call is to be spoiled: gives too few values of it.
    fn strikes(&self, pass: ExpertPass) -> Result<bool, ExpertError> {
        // Weights are asked for once in a step.
        let nth = if pass == ExpertPass::WeightsBackward { CALL } else { CALL + 1 };
        if pass != self.in_pass || self.calls.fetch_add(1, Ordering::Relaxed) + 1 != nth {
            return Ok(false);
        }
        match self.fault {
            Fault::TooFew => return Ok(true),
            Fault::Fails => return Err("no luck".into()),
            Fault::Panics => panic!("bad luck"),
            Fault::Overruns => {
                failed(&self.world);
            }
            Fault::Dies => kill_process(getpid(), Signal::KILL).unwrap(),
        }
        Ok(false)
    }
}

impl Meddler for Faulty {
    fn after(&self, pass: ExpertPass, mut values: Vec<f32>) -> Result<Vec<f32>, ExpertError> {
        if self.strikes(pass)? {
            values.pop();
        }
        Ok(values)
    }
}

fn case(ranks: usize, cut: Cut) -> Case {
    Case::new(&vec![0; ranks], &COUNTS[..ranks], cut)
}

/// A step until a failure: the errors of the culprit's layer, or of its peers.
fn broken_step(case: &Case, world: &Arc<World>, fault: Fault, in_pass: ExpertPass) -> Error {
    let (group, rank) = (world.all().unwrap(), world.rank());
    let inner = swiglu(case.held(rank));
    let builder = if rank == CULPRIT {
        let by = Faulty { fault, in_pass, calls: AtomicU32::new(0), world: Arc::clone(world) };
        MoeLayer::builder(&group, gate(), HIDDEN, Meddled { inner, by })
    } else {
        MoeLayer::builder(&group, gate(), HIDDEN, inner)
    };
    let deadline = if fault == Fault::Overruns && rank == CULPRIT { PATIENCE } else { LONG };
    let mut layer = case.cut(builder).dtype(Dtype::F32).deadline(deadline).build().unwrap();
    let [x, _, of_out] = tensors::<f32>(rank as usize, case.tokens[rank as usize]);
    let stepped = layer.forward(&Input::new(&x)).and_then(|(_, tape)| layer.backward(tape, &of_out));
    stepped.map(|_| ()).and_then(|()| group.gather(&[]).map(drop)).unwrap_err()
}

/// The survivors' next step, in a world of their own.
fn next_step(cut: Cut, world: &World) -> Seen<f32> {
    let next = world.rebuild(LONG, 1).unwrap();
    let case = case(next.size() as usize, cut);
    let [x, residual, of_out] = tensors::<f32>(next.rank() as usize, case.tokens[next.rank() as usize]);
    let seen = step(&mut case.layer::<f32>(&next), &x, &residual, &of_out);
    next.all().unwrap().gather(&[]).unwrap();
    seen
}

/// The reason at the bottom of what went wrong.
fn root(error: &Error) -> &Error {
    match error {
        Error::Overlap(OverlapError::Failed { error, .. }) => root(error),
        other => other,
    }
}

/// Why a world is dead; an error may come of it a little before.
fn cause_of(world: &World) -> Cause {
    let since = Instant::now();
    loop {
        if let Some(cause) = world.health().cause() {
            return cause;
        }
        assert!(since.elapsed() < LONG, "the world lives");
        std::thread::yield_now();
    }
}

/// Whether it names the fault, and the work that had it.
fn is_of_the_fault(error: &Error, fault: Fault, pass: ExpertPass, cut: Cut) -> bool {
    let Error::Overlap(
        OverlapError::Failed { at, .. }
        | OverlapError::Panicked { at, .. }
        | OverlapError::Overran { at, .. },
    ) = error
    else {
        return false;
    };
    let (name, chunk) = match pass {
        ExpertPass::Forward => ("experts", CALL),
        ExpertPass::RowsBackward => ("gradient of rows", CALL),
        ExpertPass::WeightsBackward => ("gradient of weights", 0),
        ExpertPass::WithWeights => return false,
        other => unreachable!("{other:?}"),
    };
    // Concurrent streams may reach their calls in any order.
    let in_order = !cut.overlap || pass == ExpertPass::WeightsBackward;
    if at.work.name != name
        || !matches!(at.stream, StreamId::Compute(_))
        || in_order && at.work.chunk != chunk
    {
        return false;
    }
    let whose = ExpertKind::Routed;
    match (fault, root(error)) {
        (Fault::Fails, Error::Layer(error)) => {
            *error == LayerError::Failed { whose, pass, reason: "no luck".into() }
        }
        (
            Fault::TooFew,
            Error::Layer(LayerError::WrongShape { whose: of, pass: seen_in, seen, rows, columns }),
        ) => (*of, *seen_in) == (whose, pass) && seen + 1 == rows * columns,
        (Fault::Panics, Error::Overlap(OverlapError::Panicked { message, .. })) => message == "bad luck",
        (Fault::Overruns, Error::Overlap(OverlapError::Overran { took, limit, .. })) => {
            *limit == PATIENCE && took >= limit
        }
        _ => false,
    }
}

const PASSES: [ExpertPass; 3] = [ExpertPass::Forward, ExpertPass::RowsBackward, ExpertPass::WeightsBackward];

/// Each of these faults ends the step on all ranks, and the step of the rebuilt world is right.
fn end_the_step(faults: impl IntoIterator<Item = (Fault, ExpertPass)>) {
    let cut = Cut { chunks: 3, groups: 2, transfers: 2, overlap: true, streams: 2, at_once: 2, align: 1 };
    let expected = case(3, WHOLE).step::<f32>();
    for (nth, (fault, pass)) in faults.into_iter().enumerate() {
        let cut = Cut { overlap: nth % 2 == 0, ..cut };
        let case = case(3, cut);
        let seen = on_ranks(&case.nodes, &small(), |world| {
            let world = Arc::new(world);
            let error = broken_step(&case, &world, fault, pass);
            if world.rank() == CULPRIT {
                assert!(is_of_the_fault(&error, fault, pass, cut), "{fault:?} in {pass:?}: {error}");
            } else {
                let cause = cause_of(&world);
                match (fault, &cause) {
                    (Fault::Panics, Cause::Panicked { by: CULPRIT, thread, message }) => {
                        assert!(thread.contains("compute") && message == "bad luck", "{cause}");
                    }
                    (_, cause) => assert_eq!(*cause, Cause::Cancelled { by: CULPRIT }, "{error}"),
                }
                let ended = matches!(root(&error), Error::Bootstrap(_)) || *root(&error) == cause.into();
                assert!(ended, "{error}");
            }
            next_step(cut, &world)
        });
        assert_eq!(seen, expected, "{fault:?} in {pass:?}");
    }
}

#[test]
fn experts_that_fail_end_the_step_on_all_ranks_and_the_rebuilt_world_is_right() {
    let faults = [Fault::TooFew, Fault::Fails, Fault::Panics];
    end_the_step(faults.into_iter().flat_map(|fault| PASSES.map(|pass| (fault, pass))));
}

/// An overrun takes all of the patience.
#[test]
fn experts_that_overrun_end_the_step_on_all_ranks_and_the_rebuilt_world_is_right() {
    end_the_step(cases(PASSES, 1).into_iter().map(|pass| (Fault::Overruns, pass)));
}

/// How many threads this process has.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
#[ignore = "started by the test below, once per rank"]
fn a_rank_of_the_world_below() {
    let pass = if std::env::var_os("SIDELANE_TEST_BACKWARD").is_some() {
        ExpertPass::RowsBackward
    } else {
        ExpertPass::Forward
    };
    let cut = Cut { chunks: 3, groups: 2, transfers: 2, overlap: true, streams: 2, at_once: 2, align: 1 };
    let world = Arc::new(World::from_env().unwrap());
    let (me, before) = (world.rank(), threads());
    let error = broken_step(&case(3, cut), &world, Fault::Dies, pass);
    assert!(matches!(root(&error), Error::World(Cause::Lost { rank: CULPRIT, .. })), "{error}");
    // A scope knows that its threads are done a little before the system does.
    let since = Instant::now();
    while threads() > before {
        assert!(since.elapsed() < LONG, "{before} threads became {}", threads());
        std::thread::yield_now();
    }
    let seen = next_step(cut, &world);
    let expected = case(2, WHOLE).step::<f32>();
    assert_eq!(seen, expected[usize::from(me > CULPRIT)]);
    println!("rank {me} is right again");
}

#[test]
fn a_rank_killed_in_mid_layer_is_named_and_the_survivors_next_step_is_right() {
    for backward in cases([false, true], 1) {
        let variables = backward.then_some(("SIDELANE_TEST_BACKWARD", "1"));
        let job = run_ranks(&[3], "faults::a_rank_of_the_world_below", variables.as_slice());
        for rank in [0, 2] {
            assert!(job.text.contains(&format!("rank {rank} is right again")), "{job:?}");
        }
    }
}
