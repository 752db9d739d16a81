//! Load and losses as a picture.
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

use sidelane::plan::ExpertMap;

use super::drops::Dropped;
use super::report::Report;
use crate::svg::{self, Attribute, Style, Svg, round};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 520.0;
/// Where the axes begin and end.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 700.0;
/// Of the bars.
const BARS: (f64, f64) = (76.0, 236.0);
/// Of the curves.
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

/// The picture of a report, with what the factors of its curves would cost.
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
        let rank = map.rank_of(map.slot_for(0, expert as u32));
        let class = if rank.is_multiple_of(2) { "even" } else { "odd" };
        let (x, y, wide, tall) = (round(x), round(bottom - tall), round(step * 0.86), round(tall));
        let place: [Attribute<'_>; 5] =
            [("class", &class), ("x", &x), ("y", &y), ("width", &wide), ("height", &tall)];
        let said = format!("expert {expert}: {load} choices, {:.2} of the mean", load as f64 / mean);
        svg.element("rect", &place, |svg| svg.element("title", &[], |svg| svg.text(said)));
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
    let names = curves[0].lost.iter().map(|lost| format!("weight: {}", lost.keep.replace('_', " ")));
    for (n, name) in ["choices".to_owned()].into_iter().chain(names).enumerate() {
        let share = |dropped: &Dropped| if n == 0 { dropped.choices } else { dropped.lost[n - 1].weight };
        let point = |dropped: &Dropped| {
            let (x, y) = place(curves, dropped.factor, share(dropped));
            format!("{},{}", round(x), round(y))
        };
        let class = format!("curve c{n}");
        let points = curves.iter().map(point).collect::<Vec<_>>().join(" ");
        svg.element("polyline", &[("class", &class), ("points", &points)], |_| {});
        svg.line(&class, (x, CURVES.1 + 44.0), (x + 22.0, CURVES.1 + 44.0));
        svg.label("quiet", x + 28.0, CURVES.1 + 48.0, &name);
        x += 42.0 + 5.9 * name.len() as f64;
    }
    svg.label("quiet end", RIGHT, CURVES.0 - 10.0, "share dropped, by capacity factor");
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::resolve;
    use super::*;
    use crate::svg::tests::elements;

    #[test]
    fn every_expert_has_a_bar_and_every_way_a_curve_that_falls() {
        for words in ["", "incast --experts 256 --top-k 1 --tokens 32", "uniform --experts 1 --top-k 1"] {
            let task = resolve(words).unwrap();
            let report = Report::new(&task).unwrap();
            let curves = task.curves().unwrap();
            let tags = elements(&draw(&report, &task.map, &curves));
            let of = |name: &str| tags.iter().filter(|tag| tag.starts_with(name)).collect::<Vec<_>>();
            assert_eq!(of("rect").len(), 1 + report.config.experts as usize, "the paper and the bars");
            assert_eq!(of("polyline").len(), 1 + curves[0].lost.len());
            for line in of("polyline") {
                let points = line.split("points=\"").nth(1).unwrap().split('"').next().unwrap();
                let points: Vec<(f64, f64)> = points
                    .split(' ')
                    .map(|point| point.split_once(',').unwrap())
                    .map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap()))
                    .collect();
                assert!(points.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "more room, less lost: {line}");
                let (top, bottom) = CURVES;
                assert!(
                    points.iter().all(|&(x, y)| (LEFT..=RIGHT).contains(&x) && (top..=bottom).contains(&y))
                );
            }
        }
    }
}
