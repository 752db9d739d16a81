//! What can go wrong in the program itself. Each variant carries what a reader needs to act.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::bench::ConfigError;
use crate::collectives::CollectivesError;
use crate::engines::EnginesError;
use crate::launch::ShapeError;
use crate::layer::LayerError;
use crate::peers::PeerError;
use crate::perf::PerfError;
use crate::planning::PlanningError;
use crate::route::RouteError;
use crate::routing::RoutingError;
use crate::simulate::SimulateError;

/// Any error that ends the program.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The shape on the command line is none.
    #[error(transparent)]
    Shape(#[from] ShapeError),

    /// The conditions of a measurement cannot be met.
    #[error(transparent)]
    Config(Box<ConfigError>),

    /// Machines without a secret in common would let in anybody.
    #[error(
        "ranks of other machines join at {master}: set the same SIDELANE_SECRET or SIDELANE_SECRET_FILE on each machine (or SIDELANE_INSECURE=1 on a trusted network)"
    )]
    NoSecret { master: String },

    /// The machines of a job were not given the same options.
    #[error("rank {rank} was started under other conditions than rank 0: {differences}")]
    Conditions { rank: u32, differences: String },

    /// The routing cannot be had.
    #[error(transparent)]
    Routing(#[from] RoutingError),

    /// What `route` is asked for cannot be shown.
    #[error(transparent)]
    Route(#[from] RouteError),

    /// What `engines` is asked for cannot be counted.
    #[error(transparent)]
    Engines(#[from] EnginesError),

    /// What `simulate` is asked for cannot be timed.
    #[error(transparent)]
    Simulate(#[from] SimulateError),

    /// What `planning` is asked for cannot be planned.
    #[error(transparent)]
    Planning(#[from] PlanningError),

    /// What `layer` is asked for is no layer.
    #[error(transparent)]
    Layer(#[from] LayerError),

    /// The ranks or sizes of `perf` are none.
    #[error(transparent)]
    Perf(#[from] PerfError),

    /// The sizes of `collectives` are none.
    #[error(transparent)]
    Collectives(#[from] CollectivesError),

    /// What this program hands to its ranks did not arrive whole.
    #[error("the task of a rank is not what `sidelane` writes: {0}")]
    Task(#[source] serde_json::Error),

    /// What a rank recorded or found did not arrive whole.
    #[error("what a rank tells is not what `sidelane` writes: {0}")]
    Told(#[source] serde_json::Error),

    /// A peer that was beside us is not there any more.
    #[error(transparent)]
    Peer(#[from] PeerError),

    /// The library reports an error.
    #[error(transparent)]
    Library(#[from] sidelane::Error),

    /// Real and floor were not measured in the same memory.
    #[error(
        "rank {rank}: a timed call did not land where its floor writes: its share of the floor would mean nothing"
    )]
    Moved { rank: u32 },

    /// A result could not be written.
    #[error("cannot write {path:?}: {source}")]
    Write { path: PathBuf, source: io::Error },

    /// The machine refused what a job needs before any rank could start.
    #[error("cannot {what}: {source}")]
    Prepare { what: &'static str, source: io::Error },

    /// A rank could not be started; those already running were killed.
    #[error("cannot start rank {rank}: {program:?}: {source}")]
    Spawn { rank: u32, program: OsString, source: io::Error },

    /// The report could not be written.
    #[error("cannot write to standard output: {0}")]
    Output(#[source] io::Error),
}

impl CliError {
    /// 2 for a wrong command line, as clap has it; 127 for a command that does not exist and 126 for one that
    /// cannot be run, as shells have it; 1 for everything else.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            CliError::Simulate(SimulateError::Noise) => 1,
            CliError::Shape(_)
            | CliError::Config(_)
            | CliError::Routing(_)
            | CliError::Route(_)
            | CliError::Engines(_)
            | CliError::Layer(_)
            | CliError::Perf(_)
            | CliError::Collectives(_)
            | CliError::Simulate(_)
            | CliError::Planning(_)
            | CliError::NoSecret { .. }
            | CliError::Conditions { .. }
            | CliError::Task(_) => 2,
            CliError::Spawn { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            CliError::Spawn { .. } => 126,
            _ => 1,
        })
    }
}

impl From<ConfigError> for CliError {
    fn from(error: ConfigError) -> Self {
        CliError::Config(Box::new(error))
    }
}
