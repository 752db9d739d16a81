//! Mutants of plans: the proof finds those that compute something else, and no others.

use sidelane_parallel::PipelineError;
use sidelane_parallel::pipeline::{
    Compute, Direction, Pass, Plan, Schedule, Step, Transfer, WarmUp, dual_pipe,
};

use crate::naive_pipeline;

fn plans() -> Vec<(&'static str, Plan)> {
    let interleaved = |warm_up| Schedule::Interleaved { model_chunks: 2, warm_up };
    [
        ("GPipe", Schedule::GPipe, 3, 4),
        ("1F1B", Schedule::OneFOneB, 4, 6),
        ("interleaved", interleaved(WarmUp::Megatron), 3, 6),
        ("two stages, interleaved", interleaved(WarmUp::Least), 2, 4),
        ("one stage, interleaved", interleaved(WarmUp::Least), 1, 3),
        ("ZB-H1", Schedule::ZeroBubbleH1, 4, 5),
        ("ZB-H2", Schedule::ZeroBubbleH2, 3, 6),
    ]
    .map(|(name, schedule, p, m)| (name, schedule.plan(p, m).unwrap()))
    .into_iter()
    .chain([("DualPipe", dual_pipe(4, 8).unwrap())])
    .collect()
}

/// The plan with another list of one stage.
fn changed(plan: &Plan, stage: usize, change: impl FnOnce(&mut Vec<Step>)) -> Plan {
    let mut stages = plan.stages().to_vec();
    change(&mut stages[stage]);
    Plan::new(plan.shape(), stages).unwrap()
}

/// Each place of a plan.
fn places(plan: &Plan) -> Vec<(usize, usize)> {
    let stages = plan.stages().iter().enumerate();
    stages.flat_map(|(stage, steps)| (0..steps.len()).map(move |step| (stage, step))).collect()
}

#[test]
fn swapped_steps_are_found_unless_gradients_stay_the_same() {
    for (name, plan) in plans() {
        let right = naive_pipeline::run(&plan).unwrap();
        let (mut found, mut harmless) = (0, 0);
        for (stage, first) in places(&plan) {
            for second in first + 1..plan.stages()[stage].len() {
                let mutant = changed(&plan, stage, |steps| steps.swap(first, second));
                let same = naive_pipeline::run(&mutant).as_ref() == Some(&right);
                let proof = mutant.prove(u32::MAX);
                assert_eq!(proof.is_ok(), same, "{name}, stage {stage}, steps {first}, {second}: {proof:?}");
                if same { harmless += 1 } else { found += 1 }
            }
        }
        println!("{name}: {found} swaps found, {harmless} harmless");
        assert!(found > harmless, "{name}: {found} {harmless}");
    }
}

#[test]
fn a_moved_step_is_found_unless_gradients_stay_the_same() {
    for (name, plan) in plans() {
        let right = naive_pipeline::run(&plan).unwrap();
        let mut found = 0;
        for (stage, from) in places(&plan) {
            for to in 0..plan.stages()[stage].len() {
                let mutant = changed(&plan, stage, |steps| {
                    let step = steps.remove(from);
                    steps.insert(to, step);
                });
                let same = naive_pipeline::run(&mutant).as_ref() == Some(&right);
                let proof = mutant.prove(u32::MAX);
                assert_eq!(proof.is_ok(), same, "{name}, stage {stage}, step {from} to {to}: {proof:?}");
                found += u32::from(!same);
            }
        }
        assert!(found > 0, "{name}");
    }
}

#[test]
fn a_pass_dropped_or_doubled_is_found() {
    for (name, plan) in plans() {
        for (stage, step) in places(&plan) {
            let Some(compute) = plan.stages()[stage][step].passes().next() else { continue };
            let dropped = changed(&plan, stage, |steps| _ = steps.remove(step));
            assert!(dropped.prove(u32::MAX).is_err(), "{name}: {compute} of stage {stage}");
            let doubled = changed(&plan, stage, |steps| steps.insert(step, steps[step].clone()));
            let twice = PipelineError::Twice { stage: stage as u32, step: step + 1, compute };
            assert_eq!(doubled.prove(u32::MAX), Err(twice), "{name}");
        }
    }
    let plan = Schedule::ZeroBubbleH1.plan(2, 2).unwrap();
    let last = plan.stages()[1].len() - 1;
    let dropped = changed(&plan, 1, |steps| _ = steps.remove(last)).prove(0).unwrap_err();
    assert_eq!(dropped.to_string(), "stage 1: no step makes backward of weights of microbatch 1, chunk 0");
}

/// The plan with one message changed, or dropped.
fn rewired(
    plan: &Plan,
    (stage, step, nth): (usize, usize, usize),
    change: impl FnOnce(Transfer) -> Option<Transfer>,
) -> Plan {
    changed(plan, stage, |steps| {
        let Step::Transfer(group) = &mut steps[step] else { return };
        match change(group[nth]) {
            Some(transfer) => group[nth] = transfer,
            None => _ = group.remove(nth),
        }
    })
}

#[test]
fn a_message_dropped_doubled_or_sent_elsewhere_is_found() {
    let mut mutants = 0;
    for (name, plan) in plans() {
        let shape = plan.shape();
        for (stage, step) in places(&plan) {
            let Step::Transfer(group) = &plan.stages()[stage][step] else { continue };
            for (nth, &transfer) in group.iter().enumerate() {
                let at = (stage, step, nth);
                let other_peer = Transfer { peer: (transfer.peer + 1) % shape.stages, ..transfer };
                let other_microbatch =
                    Transfer { microbatch: (transfer.microbatch + 1) % shape.microbatches, ..transfer };
                let far_microbatch = Transfer { microbatch: shape.microbatches, ..transfer };
                let far_chunk = Transfer { model_chunk: shape.model_chunks, ..transfer };
                let far_peer = Transfer { peer: shape.stages, ..transfer };
                let changes =
                    [None, Some(other_peer), Some(other_microbatch), Some(far_microbatch), Some(far_chunk)];
                for change in changes.into_iter().chain([Some(far_peer)]) {
                    let mutant = rewired(&plan, at, |_| change);
                    assert!(mutant.prove(u32::MAX).is_err(), "{name}: {transfer} became {change:?}");
                    mutants += 1;
                }
                let doubled =
                    changed(&plan, stage, |steps| steps.insert(step, Step::Transfer(vec![transfer])));
                assert!(doubled.prove(u32::MAX).is_err(), "{name}: {transfer} twice");
            }
        }
    }
    assert!(mutants > 500, "{mutants}");
}

#[test]
fn faults_name_the_stage_the_step_and_the_reason() {
    let plan = Schedule::OneFOneB.plan(2, 2).unwrap();
    // Stage 1: receive F0, F0, B0, send B0 and receive F1, F1, B1, send B1.
    let early = changed(&plan, 1, |steps| steps.swap(1, 2)).prove(0).unwrap_err();
    assert_eq!(
        early.to_string(),
        "stage 1, step 1: backward of microbatch 0, chunk 0 comes before forward of microbatch 0, chunk 0"
    );
    let unsent = changed(&plan, 0, |steps| _ = steps.remove(1)).prove(0).unwrap_err();
    assert!(matches!(unsent, PipelineError::Deadlock { .. } | PipelineError::Mismatch { .. }), "{unsent}");
    let sends = |step: &Step| matches!(step, Step::Transfer(group) if group[0].direction == Direction::Send);
    let send = plan.stages()[0].iter().position(sends).unwrap();
    let moved = changed(&plan, 0, |steps| steps.swap(send - 1, send)).prove(0).unwrap_err();
    assert_eq!(
        moved.to_string(),
        "stage 0, step 0: send activation of microbatch 0 for chunk 0 to stage 1 comes before forward of \
         microbatch 0, chunk 0"
    );
    let backward = plan.passes(0).find(|compute| compute.pass == Pass::Backward).unwrap();
    let unknown = changed(&plan, 0, |steps| {
        steps.push(Step::Compute(Compute { microbatch: 9, ..backward }));
    });
    assert!(matches!(unknown.prove(0), Err(PipelineError::Unknown { stage: 0, .. })));
}

#[test]
fn passes_that_need_each_other_do_not_overlap() {
    let plan = Schedule::OneFOneB.plan(2, 2).unwrap();
    let of = |pass, microbatch| Compute { pass, microbatch, model_chunk: 0 };
    // The last stage has forward and backward of microbatch 0 next to each other.
    let both = |forward, backward| {
        changed(&plan, 1, |steps| {
            steps.splice(1..3, [Step::Overlap { forward, backward }]);
        })
    };
    let (forward, backward) = (of(Pass::Forward, 0), of(Pass::Backward, 0));
    let needs = PipelineError::BeforePass { stage: 1, step: 1, compute: backward, needs: forward };
    assert_eq!(both(forward, backward).prove(0), Err(needs));
    let wrong = PipelineError::Overlap { stage: 1, step: 1, forward: backward, backward: forward };
    assert_eq!(both(backward, forward).prove(0), Err(wrong));
}
