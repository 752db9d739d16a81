//! What a host enqueues for a device: the same calls of the driver, in the same order, as
//! `exec::CopyEngineStepper` makes. A test on the fake driver compares the counts.
//!
//! ```text
//!   Put, PutRows near      copies, collected                                    stream of copies
//!   PutRows of own rows    what is collected is enqueued, a kernel              caller's stream
//!   ... of their metadata  nothing where the device plans: a kernel did         caller's stream
//!   Signal landed, read,   words, collected                                     stream of copies
//!          ready
//!   Wait landed, ready     words, collected before copies and signals           stream of copies
//!   Reduce                 what is collected is enqueued, a kernel              stream of copies
//!   Signal ready of a      a mark, if there is a new sum: what crosses from     stream of copies
//!          source          now on goes behind it
//!   other Signal, Wait     what is collected is enqueued: waits, copies, words  host
//!   PutRows far            queued behind the last mark: rows lie packed, or summed  NIC
//!   other Put, Signal far  behind what is queued, else at once                  NIC
//! ```
//!
//! What is collected is also enqueued at the end of a stage. Then the host posts what is queued for
//! the NIC. It waits until the NIC has read it before it gives memory back to local peers ("read"),
//! and at the end of a call. The model has GPUDirect, and so no outbox that could be full.

use std::collections::VecDeque;

use sidelane_core::plan::RowRun;
use sidelane_core::schedule::{
    Flag, FlagValue, Line as OpLine, MAX_BATCH, Op, Operand, OperandId, Operands, PutSource, SpanCopy,
    TrackOp, WindowId, copy_batches,
};
use sidelane_core::topology::Route;

use super::events::{Line, OwnWord, Task};
use super::hardware::{Place, at_rate};
use super::host_tasks::Lines;

/// Work that the next calls of the driver enqueue.
#[derive(Debug, Default)]
pub(super) struct Collected {
    waits: Vec<Task>,
    copies: Vec<Task>,
    /// Copies of metadata, behind those of rows.
    metadata: Vec<Task>,
    words: Vec<Task>,
    /// Tasks of the NIC, in order, and the mark that each is behind.
    queue: VecDeque<(u64, Task)>,
    /// Times that the caller's stream was told to go on behind the stream of copies.
    done: u64,
    /// Marks that the stream of copies has been told to leave.
    marks: u64,
    /// The last mark that the host has seen.
    seen: u64,
    /// Something was posted since the host last waited for the NIC.
    unsettled: bool,
    /// A sum is enqueued that no mark is behind.
    unmarked: bool,
}

/// A piece that moves for an operand.
#[derive(Clone, Copy, Debug)]
struct Piece {
    from: u32,
    bytes: u64,
    source: PieceSource,
}

/// Memory that a piece lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PieceSource {
    /// Of a device.
    Device,
    /// Of the host: row metadata, tables, control windows.
    Host,
}

impl Lines<'_> {
    /// The operations of a stage.
    pub(super) fn enqueue_stage(&mut self, items: &[TrackOp], operands: &Operands) {
        for &TrackOp { op, .. } in items {
            match op {
                Op::Put { to, operand } | Op::PutRows { to, operand } => {
                    self.move_pieces(operands, to, operand)
                }
                // Nothing was offered before the first call.
                Op::Wait { level: FlagValue::LastReturn, .. } => {}
                Op::Signal { to, flag: Flag::Ready, level: FlagValue::Call, .. } if to == self.paths.me() => {
                    self.tell_called();
                }
                Op::Wait { from, flag: Flag::Ready, .. } if from == self.paths.me() => {
                    self.push(Task::Hear(OwnWord::Called, 1));
                }
                Op::Signal { of, flag: Flag::Ready, .. } if !self.paths.same_node(of) => {
                    if std::mem::take(&mut self.collected.unmarked) {
                        self.leave_mark();
                    }
                }
                // Rows that cross are queued behind the mark.
                Op::Wait { from, flag: Flag::Ready, .. } if !self.paths.same_node(from) => {}
                Op::Signal { to, of, flag, level } => {
                    if op.frees_sources() && self.collected.unsettled {
                        self.flush();
                        self.settle();
                    }
                    let signal = Task::Signal { to, of, flag, value: operands.value(level) };
                    self.raise(to, (flag, level), signal);
                }
                Op::Wait { from, flag, level } => {
                    let wait = Task::Wait { of: from, flag, value: operands.value(level) };
                    self.wait(op, (from, flag, level), wait);
                }
                Op::Reduce { operand } => self.sum_pulled(operands, operand),
            }
        }
        self.flush();
    }

    fn move_pieces(&mut self, operands: &Operands, to: u32, operand: OperandId) {
        let moved = operands.table[operand.0 as usize];
        match moved {
            Operand::Rows { from: PutSource::Input, .. } if to == self.paths.me() => {
                return self.place_own_rows(operands, moved);
            }
            // A kernel did, when own rows had places.
            Operand::Rows { from: PutSource::Metadata, .. } if to == self.paths.me() && self.device_plans => {
                return;
            }
            _ => {}
        }
        let noted = matches!(moved, Operand::Rows { from: PutSource::Metadata, .. });
        for Piece { from, bytes, source } in self.pieces(operands, operand) {
            if self.paths.same_node(to) {
                let place = if source == PieceSource::Host { Place::Host } else { self.place(from, to) };
                let copy = self.copied(place, (from, to), bytes);
                let list = if noted { &mut self.collected.metadata } else { &mut self.collected.copies };
                list.extend(copy);
                continue;
            }
            // A run of metadata is posted even if it is empty.
            if bytes == 0 && source == PieceSource::Device {
                continue;
            }
            let send = Task::Send { to, messages: self.messages(bytes), bytes, rest: 0 };
            match source {
                PieceSource::Device => self.leave_later(send),
                PieceSource::Host => self.leave(send),
            }
        }
    }

    /// A kernel places own rows, pads counted, and reads tokens once. Engines already serve the
    /// other ranks.
    fn place_own_rows(&mut self, operands: &Operands, moved: Operand) {
        let Operand::Rows { first, count, row_bytes, .. } = moved else { return };
        self.enqueue();
        let runs = &operands.runs[first as usize..][..count as usize];
        let rows: u64 = runs.iter().map(|run| u64::from(run.count + run.pad)).sum();
        if rows > 0 {
            self.kernel((rows.min(self.tokens.into()) + rows) * row_bytes, 0);
        }
    }

    /// Collects a copy.
    pub(super) fn copy(&mut self, place: Place, ends: (u32, u32), bytes: u64) {
        let copy = self.copied(place, ends, bytes);
        self.collected.copies.extend(copy);
    }

    /// A copy, counted; none of no bytes.
    fn copied(&mut self, place: Place, (from, to): (u32, u32), bytes: u64) -> Option<Task> {
        let copies = u64::from(bytes > 0);
        self.program.work.count(place, copies, bytes);
        (copies > 0).then_some(Task::Copy { place, from, to, copies, bytes })
    }

    fn pieces(&self, operands: &Operands, operand: OperandId) -> Vec<Piece> {
        let me = self.paths.me();
        let piece_source = |from| match from {
            PutSource::Metadata if self.device_plans => PieceSource::Device,
            PutSource::Metadata
            | PutSource::Window { window: WindowId::CONTROL | WindowId::HOST_STAGING, .. } => {
                PieceSource::Host
            }
            PutSource::Input | PutSource::Window { .. } => PieceSource::Device,
        };
        match operands.table[operand.0 as usize] {
            Operand::Spans { first, count } => {
                let spans = &operands.spans[first as usize..][..count as usize];
                let piece = |span: &SpanCopy| {
                    let from = match span.from {
                        PutSource::Window { owner, .. } => owner,
                        PutSource::Input | PutSource::Metadata => me,
                    };
                    Piece { from, bytes: span.len, source: piece_source(span.from) }
                };
                spans.iter().map(piece).collect()
            }
            Operand::Rows { first, count, from, row_bytes, .. } => {
                let runs = &operands.runs[first as usize..][..count as usize];
                let source = piece_source(from);
                let piece =
                    |rows: u32, source| Piece { from: me, bytes: u64::from(rows) * row_bytes, source };
                // Zeros behind rows are copies of their own, those behind metadata from the host.
                let zeros = if from == PutSource::Metadata { PieceSource::Host } else { source };
                let pads = |pad: u32| (pad > 0).then(|| piece(pad, zeros));
                let pieces = |run: &RowRun| std::iter::once(piece(run.count, source)).chain(pads(run.pad));
                runs.iter().flat_map(pieces).collect()
            }
            Operand::Empty | Operand::SumRows { .. } | Operand::SumPulled { .. } | Operand::FetchWeights => {
                Vec::new()
            }
        }
    }

    fn raise(&mut self, to: u32, (flag, level): (Flag, FlagValue), signal: Task) {
        if !self.paths.same_node(to) {
            // A flag may overtake rows on the bus: a word in memory of the device goes first.
            if guards(flag, level) {
                self.leave(Task::Send { to, messages: 1, bytes: 8, rest: 0 });
            }
            return self.leave(signal);
        }
        if matches!(flag, Flag::Landed | Flag::Read | Flag::Ready) {
            self.collected.words.push(signal);
            return;
        }
        self.flush();
        self.push(signal);
    }

    fn wait(&mut self, op: Op, (from, flag, level): (u32, Flag, FlagValue), wait: Task) {
        let by_stream = matches!(flag, Flag::Landed | Flag::Ready) && op.line(self.paths) == OpLine::Stream;
        if by_stream {
            let Collected { copies, metadata, words, .. } = &self.collected;
            if !copies.is_empty() || !metadata.is_empty() || !words.is_empty() {
                self.flush();
            }
            self.collected.waits.push(wait);
            return;
        }
        self.flush();
        self.push(wait);
        let is_word = matches!(flag, Flag::Landed | Flag::Read)
            && (self.paths.same_node(from) || self.paths.route() == Route::Pxn);
        if !is_word && !self.paths.same_node(from) && guards(flag, level) {
            // The stream awaits the word behind rows whose flag the host has seen.
            self.operate(Line::Stream, Task::Busy(self.hardware.engines.per_word));
        }
    }

    /// A word of a stream by a call of its own.
    fn operate(&mut self, line: Line, word: Task) {
        let engines = &self.hardware.engines;
        let (list, host) = (engines.per_list, engines.per_call + engines.enqueue_word);
        self.program.work.memory_ops += 1;
        self.busy(host);
        self.hand(line, Task::Busy(list));
        self.hand(line, word);
    }

    /// Posts a task of the NIC behind those that are queued.
    fn leave(&mut self, task: Task) {
        match self.collected.queue.is_empty() {
            true => self.post(task),
            false => self.leave_later(task),
        }
    }

    /// Queues a task of the NIC behind the last mark.
    fn leave_later(&mut self, task: Task) {
        self.collected.queue.push_back((self.collected.marks, task));
    }

    fn post(&mut self, task: Task) {
        let work = &mut self.program.work;
        work.messages += 1;
        self.collected.unsettled = true;
        if let Task::Send { bytes, .. } = &task {
            work.inter_node_bytes += bytes;
            if *bytes == 0 {
                return;
            }
        }
        self.hand(Line::Nic, task);
    }

    /// Enqueues what is collected, then posts what is queued.
    pub(super) fn flush(&mut self) {
        self.enqueue();
        while let Some((behind, task)) = self.collected.queue.pop_front() {
            if behind > self.collected.seen {
                self.collected.seen = behind;
                self.push(Task::Hear(OwnWord::Marked, behind));
            }
            self.post(task);
        }
    }

    /// Waits until the NIC has read what was posted.
    pub(super) fn settle(&mut self) {
        if std::mem::take(&mut self.collected.unsettled) {
            self.push(Task::Join(Line::Nic));
        }
    }

    fn enqueue(&mut self) {
        let Collected { waits, copies, metadata, words, .. } = &mut self.collected;
        copies.append(metadata);
        let (waits, copies, words) = (std::mem::take(waits), std::mem::take(copies), std::mem::take(words));
        self.enqueue_list(&waits);
        self.enqueue_copies(&copies);
        self.enqueue_list(&words);
    }

    fn enqueue_list(&mut self, words: &[Task]) {
        let engines = &self.hardware.engines;
        for list in words.chunks(MAX_BATCH) {
            self.program.work.memory_ops += list.len() as u64;
            self.busy(engines.per_call + list.len() as u64 * engines.enqueue_word);
            self.hand(Line::Stream, Task::Busy(engines.per_list));
            list.iter().for_each(|word| self.hand(Line::Stream, word.clone()));
        }
    }

    fn enqueue_copies(&mut self, copies: &[Task]) {
        let engines = &self.hardware.engines;
        let mut rest = copies;
        for count in copy_batches(copies.len()) {
            let (batch, behind) = rest.split_at(count);
            rest = behind;
            self.program.work.batches += 1;
            self.busy(engines.per_call + batch.len() as u64 * engines.enqueue_copy);
            self.hand(Line::Stream, Task::Busy(engines.per_batch));
            if engines.switched {
                batch.iter().for_each(|copy| self.hand(Line::Stream, copy.clone()));
                continue;
            }
            let mut used: Vec<u32> = batch.iter().map(|copy| self.engine_of(copy)).collect();
            for (copy, &engine) in batch.iter().zip(&used) {
                let copy = Task::Hand(Line::Engine(engine), Box::new(copy.clone()));
                self.hand(Line::Stream, copy);
            }
            used.sort_unstable();
            used.dedup();
            used.into_iter().for_each(|engine| self.hand(Line::Stream, Task::Join(Line::Engine(engine))));
        }
    }

    /// The engine of a copy where each peer has one: that for the rank at the other end.
    fn engine_of(&self, copy: &Task) -> u32 {
        let (me, nodes) = (self.paths.me(), self.paths.nodes());
        match *copy {
            Task::Copy { from, to, .. } => nodes.index_in_node(if to == me { from } else { to }),
            _ => nodes.index_in_node(me),
        }
    }

    /// A kernel on the caller's stream, which works for so long.
    pub(super) fn launch(&mut self, ns: u64) {
        self.launch_on(Line::Caller, ns);
    }

    fn launch_on(&mut self, line: Line, ns: u64) {
        self.program.work.kernels += 1;
        self.busy(self.hardware.engines.per_call);
        self.hand(line, Task::Busy(self.hardware.compute.launch + ns));
    }

    /// A kernel that sums pulled rows and own ones.
    fn sum_pulled(&mut self, operands: &Operands, operand: OperandId) {
        let Operand::SumPulled { first, count, .. } = operands.table[operand.0 as usize] else { return };
        let terms = |output: u32| u64::from(operands.sum.starts[output as usize]);
        let rows = terms(first + count) - terms(first) + u64::from(count);
        let bytes = rows * self.sizing.return_bytes;
        self.enqueue();
        self.program.work.kernel_bytes += bytes;
        self.launch_on(Line::Stream, at_rate(bytes, self.hardware.compute.rate));
        self.collected.unmarked = true;
    }

    fn leave_mark(&mut self) {
        self.collected.marks += 1;
        self.operate(Line::Stream, Task::Tell(OwnWord::Marked, self.collected.marks));
    }

    /// A kernel that sorts so many choices, or plans them.
    pub(super) fn sort(&mut self, choices: u64) {
        self.launch(self.hardware.compute.sort * choices / 1000);
    }

    /// A copy between the host and memory of the caller's stream, by a call of its own.
    pub(super) fn copy_of_caller(&mut self, bytes: u64) {
        let (me, engines) = (self.paths.me(), &self.hardware.engines);
        if bytes > 0 {
            self.program.work.count(Place::Host, 1, bytes);
            self.busy(engines.per_call + engines.enqueue_copy);
            self.hand(Line::Caller, Task::Busy(engines.per_batch));
            let copy = Task::Copy { place: Place::Host, from: me, to: me, copies: 1, bytes };
            self.hand(Line::Caller, copy);
        }
    }

    /// The caller's stream says to the host that it has come to the call.
    fn tell_called(&mut self) {
        self.operate(Line::Caller, Task::Tell(OwnWord::Called, 1));
    }

    /// The stream of copies may go on when the caller's has packed its rows.
    pub(super) fn record_packed(&mut self) {
        self.hand(Line::Caller, Task::Tell(OwnWord::Packed, 1));
    }

    /// The stream of copies follows the caller's, and leaves its mark.
    pub(super) fn follow(&mut self) {
        self.enqueue();
        self.hand(Line::Stream, Task::Hear(OwnWord::Packed, 1));
        self.leave_mark();
    }

    /// The caller's stream goes on behind what is enqueued.
    pub(super) fn precede(&mut self) {
        self.enqueue();
        self.collected.done += 1;
        let done = self.collected.done;
        self.hand(Line::Stream, Task::Tell(OwnWord::Done, done));
        self.hand(Line::Caller, Task::Hear(OwnWord::Done, done));
    }

    /// The caller's stream writes that the call goes well so far.
    pub(super) fn clear_status(&mut self) {
        self.operate(Line::Caller, Task::Busy(self.hardware.engines.per_word));
    }

    /// Time of a kernel for the metadata of rows, which lays choices apart.
    pub(super) fn lay_apart(&mut self, bytes: u64) {
        self.launch(at_rate(2 * bytes, self.hardware.compute.rate));
    }
}

/// Whether rows come before such a flag of another node, from NIC to device.
fn guards(flag: Flag, level: FlagValue) -> bool {
    matches!((flag, level), (Flag::Block, FlagValue::Part(_)) | (Flag::Landed | Flag::Returned, _))
}
