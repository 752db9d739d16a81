//! How much a rank receives: what was asked for in factors, in rows.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use sidelane::plan::{Mode, Overflow, RowLayout};

use super::args::ConditionArgs;
use super::config::Config;
use super::placement::Placement;
use crate::error::{CliError, usage};
use crate::options::at_least_one;
use crate::routing::Router;

/// What `--mode` names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RoomMode {
    /// As much as a call needs
    #[default]
    Eager,
    /// At most --budget
    Budget,
    /// Fixed slots for each source, and no counts are exchanged
    Slots,
}

/// How receive memory is sized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Room {
    pub mode: RoomMode,
    /// What a rank may receive, by what it receives on average.
    pub budget: Option<f64>,
    /// That in rows, or the slots of each source.
    pub rows: Option<u32>,
    /// What becomes of more.
    pub overflow: Option<Overflow>,
}

impl Room {
    /// From the command line and what the routing needs.
    ///
    /// # Errors
    /// Options of another mode; room that the routing overflows, unless what is too much is dropped.
    pub fn resolve(args: &ConditionArgs, config: &Config, router: &Router) -> Result<Self, CliError> {
        for (option, given, mode) in [
            ("--budget", args.budget.is_some(), RoomMode::Budget),
            ("--slots", args.slots.is_some(), RoomMode::Slots),
        ] {
            if given && args.mode != mode {
                return Err(usage!("{option} is for --mode {mode}", mode = name(mode)));
            }
        }
        if args.mode == RoomMode::Eager {
            let other = usage!("--on-overflow is for --mode budget or slots");
            return if args.on_overflow.is_some() { Err(other) } else { Ok(Room::default()) };
        }
        let placement = Placement::new(config, router, Mode::Eager)?;
        let overflow = args.on_overflow.unwrap_or_default();
        let room = match args.mode {
            RoomMode::Slots => Self::slots(args.slots, overflow, &placement)?,
            _ => Self::budget(args.budget.unwrap_or(1.0), overflow, config, &placement)?,
        };
        Ok(Room { mode: args.mode, overflow: Some(overflow), ..room })
    }

    fn slots(asked: Option<u32>, overflow: Overflow, placement: &Placement) -> Result<Self, CliError> {
        let most = (0..placement.ranks()).map(|rank| placement.at(rank, drop).most).max().unwrap_or(0);
        let slots = asked.unwrap_or(most.max(1));
        at_least_one(&[("--slots", slots)])?;
        if most > slots && overflow == Overflow::Error {
            return Err(usage!(
                "--slots {slots} are too few: --slots {most} has room for all, or let rows be dropped with --on-overflow drop"
            ));
        }
        Ok(Room { rows: Some(slots), ..Room::default() })
    }

    fn budget(
        factor: f64,
        overflow: Overflow,
        config: &Config,
        placement: &Placement,
    ) -> Result<Self, CliError> {
        if !(factor.is_finite() && factor > 0.0) {
            return Err(usage!("--budget {factor} is not a positive number"));
        }
        let (mut all, mut required) = (0, Vec::new());
        for rank in 0..placement.ranks() {
            let place = placement.at(rank, drop);
            all += place.rows.iter().flatten().count();
            required.push(place.required);
        }
        let mean = match config.layout {
            RowLayout::ExpertMajor => f64::from(config.tokens) * f64::from(config.top_k),
            RowLayout::RankMajor => all as f64 / f64::from(placement.ranks()),
        };
        let rows = (factor * mean).ceil() as u32;
        let worst = (0..).zip(required).max_by_key(|&(_, required)| required);
        if let (Some((rank, required)), Overflow::Error) = (worst, overflow)
            && required > rows
        {
            let enough = (f64::from(required) / mean * 100.0).ceil() / 100.0;
            return Err(usage!(
                "--budget {factor} is {rows} rows, but rank {rank} needs {required}: --budget {enough} has room for all, or let rows be dropped with --on-overflow drop"
            ));
        }
        Ok(Room { budget: Some(factor), rows: Some(rows), ..Room::default() })
    }

    /// As the library has it.
    pub fn mode(self) -> Mode {
        let (rows, overflow) = (self.rows.unwrap_or(0), self.overflow.unwrap_or_default());
        match self.mode {
            RoomMode::Eager => Mode::Eager,
            RoomMode::Budget => Mode::Budget { rows, overflow },
            RoomMode::Slots => Mode::Slots { rows, overflow },
        }
    }

    /// For tables.
    pub fn words(self) -> String {
        let rows = self.rows.unwrap_or(0);
        let overflow = match self.overflow {
            Some(Overflow::Drop) => ", more is dropped",
            _ => "",
        };
        match (self.mode, self.budget) {
            (RoomMode::Eager, _) => "eager".to_owned(),
            (RoomMode::Budget, factor) => {
                format!("budget {} ({rows} rows per rank{overflow})", factor.unwrap_or(0.0))
            }
            (RoomMode::Slots, _) => format!("slots ({rows} per source and bin{overflow})"),
        }
    }
}

/// The word of the command line.
fn name(mode: RoomMode) -> &'static str {
    match mode {
        RoomMode::Eager => "eager",
        RoomMode::Budget => "budget",
        RoomMode::Slots => "slots",
    }
}
