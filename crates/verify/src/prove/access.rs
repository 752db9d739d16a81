//! Every access of an unrolled program to every window, with the knowledge at that point.

use std::ops::Range;

use sidelane_core::schedule::WindowId;

use super::order::{Knowledge, touch_era};
use super::program::Program;
use super::{AccessKind, OpRef};
use crate::unroll::{Assumed, Bytes, Effect};

/// The actor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
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
pub(super) struct Access {
    pub start: u64,
    pub end: u64,
    pub write: bool,
    pub who: Who,
    pub actor: u32,
    pub call: u32,
    /// Which state of the bytes is written, or must be seen.
    pub version: Version,
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
    pub fn before(&self, other: &Access, known: &Knowledge) -> bool {
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
    pub fn is_part_of(&self, other: &Access) -> bool {
        (self.actor, self.call, self.who) == (other.actor, other.call, other.who)
    }

    pub fn op_ref(&self, program: &Program) -> OpRef {
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

/// The accesses to one window of one rank.
pub(super) struct Accesses {
    pub owner: u32,
    pub window: WindowId,
    pub list: Vec<Access>,
    /// What ranks outside the sample write: in which call, which bytes.
    pub assumed: Vec<(u32, Range<u64>)>,
}

const WINDOWS: [WindowId; 3] = [WindowId::POOL, WindowId::CONTROL, WindowId::HOST_STAGING];

/// Collects all accesses, by owner and window.
pub(super) fn collect(program: &Program, known: &Knowledge) -> Vec<Accesses> {
    let mut all: Vec<Accesses> = (0..program.story.ranks)
        .flat_map(|owner| {
            WINDOWS.map(|window| Accesses { owner, window, list: Vec::new(), assumed: Vec::new() })
        })
        .collect();
    let place = |bytes: &Bytes| bytes.owner as usize * WINDOWS.len() + bytes.window.0 as usize;
    for Assumed { call, bytes } in &program.story.assumed {
        all[place(bytes)].assumed.push((*call as u32, bytes.range.clone()));
    }
    let told = program.told();
    let mut add = |bytes: &Bytes, access: Access| {
        if !bytes.range.is_empty() && told[bytes.owner as usize] {
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
    for actor in 0..program.story.actors {
        let scenes =
            program.story.parts_of(actor).flat_map(|part| (0..).zip(&part.scenes).map(move |s| (part, s)));
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
