//! One round of a call: the entry on which all ranks agree, and what follows it.
//!
//! ```text
//!   begin    tags, own part -> windows, entry: do all ranks make the same call?
//!   carry    sums and puts of the program, then copies to the caller's tensor
//! ```

use super::{Communicator, RoundState};
use crate::dtype::Dtype;
use crate::error::{CallError, CallKind, Error, PlanError};
use crate::exec::{StepExecutor, Until, drive};
use crate::lane::Io;
use crate::rows::{RowKernels, Stores};
use crate::schedule::call_program::{Agreement, CallMachine, Part, Role, StageId, Work};
use crate::schedule::collective::{Copied, Program, RankView, Round, Skeleton, Tensor};
use crate::schedule::{Flag, Refusal, Tag, WindowId};

/// The call that a rank makes.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallSpec {
    pub kind: CallKind,
    pub dtype: Dtype,
    /// Further parameters that must be equal.
    pub option: u32,
    /// Bytes of the caller's tensor; where ranks have different ones, nothing.
    pub bytes: Option<u64>,
}

impl CallSpec {
    /// The tag that a rank sends on entering.
    pub fn tag(&self, refused: bool) -> Tag {
        Tag {
            kind: self.kind,
            refusal: if refused { Refusal::Input } else { Refusal::None },
            options: self.dtype as u32 | self.option << 8,
            handle: self.bytes.unwrap_or(0),
            ..Tag::default()
        }
    }
}

/// The caller's tensors.
pub(super) struct Tensors<'a> {
    /// Outgoing data, if it differs from the incoming one.
    pub input: Option<&'a [u8]>,
    /// Incoming data.
    pub output: &'a mut [u8],
    /// Stores for the tensor, or for parts that land in place.
    pub stores: Stores,
}

impl Tensors<'_> {
    fn input(&self) -> &[u8] {
        self.input.unwrap_or(self.output)
    }
}

/// Contribution of a rank to the entry of a round.
struct RoundEntry<'r> {
    call: CallSpec,
    round: &'r Round,
    input: &'r [u8],
    /// How its puts are stored.
    stores: Stores,
    /// Why it refuses the call; its tags say that it does.
    refused: Option<Error>,
}

/// A round amid its steps: the entry in the first half, the caller's tensors in the second.
struct RoundCall<'r, 't> {
    state: &'r mut RoundState,
    skeleton: &'r Skeleton,
    entry: Option<RoundEntry<'r>>,
    tensors: Option<&'r mut Tensors<'t>>,
}

impl StepExecutor for RoundCall<'_, '_> {
    fn run(&mut self, _: Role, stage: StageId, _: Part) -> Result<(), Error> {
        Err(CallError::unknown_step(CallKind::Unknown, &stage).into())
    }

    fn round(&mut self, nth: u8) -> Result<(), Error> {
        let RoundCall { state, skeleton, entry, tensors } = self;
        if let Some(RoundEntry { input, stores, .. }) = entry {
            return state.run(skeleton, nth, &mut Io { input, ..Io::default() }, *stores);
        }
        let Some(tensors) = tensors else { return Ok(()) };
        let share = state.rounds.share.start as usize..state.rounds.share.end as usize;
        let tensor = skeleton.steps[usize::from(nth)].tensor;
        // All but the caller's tensor, and the results made of it, is in the cache.
        let stores = if tensor == Tensor::Input { tensors.stores } else { Stores::Cached };
        let mut io = match tensor {
            Tensor::None => Io::default(),
            Tensor::Input => Io { input: tensors.input(), ..Io::default() },
            Tensor::Share => Io { input: &tensors.output[share], ..Io::default() },
            Tensor::Sums => Io { output: &mut tensors.output[share], ..Io::default() },
        };
        state.run(skeleton, nth, &mut io, stores)
    }

    fn compute(&mut self, _: Role, work: Work) -> Result<(), Error> {
        let RoundCall { state, entry, tensors, .. } = self;
        match (work, entry, tensors) {
            (Work::FillRound, Some(RoundEntry { round, .. }), _) => {
                state.rounds.fill(&state.view, &Round { parity: state.calls.parity(), ..**round });
            }
            (Work::CopyOut, _, Some(tensors)) => state.copy_all(tensors)?,
            (Work::EndRound, ..) => state.rounds.end(),
            _ => return Err(CallError::unknown_step(CallKind::Unknown, &work).into()),
        }
        Ok(())
    }

    fn agree(&mut self, _: Role) -> Result<(), Error> {
        let Some(RoundEntry { call, refused, .. }) = &mut self.entry else { return Ok(()) };
        let (group, refused) = (self.state.agreement(*call), refused.take());
        group.alike(call.tag(refused.is_some()), |peer| self.state.said(peer))?;
        if let Some(own) = refused {
            return Err(own);
        }
        match group.refusal(|peer| self.state.said(peer))? {
            None => Ok(()),
            Some((peer, _)) => Err(group.refused_by(peer).into()),
        }
    }

    /// Ranks take memory of a collective when they build it.
    fn admit(&mut self, _: Role) -> Result<(), Error> {
        Ok(())
    }
}

impl Communicator {
    /// Enters a collective call with unusable arguments of this rank, so that the other ranks hear
    /// of it and do not wait. They get [`PeerRefused`](CallError::PeerRefused), no tensor changes,
    /// and the next call works. Messages need no entry. Returns the error to report here: `error`,
    /// or the one that ended the world meanwhile.
    pub fn refuse(&mut self, kind: CallKind, error: Error) -> Error {
        let call = CallSpec { kind, dtype: Dtype::Bytes, option: 0, bytes: None };
        self.enter_refused(call, Program::AllToAll, error)
    }

    /// Enters a round that this rank refuses: the others must hear of it.
    pub(super) fn enter_refused(&mut self, call: CallSpec, program: Program, why: Error) -> Error {
        let round = &Round { program, ..Self::empty(call.dtype) };
        self.state.rounds.sends.clear();
        self.state.rounds.tags.fill(call.tag(true));
        let refused =
            self.begin(RoundEntry { call, round, input: &[], stores: Stores::Cached, refused: Some(why) });
        // A round that a rank refuses has no other end.
        refused.err().unwrap_or_else(|| PlanError::RefusedHere.into())
    }

    /// A round of nothing.
    pub(super) fn empty(dtype: Dtype) -> Round {
        let wire = crate::dtype::PartialDtype::F32;
        Round { program: Program::AllToAll, parity: 0, at: 0, len: 0, dtype, wire }
    }

    /// One round, from its entry to the copies to the caller.
    pub(super) fn round(
        &mut self,
        call: CallSpec,
        round: &Round,
        tensors: &mut Tensors<'_>,
    ) -> Result<(), Error> {
        let staged = self.stores(call.bytes.unwrap_or(round.len));
        self.state.rounds.tags.fill(call.tag(false));
        let machine = self.enter(call, round, (tensors.input(), staged))?;
        self.carry(machine, round.program, tensors)
    }

    /// The first half: this rank's puts from `input`, its word and its tag
    /// ([`Rounds::tags`](crate::schedule::collective::Rounds)) to each peer, and those of all
    /// peers. Afterwards all ranks have agreed on the round.
    ///
    /// # Errors
    /// [`CallError::KindsDiffer`], [`CallError::Disagree`], [`CallError::PeerRefused`] of the
    /// lowest rank that refused; those that end the world.
    pub(super) fn enter(
        &mut self,
        call: CallSpec,
        round: &Round,
        (input, stores): (&[u8], Stores),
    ) -> Result<CallMachine, Error> {
        self.begin(RoundEntry { call, round, input, stores, refused: None })
    }

    fn begin(&mut self, entry: RoundEntry<'_>) -> Result<CallMachine, Error> {
        self.state.lanes.check()?;
        if entry.round.at == 0 {
            // A call that failed may have left some.
            self.state.rounds.due.clear();
        }
        self.state.calls.enter();
        self.state.host.retype(entry.round.dtype);
        let Communicator { state, programs, .. } = self;
        let skeleton = skeleton_of(programs, &state.view, entry.round.program);
        let mut machine = CallMachine::default();
        let mut call = RoundCall { state, skeleton, entry: Some(entry), tensors: None };
        match drive(&mut machine, &skeleton.call, &mut call, Until::Half)? {
            None => Ok(machine),
            Some(refusal) => Err(refusal),
        }
    }

    /// The second half: the other stages, and the copies to the caller.
    pub(super) fn carry(
        &mut self,
        mut machine: CallMachine,
        program: Program,
        tensors: &mut Tensors<'_>,
    ) -> Result<(), Error> {
        let Communicator { state, programs, .. } = self;
        let skeleton = skeleton_of(programs, &state.view, program);
        let mut call = RoundCall { state, skeleton, entry: None, tensors: Some(tensors) };
        drive(&mut machine, &skeleton.call, &mut call, Until::End).map(drop)
    }

    /// Stores for so many bytes, if each local peer writes as many. The caller reads its own when
    /// all have arrived. Lines of a window may still lie in the caches of its last readers.
    pub(super) fn stores(&self, bytes: u64) -> Stores {
        let nodes = &self.state.view.nodes;
        let members = nodes.members(nodes.node_of(self.state.view.me)).len() as u64;
        Stores::of(bytes * members, self.cache)
    }
}

impl RoundState {
    /// Copies the due bytes to the caller.
    fn copy_all(&mut self, tensors: &mut Tensors<'_>) -> Result<(), Error> {
        for copied in &self.rounds.due {
            self.copy(copied, tensors.output, tensors.stores)?;
        }
        self.rounds.due.clear();
        Ok(())
    }

    /// Copies bytes to the caller. Another thread of the caller may read them, so unordered stores
    /// end here.
    pub(super) fn copy(&self, copied: &Copied, output: &mut [u8], stores: Stores) -> Result<(), Error> {
        let Copied { owner, offset, at, len } = *copied;
        let to = &mut output[at as usize..(at + len) as usize];
        self.port.fetch(owner, WindowId::POOL, offset, to, stores)?;
        if stores == Stores::Streaming {
            RowKernels::fence();
        }
        Ok(())
    }

    fn run(&mut self, skeleton: &Skeleton, nth: u8, io: &mut Io<'_>, stores: Stores) -> Result<(), Error> {
        let step = usize::from(nth);
        let operands = self.rounds.operands(step, self.calls.value());
        let items = &skeleton.steps[step].stage.items;
        let result = self.host.run(&self.port, items, &operands, io, stores);
        result.map_err(|error| self.fail(error))
    }

    pub(super) fn fail(&self, error: Error) -> Error {
        self.world.fail(&self.lanes.world_ranks, error)
    }

    fn agreement(&self, call: CallSpec) -> Agreement {
        let (number, rank, ranks) = (self.calls.number(), self.view.me, self.view.ranks());
        Agreement { call: number, rank, ranks, compared: call.bytes.map(|_| "bytes") }
    }

    /// The tag that a peer sent on entering the running round.
    pub(super) fn said(&self, peer: u32) -> Result<Tag, Error> {
        Ok(self.port.flag(peer, Flag::Entry)?.tag(self.calls.value()))
    }

    pub(super) fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let me = self.view.me;
        (0..self.view.ranks()).filter(move |&peer| peer != me)
    }
}

/// The skeleton of a program: one of those that were called, or a new one.
fn skeleton_of<'p>(
    programs: &'p mut Vec<(Program, Skeleton)>,
    view: &RankView,
    program: Program,
) -> &'p Skeleton {
    let known = programs.iter().position(|(known, _)| *known == program);
    let at = known.unwrap_or_else(|| {
        programs.push((program, view.skeleton(program)));
        programs.len() - 1
    });
    &programs[at].1
}

impl CallSpec {
    /// The tag for a rank on entering, with the bytes that it gets and the most that any rank gets.
    pub(super) fn tag_with(&self, bytes: u64, most: u64) -> Tag {
        Tag { handle: bytes, base: most, ..self.tag(false) }
    }
}
