//! The report as people read it.

use std::fmt::Write;

use super::report::{Beside, PairReport, Report, RunReport};
use super::sizes::Bytes;
use crate::launch::shape_words;
use crate::stats::summary;
use crate::{command, machines, table};

impl command::Report for Report {
    /// Conditions, verdict, and figures: of each size, or of each pair.
    fn text(&self) -> String {
        let report = self;
        let verdict =
            if report.verified { "verified: what was received last, bit by bit" } else { "NOT VERIFIED" };
        let wrong = report.pairs.iter().flat_map(|pair| pair.runs.iter().map(move |run| (pair, run)));
        let wrong = wrong.filter(|(_, run)| !run.verified).fold(String::new(), |mut text, (pair, run)| {
            let (from, to) = (pair.from.rank, pair.to.rank);
            let _ = write!(
                text,
                "\n{} bytes between rank {from} and rank {to} did not arrive right",
                run.run.bytes
            );
            text
        });
        let figures = if report.config.matrix { matrices(report) } else { figures(report) };
        format!("{}{verdict}{wrong}\n\n{figures}{}", head(report), beside(report))
    }

    fn is_right(&self) -> bool {
        self.verified
    }
}

/// A line for each size that another took turns in; or why it could not.
fn beside(report: &Report) -> String {
    let runs = report.pairs.iter().flat_map(|pair| &pair.runs);
    let others: Vec<_> = runs.filter_map(|run| Some((run.run.bytes, run.beside.as_ref()?))).collect();
    let mut text = String::new();
    if !others.is_empty() {
        let mut table =
            table::figures(["bytes", "beside", "turns", "theirs [us]", "ours [us]", "x ours (95%)"]);
        for (bytes, other) in others {
            let [theirs, ours] =
                [&other.theirs_us, &other.ours_us].map(|us| format!("{:.3}", summary(us).p50));
            let Beside { name, times, times_low, times_high, .. } = other;
            let ratio = format!("{times:.2} ({times_low:.2}-{times_high:.2})");
            let turns = other.ours_us.len().to_string();
            table.add_row([Bytes(bytes).to_string(), name.clone(), turns, theirs, ours, ratio]);
        }
        text = format!("\n\n{}", table.trim_fmt());
    }
    report.absent.iter().fold(text, |text, peer| text + "\n\n" + &peer.text())
}

fn head(report: &Report) -> String {
    let config = &report.config;
    let host = machines::with_host(config.machines, &format!("{} cores", config.cores));
    let mut lines = vec![
        ("test", format!("{}: {}", config.test.name(), config.test.title())),
        ("ranks", format!("{}, {host}", shape_words(&config.ranks_per_node))),
    ];
    if let ([PairReport { from, to, .. }], false) = (report.pairs.as_slice(), config.matrix) {
        let pair = format!("rank {} (node {}) and rank {} (node {})", from.rank, from.node, to.rank, to.node);
        lines.push(("pair", pair));
    }
    if let Some(pair) = report.pairs.first() {
        let reason = pair.lane_reason.as_ref().map_or(String::new(), |reason| format!(" ({reason})"));
        lines.push(("lane", format!("{}{reason}, route {}", pair.lane, config.route)));
    }
    lines.iter().fold(String::new(), |mut text, (key, value)| {
        let _ = writeln!(text, "{key:<10}{value}");
        text
    })
}

/// A line for each size.
fn figures(report: &Report) -> String {
    let latency = report.config.test.is_latency();
    let header: &[&str] = match latency {
        true => &["bytes", "iterations", "min [us]", "typical [us]", "average [us]", "p99 [us]", "max [us]"],
        false => &["bytes", "puts", "peak [MiB/s]", "average [MiB/s]", "rate [Mput/s]"],
    };
    let runs = || report.pairs.iter().flat_map(|pair| &pair.runs);
    let memcpy = runs().any(|run| run.bandwidth.is_some_and(|bandwidth| bandwidth.memcpy_mib_s.is_some()));
    let beside: &[&str] = if memcpy { &["memcpy [MiB/s]", "of memcpy"] } else { &[] };
    let mut table = table::figures([header, beside].concat());
    for run in runs() {
        table.add_row(
            [vec![Bytes(run.run.bytes).to_string(), run.run.iterations.to_string()], cells(run)].concat(),
        );
    }
    table.trim_fmt()
}

fn cells(run: &RunReport) -> Vec<String> {
    let two = |number: f64| format!("{number:.2}");
    let mut cells = Vec::new();
    if let Some(latency) = run.latency {
        let p99 = latency.p99_us.map_or("-".to_owned(), two);
        cells.extend([
            two(latency.min_us),
            two(latency.p50_us),
            two(latency.mean_us),
            p99,
            two(latency.max_us),
        ]);
    }
    if let Some(bandwidth) = run.bandwidth {
        let rate = format!("{:.4}", bandwidth.puts_per_s / 1e6);
        cells.extend([two(bandwidth.peak_mib_s), two(bandwidth.mean_mib_s), rate]);
        if let Some(memcpy) = bandwidth.memcpy_mib_s {
            cells.extend([two(memcpy), format!("{:.3}", bandwidth.mean_mib_s / memcpy)]);
        }
    }
    cells
}

/// A matrix of nodes for each size.
fn matrices(report: &Report) -> String {
    let what = if report.config.test.is_latency() { "typical, in us" } else { "average, in MiB/s" };
    let runs = report.pairs.first().map_or(0, |pair| pair.runs.len());
    let matrices = (0..runs).map(|nth| {
        let bytes = report.pairs[0].runs[nth].run.bytes;
        let size = if bytes == 0 { String::new() } else { format!(", {} bytes", Bytes(bytes)) };
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
    table.trim_fmt()
}

fn typical(run: &RunReport) -> f64 {
    let latency = run.latency.map(|latency| latency.p50_us);
    latency.or(run.bandwidth.map(|bandwidth| bandwidth.mean_mib_s)).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::super::args::Test;
    use super::super::report::tests::sample;
    use super::super::report::{End, PairReport};

    use crate::command::Report as _;

    #[test]
    fn the_text_holds_conditions_verdict_and_figures() {
        let latency = sample(Test::PutLat).text();
        for words in [
            "put-lat: half the round trip",
            "4 on 2 nodes (2 + 2), 1 machine, 2 cores",
            "rank 0 (node 0) and rank 2 (node 1)",
            "loop (all nodes are on one machine), route direct",
            "verified: ",
            "typical [us]",
            "5.00",
            "9.90",
            "1M",
            "50050.00",
            "0.67 (0.50-1.00)",
            "there is no ucx_perftest; to have it: apt install ucx-utils",
        ] {
            assert!(latency.contains(words), "{words:?} in\n{latency}");
        }
        let stream = sample(Test::PutBw).text();
        for words in ["peak [MiB/s]", "100000.00", "66666.67", "0.0667", "200000.00", "0.333"] {
            assert!(stream.contains(words), "{words:?} in\n{stream}");
        }
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
        assert!(
            text.contains("typical, in us, 8 bytes") && text.contains("typical, in us, 1M bytes"),
            "{text}"
        );
    }
}
