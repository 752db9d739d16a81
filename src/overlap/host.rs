//! Streams of the host: threads that work off their nodes in order.
//!
//! ```text
//!   caller       = its stream ----- node ---- node ----+ run returns when all have ended
//!   a thread     = another stream -- node ---- node ---|
//!   a thread     = another stream ------ node ---------|
//!   (a watcher,    where there is a limit: asleep until the node that is longest at it has had its time)
//! ```
//!
//! Threads are scoped: none outlives the run, regardless of errors in it. They cannot be killed, so
//! a node that takes too long is reported to the hook at its deadline, and returned as an error
//! when it has ended.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Scope;
use std::time::{Duration, Instant};
use std::{fmt, thread};

use super::task_graph::{Edge, GraphEntry, NodeError, run_body};
use super::{Executor, Graph, StreamId};
use crate::bootstrap::{caught, interrupted, spawn_scoped, turn, wait};
use crate::error::{NodeInfo, OverlapError};
use crate::exec::Recorder;
use crate::lane::yield_to_compute;

/// The run that a node of the host belongs to, as that node sees it.
#[derive(Clone, Debug)]
pub struct Run {
    board: Arc<SharedState>,
    node: usize,
}

impl Run {
    /// Whether another node has failed meanwhile, so that this node's results will not be used. A
    /// long node may check this, and end.
    pub fn is_given_up(&self) -> bool {
        self.board.is_given_up()
    }

    /// Lets nodes begin that wait only until this one is [halfway](super::Node::halfway). The rest
    /// of this node is concurrent with them.
    pub fn halfway(&self) {
        self.board.halfway(self.node);
    }
}

/// Called at once when a run is abandoned; returns whether other nodes end by themselves.
type ErrorHook<'h> = dyn Fn(&OverlapError) -> ControlFlow<()> + Sync + 'h;

/// Carries graphs out on threads of the host.
///
/// The caller's thread is the stream [`Compute(0)`](StreamId::Compute), or the first one of the
/// graph if that has no node: so compute nodes find their thread's own state, and all work is done
/// when the caller continues.
#[derive(Clone, Copy)]
pub struct HostExecutor<'h> {
    overlap: bool,
    limit: Option<Duration>,
    hook: Option<&'h ErrorHook<'h>>,
    recorder: Option<&'h Recorder>,
}

impl Default for HostExecutor<'_> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'h> HostExecutor<'h> {
    /// With overlap, without a limit.
    pub fn new() -> Self {
        HostExecutor { overlap: true, limit: None, hook: None, recorder: None }
    }

    /// Without overlap, the same graph runs in launch order on the caller's thread: to the same
    /// bits.
    pub fn overlap(self, overlap: bool) -> Self {
        HostExecutor { overlap, ..self }
    }

    /// How long one node may take. One that takes longer ends the run ([`OverlapError::Overran`]).
    pub fn limit(self, limit: Duration) -> Self {
        HostExecutor { limit: Some(limit), ..self }
    }

    /// Hook that is called when a run is abandoned, at once, while nodes still run, on any thread.
    /// If nodes wait for other ranks, or other ranks for them, the hook cancels its
    /// [`World`](crate::World): all these waits end, and it returns [`Break`](ControlFlow::Break),
    /// since later errors follow from that. With [`Continue`](ControlFlow::Continue) the others go
    /// on, as after a call that all ranks were refused: running nodes are watched as before, and
    /// the hook is called for their errors, too. If one of these ends the run, the run returns it.
    /// The hook must not panic, nor wait for nodes.
    pub fn on_error(self, hook: &'h ErrorHook<'h>) -> Self {
        HostExecutor { hook: Some(hook), ..self }
    }

    /// Records when each node ran, for example in [`World::recorder`](crate::World::recorder), so
    /// that a timeline shows them next to the transfers.
    pub fn recorder(self, recorder: Option<&'h Recorder>) -> Self {
        HostExecutor { recorder, ..self }
    }
}

impl fmt::Debug for HostExecutor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HostExecutor { overlap, limit, .. } = self;
        f.debug_struct("HostExecutor").field("overlap", overlap).field("limit", limit).finish_non_exhaustive()
    }
}

/// A stream with its nodes: their places in launch order, and their work.
type StreamQueue<'a> = Vec<(usize, GraphEntry<'a, Run>)>;

impl Executor for HostExecutor<'_> {
    type Context = Run;

    fn run(&self, graph: Graph<'_, Run>) -> Result<(), OverlapError> {
        let run_state = RunState::new(graph.places().collect(), self);
        let mut queues = self.queues(graph);
        if queues.is_empty() {
            return Ok(());
        }
        let callers = queues.iter().position(|(stream, _)| *stream == StreamId::Compute(0)).unwrap_or(0);
        let (_, own) = queues.swap_remove(callers);
        thread::scope(|scope| {
            let caller = run_state.arrive();
            let mut started = Ok(());
            if self.limit.is_some() {
                started = spawn(scope, &run_state, "sidelane-watch".into(), || run_state.watch());
            }
            for (stream, queue) in queues {
                let guard = run_state.arrive();
                let run_state = &run_state;
                started = started.and_then(|()| {
                    spawn(scope, run_state, thread_name(stream), move || {
                        if matches!(stream, StreamId::Transfer(_)) {
                            yield_to_compute();
                        }
                        work_off(run_state, queue, guard);
                    })
                });
            }
            if let Err(error) = started {
                run_state.give_up(error);
            }
            // Other streams wait for its nodes, whichever way it ends.
            let name = thread::current().name().unwrap_or_default().to_owned();
            caught(|| work_off(&run_state, own, caller)).unwrap_or_else(died(&run_state, name));
            run_state.settle();
        });
        run_state.conclude()
    }
}

impl HostExecutor<'_> {
    /// The streams in the order of their first nodes; one for all without overlap.
    fn queues<'a>(&self, graph: Graph<'a, Run>) -> Vec<(StreamId, StreamQueue<'a>)> {
        let mut queues: Vec<(StreamId, StreamQueue<'a>)> = Vec::new();
        for (index, entry) in graph.entries.into_iter().enumerate() {
            let stream = entry.place.stream;
            match queues.iter_mut().find(|(of, _)| *of == stream || !self.overlap) {
                Some((_, queue)) => queue.push((index, entry)),
                None => queues.push((stream, vec![(index, entry)])),
            }
        }
        queues
    }
}

/// Linux keeps fifteen characters of it.
fn thread_name(stream: StreamId) -> String {
    match stream {
        StreamId::Compute(index) => format!("sidelane-comp{index}"),
        StreamId::Transfer(index) => format!("sidelane-move{index}"),
    }
}

fn spawn<'s>(
    scope: &'s Scope<'s, '_>,
    run_state: &'s RunState<'_>,
    name: String,
    life: impl FnOnce() + Send + 's,
) -> Result<(), OverlapError> {
    spawn_scoped(scope, name.clone(), life, died(run_state, name.clone()))
        .map_err(|error| OverlapError::NoThread { name, errno: error.raw_os_error().unwrap_or(0) })
}

/// A thread has panicked outside the work of its nodes: no further node begins.
fn died(run_state: &RunState<'_>, name: String) -> impl FnOnce(String) {
    move |message| run_state.give_up(OverlapError::ThreadPanicked { name, message })
}

/// The life of a stream.
fn work_off(run_state: &RunState<'_>, queue: StreamQueue<'_>, _guard: StreamGuard<'_, '_>) {
    for (index, GraphEntry { after, body, .. }) in queue {
        turn();
        let Some((run, since)) = run_state.begin(index, &after) else { return };
        let outcome = run_body(body, &run);
        run_state.end(index, since, outcome);
    }
}

/// The shortest sleep of the watcher: limits below it are noticed a little late, and no thread
/// spins.
const SOON: Duration = Duration::from_millis(1);

pub struct RunState<'h> {
    board: Arc<SharedState>,
    places: Vec<NodeInfo>,
    limit: Option<Duration>,
    hook: Option<&'h ErrorHook<'h>>,
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
enum NodeProgress {
    Nothing,
    Half,
    End,
}

#[derive(Debug)]
struct State {
    reached: Vec<NodeProgress>,
    begun: usize,
    /// Running nodes, since when.
    running: Vec<(usize, Instant)>,
    /// Nodes that were reported while they ran: errors that follow from their lateness are not
    /// reported again.
    named: Vec<usize>,
    /// Streams that have not left.
    streams: usize,
    failure: Option<RunFailure>,
    /// The hook is hearing of it.
    telling: bool,
    /// The run has ended for others too: later errors follow from that.
    over: bool,
}

/// What went wrong: the first, or the first that is over for others too.
#[derive(Debug)]
struct RunFailure {
    error: OverlapError,
    /// The node that took too long, and still runs.
    late: Option<usize>,
}

/// A stream that takes part, until this is dropped.
pub struct StreamGuard<'l, 'h>(&'l RunState<'h>);

impl Drop for StreamGuard<'_, '_> {
    fn drop(&mut self) {
        self.0.state().streams -= 1;
        self.0.board.changed.notify_all();
        self.0.rare.notify_all();
    }
}

impl SharedState {
    /// Whether a node has gone wrong.
    pub fn is_given_up(&self) -> bool {
        // Relaxed: advice to end early. The error itself is under the lock.
        self.given_up.load(Ordering::Relaxed)
    }

    /// A node is halfway.
    pub fn halfway(&self, node: usize) {
        let mut state = self.state();
        state.reached[node] = state.reached[node].max(NodeProgress::Half);
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<'h> RunState<'h> {
    pub fn new(places: Vec<NodeInfo>, executor: &HostExecutor<'h>) -> Self {
        let HostExecutor { limit, hook, recorder, .. } = *executor;
        let reached = vec![NodeProgress::Nothing; places.len()];
        let (begun, at_it, named, streams, failure) = (0, Vec::new(), Vec::new(), 0, None);
        let state =
            State { reached, begun, running: at_it, named, streams, failure, telling: false, over: false };
        let (given_up, state, changed) = (AtomicBool::new(false), Mutex::new(state), Condvar::new());
        let board = Arc::new(SharedState { given_up, state, changed });
        RunState { board, places, limit, hook, recorder, rare: Condvar::new() }
    }

    /// A stream takes part.
    pub fn arrive(&self) -> StreamGuard<'_, 'h> {
        self.state().streams += 1;
        StreamGuard(self)
    }

    /// Waits until a node can begin, and returns its argument and its start; none begins after a
    /// failure.
    pub fn begin(&self, node: usize, after: &[Edge]) -> Option<(Run, Instant)> {
        let mut state = self.state();
        let needed = |edge: &Edge| if edge.halfway { NodeProgress::Half } else { NodeProgress::End };
        while state.failure.is_none() && after.iter().any(|edge| state.reached[edge.node] < needed(edge)) {
            state = self.sleep(state);
        }
        state.failure.is_none().then(|| {
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
        if state.failure.is_some() || !interrupted() {
            return state;
        }
        let not_begun = self.places.len() - state.begun;
        self.failure(state, OverlapError::Interrupted { not_begun }, None);
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
        state.reached[node] = NodeProgress::End;
        if state.named.contains(&node) {
            if let Some(RunFailure { error: OverlapError::Overran { took: late_for, .. }, late }) =
                &mut state.failure
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
            self.failure(state, error, None);
        }
    }

    /// Begins no further node.
    pub fn give_up(&self, error: OverlapError) {
        self.failure(self.told(self.state()), error, None);
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
                self.failure(state, error, Some(node));
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
        let failure = self.state().failure.take();
        failure.map_or(Ok(()), |failure| Err(failure.error))
    }

    fn overran(&self, state: &State, node: usize, took: Duration, limit: Duration) -> OverlapError {
        let not_begun = self.places.len() - state.begun;
        OverlapError::Overran { at: self.places[node], took, limit, not_begun }
    }

    /// Records the error, and calls the hook, unless that is in a call.
    fn failure(&self, mut state: MutexGuard<'_, State>, error: OverlapError, late: Option<usize>) {
        if state.over {
            return;
        }
        state.failure.get_or_insert_with(|| RunFailure { error: error.clone(), late });
        state.telling = true;
        // Under the lock, and before the wake: a thread that wakes for it finds the error.
        self.board.given_up.store(true, Ordering::Relaxed);
        self.board.changed.notify_all();
        drop(state);
        // The run is over if the hook panics, too: nothing is known of its nodes.
        let over =
            self.hook.is_none_or(|hook| !matches!(caught(|| hook(&error)), Ok(flow) if flow.is_continue()));
        let mut state = self.state();
        (state.telling, state.over) = (false, over);
        if over {
            state.failure = Some(RunFailure { error, late });
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
