//! The loops that are timed.
//!
//! ```text
//!   put-lat, signal   a: put n, signal n ----> b: waits for n        a times both ways and halves
//!                     a: waits for n <-------- b: put n, signal n
//!   put-bw            a: put put put ... quiet | put put put ... quiet | ...        a times each window
//!   put-bibw          both: put put put ... signal k, wait for k of the other, quiet | ...
//! ```
//!
//! All puts of a window have the same bytes and go to the same place, so it does not matter which
//! of them lands last; windows are numbered. The receiver's memory is poisoned before a run and
//! compared after it: neither is timed.

use std::hint::black_box;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use sidelane::{Error, Window, World};
use sidelane_testkit::timing::stats::{Summary, summary};
use sidelane_testkit::values::Random;

use super::report::Bandwidth;
use super::{Run, Test};

/// A stream is cut into so many windows, each ended by a quiet: the fastest is the peak.
const WINDOWS: u32 = 5;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankSamples {
    pub latency: Option<Summary>,
    pub bandwidth: Option<Bandwidth>,
    /// Whether the bytes received last are those that the other rank put last.
    pub verified: bool,
}

/// Two ranks that are measured: the first one times.
pub struct RankPair<'w> {
    world: &'w World,
    window: Window,
    /// This rank's position of the two.
    me: u32,
    /// The number of the last signal in either direction.
    said: u64,
}

impl<'w> RankPair<'w> {
    /// Collective between the two.
    pub fn open(world: &'w World, (from, to): (u32, u32), bytes: u64) -> Result<Self, Error> {
        let group = world.group(&[from, to])?;
        Ok(RankPair { world, window: group.window(bytes)?, me: group.rank(), said: 0 })
    }

    /// One run. With `memcpy`, the first rank copies the same bytes within itself as often after a
    /// stream.
    pub fn run(&mut self, test: Test, run: Run, memcpy: bool) -> Result<RankSamples, Error> {
        let Run { bytes, iterations, warmup } = run;
        let mut source = fill(self.me, bytes);
        let last = match test.is_latency() {
            true => self.said + u64::from(warmup) + u64::from(iterations),
            false => u64::from(WINDOWS),
        };
        self.window.write(0, &poison(1 - self.me, bytes, last))?;
        self.window.barrier()?;
        let mut found = RankSamples::default();
        if test.is_latency() {
            self.round_trips(&mut source, warmup)?;
            let halves = self.round_trips(&mut source, iterations)?;
            found.latency = (self.me == 0).then(|| summary(&halves));
        } else {
            let windows = self.streams(test, &mut source, run)?;
            if self.me == 0 {
                let floor = if memcpy { Some(self.copies(&source, iterations)?) } else { None };
                let directions = if test == Test::PutBibw { 2 } else { 1 };
                found.bandwidth = Some(Bandwidth::of(bytes * directions, &windows, floor));
            }
        }
        let mut seen = vec![0; bytes as usize];
        self.window.read(0, &mut seen)?;
        let receives = test != Test::PutBw || self.me == 1;
        found.verified = !receives || is_put(&seen, 1 - self.me, last);
        Ok(found)
    }

    /// Half of each round trip, in microseconds. The second rank returns the time in between, which
    /// is not used. A trip ends when the next one is in flight: reading the clock, a good part of
    /// the shortest trip, overlaps with it.
    fn round_trips(&mut self, source: &mut [u8], count: u32) -> Result<Vec<f64>, Error> {
        let mut looks = Vec::with_capacity(count as usize + 1);
        let (first, last) = (self.said + 1, self.said + u64::from(count));
        stamp(source, first);
        looks.push(Instant::now());
        if self.me == 0 && count > 0 {
            self.say(source)?;
        }
        for heard in first..=last {
            self.window.wait_until(1 - self.me, heard)?;
            if self.said < last {
                self.say(source)?;
            }
            looks.push(Instant::now());
        }
        Ok(looks.windows(2).map(|trip| (trip[1] - trip[0]).as_secs_f64() * 1e6 / 2.0).collect())
    }

    /// A put and its signal, or a signal if there is nothing to put. Then stamps the bytes for the
    /// next put.
    fn say(&mut self, source: &mut [u8]) -> Result<(), Error> {
        let other = 1 - self.me;
        self.said += 1;
        match &*source {
            [] => self.window.signal(other, self.said)?,
            source => self.window.put_signal(other, 0, source, self.said)?,
        }
        stamp(source, self.said + 1);
        Ok(())
    }

    /// Puts of each timed window, and its microseconds. The windows are numbered from 1; warm-up is
    /// number 0.
    fn streams(&mut self, test: Test, source: &mut [u8], run: Run) -> Result<Vec<(u32, f64)>, Error> {
        let mut windows = Vec::new();
        let counts = [run.warmup].into_iter().chain(shares(run.iterations));
        for (number, count) in counts.enumerate() {
            stamp(source, number as u64);
            let begin = Instant::now();
            match test {
                Test::PutBibw => self.exchange(source, count)?,
                _ if self.me == 0 => self.stream(source, count)?,
                _ => {}
            }
            windows.push((count, begin.elapsed().as_secs_f64() * 1e6));
        }
        if test == Test::PutBw {
            self.said += 1;
            match self.me {
                0 => self.window.signal(1, self.said)?,
                _ => self.window.wait_until(0, self.said)?,
            }
        }
        Ok(windows.split_off(1))
    }

    fn stream(&mut self, source: &[u8], count: u32) -> Result<(), Error> {
        for _ in 0..count {
            self.window.put(1 - self.me, 0, source)?;
        }
        self.window.quiet()
    }

    fn exchange(&mut self, source: &[u8], count: u32) -> Result<(), Error> {
        let other = 1 - self.me;
        for _ in 0..count {
            self.window.put(other, 0, source)?;
        }
        self.said += 1;
        self.window.signal(other, self.said)?;
        self.window.wait_until(other, self.said)?;
        self.window.quiet()
    }

    fn copies(&self, source: &[u8], count: u32) -> Result<(u32, f64), Error> {
        let mut extent = self.world.pool().alloc(source.len() as u64)?;
        let to = extent.slice_mut::<u8>(0, source.len())?;
        let mut copy = |count| {
            for _ in 0..count {
                black_box(&mut *to).copy_from_slice(black_box(source));
            }
        };
        copy(count.div_ceil(10));
        let begin = Instant::now();
        copy(count);
        Ok((count, begin.elapsed().as_secs_f64() * 1e6))
    }
}

/// Equal shares of a number of puts; fewer if there are not enough.
fn shares(count: u32) -> impl Iterator<Item = u32> {
    let upto = move |window: u32| (u64::from(count) * u64::from(window) / u64::from(WINDOWS)) as u32;
    (0..WINDOWS).map(move |window| upto(window + 1) - upto(window))
}

const STAMP: usize = 8;

/// The bytes that the rank at this position of a pair puts, all at a time.
pub fn fill(position: u32, bytes: u64) -> Vec<u8> {
    Random(bytes << 1 | u64::from(position)).bytes(bytes)
}

/// Makes them those of the put with this number.
#[inline]
fn stamp(bytes: &mut [u8], put: u64) {
    let at = bytes.len().saturating_sub(STAMP);
    let end = &mut bytes[at..];
    end.copy_from_slice(&put.to_le_bytes()[..end.len()]);
}

/// Bytes that all differ from those of the put with this number.
pub fn poison(position: u32, bytes: u64, put: u64) -> Vec<u8> {
    let mut wrong = fill(position, bytes);
    stamp(&mut wrong, put);
    wrong.iter_mut().for_each(|byte| *byte = !*byte);
    wrong
}

fn is_put(seen: &[u8], position: u32, put: u64) -> bool {
    let mut expected = fill(position, seen.len() as u64);
    stamp(&mut expected, put);
    seen == expected
}

#[cfg(test)]
mod tests {
    use sidelane_testkit::worlds::on_ranks;

    use super::*;
    use crate::error::CliError;

    #[test]
    fn every_put_is_in_one_window() {
        assert_eq!(shares(5000).collect::<Vec<_>>(), [1000; 5]);
        assert_eq!(shares(7).collect::<Vec<_>>(), [1, 1, 2, 1, 2]);
        assert_eq!(shares(1).collect::<Vec<_>>(), [0, 0, 0, 0, 1]);
        assert_eq!(shares(u32::MAX).map(u64::from).sum::<u64>(), u64::from(u32::MAX));
    }

    /// Both ranks of a pair, as threads.
    fn on_two(test: Test, runs: &[Run]) -> Vec<Vec<RankSamples>> {
        let found = on_ranks(&World::threads(2).unwrap(), |world| {
            let mut pair = RankPair::open(world, (0, 1), 4096)?;
            runs.iter().map(|&run| Ok(pair.run(test, run, true)?)).collect::<Result<Vec<_>, CliError>>()
        });
        found.into_iter().map(Result::unwrap).collect()
    }

    #[test]
    fn every_test_finds_its_figures_and_verifies_what_came() {
        let run = |bytes, iterations, warmup| Run { bytes, iterations, warmup };
        for test in [Test::PutLat, Test::PutBw, Test::PutBibw, Test::Signal] {
            let bytes = if test == Test::Signal { [0; 3] } else { [8, 1, 4096] };
            let runs = [run(bytes[0], 20, 3), run(bytes[1], 1, 0), run(bytes[2], 7, 1)];
            let found = on_two(test, &runs);
            for (nth, first) in found[0].iter().enumerate() {
                let latency = first.latency.is_some();
                assert_eq!((latency, first.bandwidth.is_some()), (test.is_latency(), !test.is_latency()));
                assert!(first.verified && found[1][nth].verified, "{test:?} {nth}");
                assert_eq!((found[1][nth].latency, found[1][nth].bandwidth), (None, None));
            }
        }
    }

    #[test]
    fn every_byte_that_did_not_come_is_missed() {
        for len in [1, 7, 8, 9, 64] {
            let mut seen = fill(1, len);
            stamp(&mut seen, 99);
            assert!(is_put(&seen, 1, 99), "{len}");
            let poisoned = poison(1, len, 99);
            for at in 0..len as usize {
                let mut torn = seen.clone();
                torn[at] = poisoned[at];
                assert!(!is_put(&torn, 1, 99), "byte {at} of {len}");
            }
        }
    }

    #[test]
    fn bytes_of_an_earlier_put_or_of_the_other_rank_are_told_apart() {
        let mut seen = fill(1, 64);
        stamp(&mut seen, 99);
        assert!(!is_put(&seen, 1, 98) && !is_put(&seen, 0, 99) && !is_put(&seen[..63], 1, 99));
    }
}
