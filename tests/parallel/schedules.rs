//! Schedules prove, take the time of their published formulas, and hold what they promise.

use sidelane_parallel::PipelineError;
use sidelane_parallel::pipeline::{
    Costs, Direction, Pass, Peak, Plan, Route, Schedule, Shape, Step, WarmUp, dual_pipe,
};

const MEGATRON: WarmUp = WarmUp::Megatron;
const LEAST: WarmUp = WarmUp::Least;

fn interleaved(model_chunks: u32, warm_up: WarmUp) -> Schedule {
    Schedule::Interleaved { model_chunks, warm_up }
}

/// All schedules that these numbers of stages and microbatches allow.
fn schedules(stages: u32, microbatches: u32) -> Vec<Schedule> {
    let mut all = vec![Schedule::GPipe, Schedule::OneFOneB, Schedule::ZeroBubbleH1, Schedule::ZeroBubbleH2];
    if microbatches.is_multiple_of(stages) {
        all.extend([2, 4].into_iter().flat_map(|v| [interleaved(v, MEGATRON), interleaved(v, LEAST)]));
    }
    all
}

/// What a stage holds at most, by the definition of its schedule.
fn held(schedule: Schedule, p: u32, m: u32, stage: u32) -> u32 {
    let behind = p - stage - 1;
    match schedule {
        Schedule::GPipe => m,
        Schedule::OneFOneB => (behind + 1).min(m),
        Schedule::Interleaved { model_chunks: v, warm_up: WarmUp::Megatron } => {
            (2 * behind + (v - 1) * p + 1).min(m * v)
        }
        Schedule::Interleaved { model_chunks: v, warm_up: WarmUp::Least } => {
            (behind + (v - 1) * p + 1).min(m * v)
        }
        Schedule::ZeroBubbleH1 => p.min(m),
        Schedule::ZeroBubbleH2 => (2 * p - 1).min(m),
    }
}

/// Messages that a receiver holds unread at most.
fn unread(schedule: Schedule, p: u32) -> u32 {
    match schedule {
        Schedule::GPipe | Schedule::OneFOneB | Schedule::ZeroBubbleH1 => 0,
        Schedule::Interleaved { warm_up: WarmUp::Least, .. } => p / 2,
        Schedule::Interleaved { .. } | Schedule::ZeroBubbleH2 => 1,
    }
}

#[test]
fn every_schedule_up_to_16_stages_and_64_microbatches_proves() {
    let mut plans = 0;
    for (p, m) in (1..=16).flat_map(|p| (1..=64).map(move |m| (p, m))) {
        for schedule in schedules(p, m) {
            let plan = schedule.plan(p, m).unwrap();
            let proof = plan.prove(unread(schedule, p)).unwrap_or_else(|error| {
                panic!("{schedule:?} of {p} stages, {m} microbatches: {error}");
            });
            let v = plan.shape().model_chunks;
            let split = matches!(schedule, Schedule::ZeroBubbleH1 | Schedule::ZeroBubbleH2);
            assert_eq!(proof.passes, u64::from(p * m * v) * if split { 3 } else { 2 });
            assert_eq!(proof.messages, if p > 1 { u64::from(2 * m * (p * v - 1)) } else { 0 });
            for (stage, peak) in (0..).zip(proof.peaks) {
                let inputs = held(schedule, p, m, stage);
                assert_eq!(peak, Peak { inputs, activations: inputs }, "{schedule:?} {p} {m} {stage}");
            }
            plans += 1;
        }
    }
    assert!(plans > 4096, "{plans} plans");
}

#[test]
fn receivers_hold_no_more_messages_unread_than_the_page_says() {
    for p in [2, 3, 4, 8] {
        for schedule in schedules(p, 3 * p) {
            let plan = schedule.plan(p, 3 * p).unwrap();
            assert_eq!(plan.least_unread(), Ok(unread(schedule, p)), "{schedule:?} of {p} stages");
        }
    }
}

/// Free messages, which receivers hold as long as it takes.
fn timed(plan: &Plan, costs: Costs) -> (u64, u64) {
    let timeline = plan.time(u32::MAX, costs).unwrap();
    (timeline.time(), timeline.bubble())
}

/// Costs of passes: forward, gradients of inputs, gradients of weights.
const COSTS: [[u64; 3]; 6] = [[1, 1, 1], [2, 3, 1], [10, 12, 8], [9, 5, 8], [7, 7, 0], [3, 1, 1]];

#[test]
fn bubbles_up_to_16_stages_and_64_microbatches_are_the_published_ones() {
    for (p, m) in (1..=16u32).flat_map(|p| (1..=64).map(move |m| (p, m))) {
        // All costs of some shapes, and each cost of many.
        let all = p <= 8 && [1, 2, p, 2 * p - 1, 2 * p, 4 * p + 1].contains(&m);
        let nth = (p + m) as usize % COSTS.len();
        for &[f, b, w] in if all { &COSTS[..] } else { &COSTS[nth..][..1] } {
            let (pass, costs, others) = (f + b + w, Costs::new(f, b, w), u64::from(p - 1));
            let full = (u64::from(m) * pass + others * pass, others * pass);
            for schedule in [Schedule::GPipe, Schedule::OneFOneB] {
                assert_eq!(timed(&schedule.plan(p, m).unwrap(), costs), full, "{schedule:?} {p} {m}");
            }
            let (h1, h2) = (Schedule::ZeroBubbleH1, Schedule::ZeroBubbleH2);
            if m >= p {
                let bubble = others * (f + b - w);
                assert_eq!(timed(&h1.plan(p, m).unwrap(), costs).1, bubble, "H1 {p} {m} {costs:?}");
            }
            if m >= 2 * p - 1 {
                let bubble = others * (f + b).saturating_sub(2 * w);
                assert_eq!(timed(&h2.plan(p, m).unwrap(), costs).1, bubble, "H2 {p} {m} {costs:?}");
            }
        }
    }
}

#[test]
fn interleaving_divides_the_bubble_by_the_model_chunks() {
    let shapes = (1..=16u32).flat_map(|p| (1..=64 / p).map(move |rounds| (p, p * rounds)));
    for (nth, (p, m)) in shapes.enumerate() {
        let ([f, b], v) = ([[1, 1], [1, 2], [3, 2]][nth % 3], [2, 3, 4][nth / 3 % 3]);
        // A model chunk has 1 / v of the layers: so do its passes cost.
        let chunks = u64::from(v);
        let layers = Costs::new(chunks * f, chunks * b, 0);
        let (whole_time, whole) = timed(&Schedule::OneFOneB.plan(p, m).unwrap(), layers);
        for warm_up in [MEGATRON, LEAST] {
            let (time, bubble) = timed(&interleaved(v, warm_up).plan(p, m).unwrap(), Costs::new(f, b, 0));
            assert_eq!(bubble, u64::from(p - 1) * (f + b), "{p} {v} {m} {warm_up:?}");
            assert_eq!(whole, chunks * bubble, "{p} {v} {m} {warm_up:?}");
            assert_eq!(whole_time - whole, time - bubble, "{p} {v} {m} {warm_up:?}");
        }
    }
}

/// Forward passes before the first backward pass, pairs of one of each, and the rest.
fn phases(plan: &Plan, stage: u32) -> [usize; 3] {
    let passes: Vec<bool> = plan.passes(stage).map(|of| of.pass == Pass::Forward).collect();
    let warm_up = passes.iter().position(|forward| !forward).unwrap() - 1;
    let pairs = passes[warm_up..].chunks(2).take_while(|pair| pair == &[true, false]).count();
    [warm_up, pairs, passes.len() - warm_up - 2 * pairs]
}

#[test]
fn warm_up_steady_state_and_cool_down_have_megatrons_numbers_of_passes() {
    for (p, m) in [(1, 1), (2, 5), (4, 8), (8, 8), (16, 64)] {
        let plan = Schedule::OneFOneB.plan(p, m).unwrap();
        for stage in 0..p {
            let behind = (p - stage - 1) as usize;
            assert_eq!(phases(&plan, stage), [behind, m as usize - behind, behind], "{p} {m} {stage}");
        }
    }
    for (p, v, m) in [(2, 2, 4), (4, 2, 8), (4, 3, 16), (8, 4, 24)] {
        for (warm_up, factor) in [(MEGATRON, 2), (LEAST, 1)] {
            let plan = interleaved(v, warm_up).plan(p, m).unwrap();
            for stage in 0..p {
                let first = (factor * (p - stage - 1) + (v - 1) * p).min(m * v) as usize;
                let steady = (m * v) as usize - first;
                assert_eq!(phases(&plan, stage), [first, steady, first], "{p} {v} {m} {stage} {warm_up:?}");
            }
        }
    }
}

#[test]
fn slots_of_an_interleaved_schedule_have_megatrons_model_chunks() {
    for (p, v, m) in [(2, 2, 4), (3, 2, 6), (4, 3, 8), (8, 4, 16), (16, 2, 64)] {
        for warm_up in [MEGATRON, LEAST] {
            let plan = interleaved(v, warm_up).plan(p, m).unwrap();
            for stage in 0..p {
                let chunks = |forward| {
                    let passes = plan.passes(stage).filter(move |of| (of.pass == Pass::Forward) == forward);
                    passes.map(|of| of.model_chunk).collect::<Vec<_>>()
                };
                let right: Vec<u32> = (0..m * v).map(|slot| slot % (p * v) / p).collect();
                assert_eq!(chunks(true), right, "{p} {v} {m} {stage}");
                let right: Vec<u32> = right.iter().map(|chunk| v - 1 - chunk).collect();
                assert_eq!(chunks(false), right, "{p} {v} {m} {stage}");
            }
        }
    }
}

/// Stages that meet behind a step begin the next one together. The last one began later.
#[test]
fn zero_bubble_steps_between_meetings_take_as_long_as_the_page_says() {
    for (p, m) in (1..=16u32).flat_map(|p| (2 * p - 1..=64).map(move |m| (p, m))) {
        let [f, b, w] = COSTS[(p + m) as usize % COSTS.len()];
        let costs = Costs::new(f, b, w);
        let (work, others) = (u64::from(m) * (f + b + w), u64::from(p - 1));
        let (h1, _) = timed(&Schedule::ZeroBubbleH1.plan(p, m).unwrap(), costs);
        assert_eq!(h1, work + others * (f + b - w).max(f), "H1 {p} {m} {costs:?}");
        let (h2, _) = timed(&Schedule::ZeroBubbleH2.plan(p, m).unwrap(), costs);
        assert_eq!(h2, work + others * (f + b).saturating_sub(2 * w).max(f), "H2 {p} {m} {costs:?}");
    }
}

fn peaks(schedule: Schedule, p: u32, m: u32) -> Vec<u32> {
    let proof = schedule.plan(p, m).unwrap().prove(u32::MAX).unwrap();
    proof.peaks.iter().map(|peak| peak.inputs).collect()
}

#[test]
fn least_warm_up_takes_the_time_of_megatrons_and_holds_less() {
    let one = Costs::new(1, 1, 0);
    let time = |warm_up, p, m| timed(&interleaved(2, warm_up).plan(p, m).unwrap(), one).0;
    assert_eq!((time(MEGATRON, 4, 8), time(LEAST, 4, 8)), (38, 38));
    assert_eq!(peaks(interleaved(2, MEGATRON), 4, 8), [11, 9, 7, 5]);
    assert_eq!(peaks(interleaved(2, LEAST), 4, 8), [8, 7, 6, 5]);
    assert_eq!((time(MEGATRON, 8, 16), time(LEAST, 8, 16)), (78, 78));
    assert_eq!(peaks(interleaved(2, MEGATRON), 8, 16), [23, 21, 19, 17, 15, 13, 11, 9]);
    assert_eq!(peaks(interleaved(2, LEAST), 8, 16), [16, 15, 14, 13, 12, 11, 10, 9]);
}

#[test]
fn three_stages_hold_3_2_1_microbatches_by_1f1b_and_4_by_gpipe() {
    assert_eq!(peaks(Schedule::OneFOneB, 3, 4), [3, 2, 1]);
    assert_eq!(peaks(Schedule::GPipe, 3, 4), [4, 4, 4]);
}

#[test]
fn recomputation_holds_one_microbatch_and_repeats_forward() {
    for (p, m) in [(1, 1), (3, 4), (4, 8)] {
        for schedule in [Schedule::GPipe, Schedule::OneFOneB] {
            let plan = schedule.plan(p, m).unwrap().recompute(true);
            for (stage, peak) in (0..).zip(plan.prove(0).unwrap().peaks) {
                assert_eq!(peak, Peak { inputs: held(schedule, p, m, stage), activations: 1 });
            }
            let pass = 2 * 2 + 3 + 1;
            let time = u64::from(m + p - 1) * pass;
            assert_eq!(timed(&plan, Costs::new(2, 3, 1)), (time, u64::from(p - 1) * pass));
        }
    }
    // Gradients of weights that are put off keep what was computed again.
    let proof = Schedule::ZeroBubbleH1.plan(4, 8).unwrap().recompute(true).prove(0).unwrap();
    assert_eq!(proof.peaks.iter().map(|peak| peak.activations).collect::<Vec<_>>(), [1, 2, 3, 4]);
}

#[test]
fn slow_messages_delay_the_first_stage_by_a_round_trip() {
    let plan = Schedule::OneFOneB.plan(4, 1).unwrap();
    let slow = Costs { transfer: 5, ..Costs::new(1, 1, 1) };
    assert_eq!(timed(&plan, slow).0, timed(&plan, Costs::new(1, 1, 1)).0 + 6 * 5);
}

#[test]
fn largest_costs_end_at_the_largest_time() {
    let plan = Schedule::OneFOneB.plan(2, 2).unwrap().recompute(true);
    let most = Costs { transfer: u64::MAX, ..Costs::new(u64::MAX, u64::MAX, u64::MAX) };
    assert_eq!(plan.time(0, most).unwrap().time(), u64::MAX);
}

#[test]
fn one_message_after_another_deadlocks_no_sooner_than_the_page_says() {
    for (p, m) in (1..=8).flat_map(|p| (1..=20).map(move |m| (p, m))) {
        let plans =
            schedules(p, m).into_iter().map(|schedule| (Some(schedule), schedule.plan(p, m).unwrap()));
        for (schedule, plan) in plans.chain(dual_pipe(p, m).ok().map(|plan| (None, plan))) {
            let one_by_one = plan.one_by_one();
            let single = |step: &Step| !matches!(step, Step::Transfer(group) if group.len() != 1);
            assert!(one_by_one.stages().iter().flatten().all(single), "{schedule:?} {p} {m}");
            let (least, grouped) = (one_by_one.least_unread().unwrap(), plan.least_unread().unwrap());
            match schedule {
                Some(Schedule::GPipe | Schedule::OneFOneB) => assert_eq!(least, 0, "{schedule:?} {p} {m}"),
                _ => assert!(least <= grouped + 1, "{schedule:?} {p} {m}: {least}, {grouped}"),
            }
        }
    }
}

/// Both stages of a step send first, or both receive first: each waits for the other.
#[test]
fn stages_that_have_messages_for_each_other_deadlock_in_one_order() {
    let plan = Schedule::OneFOneB.plan(4, 8).unwrap().one_by_one();
    let sends_first = plan.stages().iter().map(|steps| {
        let mut steps = steps.clone();
        for pair in 1..steps.len() {
            let side = |step: &Step| match step {
                Step::Transfer(group) => Some(group[0].direction),
                Step::Compute(_) | Step::Overlap { .. } => None,
            };
            if (side(&steps[pair - 1]), side(&steps[pair]))
                == (Some(Direction::Receive), Some(Direction::Send))
            {
                steps.swap(pair - 1, pair);
            }
        }
        steps
    });
    let sends_first = Plan::new(plan.shape(), sends_first.collect()).unwrap();
    let error = sends_first.prove(0).unwrap_err();
    let PipelineError::Deadlock { waiting } = &error else { panic!("{error}") };
    assert!(waiting.iter().any(|(_, transfer)| transfer.direction == Direction::Send), "{error}");
    sends_first.prove(1).unwrap();
}

#[test]
fn shapes_without_a_plan_are_refused_with_the_arithmetic() {
    let error = interleaved(2, LEAST).plan(4, 10).unwrap_err();
    assert_eq!(error, PipelineError::Rounds { microbatches: 10, stages: 4, model_chunks: 2 });
    assert_eq!(
        error.to_string(),
        "10 microbatches on 4 stages: 10 mod 4 = 2, but 2 model chunks need whole rounds"
    );
    assert_eq!(Schedule::GPipe.plan(0, 4), Err(PipelineError::None { what: "stage" }));
    assert_eq!(Schedule::OneFOneB.plan(4, 0), Err(PipelineError::None { what: "microbatch" }));
    assert_eq!(interleaved(0, LEAST).plan(4, 4), Err(PipelineError::None { what: "model chunk" }));
    for (stages, microbatches) in [(u32::MAX, 1), (1, u32::MAX), (u32::MAX, u32::MAX)] {
        let error = Schedule::GPipe.plan(stages, microbatches).unwrap_err();
        assert!(matches!(error, PipelineError::TooMany { most: 1_048_576, .. }), "{error}");
    }
    assert!(matches!(dual_pipe(1 << 16, 1 << 31), Err(PipelineError::TooMany { .. })));
    let shape = Shape { stages: 3, microbatches: 1, model_chunks: 1, route: Route::Rounds };
    assert_eq!(Plan::new(shape, Vec::new()), Err(PipelineError::Stages { seen: 0, stages: 3 }));
}

#[test]
fn passes_of_megatrons_first_stage_are_in_its_order() {
    let plan = interleaved(2, MEGATRON).plan(2, 4).unwrap();
    let passes: Vec<_> = plan.passes(0).map(|of| (of.pass, of.microbatch, of.model_chunk)).collect();
    let (f, b) = (Pass::Forward, Pass::Backward);
    let right = [
        (f, 0, 0),
        (f, 1, 0),
        (f, 0, 1),
        (f, 1, 1),
        (f, 2, 0),
        (b, 0, 1),
        (f, 3, 0),
        (b, 1, 1),
        (f, 2, 1),
        (b, 0, 0),
        (f, 3, 1),
        (b, 1, 0),
        (b, 2, 1),
        (b, 3, 1),
        (b, 2, 0),
        (b, 3, 0),
    ];
    assert_eq!(passes, right);
}

#[test]
fn dual_pipe_up_to_16_stages_and_64_microbatches_proves() {
    for p in (2..=16).step_by(2) {
        for m in (2 * p..=64).step_by(2) {
            let plan = dual_pipe(p, m).unwrap();
            let proof = plan.prove(1).unwrap_or_else(|error| panic!("{p} stages, {m} microbatches: {error}"));
            assert_eq!(proof.messages, u64::from(2 * m * (p - 1)));
            assert_eq!(proof.peaks, vec![Peak { inputs: p + 1, activations: p + 1 }; p as usize], "{p} {m}");
        }
    }
    assert_eq!(dual_pipe(8, 24).unwrap().least_unread(), Ok(1));
}

#[test]
fn dual_pipe_idles_for_the_published_time() {
    // The paper's formula takes a forward pass to cost as much as the gradients of inputs.
    for (f, w, overlap) in [(1, 1, 3), (10, 5, 25), (10, 5, 20), (4, 3, 9), (3, 0, 6)] {
        let costs = Costs { overlap, ..Costs::new(f, f, w) };
        for p in [2, 4, 6, 8, 16] {
            for m in [2 * p, 2 * p + 2, 4 * p, 6 * p] {
                let timeline = dual_pipe(p, m).unwrap().time(u32::MAX, costs).unwrap();
                let idle = (0..p as usize).map(|stage| timeline.time() - timeline.busy(stage)).max().unwrap();
                let bubble = u64::from(p / 2 - 1) * (overlap + (f + w) - 3 * w);
                assert_eq!(idle, bubble, "{p} stages, {m} microbatches, {costs:?}");
            }
        }
    }
}

#[test]
fn dual_pipe_of_odd_or_few_microbatches_is_refused() {
    for (stages, microbatches) in [(3, 8), (4, 9), (4, 6)] {
        assert_eq!(dual_pipe(stages, microbatches), Err(PipelineError::Dual { stages, microbatches }));
    }
    assert_eq!(dual_pipe(0, 0), Err(PipelineError::None { what: "stage" }));
    let shape = Shape { stages: 2, microbatches: 1, model_chunks: 3, route: Route::BothWays };
    assert_eq!(Plan::new(shape, vec![Vec::new(); 2]), Err(PipelineError::Ways { model_chunks: 3 }));
}
