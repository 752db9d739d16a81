//! Ranks that want different things when they build.

use sidelane::config::Config;
use sidelane::ep::ExpertParallelBuilder;
use sidelane::error::{CallError, Error, MemoryError, PlanError};
use sidelane::plan::{ExpertMap, RowLayout, SumOrder};
use sidelane::topology::Route;
use sidelane::{Dtype, ExpertParallel, Group, Options, World};

use super::space::wide;
use super::{BAD, EXPERTS, HIDDEN, NODES, ROOMY, Rank, SYMMETRIC, everywhere, options};
use crate::support::on_ranks;

/// The bad rank's setting, and the difference that the others report.
type Quirk = (fn(ExpertParallelBuilder<'_>) -> ExpertParallelBuilder<'_>, &'static str);

const QUIRKS: [Quirk; 9] = [
    (|b| b.experts(EXPERTS + 1), "experts"),
    (
        |b| {
            b.expert_map(ExpertMap::from_slots(EXPERTS, &[vec![1, 0], vec![2, 3], vec![4], vec![5]]).unwrap())
        },
        "the expert map",
    ),
    (|b| b.top_k(2), "top_k"),
    (|b| b.hidden(2 * HIDDEN), "hidden"),
    (|b| b.dtype(Dtype::F16), "dtype"),
    (|b| b.sum_order(SumOrder::Rank), "sum_order"),
    (|b| b.align(8), "align"),
    (|b| b.max_tokens(63), "max_tokens"),
    (|b| b.weighted(true), "weighted"),
];

fn build(rank: &Rank, quirk: fn(ExpertParallelBuilder<'_>) -> ExpertParallelBuilder<'_>) -> Error {
    let builder = rank.settings();
    let builder = if rank.is_bad() { quirk(builder) } else { builder };
    builder.build().expect_err("ranks disagree")
}

#[test]
fn every_rank_hears_what_differs_and_where() {
    everywhere(ROOMY, |rank| {
        let me = rank.world.rank();
        let other: Quirk = match rank.route {
            Route::Direct => (|b| b.route(Route::Pxn), "route"),
            Route::Pxn => (|b| b.route(Route::Direct), "route"),
            other => unreachable!("{other:?}"),
        };
        for (quirk, setting) in QUIRKS.into_iter().chain([other]) {
            let Error::Call(CallError::ConfigsDiffer { what, rank: here, peer, mine, theirs }) =
                build(rank, quirk)
            else {
                panic!("{setting} differs");
            };
            assert_eq!((what, here, peer), (setting, me, if rank.is_bad() { 0 } else { BAD }));
            assert_ne!(mine, theirs);
        }
        rank.works();
    });
}

#[test]
fn unusable_setting_is_named_on_its_rank_and_told_to_others() {
    let unusable: [Quirk; 10] = [
        (|b| b.coalesce_relays(true).route(Route::Pxn), "coalesce_relays"),
        (|b| b.coalesce_relays(true).layout(RowLayout::RankMajor).route(Route::Direct), "coalesce_relays"),
        (|b| b.top_k(0), "top_k"),
        (|b| b.top_k(EXPERTS + 1), "top_k"),
        (|b| b.experts(0), "experts"),
        (|b| b.experts(i32::MAX as u32), "experts"),
        (|b| b.experts(u32::MAX), "experts"),
        (|b| b.hidden(HIDDEN + 1), "bytes of a row"),
        (|b| b.align(0), "align"),
        (|b| b.max_tokens(u32::MAX), "max_tokens"),
    ];
    everywhere(ROOMY, |rank| {
        for (quirk, setting) in unusable {
            match build(rank, quirk) {
                Error::Plan(PlanError::BadParameter { parameter, .. }) if rank.is_bad() => {
                    assert_eq!(parameter, setting);
                }
                Error::Call(CallError::ConfigsDiffer { what, peer: BAD, .. }) if !rank.is_bad() => {
                    assert_eq!(what, "whether their settings can be used (1: yes)");
                }
                other => panic!("{setting}: {other:?}"),
            }
        }
        rank.works();
    });
}

#[test]
fn experts_whose_counts_have_no_room_name_the_setting_to_raise() {
    let config = Config::default().with_heap(2 << 20).with_symmetric(4 * 7);
    let world = World::threads_with(&[0], &Options::default().with_config(config)).unwrap().remove(0);
    let group = world.all().unwrap();
    let builder = ExpertParallel::builder(&group).experts(8).top_k(2).hidden(HIDDEN);
    let error = builder.build().unwrap_err().to_string();
    assert!(error.starts_with("experts = 8: ") && error.contains("a larger SIDELANE_SYMMETRIC"), "{error}");
}

/// Takes so much of the bad rank's symmetric heap that half of it is no longer free there.
fn crowd(rank: &Rank) -> Option<sidelane::Window> {
    rank.is_bad().then(|| rank.world.group(&[BAD]).unwrap().window(SYMMETRIC / 8 * 5).unwrap())
}

#[test]
fn a_control_window_that_does_not_fit_is_told_alike_everywhere() {
    everywhere(ROOMY, |rank| {
        let crowded = crowd(rank);
        let error = wide(rank).build().expect_err("no room");
        let told = rank.group.gather(error.to_string().as_bytes()).unwrap();
        assert!(told.iter().all(|other| *other == told[0]), "all ranks are told the same");
        let Error::Memory(MemoryError::OutOfSpace { rank: BAD, asked, free, total, space, setting }) = error
        else {
            panic!("{error:?}");
        };
        assert!(asked > free && free < total && total == SYMMETRIC);
        assert_eq!((space, setting), ("symmetric heap", "SIDELANE_SYMMETRIC"));
        drop(crowded);
        rank.works();
    });
}

#[test]
fn window_too_large_or_of_other_size_fails_alike_on_all_ranks() {
    everywhere(ROOMY, |rank| {
        let crowded = crowd(rank);
        let error = rank.group.window(SYMMETRIC / 2).unwrap_err();
        let Error::Memory(MemoryError::OutOfSpace { rank: BAD, asked, .. }) = error else {
            panic!("{error:?}");
        };
        assert_eq!(asked, SYMMETRIC / 2);
        drop(crowded);
        let sizes = if rank.is_bad() { [128, 64] } else { [64, 128] };
        let error = rank.group.window(sizes[0]).unwrap_err();
        let Error::Memory(MemoryError::SizesDiffer { rank: other, seen, expected, .. }) = error else {
            panic!("{error:?}");
        };
        assert_eq!((other, [expected, seen]), (if rank.is_bad() { 0 } else { BAD }, sizes));
        let error = rank.group.window(u64::MAX).unwrap_err();
        assert!(matches!(error, Error::Memory(MemoryError::OutOfSpace { rank: 0, .. })), "{error:?}");
        rank.group.window(64).unwrap();
        rank.works();
    });
}

#[test]
fn a_map_for_another_number_of_ranks_is_refused() {
    fn build(group: &Group) -> Error {
        let map = ExpertMap::contiguous(EXPERTS, 3).unwrap();
        ExpertParallel::builder(group).expert_map(map).hidden(HIDDEN).build().unwrap_err()
    }
    on_ranks(&NODES[0], &options(ROOMY), |world| {
        let error = build(&world.all().unwrap());
        assert!(matches!(error, Error::Plan(PlanError::BadParameter { seen: 3, .. })), "{error:?}");
    });
}
