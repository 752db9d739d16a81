//! Limits on the blocks of kernels: no bit depends on them, and no kernel has more.

use half::bf16;
use sidelane::dtype::PartialDtype;
use sidelane::error::PlanError;
use sidelane::plan::{RowLayout, SumOrder};
use sidelane::topology::Route;
use stand_in_cuda::StandIn;

use super::calls::{on_each_of, some};
use super::on_devices;
use super::rank::Case;
use crate::devices::stream;
use crate::support::{on_ranks, small, tokens};

/// Limits, ascending: the fake driver tells of the largest kernel so far.
const LIMITS: [Option<u32>; 4] = [Some(1), Some(2), Some(7), None];

/// Runs something with each limit, and sees that no kernel had more blocks.
pub fn with_each_limit(body: impl Fn(Option<u32>)) {
    // The driver stays until it has been asked.
    let _driver = stream(0);
    for limit in LIMITS {
        body(limit);
        let most = StandIn::loaded().unwrap().counters().most_blocks;
        assert!(limit.is_none_or(|limit| (1..=limit.into()).contains(&most)), "{most} blocks, {limit:?}");
    }
}

/// More rows than a block takes at a time.
fn case(nodes: &[u32], layout: RowLayout) -> Case {
    let order = SumOrder::Node;
    let case = Case { layout, order, align: 2, max_in_flight: 3, ..Case::across(nodes, 9, 4) };
    Case { max_tokens: 40, ..case }
}

#[test]
fn rounds_and_steps_have_the_bits_of_the_host_with_any_limit() {
    let test = "enqueued::blocks::rounds_and_steps_have_the_bits_of_the_host_with_any_limit";
    on_devices(test, 8, 71, || {
        with_each_limit(|max_blocks| {
            for layout in RowLayout::ALL {
                let route = Route::Pxn;
                let case =
                    Case { max_blocks, route, wire: PartialDtype::Bf16, ..case(&[0, 0, 1, 1], layout) };
                on_each_of::<bf16>(&case, |rank, me| {
                    rank.round(&tokens(me, 37, case.hidden, case.top_k, case.map.experts()));
                    assert!(rank.reports.iter().all(|report| report.max_blocks == max_blocks));
                    rank.steps([(64 + me, some(&case, 64 + me)), (128 + me, 40)]);
                });
            }
            let case = Case { max_blocks, weighted: true, ..case(&[0; 3], RowLayout::ExpertMajor) };
            on_each_of::<f32>(&case, |rank, me| rank.steps([(192 + me, 40), (256 + me, 3)]));
        });
    });
}

#[test]
fn records_have_the_bits_of_the_host_with_any_limit() {
    on_devices("enqueued::blocks::records_have_the_bits_of_the_host_with_any_limit", 8, 72, || {
        with_each_limit(|max_blocks| {
            for layout in RowLayout::ALL {
                let case = Case { max_blocks, hidden: 264, fp8: true, ..case(&[0, 0, 0], layout) };
                on_each_of::<bf16>(&case, |rank, me| rank.step_in_records(me, 33));
            }
        });
    });
}

#[test]
fn limit_of_no_blocks_is_refused() {
    on_devices("enqueued::blocks::limit_of_no_blocks_is_refused", 8, 73, || {
        on_ranks(&[0], &small(), |world| {
            let group = world.all().unwrap();
            let settings = Case::new(1, 4, 2).settings::<half::bf16>(&group);
            let refused = settings.on(&stream(0)).max_blocks(0).build().map(drop).unwrap_err();
            let (parameter, seen, expected) = ("max_blocks", 0, "at least 1");
            assert_eq!(refused, PlanError::BadParameter { parameter, seen, expected }.into());
        });
    });
}
