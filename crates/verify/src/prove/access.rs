//! Every access of an unrolled program to every window, and every two that meet.
//!
//! ```text
//!   program + knowledge --collect--> accesses of each window --sweep over the bytes--> pairs: ordered?  reads: written?
//! ```

use std::cmp::Ordering;
use std::ops::Range;

use sidelane_core::schedule::WindowId;

use super::happens_before::{Knowledge, touch_era};
use super::program::Program;
use super::{AccessKind, OpRef, ProofFailure};
use crate::unroll::{Assumed, Bytes, Effect};

/// Checks all accesses to all windows; returns the numbers of accesses and of conflicting pairs.
pub(super) fn check(program: &Program, known: &Knowledge) -> Result<(usize, u64), ProofFailure> {
    let (mut count, mut pairs) = (0, 0);
    for mut accesses in collect(program, known) {
        accesses.list.sort_by_key(|access| access.start);
        count += accesses.list.len();
        pairs += meet(program, known, &accesses)?;
        written(program, &accesses)?;
    }
    Ok((count, pairs))
}

/// The actor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Who {
    /// An operation.
    Op(u32),
    /// A touch: its scene within the call, and its position there.
    Touch(u32, u32),
}

/// How an access is carried out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// At once, when it is issued.
    Here,
    /// By a lane, at any time until the next signal of its track is visible: a write to another
    /// rank.
    Late,
    /// By a lane, with the signal it belongs to: a tag that another rank is sent.
    Signalled,
    /// By a lane, at any time until its stage is over: the read side of a write to another rank.
    Source,
}

#[derive(Clone, Copy)]
struct Access {
    start: u64,
    end: u64,
    write: bool,
    who: Who,
    actor: u32,
    call: u32,
    /// Which state of the bytes is written, or must be seen.
    version: Version,
    how: How,
    era: u32,
    /// Track (none for touches), its lane if it signals anything, and the position in it.
    track: Option<u32>,
    lane: Option<u32>,
    pos: u32,
    /// Knowledge when it begins, and when it ends: more, if it is a wait.
    begun: u32,
    view: u32,
}

impl Access {
    /// Whether this access is over before `other` begins.
    #[inline]
    fn before(&self, other: &Access, known: &Knowledge) -> bool {
        // A wait polls its word from the beginning on, and may take an older value there for its
        // own signal.
        let view = known.view(if self.version.is_set_back() { other.begun } else { other.view });
        if self.lane.is_some_and(|lane| view.landed[lane as usize] > self.pos) {
            return true;
        }
        let one_track = (self.actor, self.track) == (other.actor, other.track) && self.pos < other.pos;
        match self.how {
            How::Late => false,
            How::Signalled => one_track && other.how == How::Signalled,
            _ if self.actor != other.actor => self.era < view.era[self.actor as usize],
            _ if self.era != other.era => self.era < other.era,
            _ => one_track && self.how == How::Here,
        }
    }

    /// Whether the two belong to one operation or touch.
    #[inline]
    fn is_part_of(&self, other: &Access) -> bool {
        (self.actor, self.call, self.who) == (other.actor, other.call, other.who)
    }

    fn op_ref(&self, program: &Program) -> OpRef {
        match self.who {
            Who::Op(op) => program.op_ref(op),
            Who::Touch(within, index) => {
                let part = program.part(self.actor, self.call);
                let scene = &part.scenes[within as usize];
                let touch = &scene.touches[index as usize];
                OpRef {
                    rank: part.rank,
                    role: part.role,
                    call: self.call as usize,
                    stage: scene.name,
                    index: index as usize,
                    what: if touch.write {
                        AccessKind::Writes(touch.what)
                    } else {
                        AccessKind::Reads(touch.what)
                    },
                }
            }
        }
    }
}

/// A state of bytes: written by a call or, behind that, a flag word that the call has reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32);

impl Version {
    fn of(call: u32) -> Self {
        Version(2 * call)
    }

    fn set_back(call: usize) -> Self {
        Version(2 * call as u32 + 1)
    }

    /// How many there are in so many calls.
    fn count(calls: usize) -> usize {
        2 * calls
    }

    fn index(self) -> usize {
        self.0 as usize
    }

    fn call(self) -> usize {
        self.index() / 2
    }

    fn is_set_back(self) -> bool {
        self.0 % 2 == 1
    }
}

/// The accesses to one window of one rank.
struct Accesses {
    owner: u32,
    window: WindowId,
    list: Vec<Access>,
    /// Writes of ranks outside the sample: in which call, which bytes.
    assumed: Vec<(u32, Range<u64>)>,
}

const WINDOWS: [WindowId; 3] = [WindowId::POOL, WindowId::CONTROL, WindowId::HOST_STAGING];

/// Collects all accesses, by owner and window.
fn collect(program: &Program, known: &Knowledge) -> Vec<Accesses> {
    let mut all: Vec<Accesses> = (0..program.unrolled.ranks)
        .flat_map(|owner| {
            WINDOWS.map(|window| Accesses { owner, window, list: Vec::new(), assumed: Vec::new() })
        })
        .collect();
    let place = |bytes: &Bytes| bytes.owner as usize * WINDOWS.len() + bytes.window.0 as usize;
    for Assumed { call, bytes } in &program.unrolled.assumed {
        all[place(bytes)].assumed.push((*call as u32, bytes.range.clone()));
    }
    let unrolled = program.unrolled_ranks();
    let mut add = |bytes: &Bytes, access: Access| {
        if !bytes.range.is_empty() && unrolled[bytes.owner as usize] {
            let (start, end) = (bytes.range.start, bytes.range.end);
            all[place(bytes)].list.push(Access { start, end, ..access });
        }
    };
    for (op, node) in (0..).zip(&program.nodes) {
        let scene = program.scene_of(node);
        let rank = program.part(node.actor, node.call).rank;
        let read = |how| Access {
            start: 0,
            end: 0,
            write: false,
            who: Who::Op(op),
            actor: node.actor,
            call: node.call,
            version: Version::of(node.call),
            how,
            era: touch_era(node.scene) + 1,
            track: Some(node.step.track),
            lane: node.lane,
            pos: node.pos,
            begun: known.at_begin(op),
            view: known.at_end(op),
        };
        let write = |how| Access { write: true, ..read(how) };
        let at = |version, access: Access| Access { version, ..access };
        let here = |to: &Bytes| to.owner == rank;
        for effect in scene.effects(&node.step) {
            match effect {
                Effect::Read(bytes) => add(&bytes, read(How::Here)),
                Effect::Sums(to) => add(&to, write(How::Here)),
                Effect::Tag(to) => add(&to, write(if here(&to) { How::Here } else { How::Signalled })),
                Effect::Raises { word, call, after } => {
                    if let Some(call) = after {
                        add(&word, at(Version::set_back(call), read(How::Signalled)));
                    }
                    add(&word, at(Version::of(call as u32), write(How::Signalled)));
                }
                Effect::Awaits { word, call } => add(&word, at(Version::of(call as u32), read(How::Here))),
                Effect::SetsBack { word, call } => add(&word, at(Version::set_back(call), write(How::Here))),
                Effect::Copy { from, to } => {
                    let (source, target) =
                        if here(&to) { (How::Here, How::Here) } else { (How::Source, How::Late) };
                    let of = scene.sources_of().map_or(Version::of(node.call), |of| Version::of(of as u32));
                    from.iter().for_each(|bytes| add(bytes, at(of, read(source))));
                    add(&to, write(target));
                }
            }
        }
    }
    for actor in 0..program.unrolled.actors {
        let scenes =
            program.unrolled.parts_of(actor).flat_map(|part| (0..).zip(&part.scenes).map(move |s| (part, s)));
        for (number, (part, (within, scene))) in (0..).zip(scenes) {
            for (index, touch) in (0..).zip(&scene.touches) {
                add(
                    &touch.bytes,
                    Access {
                        start: 0,
                        end: 0,
                        write: touch.write,
                        who: Who::Touch(within, index),
                        actor,
                        call: part.call as u32,
                        version: Version::of(touch.of as u32),
                        how: How::Here,
                        era: touch_era(number),
                        track: None,
                        lane: None,
                        pos: index,
                        begun: known.of_scene(actor, number),
                        view: known.of_scene(actor, number),
                    },
                );
            }
        }
    }
    all
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
    let mut covered: Vec<Vec<Range<u64>>> = vec![Vec::new(); Version::count(program.unrolled.calls.len())];
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
