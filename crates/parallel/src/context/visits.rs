//! Blocks of all ranks visit this one, each next to the compute of the one before.
//!
//! ```text
//!   forward     transfer 0 | take 1    take 2    take 3
//!               compute 0  | see 0     see 1     see 2     see 3
//!               compute 1  |           add 0     add 1     add 2     add 3
//!
//!   backward    transfer 0 | take 1    take 2    pass 1    take 3    pass 2    pass 3    pass 4
//!               compute 0  | see 0     see 1               see 2               see 3
//!               compute 1  |           add 0               add 1     add 2               add 3
//! ```
//!
//! `take` gives the block that is seen to the next rank, and takes that of the rank before. `see`
//! computes with a block, `add` adds the result to those of the blocks before. Forward the sum
//! stays on its rank. Backward it belongs to the block and travels behind it: `pass` gives it to
//! the next rank, and takes the sum of the block that this rank sees now. The last `pass` returns
//! it.
//!
//! A block is taken while the one before is seen, not earlier: `take i + 1` waits for `see i - 1`.
//! So a rank holds two blocks, however many there are.
//!
//! Messages to a rank wait for its receive once two slots are full. So ranks of even numbers send
//! first and others receive first: ranks that all send first would wait for each other for ever.

use std::sync::Arc;

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::overlap::{Graph, Handoff, HostExecutor, Node, NodeLabel, StreamId};

use crate::calls::reason;
use crate::check::Member;
use crate::float::Float;

/// Work of a step. Numbers are those of blocks, in the order in which a rank sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Take(u32),
    See(u32),
    Pass(u32),
    Add(u32),
}

impl Work {
    fn stream(self) -> StreamId {
        match self {
            Work::Take(_) | Work::Pass(_) => StreamId::Transfer(0),
            Work::See(_) => StreamId::Compute(0),
            Work::Add(_) => StreamId::Compute(1),
        }
    }

    fn label(self) -> NodeLabel {
        let (name, chunk) = match self {
            Work::Take(nth) => ("take", nth),
            Work::See(nth) => ("see", nth),
            Work::Pass(nth) => ("pass", nth),
            Work::Add(nth) => ("add", nth),
        };
        NodeLabel::new(name, chunk)
    }
}

/// The steps of a rank in launch order, each with those of other streams that it waits for.
fn plan(ranks: u32, passes: bool) -> Vec<(Work, Vec<Work>)> {
    let mut steps = Vec::new();
    for nth in 0..ranks {
        let before = |distance: u32| nth.checked_sub(distance);
        if nth + 1 < ranks {
            steps.push((Work::Take(nth + 1), before(1).map(Work::See).into_iter().collect()));
        }
        let taken = (nth > 0).then_some(Work::Take(nth));
        // At most one block waits to be added.
        steps.push((Work::See(nth), taken.into_iter().chain(before(2).map(Work::Add)).collect()));
        let passed = before(1).filter(|_| passes).map(|before| {
            steps.push((Work::Pass(nth), vec![Work::Add(before)]));
            Work::Pass(nth)
        });
        steps.push((Work::Add(nth), [Work::See(nth)].into_iter().chain(passed).collect()));
    }
    if passes && ranks > 1 {
        steps.push((Work::Pass(ranks), vec![Work::Add(ranks - 1)]));
    }
    steps
}

/// A function of a block, which is the one of so many ranks before this one.
pub(super) type See<'a, E, P> = &'a (dyn Fn(u32, &[E]) -> Result<P, Error> + Sync);

/// A function that passes sums on.
pub(super) type PassOn<'a, S> = &'a (dyn Fn(&mut Communicator, S) -> Result<S, Error> + Sync);

/// Computation of a rank with the blocks that visit it.
pub(super) struct Visits<'a, E, P, S> {
    /// The result of a block.
    pub see: See<'a, E, P>,
    /// The sum of results with that of another block.
    pub add: &'a (dyn Fn(Option<S>, P) -> S + Sync),
    /// For sums that travel behind their block.
    pub pass: Option<PassOn<'a, S>>,
}

/// Memory of a rank, which its steps use in turn.
struct Memory<'a, 'g, E, P, S> {
    visits: &'a Visits<'a, E, P, S>,
    member: Member,
    group: Handoff<&'g mut Communicator>,
    own: &'a [E],
    /// By block: for the rank itself, and for the next one.
    blocks: Vec<[Handoff<Arc<Vec<E>>>; 2]>,
    results: Vec<Handoff<P>>,
    sum: Handoff<S>,
}

impl<E: Float, P: Send, S: Send> Visits<'_, E, P, S> {
    /// Lets the blocks of all ranks visit, `own` first. Returns the sum of all results, or that of
    /// the own block if sums travel. Collective: all ranks have blocks of one length.
    pub fn run(&self, group: &mut Communicator, own: &[E], executor: &HostExecutor<'_>) -> Result<S, Error> {
        let member = Member::of(group);
        let memory = Memory {
            visits: self,
            member,
            group: Handoff::new(group),
            own,
            blocks: (0..member.ranks).map(|_| [Handoff::empty(), Handoff::empty()]).collect(),
            results: (0..member.ranks).map(|_| Handoff::empty()).collect(),
            sum: Handoff::empty(),
        };
        let (mut graph, mut nodes) = (Graph::new(), Vec::<(Work, Node)>::new());
        for (work, after) in plan(member.ranks, self.pass.is_some()) {
            let memory = &memory;
            let after = nodes.iter().filter(|(of, _)| after.contains(of)).map(|(_, node)| *node);
            let after: Vec<Node> = after.collect();
            nodes.push((work, graph.add(work.stream(), work.label(), &after, move |_| memory.step(work))));
        }
        graph.run(executor).map_err(reason)?;
        memory.sum.take()
    }
}

impl<E: Float, P, S> Memory<'_, '_, E, P, S> {
    fn step(&self, work: Work) -> Result<(), Error> {
        match work {
            Work::Take(nth) => {
                let received = match nth - 1 {
                    0 => self.exchange(self.own)?,
                    before => self.exchange(&self.blocks[before as usize][1].take()?)?,
                };
                let received = Arc::new(received);
                let [to_see, to_send] = &self.blocks[nth as usize];
                if nth + 1 < self.member.ranks {
                    to_send.put(received.clone())?;
                }
                to_see.put(received)
            }
            Work::See(nth) => {
                let result = match nth {
                    0 => (self.visits.see)(nth, self.own)?,
                    _ => (self.visits.see)(nth, &self.blocks[nth as usize][0].take()?)?,
                };
                self.results[nth as usize].put(result)
            }
            Work::Pass(_) => match self.visits.pass {
                Some(pass) => self.group.with(|group| self.sum.put(pass(group, self.sum.take()?)?)),
                None => Ok(()),
            },
            Work::Add(nth) => {
                let so_far = if nth > 0 { Some(self.sum.take()?) } else { None };
                self.sum.put((self.visits.add)(so_far, self.results[nth as usize].take()?))
            }
        }
    }

    fn exchange(&self, block: &[E]) -> Result<Vec<E>, Error> {
        self.group.with(|group| pass_on(group, block))
    }
}

/// Gives rows to the next rank, and takes as many of the rank before.
pub(super) fn pass_on<E: Float>(group: &mut Communicator, rows: &[E]) -> Result<Vec<E>, Error> {
    let (rank, ranks) = (group.rank(), group.size());
    let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mut received = vec![E::zeroed(); rows.len()];
    if rank.is_multiple_of(2) {
        group.send(next, rows)?;
        group.receive(before, &mut received)?;
    } else {
        group.receive(before, &mut received)?;
        group.send(next, rows)?;
    }
    Ok(received)
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};
    use std::time::Duration;

    use sidelane::World;
    use sidelane::overlap::{GraphTimer, NodeInfo};

    use super::*;

    /// When the steps of a rank would run, by the time of each.
    fn timed(ranks: u32, passes: bool, cost: fn(&str) -> u64) -> GraphTimer<impl Fn(NodeInfo) -> u64> {
        let (mut graph, mut nodes) = (Graph::new(), Vec::<(Work, Node)>::new());
        for (work, after) in plan(ranks, passes) {
            assert!(after.iter().all(|before| nodes.iter().any(|(of, _)| of == before)), "{work:?}");
            let after = nodes.iter().filter(|(of, _)| after.contains(of)).map(|(_, node)| *node);
            let after: Vec<Node> = after.collect();
            nodes.push((work, graph.add(work.stream(), work.label(), &after, |(): &()| Ok(()))));
        }
        let timer = GraphTimer::new(move |at: NodeInfo| cost(at.work.name));
        graph.run(&timer).unwrap();
        timer
    }

    #[test]
    fn transfers_and_sums_hide_behind_the_compute_of_a_block() {
        let cost = |name: &str| match name {
            "see" => 100,
            "add" => 10,
            _ => 40,
        };
        for ranks in [1, 2, 3, 4, 8] {
            let blocks = u64::from(ranks);
            assert_eq!(timed(ranks, false, cost).ns(), 100 * blocks + 10);
            // Of the sums that travel, the last one is returned when all is computed.
            let returned = if ranks > 1 { 40 } else { 0 };
            assert_eq!(timed(ranks, true, cost).ns(), 100 * blocks + 10 + returned);
        }
        // Of transfers that take longer than the compute of a block, that is hidden alone.
        let slow = |name: &str| if name == "take" { 300 } else { 1 };
        assert_eq!(timed(4, false, slow).ns(), 3 * 300 + 2);
    }

    #[test]
    fn block_is_taken_when_the_one_before_is_seen_and_not_earlier() {
        for passes in [false, true] {
            let timer = timed(8, passes, |name| if name == "see" { 100 } else { 1 });
            let span = |name, chunk| {
                let of = NodeLabel::new(name, chunk);
                timer.spans().into_iter().find(|span| span.at.work == of).unwrap()
            };
            for nth in 2..8 {
                assert!(span("take", nth).begin >= span("see", nth - 2).end);
                assert!(span("take", nth).end < span("see", nth - 1).end);
            }
        }
    }

    /// Two ranks see each other's number. `ready` is called when a rank can send, and `begun` when
    /// it begins to see a block.
    fn visit(world: &World, ready: impl FnOnce(), begun: impl Fn(u32) + Sync) -> f32 {
        let mut group = Communicator::builder(&world.all().unwrap()).build().unwrap();
        ready();
        let see = |nth, block: &[f32]| {
            begun(nth);
            Ok(block[0])
        };
        let add = |sum: Option<f32>, value| 10.0 * sum.unwrap_or(0.0) + value;
        let visits = Visits { see: &see, add: &add, pass: None };
        visits.run(&mut group, &[world.rank() as f32 + 1.0], &HostExecutor::new()).unwrap()
    }

    /// A rank that waits for ever fails.
    fn heard(told: &mpsc::Receiver<()>) {
        told.recv_timeout(Duration::from_secs(60)).unwrap();
    }

    /// The first rank sees its own block until the second one sees it, too. The second one sends
    /// nothing before the first one sees its own.
    #[test]
    fn block_leaves_and_the_next_one_comes_while_one_is_seen() {
        let worlds = World::threads(2).unwrap();
        let (first_sees, told_of_first) = mpsc::channel();
        let (second_sees, told_of_second) = mpsc::channel();
        let told_of_second = Mutex::new(told_of_second);
        let first = || {
            visit(
                &worlds[0],
                || (),
                |nth| {
                    if nth == 0 {
                        first_sees.send(()).unwrap();
                        heard(&told_of_second.lock().unwrap());
                    }
                },
            )
        };
        let begun = |nth| {
            if nth == 1 {
                second_sees.send(()).unwrap()
            }
        };
        let sums = std::thread::scope(|scope| {
            let first = scope.spawn(first);
            [visit(&worlds[1], || heard(&told_of_first), begun), first.join().unwrap()]
        });
        assert_eq!(sums, [21.0, 12.0]);
    }
}
