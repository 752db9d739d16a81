//! Kinds of objects that C has handles of.

use std::fmt;

/// Kinds of objects that handles stand for. The number is part of every handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A world.
    World = 1,
    /// A group.
    Group,
    /// A one-sided window.
    Window,
    /// An expert-parallel layer.
    Ep,
    /// The layout of a dispatch.
    Handle,
    /// Received rows.
    Rows,
    /// What experts write into.
    Output,
    /// Tokens that NICs read in place.
    Tokens,
    /// A dispatch that was started.
    PendingDispatch,
    /// A combine that was started.
    PendingCombine,
    /// A router.
    Gate,
    /// A CUDA stream of the caller's.
    Stream,
    /// All-gather and reduce-scatter.
    RowCollective,
    /// How many rows each rank has.
    RowPartition,
    /// Collectives and messages.
    Communicator,
    /// A whole layer.
    Moe,
    /// A forward pass of one.
    Tape,
    /// An allocator over the device heap of a layer.
    HeapAllocator,
}

impl Kind {
    const ALL: [Kind; 18] = [
        Kind::World,
        Kind::Group,
        Kind::Window,
        Kind::Ep,
        Kind::Handle,
        Kind::Rows,
        Kind::Output,
        Kind::Tokens,
        Kind::PendingDispatch,
        Kind::PendingCombine,
        Kind::Gate,
        Kind::Stream,
        Kind::RowCollective,
        Kind::RowPartition,
        Kind::Communicator,
        Kind::Moe,
        Kind::Tape,
        Kind::HeapAllocator,
    ];

    /// The kind with this number.
    pub fn from_code(code: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|&kind| kind as u8 == code)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::World => "sidelane_world_t",
            Kind::Group => "sidelane_group_t",
            Kind::Window => "sidelane_window_t",
            Kind::Ep => "sidelane_ep_t",
            Kind::Handle => "sidelane_handle_t",
            Kind::Rows => "sidelane_rows_t",
            Kind::Output => "sidelane_output_t",
            Kind::Tokens => "sidelane_tokens_t",
            Kind::PendingDispatch => "sidelane_pending_dispatch_t",
            Kind::PendingCombine => "sidelane_pending_combine_t",
            Kind::Gate => "sidelane_gate_t",
            Kind::Stream => "sidelane_stream_t",
            Kind::RowCollective => "sidelane_row_collective_t",
            Kind::RowPartition => "sidelane_row_partition_t",
            Kind::Communicator => "sidelane_communicator_t",
            Kind::Moe => "sidelane_moe_t",
            Kind::Tape => "sidelane_tape_t",
            Kind::HeapAllocator => "sidelane_heap_allocator_t",
        })
    }
}

/// Objects that handles may stand for.
pub trait Object: Send + Sync + 'static {
    /// Which kind it is.
    const KIND: Kind;
}
