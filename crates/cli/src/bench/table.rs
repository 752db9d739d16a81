//! The report as people read it.

use std::fmt::Write;

use super::peers::Peers;
use super::report::{First, Pass, Report};
use super::room::RoomMode;
use super::words::Words;
use crate::command;
use crate::machines;
use crate::table::{self, time, volume};

impl command::Report for Report {
    /// Conditions, verdict, figures, and the speed of memcpy beside them.
    fn text(&self) -> String {
        let report = self;
        let verdict = match (report.verified, report.rows_verified) {
            (true, rows) => format!("verified: {rows} rows bit-exact"),
            (false, rows) => format!("NOT VERIFIED: only {rows} rows are bit-exact"),
        };
        let room = match report.config.config.room.mode {
            RoomMode::Eager => String::new(),
            _ => format!(
                ", {} choices dropped, {} rows needed at most by a rank",
                report.dropped_choices, report.required_rows
            ),
        };
        let place =
            if report.config.machines == 1 { "on the same machine" } else { "on all machines together" };
        let First { dispatch_us, combine_us } = report.first;
        let first = format!("first calls: dispatch {}, combine {}", time(dispatch_us), time(combine_us));
        let memcpy = format!("memcpy: {:.1} GB/s {place}; {first}", report.memcpy_gbps);
        let crossing =
            report.crossing.text(&report.config.config).map_or(String::new(), |text| text + "\n\n");
        let peers = report.peers.as_ref().map_or(String::new(), |peers| peers.text() + "\n");
        format!("{}\n{verdict}{room}\n\n{}\n\n{peers}{crossing}{memcpy}", conditions(report), figures(report))
    }

    fn is_right(&self) -> bool {
        self.verified && self.peers.as_ref().is_none_or(Peers::all_same)
    }
}

fn conditions(report: &Report) -> String {
    let conditions = &report.config;
    let Words { ranks, rows, routing, schedule } = Words::of(&conditions.config);
    let huge =
        if conditions.huge_pages_granted { "huge pages" } else { "small pages (huge ones not granted)" };
    let host = machines::with_host(conditions.machines, &format!("{} cores, {huge}", conditions.cores));
    let lanes = &report.lanes;
    let lane = |lane: &Option<String>| lane.clone().unwrap_or_else(|| "none".into());
    let reason = lanes.rail_reason.as_ref().map_or(String::new(), |reason| format!(" ({reason})"));
    let cards = report.cards.as_ref().map(|cards| ("cards", cards.text()));
    let lines = [
        ("ranks", format!("{ranks}, {host}")),
        ("rows", rows),
        ("routing", routing),
        ("schedule", schedule),
        ("lanes", format!("local {}, rail {}{reason}", lane(&lanes.local), lane(&lanes.rail))),
        ("rounds", conditions.config.rounds.to_string()),
    ];
    lines.into_iter().chain(cards).fold(String::new(), |mut text, (key, value)| {
        let _ = writeln!(text, "{key:<10}{value}");
        text
    })
}

fn figures(report: &Report) -> String {
    let mut table = table::figures([
        "",
        "p50",
        if report.dispatch.p99_us.is_some() { "p99" } else { "max" },
        "landed",
        "rail",
        "GB/s",
        "floor",
        "floor GB/s",
        "of floor (95%)",
    ]);
    for (name, pass) in report.passes() {
        let Pass { share_of_floor, share_low, share_high, .. } = pass;
        table.add_row([
            name.replace('_', " "),
            time(pass.p50_us),
            time(pass.p99_us.unwrap_or(pass.max_us)),
            volume(pass.bytes_landed),
            volume(pass.bytes_rail),
            format!("{:.1}", pass.gbps),
            time(pass.floor_us),
            format!("{:.1}", pass.floor_gbps()),
            format!("{share_of_floor:.2} ({share_low:.2}-{share_high:.2})"),
        ]);
    }
    table.trim_fmt()
}

#[cfg(test)]
mod tests {
    use sidelane::plan::Order;

    use super::super::report::tests::sample;
    use super::*;
    use crate::command::Report as _;

    #[test]
    fn the_text_holds_conditions_verdict_figures_and_memcpy() {
        let text = sample().text();
        for words in [
            "8 on 2 nodes (4 + 4), 1 machine, 2 cores, small pages",
            "zipf:1.0, 64 experts, top-8, seed 0",
            "route pxn, layout expert-major, order node, wire bf16, align 1",
            "local shm, rail loop (all nodes are on one machine)",
            "verified: 32768 rows bit-exact",
            "6.20 ms",
            "6.40 ms",
            "134.2 MB",
            "33.6 MB",
            "21.6",
            "5.58 ms",
            "0.90 (0.90-0.90)",
            "combine backward",
            "dedup 2.0x",
            "memcpy: 9.1 GB/s on the same machine; first calls: dispatch 7.30 ms, combine 7.40 ms",
        ] {
            assert!(text.contains(words), "{words:?} in\n{text}");
        }
    }

    #[test]
    fn a_failed_verification_cannot_be_overlooked() {
        let text = Report { verified: false, rows_verified: 12, ..sample() }.text();
        assert!(text.contains("NOT VERIFIED: only 12 rows"), "{text}");
    }

    #[test]
    fn an_order_without_partial_sums_has_no_wire() {
        let mut report = sample();
        report.config.config.order = Order::Expert;
        assert!(report.text().contains("order expert, wire none"));
    }

    #[test]
    fn p99_takes_the_place_of_the_maximum_when_there_is_one() {
        let mut report = sample();
        assert!(report.text().contains(" max ") && !report.text().contains("p99"));
        report.dispatch.p99_us = Some(6300.0);
        assert!(report.text().contains("p99") && report.text().contains("6.30 ms"));
    }
}
