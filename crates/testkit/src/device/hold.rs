//! Work while a kernel holds every multiprocessor.

use sidelane::device::{AuditKernels, SmHold, Stream};
use sidelane::error::DeviceError;

use super::gpu::{Gpu, equal};
use crate::TestError;

/// A kernel of as many blocks as run at once, on a stream of its own.
pub struct Held {
    hold: SmHold,
    stream: Stream,
}

impl Held {
    /// Not taken yet.
    pub fn new(gpu: &Gpu, kernels: &AuditKernels) -> Result<Self, DeviceError> {
        Ok(Held { hold: kernels.hold()?, stream: gpu.stream()? })
    }

    /// Blocks that hold.
    pub fn blocks(&self) -> u32 {
        self.hold.blocks()
    }

    /// Has `work` done while every multiprocessor is held. Whatever comes of it, the hold ends.
    ///
    /// # Errors
    /// Those of the work; a hold that does not begin, or that ends before the work does.
    pub fn during<T, E: From<TestError> + From<DeviceError>>(
        &self,
        gpu: &Gpu,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        self.hold.take(&self.stream)?;
        let all = self.hold.blocks();
        let running = gpu.until("blocks of the hold", || Ok(self.hold.running() == all));
        let worked = running.map_err(E::from).and_then(|()| work());
        let still = self.stream.is_done();
        self.hold.release();
        let ended = gpu.finish(&self.stream, "the hold");
        let worked = worked?;
        ended?;
        let held = if still? { 0 } else { all };
        equal("blocks that ran to the end of the hold", held.into(), all.into())?;
        Ok(worked)
    }
}
