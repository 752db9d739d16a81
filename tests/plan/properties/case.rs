//! Groups and routings, and their placement, found the slow way.

use proptest::prelude::*;
use proptest::sample::subsequence;
use sidelane::plan::{Overflow, ReceiveMode, RowLayout, SumOrder};
use sidelane::topology::Route;

/// A group and what its ranks want to send.
#[derive(Clone, Debug)]
pub struct Case {
    pub labels: Vec<u32>,
    pub held: Vec<Vec<u32>>,
    pub experts: u32,
    pub top_k: u32,
    pub align: u32,
    pub order: SumOrder,
    pub layout: RowLayout,
    pub mode: ReceiveMode,
    pub route: Route,
    pub chunks: u8,
    /// Per rank: expert ids, `[tokens, top_k]`.
    pub ids: Vec<Vec<i32>>,
}

/// A row: one choice or, rank-major, all choices of a token for one rank, of which this is the
/// first. Sorted, entries lie as rows do: by bin, source, token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    pub bin: u32,
    pub source: u32,
    pub token: u32,
    pub choice: u32,
    pub slot: u32,
    pub expert: u32,
    pub rank: u32,
}

/// The same placement, found the slow way.
pub struct GlobalSort {
    /// Per rank: what lies in each row; `None` for a pad or an unused slot.
    pub rows: Vec<Vec<Option<Entry>>>,
    /// Per rank: rows that it would take without a budget.
    pub required: Vec<usize>,
    /// All entries that land.
    pub entries: Vec<Entry>,
}

pub fn weight(source: u32, choice: u32) -> f32 {
    (source * 1000 + choice + 1) as f32
}

impl Case {
    pub fn ranks(&self) -> u32 {
        self.labels.len() as u32
    }

    /// Rank and expert of each slot, counted rank by rank.
    fn slots(&self) -> Vec<(u32, u32)> {
        (0..).zip(&self.held).flat_map(|(rank, ids)| ids.iter().map(move |&expert| (rank, expert))).collect()
    }

    /// Rank of each bin.
    pub fn bins(&self) -> Vec<u32> {
        match self.layout {
            RowLayout::ExpertMajor => self.slots().iter().map(|&(rank, _)| rank).collect(),
            RowLayout::RankMajor => (0..self.ranks()).collect(),
            other => unreachable!("{other:?}"),
        }
    }

    /// An entry for each choice that is not -1.
    pub fn choices(&self) -> Vec<Entry> {
        let (slots, mut all) = (self.slots(), Vec::new());
        for (source, ids) in (0..).zip(&self.ids) {
            for (choice, &id) in (0..).zip(ids).filter(|&(_, &id)| id >= 0) {
                let (token, expert) = (choice / self.top_k, id as u32);
                let slot = slot_for(&slots, source, expert);
                let rank = slots[slot as usize].0;
                let bin = if self.layout == RowLayout::RankMajor { rank } else { slot };
                all.push(Entry { bin, source, token, choice, slot, expert, rank });
            }
        }
        all.sort();
        all
    }

    /// The choices that an entry stands for.
    pub fn choices_of(&self, entry: &Entry) -> Vec<Entry> {
        let same = |other: &Entry| (other.bin, other.source, other.token);
        self.choices().into_iter().filter(|other| same(other) == same(entry)).collect()
    }

    /// Metadata of a row.
    pub fn words(&self, entry: &Entry) -> Vec<u32> {
        let bits = |e: &Entry| weight(e.source, e.choice).to_bits();
        match (self.layout, self.mode) {
            (RowLayout::ExpertMajor, ReceiveMode::Slots { .. }) => vec![bits(entry), 1],
            (RowLayout::ExpertMajor, _) => vec![bits(entry)],
            (RowLayout::RankMajor, _) => {
                let k = self.top_k as usize;
                let mut words = vec![0; 2 * k];
                let first = self.slots().iter().position(|slot| slot.0 == entry.rank).unwrap() as u32;
                for choice in self.choices_of(entry) {
                    let nth = (choice.choice % self.top_k) as usize;
                    (words[nth], words[k + nth]) = (choice.slot - first + 1, bits(&choice));
                }
                words
            }
            other => unreachable!("{other:?}"),
        }
    }

    /// Order in which the rows of a token are added up, partial sums first.
    pub fn key(&self, entry: &Entry) -> (u32, u32, u32) {
        let node = |rank: u32| {
            self.labels.iter().position(|label| *label == self.labels[rank as usize]).unwrap() as u32
        };
        let expert = if self.layout == RowLayout::RankMajor { entry.rank } else { entry.expert };
        match self.order {
            SumOrder::Expert => (0, 0, expert),
            SumOrder::Rank => (entry.rank, 0, expert),
            SumOrder::Node => (node(entry.rank), entry.rank, expert),
            other => unreachable!("{other:?}"),
        }
    }
}

/// Which of the slots that hold `expert` rank `source` uses.
fn slot_for(slots: &[(u32, u32)], source: u32, expert: u32) -> u32 {
    let replicas: Vec<usize> = (0..slots.len()).filter(|&slot| slots[slot].1 == expert).collect();
    replicas[(source + expert) as usize % replicas.len()] as u32
}

impl GlobalSort {
    pub fn new(case: &Case) -> Self {
        let mut entries = case.choices();
        entries.dedup_by_key(|entry| match case.layout {
            RowLayout::ExpertMajor => (entry.bin, entry.source, entry.token, entry.choice),
            RowLayout::RankMajor => (entry.bin, entry.source, entry.token, 0),
            other => unreachable!("{other:?}"),
        });
        let mut rows = vec![Vec::new(); case.labels.len()];
        for (bin, rank) in (0..).zip(case.bins()) {
            let rows: &mut Vec<Option<Entry>> = &mut rows[rank as usize];
            for source in 0..case.ranks() {
                let from = entries.iter().filter(|entry| (entry.bin, entry.source) == (bin, source));
                match case.mode.slots() {
                    None => rows.extend(from.map(|&entry| Some(entry))),
                    Some(slots) => {
                        let all = from.map(|&entry| Some(entry)).chain(std::iter::repeat(None));
                        rows.extend(all.take(slots as usize));
                    }
                }
            }
            while !rows.len().is_multiple_of(case.align as usize) {
                rows.push(None);
            }
        }
        let required = rows.iter().map(Vec::len).collect();
        if let Some(budget) = case.mode.budget() {
            rows.iter_mut().for_each(|rows| rows.truncate(budget as usize));
        }
        entries.retain(|entry| rows[entry.rank as usize].contains(&Some(*entry)));
        GlobalSort { rows, required, entries }
    }

    /// The entries of a token in the order of the sum.
    pub fn summed(&self, case: &Case, source: u32, token: u32) -> Vec<Entry> {
        let of = self.entries.iter().filter(|entry| (entry.source, entry.token) == (source, token));
        let mut all: Vec<Entry> = of.copied().collect();
        all.sort_by_key(|entry| case.key(entry));
        all
    }
}

pub fn cases() -> impl Strategy<Value = Case> {
    let shape = (1..=9usize).prop_flat_map(|ranks| {
        let labels = prop::collection::vec(0..4u32, ranks);
        (Just(ranks), labels, 1..=12u32, 1..=8u32)
    });
    shape.prop_flat_map(|(ranks, labels, experts, top_k)| {
        let top_k = top_k.min(experts);
        let owner = prop::collection::vec(0..ranks, experts as usize);
        let more = prop::collection::vec((0..ranks, 0..experts), 0..4);
        let order = Just((0..experts).collect::<Vec<u32>>()).prop_shuffle();
        let all: Vec<i32> = (0..experts as i32).collect();
        let token = (
            subsequence(all, top_k as usize).prop_shuffle(),
            prop::collection::vec(prop::bool::weighted(0.15), top_k as usize),
        )
            .prop_map(|(ids, dropped)| -> Vec<i32> {
                ids.into_iter().zip(dropped).map(|(id, dropped)| if dropped { -1 } else { id }).collect()
            });
        let size = prop_oneof![2 => 0..4usize, 1 => 0..=40usize];
        let tokens = size.prop_flat_map(move |n| prop::collection::vec(token.clone(), n));
        let ids = prop::collection::vec(tokens.prop_map(|tokens| tokens.concat()), ranks);
        let rest = (
            prop::sample::select(vec![1, 2, 16]),
            prop::sample::select(SumOrder::ALL.to_vec()),
            any::<bool>(),
            prop::sample::select(Route::ALL.to_vec()),
            1..=4u8,
            prop::sample::select(RowLayout::ALL.to_vec()),
            prop_oneof![
                2 => Just(ReceiveMode::Exact),
                1 => (0..50u32).prop_map(|rows| ReceiveMode::Budget { rows, overflow: Overflow::Drop }),
                1 => (0..8u32).prop_map(|rows| ReceiveMode::Slots { rows, overflow: Overflow::Drop }),
            ],
        );
        (Just(labels), owner, more, order, ids, rest).prop_map(
            move |(labels, owner, more, order, ids, (align, sum, plain, route, chunks, layout, mode))| {
                let mut held = vec![Vec::new(); ranks];
                if plain {
                    // Blocks, the first ranks one more, independent of the library's method.
                    for (rank, held) in held.iter_mut().enumerate() {
                        let upto =
                            |r: usize| r * (experts as usize / ranks) + r.min(experts as usize % ranks);
                        held.extend(upto(rank) as u32..upto(rank + 1) as u32);
                    }
                } else {
                    let mut put = |rank: usize, expert: u32| {
                        if !held[rank].contains(&expert) {
                            held[rank].push(expert);
                        }
                    };
                    order.iter().for_each(|&expert| put(owner[expert as usize], expert));
                    more.iter().for_each(|&(rank, expert)| put(rank, expert));
                }
                Case { labels, held, experts, top_k, align, order: sum, layout, mode, route, chunks, ids }
            },
        )
    })
}
