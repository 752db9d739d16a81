//! What all calls share: a round, and what all ranks said on entering it.

use std::sync::Arc;

use super::Communicator;
use crate::dtype::Dtype;
use crate::error::{CallKind, Error};
use crate::lane::Io;
use crate::rows::{Rows, Stores};
use crate::schedule::call::Agreement;
use crate::schedule::collective::{Copied, Program, Round, Skeleton, Tensor};
use crate::schedule::{Flag, Refusal, Tag, WindowId};

/// What a rank calls.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub kind: CallKind,
    pub dtype: Dtype,
    /// What else must be alike.
    pub option: u32,
    /// Bytes of the caller's tensor; where ranks have different ones, nothing.
    pub bytes: Option<u64>,
}

impl Call {
    /// What is said on entering.
    pub fn tag(&self, refused: bool) -> Tag {
        Tag {
            kind: self.kind,
            refusal: if refused { Refusal::Input } else { Refusal::None },
            options: self.dtype as u32 | self.option << 8,
            handle: self.bytes.unwrap_or(0),
            base: 0,
        }
    }
}

/// The caller's tensors.
pub(super) struct Tensors<'a> {
    /// What goes out, if it is not what comes in.
    pub input: Option<&'a [u8]>,
    /// What comes in.
    pub output: &'a mut [u8],
    /// How that is written, or what goes out straight to its place.
    pub stores: Stores,
}

impl Tensors<'_> {
    fn input(&self) -> &[u8] {
        self.input.unwrap_or(self.output)
    }
}

impl Communicator {
    /// Enters a round that this rank refuses: the others must hear of it.
    pub(super) fn refuse(&mut self, call: Call, program: Program, why: Error) -> Error {
        let sends = std::mem::take(&mut self.counts.none);
        let round = Round { program, sends: &sends, ..Self::empty(call.dtype) };
        let tag = call.tag(true);
        let told = self.enter(&round, &[], Stores::Cached, |_| tag);
        self.counts.none = sends;
        match told.and_then(|()| self.agreement(call).alike(tag, |peer| self.said(peer))) {
            Ok(()) => why,
            Err(error) => error,
        }
    }

    /// A round of nothing.
    pub(super) fn empty(dtype: Dtype) -> Round<'static> {
        let wire = crate::dtype::Wire::F32;
        Round { program: Program::AllToAll, parity: 0, at: 0, len: 0, dtype, wire, sends: &[] }
    }

    /// One round, from its entry to what is copied to the caller.
    pub(super) fn round(
        &mut self,
        call: Call,
        round: &Round<'_>,
        tensors: &mut Tensors<'_>,
    ) -> Result<(), Error> {
        let staged = self.stores(call.bytes.unwrap_or(round.len));
        self.enter(round, tensors.input(), staged, |_| call.tag(false))?;
        self.agree(call)?;
        self.carry(round.program, tensors)
    }

    /// The first stage: this rank's puts, stored like this, its word and tag to each peer, and everybody's.
    pub(super) fn enter(
        &mut self,
        round: &Round<'_>,
        input: &[u8],
        stores: Stores,
        tag: impl Fn(u32) -> Tag,
    ) -> Result<(), Error> {
        self.lanes.health.check()?;
        if round.at == 0 {
            // A call that failed may have left some.
            self.rounds.due.clear();
        }
        self.calls.enter();
        self.host.retype(round.dtype);
        self.rounds.fill(&self.seat, &Round { parity: self.calls.parity(), ..*round });
        for (to, said) in (0..).zip(&mut self.rounds.tags) {
            *said = tag(to);
        }
        let skeleton = self.skeleton(round.program);
        self.run(&skeleton, 0, &mut Io { input, ..Io::default() }, stores)
    }

    /// The other stages, and the copies to the caller.
    pub(super) fn carry(&mut self, program: Program, tensors: &mut Tensors<'_>) -> Result<(), Error> {
        self.copy_all(tensors)?;
        let skeleton = self.skeleton(program);
        let share = self.rounds.share.start as usize..self.rounds.share.end as usize;
        for (step, program) in skeleton.steps.iter().enumerate().skip(1) {
            let mut io = match program.tensor {
                Tensor::None => Io::default(),
                Tensor::Input => Io { input: tensors.input(), ..Io::default() },
                Tensor::Share => Io { input: &tensors.output[share.clone()], ..Io::default() },
                Tensor::Sums => Io { output: &mut tensors.output[share.clone()], ..Io::default() },
            };
            // All but the caller's tensor, and what is made of it, is in the cache.
            let stores = if program.tensor == Tensor::Input { tensors.stores } else { Stores::Cached };
            self.run(&skeleton, step, &mut io, stores)?;
        }
        self.rounds.end();
        if program.ends_in_the_next() { Ok(()) } else { self.copy_all(tensors) }
    }

    /// Copies what is due to the caller.
    fn copy_all(&mut self, tensors: &mut Tensors<'_>) -> Result<(), Error> {
        for copied in &self.rounds.due {
            self.copy(copied, tensors.output, tensors.stores)?;
        }
        self.rounds.due.clear();
        Ok(())
    }

    /// Copies bytes to the caller, of whom another thread may read them: so stores that nothing orders end here.
    pub(super) fn copy(&self, copied: &Copied, output: &mut [u8], stores: Stores) -> Result<(), Error> {
        let Copied { owner, offset, at, len } = *copied;
        let to = &mut output[at as usize..(at + len) as usize];
        self.port.fetch(owner, WindowId::POOL, offset, to, stores)?;
        if stores == Stores::Streaming {
            Rows::fence();
        }
        Ok(())
    }

    /// How to write so many bytes, if each neighbour does: to the caller, who reads them when all have come, and to a window, whose lines
    /// are still in the caches of those who read there last.
    pub(super) fn stores(&self, bytes: u64) -> Stores {
        let nodes = &self.seat.nodes;
        let members = nodes.members(nodes.node_of(self.seat.me)).len() as u64;
        Stores::of(bytes * members, self.cache)
    }

    fn run(
        &mut self,
        skeleton: &Skeleton,
        step: usize,
        io: &mut Io<'_>,
        stores: Stores,
    ) -> Result<(), Error> {
        let operands = self.rounds.operands(step, self.calls.value());
        let items = &skeleton.steps[step].stage.items;
        let result = self.host.run(&self.port, items, &operands, io, stores);
        result.map_err(|error| self.fail(error))
    }

    pub(super) fn fail(&self, error: Error) -> Error {
        self.world.fail(&self.lanes.world_ranks, error)
    }

    fn skeleton(&mut self, program: Program) -> Arc<Skeleton> {
        if let Some((_, skeleton)) = self.programs.iter().find(|(known, _)| *known == program) {
            return Arc::clone(skeleton);
        }
        let skeleton = Arc::new(self.seat.skeleton(program));
        self.programs.push((program, Arc::clone(&skeleton)));
        skeleton
    }

    /// Whether all ranks make this call, and none refuses.
    ///
    /// # Errors
    /// [`CallError::KindsDiffer`](crate::error::CallError), [`CallError::Disagree`](crate::error::CallError),
    /// [`CallError::PeerRefused`](crate::error::CallError) of the lowest rank that refused.
    pub(super) fn agree(&self, call: Call) -> Result<(), Error> {
        let group = self.agreement(call);
        group.alike(call.tag(false), |peer| self.said(peer))?;
        match group.refusal(|peer| self.said(peer))? {
            None => Ok(()),
            Some((peer, _)) => Err(group.refused_by(peer).into()),
        }
    }

    fn agreement(&self, call: Call) -> Agreement {
        let (number, rank, ranks) = (self.calls.number(), self.seat.me, self.seat.ranks());
        Agreement { call: number, rank, ranks, compared: call.bytes.map(|_| "bytes") }
    }

    /// What a peer said on entering the running round.
    pub(super) fn said(&self, peer: u32) -> Result<Tag, Error> {
        Ok(self.port.flag(peer, Flag::Entry)?.tag(self.calls.value()))
    }

    pub(super) fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let me = self.seat.me;
        (0..self.seat.ranks()).filter(move |&peer| peer != me)
    }
}

impl Call {
    /// What is said to a rank on entering, with the bytes that it gets and the most that any rank gets.
    pub(super) fn tag_with(&self, bytes: u64, most: u64) -> Tag {
        Tag { handle: bytes, base: most, ..self.tag(false) }
    }
}
