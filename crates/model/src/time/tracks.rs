//! The order of a line's tasks: as they were handed over, or in turns.

use std::collections::{HashMap, VecDeque};

use super::task::Task;

/// Tasks of a line: in order of submission. A NIC takes turns among its connected peers as its
/// queue pairs do, a piece each.
#[derive(Debug, Default)]
pub(super) struct Tracks {
    /// By rank and peer; all tasks of other lines are one.
    tracks: HashMap<(u32, u32), VecDeque<Task>>,
    turns: VecDeque<(u32, u32)>,
}

/// Bytes that a NIC sends to one peer before it turns to the next.
const PIECE: u64 = 256 << 10;

impl Tracks {
    pub fn push(&mut self, track: (u32, u32), task: Task) {
        let tasks = self.tracks.entry(track).or_default();
        if tasks.is_empty() {
            self.turns.push_back(track);
        }
        tasks.push_back(task);
    }

    /// The next task or piece of one, and its peer.
    pub fn pop(&mut self) -> Option<(u32, Task)> {
        let track = self.turns.pop_front()?;
        let tasks = self.tracks.get_mut(&track).expect("a turn is a track's");
        let task = match tasks.front_mut().expect("a track with a turn has a task") {
            Task::Send { to, messages, bytes, .. } if *bytes > PIECE => {
                // Its messages are as long as each other, as far as that goes.
                let sent = (*messages * PIECE / *bytes).min(*messages - 1);
                (*messages, *bytes) = (*messages - sent, *bytes - PIECE);
                Task::Send { to: *to, messages: sent, bytes: PIECE, rest: *bytes }
            }
            _ => tasks.pop_front().expect("as before"),
        };
        if !tasks.is_empty() {
            self.turns.push_back(track);
        }
        Some((track.0, task))
    }

    /// Puts back what has to wait.
    pub fn put_back(&mut self, track: (u32, u32), task: Task) {
        let tasks = self.tracks.entry(track).or_default();
        tasks.push_front(task);
        if tasks.len() == 1 {
            self.turns.push_front(track);
        }
    }
}
