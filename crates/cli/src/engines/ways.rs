//! The ways of rows, and what each asks of every rank.

use serde::Serialize;
use sidelane::plan::RowLayout;
use sidelane::topology::Route;
use sidelane_core::schedule::call::SlotCall;
use sidelane_core::schedule::stream::{Slots, StreamProgram};
use sidelane_model::EngineWork;

use super::plan;
use super::task::{Conditions, Task};
use crate::error::CliError;

/// What one way asks of engines.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Way {
    pub name: String,
    /// Of one rank, on average.
    pub mean: Asked,
    /// Of the rank that asks for most, each by itself.
    pub most: Asked,
    /// Microseconds of the engines of the rank that needs most, one copy after another.
    pub us: f64,
}

/// [`EngineWork`], perhaps of no single rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Asked {
    pub copies: f64,
    pub bytes: f64,
    pub batches: f64,
    pub words: f64,
    pub lists: f64,
    pub card_bytes: f64,
}

impl Way {
    fn new(name: String, ranks: &[EngineWork], conditions: &Conditions) -> Self {
        let mean = |of: fn(&EngineWork) -> u64| ranks.iter().map(of).sum::<u64>() as f64 / ranks.len() as f64;
        let most = |of: fn(&EngineWork) -> u64| ranks.iter().map(of).max().unwrap_or(0) as f64;
        let us = |work: &EngineWork| {
            work.copies as f64 * conditions.per_copy + work.bytes as f64 / (conditions.speed * 1e3)
        };
        Way {
            name,
            mean: Asked::of(mean),
            most: Asked::of(most),
            us: ranks.iter().map(us).fold(0.0, f64::max),
        }
    }
}

impl Asked {
    fn of(figure: impl Fn(fn(&EngineWork) -> u64) -> f64) -> Self {
        Asked {
            copies: figure(|work| work.copies),
            bytes: figure(|work| work.bytes),
            batches: figure(|work| work.batches),
            words: figure(|work| work.words),
            lists: figure(|work| work.lists),
            card_bytes: figure(|work| work.card_bytes),
        }
    }
}

/// All ways that this group has: slots on one node; rows that are planned, straight or through relays.
pub fn all(task: &Task) -> Result<Vec<Way>, CliError> {
    let mut ways = Vec::new();
    let ranks = task.nodes.ranks();
    if task.nodes.nodes() == 1 {
        let slots =
            Slots::new(ranks, task.slot_bytes(), u64::from(task.conditions.tokens) * task.home_bytes)?;
        for (name, call) in [("dispatch", SlotCall::Dispatch), ("combine", SlotCall::Combine)] {
            let work = |me| Ok(EngineWork::of_stream(&StreamProgram::new(call, slots, me)?, me));
            let work: Vec<EngineWork> = (0..ranks).map(work).collect::<Result<_, CliError>>()?;
            ways.push(Way::new(format!("slots: {name}"), &work, &task.conditions));
        }
    }
    for layout in RowLayout::ALL {
        let mut planned = vec![(Route::Direct, false, "direct")];
        if task.nodes.nodes() > 1 {
            planned.push((Route::Pxn, false, "pxn, token order"));
        }
        if task.nodes.nodes() > 1 && layout == RowLayout::RankMajor {
            planned.push((Route::Pxn, true, "pxn, relay order"));
        }
        for (route, spans, how) in planned {
            let work = plan::dispatch(task, layout, route, spans)?;
            ways.push(Way::new(format!("{}, {how}", layout.name()), &work, &task.conditions));
        }
    }
    Ok(ways)
}
