//! Rows of bytes are not summed: the refusals, and what they leave.

use half::bf16;
use sidelane::ep::{Choices, Tensor, TensorMut};
use sidelane::error::PlanError;
use sidelane::topology::Route;
use sidelane::{Dtype, Error, ExpertParallel};

use super::on_devices;
use crate::devices::{Memory, stream};
use crate::support::layer::bits;
use crate::support::{on_ranks, small, tokens};

const HIDDEN: usize = 48;

#[test]
fn rows_of_bytes_are_not_summed() {
    on_devices("enqueued::bytes::rows_of_bytes_are_not_summed", 8, 43, || {
        for (nodes, route) in [(&[0, 0, 0][..], Route::Direct), (&[0, 0, 1, 1], Route::Pxn)] {
            on_ranks(nodes, &small(), |world| {
                let (group, stream) = (world.all().unwrap(), stream(world.rank()));
                let builder = ExpertParallel::builder(&group).experts(4).top_k(2).hidden(HIDDEN);
                let builder = builder.dtype(Dtype::Bytes).max_tokens(5).route(route);
                let mut ep = builder.on(&stream).device_heap(1 << 20).build().unwrap();
                let mine = tokens::<bf16>(world.rank().into(), 5, HIDDEN / 2, 2, 4);

                let memory = || Memory::new(stream.context(), 1 << 16);
                let (of_x, of_ids, of_weights, of_out) = (memory(), memory(), memory(), memory());
                let there = of_x.fill(&stream, bits(&mine.x));
                let x = Tensor::device(&there, Dtype::Bytes);
                let (experts, weights) =
                    (of_ids.fill(&stream, &mine.ids), of_weights.fill(&stream, &mine.weights));
                let choices = Choices::Device { experts: &experts, weights: &weights };
                let refused = Error::Plan(PlanError::NoArithmetic { dtype: Dtype::Bytes });
                let zeros = [0; 5 * HIDDEN];
                for _ in 0..2 {
                    let (_rows, handle) = ep.dispatch(x, choices).unwrap();
                    let out = of_out.fill(&stream, &[9_u8; 5 * HIDDEN]);
                    let (y, to) = (handle.output().unwrap(), TensorMut::device(&out, Dtype::Bytes));
                    assert_eq!(ep.combine_into(y, &handle, to).unwrap_err(), refused);
                    assert_eq!(handle.return_report().unwrap_err(), refused);
                    assert_eq!(of_out.read::<u8>(&stream, &out), zeros, "of a combine");

                    let out = of_out.fill(&stream, &[9_u8; 5 * HIDDEN]);
                    let (y, to) = (handle.output().unwrap(), TensorMut::device(&out, Dtype::Bytes));
                    assert_eq!(ep.dispatch_backward_into(y, None, &handle, to, None).unwrap_err(), refused);
                    assert_eq!(of_out.read::<u8>(&stream, &out), zeros, "of a gradient");
                }
            });
        }
    });
}
