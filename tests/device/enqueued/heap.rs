//! The device heap by default: the calls that it has memory for, and the error where it has none.

use std::sync::Arc;

use half::bf16;
use sidelane::device::{Allocation, DeviceRange, Stream};
use sidelane::dtype::PartialDtype;
use sidelane::ep::{Choices, ExpertParallelBuilder, Tensor};
use sidelane::error::MemoryError;
use sidelane::plan::{RowLayout, SumOrder};
use sidelane::topology::Route;
use sidelane::{Dtype, Error, ExpertParallel, Group, World};

use super::rank::{Case, Input, Rank, target};
use super::{on_devices, on_settings};
use crate::devices::{Memory, stream};
use crate::support::{on_ranks, small, tokens};

/// Rows of 1 MiB: a dispatch of 16 tokens with 8 choices brings 128 MiB, and outputs take as much.
const HIDDEN: usize = 1 << 19;

#[test]
fn first_calls_of_one_rank_fit_however_long_its_rows_are() {
    on_devices("enqueued::heap::first_calls_of_one_rank_fit_however_long_its_rows_are", 8, 61, || {
        on_ranks(&[0], &small(), |world| {
            let (group, stream, (count, k)) = (world.all().unwrap(), stream(0), (16, 8));
            let builder = ExpertParallel::builder(&group).experts(8).top_k(k).hidden(HIDDEN);
            let builder = builder.dtype(Dtype::Bf16).max_tokens(count).max_in_flight(2).on(&stream);
            let mut ep = builder.build().unwrap();

            let bytes = u64::from(count) * HIDDEN as u64 * 2;
            let memory = Memory::new(stream.context(), bytes);
            let value = |at: usize| bf16::from_f32((at % 251) as f32 - 100.0);
            let x: Vec<bf16> = (0..count as usize * HIDDEN).map(value).collect();
            let x: DeviceRange = memory.fill(&stream, &x);
            let small = [(); 2].map(|()| Memory::new(stream.context(), 4 * u64::from(count * k)));
            let experts = small[0].fill(&stream, &(0..8).collect::<Vec<i32>>().repeat(count as usize));
            let weights = small[1].fill(&stream, &vec![1.0_f32; (count * k) as usize]);
            let choices = || Choices::Device { experts: &experts, weights: &weights };

            // Twice: the second finds what the first gave back.
            for round in 0..2 {
                let (rows, handle) = ep.dispatch(Tensor::device(&x, Dtype::Bf16), choices()).unwrap();
                let y = handle.output().unwrap();
                let (to, from) = (y.range().unwrap(), rows.range().unwrap());
                stream.copy(to.span(0, 8 * bytes).unwrap(), from.span(0, 8 * bytes).unwrap()).unwrap();
                let sums = Memory::new(stream.context(), bytes);
                let out = sums.part(bytes);
                ep.combine_into(y, &handle, target::<bf16>(&out)).unwrap();
                let sums = sums.read::<bf16>(&stream, &out);
                let wrong =
                    sums.iter().enumerate().find(|&(at, sum)| sum.to_f32() != 8.0 * value(at).to_f32());
                assert_eq!(wrong, None, "round {round}");
            }
        });
    });
}

#[test]
fn any_routing_and_all_handles_of_a_small_instance_fit() {
    on_devices("enqueued::heap::any_routing_and_all_handles_of_a_small_instance_fit", 8, 62, || {
        let case = Case { max_in_flight: 6, ..Case::new(4, 8, 2) };
        on_ranks(&case.nodes, &small(), |world: World| {
            let (group, me) = (world.all().unwrap(), u64::from(world.rank()));
            let mut rank = Rank::<bf16>::by_default(&group, &case);
            // All tokens of all ranks choose experts of one rank.
            let to = |rank: i32, salt: u64| Input {
                ids: [2 * rank, 2 * rank + 1].repeat(12),
                ..tokens(10 * salt + me, 12, 16, 2, 8)
            };
            rank.all_in_flight(&(0..6).map(|nth| to(nth % 4, nth as u64)).collect::<Vec<_>>());
            rank.round(&to(3, 7));
        });
    });
}

/// Bytes of a device that has memory for one instance of [`large`] settings.
const MEMORY: &str = "50331648";

/// Settings whose default takes 26 MiB, and the rest of an instance 6: rows are of 128 KiB.
fn large<'g>(group: &'g Group, stream: &Arc<Stream>) -> ExpertParallelBuilder<'g> {
    Case { hidden: 1 << 16, ..Case::new(2, 4, 2) }.settings::<bf16>(group).max_in_flight(1).on(stream)
}

#[test]
fn default_without_room_on_one_device_is_refused_on_all_ranks() {
    let test = "enqueued::heap::default_without_room_on_one_device_is_refused_on_all_ranks";
    on_settings(test, &[&[("SIDELANE_FAKE_CUDA_MEMORY", MEMORY)]], (8, 63), &|| {
        on_ranks(&[0, 0], &small(), |world| {
            let (group, stream) = (world.all().unwrap(), stream(world.rank()));
            let full = (world.rank() == 1).then(|| Allocation::new(stream.context(), 44 << 20).unwrap());
            let before = stream.context().free_memory().unwrap();
            let refused = large(&group, &stream).build().map(drop).unwrap_err();
            let Error::Memory(MemoryError::DeviceFull { rank: 1, needed, free }) = refused else {
                panic!("rank {}: {refused}", world.rank())
            };
            assert!(free <= 4 << 20 && needed > 20 << 20, "{refused}");
            assert!(refused.to_string().contains("lower device_heap"), "{refused}");
            assert_eq!(stream.context().free_memory().unwrap(), before, "no memory was taken");
            drop(full);
            group.gather(&[]).unwrap();
            large(&group, &stream).build().unwrap();
        });
    });
}

#[test]
fn ranks_of_one_device_are_refused_what_they_need_together() {
    let test = "enqueued::heap::ranks_of_one_device_are_refused_what_they_need_together";
    on_settings(test, &[&[("SIDELANE_FAKE_CUDA_MEMORY", MEMORY)]], (8, 64), &|| {
        on_ranks(&[0, 0], &small(), |world| {
            let (group, stream) = (world.all().unwrap(), stream(0));
            let refused = large(&group, &stream).build().map(drop).unwrap_err();
            let Error::Memory(MemoryError::DeviceFull { rank: 0, needed, free }) = refused else {
                panic!("rank {}: {refused}", world.rank())
            };
            assert!(needed > free && needed / 2 < free, "{refused}");
            // A smaller one fits twice.
            large(&group, &stream).device_heap(8 << 20).build().unwrap();
        });
    });
}

/// A device allocates whole granules, which may not fit where the bytes do.
#[test]
fn heap_that_fits_in_bytes_alone_is_refused_on_all_ranks() {
    let test = "enqueued::heap::heap_that_fits_in_bytes_alone_is_refused_on_all_ranks";
    // Of this seed, granules have 2 MiB.
    on_settings(test, &[&[("SIDELANE_FAKE_CUDA_MEMORY", "52428800")]], (8, 67), &|| {
        on_ranks(&[0, 0], &small(), |world| {
            let (group, stream) = (world.all().unwrap(), stream(0));
            assert_eq!(Allocation::granularity(stream.context()), Ok(2 << 20));
            let case = Case::new(2, 4, 2);
            let heap = |bytes| case.settings::<bf16>(&group).on(&stream).device_heap(bytes);
            // With the rest of an instance, less than half of the memory.
            let refused = heap(24 << 20).build().map(drop).unwrap_err();
            let full = MemoryError::DeviceFull { rank: 0, needed: 2 * (26 << 20), free: 50 << 20 };
            assert_eq!(refused, full.into());
            heap(22 << 20).build().unwrap();
        });
    });
}

/// 12 bytes for each choice, 4 for each row that may land, and 32 for each expert, in multiples of
/// 256.
#[test]
fn report_says_how_much_memory_each_handle_takes() {
    on_devices("enqueued::heap::report_says_how_much_memory_each_handle_takes", 8, 66, || {
        let of = |nodes| Case { max_tokens: 64, ..Case::across(nodes, 64, 4) };
        let (choices, experts) = (64 * 4, 32 * 64);
        let plain = || of(&[0, 0]);
        let rounded = |case| Case { wire: PartialDtype::Bf16, ..case };
        let by_node = |nodes| rounded(Case { order: SumOrder::Node, route: Route::Pxn, ..of(nodes) });
        for (case, bytes) in [
            (plain(), 12 * choices + 4 * 512 + experts),
            (Case { weighted: true, ..plain() }, 16 * choices + 4 * 512 + experts),
            (plain().dropping(128), 12 * choices + 4 * 128 + experts),
            // One run of own rows, in place of one for each expert.
            (
                Case { layout: RowLayout::RankMajor, ..plain() },
                12 * choices + 16 * 4 * 128 + experts / 2 + 256,
            ),
            (Case { order: SumOrder::Rank, ..plain() }, 12 * choices + 4 * 512 + experts),
            (rounded(Case { order: SumOrder::Rank, ..plain() }), 16 * choices + 16 * 512 + experts),
            (by_node(&[0, 0, 1, 1]), 16 * choices + 4 * 1024 + experts),
        ] {
            on_ranks(&case.nodes, &small(), |world| {
                let (group, me) = (world.all().unwrap(), u64::from(world.rank()));
                let mut rank = Rank::<bf16>::by_default(&group, &case);
                let (_, handle) = rank.dispatch(&tokens(me, 12, 16, 4, 64)).unwrap();
                assert_eq!(handle.report().unwrap().handle_bytes, bytes, "{case:?}");
            });
        }
    });
}

#[test]
fn heap_that_is_too_small_says_what_to_raise() {
    on_devices("enqueued::heap::heap_that_is_too_small_says_what_to_raise", 8, 65, || {
        on_ranks(&[0, 0], &small(), |world| {
            let group = world.all().unwrap();
            let case = Case::new(2, 4, 2);
            let mut rank = Rank::<bf16>::with(&group, &case, |builder| builder.device_heap(256));
            let input = tokens(world.rank().into(), 12, 16, 2, 4);
            let refused = rank.dispatch(&input).map(drop).unwrap_err();
            assert!(
                matches!(refused, Error::Memory(MemoryError::OutOfSpace { total: 256, .. })),
                "{refused}"
            );
            assert!(refused.to_string().ends_with("of the device heap is 256 of 256: raise device_heap"));
        });
    });
}
