//! Growth of the device heap: between the counts of a call and its rows, at all ranks or at none.
//!
//! ```text
//!   entry         each rank: what it announces     so all know from the tags alone whether one lacks memory
//!   grow          all, by the hub: bytes that they lack; map as many more at every rank, in whole chunks
//!   tags again    all, by the hub: where rows land now
//!   rows          as if the heap had been as large before
//! ```
//!
//! A call for which all ranks have memory sends no message more than without growth, and calls no
//! function of the driver for it.
//!
//! **How much.** A call *must* have memory for its rows. It *wishes* for the output of its experts,
//! too, and for what the handles that are alive may yet ask for: those have no call by which ranks
//! could agree. A rank that wishes announces so much less. A wish that cannot be fulfilled refuses
//! no call, and ends all wishes: later calls ask the driver only for what they must have, or for
//! what a rank was asked for and did not have. That rank announces nothing.
//!
//! **Where it may wait.** The driver may make a thread wait for its device when it maps memory. All
//! ranks have entered the call, so each has enqueued all of its earlier calls. What a stream waits
//! for is enqueued by then, and streams drain by themselves. So do those of other instances, whose
//! calls all threads of a rank make in one order.

use std::sync::atomic::Ordering;

use super::enqueuer::{DeviceCall, Enqueuer};
use super::heap_growth::HeapGrowth;
use crate::ep::call_agreement::CallAgreement;
use crate::error::Error;
use crate::schedule::{CallProperties, Class, Payload, Refusal, Tag};

impl Enqueuer {
    /// The bytes that a rank says it has for a dispatch, of `bytes` that it has announced: less by
    /// what its handles may ask for, and none where it was asked for memory and had none.
    pub fn said_bytes(&self, bytes: u64) -> u64 {
        // Relaxed: misses of another thread's call may count a call later.
        match &self.growth {
            Some(growth) if growth.may_grow() && self.common.missed.load(Ordering::Relaxed) > 0 => 0,
            Some(growth) if growth.wishes() => bytes.saturating_sub(self.owed()),
            _ => bytes,
        }
    }

    fn owed(&self) -> u64 {
        // Relaxed: an estimate of what handles will ask for.
        self.common.owed.load(Ordering::Relaxed)
    }

    /// Bytes that a rank announces beyond the most that a dispatch needs: then all ranks see
    /// whether there is room for what it wishes for.
    pub fn announced_beyond(&self) -> u64 {
        if !self.growth.as_ref().is_some_and(HeapGrowth::wishes) {
            return 0;
        }
        let shape = &self.common.shape;
        let rows = u32::try_from(shape.any_rows()).unwrap_or(u32::MAX);
        shape.bytes_behind(rows).saturating_add(self.owed())
    }
}

impl DeviceCall<'_> {
    /// The entries of all ranks into this call, as they were said last.
    pub(super) fn agreement(&self) -> CallAgreement<'_> {
        let Enqueuer { common, calls, .. } = &*self.enqueuer;
        CallAgreement { said: &self.said, ..common.fixed.agreement(*calls, self.tag.kind) }
    }

    /// Has the heap grow, if a rank has no memory for the rows of this call. What it says then, it
    /// says again. A heap that does not grow refuses nothing here: the verdict is that of the next
    /// step.
    ///
    /// # Errors
    /// Those that end the world.
    pub(super) fn grow(&mut self) -> Result<(), Error> {
        match CallProperties::of(self.tag.kind).class {
            Class::Cached => self.grow_along(),
            _ => self.grow_for_rows(),
        }
    }

    /// Whether the heap should grow before rows land: all ranks find the same.
    fn lacks_room(&self) -> Result<bool, Error> {
        let Enqueuer { common, numbers, growth, .. } = &*self.enqueuer;
        let Some(growth) = growth.as_ref().filter(|growth| growth.may_grow()) else { return Ok(false) };
        let properties = CallProperties::of(self.tag.kind);
        let lands = properties.class == Class::Dispatch && properties.payload == Payload::Tokens;
        if !lands || self.agreement().within_budget(&numbers.sizes).is_err() {
            return Ok(false);
        }
        for (rank, &rows) in (0..).zip(&numbers.sizes.rows) {
            let mine = rank == common.fixed.lanes.rank;
            let announced = if mine { self.tag.handle } else { self.agreement().tag_of(rank)?.handle };
            let must = common.fixed.extent_bytes(self.tag.kind, rows, numbers.sizes.staged_at(rank));
            let wish = must.saturating_add(common.shape.bytes_behind(rows));
            if must > announced || growth.wishes() && wish > announced {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Has the heap grow for the rows of a dispatch, and announces anew where they may land.
    fn grow_for_rows(&mut self) -> Result<(), Error> {
        if !self.lacks_room()? {
            return Ok(());
        }
        // Nothing was written there.
        if let Some(mut extent) = self.landing.take().and_then(|landing| landing.extent) {
            extent.trim(0);
        }
        let Enqueuer { common, numbers, growth, .. } = &mut *self.enqueuer;
        let Some(growth) = growth else { return Ok(()) };
        let (rank, sizes) = (common.fixed.lanes.rank, &numbers.sizes);
        let rows = sizes.rows[rank as usize];
        let must = common.fixed.extent_bytes(self.tag.kind, rows, sizes.staged_at(rank));
        let lacking = common.lacks(must, rows);
        let grown = growth.grow(&common.space, lacking);
        self.ungrown = grown.map_err(|error| common.fixed.fail(error))?;
        let landing = self.enqueuer.announce(self.tag.kind, self.context);
        self.tag = Tag { base: landing.base, handle: landing.len, ..self.tag };
        self.landing = Some(landing);
        self.say_again()
    }

    /// Has the heap grow for the rows of a call along a known layout, if a rank has found no memory
    /// for them and none refuses the call for another reason. If it does not grow, all ranks refuse
    /// with the same [`MemoryError::HeapNotGrown`](crate::error::MemoryError::HeapNotGrown).
    fn grow_along(&mut self) -> Result<(), Error> {
        let Some((lowest, lacks)) = self.only_lacks_room()? else { return Ok(()) };
        let lacking = match &self.refused {
            Some(_) => {
                let rows = self.enqueuer.kept[self.context as usize].layout.landed;
                self.enqueuer.common.lacks(self.tag.handle, rows)
            }
            None => [0; 2],
        };
        let Enqueuer { common, growth, .. } = &mut *self.enqueuer;
        let Some(growth) = growth else { return Ok(()) };
        let grown = growth.grow(&common.space, lacking);
        if let Some(refused) = grown.map_err(|error| common.fixed.fail(error))? {
            self.refused = Some(refused.error(common.fixed.room.lacks(lowest, lacks.handle, lacks.base)));
            return Ok(());
        }
        if self.refused.take().is_some() {
            self.tag.refusal = Refusal::None;
            let taken = self.take();
            taken.map_err(|error| self.enqueuer.common.fixed.fail(error))?;
        }
        self.say_again()
    }

    /// The lowest rank whose tag refuses this call for lack of memory, and the tag, if the heap may
    /// grow for it: all ranks make one call along one layout, and no tag refuses it otherwise.
    fn only_lacks_room(&self) -> Result<Option<(u32, Tag)>, Error> {
        let Enqueuer { common, growth, .. } = &*self.enqueuer;
        let kind = self.tag.kind;
        let along = CallProperties::of(kind).class == Class::Cached;
        if !along || !growth.as_ref().is_some_and(HeapGrowth::may_grow) {
            return Ok(None);
        }
        let (mut lowest, mut able) = (None, None);
        for rank in 0..common.fixed.lanes.ranks() {
            let mine = rank == common.fixed.lanes.rank;
            let tag = if mine { self.tag } else { self.agreement().tag_of(rank)? };
            let alike = match tag.refusal {
                Refusal::None => {
                    let first = *able.get_or_insert(tag);
                    (first.handle, first.options) == (tag.handle, tag.options)
                }
                Refusal::Space => {
                    lowest.get_or_insert((rank, tag));
                    true
                }
                Refusal::Input => false,
            };
            if tag.kind != kind || !alike {
                return Ok(None);
            }
        }
        Ok(lowest)
    }

    fn say_again(&mut self) -> Result<(), Error> {
        let Enqueuer { common, growth, .. } = &*self.enqueuer;
        let Some(growth) = growth else { return Ok(()) };
        // The others may be told, and write where this rank's rows would land.
        self.said = growth.say(self.tag).map_err(|error| common.fixed.fail(error))?;
        Ok(())
    }
}
