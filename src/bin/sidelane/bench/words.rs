//! Conditions in words, for tables and pictures.

use clap::ValueEnum;

use super::config::Config;

/// The same words wherever conditions are shown.
pub struct Words {
    /// How many, and where.
    pub ranks: String,
    /// What each brings.
    pub rows: String,
    /// Where it goes.
    pub routing: String,
    /// By which way, and how it is added.
    pub schedule: String,
}

impl Words {
    /// Of these conditions.
    pub fn of(config: &Config) -> Self {
        let sizes: Vec<String> = config.ranks_per_node.iter().map(u32::to_string).collect();
        let ranks = match config.ranks_per_node.as_slice() {
            [ranks] => format!("{ranks} on one node"),
            _ => format!("{} on {} nodes ({})", config.ranks(), config.nodes, sizes.join(" + ")),
        };
        let (layout, order, route) = (name(&config.layout), name(&config.order), name(&config.route));
        Words {
            ranks,
            rows: format!("{} tokens per rank, hidden {}, {}", config.tokens, config.hidden, config.dtype),
            routing: format!(
                "{}, {} experts, top-{}, seed {}",
                config.routing, config.experts, config.top_k, config.seed
            ),
            schedule: format!("route {route}, layout {layout}, order {order}, align {}", config.align),
        }
    }
}

/// The word of the command line.
fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}
