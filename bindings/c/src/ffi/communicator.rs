//! Collectives and messages of a group, on tensors of the host.
//!
//! A tensor may have any shape: only its number of elements counts. Elements of other types are
//! bytes, which can be moved and not summed.

use bytemuck::{try_cast_slice, try_cast_slice_mut};
use sidelane::Dtype;
use sidelane::collective::{AllReduceAlgorithm, Communicator as Collectives, CommunicatorBuilder};
use sidelane::dtype::{PartialDtype, with_element};
use sidelane::error::{CallKind, Error, PlanError};

use super::memory::{Out, addresses, apart, structure};
use super::objects::{Communicator, Group};
use super::tensor::{Source, Target, Tensor, reserved};
use super::versioned::{read, versioned};
use super::{border, close, get, give};
use crate::fault::Fault;
use crate::handles::{ExclusiveCell, Kind};
use crate::words::choice;
use crate::{Status, refuse};

/// By ascending rank, rounded once: the same bits on every lane and for every number of nodes.
pub const SIDELANE_ALGORITHM_DIRECT: u32 = 0;
/// From rank to rank, for many nodes; partial sums keep all bits of the f32 sum.
pub const SIDELANE_ALGORITHM_RING_F32: u32 = 1;
/// Likewise, with partial sums that are rounded to bf16: for elements of that type.
pub const SIDELANE_ALGORITHM_RING_BF16: u32 = 2;

/// Settings of a communicator: all ranks must pass the same. 0 is the default of every field.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CommunicatorOptions {
    /// sizeof(sidelane_communicator_options_t).
    pub size: usize,
    /// Bytes of a round. The communicator takes about ten times as much of SIDELANE_SYMMETRIC.
    /// Default: 512 KiB.
    pub chunk: u64,
    /// All-reduces of at most this many bytes are one-shot: every rank sums them whole, with the
    /// same bits. Default: 16 KiB.
    pub one_shot_bytes: u64,
    /// How an all-reduce adds up: SIDELANE_ALGORITHM_...
    pub algorithm: u32,
    /// 0.
    pub reserved: u32,
}
versioned!(CommunicatorOptions, "sidelane_communicator_options_t", reserved: u32);

impl CommunicatorOptions {
    fn apply<'g>(&self, builder: CommunicatorBuilder<'g>) -> Result<CommunicatorBuilder<'g>, Fault> {
        let all = [
            (SIDELANE_ALGORITHM_DIRECT, AllReduceAlgorithm::Direct),
            (SIDELANE_ALGORITHM_RING_F32, AllReduceAlgorithm::Ring(PartialDtype::F32)),
            (SIDELANE_ALGORITHM_RING_BF16, AllReduceAlgorithm::Ring(PartialDtype::Bf16)),
        ];
        let algorithm = choice(
            "algorithm",
            self.algorithm,
            &all,
            "one of SIDELANE_ALGORITHM_DIRECT, _RING_F32, _RING_BF16",
        )?;
        reserved("reserved", self.reserved)?;
        let mut builder = builder.algorithm(algorithm);
        if self.chunk > 0 {
            builder = builder.chunk(self.chunk);
        }
        if self.one_shot_bytes > 0 {
            builder = builder.one_shot_bytes(self.one_shot_bytes);
        }
        Ok(builder)
    }
}

/// Builds a communicator on a group; `options` may be NULL. Collective.
///
/// The caller guarantees: pointers are NULL or valid; `options` is as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_communicator_build(
    group: *mut Group,
    options: *const CommunicatorOptions,
    communicator: *mut *mut Communicator,
) -> Status {
    border(|| {
        let group = get(group)?;
        let arguments = || -> Result<_, Fault> {
            // SAFETY: as the caller promised.
            let out = unsafe { Out::new("communicator", communicator)? };
            let builder = Collectives::builder(&group);
            if options.is_null() {
                return Ok((out, builder));
            }
            // SAFETY: as the caller promised.
            let options = unsafe { read(options)? };
            Ok((out, options.apply(builder)?))
        };
        let (out, builder) = arguments().inspect_err(|_| refuse::communicator(&group))?;
        give(ExclusiveCell::new(Kind::Communicator, builder.build()?), out)
    })
}

/// Sums `data` over all ranks, element by element, in place. Collective; all ranks have the same
/// number of elements.
///
/// The caller guarantees: pointers are NULL or valid; the tensor is as large as it says, and no
/// other thread uses it during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_communicator_all_reduce(
    communicator: *mut Communicator,
    data: *const Tensor,
) -> Status {
    // SAFETY: as the caller promised.
    let data = || unsafe { target("data", data) };
    collective(
        communicator,
        CallKind::AllReduce,
        data,
        |group, (data, dtype)| with_element!(dtype, E => group.all_reduce::<E>(try_cast_slice_mut(data).unwrap_or_default())),
    )
}

/// `data` of rank `root` becomes that of all. Collective; as many elements on all ranks.
///
/// The caller guarantees: as sidelane_communicator_all_reduce().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_communicator_broadcast(
    communicator: *mut Communicator,
    root: u32,
    data: *const Tensor,
) -> Status {
    // SAFETY: as the caller promised.
    let data = || unsafe { target("data", data) };
    collective(
        communicator,
        CallKind::Broadcast,
        data,
        |group, (data, dtype)| with_element!(dtype, E => group.broadcast::<E>(root, try_cast_slice_mut(data).unwrap_or_default())),
    )
}

/// Sums part r of `send`, which has an equal part for each rank, over all ranks into `receive` of
/// rank r. Collective.
///
/// The caller guarantees: as sidelane_communicator_all_reduce(), of both tensors.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_communicator_reduce_scatter(
    communicator: *mut Communicator,
    send: *const Tensor,
    receive: *const Tensor,
) -> Status {
    // SAFETY: as the caller promised.
    let tensors = || unsafe { both(send, receive) };
    collective(communicator, CallKind::ReduceScatter, tensors, |group, (send, receive, dtype)| {
        with_element!(dtype, E => group.reduce_scatter::<E>(
            try_cast_slice(send).unwrap_or_default(),
            try_cast_slice_mut(receive).unwrap_or_default(),
        ))
    })
}

/// Part r of `send` goes to rank r; part s of `receive` is from rank s. Both have an equal part for
/// each rank. Collective.
///
/// The caller guarantees: as sidelane_communicator_reduce_scatter().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_communicator_all_to_all(
    communicator: *mut Communicator,
    send: *const Tensor,
    receive: *const Tensor,
) -> Status {
    // SAFETY: as the caller promised.
    let tensors = || unsafe { both(send, receive) };
    collective(communicator, CallKind::AllToAll, tensors, |group, (send, receive, dtype)| {
        with_element!(dtype, E => group.all_to_all::<E>(
            try_cast_slice(send).unwrap_or_default(),
            try_cast_slice_mut(receive).unwrap_or_default(),
        ))
    })
}

/// `send` of rank s becomes part s of `receive`, on all. Collective; as many elements on all ranks.
///
/// The caller guarantees: as sidelane_communicator_reduce_scatter().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_communicator_all_gather(
    communicator: *mut Communicator,
    send: *const Tensor,
    receive: *const Tensor,
) -> Status {
    // SAFETY: as the caller promised.
    let tensors = || unsafe { both(send, receive) };
    collective(communicator, CallKind::AllGather, tensors, |group, (send, receive, dtype)| {
        with_element!(dtype, E => group.all_gather::<E>(
            try_cast_slice(send).unwrap_or_default(),
            try_cast_slice_mut(receive).unwrap_or_default(),
        ))
    })
}

/// Sends `data` to a rank, which receives it by sidelane_communicator_receive() with as many
/// elements. Messages of a pair keep their order. Returns when all bytes are in flight; `data` may
/// then be changed. At most two chunks lie unread at the receiver: a longer message waits for it.
/// Only this rank gets an error for its own wrong arguments.
///
/// The caller guarantees: as sidelane_communicator_all_reduce().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_communicator_send(
    communicator: *mut Communicator,
    peer: u32,
    data: *const Tensor,
) -> Status {
    // SAFETY: as the caller promised.
    let data = || unsafe { source("data", data) };
    message(
        communicator,
        data,
        |group, (data, dtype)| with_element!(dtype, E => group.send::<E>(peer, try_cast_slice(data).unwrap_or_default())),
    )
}

/// Receives the next message of a rank, which must have as many elements of this type: otherwise it
/// is dropped, and both ranks get an error.
///
/// The caller guarantees: as sidelane_communicator_all_reduce().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_communicator_receive(
    communicator: *mut Communicator,
    peer: u32,
    data: *const Tensor,
) -> Status {
    // SAFETY: as the caller promised.
    let data = || unsafe { target("data", data) };
    message(
        communicator,
        data,
        |group, (data, dtype)| with_element!(dtype, E => group.receive::<E>(peer, try_cast_slice_mut(data).unwrap_or_default())),
    )
}

/// Sends to a rank and receives from it, concurrently: if both do so, neither waits for the other
/// to receive first.
///
/// The caller guarantees: as sidelane_communicator_reduce_scatter().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_communicator_exchange(
    communicator: *mut Communicator,
    peer: u32,
    send: *const Tensor,
    receive: *const Tensor,
) -> Status {
    // SAFETY: as the caller promised.
    let tensors = || unsafe { both(send, receive) };
    message(communicator, tensors, |group, (send, receive, dtype)| {
        with_element!(dtype, E => group.send_receive::<E>(
            peer,
            try_cast_slice(send).unwrap_or_default(),
            try_cast_slice_mut(receive).unwrap_or_default(),
        ))
    })
}

/// Waits until a rank has taken all messages that were sent to it.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_communicator_flush(communicator: *mut Communicator, peer: u32) -> Status {
    message(communicator, || Ok(()), |group, ()| group.flush(peer))
}

/// Closes the communicator. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_communicator_close(communicator: *mut Communicator) -> Status {
    close(communicator)
}

/// A collective call, or its refusal on all ranks.
fn collective<T>(
    communicator: *mut Communicator,
    kind: CallKind,
    arguments: impl FnOnce() -> Result<T, Fault>,
    call: impl FnOnce(&mut Collectives, T) -> Result<(), Error>,
) -> Status {
    border(|| {
        get(communicator)?.lend(|group| match arguments() {
            Ok(arguments) => Ok(call(group, arguments)?),
            Err(fault) => Err(refuse::communication(group, kind, fault)),
        })
    })
}

/// A call between two ranks.
fn message<T>(
    communicator: *mut Communicator,
    arguments: impl FnOnce() -> Result<T, Fault>,
    call: impl FnOnce(&mut Collectives, T) -> Result<(), Error>,
) -> Status {
    border(|| get(communicator)?.lend(|group| Ok(call(group, arguments()?)?)))
}

/// Elements to read.
///
/// # Safety
/// As [`Source::read`], on the host.
unsafe fn source<'a>(what: &'static str, at: *const Tensor) -> Result<(&'a [u8], Dtype), Fault> {
    // SAFETY: as the caller promised.
    let read = unsafe { Source::read(None, what, at, (None, structure(what, at)?.columns)) }?;
    match read {
        Source::Host { bytes, dtype } => Ok((bytes, dtype)),
        Source::Device { .. } => Err(of_device(what)),
    }
}

/// Elements to write.
///
/// # Safety
/// As [`Target::read`], on the host.
unsafe fn target<'a>(what: &'static str, at: *const Tensor) -> Result<(&'a mut [u8], Dtype), Fault> {
    // SAFETY: as the caller promised.
    let read = unsafe {
        let Tensor { rows, columns, .. } = structure(what, at)?;
        Target::read(None, what, at, (rows, columns))
    }?;
    match read {
        Target::Host { bytes, dtype } => Ok((bytes, dtype)),
        Target::Device { .. } => Err(of_device(what)),
    }
}

/// Elements to read and elements to write, of one type and apart from each other.
///
/// # Safety
/// As [`source`] and [`target`].
unsafe fn both<'a>(
    send: *const Tensor,
    receive: *const Tensor,
) -> Result<(&'a [u8], &'a mut [u8], Dtype), Fault> {
    // SAFETY: as the caller promised; read and written memory are compared before either is used.
    let ((sent, expected), (received, seen)) =
        unsafe { (source("send", send)?, target("receive", receive)?) };
    if seen != expected {
        return Err(PlanError::WrongDtype { what: "receive", seen, expected }.into());
    }
    apart(("send", addresses(sent)), ("receive", addresses(received)))?;
    Ok((sent, received, expected))
}

fn of_device(what: &'static str) -> Fault {
    PlanError::WrongPlace { what, seen: "a device", expected: "the host" }.into()
}
