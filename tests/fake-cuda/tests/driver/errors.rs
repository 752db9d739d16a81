//! Errors that the call itself returns.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::common::*;
use crate::{cu, ok};

#[test]
fn without_initialisation_or_context_calls_say_so() {
    apart("errors::without_initialisation_or_context_calls_say_so", &plainly(), || {
        assert_eq!(cu!(cuDeviceGetCount(&mut 0)), CUresult::CUDA_ERROR_NOT_INITIALIZED);
        ok!(cuInit(0));
        assert_eq!(made(|out| ok!(cuDeviceGetCount(out))), 8);
        assert_eq!(cu!(cuMemAlloc_v2(&mut 0, 4)), CUresult::CUDA_ERROR_INVALID_CONTEXT);
        assert_eq!(cu!(cuDeviceGet(&mut 0, 8)), CUresult::CUDA_ERROR_INVALID_DEVICE);
    });
}

#[test]
fn without_devices_the_driver_says_so() {
    let none = vec![("SIDELANE_FAKE_CUDA_DEVICES", "0".to_owned())];
    apart("errors::without_devices_the_driver_says_so", &[none], || {
        assert_eq!(cu!(cuInit(0)), CUresult::CUDA_ERROR_NO_DEVICE);
    });
}

#[test]
fn a_stream_or_event_of_another_device_is_refused() {
    apart("errors::a_stream_or_event_of_another_device_is_refused", &plainly(), || {
        start(1);
        let theirs = stream();
        let their_event = event();
        use_device(0);
        let (word, _) = host_words(1);
        let refused = CUresult::CUDA_ERROR_INVALID_HANDLE;
        assert_eq!(cu!(cuStreamWriteValue32_v2(theirs, word, 1, 0)), refused);
        assert_eq!(cu!(cuMemcpyAsync(word, word, 4, theirs)), refused);
        assert_eq!(batch(&[(word, word, 4)], BESIDE, theirs), refused);
        assert_eq!(cu!(cuEventRecord(their_event, stream())), refused);
        let gone = stream();
        ok!(cuStreamDestroy_v2(gone));
        assert_eq!(cu!(cuStreamQuery(gone)), refused);
    });
}

static ANSWER: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn calls_the_driver(_: *mut c_void) {
    ANSWER.store(cu!(cuInit(0)) as u32, Ordering::Relaxed);
}

#[test]
fn a_host_function_may_not_call_the_driver() {
    apart("errors::a_host_function_may_not_call_the_driver", &plainly(), || {
        let fake_driver = start(0);
        let stream = stream();
        ok!(cuLaunchHostFunc(stream, Some(calls_the_driver), std::ptr::null_mut()));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(ANSWER.load(Ordering::Relaxed), CUresult::CUDA_ERROR_NOT_PERMITTED as u32);
        assert_eq!((fake_driver.counters().host_functions, fake_driver.counters().host_waits), (1, 1));
    });
}

#[test]
fn codes_have_the_drivers_names() {
    apart("errors::codes_have_the_drivers_names", &plainly(), || {
        let name = |code| {
            let text = made(|out| ok!(cuGetErrorName(code, out)));
            // SAFETY: the driver's texts stay.
            unsafe { std::ffi::CStr::from_ptr(text) }.to_str().unwrap()
        };
        assert_eq!(name(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS), "CUDA_ERROR_ILLEGAL_ADDRESS");
        assert_eq!(name(CUresult::CUDA_SUCCESS), "CUDA_SUCCESS");
    });
}

#[test]
fn what_the_fake_driver_does_not_do_is_not_supported() {
    apart("errors::what_the_fake_driver_does_not_do_is_not_supported", &plainly(), || {
        start(0);
        let at = device_words(1);
        let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        let mut descriptor = -1;
        let dma_buf = cu!(cuMemGetHandleForAddressRange((&raw mut descriptor).cast(), at, 4096, kind, 0));
        assert_eq!(dma_buf, CUresult::CUDA_ERROR_NOT_SUPPORTED);
        assert_eq!(cu!(cuIpcGetMemHandle(std::ptr::null_mut(), at)), CUresult::CUDA_ERROR_NOT_SUPPORTED);
    });
}
