//! Faults that kernels find in a call that goes well otherwise: its status word keeps them.

use half::bf16;
use sidelane_verify::reference::Tokens;

use super::devices::Memory;
use super::on_devices;
use super::rank::{Case, Rank, target};
use super::support::{on_ranks, small};
use crate::ep::device::memory::{ByteRange, MemoryShape};
use crate::ep::{Handle, Status, Tensor, TensorMut};
use crate::error::KernelFault;
use crate::topology::Route;
use crate::{Dtype, World};

/// The context of the only dispatch that is alive.
const CONTEXT: u32 = 0;
/// Neither a row, nor a place of one.
const NOWHERE: u32 = 1 << 20;
/// In a run of own rows: the word that says where they go.
const TO: u64 = 2;

/// One token for a rank of its own and one for the other: the first expert of each.
fn input() -> Tokens<bf16> {
    let x = (0..16).map(|n| bf16::from_f32(n as f32)).collect();
    Tokens { x, ids: vec![0, 2], weights: vec![0.5; 2] }
}

/// Changes a word of what a dispatch has left in this rank's memory; returns that it was.
fn change(rank: &mut Rank<bf16>, (range, at): (fn(&MemoryShape, u32) -> ByteRange, u64), word: u32) -> u32 {
    let stream = rank.stream.clone();
    let Some(common) = rank.planned.enqueued().map(|ep| ep.common()) else {
        panic!("exact sizes are the enqueuer's")
    };
    let (begin, _) = range(&common.shape, CONTEXT);
    let piece = common.piece((begin + 4 * at, 4)).unwrap();
    let memory = Memory::new(stream.context(), 16);
    let before = memory.read::<u32>(&stream, &piece)[0];
    memory.send(&stream, &piece, &word.to_le_bytes());
    before
}

/// How the last call of a handle ended, once its stream has come by.
fn status(rank: &Rank<bf16>, handle: &Handle) -> Status {
    rank.stream.synchronize().unwrap();
    handle.status_now()
}

/// Gradients of combine along a broken layout, then along the one before.
fn gradients(
    rank: &mut Rank<bf16>,
    handle: &Handle,
    broken: (fn(&MemoryShape, u32) -> ByteRange, u64),
    at: u32,
) {
    let weighted = rank.case.weighted;
    let call = |rank: &mut Rank<bf16>| {
        let g = rank.x.part(32);
        let weights_out = rank.weights.part(8);
        let weights_out = weighted.then(|| TensorMut::device(&weights_out, Dtype::F32));
        let rows = rank.planned.combine_backward_into(Tensor::device(&g, Dtype::Bf16), handle, weights_out);
        rows.map(drop).unwrap();
        status(rank, handle)
    };
    let before = change(rank, broken, NOWHERE);
    let seen = call(rank);
    assert_eq!(KernelFault::of(seen.0), Some(KernelFault::IndexOutOfRange { at }), "weighted: {weighted}");
    if weighted {
        let weights_out = rank.weights.part(8);
        assert_eq!(
            rank.out.read::<u32>(&rank.stream, &weights_out),
            [0; 2],
            "weight gradients behind a fault"
        );
    }
    change(rank, broken, before);
    assert_eq!(call(rank), Status::OK, "a fault is one call's");
}

#[test]
fn fault_in_packing_or_placing_own_rows_is_status_of_call() {
    let test = "kernel_faults::fault_in_packing_or_placing_own_rows_is_status_of_call";
    on_devices(test, 23, "ordered", |_| {
        for (nodes, route) in [([0, 0], Route::Direct), ([0, 1], Route::Direct), ([0, 1], Route::Pxn)] {
            for weighted in [false, true] {
                let case = Case { route, weighted, ..Case::across(&nodes, 4, 2) };
                on_ranks(&case.nodes, &small(), |world: World| {
                    let (group, me) = (world.all().unwrap(), world.rank());
                    let mut rank = Rank::<bf16>::new(&group, &case);
                    let (_, handle) = rank.dispatch(&input()).unwrap();
                    let (y, out) = (handle.output().unwrap(), rank.out.part(32));
                    rank.rows.send(
                        &rank.stream,
                        y.range().unwrap(),
                        &vec![0; y.range().unwrap().len() as usize],
                    );
                    rank.planned.combine_into(y, &handle, target::<bf16>(&out)).unwrap();
                    assert_eq!(status(&rank, &handle), Status::OK);
                    gradients(&mut rank, &handle, (MemoryShape::own_runs, TO), 0);
                    // Rows of relays lie behind those for local peers, others by expert.
                    let crossing = if route == Route::Pxn { 1 } else { 1 - me };
                    gradients(&mut rank, &handle, (MemoryShape::order, crossing.into()), crossing);
                    drop(handle);
                    rank.round(&input());
                });
            }
        }
    });
}
