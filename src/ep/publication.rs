//! What a rank says before a dispatch: its counts, its weights, and where it can receive.

use super::ExpertParallel;
use crate::error::{CallError, Error, MemoryError};
use crate::memory::Extent;
use crate::schedule::{Control, HEADER_WORDS, WindowId};

/// Scratch for publications, own and others'.
#[derive(Debug)]
pub(super) struct Publication {
    counts: Vec<u32>,
    weights: Vec<f32>,
    /// Per rank: the extent it announced, (offset in its pool, bytes).
    pub announced: Vec<(u64, u64)>,
}

impl Publication {
    pub fn new(slots: u32) -> Self {
        Publication { counts: vec![0; slots as usize], weights: Vec::new(), announced: Vec::new() }
    }
}

impl ExpertParallel {
    /// Writes this rank's publication to its own control window; peers of the node read it there.
    pub(super) fn publish(&mut self, announced: &Extent) -> Result<(), MemoryError> {
        let at = self.control.publication(self.calls.parity());
        let mut header = [0u64; HEADER_WORDS];
        header[..2].copy_from_slice(&[announced.offset(), announced.len()]);
        self.port.write(WindowId::CONTROL, at, &header)?;
        self.port.write(WindowId::CONTROL, at + Control::COUNTS, &self.sorted.counts)?;
        self.port.write(WindowId::CONTROL, at + self.control.weights(), &self.sorted.weights)
    }

    /// Reads everybody's counts and announcements.
    pub(super) fn collect(&mut self) -> Result<(), Error> {
        let me = self.rank();
        self.counts.clear(&self.spec.map, me);
        self.publication.announced.clear();
        for source in 0..self.size() {
            let (owner, at) = self.place_of(source);
            let mut header = [0u64; HEADER_WORDS];
            self.port.read(owner, WindowId::CONTROL, at, &mut header)?;
            self.publication.announced.push((header[0], header[1]));
            let counts = &mut self.publication.counts;
            self.port.read(owner, WindowId::CONTROL, at + Control::COUNTS, counts)?;
            let entries: u64 = counts.iter().map(|&count| u64::from(count)).sum();
            if entries > self.control.max_entries() {
                let (call, what, rank) = (self.calls.number(), "number of entries", me);
                let (mine, theirs) = (self.control.max_entries(), entries);
                let kind = crate::error::CallKind::Dispatch;
                return Err(CallError::Disagree { call, kind, what, rank, peer: source, mine, theirs }.into());
            }
            self.counts.add(&self.spec.map, me, source, counts.iter().copied());
        }
        Ok(())
    }

    /// Reads the weights of the rows that come here, into the layout's places.
    pub(super) fn collect_weights(&mut self, layout: &mut crate::plan::Layout) -> Result<(), MemoryError> {
        let me = self.rank();
        let first_slot = self.spec.map.slots_of(me).start as usize;
        for source in 0..self.size() {
            let (owner, at) = self.place_of(source);
            let rows = layout.rows_from(source) as usize;
            // A neighbour's publication holds all its weights; a mailbox only those for this rank.
            let mut skip = 0;
            if owner == source {
                let counts = &mut self.publication.counts;
                self.port.read(owner, WindowId::CONTROL, at + Control::COUNTS, counts)?;
                skip = counts[..first_slot].iter().map(|&count| u64::from(count)).sum();
            }
            let weights = &mut self.publication.weights;
            weights.resize(rows.max(weights.len()), 0.0);
            let from = at + self.control.weights() + skip * 4;
            self.port.read(owner, WindowId::CONTROL, from, &mut weights[..rows])?;
            layout.weigh(source, weights[..rows].iter().copied());
        }
        Ok(())
    }

    /// In whose control window, and where, the publication of `source` can be read.
    fn place_of(&self, source: u32) -> (u32, u64) {
        self.control.published(&Self::at(&self.lanes), source, self.calls.parity())
    }
}
