//! Landed rows and metadata, each once, at all ranks.

use sidelane::plan::{RankSets, ReceiveMode, RelayOrder, RowMetadata, RowRun};
use sidelane::topology::Route;

use super::case::{Play, weight};
use super::placed::{Placed, Rank, part};
use crate::support::reference::{Row, Visible};

/// Writer of a row: a token of a source, or none: zeros.
type Written = Option<(usize, usize)>;

/// All that lands at a rank: rows, and their metadata.
struct Landed {
    rows: Vec<Option<Written>>,
    metadata: Vec<Option<Vec<u32>>>,
    words: usize,
}

impl Landed {
    fn new(rows: usize, words: u32) -> Landed {
        Landed { rows: vec![None; rows], metadata: vec![None; rows], words: words as usize }
    }

    fn write(&mut self, run: RowRun, written: impl Fn(u32) -> (usize, usize)) {
        for nth in 0..run.count + run.pad {
            let row = &mut self.rows[(run.to_row + nth) as usize];
            let what = (nth < run.count).then(|| written(run.first + nth));
            assert_eq!(row.replace(what), None, "a row is written once");
        }
    }

    fn land(&mut self, run: RowRun, metadata: &[u32]) {
        for nth in 0..run.count + run.pad {
            let words = match nth < run.count {
                true => metadata[(run.first + nth) as usize * self.words..][..self.words].to_vec(),
                false => vec![0; self.words],
            };
            let place = &mut self.metadata[(run.to_row + nth) as usize];
            assert_eq!(place.replace(words), None, "metadata is written once");
        }
    }
}

/// Puts of all sources at a rank, and copies of relays to it.
fn land(play: &Play, placed: &Placed, rank: usize, rows: usize) -> Landed {
    let mut landed = Landed::new(rows, placed.sizing.words_out);
    for (source, Rank { sorted, layout, .. }) in placed.ranks.iter().enumerate() {
        for &run in part(&layout.runs, layout.runs_to(rank as u32)) {
            landed.write(run, |entry| (source, layout.rows[entry as usize] as usize));
            landed.land(run, &sorted.metadata);
        }
    }
    let mates = placed.nodes.members(placed.nodes.node_of(rank as u32));
    let member = mates.iter().position(|&mate| mate as usize == rank).unwrap();
    for &relay in mates.iter().filter(|_| play.case.route == Route::Pxn) {
        let (paths, forward) = (placed.paths(play, relay as usize), &placed.ranks[relay as usize].forward);
        for (nth, source) in paths.sources().enumerate() {
            let Rank { sorted, layout, .. } = &placed.ranks[source as usize];
            let sent = paths.of(source).relays().position(|r| r == relay).unwrap();
            let (mut tokens, mut metadata) = (Vec::new(), Vec::new());
            mates.iter().for_each(|&mate| metadata.extend(sorted.metadata_of(placed.bins.of(mate))));
            for chunk in 1..=play.chunks {
                // Rows of this chunk, behind those of earlier ones.
                let run = layout.runs[layout.block_runs[sent] as usize + usize::from(chunk) - 1];
                assert_eq!(run.to_row as usize, tokens.len());
                tokens.extend_from_slice(&layout.rows[run.first as usize..][..run.count as usize]);
                for &run in part(&forward.runs, forward.runs_of(nth, chunk, member)) {
                    let rows: Vec<u32> = forward.rows_of(run).collect();
                    let token = |nth: u32| tokens[rows[(nth - run.first) as usize] as usize] as usize;
                    landed.write(run, |nth| (source as usize, token(nth)));
                }
            }
            for &run in part(&forward.runs, forward.runs_of(nth, 0, member)) {
                landed.land(run, &metadata);
            }
        }
    }
    landed
}

/// The words that go with a row.
fn metadata_of(play: &Play, metadata: RowMetadata, seen: &Visible, rank: usize, at: usize) -> Vec<u32> {
    let k = play.case.top_k as usize;
    let Some(Row { source, choices, .. }) = &seen.rows[rank][at] else {
        return vec![0; metadata.words(k as u32) as usize];
    };
    let bits = |choice: usize| weight(*source, choice).to_bits();
    match metadata {
        RowMetadata::Weight => vec![bits(choices[0])],
        RowMetadata::Marked => vec![bits(choices[0]), 1],
        RowMetadata::Summed | RowMetadata::Gathered => unreachable!("nothing is gathered or summed here"),
        RowMetadata::Choices | RowMetadata::Indexed => {
            let experts = seen.local_experts(&play.case, &play.ids, rank, at);
            let mut words: Vec<u32> = experts.iter().map(|&expert| (expert + 1) as u32).collect();
            words.resize(2 * k, 0);
            choices.iter().for_each(|&choice| words[k + choice % k] = bits(choice));
            words.extend((metadata == RowMetadata::Indexed).then_some(at as u32 + 1));
            words
        }
    }
}

/// Per rank: which row in visible order each row is.
pub type Index = Vec<Vec<usize>>;

pub fn rows_and_metadata_land_once_each(play: &Play, seen: &Visible, placed: &Placed) -> Index {
    let of_rank = |(rank, rows): (usize, &Vec<Option<Row>>)| {
        let landed = land(play, placed, rank, rows.len());
        let visible = |at: usize| match landed.metadata[at].as_ref().and_then(|words| words.last()) {
            Some(&row) if play.case.spans && row > 0 => row as usize - 1,
            _ => at,
        };
        let index: Vec<usize> = (0..rows.len()).map(visible).collect();
        for (at, &visible) in index.iter().enumerate() {
            let written = rows[visible].as_ref().map(|row| (row.source, row.token));
            assert_eq!(landed.rows[at], Some(written), "row {at} of rank {rank}");
            let words = metadata_of(play, placed.metadata, seen, rank, visible);
            assert_eq!(landed.metadata[at], Some(words), "of row {at}");
        }
        let mut rows = index.clone();
        rows.sort_unstable();
        assert!(rows.into_iter().eq(0..index.len()), "every row lies somewhere");
        index
    };
    seen.rows.iter().enumerate().map(of_rank).collect()
}

/// Relays make as many copies as the sets of ranks, in relay order, have spans.
pub fn copies_are_those_of_relay_order(play: &Play, seen: &Visible, placed: &Placed) {
    for (me, Rank { forward, .. }) in placed.ranks.iter().enumerate() {
        let paths = placed.paths(play, me);
        let served = paths.served_by(me as u32);
        let copies = paths.sources().map(|source| {
            let goes = |token: usize, rank: &u32| {
                let rows = seen.rows[*rank as usize].iter().flatten();
                rows.filter(|row| (row.source, row.token) == (source as usize, token)).count() > 0
            };
            let (mut sets, mut order) = (RankSets::new(served.len() as u32), RelayOrder::default());
            for token in 0..play.case.counts[source as usize] as usize {
                let set = (0..).zip(served).filter(|(_, rank)| goes(token, rank)).map(|(member, _)| member);
                let set: Vec<u32> = set.collect();
                if !set.is_empty() {
                    sets.push(set);
                }
            }
            order.fill(&sets);
            order.copies(play.chunks)
        });
        assert_eq!(forward.copies(), copies.sum::<u64>(), "at rank {me}");
    }
}

/// Rows that relays stage for all their sources lie apart.
pub fn staged_rows_lie_apart(play: &Play, placed: &Placed) {
    for (me, Rank { layout, forward, .. }) in placed.ranks.iter().enumerate() {
        if play.case.route == Route::Direct || placed.nodes.nodes() == 1 {
            assert_eq!(layout.staged, 0);
            continue;
        }
        let mut taken = vec![false; layout.staged as usize];
        for row in forward.blocks.iter().flat_map(|block| block.first..block.first + block.rows) {
            assert!(!std::mem::replace(&mut taken[row as usize], true), "row {row} at rank {me}");
        }
        // In a budget, dropped rows were counted; slots are counted whether they are used or not.
        assert!(play.case.mode != ReceiveMode::Exact || taken.iter().all(|&taken| taken));
    }
}
