//! Every condition of a measurement, resolved: from the command line, from the routing file, or the
//! default.
//!
//! The program resolves once and hands the result to every rank that it starts; ranks of other
//! machines are compared.

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use sidelane::dtype::PartialDtype;
use sidelane::ep::Graphs;
use sidelane::error::PlanError;
use sidelane::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout, Strategy, SumOrder};
use sidelane::topology::{NodeMap, Route};
use sidelane_testkit::ep_settings::{OfDevice, Settings};
use sidelane_verify::reference::{Case, Real, Reference, Row, Tokens};

use crate::commands::launch::{MachineArgs, node_labels, shape_words};
use crate::error::{CliError, usage};
use crate::options::{NodeArgs, RouterArgs, RowArgs, RowType, at_least_one, one_of, word};
use crate::ranks::RankMemory;
use crate::routing_source::{Router, Share, Source};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunSettings {
    pub nodes: u32,
    pub ranks_per_node: Vec<u32>,
    pub tokens: u32,
    pub top_k: u32,
    pub experts: u32,
    #[serde(flatten)]
    pub shape: Shape,
    pub receive: ReceiveConfig,
    pub backward: bool,
    pub chained: bool,
    pub routing: Source,
    pub rounds: u32,
    pub seed: u64,
}

impl RunSettings {
    /// From the command line and the recording or routing file. Without a number of rounds, as many
    /// as take half a minute.
    pub fn resolve(args: &ConditionArgs, backward: bool, rounds: Option<u32>) -> Result<Self, CliError> {
        let ranks_per_node = args.nodes.sizes()?;
        let (routed, share) = args.router.resolve(&args.routing)?;
        let config = RunSettings {
            nodes: ranks_per_node.len() as u32,
            ranks_per_node,
            tokens: share.tokens,
            top_k: share.top_k,
            experts: share.experts,
            shape: Shape {
                hidden: args.row.hidden(),
                dtype: args.row.dtype,
                partial_dtype: args.partial_dtype.unwrap_or(PartialDtype::F32),
                ..args.shape
            },
            receive: ReceiveConfig::default(),
            backward,
            chained: false,
            routing: routed.source.clone(),
            rounds: rounds.unwrap_or(0),
            seed: share.seed,
        };
        if args.partial_dtype.is_some() && config.partials().is_none() {
            return Err(usage!("--partial-dtype has no effect here: it is for --sum-order rank or node"));
        }
        if config.nodes == 1 && args.machines.net.is_some() {
            return Err(usage!("--net has no effect here: all ranks are on one node"));
        }
        config.check(rounds)?;
        config.fits_in_memory(&args.machines)?;
        routed.note_repeats(config.ranks(), share);
        let rounds = rounds.unwrap_or_else(|| config.rounds_in_budget());
        let receive = ReceiveConfig::resolve(args, &config, &routed.router)?;
        if config.shape.strategy == Strategy::AllGather && receive.mode().slots().is_some() {
            return Err(usage!("--mode slots is for --strategy all-to-all"));
        }
        let config = RunSettings { rounds, receive, ..config };
        config.fits_in_memory(&args.machines)?;
        Ok(config)
    }

    /// Refuses what fits in no memory, regardless of the heaps, before routing is drawn.
    fn fits_in_memory(&self, machines: &MachineArgs) -> Result<(), CliError> {
        self.memory(0).fits(&self.ranks_per_node, machines)
    }

    /// Memory that each rank takes, with a heap of this size.
    pub fn memory(&self, heap: u64) -> RankMemory {
        // Each rank knows the choices and the tokens of all.
        let tokens = u64::from(self.ranks()) * u64::from(self.tokens);
        let other = self.reference_bytes().saturating_add(tokens.saturating_mul(self.row_bytes()));
        RankMemory { heap, other, options: SIZE_OPTIONS }
    }

    /// Bytes of a [`Reference`], at least: choices and, of all ranks, unused slots and padded rows.
    fn reference_bytes(&self) -> u64 {
        const CHOICE: u64 = 128;
        const ROW: u64 = size_of::<Option<Row>>() as u64;
        let (ranks, experts) = (u64::from(self.ranks()), u64::from(self.experts));
        let bins = if self.shape.layout == RowLayout::ExpertMajor { experts } else { ranks };
        let slots = self.receive.mode().slots().map_or(0, |slots| ranks.saturating_mul(slots.into()));
        let rows = bins.saturating_mul(slots.saturating_add(self.shape.align.into()));
        let choices = ranks.saturating_mul(u64::from(self.tokens) * u64::from(self.top_k));
        choices.saturating_mul(CHOICE).saturating_add(rows.saturating_mul(ROW))
    }

    fn check(&self, rounds: Option<u32>) -> Result<(), CliError> {
        const UNIT: u64 = 16;
        at_least_one(&[
            ("--hidden", self.shape.hidden),
            ("--align", self.shape.align),
            ("--rounds", rounds.unwrap_or(1)),
        ])?;
        let RunSettings { top_k, experts, shape, .. } = *self;
        let Shape { hidden, partial_dtype: wire, layout, route, coalesce_relays, .. } = shape;
        let (dtype, bytes) = (shape.dtype.element(), self.row_bytes());
        if !bytes.is_multiple_of(UNIT) {
            return Err(usage!(
                "a row of {hidden} x {dtype} has {bytes} bytes: it must be a multiple of {UNIT}"
            ));
        }
        if top_k > experts {
            return Err(usage!("--top-k is {top_k}, but there are only {experts} experts"));
        }
        if !wire.carries(dtype) {
            return Err(usage!("--partial-dtype {wire} is for rows of {wire}, and these are {dtype}"));
        }
        if coalesce_relays && (layout, route) != (RowLayout::RankMajor, Route::Pxn) {
            return Err(usage!("--coalesce-relays is for --layout rank-major --route pxn"));
        }
        if coalesce_relays && shape.strategy == Strategy::AllGather {
            return Err(usage!("--coalesce-relays is for --strategy all-to-all"));
        }
        Ok(())
    }

    pub fn check_baselines(&self) -> Result<(), CliError> {
        usual(
            &[
                ("--dtype", self.shape.dtype == RowType::Bf16),
                ("--layout", self.shape.layout == RowLayout::ExpertMajor),
                ("--sum-order", self.shape.sum_order == SumOrder::Expert),
                ("--mode", self.receive.mode == ReceiveKind::Exact),
                ("--align", self.shape.align == 1),
            ],
            "--baselines: they move bf16 rows by expert, as many as there are, and add them up by expert",
        )?;
        let (experts, ranks) = (self.experts, self.ranks());
        if experts.is_multiple_of(ranks) {
            Ok(())
        } else {
            Err(usage!(
                "--baselines need a number of experts that {ranks} ranks can share evenly, not {experts}"
            ))
        }
    }

    pub fn check_chained(&self) -> Result<(), CliError> {
        let returns = self.shape.dtype != RowType::Fp8;
        usual(&[("--dtype fp8", returns)], "--chained: what returns is bf16, and no record to send next")
    }

    pub fn check_collectivex(&self) -> Result<(), CliError> {
        usual(
            &[
                ("--dtype", self.shape.dtype == RowType::Bf16),
                ("--on-overflow drop", self.receive.overflow != Some(Overflow::Drop)),
                (
                    "--ranks-per-node",
                    self.ranks_per_node.iter().all(|ranks| *ranks == self.ranks_per_node[0]),
                ),
            ],
            "--collectivex: its cases move all rows, in bf16, between nodes of equal size",
        )
    }

    pub fn ranks(&self) -> u32 {
        self.ranks_per_node.iter().sum()
    }

    /// The same words wherever conditions are shown: ranks; what each brings; where it goes; by
    /// which way, and into how much memory; how combine adds.
    pub fn words(&self) -> [(&'static str, String); 5] {
        let RunSettings { tokens, routing, experts, top_k, seed, shape, .. } = self;
        let Shape { hidden, dtype, align, layout, route, sum_order, .. } = shape;
        let gathers = if shape.strategy == Strategy::AllGather { "all-gather, " } else { "" };
        let spans = if shape.coalesce_relays { " in spans" } else { "" };
        let route = if self.nodes == 1 { "-" } else { route.name() };
        let (layout, receive) = (layout.name(), self.receive.words());
        let (order, wire) = (sum_order.name(), self.partials().map_or("none", PartialDtype::name));
        [
            ("ranks", shape_words(&self.ranks_per_node)),
            ("rows", format!("{tokens} tokens per rank, hidden {hidden}, {}", dtype.name())),
            ("routing", format!("{routing}, {experts} experts, top-{top_k}, seed {seed}")),
            ("schedule", format!("{gathers}route {route}{spans}, layout {layout}, align {align}, {receive}")),
            ("sums", format!("order {order}, partials {wire}")),
        ]
    }

    pub fn share(&self) -> Share {
        Share { experts: self.experts, top_k: self.top_k, tokens: self.tokens, seed: self.seed }
    }

    /// The calls of a measurement, as all ranks together see them.
    pub fn reference<E: Real>(&self, router: &Router) -> Result<Reference<E>, CliError> {
        let tokens = |rank| {
            let routing = router.routing(self.share(), rank)?;
            let (ids, weights) = (routing.experts().to_vec(), routing.weights().to_vec());
            Ok(Tokens { x: Vec::new(), ids, weights })
        };
        let all = (0..self.ranks()).map(tokens).collect::<Result<_, CliError>>()?;
        Ok(Reference::of(&self.settings()?.case, all))
    }

    pub fn settings(&self) -> Result<Settings, PlanError> {
        let shape = &self.shape;
        let nodes: Vec<u32> = node_labels(&self.ranks_per_node).into_iter().map(|node| node as u32).collect();
        let counts = vec![self.tokens; nodes.len()];
        let case = Case {
            map: ExpertMap::contiguous(self.experts, self.ranks())?,
            hidden: shape.hidden as usize,
            align: shape.align,
            layout: shape.layout,
            mode: self.receive.mode(),
            route: shape.route,
            order: shape.sum_order,
            wire: shape.partial_dtype,
            spans: shape.coalesce_relays,
            strategy: shape.strategy,
            ..Case::new(&nodes, &counts, self.experts, self.top_k)
        };
        let (dtype, fp8) = (shape.dtype.element(), shape.dtype == RowType::Fp8);
        let device = OfDevice::default();
        Ok(Settings { case, dtype, max_tokens: self.tokens, fp8, graphs: Graphs::Off, device })
    }

    pub fn node_map(&self) -> NodeMap {
        NodeMap::from_labels(&node_labels(&self.ranks_per_node))
    }

    /// Type of partial sums, if the order of addition makes some.
    pub fn partials(&self) -> Option<PartialDtype> {
        (self.shape.sum_order != SumOrder::Expert).then_some(self.shape.partial_dtype)
    }

    pub fn row_bytes(&self) -> u64 {
        self.shape.dtype.bytes(self.shape.hidden).1
    }

    pub fn sent_bytes(&self) -> u64 {
        self.shape.dtype.bytes(self.shape.hidden).0
    }

    /// As many rounds as take about half a minute on a slow laptop, at most enough for a p99,
    /// rounded down to one digit. A function of the conditions alone: the same command runs the
    /// same rounds everywhere.
    fn rounds_in_budget(&self) -> u32 {
        const BUDGET_BYTES: u64 = 200_000_000_000;
        let passes = if self.backward { 8 } else { 4 };
        let rows = u64::from(self.ranks()) * u64::from(self.tokens) * u64::from(self.top_k);
        let bytes = rows.saturating_mul(self.row_bytes()).saturating_mul(passes);
        let rounds = (BUDGET_BYTES / bytes.max(1)).clamp(10, 1000) as u32;
        let digit = 10u32.pow(rounds.ilog10());
        rounds / digit * digit
    }
}

/// Refuses the first option that is not as it usually is.
fn usual(options: &[(&str, bool)], what: &str) -> Result<(), CliError> {
    let unusual = options.iter().find(|(_, usual)| !usual);
    unusual.map_or(Ok(()), |(option, _)| Err(usage!("{option} is not for {what}")))
}

/// Options that change the memory of a measurement.
const SIZE_OPTIONS: &str = "--tokens, --top-k, --hidden, --experts, --align, --slots or the number of ranks";

/// What dispatches and combines are made of.
#[derive(Args)]
pub struct ConditionArgs {
    #[command(flatten)]
    pub nodes: NodeArgs<2, 4>,

    #[command(flatten)]
    pub router: RouterArgs<512>,

    #[command(flatten)]
    pub row: RowArgs<2048>,

    #[command(flatten)]
    pub shape: Shape,

    /// Type of partial sums, for --sum-order rank or node [default: f32]
    #[arg(long, value_parser = one_of(PartialDtype::ALL, PartialDtype::name))]
    partial_dtype: Option<PartialDtype>,

    /// How receive memory is sized
    #[arg(long, value_enum, default_value_t)]
    pub mode: ReceiveKind,

    /// Budget of received rows: this factor times tokens x top-k or, rank-major, times the (token,
    /// rank) rows that a rank receives on average
    #[arg(long, value_name = "FACTOR", required_if_eq("mode", "budget"))]
    pub budget: Option<f64>,

    /// Slots of each source for each expert or, rank-major, for each rank [default: the routing's
    /// largest need]
    #[arg(long, value_name = "N")]
    pub slots: Option<u32>,

    /// Treatment of rows beyond budget or slots [default: error]
    #[arg(long, value_parser = one_of([Overflow::Drop, Overflow::Error], overflow))]
    on_overflow: Option<Overflow>,

    /// recorded (a trained router's decisions, 64 experts, top-8), uniform, zipf:S, incast, or a
    /// file of JSON lines with topk_ids and topk_weights [default: recorded; zipf:1.0 if --experts
    /// or --top-k differ from it]
    #[arg(long, value_name = "recorded|PATTERN|FILE")]
    pub routing: Option<Source>,

    #[command(flatten)]
    pub machines: MachineArgs,
}

/// Shape of the rows, and how they are sent, laid out and summed.
#[derive(Args, Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shape {
    #[arg(skip)]
    pub hidden: u32,

    #[arg(skip = RowType::Bf16)]
    pub dtype: RowType,

    /// Summation order of combine: by expert, or partial sums per rank or per node first, which
    /// cross in place of rows
    #[arg(long, default_value = "expert", value_parser = one_of(SumOrder::ALL, SumOrder::name))]
    pub sum_order: SumOrder,

    #[arg(skip = PartialDtype::F32)]
    pub partial_dtype: PartialDtype,

    /// Order of the received rows: a row for each expert, by expert; or one row for all experts of
    /// a rank, by source
    #[arg(long, default_value = "expert-major", value_parser = one_of(RowLayout::ALL, RowLayout::name))]
    pub layout: RowLayout,

    /// Route of rows to other nodes: direct, a row for each expert; or pxn, one row for each node,
    /// which a rank there relays
    #[arg(long, default_value = "pxn", value_parser = one_of(Route::ALL, Route::name))]
    pub route: Route,

    /// Let relays copy spans of rows instead of single rows, as a copy engine would: for --layout
    /// rank-major --route pxn
    #[arg(long)]
    pub coalesce_relays: bool,

    /// Dispatch algorithm: send each row to its chosen ranks, or every token to every rank, which
    /// copies the rows of its experts
    #[arg(long, default_value = "all-to-all", value_parser = one_of(Strategy::ALL, Strategy::name))]
    pub strategy: Strategy,

    /// Start and pad the rows of each expert to a multiple of this many rows
    #[arg(long, value_name = "ROWS", default_value_t = 1)]
    pub align: u32,
}

fn overflow(what: Overflow) -> &'static str {
    if what == Overflow::Drop { "drop" } else { "error" }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReceiveKind {
    /// As much as a call needs
    #[default]
    Exact,
    /// At most --budget
    Budget,
    /// Fixed slots for each source, and no counts are exchanged
    Slots,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReceiveConfig {
    pub mode: ReceiveKind,
    /// Limit on received rows, relative to the average.
    pub budget: Option<f64>,
    /// That in rows, or the slots of each source.
    pub rows: Option<u32>,
    pub overflow: Option<Overflow>,
}

impl ReceiveConfig {
    /// From the command line and the needs of the routing.
    ///
    /// # Errors
    /// Options of another mode; too little room for the routing, unless excess rows are dropped.
    pub fn resolve(args: &ConditionArgs, config: &RunSettings, router: &Router) -> Result<Self, CliError> {
        for (option, given, mode) in [
            ("--budget", args.budget.is_some(), ReceiveKind::Budget),
            ("--slots", args.slots.is_some(), ReceiveKind::Slots),
        ] {
            if given && args.mode != mode {
                return Err(usage!("{option} is for --mode {}", word(&mode)));
            }
        }
        if args.mode == ReceiveKind::Exact {
            let other = usage!("--on-overflow is for --mode budget or slots");
            return if args.on_overflow.is_some() { Err(other) } else { Ok(ReceiveConfig::default()) };
        }
        let needs = config.reference(router)?;
        let overflow = args.on_overflow.unwrap_or_default();
        let sized = match args.mode {
            ReceiveKind::Slots => Self::slots(args.slots, overflow, &needs)?,
            _ => Self::budget(args.budget.unwrap_or(1.0), overflow, config, &needs)?,
        };
        Ok(ReceiveConfig { mode: args.mode, overflow: Some(overflow), ..sized })
    }

    fn slots(asked: Option<u32>, overflow: Overflow, needs: &Reference<f32>) -> Result<Self, CliError> {
        let most = needs.most_slots();
        let slots = asked.unwrap_or(most.max(1));
        at_least_one(&[("--slots", slots)])?;
        if most > slots && overflow == Overflow::Error {
            return Err(usage!(
                "--slots {slots} are too few: --slots {most} has room for all, or let rows be dropped with --on-overflow drop"
            ));
        }
        Ok(ReceiveConfig { rows: Some(slots), ..ReceiveConfig::default() })
    }

    fn budget(
        factor: f64,
        overflow: Overflow,
        config: &RunSettings,
        needs: &Reference<f32>,
    ) -> Result<Self, CliError> {
        if !(factor.is_finite() && factor > 0.0) {
            return Err(usage!("--budget {factor} is not a positive number"));
        }
        let all = needs.seen.rows.iter().flatten().flatten().count();
        let mean = match config.shape.layout.is_per_rank() {
            true => all as f64 / f64::from(config.ranks()),
            false => f64::from(config.tokens) * f64::from(config.top_k),
        };
        let rows = (factor * mean).ceil() as u32;
        let worst = (0..).zip(needs.seen.required.iter().copied()).max_by_key(|&(_, required)| required);
        if let (Some((rank, required)), Overflow::Error) = (worst, overflow)
            && required > rows
        {
            let enough = (f64::from(required) / mean * 100.0).ceil() / 100.0;
            return Err(usage!(
                "--budget {factor} is {rows} rows, but rank {rank} needs {required}: --budget {enough} has room for all, or let rows be dropped with --on-overflow drop"
            ));
        }
        Ok(ReceiveConfig { budget: Some(factor), rows: Some(rows), ..ReceiveConfig::default() })
    }

    pub fn mode(self) -> ReceiveMode {
        let (rows, overflow) = (self.rows.unwrap_or(0), self.overflow.unwrap_or_default());
        match self.mode {
            ReceiveKind::Exact => ReceiveMode::Exact,
            ReceiveKind::Budget => ReceiveMode::Budget { rows, overflow },
            ReceiveKind::Slots => ReceiveMode::Slots { rows, overflow },
        }
    }

    pub fn words(self) -> String {
        let rows = self.rows.unwrap_or(0);
        let overflow = match self.overflow {
            Some(Overflow::Drop) => ", more is dropped",
            _ => "",
        };
        match (self.mode, self.budget) {
            (ReceiveKind::Exact, _) => "exact".to_owned(),
            (ReceiveKind::Budget, factor) => {
                format!("budget {} ({rows} rows per rank{overflow})", factor.unwrap_or(0.0))
            }
            (ReceiveKind::Slots, _) => format!("slots ({rows} per source and bin{overflow})"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Dispatch,
    Combine,
    DispatchBackward,
    CombineBackward,
}

impl Kind {
    /// The timed calls, in phases: the calls of one share a place for rows, which may be of another
    /// type in the next.
    pub fn phases(backward: bool) -> &'static [[Kind; 2]] {
        const ALL: [[Kind; 2]; 2] =
            [[Kind::Dispatch, Kind::Combine], [Kind::DispatchBackward, Kind::CombineBackward]];
        if backward { &ALL } else { &ALL[..1] }
    }

    /// Whether rows are summed; otherwise they are scattered.
    pub fn sums(self) -> bool {
        matches!(self, Kind::Combine | Kind::DispatchBackward)
    }
}

#[cfg(test)]
pub mod tests {
    use sidelane::plan::{Overflow, ReceiveMode};
    use tempfile::NamedTempFile;

    use super::*;
    use crate::command_frame::tests::{assert_words, parsed};
    use crate::commands::bench::BenchArgs;
    use crate::routing_source::Router;

    #[test]
    fn the_main_job_needs_no_options() {
        let args = parsed::<BenchArgs>("").unwrap().conditions;
        assert_eq!((args.nodes.nodes, args.nodes.ranks_per_node.len(), args.router.tokens), (None, 0, None));
        assert_eq!(
            (args.shape.route, args.shape.sum_order, args.shape.partial_dtype),
            (Route::Pxn, SumOrder::Expert, PartialDtype::F32)
        );
        assert_eq!((args.row.hidden(), args.row.dtype, args.routing), (2048, RowType::Bf16, None));
    }

    pub fn resolve(words: &str) -> RunSettings {
        let args: BenchArgs = parsed(words).unwrap();
        RunSettings::resolve(&args.conditions, args.backward, args.rounds).unwrap()
    }

    /// A routing file of four experts, top-2.
    fn file(meta: bool) -> NamedTempFile {
        let file = NamedTempFile::new().unwrap();
        let meta = if meta { "{\"type\":\"meta\",\"num_experts\":4,\"top_k\":2}\n" } else { "" };
        let token = "{\"topk_ids\":[3,0],\"topk_weights\":[0.5,0.5]}\n";
        std::fs::write(&file, format!("{meta}{token}")).unwrap();
        file
    }

    fn resolve_file(file: &NamedTempFile, words: &str) -> RunSettings {
        resolve(&format!("--routing {} {words}", file.path().display()))
    }

    #[test]
    fn the_main_job_is_two_nodes_of_four_ranks_and_recorded_routing() {
        let config = resolve("");
        assert_eq!(config.routing, Source::Recorded);
        assert_eq!((config.ranks_per_node.as_slice(), config.experts, config.top_k), (&[4, 4][..], 64, 8));
        assert_eq!(config.row_bytes(), 4096);
        assert_eq!(config.rounds, 300);
    }

    #[test]
    fn nodes_are_as_given_or_listed_with_four_ranks_each_by_default() {
        for (words, sizes) in [
            ("--nodes 3", &[4, 4, 4][..]),
            ("--nodes 1", &[4]),
            ("--ranks-per-node 8", &[8]),
            ("--ranks-per-node 3,5", &[3, 5]),
            ("--nodes 2 --ranks-per-node 8", &[8, 8]),
        ] {
            let config = resolve(words);
            assert_eq!(
                (config.nodes as usize, config.ranks_per_node.as_slice()),
                (sizes.len(), sizes),
                "{words}"
            );
        }
        let nodes = resolve("--ranks-per-node 1,2").node_map();
        assert_eq!((nodes.members(0), nodes.members(1)), (&[0][..], &[1, 2][..]));
    }

    #[test]
    fn partial_sums_have_a_type_where_the_order_makes_some() {
        for (words, partials) in [
            ("", None),
            ("--sum-order rank", Some(PartialDtype::F32)),
            ("--sum-order node --partial-dtype bf16", Some(PartialDtype::Bf16)),
        ] {
            assert_eq!(resolve(words).partials(), partials, "{words}");
        }
    }

    #[test]
    fn route_is_told_where_there_is_one() {
        for (words, route) in
            [("", "route pxn,"), ("--route direct", "route direct,"), ("--ranks-per-node 4", "route -,")]
        {
            let schedule = &resolve(words).words()[3].1;
            assert!(schedule.contains(route), "{words}: {schedule}");
        }
    }

    #[test]
    fn tokens_beyond_the_machine_are_refused_before_routing_is_drawn() {
        let args: BenchArgs = parsed("--tokens 65536 --top-k 1 --hidden 1048576").unwrap();
        let refused = RunSettings::resolve(&args.conditions, false, None).unwrap_err().to_string();
        assert!(refused.contains("available: lower --tokens"), "{refused}");
    }

    #[test]
    fn default_rounds_suffice_for_p99_if_small_and_end_in_time() {
        assert_eq!(resolve("--tokens 64").rounds, 1000);
        assert_eq!(resolve("--tokens 512 --top-k 64 --hidden 7168").rounds, 10);
        assert_eq!(resolve("--backward").rounds, 100);
        assert_eq!(resolve("--rounds 7").rounds, 7);
    }

    #[test]
    fn the_routing_file_decides_what_no_option_says() {
        let file = file(true);
        let config = resolve_file(&file, "");
        assert_eq!((config.experts, config.top_k), (4, 2));
        assert_eq!(resolve_file(&file, "--experts 4 --top-k 2"), config);
    }

    #[test]
    fn another_shape_without_a_routing_is_drawn() {
        for (words, experts, top_k) in [("--experts 32", 32, 8), ("--top-k 4", 64, 4)] {
            let config = resolve(words);
            assert_eq!(config.routing, "zipf:1.0".parse().unwrap(), "{words}");
            assert_eq!((config.experts, config.top_k), (experts, top_k));
        }
        assert_eq!(resolve("--experts 64 --top-k 8").routing, Source::Recorded);
    }

    #[test]
    fn routing_file_without_meta_has_experts_of_option_or_default() {
        let file = file(false);
        assert_eq!(resolve_file(&file, "").experts, 64);
        assert_eq!(resolve_file(&file, "--experts 5").experts, 5);
    }

    #[test]
    fn a_configuration_survives_the_way_to_a_rank() {
        let config =
            resolve("--nodes 2 --ranks-per-node 3,5 --sum-order node --partial-dtype bf16 --routing incast");
        let json = serde_json::to_string(&config).unwrap();
        assert_words(
            &json,
            &[
                r#""layout":"expert-major""#,
                r#""route":"pxn""#,
                r#""sum_order":"node""#,
                r#""partial_dtype":"bf16""#,
            ],
        );
        assert_eq!(serde_json::from_str::<RunSettings>(&json).unwrap(), config);
    }

    #[test]
    fn ranks_of_one_file_read_on_where_the_last_one_ended() {
        let file = file(true);
        let config = resolve_file(&file, "--tokens 3");
        let router = Router::open(&config.routing).unwrap();
        let routing = router.routing(config.share(), 1).unwrap();
        assert_eq!((routing.tokens(), routing.experts_of(2)), (3, &[3, 0][..]));
    }

    #[test]
    fn room_is_resolved_to_rows_by_what_the_routing_needs() {
        let room = |words: &str| resolve(&format!("--tokens 16 --routing incast {words}")).receive;
        assert_eq!(room(""), ReceiveConfig::default());
        let budget = room("--mode budget --budget 0.5 --on-overflow drop");
        assert_eq!(
            (budget.rows, budget.mode()),
            (Some(64), ReceiveMode::Budget { rows: 64, overflow: Overflow::Drop })
        );
        // All tokens go to the eight experts of rank 0.
        assert_eq!(room("--mode slots").mode(), ReceiveMode::Slots { rows: 16, overflow: Overflow::Error });
        let rank_major = room("--layout rank-major --mode budget --budget 8");
        assert_eq!(rank_major.rows, Some(8 * 16), "one row per token, an eighth of all on average");
    }
}
