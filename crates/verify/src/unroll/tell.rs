//! Unrolls a script: plays the planners and the caller of every rank.
//!
//! ```text
//!   dispatch   | release | free offered, take extents, write publication | entry | read tags, counts; write headers | rows | caller reads rows
//!   cached     | release | free offered, take extents                    | entry | read tags                        | rows | caller reads rows
//!   return     caller writes chunk | release | free offered, take staging | entry | read tags | home | sum | free staging, offer chunk
//!
//!   relay      | node entered | read tags, counts; write messages | counts sent | all entered | read messages, counts | agreed
//!              | headers | read headers or offers | ...
//! ```

use sidelane_core::error::PlanError;
use sidelane_core::plan::{ExpertMap, Strategy};
use sidelane_core::schedule::ReturnParts;

use super::gathered::gathering;
use super::state::{Exchange, SampledCall, Unroller, Until, bad};
use super::{ActorCall, Assumed, Call, ProofScenario, Role, UnrolledProgram};

pub(super) fn tell(script: &ProofScenario) -> Result<UnrolledProgram, PlanError> {
    let ranks = script.nodes.ranks();
    if script.map.ranks() != ranks {
        return Err(bad("ranks of the expert map", script.map.ranks() as usize, "as many as the nodes have"));
    }
    match script.strategy {
        Strategy::AllToAll => Unroller::new(script).tell(),
        Strategy::AllGather => {
            let map = ExpertMap::contiguous(ranks, ranks)?;
            let gathering = gathering(script, &map);
            Unroller { exchange: Some(Exchange::new(script)), ..Unroller::new(&gathering) }.tell()
        }
    }
}

impl<'a> Unroller<'a> {
    fn tell(mut self) -> Result<UnrolledProgram, PlanError> {
        for (number, call) in self.script.calls.iter().enumerate() {
            self.members.iter_mut().for_each(|member| member.calls.enter());
            let gathers = self.exchange.is_some();
            let told = match *call {
                Call::Dispatch { routing, keep } if gathers => self.gather(routing, keep, Until::End)?,
                Call::RefusedRegroup { routing } if gathers => self.gather(routing, false, Until::Counts)?,
                Call::RefusedDispatch { routing } => self.dispatch(routing, false, Until::Counts)?,
                _ if gathers => return Err(bad("call", number, "a dispatch, where rows are gathered")),
                Call::RefusedRegroup { .. } => {
                    return Err(bad("call", number, "one of an instance that gathers no rows"));
                }
                Call::Dispatch { routing, keep } => self.dispatch(routing, keep, Until::End)?,
                Call::Cached { handle } => self.cached(handle, Until::End)?,
                Call::RefusedCached { handle } => self.cached(handle, Until::Tags)?,
                Call::Return { handle, parts, copied } => self.ret(handle, parts, copied, Until::End)?,
                Call::RefusedReturn { handle } => {
                    self.ret(handle, ReturnParts { rows: true, weights: false }, false, Until::Tags)?
                }
                Call::Agree => self.agree(),
                Call::Mixed { routing, handle } => self.mixed(routing, handle)?,
            };
            self.add(told);
        }
        let actors = self.calls.first().map_or(0, Vec::len) as u32;
        let pool_bytes = self.members.iter().map(|member| member.pool.high).max().unwrap_or(0);
        let (ranks, control_bytes) = (self.script.nodes.ranks(), self.control.bytes());
        Ok(UnrolledProgram {
            ranks,
            actors,
            control_bytes,
            pool_bytes,
            calls: self.calls,
            assumed: self.assumed,
        })
    }

    /// The running call is unrolled; the next one runs.
    pub(super) fn add(&mut self, told: Vec<SampledCall>) {
        let parts = self.parts(told);
        self.calls.push(parts);
        self.call += 1;
    }

    /// The parts of all actors in the running call.
    fn parts(&mut self, told: Vec<SampledCall>) -> Vec<ActorCall> {
        let (mut own, mut others, call) = (Vec::new(), Vec::new(), self.call);
        for (rank, told) in (0..).zip(told) {
            match told {
                SampledCall::Inside(kind, all) => {
                    // No relay is offloaded where callers' threads enqueue.
                    let beside = if self.script.enqueues { Role::Transfers } else { Role::Relay };
                    for (scenes, role) in all.into_iter().zip([Role::Own, beside]) {
                        let part = ActorCall { rank, role, call, kind, scenes };
                        if role == Role::Own { own.push(part) } else { others.push(part) }
                    }
                }
                SampledCall::Outside(hearsay) => {
                    self.assumed.extend(hearsay.written.into_iter().map(|bytes| Assumed { call, bytes }));
                    self.outside.extend(hearsay.raised);
                }
            }
        }
        own.append(&mut others);
        for part in &mut own {
            part.scenes.iter_mut().for_each(|scene| scene.believe(part.rank, &self.outside));
        }
        own
    }
}
