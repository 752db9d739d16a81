//! The messages of a pipeline are proved down to the words of their channels; seeded bugs are
//! found, or listed with the reason why they are harmless.

use sidelane_core::schedule::collective::Staging;
use sidelane_core::schedule::{Flag, Op};
use sidelane_parallel::pipeline::{
    Direction, Plan, Schedule, Step, Transfer, WarmUp, dual_pipe, messages_in_turn,
};
use sidelane_verify::mutate::{Change, Mutation, mutations};
use sidelane_verify::prove::{MutantProver, ProofFailure, prove};
use sidelane_verify::random_check::check;
use sidelane_verify::unroll::{MessageBug, MessageCall, MessageScenario, UnrolledProgram};

/// The step of a stage in which it has the other side of a message.
fn other_side(plan: &Plan, stage: u32, message: &Transfer) -> usize {
    let direction = match message.direction {
        Direction::Send => Direction::Receive,
        Direction::Receive => Direction::Send,
    };
    let other = Transfer { direction, peer: stage, ..*message };
    let has = |step: &Step| matches!(step, Step::Transfer(group) if group.contains(&other));
    plan.stages()[message.peer as usize].iter().position(has).expect("a plan that is proved")
}

/// The calls of each stage. Two messages pass each other where both stages have both in one step;
/// otherwise what a stage receives may depend on what it sends.
fn calls(plan: &Plan) -> Vec<Vec<MessageCall>> {
    let of = |stage: u32, step: &Step| {
        let Step::Transfer(group) = step else { return Vec::new() };
        if let [one, other] = &group[..]
            && one.peer == other.peer
            && other_side(plan, stage, one) == other_side(plan, stage, other)
        {
            return vec![MessageCall::Exchange(one.peer)];
        }
        let side = |direction| group.iter().filter(move |message| message.direction == direction);
        let sends = side(Direction::Send).map(|message| MessageCall::Send(message.peer));
        let receives = side(Direction::Receive).map(|message| MessageCall::Receive(message.peer));
        sends.chain(receives).collect()
    };
    let stages = plan.stages().iter().zip(0..);
    stages.map(|(steps, stage)| steps.iter().flat_map(|step| of(stage, step)).collect()).collect()
}

/// The calls of a [`Pipeline`](sidelane_parallel::pipeline::Pipeline), with its communicators of a
/// pair, and how many these are. A peer has a number of its own in each.
fn calls_one_by_one(plan: &Plan) -> (Vec<Vec<MessageCall>>, u32) {
    let stages = messages_in_turn(plan).unwrap();
    let communicators = stages.iter().flatten().map(|(_, communicator)| communicator + 1).max().unwrap_or(1);
    let call = |(of, communicator): (Transfer, u32)| {
        let peer = communicator * plan.shape().stages + of.peer;
        match of.direction {
            Direction::Send => MessageCall::Send(peer),
            Direction::Receive => MessageCall::Receive(peer),
        }
    };
    let of_stage = |messages: Vec<(Transfer, u32)>| messages.into_iter().map(call).collect();
    (stages.into_iter().map(of_stage).collect(), communicators)
}

fn one_forward_one_backward(stages: u32, microbatches: u32) -> Vec<Vec<MessageCall>> {
    calls(&Schedule::OneFOneB.plan(stages, microbatches).unwrap())
}

fn unroll(calls: &[Vec<MessageCall>], parts: u64, seeded: Option<MessageBug>) -> UnrolledProgram {
    unroll_in((calls, 1), parts, seeded)
}

/// With so many communicators.
fn unroll_in(
    (calls, communicators): (&[Vec<MessageCall>], u32),
    parts: u64,
    seeded: Option<MessageBug>,
) -> UnrolledProgram {
    let ranks = calls.len() as u64 * u64::from(communicators);
    let staging = Staging::new(ranks as u32, ranks * 128).unwrap().with_room(ranks * 164).unwrap();
    let len = parts * staging.slot();
    UnrolledProgram::of_messages(&MessageScenario { calls, staging, len, seeded }).unwrap()
}

#[test]
fn pipeline_ends_for_any_stages_microbatches_and_message_size() {
    for (stages, microbatches) in (1..=8).flat_map(|stages| (1..=9).map(move |of| (stages, of))) {
        let plan = Schedule::OneFOneB.plan(stages, microbatches).unwrap();
        let pipelines = [calls(&plan), calls_one_by_one(&plan).0];
        for (pipeline, parts) in
            pipelines.iter().flat_map(|pipeline| [1, 2, 3, 5].map(|parts| (pipeline, parts)))
        {
            let proof = prove(&unroll(pipeline, parts, None)).unwrap_or_else(|fault| {
                panic!("{stages} stages, {microbatches} microbatches, {parts} parts: {fault}")
            });
            // Of each message and part a put, a word and its wait, an answer; and waits for slots.
            let messages = 2 * u64::from(stages - 1) * u64::from(microbatches);
            assert!(proof.operations as u64 >= 4 * messages * parts);
        }
    }
    let deep = one_forward_one_backward(64, 70);
    prove(&unroll(&deep, 1, None)).unwrap_or_else(|fault| panic!("64 stages: {fault}"));
}

/// Plans of all schedules that these numbers allow.
fn plans(stages: u32, microbatches: u32) -> Vec<Plan> {
    let interleaved = |model_chunks, warm_up| Schedule::Interleaved { model_chunks, warm_up };
    let schedules = [
        Schedule::GPipe,
        Schedule::ZeroBubbleH1,
        Schedule::ZeroBubbleH2,
        interleaved(2, WarmUp::Megatron),
        interleaved(3, WarmUp::Least),
    ];
    let plans = schedules.into_iter().filter_map(|schedule| schedule.plan(stages, microbatches).ok());
    plans.chain(dual_pipe(stages, microbatches)).collect()
}

#[test]
fn every_schedule_is_proved_down_to_the_words_of_its_channels() {
    let (mut proofs, mut several) = (0, 0);
    for (stages, microbatches) in (1..=8).flat_map(|stages| [1, 3, stages, 2 * stages].map(|of| (stages, of)))
    {
        for plan in plans(stages, microbatches) {
            let (calls, communicators) = calls_one_by_one(&plan);
            // Slots are smaller than a message only where none is unread.
            let lengths: &[u64] = if plan.one_by_one().least_unread() == Ok(0) { &[1, 2, 5] } else { &[1] };
            for &parts in lengths {
                prove(&unroll_in((&calls, communicators), parts, None)).unwrap_or_else(|fault| {
                    panic!("{stages} stages, {microbatches} microbatches, {parts} parts: {fault}")
                });
            }
            (proofs, several) = (proofs + 1, several + usize::from(communicators > 1));
        }
    }
    assert!(proofs > 100 && several > 10, "{proofs} proofs, {several} of several communicators");
}

#[test]
fn one_communicator_for_messages_that_need_several_is_a_deadlock() {
    let least = Schedule::Interleaved { model_chunks: 2, warm_up: WarmUp::Least }.plan(8, 16).unwrap();
    let (calls, communicators) = calls_one_by_one(&least);
    assert_eq!(communicators, 2);
    let in_one = |call: &MessageCall| match *call {
        MessageCall::Send(to) => MessageCall::Send(to % 8),
        MessageCall::Receive(from) => MessageCall::Receive(from % 8),
        MessageCall::Exchange(peer) => MessageCall::Exchange(peer % 8),
    };
    let calls: Vec<Vec<_>> = calls.iter().map(|calls| calls.iter().map(in_one).collect()).collect();
    let seen = prove(&unroll(&calls, 1, None));
    assert!(matches!(seen, Err(ProofFailure::Deadlock { .. })), "{seen:?}");
}

#[test]
fn pipelines_run_at_random() {
    for (stages, microbatches) in [(2, 3), (4, 2), (4, 6)] {
        check(&unroll(&one_forward_one_backward(stages, microbatches), 3, None), 0..5).unwrap();
    }
    for plan in plans(4, 8) {
        let (calls, communicators) = calls_one_by_one(&plan);
        check(&unroll_in((&calls, communicators), 1, None), 0..5).unwrap();
    }
}

#[test]
fn every_broken_rule_of_a_pipeline_is_found() {
    let pipeline = one_forward_one_backward(4, 6);
    for (seeded, parts) in
        MessageBug::ALL.into_iter().flat_map(|seeded| [1, 2, 3, 4].map(|parts| (seeded, parts)))
    {
        let seen = prove(&unroll(&pipeline, parts, Some(seeded)));
        match seeded {
            // Parts that fit the two slots of a pair may be sent first: that is their purpose.
            MessageBug::SendFirst if parts <= 2 => assert!(seen.is_ok(), "{parts}: {seen:?}"),
            // A rank that first waits for the other's later message waits forever.
            MessageBug::SendFirst | MessageBug::ReceiveFirst => {
                assert!(matches!(seen, Err(ProofFailure::Deadlock { .. })), "{seeded:?} {parts}: {seen:?}");
            }
            MessageBug::Ungranted | MessageBug::CopyLate => assert!(seen.is_err(), "{seeded:?} {parts}"),
        }
    }
}

/// Reason why a mutant of a message is unobservable; `None` if it must be found. The wait for a
/// slot, which the first parts do not have, is not among them: [`MessageBug::Ungranted`] leaves
/// it out.
fn harmless_in_a_message(mutation: &Mutation) -> Option<&'static str> {
    match (mutation.change, mutation.item.op) {
        (Change::Lower, Op::Signal { flag: Flag::Read, .. }) => Some("the sender waits for one part more"),
        (Change::Retrack, Op::Signal { flag: Flag::Read, .. }) => {
            Some("it is alone in its stage, behind the copy")
        }
        _ => None,
    }
}

#[test]
fn every_mutant_of_a_message_is_found() {
    for (stages, microbatches, parts) in [(2, 3, 3), (4, 6, 3), (3, 4, 5)] {
        let unrolled = unroll(&one_forward_one_backward(stages, microbatches), parts, None);
        let prover = MutantProver::new(&unrolled);
        let (mut found, mut wrong) = (0, Vec::new());
        for mutation in mutations(&unrolled) {
            let mutant = mutation.plant(&unrolled);
            let seen = prover.prove(&mutant);
            // The number of a part decides where its tag lies: some mutants access other bytes.
            assert_eq!(seen, prove(&mutant), "{mutation:?}");
            match (seen, harmless_in_a_message(&mutation)) {
                (Err(_), None) => found += 1,
                (Ok(_), Some(_)) => {}
                (seen, why) => wrong.push(format!("{why:?}: {seen:?}: {mutation:?}")),
            }
        }
        println!("{stages} stages: {found} found");
        assert_eq!(wrong, Vec::<String>::new(), "{stages} stages");
        assert!(found >= 10 * stages as usize, "{stages} stages: {found}");
    }
}

/// The first gradient cannot come before the first output has gone.
#[test]
fn awaiting_gradient_before_sending_output_is_deadlock() {
    for (stages, microbatches) in [(2, 1), (3, 4), (5, 5)] {
        let right = one_forward_one_backward(stages, microbatches);
        for stage in 0..stages - 1 {
            let mut calls = right.clone();
            let calls_here = &mut calls[stage as usize];
            let next = stage + 1;
            let sent = calls_here.iter().position(|&call| call == MessageCall::Send(next)).unwrap();
            let answer = calls_here
                .iter()
                .position(|&call| call == MessageCall::Receive(next) || call == MessageCall::Exchange(next));
            match &mut calls_here[answer.unwrap()] {
                exchange @ MessageCall::Exchange(_) => *exchange = MessageCall::Send(next),
                _ => drop(calls_here.remove(answer.unwrap())),
            }
            calls_here.insert(sent, MessageCall::Receive(next));
            let fault = prove(&unroll(&calls, 1, None)).unwrap_err();
            assert!(matches!(fault, ProofFailure::Deadlock { .. }), "{stages} stages, {stage}: {fault}");
        }
    }
}
