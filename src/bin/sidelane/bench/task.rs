//! What the program hands to its ranks.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sidelane::plan::ExpertMap;

use super::args::BenchArgs;
use super::config::{Config, ConfigError};
use super::source::Router;

/// Everything a rank needs to know, and every rank the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    pub config: Config,
    pub json: Option<PathBuf>,
    pub trace_out: Option<PathBuf>,
    /// Bytes of each rank's heap, and of its symmetric part.
    pub heap: u64,
    pub symmetric: u64,
}

impl Task {
    /// From the command line.
    pub fn resolve(args: &BenchArgs) -> Result<Self, ConfigError> {
        let config = Config::resolve(args)?;
        let (heap, symmetric) = sizes(&config)?;
        Ok(Task { config, json: args.json.clone(), trace_out: args.trace_out.clone(), heap, symmetric })
    }
}

/// Room for the calls of a round beside a dispatch that stays alive, for the busiest rank.
fn sizes(config: &Config) -> Result<(u64, u64), ConfigError> {
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
    let publications = 2 * (1 + u64::from(config.ranks())) * (own * 4 + u64::from(config.experts) * 4 + 4096);
    let symmetric = publications + (4 << 20);
    Ok(((pool + symmetric).next_multiple_of(2 << 20), symmetric))
}
