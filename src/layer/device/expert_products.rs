//! Products of a layer on a device: by a kernel of ours, or by cuBLAS.

use std::sync::Arc;

use crate::device::{Blas, Kernels, LayerKernels, MatmulArgs, Stream, wheels};
use crate::dtype::Dtype;
use crate::error::DeviceError;

use super::device_memory::DeviceMemory;

/// Maker of the products of a [`DeviceMoeLayer`](super::DeviceMoeLayer).
///
/// The default promises bits and needs no library. A layer that is to be fast says so:
/// [`CublasBf16`](Self::CublasBf16), or [`CublasTf32`](Self::CublasTf32) and
/// [`Cublas`](Self::Cublas) where rows are f32 or factors must stay so. They are no default,
/// because results would then depend on what a machine has installed.
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
    /// cuBLAS on tensor cores, in TF32: several times as fast. The experts' products round each
    /// factor to 10 bits behind its leading one, by `2^-10` of it at most, and add up in f32.
    /// Tokens of bf16 and f16 have no more bits and lose nothing; weights, activations and
    /// gradients do. The router's products are those of [`Cublas`](Self::Cublas): a choice of
    /// experts does not hang on such a rounding.
    ///
    /// A sum of `k` products differs from [`Cublas`](Self::Cublas)'s by at most
    /// `2^-9 + 2 * k * 2^-24` times the sum of their absolute values, to first order. Sums of whole
    /// numbers below `2^24`, of factors up to `2^11`, are equal.
    CublasTf32,
    /// cuBLAS on tensor cores, with factors in bf16: the fastest. The experts' rows, weights,
    /// activations and gradients of outputs are bf16, and products add up in f32. Weights stay f32
    /// with a copy in bf16, which a pass makes anew where they may have changed
    /// ([`experts`](super::DeviceMoeLayer::experts)). Their gradients are f32, and so is the
    /// router. Rows must be bf16. They are the factors as they come, and what is kept for gradients
    /// takes about a third of the memory.
    ///
    /// Each rounding loses at most `2^-8` of a number. A sum of `k` products differs from that of
    /// the same factors in another order by at most `2 * k * 2^-24` times the sum of their absolute
    /// values, to first order, and by that rounding.
    CublasBf16,
}

impl Products {
    /// Type of the factors of the experts' products.
    pub(super) fn factors(self) -> Dtype {
        if self == Products::CublasBf16 { Dtype::Bf16 } else { Dtype::F32 }
    }
}

/// Kernels, memory and products of the experts, on one stream.
#[derive(Clone, Debug)]
pub(super) struct Compute {
    pub stream: Arc<Stream>,
    pub kernels: LayerKernels,
    /// Those of dispatch and combine, for gradients of routing weights.
    pub exchange_kernels: Kernels,
    pub memory: Arc<DeviceMemory>,
    blas: Option<Arc<Blas>>,
    products: Products,
}

impl Compute {
    /// Loads what makes the products. With cuBLAS it waits for the device.
    pub fn new(
        stream: &Arc<Stream>,
        (kernels, exchange_kernels): (LayerKernels, Kernels),
        products: Products,
    ) -> Result<Self, DeviceError> {
        let blas = match products {
            Products::Own => None,
            Products::Cublas | Products::CublasTf32 | Products::CublasBf16 => {
                let fake_driver = stream.context().driver().is_fake();
                Some(Arc::new(Blas::load(stream, &wheels::folders(fake_driver, Vec::new))?))
            }
        };
        let memory = DeviceMemory::new(stream.context());
        Ok(Compute { stream: Arc::clone(stream), kernels, exchange_kernels, memory, blas, products })
    }

    /// Type of the factors of the experts' products.
    pub fn factors(&self) -> Dtype {
        self.products.factors()
    }

    /// cuBLAS, if factors of the experts' products are bf16.
    pub fn bf16_products(&self) -> Option<Arc<Blas>> {
        self.blas.clone().filter(|_| self.factors() == Dtype::Bf16)
    }

    /// Enqueues a product of the experts' groups of rows in f32.
    pub fn expert_product(&self, matmul: &MatmulArgs<'_>) -> Result<(), DeviceError> {
        match &self.blas {
            Some(blas) if self.products == Products::CublasTf32 => blas.matmul_tf32(&self.kernels, matmul),
            _ => self.router_product(matmul),
        }
    }

    /// Enqueues a product of the router, which is always of f32.
    pub fn router_product(&self, matmul: &MatmulArgs<'_>) -> Result<(), DeviceError> {
        match &self.blas {
            None => self.kernels.matmul(&self.stream, matmul),
            Some(blas) => blas.matmul(&self.kernels, matmul),
        }
    }
}
