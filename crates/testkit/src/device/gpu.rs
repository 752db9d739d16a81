//! One GPU as checks use it: its memory, what lies there, and comparisons.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use bytemuck::NoUninit;
use sidelane::device::{
    ByteSpan, Context, DeviceRange, Driver, Kernels, PinnedMemory, Stream, Value, Version, Word,
};
use sidelane::error::DeviceError;

use super::{allocate, stream, until, whole};
use crate::TestError;

/// A GPU, and how much is asked of it.
#[derive(Clone)]
pub struct Gpu {
    /// Its context.
    pub context: Arc<Context>,
    /// Whether checks have fewer rounds and smaller sizes.
    pub quick: bool,
    /// Longest time of a wait before it counts as stuck.
    pub patience: Duration,
}

impl Gpu {
    /// The device with this number.
    pub fn open(device: u32, quick: bool) -> Result<Self, DeviceError> {
        Ok(Gpu::of(Driver::open()?.context(device)?, quick))
    }

    /// The device of a context.
    pub fn of(context: Arc<Context>, quick: bool) -> Self {
        Gpu { context, quick, patience: patience(quick) }
    }

    /// The first, or to be quick the second.
    pub fn few<T>(&self, all: T, quick: T) -> T {
        if self.quick { quick } else { all }
    }

    /// Version of CUDA that the driver is for.
    pub fn version(&self) -> Version {
        self.context.driver().version()
    }

    /// A stream of its own.
    pub fn stream(&self) -> Result<Stream, DeviceError> {
        stream(&self.context)
    }

    /// So many, made one after the other: on hardware queues of their own.
    pub fn streams(&self, count: usize) -> Result<Vec<Stream>, DeviceError> {
        (0..count).map(|_| self.stream()).collect()
    }

    /// New memory of the GPU.
    pub fn memory(&self, bytes: u64) -> Result<DeviceRange, DeviceError> {
        allocate(&self.context, bytes)
    }

    /// New memory of the host that the GPU reaches.
    pub fn pinned(&self, bytes: u64) -> Result<PinnedMemory, DeviceError> {
        PinnedMemory::new(&self.context, bytes as usize)
    }

    /// Memory of the GPU with this content.
    pub fn put(&self, stream: &Stream, content: &[impl NoUninit]) -> Result<DeviceRange, DeviceError> {
        let bytes = bytemuck::cast_slice(content);
        let range = self.memory(bytes.len() as u64)?;
        write(stream, &range, bytes)?;
        Ok(range)
    }

    /// So many numbers, each by its position.
    pub fn put_each(
        &self,
        stream: &Stream,
        count: u32,
        of: impl Fn(u32) -> i32,
    ) -> Result<DeviceRange, DeviceError> {
        self.put(stream, &(0..count).map(of).collect::<Vec<_>>())
    }

    /// Waits for something, but not for ever.
    pub fn until(
        &self,
        what: &str,
        done: impl FnMut() -> Result<bool, DeviceError>,
    ) -> Result<(), TestError> {
        until(what, self.patience, done)
    }

    /// Waits for the work of a stream.
    pub fn finish(&self, stream: &Stream, what: &str) -> Result<(), TestError> {
        self.until(what, || stream.is_done())
    }

    /// The bytes of a range, behind the work of a stream.
    pub fn read(&self, stream: &Stream, from: &DeviceRange) -> Result<Vec<u8>, TestError> {
        let staging = self.pinned(from.len())?;
        stream.copy(whole(staging.range())?, whole(from)?)?;
        self.finish(stream, "a copy to the host")?;
        Ok(content(&staging)?)
    }
}

/// Longest time of a wait on a GPU of its own before it counts as stuck.
pub fn patience(quick: bool) -> Duration {
    Duration::from_secs(if quick { 10 } else { 20 })
}

/// All bytes of pinned memory.
pub fn content(memory: &PinnedMemory) -> Result<Vec<u8>, DeviceError> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes)?;
    Ok(bytes)
}

/// Writes the first bytes of a range, and waits for it.
pub fn write(stream: &Stream, to: &DeviceRange, bytes: &[u8]) -> Result<(), DeviceError> {
    let staging = PinnedMemory::new(stream.context(), bytes.len())?;
    staging.write(0, bytes)?;
    stream.copy(to.span(0, bytes.len() as u64)?, whole(staging.range())?)?;
    stream.synchronize()
}

/// Fails where bytes differ, and names the first.
pub fn same(what: impl Display, seen: &[u8], expected: &[impl NoUninit]) -> Result<(), TestError> {
    let expected: &[u8] = bytemuck::cast_slice(expected);
    equal("bytes", seen.len() as u64, expected.len() as u64)?;
    let Some(at) = seen.iter().zip(expected).position(|(seen, expected)| seen != expected) else {
        return Ok(());
    };
    let (len, seen, expected) = (seen.len(), seen[at], expected[at]);
    Err(TestError::Wrong(format!("{what}: byte {at} of {len} is {seen:#04x} and must be {expected:#04x}")))
}

/// Fails where two numbers differ.
pub fn equal(what: impl Display, seen: u64, expected: u64) -> Result<(), TestError> {
    if seen == expected {
        return Ok(());
    }
    Err(TestError::Wrong(format!("{what} is {seen} and must be {expected}")))
}

/// Bytes before and behind memory that a kernel is given, and their content.
const GUARDS: u64 = 256;
const GUARD: u8 = 0xa5;
/// Content of memory that no kernel has written.
pub const POISON: u8 = 0xcb;

/// A GPU, a stream and our kernels.
pub struct Bench {
    /// The GPU.
    pub gpu: Gpu,
    /// Stream of launches.
    pub stream: Arc<Stream>,
    /// Kernels, with or without a limit on their blocks.
    pub kernels: Kernels,
}

impl Bench {
    /// With kernels of as many blocks as they like.
    pub fn new(gpu: Gpu) -> Result<Self, DeviceError> {
        Ok(Bench { stream: Arc::new(gpu.stream()?), kernels: Kernels::load(&gpu.context)?, gpu })
    }

    /// Memory of the GPU with this content, between guards.
    pub fn put(&self, content: &[impl NoUninit]) -> Result<Guarded, DeviceError> {
        let content: &[u8] = bytemuck::cast_slice(content);
        let guard = vec![GUARD; GUARDS as usize];
        let all = self.gpu.put(&self.stream, &[&guard[..], content, &guard].concat())?;
        Ok(Guarded { range: all.part(GUARDS, content.len() as u64)?, all })
    }

    /// Memory that is not written yet.
    pub fn room(&self, bytes: u64) -> Result<Guarded, DeviceError> {
        self.put(&vec![POISON; bytes as usize])
    }

    /// The content, behind all launches.
    ///
    /// # Errors
    /// Something was written beside the memory.
    pub fn read(&self, memory: &Guarded) -> Result<Vec<u8>, TestError> {
        let all = self.gpu.read(&self.stream, &memory.all)?;
        let (before, rest) = all.split_at(GUARDS as usize);
        let (content, behind) = rest.split_at(rest.len() - GUARDS as usize);
        if before.iter().chain(behind).any(|&byte| byte != GUARD) {
            return Err(TestError::Wrong("a kernel wrote outside of the memory that it was given".into()));
        }
        Ok(content.to_vec())
    }

    /// The content as words.
    pub fn words<T: bytemuck::Pod>(&self, memory: &Guarded) -> Result<Vec<T>, TestError> {
        Ok(bytemuck::pod_collect_to_vec(&self.read(memory)?))
    }
}

/// Memory of a GPU between guards: anything that is written beside it is noticed when it is read.
pub struct Guarded {
    all: DeviceRange,
    range: DeviceRange,
}

impl Guarded {
    /// Bytes of it.
    pub fn range(&self) -> &DeviceRange {
        &self.range
    }

    /// All of it.
    pub fn span(&self) -> Result<ByteSpan<'_>, DeviceError> {
        whole(&self.range)
    }

    /// Its first word.
    pub fn word<T: Value>(&self) -> Result<Word<'_, T>, DeviceError> {
        self.range.word(0)
    }
}
