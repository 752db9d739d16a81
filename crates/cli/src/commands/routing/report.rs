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
//!
//! The picture shows load and losses:
//!
//! ```text
//!   title, conditions
//!   2x |      _
//!   1x |--_--| |-_--        a bar for each expert, in two shades: rank by rank
//!      +-------------
//!  50% |\
//!      | \__                choices, and weight by each way of dropping, by capacity factor
//!      |    \_______
//!      0   1   2   4
//! ```

use std::fmt::Write;

use serde::Serialize;
use sidelane::plan::ExpertMap;
use sidelane_model::{Dropped, Loads, Spread};

use super::dropped;
use crate::chart::{curve, key, rect};
use crate::commands::launch::shape_words;
use crate::error::CliError;
use crate::routing_source::{Conditions, Decided};
use crate::svg::{self, Style, Svg, round};
use crate::{command_frame, table};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub config: Conditions,
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
                ("evenness", &|(_, load)| format!("{:.4}", load.evenness)),
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

impl Conditions {
    /// Source of the decisions, and their number.
    pub fn words(&self) -> [String; 2] {
        let Conditions { routing, experts, top_k, seed, tokens, .. } = self;
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

impl command_frame::Report for Report {
    fn text(&self) -> String {
        let [routing, ranks] = self.config.words();
        let head = table::head(&[("routing", routing), ("ranks", ranks)]);
        let bars = bar_lines(&self.load.experts.choices, table::width().unwrap_or(usize::MAX));
        let [loads, spreads, drops] = [self.loads(), self.spreads(), self.drops()];
        format!("{head}\nchoices per expert, by their mean\n\n{bars}\n{loads}\n\n{spreads}\n\n{drops}")
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

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 520.0;
/// Where the axes begin and end.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 700.0;
const BARS: (f64, f64) = (76.0, 236.0);
const CURVES: (f64, f64) = (290.0, 450.0);

const STYLE: Style = Style {
    light: "\
.even { fill: #2166c2; } .odd { fill: #7ba7dd; } .mean { stroke: #c2307f; stroke-dasharray: 4 3; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.c0 { stroke: #8c959f; stroke-dasharray: 5 3; } .c1 { stroke: #2166c2; } .c2 { stroke: #d9820f; }
.c3 { stroke: #0f8a86; } .c4 { stroke: #c2307f; }",
    dark: "\
.even { fill: #3f83dd; } .odd { fill: #234a7d; } .c1 { stroke: #3f83dd; } .c2 { stroke: #e0962f; }
.c3 { stroke: #1f9e99; } .c4 { stroke: #e0579f; }",
};

pub fn draw(report: &Report, map: &ExpertMap, curves: &[Dropped]) -> String {
    svg::picture((WIDTH, HEIGHT), "Load of the experts, and what a capacity drops", STYLE, |svg| {
        let [routing, ranks] = report.config.words();
        svg.label("quiet", 16.0, 43.0, &routing);
        svg.label("quiet", 16.0, 59.0, &ranks);
        bars(svg, report, map);
        axes(svg, curves);
        lines(svg, curves);
    })
}

/// A bar for each expert; the mean as a line.
fn bars(svg: &mut Svg, report: &Report, map: &ExpertMap) {
    let choices = &report.load.experts.choices;
    let (top, bottom) = BARS;
    let most = report.load.experts.max_over_mean.max(1.0).ceil();
    let height = |over_mean: f64| (bottom - top) * over_mean / most;
    let step = (RIGHT - LEFT) / choices.len() as f64;
    let mean = (choices.iter().sum::<u64>() as f64 / choices.len() as f64).max(f64::MIN_POSITIVE);
    for (expert, &load) in choices.iter().enumerate() {
        let (x, tall) = (LEFT + step * expert as f64, height(load as f64 / mean));
        let rank = map.slot_for(0, expert as u32).map(|slot| map.rank_of(slot));
        let class = if rank.is_some_and(|rank| rank.is_multiple_of(2)) { "even" } else { "odd" };
        let said = format!("expert {expert}: {load} choices, {:.2} of the mean", load as f64 / mean);
        rect(svg, class, (x, round(bottom - tall), step * 0.86, round(tall)), &said);
    }
    svg.line("mean", (LEFT, bottom - height(1.0)), (RIGHT, bottom - height(1.0)));
    for (over_mean, y) in [(most, top), (1.0, bottom - height(1.0))] {
        svg.label("quiet end", LEFT - 8.0, y + 4.0, &format!("{over_mean}x"));
    }
    svg.line("line", (LEFT, bottom), (RIGHT, bottom));
    svg.label("quiet", LEFT, bottom + 16.0, "expert 0");
    svg.label("quiet end", RIGHT, bottom + 16.0, &format!("expert {}", choices.len() - 1));
    svg.label(
        "quiet middle",
        (LEFT + RIGHT) / 2.0,
        bottom + 16.0,
        "choices by their mean; two shades: ranks",
    );
}

/// Where a factor and a share lie.
fn place(curves: &[Dropped], factor: f64, share: f64) -> (f64, f64) {
    let (top, bottom) = CURVES;
    let (first, last) = (curves[0].factor, curves[curves.len() - 1].factor);
    (
        LEFT + (factor - first) / (last - first) * (RIGHT - LEFT),
        bottom - share / highest(curves) * (bottom - top),
    )
}

/// The upper end of the shares: a multiple of a tenth.
fn highest(curves: &[Dropped]) -> f64 {
    let most = curves.iter().map(|dropped| dropped.choices).fold(0.0, f64::max);
    (most * 10.0).ceil().max(1.0) / 10.0
}

fn axes(svg: &mut Svg, curves: &[Dropped]) {
    let (top, bottom) = CURVES;
    for dropped in curves.iter().filter(|dropped| (dropped.factor * 2.0).fract() == 0.0) {
        let (x, _) = place(curves, dropped.factor, 0.0);
        svg.line("line", (x, top), (x, bottom));
        svg.label("quiet middle", x, bottom + 16.0, &dropped.factor.to_string());
    }
    for quarter in 0..=4 {
        let share = highest(curves) * f64::from(quarter) / 4.0;
        let (_, y) = place(curves, curves[0].factor, share);
        svg.line("line", (LEFT, y), (RIGHT, y));
        svg.label("quiet end", LEFT - 8.0, y + 4.0, &format!("{:.0}%", share * 100.0));
    }
}

/// Choices, and the weights of each way; with a legend.
fn lines(svg: &mut Svg, curves: &[Dropped]) {
    let mut x = LEFT;
    let names = curves[0].lost.iter().map(|lost| format!("weight: {}", lost.policy.replace('_', " ")));
    for (n, name) in ["choices".to_owned()].into_iter().chain(names).enumerate() {
        let share = |dropped: &Dropped| if n == 0 { dropped.choices } else { dropped.lost[n - 1].weight };
        let class = format!("c{n}");
        curve(svg, &class, curves.iter().map(|dropped| place(curves, dropped.factor, share(dropped))));
        key(svg, &class, &name, (x, CURVES.1 + 44.0));
        x += 42.0 + 5.9 * name.len() as f64;
    }
    svg.label("quiet end", RIGHT, CURVES.0 - 10.0, "share dropped, by capacity factor");
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::chart::tests::points;
    use crate::command_frame::tests::{assert_page, parsed};
    use crate::commands::routing::{RoutingArgs, curve_factors};
    use crate::svg::tests::elements;

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
            assert_eq!(of("polyline").len(), 1 + curves[0].lost.len());
            for line in of("polyline") {
                let points = points(line);
                assert!(points.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "more room, less lost: {line}");
                let (top, bottom) = CURVES;
                assert!(
                    points.iter().all(|&(x, y)| (LEFT..=RIGHT).contains(&x) && (top..=bottom).contains(&y))
                );
            }
        }
    }
}
