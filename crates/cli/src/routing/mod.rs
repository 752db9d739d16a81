//! Where the routing of a command comes from, and of how many experts and choices it is.

mod source;
pub mod trained;

use crate::error::{CliError, usage};

pub use source::{Router, Share, Source};

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
    ) -> Result<Self, CliError> {
        let source = asked.unwrap_or_else(|| Source::default_for(experts, top_k));
        let router = Router::open(&source)?;
        let (experts, top_k) = match &router {
            Router::Recorded(recorded) => {
                let experts = experts.or(recorded.experts()).unwrap_or(trained::EXPERTS);
                recorded
                    .require(Some(experts), top_k)
                    .map_err(|error| usage!("routing {routing}: {error}", routing = source.clone()))?;
                (experts, recorded.top_k())
            }
            Router::Drawn(_) => (experts.unwrap_or(trained::EXPERTS), top_k.unwrap_or(trained::TOP_K)),
        };
        Ok(Routed { source, router, experts, top_k })
    }
}
