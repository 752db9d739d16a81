//! Memory that context parallel attention takes on a rank, as an allocator counts it.

#![allow(unsafe_code, reason = "an allocator cannot be written in safe Rust")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use sidelane::collective::Communicator;
use sidelane_parallel::context::{AttentionShape, RingAttention, UlyssesAttention, cut_zig_zag};
use sidelane_parallel::tensor::cut_rows;

use crate::ranks::{on_ranks, tiny};
use crate::tensors::{communicator, tensor};

/// The system's allocator, which counts bytes for each thread.
struct Counting;

thread_local! {
    /// Bytes that a thread has, and the most that it had.
    static LIVE: Cell<(i64, i64)> = const { Cell::new((0, 0)) };
}

fn count(bytes: i64) {
    // A thread that is ending has no counter any more, and no test reads it.
    let _ = LIVE.try_with(|live| {
        let (now, most) = live.get();
        live.set((now + bytes, most.max(now + bytes)));
    });
}

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The result of a call, the bytes that it leaves allocated, and the most that it had allocated.
fn measured<T>(call: impl FnOnce() -> T) -> (T, [usize; 2]) {
    let before = LIVE.get().0;
    LIVE.set((before, before));
    let given = call();
    let (now, most) = LIVE.get();
    (given, [now - before, most - before].map(|bytes| bytes as usize))
}

const TOKENS: usize = 256;
const SHAPE: AttentionShape = AttentionShape { query_heads: 8, kv_heads: 2, head_dim: 16, causal: true };

/// Bytes that a forward pass leaves, that it takes at most, and that a backward pass takes at most,
/// beyond queries, keys and values.
fn of_ranks(nodes: &[u32], ring: bool) -> Vec<[usize; 3]> {
    on_ranks(nodes, &tiny(), |world| {
        let mut group: Communicator = communicator(&world);
        let part = (group.rank(), group.size());
        let [query, key, value] = [SHAPE.query_heads, SHAPE.kv_heads, SHAPE.kv_heads].map(|heads| {
            let whole = tensor(heads as u64, 0, TOKENS * heads * SHAPE.head_dim);
            match ring {
                true => cut_zig_zag(&whole, heads * SHAPE.head_dim, part).unwrap(),
                false => cut_rows(&whole, heads * SHAPE.head_dim, part).unwrap().to_vec(),
            }
        });
        let mut passes = || -> [usize; 3] {
            let group = &mut group;
            let ([left, most], [_, most_backward]) = if ring {
                let attention = RingAttention::new(group, SHAPE).unwrap();
                let forward = measured(|| attention.forward(group, &query, &key, &value).unwrap());
                let ((out, tape), forward) = forward;
                (forward, measured(|| tape.backward(group, &out).unwrap()).1)
            } else {
                let attention = UlyssesAttention::new(group, SHAPE).unwrap();
                let forward = measured(|| attention.forward(group, &query, &key, &value).unwrap());
                let ((out, tape), forward) = forward;
                (forward, measured(|| tape.backward(group, &out).unwrap()).1)
            };
            [left, most, most_backward]
        };
        // A communicator keeps its programs from their first call on.
        passes();
        passes()
    })
}

/// The page's formulas. Scores of one query are less than what else comes and goes.
#[test]
fn a_rank_holds_its_part_of_the_tokens_and_no_scores() {
    let AttentionShape { query_heads, kv_heads, head_dim, .. } = SHAPE;
    for nodes in [&[0][..], &[0, 0], &[0, 0, 1, 1]] {
        let (ranks, tokens) = (nodes.len(), TOKENS / nodes.len());
        let [outputs, powers] = [4 * tokens * query_heads * head_dim, 4 * tokens * query_heads * 2];
        let block = |heads| 4 * tokens * heads * head_dim * 2;
        let ring = |block| {
            let left = 3 * outputs + powers + block;
            let (forward, backward) = match ranks {
                1 => (left, 3 * block / 2),
                2 => (left + powers + block, 3 * block),
                _ => (left + powers + 2 * block, 4 * block),
            };
            [left, forward, outputs + powers / 2 + backward]
        };
        let right = ring(block(kv_heads));
        for seen in of_ranks(nodes, true) {
            // Steps of a pass, and the rows of one query.
            let steps = |at: usize| right[at]..right[at] + (8 << 10);
            assert_eq!(seen[0], right[0], "ring of {ranks}");
            assert!(
                (1..3).all(|at| steps(at).contains(&seen[at])),
                "ring of {ranks}: {seen:?}, not {right:?}"
            );
        }
        let ulysses = |block| {
            let most_backward = 4 * outputs + powers / 2 + 3 * block;
            [3 * outputs + powers + block, 4 * outputs + powers + block, most_backward]
        };
        let block = block(kv_heads.max(ranks));
        assert_eq!(of_ranks(nodes, false), vec![ulysses(block); ranks], "Ulysses of {ranks}");
    }
}
