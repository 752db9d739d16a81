//! Work of relays on blocks, followed row by row.

use sidelane::plan::{Bins, Block, DispatchLayout, RelayPlan, SumOrder};
use sidelane::topology::{Paths, Route};

use super::Placed;
use super::case::Case;

/// The block that `source` has for `relay`, as its own rank sees it.
fn block<'a>(paths: &Paths, layouts: &'a [DispatchLayout], source: u32, relay: u32) -> &'a Block {
    let nth = paths.of(source).relays().position(|r| r == relay).expect("a relay of the source");
    &layouts[source as usize].blocks[nth]
}

/// Knowledge of the rank of these paths, once it has read the headers of its sources.
pub fn forward(case: &Case, bins: &Bins, paths: &Paths, layouts: &[DispatchLayout]) -> RelayPlan {
    let mut forward = RelayPlan::default();
    forward.blocks.extend(paths.sources().map(|s| block(paths, layouts, s, paths.me()).clone()));
    for block in &mut forward.blocks {
        if case.route == Route::Direct {
            assert!(block.index.is_empty(), "every entry is a row of its own");
            block.index.extend(0..block.entries());
        }
        assert!(block.is_sound(block.entries(), true));
    }
    let sums = case.order != SumOrder::Expert && case.route == Route::Pxn;
    forward.fill(bins, paths.served_by(paths.me()), case.chunks, sums);
    forward
}

/// Takes the blocks for the node of `rank` as they come, chunk by chunk, and copies the rows for
/// `rank`.
pub fn relayed(
    case: &Case,
    placed: &Placed,
    rank: u32,
    write: &mut impl FnMut(u32, Option<(u32, u32)>),
    metadata_at: &mut impl FnMut(u32, Vec<u32>),
) {
    let (relays, words) =
        (placed.nodes.members(placed.nodes.node_of(rank)), placed.sizing.words_out as usize);
    for &relay in relays {
        let (paths, forward) = (placed.paths(relay), &placed.forwards[relay as usize]);
        let member = relays.iter().position(|&served| served == rank).unwrap();
        let mut staged = vec![false; placed.layouts[relay as usize].staged as usize];
        for (nth, source) in paths.sources().enumerate() {
            let (taken, tokens) = taken(case, placed, source, relay);
            for row in (forward.blocks[nth].first..).take(tokens.len()) {
                assert!(!std::mem::replace(&mut staged[row as usize], true), "blocks lie apart");
            }
            for chunk in 1..=case.chunks {
                for run in &forward.runs[range(forward, nth, chunk, member)] {
                    assert!(run.count + run.pad > 0);
                    for n in 0..run.count {
                        let row = forward.rows[(run.first + n) as usize];
                        assert!(
                            row < taken[usize::from(chunk) - 1],
                            "no row is handed on before it has come"
                        );
                        write(run.to_row + n, Some((source, tokens[row as usize])));
                    }
                    assert!(run.pad == 0 || chunk == case.chunks);
                    (0..run.pad).for_each(|n| write(run.to_row + run.count + n, None));
                }
            }
            let metadata = metadata(placed, source, relay);
            for run in &forward.runs[range(forward, nth, 0, member)] {
                let entry = |n: u32| metadata[(run.first + n) as usize * words..][..words].to_vec();
                (0..run.count).for_each(|n| metadata_at(run.to_row + n, entry(n)));
                (0..run.pad).for_each(|n| metadata_at(run.to_row + run.count + n, vec![0; words]));
            }
        }
    }
}

fn range(forward: &RelayPlan, nth: usize, chunk: u8, member: usize) -> std::ops::Range<usize> {
    let runs = forward.runs_of(nth, chunk, member);
    runs.start as usize..runs.end as usize
}

/// How many rows of a block have come after each chunk, and the tokens they are: each once.
fn taken(case: &Case, placed: &Placed, source: u32, relay: u32) -> (Vec<u32>, Vec<u32>) {
    let (paths, layout) = (placed.paths(source), &placed.layouts[source as usize]);
    let nth = paths.relays().position(|r| r == relay).unwrap();
    let (mut upto, mut tokens) = (Vec::new(), Vec::new());
    for chunk in 0..u32::from(case.chunks) {
        let run = layout.runs[(layout.block_runs[nth] + chunk) as usize];
        assert_eq!((run.to_row as usize, run.pad), (tokens.len(), 0));
        tokens.extend_from_slice(&layout.rows[run.first as usize..][..run.count as usize]);
        upto.push(tokens.len() as u32);
    }
    assert_eq!(tokens.len() as u32, layout.blocks[nth].rows);
    assert!(tokens.is_sorted_by(|a, b| a < b), "each token crosses once");
    (upto, tokens)
}

/// Metadata of the entries of a block: as the source sorted them, for the ranks served.
fn metadata(placed: &Placed, source: u32, relay: u32) -> Vec<u32> {
    let served = placed.nodes.members(placed.nodes.node_of(relay));
    let of = |&rank: &u32| placed.sorted[source as usize].metadata_of(placed.bins.of(rank)).to_vec();
    served.iter().flat_map(of).collect()
}
