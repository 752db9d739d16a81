//! `sidelane plan-bench`: the cost of one rank's operands, in time and memory, by number of ranks.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use sidelane::gate::Pattern;
use sidelane::plan::RowLayout;
use sidelane::topology::Route;
use sidelane_testkit::timing::planning_steps::{Cost, Shape, measure};

use crate::chart::{Arrangement, Chart, Curve, Panel, Point};
use crate::command_frame::{self, Command};
use crate::error::{CliError, usage};
use crate::options::one_of;
use crate::table::{self, time, volume};

const EXAMPLES: &str = "\
Examples:
  sidelane plan-bench --ranks 8,64,512 --tokens 4096
  sidelane plan-bench --layout rank-major --svg plan.svg";

/// Measure the time to plan a rank's own part of a dispatch, and the memory of its tables, by
/// number of ranks
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct PlanBenchArgs {
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

impl Command for PlanBenchArgs {
    const NAME: &'static str = "plan-bench";

    fn run(self) -> Result<ExitCode, CliError> {
        command_frame::claim(&None, &self.svg)?;
        let rows = rows(&self)?;
        command_frame::print(&table::fitted(&text(&self, &rows)))?;
        command_frame::draw(&self.svg, || draw(&self, &rows))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn rows(args: &PlanBenchArgs) -> Result<Vec<Row>, CliError> {
    let bar = command_frame::progress(0, 2 * args.ranks.len() as u64).with_message("groups");
    let mut rows = Vec::new();
    for (&ranks, route) in args.ranks.iter().flat_map(|ranks| Route::ALL.map(|route| (ranks, route))) {
        let per_node = args.ranks_per_node.min(ranks);
        if !ranks.is_multiple_of(per_node) {
            return Err(usage!("--ranks {ranks} is more than a node of {per_node}, and no multiple of it"));
        }
        let &PlanBenchArgs { tokens, top_k, layout, rounds, .. } = args;
        // As many as DeepSeek-V3 has, and no rank without one.
        let experts = ranks.max(256);
        let pattern = Pattern::Uniform;
        let shape = Shape { pattern, tokens, top_k, experts, ranks, per_node, route, layout };
        rows.push(Row { shape, cost: measure(&shape, rounds)? });
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(rows)
}

fn text(args: &PlanBenchArgs, rows: &[Row]) -> String {
    let table = table::of(
        rows,
        &[
            ("ranks", &|row| row.shape.ranks.to_string()),
            ("experts", &|row| row.shape.experts.to_string()),
            ("route", &|row| row.shape.route.name().to_owned()),
            ("sort", &|row| time(row.cost.sort)),
            ("place", &|row| time(row.cost.place)),
            ("fill", &|row| time(row.cost.fill)),
            ("together", &|row| time(row.cost.together())),
            ("relay", &|row| time(row.cost.relay)),
            ("tables", &|row| volume(row.cost.bytes)),
        ],
    );
    let PlanBenchArgs { tokens, top_k, layout, rounds, ranks_per_node, .. } = args;
    format!(
        "{tokens} tokens, top-{top_k}, {}, uniform routing, nodes of {ranks_per_node} ranks, middle of {rounds} rounds\n\n{table}\n\n\
         Sort: a rank's own routing by bin, before counts are exchanged. Place: sums of counts, and the layout that follows.\n\
         Fill: operands of its own program. Relay: runs and operands of what it relays, for as many sources as it has. One\n\
         thread; tables grow with the first call and are used again.",
        layout.name(),
    )
}

fn draw(args: &PlanBenchArgs, rows: &[Row]) -> String {
    let curves = |of: fn(&Cost) -> f64, said: &dyn Fn(f64) -> String| {
        let of_route = |route: Route| {
            let point = |row: &Row| {
                let (ranks, figure) = (row.shape.ranks, of(&row.cost));
                let said = format!("{ranks} ranks, {}: {}", route.name(), said(figure));
                Point { at: (f64::from(ranks), figure), said }
            };
            let points = rows.iter().filter(|row| row.shape.route == route).map(point).collect();
            Curve { name: route.name().to_owned(), points }
        };
        Route::ALL.map(of_route).into()
    };
    let bytes = |bytes: f64| volume(bytes as u64);
    let numbers = &|ranks: f64| ranks.to_string();
    let PlanBenchArgs { tokens, top_k, layout, ranks_per_node, .. } = args;
    let conditions =
        format!("{tokens} tokens, top-{top_k}, {}, nodes of {ranks_per_node} ranks", layout.name());
    let times = Panel { curves: curves(Cost::together, &time), ..Panel::new("time", numbers, &time) };
    let curves = curves(|cost| cost.bytes as f64, &bytes);
    let memory = Panel { curves, ..Panel::new("memory of the tables", numbers, &bytes) };
    let title = "What a rank's operands cost, by number of ranks";
    let panels = vec![times, memory];
    Chart { title, conditions: vec![conditions], panels, arrangement: Arrangement::Apart }.draw()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chart::svg::tests::elements;
    use crate::command_frame::tests::parsed;

    #[test]
    fn every_group_has_a_line_and_a_point_for_each_route() {
        for layout in RowLayout::ALL {
            let args =
                parsed(&format!("--ranks 4,16 --tokens 64 --rounds 1 --layout {}", layout.name())).unwrap();
            let rows = rows(&args).unwrap();
            assert_eq!(rows.len(), 4);
            // Rows through relays are held in addition to direct ones, and need a relay.
            assert!(rows[3].cost.bytes > rows[2].cost.bytes && rows[3].cost.relay > 0.0);
            assert!(text(&args, &rows).contains(" pxn "), "{}", text(&args, &rows));
            let tags = elements(&draw(&args, &rows));
            assert_eq!(tags.iter().filter(|tag| tag.starts_with("circle")).count(), 8);
        }
    }
}
