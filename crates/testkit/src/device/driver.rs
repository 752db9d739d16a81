//! Functions of the driver that the library needs, one thing at a time.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::Instant;

use sidelane::device::{
    Allocation, AuditKernels, CopyBatch, CudaGraph, DeviceRange, Event, Kernels, MemOpBatch, PinnedMemory,
    Reservation, Stream, Value, Version,
};
use sidelane::error::DeviceError;

use super::gpu::{Gpu, content, equal, same, write};
use super::whole;
use crate::TestError;
use crate::values::Random;

const BYTES: u64 = 1 << 20;

/// One question about the driver.
pub struct Check {
    /// Its subject.
    pub what: &'static str,
    /// The meaning of a right answer.
    pub shows: &'static str,
    /// A feature that not every driver has, and the version that has it.
    pub needs: Option<(&'static str, Version)>,
    /// Behaviour that only several GPUs show.
    pub open: Option<&'static str>,
    run: fn(&Streams) -> Result<String, TestError>,
}

impl Check {
    const fn new(
        what: &'static str,
        shows: &'static str,
        run: fn(&Streams) -> Result<String, TestError>,
    ) -> Check {
        Check { what, shows, needs: None, open: None, run }
    }

    /// The results.
    ///
    /// # Errors
    /// The driver does something else.
    pub fn run(&self, streams: &Streams) -> Result<String, TestError> {
        (self.run)(streams)
    }
}

/// All of them.
pub const CHECKS: [Check; 9] = [
    Check::new("modules", "the driver compiles our kernels for this GPU", Streams::modules),
    Check::new(
        "copies and flags",
        "a flag that the host sees comes after the copy before it",
        Streams::flags,
    ),
    Check::new(
        "waits of 32 bits",
        "streams wait for words of the host, and of the GPU",
        Streams::waits::<u32>,
    ),
    Check::new("waits of 64 bits", "as above", Streams::waits::<u64>),
    Check::new("lists of operations", "a list runs in its order, also beyond 255", Streams::lists),
    Check::new("events", "a stream goes on where another has come to", Streams::events),
    Check {
        needs: Some(("a batch of copies", Version::BATCHED_COPIES)),
        ..Check::new(
            "batches of copies",
            "all copies of a batch land before a flag behind it",
            Streams::batches,
        )
    },
    Check::new("graphs", "copies, writes and waits are captured, and run again", Streams::graphs),
    Check {
        open: Some("the memory of another GPU, mapped over NVLink"),
        ..Check::new(
            "memory by descriptor",
            "what one exports another imports and maps: the same bytes",
            Streams::descriptors,
        )
    },
];

/// A GPU, and two streams of it.
pub struct Streams {
    gpu: Gpu,
    streams: [Stream; 2],
}

impl Streams {
    /// New streams.
    pub fn new(gpu: Gpu) -> Result<Self, DeviceError> {
        Ok(Streams { streams: [gpu.stream()?, gpu.stream()?], gpu })
    }

    fn finish(&self, stream: &Stream) -> Result<(), TestError> {
        self.gpu.finish(stream, "a stream")
    }

    fn modules(&self) -> Result<String, TestError> {
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

    fn flags(&self) -> Result<String, TestError> {
        let [stream, _] = &self.streams;
        let trip = Trip::new(&self.gpu)?;
        let Trip { from, there, to, .. } = &trip;
        let rounds = self.gpu.few(200, 20);
        trip.check(self, rounds, || {
            stream.copy(whole(there)?, whole(from.range())?)?;
            stream.copy(whole(to.range())?, whole(there)?)
        })?;
        Ok(format!("{rounds} rounds of 1 MiB to the GPU and back"))
    }

    fn waits<T: Value + From<u32>>(&self) -> Result<String, TestError> {
        let [first, second] = &self.streams;
        let (words, there) = (self.gpu.pinned(24)?, self.gpu.memory(64)?);
        write(first, &there, &[0; 64])?;
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

    fn lists(&self) -> Result<String, TestError> {
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

    fn events(&self) -> Result<String, TestError> {
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

    fn batches(&self) -> Result<String, TestError> {
        let [stream, _] = &self.streams;
        let trip = Trip::new(&self.gpu)?;
        let Trip { from, there, to, .. } = &trip;
        let batch = || CopyBatch::with_capacity(&self.gpu.context, 600);
        let (mut random, mut away, mut back) = (Random(1), batch(), batch());
        let mut at = 0;
        while at < BYTES {
            let len = u64::from(1 + random.below(4096)).min(BYTES - at);
            away.push(there.span(at, len)?, from.range().span(at, len)?)?;
            back.push(to.range().span(at, len)?, there.span(at, len)?)?;
            at += len;
        }
        let (rounds, copies) = (self.gpu.few(50, 5), away.len());
        trip.check(self, rounds, || {
            stream.copy_batch(&mut away)?;
            stream.copy_batch(&mut back)
        })?;
        Ok(format!("{rounds} rounds of {copies} copies of odd sizes, each way"))
    }

    fn graphs(&self) -> Result<String, TestError> {
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
        let rounds = self.gpu.few(100, 10);
        for round in 1..=rounds {
            let bytes = Random(round << 16).bytes(BYTES);
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

    fn descriptors(&self) -> Result<String, TestError> {
        let [stream, _] = &self.streams;
        let made = Allocation::new(&self.gpu.context, BYTES)?;
        let descriptor = made.export()?;
        let imported = Allocation::import(&self.gpu.context, descriptor.as_fd(), made.bytes())?;
        let reservation = Reservation::new(&self.gpu.context, 2, made.bytes())?;
        let devices = [self.gpu.context.device()];
        let (one, other) = (reservation.map(0, &made, &devices)?, reservation.map(1, &imported, &devices)?);
        let bytes = Random(3).bytes(BYTES);
        write(stream, &one, &bytes)?;
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
        bench: &Streams,
        rounds: u64,
        mut enqueue: impl FnMut() -> Result<(), DeviceError>,
    ) -> Result<(), TestError> {
        let [stream, _] = &bench.streams;
        for round in 1..=rounds {
            let bytes = Random(round).bytes(BYTES);
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
