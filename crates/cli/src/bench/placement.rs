//! Which row every rank must see where, found from everybody's routing at once. The library finds the same from sums of
//! counts; nothing of that is used here.

use sidelane::error::PlanError;
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, Mode, RowLayout};

use super::config::Config;
use crate::routing::Router;

/// Whose token a row is, and the first choice of the token that it stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    pub source: u32,
    pub token: u32,
    pub choice: u32,
}

/// The rows of one rank.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// Origin of each row; `None` is a pad or an unused slot.
    pub rows: Vec<Option<Origin>>,
    /// Rows that would be needed, pads and unused slots counted.
    pub required: u32,
    /// Rows of each source in each bin, at most.
    pub most: u32,
}

/// The routing of all, and what decides where rows go.
pub struct Placement {
    pub map: ExpertMap,
    routings: Vec<Routing<'static>>,
    layout: RowLayout,
    align: usize,
    mode: Mode,
}

impl Placement {
    /// Asks for everybody's routing.
    pub fn new(config: &Config, router: &Router, mode: Mode) -> Result<Self, PlanError> {
        let ranks = 0..config.ranks();
        Ok(Placement {
            map: ExpertMap::contiguous(config.experts, config.ranks())?,
            routings: ranks.map(|rank| router.routing(config.share(), rank)).collect::<Result<_, _>>()?,
            layout: config.layout,
            align: config.align as usize,
            mode,
        })
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.routings.len() as u32
    }

    /// The decisions of a rank.
    pub fn routing(&self, rank: u32) -> &Routing<'static> {
        &self.routings[rank as usize]
    }

    /// The choices of a token that lie on `rank`, with their expert slots.
    pub fn choices_on(&self, rank: u32, source: u32, token: u32) -> impl Iterator<Item = (u32, u32)> {
        let slots = self.map.slots_of(rank);
        let ids = (0..).zip(self.routings[source as usize].experts_of(token));
        ids.filter_map(move |(choice, &id)| {
            let slot = self.map.slot_for(source, u32::try_from(id).ok()?);
            slots.contains(&slot).then_some((choice, slot))
        })
    }

    /// The choices that a row on `rank` stands for, with their expert slots.
    pub fn stands_for(&self, rank: u32, row: Origin) -> impl Iterator<Item = (u32, u32)> {
        let all = self.layout == RowLayout::RankMajor;
        let choices = self.choices_on(rank, row.source, row.token);
        choices.filter(move |&(choice, _)| all || choice == row.choice)
    }

    /// The rows of a rank; `lost` is told of those for which there is no room.
    pub fn at(&self, rank: u32, mut lost: impl FnMut(Origin)) -> Place {
        let slots = self.map.slots_of(rank);
        // Rank-major there is one bin, and one row stands for all choices of a token.
        let (bins, rows_per_token) = match self.layout {
            RowLayout::ExpertMajor => (slots.len(), usize::MAX),
            RowLayout::RankMajor => (1, 1),
        };
        let mut segments: Vec<Vec<Option<Origin>>> = vec![Vec::new(); bins];
        let mut most = 0;
        for (source, routing) in (0u32..).zip(&self.routings) {
            let before: Vec<usize> = segments.iter().map(Vec::len).collect();
            for token in 0..routing.tokens() {
                for (choice, slot) in self.choices_on(rank, source, token).take(rows_per_token) {
                    let bin = if bins == 1 { 0 } else { (slot - slots.start) as usize };
                    segments[bin].push(Some(Origin { source, token, choice }));
                }
            }
            for (segment, before) in segments.iter_mut().zip(before) {
                most = most.max((segment.len() - before) as u32);
                if let Some(room) = self.mode.slots() {
                    let end = before + room as usize;
                    segment.drain(end.min(segment.len())..).flatten().for_each(&mut lost);
                    segment.resize(end, None);
                }
            }
        }
        for segment in &mut segments {
            segment.resize(segment.len().next_multiple_of(self.align), None);
        }
        let mut rows = segments.concat();
        let required = rows.len() as u32;
        let room = self.mode.budget().unwrap_or(required).min(required);
        rows.drain(room as usize..).flatten().for_each(lost);
        Place { rows, required, most }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two ranks of two experts; two tokens each, of two choices.
    fn placement(layout: RowLayout, align: usize, mode: Mode) -> Placement {
        let routing = |ids: [i32; 4]| Routing::new(2, ids.to_vec(), vec![0.5; 4]).unwrap();
        let routings = vec![routing([0, 1, 1, 3]), routing([1, -1, 2, 0])];
        Placement { map: ExpertMap::contiguous(4, 2).unwrap(), routings, layout, align, mode }
    }

    /// Source, token, choice.
    type Row = (u32, u32, u32);

    /// The rows of rank 0, and those that were lost.
    fn rows(placement: &Placement) -> (Vec<Option<Row>>, Vec<Row>) {
        let of = |row: Origin| (row.source, row.token, row.choice);
        let mut lost = Vec::new();
        let place = placement.at(0, |row| lost.push(of(row)));
        (place.rows.into_iter().map(|row| row.map(of)).collect(), lost)
    }

    #[test]
    fn rows_lie_by_expert_or_by_source() {
        let (seen, _) = rows(&placement(RowLayout::ExpertMajor, 3, Mode::Eager));
        let [a, b, c, d, e] = [(0, 0, 0), (1, 1, 1), (0, 0, 1), (0, 1, 0), (1, 0, 0)].map(Some);
        assert_eq!(seen, [a, b, None, c, d, e]);
        let by_rank = placement(RowLayout::RankMajor, 1, Mode::Eager);
        assert_eq!(rows(&by_rank).0, [a, d, e, b]);
        let both = by_rank.stands_for(0, Origin::default()).collect::<Vec<_>>();
        assert_eq!(both, [(0, 0), (1, 1)]);
    }

    #[test]
    fn what_has_no_room_is_lost() {
        let overflow = sidelane::plan::Overflow::Drop;
        let (seen, lost) = rows(&placement(RowLayout::ExpertMajor, 1, Mode::Budget { rows: 3, overflow }));
        assert_eq!((seen.len(), lost), (3, vec![(0, 1, 0), (1, 0, 0)]));
        let slots = placement(RowLayout::ExpertMajor, 1, Mode::Slots { rows: 1, overflow });
        let (seen, lost) = rows(&slots);
        assert_eq!(seen, [(0, 0, 0), (1, 1, 1), (0, 0, 1), (1, 0, 0)].map(Some));
        assert_eq!((lost, slots.at(0, drop).most), (vec![(0, 1, 0)], 2));
    }
}
