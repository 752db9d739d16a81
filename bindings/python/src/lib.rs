//! Sidelane for Python.
//!
//! Rust does what must not depend on the interpreter: tensors by DLPack, calls without the GIL,
//! waits that Ctrl-C ends. What is convenience (processes, process groups, autograd, Megatron) is
//! Python, in `python/sidelane`.
//!
//! ```text
//!   tensor (torch, numpy) --DLPack--> Input -----\                          /--> Tensor --DLPack--> torch, numpy
//!                                                 Slot: one call at a time /
//!   exception with fields <--- errors <--- wait: GIL released, asked for signals every 20 ms
//! ```
//!
//! | module | what is in it |
//! |---|---|
//! | [`dlpack`] | the capsules of DLPack; unsafe code is here, in [`device`] and in [`heap`] alone |
//! | [`device`] | streams of the caller's, and what is lent on their devices |
//! | [`heap`] | allocators over device heaps, and the functions by which torch calls them |
//! | [`tensor`] | memory that is handed out, and to which library |
//! | [`input`] | tensors that are handed in |
//! | [`errors`] | the library's errors as exceptions with their fields |
//! | [`wait`], [`calls`] | calls that wait; those of `ExpertParallel` |
//! | [`lending`] | values that are lent to calls; closed worlds, forked processes |
//! | [`world`], [`window`], [`parallel`], [`pending`], [`handle`], [`collective`], [`communicator`] | the classes |
//! | [`gate`], [`losses`] | routers, and what they are trained by |
//! | [`layer`] | whole layers |

mod calls;
mod collective;
mod communicator;
mod device;
mod dlpack;
mod errors;
mod expert_parallel;
mod gate;
mod handle;
mod heap;
mod input;
mod layer;
mod lending;
mod losses;
mod pending;
mod settings;
mod tensor;
mod wait;
mod window;
mod world;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<world::World>()?;
    module.add_class::<world::Group>()?;
    module.add_class::<window::Window>()?;
    module.add_class::<expert_parallel::ExpertParallel>()?;
    module.add_class::<pending::PendingDispatch>()?;
    module.add_class::<pending::PendingCombine>()?;
    module.add_class::<handle::Handle>()?;
    module.add_class::<collective::RowCollective>()?;
    module.add_class::<collective::RowPartition>()?;
    module.add_class::<communicator::Communicator>()?;
    module.add_class::<heap::HeapAllocator>()?;
    module.add_class::<layer::MoeLayer>()?;
    module.add_class::<layer::Tape>()?;
    module.add_class::<tensor::Tensor>()?;
    module.add_class::<gate::Gate>()?;
    module.add_class::<gate::Decision>()?;
    module.add_function(wrap_pyfunction!(gate::preset, module)?)?;
    module.add_function(wrap_pyfunction!(gate::presets, module)?)?;
    losses::add(module)?;
    module.add_function(wrap_pyfunction!(world::close_all, module)?)?;
    Ok(())
}
