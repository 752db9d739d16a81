//! A layer with factors of bf16 as its formula says it, token by token: rounded to bf16 where a
//! layer on a device does, with sums in the order of the fake cuBLAS or of our kernels.

use half::bf16;
use sidelane::gate::{Decision, GateConfig, WeightsInput, weights_backward};
use sidelane::layer::GroupedSwiGlu;

use super::case::{HIDDEN, values};

/// The order in which the fake cuBLAS sums.
#[derive(Clone, Copy, Debug)]
pub enum Order {
    /// From the last term to the first, each rounded.
    Backward,
    /// To the last rounding.
    Exact,
}

impl Order {
    /// That of this process.
    pub fn of_process() -> Order {
        let seed = std::env::var("SIDELANE_FAKE_CUDA_SEED").unwrap().parse::<u64>().unwrap();
        if seed.is_multiple_of(2) { Order::Backward } else { Order::Exact }
    }

    fn sum(self, terms: impl DoubleEndedIterator<Item = (f32, f32)>) -> f32 {
        let terms = terms.rev();
        let sum = match self {
            Order::Backward => terms.fold(0.0, |sum, (left, right)| sum + left * right),
            Order::Exact => terms.map(|(left, right)| f64::from(left) * f64::from(right)).sum::<f64>() as f32,
        };
        // Nothing is added to it.
        sum + 0.0
    }
}

fn round(value: f32) -> f32 {
    bf16::from_f32(value).to_f32()
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + libm::expf(-x))
}

/// Weights of one expert, f32: w1 and w3, then w2.
pub fn weights_of(expert: u32, ffn: usize) -> Vec<f32> {
    values(500 + u64::from(expert), GroupedSwiGlu::values(1, HIDDEN, ffn), 0.6)
}

/// One expert, by its weights in bf16.
#[derive(Clone)]
pub struct Expert {
    ffn: usize,
    order: Order,
    weights: Vec<f32>,
}

/// Outputs of an expert for a row, and values that its gradients need.
pub struct Made {
    x: Vec<f32>,
    weight: f32,
    inner: Vec<f32>,
    /// Its outputs, times the routing weight, not yet rounded.
    pub y: Vec<f32>,
}

/// Gradients of a row.
pub struct Gradients {
    x: Vec<f32>,
    of_y: Vec<f32>,
    inner: Vec<f32>,
    act: Vec<f32>,
    pub of_weight: f32,
    /// Of the row, not yet rounded.
    pub of_x: Vec<f32>,
}

impl Expert {
    pub fn new(weights: &[f32], ffn: usize, order: Order) -> Expert {
        Expert { ffn, order, weights: weights.iter().copied().map(round).collect() }
    }

    /// Gate and up side by side.
    fn gate_up(&self, row: usize, column: usize) -> f32 {
        let (which, column) = (column / self.ffn, column % self.ffn);
        self.weights[(which * HIDDEN + row) * self.ffn + column]
    }

    fn down(&self, row: usize, column: usize) -> f32 {
        self.weights[(2 * self.ffn + row) * HIDDEN + column]
    }

    pub fn forward(&self, x: &[f32], weight: f32) -> Made {
        let of_inner = |c| round(self.order.sum((0..HIDDEN).map(|h| (x[h], self.gate_up(h, c)))));
        let inner: Vec<f32> = (0..2 * self.ffn).map(of_inner).collect();
        let act = |f: usize| round(weight * (inner[f] * sigmoid(inner[f]) * inner[self.ffn + f]));
        let act: Vec<f32> = (0..self.ffn).map(act).collect();
        let y = |h| self.order.sum((0..self.ffn).map(|f| (act[f], self.down(f, h))));
        let y = (0..HIDDEN).map(y).collect();
        Made { x: x.to_vec(), weight, inner, y }
    }

    pub fn backward(&self, made: &Made, of_y: &[f32]) -> Gradients {
        let ffn = self.ffn;
        let (mut inner, mut act, mut lanes) = (made.inner.clone(), Vec::new(), [0.0_f32; 32]);
        for f in 0..ffn {
            let da = round(self.order.sum((0..HIDDEN).map(|h| (of_y[h], self.down(f, h)))));
            let (g, u) = (made.inner[f], made.inner[ffn + f]);
            let s = sigmoid(g);
            let (silu, d) = (g * s, made.weight * da);
            lanes[f / 8 % 32] += da * (silu * u);
            inner[f] = round(d * u * (s + silu * (1.0 - s)));
            inner[ffn + f] = round(d * silu);
            act.push(round(made.weight * (silu * u)));
        }
        for half in [16, 8, 4, 2, 1] {
            let before = lanes;
            (0..32).for_each(|lane| lanes[lane] = before[lane] + before[lane ^ half]);
        }
        let of_x = |h| self.order.sum((0..2 * ffn).map(|c| (inner[c], self.gate_up(h, c))));
        let of_x = (0..HIDDEN).map(of_x).collect();
        Gradients { x: made.x.clone(), of_y: of_y.to_vec(), inner, act, of_weight: lanes[0], of_x }
    }

    /// The gradient of the weights, by rows in their order.
    pub fn of_weights(&self, rows: &[&Gradients]) -> Vec<f32> {
        let ffn = self.ffn;
        let sum = |left: &dyn Fn(&Gradients) -> f32, right: &dyn Fn(&Gradients) -> f32| {
            self.order.sum(rows.iter().map(|row| (left(row), right(row))))
        };
        let inner = (0..2 * HIDDEN * ffn).map(|at| {
            let (which, h, f) = (at / ffn / HIDDEN, at / ffn % HIDDEN, at % ffn);
            sum(&|row| row.x[h], &|row| row.inner[which * ffn + f])
        });
        let down = (0..ffn * HIDDEN).map(|at| sum(&|row| row.act[at / HIDDEN], &|row| row.of_y[at % HIDDEN]));
        inner.chain(down).collect()
    }
}

/// One rank's tokens and what it knows of them.
pub struct Rank {
    pub x: Vec<bf16>,
    pub residual: Vec<bf16>,
    pub of_out: Vec<bf16>,
    pub decision: Decision,
}

/// A rank's results.
pub struct Expected {
    pub out: Vec<bf16>,
    pub of_x: Vec<bf16>,
    pub router: Vec<f32>,
    pub shared: Vec<f32>,
    /// Of its rows: each one's expert, and the gradients.
    pub rows: Vec<(usize, Gradients)>,
}

/// A layer: all experts, that of all tokens, and the router.
pub struct Layer<'a> {
    pub experts: &'a [Expert],
    pub shared: &'a Expert,
    pub router: &'a [f32],
    pub config: &'a GateConfig,
    pub order: Order,
}

impl Layer<'_> {
    pub fn step(&self, rank: &Rank) -> Expected {
        let (n_experts, top_k) = (self.experts.len(), self.config.top_k as usize);
        let wide = |values: &[bf16]| values.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
        let (x, residual, of_out) = (wide(&rank.x), wide(&rank.residual), wide(&rank.of_out));
        let tokens = x.len() / HIDDEN;
        let row = |values: &'_ [f32], token: usize| values[token * HIDDEN..][..HIDDEN].to_vec();
        let (mut out, mut of_tokens, mut beside) = (Vec::new(), Vec::new(), Vec::new());
        let (mut rows, mut of_weights, mut all) = (Vec::new(), vec![0.0; tokens * top_k], Vec::new());
        for token in 0..tokens {
            let (x, of_y) = (row(&x, token), row(&of_out, token));
            let shared = self.shared.forward(&x, 1.0);
            let mut choices: Vec<usize> = (token * top_k..(token + 1) * top_k).collect();
            choices.sort_by_key(|&at| rank.decision.experts()[at]);
            let (mut sums, mut of_sums) = (vec![0.0; HIDDEN], vec![0.0; HIDDEN]);
            for at in choices {
                let expert = rank.decision.experts()[at] as usize;
                let made = self.experts[expert].forward(&x, rank.decision.weights()[at]);
                let gradients = self.experts[expert].backward(&made, &of_y);
                let add = |sums: &mut Vec<f32>, row: &[f32]| {
                    sums.iter_mut().zip(row).for_each(|(sum, &value)| *sum += round(value));
                };
                add(&mut sums, &made.y);
                add(&mut of_sums, &gradients.of_x);
                of_weights[at] = gradients.of_weight;
                rows.push((expert, gradients));
            }
            let residual = row(&residual, token);
            out.extend((0..HIDDEN).map(|h| bf16::from_f32(round(sums[h]) + residual[h] + shared.y[h])));
            of_tokens.extend(of_sums.into_iter().map(round));
            all.push(self.shared.backward(&shared, &of_y));
            beside.extend(all[token].of_x.clone());
        }
        let logit = |at: usize| {
            let (token, expert) = (at / n_experts, at % n_experts);
            let term = |h| (x[token * HIDDEN + h], self.router[h * n_experts + expert]);
            self.order.sum((0..HIDDEN).map(term))
        };
        let logits: Vec<f32> = (0..tokens * n_experts).map(logit).collect();
        let mut of_logits = vec![0.0; logits.len()];
        let (choices, experts) = (rank.decision.choices(), rank.decision.experts());
        let input = WeightsInput { logits: &logits, choices, experts, d_weights: &of_weights };
        weights_backward(self.config, &input, &mut of_logits).unwrap();
        let of_x = (0..tokens * HIDDEN).map(|at| {
            let (token, h) = (at / HIDDEN, at % HIDDEN);
            let term = |e| (of_logits[token * n_experts + e], self.router[h * n_experts + e]);
            bf16::from_f32(of_tokens[at] + beside[at] + self.order.sum((0..n_experts).map(term)))
        });
        let router = (0..HIDDEN * n_experts).map(|at| {
            let (h, e) = (at / n_experts, at % n_experts);
            let term = |token| (x[token * HIDDEN + h], of_logits[token * n_experts + e]);
            self.order.sum((0..tokens).map(term))
        });
        let shared = self.shared.of_weights(&all.iter().collect::<Vec<_>>());
        Expected { of_x: of_x.collect(), router: router.collect(), shared, out, rows }
    }
}
