//! Allocations, reservations, what is mapped, and when it goes.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use sidelane::device::{Allocation, PinnedMemory, Reservation};
use sidelane::error::DeviceError;

use super::{context, fill, pattern, read, stream};

#[test]
fn imported_memory_is_the_memory_that_was_exported() {
    let (one, other) = (context(0), context(1));
    let theirs = Allocation::new(&other, 100_000).unwrap();
    let granularity = Allocation::granularity(&other).unwrap();
    assert_eq!(theirs.bytes(), 100_000_u64.next_multiple_of(granularity));
    let descriptor = theirs.export().unwrap();
    let ours = Allocation::import(&one, descriptor.as_fd(), theirs.bytes()).unwrap();

    let stride = theirs.bytes() + granularity;
    let reservation = Reservation::new(&one, 3, stride).unwrap();
    let (mine, peer) = (Allocation::new(&one, 4096).unwrap(), 2);
    let own = reservation.map(0, &mine, &[0]).unwrap();
    let far = reservation.map(peer, &ours, &[0]).unwrap();
    assert_eq!(own.address(), reservation.address(0).unwrap());
    assert_eq!(far.address(), reservation.address(0).unwrap() + 2 * stride, "base + member * stride");
    assert_eq!(far.len(), theirs.bytes());

    let mapped = Reservation::new(&other, 1, stride).unwrap().map(0, &theirs, &[1]).unwrap();
    let bytes = pattern(100_000, 1);
    fill(&stream(&one), &far.part(0, 100_000).unwrap(), &bytes);
    assert_eq!(read(&stream(&other), &mapped.part(0, 100_000).unwrap()), bytes);
}

#[test]
fn a_place_is_taken_once_and_free_again_when_nobody_needs_it() {
    let context = context(0);
    let allocation = Allocation::new(&context, 1).unwrap();
    let reservation = Reservation::new(&context, 2, allocation.bytes()).unwrap();
    let range = reservation.map(1, &allocation, &[0]).unwrap();
    let again = || reservation.map(1, &allocation, &[0]).map(|range| range.address());
    assert_eq!(again(), Err(DeviceError::Taken { member: 1 }));
    let part = range.part(8, 8).unwrap();
    drop(range);
    assert_eq!(again(), Err(DeviceError::Taken { member: 1 }), "a part is a claim too");
    drop(part);
    assert_eq!(again(), reservation.address(1));
    let none = DeviceError::NoSuchMember { member: 2, members: 2 };
    assert_eq!(reservation.address(2), Err(none.clone()));
    assert_eq!(reservation.map(2, &allocation, &[0]).map(|_| ()), Err(none));
}

#[test]
fn memory_grows_behind_what_is_mapped() {
    let context = context(0);
    let granularity = Allocation::granularity(&context).unwrap();
    let reservation = Reservation::new(&context, 2, 3 * granularity).unwrap();
    let first = Allocation::new(&context, 1).unwrap();
    let member = reservation.map_growing(1, &first, &[0], 1000).unwrap();
    let (range, next) = (member.range().clone(), Allocation::new(&context, granularity).unwrap());
    let bytes = pattern(1000, 3);
    fill(&stream(&context), &range.part(0, 1000).unwrap(), &bytes);
    assert_eq!((range.address(), range.len()), (reservation.address(1).unwrap(), 1000));

    // Mapped and given up, as where another rank is refused.
    drop(member.map_behind(&next).unwrap());
    let refused = DeviceError::OutOfRange { offset: 900, len: 200, size: 1000 };
    assert_eq!(range.part(900, 200).map(|_| ()), Err(refused), "it is not in the range");
    member.map_behind(&next).unwrap().keep();
    member.lengthen(2 * granularity);
    assert_eq!((range.address(), range.len()), (reservation.address(1).unwrap(), 2 * granularity));
    // A copy over the border of the pieces; what was there stays.
    let border = range.part(granularity - 500, 1000).unwrap();
    fill(&stream(&context), &border, &pattern(1000, 5));
    assert_eq!(read(&stream(&context), &border), pattern(1000, 5));
    assert_eq!(read(&stream(&context), &range.part(0, 1000).unwrap()), bytes);

    let beyond = Allocation::new(&context, granularity + 1).unwrap();
    let refused =
        DeviceError::OutOfRange { offset: 2 * granularity, len: 2 * granularity, size: 3 * granularity };
    assert_eq!(member.map_behind(&beyond).map(|_| ()), Err(refused));
    drop((member, border));
    let again = || reservation.map(1, &first, &[0]).map(|_| ());
    assert_eq!(again(), Err(DeviceError::Taken { member: 1 }), "the range is a claim on all pieces");
    drop(range);
    assert_eq!(again(), Ok(()));
}

#[test]
fn memory_stays_mapped_while_a_stream_needs_it() {
    let context = context(0);
    let allocation = Allocation::new(&context, 64).unwrap();
    let reservation = Reservation::new(&context, 1, allocation.bytes()).unwrap();
    let words = PinnedMemory::new(&context, 64).unwrap();
    words.write(8, &pattern(8, 4)).unwrap();
    let stream = stream(&context);
    let range = reservation.map(0, &allocation, &[0]).unwrap();
    stream.wait::<u64>(words.range().word(0).unwrap(), 1).unwrap();
    stream.copy(range.span(0, 8).unwrap(), words.range().span(8, 8).unwrap()).unwrap();
    stream.copy(words.range().span(16, 8).unwrap(), range.span(0, 8).unwrap()).unwrap();
    drop(range);
    let again = || reservation.map(0, &allocation, &[0]).map(|_| ());
    assert_eq!(again(), Err(DeviceError::Taken { member: 0 }));
    words.word(0).unwrap().store(1, Ordering::Release);
    stream.synchronize().unwrap();
    let mut landed = [0; 8];
    words.read(16, &mut landed).unwrap();
    assert_eq!(landed[..], pattern(8, 4));
    assert_eq!(again(), Ok(()), "the stream was seen to be done");
}

#[test]
fn device_memory_of_unfit_size_is_refused() {
    let context = context(0);
    let granularity = Allocation::granularity(&context).unwrap();
    let seen = Reservation::new(&context, 2, granularity + 4096).map(|_| ());
    let value = granularity + 4096;
    assert_eq!(seen, Err(DeviceError::Misaligned { what: "a stride of", value, align: granularity }));
    let large = Allocation::new(&context, granularity + 1).unwrap();
    let narrow = Reservation::new(&context, 1, granularity).unwrap();
    let refused = DeviceError::OutOfRange { offset: 0, len: 2 * granularity, size: granularity };
    assert_eq!(narrow.map(0, &large, &[0]).map(|_| ()), Err(refused));
    for bytes in [1 << 50, u64::MAX] {
        let Err(error) = Allocation::new(&context, bytes) else { panic!("{bytes} bytes") };
        let DeviceError::OutOfMemory { device: 0, call: "cuMemCreate", bytes: said } = error else {
            panic!("{error:?}")
        };
        assert_eq!(said, bytes, "already a multiple, or never one");
    }
}

#[test]
fn a_device_without_dma_bufs_says_so() {
    let context = context(0);
    let range = super::copies::memory(&context, 4096, &[0]);
    let Err(DeviceError::Unsupported { device: 0, feature }) = range.dma_buf(&context) else {
        panic!("the fake driver has no dma-bufs")
    };
    assert!(feature.contains("dma-buf"), "{feature}");
}
