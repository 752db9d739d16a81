//! Puts the two programs of a rank together.
//!
//! ```text
//!   away      caller   licence | entry                           | rows                          | end
//!             relay    met | told | heard | agreed | headers | forward | end
//!
//!   inline    licence | entry, up to its waits | met .. agreed | entry's waits
//!                     | rows, up to its waits  | headers | forward | rows' waits | end
//! ```
//!
//! Inline is the launch order of a stage (own puts and signals, what is relayed, own waits) carried on to the whole
//! call. A return is woven alike, with "home" for "rows", and ends with its sum.

use std::rc::Rc;

use super::filled::Filled;
use super::{Relays, Scene, Step, Touch};
use crate::schedule::{Item, Op, Stage};

/// A stage, what happens before it, and what its slots are filled with.
pub(super) struct Act {
    pub stage: Stage,
    pub touches: Vec<Touch>,
    pub filled: Rc<Filled>,
}

/// What one rank does in one call: itself, and for others.
pub(super) struct Acts {
    pub caller: Vec<Act>,
    /// What its caller touches last.
    pub end: Vec<Touch>,
    pub relay: Vec<Act>,
}

/// Acts of a relay that lie between the two halves of the caller's entry: those of the meeting.
const MEETING: usize = 4;

impl Acts {
    /// The scenes of the rank's actors: its own, and its relay's if that is away.
    pub fn weave(self, relays: Relays) -> Vec<Vec<Scene>> {
        let Acts { caller, end, relay } = self;
        let last = |acts: &[Act], touches| Act {
            stage: Stage { name: "end", items: Vec::new() },
            touches,
            filled: Rc::clone(&acts[0].filled),
        };
        let end = last(&caller, end).scene();
        let whole = |acts: Vec<Act>, end| acts.into_iter().map(Act::scene).chain([end]).collect();
        match relays {
            Relays::Inline => vec![inline(caller, relay).chain([end]).collect()],
            Relays::Away if relay.is_empty() => vec![whole(caller, end)],
            Relays::Away => {
                let relay_end = last(&relay, Vec::new()).scene();
                vec![whole(caller, end), whole(relay, relay_end)]
            }
        }
    }
}

fn inline(caller: Vec<Act>, relay: Vec<Act>) -> impl Iterator<Item = Scene> {
    let mut relay = relay.into_iter().map(Act::scene);
    (0..).zip(caller).flat_map(move |(nth, act)| {
        let between = match nth {
            1 => MEETING,
            2 => usize::MAX,
            _ => return vec![act.scene()],
        };
        let [start, finish] = act.halves();
        [start].into_iter().chain(relay.by_ref().take(between)).chain([finish]).collect()
    })
}

impl Act {
    fn scene(self) -> Scene {
        let steps = self.steps(&self.stage.items);
        Scene { name: self.stage.name, first: 0, touches: self.touches, steps, filled: self.filled }
    }

    /// What can be done at once, and what begins with the first wait.
    fn halves(self) -> [Scene; 2] {
        let [start, finish] = [self.stage.start(), self.stage.finish()].map(|items| self.steps(items));
        let (name, first) = (self.stage.name, start.len());
        let filled = Rc::clone(&self.filled);
        [
            Scene { name, first: 0, touches: self.touches, steps: start, filled },
            Scene { name, first, touches: Vec::new(), steps: finish, filled: self.filled },
        ]
    }

    fn steps(&self, items: &[Item]) -> Vec<Step> {
        let operands = self.filled.operands();
        let value = |op| match op {
            Op::Signal { level, .. } | Op::Wait { level, .. } => operands.value(level),
            _ => 0,
        };
        items.iter().map(|&Item { track, op }| Step { track, set: 0, op, value: value(op) }).collect()
    }
}
