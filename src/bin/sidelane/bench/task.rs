//! What the program hands to its ranks.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sidelane::plan::ExpertMap;

use super::args::BenchArgs;
use super::config::{Config, ConfigError};
use super::source::Router;
use crate::error::CliError;
use crate::launch::Job;

/// Runs this program once per rank, as the given subcommand with the given task, until the last one has ended.
pub fn start_ranks(subcommand: &str, config: &Config, task: &impl Serialize) -> Result<ExitCode, CliError> {
    let program =
        std::env::current_exe().map_err(|source| CliError::Prepare { what: "find this program", source })?;
    let json = serde_json::to_string(task).expect("numbers, names and paths are always JSON");
    let job = Job {
        nodes: config.ranks_per_node.clone(),
        command: vec![program.into(), subcommand.into(), json.into()],
        env: Vec::new(),
        grace: Duration::from_secs(5),
        tag: false,
    };
    Ok(ExitCode::from(job.run()?.exit_code()))
}

/// One rank of a job that this program started.
#[derive(Args)]
pub struct RankArgs {
    /// What to do, as JSON
    task: String,
}

impl RankArgs {
    /// What to do.
    pub fn task<T: DeserializeOwned>(&self) -> Result<T, CliError> {
        serde_json::from_str(&self.task).map_err(CliError::Task)
    }
}

/// Everything a rank of a measurement needs to know, and every rank the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    pub config: Config,
    pub json: Option<PathBuf>,
    pub trace_out: Option<PathBuf>,
    pub sizes: Sizes,
}

/// Bytes of each rank's heap, and of its symmetric part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sizes {
    pub heap: u64,
    pub symmetric: u64,
}

impl Task {
    /// From the command line.
    pub fn resolve(args: &BenchArgs) -> Result<Self, ConfigError> {
        let config = Config::resolve(&args.conditions, args.backward, args.rounds)?;
        let sizes = Sizes::of(&config)?;
        Ok(Task { config, json: args.json.clone(), trace_out: args.trace_out.clone(), sizes })
    }
}

impl Sizes {
    /// Room for the calls of a round beside a dispatch that stays alive, for the busiest rank.
    pub fn of(config: &Config) -> Result<Self, ConfigError> {
        let router = Router::open(&config.routing)?;
        let map = ExpertMap::contiguous(config.experts, config.ranks())?;
        let mut rows = vec![0u64; config.experts as usize];
        for rank in 0..config.ranks() {
            let routing = router.routing(config, rank)?;
            routing.experts().iter().filter(|&&id| id >= 0).for_each(|&id| rows[id as usize] += 1);
        }
        let busiest = (0..config.ranks())
            .map(|rank| {
                map.slots_of(rank).map(|slot| rows[slot as usize].next_multiple_of(config.align.into())).sum()
            })
            .max()
            .unwrap_or(0u64);
        let own = u64::from(config.tokens) * u64::from(config.top_k);
        // A row of a chunk has an f32 behind it; rows alone have not. Alive together at most: rows and output of the first
        // dispatch, the floor's scratch (own rows and chunks), and rows and output of the round.
        let row = config.row_bytes() + 4;
        let pool = (5 * busiest + 3 * own) * row + (16 << 20);
        let publications =
            2 * (1 + u64::from(config.ranks())) * (own * 4 + u64::from(config.experts) * 4 + 4096);
        let symmetric = publications + (4 << 20);
        Ok(Sizes { heap: (pool + symmetric).next_multiple_of(2 << 20), symmetric })
    }
}
