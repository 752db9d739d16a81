//! Memory that an allocator over the device heap gives out: tokens in it go as they lie, it is used
//! again behind the stream that freed it, and it outlives its world.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use half::bf16;
use sidelane::Error;
use sidelane::device::{DeviceRange, PinnedMemory, Stream};
use sidelane::ep::{Choices, HeapAllocator, Tensor};
use sidelane::error::{DeviceError, MemoryError, PlanError};
use sidelane::plan::RowLayout;
use sidelane::topology::Route;
use sidelane::{Dtype, Element};

use super::calls::on_each_of;
use super::on_devices;
use super::rank::{Case, Rank};
use crate::devices::{Memory, stream};
use crate::support::layer::bits;
use crate::support::{on_ranks, small, tokens};

#[test]
fn tokens_in_runs_go_as_they_lie() {
    on_devices("enqueued::allocator::tokens_in_runs_go_as_they_lie", 8, 81, || {
        for (nodes, route) in
            [(&[0; 3][..], Route::Direct), (&[0, 1, 2], Route::Direct), (&[0, 0, 1, 1], Route::Pxn)]
        {
            let sequence = Case { route, align: 2, max_in_flight: 3, ..Case::across(nodes, 6, 1) };
            let scattered = Case { top_k: 3, ..sequence.clone() };
            on_each_of::<bf16>(&sequence, |rank, me| {
                for seed in (0..3).map(|round| round * 64 + me) {
                    let input = rank.in_runs(seed, 1 + (seed % 11) as u32);
                    rank.go_from_an_allocation(&input, true);
                }
            });
            on_each_of::<bf16>(&scattered, |rank, me| {
                let input = tokens(me, 9 + me as u32 % 3, 16, 3, 6);
                rank.go_from_an_allocation(&input, false);
            });
        }
    });
}

#[test]
fn device_plans_tokens_elsewhere_beside_an_allocation() {
    let test = "enqueued::allocator::device_plans_tokens_elsewhere_beside_an_allocation";
    on_devices(test, 8, 82, || {
        let case = Case { layout: RowLayout::ExpertMajor, ..Case::new(2, 4, 2) };
        on_each_of::<bf16>(&case, |rank, me| {
            let allocator = rank.planned.heap_allocator().unwrap();
            let _alive = allocator.alloc(256).unwrap();
            rank.round(&tokens(me, 5, 16, 2, 4));
            assert!(rank.reports[0].kernels.contains(&"plan_choices"), "{:?}", rank.reports[0].kernels);
        });
    });
}

/// Whether two ranges have bytes in common.
fn overlap(one: &DeviceRange, other: &DeviceRange) -> bool {
    one.address() < other.address() + other.len() && other.address() < one.address() + one.len()
}

/// Runs something on the only rank of a world.
fn alone(body: impl Fn(&mut Rank<bf16>) + Sync) {
    on_ranks(&[0], &small(), |world| {
        body(&mut Rank::new(&world.all().unwrap(), &Case::new(1, 3, 2)));
    });
}

/// A stream that waits for the word of the pinned memory to become 1.
fn gated(device: u32) -> (Arc<Stream>, PinnedMemory) {
    let stream = stream(device);
    let gate = PinnedMemory::new(stream.context(), 8).unwrap();
    stream.wait(gate.range().word::<u32>(0).unwrap(), 1).unwrap();
    (stream, gate)
}

#[test]
fn freed_memory_is_used_again_behind_its_stream() {
    let test = "enqueued::allocator::freed_memory_is_used_again_behind_its_stream";
    on_devices(test, 8, 83, || {
        alone(|rank| {
            let allocator = rank.planned.heap_allocator().unwrap();
            let first = allocator.alloc(1000).unwrap();
            assert!(first.address().is_multiple_of(512));
            let (user, gate) = gated(0);
            HeapAllocator::free(first.address(), &user).unwrap();
            let beside = allocator.alloc(1000).unwrap();
            gate.word(0).unwrap().store(1, Ordering::Release);
            assert!(!overlap(&first, &beside), "the stream still used it");
            user.synchronize().unwrap();
            let again = allocator.alloc(1000).unwrap();
            assert_eq!(again.address(), first.address(), "no call used it, and the stream is done");
        });
    });
}

#[test]
fn allocation_waits_for_the_stream_that_freed_all_the_rest() {
    let test = "enqueued::allocator::allocation_waits_for_the_stream_that_freed_all_the_rest";
    on_devices(test, 8, 84, || {
        alone(|rank| {
            let allocator = rank.planned.heap_allocator().unwrap();
            let Err(Error::Memory(MemoryError::OutOfSpace { free, .. })) = allocator.alloc(1 << 40) else {
                panic!("as much as no heap has")
            };
            // The pool may begin between two multiples.
            let bytes = free - 512;
            let all = allocator.alloc(bytes).unwrap();
            let (user, gate) = gated(0);
            HeapAllocator::free(all.address(), &user).unwrap();
            let never = allocator.alloc(1 << 40).unwrap_err();
            assert!(never.to_string().contains("raise device_heap"), "not awaited: {never}");
            std::thread::scope(|threads| {
                let waiting = threads.spawn(|| allocator.alloc(bytes).unwrap());
                gate.word(0).unwrap().store(1, Ordering::Release);
                let again = waiting.join().unwrap();
                assert_eq!((again.address(), user.is_done()), (all.address(), Ok(true)));
            });
        });
    });
}

#[test]
fn memory_freed_between_the_halves_of_a_call_is_kept_for_it() {
    let test = "enqueued::allocator::memory_freed_between_the_halves_of_a_call_is_kept_for_it";
    on_devices(test, 8, 85, || {
        on_each_of::<bf16>(&Case { max_in_flight: 3, ..Case::new(3, 6, 1) }, |rank, me| {
            let (allocator, stream) = (rank.planned.heap_allocator().unwrap(), Arc::clone(&rank.stream));
            let input = rank.in_runs(me, 9);
            let expected: Vec<bf16> = {
                let routing = sidelane::gate::Routing::new(1, &input.ids[..], &input.weights[..]).unwrap();
                rank.host.dispatch(&input.x, &routing).unwrap().0.to_vec().unwrap()
            };
            let bytes = bits(&input.x);
            let x = allocator.alloc(bytes.len() as u64).unwrap();
            rank.rows.send(&stream, &x, bytes);
            let [ids, weights] = [bits(&input.ids), bits(&input.weights)].map(|bytes| rank.lent(bytes));
            let choices = Choices::Device { experts: &ids, weights: &weights };
            let started = rank.planned.start_dispatch(Tensor::device(&x, Dtype::Bf16), choices).unwrap();
            HeapAllocator::free(x.address(), &stream).unwrap();
            stream.synchronize().unwrap();
            let other = allocator.alloc(bytes.len() as u64).unwrap();
            assert!(!overlap(&x, &other), "the second half reads it");
            let (rows, _handle) = started.finish().unwrap();
            assert_eq!(bits(&rank.seen::<bf16>(&rows.range().unwrap())), bits(&expected));
        });
    });
}

#[test]
fn refused_allocations_name_the_setting_and_the_mistake() {
    let test = "enqueued::allocator::refused_allocations_name_the_setting_and_the_mistake";
    on_devices(test, 8, 86, || {
        alone(|rank| {
            let stream = Arc::clone(&rank.stream);
            let none_serves = MemoryError::NoAllocator { device: 0 };
            assert_eq!(HeapAllocator::alloc_on(0, 64).unwrap_err(), none_serves.clone().into());
            let allocator = rank.planned.heap_allocator().unwrap();
            let taken = MemoryError::AllocatorTaken { device: 0 };
            assert_eq!(rank.planned.heap_allocator().unwrap_err(), taken.into());
            let on_host = rank.host.heap_allocator().unwrap_err();
            assert!(matches!(on_host, Error::Plan(PlanError::NotAvailable { .. })), "{on_host}");

            assert_eq!((allocator.device(), allocator.refused()), (0, None));
            let full = HeapAllocator::alloc_on(0, u64::MAX).unwrap_err();
            assert!(full.to_string().contains("raise device_heap"), "{full}");
            assert_eq!(allocator.refused(), Some(full));

            let at = HeapAllocator::alloc_on(0, 64).unwrap().address();
            let missing = MemoryError::NotAllocated { address: at + 512 };
            assert_eq!(HeapAllocator::free(at + 512, &stream).unwrap_err(), missing.into());
            let elsewhere = HeapAllocator::free(at, &crate::devices::stream(1)).unwrap_err();
            let of_other =
                matches!(elsewhere, Error::Device(DeviceError::OtherDevice { found: 1, expected: 0, .. }));
            assert!(of_other, "{elsewhere}");
            HeapAllocator::free(at, &stream).unwrap();
            let again = MemoryError::NotAllocated { address: at };
            assert_eq!(HeapAllocator::free(at, &stream).unwrap_err(), again.into());

            drop(allocator);
            assert_eq!(HeapAllocator::alloc_on(0, 64).unwrap_err(), none_serves.into());
            rank.planned.heap_allocator().unwrap();
        });
    });
}

#[test]
fn memory_outlives_its_world_and_is_unmapped_when_freed() {
    let test = "enqueued::allocator::memory_outlives_its_world_and_is_unmapped_when_freed";
    on_devices(test, 8, 87, || {
        let user = stream(0);
        let named = |at| {
            // SAFETY: `at` is not freed before the stream was synchronized.
            unsafe { DeviceRange::from_raw(user.context(), "memory", at, 64) }
        };
        let at = on_ranks(&[0], &small(), |world| {
            let rank = Rank::<bf16>::new(&world.all().unwrap(), &Case::new(1, 3, 2));
            let allocator = rank.planned.heap_allocator().unwrap();
            allocator.alloc(64).unwrap().address()
        })[0];
        let (memory, values) = (Memory::new(user.context(), 64), [bf16::ONE; 32]);
        memory.send(&user, &named(at).unwrap(), bits(&values));
        assert_eq!(memory.read::<bf16>(&user, &named(at).unwrap()), values);
        assert_eq!(bf16::DTYPE.size() * values.len(), 64);

        HeapAllocator::free(at, &user).unwrap();
        assert!(named(at).is_err(), "nothing else keeps it");
    });
}
