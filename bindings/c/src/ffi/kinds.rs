//! What each name in C stands for.

use sidelane::ep::{ExpertOutput, ExpertRows, TokenBuffer};

use super::collective::CollectiveLayer;
use super::ep::Layer;
use super::moe::{TapeAt, Whole};
use super::objects::{
    Communicator, Ep, Gate, Group, Handle, HeapAllocator, Moe, Opaque, Output, PendingCombine,
    PendingDispatch, RowCollective, RowPartition, Rows, Stream, Tape, Tokens, Window, World,
};
use super::start_finish::{CombineUnderway, DispatchUnderway};
use crate::handles::{ExclusiveCell, Kind, Object};

/// Name in C, object, kind.
macro_rules! objects {
    ($($name:ident = $object:ty, $kind:ident;)*) => {$(
        impl Opaque for $name {
            type Object = $object;
        }
        impl Object for $object {
            const KIND: Kind = Kind::$kind;
        }
    )*};
}

objects! {
    World = sidelane::World, World;
    Group = sidelane::Group, Group;
    Window = ExclusiveCell<sidelane::Window>, Window;
    Ep = Layer, Ep;
    Handle = ExclusiveCell<sidelane::ep::Handle>, Handle;
    Rows = ExclusiveCell<ExpertRows>, Rows;
    Output = ExclusiveCell<ExpertOutput>, Output;
    Tokens = ExclusiveCell<TokenBuffer>, Tokens;
    PendingDispatch = ExclusiveCell<DispatchUnderway>, PendingDispatch;
    PendingCombine = ExclusiveCell<CombineUnderway>, PendingCombine;
    Gate = ExclusiveCell<sidelane::gate::Gate>, Gate;
    Stream = sidelane::device::Stream, Stream;
    RowCollective = CollectiveLayer, RowCollective;
    RowPartition = ExclusiveCell<sidelane::ep::RowPartition>, RowPartition;
    Communicator = ExclusiveCell<sidelane::collective::Communicator>, Communicator;
    Moe = Whole, Moe;
    Tape = ExclusiveCell<TapeAt>, Tape;
    HeapAllocator = sidelane::ep::HeapAllocator, HeapAllocator;
}
