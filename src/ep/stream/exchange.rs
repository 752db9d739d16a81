//! The exchange itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::StreamExchangeBuilder;
use super::aside::Aside;
use super::builder::Spec;
use super::late::late;
use super::places::{Places, Windows};
use super::proxy::Proxy;
use super::turn::Turn;
use crate::device::{Addresses, Check, Context, Kernels, Pack, PinnedMemory, Range, Span, Stream, Sum, Word};
use crate::ep::guard::Guard;
use crate::ep::passage::Passage;
use crate::error::{CallError, DeviceError, Error, Fault, LaneError, PlanError};
use crate::exec::{Enqueued, Lowered, PeerWindows};
use crate::lane::COPY_ENGINE;
use crate::plan::SlotShape;
use crate::schedule::Flag;
use crate::world::{Detour, Group, Registration, Shared};

/// What this rank waits for of each peer.
pub(super) const FLAGS: [Flag; 2] = [Flag::Landed, Flag::Home];
/// The status of a dead world; what kernels find is below it.
pub(super) const DEAD: u64 = 1 << 16;
/// What is computed: before a dispatch, behind it, behind a combine.
const KERNELS: [&str; 3] = ["pack", "check", "sum"];

/// Dispatch and combine on CUDA streams, in rank-major slots. See the [module](super).
///
/// All calls go into one stream, or into streams that the caller puts in order by events. It may be dropped when the host has
/// enqueued its last call; graphs that hold its calls must not be launched any more, and with several nodes their launches must
/// be done.
///
/// With several nodes, see that the stream is done, by [`synchronize`](Self::synchronize) or [`Stream::is_done`], before the
/// exchange goes, or at least before the world does: what CUDA alone has seen to be done Sidelane takes for under way. Until it
/// sees it, a thread that is left behind serves the stream and holds the world, which says no goodbye; a process that exits then
/// is lost to the others, not gone.
///
/// ```no_run
/// use sidelane::device::{Driver, Priority, Range, Stream};
/// use sidelane::ep::{StreamExchange, StreamTokens};
///
/// # fn layer(x: &Range, choices: &Range, weights: &Range, out: &Range, experts: fn(&Stream, &StreamExchange))
/// # -> sidelane::Result<()> {
/// let world = sidelane::World::from_env()?;
/// let (group, context) = (world.all()?, Driver::open()?.context(world.rank())?);
/// let mut exchange =
///     StreamExchange::builder(&group, &context).experts(64).top_k(8).hidden(7168).max_tokens(128).build()?;
/// let stream = Stream::new(&context, Priority::Usual)?;
///
/// let tokens = StreamTokens {
///     count: 100,
///     rows: x.span(0, 100 * 7168 * 2)?,
///     experts: choices.span(0, 100 * 8 * 4)?,
///     weights: weights.span(0, 100 * 8 * 4)?,
/// };
/// exchange.dispatch(&stream, &tokens)?; // enqueued: what comes behind it finds rows and headers
/// experts(&stream, &exchange); //           exchange.received() -> exchange.partials()
/// exchange.combine(&stream, out.span(0, 100 * 7168 * 2)?)?;
/// exchange.synchronize(&stream)
/// # }
/// ```
#[derive(Debug)]
pub struct StreamExchange {
    pub(super) shared: Arc<Shared>,
    pub(super) world_ranks: Vec<u32>,
    pub(super) me: u32,
    pub(super) device: u32,
    pub(super) spec: Spec,
    pub(super) shape: SlotShape,
    pub(super) experts: u32,
    pub(super) digest: u64,
    pub(super) places: Places,
    pub(super) kernels: Kernels,
    /// The rank of each expert, its number there, and the place of each token.
    pub(super) rank_of: Range,
    pub(super) local_of: Range,
    pub(super) rows: Range,
    pub(super) received: Range,
    /// Where slots are packed to, and where partial rows are summed from.
    pub(super) packed_at: Addresses,
    pub(super) summed_from: Addresses,
    pub(super) dispatch: Lowered,
    pub(super) combine: Lowered,
    pub(super) release: Lowered,
    /// Of a dispatch, and of a combine, without how copies are enqueued.
    pub(super) counts: [Enqueued; 2],
    pub(super) turn: Turn,
    pub(super) guard: Guard,
    /// Whom it awaits: by words of the host first, then by those that cards raise in the device's memory.
    pub(super) awaited: Vec<u32>,
    pub(super) aside: Option<Arc<Aside>>,
    /// This rank's own.
    pub(super) memory: Range,
    pub(super) words: PinnedMemory,
    pub(super) window: Windows,
    /// Goes last: it sees whether anybody still uses the words.
    pub(super) proxy: Option<Proxy>,
}

/// What a rank hands over: its tokens, in memory that its device reaches.
#[derive(Clone, Copy, Debug)]
pub struct StreamTokens<'a> {
    /// How many.
    pub count: u32,
    /// Rows, `[count, hidden]`.
    pub rows: Span<'a>,
    /// Choices, `i32 [count, top_k]`; -1 is dropped.
    pub experts: Span<'a>,
    /// Routing weights, `f32 [count, top_k]`.
    pub weights: Span<'a>,
}

/// What one dispatch and one combine ask of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamReport {
    /// Between packed and landed.
    pub dispatch: Enqueued,
    /// Between the experts' rows and the sum.
    pub combine: Enqueued,
    /// Kernels, none of them in between: compute.
    pub kernels: Vec<&'static str>,
    /// Ranks on this rank's own device. SMs make the copies to them, but for batches from CUDA 13.1
    /// on: [`Enqueued::copies_by_sms`] counts them.
    pub same_device: u32,
    /// Why rows that cross go by memory of the host, if any do.
    pub detour: Option<Detour>,
    /// How cards know the device's memory, where rows cross straight.
    pub registration: Option<Registration>,
}

impl StreamExchange {
    /// Settings first. `context` is of the device that this rank uses.
    pub fn builder<'g>(group: &'g Group, context: &'g Arc<Context>) -> StreamExchangeBuilder<'g> {
        StreamExchangeBuilder::new(group, context)
    }

    /// This rank's place in the group.
    pub fn rank(&self) -> u32 {
        self.me
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.world_ranks.len() as u32
    }

    /// Where things lie in a slot.
    pub fn shape(&self) -> SlotShape {
        self.shape
    }

    /// What was received: a slot of [`shape`](Self::shape) from each rank, by rank, own rows among them. As a tensor
    /// `[ranks * slot_rows, hidden]`, in which the first `header_rows` of each slot are its header.
    pub fn received(&self) -> &Range {
        &self.received
    }

    /// Where the experts leave their partial rows, `[ranks, max_tokens, hidden]`: row i of rank r is what this rank's experts
    /// make of row i of the slot of r, weighted and added up. Rows that a slot does not use may be left as they are.
    ///
    /// # Errors
    /// None in practice: it lies in the window.
    pub fn partials(&self) -> Result<Range, Error> {
        let slots = self.places.slots();
        let len = u64::from(self.size()) * slots.home_bytes();
        Ok(self.memory.part(slots.partial(0), len)?)
    }

    /// Enqueues a dispatch: behind it in the stream, [`received`](Self::received) is what all ranks sent. Collective.
    ///
    /// # Errors
    /// [`CallError::OutOfTurn`], [`PlanError::TooManyTokens`], and [`DeviceError`](crate::error::DeviceError) for tensors
    /// that are too small, misaligned or out of reach: nothing was enqueued, and the call can be made again. The cause of
    /// death of the world.
    pub fn dispatch(&mut self, stream: &Stream, tokens: &StreamTokens<'_>) -> Result<(), Error> {
        self.start_dispatch(stream, tokens)?;
        self.finish_dispatch(stream)
    }

    /// First half of [`dispatch`](Self::dispatch): sends. What is enqueued before the second half runs meanwhile.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn start_dispatch(&mut self, stream: &Stream, tokens: &StreamTokens<'_>) -> Result<(), Error> {
        self.turn("start_dispatch", |turn| (turn == Turn::Dispatch).then_some(0))?;
        let (count, max) = (tokens.count, self.spec.max_tokens);
        if count > max {
            return Err(PlanError::TooManyTokens { tokens: count, max }.into());
        }
        let pack = Pack {
            shape: self.shape,
            tokens: count,
            x: tokens.rows,
            experts: tokens.experts,
            weights: tokens.weights,
            n_experts: self.experts,
            rank_of: self.rank_of.span(0, self.rank_of.len())?,
            local_of: self.local_of.span(0, self.local_of.len())?,
            slots: &self.packed_at,
            places: self.rows.span(0, self.rows.len())?,
            counter: self.counter()?,
            status: self.status_word()?,
            digest: self.digest,
        };
        self.kernels.pack(stream, &pack)?;
        self.turn = Turn::Landing { tokens: count };
        let sent = self.dispatch.send(stream);
        sent.map_err(|error| self.fail(error.into()))
    }

    /// Second half of [`dispatch`](Self::dispatch): the stream waits for the rows of all ranks.
    ///
    /// # Errors
    /// [`CallError::OutOfTurn`]; what the driver refuses ends the world.
    pub fn finish_dispatch(&mut self, stream: &Stream) -> Result<(), Error> {
        let landing = |turn| if let Turn::Landing { tokens } = turn { Some(tokens) } else { None };
        let tokens = self.turn("finish_dispatch", landing)?;
        self.turn = Turn::Combine { tokens };
        let received = self.dispatch.receive(stream).and_then(|()| self.check(stream));
        received.map_err(|error| self.fail(error.into()))
    }

    /// Compares the headers with what they must be: a rank that makes another call is found before its rows are used.
    fn check(&self, stream: &Stream) -> Result<(), DeviceError> {
        let check = Check {
            shape: self.shape,
            ranks: self.size(),
            received: self.received.span(0, self.received.len())?,
            counter: self.counter()?,
            status: self.status_word()?,
            digest: self.digest,
        };
        self.kernels.check(stream, &check)
    }

    /// Calls of this rank, as the pack kernel counts them.
    fn counter(&self) -> Result<Word<'_, u64>, DeviceError> {
        self.memory.word(self.places.counter().0)
    }

    /// Enqueues a combine: behind it in the stream, `out`, `[tokens, hidden]`, is the sum of each token's partial rows, by
    /// rank, ascending. Collective.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch); an `out` that cannot be used is refused before anything is enqueued.
    pub fn combine(&mut self, stream: &Stream, out: Span<'_>) -> Result<(), Error> {
        self.start_combine(stream)?;
        self.finish_combine(stream, out)
    }

    /// First half of [`combine`](Self::combine): sends the partial rows home.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn start_combine(&mut self, stream: &Stream) -> Result<(), Error> {
        let tokens = self.turn("start_combine", Turn::combine)?;
        self.turn = Turn::Homing { tokens };
        let sent = self.combine.send(stream);
        sent.map_err(|error| self.fail(error.into()))
    }

    /// Second half of [`combine`](Self::combine).
    ///
    /// # Errors
    /// As [`combine`](Self::combine). With an `out` that cannot be used, this half can be called again.
    pub fn finish_combine(&mut self, stream: &Stream, out: Span<'_>) -> Result<(), Error> {
        if let Turn::Homing { tokens } = self.turn {
            self.turn = Turn::Home { tokens };
            self.combine.receive(stream).map_err(|error| self.fail(error.into()))?;
        }
        let home = |turn| if let Turn::Home { tokens } = turn { Some(tokens) } else { None };
        let tokens = self.turn("finish_combine", home)?;
        let sum = Sum {
            shape: self.shape,
            tokens,
            columns: self.spec.hidden,
            rows: self.spec.dtype,
            dtype: self.spec.dtype,
            homes: &self.summed_from,
            places: self.rows.span(0, self.rows.len())?,
            status: self.status_word()?,
            out,
        };
        self.kernels.sum(stream, &sum)?;
        self.turn = Turn::Dispatch;
        Ok(())
    }

    /// Instead of a combine: what was received has been read, and nothing comes home. Collective.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn release(&mut self, stream: &Stream) -> Result<(), Error> {
        self.turn("release", Turn::combine)?;
        self.turn = Turn::Dispatch;
        let released = self.release.send(stream).and_then(|()| self.release.receive(stream));
        released.map_err(|error| self.fail(error.into()))
    }

    /// Blocks until everything in the stream is done, however the world fares, and says how it went. For the end of a step or
    /// of a test: nothing else here blocks.
    ///
    /// With words in memory of the device, a dead world's waits are ended by a stream of Sidelane's. If blocked streams hold up
    /// all hardware queues, there is none, and this returns the cause with the stream still waiting: it keeps Sidelane's memory,
    /// and tensors of the caller's own must stay.
    ///
    /// # Errors
    /// [`LaneError::Deadline`] if a live rank is silent for too long, which ends the world. It names the first peer of which
    /// nothing has come, as far as words can be read: where the device does not answer, those of the host. If these say of nobody
    /// that it is late, it names this rank itself. Else as [`status`](Self::status).
    pub fn synchronize(&self, stream: &Stream) -> Result<(), Error> {
        let (start, deadline) = (Instant::now(), self.shared.options.clocks.deadline);
        let mut late = None;
        while !stream.is_done()? {
            let waited = start.elapsed();
            if self.shared.hub.health().check().is_err() {
                if self.aside.as_ref().is_some_and(|aside| aside.is_stuck()) {
                    break;
                }
            } else if waited > deadline && late.is_none() {
                let missing = self.missing(waited);
                // Words of a world that has died meanwhile tell nothing. Ending it ends the waits.
                late = self.shared.hub.health().check().is_ok().then(|| self.fail(missing));
            }
            std::thread::yield_now();
        }
        late.map_or_else(|| self.status(), Err)
    }

    /// What is known to be wrong: the world's cause of death, or what a kernel has found. Sums are zeros then.
    ///
    /// # Errors
    /// [`Cause`](crate::error::Cause), [`DeviceError::Fault`].
    pub fn status(&self) -> Result<(), Error> {
        self.shared.hub.health().check()?;
        let status = self.guard.status();
        match Fault::of(status as u32) {
            Some(fault) => Err(DeviceError::Fault { device: self.device, fault }.into()),
            None => Ok(()),
        }
    }

    /// The status, for kernels of the caller: a word that is 0 while all is well.
    ///
    /// # Errors
    /// None in practice: it lies in the window.
    pub fn status_word(&self) -> Result<Word<'_, u32>, DeviceError> {
        self.words.range().word(self.places.status())
    }

    /// What the calls ask of a stream, and which kernels they use. Copies are counted as the last
    /// call enqueued them, in a batch or one by one; before the first call, as on a stream that
    /// takes batches.
    pub fn report(&self) -> StreamReport {
        let peers = (0..self.size()).filter(|&peer| peer != self.me);
        let passage = self.proxy.as_ref().map(|proxy| &proxy.work().passage);
        let [dispatch, combine] = self.counts;
        StreamReport {
            dispatch: self.dispatch.with_copies(dispatch),
            combine: self.combine.with_copies(combine),
            kernels: KERNELS.to_vec(),
            same_device: peers.filter(|&peer| self.window.same_device(peer)).count() as u32,
            detour: passage.and_then(Passage::detour),
            registration: passage.and_then(Passage::registration),
        }
    }

    /// Refuses what is not next, and what comes after the end of the world.
    fn turn(&self, call: &'static str, next: impl FnOnce(Turn) -> Option<u32>) -> Result<u32, Error> {
        self.shared.hub.health().check()?;
        let expected = self.turn.name();
        next(self.turn).ok_or_else(|| CallError::OutOfTurn { call, expected }.into())
    }

    /// Peers wait for what could not be enqueued: their waits are ended, too.
    fn fail(&self, error: Error) -> Error {
        self.shared.fail(&self.world_ranks, error)
    }

    /// The peer whose word a stream still waits for.
    fn missing(&self, waited: Duration) -> Error {
        let by_card = self.aside.as_ref().map_or_else(|| Some(Vec::new()), |aside| aside.values());
        let all = FLAGS.len() * self.awaited.len();
        let by_host = all - if self.aside.is_some() { FLAGS.len() * self.window.far.len() } else { 0 };
        let mut values: Vec<u64> = (0..by_host).map(|nth| self.guard.value(nth)).collect();
        values.extend(by_card.into_iter().flatten());
        let landing = matches!(self.turn, Turn::Landing { .. } | Turn::Combine { .. });
        let (late, flag) = late(&values, usize::from(!landing));
        let peer = late.map_or(self.me, |nth| self.awaited[nth]);
        let lanes = self.proxy.as_ref().map(|proxy| proxy.work().port.lanes());
        let far = lanes.filter(|_| self.window.far.contains(&peer));
        let lane = far.map_or(COPY_ENGINE, |lanes| lanes.reach[peer as usize].name());
        let (rank, flag) = (self.me, FLAGS[flag] as u32);
        LaneError::Deadline { rank, peer, lane, flag, awaited: 1, seen: 0, waited }.into()
    }
}
