//! Counts of the time model against those of what the fake driver carries out in fixed slots.

use fake_cuda::FakeDriver;
use sidelane::exec::EnqueueCounts;
use sidelane::plan::SlotShape;
use sidelane_model::time::{Timing, slots};

use super::on_fake_driver;
use super::rank::{Case, Rank, combine, dispatch, experts_copy, on_ranks, options};

/// Of all ranks: copies, their bytes and batches, words and kernels.
fn modeled(Timing { total, .. }: &Timing) -> [u64; 5] {
    [total.copies, total.intra_node_bytes, total.batches, total.memory_ops, total.kernels]
}

/// The same, as the fake driver has counted it.
fn seen() -> [u64; 5] {
    let of = FakeDriver::loaded().unwrap().counters();
    [of.copies, of.copied_bytes, of.copy_batches, of.memory_operations, of.kernels]
}

#[test]
fn model_counts_what_the_driver_carries_out_in_slots() {
    on_fake_driver("slots::counts::model_counts_what_the_driver_carries_out_in_slots", || {
        let case = Case { ranks: 4, experts: 8, top_k: 3, hidden: 16, max_tokens: 5 };
        let row_bytes = case.hidden as u64 * 2;
        let shape = SlotShape::new(case.max_tokens, case.top_k, row_bytes).unwrap();
        let hardware = "h100-cx7".parse().unwrap();
        let times = slots(case.ranks, shape, row_bytes, &hardware).unwrap();
        on_ranks(case.ranks, &options(), |world| {
            let mut rank = Rank::new(case, world);
            let tensors = rank.tensors(&case.input(1, rank.me()));
            let settled = |rank: &Rank| {
                rank.ep.synchronize().unwrap();
                rank.group.gather(&[]).unwrap();
                let seen = seen();
                rank.group.gather(&[]).unwrap();
                seen
            };
            let differ = |[before, after]: [[u64; 5]; 2]| std::array::from_fn(|nth| after[nth] - before[nth]);
            let before = settled(&rank);
            let (rows, handle) = dispatch(&mut rank.ep, &tensors).unwrap();
            assert_eq!(differ([before, settled(&rank)]), modeled(&times[0]), "dispatch");
            experts_copy(&rank.stream, &rows, &handle).unwrap();
            let before = settled(&rank);
            combine(&mut rank.ep, &handle, &tensors).unwrap();
            assert_eq!(differ([before, settled(&rank)]), modeled(&times[1]), "combine");
            for (report, timing) in
                [handle.report().unwrap(), handle.return_report().unwrap()].into_iter().zip(&times)
            {
                let EnqueueCounts { copies, batches, memory_operations, .. } = report.enqueued;
                let Timing { max, .. } = timing;
                assert_eq!((copies, batches, memory_operations), (max.copies, max.batches, max.memory_ops));
                assert_eq!(report.kernels.len() as u64, max.kernels);
            }
        });
    });
}
