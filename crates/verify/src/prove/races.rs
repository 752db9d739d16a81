//! Whether all accesses to the same bytes are ordered, and whether each read finds what its call
//! wrote.
//!
//! ```text
//!   accesses, pairs + knowledge --> moment of each operation and touch --> pairs: ordered?   reads: written?
//! ```

use std::cmp::Ordering;

use super::flat_program::Program;
use super::happens_before::{Knowledge, touch_era};
use super::overlapping_accesses::{Access, Accesses, How, Touched, Window};
use super::{AccessKind, OpRef, ProofFailure};

/// When an operation or a touch happens.
#[derive(Clone, Copy)]
struct Moment {
    actor: u32,
    call: u32,
    era: u32,
    /// The last era in which lanes may read what it puts.
    read_until: u32,
    /// Track (none for touches), its lane if it signals anything, and the position in it.
    track: Option<u32>,
    lane: Option<u32>,
    pos: u32,
    /// Knowledge when it begins, and when it ends: more, if it is a wait.
    begun: u32,
    view: u32,
}

/// Per scene of an actor: the last era in which lanes may read what the scene puts.
fn settled(program: &Program, actor: u32) -> Vec<u32> {
    let scenes: Vec<_> = program.unrolled.parts_of(actor).flat_map(|part| &part.scenes).collect();
    let (mut last, mut from) = (vec![u32::MAX; scenes.len()], 0);
    for next in (0..scenes.len()).filter(|&next| scenes[next].settled) {
        last[from..next].fill(touch_era(next as u32).saturating_sub(1));
        from = next;
    }
    last
}

/// The accesses of a program, and what is known at each of them.
pub(super) struct Judge<'a> {
    program: &'a Program<'a>,
    known: &'a Knowledge,
    accesses: &'a Accesses,
    /// Per operation, by id, and behind them per touch; none for operations that a mutant lacks.
    moments: Vec<Option<Moment>>,
    /// Whether the program has every operation.
    whole: bool,
}

impl<'a> Judge<'a> {
    /// `accesses` are those of the program, or [fit](Accesses::fit) it.
    pub fn new(program: &'a Program<'a>, known: &'a Knowledge, accesses: &'a Accesses) -> Self {
        let mut moments = vec![None; accesses.ids as usize];
        let settled: Vec<Vec<u32>> =
            (0..program.unrolled.actors).map(|actor| settled(program, actor)).collect();
        for (op, node) in (0..).zip(&program.nodes) {
            moments[node.step.id as usize] = Some(Moment {
                actor: node.actor,
                call: node.call,
                era: touch_era(node.scene) + 1,
                read_until: settled[node.actor as usize][node.scene as usize],
                track: Some(node.step.track),
                lane: node.lane,
                pos: node.pos,
                begun: known.at_begin(op),
                view: known.at_end(op),
            });
        }
        let whole = moments.iter().all(Option::is_some);
        moments.extend(accesses.touches.iter().map(|touch| {
            let view = known.of_scene(touch.actor, touch.scene);
            Some(Moment {
                actor: touch.actor,
                call: touch.call,
                era: touch_era(touch.scene),
                read_until: touch_era(touch.scene),
                track: None,
                lane: None,
                pos: touch.at.1,
                begun: view,
                view,
            })
        }));
        Judge { program, known, accesses, moments, whole }
    }

    /// Checks all accesses to all windows; returns the numbers of accesses and of conflicting
    /// pairs.
    pub fn check(&self) -> Result<(usize, u64), ProofFailure> {
        let (mut count, mut pairs) = (0, 0);
        for window in &self.accesses.windows {
            let here = match self.whole {
                true => window.list.len(),
                false => window.list.iter().filter(|access| self.moment(access).is_some()).count(),
            };
            count += here;
            if here == window.list.len()
                && window.chain.as_ref().is_some_and(|chain| self.keeps(window, chain))
            {
                pairs += window.pairs.len() as u64;
                continue;
            }
            for &(a, b) in &window.pairs {
                if let (Some(a), Some(b)) = (self.at(window, a), self.at(window, b)) {
                    pairs += 1;
                    self.pair(window, a, b)?;
                }
            }
            if here < window.list.len() || !window.is_written {
                self.written(window)?;
            }
        }
        Ok((count, pairs))
    }

    /// Whether the pairs of a chain are still ordered as they were. Order is transitive: who begins
    /// behind the end of an access knows all that was known there. So all pairs are ordered as
    /// before, and whatever holds of the bytes follows from that.
    fn keeps(&self, window: &Window, chain: &[(u32, u32)]) -> bool {
        chain.iter().all(|&(first, then)| {
            let (first, then) = (self.at(window, first), self.at(window, then));
            first.zip(then).is_some_and(|(first, then)| self.is_before(first, then))
        })
    }

    /// All pairs of a window whose accesses are ordered, the first access first.
    pub fn ordered(&self, window: &Window) -> Vec<(u32, u32)> {
        let first_first = |&(a, b): &(u32, u32)| {
            let (of_a, of_b) = self.at(window, a).zip(self.at(window, b))?;
            match self.is_before(of_a, of_b) {
                true => Some((a, b)),
                false => self.is_before(of_b, of_a).then_some((b, a)),
            }
        };
        window.pairs.iter().filter_map(first_first).collect()
    }

    /// An access, if its operation is there.
    fn at(&self, window: &'a Window, at: u32) -> Option<(&'a Access, &Moment)> {
        let access = &window.list[at as usize];
        self.moment(access).map(|moment| (access, moment))
    }

    fn moment(&self, access: &Access) -> Option<&Moment> {
        self.moments[access.by as usize].as_ref()
    }

    fn pair(&self, of: &Window, a: (&Access, &Moment), b: (&Access, &Moment)) -> Result<(), ProofFailure> {
        let (owner, window) = (of.owner, of.window);
        let bytes = a.0.start.max(b.0.start)..a.0.end.min(b.0.end);
        let refs = |a: (&Access, _), b: (&Access, _)| (self.op_ref(a.0), self.op_ref(b.0));
        if a.0.by == b.0.by {
            let (a, b) = refs(a, b);
            return Err(ProofFailure::WrittenTwice { a, b, owner, window, bytes });
        }
        // Calls follow each other: mostly the earlier one's access comes first.
        let (first, second) = if a.1.call <= b.1.call { (a, b) } else { (b, a) };
        let (a, b) = if self.is_before(first, second) {
            (first, second)
        } else if self.is_before(second, first) {
            (second, first)
        } else {
            let (a, b) = refs(a, b);
            return Err(ProofFailure::Race { a, b, owner, window, bytes });
        };
        match (a.0.write && b.0.write, a.0.write, a.0.version.cmp(&b.0.version)) {
            (true, _, Ordering::Equal) => {
                let (a, b) = refs(a, b);
                Err(ProofFailure::WrittenTwice { a, b, owner, window, bytes })
            }
            (true, _, Ordering::Greater) => {
                let (write, by) = refs(a, b);
                Err(ProofFailure::Lost { write, by, owner, window, bytes })
            }
            (_, true, Ordering::Greater) => {
                let (writer, reader) = refs(a, b);
                Err(ProofFailure::Overwritten { writer, reader, owner, window, bytes })
            }
            // A call writes a byte once, so it was not there yet.
            (_, false, Ordering::Equal) => {
                let (reader, of) = (self.op_ref(a.0), a.0.version.call());
                Err(ProofFailure::Unwritten { reader, of, owner, window, bytes })
            }
            _ => Ok(()),
        }
    }

    /// Whether an access is over before another begins.
    #[inline]
    fn is_before(&self, (a, of_a): (&Access, &Moment), (b, of_b): (&Access, &Moment)) -> bool {
        // A wait polls its word from the beginning on, and may take an older value there for its
        // own signal.
        let view = self.known.view(if b.version.is_set_back() { of_b.begun } else { of_b.view });
        if of_a.lane.is_some_and(|lane| view.landed[lane as usize] > of_a.pos) {
            return true;
        }
        let one_track = (of_a.actor, of_a.track) == (of_b.actor, of_b.track) && of_a.pos < of_b.pos;
        let last = if a.how == How::Source { of_a.read_until } else { of_a.era };
        match a.how {
            How::Late => false,
            How::Signalled => one_track && b.how == How::Signalled,
            _ if of_a.actor != of_b.actor => last < view.era[of_a.actor as usize],
            _ if last != of_b.era => last < of_b.era,
            _ => one_track && a.how == How::Here,
        }
    }

    /// Each read finds all its bytes written by the call it belongs to.
    fn written(&self, of: &Window) -> Result<(), ProofFailure> {
        let is_there = |access: &Access| self.moment(access).is_some();
        let Some((read, bytes)) = of.unwritten(self.program.unrolled.calls.len(), is_there) else {
            return Ok(());
        };
        let (reader, call) = (self.op_ref(read), read.version.call());
        Err(match read.version.is_set_back() {
            true => ProofFailure::StillRaised { signal: reader, since: call },
            false => ProofFailure::Unwritten { reader, of: call, owner: of.owner, window: of.window, bytes },
        })
    }

    fn op_ref(&self, access: &Access) -> OpRef {
        let Some(touch) = access.by.checked_sub(self.accesses.ids) else {
            let op = self.program.index_of[access.by as usize].expect("whose moment is known");
            return self.program.op_ref(op);
        };
        let Touched { actor, call, at: (within, index), .. } = self.accesses.touches[touch as usize];
        let part = self.program.part(actor, call);
        let scene = &part.scenes[within as usize];
        let what = scene.touches[index as usize].what;
        OpRef {
            rank: part.rank,
            role: part.role,
            call: call as usize,
            stage: scene.name,
            index: index as usize,
            what: if access.write { AccessKind::Writes(what) } else { AccessKind::Reads(what) },
        }
    }
}
