//! The order of a forward pass: one for the step that is carried out and for the one that is only timed.

use std::collections::VecDeque;

use crate::error::{Error, Stream, Work};
use crate::overlap::{Forecast, Graph, Rotation};

/// What the nodes of a forward pass do to a chunk.
pub(super) trait Forward: Sync {
    fn dispatch(&self, chunk: usize) -> Result<(), Error>;
    fn shared(&self) -> Result<(), Error>;
    fn experts(&self, chunk: usize) -> Result<(), Error>;
    fn combine(&self, chunk: usize) -> Result<(), Error>;
    fn sum(&self, chunk: usize) -> Result<(), Error>;
}

/// How many dispatches are in front of the combine of the chunk that experts are at. Where transfers take as long as experts, a combine
/// that is late holds up what is behind it on the link: this much may be late before experts have nothing to do.
const AHEAD: usize = 4;

/// Chunk by chunk, dispatches ahead. Sums come last, where they hold up no experts: all but the last are beside the last combine.
pub(super) fn forward<'g, G, W: Forward>(step: &'g W, chunks: usize, mut turns: Rotation) -> Graph<'g, G> {
    let (compute, transfer) = (Stream::Compute(0), Stream::Transfer(0));
    let work = |name, chunk: usize| Work { name, chunk: chunk as u32 };
    let mut graph = Graph::new();
    let dispatch = |graph: &mut Graph<'g, G>, chunk: usize| {
        graph.add(transfer, work("dispatch", chunk), &[], move |_| step.dispatch(chunk))
    };
    let mut landing = VecDeque::with_capacity(1 + AHEAD);
    landing.extend((0..chunks.min(AHEAD)).map(|chunk| dispatch(&mut graph, chunk)));
    let beside = graph.add(compute, work("shared expert", 0), &[], |_| step.shared());
    let mut home = Vec::with_capacity(chunks);
    for chunk in 0..chunks {
        if chunk + AHEAD < chunks {
            landing.push_back(dispatch(&mut graph, chunk + AHEAD));
        }
        let landed = landing.pop_front();
        let after = landed.as_slice();
        let made = turns.add(&mut graph, work("experts", chunk), after, move |_| step.experts(chunk));
        home.push(graph.add(transfer, work("combine", chunk), &[made], move |_| step.combine(chunk)));
    }
    for (chunk, combine) in home.into_iter().enumerate() {
        graph.add(compute, work("sum", chunk), &[combine, beside], move |_| step.sum(chunk));
    }
    graph
}

/// Nothing is carried out.
struct Timed;

impl Forward for Timed {
    fn dispatch(&self, _: usize) -> Result<(), Error> {
        Ok(())
    }
    fn shared(&self) -> Result<(), Error> {
        Ok(())
    }
    fn experts(&self, _: usize) -> Result<(), Error> {
        Ok(())
    }
    fn combine(&self, _: usize) -> Result<(), Error> {
        Ok(())
    }
    fn sum(&self, _: usize) -> Result<(), Error> {
        Ok(())
    }
}

/// How long an overlapped forward pass of so many chunks would take, in nanoseconds, if each piece of its work took as long as
/// `cost` says: `dispatch`, `combine`, `experts` and `sum` of a chunk, and the `shared expert`.
///
/// ```
/// use sidelane::layer::forward_times;
///
/// // Experts that take as long as both transfers: all of these hide but the first and the last.
/// let cost = |work: &str| match work {
///     "dispatch" | "combine" => 5,
///     "experts" => 10,
///     _ => 0,
/// };
/// assert_eq!(forward_times(16, cost), 5 + 16 * 10 + 5);
/// ```
pub fn forward_times(chunks: u32, cost: impl Fn(&str) -> u64) -> u64 {
    let forecast = Forecast::new(|at| cost(at.work.name));
    match forward(&Timed, chunks as usize, Rotation::new(1, 1)).run(&forecast) {
        Ok(()) => forecast.ns(),
        Err(error) => unreachable!("nothing of it can fail: {error}"),
    }
}
