//! Report of `routing`: as people read it, and its JSON. `docs/routing-json.md` describes the keys.
//!
//! The terminal shows load per expert as bars: a column for each expert, a band of columns for as
//! many as fit.
//!
//! ```text
//!    2.1x |  █
//!         | ▃█   ▂
//!    1.0x |▇██▅▁▆█
//!       0 +-------
//!          0
//! ```

use std::fmt::Write;

use serde::Serialize;
use sidelane::plan::ExpertMap;
use sidelane_model::{Dropped, Loads, Spread};

use super::dropped;
use crate::chart::{Arrangement, Bar, Chart, Color, Curve, Panel, Point};
use crate::commands::launch::shape_words;
use crate::error::CliError;
use crate::routing_source::{Decided, RunSettings};
use crate::{command_frame, table};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub config: RunSettings,
    pub load: Loads,
    pub capacity: Vec<Dropped>,
}

impl Report {
    pub fn new(decided: &Decided, factors: &[f64]) -> Result<Self, CliError> {
        let Decided { conditions, map, nodes, routings } = decided;
        let (load, capacity) = (Loads::new(map, nodes, routings), dropped(decided, factors)?);
        Ok(Report { config: conditions.clone(), load, capacity })
    }

    fn loads(&self) -> String {
        let Loads { experts, ranks, nodes, .. } = &self.load;
        table::of(
            [("experts", experts), ("ranks", ranks), ("nodes", nodes)],
            &[
                ("load of", &|(name, _)| (*name).to_owned()),
                ("number", &|(_, load)| load.choices.len().to_string()),
                ("max / mean", &|(_, load)| format!("{:.2}", load.max_over_mean)),
                ("min / mean", &|(_, load)| format!("{:.2}", load.min_over_mean)),
                ("evenness", &|(_, load)| format!("{:.4}", load.evenness.max(0.0) + 0.0)),
            ],
        )
    }

    fn spreads(&self) -> String {
        let Loads { ranks_per_token, nodes_per_token, .. } = &self.load;
        let most = ranks_per_token.tokens.len();
        let numbers = (0..most).map(|places| places.to_string());
        let header = ["a token reaches".to_owned(), "mean".to_owned()].into_iter().chain(numbers);
        let mut table = table::figures(header.collect::<Vec<_>>());
        for (name, spread) in [("ranks", ranks_per_token), ("nodes", nodes_per_token)] {
            let Spread { mean, tokens } = spread;
            let all = tokens.iter().sum::<u64>().max(1) as f64;
            let shares = tokens.iter().map(|&tokens| percent(tokens as f64 / all));
            table.add_row([name.to_owned(), format!("{mean:.2}")].into_iter().chain(shares));
        }
        table::lines(&table)
    }

    fn drops(&self) -> String {
        let ways = self.capacity.first().into_iter().flat_map(|dropped| &dropped.lost);
        let names = ways.map(|lost| lost.policy.replace('_', " "));
        let names =
            names.enumerate().map(|(n, name)| if n == 0 { format!("weight by {name}") } else { name });
        let header = ["capacity factor", "rows", "choices dropped"].map(str::to_owned).into_iter();
        let mut table =
            table::figures(header.chain(names).chain(["tokens emptied".to_owned()]).collect::<Vec<_>>());
        for dropped in &self.capacity {
            let cells = [dropped.factor.to_string(), dropped.rows.to_string(), percent(dropped.choices)];
            let weights = dropped.lost.iter().map(|lost| percent(lost.weight));
            let emptied = dropped.lost.iter().map(|lost| lost.tokens);
            let (least, most) =
                emptied.fold((1.0, 0.0), |(low, high), x| (f64::min(low, x), f64::max(high, x)));
            let emptied = if least == most {
                percent(least)
            } else {
                format!("{} to {}", percent(least), percent(most))
            };
            table.add_row(cells.into_iter().chain(weights).chain([emptied]));
        }
        table::lines(&table)
    }
}

impl RunSettings {
    /// Source of the decisions, and their number.
    pub fn words(&self) -> [String; 2] {
        let RunSettings { routing, experts, top_k, seed, tokens, .. } = self;
        [
            format!("{routing}, {experts} experts, top-{top_k}, seed {seed}"),
            format!("{}, {tokens} tokens each, experts in equal blocks", shape_words(&self.ranks_per_node)),
        ]
    }
}

/// Two digits; empty without a share.
fn percent(share: f64) -> String {
    if share == 0.0 { "-".into() } else { format!("{:.2}%", share * 100.0) }
}

const NOTES: &str = "Weight by a policy: the share of the routing weights that it drops. Tokens emptied: without a choice left, least to most of the policies. Evenness: entropy of the load; 1 is even.";

impl command_frame::Report for Report {
    fn text(&self) -> String {
        let [routing, ranks] = self.config.words();
        let head = table::head(&[("routing", routing), ("ranks", ranks)]);
        let bars = bar_lines(&self.load.experts.choices, table::width());
        let [loads, spreads, drops] = [self.loads(), self.spreads(), self.drops()];
        format!(
            "{head}\nchoices per expert, by their mean\n\n{bars}\n{loads}\n\n{spreads}\n\n{drops}\n\n{NOTES}"
        )
    }
}

/// Experts of a band, at most.
const BAND: usize = 64;
/// Columns of the label and the axis in front of the bars.
const AXIS: usize = 9;
const LINES: usize = 6;
/// From nothing to a full character.
const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

fn bar_lines(choices: &[u64], width: usize) -> String {
    // A ruler's mark has eight columns.
    let band = (width.saturating_sub(AXIS) / 8 * 8).clamp(8, BAND);
    let most = choices.iter().copied().max().unwrap_or(0);
    let mean = choices.iter().sum::<u64>() as f64 / choices.len() as f64;
    let mut text = String::new();
    for (nth, loads) in choices.chunks(band).enumerate() {
        for line in (0..LINES).rev() {
            let label = if most == 0 { 0.0 } else { (line + 1) as f64 / LINES as f64 * most as f64 / mean };
            let bars: String = loads.iter().map(|&load| piece(load, most, line)).collect();
            let _ = writeln!(text, "{label:>6.2}x │{}", bars.trim_end());
        }
        let _ = writeln!(text, "      0 └{}", "─".repeat(loads.len()));
        let _ = writeln!(text, "         {}", ruler(nth * band, loads.len()));
    }
    text
}

/// The character of a column in a line, counted from below. The least load above zero is visible.
fn piece(load: u64, most: u64, line: usize) -> char {
    let eighths = (load * (LINES * 8) as u64).div_ceil(most.max(1)) as usize;
    EIGHTHS[eighths.saturating_sub(line * 8).min(8)]
}

fn ruler(first: usize, columns: usize) -> String {
    let marks = (first..first + columns).step_by(8).map(|expert| format!("{expert:<8}"));
    marks.collect::<String>().trim_end().to_owned()
}

pub fn draw(report: &Report, map: &ExpertMap, curves: &[Dropped]) -> String {
    let title = "Load of the experts, and what a capacity drops";
    let panels = vec![load(report, map), losses(curves)];
    Chart { title, conditions: report.config.words().into(), panels, arrangement: Arrangement::Stacked }
        .draw()
}

/// A bar for each expert, in two colors: rank by rank.
fn load<'a>(report: &Report, map: &ExpertMap) -> Panel<'a> {
    let choices = &report.load.experts.choices;
    let mean = (choices.iter().sum::<u64>() as f64 / choices.len() as f64).max(f64::MIN_POSITIVE);
    let bar = |(expert, &load): (u32, &u64)| {
        let rank = map.slot_for(0, expert).map_or(0, |slot| map.rank_of(slot));
        let color = if rank.is_multiple_of(2) { Color::Orange } else { Color::Brown };
        let tall = load as f64 / mean;
        Bar { tall, color, said: format!("expert {expert}: {load} choices, {tall:.2} of the mean") }
    };
    let place = |at| Point { at, said: String::new() };
    let mean_line = [(0.0, 1.0), (choices.len() as f64, 1.0)].map(place);
    let curves = vec![Curve { name: "mean".to_owned(), points: mean_line.into() }];
    let title = "choices of each expert, by their mean; two colors: ranks";
    let panel = Panel::new(title, &|expert| expert.to_string(), &|tall| format!("{tall:.1}x"));
    Panel { bars: (0..).zip(choices).map(bar).collect(), curves, linear: true, ..panel }
}

/// Choices that a capacity drops, and the weight by each way of dropping.
fn losses<'a>(dropped: &[Dropped]) -> Panel<'a> {
    let curve = |name: String, share: &dyn Fn(&Dropped) -> f64| {
        let point = |dropped: &Dropped| Point { at: (dropped.factor, share(dropped)), said: String::new() };
        Curve { name, points: dropped.iter().map(point).collect() }
    };
    let ways = dropped[0].lost.iter().enumerate();
    let ways = ways.map(|(n, lost)| {
        curve(format!("weight: {}", lost.policy.replace('_', " ")), &|dropped| dropped.lost[n].weight)
    });
    let choices = curve("choices".to_owned(), &|dropped| dropped.choices);
    let title = "share dropped, by capacity factor";
    let panel = Panel::new(title, &|factor| factor.to_string(), &|share| format!("{:.0}%", share * 100.0));
    Panel { curves: [choices].into_iter().chain(ways).collect(), linear: true, ..panel }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::chart::svg::tests::elements;
    use crate::chart::tests::points;
    use crate::command_frame::tests::{assert_page, parsed};
    use crate::commands::routing::{RoutingArgs, curve_factors};

    fn resolve(words: &str) -> (Decided, Report) {
        let args: RoutingArgs = parsed(words).unwrap();
        let decided = args.decide().unwrap();
        let report = Report::new(&decided, &args.factors).unwrap();
        (decided, report)
    }

    #[test]
    fn the_document_names_exactly_the_keys_of_the_json() {
        assert_page("routing-json.md", &[resolve("").1]);
    }

    #[test]
    fn a_load_that_is_even_drops_nothing_from_factor_one_on() {
        let (_, report) = resolve("uniform --experts 4 --top-k 4 --factors 0.5,1,2");
        let dropped: Vec<_> = report.capacity.iter().map(|dropped| (dropped.rows, dropped.choices)).collect();
        assert_eq!(dropped, [(256, 0.5), (512, 0.0), (1024, 0.0)]);
        assert!(report.capacity[1].lost.iter().all(|lost| (lost.weight, lost.tokens) == (0.0, 0.0)));
        let [score, position, ..] = &report.capacity[0].lost[..] else { panic!("several ways") };
        assert!(score.weight < position.weight, "{score:?} {position:?}");
        assert_eq!((score.policy.as_str(), position.tokens), ("score", 0.5));
    }

    #[test]
    fn the_busiest_expert_fills_its_column_and_the_least_is_seen() {
        let text = bar_lines(&[6000, 3000, 1, 0], 80);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "  2.67x │█");
        assert_eq!(lines[LINES - 1], "  0.44x │██▁");
        assert_eq!(lines[LINES / 2], "  1.33x │██");
        assert_eq!(&lines[LINES..], ["      0 └────", "         0"]);
    }

    #[test]
    fn more_experts_than_columns_get_another_band() {
        let text = bar_lines(&[1; 72], 80);
        assert_eq!(text.lines().count(), 2 * (LINES + 2));
        assert!(text.lines().last().unwrap().ends_with(" 64"), "{text}");
    }

    #[test]
    fn bands_of_a_narrow_terminal_fit() {
        let text = bar_lines(&[1; 72], 40);
        assert!(text.lines().all(|line| line.chars().count() <= 40), "{text}");
        assert!(text.lines().last().unwrap().ends_with(" 48      56      64"), "{text}");
    }

    #[test]
    fn no_choices_are_no_bars() {
        assert!(!bar_lines(&[0; 5], 80).contains('█'));
    }

    #[test]
    fn every_expert_has_a_bar_and_every_way_a_curve_that_falls() {
        for words in ["", "incast --experts 256 --top-k 1 --tokens 32", "uniform --experts 1 --top-k 1"] {
            let (decided, report) = resolve(words);
            let curves = dropped(&decided, &curve_factors()).unwrap();
            let tags = elements(&draw(&report, &decided.map, &curves));
            let of = |name: &str| tags.iter().filter(|tag| tag.starts_with(name)).collect::<Vec<_>>();
            assert_eq!(of("rect").len(), 1 + report.config.experts as usize, "the paper and the bars");
            assert_eq!(of("polyline").len(), 2 + curves[0].lost.len());
            for line in of("polyline").into_iter().skip(1) {
                let points = points(line);
                assert!(points.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "more room, less lost: {line}");
            }
        }
    }
}
