//! One cell of the matrix, in processes of its own: four ranks come to a phase, and the fault
//! strikes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::RngExt;
use serde::Serialize;

use crate::cell::{Cell, Lane, Phase};
use crate::error::{Error, Result};
use crate::inject::Machine;
use crate::job::Job;
use crate::trial::{Judged, Strike, Trial};
use crate::wire::Wire;

/// Ranks of a world.
pub const SIZE: usize = 4;
/// The fault strikes so long after the phase runs, at most: at any moment of a step.
const LATEST_MS: u64 = 40;

/// Choices of the caller that hold for all cells.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// The rank that is struck, if chance does not draw it.
    pub victim: Option<u32>,
    /// The silence after which a rank is lost.
    pub liveness: Duration,
}

/// What came of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// All others fail with an error that names the victim, in time.
    Named,
    /// All others go on, with the right bits.
    Survived,
    /// The cell means nothing, or not here.
    NotApplicable,
    /// A hang, another name, too late, or wrong bits.
    Wrong,
}

impl Verdict {
    /// In words.
    pub const fn text(self) -> &'static str {
        match self {
            Verdict::Named => "named",
            Verdict::Survived => "survived",
            Verdict::NotApplicable => "not applicable",
            Verdict::Wrong => "WRONG",
        }
    }
}

/// A cell that was run.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The cell.
    #[serde(flatten)]
    pub cell: Cell,
    /// What came of it.
    pub verdict: Verdict,
    /// The rank that the fault struck; none for a wire.
    pub victim: Option<u32>,
    /// Seconds until the last of the others failed.
    pub named_seconds: Option<f64>,
    /// Errors of the others, and what followed; or the reason.
    pub note: String,
    /// Seconds of the cell.
    pub seconds: f64,
}

/// Runs a cell.
///
/// # Errors
/// [`Error`] where the fault cannot be made.
pub fn judge(cell: Cell, machine: &Machine, seed: u64, rules: &Rules) -> Result<Outcome> {
    let began = Instant::now();
    let outcome = |verdict, note| Outcome {
        cell,
        verdict,
        victim: None,
        named_seconds: None,
        note,
        seconds: began.elapsed().as_secs_f64(),
    };
    if let Some(why) = cell.why_not(machine) {
        return Ok(outcome(Verdict::NotApplicable, why));
    }
    let mut rng = cell.rng(seed);
    let drawn = rng.random_range(0..SIZE);
    let victim = rules.victim.map_or(drawn, |victim| victim as usize);
    let pause = Duration::from_micros(rng.random_range(0..LATEST_MS * 1000));
    let wire = cell.fault.is_of_wire().then(|| Wire::new(rng.random())).transpose()?.map(Arc::new);
    let strike = Strike { fault: cell.fault, phase: cell.phase, victim, pause, steps: None };
    let seen = run(cell, strike, machine, wire.clone(), rules.liveness);
    let of_wire = wire.as_ref().map_or(String::new(), |wire| format!("; {}", wire.counts()));
    let victim = wire.is_none().then_some(victim as u32);
    match seen {
        Ok(Ok(Judged { verdict, named, note, .. })) => {
            let named_seconds = named.map(|named| named.as_secs_f64());
            Ok(Outcome { victim, named_seconds, ..outcome(verdict, note + &of_wire) })
        }
        Ok(Err(wrong)) => Ok(Outcome { victim, ..outcome(Verdict::Wrong, wrong + &of_wire) }),
        // Ranks that do not come to the phase are no better than ranks that do not leave it.
        Err(error @ Error::NotReady { .. }) => Ok(outcome(Verdict::Wrong, error.to_string())),
        Err(error) => Err(error),
    }
}

/// Four ranks come to the phase and are struck.
fn run(
    cell: Cell,
    strike: Strike,
    machine: &Machine,
    wire: Option<Arc<Wire>>,
    liveness: Duration,
) -> Result<std::result::Result<Judged, String>> {
    let nodes = if cell.lane == Lane::Shm { [0; SIZE] } else { [0, 0, 1, 1] };
    let mut job = Job::start(&nodes, wire, liveness)?;
    let mut trial = Trial::assign(&mut job, (0..SIZE).collect(), cell.lane, cell.phase != Phase::Bootstrap)?;
    let judged = trial.strike(&strike, machine)?;
    Ok(judged.map_err(|wrong| {
        let words: Vec<String> = (0..SIZE).map(|rank| job.last_words(rank)).collect();
        format!("{wrong}\n{}", words.join("\n")).trim_end().to_owned()
    }))
}
