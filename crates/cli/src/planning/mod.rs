//! `sidelane planning`: what one rank's operands cost to make, in time and memory, by number of ranks.

mod measure;
mod picture;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use sidelane::plan::RowLayout;
use sidelane::topology::Route;

use crate::command::{self, Command};
use crate::error::{CliError, usage};
use crate::options::one_of;
use crate::table::{self, time, volume};

pub use measure::{Cost, Shape, measure};

/// Measure what a rank's own part of a dispatch costs to plan, and what its tables hold, by number of ranks
#[derive(Args)]
pub struct PlanningArgs {
    /// Numbers of ranks
    #[arg(long, value_name = "R[,R..]", value_delimiter = ',', default_values_t = [8, 16, 32, 64, 128, 256, 512],
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub ranks: Vec<u32>,

    /// Ranks of a node
    #[arg(long, value_name = "M", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    pub ranks_per_node: u32,

    /// Tokens of the rank
    #[arg(long, value_name = "T", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub tokens: u32,

    /// Experts that each token chooses
    #[arg(long, value_name = "K", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub top_k: u32,

    /// Order of received rows
    #[arg(long, default_value = "expert-major", value_parser = one_of(RowLayout::ALL, RowLayout::name))]
    pub layout: RowLayout,

    /// Rounds of each; the middle one counts
    #[arg(long, value_name = "N", default_value_t = 101, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,

    /// Draw time and memory by number of ranks
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// One group, one route.
struct Row {
    shape: Shape,
    cost: Cost,
}

impl Command for PlanningArgs {
    const NAME: &'static str = "planning";

    fn run(self) -> Result<ExitCode, CliError> {
        command::claim(&self.svg)?;
        let rows = rows(&self)?;
        command::print(&text(&self, &rows))?;
        command::draw(&self.svg, || picture::draw(&self, &rows))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn rows(args: &PlanningArgs) -> Result<Vec<Row>, CliError> {
    let bar = command::progress(0, 2 * args.ranks.len() as u64).with_message("groups");
    let mut rows = Vec::new();
    for (&ranks, route) in args.ranks.iter().flat_map(|ranks| Route::ALL.map(|route| (ranks, route))) {
        let per_node = args.ranks_per_node.min(ranks);
        if !ranks.is_multiple_of(per_node) {
            return Err(usage!("--ranks {ranks} is more than a node of {per_node}, and no multiple of it"));
        }
        let &PlanningArgs { tokens, top_k, layout, rounds, .. } = args;
        // As many as DeepSeek-V3 has, and no rank without one.
        let experts = ranks.max(256);
        let shape = Shape { tokens, top_k, experts, ranks, per_node, route, layout };
        rows.push(Row { shape, cost: measure(&shape, rounds)? });
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(rows)
}

fn text(args: &PlanningArgs, rows: &[Row]) -> String {
    let header = ["ranks", "experts", "route", "sort", "place", "fill", "together", "relay", "tables"];
    let mut table = table::figures(header);
    for Row { shape, cost } in rows {
        table.add_row([
            shape.ranks.to_string(),
            shape.experts.to_string(),
            shape.route.name().to_owned(),
            time(cost.sort),
            time(cost.place),
            time(cost.fill),
            time(cost.together()),
            time(cost.relay),
            volume(cost.bytes),
        ]);
    }
    let PlanningArgs { tokens, top_k, layout, rounds, ranks_per_node, .. } = args;
    format!(
        "{tokens} tokens, top-{top_k}, {}, uniform routing, nodes of {ranks_per_node} ranks, middle of {rounds} rounds\n\n{}\n\n\
         Sort: a rank's own routing by bin, before counts are exchanged. Place: sums of counts, and the layout that follows.\n\
         Fill: operands of its own program. Relay: runs and operands of what it hands on, for as many sources as it has. One\n\
         thread; tables grow with the first call and are used again.",
        layout.name(),
        table.trim_fmt(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::tests::parsed;
    use crate::svg::tests::elements;

    #[test]
    fn every_group_has_a_line_and_a_point_for_each_route() {
        for layout in RowLayout::ALL {
            let args =
                parsed(&format!("--ranks 4,16 --tokens 64 --rounds 1 --layout {}", layout.name())).unwrap();
            let rows = rows(&args).unwrap();
            assert_eq!(rows.len(), 4);
            // What crosses through relays is held beside what goes straight, and is handed on by somebody.
            assert!(rows[3].cost.bytes > rows[2].cost.bytes && rows[3].cost.relay > 0.0);
            assert!(text(&args, &rows).contains(" pxn "), "{}", text(&args, &rows));
            let tags = elements(&picture::draw(&args, &rows));
            assert_eq!(tags.iter().filter(|tag| tag.starts_with("circle")).count(), 8);
        }
    }

    #[test]
    fn a_group_that_is_no_whole_number_of_nodes_is_refused() {
        let refused = rows(&parsed("--ranks 12 --rounds 1").unwrap()).err().unwrap().to_string();
        assert!(refused.contains("--ranks 12") && refused.contains('8'), "{refused}");
    }
}
