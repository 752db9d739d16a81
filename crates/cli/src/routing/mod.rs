//! Where the routing of a command comes from, and of how many experts and choices it is.

mod source;
mod trained;

pub use source::{Router, Share, Source};

use std::io;
use std::path::PathBuf;

use sidelane::gate::RecordedError;

/// Routing that cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum RoutingError {
    /// The routing file cannot be read.
    #[error(
        "cannot read the routing file {path:?}: {source} (other than files: recorded, uniform, zipf:S, incast)"
    )]
    Unreadable { path: PathBuf, source: io::Error },

    /// A recording is wrong, or is not what the options say.
    #[error("routing {routing}: {source}")]
    Recorded { routing: Source, source: RecordedError },
}

/// A source and what it is asked for.
pub struct Routed {
    pub source: Source,
    pub router: Router,
    pub experts: u32,
    pub top_k: u32,
}

impl Routed {
    /// What was asked for, completed by what the source says, then by what the program carries.
    pub fn resolve(
        asked: Option<Source>,
        experts: Option<u32>,
        top_k: Option<u32>,
    ) -> Result<Self, RoutingError> {
        let source = asked.unwrap_or_else(|| Source::default_for(experts, top_k));
        let router = Router::open(&source)?;
        let (experts, top_k) = match &router {
            Router::Recorded(recorded) => {
                let experts = experts.or(recorded.experts()).unwrap_or(trained::EXPERTS);
                recorded
                    .require(Some(experts), top_k)
                    .map_err(|error| RoutingError::Recorded { routing: source.clone(), source: error })?;
                (experts, recorded.top_k())
            }
            Router::Drawn(_) => (experts.unwrap_or(trained::EXPERTS), top_k.unwrap_or(trained::TOP_K)),
        };
        Ok(Routed { source, router, experts, top_k })
    }
}
