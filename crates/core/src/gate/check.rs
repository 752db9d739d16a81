//! Configurations that make no sense, found before the first call.

use super::top_k::PLACES;
use super::{Divisor, GateConfig, GroupScore, Noise, Normalize, ScoreFunction, SecondExpertPolicy, Select};
use crate::error::GateError;

impl GateConfig {
    /// Checks all that can be known before a call; [`Gate::new`](super::Gate::new) does.
    ///
    /// # Errors
    /// [`GateError::BadNumber`] names the first number that cannot be used, [`GateError::Conflict`]
    /// two settings that exclude each other.
    pub fn check(&self) -> Result<(), GateError> {
        number("experts", self.experts, 1..=PLACES, "1 to 2^20")?;
        number("top_k", self.top_k, 1..=self.experts, "1 to the number of experts")?;
        above_zero("scaling", self.scaling)?;
        self.select.check(self)?;
        self.noise.check(self)?;
        if let SecondExpertPolicy::Random { threshold } = self.second {
            above_zero("threshold", threshold)?;
            number("top_k", self.top_k, 2..=2, "2 where second choices are thinned out")?;
        }
        if let Some(capacity) = &self.capacity {
            capacity.check()?;
        }
        match self.normalise {
            Normalize::BeforeDrop(divisor) | Normalize::AfterDrop(divisor) => divisor.check(),
            Normalize::Never => Ok(()),
        }
    }
}

impl Select {
    fn check(self, config: &GateConfig) -> Result<(), GateError> {
        match self {
            Select::Best => Ok(()),
            Select::Groups { count, kept, by } => {
                number("groups", count, 1..=config.experts, "1 to the number of experts")?;
                if !config.experts.is_multiple_of(count) {
                    return Err(bad("groups", count.into(), "a divisor of the number of experts"));
                }
                let size = config.experts / count;
                number("kept groups", kept, 1..=count, "1 to the number of groups")?;
                number(
                    "top_k",
                    config.top_k,
                    1..=kept * size,
                    "at most the experts of the groups that are kept",
                )?;
                let GroupScore::SumOfBest(n) = by else { return Ok(()) };
                number("best of a group", n, 1..=size, "1 to the size of a group")
            }
            Select::Sinkhorn { tolerance } => above_zero("tolerance", tolerance),
        }
    }
}

impl Noise {
    fn check(self, config: &GateConfig) -> Result<(), GateError> {
        match self {
            Noise::Jitter { eps } => share("eps", eps)?,
            Noise::Normal { deviation } if !(deviation.is_finite() && deviation >= 0.0) => {
                return Err(bad("deviation", deviation.into(), "0 or more"));
            }
            _ => {}
        }
        if self != Noise::None && matches!(config.select, Select::Sinkhorn { .. }) {
            return conflict("noise", "Sinkhorn", "the balancing takes the logits as they are");
        }
        if self.samples() && config.select != Select::Best {
            return conflict("Gumbel noise", "groups", "it samples from all experts");
        }
        if self.samples() && matches!(config.score, ScoreFunction::Sigmoid | ScoreFunction::SqrtSoftplus) {
            return conflict("Gumbel noise", "sigmoid or sqrt-softplus", "it samples from a softmax");
        }
        Ok(())
    }
}

impl Divisor {
    fn check(self) -> Result<(), GateError> {
        match self {
            Divisor::SumPlus(more) if more.is_finite() && more >= 0.0 => Ok(()),
            Divisor::SumPlus(more) => Err(bad("sum plus", more.into(), "0 or more")),
            Divisor::SumAtLeast(least) => above_zero("sum at least", least),
        }
    }
}

fn bad(parameter: &'static str, seen: f64, expected: &'static str) -> GateError {
    GateError::BadNumber { parameter, seen, expected }
}

fn conflict(one: &'static str, other: &'static str, why: &'static str) -> Result<(), GateError> {
    Err(GateError::Conflict { one, other, why })
}

/// A count within bounds.
pub(super) fn number(
    parameter: &'static str,
    seen: u32,
    bounds: std::ops::RangeInclusive<u32>,
    expected: &'static str,
) -> Result<(), GateError> {
    if bounds.contains(&seen) { Ok(()) } else { Err(bad(parameter, seen.into(), expected)) }
}

fn above_zero(parameter: &'static str, seen: f32) -> Result<(), GateError> {
    if seen.is_finite() && seen > 0.0 {
        Ok(())
    } else {
        Err(bad(parameter, seen.into(), "a finite number above 0"))
    }
}

/// A number from 0 to 1.
pub(super) fn share(parameter: &'static str, seen: f32) -> Result<(), GateError> {
    if (0.0..=1.0).contains(&seen) { Ok(()) } else { Err(bad(parameter, seen.into(), "0 to 1")) }
}
