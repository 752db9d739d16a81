//! Graphs: captured operations, enqueued again at each launch with the same constants.

use std::sync::{Arc, Mutex};

use crate::capture::{Captured, Step};
use crate::code::{Code, Result};
use crate::counters::{COUNTERS, add};
use crate::driver::Context;
use crate::stream::Stream;
use crate::table::Table;
use crate::work::{Late, Mark, Work};

pub static GRAPHS: Table<Graph> = Table::new();
pub static EXECUTABLES: Table<Executable> = Table::new();

/// Kinds of nodes, by the driver's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKind {
    Kernel = 0,
    Copy = 1,
    Fill = 2,
    Host = 3,
    MemoryOperations = 12,
}

/// A graph, and a handle for each of its nodes.
pub struct Graph {
    captured: Arc<Captured>,
    pub nodes: Vec<(usize, NodeKind)>,
}

impl Graph {
    pub fn new(captured: Captured) -> Graph {
        let kinds = captured.steps.iter().filter_map(|(_, step)| NodeKind::of(step));
        let nodes = kinds.map(|kind| (crate::table::fresh(), kind)).collect();
        Graph { captured: Arc::new(captured), nodes }
    }
}

impl NodeKind {
    fn of(step: &Step) -> Option<NodeKind> {
        let Step::Work(work) = step else { return None };
        match work {
            Work::Late(Late::Copies(_)) => Some(NodeKind::Copy),
            Work::Late(Late::Fill { .. }) => Some(NodeKind::Fill),
            Work::Memory(_) => Some(NodeKind::MemoryOperations),
            Work::Kernel(_) => Some(NodeKind::Kernel),
            Work::Host(_) => Some(NodeKind::Host),
            Work::Record(_) | Work::Await(_) | Work::Flush => None,
        }
    }
}

/// A graph that can be launched.
pub struct Executable {
    captured: Arc<Captured>,
    context: usize,
    /// For all branches but the first, which runs in the stream of the launch.
    branches: Vec<Arc<Stream>>,
    /// The end of the launch before: launches of one graph never overlap.
    last: Mutex<Option<Arc<Mark>>>,
}

impl Executable {
    pub fn new(graph: &Graph, context: &Context) -> Executable {
        let branches = (1..graph.captured.branches).map(|_| Stream::inner(context)).collect();
        let captured = Arc::clone(&graph.captured);
        Executable { captured, context: context.handle, branches, last: Mutex::default() }
    }

    /// Enqueues the whole graph behind the stream's work.
    pub fn launch(&self, stream: &Arc<Stream>) -> Result<()> {
        if stream.context != self.context {
            return Err(Code::INVALID_HANDLE);
        }
        if let Some(place) = &*stream.capture.lock().unwrap() {
            place.invalidate();
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        add(&COUNTERS.graphs, 1);
        let mut last = self.last.lock().unwrap();
        stream.submit(last.take().map_or(Work::Flush, Work::Await))?;
        let marks: Vec<Arc<Mark>> = (0..self.captured.marks).map(|_| Arc::default()).collect();
        for (branch, step) in &self.captured.steps {
            let to = if *branch == 0 { stream } else { &self.branches[branch - 1] };
            to.push(match step {
                Step::Work(work) => work.clone(),
                Step::Record(mark) => Work::Record(Arc::clone(&marks[*mark])),
                Step::Await(mark) => Work::Await(Arc::clone(&marks[*mark])),
            });
        }
        let end = Arc::new(Mark::default());
        stream.push(Work::Record(Arc::clone(&end)));
        *last = Some(end);
        Ok(())
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        if let Ok(context) = Context::of(self.context) {
            let inner = |stream: &Arc<Stream>| self.branches.iter().any(|own| Arc::ptr_eq(own, stream));
            context.streams.lock().unwrap().retain(|stream| !inner(stream));
        }
    }
}
