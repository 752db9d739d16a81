//! Shared state of all streams of a run: progress of nodes, running nodes since when, and failures.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{Hook, HostExecutor, Run};
use crate::bootstrap::{caught, interrupted, wait};
use crate::error::{NodeInfo, OverlapError};
use crate::exec::Recorder;
use crate::overlap::task_graph::Edge;
use crate::overlap::task_graph::NodeError;

/// The shortest sleep of the watcher: limits below it are noticed a little late, and no thread
/// spins.
const SOON: Duration = Duration::from_millis(1);

pub struct RunState<'h> {
    board: Arc<SharedState>,
    places: Vec<NodeInfo>,
    limit: Option<Duration>,
    hook: Option<&'h Hook<'h>>,
    recorder: Option<&'h Recorder>,
    /// A stream has left, or it is over: the watcher need not wake up for every node.
    rare: Condvar,
}

/// What nodes see of it, too.
#[derive(Debug)]
pub struct SharedState {
    given_up: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

/// How far a node is, for those that wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reached {
    Nothing,
    Half,
    End,
}

#[derive(Debug)]
struct State {
    reached: Vec<Reached>,
    begun: usize,
    /// Running nodes, since when.
    running: Vec<(usize, Instant)>,
    /// Nodes that were reported while they ran: errors that follow from their lateness are not
    /// reported again.
    named: Vec<usize>,
    /// Streams that have not left.
    streams: usize,
    trouble: Option<Trouble>,
    /// The hook is hearing of it.
    telling: bool,
    /// The run has ended for others too: later errors follow from that.
    over: bool,
}

/// What went wrong: the first, or the first that is over for others too.
#[derive(Debug)]
struct Trouble {
    error: OverlapError,
    /// The node that took too long, and still runs.
    late: Option<usize>,
}

/// A stream that takes part, until this is dropped.
pub struct Leaving<'l, 'h>(&'l RunState<'h>);

impl Drop for Leaving<'_, '_> {
    fn drop(&mut self) {
        self.0.state().streams -= 1;
        self.0.board.changed.notify_all();
        self.0.rare.notify_all();
    }
}

impl SharedState {
    /// Whether a node has gone wrong.
    pub fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }

    /// A node is halfway.
    pub fn halfway(&self, node: usize) {
        let mut state = self.state();
        state.reached[node] = state.reached[node].max(Reached::Half);
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<'h> RunState<'h> {
    pub fn new(places: Vec<NodeInfo>, executor: &HostExecutor<'h>) -> Self {
        let HostExecutor { limit, hook, recorder, .. } = *executor;
        let reached = vec![Reached::Nothing; places.len()];
        let (begun, at_it, named, streams, trouble) = (0, Vec::new(), Vec::new(), 0, None);
        let state =
            State { reached, begun, running: at_it, named, streams, trouble, telling: false, over: false };
        let (given_up, state, changed) = (AtomicBool::new(false), Mutex::new(state), Condvar::new());
        let board = Arc::new(SharedState { given_up, state, changed });
        RunState { board, places, limit, hook, recorder, rare: Condvar::new() }
    }

    /// A stream takes part.
    pub fn arrive(&self) -> Leaving<'_, 'h> {
        self.state().streams += 1;
        Leaving(self)
    }

    /// Waits until a node can begin, and returns its argument and its start; none begins after a
    /// failure.
    pub fn begin(&self, node: usize, after: &[Edge]) -> Option<(Run, Instant)> {
        let mut state = self.state();
        let needed = |edge: &Edge| if edge.halfway { Reached::Half } else { Reached::End };
        while state.trouble.is_none() && after.iter().any(|edge| state.reached[edge.node] < needed(edge)) {
            state = self.sleep(state);
        }
        state.trouble.is_none().then(|| {
            let now = Instant::now();
            state.begun += 1;
            state.running.push((node, now));
            (Run { board: Arc::clone(&self.board), node }, now)
        })
    }

    /// Waits until all streams have left.
    pub fn settle(&self) {
        let mut state = self.state();
        while state.streams > 0 {
            state = self.sleep(state);
        }
    }

    /// Waits for a change. A caller with an interrupt check runs it now and then, and gives up on
    /// its request.
    fn sleep<'g>(&'g self, state: MutexGuard<'g, State>) -> MutexGuard<'g, State> {
        let state = wait::on(&self.board.changed, state, wait::LONGEST);
        if state.trouble.is_some() || !interrupted() {
            return state;
        }
        let not_begun = self.places.len() - state.begun;
        self.trouble(state, OverlapError::Interrupted { not_begun }, None);
        self.state()
    }

    /// A node has ended, which began at `since`.
    pub fn end(&self, node: usize, since: Instant, outcome: Result<(), NodeError>) {
        if let Some(recorder) = self.recorder {
            recorder.span(self.places[node], since);
        }
        let state = self.state();
        let took = since.elapsed();
        let mut state = self.told(state);
        state.running.retain(|(at_it, _)| *at_it != node);
        state.reached[node] = Reached::End;
        if state.named.contains(&node) {
            if let Some(Trouble { error: OverlapError::Overran { took: late_for, .. }, late }) =
                &mut state.trouble
                && *late == Some(node)
            {
                (*late_for, *late) = (took, None);
            }
            return self.board.changed.notify_all();
        }
        let error = match outcome {
            Err(why) => Some(why.at(self.places[node], self.places.len() - state.begun)),
            // Its time was up before the watcher looked.
            Ok(()) => {
                self.limit.filter(|limit| took > *limit).map(|limit| self.overran(&state, node, took, limit))
            }
        };
        self.board.changed.notify_all();
        if let Some(error) = error {
            self.trouble(state, error, None);
        }
    }

    /// Begins no further node.
    pub fn give_up(&self, error: OverlapError) {
        self.trouble(self.told(self.state()), error, None);
    }

    /// Checks whether nodes take too long, until the run has ended for others too, or no node is
    /// left to check.
    pub fn watch(&self) {
        let Some(limit) = self.limit else { return };
        let mut state = self.state();
        while state.streams > 0 && !state.over {
            if state.telling {
                state = self.told(state);
                continue;
            }
            let unnamed = state.running.iter().filter(|(node, _)| !state.named.contains(node));
            let oldest = unnamed.min_by_key(|(_, since)| *since);
            let oldest = oldest.map(|&(node, since)| (node, since.elapsed()));
            if let Some((node, took)) = oldest.filter(|(_, took)| *took >= limit) {
                let error = self.overran(&state, node, took, limit);
                state.named.push(node);
                self.trouble(state, error, Some(node));
                state = self.state();
                continue;
            }
            // A node that begins meanwhile times out later, so its begin needs no wake-up.
            let left = limit - oldest.map_or(Duration::ZERO, |(_, took)| took);
            state = wait::on(&self.rare, state, left.max(SOON));
        }
    }

    /// What went wrong, once all streams have left.
    pub fn conclude(self) -> Result<(), OverlapError> {
        let trouble = self.state().trouble.take();
        trouble.map_or(Ok(()), |trouble| Err(trouble.error))
    }

    fn overran(&self, state: &State, node: usize, took: Duration, limit: Duration) -> OverlapError {
        let not_begun = self.places.len() - state.begun;
        OverlapError::Overran { at: self.places[node], took, limit, not_begun }
    }

    /// Records the error, and calls the hook, unless that is in a call.
    fn trouble(&self, mut state: MutexGuard<'_, State>, error: OverlapError, late: Option<usize>) {
        if state.over {
            return;
        }
        state.trouble.get_or_insert_with(|| Trouble { error: error.clone(), late });
        state.telling = true;
        self.board.given_up.store(true, Ordering::Relaxed);
        self.board.changed.notify_all();
        drop(state);
        // The run is over if the hook panics, too: nothing is known of its nodes.
        let over =
            self.hook.is_none_or(|hook| !matches!(caught(|| hook(&error)), Ok(flow) if flow.is_continue()));
        let mut state = self.state();
        (state.telling, state.over) = (false, over);
        if over {
            state.trouble = Some(Trouble { error, late });
        }
        self.board.changed.notify_all();
        self.rare.notify_all();
    }

    /// Once the hook has returned.
    fn told<'g>(&self, mut state: MutexGuard<'g, State>) -> MutexGuard<'g, State> {
        while state.telling {
            state = wait::on(&self.board.changed, state, wait::LONGEST);
        }
        state
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.board.state()
    }
}
