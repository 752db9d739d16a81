//! Time of a plan, by what each step would take.

use std::cell::Cell;

use sidelane::layer::Times;
use sidelane::overlap::{Graph, GraphTimer, Node};

use super::plan::{Plan, Work};

impl Plan {
    /// Time of the pass on a rank, next to its transfers and in turn, if each step took the
    /// nanoseconds that `cost` returns.
    ///
    /// ```
    /// use sidelane::overlap::TokenChunks;
    /// use sidelane_parallel::tensor::overlap::{LinearPass, Plan, Work};
    ///
    /// let plan = Plan::new(LinearPass::RowForward, TokenChunks::new(4));
    /// let times = plan.times(|work| match work {
    ///     Work::Multiply(_) => 10,
    ///     Work::Reduce(_) => 7,
    ///     _ => 0,
    /// });
    /// assert_eq!((times.overlapped, times.in_turn), (4 * 10 + 7, 4 * 10 + 4 * 7));
    /// ```
    ///
    /// A step of the caller's own that waits for one behind it waits for nothing here:
    /// [`prove`](Plan::prove) finds it.
    pub fn times(&self, cost: impl Fn(Work) -> u64) -> Times {
        let (mut graph, mut nodes) = (Graph::new(), Vec::<Node>::new());
        for step in self.steps() {
            let after: Vec<Node> = step.after.iter().filter_map(|&at| nodes.get(at)).copied().collect();
            nodes.push(graph.add(step.work.stream(), step.work.label(), &after, |(): &()| Ok(())));
        }
        // It asks for the cost of each node in launch order, once.
        let nth = Cell::new(0);
        let timer = GraphTimer::new(|_| {
            let step = &self.steps()[nth.replace(nth.get() + 1)];
            cost(step.work)
        });
        graph.run(&timer).expect("all nodes are of this graph, and none runs");
        Times { overlapped: timer.ns(), in_turn: self.steps().iter().map(|step| cost(step.work)).sum() }
    }
}
