use super::*;
use crate::gate::{CapacityRule, Choices, PlacedChoices, apply_capacity};
use proptest::prelude::*;

fn capacity(keep: DropPolicy, groups: u32, rows: u32) -> Capacity {
    Capacity { rule: CapacityRule::Rows { rows }, minimum: 0, align: 1, keep, groups, pad: false }
}

/// The order in which an expert considers the tokens that chose it, and the order in which it
/// numbers those that it keeps.
fn orders(
    keep: DropPolicy,
    own: &[(usize, usize)],
    score: impl Fn(usize, usize) -> f32,
    columns: usize,
) -> [Vec<(usize, usize)>; 2] {
    let by_token = own.to_vec();
    let mut looked = own.to_vec();
    let best = |t: usize| (0..columns).map(|k| score(t, k)).fold(f32::NEG_INFINITY, f32::max);
    // Stable sorts: equal keys stay in token order.
    match keep {
        DropPolicy::Position => {}
        DropPolicy::Score | DropPolicy::Random => {
            looked.sort_by(|a, b| score(b.0, b.1).partial_cmp(&score(a.0, a.1)).unwrap());
        }
        DropPolicy::FirstChoices => looked.sort_by_key(|&(_, k)| k),
        DropPolicy::Priority => {
            looked.sort_by(|a, b| best(b.0).partial_cmp(&best(a.0)).unwrap());
            looked.sort_by_key(|&(_, k)| k);
        }
    }
    let numbered = match keep {
        DropPolicy::Position | DropPolicy::Score | DropPolicy::Random => by_token,
        DropPolicy::FirstChoices | DropPolicy::Priority => looked.clone(),
    };
    [looked, numbered]
}

/// Every expert of every group looks at every token.
fn naive(capacity: &Capacity, choices: &Choices<'_>) -> PlacedChoices {
    let columns = choices.top_k as usize;
    let tokens = choices.ids.len() / columns;
    let group = tokens / capacity.groups as usize;
    let lots: Vec<f32> = (0..tokens)
        .flat_map(|t| {
            let mut random = choices.draw.stream(Purpose::Keep, t as u32);
            (0..columns).map(move |_| unit(&mut random))
        })
        .collect();
    let (keep, scores) = match capacity.keep {
        DropPolicy::Random => (DropPolicy::Random, lots.as_slice()),
        keep => (keep, choices.scores),
    };
    let chosen = |group_number: usize, expert: i32| -> Vec<(usize, usize)> {
        let tokens = group_number * group..(group_number + 1) * group;
        let all = tokens.flat_map(|t| (0..columns).map(move |k| (t, k)));
        all.filter(|&(t, k)| choices.ids[t * columns + k] == expert).collect()
    };
    let pairs: Vec<(usize, i32)> = (0..capacity.groups as usize)
        .flat_map(|g| (0..choices.experts as i32).map(move |e| (g, e)))
        .collect();
    let required = pairs.iter().map(|&(g, e)| chosen(g, e).len()).max().unwrap() as u32;
    let need = required.max(choices.need.unwrap_or(0));
    let rows = capacity.rows(group as u32, choices.experts, choices.top_k, need);
    let mut placed = PlacedChoices {
        ids: vec![-1; choices.ids.len()],
        slots: vec![-1; choices.ids.len()],
        capacity: rows,
        required,
    };
    for (g, expert) in pairs {
        let [looked, numbered] = orders(keep, &chosen(g, expert), |t, k| scores[t * columns + k], columns);
        let kept = &looked[..looked.len().min(rows as usize)];
        for (slot, (t, k)) in numbered.into_iter().filter(|pair| kept.contains(pair)).enumerate() {
            placed.ids[t * columns + k] = expert;
            placed.slots[t * columns + k] = slot as i32;
        }
    }
    placed
}

/// Shapes, with few different scores so that many are equal, and some choices missing.
fn cases() -> impl Strategy<Value = (u32, u32, u32, Vec<i32>, Vec<f32>)> {
    (1_u32..9, 1_u32..5, 0_u32..14).prop_flat_map(|(experts, groups, group)| {
        (1..=experts.min(4)).prop_flat_map(move |top_k| {
            let tokens = (groups * group) as usize;
            let all: Vec<i32> = (0..experts as i32).collect();
            let row = Just(all).prop_shuffle().prop_flat_map(move |row| {
                let present = prop::collection::vec(prop::bool::weighted(0.9), top_k as usize);
                present.prop_map(move |present| {
                    let choice = |(id, present): (&i32, bool)| if present { *id } else { -1 };
                    row.iter().zip(present).map(choice).collect::<Vec<i32>>()
                })
            });
            let score = prop::sample::select(vec![-1.5_f32, -0.0, 0.0, 0.25, 0.5, 1e-30, 3.0]);
            let scores = prop::collection::vec(score, tokens * top_k as usize);
            (prop::collection::vec(row, tokens), scores)
                .prop_map(move |(rows, scores)| (experts, top_k, groups, rows.concat(), scores))
        })
    })
}

const ALL: [DropPolicy; 5] = [
    DropPolicy::Score,
    DropPolicy::Position,
    DropPolicy::FirstChoices,
    DropPolicy::Priority,
    DropPolicy::Random,
];

proptest! {
    #[test]
    fn every_expert_keeps_whom_the_rule_names(
        (experts, top_k, groups, ids, scores) in cases(),
        rows in 0_u32..9,
        needed: bool,
        need in prop::option::of(0_u32..20),
        seed: u64,
    ) {
        let draw = RngKey { seed, step: 3, rank: 1 };
        let choices = Choices { experts, top_k, ids: &ids, scores: &scores, need, draw };
        for keep in ALL {
            let rule = if needed { CapacityRule::Needed } else { CapacityRule::Rows { rows } };
            let capacity = Capacity { rule, ..capacity(keep, groups, rows) };
            prop_assert_eq!(apply_capacity(&capacity, &choices).unwrap(), naive(&capacity, &choices), "{:?}", keep);
        }
    }
}

/// Keeps with a workspace that has seen something else before.
fn keep_again(keeper: &mut CapacityAssigner, capacity: &Capacity, choices: &Choices<'_>) -> PlacedChoices {
    let (mut ids, mut slots) = (choices.ids.to_vec(), vec![77; choices.ids.len()]);
    let chosen = Chosen {
        experts: choices.experts,
        top_k: choices.top_k,
        ids: &mut ids,
        scores: choices.scores,
        slots: &mut slots,
    };
    let kept = keeper.keep(capacity, choices.need, choices.draw, chosen).unwrap();
    PlacedChoices { ids, slots, capacity: kept.capacity, required: kept.required }
}

#[test]
fn a_used_workspace_remembers_nothing() {
    let mut keeper = CapacityAssigner::default();
    for keep in ALL.into_iter().chain(ALL) {
        for (experts, rows) in [(8, 1), (3, 0), (5, 2), (8, 100)] {
            let ids: Vec<i32> = (0..12).map(|i| i * i % experts as i32).collect();
            let scores: Vec<f32> = (0..12).map(|i| (i * 7 % 5) as f32).collect();
            let choices = Choices { experts, top_k: 1, ids: &ids, scores: &scores, ..Choices::default() };
            let capacity = capacity(keep, 3, rows);
            assert_eq!(keep_again(&mut keeper, &capacity, &choices), naive(&capacity, &choices));
        }
    }
}

/// Four tokens, two choices, three experts; two rows each.
const IDS: [i32; 8] = [0, 1, 0, 2, 1, 0, 0, 1];
const SCORES: [f32; 8] = [0.6, 0.3, 0.5, 0.4, 0.7, 0.2, 0.8, 0.1];

fn placed(keep: DropPolicy) -> (Vec<i32>, Vec<i32>) {
    let choices = Choices { experts: 3, top_k: 2, ids: &IDS, scores: &SCORES, ..Choices::default() };
    let placed = apply_capacity(&capacity(keep, 1, 2), &choices).unwrap();
    assert_eq!((placed.capacity, placed.required), (2, 4));
    (placed.ids, placed.slots)
}

#[test]
fn by_score_the_highest_stay_and_are_numbered_by_token() {
    // Expert 0: 0.6, 0.5, 0.2, 0.8; expert 1: 0.3, 0.7, 0.1.
    assert_eq!(placed(DropPolicy::Score), (vec![0, 1, -1, 2, 1, -1, 0, -1], vec![0, 0, -1, 0, 1, -1, 1, -1]));
}

#[test]
fn by_position_the_first_tokens_stay_whichever_choice_it_is() {
    let expected = (vec![0, 1, 0, 2, 1, -1, -1, -1], vec![0, 0, 1, 0, 1, -1, -1, -1]);
    assert_eq!(placed(DropPolicy::Position), expected);
}

#[test]
fn first_choices_come_before_all_second_ones() {
    // Expert 1: token 2 first, then the second choice of token 0.
    assert_eq!(
        placed(DropPolicy::FirstChoices),
        (vec![0, 1, 0, 2, 1, -1, -1, -1], vec![0, 1, 1, 0, 0, -1, -1, -1])
    );
}

#[test]
fn priority_goes_to_the_surest_tokens() {
    // Tokens 3, 2, 0, 1. Expert 0: 3, 0; expert 1: 2, then the second choice of token 3.
    assert_eq!(
        placed(DropPolicy::Priority),
        (vec![0, -1, -1, 2, 1, -1, 0, 1], vec![1, -1, -1, 0, 0, -1, 0, 1])
    );
}

#[test]
fn lots_are_the_same_for_the_same_draw_alone() {
    let ids = [0; 256];
    let keep = |draw| {
        let choices = Choices { experts: 1, top_k: 1, ids: &ids, scores: &[0.0; 256], ..Choices::default() };
        let choices = Choices { draw, ..choices };
        apply_capacity(&capacity(DropPolicy::Random, 1, 128), &choices).unwrap()
    };
    let draw = RngKey { seed: 1, step: 2, rank: 3 };
    let kept = keep(draw);
    assert_eq!(kept.ids.iter().filter(|&&id| id == 0).count(), 128);
    assert_eq!(kept, keep(draw));
    for other in [RngKey { seed: 2, ..draw }, RngKey { step: 3, ..draw }, RngKey { rank: 4, ..draw }] {
        assert_ne!(kept, keep(other), "{other:?}");
    }
}

#[test]
fn choices_that_cannot_be_placed_are_named() {
    let good = Choices { experts: 3, top_k: 2, ids: &[0, 1, 2, -1], scores: &[0.5; 4], ..Choices::default() };
    let fails = |groups, choices: &Choices<'_>| {
        apply_capacity(&capacity(DropPolicy::Score, groups, 1), choices).unwrap_err()
    };
    assert!(apply_capacity(&capacity(DropPolicy::Score, 2, 1), &good).is_ok());
    let bad_number = |error| match error {
        GateError::BadNumber { parameter, .. } => parameter,
        other => panic!("{other}"),
    };
    assert_eq!(bad_number(fails(3, &good)), "tokens");
    assert_eq!(bad_number(fails(0, &good)), "capacity groups");
    assert_eq!(bad_number(fails(1, &Choices { top_k: 0, ..good })), "top_k");
    for ids in [[0, 1, 3, -1], [0, 1, -2, 0], [0, 1, 2, 2]] {
        let error = fails(1, &Choices { ids: &ids, ..good });
        assert!(matches!(error, GateError::BadChoice { token: 1, experts: 3, .. }), "{error}");
    }
    let error = fails(1, &Choices { scores: &[0.5, 0.5, f32::NAN, 0.5], ..good });
    assert!(matches!(error, GateError::BadElement { row: 1, column: 0, .. }), "{error}");
    let error = fails(1, &Choices { scores: &[0.5; 2], ..good });
    assert_eq!(error, GateError::WrongShape { what: "scores", seen: 2, rows: 2, columns: 2 });
}
