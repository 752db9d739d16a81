//! Memory: poison, mapping, access, limits.

use std::os::fd::RawFd;
use std::ptr;

use sys::CUmemAccess_flags::{
    CU_MEM_ACCESS_FLAGS_PROT_NONE as NONE, CU_MEM_ACCESS_FLAGS_PROT_READ as READ,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE as WRITE,
};
use sys::CUmemAllocationHandleType as HandleType;

use crate::common::*;
use crate::{cu, ok};

fn created(device: i32, bytes: usize, exportable: bool) -> u64 {
    made(|out| ok!(cuMemCreate(out, bytes, &properties(device, exportable), 0)))
}

#[test]
fn fresh_memory_is_poisoned() {
    apart("memory::fresh_memory_is_poisoned", &plainly(), || {
        start(0);
        let mapped = map_for(created(0, GRANULARITY, true), GRANULARITY, 0);
        assert!(read_words(mapped, GRANULARITY / 4).iter().all(|&word| word == POISON));
        assert!(read_words(device_words(999), 999).iter().all(|&word| word == POISON));
    });
}

/// Does something in a fresh context of device 0, which the last thing ended.
fn afresh<T>(f: impl FnOnce() -> T) -> T {
    use_device(0);
    let result = f();
    ok!(cuDevicePrimaryCtxRelease_v2(0));
    result
}

/// The work is taken, its failure is found later, and then never goes away.
fn faults(enqueue: impl FnOnce(sys::CUstream)) {
    let illegal = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    let (faulty, other) = (stream(), stream());
    enqueue(faulty);
    assert_eq!(cu!(cuStreamSynchronize(faulty)), illegal);
    assert_eq!(cu!(cuStreamQuery(other)), illegal, "in another stream");
    assert_eq!(cu!(cuMemAlloc_v2(&mut 0, 4)), illegal, "in a call without a stream");
    assert_eq!(cu!(cuCtxSynchronize()), illegal, "again");
}

#[test]
fn memory_that_is_not_mapped_or_not_granted_faults() {
    apart("memory::memory_that_is_not_mapped_or_not_granted_faults", &seeds(2), || {
        ok!(cuInit(0));
        let bytes = 2 * GRANULARITY;
        let reserved = made(|out| ok!(cuMemAddressReserve(out, 2 * bytes, 0, 0, 0)));
        let handle = created(0, bytes, false);
        ok!(cuMemMap(reserved, bytes, 0, handle, 0));
        let (host, _) = afresh(|| host_words(1));
        let to = |at: u64| move |stream| ok!(cuMemcpyHtoDAsync_v2(at, host as *const _, 4, stream));
        let from = |at: u64| move |stream| ok!(cuMemcpyDtoHAsync_v2(host as *mut _, at, 4, stream));
        let end = reserved + bytes as u64;

        afresh(|| faults(to(reserved)));
        grant(reserved, bytes, 0, READ);
        afresh(|| faults(to(reserved)));
        grant(reserved, bytes, 1, WRITE);
        afresh(|| faults(to(reserved)));
        grant(reserved, bytes, 0, WRITE);
        afresh(|| faults(to(end)));
        afresh(|| faults(from(end - 3)));
        afresh(|| faults(|stream| ok!(cuStreamWriteValue32_v2(stream, end, 1, 0))));
        afresh(|| faults(|stream| ok!(cuMemsetD8Async(end - 1, 0, 2, stream))));
        afresh(|| {
            let stream = stream();
            to(end - 4)(stream);
            from(end - 4)(stream);
            ok!(cuStreamSynchronize(stream));
        });
        grant(reserved, bytes, 0, NONE);
        afresh(|| faults(from(reserved)));
        grant(reserved, bytes, 0, WRITE);
        // Taken away while work for it is enqueued: the wait holds the copy back until then.
        afresh(|| {
            let (word, value) = host_words(1);
            faults(|stream| {
                ok!(cuStreamWaitValue32_v2(stream, word, 1, 0));
                from(reserved)(stream);
                ok!(cuMemUnmap(reserved, bytes));
                value[0] = 1;
            });
        });
    });
}

#[test]
fn memory_is_refused_once_where_a_test_asks_for_it() {
    apart("memory::memory_is_refused_once_where_a_test_asks_for_it", &plainly(), || {
        let (full, fake_driver) = (CUresult::CUDA_ERROR_OUT_OF_MEMORY, start(0));
        let reserved = made(|out| ok!(cuMemAddressReserve(out, GRANULARITY, 0, 0, 0)));
        fake_driver.refuse_memory(1, 0);
        let handle = created(0, GRANULARITY, true);
        assert_eq!(cu!(cuMemCreate(&mut 0, GRANULARITY, &properties(1, true), 0)), full);
        created(1, GRANULARITY, true);
        fake_driver.refuse_memory(0, 1);
        assert_eq!(cu!(cuMemMap(reserved, GRANULARITY, 0, handle, 0)), full);
        ok!(cuMemMap(reserved, GRANULARITY, 0, handle, 0));
        fake_driver.refuse_memory(0, 2);
        let wish = sys::CUmemAccessDesc { location: location(0), flags: WRITE };
        assert_eq!(cu!(cuMemSetAccess(reserved, GRANULARITY, &wish, 1)), full);
        ok!(cuMemSetAccess(reserved, GRANULARITY, &wish, 1));
        assert_eq!(fake_driver.counters().mappings, 2, "what was refused does not count");
    });
}

#[test]
fn plain_memory_ends_at_its_last_byte() {
    apart("memory::plain_memory_ends_at_its_last_byte", &plainly(), || {
        ok!(cuInit(0));
        afresh(|| {
            let ten = made(|out| ok!(cuMemAlloc_v2(out, 10)));
            faults(|stream| ok!(cuMemsetD8Async(ten, 1, 11, stream)));
        });
    });
}

#[test]
fn memory_of_another_device_needs_peer_access() {
    apart("memory::memory_of_another_device_needs_peer_access", &plainly(), || {
        ok!(cuInit(0));
        let one = use_device(1);
        let theirs = device_words(1);
        afresh(|| faults(|stream| ok!(cuMemsetD8Async(theirs, 1, 4, stream))));
        afresh(|| {
            ok!(cuCtxEnablePeerAccess(one, 0));
            fill_words(theirs, 7, 1);
            assert_eq!(read_words(theirs, 1), [7]);
        });
    });
}

#[test]
fn devices_that_do_not_reach_each_other_are_refused() {
    let islands = vec![("SIDELANE_FAKE_CUDA_PEERS", "0,1|2,3".to_owned())];
    apart("memory::devices_that_do_not_reach_each_other_are_refused", &[islands], || {
        start(0);
        let reaches = |a, b| made(|out| ok!(cuDeviceCanAccessPeer(out, a, b)));
        assert_eq!((reaches(0, 1), reaches(2, 3), reaches(1, 2), reaches(0, 0)), (1, 1, 0, 0));
        let two = use_device(2);
        use_device(0);
        assert_eq!(cu!(cuCtxEnablePeerAccess(two, 0)), CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
        let at = map_for(created(0, GRANULARITY, true), GRANULARITY, 1);
        let wish = sys::CUmemAccessDesc { location: location(2), flags: WRITE };
        assert_eq!(cu!(cuMemSetAccess(at, GRANULARITY, &wish, 1)), CUresult::CUDA_ERROR_INVALID_DEVICE);
    });
}

#[test]
fn mapping_is_refused_where_it_makes_no_sense() {
    apart("memory::mapping_is_refused_where_it_makes_no_sense", &plainly(), || {
        start(0);
        let refused = CUresult::CUDA_ERROR_INVALID_VALUE;
        let crooked = cu!(cuMemCreate(&mut 0, GRANULARITY + 4096, &properties(0, true), 0));
        assert_eq!(crooked, refused, "a size between granules");
        let bytes = 2 * GRANULARITY;
        let handle = created(0, bytes, false);
        let at = map_for(handle, bytes, 0);
        assert_eq!(cu!(cuMemMap(at, bytes, 0, handle, 0)), CUresult::CUDA_ERROR_ALREADY_MAPPED);
        assert_eq!(cu!(cuMemMap(at + bytes as u64, bytes, 0, handle, 0)), refused, "beyond the reservation");
        assert_eq!(cu!(cuMemUnmap(at, GRANULARITY)), refused, "half of a mapping");
        assert_eq!(cu!(cuMemAddressFree(at, bytes)), refused, "while something is mapped");
        let mut descriptor: RawFd = -1;
        let kind = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let export = cu!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, kind, 0));
        assert_eq!(export, refused, "made without a handle type");
        assert_eq!(
            cu!(cuMemImportFromShareableHandle(&mut 0, ptr::null_mut(), kind)),
            refused,
            "no export of ours"
        );
        ok!(cuMemRelease(handle));
        assert_eq!(cu!(cuMemRelease(handle)), refused, "twice");
        assert_eq!(read_words(at, 1), [POISON], "what is mapped outlives its handle");
        ok!(cuMemUnmap(at, bytes));
        ok!(cuMemAddressFree(at, bytes));
    });
}

#[test]
fn a_device_runs_out_of_memory() {
    let small = vec![("SIDELANE_FAKE_CUDA_MEMORY", (2 * GRANULARITY).to_string())];
    apart("memory::a_device_runs_out_of_memory", &[small], || {
        start(0);
        let first = created(0, GRANULARITY, true);
        created(0, GRANULARITY, true);
        let full = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        assert_eq!(cu!(cuMemCreate(&mut 0, GRANULARITY, &properties(0, true), 0)), full);
        assert_eq!(cu!(cuMemAlloc_v2(&mut 0, 1)), full);
        created(1, GRANULARITY, true);
        ok!(cuMemRelease(first));
        created(0, GRANULARITY, true);
    });
}

#[test]
fn host_memory_takes_part_once_it_is_registered() {
    apart("memory::host_memory_takes_part_once_it_is_registered", &plainly(), || {
        ok!(cuInit(0));
        let mut page = vec![5u32; 1024];
        let host = page.as_mut_ptr() as u64;
        afresh(|| {
            let to = device_words(1);
            faults(|stream| assert_eq!(batch(&[(to, host, 4)], BESIDE, stream), CUresult::CUDA_SUCCESS));
        });
        afresh(|| faults(|stream| ok!(cuStreamWriteValue32_v2(stream, host, 1, 0))));
        afresh(|| {
            ok!(cuMemHostRegister_v2(host as *mut _, 4096, 0));
            let again = cu!(cuMemHostRegister_v2((host + 8) as *mut _, 8, 0));
            assert_eq!(again, CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
            assert_eq!(made(|out| ok!(cuMemHostGetDevicePointer_v2(out, host as *mut _, 0))), host);
            let to = device_words(1);
            let stream = stream();
            assert_eq!(batch(&[(to, host, 4)], BESIDE, stream), CUresult::CUDA_SUCCESS);
            ok!(cuStreamWriteValue32_v2(stream, host + 4, 9, 0));
            ok!(cuStreamSynchronize(stream));
            assert_eq!(read_words(to, 1), [5]);
            ok!(cuMemHostUnregister(host as *mut _));
            let twice = cu!(cuMemHostUnregister(host as *mut _));
            assert_eq!(twice, CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
        });
        assert_eq!(page[1], 9);
        let nowhere = afresh(|| cu!(cuMemHostRegister_v2(0x1000 as *mut _, 8, 0)));
        assert_eq!(nowhere, CUresult::CUDA_ERROR_INVALID_VALUE);
        let copy = afresh(|| cu!(cuMemcpyHtoDAsync_v2(device_words(1), 0x1000 as *const _, 4, stream())));
        assert_eq!(copy, CUresult::CUDA_ERROR_INVALID_VALUE);
    });
}

#[test]
fn pageable_memory_is_done_with_when_the_call_returns() {
    apart("memory::pageable_memory_is_done_with_when_the_call_returns", &seeds(2), || {
        start(0);
        let (to, stream) = (device_words(1), stream());
        for round in 1..50u32 {
            let mut word = round;
            ok!(cuMemcpyHtoDAsync_v2(to, (&raw const word).cast(), 4, stream));
            word = 0;
            ok!(cuMemcpyDtoHAsync_v2((&raw mut word).cast(), to, 4, stream));
            assert_eq!(word, round);
        }
    });
}
