//! Every single bug planted in the real schedules is found, or is listed here with the reason why
//! it is harmless.

use std::collections::BTreeMap;

use sidelane_core::error::CallKind;
use sidelane_core::plan::{ReceiveMode, RowLayout, SumOrder};
use sidelane_core::schedule::{Flag, FlagValue, Op};
use sidelane_core::topology::{Paths, Route};
use sidelane_verify::mutate::{Change, Mutation, mutations};
use sidelane_verify::prove::{AccessKind, MutantProver, ProofFailure, prove};
use sidelane_verify::random_check::check;
use sidelane_verify::unroll::{Relays, SeededBug, TokenPlace, UnrolledProgram};

use crate::cases::{cases, sample};
use crate::groups::{Group, ROWS, dispatch, enqueued_rounds, gathering_rounds, ret, rounds, rounds_of, ways};

/// A mutation, and what its harm depends on.
struct Mutant<'a> {
    mutation: Mutation,
    paths: Paths<'a>,
    /// The relay runs in its rank's own thread.
    inline: bool,
    /// The operation moves bytes in such calls.
    moves: bool,
    /// Engines move rows.
    engines: bool,
    /// Callers' threads enqueue, and run ahead of their streams.
    ahead: bool,
    /// Where tokens lie.
    tokens: TokenPlace,
    /// Dispatches pack rows when these have places.
    packs_later: bool,
}

impl<'a> Mutant<'a> {
    fn new(mutation: Mutation, group: &'a Group, unrolled: &UnrolledProgram) -> Self {
        let paths = Paths::new(&group.nodes, group.route, mutation.rank);
        let (moves, engines) = (mutation.moves(unrolled), group.pulls);
        Mutant {
            moves,
            engines,
            ahead: group.enqueues,
            tokens: group.tokens,
            packs_later: group.packs_later(),
            mutation,
            paths,
            inline: group.relays == Relays::Inline,
        }
    }

    /// Reason why it is unobservable; `None` if it must be found.
    fn harmless(&self) -> Option<&'static str> {
        let Mutation { item, other, change, .. } = self.mutation;
        match (change, item.op, other) {
            (_, Op::Put { .. } | Op::PutRows { .. }, _) if !self.moves => {
                Some("it moves nothing in such calls")
            }
            (Change::Swap, op, Some(next)) => self.swapped(op, next),
            (_, Op::Signal { .. }, _) => self.signalled(item.op),
            (_, Op::Wait { from, flag, .. }, _) => self.not_awaited(from, flag),
            _ => None,
        }
    }

    /// The word orders streams of its rank.
    fn of_streams(&self) -> bool {
        ["packed", "order", "follow", "mark", "join"].contains(&self.mutation.stage)
    }

    /// How often such calls record the event of its word. Rows are packed in two steps of a
    /// dispatch, if some have to wait. Where engines relay, the stream of copies says by the event
    /// of its end that it has brought their order, too.
    fn records(&self) -> u8 {
        let twice = match self.mutation.stage {
            "packed" => self.packs_later && self.mutation.kind == CallKind::Dispatch,
            "order" | "join" => self.orders(),
            _ => false,
        };
        if twice { 2 } else { 1 }
    }

    /// Rows of such calls were written before the call, and leave from where they lie.
    fn as_they_lie(&self) -> bool {
        self.tokens == TokenPlace::InRuns && self.mutation.kind == CallKind::Dispatch
    }

    /// In such calls the host finds the order of rows, and where they arrive, from headers that
    /// relays of its node have.
    fn orders(&self) -> bool {
        let relays = self.paths.is_multi_node() && self.paths.route() == Route::Pxn;
        self.ahead && relays && self.mutation.kind == CallKind::Dispatch
    }

    fn swapped(&self, op: Op, next: Op) -> Option<&'static str> {
        let me = self.mutation.rank;
        match (op, next) {
            (Op::Reduce { .. }, Op::Reduce { .. }) => Some("two reads in either order"),
            (Op::Put { .. } | Op::PutRows { .. }, Op::PutRows { .. }) => Some("two puts in either order"),
            (Op::Put { .. }, Op::Reduce { .. }) => Some("the next part is summed elsewhere"),
            (Op::PutRows { to: a, .. }, Op::Signal { to: b, .. }) if a != b => {
                Some("the signal is for another rank than the rows")
            }
            (Op::PutRows { .. }, Op::Signal { to, .. }) if to == me => Some(ITS_RELAY_SAYS_SO),
            (Op::PutRows { .. }, Op::Wait { .. }) => Some(WAITS_FIRST),
            (Op::Signal { to, .. }, Op::Wait { .. }) if to != me => Some(WAITS_FIRST),
            (Op::Signal { to: a, .. }, Op::Signal { to: b, .. }) if a != b => {
                Some("two words of two ranks, each still behind what it guards")
            }
            (Op::Signal { .. }, Op::PutRows { .. }) => Some("the signal is later"),
            _ => None,
        }
    }

    fn signalled(&self, op: Op) -> Option<&'static str> {
        let Op::Signal { to, flag, level, .. } = op else { return None };
        let (me, change) = (self.mutation.rank, self.mutation.change);
        let parts = self.paths.route() == Route::Pxn && self.mutation.stage == "rows";
        match (flag, change) {
            (Flag::Posted, Change::Raise)
                if self.of_streams() && level == FlagValue::Part(self.records()) =>
            {
                Some("no stream waits for a later record of the event")
            }
            (Flag::Posted, Change::Drop | Change::Lower)
                if self.mutation.stage == "follow" && self.mutation.kind == CallKind::Combine =>
            {
                Some("no NIC reads rows that were packed in such calls")
            }
            (Flag::Posted, Change::Drop | Change::Lower)
                if self.mutation.stage == "order" && self.as_they_lie() =>
            {
                Some("own rows wait for the next record, which is later; a lost event is a wait left out")
            }
            (Flag::Block, Change::Drop) if parts && level != FlagValue::Part(crate::groups::CHUNKS) => {
                Some("the next part says it too")
            }
            (Flag::Block, Change::Raise) if level == FlagValue::Part(crate::groups::CHUNKS) => {
                Some("nobody waits for a part behind the last")
            }
            (Flag::Landed, Change::First) if to == me => Some(ITS_RELAY_SAYS_SO),
            (Flag::Read, Change::Retrack) if self.mutation.stage == "pull rest" => {
                Some("what it vouches for was read in an earlier stage")
            }
            (Flag::Ready, Change::Retrack) if self.mutation.stage == "ready" => {
                Some("its stream has done all that was before")
            }
            (Flag::Read, Change::Raise) if self.ahead && !self.paths.is_multi_node() => {
                Some(ANOTHER_RELEASES)
            }
            // Where callers' threads enqueue, calls along a layout raise the same word.
            (Flag::Landed, Change::Raise | Change::Retrack) if to == me && self.engines && !self.ahead => {
                Some(ITS_RELAY_SAYS_SO)
            }
            _ => None,
        }
    }

    fn not_awaited(&self, from: u32, flag: Flag) -> Option<&'static str> {
        let (Mutation { rank: me, kind, stage, item, change, .. }, paths) = (self.mutation, self.paths);
        let (sends, all) = (kind != CallKind::Combine, change == Change::DropWaits);
        let first = matches!(item.op, Op::Wait { level: FlagValue::Part(1), .. });
        let relayed = |s: u32| paths.route() == Route::Pxn && paths.sources().any(|source| source == s);
        match (flag, stage) {
            (Flag::Posted, "posted") if !self.orders() => Some(FOR_CAUSES),
            (Flag::Posted, "join") if kind == CallKind::ExpertMap => Some("nothing moves in such calls"),
            (Flag::Posted, _) if change == Change::Lower && self.of_streams() && first => {
                Some(RECORDED_FIRST)
            }
            (Flag::Posted, "follow" | "mark")
                if paths.is_multi_node() && kind != CallKind::Dispatch || self.as_they_lie() =>
            {
                Some("its host has awaited the caller's stream before it enqueues copies")
            }
            (Flag::Read, "release") if self.ahead => Some(ANOTHER_RELEASES),
            (Flag::Ready, "reached") if kind == CallKind::ExpertMap && paths.is_multi_node() => {
                Some("calls that take memory await their stream")
            }
            (Flag::Ready, "reached") if kind == CallKind::ExpertMap && change == Change::Late => {
                Some("memory is taken in the calls that follow")
            }
            (Flag::Read, _) if sends => Some(
                "whoever writes in a dispatch has heard the entry of every rank, sent after its last sum",
            ),
            (Flag::Block, "headers") if kind == CallKind::CachedDispatch => {
                Some("no header comes in such calls, and parts are awaited by themselves")
            }
            (Flag::Block, "node entered")
                if self.inline && (!all || paths.local_peers().next().is_none()) =>
            {
                Some("its caller's thread is its own")
            }
            (Flag::Entry, "all entered") if self.inline => {
                Some("its rank waits for the same in the same thread, before it judges")
            }
            (Flag::Entry, "entry" | "offer") if self.inline && paths.is_multi_node() => {
                Some("its relay has waited in the same thread")
            }
            (Flag::Entry, "entry" | "offer") if paths.is_multi_node() && from != me && !all => {
                Some("its relay waits for the same before it answers")
            }
            (Flag::Entry, "entry" | "offer") if from == me && change == Change::Late => {
                Some("only after a call that is refused may its relay be left behind")
            }
            (Flag::Entry, "entry" | "offer")
                if from == me && change == Change::Lower && paths.local_peers().next().is_none() =>
            {
                Some("alone on its node, a relay that is one call behind reads its own, and that is doubled")
            }
            (Flag::Landed, "rows")
                if relayed(from) && (!all || self.inline && paths.peers().all(relayed)) =>
            {
                Some(ITS_RELAY_SAYS_SO)
            }
            (Flag::Returned, _) if from == me && self.inline => {
                Some("its relay has ended in the same thread")
            }
            (Flag::Returned, "rows") => Some("what its relay still reads is headers, and those are doubled"),
            (Flag::Returned, "returned") if from == me && paths.sources().next().is_none() => {
                Some("its relay returns nothing")
            }
            (Flag::Returned, "returned")
                if from == me && change == Change::Late && paths.served_by(me).len() == 1 =>
            {
                Some("its relay reads no chunk but its own")
            }
            _ => None,
        }
    }
}

const RECORDED_FIRST: &str = "it is the first record of the event in the call: its word has no value between";
const FOR_CAUSES: &str = "bytes are as before: the fake driver counts waits whose cause is not enqueued";
const ANOTHER_RELEASES: &str =
    "a reader says so to all owners behind its last copy, and the entry of each other one vouches for it";
const ITS_RELAY_SAYS_SO: &str = "its own relay handed the rows on, and says when it is done";
const WAITS_FIRST: &str = "one actor alone waits first: stricter, and nobody waits for it in turn";

fn name(fault: &ProofFailure) -> &'static str {
    match fault {
        ProofFailure::Deadlock { .. } => "deadlock",
        ProofFailure::Race { .. } => "race",
        ProofFailure::Unwritten { .. } => "unwritten",
        ProofFailure::WrittenTwice { .. } => "twice",
        ProofFailure::Overwritten { .. } => "overwritten",
        ProofFailure::Lost { .. } => "lost",
        ProofFailure::StillRaised { .. } => "still raised",
        ProofFailure::TwoWriters { .. } => "two writers",
        ProofFailure::NotMonotone { .. } => "not monotone",
        ProofFailure::Differs { .. } => "differs",
    }
}

fn class(mutation: &Mutation) -> String {
    let op = match mutation.item.op {
        Op::Put { .. } => "put".into(),
        Op::PutRows { .. } => "put rows".into(),
        Op::Signal { flag, .. } => format!("signal {}", flag.name()),
        Op::Wait { flag, .. } => format!("wait {}", flag.name()),
        Op::Reduce { .. } => "reduce".into(),
    };
    format!("{op:14} {:?}", mutation.change)
}

/// Findings about the mutants of one class.
#[derive(Default)]
struct Tally {
    mutants: usize,
    found: BTreeMap<&'static str, usize>,
    harmless: usize,
    example: String,
}

fn survivors(title: &str, group: &Group) -> Vec<String> {
    let calls = rounds_of(group);
    let unrolled = group.unroll(&calls, None);
    let prover = MutantProver::new(&unrolled);
    prover.prove(&unrolled).expect("the real schedule has no fault");
    let mut tallies: BTreeMap<String, Tally> = BTreeMap::new();
    let mut wrong = Vec::new();
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    // That a stream begins nothing before it is enqueued is an axiom, and in no program.
    for mutation in mutations(&unrolled).into_iter().filter(|mutation| mutation.stage != "enqueued") {
        let tally = tallies.entry(class(&mutation)).or_default();
        tally.mutants += 1;
        let mutant = Mutant::new(mutation, group, &unrolled);
        match (prover.prove(&mutation.plant(&unrolled)), mutant.harmless()) {
            (Ok(_), Some(reason)) => {
                tally.harmless += 1;
                *reasons.entry(reason).or_default() += 1;
            }
            (Err(fault), None) => {
                *tally.found.entry(name(&fault)).or_default() += 1;
                tally.example = fault.to_string();
            }
            (Ok(_), None) => wrong.push(format!("not found: {mutation:?}")),
            (Err(fault), Some(reason)) => {
                wrong.push(format!("not harmless ({reason}): {mutation:?}: {fault}"))
            }
        }
    }
    report(title, &tallies);
    reasons.iter().for_each(|(reason, mutants)| println!("  {mutants:>7} harmless: {reason}"));
    wrong
}

fn report(title: &str, tallies: &BTreeMap<String, Tally>) {
    println!("{title:<32} mutants  found  harmless");
    for (class, tally) in tallies {
        let found: usize = tally.found.values().sum();
        println!("{class:<32} {:>7} {found:>6} {:>9}  {:?}", tally.mutants, tally.harmless, tally.found);
    }
    let sum = |of: fn(&Tally) -> usize| tallies.values().map(of).sum::<usize>();
    let (all, found, harmless) = (sum(|t| t.mutants), sum(|t| t.found.values().sum()), sum(|t| t.harmless));
    println!("{:<32} {all:>7} {found:>6} {harmless:>9}", "all");
    println!("for example:");
    for (class, tally) in tallies.iter().filter(|(_, tally)| !tally.example.is_empty()) {
        println!("  {class:<32} {}", tally.example);
    }
    assert!(found > 500, "the skeletons were mutated");
}

fn all_found(labels: &[u32], way: (Route, Relays), order: SumOrder) {
    let group = Group::new(labels, 4, 5).run(way).placed((RowLayout::ExpertMajor, ReceiveMode::Exact, order));
    let title = format!("{labels:?} {} {:?} {}", way.0.name(), way.1, order.name());
    assert_eq!(survivors(&title, &group), Vec::<String>::new());
}

#[test]
fn mutants_that_share_accesses_are_proved_as_each_is_alone() {
    let relayed = Group::new(&[0, 0, 1, 1], 4, 5).run((Route::Pxn, Relays::Thread));
    let ahead = Group::new(&[0, 0, 1, 1], 4, 5).run((Route::Direct, Relays::Inline)).enqueuing();
    for group in [relayed, ahead] {
        let unrolled = group.unroll(&rounds_of(&group), None);
        let prover = MutantProver::new(&unrolled);
        // Prime to the numbers of ranks and changes, so that all of them occur.
        for mutation in mutations(&unrolled).iter().step_by(11) {
            let mutant = mutation.plant(&unrolled);
            assert_eq!(prover.prove(&mutant), prove(&mutant), "{mutation:?}");
        }
    }
}

#[test]
fn every_mutant_of_two_nodes_of_two_is_found() {
    cases(ways(), 2).into_iter().for_each(|way| all_found(&[0, 0, 1, 1], way, SumOrder::Expert));
}

#[test]
fn every_mutant_of_relays_that_sum_is_found() {
    let group = |relays| all_found(&[0, 1, 1, 0], (Route::Pxn, relays), SumOrder::Node);
    cases(Relays::ALL, 1).into_iter().for_each(group);
    all_found(&[0, 0, 0, 1], (Route::Pxn, Relays::Thread), SumOrder::Rank);
}

#[test]
fn every_mutant_of_relays_that_copy_spans_is_found() {
    for order in [SumOrder::Expert, SumOrder::Node] {
        let placement = (RowLayout::RankMajor, ReceiveMode::Exact, order);
        let group = Group::dense(&[0, 0, 1, 1], 4, 5).in_spans(Relays::Thread, placement);
        let title = format!("2 x 2 in spans, {}", order.name());
        assert_eq!(survivors(&title, &group), Vec::<String>::new());
    }
}

#[test]
fn every_mutant_of_all_gather_and_reduce_scatter_is_found() {
    let groups =
        [(&[0, 0, 1, 1][..], SumOrder::Expert), (&[0, 1, 1, 0], SumOrder::Node), (&[0; 4], SumOrder::Expert)];
    for (labels, order) in cases(groups, 1) {
        let group = Group::new(labels, 1, 5).gathering((Route::Pxn, Relays::Thread), order);
        let title = format!("{labels:?} gathered, {}", order.name());
        assert_eq!(survivors(&title, &group), Vec::<String>::new());
    }
    let group = Group::new(&[0, 0, 1, 1], 1, 5).gathering((Route::Direct, Relays::Inline), SumOrder::Expert);
    assert_eq!(survivors("2 x 2 gathered, direct", &group), Vec::<String>::new());
}

#[test]
fn dropped_copies_behind_an_all_gather_are_found() {
    for way in ways() {
        let group = Group::new(&[0, 0, 1, 1], 4, 5).run(way).by_all_gather();
        let unrolled = group.unroll(&gathering_rounds(), None);
        let copies = mutations(&unrolled).into_iter().filter(|mutation| mutation.stage == "regroup");
        let copies: Vec<Mutation> = copies.collect();
        assert_eq!(copies.len(), 4, "each rank copies its own rows");
        for mutation in copies {
            let fault = prove(&mutation.plant(&unrolled)).unwrap_err();
            let ProofFailure::Unwritten { reader, .. } = fault else { panic!("{mutation:?}: {fault}") };
            assert_eq!((reader.rank, reader.what), (mutation.rank, AccessKind::Reads("landed rows")));
        }
    }
}

#[test]
fn every_mutant_of_engines_across_nodes_is_found() {
    let group = Group::new(&[0, 0, 1, 1], 4, 5).run((Route::Direct, Relays::Inline)).pulling();
    assert_eq!(survivors("2 x 2 by engines, direct", &group), Vec::<String>::new());
    assert_eq!(survivors("2 x 2 by engines, direct and straight", &group.straight()), Vec::<String>::new());
}

#[test]
fn every_mutant_of_callers_that_run_ahead_is_found() {
    let direct = (Route::Direct, Relays::Inline);
    let group = Group::new(&[0; 4], 4, 5).run(direct).enqueuing();
    assert_eq!(survivors("1 x 4, enqueued", &group), Vec::<String>::new());
    let group = Group::new(&[0, 0, 1, 1], 4, 5).run(direct).enqueuing();
    assert_eq!(survivors("2 x 2, enqueued", &group), Vec::<String>::new());
    let group = Group::dense(&[0, 0, 1, 1], 4, 5).run((Route::Pxn, Relays::Inline)).enqueuing();
    assert_eq!(survivors("2 x 2, enqueued, pxn", &group), Vec::<String>::new());
    let in_runs = group.of_tokens(TokenPlace::InRuns);
    assert_eq!(survivors("2 x 2, enqueued, pxn, as they lie", &in_runs), Vec::<String>::new());
    let scattered = Group::new(&[0; 4], 4, 5).run(direct).enqueuing().of_tokens(TokenPlace::Scattered);
    assert_eq!(survivors("1 x 4, enqueued, packed late", &scattered), Vec::<String>::new());
}

#[test]
fn every_mutant_of_sums_by_rank_is_found() {
    let by_rank = (RowLayout::ExpertMajor, ReceiveMode::Exact, SumOrder::Rank);
    for labels in [&[0; 4][..], &[0, 0, 1, 1]] {
        let direct = (Route::Direct, Relays::Inline);
        let group = Group::dense(labels, 4, 5).run(direct).enqueuing().placed(by_rank);
        assert_eq!(survivors(&format!("{labels:?}, sums by rank"), &group), Vec::<String>::new());
    }
}

#[test]
fn every_mutant_of_engines_that_relay_is_found() {
    let group = Group::dense(&[0, 0, 1, 1], 4, 5).run((Route::Pxn, Relays::Inline)).pulling();
    assert_eq!(survivors("2 x 2 by engines, pxn", &group), Vec::<String>::new());
    assert_eq!(survivors("2 x 2 by engines, pxn and straight", &group.straight()), Vec::<String>::new());
}

#[test]
fn every_mutant_of_uneven_nodes_is_found() {
    cases(ways(), 3).into_iter().for_each(|way| all_found(&[0, 0, 0, 1], way, SumOrder::Expert));
}

#[test]
fn every_mutant_of_nodes_that_interleave_is_found() {
    let away = Route::ALL.map(|route| (route, Relays::Thread));
    cases(away, 1).into_iter().for_each(|way| all_found(&[0, 0, 1, 0, 1], way, SumOrder::Expert));
}

#[test]
fn every_mutant_of_four_nodes_of_one_is_found() {
    all_found(&[0, 1, 2, 3], (Route::Pxn, Relays::Thread), SumOrder::Expert);
}

#[test]
fn every_mutant_of_one_node_of_four_is_found() {
    all_found(&[0; 4], (Route::Direct, Relays::Inline), SumOrder::Expert);
}

#[test]
fn harmless_mutants_change_no_outcome() {
    for route in cases(Route::ALL, 1) {
        let group = Group::new(&[0, 0, 1, 1], 4, 5).run((route, Relays::Thread));
        let unrolled = group.unroll(&rounds(), None);
        let mutants =
            mutations(&unrolled).into_iter().map(|mutation| Mutant::new(mutation, &group, &unrolled));
        let harmless: Vec<Mutant> = mutants.filter(|mutant| mutant.harmless().is_some()).collect();
        assert!(harmless.len() > 100);
        // Ranks are alike: one mutant in three represents the others.
        for Mutant { mutation, .. } in harmless.iter().step_by(3) {
            check(&mutation.plant(&unrolled), 0..2).unwrap_or_else(|fault| panic!("{mutation:?}: {fault}"));
        }
    }
}

/// Whether a rule of memory matters to a group.
fn applies(seeded: SeededBug, group: &Group) -> bool {
    let paths = |rank| Paths::new(&group.nodes, group.route, rank);
    let (multi_node, pxn) = (paths(0).is_multi_node(), group.route == Route::Pxn);
    let any = |of: &dyn Fn(Paths) -> bool| (0..group.nodes.ranks()).any(|rank| of(paths(rank)));
    match seeded {
        SeededBug::OneMessage => multi_node,
        SeededBug::StageUnasked => multi_node && pxn,
        SeededBug::ShareOutbox => multi_node && pxn && group.order != SumOrder::Expert,
        SeededBug::ShareStaging => pxn && any(&|paths| paths.sources().count() > 1),
        SeededBug::ShareReturned => any(&|paths| paths.relays().count() > 1),
        // A relay is done before its rank goes on, so one header would do.
        SeededBug::OneHeader => false,
        // Callers' threads that enqueue have tests of their own.
        SeededBug::TakeUnread
        | SeededBug::OwnContext
        | SeededBug::ReadUnsettled
        | SeededBug::EndUnsettled
        | SeededBug::SumLate
        | SeededBug::SumOverRows => false,
        _ => true,
    }
}

#[test]
fn every_broken_rule_of_memory_is_found() {
    for labels in [&[0, 0, 1, 1][..], &[0, 0, 0, 1], &[0, 1, 2, 0], &[0; 4]] {
        let all = ways().flat_map(|way| [SumOrder::Expert, SumOrder::Node].map(|order| (way, order)));
        for (way, order) in sample(all, 2) {
            let group =
                Group::new(labels, 4, 5).run(way).placed((RowLayout::ExpertMajor, ReceiveMode::Exact, order));
            for seeded in SeededBug::ALL {
                let seen = prove(&group.unroll(&rounds(), Some(seeded)));
                assert_eq!(
                    seen.is_err(),
                    applies(seeded, &group),
                    "{labels:?} {way:?} {order:?} {seeded:?}: {seen:?}"
                );
                if let (Err(fault), Relays::Thread) = (seen, way.1) {
                    println!("{labels:?} {} {} {seeded:?}: {fault}", way.0.name(), order.name());
                }
            }
        }
    }
}

#[test]
fn memory_that_a_stream_has_yet_to_read_is_no_landing() {
    for (labels, found) in [(&[0; 4][..], true), (&[0, 0, 1, 1], false)] {
        let group = Group::new(labels, 4, 5).run((Route::Direct, Relays::Inline)).enqueuing();
        let seen = prove(&group.unroll(&enqueued_rounds(), Some(SeededBug::TakeUnread)));
        // Over several nodes a call awaits its stream before it takes memory.
        assert_eq!(seen.is_err(), found, "{labels:?}: {seen:?}");
        assert!(!found || matches!(seen, Err(ProofFailure::Race { .. })), "{seen:?}");
    }
}

#[test]
fn outputs_that_a_nic_has_yet_to_read_are_not_given_back() {
    for (route, found) in [(Route::Pxn, true), (Route::Direct, false)] {
        for gpu_direct in [true, false] {
            let group = Group::new(&[0, 0, 1, 1], 4, 5).run((route, Relays::Inline)).enqueuing();
            let group = Group { gpu_direct, ..group };
            assert_eq!(prove(&group.unroll(&enqueued_rounds(), None)).map(drop), Ok(()), "{route:?}");
            let seen = prove(&group.unroll(&enqueued_rounds(), Some(SeededBug::ReadUnsettled)));
            // Without relays a rank puts no outputs but its own.
            assert_eq!(seen.is_err(), found, "{route:?}: {seen:?}");
            assert!(!found || matches!(seen, Err(ProofFailure::Race { .. })), "{seen:?}");
        }
    }
}

#[test]
fn outputs_still_unread_by_nic_are_not_written_by_next_call() {
    let calls = [dispatch(0), dispatch(0), ret(0, ROWS), ret(0, ROWS), ret(1, ROWS), ret(0, ROWS)];
    for route in Route::ALL {
        // Without local peers nothing is given back before the end of a call.
        let group = Group::new(&[0, 1], 4, 5).run((route, Relays::Inline)).enqueuing().straight();
        assert_eq!(prove(&group.unroll(&calls, None)).map(drop), Ok(()), "{route:?}");
        assert_eq!(prove(&group.unroll(&calls, Some(SeededBug::ReadUnsettled))).map(drop), Ok(()));
        let seen = prove(&group.unroll(&calls, Some(SeededBug::EndUnsettled)));
        assert!(matches!(seen, Err(ProofFailure::Race { .. })), "{route:?}: {seen:?}");
        println!("{}: {}", route.name(), seen.unwrap_err());
    }
}

#[test]
fn node_sums_use_memory_of_their_own_and_end_before_nic_reads() {
    let by_node = (RowLayout::ExpertMajor, ReceiveMode::Exact, SumOrder::Node);
    for (labels, gpu_direct) in [(&[0, 0, 1, 1][..], true), (&[0, 0, 1, 1], false), (&[0, 1, 2, 0, 1], true)]
    {
        let group = Group::new(labels, 4, 5).run((Route::Pxn, Relays::Inline)).enqueuing().placed(by_node);
        let group = Group { gpu_direct, ..group };
        assert_eq!(prove(&group.unroll(&enqueued_rounds(), None)).map(drop), Ok(()), "{labels:?}");
        for seeded in [SeededBug::SumOverRows, SeededBug::ShareOutbox, SeededBug::FreeBeforeAck] {
            let seen = prove(&group.unroll(&enqueued_rounds(), Some(seeded)));
            assert!(seen.is_err(), "{labels:?} {seeded:?}");
            println!("{labels:?} {seeded:?}: {}", seen.unwrap_err());
        }
    }
}

#[test]
fn sums_by_rank_are_made_before_peers_pull_them() {
    let by_rank = (RowLayout::ExpertMajor, ReceiveMode::Exact, SumOrder::Rank);
    for (labels, route) in [(&[0; 4][..], Route::Direct), (&[0, 1, 1, 0], Route::Pxn)] {
        let group = Group::new(labels, 4, 5).run((route, Relays::Inline)).enqueuing().placed(by_rank);
        assert_eq!(prove(&group.unroll(&enqueued_rounds(), None)).map(drop), Ok(()), "{labels:?}");
        for seeded in [SeededBug::SumLate, SeededBug::FreeBeforeAck] {
            let seen = prove(&group.unroll(&enqueued_rounds(), Some(seeded)));
            assert!(seen.is_err(), "{labels:?} {seeded:?}: {seen:?}");
        }
    }
}

#[test]
fn metadata_goes_to_the_context_that_the_peer_named() {
    for labels in [&[0; 4][..], &[0, 0, 1, 1]] {
        let group = Group::new(labels, 4, 5).run((Route::Direct, Relays::Inline)).enqueuing();
        let calls = enqueued_rounds();
        assert_eq!(prove(&group.unroll(&calls, None)).map(drop), Ok(()), "{labels:?}");
        let seen = prove(&group.unroll(&calls, Some(SeededBug::OwnContext)));
        assert!(seen.is_err(), "{labels:?}: {seen:?}");
    }
}
