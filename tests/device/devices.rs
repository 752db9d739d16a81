//! Devices of the fake driver, their streams, and their memory.
#![allow(dead_code, reason = "each test program uses a part of this")]

use std::ffi::c_void;
use std::sync::Arc;

use sidelane::device::{
    Allocation, Context, DeviceRange, Driver, PinnedMemory, Priority, Reservation, Stream,
};

/// The context of a device.
pub fn context(device: u32) -> Arc<Context> {
    let library = fake_cuda::install().unwrap().join("libcuda.so.1");
    let driver = Driver::load(Some(&library)).unwrap();
    assert!(driver.is_fake(), "tests run without a GPU");
    driver.context(device).unwrap()
}

/// A stream of a device.
pub fn stream(device: u32) -> Arc<Stream> {
    Arc::new(Stream::new(&context(device), Priority::Normal).unwrap())
}

/// Ends the context of a stream, as work does that reads memory which is not there.
#[expect(unsafe_code, reason = "the library refuses such work: the driver is called")]
pub fn break_device(stream: &Stream) {
    type Retain = unsafe extern "C" fn(*mut *mut c_void, i32) -> u32;
    type Set = unsafe extern "C" fn(*mut c_void) -> u32;
    type Release = unsafe extern "C" fn(i32) -> u32;
    type Copy = unsafe extern "C" fn(u64, u64, usize, *mut c_void) -> u32;
    let (context, device) = (stream.context(), stream.device() as i32);
    let nothing = Reservation::new(context, 1, Allocation::granularity(context).unwrap()).unwrap();
    let to = PinnedMemory::new(context, 8).unwrap();
    let library = fake_cuda::install().unwrap().join("libcuda.so.1");
    // SAFETY: the driver's library, which is loaded already.
    let driver = unsafe { libloading::Library::new(library) }.unwrap();
    // SAFETY: functions of the driver with these types.
    let (retain, set, release, copy) = unsafe {
        (
            driver.get::<Retain>("cuDevicePrimaryCtxRetain").unwrap(),
            driver.get::<Set>("cuCtxSetCurrent").unwrap(),
            driver.get::<Release>("cuDevicePrimaryCtxRelease_v2").unwrap(),
            driver.get::<Copy>("cuMemcpyAsync").unwrap(),
        )
    };
    let mut current = std::ptr::null_mut();
    // SAFETY: fills the handle, which is current until the context is released. The copy is between
    // memory that is there and memory that is only reserved: the driver refuses it when it runs.
    unsafe {
        assert_eq!(retain(&raw mut current, device), 0);
        assert_eq!(set(current), 0);
        assert_eq!(copy(to.range().address(), nothing.address(0).unwrap(), 8, stream.handle()), 0);
        stream.synchronize().unwrap_err();
        set(std::ptr::null_mut());
        release(device);
    }
}

/// Bytes of a device, with pinned memory to write and read them by.
pub struct Memory {
    range: DeviceRange,
    staging: PinnedMemory,
}

impl Memory {
    /// Of at most so many bytes.
    pub fn new(context: &Arc<Context>, bytes: u64) -> Memory {
        let allocation = Allocation::new(context, bytes.max(16)).unwrap();
        let reservation = Reservation::new(context, 1, allocation.bytes()).unwrap();
        let range = reservation.map(0, &allocation, &[context.device()]).unwrap();
        let staging = PinnedMemory::new(context, bytes as usize).unwrap();
        Memory { range, staging }
    }

    /// Its first bytes.
    pub fn part(&self, bytes: u64) -> DeviceRange {
        self.range.part(0, bytes).unwrap()
    }

    /// Has a stream write these values, and gives where they lie.
    pub fn fill<T: bytemuck::NoUninit>(&self, stream: &Stream, values: &[T]) -> DeviceRange {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let range = self.part(bytes.len() as u64);
        self.send(stream, &range, bytes);
        range
    }

    /// Has a stream write these bytes to another range.
    pub fn send(&self, stream: &Stream, to: &DeviceRange, bytes: &[u8]) {
        self.staging.write(0, bytes).unwrap();
        let len = bytes.len() as u64;
        stream.copy(to.span(0, len).unwrap(), self.staging.range().span(0, len).unwrap()).unwrap();
        // The staging is written again by the next call.
        stream.synchronize().unwrap();
    }

    /// What a range has when the stream comes by.
    pub fn read<T: bytemuck::Pod>(&self, stream: &Stream, from: &DeviceRange) -> Vec<T> {
        let len = from.len();
        stream.copy(self.staging.range().span(0, len).unwrap(), from.span(0, len).unwrap()).unwrap();
        stream.synchronize().unwrap();
        let mut bytes = vec![0; len as usize];
        self.staging.read(0, &mut bytes).unwrap();
        bytemuck::pod_collect_to_vec(&bytes)
    }
}
