//! Sharded checkpoints: any number of ranks reads what any other number wrote.
//!
//! A shard names the places of its values in the row of all parameters, so a reader needs to know
//! neither buckets nor strategy of the writers. Numbers are little-endian, of eight bytes:
//!
//! ```text
//!   SLSHARD1 | ranks | elements | steps | runs | first, length | first, length | ...
//!   of each run: parameters | means of gradients | means of squares          f32
//!   digest of all that is before it
//! ```
//!
//! A reader takes memory for its own part and for places of runs, which are never more than twice
//! the elements, regardless of the shards' own lists. It changes nothing before all shards are
//! read, their digests are right, and each element has come once.

use std::io::{self, Read, Write};
use std::ops::Range;

use sidelane::Error;
use sidelane::collective::Communicator;
use sidelane::digest::Digest;

use super::error::{CheckpointError, DataError};
use crate::check::{Member, agree};

const MAGIC: [u8; 8] = *b"SLSHARD1";
/// Elements that are read or written at once.
const CHUNK: usize = 4096;

/// Values that lie together, with their states.
pub(super) struct Run<'a> {
    /// Place in the row of all parameters.
    pub first: usize,
    pub parameters: &'a [f32],
    pub states: [&'a [f32]; 2],
}

/// A shard to be written.
pub(super) struct Shard {
    pub member: Member,
    pub elements: usize,
    pub steps: u64,
}

impl Shard {
    pub fn write(self, mut runs: Vec<Run<'_>>, writer: &mut impl Write) -> Result<(), CheckpointError> {
        runs.retain(|run| !run.parameters.is_empty());
        let Shard { member, elements, steps } = self;
        let mut out = Writer { inner: writer, digest: Digest::default() };
        let mut write = || {
            out.bytes(&MAGIC)?;
            for number in [member.ranks.into(), elements as u64, steps, runs.len() as u64] {
                out.number(number)?;
            }
            for run in &runs {
                out.number(run.first as u64)?;
                out.number(run.parameters.len() as u64)?;
            }
            for run in &runs {
                out.values(run.parameters)?;
                run.states.iter().try_for_each(|values| out.values(values))?;
            }
            out.number(out.digest.value())?;
            out.inner.flush()
        };
        write().map_err(|error| io_error(member.rank as usize, &error))
    }
}

fn io_error(shard: usize, error: &io::Error) -> CheckpointError {
    CheckpointError::Io { shard, kind: error.kind(), message: error.to_string() }
}

struct Writer<'w, W> {
    inner: &'w mut W,
    digest: Digest,
}

impl<W: Write> Writer<'_, W> {
    fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.digest.add(bytes);
        self.inner.write_all(bytes)
    }

    fn number(&mut self, number: u64) -> io::Result<()> {
        self.bytes(&number.to_le_bytes())
    }

    fn values(&mut self, values: &[f32]) -> io::Result<()> {
        for values in values.chunks(CHUNK) {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.bytes(&bytes)?;
        }
        Ok(())
    }
}

/// Memory for the values that a reader keeps.
pub(super) struct Wanted {
    /// Places in the row of all parameters, and where each begins in `values`.
    places: Vec<(Range<usize>, usize)>,
    pub values: Vec<f32>,
}

impl Wanted {
    pub fn new(places: Vec<(Range<usize>, usize)>, len: usize) -> Wanted {
        Wanted { places, values: vec![0.0; len] }
    }

    /// Keeps what is wanted of values that begin at `first`.
    fn put(&mut self, first: usize, values: &[f32]) {
        // Places ascend, so those before the values are skipped at once.
        let from = self.places.partition_point(|(place, _)| place.end <= first);
        for (place, at) in &self.places[from..] {
            let (start, end) = (place.start.max(first), place.end.min(first + values.len()));
            if start >= first + values.len() {
                return;
            }
            if start < end {
                let to = at + (start - place.start);
                self.values[to..to + (end - start)].copy_from_slice(&values[start - first..end - first]);
            }
        }
    }
}

/// A checkpoint that was read.
pub(super) struct Found {
    /// Steps of the optimizer.
    pub steps: u64,
    /// The same for the same shards in any order.
    digest: u64,
}

/// Reads all shards of a model of so many elements into memory for its parameters and two states.
pub(super) fn read(
    elements: usize,
    shards: impl IntoIterator<Item = impl Read>,
    wanted: &mut [Wanted; 3],
) -> Result<Found, CheckpointError> {
    let (mut of_first, mut covered, mut seen) = (None, Vec::<Range<usize>>::new(), 0);
    let mut digest = 0u64;
    for (nth, shard) in shards.into_iter().enumerate() {
        let mut reader = Reader { inner: shard, nth, digest: Digest::default() };
        let header = reader.shard(elements, &mut covered, wanted)?;
        digest = digest.wrapping_add(reader.digest.value());
        let first = *of_first.get_or_insert(header);
        for (what, seen, expected) in
            [("ranks", header.ranks, first.ranks), ("steps", header.steps, first.steps)]
        {
            if seen != expected {
                return Err(CheckpointError::OtherCheckpoint { reader: nth, what, seen, expected });
            }
        }
        seen = nth + 1;
        let elements_so_far: usize = covered.iter().map(ExactSizeIterator::len).sum();
        if elements_so_far > elements {
            once(&mut covered, elements)?;
        }
    }
    let Header { ranks, steps } = of_first.unwrap_or(Header { ranks: 0, steps: 0 });
    if seen == 0 || seen as u64 != ranks {
        return Err(CheckpointError::Shards { seen, ranks });
    }
    once(&mut covered, elements)?;
    Ok(Found { steps, digest })
}

/// As [`read`] on all ranks of a group, which compare what they have read. Returns the steps.
pub(super) fn load(
    group: &mut Communicator,
    member: Member,
    elements: usize,
    shards: impl IntoIterator<Item = impl Read>,
    wanted: &mut [Wanted; 3],
) -> Result<u64, DataError> {
    let member = member.check(group).map_err(|error| DataError::from(Error::from(error)));
    let mut steps = 0;
    let found = member.and_then(|()| Ok(read(elements, shards, wanted)?)).map(|found| {
        steps = found.steps;
        vec![("steps of the checkpoint", found.steps), ("digest of the checkpoint", found.digest)]
    });
    agree(group, found)?;
    Ok(steps)
}

/// Checks that each element is in one of the runs.
fn once(covered: &mut [Range<usize>], elements: usize) -> Result<(), CheckpointError> {
    covered.sort_by_key(|run| run.start);
    let mut end = 0;
    let behind = elements..elements;
    for run in covered.iter().chain([&behind]) {
        if run.start != end {
            let twice = run.start < end;
            return Err(CheckpointError::NotOnce { element: run.start.min(end), twice });
        }
        end = run.end;
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct Header {
    ranks: u64,
    steps: u64,
}

struct Reader<R> {
    inner: R,
    nth: usize,
    digest: Digest,
}

impl<R: Read> Reader<R> {
    fn shard(
        &mut self,
        elements: usize,
        covered: &mut Vec<Range<usize>>,
        wanted: &mut [Wanted; 3],
    ) -> Result<Header, CheckpointError> {
        let reader = self.nth;
        let mut magic = [0; 8];
        self.bytes(&mut magic)?;
        if magic != MAGIC {
            return Err(CheckpointError::NotAShard { reader });
        }
        let [ranks, seen, steps, runs] = [self.number()?, self.number()?, self.number()?, self.number()?];
        if seen != elements as u64 {
            return Err(CheckpointError::OtherModel { reader, seen, expected: elements as u64 });
        }
        let from = covered.len();
        let mut end = 0;
        for _ in 0..runs {
            let (first, len) = (self.number()?, self.number()?);
            let behind = first.checked_add(len).filter(|&behind| behind <= elements as u64);
            let Some(behind) = behind.filter(|_| first >= end && len > 0) else {
                return Err(CheckpointError::BadRun { reader, first, len });
            };
            covered.push(first as usize..behind as usize);
            end = behind;
        }
        for run in &covered[from..] {
            for wanted in &mut *wanted {
                self.values(run.clone(), wanted)?;
            }
        }
        let expected = self.digest.value();
        let seen = self.number()?;
        if seen != expected {
            return Err(CheckpointError::Damaged { reader, seen, expected });
        }
        Ok(Header { ranks, steps })
    }

    fn bytes(&mut self, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        self.inner.read_exact(bytes).map_err(|error| io_error(self.nth, &error))?;
        self.digest.add(bytes);
        Ok(())
    }

    fn number(&mut self) -> Result<u64, CheckpointError> {
        let mut bytes = [0; 8];
        self.bytes(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn values(&mut self, run: Range<usize>, wanted: &mut Wanted) -> Result<(), CheckpointError> {
        let mut bytes = [0; 4 * CHUNK];
        for first in run.clone().step_by(CHUNK) {
            let bytes = &mut bytes[..4 * CHUNK.min(run.end - first)];
            self.bytes(bytes)?;
            let values: Vec<_> = bytes.as_chunks::<4>().0.iter().map(|of| f32::from_le_bytes(*of)).collect();
            wanted.put(first, &values);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Elements of the model.
    const ELEMENTS: usize = 8;
    /// No valid input has it: a NaN.
    const UNWRITTEN: f32 = f32::from_bits(0x7fc5_a5a5);

    /// A shard of one of two ranks.
    fn shard(rank: u32, first: usize, parameters: &[f32]) -> Vec<u8> {
        let (member, mut bytes) = (Member { rank, ranks: 2 }, Vec::new());
        let runs = vec![Run { first, parameters, states: [parameters, parameters] }];
        Shard { member, elements: ELEMENTS, steps: 7 }.write(runs, &mut bytes).unwrap();
        bytes
    }

    /// Shards one after another, each behind its length.
    fn joined(shards: &[Vec<u8>]) -> Vec<u8> {
        shards.iter().flat_map(|shard| [&(shard.len() as u16).to_le_bytes(), &shard[..]].concat()).collect()
    }

    fn split(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut shards = Vec::new();
        while let Some((len, rest)) = bytes.split_first_chunk() {
            let (shard, rest) = rest.split_at(usize::from(u16::from_le_bytes(*len)).min(rest.len()));
            shards.push(shard.to_vec());
            bytes = rest;
        }
        shards
    }

    #[test]
    fn fuzzed_bytes_hold_each_element_once_or_are_refused() {
        let (whole, part) = ([1.5, -2.0, 0.25, 8.0, 3.0], [9.0, -0.5, 1e-9]);
        let both = [shard(0, 0, &whole), shard(1, 5, &part)];
        let seeds = [joined(&both), joined(&both[..1]), joined(&[shard(0, 0, &whole), shard(1, 0, &whole)])];
        fuzz::run("checkpoints", &seeds, |bytes| {
            let mut shards = split(bytes);
            // No mutant has the digest of its bytes.
            for shard in &mut shards {
                if let Some((bytes, digest)) = shard.split_last_chunk_mut::<8>() {
                    let mut right = Digest::default();
                    right.add(bytes);
                    *digest = right.value().to_le_bytes();
                }
            }
            let mut wanted = [(); 3].map(|()| Wanted::new(vec![(0..ELEMENTS, 0)], ELEMENTS));
            wanted.iter_mut().for_each(|wanted| wanted.values.fill(UNWRITTEN));
            let read = read(ELEMENTS, shards.iter().map(|shard| &shard[..]), &mut wanted);
            let values = wanted.iter().flat_map(|wanted| &wanted.values);
            let missing = values.filter(|value| value.to_bits() == UNWRITTEN.to_bits()).count();
            assert!(read.is_err() || missing == 0, "{missing} values did not come");
            // Three values of each element once, and at least a header of each shard.
            let least = 12 * ELEMENTS + 48 * shards.len();
            assert!(read.is_err() || shards.iter().map(Vec::len).sum::<usize>() >= least);
        });
    }
}
