//! Rows in fp8: records as on the host, to the bit.

use half::{bf16, f16};
use sidelane::error::{CallError, PlanError};
use sidelane::plan::SumOrder;
use sidelane::topology::Route;
use sidelane::{Dtype, Element, Error};

use super::calls::{on_each_of, some};
use super::on_devices;
use super::rank::{Case, call};
use crate::support::{To, tokens};

fn steps<E: Element + Into<f32>>(case: &Case, rounds: u64)
where
    f32: To<E>,
{
    let case = Case { fp8: true, max_in_flight: 3, ..case.clone() };
    on_each_of::<E>(&case, |rank, me| {
        for seed in (0..rounds).map(|round| round * 64 + me) {
            rank.step_in_records(seed, some(&case, seed));
        }
    });
}

#[test]
fn steps_in_records_are_those_of_the_host() {
    on_devices("enqueued::records::steps_in_records_are_those_of_the_host", 8, 41, || {
        for (nodes, route) in [
            (&[0; 3][..], Route::Direct),
            (&[0, 0, 1, 1], Route::Direct),
            (&[0, 0, 1, 1], Route::Pxn),
            (&[0, 1, 2, 0, 1], Route::Pxn),
        ] {
            let case = Case { route, align: 4, hidden: 136, ..Case::across(nodes, 6, 3) };
            steps::<bf16>(&case, 3);
            steps::<bf16>(&case.clone().dropping(10), 2);
            let case = Case { hidden: 8, align: 1, weighted: true, order: SumOrder::Node, ..case };
            steps::<f32>(&case, 2);
            steps::<f32>(&case.dropping(7), 1);
        }
        steps::<f16>(&Case { hidden: 264, ..Case::new(2, 5, 4) }, 2);
    });
}

/// Tokens of a third type are refused on all ranks, as on the host.
#[test]
fn device_tokens_of_wrong_type_are_refused_on_every_rank() {
    let test = "enqueued::records::device_tokens_of_wrong_type_are_refused_on_every_rank";
    on_devices(test, 8, 42, || {
        let case = Case { fp8: true, ..Case::new(2, 4, 2) };
        on_each_of::<bf16>(&case, |rank, me| {
            let tensors = rank.put(&tokens(me, 5, case.hidden, case.top_k, 4));
            let (x, choices) = call::<bf16>(&tensors);
            let bad = sidelane::ep::Tensor::device(&tensors[0], Dtype::F16);
            let refused = rank.planned.dispatch(if me == 1 { bad } else { x }, choices).unwrap_err();
            match me {
                1 => assert!(
                    matches!(refused, Error::Plan(PlanError::WrongDtype { expected: Dtype::Bytes, .. })),
                    "{refused}"
                ),
                _ => assert!(
                    matches!(refused, Error::Call(CallError::PeerRefused { peer: 1, .. })),
                    "{refused}"
                ),
            }
            rank.step_in_records(me, 4);
        });
    });
}
