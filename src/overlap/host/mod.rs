//! Streams of the host: threads that work off their nodes in order.
//!
//! ```text
//!   caller       = its stream ----- node ---- node ----+ run returns when all have ended
//!   a thread     = another stream -- node ---- node ---|
//!   a thread     = another stream ------ node ---------|
//!   (a watcher,    where there is a limit: asleep until the node that is longest at it has had its time)
//! ```
//!
//! Threads are scoped: none outlives the run, whatever happens in it. They cannot be killed, so a
//! node that takes too long is reported to the hook at its deadline, and returned as an error when
//! it has ended.

mod ledger;

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread::{self, Scope};
use std::time::Duration;

use self::ledger::{Leaving, RunState, SharedState};
use super::task_graph::Entry;
use super::task_graph::run_body;
use super::{Executor, Graph, StreamId};
use crate::bootstrap::{caught, spawn_scoped, turn};
use crate::error::OverlapError;
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
type Hook<'h> = dyn Fn(&OverlapError) -> ControlFlow<()> + Sync + 'h;

/// Carries graphs out on threads of the host.
///
/// The caller's thread is the stream [`Compute(0)`](StreamId::Compute), or the first one of the
/// graph if that has no node: so compute nodes find their thread's own state, and all work is done
/// when the caller continues.
#[derive(Clone, Copy)]
pub struct HostExecutor<'h> {
    overlap: bool,
    limit: Option<Duration>,
    hook: Option<&'h Hook<'h>>,
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
    pub fn on_error(self, hook: &'h Hook<'h>) -> Self {
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
type Queue<'a> = Vec<(usize, Entry<'a, Run>)>;

impl Executor for HostExecutor<'_> {
    type Context = Run;

    fn run(&self, graph: Graph<'_, Run>) -> Result<(), OverlapError> {
        let ledger = RunState::new(graph.places().collect(), self);
        let mut queues = self.queues(graph);
        if queues.is_empty() {
            return Ok(());
        }
        let callers = queues.iter().position(|(stream, _)| *stream == StreamId::Compute(0)).unwrap_or(0);
        let (_, own) = queues.swap_remove(callers);
        thread::scope(|scope| {
            let caller = ledger.arrive();
            let mut started = Ok(());
            if self.limit.is_some() {
                started = spawn(scope, &ledger, "sidelane-watch".into(), || ledger.watch());
            }
            for (stream, queue) in queues {
                let leaving = ledger.arrive();
                let ledger = &ledger;
                started = started.and_then(|()| {
                    spawn(scope, ledger, thread_name(stream), move || {
                        if matches!(stream, StreamId::Transfer(_)) {
                            yield_to_compute();
                        }
                        work_off(ledger, queue, leaving);
                    })
                });
            }
            if let Err(error) = started {
                ledger.give_up(error);
            }
            // Other streams wait for its nodes, whichever way it ends.
            let name = thread::current().name().unwrap_or_default().to_owned();
            caught(|| work_off(&ledger, own, caller)).unwrap_or_else(died(&ledger, name));
            ledger.settle();
        });
        ledger.conclude()
    }
}

impl HostExecutor<'_> {
    /// The streams in the order of their first nodes; one for all without overlap.
    fn queues<'a>(&self, graph: Graph<'a, Run>) -> Vec<(StreamId, Queue<'a>)> {
        let mut queues: Vec<(StreamId, Queue<'a>)> = Vec::new();
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
    ledger: &'s RunState<'_>,
    name: String,
    life: impl FnOnce() + Send + 's,
) -> Result<(), OverlapError> {
    spawn_scoped(scope, name.clone(), life, died(ledger, name.clone()))
        .map_err(|error| OverlapError::NoThread { name, errno: error.raw_os_error().unwrap_or(0) })
}

/// A thread has panicked outside the work of its nodes: no further node begins.
fn died(ledger: &RunState<'_>, name: String) -> impl FnOnce(String) {
    move |message| ledger.give_up(OverlapError::ThreadPanicked { name, message })
}

/// The life of a stream.
fn work_off(ledger: &RunState<'_>, queue: Queue<'_>, _leaving: Leaving<'_, '_>) {
    for (index, Entry { after, body, .. }) in queue {
        turn();
        let Some((run, since)) = ledger.begin(index, &after) else { return };
        let outcome = run_body(body, &run);
        ledger.end(index, since, outcome);
    }
}
