//! Running copies and fills: in pieces, the pieces of a batch in any order.

use std::ops::Range;
use std::thread;

use crate::activity;
use crate::code::Result;
use crate::counters::{COUNTERS, add};
use crate::driver::settings;
use crate::memory::{MAP, device_of};
use crate::random::Chance;
use crate::stream::Stream;
use crate::work::{Copies, Copy, Late, Source};

/// The most pieces that a copy is cut in.
const PIECES: u64 = 4;

/// Runs what stayed behind.
pub fn run(late: &Late, stream: &Stream, chance: &mut Chance) -> Result<()> {
    match late {
        Late::Copies(copies) => run_copies(copies, stream, chance),
        Late::Fill { to, pattern, count } => {
            add(&COUNTERS.fills, 1);
            stream.engine(false).write(*to, &pattern.repeat(*count))
        }
    }
}

fn run_copies(copies: &Copies, stream: &Stream, chance: &mut Chance) -> Result<()> {
    let engine = stream.engine(copies.pageable);
    let (start, mut movers, mut pieces) = (activity::now(), Vec::new(), Vec::new());
    for copy in &copies.all {
        add(&COUNTERS.copies, 1);
        add(&COUNTERS.copied_bytes, copy.bytes as u64);
        let mover = Mover::of(copy)?;
        add(&COUNTERS.copies_by_sms, u64::from(mover.by_sms()));
        movers.push((mover, copy.bytes as u64));
        pieces.extend(cut(copy.bytes, chance).into_iter().map(|piece| (copy, piece)));
    }
    chance.shuffle(&mut pieces);
    for (copy, piece) in pieces {
        if chance.one_in(16) {
            thread::yield_now();
        }
        let to = copy.to + piece.start as u64;
        match &copy.from {
            Source::At(from) => engine.copy(to, from + piece.start as u64, piece.len())?,
            Source::Kept(bytes) => engine.write(to, &bytes[piece])?,
        }
    }
    for (mover, bytes) in movers {
        mover.note(bytes, start);
    }
    Ok(())
}

/// Cuts at random places.
fn cut(bytes: usize, chance: &mut Chance) -> Vec<Range<usize>> {
    let mut cuts: Vec<usize> =
        (0..chance.below(PIECES)).map(|_| chance.below(bytes as u64) as usize).collect();
    cuts.extend([0, bytes]);
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|ends| ends[0]..ends[1]).collect()
}

/// The part of a real device that moves the bytes of a copy.
#[derive(Clone, Copy, PartialEq)]
enum Mover {
    /// To or from the host.
    Engine,
    /// From one device to another.
    EngineBetween,
    /// A plain copy within one device's memory is a kernel in disguise.
    Multiprocessors,
    /// One of the driver's own, which shows.
    Kernel,
}

impl Mover {
    fn of(copy: &Copy) -> Result<Mover> {
        let Source::At(from) = copy.from else { return Ok(Mover::Engine) };
        let map = MAP.read().unwrap();
        Ok(match device_of(&map, from).zip(device_of(&map, copy.to)) {
            None => Mover::Engine,
            Some((from, to)) if from != to => Mover::EngineBetween,
            Some(_) if settings()?.copy_kernels => Mover::Kernel,
            Some(_) if copy.overlap && settings()?.heeds_overlap() => Mover::Engine,
            Some(_) => Mover::Multiprocessors,
        })
    }

    fn by_sms(self) -> bool {
        matches!(self, Mover::Multiprocessors | Mover::Kernel)
    }

    /// Records the finished work.
    fn note(self, bytes: u64, start: u64) {
        match self {
            Mover::Engine => activity::copy(activity::MEMCPY, bytes, activity::ASYNC_MEMCPY, start),
            Mover::EngineBetween => activity::copy(activity::MEMCPY2, bytes, activity::ASYNC_MEMCPY, start),
            Mover::Multiprocessors => activity::copy(activity::MEMCPY, bytes, activity::COMPUTE, start),
            Mover::Kernel => activity::kernel(c"fake_copy", start),
        }
    }
}
