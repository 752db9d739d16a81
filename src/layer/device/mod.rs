//! The layer on a device: tensors, experts and their weights lie there, and a step is enqueued on
//! the caller's stream.
//!
//! ```text
//!   host               logits --> Gate --> choices up                  gradients of choices --> of logits up
//!                        ^                    |                                  ^
//!   caller's stream    x w        ..........  |  experts 0, experts 1 .. sum     | ...  of router, of x
//!                                             v   ^            |       ^
//!   transfer stream                   d0, d1, d2 ........     c0, c1 ..                 the graph of `pass_order`, by the CUDA executor
//! ```
//!
//! It is the graph of the host's layer, enqueued by
//! [`CudaExecutor`](crate::overlap::CudaExecutor): dispatches and combines go on a stream of their
//! own, next to the experts of other chunks, one transfer after another.
//!
//! **Bits** are those of the host's layer for the same input: products, SwiGLU, sums and roundings
//! are kernels of ours with the host's order (`cuda/layer.cu`), where the host has fused
//! multiply-adds and there is more than one expert. With [`Products::Cublas`] and
//! [`Products::CublasTf32`] products are those of cuBLAS, and have its order. With
//! [`Products::CublasBf16`] their factors are bf16, too, and so is what lies between them.
//!
//! **The gate** chooses on the device where a kernel has all its settings and there are no losses
//! ([`gate_place`](DeviceMoeLayer::gate_place)), otherwise on the host. A forward pass waits until
//! its stream has brought the choices, or the logits. A backward pass waits at its end, for the
//! gradients of routing weights: those of logits are the host's.
//!
//! **Dispatches wait, too.** Memory for rows is taken once their number is known. So the host waits
//! in each dispatch until all ranks' streams have brought their choices, though not for the rows.
//! Over several nodes a combine waits until the stream has come to it.
//!
//! **Faults.** What one rank cannot bring is refused on all, as on the host. A device that fails
//! ends the world.

mod device_experts;
mod device_memory;
mod device_moe;
mod device_swiglu;
mod enqueue_backward;
mod enqueue_forward;

pub use device_experts::Products;
pub use device_memory::DeviceTensor;
pub use device_moe::{DeviceMoeLayer, DeviceMoeLayerBuilder, DeviceTape};
pub use enqueue_backward::DeviceGradients;
