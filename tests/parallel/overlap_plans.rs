//! Plans of products next to transfers: each is proved, and mutants are found by the proof exactly
//! where some order of the two streams computes something else.

use std::collections::HashSet;

use sidelane::overlap::{StreamId, TokenChunks};
use sidelane_parallel::OverlapPlanError;
use sidelane_parallel::tensor::overlap::{Cell, LinearPass, Plan, Step, Work};

fn plan(pass: LinearPass, chunks: u32) -> Plan {
    Plan::new(pass, TokenChunks::new(chunks))
}

#[test]
fn every_plan_proves_for_groups_of_up_to_sixteen_ranks() {
    for pass in LinearPass::ALL {
        for chunks in (1..=12).chain([32, 64]) {
            let plan = plan(pass, chunks);
            for ranks in 1..=16 {
                assert_eq!(plan.prove(ranks), Ok(()), "{pass:?}, {chunks} chunks, {ranks} ranks");
            }
        }
    }
}

#[test]
fn plans_lay_each_transfer_next_to_products_of_another_chunk() {
    assert_eq!(
        plan(LinearPass::ColumnForward, 3).to_string(),
        "transfer 0 | compare, gather 0, gather 1, gather 2\n\
         compute 0  | own, multiply 0 (gather 0), multiply 1 (gather 1), multiply 2 (gather 2)\n"
    );
    assert_eq!(
        plan(LinearPass::RowForward, 2).to_string(),
        "transfer 0 | compare, reduce 0 (multiply 0), reduce 1 (multiply 1)\n\
         compute 0  | multiply 0, multiply 1\n"
    );
    assert_eq!(
        plan(LinearPass::ColumnBackward, 2).to_string(),
        "transfer 0 | compare, gather 0, gather 1, reduce 0 (multiply 0), reduce 1 (multiply 1)\n\
         compute 0  | multiply 0, multiply 1, weights (gather 1)\n"
    );
    assert_eq!(
        plan(LinearPass::RowBackward, 1).to_string(),
        "transfer 0 | gather 0\ncompute 0  | multiply 0 (gather 0), weights (gather 0)\n"
    );
}

/// Memory of a rank amid its steps, and whether something went wrong.
struct Rank<'p> {
    plan: &'p Plan,
    me: u32,
    ranks: u32,
}

impl Rank<'_> {
    /// Whether every order of the two streams makes each result once, of what is there.
    fn works(&self) -> bool {
        let steps = self.plan.steps();
        if steps.iter().enumerate().any(|(at, step)| step.after.iter().any(|&needs| needs >= at)) {
            return false;
        }
        let of = |transfers: bool| -> Vec<usize> {
            let on = |step: &Step| matches!(step.work.stream(), StreamId::Transfer(_)) == transfers;
            (0..steps.len()).filter(|&at| on(&steps[at])).collect()
        };
        let (transfers, products) = (of(true), of(false));
        let (mut open, mut seen) = (vec![(0, 0)], HashSet::new());
        while let Some((moved, made)) = open.pop() {
            if !seen.insert((moved, made)) {
                continue;
            }
            let done: Vec<usize> = transfers[..moved].iter().chain(&products[..made]).copied().collect();
            let ready = |at: &usize| steps[*at].after.iter().all(|needs| done.contains(needs));
            for (next, to) in
                [(transfers.get(moved), (moved + 1, made)), (products.get(made), (moved, made + 1))]
            {
                let Some(&at) = next.filter(|at| ready(at)) else { continue };
                if !self.may_run(steps[at].work, &done) {
                    return false;
                }
                open.push(to);
            }
        }
        let all: Vec<usize> = (0..steps.len()).collect();
        seen.contains(&(transfers.len(), products.len())) && self.is_complete(&all)
    }

    fn count(&self, done: &[usize], work: Work) -> usize {
        done.iter().filter(|&&at| self.plan.steps()[at].work == work).count()
    }

    fn owns(&self) -> bool {
        let pass = self.plan.pass();
        let gathers = matches!(pass, LinearPass::ColumnForward | LinearPass::RowBackward);
        gathers && self.plan.chunks().count() > 1
    }

    fn may_run(&self, work: Work, done: &[usize]) -> bool {
        let (pass, chunks) = (self.plan.pass(), self.plan.chunks().count());
        let has = |work| self.count(done, work) > 0;
        let compared = chunks == 1 || has(Work::Compare);
        let exists = |chunk| chunk < chunks;
        match (work, pass) {
            (Work::Compare, _) => chunks > 1 && !has(Work::Compare),
            (Work::Gather(_), LinearPass::RowForward) => false,
            (Work::Gather(chunk), _) => exists(chunk) && compared,
            (Work::Own, _) => self.owns(),
            (Work::Multiply(chunk), LinearPass::RowForward | LinearPass::ColumnBackward) => exists(chunk),
            // A rank alone has no rows of others.
            (Work::Multiply(chunk), _) => {
                exists(chunk) && (has(Work::Gather(chunk)) || self.owns() && self.ranks == 1)
            }
            (Work::Reduce(_), LinearPass::ColumnForward | LinearPass::RowBackward) => false,
            (Work::Reduce(chunk), _) => exists(chunk) && compared && has(Work::Multiply(chunk)),
            (Work::Weights, LinearPass::ColumnForward | LinearPass::RowForward) => false,
            (Work::Weights, _) => (0..chunks).all(|chunk| has(Work::Gather(chunk))),
        }
    }

    fn is_complete(&self, done: &[usize]) -> bool {
        let (pass, chunks) = (self.plan.pass(), self.plan.chunks().count());
        let count = |work| self.count(done, work);
        let products_of = |rank: u32, chunk| {
            let multiplied = if rank != self.me || !self.owns() { count(Work::Multiply(chunk)) } else { 0 };
            let own = if rank == self.me { count(Work::Own) } else { 0 };
            multiplied + own
        };
        let reduces = matches!(pass, LinearPass::RowForward | LinearPass::ColumnBackward);
        let weights = usize::from(matches!(pass, LinearPass::ColumnBackward | LinearPass::RowBackward));
        let gathers = (0..chunks).all(|chunk| count(Work::Gather(chunk)) <= 1);
        let products = (0..self.ranks).all(|rank| (0..chunks).all(|chunk| products_of(rank, chunk) == 1));
        let sums = !reduces || (0..chunks).all(|chunk| count(Work::Reduce(chunk)) == 1);
        gathers && products && sums && count(Work::Weights) == weights
    }
}

fn works(plan: &Plan, ranks: u32) -> bool {
    (0..ranks).all(|me| Rank { plan, me, ranks }.works())
}

fn changed(plan: &Plan, change: impl FnOnce(&mut Vec<Step>)) -> Plan {
    let mut steps = plan.steps().to_vec();
    change(&mut steps);
    Plan::from_steps(plan.pass(), plan.chunks(), steps)
}

/// Moves what waits for a step along with it.
fn renumber(steps: &mut [Step], number: impl Fn(usize) -> Option<usize>) {
    for step in steps {
        step.after = step.after.iter().filter_map(|&needs| number(needs)).collect();
    }
}

fn swapped(steps: &mut [Step], first: usize, second: usize) {
    steps.swap(first, second);
    renumber(steps, |at| match at {
        at if at == first => Some(second),
        at if at == second => Some(first),
        at => Some(at),
    });
}

fn dropped(steps: &mut Vec<Step>, at: usize) {
    steps.remove(at);
    renumber(steps, |needs| (needs != at).then(|| if needs > at { needs - 1 } else { needs }));
}

fn doubled(steps: &mut Vec<Step>, at: usize) {
    let copy = steps[at].clone();
    steps.insert(at + 1, copy);
    renumber(&mut steps[at + 2..], |needs| Some(if needs > at { needs + 1 } else { needs }));
}

fn renamed(work: Work, chunk: u32) -> Option<Work> {
    match work {
        Work::Gather(_) => Some(Work::Gather(chunk)),
        Work::Multiply(_) => Some(Work::Multiply(chunk)),
        Work::Reduce(_) => Some(Work::Reduce(chunk)),
        Work::Compare | Work::Own | Work::Weights => None,
    }
}

#[test]
fn proof_finds_exactly_plans_that_fail_in_some_stream_order() {
    let (mut found, mut harmless) = (0, 0);
    let mut judge = |plan: &Plan, what: &str| {
        for ranks in 1..=3 {
            let (right, proof) = (works(plan, ranks), plan.prove(ranks));
            assert_eq!(proof.is_ok(), right, "{what}, {ranks} ranks: {proof:?}\n{plan}");
            if right { harmless += 1 } else { found += 1 }
        }
    };
    for pass in LinearPass::ALL {
        for chunks in 1..=4 {
            let plan = plan(pass, chunks);
            judge(&plan, "no change");
            for at in 0..plan.steps().len() {
                let Step { work, after } = plan.steps()[at].clone();
                judge(&changed(&plan, |steps| dropped(steps, at)), &format!("without {work}"));
                judge(&changed(&plan, |steps| doubled(steps, at)), &format!("{work} twice"));
                for edge in 0..after.len() {
                    let mutant = changed(&plan, |steps| _ = steps[at].after.remove(edge));
                    judge(&mutant, &format!("{work} waits for less"));
                }
                for chunk in 0..=chunks {
                    let Some(other) = renamed(work, chunk) else { continue };
                    judge(&changed(&plan, |steps| steps[at].work = other), &format!("{work} as {other}"));
                }
                for second in at + 1..plan.steps().len() {
                    let mutant = changed(&plan, |steps| swapped(steps, at, second));
                    judge(&mutant, &format!("steps {at} and {second} swapped"));
                }
            }
        }
    }
    println!("{found} mutants found, {harmless} harmless");
    assert!(found > 1000 && harmless > 100, "{found} {harmless}");
}

#[test]
fn faults_name_the_step_and_what_it_lacks() {
    let forward = plan(LinearPass::ColumnForward, 2);
    // compare, gather 0, own, gather 1, multiply 0, multiply 1.
    let early = changed(&forward, |steps| steps[4].after.clear()).prove(2).unwrap_err();
    assert_eq!(early.to_string(), "step 4, multiply 0, is not ordered behind rows of rank 1, chunk 0");
    let missing = changed(&forward, |steps| dropped(steps, 2)).prove(2).unwrap_err();
    assert_eq!(missing, OverlapPlanError::Missing { cell: Cell::Products { rank: 0, chunk: 0 } });
    let uncompared = changed(&forward, |steps| dropped(steps, 0)).prove(2).unwrap_err();
    assert_eq!(uncompared, OverlapPlanError::Uncompared { step: 0, work: Work::Gather(0) });
    let ahead = changed(&forward, |steps| steps[4].after = vec![4]).prove(2).unwrap_err();
    assert_eq!(ahead, OverlapPlanError::Ahead { step: 4, work: Work::Multiply(0), needs: 4 });
    let stray = changed(&forward, |steps| steps[5].work = Work::Reduce(0)).prove(2).unwrap_err();
    assert_eq!(stray.to_string(), "step 5: the pass has no reduce 0");
    let twice = changed(&forward, |steps| doubled(steps, 2)).prove(1).unwrap_err();
    assert_eq!(twice.to_string(), "step 3, own: products of rank 0, chunk 0 are made twice");
}
