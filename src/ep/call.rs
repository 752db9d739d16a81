//! What all calls share: entering together, and agreeing before anything moves.

use std::sync::Arc;

use super::ExpertParallel;
use super::handle::Inner;
use super::proxy::Seat;
use super::relay::Errand;
use crate::error::{Cause, Error, MemoryError};
use crate::lane::Io;
use crate::rows::Stores;
use crate::schedule::{Calls, Item, Operands, Refusal, Sum, Tag};

/// Bits of the options digest.
pub(super) mod options {
    /// Rows are summed.
    pub const ROWS: u32 = 1;
    /// One `f32` per row comes home.
    pub const WEIGHTS: u32 = 2;
    /// Rows are multiplied with routing weights.
    pub const WEIGHTED: u32 = 4;
}

/// A call that was started, and that the other ranks wait for: dropped before it is finished, it ends the world.
#[derive(Debug)]
pub(super) struct Begun<'a> {
    ep: &'a mut ExpertParallel,
    finishing: bool,
}

impl<'a> Begun<'a> {
    pub fn new(ep: &'a mut ExpertParallel) -> Self {
        Begun { ep, finishing: false }
    }

    /// To make the second half.
    pub fn finish(&mut self) -> &mut ExpertParallel {
        self.finishing = true;
        self.ep
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if !self.finishing {
            let hub = &self.ep.fixed.shared.hub;
            hub.cancel(Cause::Cancelled { by: hub.rank() });
            // It finds the world dead, and comes back.
            self.ep.relay.as_mut().and_then(Seat::join);
            if let Some(gather) = &mut self.ep.gather {
                gather.engine.relay.as_mut().and_then(Seat::join);
            }
        }
    }
}

/// What is done once all ranks have agreed on a call.
pub(super) type Agreed = Box<dyn FnOnce() + Send + Sync>;

/// The tag of a rank that is ready for the call, or of one that refuses.
pub(super) fn entry<T>(tag: Tag, ready: &Result<T, Error>) -> Tag {
    match *ready {
        Ok(_) => tag,
        Err(Error::Memory(MemoryError::OutOfSpace { asked, free, .. })) => {
            Tag { refusal: Refusal::Space, handle: asked, base: free, ..tag }
        }
        Err(_) => Tag { refusal: Refusal::Input, ..tag },
    }
}

/// The part of a call that is this rank's relay's.
#[derive(Debug)]
pub(super) enum Relaying {
    /// There is only one node.
    None,
    /// It is played in the caller's thread.
    Here(Errand),
    /// It is played while the caller is away.
    Away,
}

impl ExpertParallel {
    /// Counts the call, and waits until peers have read what this rank offered last: the first stage of every call.
    pub(super) fn enter(&mut self) -> Result<(), Error> {
        self.fixed.shared.hub.health().check()?;
        self.calls.enter();
        let skeletons = Arc::clone(&self.skeletons);
        self.run(&skeletons.ret.licence.items, None, &mut Io::default(), Stores::Cached)
    }

    /// After this rank's own entry: gives the relay, if there is one, its errand in the running call. It begins at once if
    /// it is to work while the caller is away.
    pub(super) fn relay(
        &mut self,
        away: bool,
        errand: impl FnOnce(Calls) -> Errand,
    ) -> Result<Relaying, Error> {
        match &mut self.relay {
            None => Ok(Relaying::None),
            Some(_) if !away => Ok(Relaying::Here(errand(self.calls))),
            Some(seat) => {
                let sent = seat.send(errand(self.calls), &self.fixed);
                sent.map_err(|error| self.fail(error))?;
                Ok(Relaying::Away)
            }
        }
    }

    /// The relay's first part, where the caller plays it.
    pub(super) fn meet(&mut self, relaying: &mut Relaying) -> Result<(), Error> {
        if let (Relaying::Here(errand), Some(relay)) = (relaying, self.relay.as_mut().and_then(Seat::here)) {
            relay.meet(errand).map_err(|error| self.fixed.fail(error))?;
        }
        Ok(())
    }

    /// The relay's second part, where the caller plays it.
    pub(super) fn carry(&mut self, relaying: &mut Relaying) -> Result<(), Error> {
        if let (Relaying::Here(errand), Some(relay)) = (relaying, self.relay.as_mut().and_then(Seat::here)) {
            relay.carry(errand).map_err(|error| self.fixed.fail(error))?;
        }
        Ok(())
    }

    /// The relay has done its part: what it brings back.
    pub(super) fn relayed(&mut self, relaying: Relaying) -> Option<Errand> {
        match relaying {
            Relaying::None => None,
            Relaying::Here(errand) => Some(errand),
            Relaying::Away => self.relay.as_mut()?.join(),
        }
    }

    /// As [`Meeting::conclude`](super::meeting::Meeting::conclude), in the running call.
    pub(super) fn agree<T>(
        &self,
        mine: Tag,
        ready: Result<T, Error>,
        take_back: impl FnOnce(T),
    ) -> Result<T, Error> {
        self.fixed.meeting(self.calls, mine.kind).conclude(mine, ready, take_back)
    }

    /// Makes one call, and does this once all ranks have agreed on it: from then on it is not refused, and what is left of it is to
    /// move rows. What is refused, or not by exchange, is not told. The gradient of a weighted combine is two calls, and not for this.
    pub(crate) fn telling<R>(
        &mut self,
        agreed: impl FnOnce() + Send + Sync + 'static,
        call: impl FnOnce(&mut Self) -> R,
    ) -> R {
        self.agreed = Some(Box::new(agreed));
        let done = call(self);
        self.agreed = None;
        done
    }

    /// Whoever wants to know hears that the running call is agreed on.
    pub(super) fn tell_agreed(&mut self) {
        if let Some(agreed) = self.agreed.take() {
            agreed();
        }
    }

    /// Runs operations of the running call, with the layout of a handle.
    pub(super) fn run(
        &mut self,
        items: &[Item],
        handle: Option<&Inner>,
        io: &mut Io<'_>,
        stores: Stores,
    ) -> Result<(), Error> {
        self.run_sum(items, handle, false, io, stores)
    }

    /// As [`ExpertParallel::run`]; sums multiply with the handle's routing weights if `weighted`.
    pub(super) fn run_sum(
        &mut self,
        items: &[Item],
        handle: Option<&Inner>,
        weighted: bool,
        io: &mut Io<'_>,
        stores: Stores,
    ) -> Result<(), Error> {
        let operands = Operands {
            runs: handle.map_or(&[], |h| &h.layout.runs),
            rows: handle.map_or(&[], |h| &h.layout.rows),
            sum: handle.map_or(Sum::default(), |h| h.sum(&self.tables.bases, weighted)),
            ..self.tables.operands(self.calls, self.fixed.spec.row_bytes())
        };
        let result = self.host.run(&self.fixed.port, items, &operands, io, stores);
        result.map_err(|error| self.fail(error))
    }
}
