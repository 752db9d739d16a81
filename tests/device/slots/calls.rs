//! Single calls: what lands, and what returns.

use std::time::Duration;

use fake_cuda::FakeDriver;
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, SlotHead, SumOrder};

use super::on_fake_driver;
use super::rank::{Case, Rank, combine, content, dispatch, on_ranks, options, sums};
use crate::rows_common::Random;

const CASES: [Case; 5] = [
    Case { ranks: 1, experts: 4, top_k: 3, hidden: 8, max_tokens: 5 },
    Case { ranks: 2, experts: 2, top_k: 2, hidden: 64, max_tokens: 9 },
    Case { ranks: 3, experts: 16, top_k: 4, hidden: 40, max_tokens: 1 },
    Case { ranks: 4, experts: 9, top_k: 8, hidden: 16, max_tokens: 6 },
    Case { ranks: 8, experts: 64, top_k: 6, hidden: 24, max_tokens: 4 },
];

/// Partial rows of any bits, different for each rank and round.
fn any_partials(rank: &Rank, round: u64) -> Vec<u8> {
    let mut random = Random(round << 16 | u64::from(rank.me()) | 1 << 40);
    let len = u64::from(rank.case.ranks) * rank.case.bytes(rank.case.max_tokens);
    (0..len).map(|_| random.next() as u8).collect()
}

fn write(rank: &Rank, to: &sidelane::device::DeviceRange, bytes: &[u8]) {
    let staging = sidelane::device::PinnedMemory::new(&rank.context, bytes.len()).unwrap();
    staging.write(0, bytes).unwrap();
    let len = bytes.len() as u64;
    rank.stream.copy(to.span(0, len).unwrap(), staging.range().span(0, len).unwrap()).unwrap();
    rank.stream.synchronize().unwrap();
}

/// A dispatch and a combine, every byte compared.
pub fn round(rank: &mut Rank, round: u64) {
    let (me, case) = (rank.me(), rank.case);
    let inputs = case.inputs(round);
    let tensors = rank.tensors(&inputs[me as usize]);
    let (rows, handle) = dispatch(&mut rank.ep, &tensors).unwrap();
    let received = rank.read(&rows.range().unwrap());
    let slots: Vec<&[u8]> = received.chunks_exact(case.shape().bytes() as usize).collect();
    let head: SlotHead = bytemuck::pod_read_unaligned(&slots[me as usize][..64]);
    assert_eq!(head.call, round);
    for (source, (slot, input)) in slots.iter().zip(&inputs).enumerate() {
        assert_eq!(*slot, input.slot(me, head.digest, round), "round {round}: from {source} at {me}");
    }
    let partials = any_partials(rank, round);
    write(rank, handle.output().unwrap().range().unwrap(), &partials);
    let blobs = rank.group.gather(&partials).unwrap();
    combine(&mut rank.ep, &handle, &tensors).unwrap();
    rank.ep.synchronize().unwrap();
    let input = &inputs[me as usize];
    let row = case.bytes(1) as usize;
    let partial = |_: usize, from: usize, place: i32| {
        let block = me as usize * case.max_tokens as usize + place as usize;
        blobs[from][block * row..][..row].to_vec()
    };
    let expected = sums(case, input.tokens, &input.places(), partial);
    assert_eq!(content(&tensors.out)[..expected.len()], expected, "round {round}: sums at {me}");
}

#[test]
fn every_slot_and_every_sum_is_right_to_the_bit() {
    on_fake_driver("slots::calls::every_slot_and_every_sum_is_right_to_the_bit", || {
        for case in CASES {
            on_ranks(case.ranks, &options(), |world| {
                let mut rank = Rank::new(case, world);
                (1..=6).for_each(|number| round(&mut rank, number));
            });
        }
    });
}

#[test]
fn rebuilt_instance_is_right_to_the_bit_on_the_survivors_group() {
    on_fake_driver("slots::calls::rebuilt_instance_is_right_to_the_bit_on_the_survivors_group", || {
        let case = Case { ranks: 3, experts: 6, top_k: 3, hidden: 16, max_tokens: 6 };
        on_ranks(case.ranks, &options(), |world| {
            let mut rank = Rank::new(case, world);
            round(&mut rank, 1);
            rank.group.gather(&[]).unwrap();
            if rank.me() == 1 {
                return;
            }
            let next = rank.world.rebuild(Duration::from_secs(60), 2).unwrap();
            let group = next.all().unwrap();
            let map = ExpertMap::contiguous(case.experts, next.size()).unwrap();
            rank.ep = rank.ep.rebuilt(&group, map).build().unwrap();
            (rank.case.ranks, rank.group, rank.world) = (next.size(), group, next);
            (1..=4).for_each(|number| round(&mut rank, number));
            rank.group.gather(&[]).unwrap();
        });
    });
}

#[test]
fn rows_choices_and_sums_are_those_of_the_host() {
    on_fake_driver("slots::calls::rows_choices_and_sums_are_those_of_the_host", || {
        for case in CASES {
            on_ranks(case.ranks, &options(), |world| {
                let mut rank = Rank::new(case, world);
                for order in [SumOrder::Rank, SumOrder::Expert] {
                    rank.ep = case.builder(&rank.group).sum_order(order).on(&rank.stream).build().unwrap();
                    let map = ExpertMap::contiguous(case.experts, case.ranks).unwrap();
                    like_the_host(&mut rank, order, map);
                }
            });
        }
    });
}

#[test]
fn sums_of_scattered_experts_are_those_of_the_host() {
    on_fake_driver("slots::calls::sums_of_scattered_experts_are_those_of_the_host", || {
        let case = Case { ranks: 3, experts: 5, top_k: 3, hidden: 16, max_tokens: 6 };
        on_ranks(case.ranks, &options(), |world| {
            let map = ExpertMap::from_slots(5, &[vec![4, 0], vec![1, 3, 4], vec![2, 0]]).unwrap();
            let mut rank = Rank::new(case, world);
            for order in [SumOrder::Rank, SumOrder::Expert] {
                let builder = case.builder(&rank.group).expert_map(map.clone()).sum_order(order);
                rank.ep = builder.on(&rank.stream).build().unwrap();
                like_the_host(&mut rank, order, map.clone());
            }
        });
    });
}

/// Rounds on host and device, compared in every byte that is seen of them.
fn like_the_host(rank: &mut Rank, order: SumOrder, map: ExpertMap) {
    let (case, me) = (rank.case, rank.me() as usize);
    let (shape, row) = (case.shape(), case.bytes(1) as usize);
    let mut host = case.builder(&rank.group).expert_map(map).sum_order(order).build().unwrap();
    for number in 1..=4 {
        // The host refuses weights that are no numbers, and tokens that name an expert twice.
        let mut input = case.input(number, me as u32);
        input.weights = (0..input.weights.len()).map(|i| i as f32 / 8.0 - 1.0).collect();
        for token in input.experts.chunks_exact_mut(case.top_k as usize) {
            for k in 1..token.len() {
                if token[..k].contains(&token[k]) {
                    token[k] = -1;
                }
            }
        }
        let tensors = rank.tensors(&input);
        let (slots, on_device) = dispatch(&mut rank.ep, &tensors).unwrap();
        let received = rank.read(&slots.range().unwrap());

        let x: Vec<half::bf16> = bytemuck::pod_collect_to_vec(&input.x);
        let routing = Routing::new(case.top_k, input.experts.as_slice(), input.weights.as_slice()).unwrap();
        let (rows, handle) = host.dispatch(&x, &routing).unwrap();
        let seen = bytemuck::cast_slice::<_, u8>(rows.rows::<half::bf16>().unwrap());
        let (ids, weights) = (handle.row_experts(), handle.row_weights());
        let per_slot = (case.max_tokens * case.top_k) as usize;
        for (source, slot) in received.chunks_exact(shape.bytes() as usize).enumerate() {
            let rows = &seen[source * case.max_tokens as usize * row..][..case.max_tokens as usize * row];
            assert_eq!(&slot[shape.rows_at() as usize..], rows, "rows of {source} at {me}");
            let choices: Vec<i32> =
                bytemuck::pod_collect_to_vec(&slot[shape.experts_at() as usize..][..per_slot * 4]);
            assert_eq!(choices, ids[source * per_slot..][..per_slot], "choices of {source} at {me}");
            let beside: Vec<f32> =
                bytemuck::pod_collect_to_vec(&slot[shape.weights_at() as usize..][..per_slot * 4]);
            assert_eq!(beside, weights[source * per_slot..][..per_slot], "weights of {source} at {me}");
        }

        let partials = any_partials(rank, number);
        write(rank, on_device.output().unwrap().range().unwrap(), &partials);
        combine(&mut rank.ep, &on_device, &tensors).unwrap();
        let mut y = handle.output().unwrap();
        bytemuck::cast_slice_mut::<_, u8>(y.rows_mut::<half::bf16>().unwrap()).copy_from_slice(&partials);
        let out: Vec<half::bf16> = host.combine(y, &handle).unwrap();
        rank.ep.synchronize().unwrap();
        let out: &[u8] = bytemuck::cast_slice(&out);
        assert_eq!(content(&tensors.out)[..out.len()], *out, "sums at {me}");
    }
}

#[test]
fn between_packed_and_landed_there_is_no_kernel() {
    let test = "slots::calls::between_packed_and_landed_there_is_no_kernel";
    on_fake_driver(test, || {
        let case = CASES[3];
        on_ranks(case.ranks, &options(), |world| {
            let mut rank = Rank::new(case, world);
            let counters = || FakeDriver::loaded().unwrap().counters();
            let whole = |rank: &Rank| rank.group.gather(&[]).unwrap();
            let tensors = rank.tensors(&case.input(1, rank.me()));
            rank.stream.synchronize().unwrap();
            whole(&rank);
            let before = counters();
            whole(&rank);
            let (_, handle) = dispatch(&mut rank.ep, &tensors).unwrap();
            rank.ep.synchronize().unwrap();
            rank.ep.release(Some(&handle)).unwrap();
            rank.ep.synchronize().unwrap();
            whole(&rank);
            let (after, report) = (counters(), handle.report().unwrap());
            let ranks = u64::from(case.ranks);
            let release = 3 * (ranks - 1);
            assert_eq!(
                (report.enqueued.copies, report.enqueued.memory_operations),
                (ranks - 1, 3 * (ranks - 1))
            );
            assert_eq!(after.copies - before.copies, ranks * report.enqueued.copies);
            assert_eq!(after.copy_batches - before.copy_batches, ranks);
            assert_eq!(after.copied_bytes - before.copied_bytes, ranks * report.enqueued.bytes);
            assert_eq!(report.enqueued.bytes, (ranks - 1) * case.shape().bytes());
            let operations = after.memory_operations - before.memory_operations;
            assert_eq!(operations, ranks * (report.enqueued.memory_operations + release));
            assert_eq!(after.copies_by_sms, before.copies_by_sms, "copy engines");
            // One pack and one check of each rank.
            assert_eq!(after.kernels - before.kernels, 2 * ranks);
            assert_eq!((report.same_device, report.enqueued.batches), (0, 1));
            whole(&rank);
        });
    });
}
