//! Default size of a device heap, computed from settings that are the same at every rank.
//!
//! ```text
//!   dispatch of n rows   | n rows; over pxn arrivals, staged rows | n outputs |
//!   return               | n sums, where ranks sum a token's rows: of two at once, one of them yet to be read |
//!                        | n pulled rows, a sum and its tables for each staged row, where relays sum: likewise |
//!
//!   any                  n = all rows that a rank can receive, or its budget
//!   expected             n = rows if experts get equally many, and half as many more, or any
//!
//!   default              the load in expected dispatches; but as much as 2 max_in_flight
//!                        dispatches of any routing need, if 256 MiB are enough for them,
//!                        else at least 256 MiB
//!   limit                the load in dispatches of any routing, at most 4 times the default
//! ```
//!
//! So small instances have memory for all that can be alive at once, gradients counted.

use super::memory::MemoryShape;
use crate::ep::builder::Spec;

/// Number of receive and output buffers alive in the device heap at once, each of a dispatch of
/// `max_tokens`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeapLoad {
    /// Rows of a dispatch, or incoming gradients.
    pub landings: u32,
    /// Outputs of experts, or gradients of rows.
    pub outputs: u32,
}

impl Default for HeapLoad {
    /// Two dispatches with their outputs, or one and its gradients.
    fn default() -> Self {
        HeapLoad { landings: 2, outputs: 2 }
    }
}

/// Returns whose sums by rank or by node are in the device heap at once.
const SUMS: u32 = 2;
/// Memory that small instances may take beyond the expected load.
const SMALL: u64 = 256 << 20;
/// Pages of a device.
pub(super) const STEP: u64 = 2 << 20;
/// How many times its default size a heap may have, once it has grown.
const GROWN: u64 = 4;
/// No device has as much, and sums of a few of these do not overflow.
const MOST: u64 = 1 << 56;

impl HeapLoad {
    /// The default size for these settings: `shape` has no pool yet.
    pub(super) fn default_heap(self, spec: &Spec, shape: &MemoryShape) -> u64 {
        let any = shape.any_rows();
        let alive = shape.contexts().saturating_mul(2);
        let alive = HeapLoad { landings: alive, outputs: alive };
        let all = alive.bytes(shape, any).min(SMALL);
        let expected = self.bytes(shape, expected_rows(spec, shape).min(any));
        expected.max(all).min(MOST).next_multiple_of(STEP)
    }

    /// The default of the size to which a heap of this default size may grow.
    pub(super) fn default_limit(self, shape: &MemoryShape, heap: u64) -> u64 {
        let any = self.bytes(shape, shape.any_rows()).min(MOST).next_multiple_of(STEP);
        any.min(heap.saturating_mul(GROWN)).max(heap)
    }

    /// Bytes of this load, of dispatches of so many rows.
    fn bytes(self, shape: &MemoryShape, rows: u64) -> u64 {
        let rows = u32::try_from(rows).unwrap_or(u32::MAX);
        let landings = shape.landing_bytes(rows).saturating_mul(self.landings.into());
        let sums = self.outputs.min(SUMS);
        let outputs = self.outputs.saturating_add(if shape.sums_by_rank() { sums } else { 0 });
        let outputs = shape.offer(rows).bytes().saturating_mul(outputs.into());
        let relays = shape.node_sum_bytes(rows).saturating_mul(sums.into());
        landings.saturating_add(outputs).saturating_add(relays)
    }
}

/// Rows of a dispatch at the rank with the most experts, if all of them get equally many, and half
/// as many more. A budget is a limit that its caller chose, so it counts in full.
fn expected_rows(spec: &Spec, shape: &MemoryShape) -> u64 {
    if spec.mode.budget().is_some() {
        return u64::MAX;
    }
    let (map, tokens) = (&spec.map, u128::from(spec.max_tokens));
    let most_slots = (0..map.ranks()).map(|rank| map.slots_of(rank).len()).max().unwrap_or(0);
    let entries = u128::from(map.ranks()) * tokens * u128::from(spec.entries_of_token());
    let even = (entries * most_slots as u128).div_ceil(u128::from(map.slots().max(1)));
    u64::try_from(even + even / 2).unwrap_or(u64::MAX).saturating_add(shape.pad_rows())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::dtype::{Dtype, PartialDtype};
    use crate::ep::device::device_pool::DevicePool;
    use crate::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout, Strategy, SumOrder};
    use crate::topology::Route;

    /// Ranks of 4,096 tokens with 8 choices.
    fn spec(ranks: u32, hidden: usize) -> Spec {
        Spec {
            top_k: 8,
            hidden,
            dtype: Dtype::Bf16,
            sum_order: SumOrder::default(),
            align: 1,
            max_tokens: 4096,
            weighted: false,
            map: Arc::new(ExpertMap::contiguous(256, ranks).unwrap()),
            route: Route::Direct,
            partial_dtype: PartialDtype::F32,
            layout: RowLayout::ExpertMajor,
            mode: ReceiveMode::Exact,
            record: None,
            coalesce_relays: false,
            strategy: Strategy::AllToAll,
            gathers: false,
            max_blocks: None,
            rank_sums: false,
            node_sums: false,
        }
    }

    fn heap_of(spec: &Spec, (contexts, staged): (u32, Option<u64>), load: HeapLoad) -> u64 {
        load.default_heap(spec, &MemoryShape::new(spec, contexts, (0, 0), staged, 0))
    }

    /// By the other defaults.
    fn heap(spec: &Spec) -> u64 {
        heap_of(spec, (64, None), HeapLoad::default())
    }

    #[test]
    fn default_heap_fits_two_even_dispatches_and_half_more() {
        let rows = 4096 * 8 * 3 / 2;
        assert_eq!(heap(&spec(8, 7168)), (2 * rows * (2 * 14336 + 4_u64)).next_multiple_of(STEP));
        // No routing brings one rank more than it has.
        assert_eq!(heap(&spec(1, 2048)), (2 * 4096 * 8 * (2 * 4096 + 4_u64)).next_multiple_of(STEP));
        assert_eq!([heap(&spec(8, 7168)), heap(&spec(1, 2048))].map(|bytes| bytes >> 20), [2690, 514]);
    }

    #[test]
    fn rank_with_most_experts_sets_the_size() {
        let slots = [(0..192).collect(), (192..256).collect::<Vec<u32>>()];
        let uneven = Spec { map: Arc::new(ExpertMap::from_slots(256, &slots).unwrap()), ..spec(2, 7168) };
        // All that comes is twice a share, and less than three quarters of it and half as much.
        assert_eq!(heap(&uneven), (2 * 2 * 4096 * 8 * (2 * 14336 + 4_u64)).next_multiple_of(STEP));
    }

    #[test]
    fn budget_counts_in_full() {
        let mode = ReceiveMode::Budget { rows: 200_000, overflow: Overflow::Error };
        let large = (2 * 200_000 * (2 * 14336 + 4_u64)).next_multiple_of(STEP);
        assert!(heap(&Spec { mode, ..spec(8, 7168) }).abs_diff(large) <= STEP);
    }

    #[test]
    fn small_instances_have_memory_for_all_that_can_be_alive() {
        let small = Spec { max_tokens: 4, ..spec(2, 64) };
        let all = (2 * 4 * 8) * (128 + 128 + 4_u64);
        assert!(heap_of(&small, (3, None), HeapLoad::default()) >= 6 * all);
        assert_eq!(heap(&Spec { max_tokens: 128, ..spec(8, 2048) }), SMALL, "no more than that");
    }

    #[test]
    fn heap_may_grow_to_what_any_routing_needs() {
        let limit = |spec: &Spec| {
            let bare = MemoryShape::new(spec, 64, (0, 0), None, 0);
            HeapLoad::default().default_limit(&bare, heap(spec))
        };
        assert_eq!(limit(&spec(2, 7168)), (2 * 2 * 4096 * 8 * (2 * 14336 + 4_u64)).next_multiple_of(STEP));
        assert_eq!(limit(&spec(8, 7168)), 4 * heap(&spec(8, 7168)), "at most so many times the default");
        let small = Spec { max_tokens: 4, ..spec(2, 64) };
        assert_eq!(limit(&small), heap(&small), "it has memory for all that can come");
    }

    #[test]
    fn tapes_and_chunks_of_a_layer_add_rows() {
        let chunk = Spec { max_tokens: 1024, ..spec(1, 7168) };
        let of = |load| heap_of(&chunk, (8, None), load);
        let (two, three) = (HeapLoad { landings: 8, outputs: 8 }, HeapLoad { landings: 12, outputs: 8 });
        assert!(of(two).abs_diff(heap(&spec(1, 7168))) <= STEP, "four chunks are as long as one");
        assert_eq!(of(three) - of(two), 4 * 1024 * 8 * 14336);
    }

    #[test]
    fn sums_by_rank_are_as_many_rows_as_two_outputs() {
        let summed = Spec { rank_sums: true, ..spec(8, 7168) };
        let rows = 4096 * 8 * 3 / 2;
        assert_eq!(heap(&summed), (2 * rows * (3 * 14336 + 8_u64)).next_multiple_of(STEP));
    }

    #[test]
    fn sums_by_node_are_pulled_rows_and_as_many_sums_as_staged_rows() {
        let (staged, rows) = (3 << 12, 4096 * 8 * 3 / 2);
        let of = |node_sums| {
            heap_of(&Spec { node_sums, ..spec(8, 7168) }, (64, Some(staged)), HeapLoad::default())
        };
        let sums = 2 * (rows * 14336 + staged * (14336 + 2 * 8 * 4));
        assert!((of(true) - of(false)).abs_diff(sums) <= STEP, "{} {}", of(true), of(false));
    }

    /// Two dispatches with outputs, of so many rows each, one after another and trimmed.
    fn fits(shape: &MemoryShape, bytes: u64, rows: u32) -> bool {
        let pool = DevicePool::new(0, bytes);
        let mut taken = Vec::new();
        for _ in 0..2 {
            let mut landing = pool.announce(u64::MAX);
            if landing.len() < shape.landing_bytes(rows) {
                return false;
            }
            landing.trim(shape.landing_bytes(rows));
            let Ok(output) = pool.take(shape.offer(rows).bytes(), (MemoryShape::STEP, 0)) else {
                return false;
            };
            taken.extend([landing, output]);
        }
        true
    }

    #[test]
    fn two_dispatches_fit_whatever_the_layout_and_route() {
        for layout in [RowLayout::ExpertMajor, RowLayout::RankMajor] {
            for (align, staged) in [(1, None), (64, None), (64, Some(3 << 14))] {
                for ranks in [1, 4, 16] {
                    let spec = Spec { layout, align, max_tokens: 1 << 14, ..spec(ranks, 7168) };
                    let bytes = heap_of(&spec, (2, staged), HeapLoad::default());
                    let shape = MemoryShape::new(&spec, 2, (bytes, bytes), staged, 0);
                    let rows = expected_rows(&spec, &shape).min(shape.any_rows()) as u32;
                    assert!(fits(&shape, bytes, rows), "{layout:?} {align} {staged:?} {ranks}");
                    assert!(!fits(&shape, bytes, rows + rows / 8), "{layout:?} {align} {staged:?} {ranks}");
                }
            }
        }
    }

    #[test]
    fn settings_that_no_device_has_are_counted_without_overflow() {
        let huge = Spec { max_tokens: 1 << 28, align: u32::MAX, ..spec(8, 1 << 40) };
        assert_eq!(heap_of(&huge, (65_534, Some(u64::MAX >> 8)), HeapLoad::default()), MOST);
    }
}
