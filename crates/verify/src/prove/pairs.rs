//! Every two accesses that meet, and whether every read finds what its call wrote.

use std::cmp::Ordering;
use std::ops::Range;

use super::ProofFailure;
use super::access::{Access, Accesses, Version};
use super::order::Knowledge;
use super::program::Program;

/// Checks the accesses to one window; returns the number of conflicting pairs.
pub(super) fn check(
    program: &Program,
    known: &Knowledge,
    accesses: &mut Accesses,
) -> Result<u64, ProofFailure> {
    accesses.list.sort_by_key(|access| access.start);
    let pairs = meet(program, known, accesses)?;
    written(program, accesses)?;
    Ok(pairs)
}

/// Sweeps over the bytes: whatever overlaps, with a write among the two, must be ordered.
fn meet(program: &Program, known: &Knowledge, accesses: &Accesses) -> Result<u64, ProofFailure> {
    let mut pairs = 0;
    let mut open: Vec<&Access> = Vec::new();
    for b in &accesses.list {
        open.retain(|a| a.end > b.start);
        for a in &open {
            // Most pairs are two reads, which never conflict.
            if (a.write || b.write) && (!a.is_part_of(b) || (a.write && b.write)) {
                pairs += 1;
                pair(program, known, accesses, a, b)?;
            }
        }
        open.push(b);
    }
    Ok(pairs)
}

fn pair(
    program: &Program,
    known: &Knowledge,
    accesses: &Accesses,
    a: &Access,
    b: &Access,
) -> Result<(), ProofFailure> {
    let (owner, window) = (accesses.owner, accesses.window);
    let bytes = a.start.max(b.start)..a.end.min(b.end);
    if a.is_part_of(b) {
        let op = a.op_ref(program);
        return Err(ProofFailure::WrittenTwice { a: op, b: op, owner, window, bytes });
    }
    // Calls follow each other: mostly the earlier one's access comes first.
    let (first, second) = if a.call <= b.call { (a, b) } else { (b, a) };
    let (a, b) = if first.before(second, known) {
        (first, second)
    } else if second.before(first, known) {
        (second, first)
    } else {
        let (a, b) = (a.op_ref(program), b.op_ref(program));
        return Err(ProofFailure::Race { a, b, owner, window, bytes });
    };
    let refs = || (a.op_ref(program), b.op_ref(program));
    match (a.write && b.write, a.write, a.version.cmp(&b.version)) {
        (true, _, Ordering::Equal) => {
            let (a, b) = refs();
            Err(ProofFailure::WrittenTwice { a, b, owner, window, bytes })
        }
        (true, _, Ordering::Greater) => {
            let (write, by) = refs();
            Err(ProofFailure::Lost { write, by, owner, window, bytes })
        }
        (_, true, Ordering::Greater) => {
            let (writer, reader) = refs();
            Err(ProofFailure::Overwritten { writer, reader, owner, window, bytes })
        }
        // A call writes a byte once, so it was not there yet.
        (_, false, Ordering::Equal) => {
            let (reader, of) = (a.op_ref(program), a.version.call());
            Err(ProofFailure::Unwritten { reader, of, owner, window, bytes })
        }
        _ => Ok(()),
    }
}

/// Each read finds all its bytes written by the call it belongs to.
fn written(program: &Program, accesses: &Accesses) -> Result<(), ProofFailure> {
    let assumed = accesses.assumed.iter().map(|(call, bytes)| (Version::of(*call), bytes.clone()));
    let mut writes: Vec<(Version, Range<u64>)> = assumed.collect();
    writes.extend(accesses.list.iter().filter(|a| a.write).map(|a| (a.version, a.start..a.end)));
    writes.sort_unstable_by_key(|write| write.1.start);
    let mut covered: Vec<Vec<Range<u64>>> = vec![Vec::new(); Version::count(program.story.calls.len())];
    for (version, bytes) in writes {
        let covered = &mut covered[version.index()];
        match covered.last_mut() {
            Some(last) if last.end >= bytes.start => last.end = last.end.max(bytes.end),
            _ => covered.push(bytes),
        }
    }
    for read in accesses.list.iter().filter(|access| !access.write) {
        let covered = &covered[read.version.index()];
        let next = covered.partition_point(|range| range.end <= read.start);
        let here = covered.get(next).cloned().unwrap_or(u64::MAX..u64::MAX);
        let missing = match here.start <= read.start {
            true => here.end..read.end,
            false => read.start..read.end.min(here.start),
        };
        if !missing.is_empty() && read.version.is_set_back() {
            return Err(ProofFailure::StillRaised {
                signal: read.op_ref(program),
                since: read.version.call(),
            });
        }
        if !missing.is_empty() {
            return Err(ProofFailure::Unwritten {
                reader: read.op_ref(program),
                of: read.version.call(),
                owner: accesses.owner,
                window: accesses.window,
                bytes: missing,
            });
        }
    }
    Ok(())
}
