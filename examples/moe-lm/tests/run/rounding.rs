//! The model in `f64`, with a bound of what its computation in `f32` may be off.
//!
//! A value and its bound go through the operations together, forward and backward. Let `u` be half
//! of `f32::EPSILON`. An operation is off by what its inputs are off, and by two roundings of `u`:
//! one that both implementations have, and one for chains that one of them has as two operations.
//! A sum of `n` terms is off by `n` such roundings of the sizes of its terms, so in any order.
//! Functions are right within their last place, which is two roundings, too. So candle's model and
//! the layers of a mesh are both within the bound, and no constant is chosen.
//!
//! The choice of experts is no such operation: a token whose choice is in doubt fails the test.

use std::ops::{Add, Div, Mul, Sub};

use moe_lm::batches::Windows;
use moe_lm::settings::{Settings, Shape};

use crate::meshes::Tensors;

/// Two roundings.
const ROUNDINGS: f64 = f32::EPSILON as f64;

/// A value, and how far it may be off.
#[derive(Clone, Copy, Debug, Default)]
pub struct Near {
    pub value: f64,
    pub off: f64,
}

type Rows = Vec<Vec<Near>>;

/// Terms of a sum.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    sum: Near,
    sizes: f64,
    terms: f64,
}

impl Near {
    fn exact(value: f64) -> Near {
        Near { value, off: 0.0 }
    }

    /// A result of an operation, with its roundings.
    fn rounded(value: f64, off: f64) -> Near {
        Near { value, off: off + ROUNDINGS * (value.abs() + off) }
    }

    fn sqrt(self) -> Near {
        let value = self.value.sqrt();
        Near::rounded(value, self.off / value)
    }

    fn exp(self) -> Near {
        let value = self.value.exp();
        Near::rounded(value, value * self.off.exp_m1())
    }

    fn ln(self) -> Near {
        Near::rounded(self.value.ln(), self.off / (self.value - self.off))
    }
}

impl Add for Near {
    type Output = Near;

    fn add(self, other: Near) -> Near {
        Near::rounded(self.value + other.value, self.off + other.off)
    }
}

impl Sub for Near {
    type Output = Near;

    fn sub(self, other: Near) -> Near {
        Near::rounded(self.value - other.value, self.off + other.off)
    }
}

impl Mul for Near {
    type Output = Near;

    fn mul(self, other: Near) -> Near {
        let off = self.off * other.value.abs() + other.off * self.value.abs() + self.off * other.off;
        Near::rounded(self.value * other.value, off)
    }
}

impl Div for Near {
    type Output = Near;

    fn div(self, other: Near) -> Near {
        let value = self.value / other.value;
        Near::rounded(value, (self.off + value.abs() * other.off) / (other.value.abs() - other.off))
    }
}

impl Sum {
    fn add(&mut self, term: Near) {
        self.sum.value += term.value;
        self.sum.off += term.off;
        self.sizes += term.value.abs() + term.off;
        self.terms += 1.0;
    }

    fn total(self) -> Near {
        let Near { value, off } = self.sum;
        Near { value, off: off + self.terms * ROUNDINGS * self.sizes }
    }
}

fn sum(terms: impl Iterator<Item = Near>) -> Near {
    let mut sum = Sum::default();
    terms.for_each(|term| sum.add(term));
    sum.total()
}

fn dot(a: &[Near], b: &[Near]) -> Near {
    sum(a.iter().zip(b).map(|(&a, &b)| a * b))
}

fn scaled(row: &[Near], factor: Near) -> Vec<Near> {
    row.iter().map(|&value| value * factor).collect()
}

fn plus(a: &Rows, b: &Rows) -> Rows {
    let row = |(a, b): (&Vec<Near>, &Vec<Near>)| a.iter().zip(b).map(|(&a, &b)| a + b).collect();
    a.iter().zip(b).map(row).collect()
}

/// Sums of rows, element by element.
fn sum_of_rows<'a>(rows: impl Iterator<Item = &'a Vec<Near>> + Clone, width: usize) -> Vec<Near> {
    (0..width).map(|column| sum(rows.clone().map(|row| row[column]))).collect()
}

fn transposed(rows: &Rows) -> Rows {
    (0..rows[0].len()).map(|column| rows.iter().map(|row| row[column]).collect()).collect()
}

/// `x w`
fn product(x: &Rows, w: &Rows) -> Rows {
    let columns = transposed(w);
    x.iter().map(|row| columns.iter().map(|column| dot(row, column)).collect()).collect()
}

/// Softmax. It does not depend on what is subtracted from all, so that is exact.
fn softmax(scores: &[Near]) -> Vec<Near> {
    let largest = scores.iter().map(|score| score.value).fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<Near> = scores.iter().map(|&score| (score - Near::exact(largest)).exp()).collect();
    let sum = sum(powers.iter().copied());
    powers.iter().map(|&power| power / sum).collect()
}

/// Gradients of scores from those of their softmax.
fn softmax_backward(shares: &[Near], of: &[Near]) -> Vec<Near> {
    let along = dot(shares, of);
    shares.iter().zip(of).map(|(&share, &of)| share * (of - along)).collect()
}

fn length(row: &[Near]) -> Near {
    (dot(row, row) / Near::exact(row.len() as f64) + Near::exact(1e-6)).sqrt()
}

fn norm(x: &Rows) -> Rows {
    x.iter().map(|row| row.iter().map(|&value| value / length(row)).collect()).collect()
}

fn norm_backward(x: &Rows, of_y: &Rows) -> Rows {
    let of_row = |(row, of_y): (&Vec<Near>, &Vec<Near>)| {
        let length = length(row);
        let along = dot(row, of_y) / (Near::exact(row.len() as f64) * length * length);
        row.iter().zip(of_y).map(|(&value, &of)| (of - value * along) / length).collect()
    };
    x.iter().zip(of_y).map(of_row).collect()
}

/// The model, with the gradients that came so far.
pub struct Exact<'a> {
    settings: &'a Settings,
    weights: &'a Tensors,
    pub gradients: std::collections::BTreeMap<String, Vec<Near>>,
}

/// Tensors that a layer keeps.
struct Tape {
    x: Rows,
    qkv: Rows,
    /// By token and head: shares of the keys from the window's first on.
    looks: Vec<Vec<Vec<Near>>>,
    seen: Rows,
    between: Rows,
    gates: Vec<Gate>,
}

/// The router's decision for a token.
struct Gate {
    /// Of all experts.
    shares: Vec<Near>,
    /// Chosen experts, with their weights.
    choices: Vec<(usize, Near)>,
}

/// Results of an expert for a row.
struct Expert {
    gate: Vec<Near>,
    up: Vec<Near>,
    inner: Vec<Near>,
    out: Vec<Near>,
}

impl<'a> Exact<'a> {
    pub fn new(settings: &'a Settings, weights: &'a Tensors) -> Exact<'a> {
        Exact { settings, weights, gradients: Default::default() }
    }

    fn weight(&self, name: &str, columns: usize) -> Rows {
        let rows = self.weights[name].chunks_exact(columns);
        rows.map(|row| row.iter().map(|&value| Near::exact(value.into())).collect()).collect()
    }

    /// The gradient of a weight of `y = x w`.
    fn learn(&mut self, name: String, x: &Rows, of_y: &Rows) {
        self.gradients.insert(name, product(&transposed(x), of_y).concat());
    }

    /// The mean loss of some windows. Leaves the gradients of all tensors.
    pub fn pass(&mut self, windows: &Windows) -> Near {
        let Shape { window, layers, width, vocabulary, tied, .. } = self.settings.shape;
        let (token, place) = (self.weight("token", width), self.weight("place", width));
        let tokens: Vec<usize> = windows.tokens.iter().map(|&token| token as usize).collect();
        let embedded = tokens.iter().map(|&id| token[id].clone()).collect();
        let places = (0..tokens.len()).map(|nth| place[nth % window].clone()).collect();
        let (mut x, mut tapes) = (plus(&embedded, &places), Vec::new());
        for layer in 0..layers {
            let (y, tape) = self.block(layer, x);
            x = y;
            tapes.push(tape);
        }
        let head = if tied { transposed(&token) } else { self.weight("head", vocabulary) };
        let (normed, count) = (norm(&x), Near::exact(tokens.len() as f64));
        let mut of_logits = product(&normed, &head);
        let mut losses = Sum::default();
        for (logits, &target) in of_logits.iter_mut().zip(&windows.following) {
            let shares = softmax(logits);
            let largest = logits.iter().map(|logit| logit.value).fold(f64::NEG_INFINITY, f64::max);
            let powers = logits.iter().map(|&logit| (logit - Near::exact(largest)).exp());
            losses.add(sum(powers).ln() - (logits[target as usize] - Near::exact(largest)));
            *logits = shares;
            logits[target as usize] = logits[target as usize] - Near::exact(1.0);
            *logits = scaled(logits, Near::exact(1.0) / count);
        }
        let mut of_x = norm_backward(&x, &product(&of_logits, &transposed(&head)));
        self.learn("head".into(), &normed, &of_logits);
        for (layer, tape) in tapes.into_iter().enumerate().rev() {
            of_x = self.block_backward(layer, tape, of_x);
        }
        let of_token = |id: usize| {
            let rows = tokens.iter().zip(&of_x).filter(move |(token, _)| **token == id).map(|(_, of)| of);
            sum_of_rows(rows, width)
        };
        let mut of_tokens: Rows = (0..vocabulary).map(of_token).collect();
        if tied {
            let of_head = self.gradients.remove("head").unwrap();
            let of_head = of_head.chunks_exact(vocabulary).map(<[Near]>::to_vec).collect();
            of_tokens = plus(&of_tokens, &transposed(&of_head));
        }
        let of_place = |place: usize| sum_of_rows(of_x.iter().skip(place).step_by(window), width);
        let of_places: Rows = (0..window).map(of_place).collect();
        self.gradients.insert("token".into(), of_tokens.concat());
        self.gradients.insert("place".into(), of_places.concat());
        losses.total() / count
    }

    /// Elements of a query head, and of the key and the value that it sees.
    fn places(&self, head: usize) -> [std::ops::Range<usize>; 3] {
        let shape = self.settings.shape;
        let depth = shape.width / shape.heads;
        let key = shape.width + head * shape.kv_heads / shape.heads * depth;
        [head * depth, key, key + shape.kv_width()].map(|first| first..first + depth)
    }

    fn scale(&self) -> Near {
        let Shape { width, heads, .. } = self.settings.shape;
        Near::exact(1.0) / Near::exact((width / heads) as f64).sqrt()
    }

    fn block(&self, layer: usize, x: Rows) -> (Rows, Tape) {
        let Shape { window, width, heads, .. } = self.settings.shape;
        let qkv_width = self.settings.shape.qkv_width();
        let qkv = product(&norm(&x), &self.weight(&format!("qkv.{layer}"), qkv_width));
        let (mut looks, mut seen) = (Vec::new(), Rows::new());
        for token in 0..x.len() {
            let keys = token / window * window..token + 1;
            let (mut of_heads, mut row) = (Vec::new(), Vec::new());
            for [query, key, value] in (0..heads).map(|head| self.places(head)) {
                let score = |at: usize| dot(&qkv[token][query.clone()], &qkv[at][key.clone()]) * self.scale();
                let shares = softmax(&keys.clone().map(score).collect::<Vec<_>>());
                row.extend(value.map(|column| {
                    sum(keys.clone().zip(&shares).map(|(at, &share)| share * qkv[at][column]))
                }));
                of_heads.push(shares);
            }
            looks.push(of_heads);
            seen.push(row);
        }
        let between = plus(&x, &product(&seen, &self.weight(&format!("out.{layer}"), width)));
        let normed = norm(&between);
        let gates: Vec<_> = self.gates(layer, &normed);
        let row = |(row, gate): (&Vec<Near>, &Gate)| {
            let outputs: Rows = gate
                .choices
                .iter()
                .map(|&(expert, weight)| scaled(&self.expert(layer, expert, row).out, weight))
                .collect();
            sum_of_rows(outputs.iter(), width)
        };
        let out = normed.iter().zip(&gates).map(row).collect();
        (plus(&between, &out), Tape { x, qkv, looks, seen, between, gates })
    }

    fn gates(&self, layer: usize, x: &Rows) -> Vec<Gate> {
        let Shape { experts, top_k, .. } = self.settings.shape;
        let of_token = |logits: Vec<Near>| {
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|&a, &b| logits[b].value.total_cmp(&logits[a].value));
            let (last, next) = (logits[order[top_k - 1]], logits[order[top_k]]);
            assert!(last.value - next.value > last.off + next.off, "a choice is in doubt: {last:?} {next:?}");
            let chosen: Vec<Near> = order[..top_k].iter().map(|&expert| logits[expert]).collect();
            let choices = order.iter().copied().zip(softmax(&chosen)).collect();
            Gate { shares: softmax(&logits), choices }
        };
        product(x, &self.weight(&format!("router.{layer}"), experts)).into_iter().map(of_token).collect()
    }

    fn expert(&self, layer: usize, expert: usize, row: &[Near]) -> Expert {
        let Shape { width, expert_width, .. } = self.settings.shape;
        let of = |name: &str, row: &[Near], columns: usize| {
            let weight = self.weight(&format!("{name}.{layer}.{expert}"), columns);
            product(&vec![row.to_vec()], &weight).remove(0)
        };
        let (gate, up) = (of("gate", row, expert_width), of("up", row, expert_width));
        let inner: Vec<Near> = gate.iter().zip(&up).map(|(&gate, &up)| gate * sigmoid(gate) * up).collect();
        let out = of("down", &inner, width);
        Expert { gate, up, inner, out }
    }

    fn block_backward(&mut self, layer: usize, tape: Tape, of_y: Rows) -> Rows {
        let Shape { window, width, heads, .. } = self.settings.shape;
        let normed = norm(&tape.between);
        let of_normed = self.experts_backward(layer, &tape, &normed, &of_y);
        let of_between = plus(&of_y, &norm_backward(&tape.between, &of_normed));
        let out = self.weight(&format!("out.{layer}"), width);
        self.learn(format!("out.{layer}"), &tape.seen, &of_between);
        let of_seen = product(&of_between, &transposed(&out));
        let mut of_qkv = vec![vec![Sum::default(); tape.qkv[0].len()]; tape.x.len()];
        for token in 0..tape.x.len() {
            let keys = token / window * window..token + 1;
            for head in 0..heads {
                let [query, key, value] = self.places(head);
                let (shares, of_out) = (&tape.looks[token][head], &of_seen[token][query.clone()]);
                let of_shares = keys.clone().map(|at| dot(of_out, &tape.qkv[at][value.clone()]));
                let of_scores = softmax_backward(shares, &of_shares.collect::<Vec<_>>());
                for ((at, &share), &of_score) in keys.clone().zip(shares).zip(&of_scores) {
                    let of_score = of_score * self.scale();
                    let columns = query.clone().zip(key.clone().zip(value.clone()));
                    for ((query, (key, value)), &of) in columns.zip(of_out) {
                        of_qkv[token][query].add(of_score * tape.qkv[at][key]);
                        of_qkv[at][key].add(of_score * tape.qkv[token][query]);
                        of_qkv[at][value].add(share * of);
                    }
                }
            }
        }
        let of_qkv: Rows = of_qkv.into_iter().map(|row| row.into_iter().map(Sum::total).collect()).collect();
        let qkv = self.weight(&format!("qkv.{layer}"), tape.qkv[0].len());
        self.learn(format!("qkv.{layer}"), &norm(&tape.x), &of_qkv);
        let of_normed = product(&of_qkv, &transposed(&qkv));
        plus(&of_between, &norm_backward(&tape.x, &of_normed))
    }

    fn experts_backward(&mut self, layer: usize, tape: &Tape, x: &Rows, of_y: &Rows) -> Rows {
        let Shape { window, width, experts, top_k, expert_width, .. } = self.settings.shape;
        let windows = x.len() / window;
        // Each window is balanced by itself: counts of choices, which have no gradient.
        let mut counts = vec![vec![0.0; experts]; windows];
        for (token, gate) in tape.gates.iter().enumerate() {
            gate.choices.iter().for_each(|&(expert, _)| counts[token / window][expert] += 1.0);
        }
        let balance = Near::exact(f64::from(self.settings.balance) * experts as f64 / windows as f64);
        let choices = Near::exact((window * top_k * window) as f64);
        let mut rows: Vec<[Rows; 6]> = vec![Default::default(); experts];
        let (mut of_x, mut of_logits) = (Rows::new(), Rows::new());
        for (token, Gate { shares, choices: chosen }) in tape.gates.iter().enumerate() {
            let of_shares: Vec<Near> =
                counts[token / window].iter().map(|&count| balance * Near::exact(count) / choices).collect();
            let mut of_logit = softmax_backward(shares, &of_shares);
            let (mut of_rows, mut of_weights) = (Rows::new(), Vec::new());
            for &(expert, weight) in chosen {
                let Expert { gate, up, inner, out } = self.expert(layer, expert, &x[token]);
                of_weights.push(dot(&of_y[token], &out));
                let of_out = scaled(&of_y[token], weight);
                let weight_of =
                    |name: &str, columns| self.weight(&format!("{name}.{layer}.{expert}"), columns);
                let of_inner =
                    product(&vec![of_out.clone()], &transposed(&weight_of("down", width))).remove(0);
                let (mut of_gate, mut of_up) = (Vec::new(), Vec::new());
                for ((&gate, &up), &of) in gate.iter().zip(&up).zip(&of_inner) {
                    let s = sigmoid(gate);
                    of_up.push(of * (gate * s));
                    of_gate.push(of * up * (s + gate * s * (Near::exact(1.0) - s)));
                }
                for (name, of) in [("gate", &of_gate), ("up", &of_up)] {
                    let weight = transposed(&weight_of(name, expert_width));
                    of_rows.push(product(&vec![of.clone()], &weight).remove(0));
                }
                let row = [x[token].clone(), of_gate, x[token].clone(), of_up, inner, of_out];
                rows[expert].iter_mut().zip(row).for_each(|(rows, row)| rows.push(row));
            }
            let weights: Vec<Near> = chosen.iter().map(|&(_, weight)| weight).collect();
            for (&(expert, _), of) in chosen.iter().zip(softmax_backward(&weights, &of_weights)) {
                of_logit[expert] = of_logit[expert] + of;
            }
            of_x.push(sum_of_rows(of_rows.iter(), width));
            of_logits.push(of_logit);
        }
        for (expert, [x, of_gate, again, of_up, inner, of_out]) in rows.into_iter().enumerate() {
            let shapes = [("gate", x, of_gate), ("up", again, of_up), ("down", inner, of_out)];
            for (name, x, of_y) in shapes {
                let name = format!("{name}.{layer}.{expert}");
                if x.is_empty() {
                    self.gradients.insert(name, vec![Near::default(); width * expert_width]);
                } else {
                    self.learn(name, &x, &of_y);
                }
            }
        }
        let router = self.weight(&format!("router.{layer}"), experts);
        self.learn(format!("router.{layer}"), x, &of_logits);
        plus(&of_x, &product(&of_logits, &transposed(&router)))
    }
}

fn sigmoid(x: Near) -> Near {
    Near::exact(1.0) / (Near::exact(1.0) + (Near::exact(0.0) - x).exp())
}
