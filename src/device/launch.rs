//! Launches of kernels, whose parameters are compared with the kernel's own list.

use std::ffi::c_void;
use std::sync::MutexGuard;

use super::call;
use super::context::Context;
use super::module::Function;
use super::range::{ByteSpan, Claim, Claims, Value, Word};
use super::stream::Stream;
use crate::error::DeviceError;

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks along x, y and z.
    pub blocks: [u32; 3],
    /// Threads of a block along x, y and z.
    pub threads: [u32; 3],
    /// Bytes of dynamic shared memory of a block, in addition to the kernel's static ones.
    pub shared: u32,
}

impl Grid {
    /// So many blocks of so many threads, in a line.
    pub fn line(blocks: u32, threads: u32) -> Self {
        Grid { blocks: [blocks, 1, 1], threads: [threads, 1, 1], shared: 0 }
    }
}

/// The parameters of a launch, in their order.
#[derive(Debug)]
pub struct Parameters {
    device: u32,
    /// Values one behind the other, each at the start of eight bytes.
    words: Vec<u64>,
    /// First word and size of each value.
    values: Vec<(usize, usize)>,
    held: Claims,
}

impl Parameters {
    /// None yet.
    pub fn new(context: &Context) -> Self {
        Parameters {
            device: context.device(),
            words: Vec::new(),
            values: Vec::new(),
            held: Claims::default(),
        }
    }

    /// Adds a value: a number, or a struct that the kernel takes as it lies in memory.
    pub fn value<T: bytemuck::NoUninit>(mut self, value: T) -> Self {
        let bytes = bytemuck::bytes_of(&value);
        let first = self.words.len();
        self.words.resize(first + bytes.len().div_ceil(8), 0);
        bytemuck::cast_slice_mut::<u64, u8>(&mut self.words[first..])[..bytes.len()].copy_from_slice(bytes);
        self.values.push((first, bytes.len()));
        self
    }

    /// Adds the address of bytes that the kernel reads or writes.
    ///
    /// # Errors
    /// [`DeviceError::NoAccess`].
    pub fn span(mut self, span: ByteSpan<'_>) -> Result<Self, DeviceError> {
        span.range.check_reach(self.device)?;
        self.held.add(span.range.keep());
        Ok(self.value(span.address))
    }

    /// Adds the address of a word that the kernel reads or writes.
    ///
    /// # Errors
    /// [`DeviceError::NoAccess`].
    pub fn word<T: Value>(mut self, word: Word<'_, T>) -> Result<Self, DeviceError> {
        word.range.check_reach(self.device)?;
        self.held.add(word.range.keep());
        Ok(self.value(word.address))
    }
}

impl Function {
    /// Enqueues a launch. Number and sizes of the parameters and the shape are compared with what
    /// the kernel and the device take.
    ///
    /// # Safety
    /// The parameters have the meaning that the caller assumes, and with them the kernel stays
    /// inside the given spans.
    ///
    /// # Errors
    /// [`DeviceError::Parameters`], [`DeviceError::Launch`], [`DeviceError::OtherDevice`],
    /// [`DeviceError::Call`].
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: Grid,
        parameters: &Parameters,
    ) -> Result<(), DeviceError> {
        let found = parameters.device;
        let expected = self.module.context.device();
        if found != expected {
            return Err(DeviceError::OtherDevice { what: "list of parameters", found, expected });
        }
        let sizes = parameters.values.iter().map(|&(_, size)| size as u64);
        self.check_parameters(sizes)?;
        let address = |&(first, _): &(usize, usize)| std::ptr::from_ref(&parameters.words[first..]).cast();
        let mut pointers: Vec<*const c_void> = parameters.values.iter().map(address).collect();
        let mut held = stream.held();
        held.add_all(&parameters.held);
        // SAFETY: a pointer to each value, whose sizes were compared; the contract covers their
        // meaning.
        unsafe { self.enqueue(stream, held, grid, &mut pointers) }
    }

    /// Enqueues a launch of a kernel that takes one struct, without allocating. `held` is the
    /// stream's list, with claims on all memory that the struct names.
    ///
    /// # Safety
    /// As [`launch`](Self::launch), for the memory that the struct names.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub(super) unsafe fn launch_struct<T: bytemuck::NoUninit>(
        &self,
        stream: &Stream,
        held: MutexGuard<'_, Claims>,
        grid: Grid,
        parameters: &T,
    ) -> Result<(), DeviceError> {
        self.check_parameters(std::iter::once(size_of::<T>() as u64))?;
        let mut pointers = [std::ptr::from_ref(parameters).cast::<c_void>()];
        // SAFETY: a pointer to the one value, whose size was compared; the contract covers its
        // meaning.
        unsafe { self.enqueue(stream, held, grid, &mut pointers) }
    }

    /// # Safety
    /// There is a pointer for each parameter of the kernel, to a value of its size, and `held` has
    /// claims on all memory that the values name.
    unsafe fn enqueue(
        &self,
        stream: &Stream,
        mut held: MutexGuard<'_, Claims>,
        grid: Grid,
        pointers: &mut [*const c_void],
    ) -> Result<(), DeviceError> {
        let (found, expected) = (stream.device(), self.module.context.device());
        if found != expected {
            return Err(DeviceError::OtherDevice { what: "stream", found, expected });
        }
        self.check_shape(grid)?;
        let module: Claim = self.module.clone();
        held.add(&module);
        let (library, context) = (stream.library(), &self.module.context);
        let _entered = context.enter()?;
        let Grid { blocks: [bx, by, bz], threads: [tx, ty, tz], shared } = grid;
        let (values, none) = (pointers.as_mut_ptr().cast(), std::ptr::null_mut());
        // SAFETY: the driver copies the values during the call; the contract covers their meaning.
        unsafe {
            call!(
                library,
                Some(expected),
                cuLaunchKernel(self.raw, bx, by, bz, tx, ty, tz, shared, stream.raw, values, none)
            )
        }
    }

    /// Compares sizes of parameters with those that the kernel takes.
    fn check_parameters(&self, mut given: impl Iterator<Item = u64>) -> Result<(), DeviceError> {
        let mut taken = self.parameters.iter().copied();
        for index in 0.. {
            match (given.next(), taken.next()) {
                (None, None) => break,
                (given, taken) if given == taken => {}
                (given, taken) => {
                    let function = self.name.clone();
                    return Err(DeviceError::Parameters { function, index, given, taken });
                }
            }
        }
        Ok(())
    }

    fn check_shape(&self, grid: Grid) -> Result<(), DeviceError> {
        let facts = self.module.context.facts();
        let threads = grid.threads.iter().map(|&count| u64::from(count)).product();
        let block = [("threads of a block", threads, self.most_threads.min(u64::from(facts.block_threads)))];
        let names = ["blocks along x", "blocks along y", "blocks along z"];
        let blocks = names.into_iter().zip(grid.blocks).zip(facts.grid);
        let blocks = blocks.map(|((what, asked), limit)| (what, u64::from(asked), u64::from(limit)));
        for (what, asked, limit) in block.into_iter().chain(blocks) {
            if asked == 0 || asked > limit {
                return Err(DeviceError::Launch { function: self.name.clone(), what, asked, limit });
            }
        }
        Ok(())
    }
}
