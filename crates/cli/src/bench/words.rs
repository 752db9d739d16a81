//! Conditions in words, for tables and pictures.

use sidelane::dtype::Wire;
use sidelane::plan::Strategy;

use super::config::Config;
use crate::launch::shape_words;

/// The same words wherever conditions are shown.
pub struct Words {
    /// How many, and where.
    pub ranks: String,
    /// What each brings.
    pub rows: String,
    /// Where it goes.
    pub routing: String,
    /// By which way, how it is added, and into how much memory.
    pub schedule: String,
}

impl Words {
    /// Of these conditions.
    pub fn of(config: &Config) -> Self {
        let (order, route) = (config.order.name(), config.route.name());
        let (layout, wire) = (config.layout.name(), config.partials().map_or("none", Wire::name));
        Words {
            ranks: shape_words(&config.ranks_per_node),
            rows: format!(
                "{} tokens per rank, hidden {}, {}",
                config.tokens,
                config.hidden,
                config.dtype.name()
            ),
            routing: format!(
                "{}, {} experts, top-{}, seed {}",
                config.routing, config.experts, config.top_k, config.seed
            ),
            schedule: format!(
                "{}route {route}{}, layout {layout}, order {order}, wire {wire}, align {}, {}",
                if config.strategy == Strategy::Gather { "all-gather, " } else { "" },
                if config.spans { " in spans" } else { "" },
                config.align,
                config.room.words()
            ),
        }
    }
}
