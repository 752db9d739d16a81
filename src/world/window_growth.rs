//! Growth of a window on GPUs: one more piece of memory at every member, or at none.
//!
//! ```text
//!   all      bytes that are free on each device
//!   each     create a piece, export it            | all: who has one
//!   each     map its own piece and its peers'     | all: who has mapped them
//!   each     the pieces belong to the windows
//! ```
//!
//! Until the last step nothing is in a window, so a rank that is refused has all of them drop what
//! they have made: no stream knows the addresses. The driver may wait for streams of this process
//! meanwhile. Streams of exact sizes and of budgets drain without another call of the driver: each
//! wait has its cause enqueued before it, as [`ep::device`](crate::ep) says. In slots a stream may
//! wait for a call that a peer has yet to enqueue. So ranks that are threads of one process, and
//! share the driver's lock, end at the deadline where one grows while another's slots wait for it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::Group;
use super::device_window::DeviceWindow;
use crate::bootstrap::exchange_fds;
use crate::device::{Allocation, Context, MappedBehind};
use crate::error::{BootstrapError, Error, MemoryError};

/// How a growth ended, at all members alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Growth {
    /// Every member's memory has so many bytes now.
    Grown(u64),
    /// The device of this rank has no more memory, or its driver refused it. Nothing has changed.
    Refused(u32),
}

impl DeviceWindow {
    /// The common granularity of its pieces.
    pub(crate) fn granularity(&self) -> u64 {
        self.sizes.granularity
    }

    /// Bytes by which it may still grow.
    pub(crate) fn growth_left(&self) -> u64 {
        self.sizes.most - self.sizes.len
    }

    /// Adds `by` bytes to each member's memory, at most [what is left](DeviceWindow::growth_left),
    /// and maps whole granules for them. Refused, too, where fewer than `spare` bytes for each
    /// member would stay free on a device. Collective.
    ///
    /// # Errors
    /// The world's cause, and [`BootstrapError`]: the members are then of different minds.
    pub(crate) fn grow(
        &mut self,
        group: &Group,
        context: &Arc<Context>,
        by: u64,
        spare: u64,
    ) -> Result<Growth, Error> {
        let len = self.sizes.len.saturating_add(by).min(self.sizes.most);
        let whole = Allocation::whole(len, self.sizes.granularity).unwrap_or(u64::MAX);
        let pieces = match whole.saturating_sub(self.mapped) {
            0 => Ok(Vec::new()),
            more => self.map_more(group, context, (more, spare))?,
        };
        let pieces = match pieces {
            Ok(pieces) => pieces,
            Err(rank) => return Ok(Growth::Refused(rank)),
        };
        (self.mapped, self.sizes.len) = (self.mapped.max(whole), len);
        pieces.into_iter().for_each(MappedBehind::keep);
        self.ranges.iter().flatten().for_each(|range| range.lengthen(len));
        Ok(Growth::Grown(len))
    }

    /// Maps a piece of `bytes` bytes of each member, or gives the rank that was refused.
    fn map_more(
        &self,
        group: &Group,
        context: &Arc<Context>,
        (bytes, spare): (u64, u64),
    ) -> Result<Result<Vec<MappedBehind>, u32>, Error> {
        let me = group.rank();
        match Self::check_free(group, context, bytes.saturating_add(spare)) {
            Ok(_) => {}
            Err(Error::Device(error)) => {
                tracing::warn!(rank = me, %error, "the driver does not say what memory is free");
                return Ok(Err(me));
            }
            Err(Error::Memory(MemoryError::DeviceFull { rank, .. } | MemoryError::NotUsable { rank })) => {
                return Ok(Err(rank));
            }
            Err(error) => return Err(error),
        }
        let made = Allocation::new(context, bytes).and_then(|piece| Ok((piece.export()?, piece)));
        if let Some(rank) = refusing(group, made.as_ref().map(drop))? {
            return Ok(Err(rank));
        }
        let mapped = made.map_err(Error::from).and_then(|made| self.map_pieces(group, context, made));
        if let Some(rank) = refusing(group, mapped.as_ref().map(drop))? {
            return Ok(Err(rank));
        }
        mapped.map(Ok)
    }

    /// Maps this rank's new piece and those of its peers.
    fn map_pieces(
        &self,
        group: &Group,
        context: &Arc<Context>,
        (descriptor, own): (OwnedFd, Arc<Allocation>),
    ) -> Result<Vec<MappedBehind>, Error> {
        let me = group.rank() as usize;
        let offer =
            |peer: usize| (peer != me && self.ranges[peer].is_some()).then(|| vec![descriptor.as_fd()]);
        let (hub, key) = (group.shared.hub.as_ref(), group.step());
        let deadline = group.shared.options.timeouts.rendezvous;
        let received = exchange_fds(hub, &key, group.ranks(), me, &offer, deadline)?;
        let mut pieces = Vec::with_capacity(received.len());
        for ((fds, range), rank) in received.into_iter().zip(&self.ranges).zip(0..) {
            let Some(range) = range else { continue };
            let imported;
            let piece = if rank == me {
                &own
            } else {
                let [piece] = <[OwnedFd; 1]>::try_from(fds)
                    .map_err(|_| BootstrapError::Malformed { peer: format!("rank {rank}") })?;
                imported = Allocation::import(context, piece.as_fd(), own.bytes())?;
                &imported
            };
            pieces.push(range.map_behind(piece)?);
        }
        Ok(pieces)
    }
}

/// Asks all members how their step went: the first that failed.
fn refusing<E: std::fmt::Display>(group: &Group, step: Result<(), E>) -> Result<Option<u32>, Error> {
    if let Err(error) = &step {
        tracing::warn!(rank = group.rank(), %error, "the driver has no more memory for the device heap");
    }
    let heard = group.gather(&[u8::from(step.is_ok())])?;
    Ok(heard.iter().zip(0..).find(|(said, _)| said[..] != [1]).map(|(_, rank)| rank))
}
