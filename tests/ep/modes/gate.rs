//! Dispatch of a gate's decision: in every mode the rows that fit have the bits of exact sizes, and
//! the others are dropped by the gate's policy before the exchange, or by the index of its row in
//! it, on every rank alike.

use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sidelane::error::GateError;
use sidelane::gate::{
    Capacity, CapacityInput, CapacityRule, DropPolicy, Gate, GateConfig, GateInput, Preset, Recorded, RngKey,
    apply_capacity,
};
use sidelane::plan::{Overflow, ReceiveMode, RowLayout};
use sidelane::topology::Route;

use super::equal::{steps, steps_in};
use crate::support::layer::Expected;
use crate::support::reference::Case;
use crate::support::{Tokens, sample, small, tiny};

/// The recorded decisions of a small trained model.
const RECORDED: &str = include_str!("../../../data/routing.jsonl");

/// Decision of a gate for one rank, and its input.
struct Decided {
    tokens: Tokens<bf16>,
    choices: Vec<i32>,
    dropped: usize,
}

/// Random logits through a gate.
fn decide(config: &GateConfig, count: u32, hidden: usize, draw: RngKey) -> Decided {
    let mut random = ChaCha8Rng::seed_from_u64(draw.seed ^ u64::from(draw.rank) << 32);
    // Experts differ in how much they are wanted, so that some are full.
    let wanted: Vec<f32> = (0..config.experts).map(|expert| 2.0 / (expert + 1) as f32).collect();
    let logits: Vec<f32> = (0..count)
        .flat_map(|_| wanted.iter().map(|w| w + random.random::<f32>() * 2.0).collect::<Vec<_>>())
        .collect();
    let mut gate = Gate::new(config.clone()).unwrap();
    let decision = gate.route(&GateInput::new(&logits).with_training(true).with_draw(draw)).unwrap();
    let x = (0..count as usize * hidden).map(|_| bf16::from_f32(random.random::<f32>() - 0.5)).collect();
    Decided {
        tokens: Tokens { x, ids: decision.experts().to_vec(), weights: decision.weights().to_vec() },
        choices: decision.choices().to_vec(),
        dropped: decision.dropped().filter(|&dropped| dropped).count(),
    }
}

/// One of many groups, gates and sizes.
fn drawn(seed: u64) -> (Case, GateConfig, Vec<Decided>) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let shapes: [&[u32]; 4] = [&[0, 0, 0, 0], &[0, 0, 1, 1], &[0, 1, 0], &[0]];
    let nodes = shapes[random.random_range(0..shapes.len())];
    let (experts, top_k) = (random.random_range(4..=9), random.random_range(1..=4));
    let presets = [Preset::Megatron, Preset::Olmoe, Preset::Qwen3, Preset::Mixtral];
    let config = presets[random.random_range(0..presets.len())].config(experts, top_k).unwrap();
    let groups = random.random_range(1..=2);
    let counts: Vec<u32> = nodes.iter().map(|_| random.random_range(0..8) * groups).collect();
    let keeps = [
        DropPolicy::Score,
        DropPolicy::Position,
        DropPolicy::FirstChoices,
        DropPolicy::Priority,
        DropPolicy::Random,
    ];
    let capacity = Capacity::new(
        CapacityRule::CeilF64 { factor: [0.5, 1.0, 1.25, 2.0][random.random_range(0..4)] },
        keeps[random.random_range(0..keeps.len())],
    )
    .with_groups(groups);
    let capacity = [None, Some(capacity)][random.random_range(0..2)];
    let config = config.with_capacity(capacity);
    let case = Case { hidden: 8, ..Case::new(nodes, &counts, experts, top_k) };
    let layouts = RowLayout::ALL;
    let layout = layouts[random.random_range(0..layouts.len())];
    let route = Route::ALL[random.random_range(0..2)];
    let case = Case { layout, route, ..case };
    let rank = |(rank, &count)| decide(&config, count, case.hidden, RngKey::new(seed, 1, rank));
    let decided = (0..).zip(&counts).map(rank).collect();
    (case, config, decided)
}

fn tokens(decided: &[Decided]) -> Vec<Tokens<bf16>> {
    decided.iter().map(|decided| decided.tokens.clone()).collect()
}

/// Counts of each local group of a rank at each expert, before and after dropping, and whether the
/// kept rows come first.
fn kept_as_the_policy_says(config: &GateConfig, decided: &Decided) {
    let (k, count) = (config.top_k as usize, decided.choices.len() / config.top_k as usize);
    let Some(capacity) = config.capacity else { return assert_eq!(decided.dropped, 0) };
    let size = count / capacity.groups as usize;
    for group in 0..capacity.groups as usize {
        let rows = capacity.rows(size as u32, config.experts, config.top_k, 0) as usize;
        let tokens = group * size..(group + 1) * size;
        for expert in 0..config.experts as i32 {
            let by_token = tokens.clone().flat_map(|token| token * k..(token + 1) * k);
            let by_choice = (0..k).flat_map(|choice| tokens.clone().map(move |token| token * k + choice));
            let all: Vec<usize> = match capacity.drop_policy {
                DropPolicy::FirstChoices => by_choice.filter(|&at| decided.choices[at] == expert).collect(),
                _ => by_token.filter(|&at| decided.choices[at] == expert).collect(),
            };
            let kept: Vec<usize> =
                all.iter().copied().filter(|&at| decided.tokens.ids[at] == expert).collect();
            assert_eq!(kept.len(), all.len().min(rows), "{config:?}");
            if matches!(capacity.drop_policy, DropPolicy::FirstChoices | DropPolicy::Position) {
                assert_eq!(kept, all[..kept.len()], "{config:?}");
            }
        }
    }
}

#[test]
fn gates_give_the_same_bits_in_every_mode_that_has_room() {
    let (mut gates_that_drop, mut slots_that_bite) = (0, 0);
    let seeds: Vec<u64> = sample(0..1000, 8);
    for &seed in &seeds {
        let (case, config, decided) = drawn(seed);
        gates_that_drop += usize::from(decided.iter().any(|decided| decided.dropped > 0));
        decided.iter().for_each(|decided| kept_as_the_policy_says(&config, decided));
        let exact = Expected::of(&case, tokens(&decided));
        let (rows, overflow) = (case.max_tokens().max(1), Overflow::Error);
        let roomy = [ReceiveMode::Budget { rows: u32::MAX, overflow }, ReceiveMode::Slots { rows, overflow }];
        let roomy = Case { mode: roomy[seed as usize % 2], ..case.clone() };
        assert_eq!(steps(&roomy, &exact), steps(&case, &exact), "seed {seed}");
        let mode = ReceiveMode::Slots { rows: 1, overflow: Overflow::Drop };
        let tight = Expected::of(&Case { mode, ..case }, tokens(&decided));
        if tight.seen.dropped.concat().contains(&true) {
            slots_that_bite += 1;
            tight.holds(&tiny());
        }
    }
    let (enough_drop, enough_bite) = (seeds.len() / 4, seeds.len() / 2);
    assert!(gates_that_drop > enough_drop, "{gates_that_drop} gates drop");
    assert!(slots_that_bite > enough_bite, "{slots_that_bite} slots bite");
}

#[test]
fn a_padded_capacity_fills_slots_that_always_suffice() {
    let mut dropped = 0;
    for seed in 0..100 {
        let (case, config, _) = drawn(seed);
        let Some(capacity) = config.capacity else { continue };
        let config = config.with_capacity(Some(capacity.with_pad(true)));
        // A size that all ranks have in common: slots are fixed before any rank knows the counts.
        let count = 6 * capacity.groups;
        let mode = ReceiveMode::from_gate(&config, count).unwrap();
        let rank = |rank| decide(&config, count, case.hidden, RngKey::new(seed, 1, rank));
        let decided: Vec<Decided> = (0..case.nodes.len() as u32).map(rank).collect();
        dropped += decided.iter().map(|decided| decided.dropped).sum::<usize>();
        let case =
            Case { counts: vec![count; case.nodes.len()], mode, layout: RowLayout::ExpertMajor, ..case };
        let expected = Expected::of(&case, tokens(&decided));
        assert!(!expected.seen.dropped.concat().contains(&true), "seed {seed}: the gate has dropped enough");
        expected.holds(&tiny());
    }
    assert!(dropped > 100, "capacities that bite: {dropped}");
}

#[test]
fn slots_cannot_follow_the_need() {
    let config = Preset::DeepspeedTop2.config(8, 2).unwrap();
    for rule in
        [CapacityRule::Needed, CapacityRule::Tutel { factor: 0.0 }, CapacityRule::Tutel { factor: -1.0 }]
    {
        let capacity = config.capacity.map(|capacity| capacity.with_rule(rule).with_pad(true));
        let config = config.clone().with_capacity(capacity);
        assert!(matches!(
            ReceiveMode::from_gate(&config, 64),
            Err(GateError::Conflict { one: "capacity pad", .. })
        ));
    }
    let capacity = config.capacity.map(|capacity| capacity.with_groups(3).with_pad(true));
    let error = ReceiveMode::from_gate(&config.with_capacity(capacity), 64).unwrap_err();
    assert!(matches!(error, GateError::BadNumber { parameter: "capacity groups", .. }), "{error}");
}

#[test]
fn recorded_routing_drops_by_policy_or_index_at_every_factor() {
    const NODES: [u32; 8] = [0, 0, 0, 0, 1, 1, 1, 1];
    const TOKENS: u32 = 128;
    let recorded = Recorded::parse(RECORDED).unwrap();
    let (experts, top_k) = (recorded.experts().unwrap(), recorded.top_k());
    let case = Case { hidden: 8, route: Route::Pxn, ..Case::new(&NODES, &[TOKENS; 8], experts, top_k) };
    let all: Vec<Tokens<bf16>> = (0..8u32)
        .map(|rank| {
            let routing = recorded.routing(u64::from(rank) * 512, TOKENS).unwrap();
            let x = (0..TOKENS * 8).map(|n| bf16::from_f32((n % 251) as f32 + rank as f32)).collect();
            Tokens { x, ids: routing.experts().to_vec(), weights: routing.weights().to_vec() }
        })
        .collect();
    let mut lost = Vec::new();
    for factor in [0.5, 1.0, 1.25, 2.0] {
        let rule = CapacityRule::CeilF64 { factor };
        let capacity = Capacity::new(rule, DropPolicy::Score).with_pad(true);
        let rows = capacity.rows(TOKENS, experts, top_k, 0);
        let by_policy: Vec<Tokens<bf16>> = all
            .iter()
            .map(|Tokens { x, ids, weights }| {
                let choices =
                    CapacityInput { experts, top_k, ids, scores: weights, ..CapacityInput::default() };
                let placed = apply_capacity(&capacity, &choices).unwrap();
                Tokens { x: x.clone(), ids: placed.ids, weights: weights.clone() }
            })
            .collect();
        let gone = |all: &[Tokens<bf16>]| all.iter().flat_map(|of| &of.ids).filter(|&&id| id < 0).count();
        let mode = ReceiveMode::Slots { rows, overflow: Overflow::Error };
        let exact = Expected::of(&case, by_policy.clone());
        let slots = Case { mode, ..case.clone() };
        assert_eq!(steps_in(&small(), &slots, &exact), steps_in(&small(), &case, &exact), "factor {factor}");
        Expected::of(&slots, by_policy.clone()).holds(&small());
        let by_index = |mode| Expected::of(&Case { mode, ..case.clone() }, all.clone());
        let overflow = Overflow::Drop;
        let slots = by_index(ReceiveMode::Slots { rows, overflow });
        let budget =
            by_index(ReceiveMode::Budget { rows: (factor * f64::from(TOKENS * top_k)) as u32, overflow });
        for expected in [&slots, &budget] {
            expected.holds(&small());
        }
        let dropped = |of: &Expected<bf16>| of.seen.dropped.concat().into_iter().filter(|&gone| gone).count();
        assert_eq!(dropped(&slots), gone(&by_policy), "factor {factor}: how many is a matter of counts");
        lost.push((dropped(&slots), dropped(&budget)));
    }
    println!(
        "choices of {} lost at 0.5, 1.0, 1.25, 2.0, by slots and by budget: {lost:?}",
        TOKENS * top_k * 8
    );
    assert!(lost.is_sorted_by(|a, b| a.0 > b.0 && a.1 >= b.1) && lost[0].1 > 0, "{lost:?}");
}
