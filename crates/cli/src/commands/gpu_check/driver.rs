//! Functions of the driver that the library needs, one thing at a time.

use std::sync::atomic::Ordering;
use std::time::Instant;

use rand::RngExt;
use sidelane::device::{
    Allocation, AuditKernels, CopyBatch, CudaGraph, DeviceRange, Driver, Event, Kernels, MemOpBatch,
    PinnedMemory, Reservation, Stream, Value, Version,
};
use sidelane::error::DeviceError;
use sidelane_testkit::device::whole;

use super::Task;
use super::gpu::{self, Gpu, content, equal, random, random_bytes, same};
use super::report::{About, Checks, State};
use crate::commands::doctor::{self, Level};
use crate::error::CliError;

const BYTES: u64 = 1 << 20;

pub fn run(task: &Task, checks: &mut Checks) -> Result<(), CliError> {
    let driver = Driver::open()?;
    for finding in doctor::cuda_findings(&driver.probe()?) {
        let state = if finding.level == Level::Warn { State::Wrong } else { State::Right };
        let about = About::new(&finding.what, finding.meaning);
        checks.tell(about, state, finding.found)?;
    }
    let gpu = Gpu::open(task)?;
    let bench = Bench { streams: [gpu.stream()?, gpu.stream()?], gpu };
    for (what, shows, check) in CHECKS {
        let about = About::new(what, shows).open((what == EXPORTED).then_some(OTHERS));
        let needs = ("a batch of copies", Version::BATCHED_COPIES);
        if what != BATCHES || checks.has(about, driver.version(), needs)? {
            checks.check(about, || check(&bench))?;
        }
    }
    Ok(())
}

type Check = fn(&Bench) -> Result<String, CliError>;

const BATCHES: &str = "batches of copies";
const EXPORTED: &str = "memory by descriptor";
const OTHERS: &str = "the memory of another GPU, mapped over NVLink";

const CHECKS: [(&str, &str, Check); 9] = [
    ("modules", "the driver compiles our kernels for this GPU", Bench::modules),
    ("copies and flags", "a flag that the host sees comes after the copy before it", Bench::flags),
    ("waits of 32 bits", "streams wait for words of the host, and of the GPU", Bench::waits::<u32>),
    ("waits of 64 bits", "as above", Bench::waits::<u64>),
    ("lists of operations", "a list runs in its order, also beyond 255", Bench::lists),
    ("events", "a stream goes on where another has come to", Bench::events),
    (BATCHES, "all copies of a batch land before a flag behind it", Bench::batches),
    ("graphs", "copies, writes and waits are captured, and run again", Bench::graphs),
    (EXPORTED, "what one exports another imports and maps: the same bytes", Bench::descriptors),
];

struct Bench {
    gpu: Gpu,
    streams: [Stream; 2],
}

impl Bench {
    fn finish(&self, stream: &Stream) -> Result<(), CliError> {
        self.gpu.finish(stream, "a stream")
    }

    fn modules(&self) -> Result<String, CliError> {
        let start = Instant::now();
        Kernels::load(&self.gpu.context)?;
        let kernels = start.elapsed();
        AuditKernels::load(&self.gpu.context)?;
        let both = start.elapsed();
        Ok(format!(
            "compiled in {} ms, and the audit's in {} ms",
            kernels.as_millis(),
            (both - kernels).as_millis()
        ))
    }

    fn flags(&self) -> Result<String, CliError> {
        let [stream, _] = &self.streams;
        let trip = Trip::new(&self.gpu)?;
        let Trip { from, there, to, .. } = &trip;
        let rounds = self.gpu.task.few(200, 20);
        trip.check(self, rounds, || {
            stream.copy(whole(there)?, whole(from.range())?)?;
            stream.copy(whole(to.range())?, whole(there)?)
        })?;
        Ok(format!("{rounds} rounds of 1 MiB to the GPU and back"))
    }

    fn waits<T: Value + From<u32>>(&self) -> Result<String, CliError> {
        let [first, second] = &self.streams;
        let (words, there) = (self.gpu.pinned(24)?, self.gpu.memory(64)?);
        gpu::write(first, &there, &[0; 64])?;
        // Of the host.
        first.wait::<T>(words.range().word(0)?, 2.into())?;
        first.write::<T>(words.range().word(8)?, 1.into())?;
        equal("a stream that waits is done", first.is_done()?.into(), 0)?;
        words.word(0)?.store(1, Ordering::Release);
        equal("the word behind a wait", words.word(8)?.load(Ordering::Acquire), 0)?;
        words.word(0)?.store(3, Ordering::Release);
        self.finish(first)?;
        equal("the word behind a wait that ended", words.word(8)?.load(Ordering::Acquire), 1)?;
        // Of the GPU, written by the other stream.
        first.wait::<T>(there.word(0)?, 5.into())?;
        first.write::<T>(words.range().word(16)?, 1.into())?;
        equal("a stream that waits is done", first.is_done()?.into(), 0)?;
        second.write::<T>(there.word(0)?, 5.into())?;
        self.finish(second)?;
        self.finish(first)?;
        equal("the word behind a wait on the GPU", words.word(16)?.load(Ordering::Acquire), 1)?;
        Ok("end when the word is at or past the value, and not before".to_owned())
    }

    fn lists(&self) -> Result<String, CliError> {
        let [stream, _] = &self.streams;
        let words = self.gpu.pinned(24)?;
        let mut list = MemOpBatch::with_capacity(&self.gpu.context, 600);
        for value in 1..=299_u32 {
            list.write(words.range().word::<u32>(0)?, value)?;
            list.wait(words.range().word::<u32>(0)?, value)?;
        }
        list.wait(words.range().word::<u32>(8)?, 9)?;
        list.write(words.range().word::<u32>(16)?, 7)?;
        stream.operate(&mut list)?;
        self.gpu.until("writes of a list", || Ok(words.word(0)?.load(Ordering::Acquire) == 299))?;
        equal("what follows a wait", words.word(16)?.load(Ordering::Acquire), 0)?;
        words.word(8)?.store(9, Ordering::Release);
        self.finish(stream)?;
        equal("what follows a wait that ended", words.word(16)?.load(Ordering::Acquire), 7)?;
        Ok(format!("{} in one list", list.len()))
    }

    fn events(&self) -> Result<String, CliError> {
        let [first, second] = &self.streams;
        let words = self.gpu.pinned(16)?;
        let event = Event::new(&self.gpu.context)?;
        first.wait::<u32>(words.range().word(0)?, 1)?;
        event.record(first)?;
        second.wait_event(&event)?;
        second.write::<u32>(words.range().word(8)?, 1)?;
        equal("an event behind a wait is reached", event.is_done()?.into(), 0)?;
        equal("the word behind an event", words.word(8)?.load(Ordering::Acquire), 0)?;
        words.word(0)?.store(1, Ordering::Release);
        self.finish(second)?;
        equal("the word behind an event that was reached", words.word(8)?.load(Ordering::Acquire), 1)?;
        Ok("hold up other streams, and let them go".to_owned())
    }

    fn batches(&self) -> Result<String, CliError> {
        let [stream, _] = &self.streams;
        let trip = Trip::new(&self.gpu)?;
        let Trip { from, there, to, .. } = &trip;
        let batch = || CopyBatch::with_capacity(&self.gpu.context, 600);
        let (mut random, mut away, mut home) = (random(1), batch(), batch());
        let mut at = 0;
        while at < BYTES {
            let len = random.random_range(1..=4096).min(BYTES - at);
            away.push(there.span(at, len)?, from.range().span(at, len)?)?;
            home.push(to.range().span(at, len)?, there.span(at, len)?)?;
            at += len;
        }
        let (rounds, copies) = (self.gpu.task.few(50, 5), away.len());
        trip.check(self, rounds, || {
            stream.copy_batch(&mut away)?;
            stream.copy_batch(&mut home)
        })?;
        Ok(format!("{rounds} rounds of {copies} copies of odd sizes, each way"))
    }

    fn graphs(&self) -> Result<String, CliError> {
        let [stream, _] = &self.streams;
        let (from, to, words) = (self.gpu.pinned(BYTES)?, self.gpu.pinned(BYTES)?, self.gpu.pinned(16)?);
        let there = self.gpu.memory(BYTES)?;
        let graph = CudaGraph::capture(stream, || -> Result<(), DeviceError> {
            stream.wait::<u32>(words.range().word(0)?, 1)?;
            stream.copy(whole(&there)?, whole(from.range())?)?;
            stream.copy(whole(to.range())?, whole(&there)?)?;
            stream.write::<u32>(words.range().word(0)?, 0)?;
            stream.write::<u32>(words.range().word(8)?, 1)
        })?;
        let rounds = self.gpu.task.few(100, 10);
        for round in 1..=rounds {
            let bytes = random_bytes(round << 16, BYTES);
            from.write(0, &bytes)?;
            words.word(8)?.store(0, Ordering::Release);
            graph.launch(stream)?;
            equal("what follows a wait in a graph", words.word(8)?.load(Ordering::Acquire), 0)?;
            words.word(0)?.store(1, Ordering::Release);
            self.finish(stream)?;
            equal("a word that a graph writes", words.word(8)?.load(Ordering::Acquire), 1)?;
            same(format!("launch {round}"), &content(&to)?, &bytes)?;
        }
        Ok(format!("{rounds} launches"))
    }

    fn descriptors(&self) -> Result<String, CliError> {
        let [stream, _] = &self.streams;
        let made = Allocation::new(&self.gpu.context, BYTES)?;
        let descriptor = made.export()?;
        let imported =
            Allocation::import(&self.gpu.context, std::os::fd::AsFd::as_fd(&descriptor), made.bytes())?;
        let reservation = Reservation::new(&self.gpu.context, 2, made.bytes())?;
        let devices = [self.gpu.task.device];
        let (one, other) = (reservation.map(0, &made, &devices)?, reservation.map(1, &imported, &devices)?);
        let bytes = random_bytes(3, BYTES);
        gpu::write(stream, &one, &bytes)?;
        let seen = self.gpu.read(stream, &other.part(0, BYTES)?)?;
        same("what was imported", &seen, &bytes)?;
        Ok(format!("{} MiB, mapped twice", made.bytes() >> 20))
    }
}

/// Memory of the host, of the GPU, and of the host again; and a word that says that all came.
struct Trip {
    from: PinnedMemory,
    there: DeviceRange,
    to: PinnedMemory,
    word: PinnedMemory,
}

impl Trip {
    fn new(gpu: &Gpu) -> Result<Self, DeviceError> {
        let (from, to, word) = (gpu.pinned(BYTES)?, gpu.pinned(BYTES)?, gpu.pinned(8)?);
        Ok(Trip { from, there: gpu.memory(BYTES)?, to, word })
    }

    /// Has bytes go there and back again and again; the word follows them, and they are compared
    /// when it is seen.
    fn check(
        &self,
        bench: &Bench,
        rounds: u64,
        mut enqueue: impl FnMut() -> Result<(), DeviceError>,
    ) -> Result<(), CliError> {
        let [stream, _] = &bench.streams;
        for round in 1..=rounds {
            let bytes = random_bytes(round, BYTES);
            self.from.write(0, &bytes)?;
            enqueue()?;
            stream.write::<u64>(self.word.range().word(0)?, round)?;
            let seen = || Ok(self.word.word(0)?.load(Ordering::Acquire) == round);
            bench.gpu.until("a flag", seen)?;
            same(format!("round {round}"), &content(&self.to)?, &bytes)?;
        }
        bench.finish(stream)
    }
}
