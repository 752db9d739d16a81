//! Every access of a story to every window, with what is known where it happens.

use super::order::{Knowledge, touch_era};
use super::program::Program;
use super::{OpRef, What};
use crate::schedule::WindowId;
use crate::schedule::story::{Bytes, Effect};

/// Who accesses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    /// An operation.
    Op(u32),
    /// A touch: its scene within the call, and its position there.
    Touch(u32, u32),
}

#[derive(Clone, Copy)]
pub(super) struct Access {
    pub start: u64,
    pub end: u64,
    pub write: bool,
    /// A write to another rank: it lands later than it is issued.
    pub remote: bool,
    pub who: Who,
    pub rank: u32,
    pub call: u32,
    /// For a read: the call whose bytes it must see.
    pub of: u32,
    era: u32,
    /// Track (none for touches) and position in it.
    track: Option<u32>,
    pos: u32,
    view: u32,
}

impl Access {
    /// Whether this access is over before `other` begins.
    pub fn before(&self, other: &Access, known: &Knowledge, tracks: u32) -> bool {
        let view = known.view(other.view);
        let landed = |track| view.landed[(self.rank * tracks + track) as usize] > self.pos;
        if self.track.is_some_and(landed) {
            return true;
        }
        if self.remote {
            return false;
        }
        if self.rank != other.rank {
            return self.era < view.era[self.rank as usize];
        }
        self.era < other.era || self.era == other.era && self.track == other.track && self.pos < other.pos
    }

    /// Whether the two belong to one operation or touch.
    pub fn is_part_of(&self, other: &Access) -> bool {
        (self.rank, self.call, self.who) == (other.rank, other.call, other.who)
    }

    pub fn op_ref(&self, program: &Program) -> OpRef {
        match self.who {
            Who::Op(op) => program.op_ref(op),
            Who::Touch(within, index) => {
                let scene =
                    &program.story.calls[self.call as usize][self.rank as usize].scenes[within as usize];
                let touch = &scene.touches[index as usize];
                OpRef {
                    rank: self.rank,
                    call: self.call as usize,
                    stage: scene.name,
                    index: index as usize,
                    what: if touch.write { What::Writes(touch.what) } else { What::Reads(touch.what) },
                }
            }
        }
    }
}

/// The accesses to one window of one rank.
pub(super) struct Accesses {
    pub owner: u32,
    pub window: WindowId,
    pub list: Vec<Access>,
}

const WINDOWS: [WindowId; 2] = [WindowId::POOL, WindowId::CONTROL];

/// Collects all accesses, by owner and window.
pub(super) fn collect(program: &Program, known: &Knowledge) -> Vec<Accesses> {
    let mut all: Vec<Accesses> = (0..program.story.ranks)
        .flat_map(|owner| WINDOWS.map(|window| Accesses { owner, window, list: Vec::new() }))
        .collect();
    let mut add = |bytes: &Bytes, access: Access| {
        if !bytes.range.is_empty() {
            let (start, end) = (bytes.range.start, bytes.range.end);
            let index = bytes.owner as usize * WINDOWS.len() + bytes.window.0 as usize;
            all[index].list.push(Access { start, end, ..access });
        }
    };
    for (op, node) in (0..).zip(&program.nodes) {
        let base = Access {
            start: 0,
            end: 0,
            write: false,
            remote: false,
            who: Who::Op(op),
            rank: node.rank,
            call: node.call,
            of: node.call,
            era: touch_era(node.scene) + 1,
            track: Some(node.step.track),
            pos: node.pos,
            view: known.of_op(op),
        };
        let write = |to: &Bytes| Access { write: true, remote: to.owner != node.rank, ..base };
        for effect in program.story.calls[node.call as usize][node.rank as usize].effects(&node.step) {
            match effect {
                Effect::Read(bytes) => add(&bytes, base),
                Effect::Tag(to) => add(&to, write(&to)),
                Effect::Copy { from, to } => {
                    from.iter().for_each(|bytes| add(bytes, base));
                    add(&to, write(&to));
                }
            }
        }
    }
    for rank in 0..program.story.ranks {
        let scenes =
            program.story.parts_of(rank).flat_map(|part| (0..).zip(&part.scenes).map(move |s| (part, s)));
        for (number, (part, (within, scene))) in (0..).zip(scenes) {
            for (index, touch) in (0..).zip(&scene.touches) {
                add(
                    &touch.bytes,
                    Access {
                        start: 0,
                        end: 0,
                        write: touch.write,
                        remote: false,
                        who: Who::Touch(within, index),
                        rank,
                        call: part.call as u32,
                        of: touch.of as u32,
                        era: touch_era(number),
                        track: None,
                        pos: index,
                        view: known.of_scene(rank, number),
                    },
                );
            }
        }
    }
    all
}
