//! Every access of an unrolled program to every window, and every two that meet.
//!
//! ```text
//!   program --collect--> accesses of each window --sweep over the bytes--> pairs that must be ordered
//! ```
//!
//! None of this depends on when an operation happens, so the mutants of a program share it: see
//! [`Accesses::fit`].

use std::ops::Range;
use std::rc::Rc;

use sidelane_core::schedule::WindowId;

use super::flat_program::{Node, Program};
use crate::unroll::{ActorCall, Assumed, Bytes, Effect};

/// How an access is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// At once, when it is issued.
    Here,
    /// By a lane, at any time until the next signal of its track is visible: a write to another
    /// rank.
    Late,
    /// By a lane, with the signal it belongs to: a tag that another rank is sent.
    Signalled,
    /// By a lane, at any time until the next scene of its actor that begins settled: the read side
    /// of a write to another rank.
    Source,
}

/// An access to some bytes of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Access {
    pub start: u64,
    pub end: u64,
    pub write: bool,
    /// The id of its operation; behind all ids, the number of its touch.
    pub by: u32,
    /// Which state of the bytes is written, or must be seen.
    pub version: Version,
    pub how: How,
}

/// A state of bytes: written by a call or, behind that, a flag word that the call has reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(u32);

impl Version {
    pub fn of(call: u32) -> Self {
        Version(2 * call)
    }

    fn set_back(call: usize) -> Self {
        Version(2 * call as u32 + 1)
    }

    /// How many there are in so many calls.
    pub fn count(calls: usize) -> usize {
        2 * calls
    }

    pub fn index(self) -> usize {
        self.0 as usize
    }

    pub fn call(self) -> usize {
        self.index() / 2
    }

    pub fn is_set_back(self) -> bool {
        self.0 % 2 == 1
    }
}

/// A touch of planner or caller.
#[derive(Clone, Copy)]
pub(super) struct Touched {
    pub actor: u32,
    pub call: u32,
    /// Scene of the actor, counted through all calls.
    pub scene: u32,
    /// Scene within its call, and position in it.
    pub at: (u32, u32),
}

/// The accesses to one window of one rank.
pub(super) struct Window {
    pub owner: u32,
    pub window: WindowId,
    /// By first byte.
    pub list: Vec<Access>,
    /// Positions of every two that overlap, with a write among them.
    pub pairs: Vec<(u32, u32)>,
    /// Of a program without a fault: pairs, the first access first, whose order implies that of all
    /// others.
    pub chain: Option<Vec<(u32, u32)>>,
    /// Writes of ranks outside the sample: in which call, which bytes.
    assumed: Vec<(u32, Range<u64>)>,
    /// Whether each read finds all its bytes written by its call, if every operation is there.
    pub is_written: bool,
}

/// All accesses of an unrolled program.
pub(super) struct Accesses {
    pub windows: Vec<Window>,
    pub touches: Vec<Touched>,
    /// One more than the largest id of an operation.
    pub ids: u32,
}

const WINDOWS: [WindowId; 3] = [WindowId::POOL, WindowId::CONTROL, WindowId::HOST_STAGING];

/// The index of a window.
fn place(bytes: &Bytes) -> usize {
    bytes.owner as usize * WINDOWS.len() + bytes.window.0 as usize
}

impl Accesses {
    /// Collects all accesses, by owner and window, and all pairs.
    pub fn of(program: &Program) -> Accesses {
        let owners = 0..program.unrolled.ranks;
        let of_owner = |owner| {
            WINDOWS.map(|window| Window {
                owner,
                window,
                list: Vec::new(),
                pairs: Vec::new(),
                chain: None,
                assumed: Vec::new(),
                is_written: false,
            })
        };
        let mut windows: Vec<Window> = owners.flat_map(of_owner).collect();
        for Assumed { call, bytes } in &program.unrolled.assumed {
            windows[place(bytes)].assumed.push((*call as u32, bytes.range.clone()));
        }
        let unrolled = program.unrolled_ranks();
        let mut add = |bytes: &Bytes, access: Access| {
            if unrolled[bytes.owner as usize] {
                windows[place(bytes)].list.push(access);
            }
        };
        program.nodes.iter().for_each(|node| of_op(program, node, &mut add));
        let (ids, mut touches) = (program.index_of.len() as u32, Vec::new());
        for actor in 0..program.unrolled.actors {
            let scenes = (program.unrolled.parts_of(actor))
                .flat_map(|part| (0..).zip(&part.scenes).map(move |scene| (part.call as u32, scene)));
            for (scene, (call, (within, run))) in (0..).zip(scenes) {
                for (index, touch) in (0..).zip(&run.touches) {
                    let (by, version) = (ids + touches.len() as u32, Version::of(touch.of as u32));
                    touches.push(Touched { actor, call, scene, at: (within, index) });
                    access(&touch.bytes, (by, touch.write, version, How::Here), &mut add);
                }
            }
        }
        for window in &mut windows {
            window.meet();
            window.is_written = window.unwritten(program.unrolled.calls.len(), |_| true).is_none();
        }
        Accesses { windows, touches, ids }
    }

    /// Whether these, which are those of `base`, are also the accesses of a mutant of it: each
    /// operation that the mutant still has accesses the same bytes in the same way.
    pub fn fit(base: &Program, mutant: &Program) -> bool {
        let parts = base.unrolled.calls.iter().flatten();
        (parts.zip(mutant.unrolled.calls.iter().flatten()))
            .all(|(old, new)| Rc::ptr_eq(old, new) || same_touches(old, new))
            && mutant.nodes.iter().all(|node| {
                let known = base.index_of.get(node.step.id as usize).copied().flatten();
                known.is_some_and(|index| same_accesses((base, &base.nodes[index as usize]), (mutant, node)))
            })
    }
}

fn same_touches(old: &ActorCall, new: &ActorCall) -> bool {
    old.scenes.len() == new.scenes.len()
        && old.scenes.iter().zip(&new.scenes).all(|(old, new)| old.touches == new.touches)
}

fn same_accesses((base, old): (&Program, &Node), (mutant, new): (&Program, &Node)) -> bool {
    let what = |node: &Node| (node.actor, node.call, node.step.op, node.step.set, node.step.value);
    if what(old) == what(new) && base.scene_of(old).has_operands_of(mutant.scene_of(new)) {
        return true;
    }
    let all = |program, node| {
        let mut all = Vec::new();
        of_op(program, node, &mut |bytes, access| all.push((place(bytes), access)));
        all
    };
    all(base, old) == all(mutant, new)
}

/// Adds the accesses of an operation.
fn of_op(program: &Program, node: &Node, add: &mut impl FnMut(&Bytes, Access)) {
    let scene = program.scene_of(node);
    let rank = program.part(node.actor, node.call).rank;
    let own = Version::of(scene.targets_of().map_or(node.call, |of| of as u32));
    let here = |to: &Bytes| to.owner == rank;
    let mut access = |bytes: &Bytes, write, version, how| {
        access(bytes, (node.step.id, write, version, how), add);
    };
    for effect in scene.effects(&node.step) {
        match effect {
            Effect::Read(bytes) => access(&bytes, false, own, How::Here),
            Effect::Sums(to) => access(&to, true, own, How::Here),
            Effect::Tag(to) => access(&to, true, own, if here(&to) { How::Here } else { How::Signalled }),
            Effect::Raises { word, call, after } => {
                if let Some(call) = after {
                    access(&word, false, Version::set_back(call), How::Signalled);
                }
                access(&word, true, Version::of(call as u32), How::Signalled);
            }
            Effect::Awaits { word, call } => access(&word, false, Version::of(call as u32), How::Here),
            Effect::SetsBack { word, call } => access(&word, true, Version::set_back(call), How::Here),
            Effect::Copy { from, to } => {
                let (source, target) =
                    if here(&to) { (How::Here, How::Here) } else { (How::Source, How::Late) };
                let of = scene.sources_of().map_or(own, |of| Version::of(of as u32));
                from.iter().for_each(|bytes| access(bytes, false, of, source));
                access(&to, true, own, target);
            }
        }
    }
}

/// Adds an access, unless it has no bytes.
fn access(
    bytes: &Bytes,
    (by, write, version, how): (u32, bool, Version, How),
    add: &mut impl FnMut(&Bytes, Access),
) {
    let Range { start, end } = bytes.range;
    if start < end {
        add(bytes, Access { start, end, write, by, version, how });
    }
}

impl Window {
    /// Sweeps over the bytes: two accesses that overlap, of which one writes,, must be ordered.
    fn meet(&mut self) {
        // Of those that begin together, the operations of a mutant come in the order of their
        // program, too.
        self.list.sort_by_key(|access| (access.start, access.by));
        let mut open: Vec<u32> = Vec::new();
        for (at, b) in (0..).zip(&self.list) {
            open.retain(|&other| self.list[other as usize].end > b.start);
            for &other in &open {
                let a = &self.list[other as usize];
                // Most pairs are two reads, which never conflict.
                if (a.write || b.write) && (a.by != b.by || (a.write && b.write)) {
                    self.pairs.push((other, at));
                }
            }
            open.push(at);
        }
    }

    /// The first read whose call has not written all its bytes, and the first of those, among the
    /// accesses that are there.
    pub fn unwritten(
        &self,
        calls: usize,
        is_there: impl Fn(&Access) -> bool,
    ) -> Option<(&Access, Range<u64>)> {
        let list = || self.list.iter().filter(|access| is_there(access));
        let assumed = self.assumed.iter().map(|(call, bytes)| (Version::of(*call), bytes.clone()));
        let mut writes: Vec<(Version, Range<u64>)> = assumed.collect();
        writes.extend(list().filter(|a| a.write).map(|a| (a.version, a.start..a.end)));
        writes.sort_unstable_by_key(|write| write.1.start);
        let mut covered: Vec<Vec<Range<u64>>> = vec![Vec::new(); Version::count(calls)];
        for (version, bytes) in writes {
            let covered = &mut covered[version.index()];
            match covered.last_mut() {
                Some(last) if last.end >= bytes.start => last.end = last.end.max(bytes.end),
                _ => covered.push(bytes),
            }
        }
        list().filter(|access| !access.write).find_map(|read| {
            let covered = &covered[read.version.index()];
            let next = covered.partition_point(|range| range.end <= read.start);
            let here = covered.get(next).cloned().unwrap_or(u64::MAX..u64::MAX);
            let missing = match here.start <= read.start {
                true => here.end..read.end,
                false => read.start..read.end.min(here.start),
            };
            (!missing.is_empty()).then_some((read, missing))
        })
    }

    /// Keeps of these ordered pairs those that no two others imply: a pair is over in turn if there
    /// is an access between the two.
    pub fn link(&mut self, mut ordered: Vec<(u32, u32)>) {
        let words = self.list.len().div_ceil(64);
        let row = |at: u32| at as usize * words..(at as usize + 1) * words;
        let mut before = vec![0_u64; self.list.len() * words];
        for &(first, then) in &ordered {
            before[row(then)][first as usize / 64] |= 1 << (first % 64);
        }
        let mut implied = vec![0_u64; self.list.len() * words];
        for &(first, then) in &ordered {
            for (implied, before) in implied[row(then)].iter_mut().zip(&before[row(first)]) {
                *implied |= before;
            }
        }
        ordered.retain(|&(first, then)| implied[row(then)][first as usize / 64] >> (first % 64) & 1 == 0);
        self.chain = Some(ordered);
    }
}
