//! The result of a measurement, and its JSON. Keys are described in `docs/put-bench-json.md`.

use std::fmt::Write;

use serde::{Deserialize, Serialize};
use sidelane_testkit::machines::Hosts;
use sidelane_testkit::timing::stats::{Ratio, Summary, ratio_of_medians, summary};

use super::measure::RankSamples;
use super::{Run, Test};
use crate::baselines::Unavailable;
use crate::chart::{Arrangement, Chart, Curve, Panel, Point};
use crate::command_frame;
use crate::commands::launch::shape_words;
use crate::options::{Scaled, word};
use crate::table::{self, Column};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub config: RunSettings,
    pub verified: bool,
    pub pairs: Vec<PairReport>,
    /// One that was to take turns with us, and could not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unavailable: Option<Unavailable>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunSettings {
    pub test: Test,
    pub nodes: usize,
    pub ranks_per_node: Vec<u32>,
    #[serde(flatten)]
    pub hosts: Hosts,
    pub route: String,
    /// Whether the pairs are all of nodes.
    pub matrix: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PairReport {
    pub from: End,
    pub to: End,
    pub lane: String,
    /// Why it is this one; null within a node, where there is no other.
    pub lane_reason: Option<String>,
    pub runs: Vec<RunReport>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct End {
    pub rank: u32,
    pub node: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunReport {
    #[serde(flatten)]
    pub run: Run,
    pub verified: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency: Option<Summary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bandwidth>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub baseline: Option<BaselineReport>,
}

/// Medians of runs in turn with another.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BaselineReport {
    pub name: String,
    /// Of each turn.
    pub ours_us: Vec<f64>,
    pub theirs_us: Vec<f64>,
    /// By what factor ours is faster: median by median.
    pub speedup: Ratio,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// Of the fastest window.
    peak_mib_s: f64,
    /// Of all windows.
    mean_mib_s: f64,
    /// In each direction.
    puts_per_s: f64,
    /// The same number of copies of the same bytes, where they move within a machine's memory.
    memcpy_mib_s: Option<f64>,
}

impl BaselineReport {
    pub fn new(name: &str, ours_us: Vec<f64>, theirs_us: Vec<f64>) -> Self {
        let speedup = ratio_of_medians(&theirs_us, &ours_us);
        BaselineReport { name: name.into(), ours_us, theirs_us, speedup }
    }
}

impl Bandwidth {
    /// Figures of windows of (puts, microseconds), where `bytes` move with each put; next to copies
    /// of the same number and size.
    pub fn of(bytes: u64, windows: &[(u32, f64)], memcpy: Option<(u32, f64)>) -> Self {
        let speed = |puts: u64, us: f64| mib_s(bytes * puts, us);
        let (puts, us) =
            windows.iter().fold((0, 0.0), |sum, &(puts, us)| (sum.0 + u64::from(puts), sum.1 + us));
        let peaks = windows.iter().map(|&(puts, us)| speed(puts.into(), us));
        Bandwidth {
            peak_mib_s: peaks.fold(0.0, f64::max),
            mean_mib_s: speed(puts, us),
            puts_per_s: puts as f64 / us * 1e6,
            memcpy_mib_s: memcpy.map(|(copies, us)| speed(copies.into(), us)),
        }
    }
}

/// Powers of 1024, as perftest has it.
fn mib_s(bytes: u64, us: f64) -> f64 {
    bytes as f64 / f64::from(1 << 20) / us * 1e6
}

impl RunReport {
    /// From what both ranks have found: the first one timed.
    pub fn new(run: Run, first: RankSamples, second: &RankSamples) -> Self {
        let verified = first.verified && second.verified;
        RunReport { run, verified, latency: first.latency, bandwidth: first.bandwidth, baseline: None }
    }
}

impl command_frame::Report for Report {
    /// Conditions, verdict, and figures: of each size, or of each pair.
    fn text(&self) -> String {
        let verdict =
            if self.verified { "verified: what was received last, bit by bit" } else { "NOT VERIFIED" };
        let wrong = self.pairs.iter().flat_map(|pair| pair.runs.iter().map(move |run| (pair, run)));
        let wrong = wrong.filter(|(_, run)| !run.verified).fold(String::new(), |mut text, (pair, run)| {
            let (from, to) = (pair.from.rank, pair.to.rank);
            let _ = write!(
                text,
                "\n{} bytes between rank {from} and rank {to} did not arrive right",
                run.run.bytes
            );
            text
        });
        let figures = if self.config.matrix { matrices(self) } else { figures(self) };
        format!("{}{verdict}{wrong}\n\n{figures}{}", head(self), beside(self))
    }

    fn is_right(&self) -> bool {
        self.verified
    }
}

/// A line for each size that another took turns in; or why it could not.
fn beside(report: &Report) -> String {
    let runs = report.pairs.iter().flat_map(|pair| &pair.runs);
    let others: Vec<_> = runs.filter_map(|run| Some((run.run.bytes, run.baseline.as_ref()?))).collect();
    let mut text = String::new();
    if !others.is_empty() {
        let p50 = |us: &[f64]| format!("{:.3}", summary(us).p50_us);
        let table = table::of(
            others,
            &[
                ("bytes", &|(bytes, _)| Scaled(*bytes).to_string()),
                ("beside", &|(_, other)| other.name.clone()),
                ("turns", &|(_, other)| other.ours_us.len().to_string()),
                ("theirs [us]", &|(_, other)| p50(&other.theirs_us)),
                ("ours [us]", &|(_, other)| p50(&other.ours_us)),
                ("x ours (95%)", &|(_, other)| other.speedup.text(2)),
            ],
        );
        text = format!("\n\n{table}");
    }
    report.unavailable.iter().fold(text, |text, one| text + "\n\n" + &one.text())
}

fn head(report: &Report) -> String {
    let config = &report.config;
    let host = config.hosts.text("");
    let mut lines = vec![
        ("test", format!("{}: {}", word(&config.test), config.test.title())),
        ("ranks", format!("{}, {host}", shape_words(&config.ranks_per_node))),
    ];
    if let ([PairReport { from, to, .. }], false) = (report.pairs.as_slice(), config.matrix) {
        let pair = format!("rank {} (node {}) and rank {} (node {})", from.rank, from.node, to.rank, to.node);
        lines.push(("pair", pair));
    }
    if let Some(pair) = report.pairs.first() {
        lines.push((
            "lane",
            format!("{}{}, route {}", pair.lane, table::because(&pair.lane_reason), config.route),
        ));
    }
    table::head(&lines)
}

fn figures(report: &Report) -> String {
    let runs = || report.pairs.iter().flat_map(|pair| &pair.runs);
    let of = |figure: Option<f64>| figure.map_or("-".to_owned(), |figure| format!("{figure:.2}"));
    let memcpy = |run: &RunReport| run.bandwidth.and_then(|seen| seen.memcpy_mib_s);
    let share = |run: &RunReport| Some(format!("{:.3}", run.bandwidth?.mean_mib_s / memcpy(run)?));
    let (latency, copied) = (report.config.test.is_latency(), runs().any(|run| memcpy(run).is_some()));
    // Whether a column is there, and the column.
    let columns: [(bool, Column<'_, &RunReport>); 12] = [
        (true, ("bytes", &|run| Scaled(run.run.bytes).to_string())),
        (true, (if latency { "iterations" } else { "puts" }, &|run| run.run.iterations.to_string())),
        (latency, ("min [us]", &|run| of(run.latency.map(|seen| seen.min_us)))),
        (latency, ("p50 [us]", &|run| of(run.latency.map(|seen| seen.p50_us)))),
        (latency, ("average [us]", &|run| of(run.latency.map(|seen| seen.mean_us)))),
        (latency, ("p99 [us]", &|run| of(run.latency.and_then(|seen| seen.p99_us)))),
        (latency, ("max [us]", &|run| of(run.latency.map(|seen| seen.max_us)))),
        (!latency, ("peak [MiB/s]", &|run| of(run.bandwidth.map(|seen| seen.peak_mib_s)))),
        (!latency, ("average [MiB/s]", &|run| of(run.bandwidth.map(|seen| seen.mean_mib_s)))),
        (
            !latency,
            ("rate [Mput/s]", &|run| {
                run.bandwidth.map_or("-".to_owned(), |seen| format!("{:.4}", seen.puts_per_s / 1e6))
            }),
        ),
        (copied, ("memcpy [MiB/s]", &|run| of(memcpy(run)))),
        (copied, ("of memcpy", &|run| share(run).unwrap_or_else(|| "-".to_owned()))),
    ];
    let columns = columns.into_iter().filter_map(|(there, column)| there.then_some(column));
    let rare = runs().any(|run| run.latency.is_some_and(|seen| seen.p99_us.is_none()));
    let note = if rare { "\n\np99: of 1000 iterations or more." } else { "" };
    table::of(runs(), &columns.collect::<Vec<_>>()) + note
}

fn matrices(report: &Report) -> String {
    let what = if report.config.test.is_latency() { "p50, in us" } else { "average, in MiB/s" };
    let runs = report.pairs.first().map_or(0, |pair| pair.runs.len());
    let matrices = (0..runs).map(|nth| {
        let bytes = report.pairs[0].runs[nth].run.bytes;
        let size = if bytes == 0 { String::new() } else { format!(", {} bytes", Scaled(bytes)) };
        format!("{what}{size}; rows: from, columns: to\n\n{}", matrix(report, nth))
    });
    matrices.collect::<Vec<_>>().join("\n\n")
}

fn matrix(report: &Report, nth: usize) -> String {
    let nodes = 0..report.config.nodes as u32;
    let name = |node: u32| format!("node {node}");
    let mut table = table::figures([vec![String::new()], nodes.clone().map(name).collect()].concat());
    for from in nodes.clone() {
        let cell = |to: u32| {
            let pair = report.pairs.iter().find(|pair| (pair.from.node, pair.to.node) == (from, to));
            pair.map_or("-".to_owned(), |pair| format!("{:.2}", typical(&pair.runs[nth])))
        };
        table.add_row([vec![name(from)], nodes.clone().map(cell).collect()].concat());
    }
    table::lines(&table)
}

fn typical(run: &RunReport) -> f64 {
    let latency = run.latency.map(|latency| latency.p50_us);
    latency.or(run.bandwidth.map(|bandwidth| bandwidth.mean_mib_s)).unwrap_or(0.0)
}

pub fn draw(report: &Report) -> String {
    let RunSettings { test, hosts, ranks_per_node, .. } = &report.config;
    let unit = if test.is_latency() { "us" } else { "MiB/s" };
    let host = hosts.text("");
    let mut conditions = vec![format!("ranks: {}, {host}", shape_words(ranks_per_node))];
    conditions.extend(report.pairs.first().map(|PairReport { from, to, lane, lane_reason, .. }| {
        let reason = table::because(lane_reason);
        format!("rank {} and rank {} · lane {lane}{reason} · {unit} by bytes of a put", from.rank, to.rank)
    }));
    let (numbers, figures) =
        (&|bytes| Scaled(bytes as u64).to_string(), &|figure| format!("{figure} {unit}"));
    let panels = vec![Panel { curves: curves(report), ..Panel::new("", numbers, figures) }];
    let title = format!("{}: {}", word(test), test.title());
    Chart { title: &title, conditions, panels, arrangement: Arrangement::Apart }.draw()
}

fn curves(report: &Report) -> Vec<Curve> {
    let curve = |name: &str, figure: fn(&RunReport) -> Option<f64>| {
        let runs = report.pairs.first().into_iter().flat_map(|pair| &pair.runs);
        let mut points: Vec<_> = runs.filter_map(|run| Some((run.run.bytes, figure(run)?))).collect();
        points.sort_by_key(|&(bytes, _)| bytes);
        let said = |(bytes, figure)| Point {
            at: (bytes as f64, figure),
            said: format!("{} bytes: {name} {figure:.2}", Scaled(bytes)),
        };
        Curve { name: name.to_owned(), points: points.into_iter().map(said).collect() }
    };
    let curves = if report.config.test.is_latency() {
        [
            curve("min", |run| Some(run.latency?.min_us)),
            curve("p50", |run| Some(run.latency?.p50_us)),
            curve("p99", |run| run.latency?.p99_us),
        ]
    } else {
        [
            curve("peak", |run| Some(run.bandwidth?.peak_mib_s)),
            curve("average", |run| Some(run.bandwidth?.mean_mib_s)),
            curve("memcpy", |run| run.bandwidth?.memcpy_mib_s),
        ]
    };
    curves.into_iter().filter(|curve| !curve.points.is_empty()).collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::chart::svg::tests::elements;
    use crate::command_frame::Report as _;
    use crate::command_frame::tests::{assert_page, assert_words};
    use crate::commands::put_bench::Test;

    /// A report of puts of 8 bytes and of 1 MiB between two nodes.
    pub fn sample(test: Test) -> Report {
        let run = |bytes, us: f64| {
            let halves: Vec<f64> = (1..=1000).map(|n| us * f64::from(n)).collect();
            let latency = test.is_latency().then(|| summary(&halves));
            let windows = [(10, 2.0 * us), (10, us)];
            let bandwidth =
                (!test.is_latency()).then(|| Bandwidth::of(bytes, &windows, Some((10, us / 2.0))));
            let run = Run { bytes, iterations: 1000, warmup: 100 };
            let baseline =
                test.is_latency().then(|| BaselineReport::new("ucx", vec![us, 2.0 * us], vec![us; 2]));
            RunReport { run, verified: true, latency, bandwidth, baseline }
        };
        let end = |rank, node| End { rank, node };
        Report {
            config: RunSettings {
                test,
                nodes: 2,
                ranks_per_node: vec![2, 2],
                hosts: Hosts { machines: 1, cores: 2 },
                route: "direct".into(),
                matrix: false,
            },
            verified: true,
            pairs: vec![PairReport {
                from: end(0, 0),
                to: end(2, 1),
                lane: "loopback".into(),
                lane_reason: Some("all nodes on one machine".into()),
                runs: vec![run(8, 0.01), run(1 << 20, 100.0)],
            }],
            unavailable: Some(Unavailable {
                name: "ucx".into(),
                reason: "there is no ucx_perftest".into(),
                install: "apt install ucx-utils".into(),
            }),
        }
    }

    #[test]
    fn the_document_names_exactly_the_keys_of_the_json() {
        let reports = [Test::PutLat, Test::PutBw].map(sample);
        assert_page("put-bench-json.md", &reports);
    }

    #[test]
    fn speeds_follow_from_puts_and_times() {
        let seen = Bandwidth::of(1 << 20, &[(10, 2e4), (10, 1e4), (0, 5e3)], Some((20, 1e4)));
        assert_eq!(
            (seen.peak_mib_s, seen.puts_per_s.round(), seen.memcpy_mib_s),
            (1000.0, 571.0, Some(2000.0))
        );
        assert!((seen.mean_mib_s - 20.0 / 0.035).abs() < 1e-9);
    }

    #[test]
    fn a_run_is_verified_if_both_ranks_say_so() {
        let run = Run { bytes: 8, iterations: 1, warmup: 0 };
        let [good, bad] = [true, false].map(|verified| RankSamples { verified, ..RankSamples::default() });
        for (first, second) in [(&good, &bad), (&bad, &good)] {
            assert!(!RunReport::new(run, first.clone(), second).verified);
        }
        assert!(RunReport::new(run, good.clone(), &good).verified);
    }

    #[test]
    fn the_text_holds_conditions_verdict_and_figures() {
        let latency = sample(Test::PutLat).text();
        assert_words(
            &latency,
            &[
                "put-lat: half the round trip",
                "4 on 2 nodes (2 + 2), 1 machine, 2 cores",
                "rank 0 (node 0) and rank 2 (node 1)",
                "loopback (all nodes on one machine), route direct",
                "verified: ",
                "p50 [us]",
                "5.00",
                "9.90",
                "1M",
                "50050.00",
                "0.67 (0.50-1.00)",
                "there is no ucx_perftest; to have it: apt install ucx-utils",
            ],
        );
        let stream = sample(Test::PutBw).text();
        assert_words(&stream, &["peak [MiB/s]", "100000.00", "66666.67", "0.0667", "200000.00", "0.333"]);
        assert!(!stream.contains("us]"), "{stream}");
    }

    #[test]
    fn a_failed_verification_cannot_be_overlooked() {
        let mut report = sample(Test::PutLat);
        (report.verified, report.pairs[0].runs[1].verified) = (false, false);
        let text = report.text();
        assert!(text.contains("NOT VERIFIED\n1048576 bytes between rank 0 and rank 2"), "{text}");
    }

    #[test]
    fn a_matrix_has_a_row_and_a_column_for_each_node() {
        let mut report = sample(Test::PutLat);
        let back = PairReport {
            from: End { rank: 2, node: 1 },
            to: End { rank: 0, node: 0 },
            ..report.pairs[0].clone()
        };
        report.pairs.push(back);
        report.pairs[1].runs[0].latency.as_mut().unwrap().p50_us = 7.25;
        report.config.matrix = true;
        let text = report.text();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        for line in [["node", "0", "-", "5.00"], ["node", "1", "7.25", "-"]] {
            assert!(lines.iter().any(|seen| *seen == line), "{line:?} in\n{text}");
        }
        assert!(text.contains("p50, in us, 8 bytes") && text.contains("p50, in us, 1M bytes"), "{text}");
    }

    #[test]
    fn every_figure_of_a_size_is_a_point_of_its_curve() {
        for test in [Test::PutLat, Test::PutBw, Test::PutBibw] {
            for runs in 1..=2 {
                let mut report = sample(test);
                report.pairs[0].runs.truncate(runs);
                let tags = elements(&draw(&report));
                let count = |name: &str| tags.iter().filter(|tag| tag.starts_with(name)).count();
                assert_eq!((count("polyline"), count("circle")), (3, 3 * runs), "{test:?}");
            }
        }
    }
}
