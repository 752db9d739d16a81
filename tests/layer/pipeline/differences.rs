//! Every gradient against finite differences.

use sidelane::layer::{Gradients, GroupedSwiGlu, Input, MoeLayer};

use super::case::{Case, Cut, EXPERTS, FFN, HIDDEN, WHOLE, tensors};
use crate::support::{on_ranks, small};

const STEP: f32 = 4e-3;

/// Changed input.
#[derive(Clone, Copy, Debug)]
enum What {
    Token,
    Router,
    Expert,
    Shared,
}

/// One value, on one rank.
#[derive(Clone, Copy, Debug)]
struct Change {
    what: What,
    rank: usize,
    at: usize,
}

impl Change {
    /// Where it is, on its rank.
    fn place<'v>(&self, layer: &'v mut MoeLayer, x: &'v mut [f32]) -> &'v mut f32 {
        match self.what {
            What::Token => &mut x[self.at],
            What::Router => &mut layer.router_mut()[self.at],
            What::Expert => &mut layer.experts_mut().weights_mut()[self.at],
            What::Shared => &mut layer.shared_mut().unwrap().weights_mut()[self.at],
        }
    }

    fn gradient(&self, of: &Gradients<f32>) -> f32 {
        match self.what {
            What::Token => of.x[self.at],
            What::Router => of.router[self.at],
            What::Expert => of.experts[self.at],
            What::Shared => of.shared[self.at],
        }
    }
}

/// Some of all values of all ranks.
fn changes(counts: &[usize]) -> Vec<Change> {
    let weights = GroupedSwiGlu::values(1, HIDDEN, FFN);
    let of_rank = |(rank, &tokens): (usize, &usize)| {
        let each = move |what, count: usize, apart: usize| {
            (0..count).step_by(apart).map(move |at| Change { what, rank, at })
        };
        let tokens =
            each(What::Token, tokens * HIDDEN, 3).chain(each(What::Router, HIDDEN * EXPERTS as usize, 7));
        tokens.chain(each(What::Expert, weights, 29)).chain(each(What::Shared, weights, 41))
    };
    counts.iter().enumerate().flat_map(of_rank).collect()
}

/// The loss, which is `<out, of_out>` and the gate's own over all ranks, with each change made up
/// and down; and the gradients.
#[test]
fn gradients_are_finite_differences() {
    let counts = [5, 0, 4];
    let case = Case::new(&[0, 0, 0], &counts, Cut { chunks: 2, overlap: true, ..WHOLE });
    let changes = changes(&counts);
    let ranks = on_ranks(&case.nodes, &small(), |world| {
        let me = world.rank() as usize;
        let mut layer = case.layer::<f32>(&world);
        let [mut x, residual, of_out] = tensors::<f32>(me, counts[me]);
        let (_, tape) = layer.forward(&Input::new(&x)).unwrap();
        let gradients = layer.backward(tape, &of_out).unwrap();
        let mut losses = Vec::new();
        for (change, step) in changes.iter().flat_map(|change| [(change, STEP), (change, -STEP)]) {
            let mine = change.rank == me;
            let before = if mine { *change.place(&mut layer, &mut x) } else { 0.0 };
            if mine {
                *change.place(&mut layer, &mut x) = before + step;
            }
            let (out, tape) = layer.forward(&Input::new(&x[..]).with_residual(Some(&residual))).unwrap();
            let loss: f64 = out.iter().zip(&of_out).map(|(out, g)| f64::from(*out) * f64::from(*g)).sum();
            losses.push(loss + f64::from(tape.balance_loss()) + f64::from(tape.z_loss()));
            if mine {
                *change.place(&mut layer, &mut x) = before;
            }
        }
        (losses, gradients)
    });
    let mut moved = [0; 4];
    for (nth, change) in changes.iter().enumerate() {
        let loss = |step: usize| -> f64 { ranks.iter().map(|(losses, _)| losses[2 * nth + step]).sum() };
        let slope = (loss(0) - loss(1)) / (2.0 * f64::from(STEP));
        let got = change.gradient(&ranks[change.rank].1);
        assert!((slope - f64::from(got)).abs() < 2e-3, "{change:?}: {got}, differences say {slope}");
        moved[change.what as usize] += usize::from(got.abs() > 0.02);
    }
    assert!(moved.iter().all(|&moved| moved > 5), "{moved:?}");
}
