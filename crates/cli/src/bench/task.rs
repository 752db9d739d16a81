//! What the program hands to its ranks.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sidelane::plan::{Bins, ExpertMap, Notes, Order, Strategy};
use sidelane::topology::{Paths, Route};
use sidelane_core::schedule::Control;

use super::args::BenchArgs;
use super::config::Config;
use super::placement::Placement;
use crate::error::CliError;
use crate::ranks;
use crate::ranks::Sizes;
use crate::routing::Router;

/// Everything a rank of a measurement needs to know, and every rank the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    pub config: Config,
    pub json: Option<PathBuf>,
    pub trace_out: Option<PathBuf>,
    /// The folder of others that take turns with us.
    pub peers: Option<PathBuf>,
    pub sizes: Sizes,
}

impl Task {
    /// From the command line. Who starts the ranks makes the folder of others.
    pub fn resolve(args: &BenchArgs) -> Result<Self, CliError> {
        let config = Config::resolve(&args.conditions, args.backward, args.rounds)?;
        if args.peers {
            config.check_peers()?;
        }
        let sizes = sizes(&config)?;
        let (json, trace_out) = (args.json.clone(), args.trace_out.clone());
        Ok(Task { config, json, trace_out, peers: None, sizes })
    }

    /// What all ranks must have in common. Only rank 0 writes files, but all record what it writes.
    pub fn conditions(&self) -> Result<String, CliError> {
        let mut conditions = self.config.conditions()?;
        conditions["trace_out"] = self.trace_out.is_some().into();
        conditions["peers"] = self.peers.is_some().into();
        Ok(ranks::conditions("bench", &conditions))
    }
}

/// Room for the calls of a round beside a dispatch that stays alive, for the busiest rank.
pub fn sizes(config: &Config) -> Result<Sizes, CliError> {
    let router = Router::open(&config.routing)?;
    let placement = Placement::new(config, &router, config.room.mode())?;
    let rows = (0..config.ranks()).map(|rank| placement.at(rank, drop).rows.len() as u64);
    let busiest = rows.max().unwrap_or(0);
    let (nodes, tokens) = (config.node_map(), u64::from(config.tokens));
    let paths = Paths::new(&nodes, config.route, 0);
    let relayed = match config.route {
        Route::Pxn => {
            (0..config.ranks()).map(|rank| paths.of(rank).sources().count() as u64).max().unwrap_or(0)
        }
        Route::Direct => 0,
    };
    let own = tokens * u64::from(config.top_k);
    let notes = Notes::of(config.layout, config.room.mode(), config.spans);
    let note_bytes = u64::from(notes.words(config.top_k)) * size_of::<u32>() as u64;
    // Rows of a chunk have words behind them; rows alone have not. Alive together at most: rows and output of the
    // first dispatch, rows and output of the round, the tokens, own rows that come home and, of each rank that is relayed, the
    // rows that wait to be handed on or the sums that wait to be brought home.
    let partial = u64::from(config.hidden) * config.wire.size() as u64;
    let row = config.row_bytes().max(config.sent_bytes()).max(partial) + note_bytes;
    // An all-gather has a control window of its own, and all tokens lie beside the rows.
    let (ranks, gathers) = (u64::from(config.ranks()), config.strategy == Strategy::Gather);
    let words = u64::from(Notes::Gathered.words(config.top_k));
    let (gathered, gathering) = match gathers {
        true => (
            ranks * tokens * (row + 4 * words),
            Control::new(&paths, &gather_bins(config)?, ranks * tokens, 4 * words).bytes(),
        ),
        false => (0, 0),
    };
    let pool = (5 * busiest + 3 * own + tokens + relayed * (tokens + own)) * row + gathered + (16 << 20);
    let bins = Bins::of_layout(config.layout, &placement.map, config.order, &nodes);
    let symmetric = Control::new(&paths, &bins, own, note_bytes).bytes() + gathering + (4 << 20);
    Ok(Sizes { heap: (pool + symmetric).next_multiple_of(2 << 20), symmetric })
}

/// The bins of an all-gather: a rank is one.
fn gather_bins(config: &Config) -> Result<Bins, CliError> {
    let map = ExpertMap::contiguous(config.ranks(), config.ranks())?;
    Ok(Bins::experts(&map, Order::Expert, &config.node_map()))
}
