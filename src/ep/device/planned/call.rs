//! One call, as the enqueuer serves it: what each step of its program is to copy engines.
//!
//! The order of steps stands in [`schedule::call`](crate::schedule::call), and nowhere here. The
//! enqueuer plays its relay, too, in the same thread.

use super::dispatch::Landing;
use super::enqueuer::{Enqueuer, Kept};
use super::shape::StreamFlag;
use super::space::Extent;
use crate::device::DeviceRange;
use crate::dtype::Dtype;
use crate::ep::host::refusing;
use crate::ep::relay::{CallPlan, RelayCall, RelayTask};
use crate::error::{CallError, CallKind, Error};
use crate::exec::{Executor, Packed, Until, drive};
use crate::plan::{DispatchLayout, ExpertMap};
use crate::schedule::call::{CallMachine, Part, RankPrograms, Relays, Role, StageId, Work};
use crate::schedule::{Operands, ReturnParts, Tag};

/// A call amid its steps.
pub(super) struct DeviceCall<'p> {
    pub enqueuer: &'p mut Enqueuer,
    pub programs: &'p RankPrograms,
    pub seat: u32,
    /// Dispatch: tokens that the caller's stream announced.
    pub tokens: u32,
    /// Tokens that may be sent as they lie, or are packed when it is known how.
    pub x: Option<(DeviceRange, Dtype)>,
    /// The caller's stream has come to this call: what was given back before is free.
    pub reached: bool,
    /// Combine: where outputs begin.
    pub base: u64,
    /// The tag of this rank's entry.
    pub tag: Tag,
    /// Why this rank refuses the call; its tag says that it does.
    pub refused: Option<Error>,
    /// Dispatch: where rows land.
    pub landing: Option<Landing>,
    /// Memory behind what landed, which is this rank's until the call is over.
    pub staging: Option<Extent>,
    /// Another expert map, that this rank proposes.
    pub map: Option<ExpertMap>,
    /// The relay's part of this call.
    pub task: Option<RelayTask>,
}

impl<'p> DeviceCall<'p> {
    /// A call of this kind by the caller of a seat.
    pub fn new(enqueuer: &'p mut Enqueuer, programs: &'p RankPrograms, kind: CallKind, seat: u32) -> Self {
        DeviceCall {
            enqueuer,
            programs,
            seat,
            tokens: 0,
            x: None,
            reached: false,
            base: 0,
            tag: Tag { kind, context: seat as u16, ..Tag::default() },
            refused: None,
            landing: None,
            staging: None,
            map: None,
            task: None,
        }
    }

    /// Drives the call that was entered; returns why it was refused, if it was.
    ///
    /// # Errors
    /// Those that end the world.
    pub fn drive(&mut self, machine: &mut CallMachine, until: Until) -> Result<Option<Error>, Error> {
        let program = self.programs.own(self.tag.kind, Relays::Inline);
        drive(machine, program, self, until)
    }

    /// Sets the tag that goes out with the entries: one that refuses, if this rank does.
    pub fn say(&mut self, tag: Tag) {
        self.tag = match &self.refused {
            None => tag,
            Some(error) => refusing(tag, error),
        };
        self.enqueuer.tables.clear();
        self.enqueuer.tables.tags.fill(self.tag);
    }

    /// If tokens go as they lie: where that is in this rank's memory, and the first of the runs by
    /// token.
    pub fn in_place(&self) -> Option<(u64, u32)> {
        let (x, dtype) = self.x.as_ref()?;
        let offset = self.enqueuer.common.lie_here(self.tag.kind, (x, *dtype))?;
        Some((offset, self.enqueuer.kept[self.seat as usize].in_place?))
    }

    fn stage(&mut self, stage: StageId, part: Part) -> Result<(), Error> {
        let in_place = self.in_place();
        let Enqueuer { engine, tables, kept, common, calls, scratch, .. } = &mut *self.enqueuer;
        let items = self.programs.stages.items(stage, part);
        let layout: &DispatchLayout = &kept[self.seat as usize].layout;
        let rows = stage == StageId::Rows;
        let operands = Operands {
            runs: if rows { &layout.runs } else { &[] },
            ..tables.operands(*calls, common.shape.row_bytes(self.tag.kind))
        };
        if !rows || part == Part::Finish {
            return engine.run(items, &operands, None);
        }
        let (staging, notes) = (common.shape.staging(), common.shape.host_notes());
        let (packed, notes) = (common.piece(staging)?, common.host_piece(notes)?);
        let words = bytemuck::cast_slice(&scratch.notes);
        let (rows, at) = match (&self.x, in_place) {
            (Some((x, _)), Some((offset, _))) => (x, offset),
            _ => (&packed, staging.0),
        };
        let packed = Packed { rows, at, notes: &notes, notes_of_host: words };
        engine.run(items, &operands, Some(packed))
    }

    /// Has the relay perform a step.
    fn relay(&mut self, step: impl FnOnce(&mut RelayCall<'_, '_>) -> Result<(), Error>) -> Result<(), Error> {
        let Enqueuer { relay, engine, kept, calls, numbers, .. } = &mut *self.enqueuer;
        let Some(relay) = relay else { return Ok(()) };
        let (kind, programs) = (self.tag.kind, self.programs);
        let Kept { forward, numbers: (counts, sizes), .. } = &mut kept[self.seat as usize];
        let task = self.task.get_or_insert_with(|| {
            let parts = ReturnParts { rows: !kind.places(), weights: false };
            RelayTask { parts, ..RelayTask::new(*calls, kind) }
        });
        let judged = if kind.places() { (&numbers.counts, &numbers.sizes) } else { (&*counts, &*sizes) };
        let run = &mut |items: &[_], operands: &Operands<'_>| engine.run(items, operands, None);
        step(&mut RelayCall {
            relay,
            programs,
            task,
            plan: CallPlan::Own(forward),
            judged: Some(judged),
            run,
        })
    }
}

impl Executor for DeviceCall<'_> {
    fn run(&mut self, role: Role, stage: StageId, part: Part) -> Result<(), Error> {
        if role == Role::Relay {
            return self.relay(|relay| relay.run(role, stage, part));
        }
        self.stage(stage, part)?;
        if stage == StageId::Release && self.reached {
            let common = &self.enqueuer.common;
            common.space.reach(common.served.load(std::sync::atomic::Ordering::Relaxed) + 1);
        }
        Ok(())
    }

    fn compute(&mut self, role: Role, work: Work) -> Result<(), Error> {
        if role == Role::Relay {
            return self.relay(|relay| relay.compute(role, work));
        }
        match work {
            Work::AwaitStream => {
                let flag = if self.tag.kind.places() { StreamFlag::Dispatch } else { StreamFlag::Combine };
                self.enqueuer.await_stream(self.seat, flag)?;
                self.reached = true;
            }
            Work::Sort => self.sort(),
            Work::Publish => self.publish()?,
            Work::Announce => self.announce(),
            Work::Take => self.take()?,
            Work::Landings => self.landings()?,
            Work::Judge => {
                let Enqueuer { common, calls, numbers, .. } = &mut *self.enqueuer;
                common.fixed.agreement(*calls, self.tag.kind).judge(numbers)?;
            }
            Work::Place => self.place()?,
            Work::Describe => {
                let Enqueuer { common, calls, kept, sorted, .. } = &*self.enqueuer;
                common.fixed.describe_blocks(*calls, &kept[self.seat as usize].layout, sorted)?;
            }
            Work::FillRows => self.fill_rows()?,
            Work::FillBringIn => self.fill_bring_in()?,
            Work::Offer => self.offer(),
            Work::Bases => self.bases()?,
            Work::FillPull => self.fill_pull(),
            Work::Propose => self.propose(),
            Work::Adopt => self.adopt()?,
            Work::Retire => {
                let Enqueuer { calls, common, .. } = &mut *self.enqueuer;
                calls.returned();
                common.progress.returned(calls.last_return());
            }
            // Nobody waits for the verdict, and the caller's stream finds rows and metadata where
            // they landed.
            Work::TellAgreed | Work::Report | Work::Metadata => {}
            _ => return Err(CallError::unknown_step(self.tag.kind, &work).into()),
        }
        Ok(())
    }

    fn agree(&mut self, _: Role) -> Result<(), Error> {
        let refused = self.refused.take();
        let agreement = self.enqueuer.common.fixed.agreement(self.enqueuer.calls, self.tag.kind);
        agreement.agree(self.tag, refused).inspect_err(|_| self.landing = None)
    }

    fn admit(&mut self, _: Role) -> Result<(), Error> {
        let Enqueuer { common, calls, numbers, .. } = &mut *self.enqueuer;
        let verdict = common.fixed.agreement(*calls, self.tag.kind).check_space(self.tag, numbers);
        // Memory is free before the caller hears of the refusal, and may enter the next call.
        verdict.inspect_err(|_| self.landing = None)
    }
}
