//! Returned rows: the summands of each token, and the fetched words.

use sidelane::dtype::PARTIAL;
use sidelane::plan::{RowLayout, Summand};

use super::case::Play;
use super::landing::Index;
use super::placed::{Placed, Rank, part};
use crate::support::reference::Visible;

/// Rank and row of a summand that a relay returns unchanged, or holds itself.
fn resolve(play: &Play, placed: &Placed, me: usize, term: Summand) -> (usize, usize) {
    let paths = placed.paths(play, me);
    if paths.same_node(term.owner) {
        return (term.owner as usize, term.row as usize);
    }
    let nth = paths.relays().position(|relay| relay == term.owner).unwrap();
    let mut segments = placed.ranks[me].layout.blocks[nth].segments.iter();
    let mut entry = term.row;
    for &owner in paths.served_by(term.owner) {
        for segment in segments.by_ref().take(placed.bins.of(owner).len()) {
            if entry < segment.count {
                return (owner as usize, (segment.to_row + entry) as usize);
            }
            entry -= segment.count;
        }
    }
    panic!("no such row returns: {term:?}")
}

/// The summands of one token in the order of the sum, partials expanded: (rank, row, choice of the
/// weight).
fn sum_of(play: &Play, placed: &Placed, me: usize, token: usize) -> Vec<Vec<(usize, usize, usize)>> {
    let Rank { layout, .. } = &placed.ranks[me];
    let (terms, starts, choices) = layout.summands();
    let mut at = starts[token] as usize;
    let all = starts[token + 1] as usize - at;
    let own = |at: usize| {
        let (rank, row) = resolve(play, placed, me, terms[at]);
        (rank, row, choices[at] as usize)
    };
    let groups = match layout.group_starts.is_empty() {
        true if all == 0 => Vec::new(),
        true => vec![all as u32],
        false => part(&layout.groups, layout.group_starts[token]..layout.group_starts[token + 1]).to_vec(),
    };
    let sum: Vec<_> = groups
        .into_iter()
        .map(|group| {
            let first = at;
            if group != PARTIAL {
                at += group as usize;
                return (first..at).map(own).collect();
            }
            at += 1;
            let Summand { owner, row } = terms[first];
            let nth = placed.paths(play, owner as usize).sources().position(|s| s as usize == me).unwrap();
            let forward = &placed.ranks[owner as usize].forward;
            let partials = forward.partials_from(nth);
            assert!(
                row < partials.len() as u32 && partials.len() as u32 == layout.chunks[owner as usize].rows
            );
            let partial = (partials.start + row) as usize;
            let range = forward.partials.starts[partial]..forward.partials.starts[partial + 1];
            // Entries count through all blocks; the weight of each is in the metadata of its row.
            let terms = part(&forward.partials.terms, range).iter();
            let found = |term: &Summand| (term.owner as usize, term.row as usize, NO_CHOICE);
            terms.map(found).collect()
        })
        .collect();
    assert_eq!(at, starts[token + 1] as usize);
    sum
}

/// A partial has no choice of its own: its relay weights by the metadata.
const NO_CHOICE: usize = usize::MAX;

pub fn sums_find_their_rows(play: &Play, seen: &Visible, placed: &Placed, index: &Index) {
    for me in 0..play.ids.len() {
        for token in 0..play.case.counts[me] as usize {
            let expected = seen.terms(&play.case, &play.ids, me, token);
            let sum = sum_of(play, placed, me, token);
            assert_eq!(sum.len(), expected.len(), "token {token} of rank {me}");
            for (found, wanted) in sum.iter().flatten().zip(expected.iter().flatten()) {
                let row = index[found.0][found.1];
                assert_eq!((found.0, row), (wanted.0, wanted.1), "token {token} of rank {me}");
                assert!(found.2 == wanted.2 || found.2 == NO_CHOICE);
            }
            assert!(sum.iter().map(Vec::len).eq(expected.iter().map(Vec::len)));
        }
    }
}

pub fn fetches_find_their_words(play: &Play, seen: &Visible, placed: &Placed, index: &Index) {
    let (k, words) = (play.case.top_k as usize, placed.sizing.return_words);
    for (me, Rank { layout, .. }) in placed.ranks.iter().enumerate() {
        let (fetched, places) = layout.fetches();
        let mut returned = vec![None; play.ids[me].len()];
        for (term, &place) in fetched.iter().zip(places) {
            assert!(u64::from(term.row) < layout.chunks[term.owner as usize].metadata);
            let (rank, row) = resolve(play, placed, me, Summand { row: term.row / words, ..*term });
            let word = (rank, index[rank][row], (term.row % words) as usize);
            assert_eq!(returned[place as usize].replace(word), None, "a word returns once");
        }
        for (choice, word) in returned.into_iter().enumerate() {
            let nth = if play.case.layout == RowLayout::RankMajor { choice % k } else { 0 };
            let expected = seen.place_of(me, choice / k, choice).map(|(rank, row)| (rank, row, nth));
            assert_eq!(word, expected, "choice {choice} of rank {me}");
        }
    }
}
