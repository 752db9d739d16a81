//! Tensors of a rank: in memory of the host, or of a device behind a pinned page.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sidelane::Dtype;
use sidelane::device::{DeviceRange, Driver, Event, PinnedMemory, Stream};
use sidelane::ep::{ExpertRows, Tensor, TensorMut};

use crate::TestError;
use crate::device::{allocate, stream, until, whole};

/// Tensors begin at multiples of this.
const ALIGN: u64 = 256;
/// Longest time of a copy before it counts as stuck: less than other ranks wait for this one.
const PATIENCE: Duration = Duration::from_secs(60);
/// Content of memory that a call is to write.
const BEFORE: u8 = 0xcb;

/// Bytes of a device's memory.
#[derive(Clone, Copy)]
pub struct Memory {
    /// For the tensors of one case.
    pub tensors: u64,
    /// For the largest tensor that is read or written, on the host.
    pub staging: u64,
    /// For an instance, where its mode does not say.
    pub heap: u64,
}

/// A device of a rank. All its memory is made before the first case and kept until the last: to
/// free memory waits for streams that wait for other ranks.
pub struct Device {
    /// Stream of the calls.
    pub stream: Arc<Stream>,
    /// For calls that change streams.
    other: Arc<Stream>,
    tensors: DeviceRange,
    staging: PinnedMemory,
    pub(crate) heap: u64,
}

impl Device {
    /// This one, or the rank's, where ranks take the devices in turns.
    ///
    /// Ranks that are threads of a process open their devices one after another: the driver makes
    /// contexts and memory under one lock, and their times would be those of the queue. What all
    /// ranks then build together, collectives of the library, ends with a meeting of all ranks, and
    /// needs no such order.
    pub fn new(device: Option<u32>, rank: u32, memory: Memory) -> Result<Self, TestError> {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let driver = Driver::open()?;
        let in_turn = rank % driver.device_count()?.max(1);
        let context = driver.context(device.unwrap_or(in_turn))?;
        Ok(Device {
            stream: Arc::new(stream(&context)?),
            other: Arc::new(stream(&context)?),
            tensors: allocate(&context, memory.tensors)?,
            staging: PinnedMemory::new(&context, memory.staging as usize)?,
            heap: memory.heap,
        })
    }
}

/// Memory of one tensor.
pub(crate) enum Buffer {
    /// In words, so that all types are aligned.
    Host(Vec<u64>, usize),
    Device(DeviceRange),
}

impl Buffer {
    pub(crate) fn tensor(&self, dtype: Dtype) -> Tensor<'_> {
        match self {
            Buffer::Host(words, len) => Tensor::Host { bytes: &bytemuck::cast_slice(words)[..*len], dtype },
            Buffer::Device(range) => Tensor::device(range, dtype),
        }
    }

    pub(crate) fn tensor_mut(&mut self, dtype: Dtype) -> TensorMut<'_> {
        match self {
            Buffer::Host(words, len) => {
                TensorMut::Host { bytes: &mut bytemuck::cast_slice_mut(words)[..*len], dtype }
            }
            Buffer::Device(range) => TensorMut::device(range, dtype),
        }
    }
}

/// Place of the tensors of one case.
pub(crate) struct Place<'d> {
    device: Option<&'d Device>,
    /// Stream of the calls, on a device.
    stream: Option<Arc<Stream>>,
    used: u64,
}

impl<'d> Place<'d> {
    /// Part `part` of two of a device's memory, or the host.
    pub(crate) fn new(device: Option<&'d Device>, part: u64) -> Self {
        let stream = device.map(|device| Arc::clone(&device.stream));
        let used = device.map_or(0, |device| part * device.tensors.len() / 2);
        Place { device, stream, used }
    }

    pub(crate) fn stream(&self) -> Option<&Arc<Stream>> {
        self.stream.as_ref()
    }

    /// The device's other stream, on which calls go from now on.
    pub(crate) fn change_stream(&mut self) -> Result<&Arc<Stream>, TestError> {
        let (Some(device), Some(stream)) = (self.device, &mut self.stream) else {
            return Err(TestError::Lacks("the host has no stream"));
        };
        let next = if Arc::ptr_eq(stream, &device.stream) { &device.other } else { &device.stream };
        // In fixed slots the caller orders streams.
        next.join(stream, &Event::new(stream.context())?)?;
        *stream = Arc::clone(next);
        Ok(stream)
    }

    /// A tensor with this content.
    pub(crate) fn lend<T: bytemuck::NoUninit>(&mut self, content: &[T]) -> Result<Buffer, TestError> {
        let bytes: &[u8] = bytemuck::cast_slice(content);
        let Some(device) = self.device else {
            let mut words = vec![0_u64; bytes.len().div_ceil(8)];
            bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
            return Ok(Buffer::Host(words, bytes.len()));
        };
        let range = device.tensors.part(self.used, bytes.len() as u64)?;
        self.used += (bytes.len() as u64).next_multiple_of(ALIGN).max(ALIGN);
        self.write(&range, bytes)?;
        Ok(Buffer::Device(range))
    }

    /// Room for as many bytes, full of something else.
    pub(crate) fn room(&mut self, bytes: usize) -> Result<Buffer, TestError> {
        self.lend(&vec![BEFORE; bytes])
    }

    fn on_device(&self) -> Result<(&Device, &Stream), TestError> {
        self.device.zip(self.stream.as_deref()).ok_or(TestError::Lacks("the host has no device memory"))
    }

    /// Writes to memory of the device, and waits until it is there.
    pub(crate) fn write(&self, to: &DeviceRange, bytes: &[u8]) -> Result<(), TestError> {
        let (device, stream) = self.on_device()?;
        if bytes.is_empty() {
            return Ok(());
        }
        let len = bytes.len() as u64;
        device.staging.write(0, bytes)?;
        stream.copy(to.span(0, len)?, device.staging.range().span(0, len)?)?;
        until("a copy to the device", PATIENCE, || stream.is_done())
    }

    /// Reads memory of the device, once the stream has come so far.
    pub(crate) fn read(&self, from: &DeviceRange) -> Result<Vec<u8>, TestError> {
        let (device, stream) = self.on_device()?;
        let mut bytes = vec![0; from.len() as usize];
        if !bytes.is_empty() {
            stream.copy(device.staging.range().span(0, from.len())?, whole(from)?)?;
            until("a call on the device", PATIENCE, || stream.is_done())?;
            device.staging.read(0, &mut bytes)?;
        }
        Ok(bytes)
    }

    /// Bytes of a tensor.
    pub(crate) fn content(&self, buffer: &Buffer) -> Result<Vec<u8>, TestError> {
        match buffer {
            Buffer::Host(words, len) => Ok(bytemuck::cast_slice(words)[..*len].to_vec()),
            Buffer::Device(range) => self.read(range),
        }
    }

    /// Bytes of received rows as they lie: on a device with fixed slots, of whole slots.
    pub(crate) fn received(&self, rows: &ExpertRows) -> Result<Vec<u8>, TestError> {
        match self.device {
            None => Ok(rows.rows::<u8>()?.to_vec()),
            Some(_) => self.read(&rows.range()?),
        }
    }
}
