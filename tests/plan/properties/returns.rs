//! Returned rows, and whether sums and fetches find them.

use sidelane::dtype::PARTIAL;
use sidelane::plan::{RowBuffer, Summand};

use super::Placed;
use super::case::{Case, Entry, GlobalSort};

/// The rows that `relay` returns to `me`, in the order in which they come; none from a rank that is
/// not its relay.
fn returned(global: &GlobalSort, placed: &Placed, me: u32, relay: u32) -> Vec<Entry> {
    let paths = placed.paths(relay);
    let Some(nth) = paths.sources().position(|source| source == me) else { return Vec::new() };
    let mut segments = placed.forwards[relay as usize].blocks[nth].segments.iter();
    let mut rows = Vec::new();
    for &owner in paths.served_by(relay) {
        for segment in segments.by_ref().take(placed.bins.of(owner).len()) {
            let row = |row: u32| global.rows[owner as usize][row as usize].expect("a row, and not a pad");
            rows.extend((segment.to_row..).take(segment.count as usize).map(row));
        }
    }
    assert!(rows.iter().all(|entry| entry.source == me));
    rows
}

/// The partial sums that `relay` returns to `me`, each with its rows.
fn partials(global: &GlobalSort, placed: &Placed, me: u32, relay: u32) -> Vec<Vec<Entry>> {
    let (paths, forward) = (placed.paths(relay), &placed.forwards[relay as usize]);
    let Some(nth) = paths.sources().position(|source| source == me) else { return Vec::new() };
    let before: u32 = forward.blocks[..nth].iter().map(|block| block.entries()).sum();
    let rows = returned(global, placed, me, relay);
    let sums = &forward.partials;
    let of = |partial: u32| {
        let terms = sums.starts[partial as usize] as usize..sums.starts[partial as usize + 1] as usize;
        terms.map(|term| {
            let Summand { owner, row } = sums.terms[term];
            let entry = global.rows[owner as usize][row as usize].expect("a row, and not a pad");
            assert_eq!(rows[(sums.entries[term] - before) as usize], entry, "what it is weighed by");
            entry
        })
    };
    forward.partials_from(nth).map(|partial| of(partial).collect()).collect()
}

/// Each token's summands are its rows, in the order of the sum: in place, returned, or already
/// added up by a relay.
pub fn sums_find_their_rows(case: &Case, global: &GlobalSort, placed: &Placed) {
    for (me, layout) in (0..).zip(&placed.layouts) {
        let paths = placed.paths(me);
        let of_relays: Vec<Vec<Entry>> =
            (0..case.ranks()).map(|rank| returned(global, placed, me, rank)).collect();
        let sums = placed.sizing.partial_bytes.is_some();
        let brought: Vec<Vec<Vec<Entry>>> = match sums {
            true => (0..case.ranks()).map(|rank| partials(global, placed, me, rank)).collect(),
            false => Vec::new(),
        };
        for rank in 0..case.ranks() {
            let at = rank as usize;
            let words = u64::from(placed.sizing.return_words);
            let (held, rows, entries, row_bytes) = match (paths.same_node(rank), sums) {
                (true, _) => (rank, global.rows[at].len(), global.rows[at].len(), placed.sizing.return_bytes),
                (false, false) => (me, of_relays[at].len(), of_relays[at].len(), placed.sizing.return_bytes),
                (false, true) => (me, brought[at].len(), of_relays[at].len(), 64),
            };
            assert_eq!(layout.held_by[at], held);
            let chunk = RowBuffer { rows: rows as u32, metadata: entries as u64 * words, row_bytes };
            if paths.same_node(rank) || paths.relays().any(|relay| relay == rank) {
                assert_eq!(layout.chunks[at], chunk);
            } else {
                assert_eq!(layout.chunks[at].bytes(), 0);
            }
        }
        let row = |term: &Summand| match paths.same_node(term.owner) {
            true => global.rows[term.owner as usize][term.row as usize].expect("a row, and not a pad"),
            false => of_relays[term.owner as usize][term.row as usize],
        };
        let (terms, starts, choices) = layout.summands();
        assert_eq!(starts.len(), case.ids[me as usize].len() / case.top_k as usize + 1);
        for token in 0..layout.tokens {
            let at = token as usize;
            let range = starts[at] as usize..starts[at + 1] as usize;
            let (mut terms, mut choices) = (terms[range.clone()].iter(), choices[range].iter());
            let groups: Vec<u32> = match layout.groups.is_empty() && layout.group_starts.is_empty() {
                true => vec![terms.len() as u32],
                false => layout.groups
                    [layout.group_starts[at] as usize..layout.group_starts[at + 1] as usize]
                    .to_vec(),
            };
            let mut found: Vec<Vec<Entry>> = Vec::new();
            for group in groups {
                if group == PARTIAL {
                    let Summand { owner, row } = *terms.next().unwrap();
                    assert!(!paths.same_node(owner));
                    choices.next();
                    found.push(brought[owner as usize][row as usize].clone());
                } else {
                    let rows: Vec<Entry> = terms.by_ref().take(group as usize).map(row).collect();
                    assert!(rows.iter().zip(choices.by_ref()).all(|(entry, choice)| entry.choice == *choice));
                    found.push(rows);
                }
            }
            assert_eq!(terms.len(), 0, "every summand is of a group");
            let expected = global.summed(case, me, token);
            let mut expected: Vec<Vec<Entry>> =
                expected.chunk_by(|a, b| case.key(a).0 == case.key(b).0).map(<[Entry]>::to_vec).collect();
            if case.order == sidelane::plan::SumOrder::Expert {
                expected = vec![expected.concat()];
            }
            assert_eq!(found, expected, "token {token} of rank {me} of {case:?}");
        }
    }
}

/// Each choice that landed has a word, and finds the one that lies behind its own row.
pub fn fetches_find_their_words(case: &Case, global: &GlobalSort, placed: &Placed) {
    let words = placed.sizing.return_words;
    for (me, layout) in (0..).zip(&placed.layouts) {
        let (terms, places) = layout.fetches();
        let mut expected: Vec<(u32, Entry, u32)> = Vec::new();
        for entry in global.entries.iter().filter(|entry| entry.source == me) {
            match words {
                1 if case.layout == sidelane::plan::RowLayout::ExpertMajor => {
                    expected.push((entry.choice, *entry, 0));
                }
                _ => expected
                    .extend(case.choices_of(entry).iter().map(|c| (c.choice, *entry, c.choice % case.top_k))),
            }
        }
        expected.sort();
        let mut found: Vec<(u32, Entry, u32)> = terms
            .iter()
            .zip(places)
            .map(|(term, &place)| {
                let (row, word) = ((term.row / words) as usize, term.row % words);
                let entry = match placed.paths(me).same_node(term.owner) {
                    true => global.rows[term.owner as usize][row].expect("a row, and not a pad"),
                    false => returned(global, placed, me, term.owner)[row],
                };
                (place, entry, word)
            })
            .collect();
        found.sort();
        assert_eq!(found, expected, "rank {me} of {case:?}");
    }
}
