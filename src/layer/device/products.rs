//! Products of a layer on a device: by a kernel of ours, or by cuBLAS.

use std::sync::Arc;

use crate::device::{Blas, LayerKernels, MatmulArgs, Stream, wheels};
use crate::error::DeviceError;

use super::memory::DeviceMemory;

/// Maker of the products of a [`DeviceMoeLayer`](super::DeviceMoeLayer).
///
/// The default promises bits and needs no library. A layer that is to be fast says so:
/// [`Cublas`](Self::Cublas). It is no default, because results would then depend on what a machine
/// has installed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Products {
    /// A kernel of ours, without tensor cores: to the bit the products of the host.
    #[default]
    Own,
    /// cuBLAS, loaded at run time. Products are made and summed in f32, without TF32, in the
    /// library's own order: the same bits from run to run, and others than the host's.
    ///
    /// Two results of a sum of `k` products differ by at most `2 * k * 2^-24` times the sum of
    /// their absolute values, to first order. Sums of whole numbers below `2^24` are equal.
    Cublas,
}

/// Kernels, memory and products of the experts, on one stream.
#[derive(Clone, Debug)]
pub(super) struct Compute {
    pub stream: Arc<Stream>,
    pub kernels: LayerKernels,
    pub memory: Arc<DeviceMemory>,
    blas: Option<Arc<Blas>>,
}

impl Compute {
    /// Loads what makes the products. With cuBLAS it waits for the device.
    pub fn new(
        stream: &Arc<Stream>,
        kernels: LayerKernels,
        memory: Arc<DeviceMemory>,
        products: Products,
    ) -> Result<Self, DeviceError> {
        let blas = match products {
            Products::Own => None,
            Products::Cublas => {
                let stand_in = stream.context().driver().is_stand_in();
                Some(Arc::new(Blas::load(stream, &wheels::folders(stand_in, Vec::new))?))
            }
        };
        Ok(Compute { stream: Arc::clone(stream), kernels, memory, blas })
    }

    /// Enqueues a product of groups.
    pub fn matmul(&self, matmul: &MatmulArgs<'_>) -> Result<(), DeviceError> {
        match &self.blas {
            None => self.kernels.matmul(&self.stream, matmul),
            Some(blas) => blas.matmul(&self.kernels, matmul),
        }
    }
}
