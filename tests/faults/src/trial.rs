//! A trial: ranks are in a phase, a fault strikes, and what follows is judged.
//!
//! ```text
//!   assignment, join ── phase runs ── STRIKE ──► all others pass the mark, bits right          survived
//!                                     └──► all others fail, each names the victim        named
//!   lifted, rebuilt by those that are left, a few steps more, bits right                 or wrong
//! ```

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use crate::cell::{Fault, Lane, Phase};
use crate::error::Result;
use crate::inject::{Active, Machine};
use crate::job::{Heard, Job, News};
use crate::judge::Verdict;
use crate::protocol::{ATTEMPTS, Command, Failure, Report, named_within};

/// A rank without any news for so long hangs.
const HANG: Duration = Duration::from_secs(40);
/// What a machine with other work may take beyond the bounds of the design.
const SLACK: Duration = Duration::from_secs(3);
/// Steps after a rebuild.
const STEPS_AFTER: u64 = 3;
/// Time of a partition in rebuilds: long enough for each half to lose the other one.
const CUT: Duration = Duration::from_secs(5);

/// A result, or what is wrong.
pub type Judgment<T = Judged> = std::result::Result<T, String>;

/// A fault that is right: what came of it.
#[derive(Debug)]
pub struct Judged {
    /// Named or survived.
    pub verdict: Verdict,
    /// Time until the last of the others failed.
    pub named: Option<Duration>,
    /// Whether the victim's process has ended.
    pub ended: bool,
    /// Errors of the others, and what followed.
    pub note: String,
}

/// A fault to come.
#[derive(Clone, Copy, Debug)]
pub struct Strike {
    /// The fault.
    pub fault: Fault,
    /// The phase that it strikes.
    pub phase: Phase,
    /// The rank that it strikes; the wire's faults strike all.
    pub victim: usize,
    /// Time between the first steps of the phase and the fault.
    pub pause: Duration,
    /// Steps of the phase, after which ranks stop; else they take steps until they fail or are
    /// killed, and survive by the steps of a mark.
    pub steps: Option<u64>,
}

impl Strike {
    fn strikes(&self, rank: usize) -> bool {
        !self.fault.is_of_wire() && rank == self.victim
    }

    /// Whether the victim says nothing more.
    fn silences(&self) -> bool {
        matches!(self.fault, Fault::Sigkill | Fault::Sigstop)
    }
}

/// What ranks have said since the fault.
#[derive(Default)]
struct Seen {
    passed: BTreeMap<usize, (u32, Vec<Failure>)>,
    failed: BTreeMap<usize, (Failure, Instant)>,
    ended: Vec<usize>,
}

impl Seen {
    /// Whether the victim's process has ended, which may be heard later than what follows from it.
    fn has_ended(&self, strike: &Strike) -> bool {
        strike.fault == Fault::Sigkill || self.ended.contains(&strike.victim)
    }

    /// All failures, for the report of a wrong one.
    fn text(&self, struck: Instant) -> String {
        let line = |(rank, (failure, at)): (&usize, &(Failure, Instant))| {
            format!("  rank {rank} after {:.1} s: {}", (*at - struck).as_secs_f64(), failure.text)
        };
        self.failed.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

/// Ranks of one world.
pub struct Trial<'j> {
    job: &'j mut Job,
    /// The process of each rank.
    order: Vec<usize>,
}

impl<'j> Trial<'j> {
    /// Gives each of these processes an assignment, and has it join.
    ///
    /// # Errors
    /// [`Error::NotReady`](crate::error::Error::NotReady).
    pub fn assign(job: &'j mut Job, order: Vec<usize>, lane: Lane, join: bool) -> Result<Trial<'j>> {
        for (assignment, &process) in job.assignments(&order, lane).into_iter().zip(&order) {
            job.tell(process, &Command::Assign { assignment, join });
        }
        let is_seated = |report: &Report| matches!(report, Report::Joined { .. } | Report::Left);
        job.expect(order.iter().copied(), "join", is_seated)?;
        Ok(Trial { job, order })
    }

    fn size(&self) -> usize {
        self.order.len()
    }

    /// The fewest ranks that go on.
    fn at_least(&self) -> usize {
        (self.size() - 1).max(1)
    }

    fn tell(&mut self, rank: usize, command: &Command) {
        self.job.tell(self.order[rank], command);
    }

    /// The next news of a rank of this world.
    fn next(&mut self, until: Instant) -> Option<(usize, News, Instant)> {
        loop {
            let Heard { from, news, at } = self.job.next(until)?;
            if let Some(rank) = self.order.iter().position(|&process| process == from) {
                return Some((rank, news, at));
            }
        }
    }

    /// Ranks that the fault does not strike itself.
    fn others(&self, strike: &Strike) -> Vec<usize> {
        (0..self.size()).filter(|&rank| !strike.strikes(rank)).collect()
    }

    /// Runs so many steps of a phase on all ranks.
    ///
    /// # Errors
    /// The first rank that does not do them.
    pub fn steps(&mut self, phase: Phase, steps: u64) -> Judgment<()> {
        let all: Vec<usize> = (0..self.size()).collect();
        self.done(&all, phase, steps)
    }

    fn done(&mut self, ranks: &[usize], phase: Phase, steps: u64) -> Judgment<()> {
        let reports = self.ask(ranks, &Command::Run { phase, steps: Some(steps) })?;
        match reports.iter().find(|(_, report)| !matches!(report, Report::Done)) {
            Some((rank, report)) => Err(format!("rank {rank} in {}: {report:?}", phase.name())),
            None => Ok(()),
        }
    }

    /// Brings all ranks to the phase, makes the fault, and judges what follows.
    ///
    /// # Errors
    /// [`Error`](crate::error::Error) where the fault cannot be made.
    pub fn strike(&mut self, strike: &Strike, machine: &Machine) -> Result<Judgment> {
        for rank in 0..self.size() {
            self.tell(rank, &Command::Run { phase: strike.phase, steps: strike.steps });
        }
        let order = self.order.clone();
        self.job.expect(order, "run", |report| matches!(report, Report::Running))?;
        // No wait for anything: it only chooses the moment.
        thread::sleep(strike.pause);
        let active =
            Active::strike(strike.fault, self.job.pid(self.order[strike.victim]), machine, self.job.wire())?;
        let struck = Instant::now();
        if strike.steps.is_none() {
            (0..self.size()).for_each(|rank| self.tell(rank, &Command::Mark(strike.phase.steps())));
        }
        if (strike.phase, strike.fault) == (Phase::Rebuild, Fault::Partition) {
            thread::sleep(CUT);
            active.lift()?;
            return Ok(self.healed(strike, struck + CUT));
        }
        let seen = match self.watch(strike, struck) {
            Ok(seen) => seen,
            Err(wrong) => return Ok(Err(wrong)),
        };
        let named = self.others(strike).iter().all(|rank| seen.failed.contains_key(rank));
        let judged = match named {
            true if strike.fault.is_survived() => Err("all others fail".to_owned()),
            // A rebuild goes on without the victim: that is what it is for.
            false if strike.fault.is_fatal() && strike.phase != Phase::Rebuild && strike.steps.is_none() => {
                Err("no other rank fails".to_owned())
            }
            true => self.named(strike, active, struck, &seen)?,
            false => self.survived(strike, active, &seen)?,
        };
        Ok(judged.map_err(|wrong| format!("{wrong}\n{}", seen.text(struck))))
    }

    /// Listens until all others have passed the mark, or have failed. The victim may do either.
    fn watch(&mut self, strike: &Strike, struck: Instant) -> Judgment<Seen> {
        let (mut seen, others) = (Seen::default(), self.others(strike));
        loop {
            let failed = others.iter().filter(|rank| seen.failed.contains_key(rank)).count();
            let passed = others.iter().all(|rank| seen.passed.contains_key(rank));
            // A victim that has passed its mark goes on, and fails with the others' world. That
            // report would be taken for the answer to the next command.
            let goes_on = failed > 0 && strike.steps.is_none();
            let victim = strike.silences()
                || others.len() == self.size()
                || !goes_on && seen.passed.contains_key(&strike.victim)
                || seen.failed.contains_key(&strike.victim)
                || seen.ended.contains(&strike.victim);
            if victim && (failed == others.len() || passed && failed == 0) {
                return Ok(seen);
            }
            let Some((rank, news, at)) = self.next(struck + HANG) else {
                let heard = |rank: &usize| {
                    seen.failed.contains_key(rank) || failed == 0 && seen.passed.contains_key(rank)
                };
                let hung: Vec<usize> = (0..self.size()).filter(|rank| !heard(rank)).collect();
                return Err(format!("hang: ranks {hung:?} say nothing for {} s", HANG.as_secs()));
            };
            match news {
                News::Said(Report::Passed { size, mended }) => _ = seen.passed.insert(rank, (size, mended)),
                News::Said(Report::Done) => _ = seen.passed.insert(rank, (self.size() as u32, Vec::new())),
                News::Said(Report::Failed(failure)) => _ = seen.failed.insert(rank, (failure, at)),
                News::Ended if strike.strikes(rank) => seen.ended.push(rank),
                other => return Err(format!("rank {rank}: {other:?}")),
            }
        }
    }

    fn survived(&mut self, strike: &Strike, active: Active, seen: &Seen) -> Result<Judgment> {
        active.lift()?;
        let others = self.others(strike);
        let fewest = others.iter().map(|rank| seen.passed[rank].0).filter(|&size| size > 0).min();
        let mut note = match fewest.filter(|&size| size < self.size() as u32) {
            Some(size) => format!("{size} ranks go on, all steps right"),
            None => "all steps right".to_owned(),
        };
        let mended = others.iter().flat_map(|rank| &seen.passed[rank].1);
        let mended: Vec<&str> = mended.map(|failure| failure.kind.as_str()).collect();
        if !mended.is_empty() {
            note += &format!("; attempts that failed: {}", counted(&mended));
        }
        note += &victims(strike, seen);
        if strike.fault == Fault::Sigstop {
            match self.hear_victim(strike) {
                Ok(kind) => note += &format!("; the victim, awake: {kind}"),
                Err(wrong) => return Ok(Err(wrong)),
            }
        }
        let ended = seen.has_ended(strike);
        Ok(Ok(Judged { verdict: Verdict::Survived, named: None, ended, note }))
    }

    fn named(&mut self, strike: &Strike, active: Active, struck: Instant, seen: &Seen) -> Result<Judgment> {
        let others = self.others(strike);
        let took = |rank: &usize| seen.failed[rank].1 - struck;
        for rank in &others {
            let (failure, took) = (&seen.failed[rank].0, took(rank));
            if let Err(wrong) = self.blames(strike, *rank, failure, took) {
                return Ok(Err(wrong));
            }
        }
        let named = others.iter().map(took).max();
        let kinds: Vec<&str> = others.iter().map(|rank| seen.failed[rank].0.kind.as_str()).collect();
        let mut note = counted(&kinds) + &victims(strike, seen);
        // The others go on before a stopped rank wakes up.
        let stopped = strike.fault == Fault::Sigstop;
        let mut active = Some(active);
        if !stopped {
            active.take().map_or(Ok(()), Active::lift)?;
        }
        if strike.phase != Phase::Bootstrap {
            let lives = !strike.silences() && !seen.ended.contains(&strike.victim);
            match self.rebuild(strike, lives) {
                Ok(size) => note += &format!("; {size} ranks rebuilt"),
                Err(wrong) => return Ok(Err(wrong)),
            }
        }
        if let Some(active) = active {
            active.lift()?;
            match self.hear_victim(strike) {
                Ok(kind) => note += &format!("; the victim, awake: {kind}"),
                Err(wrong) => return Ok(Err(wrong)),
            }
        }
        let ended = seen.has_ended(strike);
        Ok(Ok(Judged { verdict: Verdict::Named, named, ended, note }))
    }

    /// Holds the failure of a rank against what it must name, and until when.
    fn blames(&self, strike: &Strike, rank: usize, failure: &Failure, took: Duration) -> Judgment<()> {
        let half = self.size() / 2;
        let guilty: Vec<u32> = match strike.fault.is_of_wire() {
            true => {
                (0..self.size()).filter(|other| other / half != rank / half).map(|rank| rank as u32).collect()
            }
            false => vec![strike.victim as u32],
        };
        if !failure.blames_only(&guilty) {
            let text = &failure.text;
            return Err(format!("rank {rank} names {:?}, not only {guilty:?}: {text}", failure.names));
        }
        // In rebuilds a rank reports the failure of its last attempt.
        let attempts = if strike.phase == Phase::Rebuild { ATTEMPTS } else { 1 };
        // A rank that is lost from a world is missed by its silence, whatever the error.
        let in_world = !matches!(strike.phase, Phase::Bootstrap | Phase::Rebuild);
        let liveness = self.job.liveness();
        let of_world = strike.fault.is_fatal() && in_world;
        let bound = if of_world { named_within(liveness) } else { failure.bound(liveness) };
        if took > bound * attempts + SLACK {
            return Err(format!("rank {rank} took {:.1} s: {}", took.as_secs_f64(), failure.text));
        }
        Ok(())
    }

    /// Those that are left meet in a later epoch, and take a few steps. Returns their number.
    fn rebuild(&mut self, strike: &Strike, with_victim: bool) -> Judgment<usize> {
        let at_least = self.at_least();
        let mut members: Vec<usize> =
            (0..self.size()).filter(|&rank| with_victim || !strike.strikes(rank)).collect();
        let mut reports = BTreeMap::new();
        for _ in 0..ATTEMPTS {
            reports = self.ask(&members, &Command::Rebuild { at_least: at_least as u32 })?;
            let is_out =
                |report: &Report| matches!(report, Report::Failed(failure) if failure.kind == "Evicted");
            members.retain(|rank| !is_out(&reports[rank]));
            if members.iter().all(|rank| matches!(reports[rank], Report::Joined { .. })) {
                break;
            }
        }
        if members.len() < at_least
            || members.iter().any(|rank| !matches!(reports[rank], Report::Joined { .. }))
        {
            return Err(format!("no rebuild of {at_least} ranks: {reports:?}"));
        }
        let phase = if strike.phase == Phase::Rebuild { Phase::Dispatch } else { strike.phase };
        self.done(&members, phase, STEPS_AFTER)?;
        Ok(members.len())
    }

    /// A command to some ranks, and the report of each.
    fn ask(&mut self, ranks: &[usize], command: &Command) -> Judgment<BTreeMap<usize, Report>> {
        ranks.iter().for_each(|&rank| self.tell(rank, command));
        let (mut reports, until) = (BTreeMap::new(), Instant::now() + HANG);
        while reports.len() < ranks.len() {
            let Some((rank, news, _)) = self.next(until) else {
                return Err(format!("hang: {command:?}: only {:?} of {ranks:?} answer", reports.keys()));
            };
            match news {
                // Steps of the phase, or of the one before.
                News::Said(Report::Running | Report::Passed { .. }) => {}
                News::Said(report) if ranks.contains(&rank) => _ = reports.insert(rank, report),
                News::Ended if !ranks.contains(&rank) => {}
                other => return Err(format!("{command:?}: rank {rank}: {other:?}")),
            }
        }
        Ok(reports)
    }

    /// A rank that was stopped fails, or goes on: the kind of its failure.
    fn hear_victim(&mut self, strike: &Strike) -> Judgment<String> {
        let until = Instant::now() + HANG;
        loop {
            match self.next(until) {
                Some((rank, News::Said(report), _)) if rank == strike.victim => match report {
                    Report::Failed(failure) => return Ok(failure.kind),
                    Report::Passed { .. } | Report::Done => return Ok("it goes on".to_owned()),
                    Report::Running => {}
                    other => return Err(format!("the victim, awake: {other:?}")),
                },
                Some((rank, News::Ended, _)) => return Err(format!("rank {rank} ended")),
                Some(_) => {}
                None => {
                    return Err(format!("hang: the victim, awake, says nothing for {} s", HANG.as_secs()));
                }
            }
        }
    }

    /// A partition of two halves makes no world of more than a half. Ranks go on when it is over.
    fn healed(&mut self, strike: &Strike, healed: Instant) -> Judgment {
        let seen = self.watch_members(strike, healed)?;
        let sizes: Vec<String> = seen.passed.values().map(|(size, _)| size.to_string()).collect();
        let failed: Vec<&str> = seen.failed.values().map(|(failure, _)| failure.kind.as_str()).collect();
        let members = self.size() - failed.len();
        if members < self.at_least() || failed.iter().any(|kind| *kind != "Evicted") {
            return Err(format!("after the partition: worlds of {}; {}", sizes.join(" "), counted(&failed)));
        }
        let note = format!("{members} ranks go on when it is over, all steps right");
        Ok(Judged { verdict: Verdict::Survived, named: None, ended: false, note })
    }

    /// Listens until each rank has passed the mark or has failed.
    fn watch_members(&mut self, strike: &Strike, since: Instant) -> Judgment<Seen> {
        let mut seen = Seen::default();
        while (0..self.size())
            .any(|rank| !seen.passed.contains_key(&rank) && !seen.failed.contains_key(&rank))
        {
            let Some((rank, news, at)) = self.next(since + HANG) else {
                return Err(format!("hang: after {}: {:?} passed", strike.fault.name(), seen.passed.keys()));
            };
            match news {
                News::Said(Report::Passed { size, mended }) => _ = seen.passed.insert(rank, (size, mended)),
                News::Said(Report::Failed(failure)) => _ = seen.failed.insert(rank, (failure, at)),
                other => return Err(format!("rank {rank}: {other:?}")),
            }
        }
        Ok(seen)
    }

    /// All ranks that live leave their world.
    ///
    /// # Errors
    /// The first that does not.
    pub fn leave(&mut self, without: Option<usize>) -> Judgment<()> {
        let members: Vec<usize> = (0..self.size()).filter(|&rank| Some(rank) != without).collect();
        let reports = self.ask(&members, &Command::Leave)?;
        match reports.iter().find(|(_, report)| !matches!(report, Report::Left)) {
            Some((rank, report)) => Err(format!("rank {rank} does not leave: {report:?}")),
            None => Ok(()),
        }
    }
}

/// What the victim itself has said.
fn victims(strike: &Strike, seen: &Seen) -> String {
    match seen.failed.get(&strike.victim).filter(|_| strike.strikes(strike.victim)) {
        Some((failure, _)) => format!("; the victim: {}", failure.text),
        None if seen.ended.contains(&strike.victim) && !strike.silences() => {
            "; the kernel killed the victim".to_owned()
        }
        None => String::new(),
    }
}

/// Words with their numbers.
fn counted(words: &[&str]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    words.iter().for_each(|word| *counts.entry(word).or_default() += 1);
    counts.iter().map(|(word, count)| format!("{count} {word}")).collect::<Vec<_>>().join(", ")
}
