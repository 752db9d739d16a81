//! When buckets and layers leave, the copies of a step, and verdicts on checkpoints.
//!
//! A test of when a bucket leaves has one rank in a backward pass. The other makes the calls of
//! that pass by itself, and tells the first rank in its backward pass that a call has ended.

use std::ops::ControlFlow;
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use sidelane::collective::Communicator;
use sidelane::error::{CallError, OverlapError};
use sidelane::overlap::HostExecutor;
use sidelane::{Error, Options};
use sidelane_parallel::data::{
    Adam, CheckpointError, DataError, DataParallel, FullySharded, Layout, Sharding,
};

use crate::ranks::{on_ranks, tiny};
use crate::tensors::communicator;

const SHARDINGS: [Sharding; 3] = [Sharding::None, Sharding::OptimizerStates, Sharding::Gradients];
/// Elements of each parameter, and parameters.
const ELEMENTS: usize = 8;
const PARAMETERS: usize = 3;

/// A rank that waits for an event which does not come fails soon.
fn impatient() -> Options {
    let mut options = tiny();
    options.timeouts.deadline = Duration::from_secs(5);
    options
}

/// An end of a channel for each of two ranks.
struct Ends {
    sender: Mutex<Option<Sender<usize>>>,
    receiver: Mutex<Option<Receiver<usize>>>,
}

impl Ends {
    fn new() -> Ends {
        let (sender, receiver) = mpsc::channel();
        Ends { sender: Mutex::new(Some(sender)), receiver: Mutex::new(Some(receiver)) }
    }

    fn sender(&self) -> Sender<usize> {
        self.sender.lock().unwrap().take().unwrap()
    }

    fn receiver(&self) -> Receiver<usize> {
        self.receiver.lock().unwrap().take().unwrap()
    }
}

fn buckets() -> Layout {
    Layout::buckets(&[ELEMENTS; PARAMETERS], 4 * ELEMENTS).unwrap()
}

fn data_parallel(group: &mut Communicator, sharding: Sharding) -> DataParallel {
    let parameters = vec![1.0; PARAMETERS * ELEMENTS];
    DataParallel::new(group, buckets(), sharding, parameters, Adam::default()).unwrap()
}

fn fully_sharded(group: &mut Communicator, layers: usize, prefetch: usize) -> FullySharded {
    let layout = Layout::layers(&vec![[ELEMENTS]; layers]).unwrap();
    FullySharded::new(group, layout, prefetch, &vec![1.0; layers * ELEMENTS], Adam::default()).unwrap()
}

#[test]
fn bucket_is_reduced_before_the_next_gradient_comes() {
    for sharding in SHARDINGS {
        let ends = Ends::new();
        on_ranks(&[0, 0], &impatient(), |world| {
            let mut group = communicator(&world);
            let mut model = data_parallel(&mut group, sharding);
            if world.rank() == 1 {
                let reduced = ends.sender();
                for bucket in (0..PARAMETERS).rev() {
                    let gradient = &mut [1.0; ELEMENTS];
                    match sharding {
                        Sharding::Gradients => group.reduce_scatter(gradient, &mut [0.0; ELEMENTS / 2]),
                        Sharding::None | Sharding::OptimizerStates => group.all_reduce(gradient),
                    }
                    .expect("the other rank's bucket has left");
                    reduced.send(bucket).unwrap();
                }
                return;
            }
            let reduced = ends.receiver();
            model
                .backward(&mut group, &HostExecutor::new(), move |pass| {
                    (0..PARAMETERS).rev().try_for_each(|nth| {
                        pass.gradient(nth, &[1.0; ELEMENTS])?;
                        assert_eq!(reduced.recv(), Ok(nth), "{sharding:?}");
                        Ok(())
                    })
                })
                .unwrap();
        });
    }
}

#[test]
fn layer_is_reduced_before_the_next_one_has_its_gradients() {
    const LAYERS: usize = 3;
    for prefetch in 0..2 {
        let ends = Ends::new();
        on_ranks(&[0, 0], &impatient(), |world| {
            let mut group = communicator(&world);
            let mut model = fully_sharded(&mut group, LAYERS, prefetch);
            if world.rank() == 1 {
                let reduced = ends.sender();
                for step in 0..LAYERS + prefetch {
                    if step < LAYERS {
                        group
                            .all_gather(&[1.0; ELEMENTS / 2], &mut [0.0; ELEMENTS])
                            .expect("the other rank gathers");
                    }
                    if let Some(nth) = step.checked_sub(prefetch) {
                        group
                            .reduce_scatter(&[1.0; ELEMENTS], &mut [0.0; ELEMENTS / 2])
                            .expect("the other rank reduces");
                        // Nobody waits for that of the first layer, the last to be reduced.
                        if nth + 1 < LAYERS {
                            reduced.send(LAYERS - 1 - nth).unwrap();
                        }
                    }
                }
                return;
            }
            let reduced = ends.receiver();
            model
                .backward(&mut group, &HostExecutor::new(), move |layer, _, _| {
                    if layer + 1 < LAYERS {
                        assert_eq!(reduced.recv(), Ok(layer + 1), "prefetch {prefetch}");
                    }
                    Ok(())
                })
                .unwrap();
        });
    }
}

#[test]
fn complete_gradients_stay_if_last_reduction_overran_limit() {
    let ends = Ends::new();
    on_ranks(&[0, 0], &tiny(), |world| {
        let mut group = communicator(&world);
        let mut model = fully_sharded(&mut group, 1, 0);
        let give = |gradient: &mut [f32]| gradient.fill(1.0);
        if world.rank() == 1 {
            // Its reduction begins when that of the other rank has overrun.
            let late = ends.receiver();
            let body = move |_: usize, _: &[f32], gradient: &mut [f32]| {
                give(gradient);
                late.recv().map(drop).map_err(|_| DataError::NoGradients)
            };
            model.backward(&mut group, &HostExecutor::new(), body).unwrap();
        } else {
            let late = Mutex::new(ends.sender());
            let tell = |_: &OverlapError| {
                // The other rank listens once.
                let _ = late.lock().unwrap().send(0);
                ControlFlow::Continue(())
            };
            let executor = HostExecutor::new().limit(Duration::from_secs(5)).on_error(&tell);
            let body = |_: usize, _: &[f32], gradient: &mut [f32]| {
                give(gradient);
                Ok(())
            };
            let error = model.backward(&mut group, &executor, body).unwrap_err();
            assert!(
                matches!(error, DataError::Call(Error::Overlap(OverlapError::Overran { .. }))),
                "{error}"
            );
        }
        model.step(&mut group).unwrap();
        assert!(model.gather(&mut group).unwrap().iter().all(|&value| value < 1.0));
    });
}

#[test]
fn copies_of_a_step_are_in_the_peak() {
    // One bucket: a step holds its states and this rank's part twice, and gathers the bucket.
    let bytes = (4 * PARAMETERS * ELEMENTS) as u64;
    for (sharding, step) in [
        (Sharding::None, 3 * bytes),
        (Sharding::OptimizerStates, 3 * bytes / 2 + bytes),
        (Sharding::Gradients, 3 * bytes / 2 + bytes),
    ] {
        on_ranks(&[0, 0], &tiny(), |world| {
            let mut group = communicator(&world);
            let layout = Layout::buckets(&[PARAMETERS * ELEMENTS], usize::MAX).unwrap();
            let start = vec![1.0; PARAMETERS * ELEMENTS];
            let mut model =
                DataParallel::new(&mut group, layout, sharding, start.clone(), Adam::default()).unwrap();
            model.backward(&mut group, &HostExecutor::new(), |pass| pass.gradient(0, &start)).unwrap();
            assert_eq!(model.memory_usage().buffers_peak_bytes, bytes);
            model.step(&mut group).unwrap();
            assert_eq!(model.memory_usage().buffers_peak_bytes, step, "{sharding:?}");
        });
    }
}

/// Shards of two ranks after so many steps, with this gradient.
fn checkpoint(steps: usize, gradient: f32) -> Vec<Vec<u8>> {
    on_ranks(&[0, 0], &tiny(), |world| {
        let mut group = communicator(&world);
        let mut model = data_parallel(&mut group, Sharding::Gradients);
        for _ in 0..steps {
            model
                .backward(&mut group, &HostExecutor::new(), |pass| {
                    (0..PARAMETERS).rev().try_for_each(|nth| pass.gradient(nth, &[gradient; ELEMENTS]))
                })
                .unwrap();
            model.step(&mut group).unwrap();
        }
        let mut shard = Vec::new();
        model.save(&mut shard).unwrap();
        shard
    })
}

#[test]
fn checkpoints_that_differ_between_ranks_change_nothing_on_any() {
    let (one, other, later) = (checkpoint(1, 1.0), checkpoint(1, -1.0), checkpoint(2, 1.0));
    let mut damaged = one.clone();
    damaged[1][100] ^= 1;
    on_ranks(&[0, 0, 1], &tiny(), |world| {
        let mut group = communicator(&world);
        let odd = world.rank() == 2;
        let mut whole = data_parallel(&mut group, Sharding::None);
        let mut sharded = fully_sharded(&mut group, PARAMETERS, 1);
        let start = vec![1.0; PARAMETERS * ELEMENTS];
        for (theirs, what) in
            [(&other, "digest of the checkpoint"), (&later, "steps of the checkpoint"), (&damaged, "")]
        {
            let shards = if odd { theirs } else { &one };
            for error in [
                whole.load(&mut group, shards.iter().map(Vec::as_slice)).unwrap_err(),
                sharded.load(&mut group, shards.iter().map(Vec::as_slice)).unwrap_err(),
            ] {
                let right = match (&error, odd) {
                    (DataError::Call(Error::Call(CallError::ConfigsDiffer { what: named, .. })), _) => {
                        *named == what
                    }
                    (DataError::Checkpoint(CheckpointError::Damaged { reader: 1, .. }), true)
                    | (DataError::Call(Error::Call(CallError::PeerRefused { peer: 2, .. })), false) => {
                        what.is_empty()
                    }
                    _ => false,
                };
                assert!(right, "{error}");
            }
            assert_eq!(whole.parameters(), start);
            assert_eq!(sharded.gather(&mut group).unwrap(), start);
        }
        // Any order will do.
        let shards = [&one[usize::from(odd)], &one[usize::from(!odd)]];
        whole.load(&mut group, shards.iter().map(|shard| shard.as_slice())).unwrap();
        assert_ne!(whole.parameters(), start);
    });
}
