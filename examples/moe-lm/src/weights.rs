//! Weights as one vector, with names for its parts: for an optimizer, a sum over ranks, and a
//! checkpoint.

use std::ops::Range;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::settings::{Settings, Shape};

/// A tensor among the weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What checkpoints call it.
    pub name: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Where its values are.
    pub range: Range<usize>,
}

/// Tensors one after another.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Weights {
    /// What there is.
    pub entries: Vec<Entry>,
    /// Its values.
    pub values: Vec<f32>,
}

impl Weights {
    /// Weights that are equal on all ranks: embeddings, attention, routers, head.
    pub fn dense(settings: &Settings) -> Weights {
        let Shape { vocabulary, window, layers, width, experts, tied, .. } = settings.shape;
        let mut weights = Weights::default();
        let mut add = |name: String, shape: &[usize]| {
            let stream = weights.entries.len() as u64;
            let range = weights.add(name, shape);
            weights.draw(range, shape, &mut Normal::new(settings.seed, stream));
        };
        add("token".into(), &[vocabulary, width]);
        add("place".into(), &[window, width]);
        if !tied {
            add("head".into(), &[width, vocabulary]);
        }
        for layer in 0..layers {
            add(format!("qkv.{layer}"), &[width, settings.shape.qkv_width()]);
            add(format!("out.{layer}"), &[width, width]);
            add(format!("router.{layer}"), &[width, experts]);
        }
        weights
    }

    /// Some of the experts of every layer, each with its matrices in the order of
    /// [`GroupedSwiGlu`](sidelane::layer::GroupedSwiGlu). An expert begins with the same values on
    /// every rank.
    pub fn experts(settings: &Settings, range: Range<usize>) -> Weights {
        let mut weights = Weights::no_experts(settings, range.clone());
        let Shape { layers, experts, .. } = settings.shape;
        let mut entries = weights.entries.clone().into_iter();
        for layer in 0..layers {
            for expert in range.clone() {
                let stream = 1 << 32 | (layer * experts + expert) as u64;
                let mut normal = Normal::new(settings.seed, stream);
                for Entry { shape, range, .. } in entries.by_ref().take(3) {
                    weights.draw(range, &shape, &mut normal);
                }
            }
        }
        weights
    }

    /// The same with zeros: for experts that come from elsewhere.
    pub fn no_experts(settings: &Settings, range: Range<usize>) -> Weights {
        let Shape { layers, width, expert_width, .. } = settings.shape;
        let mut weights = Weights::default();
        for layer in 0..layers {
            for expert in range.clone() {
                for (name, shape) in [
                    ("gate", [width, expert_width]),
                    ("up", [width, expert_width]),
                    ("down", [expert_width, width]),
                ] {
                    weights.add(format!("{name}.{layer}.{expert}"), &shape);
                }
            }
        }
        weights
    }

    /// Appends a tensor of zeros.
    fn add(&mut self, name: String, shape: &[usize]) -> Range<usize> {
        let range = self.values.len()..self.values.len() + shape.iter().product::<usize>();
        self.values.resize(range.end, 0.0);
        self.entries.push(Entry { name, shape: shape.to_vec(), range: range.clone() });
        range
    }

    /// Draws a tensor whose products keep the size of their inputs.
    fn draw(&mut self, range: Range<usize>, shape: &[usize], normal: &mut Normal) {
        let scale = 1.0 / (shape[0] as f32).sqrt();
        self.values[range].iter_mut().for_each(|value| *value = scale * normal.draw());
    }

    /// Where the values of an expert are, in each layer.
    pub fn ranges_of(&self, expert: usize) -> Vec<Range<usize>> {
        let suffix = format!(".{expert}");
        let entries = self.entries.iter().filter(|entry| entry.name.ends_with(&suffix));
        entries.map(|entry| entry.range.clone()).collect()
    }

    /// The weights of an expert in a layer.
    ///
    /// # Panics
    /// As [`range`](Self::range).
    pub fn of_expert(&self, layer: usize, expert: usize) -> &[f32] {
        let [first, last] = ["gate", "down"].map(|name| self.range(&format!("{name}.{layer}.{expert}")));
        &self.values[first.start..last.end]
    }

    /// Where a tensor's values are.
    ///
    /// # Panics
    /// If there is no such tensor: names are the model's own.
    pub fn range(&self, name: &str) -> Range<usize> {
        let entry = self.entries.iter().find(|entry| entry.name == name);
        entry.unwrap_or_else(|| panic!("no tensor {name}")).range.clone()
    }
}

/// Normally distributed numbers.
struct Normal(ChaCha8Rng);

impl Normal {
    fn new(seed: u64, stream: u64) -> Normal {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(stream);
        Normal(random)
    }

    /// By Box and Muller.
    fn draw(&mut self) -> f32 {
        let (u, v) = (1.0 - self.0.random::<f64>(), self.0.random::<f64>());
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }
}
