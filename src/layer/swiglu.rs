//! SwiGLU experts by grouped products: the default.
//!
//! ```text
//!   g = x w1      u = x w3      a = silu(g) u      y = a w2                        silu(g) = g s,  s = 1 / (1 + e^-g)
//!
//!   da = dy w2'   du = da silu(g)   dg = da u (s + g s (1 - s))   dx = dg w1' + du w3'          rows_backward
//!   dw1 = x' dg   dw3 = x' du       dw2 = a' dy                                                 weights_backward
//! ```
//!
//! All in f32. A row's bits depend on the row and the weights alone
//! ([`product`](crate::rows::product)). Weight gradients are one product per expert over its rows
//! of all chunks, so no sum is split; the price is memory:
//!
//! | held | values |
//! |---|---|
//! | from forward to `rows_backward`, per row | `2 ffn` (g, u) |
//! | from there to `weights_backward`, per row | `3 ffn + hidden` (a, dg, du, dy) |
//! | in `weights_backward`, per row of one expert | `3 ffn + 2 hidden`, put in order |

use super::{ExpertError, Experts, GradientOrder, Saved, Segments};
use crate::error::{Error, LayerError, PlanError};
use crate::rows::{Matrix, product};

/// Experts of one rank, each `silu(x w1) * (x w3) w2`.
///
/// ```
/// use sidelane::layer::{Experts, GroupedSwiGlu, Segments};
/// let weights = vec![1.0; GroupedSwiGlu::values(2, 4, 3)];              // 2 experts, hidden 4, ffn 3
/// let experts = GroupedSwiGlu::new(2, 4, 3, weights)?;
/// let rows = Segments::new(&[0.25; 8], 4, &[0, 2], &[0, 2]);
/// let (y, _) = experts.forward(rows).unwrap();
/// let silu = 1.0 / (1.0 + (-1.0f32).exp());
/// assert!(y.iter().all(|y| (y - 3.0 * silu).abs() < 1e-5));
/// # Ok::<(), sidelane::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct GroupedSwiGlu {
    pub(super) experts: usize,
    pub(super) hidden: usize,
    pub(super) ffn: usize,
    pub(super) weights: Vec<f32>,
}

/// Saved values of a chunk, `[rows, ffn]` each; after `rows_backward` the gradients of `gate` and
/// `up` replace them.
struct Activations {
    gate: Vec<f32>,
    up: Vec<f32>,
    act: Vec<f32>,
    of_outputs: Vec<f32>,
}

/// The weights of one expert.
struct Weights<'a> {
    gate: Matrix<'a>,
    up: Matrix<'a>,
    down: Matrix<'a>,
}

impl GroupedSwiGlu {
    /// Number of weights: `experts * 3 * hidden * ffn`.
    pub fn values(experts: usize, hidden: usize, ffn: usize) -> usize {
        experts * 3 * hidden * ffn
    }

    /// From weights: per expert `w1` and `w3`, `[hidden, ffn]`, and `w2`, `[ffn, hidden]`. Their
    /// gradient has the same order.
    ///
    /// # Errors
    /// [`PlanError::WrongShape`] if there are not [`values`](Self::values) weights.
    pub fn new(experts: usize, hidden: usize, ffn: usize, weights: Vec<f32>) -> Result<Self, PlanError> {
        let seen = weights.len();
        let columns = hidden.saturating_mul(ffn).saturating_mul(3);
        if experts.checked_mul(columns) != Some(seen) {
            return Err(PlanError::WrongShape { what: "weights of experts", seen, rows: experts, columns });
        }
        Ok(GroupedSwiGlu { experts, hidden, ffn, weights })
    }

    fn of(&self, expert: usize) -> Weights<'_> {
        let (hidden, ffn) = (self.hidden, self.ffn);
        let each = hidden * ffn;
        let weights = |nth| &self.weights[(3 * expert + nth) * each..][..each];
        Weights {
            gate: Matrix::new(weights(0), hidden, ffn),
            up: Matrix::new(weights(1), hidden, ffn),
            down: Matrix::new(weights(2), ffn, hidden),
        }
    }

    fn check(&self, rows: &Segments<'_>) -> Result<(), Error> {
        let (seen, columns) = (rows.rows.len(), self.hidden);
        for counts in [rows.counts, rows.padded] {
            if counts.len() != self.experts {
                let (what, seen, rows) = ("counts of experts", counts.len(), self.experts);
                return Err(PlanError::WrongShape { what, seen, rows, columns: 1 }.into());
            }
        }
        let total = rows.total().unwrap_or(usize::MAX);
        if rows.hidden != columns || total.checked_mul(columns) != Some(seen) {
            let what = "rows of experts";
            return Err(PlanError::WrongShape { what, seen, rows: total, columns }.into());
        }
        Ok(())
    }

    /// Per expert: its number, its rows, and how many there are.
    fn groups<'a>(&self, rows: Segments<'a>) -> impl Iterator<Item = (usize, usize, usize)> + 'a {
        let counts = rows.counts;
        let firsts: Vec<usize> = rows.ranges().map(|range| range.start).collect();
        firsts
            .into_iter()
            .zip(counts)
            .enumerate()
            .map(|(expert, (first, &count))| (expert, first, count as usize))
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + libm::expf(-x))
}

impl Experts for GroupedSwiGlu {
    fn count(&self) -> usize {
        self.experts
    }

    fn hidden(&self) -> usize {
        self.hidden
    }

    fn forward(&self, rows: Segments<'_>) -> Result<(Vec<f32>, Saved), ExpertError> {
        self.check(&rows)?;
        let (hidden, ffn) = (self.hidden, self.ffn);
        let zeros = |columns| vec![0.0f32; rows.len() * columns];
        let (mut gate, mut up, mut out) = (zeros(ffn), zeros(ffn), zeros(hidden));
        for (expert, first, count) in self.groups(rows) {
            let weights = self.of(expert);
            let x = Matrix::new(&rows.rows[first * hidden..][..count * hidden], count, hidden);
            let inner = first * ffn..(first + count) * ffn;
            product(&mut gate[inner.clone()], x, weights.gate, false);
            product(&mut up[inner.clone()], x, weights.up, false);
            let act = activate(&gate[inner.clone()], &up[inner]);
            let out = &mut out[first * hidden..][..count * hidden];
            product(out, Matrix::new(&act, count, ffn), weights.down, false);
        }
        Ok((out, Box::new(Activations { gate, up, act: Vec::new(), of_outputs: Vec::new() })))
    }

    fn rows_backward(
        &self,
        rows: Segments<'_>,
        saved: &mut Saved,
        of_outputs: Vec<f32>,
    ) -> Result<Vec<f32>, ExpertError> {
        self.check(&rows)?;
        let (hidden, ffn) = (self.hidden, self.ffn);
        let kept = saved.downcast_mut::<Activations>().ok_or(LayerError::ForeignSaved)?;
        kept.act = activate(&kept.gate, &kept.up);
        kept.of_outputs = of_outputs;
        let mut of_act = vec![0.0; rows.len() * ffn];
        let mut of_rows = vec![0.0; rows.len() * hidden];
        for (expert, first, count) in self.groups(rows) {
            let weights = self.of(expert);
            let (inner, outer) =
                (first * ffn..(first + count) * ffn, first * hidden..(first + count) * hidden);
            let dy = Matrix::new(&kept.of_outputs[outer.clone()], count, hidden);
            product(&mut of_act[inner.clone()], dy, weights.down.transposed(), false);
            let (gate, up) = (&mut kept.gate[inner.clone()], &mut kept.up[inner.clone()]);
            for ((g, u), &da) in gate.iter_mut().zip(&mut *up).zip(&of_act[inner]) {
                let s = sigmoid(*g);
                let silu = *g * s;
                (*g, *u) = (da * *u * (s + silu * (1.0 - s)), da * silu);
            }
            let of_rows = &mut of_rows[outer];
            product(of_rows, Matrix::new(gate, count, ffn), weights.gate.transposed(), false);
            product(of_rows, Matrix::new(up, count, ffn), weights.up.transposed(), true);
        }
        Ok(of_rows)
    }

    fn weights_backward(
        &self,
        chunks: &[(Segments<'_>, &Saved)],
        order: &GradientOrder,
    ) -> Result<Vec<f32>, ExpertError> {
        chunks.iter().try_for_each(|(rows, _)| self.check(rows))?;
        let (hidden, ffn) = (self.hidden, self.ffn);
        let kept = chunks.iter().map(|(_, saved)| saved.downcast_ref::<Activations>());
        let kept = kept.collect::<Option<Vec<_>>>().ok_or(LayerError::ForeignSaved)?;
        let mut gradient = vec![0.0; self.weights.len()];
        let each = hidden * ffn;
        for (expert, gradient) in gradient.chunks_exact_mut((3 * each).max(1)).enumerate() {
            let rows = order.rows(expert);
            let x = order.gather(expert, hidden, |chunk| chunks[chunk].0.rows);
            let x = Matrix::new(&x, rows, hidden).transposed();
            let of_gate = order.gather(expert, ffn, |chunk| &kept[chunk].gate);
            product(&mut gradient[..each], x, Matrix::new(&of_gate, rows, ffn), false);
            let of_up = order.gather(expert, ffn, |chunk| &kept[chunk].up);
            product(&mut gradient[each..2 * each], x, Matrix::new(&of_up, rows, ffn), false);
            let act = order.gather(expert, ffn, |chunk| &kept[chunk].act);
            let dy = order.gather(expert, hidden, |chunk| &kept[chunk].of_outputs);
            let act = Matrix::new(&act, rows, ffn).transposed();
            product(&mut gradient[2 * each..], act, Matrix::new(&dy, rows, hidden), false);
        }
        Ok(gradient)
    }

    fn as_swiglu(&self) -> Option<&GroupedSwiGlu> {
        Some(self)
    }

    fn with_weights(&self, count: usize, weights: Vec<f32>) -> Result<Box<dyn Experts>, ExpertError> {
        Ok(Box::new(GroupedSwiGlu::new(count, self.hidden, self.ffn, weights).map_err(Error::from)?))
    }

    fn weights(&self) -> &[f32] {
        &self.weights
    }

    fn weights_mut(&mut self) -> &mut [f32] {
        &mut self.weights
    }
}

/// `silu(gate) * up`, element by element.
fn activate(gate: &[f32], up: &[f32]) -> Vec<f32> {
    gate.iter().zip(up).map(|(&g, &u)| g * sigmoid(g) * u).collect()
}
