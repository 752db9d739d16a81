//! Devices of the stand-in driver, their streams, and their memory.
#![allow(dead_code, reason = "each test program uses a part of this")]

use std::sync::Arc;

use sidelane::device::{
    Allocation, Context, DeviceRange, Driver, PinnedMemory, Priority, Reservation, Stream,
};

/// The context of a device.
pub fn context(device: u32) -> Arc<Context> {
    let library = stand_in_cuda::install().unwrap().join("libcuda.so.1");
    let driver = Driver::load(Some(&library)).unwrap();
    assert!(driver.is_stand_in(), "tests run without a GPU");
    driver.context(device).unwrap()
}

/// A stream of a device.
pub fn stream(device: u32) -> Arc<Stream> {
    Arc::new(Stream::new(&context(device), Priority::Normal).unwrap())
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
