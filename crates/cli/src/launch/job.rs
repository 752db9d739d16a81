//! One job from start to end: all ranks succeed, or the first failure ends it.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::bind::Bind;
use super::environment::{Meeting, Place, places};
use super::lifeline::Lifeline;
use super::machines::Part;
use super::ranks::{End, Ranks};
use super::signals::{Event, Inbox};
use super::tag::Taggers;
use crate::error::CliError;

/// What to run, and how often.
pub struct Job {
    /// Number of ranks of each node.
    pub nodes: Vec<u32>,
    /// What this machine runs of it, if not all.
    pub part: Option<Part>,
    /// Program and arguments of every rank.
    pub command: Vec<OsString>,
    /// Variables beside those that the launcher sets; they win.
    pub env: Vec<(String, OsString)>,
    /// Which processors ranks get.
    pub bind: Bind,
    /// How long the others may take to end after a failure or a signal.
    pub grace: Duration,
    /// Whether lines of output begin with the rank.
    pub tag: bool,
}

/// How a job ended.
#[derive(Debug, Default)]
pub struct Outcome {
    /// The rank that failed first.
    failed: Option<End>,
    /// The signal that the launcher was ended by.
    stopped: Option<Signal>,
}

impl Outcome {
    /// 0 if all ranks exited with 0; otherwise as a shell would report the signal or the first failure.
    pub fn exit_code(&self) -> u8 {
        match (self.stopped, self.failed) {
            (Some(signal), _) => 128 + signal.as_raw() as u8,
            (None, Some(end)) => end.code(),
            (None, None) => 0,
        }
    }
}

impl Job {
    /// Starts the ranks and stays until the last one has ended.
    pub fn run(&self) -> Result<Outcome, CliError> {
        let inbox = Inbox::open().map_err(CliError::prepare("listen for signals"))?;
        let lifeline = Lifeline::new().map_err(CliError::prepare("open a pipe to the ranks"))?;
        let (meeting, places) = self.meeting(&lifeline)?;
        let taggers = self.tag.then(Taggers::new);
        let ranks = Ranks::start(&places, &meeting, self, taggers.as_ref())?;
        let outcome = self.watch(ranks, &inbox);
        if let Some(taggers) = taggers {
            taggers.finish(self.grace);
        }
        Ok(outcome)
    }

    /// Where the ranks meet, and which of them this machine starts.
    fn meeting(&self, lifeline: &Lifeline) -> Result<(Meeting, Vec<Place>), CliError> {
        let mut places = places(&self.nodes);
        let Some(part) = &self.part else { return Ok((Meeting::here(lifeline)?, places)) };
        places.retain(|place| place.node == part.node);
        Ok((Meeting::at(&part.master, &places, lifeline)?, places))
    }

    fn watch(&self, mut ranks: Ranks, inbox: &Inbox) -> Outcome {
        let mut outcome = Outcome::default();
        let mut deadline = None;
        while ranks.running() > 0 {
            match inbox.next(deadline) {
                Event::Child => {
                    for end in ranks.ended().into_iter().filter(|end| !end.status.success()) {
                        eprintln!("sidelane: {end}");
                        outcome.failed.get_or_insert(end);
                    }
                }
                Event::Stop(signal) if outcome.stopped.is_none() => {
                    outcome.stopped = Some(signal);
                    ranks.signal(signal);
                }
                // The grace is over, or whoever stopped the job has no more patience.
                Event::Stop(_) | Event::Elapsed => {
                    let killed: Vec<u32> = ranks.kill().iter().map(|place| place.rank).collect();
                    eprintln!("sidelane: killed {}", list(&killed));
                }
            }
            let ending = outcome.failed.is_some() || outcome.stopped.is_some();
            if ending && deadline.is_none() && ranks.running() > 0 {
                eprintln!(
                    "sidelane: ranks still running: {}, to be killed in {:?}",
                    ranks.running(),
                    self.grace
                );
                deadline = Some(Instant::now() + self.grace);
            }
        }
        outcome
    }
}

/// "rank 3", "ranks 0, 2 and 5".
fn list(ranks: &[u32]) -> String {
    let words: Vec<String> = ranks.iter().map(u32::to_string).collect();
    match words.split_last() {
        Some((last, others)) if !others.is_empty() => format!("ranks {} and {last}", others.join(", ")),
        _ => format!("rank {}", words.concat()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_listed_as_a_reader_would_say_them() {
        assert_eq!(list(&[3]), "rank 3");
        assert_eq!(list(&[0, 2, 5]), "ranks 0, 2 and 5");
    }
}
