//! What the least certain figures decide: the fastest variants and their bottlenecks, at both ends
//! of what a copy and a word of a stream may cost.
//!
//! | figure | from | to |
//! |---|---|---|
//! | a copy of a batch, between ranks and within one | 0.6 us: published for copies from a host in large batches | 2.3 us: published over NVLink in batches of 16 |
//! | a word of a list | 0.1 us: an estimate | 0.5 us: an estimate; an H100 took 0.63 us to host memory |

use serde::Serialize;

use super::variants::Timed;
use super::{Executor, Hardware, Resource, Timing};

/// Prices in us that a copy and a word are given in turn.
const COPIES: [f64; 2] = [0.6, 2.3];
const WORDS: [f64; 2] = [0.1, 0.5];

/// The machine with another price.
pub struct Assumption {
    title: String,
    /// The machine with that price alone changed.
    pub hardware: Hardware,
}

/// Conclusions at these prices.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// The price that is another, in words.
    pub assumption: String,
    /// Of a copy between ranks, in us.
    pub copy_us: f64,
    /// Of a word of a stream, in us.
    pub word_us: f64,
    /// Of all ways.
    pub dispatch: Fastest,
    /// Of all ways.
    pub combine: Fastest,
    /// Conclusions that are others than those of the machine as it is.
    pub flips: Vec<String>,
}

/// The fastest variant of a call.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fastest {
    /// Its name.
    pub variant: String,
    /// Its time.
    pub ns: u64,
    /// The part that was busy longest.
    pub bottleneck: Resource,
}

impl Assumption {
    /// Each price by itself; none where cores copy.
    pub fn of(hardware: &Hardware) -> Vec<Assumption> {
        if hardware.executor == Executor::Host {
            return Vec::new();
        }
        let copy = |us: f64| {
            let mut hardware = hardware.clone();
            let engines = &mut hardware.engines;
            let steps = engines.peer.iter_mut().chain(&mut engines.own);
            steps.for_each(|step| step.per_copy = (us * 1e3) as u64);
            Assumption { title: format!("{us} us a copy"), hardware }
        };
        let word = |us: f64| {
            let mut hardware = hardware.clone();
            hardware.engines.per_word = (us * 1e3) as u64;
            Assumption { title: format!("{us} us a word"), hardware }
        };
        COPIES.map(copy).into_iter().chain(WORDS.map(word)).collect()
    }
}

impl Hardware {
    /// Price of a small copy between ranks, in us.
    pub fn copy_us(&self) -> f64 {
        self.engines.peer.first().map_or(0.0, |step| step.per_copy as f64 / 1e3)
    }
}

/// Conclusions of the machine as it is, then at each other price.
pub fn outcomes(
    hardware: &Hardware,
    variants: &[Timed],
    assumptions: &[Assumption],
    of_others: &[Vec<Timed>],
) -> Vec<Outcome> {
    let Some(as_given) = Outcome::new("as given", hardware, variants) else { return Vec::new() };
    let others = assumptions.iter().zip(of_others).filter_map(|(other, variants)| {
        let outcome = Outcome::new(&other.title, &other.hardware, variants)?;
        Some(Outcome { flips: outcome.differences(&as_given), ..outcome })
    });
    std::iter::once(as_given.clone()).chain(others).collect()
}

impl Outcome {
    fn new(assumption: &str, hardware: &Hardware, variants: &[Timed]) -> Option<Self> {
        let fastest = |of: fn(&Timed) -> &Timing| {
            let timed = variants.iter().min_by_key(|timed| of(timed).ns)?;
            let Timing { ns, bottleneck, .. } = of(timed);
            Some(Fastest { variant: timed.name.clone(), ns: *ns, bottleneck: bottleneck.part })
        };
        Some(Outcome {
            assumption: assumption.to_owned(),
            copy_us: hardware.copy_us(),
            word_us: hardware.engines.per_word as f64 / 1e3,
            dispatch: fastest(|timed| &timed.dispatch)?,
            combine: fastest(|timed| &timed.combine)?,
            flips: Vec::new(),
        })
    }

    fn differences(&self, other: &Outcome) -> Vec<String> {
        let calls =
            [("dispatch", &self.dispatch, &other.dispatch), ("combine", &self.combine, &other.combine)];
        let mut flips = Vec::new();
        for (call, here, there) in calls {
            if here.variant != there.variant {
                flips.push(format!("{call}: {}", here.variant));
            }
            if here.bottleneck != there.bottleneck {
                flips.push(format!("{call}: bound by {}", here.bottleneck.name()));
            }
        }
        flips
    }
}
