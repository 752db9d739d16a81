//! Words between this program and the ranks that it starts: a JSON line each.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sidelane::Error;

use crate::cell::{Lane, Phase};

/// Time to wait for ranks at the start (`SIDELANE_RENDEZVOUS_MS`).
pub const RENDEZVOUS: Duration = Duration::from_secs(6);
/// Time to wait for a live but silent rank (`SIDELANE_DEADLINE_MS`).
pub const DEADLINE: Duration = Duration::from_secs(6);

/// A rank that sends nothing for so long is lost, unless the caller chooses another limit: the
/// library's default.
pub const LIVENESS: Duration = Duration::from_millis(1750);
/// Time of one rebuild.
pub const REBUILD: Duration = Duration::from_secs(10);
/// The longest limit that a run can have: a rebuild waits for two and a half times as long for
/// ranks that do not come.
pub const LONGEST_LIVENESS: Duration = REBUILD.checked_div(3).expect("three is not zero");

/// A rank that ended or stands still is named within this time: the coordinator, which every rank
/// hears, sends at each heartbeat of 250 ms.
pub fn named_within(liveness: Duration) -> Duration {
    liveness + Duration::from_millis(250)
}
/// Attempts of a rebuild: the library asks for another one when a rank is lost meanwhile.
pub const ATTEMPTS: u32 = 4;

/// A rank's place in a world that it is to join.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Assignment {
    /// Its number.
    pub rank: u32,
    /// Ranks of the world.
    pub size: u32,
    /// Its number on its machine.
    pub local_rank: u32,
    /// Ranks on its machine.
    pub local_size: u32,
    /// Name of the job.
    pub job: String,
    /// Address of rank 0's machine.
    pub master: String,
    /// First port of the rendezvous.
    pub port: u16,
    /// The lane between nodes.
    pub lane: Lane,
}

/// Command to a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Command {
    /// Take this assignment: join its world, unless the phase is to do that.
    Assign {
        /// The assignment.
        assignment: Assignment,
        /// Whether to join now.
        join: bool,
    },
    /// Take so many steps of a phase, or steps until one fails.
    Run {
        /// The phase.
        phase: Phase,
        /// Number of steps.
        steps: Option<u64>,
    },
    /// Report when so many steps more have been taken.
    Mark(u64),
    /// Meet the survivors in the next world.
    Rebuild {
        /// The fewest ranks of it.
        at_least: u32,
    },
    /// Leave the world.
    Leave,
}

/// Report of a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Report {
    /// It waits for commands.
    Started,
    /// It is in a world.
    Joined {
        /// Ranks of the world.
        size: u32,
        /// The epoch.
        epoch: u16,
    },
    /// The steps of a phase run.
    Running,
    /// The marked steps have been taken, in a world of so many ranks.
    Passed {
        /// Ranks of the world.
        size: u32,
        /// Failures that another attempt made good.
        mended: Vec<Failure>,
    },
    /// All steps have been taken.
    Done,
    /// It has left its world.
    Left,
    /// A call failed.
    Failed(Failure),
    /// A call succeeded, and its results are wrong.
    Wrong(String),
}

/// An error of the library, as far as this program judges it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure {
    /// The variant.
    pub kind: String,
    /// Ranks that it names.
    pub names: Vec<u32>,
    /// Whether it is about two ranks: both ends of a connection, or a rank and the one that it
    /// waits for.
    pub pair: bool,
    /// Its message.
    pub text: String,
}

impl From<&Error> for Failure {
    /// Every error of the library is data: ranks lie in fields of these names.
    fn from(error: &Error) -> Self {
        let (kind, text) = ("Error".to_owned(), error.to_string());
        let mut failure = Failure { kind, names: Vec::new(), pair: false, text };
        if let Ok(value) = serde_json::to_value(error) {
            failure.read(&value);
        }
        // Rank 0 is named by its address.
        if failure.kind == "NoRendezvous" {
            failure.names.push(0);
        }
        failure.names.sort_unstable();
        failure.names.dedup();
        failure
    }
}

impl Failure {
    fn read(&mut self, value: &Value) {
        match value {
            Value::String(name) => self.kind.clone_from(name),
            Value::Object(fields) => {
                let of_pair = |name: &&str| fields.contains_key(*name);
                self.pair |= ["rank", "peer", "by"].into_iter().filter(of_pair).count() == 2;
                for (name, value) in fields {
                    if name.starts_with(char::is_uppercase) {
                        self.kind.clone_from(name);
                        self.read(value);
                    } else if ["rank", "peer", "by", "missing"].contains(&name.as_str()) {
                        self.name(value);
                    }
                }
            }
            _ => {}
        }
    }

    fn name(&mut self, value: &Value) {
        match value {
            Value::Number(rank) => self.names.extend(rank.as_u64().map(|rank| rank as u32)),
            Value::Array(ranks) => ranks.iter().for_each(|rank| self.name(rank)),
            _ => {}
        }
    }

    /// Whether these ranks are guilty by this error, and no other is blamed: it names one of them,
    /// and besides them at most the other end of a pair.
    pub fn blames_only(&self, guilty: &[u32]) -> bool {
        let innocent = self.names.iter().filter(|name| !guilty.contains(name)).count();
        innocent < self.names.len() && innocent <= usize::from(self.pair)
    }

    /// The time that the design gives until such an error, where ranks are silent after this time.
    pub fn bound(&self, liveness: Duration) -> Duration {
        match self.kind.as_str() {
            "Stalled" => DEADLINE,
            "Deadline" | "NoRendezvous" | "NoConnection" | "Cancelled" => DEADLINE.max(RENDEZVOUS),
            _ => named_within(liveness),
        }
    }
}

#[cfg(test)]
mod tests {
    use sidelane::error::{BootstrapError, Cause, LaneError, LostReason};

    use super::*;

    fn named(error: impl Into<Error>) -> (String, Vec<u32>) {
        let failure = Failure::from(&error.into());
        (failure.kind, failure.names)
    }

    #[test]
    fn innocent_rank_is_named_only_as_the_other_end_of_a_pair() {
        let late = |missing| BootstrapError::Deadline {
            step: "meet".to_owned(),
            missing,
            waited: DEADLINE,
            refused: None,
        };
        let blames = |error: Error| Failure::from(&error).blames_only(&[2]);
        assert!(blames(late(vec![2]).into()) && !blames(late(vec![1, 2]).into()));
        assert!(!blames(late(vec![]).into()), "it names none");
        assert!(blames(Cause::Connection { rank: 2, by: 1 }.into()));
        assert!(blames(Cause::Connection { rank: 0, by: 2 }.into()));
        assert!(!blames(Cause::Connection { rank: 0, by: 1 }.into()));
        assert!(!blames(Cause::Cancelled { by: 1 }.into()));
    }

    #[test]
    fn failure_names_the_ranks_of_each_layer() {
        let lost = Cause::Lost { rank: 3, how: LostReason::Silent(DEADLINE) };
        assert_eq!(named(lost), ("Lost".to_owned(), vec![3]));
        assert_eq!(named(Cause::Connection { rank: 2, by: 1 }), ("Connection".to_owned(), vec![1, 2]));
        let wire = LaneError::Wire { rank: 0, peer: 3, lane: "tcp", errno: 104 };
        assert_eq!(named(wire), ("Wire".to_owned(), vec![0, 3]));
        let (step, missing) = ("meet".to_owned(), vec![1, 2]);
        let late = BootstrapError::Deadline { step, missing, waited: DEADLINE, refused: None };
        assert_eq!(named(late), ("Deadline".to_owned(), vec![1, 2]));
        let (address, waited) = ("10.0.0.1".to_owned(), DEADLINE);
        let nobody = BootstrapError::NoRendezvous { address, waited, other_job: None };
        assert_eq!(named(nobody), ("NoRendezvous".to_owned(), vec![0]));
        let files = BootstrapError::System { call: "socket", errno: 24 };
        assert_eq!(named(files), ("System".to_owned(), vec![]));
    }
}
