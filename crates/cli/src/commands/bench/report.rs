//! The result of a measurement, and its JSON. Keys are described in `docs/bench-json.md`.

use std::fmt::Write;

use comfy_table::CellAlignment;
use serde::Serialize;
use sidelane::dtype::PartialDtype;
use sidelane::plan::{SumOrder, Traffic};
use sidelane::topology::Route;
use sidelane_testkit::machines::Hosts;
use sidelane_testkit::timing::stats::{Ratio, Summary, ratio_of_medians, summary};

use super::call_baselines::Baselines;
use super::chain::ChainReport;
use super::checked_layer::Verdict;
use super::rank::Nics;
use super::run_settings::{ReceiveKind, RunSettings};
use crate::command_frame;
use crate::table::{self, time, volume};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub config: RunConfig,
    #[serde(flatten)]
    pub verdict: Verdict,
    /// Of the rank that needs most.
    pub required_rows: u32,
    /// Of all ranks.
    pub dropped_choices: u64,
    pub memcpy_gbps: f64,
    pub first_call: FirstCall,
    pub lanes: Lanes,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nics: Option<Nics>,
    pub inter_node: InterNode,
    pub dispatch: Pass,
    pub combine: Pass,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dispatch_backward: Option<Pass>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub combine_backward: Option<Pass>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chain: Option<ChainReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub baselines: Option<Baselines>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunConfig {
    #[serde(flatten)]
    pub config: RunSettings,
    #[serde(flatten)]
    pub hosts: Hosts,
    /// On the machine of rank 0. Read from the mapping: the pages that the kernel granted, not
    /// those that were requested.
    pub huge_pages_granted: bool,
}

/// The first calls of a world: what later ones find touched, they touch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FirstCall {
    pub dispatch_us: f64,
    pub combine_us: f64,
}

/// Which lane the hops took; none where there was no such hop.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Lanes {
    pub intra_node: Option<String>,
    pub inter_node: Option<String>,
    pub inter_node_reason: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Pass {
    #[serde(flatten)]
    pub timing: Summary,
    bytes_landed: u64,
    bytes_inter_node: u64,
    bytes_inter_node_logical: u64,
    gbps: f64,
    floor_us: f64,
    share_of_floor: Ratio,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Volume {
    pub landed: u64,
    pub inter_node: u64,
    /// Bytes that would have crossed with a row for each (token, expert).
    pub inter_node_logical: u64,
}

impl Pass {
    /// From the slowest rank's time of each round, in microseconds, and the floor's of the same
    /// rounds.
    pub fn of_rounds(real_us: &[f64], floor_us: &[f64], volume: Volume) -> Self {
        let timing = summary(real_us);
        Pass {
            timing,
            bytes_landed: volume.landed,
            bytes_inter_node: volume.inter_node,
            bytes_inter_node_logical: volume.inter_node_logical,
            gbps: gbps(volume.landed, timing.p50_us),
            floor_us: summary(floor_us).p50_us,
            share_of_floor: ratio_of_medians(floor_us, real_us),
        }
    }
}

fn gbps(bytes: u64, us: f64) -> f64 {
    bytes as f64 / us / 1e3
}

impl Report {
    pub fn passes(&self) -> Vec<(&'static str, Pass)> {
        let always = [("dispatch", Some(self.dispatch)), ("combine", Some(self.combine))];
        let backward =
            [("dispatch_backward", self.dispatch_backward), ("combine_backward", self.combine_backward)];
        always.into_iter().chain(backward).filter_map(|(name, pass)| Some((name, pass?))).collect()
    }
}

impl command_frame::Report for Report {
    fn text(&self) -> String {
        let verdict = self.verdict.text();
        let room = match self.config.config.receive.mode {
            ReceiveKind::Exact => String::new(),
            _ => format!(
                ", {} choices dropped, {} rows needed at most by a rank",
                self.dropped_choices, self.required_rows
            ),
        };
        let place =
            if self.config.hosts.machines == 1 { "on the same machine" } else { "on all machines together" };
        let FirstCall { dispatch_us, combine_us } = self.first_call;
        let first = format!("first calls: dispatch {}, combine {}", time(dispatch_us), time(combine_us));
        // A slow floor flatters, so the speed of memcpy stands beside it.
        let memcpy = format!(
            "memcpy: {:.1} GB/s {place}, of buffers larger than its caches\n{first}",
            self.memcpy_gbps
        );
        let floor = "of floor: share of the time that bare copies of the bytes take (95% interval)";
        let next = "next: bench --help lists shapes, routes and modes; doctor describes this machine";
        let crossing = self.inter_node.text(&self.config.config).map_or(String::new(), |text| text + "\n\n");
        let chain = self.chain.as_ref().map_or(String::new(), |chain| chain.text() + "\n\n");
        let baselines = self.baselines.as_ref().map_or(String::new(), |baselines| baselines.text() + "\n");
        format!(
            "{}\n{verdict}{room}\n\n{}\n{floor}\n\n{chain}{baselines}{crossing}{memcpy}\n\n{next}",
            conditions(self),
            figures(self)
        )
    }

    fn is_right(&self) -> bool {
        self.verdict.verified && self.baselines.as_ref().is_none_or(Baselines::all_same)
    }
}

fn conditions(report: &Report) -> String {
    let RunConfig { config, hosts, huge_pages_granted } = &report.config;
    let mut lines = Vec::from(config.words());
    lines[0].1 += ", ";
    lines[0].1 += &hosts.text(if *huge_pages_granted { ", huge pages" } else { ", small pages" });
    let Lanes { intra_node, inter_node, inter_node_reason } = &report.lanes;
    let [within, between] = [intra_node, inter_node].map(|lane| lane.as_deref().unwrap_or("none"));
    let reason = table::because(inter_node_reason);
    lines.push(("lanes", format!("within nodes {within}, between nodes {between}{reason}")));
    lines.push(("rounds", config.rounds.to_string()));
    lines.extend(report.nics.as_ref().map(|nics| ("NICs", nics.text())));
    table::head(&lines)
}

fn figures(report: &Report) -> String {
    let slowest = if report.dispatch.timing.p99_us.is_some() { "p99" } else { "max" };
    table::of(
        report.passes(),
        &[
            ("", &|(name, _)| name.replace('_', " ")),
            ("p50", &|(_, pass)| time(pass.timing.p50_us)),
            (slowest, &|(_, pass)| time(pass.timing.p99_us.unwrap_or(pass.timing.max_us))),
            ("landed", &|(_, pass)| volume(pass.bytes_landed)),
            ("crossed", &|(_, pass)| volume(pass.bytes_inter_node)),
            ("GB/s", &|(_, pass)| format!("{:.1}", pass.gbps)),
            ("of floor (95%)", &|(_, pass)| pass.share_of_floor.text(2)),
        ],
    )
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct InterNode {
    /// What crosses, zeros included.
    pub rows: u64,
    /// What would cross with a row for each (token, expert), or for each (token, rank).
    pub expert_rows: u64,
    rank_rows: u64,
    /// Rows that relays copy, zeros included, and the number of copies.
    relay_rows: u64,
    relay_copies: u64,
    /// How many times less crosses; none if nothing does.
    pub dedup: Option<Dedup>,
    /// Bytes that a combine returns, for every sum order and partial type that these rows can have.
    pub combine: Vec<ReturnBytes>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Dedup {
    /// Against a row for each (token, expert).
    pub expert: f64,
    /// Against a row for each (token, rank).
    pub rank: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ReturnBytes {
    pub sum_order: SumOrder,
    /// Type of partial sums; none where there are none.
    pub partial_dtype: Option<PartialDtype>,
    pub bytes: u64,
}

impl InterNode {
    pub fn words(traffic: &Traffic, choices: u64) -> [u64; 7] {
        let Traffic { sent, logical, remote_ranks, remote_nodes, relayed, copies, .. } = *traffic;
        [sent.remote, logical.remote, remote_ranks, remote_nodes, choices, relayed, copies]
    }

    pub fn new(config: &RunSettings, words: [u64; 7]) -> Self {
        let [rows, wanted, rank_rows, remote_nodes, expert_rows, relay_rows, relay_copies] = words;
        let mut all = Traffic::default();
        (all.sent.remote, all.logical.remote) = (rows, wanted);
        (all.remote_ranks, all.remote_nodes) = (rank_rows, remote_nodes);
        (all.combine_row_bytes, all.route) = (config.row_bytes(), config.shape.route);
        let saving = |without: u64| without as f64 / rows as f64;
        let dedup = Dedup { expert: saving(expert_rows), rank: saving(rank_rows) };
        let wires = PartialDtype::ALL.into_iter().filter(|wire| wire.carries(config.shape.dtype.element()));
        let returned = |order, wire: Option<PartialDtype>| {
            let partial_bytes = u64::from(config.shape.hidden) * wire.map_or(0, |wire| wire.size() as u64);
            ReturnBytes {
                sum_order: order,
                partial_dtype: wire,
                bytes: all.return_bytes(order, partial_bytes),
            }
        };
        let combine = SumOrder::ALL.into_iter().flat_map(|order| match order.per_partial((), ()) {
            None => vec![returned(order, None)],
            Some(()) => wires.clone().map(|wire| returned(order, Some(wire))).collect(),
        });
        InterNode {
            rows,
            expert_rows,
            rank_rows,
            relay_rows,
            relay_copies,
            dedup: (rows > 0).then_some(dedup),
            combine: combine.collect(),
        }
    }

    pub fn combine_bytes(&self, config: &RunSettings) -> u64 {
        let measured = self.combine.iter().find(|returned| returned.is_of(config));
        measured.map_or(0, |returned| returned.bytes)
    }

    /// The rows and their savings, and the combine of every order; empty if nothing crosses.
    pub fn text(&self, config: &RunSettings) -> Option<String> {
        let InterNode { rows, expert_rows, rank_rows, .. } = self;
        let Dedup { expert, rank } = self.dedup?;
        let mut text = format!(
            "between nodes: {rows} rows, for {expert_rows} (token, expert) and {rank_rows} (token, rank)\n"
        );
        let _ = writeln!(
            text,
            "dedup {expert:.1}x against a row per (token, expert), {rank:.1}x against one per (token, rank)"
        );
        if config.shape.route == Route::Pxn {
            let (relayed, copies) = (self.relay_rows, self.relay_copies);
            let how = if config.shape.coalesce_relays { "spans" } else { "row by row" };
            let _ = writeln!(text, "relays copy {relayed} rows in {copies} copies ({how})");
        }
        if config.shape.route == Route::Direct {
            let of = if config.shape.layout.is_per_rank() { "rank" } else { "expert" };
            let _ = write!(text, "combine returns a row for each (token, {of}), in every order");
            return Some(text);
        }
        let mut table = table::new(["combine", "partials", "inter-node", "from"]);
        text.push('\n');
        for returned in &self.combine {
            table.add_row([
                returned.sum_order.name(),
                returned.partial_dtype.map_or("-", PartialDtype::name),
                &volume(returned.bytes),
                if returned.is_of(config) { "measured" } else { "arithmetic" },
            ]);
        }
        for column in table.column_iter_mut().skip(2).take(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        Some(text + &table::lines(&table))
    }
}

impl ReturnBytes {
    fn is_of(&self, config: &RunSettings) -> bool {
        (self.sum_order, self.partial_dtype) == (config.shape.sum_order, config.partials())
    }
}

#[cfg(test)]
pub mod tests {
    use sidelane::dtype::PartialDtype;
    use sidelane::plan::SumOrder;
    use sidelane::topology::Route;
    use sidelane::world::NicCounters;

    use super::*;
    use crate::baselines::{BaselinePass, BaselineReport, Unavailable};
    use crate::command_frame::Report as _;
    use crate::command_frame::tests::{assert_page_with, assert_words};
    use crate::commands::bench::call_baselines::Calls;
    use crate::commands::bench::chain;
    use crate::commands::bench::run_settings::Shape;
    use crate::commands::bench::run_settings::tests::resolve;
    use crate::options::RowType;

    #[test]
    fn the_text_holds_conditions_verdict_figures_and_memcpy() {
        let text = sample().text();
        assert_words(
            &text,
            &[
                "8 on 2 nodes (4 + 4), 1 machine, 2 cores, small pages",
                "zipf:1.0, 64 experts, top-8, seed 0",
                "route pxn, layout expert-major, align 1",
                "order node, partials bf16",
                "within nodes shm, between nodes loopback (all nodes on one machine)",
                "verified: 32768 rows bit-exact",
                "6.20 ms",
                "6.40 ms",
                "134.2 MB",
                "33.6 MB",
                "21.6",
                "0.90 (0.90-0.90)",
                "combine backward",
                "dedup 2.0x",
                "memcpy: 9.1 GB/s on the same machine, of buffers larger than its caches\nfirst calls: dispatch 7.30 ms, combine 7.40 ms",
            ],
        );
        assert!(text.lines().last().is_some_and(|last| last.starts_with("next: bench --help")), "{text}");
    }

    #[test]
    fn text_of_a_first_run_fits_a_screen_of_80_columns() {
        let config = RunConfig { config: resolve(""), ..sample().config };
        let (dispatch_backward, combine_backward) = (None, None);
        let first =
            Report { config, dispatch_backward, combine_backward, baselines: None, nics: None, ..sample() };
        let text = first.text();
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line:?} in\n{text}");
        }
    }

    #[test]
    fn a_failed_verification_cannot_be_overlooked() {
        let text = Report { verdict: Verdict { verified: false, rows_verified: 12 }, ..sample() }.text();
        assert!(text.contains("NOT VERIFIED: only 12 rows"), "{text}");
    }

    #[test]
    fn an_order_without_partial_sums_has_no_wire() {
        let mut report = sample();
        report.config.config.shape.sum_order = SumOrder::Expert;
        assert!(report.text().contains("order expert, partials none"));
    }

    #[test]
    fn p99_takes_the_place_of_the_maximum_when_there_is_one() {
        let mut report = Report { chain: None, ..sample() };
        assert!(report.text().contains(" max ") && !report.text().contains("p99"));
        report.dispatch.timing.p99_us = Some(6300.0);
        assert!(report.text().contains("p99") && report.text().contains("6.30 ms"));
    }

    fn config(route: Route, order: SumOrder, dtype: RowType) -> RunSettings {
        let config = sample().config.config;
        let shape = Shape { route, sum_order: order, dtype, hidden: 1000, ..config.shape };
        RunSettings { shape, ..config }
    }

    #[test]
    fn every_order_and_wire_has_its_bytes() {
        let crossing =
            InterNode::new(&config(Route::Pxn, SumOrder::Node, RowType::Bf16), [20, 80, 50, 20, 80, 90, 90]);
        let bytes: Vec<u64> = crossing.combine.iter().map(|returned| returned.bytes / 1000).collect();
        assert_eq!(bytes, [80 * 2, 50 * 4, 50 * 2, 20 * 4, 20 * 2]);
        assert_eq!(crossing.dedup, Some(Dedup { expert: 4.0, rank: 2.5 }));
    }

    #[test]
    fn rows_of_other_types_have_partials_in_f32_alone() {
        let crossing =
            InterNode::new(&config(Route::Pxn, SumOrder::Node, RowType::F16), [20, 80, 50, 20, 80, 90, 90]);
        let wires: Vec<_> = crossing.combine.iter().map(|returned| returned.partial_dtype).collect();
        assert_eq!(wires, [None, Some(PartialDtype::F32), Some(PartialDtype::F32)]);
    }

    #[test]
    fn the_text_marks_what_was_measured() {
        let config = config(Route::Pxn, SumOrder::Node, RowType::Bf16);
        let text = InterNode::new(&config, [20, 80, 50, 20, 80, 90, 90]).text(&config).unwrap();
        assert!(text.contains("20 rows, for 80 (token, expert) and 50 (token, rank)"), "{text}");
        assert!(text.contains("dedup 4.0x against a row per (token, expert), 2.5x against one"), "{text}");
        assert!(text.contains("relays copy 90 rows in 90 copies (row by row)"), "{text}");
        let marked: Vec<&str> = text.lines().filter(|line| line.ends_with("measured")).collect();
        assert_eq!(marked.len(), 1, "{text}");
        assert!(["node", "bf16", "40.0 kB"].iter().all(|word| marked[0].contains(word)), "{text}");
    }

    #[test]
    fn rows_that_go_straight_save_nothing_and_return_as_they_are() {
        let config = config(Route::Direct, SumOrder::Node, RowType::Bf16);
        let crossing = InterNode::new(&config, [80, 80, 50, 20, 80, 0, 0]);
        assert!(crossing.combine.iter().all(|returned| returned.bytes == 80 * 2000));
        let text = crossing.text(&config).unwrap();
        assert!(text.contains("dedup 1.0x against a row per (token, expert), 0.6x against one"), "{text}");
        assert!(text.ends_with("a row for each (token, expert), in every order"), "{text}");
    }

    #[test]
    fn where_nothing_crosses_nothing_is_said() {
        let config = config(Route::Direct, SumOrder::Expert, RowType::Bf16);
        let crossing = InterNode::new(&config, [0; 7]);
        assert_eq!((crossing.dedup, crossing.text(&config)), (None, None));
    }

    /// A report in which every key is present.
    pub fn sample() -> Report {
        let pass = Pass::of_rounds(
            &[6200.0, 6000.0, 6400.0],
            &[5580.0, 5400.0, 5760.0],
            Volume { landed: 134_217_728, inter_node: 33_554_432, inter_node_logical: 67_108_864 },
        );
        let config = resolve(
            "--sum-order node --partial-dtype bf16 --mode budget --budget 1.25 --on-overflow drop --routing zipf:1.0 --backward \
             --rounds 3",
        );
        Report {
            inter_node: InterNode::new(&config, [8192, 16384, 12288, 8192, 16384, 16384, 16384]),
            config: RunConfig { config, hosts: Hosts { machines: 1, cores: 2 }, huge_pages_granted: false },
            verdict: Verdict { verified: true, rows_verified: 32768 },
            required_rows: 6000,
            dropped_choices: 880,
            memcpy_gbps: 9.1,
            first_call: FirstCall { dispatch_us: 7300.0, combine_us: 7400.0 },
            lanes: Lanes {
                intra_node: Some("shm".into()),
                inter_node: Some("loopback".into()),
                inter_node_reason: Some("all nodes on one machine".into()),
            },
            nics: Some(Nics {
                measured: vec![NicCounters {
                    requests: 12,
                    doorbells: 3,
                    packets: 40,
                    ..NicCounters::default()
                }],
                predicted: vec![NicCounters::default()],
                exact: true,
            }),
            dispatch: pass,
            combine: pass,
            dispatch_backward: Some(pass),
            combine_backward: Some(pass),
            chain: Some(chain::tests::sample()),
            baselines: Some(baselines()),
        }
    }

    /// A baseline that ran, and one that did not.
    fn baselines() -> Baselines {
        let pass = BaselinePass::new(&[34_000.0, 30_000.0, 36_000.0], &[6200.0, 6000.0, 6400.0]);
        let (name, version) = ("mpi".to_owned(), "Open MPI v4".to_owned());
        let results = vec![BaselineReport {
            name,
            version,
            bitwise_equal: true,
            calls: Calls { dispatch: pass, combine: pass },
        }];
        let [name, reason, install] = ["gloo", "there is no python3", "pip install torch"].map(str::to_owned);
        Baselines { results, unavailable: vec![Unavailable { name, reason, install }] }
    }

    #[test]
    fn the_document_names_exactly_the_keys_of_the_json() {
        const PASSES: [&str; 4] = ["dispatch", "combine", "dispatch_backward", "combine_backward"];
        assert_page_with("bench-json.md", &[sample()], |key| {
            Some(match key.split_once('.') {
                Some((pass, below)) if PASSES.contains(&pass) => format!("PASS.{below}"),
                Some(("chain", below)) => match below.split_once('.') {
                    Some((figure, percentile)) if figure != "period" => format!("CHAIN.{percentile}"),
                    _ => key.to_owned(),
                },
                _ => key.to_owned(),
            })
        });
    }

    #[test]
    fn without_backward_its_keys_are_absent() {
        let report = Report { dispatch_backward: None, combine_backward: None, ..sample() };
        assert!(!report.json().contains("_backward\":"));
        assert_eq!(
            report.passes().iter().map(|(name, _)| *name).collect::<Vec<_>>(),
            ["dispatch", "combine"]
        );
    }

    #[test]
    fn speed_and_share_follow_from_times_and_bytes() {
        let pass = Pass::of_rounds(
            &[200.0; 5],
            &[100.0; 5],
            Volume { landed: 2_000_000, inter_node: 0, inter_node_logical: 0 },
        );
        assert_eq!(pass.gbps, 10.0);
        assert_eq!(pass.share_of_floor, Ratio { value: 0.5, low: 0.5, high: 0.5 });
        assert_eq!(pass.timing.p99_us, None);
    }
}
