//! Figures by size as a picture, both axes logarithmic.
//!
//! ```text
//!   title, conditions
//!   1000 us |                      .-
//!    100 us |                 .---'        min, typical, p99; or peak, average, memcpy
//!     10 us |----------------'
//!           8   64   512   4K   32K  256K
//!          legend
//! ```

use super::report::{Report, RunReport};
use super::sizes::Bytes;
use crate::chart::{Curve, Point, Scale};
use crate::launch::shape_words;
use crate::machines;
use crate::svg::{self, Style, Svg};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 440.0;
/// Where the axes begin and end.
const LEFT: f64 = 92.0;
const RIGHT: f64 = 700.0;
const TOP: f64 = 78.0;
const BOTTOM: f64 = 372.0;

const STYLE: Style = Style {
    light: "\
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
circle.dot { stroke: none; }
.main { stroke: #2166c2; } .dot.main { fill: #2166c2; }
.best { stroke: #0f8a86; stroke-width: 1.2; } .dot.best { fill: #0f8a86; }
.third { stroke: #8c959f; stroke-width: 1.2; stroke-dasharray: 5 3; } .dot.third { fill: #8c959f; }",
    dark: "\
.main { stroke: #3f83dd; } .dot.main { fill: #3f83dd; }
.best { stroke: #1f9e99; } .dot.best { fill: #1f9e99; }",
};

/// The picture of the first pair.
pub fn draw(report: &Report) -> String {
    let test = report.config.test;
    let title = format!("{}: {}", test.name(), test.title());
    let unit = if test.is_latency() { "us" } else { "MiB/s" };
    let curves = curves(report);
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let sizes = Scale::of(points().map(|point| point.at.0), (LEFT, RIGHT), f64::log2);
    let figures = Scale::of(points().map(|point| point.at.1), (BOTTOM, TOP), f64::log10);
    svg::picture((WIDTH, HEIGHT), &title, STYLE, |svg| {
        head(svg, report);
        for power in sizes.powers(10) {
            let x = sizes.at(2f64.powi(power));
            svg.line("line", (x, TOP), (x, BOTTOM));
            svg.label("quiet middle", x, BOTTOM + 16.0, &Bytes(1 << power).to_string());
        }
        for power in figures.powers(8) {
            let y = figures.at(10f64.powi(power));
            svg.line("line", (LEFT, y), (RIGHT, y));
            svg.label("quiet end", LEFT - 8.0, y + 4.0, &format!("{} {unit}", 10f64.powi(power)));
        }
        for curve in &curves {
            curve.draw(svg, &sizes, &figures);
        }
        legend(svg, &curves, unit);
    })
}

fn head(svg: &mut Svg, report: &Report) {
    let config = &report.config;
    let host = machines::with_host(config.machines, &format!("{} cores", config.cores));
    svg.label("quiet", 16.0, 43.0, &format!("ranks: {}, {host}", shape_words(&config.ranks_per_node)));
    if let Some(pair) = report.pairs.first() {
        let reason = pair.lane_reason.as_ref().map_or(String::new(), |reason| format!(" ({reason})"));
        let (from, to) = (pair.from.rank, pair.to.rank);
        svg.label("quiet", 16.0, 59.0, &format!("rank {from} and rank {to} · lane {}{reason}", pair.lane));
    }
}

fn curves(report: &Report) -> Vec<Curve> {
    let curve = |name: &str, class, figure: fn(&RunReport) -> Option<f64>| {
        let runs = report.pairs.first().into_iter().flat_map(|pair| &pair.runs);
        let mut points: Vec<_> = runs.filter_map(|run| Some((run.run.bytes, figure(run)?))).collect();
        points.sort_by_key(|&(bytes, _)| bytes);
        let said = |(bytes, figure)| Point {
            at: (bytes as f64, figure),
            said: format!("{} bytes: {name} {figure:.2}", Bytes(bytes)),
        };
        Curve { name: name.to_owned(), class, points: points.into_iter().map(said).collect() }
    };
    let curves = if report.config.test.is_latency() {
        [
            curve("min", "best", |run| Some(run.latency?.min_us)),
            curve("typical", "main", |run| Some(run.latency?.p50_us)),
            curve("p99", "third", |run| run.latency?.p99_us),
        ]
    } else {
        [
            curve("peak", "best", |run| Some(run.bandwidth?.peak_mib_s)),
            curve("average", "main", |run| Some(run.bandwidth?.mean_mib_s)),
            curve("memcpy", "third", |run| run.bandwidth?.memcpy_mib_s),
        ]
    };
    curves.into_iter().filter(|curve| !curve.points.is_empty()).collect()
}

fn legend(svg: &mut Svg, curves: &[Curve], unit: &str) {
    let mut x = LEFT;
    for curve in curves {
        svg.line(&format!("curve {}", curve.class), (x, BOTTOM + 44.0), (x + 22.0, BOTTOM + 44.0));
        svg.label("quiet", x + 28.0, BOTTOM + 48.0, &curve.name);
        x += 52.0 + 6.5 * curve.name.len() as f64;
    }
    svg.label("quiet end", RIGHT, BOTTOM + 48.0, &format!("{unit} by bytes of a put"));
}

#[cfg(test)]
mod tests {
    use super::super::args::Test;
    use super::super::report::tests::sample;
    use super::*;
    use crate::svg::tests::elements;

    fn numbers(tag: &str, name: &str) -> Vec<f64> {
        let value = tag.split(&format!(" {name}=\"")).nth(1).unwrap().split('"').next().unwrap();
        value.split([' ', ',']).map(|number| number.parse().unwrap()).collect()
    }

    #[test]
    fn every_picture_is_well_formed_and_every_point_lies_between_the_axes() {
        for test in [Test::PutLat, Test::PutBw, Test::Exchange] {
            for runs in 1..=2 {
                let mut report = sample(test);
                report.pairs[0].runs.truncate(runs);
                let tags = elements(&draw(&report));
                let of = |name: &str| tags.iter().filter(|tag| tag.starts_with(name)).collect::<Vec<_>>();
                assert_eq!((of("polyline").len(), of("circle").len()), (3, 3 * runs), "{test:?}");
                for line in of("polyline") {
                    for point in numbers(line, "points").chunks(2) {
                        assert!((LEFT..=RIGHT).contains(&point[0]), "{line}");
                        assert!((TOP..=BOTTOM).contains(&point[1]), "{line}");
                    }
                }
            }
        }
    }

    #[test]
    fn larger_sizes_lie_to_the_right_and_larger_figures_above() {
        let tags = elements(&draw(&sample(Test::PutLat)));
        let line = tags.iter().find(|tag| tag.contains("curve main")).unwrap();
        let points = numbers(line, "points");
        assert!(points[0] < points[2] && points[1] > points[3], "{points:?}");
    }
}
