//! Placement in every layout and mode: each row, its metadata, sum and fetch of all ranks against a
//! reference.

mod case;
mod landing;
mod placed;
mod sums;

use self::case::{Play, plays, plays_in_spans};
use self::landing::{
    copies_are_those_of_relay_order, rows_and_metadata_land_once_each, staged_rows_lie_apart,
};
use self::placed::{Placed, Rank, routing};
use self::sums::{fetches_find_their_words, sums_find_their_rows};
use crate::random_cases;
use crate::support::reference::Visible;
use proptest::prelude::*;
use sidelane::plan::{Bins, Counts, DispatchLayout, PlanContext, ReceiveMode, ReceiveSizes, SortedRouting};
use sidelane::topology::{NodeMap, Paths};

fn sizes_are_told(play: &Play, seen: &Visible, placed: &Placed) {
    let rows: Vec<u32> = seen.rows.iter().map(|rows| rows.len() as u32).collect();
    for (me, Rank { sorted, sizes, layout, .. }) in placed.ranks.iter().enumerate() {
        assert_eq!(sorted.dropped, seen.dropped[me]);
        assert_eq!((&sizes.required, &sizes.rows, &layout.sizes), (&seen.required, &rows, &rows));
        assert_eq!((layout.landed, &layout.padded_per_bin), (rows[me], &seen.padded[me]));
        let mut begin = 0;
        for (bin, padded) in seen.padded[me].iter().enumerate() {
            // Behind a budget all bins are empty, wherever they would have begun.
            assert!(layout.begin[bin] == begin || *padded == 0);
            let segment = &seen.rows[me][begin as usize..][..*padded as usize];
            let real = match play.case.mode {
                ReceiveMode::Slots { rows, .. } => rows as usize * play.ids.len(),
                _ => segment.iter().flatten().count(),
            };
            assert_eq!(layout.rows_per_bin[bin], real as i64);
            begin += *padded as u32;
        }
    }
}

fn holds(play: &Play) -> (Visible, Placed) {
    let seen = Visible::new(&play.case, &play.ids);
    let placed = Placed::new(play);
    sizes_are_told(play, &seen, &placed);
    let index = rows_and_metadata_land_once_each(play, &seen, &placed);
    staged_rows_lie_apart(play, &placed);
    sums_find_their_rows(play, &seen, &placed, &index);
    fetches_find_their_words(play, &seen, &placed, &index);
    (seen, placed)
}

proptest! {
    #![proptest_config(random_cases(1500))]

    #[test]
    fn everything_is_where_everybody_looks_for_it(play in plays()) {
        holds(&play);
    }

    #[test]
    fn in_spans_everything_is_where_the_index_says(play in plays_in_spans()) {
        let (seen, placed) = holds(&play);
        copies_are_those_of_relay_order(&play, &seen, &placed);
    }
}

/// The layout of a rank that is alone with these entries: all that is known of them.
fn alone(play: &Play, placed: &Placed, me: usize, sorted: &SortedRouting) -> String {
    let paths = placed.paths(play, me);
    let (mut counts, mut sizes, mut layout) =
        (Counts::default(), ReceiveSizes::default(), DispatchLayout::default());
    let mut crossing = sidelane::plan::InterNodeRows::default();
    crossing.fill(&placed.bins, &paths, sorted);
    let mut words = sorted.counts.clone();
    crossing.staged(&paths, &mut words);
    counts.clear(words.len() as u32);
    counts.add(me as u32, me as u32, &words);
    sizes.fill(&placed.bins, 1, &counts.total, None);
    let (bins, sizing) = (&placed.bins, placed.sizing);
    let frame = PlanContext { bins, paths, align: 1, chunks: 2, sizing, mode: ReceiveMode::Exact };
    layout.fill(&frame, (sorted, &crossing), play.case.top_k, &counts, &sizes);
    format!("{:?} {:?} {:?} {layout:?}", sorted.counts, sorted.starts, sorted.metadata)
}

proptest! {
    #![proptest_config(random_cases(1000))]

    #[test]
    fn kept_choices_sort_as_if_dropped_ones_were_not_chosen(
        play in plays(),
        rooms in prop::collection::vec(0..6u32, 1..8),
    ) {
        let placed = Placed::new(&play);
        let (mut kept, mut fresh) = (SortedRouting::default(), SortedRouting::default());
        for (me, ids) in play.ids.iter().enumerate() {
            let fill = |sorted: &mut SortedRouting, ids: &[i32]| {
                let routing = routing(&play, me, ids);
                sorted.fill(&play.case.map, &placed.bins, placed.metadata, me as u32, &routing).unwrap();
            };
            fill(&mut kept, ids);
            let (before, masked) = (kept.counts.clone(), kept.dropped.clone());
            let room = |bin: u32| rooms[bin as usize % rooms.len()];
            let any = kept.keep(play.case.top_k, room);
            prop_assert_eq!(any, kept.dropped != masked);
            for (bin, (&kept, &all)) in (0..).zip(kept.counts.iter().zip(&before)) {
                prop_assert_eq!(kept, all.min(room(bin)));
            }
            let without = ids.iter().zip(&kept.dropped).map(|(&id, &dropped)| if dropped { -1 } else { id });
            fill(&mut fresh, &without.collect::<Vec<i32>>());
            prop_assert_eq!(alone(&play, &placed, me, &kept), alone(&play, &placed, me, &fresh));
            prop_assert!(!kept.keep(play.case.top_k, room), "once is enough");
        }
    }

    #[test]
    fn fixed_counts_equal_counts_with_every_slot_used(
        play in plays(),
        slots in 1..20u32,
        tokens in 0..30u32,
    ) {
        let nodes = NodeMap::from_labels(&play.case.nodes);
        let bins = Bins::of_layout(play.case.layout, &play.case.map, play.case.order, &nodes);
        let ranks = play.ids.len() as u32;
        let full = |source: u32| {
            let paths = Paths::new(&nodes, play.case.route, source);
            let mut words = vec![slots; bins.count() as usize];
            words.extend((0..paths.staged_ranks()).map(|relay| {
                let places: u32 = paths.served_by(relay).iter().map(|&r| bins.of(r).len() as u32 * slots).sum();
                if paths.relays().any(|r| r == relay) { places.min(tokens) } else { 0 }
            }));
            words
        };
        for me in 0..ranks {
            let paths = Paths::new(&nodes, play.case.route, me);
            let (mut all, mut fixed) = (Counts::default(), Counts::default());
            all.clear(bins.count() + paths.staged_ranks());
            (0..ranks).for_each(|source| all.add(me, source, &full(source)));
            fixed.fix(&bins, &paths, slots, tokens);
            prop_assert_eq!(&fixed.total, &all.total);
            prop_assert_eq!(&fixed.below[..bins.count() as usize], &all.below[..bins.count() as usize]);
            // Staged rows matter only to the ranks that send them there.
            for relay in paths.relays().filter(|_| paths.staged_ranks() > 0) {
                let word = (bins.count() + relay) as usize;
                prop_assert_eq!(fixed.below[word], all.below[word]);
            }
        }
    }
}
