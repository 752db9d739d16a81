//! The object that calls are made on, and how it drives them.

use std::sync::Arc;

use super::call::HostCall;
use super::flight::{Flight, Lent};
use super::gather::Gather;
use super::handle::{HostHandle, Inner};
use super::workspace::Workspace;
use crate::ep::builder::Spec;
use crate::ep::fixed::{CHUNKS, EpState, ReceiveMemory, RowMemory};
use crate::error::{CallError, Cause, Error};
use crate::exec::{Until, drive};
use crate::memory::Pool;
use crate::plan::Strategy;
use crate::schedule::call::{CallMachine, Engines, RankPrograms, Relays};
use crate::world::Group;

/// An [`ExpertParallel`](crate::ExpertParallel) on the host.
pub(in crate::ep) struct HostExchange {
    /// State that never changes, except for the expert map.
    pub fixed: Arc<EpState>,
    pub programs: Arc<RankPrograms>,
    /// State that calls reuse.
    pub space: Workspace,
    /// How rows go out, if not by exchange.
    pub gather: Option<Box<Gather>>,
}

impl HostExchange {
    /// Collective.
    pub fn new(group: &Group, spec: Spec) -> Result<Self, Error> {
        let gather = match spec.strategy {
            Strategy::AllToAll => None,
            Strategy::AllGather => Some(Box::new(Gather::new(group, &spec)?)),
        };
        let total = group.shared.heap.pool().total();
        let room = ReceiveMemory { total, space: "pool", setting: "SIDELANE_HEAP" };
        let (fixed, range) = EpState::new(group, spec, room, RowMemory::Near)?;
        let fixed = Arc::new(fixed);
        let programs =
            RankPrograms::new(fixed.paths(), CHUNKS, fixed.partial_bytes().is_some(), Engines::default());
        let space = Workspace::new(&fixed, range);
        Ok(HostExchange { fixed, programs: Arc::new(programs), space, gather })
    }

    /// Makes a call from its first step to its last.
    ///
    /// # Errors
    /// Why the call was refused; those that end the world.
    pub fn make(&mut self, flight: &mut Flight, lent: Lent<'_>) -> Result<(), Error> {
        self.enter()?;
        self.drive(&mut CallMachine::default(), flight, lent, Until::End)
    }

    /// Makes the first half of a call. [`HostExchange::finish`] makes the second.
    ///
    /// # Errors
    /// As [`HostExchange::make`].
    pub fn start(&mut self, flight: &mut Flight, lent: Lent<'_>) -> Result<CallMachine, Error> {
        self.enter()?;
        let mut machine = CallMachine::default();
        self.drive(&mut machine, flight, lent, Until::Half)?;
        Ok(machine)
    }

    /// Makes the second half of a call, which the machine has left at its half.
    ///
    /// # Errors
    /// As [`HostExchange::make`].
    pub fn finish(
        &mut self,
        mut machine: CallMachine,
        flight: &mut Flight,
        lent: Lent<'_>,
    ) -> Result<(), Error> {
        self.drive(&mut machine, flight, lent, Until::End)
    }

    fn enter(&mut self) -> Result<(), Error> {
        self.fixed.shared.hub.health().check()?;
        self.space.calls.enter();
        Ok(())
    }

    fn drive(
        &mut self,
        machine: &mut CallMachine,
        flight: &mut Flight,
        lent: Lent<'_>,
        until: Until,
    ) -> Result<(), Error> {
        let HostExchange { fixed, programs, space, .. } = self;
        let relays = if flight.offloaded { Relays::Thread } else { Relays::Inline };
        let program = programs.own(flight.kind(), relays);
        match drive(machine, program, &mut HostCall { fixed, programs, space, flight, lent }, until) {
            Ok(None) => Ok(()),
            Ok(Some(refusal)) => Err(refusal),
            Err(error) => Err(self.fail(error)),
        }
    }

    pub fn spec(&self) -> &Spec {
        &self.fixed.spec
    }

    /// The pool rows are received in.
    pub fn pool(&self) -> &Arc<Pool> {
        self.fixed.pool()
    }

    pub fn fail(&self, error: Error) -> Error {
        self.fixed.fail(error)
    }

    /// Whether a handle is one of this instance.
    pub fn check_handle(&self, handle: &HostHandle) -> Result<(), Error> {
        let (seen, expected) = (handle.inner().instance, self.space.instance);
        if seen != expected {
            return Err(CallError::ForeignHandle { seen, expected }.into());
        }
        Ok(())
    }

    pub fn handle_of(&self, inner: Inner) -> HostHandle {
        self.space.handle_of(inner, self.pool())
    }
}

impl std::fmt::Debug for HostExchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostExchange")
            .field("rank", &self.fixed.lanes.rank)
            .field("spec", self.spec())
            .finish()
    }
}

/// A call that was started, and that the other ranks wait for: dropped before it is finished, it
/// ends the world.
#[derive(Debug)]
pub(in crate::ep) struct UnfinishedCall<'a> {
    ep: &'a mut HostExchange,
    finishing: bool,
}

impl<'a> UnfinishedCall<'a> {
    pub fn new(ep: &'a mut HostExchange) -> Self {
        UnfinishedCall { ep, finishing: false }
    }

    /// To make the second half.
    pub fn finish(&mut self) -> &mut HostExchange {
        self.finishing = true;
        self.ep
    }
}

impl Drop for UnfinishedCall<'_> {
    fn drop(&mut self) {
        if !self.finishing {
            let hub = &self.ep.fixed.shared.hub;
            hub.cancel(Cause::Cancelled { by: hub.rank() });
            // The relay finds the world failed, and comes back.
            self.ep.space.join_relay();
            if let Some(gather) = &mut self.ep.gather {
                gather.engine.space.join_relay();
            }
        }
    }
}
