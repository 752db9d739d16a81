//! The phases of a world, step by step.

use std::sync::Arc;

use sidelane::bootstrap::{Identity, Secret};
use sidelane::collective::Communicator;
use sidelane::ep::Handle;
use sidelane::error::Cause;
use sidelane::topology::Route;
use sidelane::{Error, ExpertParallel, Options, World};

use super::tensors::{Calls, compare};
use super::{Progress, say};
use crate::cell::Phase;
use crate::protocol::{ATTEMPTS, Assignment, Failure, REBUILD, Report};

/// Ports of a rendezvous.
const PORTS: u16 = 16;

/// Why a step did not succeed.
#[derive(Debug)]
pub enum Trouble {
    /// A call failed.
    Error(Error),
    /// A call succeeded with wrong results.
    Wrong(String),
}

impl<E: Into<Error>> From<E> for Trouble {
    fn from(error: E) -> Self {
        Trouble::Error(error.into())
    }
}

/// What the calls of a phase are made with.
enum Objects {
    /// The phase makes its own in each step.
    None,
    Layer {
        ep: Box<ExpertParallel>,
        calls: Calls,
        handle: Option<Box<Handle>>,
    },
    Collectives(Box<Communicator>),
}

/// A rank between two commands.
pub struct Rank {
    progress: Arc<Progress>,
    assignment: Option<Assignment>,
    world: Option<World>,
    /// For each rank of the world, its rank in the first one.
    firsts: Vec<u32>,
    mended: Vec<Failure>,
}

impl Rank {
    /// A rank without an assignment.
    pub fn new(progress: Arc<Progress>) -> Self {
        Rank { progress, assignment: None, world: None, firsts: Vec::new(), mended: Vec::new() }
    }

    /// Takes an assignment, and joins its world.
    pub fn assign(&mut self, assignment: Assignment, join: bool) -> Report {
        self.firsts = (0..assignment.size).collect();
        self.assignment = Some(assignment);
        match join.then(|| self.join("")) {
            Some(Err(trouble)) => self.report(trouble),
            Some(Ok(())) => self.joined(),
            None => Report::Left,
        }
    }

    /// Leaves its world.
    pub fn leave(&mut self) -> Report {
        self.world = None;
        Report::Left
    }

    /// Runs a phase.
    pub fn run(&mut self, phase: Phase, steps: Option<u64>) -> Report {
        match self.steps(phase, steps.unwrap_or(u64::MAX)) {
            Ok(()) => Report::Done,
            Err(trouble) => self.report(trouble),
        }
    }

    /// Goes on in a later epoch.
    pub fn rebuild(&mut self, at_least: u32) -> Report {
        match self.next_world(at_least) {
            Ok(()) => self.joined(),
            Err(trouble) => self.report(trouble),
        }
    }

    fn joined(&self) -> Report {
        let world = self.world.as_ref().expect("it has just joined");
        Report::Joined { size: world.size(), epoch: world.epoch() }
    }

    fn report(&self, trouble: Trouble) -> Report {
        match trouble {
            Trouble::Error(error) => Report::Failed(self.failure(&error)),
            Trouble::Wrong(what) => Report::Wrong(what),
        }
    }

    /// An error, which names ranks as the first world numbers them.
    fn failure(&self, error: &Error) -> Failure {
        let mut failure = Failure::from(error);
        for rank in &mut failure.names {
            *rank = self.firsts.get(*rank as usize).copied().unwrap_or(*rank);
        }
        failure
    }

    fn join(&mut self, suffix: &str) -> Result<(), Trouble> {
        let assignment = self.assignment.as_ref().expect("the parent gives an assignment first");
        let identity = Identity::new(assignment.rank, assignment.size)
            .with_local_rank(Some(assignment.local_rank))
            .with_local_size(Some(assignment.local_size))
            .with_job(format!("{}{suffix}", assignment.job))
            .with_master_addr(assignment.master.clone())
            .with_ports((assignment.port..assignment.port + PORTS).collect());
        let options = Options::from_env()?.with_net(assignment.lane.net());
        self.world = Some(World::join(&identity, Secret::from_env()?, options)?);
        Ok(())
    }

    fn next_world(&mut self, at_least: u32) -> Result<(), Trouble> {
        let world = self.world.as_ref().expect("only a world is rebuilt");
        let next = world.rebuild(REBUILD, at_least)?;
        self.firsts = next.previous_ranks().iter().map(|&rank| self.firsts[rank as usize]).collect();
        self.world = Some(next);
        Ok(())
    }

    fn steps(&mut self, phase: Phase, steps: u64) -> Result<(), Trouble> {
        let mut objects = self.objects(phase)?;
        self.mended.clear();
        self.progress.clear();
        say(&Report::Running);
        for nth in 0..steps {
            match (&mut objects, phase) {
                (_, Phase::Bootstrap) => self.meet(nth)?,
                (_, Phase::Rebuild) => self.rebuild_with_patience()?,
                (Objects::None, _) => self.build()?,
                (Objects::Collectives(communicator), _) => collective(communicator, nth)?,
                (Objects::Layer { ep, calls, handle }, _) => layer_step(phase, ep, calls, handle, nth)?,
            }
            if self.progress.step() {
                let size = self.world.as_ref().map_or(0, World::size);
                say(&Report::Passed { size, mended: std::mem::take(&mut self.mended) });
            }
        }
        Ok(())
    }

    fn communicator(&self) -> Result<Communicator, Trouble> {
        let world = self.world.as_ref().expect("the parent has it join first");
        let bytes = u64::from(world.size()) * (PART * size_of::<f32>()) as u64;
        Ok(Communicator::builder(&world.all()?).chunk(16 << 10).zero_copy_bytes(bytes).build()?)
    }

    /// An instance and a communicator, which are dropped again.
    fn build(&self) -> Result<(), Trouble> {
        let world = self.world.as_ref().expect("the parent has it join first");
        Calls::build(world, Route::Direct)?;
        self.communicator().map(drop)
    }

    fn objects(&self, phase: Phase) -> Result<Objects, Trouble> {
        match phase {
            Phase::Bootstrap | Phase::Build | Phase::Rebuild => Ok(Objects::None),
            Phase::Dispatch => self.layer(Route::Direct, false),
            Phase::Relay => self.layer(Route::Pxn, false),
            Phase::Combine | Phase::Gradients => self.layer(Route::Direct, true),
            Phase::Collectives => Ok(Objects::Collectives(Box::new(self.communicator()?))),
        }
    }

    fn layer(&self, route: Route, dispatched: bool) -> Result<Objects, Trouble> {
        let world = self.world.as_ref().expect("the parent has it join first");
        let (calls, mut ep) = (Calls::new(world), Calls::build(world, route)?);
        let handle = if dispatched { Some(calls.dispatch(&mut ep, 0, false)?) } else { None };
        Ok(Objects::Layer { ep: Box::new(ep), calls, handle: handle.map(Box::new) })
    }

    /// One more world of the job, and the end of it.
    fn meet(&mut self, nth: u64) -> Result<(), Trouble> {
        self.join(&format!(" {nth}"))?;
        let world = self.world.take().expect("it has just joined");
        // None leaves before all have joined.
        world.all()?.gather(&[])?;
        Ok(())
    }

    /// A rebuild and a dispatch. An attempt that fails is followed by another one, as the library
    /// asks for.
    fn rebuild_with_patience(&mut self) -> Result<(), Trouble> {
        let (mut left, at_least) =
            (ATTEMPTS, self.assignment.as_ref().map_or(1, |assignment| assignment.size - 1));
        loop {
            left -= 1;
            let trouble = match self.next_world(at_least).map(|()| self.use_once()) {
                // Another rank went on to its next rebuild.
                Ok(Ok(()) | Err(Trouble::Error(Error::World(Cause::Cancelled { .. })))) => return Ok(()),
                Ok(Err(trouble)) | Err(trouble) => trouble,
            };
            match trouble {
                Trouble::Error(error)
                    if left > 0 && !matches!(error, Error::World(Cause::Evicted { .. })) =>
                {
                    self.mended.push(self.failure(&error));
                }
                trouble => return Err(trouble),
            }
        }
    }

    fn use_once(&self) -> Result<(), Trouble> {
        let Objects::Layer { mut ep, calls, .. } = self.layer(Route::Direct, false)? else { return Ok(()) };
        calls.dispatch(&mut ep, 0, false).map(drop)
    }
}

fn layer_step(
    phase: Phase,
    ep: &mut ExpertParallel,
    calls: &Calls,
    handle: &Option<Box<Handle>>,
    nth: u64,
) -> Result<(), Trouble> {
    match (phase, handle) {
        (Phase::Combine, Some(handle)) => calls.combine(ep, handle, 0, !nth.is_multiple_of(2)),
        (_, Some(handle)) => calls.gradients(ep, handle, 0),
        (Phase::Relay, None) => {
            let handle = calls.dispatch(ep, nth, !nth.is_multiple_of(2))?;
            calls.combine(ep, &handle, nth, nth.is_multiple_of(2))
        }
        (_, None) => calls.dispatch(ep, nth, !nth.is_multiple_of(2)).map(drop),
    }
}

/// Elements of one rank's part.
const PART: usize = 4096;

/// One collective after another: all values are small integers, whose sums are exact.
fn collective(communicator: &mut Communicator, nth: u64) -> Result<(), Trouble> {
    let (me, ranks) = (communicator.rank(), communicator.size());
    let element = |rank: u32, at: usize| ((u64::from(rank) + 1) * 100 + nth % 50 + at as u64 % 7) as f32;
    let of = |rank: u32, len: usize| (0..len).map(|at| element(rank, at)).collect::<Vec<f32>>();
    let sum = |at: usize| (0..ranks).map(|rank| element(rank, at)).sum::<f32>();
    let all = PART * ranks as usize;
    let gathered = || (0..ranks).flat_map(|rank| of(rank, PART)).collect::<Vec<f32>>();
    let parts = || -> Vec<f32> {
        let mine = me as usize * PART..(me as usize + 1) * PART;
        (0..ranks).flat_map(|rank| mine.clone().map(move |at| element(rank, at))).collect()
    };
    match nth % 6 {
        0 => {
            let mut data = of(me, all);
            communicator.all_reduce(&mut data)?;
            compare("all-reduce", &data, &(0..all).map(sum).collect::<Vec<_>>())
        }
        1 => {
            let mut part = vec![0.0; PART];
            communicator.reduce_scatter(&of(me, all), &mut part)?;
            let first = me as usize * PART;
            compare("reduce-scatter", &part, &(first..first + PART).map(sum).collect::<Vec<_>>())
        }
        2 => {
            let mut seen = vec![0.0; all];
            communicator.all_gather(&of(me, PART), &mut seen)?;
            compare("all-gather", &seen, &gathered())
        }
        3 => {
            let root = (nth / 6) as u32 % ranks;
            let mut data = of(me, all);
            communicator.broadcast(root, &mut data)?;
            compare("broadcast", &data, &of(root, all))
        }
        4 => {
            let mut seen = vec![0.0; all];
            communicator.all_to_all(&of(me, all), &mut seen)?;
            compare("all-to-all", &seen, &parts())
        }
        _ => {
            let sent = of(me, all);
            let seen = communicator.all_to_all_zero_copy(&sent)?;
            compare("all-to-all in place", seen, &parts())
        }
    }
}
