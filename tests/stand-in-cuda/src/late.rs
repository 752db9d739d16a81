//! Running copies and fills: in pieces, the pieces of a batch in any order.

use std::ops::Range;
use std::thread;

use crate::code::Result;
use crate::counters::{COUNTERS, add};
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
    let mut pieces = Vec::new();
    for copy in &copies.all {
        add(&COUNTERS.copies, 1);
        add(&COUNTERS.copied_bytes, copy.bytes as u64);
        add(&COUNTERS.copies_by_sms, u64::from(by_sms(copy)));
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

/// A plain copy within one device's memory is a kernel in disguise.
fn by_sms(copy: &Copy) -> bool {
    let Source::At(from) = copy.from else { return false };
    let map = MAP.read().unwrap();
    let owners = device_of(&map, from).zip(device_of(&map, copy.to));
    !copy.overlap && owners.is_some_and(|(from, to)| from == to)
}
