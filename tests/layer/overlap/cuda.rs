//! Graphs on CUDA streams, on the fake driver: copies as late as the rules allow, fresh memory
//! poisoned, so that a forgotten edge shows.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use sidelane::Error;
use sidelane::device::{
    Allocation, Context, CudaGraph, DeviceRange, Driver, PinnedMemory, Priority, Reservation, Stream,
};
use sidelane::error::{CallError, OverlapError};
use sidelane::overlap::{
    CudaExecutor, Graph, Node, NodeInfo, NodeLabel, RoundRobin, StreamId as Name, StreamPool,
};

use crate::apart;

const CHUNKS: u64 = 6;
const BYTES: u64 = 3 << 10;

fn context() -> Arc<Context> {
    let library = fake_cuda::install().unwrap().join("libcuda.so.1");
    let driver = Driver::load(Some(&library)).unwrap();
    assert!(driver.is_fake(), "tests run without a GPU");
    driver.context(0).unwrap()
}

fn caller(context: &Arc<Context>) -> Arc<Stream> {
    Arc::new(Stream::new(context, Priority::Normal).unwrap())
}

fn memory(context: &Arc<Context>, bytes: u64) -> DeviceRange {
    let allocation = Allocation::new(context, bytes).unwrap();
    let reservation = Reservation::new(context, 1, allocation.bytes()).unwrap();
    reservation.map(0, &allocation, &[0]).unwrap().part(0, bytes).unwrap()
}

fn work(name: &'static str, chunk: u64) -> NodeLabel {
    NodeLabel::new(name, chunk as u32)
}

fn pattern(round: u64) -> Vec<u8> {
    (0..CHUNKS * BYTES)
        .map(|at| ((at + round * 77).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

/// The source of bytes, two landing places that chunks use in turn, the experts' outputs, and the
/// place of returned rows.
struct Tensors {
    input: PinnedMemory,
    tokens: DeviceRange,
    landing: DeviceRange,
    outputs: DeviceRange,
    sums_back: PinnedMemory,
}

impl Tensors {
    fn new(context: &Arc<Context>) -> Self {
        let all = CHUNKS * BYTES;
        Tensors {
            input: PinnedMemory::new(context, all as usize).unwrap(),
            tokens: memory(context, all),
            landing: memory(context, 2 * BYTES),
            outputs: memory(context, all),
            sums_back: PinnedMemory::new(context, all as usize).unwrap(),
        }
    }

    /// Dispatch, experts and combine of each chunk as copies, behind a copy of the caller's own.
    fn enqueue(&self, executor: &CudaExecutor<'_>, caller: &Arc<Stream>, streams: u32) -> Result<(), Error> {
        let copy =
            |stream: &Stream, to: (&DeviceRange, u64), from: (&DeviceRange, u64)| -> Result<(), Error> {
                Ok(stream.copy(to.0.span(to.1 * BYTES, BYTES)?, from.0.span(from.1 * BYTES, BYTES)?)?)
            };
        let all = CHUNKS * BYTES;
        caller.copy(self.tokens.span(0, all)?, self.input.range().span(0, all)?)?;
        let sent = memory(caller.context(), all);
        let mut graph: Graph<'_, Arc<Stream>> = Graph::new();
        let (mut rotation, mut computed) = (RoundRobin::new(streams, 2), Vec::<Node>::new());
        for chunk in 0..CHUNKS {
            // The landing place is free when the experts have read it.
            let free: Vec<Node> = computed.len().checked_sub(2).map(|at| computed[at]).into_iter().collect();
            let landed =
                graph.add(Name::Transfer(0), work("dispatch", chunk), &free, move |stream: &Arc<Stream>| {
                    copy(stream, (&self.landing, chunk % 2), (&self.tokens, chunk))
                });
            let made = rotation.add(&mut graph, work("experts", chunk), &[landed], move |stream| {
                copy(stream, (&self.outputs, chunk), (&self.landing, chunk % 2))
            });
            computed.push(made);
            let sent = sent.clone();
            graph.add(Name::Transfer(1), work("combine", chunk), &[made], move |stream| {
                // No stream but this one uses the memory between.
                copy(stream, (&sent, chunk), (&self.outputs, chunk))?;
                copy(stream, (self.sums_back.range(), chunk), (&sent, chunk))
            });
        }
        Ok(graph.run(executor)?)
    }

    fn put(&self, round: u64) {
        self.input.write(0, &pattern(round)).unwrap();
    }

    fn assert_returned(&self, round: u64, what: &str) {
        let mut sums_back = vec![0; (CHUNKS * BYTES) as usize];
        self.sums_back.read(0, &mut sums_back).unwrap();
        assert!(sums_back == pattern(round), "round {round}, {what}");
    }
}

/// Seeds of the orders that the rules allow, and numbers of hardware queues.
fn each(test: &str, body: impl FnOnce()) {
    let runs = [("0", "8"), ("1", "8"), ("2", "2"), ("3", "1")]
        .map(|(seed, queues)| [("SIDELANE_FAKE_CUDA_SEED", seed), ("CUDA_DEVICE_MAX_CONNECTIONS", queues)]);
    apart::each(test, &runs.each_ref().map(|run| run.as_slice()), body);
}

#[test]
fn chunks_return_on_any_number_of_streams_and_queues() {
    each("overlap::cuda::chunks_return_on_any_number_of_streams_and_queues", || {
        let context = context();
        let caller = caller(&context);
        for streams in 1..4 {
            let (pool, tensors) =
                (StreamPool::new(&context, streams, 2, Priority::Highest).unwrap(), Tensors::new(&context));
            for round in 0..4 {
                let executor = CudaExecutor::new(&pool, &caller).overlap(round != 3);
                tensors.put(round);
                tensors.enqueue(&executor, &caller, streams).unwrap();
                caller.synchronize().unwrap();
                tensors.assert_returned(round, "enqueued");
            }
        }
    });
}

#[test]
fn a_captured_graph_is_replayed_and_keeps_its_memory() {
    each("overlap::cuda::a_captured_graph_is_replayed_and_keeps_its_memory", || {
        let context = context();
        let caller = caller(&context);
        let (pool, tensors) =
            (StreamPool::new(&context, 2, 2, Priority::Highest).unwrap(), Tensors::new(&context));
        let executor = CudaExecutor::new(&pool, &caller);
        tensors.put(0);
        let captured =
            CudaGraph::capture(&caller, || tensors.enqueue(&executor, &caller, 2)).expect("it is captured");
        // Between replays the same pool and marks serve another run.
        for round in 1..4 {
            tensors.put(round);
            captured.launch(&caller).unwrap();
            caller.synchronize().unwrap();
            tensors.assert_returned(round, "replayed");
            tensors.enqueue(&executor, &caller, 2).unwrap();
            caller.synchronize().unwrap();
        }
    });
}

/// Polls until the word has the value.
fn until(words: &PinnedMemory, at: usize, value: u64) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while words.word(at).unwrap().load(Ordering::Acquire) != value {
        assert!(Instant::now() < deadline, "word {at}");
        std::thread::yield_now();
    }
}

#[test]
fn device_nodes_wait_for_exactly_their_edges() {
    let context = context();
    let (caller, pool) = (caller(&context), StreamPool::new(&context, 2, 1, Priority::Highest).unwrap());
    let words = PinnedMemory::new(&context, 40).unwrap();
    let write = |at: u64| {
        let words = &words;
        move |stream: &Arc<Stream>| Ok(stream.write::<u64>(words.range().word(at)?, 1)?)
    };
    let mut graph = Graph::new();
    let waits = graph.add(Name::Transfer(0), work("dispatch", 0), &[], |stream: &Arc<Stream>| {
        Ok(stream.wait::<u64>(words.range().word(0)?, 1)?)
    });
    graph.add(Name::Compute(1), work("free", 0), &[], write(8));
    graph.add(Name::Compute(0), work("experts", 0), &[waits], write(16));
    graph.run(&CudaExecutor::new(&pool, &caller)).unwrap();
    caller.write::<u64>(words.range().word(24).unwrap(), 1).unwrap();
    until(&words, 8, 1);
    assert_eq!(caller.is_done(), Ok(false));
    assert_eq!([16, 24].map(|at| words.word(at).unwrap().load(Ordering::Acquire)), [0, 0]);
    words.word(0).unwrap().store(1, Ordering::Release);
    caller.synchronize().unwrap();
    assert_eq!([16, 24].map(|at| words.word(at).unwrap().load(Ordering::Acquire)), [1, 1]);
}

fn turn() -> Error {
    CallError::OutOfTurn { call: "combine", expected: "dispatch" }.into()
}

#[test]
fn failed_node_leaves_streams_joined_and_captures_endable() {
    let context = context();
    let (caller, pool) = (caller(&context), StreamPool::new(&context, 1, 1, Priority::Highest).unwrap());
    let executor = CudaExecutor::new(&pool, &caller);
    let words = PinnedMemory::new(&context, 8).unwrap();
    let run =
        |value: u64, fails: bool| {
            let mut graph = Graph::new();
            let words = &words;
            let sent = graph.add(Name::Transfer(0), work("dispatch", 0), &[], move |stream: &Arc<Stream>| {
                Ok(stream.write::<u64>(words.range().word(0)?, value)?)
            });
            graph.add(Name::Compute(0), work("experts", 0), &[sent], move |_| {
                if fails { Err(turn()) } else { Ok(()) }
            });
            graph.add(Name::Transfer(0), work("combine", 0), &[], |_| Ok(()));
            graph.run(&executor)
        };
    let at = NodeInfo::new(work("experts", 0), Name::Compute(0));
    let failed = OverlapError::Failed { at, error: Box::new(turn()), not_begun: 1 };
    assert_eq!(run(1, true), Err(failed.clone()));
    caller.synchronize().unwrap();
    assert_eq!(words.word(0).unwrap().load(Ordering::Acquire), 1, "the caller's stream waited for it");

    let captured = CudaGraph::capture(&caller, || Ok::<_, Error>(run(2, true)?));
    assert_eq!(captured.err(), Some(failed.into()));
    run(3, false).unwrap();
    caller.synchronize().unwrap();
    assert_eq!(words.word(0).unwrap().load(Ordering::Acquire), 3);
}

#[test]
fn stream_missing_in_pool_is_named_before_any_enqueue() {
    let context = context();
    let (caller, pool) = (caller(&context), StreamPool::new(&context, 2, 1, Priority::Highest).unwrap());
    for stream in [Name::Compute(2), Name::Transfer(1)] {
        let mut graph = Graph::new();
        graph.add(Name::Compute(1), work("experts", 0), &[], |_: &Arc<Stream>| {
            unreachable!("nothing is begun")
        });
        graph.add(stream, work("combine", 5), &[], |_: &Arc<Stream>| unreachable!("nothing is begun"));
        let at = NodeInfo::new(work("combine", 5), stream);
        let refused = graph.run(&CudaExecutor::new(&pool, &caller));
        assert_eq!(refused, Err(OverlapError::NoStream { at }));
    }
}
