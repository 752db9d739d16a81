//! The formula, token by token: each through its experts by itself, in a plain loop.

use half::bf16;
use sidelane::World;
use sidelane::gate::{
    Gate, GateConfig, GateInput, LossInput, Preset, WeightsInput, weights_backward, z_loss,
};
use sidelane::layer::{Experts, Segments};
use sidelane::rows::{Matrix, product};

use super::case::{
    Case, Cut, EXPERTS, HIDDEN, Real, SHARED, Seen, TOP_K, WHOLE, Z, balance, router, step, swiglu, tensors,
};
use crate::support::{To, on_ranks, small};

/// One row through one expert: its output, and the way back for the gradient of that.
fn through(expert: u32, row: &[f32]) -> (Vec<f32>, impl FnOnce(Vec<f32>) -> Vec<f32>) {
    let experts = swiglu([expert]);
    let row = row.to_vec();
    let (output, mut saved) = experts.forward(one(&row)).unwrap();
    (output, move |of_output| experts.rows_backward(one(&row), &mut saved, of_output).unwrap())
}

fn one(row: &[f32]) -> Segments<'_> {
    Segments::new(row, HIDDEN, &[1], &[1])
}

fn wide<E: Real>(values: &[E]) -> Vec<f32> {
    values.iter().map(|&value| value.into()).collect()
}

/// The output of one rank's tokens, and the gradient of these.
fn formula<E: Real>(gate: &GateConfig, [x, residual, of_out]: &[Vec<E>; 3]) -> (Vec<E>, Vec<E>)
where
    f32: To<E>,
{
    let (tokens, experts, k) = (x.len() / HIDDEN, EXPERTS as usize, TOP_K as usize);
    let (x, residual, of_out) = (wide(x), wide(residual), wide(of_out));
    let router = router();
    let mut logits = vec![0.0; tokens * experts];
    product(&mut logits, Matrix::new(&x, tokens, HIDDEN), Matrix::new(&router, HIDDEN, experts), false);
    let mut gate = Gate::new(gate.clone()).unwrap();
    let decision = gate.route(&GateInput::new(&logits)).unwrap().clone();
    let (mut out, mut of_tokens, mut of_weights) = (Vec::new(), Vec::new(), vec![0.0f32; tokens * k]);
    let round = |value: f32| -> f32 { To::<E>::to(value).into() };
    for token in 0..tokens {
        let at = token * HIDDEN..(token + 1) * HIDDEN;
        let (row, g) = (&x[at.clone()], &of_out[at.clone()]);
        let kept = |choice: &usize| decision.experts()[*choice] >= 0;
        let mut choices: Vec<usize> = (token * k..(token + 1) * k).filter(kept).collect();
        choices.sort_by_key(|&choice| decision.experts()[choice]);
        let (mut sum, mut of_row) = (vec![0.0f32; HIDDEN], vec![0.0f32; HIDDEN]);
        for choice in choices {
            let (expert, weight) = (decision.experts()[choice] as u32, decision.weights()[choice]);
            let (y, back) = through(expert, row);
            sum.iter_mut().zip(&y).for_each(|(sum, y)| *sum += round(weight * y));
            // 16 lanes of which these rows fill 8: folded by halves.
            let mut lanes: Vec<f32> = g.iter().zip(&y).map(|(g, y)| g * y).collect();
            for half in [4, 2, 1] {
                (0..half).for_each(|lane| lanes[lane] += lanes[lane + half]);
            }
            of_weights[choice] = lanes[0];
            let dx = back(g.iter().map(|g| weight * g).collect());
            of_row.iter_mut().zip(dx).for_each(|(sum, dx)| *sum += round(dx));
        }
        let (beside, back) = through(SHARED, row);
        let columns = residual[at].iter().zip(&sum).zip(&beside);
        out.extend(columns.map(|((residual, sum), shared)| residual + round(*sum) + shared));
        of_tokens.extend(of_row.iter().zip(back(g.to_vec())).map(|(routed, shared)| round(*routed) + shared));
    }
    let mut of_logits = vec![0.0; logits.len()];
    let choices = decision.choices();
    let loss = LossInput { logits: &logits, experts: EXPERTS, top_k: TOP_K, choices, ..LossInput::default() };
    balance().loss(&loss, Some(&mut of_logits)).unwrap();
    z_loss(Z, &logits, EXPERTS, None, Some(&mut of_logits)).unwrap();
    let input =
        WeightsInput { logits: &logits, choices, experts: decision.experts(), d_weights: &of_weights };
    weights_backward(gate.config(), &input, &mut of_logits).unwrap();
    let mut through_router = vec![0.0; x.len()];
    let turned = Matrix::new(&router, HIDDEN, experts).transposed();
    product(&mut through_router, Matrix::new(&of_logits, tokens, experts), turned, false);
    of_tokens.iter_mut().zip(through_router).for_each(|(sum, router)| *sum += router);
    (super::case::rounded(out), super::case::rounded(of_tokens))
}

fn follows_the_formula<E: Real>(case: &Case)
where
    f32: To<E>,
{
    for (rank, seen) in case.step::<E>().into_iter().enumerate() {
        let (out, of_x) = formula(&case.gate, &tensors::<E>(rank, case.tokens[rank]));
        assert_eq!(seen.out, out, "rank {rank}");
        assert_eq!(seen.gradients.x, of_x, "rank {rank}");
    }
}

#[test]
fn a_token_gets_what_its_experts_make_of_it_to_the_bit() {
    let cut = Cut { chunks: 3, groups: 2, transfers: 2, overlap: true, streams: 2, at_once: 2, align: 1 };
    follows_the_formula::<f32>(&Case::new(&[0, 0, 0], &[11, 0, 6], cut));
    follows_the_formula::<f32>(&Case::new(&[0, 0], &[1, 16], WHOLE));
    follows_the_formula::<bf16>(&Case::new(&[0, 0], &[7, 12], cut));
    let drops = Preset::DeepspeedTopk.config(EXPERTS, TOP_K).unwrap();
    follows_the_formula::<f32>(&Case { gate: drops, ..Case::new(&[0, 0], &[30, 13], cut) });
}

/// All ranks' tokens on one.
pub fn joined(counts: &[usize]) -> Seen<f32> {
    let all: Vec<[Vec<f32>; 3]> =
        counts.iter().enumerate().map(|(rank, &count)| tensors(rank, count)).collect();
    let [x, residual, of_out] = [0, 1, 2].map(|which| all.iter().flat_map(|of| of[which].clone()).collect());
    let (x, residual, of_out): (Vec<f32>, Vec<f32>, Vec<f32>) = (x, residual, of_out);
    let case = Case::new(&[0], &[x.len() / HIDDEN], WHOLE);
    let run = |world: World| step(&mut case.layer::<f32>(&world), &x, &residual, &of_out);
    on_ranks(&case.nodes, &small(), run).remove(0)
}
