//! Launching kernels with parameters that were compared with what they take.

use std::ffi::c_void;

use super::call;
use super::context::Context;
use super::module::Function;
use super::range::{Held, Keep, Span};
use super::stream::Stream;
use crate::error::DeviceError;

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks along x, y and z.
    pub blocks: [u32; 3],
    /// Threads of a block along x, y and z.
    pub threads: [u32; 3],
    /// Bytes of shared memory that a block gets beside what the kernel declares.
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
    held: Held,
}

impl Parameters {
    /// None yet.
    pub fn new(context: &Context) -> Self {
        Parameters { device: context.device(), words: Vec::new(), values: Vec::new(), held: Held::default() }
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
    pub fn span(mut self, span: Span<'_>) -> Result<Self, DeviceError> {
        span.range.check_reach(self.device)?;
        self.held.add(span.range.keep());
        Ok(self.value(span.address))
    }
}

impl Function {
    /// Enqueues a launch. Number and sizes of the parameters and the shape are compared with what the kernel and the
    /// device take.
    ///
    /// # Safety
    /// The parameters mean to the kernel what the caller thinks, and with them it stays inside the spans given.
    ///
    /// # Errors
    /// [`DeviceError::Parameters`], [`DeviceError::Launch`], [`DeviceError::OtherDevice`], [`DeviceError::Call`].
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: Grid,
        parameters: &Parameters,
    ) -> Result<(), DeviceError> {
        let expected = self.module.context.device();
        for (what, found) in [("stream", stream.device()), ("list of parameters", parameters.device)] {
            if found != expected {
                return Err(DeviceError::OtherDevice { what, found, expected });
            }
        }
        self.check_parameters(parameters)?;
        self.check_shape(grid)?;
        let mut pointers: Vec<*mut c_void> = parameters
            .values
            .iter()
            .map(|&(first, _)| std::ptr::from_ref(&parameters.words[first..]).cast::<c_void>().cast_mut())
            .collect();
        let mut held = stream.held();
        held.add_all(&parameters.held);
        let module: Keep = self.module.clone();
        held.add(&module);
        let (library, context) = (stream.library(), &self.module.context);
        let _entered = context.enter()?;
        let Grid { blocks: [bx, by, bz], threads: [tx, ty, tz], shared } = grid;
        let (values, none) = (pointers.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: as many pointers to values as the kernel takes, each of its size, which the driver copies during the
        // call; what they mean is in the contract.
        unsafe {
            call!(
                library,
                Some(expected),
                cuLaunchKernel(self.raw, bx, by, bz, tx, ty, tz, shared, stream.raw, values, none)
            )
        }
    }

    fn check_parameters(&self, parameters: &Parameters) -> Result<(), DeviceError> {
        let given = |index: usize| parameters.values.get(index).map(|&(_, size)| size as u64);
        let taken = |index: usize| self.parameters.get(index).copied();
        let most = parameters.values.len().max(self.parameters.len());
        match (0..most).find(|&index| given(index) != taken(index)) {
            None => Ok(()),
            Some(index) => {
                let function = self.name.clone();
                Err(DeviceError::Parameters { function, index, given: given(index), taken: taken(index) })
            }
        }
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
