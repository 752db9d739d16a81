//! Names by which C knows objects. What each stands for is in `kinds`.

use crate::handles::Object;

/// A type that C knows by name alone.
pub trait Opaque {
    /// The object that it stands for.
    type Object: Object;
}

/// All ranks of a job, as this process sees them.
pub struct World {
    _opaque: [u8; 0],
}

/// Ordered ranks of a world.
pub struct Group {
    _opaque: [u8; 0],
}

/// Memory that the ranks of a group write to each other.
pub struct Window {
    _opaque: [u8; 0],
}

/// Dispatch and combine over a group.
pub struct Ep {
    _opaque: [u8; 0],
}

/// The layout of one dispatch: combine, cached dispatch and the gradients follow it.
pub struct Handle {
    _opaque: [u8; 0],
}

/// Rows that a dispatch brought. They go back to the receive pool when they are closed.
pub struct Rows {
    _opaque: [u8; 0],
}

/// What experts write into: peers read it in place.
pub struct Output {
    _opaque: [u8; 0],
}

/// Tokens that NICs read in place.
pub struct Tokens {
    _opaque: [u8; 0],
}

/// Allocates from the device heap of a layer for another library.
pub struct HeapAllocator {
    _opaque: [u8; 0],
}

/// A dispatch that was started.
pub struct PendingDispatch {
    _opaque: [u8; 0],
}

/// A combine that was started.
pub struct PendingCombine {
    _opaque: [u8; 0],
}

/// A router.
pub struct Gate {
    _opaque: [u8; 0],
}

/// A CUDA stream of the caller's, and the device it is of.
pub struct Stream {
    _opaque: [u8; 0],
}

/// All-gather and reduce-scatter over a group.
pub struct RowCollective {
    _opaque: [u8; 0],
}

/// All-reduce, reduce-scatter, broadcast, all-to-all, all-gather and messages over a group.
pub struct Communicator {
    _opaque: [u8; 0],
}

/// How many rows each rank has, and so where they lie among those of all.
pub struct RowPartition {
    _opaque: [u8; 0],
}

/// A whole layer: gate, dispatch, experts, combine.
pub struct Moe {
    _opaque: [u8; 0],
}

/// A forward pass of a whole layer, kept for its gradients.
pub struct Tape {
    _opaque: [u8; 0],
}
