//! Counting rows for experts and ranks.

use sidelane::device::CountArgs;
use sidelane::error::DeviceError;
use sidelane::error::KernelFault;
use sidelane::plan::SlotShape;

use super::buffer::{Buffer, POISON};
use super::world::Input;
use super::{Device, with_kernels};
use crate::rows_common::Random;

/// Rows per expert and per rank as the device counts them, and its status.
fn counts(device: &Device, input: &Input) -> (Vec<u32>, Vec<u32>, Option<KernelFault>) {
    let Device { context, stream, kernels } = device;
    let (n_experts, ranks) = (input.map.experts(), input.map.ranks());
    let (experts, rank_of) =
        (Buffer::words(context, &input.experts), Buffer::words(context, &input.tables().0));
    let (per_expert, per_rank) =
        (Buffer::new(context, u64::from(n_experts) * 4), Buffer::new(context, u64::from(ranks) * 4));
    let status = Buffer::words(context, &[0_u32]);
    let counts = CountArgs {
        tokens: input.tokens,
        top_k: input.shape.top_k(),
        n_experts,
        ranks,
        experts: experts.span(),
        rank_of: rank_of.span(),
        per_expert: per_expert.span(),
        per_rank: per_rank.span(),
        status: status.word(),
    };
    kernels.counts(stream, &counts).unwrap();
    stream.synchronize().unwrap();
    (per_expert.read(), per_rank.read(), KernelFault::of(status.read::<u32>()[0]))
}

/// The same by the definition.
fn reference(input: &Input) -> (Vec<u32>, Vec<u32>) {
    let of = |expert| input.experts.iter().filter(|&&id| id == expert as i32).count() as u32;
    let rows = |rank| input.tokens_at(rank).len() as u32;
    ((0..input.map.experts()).map(of).collect(), (0..input.map.ranks()).map(rows).collect())
}

#[test]
fn each_expert_gets_its_choices_and_each_rank_its_tokens_once() {
    with_kernels("kernels::counts::each_expert_gets_its_choices_and_each_rank_its_tokens_once", |device| {
        for (tokens, top_k, experts, ranks) in [
            (1, 1, 1, 1),
            (0, 4, 8, 2),
            (300, 8, 64, 8),
            (37, 5, 100, 65),
            (600, 2, 33, 32),
            (20, 40, 31, 33),
        ] {
            let shape = SlotShape::new(600, top_k, 16).unwrap();
            let input = Input::any(&mut Random(tokens.into()), shape, (experts, ranks), ranks - 1, tokens);
            let (per_expert, per_rank) = reference(&input);
            assert_eq!(counts(device, &input), (per_expert, per_rank, None), "{tokens} to {ranks} ranks");
        }
    });
}

#[test]
fn an_expert_that_does_not_exist_is_reported_and_counts_nowhere() {
    with_kernels("kernels::counts::an_expert_that_does_not_exist_is_reported_and_counts_nowhere", |device| {
        let shape = SlotShape::new(50, 2, 16).unwrap();
        for bad in [8, -2, i32::MAX, i32::MIN] {
            let mut input = Input::any(&mut Random(3), shape, (8, 4), 0, 50);
            input.experts[61] = bad;
            let (per_expert, per_rank) = reference(&input);
            let status = Some(KernelFault::ExpertOutOfRange { token: 30 });
            assert_eq!(counts(device, &input), (per_expert, per_rank, status));
        }
    });
}

#[test]
fn counts_with_map_to_no_rank_report_it_and_count_expert_only() {
    with_kernels("kernels::counts::counts_with_map_to_no_rank_report_it_and_count_expert_only", |device| {
        let shape = SlotShape::new(50, 2, 16).unwrap();
        for rank in [4, -1, i32::MAX, i32::MIN] {
            let mut input = Input::any(&mut Random(4), shape, (8, 4), 0, 50);
            input.experts.iter_mut().filter(|expert| **expert == 5).for_each(|expert| *expert = -1);
            input.experts[91] = 5;
            input.misplaced = Some((5, rank));
            let (per_expert, per_rank) = reference(&input);
            let status = Some(KernelFault::RankOutOfRange { token: 45 });
            assert_eq!(counts(device, &input), (per_expert, per_rank, status), "{rank}");
        }
    });
}

#[test]
fn memory_that_is_too_small_is_refused_by_name() {
    with_kernels("kernels::counts::memory_that_is_too_small_is_refused_by_name", |device| {
        let Device { context, stream, kernels } = device;
        let memory = Buffer::new(context, 1024);
        let good = CountArgs {
            tokens: 4,
            top_k: 2,
            n_experts: 6,
            ranks: 3,
            experts: memory.part(0, 32),
            rank_of: memory.part(64, 24),
            per_expert: memory.part(128, 24),
            per_rank: memory.part(192, 12),
            status: memory.range().word(256).unwrap(),
        };
        for (counts, what, given, needed) in [
            (CountArgs { experts: memory.part(0, 31), ..good }, "experts", 31, 32),
            (CountArgs { rank_of: memory.part(64, 23), ..good }, "rank_of", 23, 24),
            (CountArgs { per_expert: memory.part(128, 23), ..good }, "per_expert", 23, 24),
            (CountArgs { per_rank: memory.part(192, 11), ..good }, "per_rank", 11, 12),
        ] {
            let expected = DeviceError::TooSmall { kernel: "counts", what, given, needed };
            assert_eq!(kernels.counts(stream, &counts), Err(expected));
        }
        for (counts, what) in
            [(CountArgs { n_experts: 0, ..good }, "n_experts"), (CountArgs { ranks: 0, ..good }, "ranks")]
        {
            let Err(DeviceError::Shape { what: said, .. }) = kernels.counts(stream, &counts) else {
                panic!("{what}")
            };
            assert_eq!(said, what);
        }
        stream.synchronize().unwrap();
        assert!(memory.content().iter().all(|&byte| byte == POISON), "nothing was launched");
    });
}
