//! What every rank of a measurement does: check, time, check again; rank 0 reports.

use std::process::ExitCode;

use half::{bf16, f16};
use sidelane::dtype::Dtype;
use sidelane::ep::{ExpertRows, Handle, Yardstick};
use sidelane::exec::{Event, write_chrome_trace};
use sidelane::plan::Order as Sums;
use sidelane::{Error, ExpertParallel, Group, Options, World};

use super::args::Order;
use super::config::ConfigError;
use super::passes::{Kind, Pair, Track, memcpy_gbps};
use super::report::{Conditions, Lanes, Pass, Report, Volume};
use super::task::Task;
use super::tensor::{Number, fill};
use super::verify::Expected;
use super::{clock::Laps, progress, source::Router, table};
use crate::error::CliError;
use crate::output;
use sidelane::rows::Stores;

/// Operations kept for a timeline: one round of calls at 1,024 ranks.
const TRACE_EVENTS: usize = 1 << 16;

/// Runs this rank's part.
pub fn main(task: &Task) -> Result<ExitCode, CliError> {
    let report = match task.config.dtype {
        Dtype::F32 => Rank::<f32>::run(task),
        Dtype::F16 => Rank::<f16>::run(task),
        Dtype::Bf16 | Dtype::Bytes => Rank::<bf16>::run(task),
    }?;
    let Some(report) = report else { return Ok(ExitCode::SUCCESS) };
    output::print(&table::text(&report))?;
    if let Some(path) = &task.json {
        let failed = |source| CliError::Write { path: path.clone(), source };
        std::fs::write(path, report.json() + "\n").map_err(failed)?;
    }
    Ok(if report.verified { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

struct Rank<'t, E> {
    task: &'t Task,
    world: World,
    group: Group,
    ep: ExpertParallel,
    router: Router,
    expected: Expected,
    x: Vec<E>,
    out: Vec<E>,
    /// Compared and found equal; compared.
    right: u64,
    compared: u64,
}

impl<'t, E: Number> Rank<'t, E> {
    /// The report, on rank 0.
    fn run(task: &'t Task) -> Result<Option<Report>, CliError> {
        let mut rank = Self::join(task)?;
        let (rows, handle) = rank.dispatch_and_check()?;
        let mut fill = rows.to_vec::<E>().map_err(Error::from)?;
        rank.expected.experts(&task.config, rows.rows::<E>().map_err(Error::from)?, &mut fill);
        drop(rows);
        rank.combine_and_check(&fill, &handle)?;
        if task.config.backward {
            rank.backward_and_check(&fill, &handle)?;
        }
        // Once all are here, all have read what was offered, and the pool is empty. Then the output lies below the rows:
        // whenever these are dropped, the next dispatch lands in the same place.
        rank.group.gather(&[])?;
        let mut output = handle.output()?;
        output.rows_mut::<E>().map_err(Error::from)?.copy_from_slice(&fill);
        let (rows, _) = rank.dispatch_and_check()?;
        let yardstick = rank.ep.yardstick(&rank.group, rows, output, &handle)?;
        let (passes, memcpy, rows) = rank.time(yardstick, &handle)?;
        // The floor has written the same rows again and again: they must still be right.
        rank.check_rows(&rows.ok_or(CliError::Moved { rank: rank.world.rank() })?, &handle)?;
        rank.combine_and_check(&fill, &handle)?;
        rank.trace(&handle)?;
        rank.report(passes, memcpy)
    }

    fn join(task: &'t Task) -> Result<Self, CliError> {
        let config = &task.config;
        let mut options = Options::from_env().map_err(Error::from)?;
        options.config.heap = options.config.heap.max(task.heap);
        options.config.symmetric = options.config.symmetric.max(task.symmetric);
        options.record = if task.trace_out.is_some() { TRACE_EVENTS } else { 0 };
        let world = World::from_env_with(options)?;
        let group = world.all()?;
        let ep = ExpertParallel::builder(&group)
            .map_err(Error::from)?
            .experts(config.experts)
            .top_k(config.top_k)
            .hidden(config.hidden as usize)
            .dtype(config.dtype)
            .align(config.align)
            .max_tokens(config.tokens)
            .order(match config.order {
                Order::Expert => Sums::Expert,
                Order::Rank => Sums::Rank,
            })
            .build()?;
        let router = Router::open(&config.routing).map_err(|e| CliError::Config(Box::new(e)))?;
        let expected = Expected::new(config, &router, world.rank()).map_err(Error::from)?;
        let mut x = Vec::new();
        (0..config.tokens).for_each(|token| fill(&mut x, config.seed, world.rank(), token, config.hidden));
        let out = vec![E::of(0.0); x.len()];
        Ok(Rank { task, world, group, ep, router, expected, x, out, right: 0, compared: 0 })
    }

    fn dispatch_and_check(&mut self) -> Result<(ExpertRows, Handle), CliError> {
        let routing = self.router.routing(&self.task.config, self.world.rank()).map_err(Error::from)?;
        self.world.pool().poison(0xff);
        let (rows, handle) = self.ep.dispatch(&self.x, &routing)?;
        self.check_rows(&rows, &handle)?;
        Ok((rows, handle))
    }

    fn check_rows(&mut self, rows: &ExpertRows, handle: &Handle) -> Result<(), CliError> {
        let seen = rows.rows::<E>().map_err(Error::from)?;
        self.right += self.expected.right_rows(&self.task.config, seen, handle.row_weights());
        self.compared += self.expected.len() as u64;
        Ok(())
    }

    fn combine_and_check(&mut self, y: &[E], handle: &Handle) -> Result<(), CliError> {
        self.ep.combine_into(y, handle, &mut self.out)?;
        self.check_tokens();
        Ok(())
    }

    fn check_tokens(&mut self) {
        self.right += self.expected.right_tokens(&self.task.config, &self.out);
        self.compared += u64::from(self.task.config.tokens);
    }

    fn backward_and_check(&mut self, y: &[E], handle: &Handle) -> Result<(), CliError> {
        let weights = self.expected.weight_gradients();
        let (tokens, home) = self.ep.dispatch_backward::<E>(y, Some(&weights), handle)?;
        self.out.copy_from_slice(&tokens);
        self.check_tokens();
        self.compared += 1;
        self.right += u64::from(home.is_some_and(|home| self.expected.right_weights(&home)));
        self.world.pool().poison(0xff);
        let (rows, _) = self.ep.combine_backward(&self.x, handle)?;
        self.check_rows(&rows, handle)
    }

    fn time(
        &mut self,
        mut yardstick: Yardstick,
        handle: &Handle,
    ) -> Result<(Vec<Pair>, f64, Option<ExpertRows>), CliError> {
        let config = &self.task.config;
        let mut barrier = self.group.window(0)?;
        let memcpy = memcpy_gbps(&self.world, &self.group, &mut barrier)?;
        let routing = self.router.routing(config, self.world.rank()).map_err(Error::from)?;
        let mut track = Track {
            ep: &mut self.ep,
            barrier: &mut barrier,
            config,
            routing: &routing,
            x: &self.x,
            out: &mut self.out,
            yardstick: &mut yardstick,
            stores: [Stores::Streaming, Stores::Cached],
            handle,
            moved: false,
        };
        track.choose_stores(&self.group)?;
        let kinds = Kind::all(config.backward);
        let mut pairs = vec![Pair::default(); kinds.len()];
        let bar = if self.world.rank() == 0 {
            progress::bar(config.rounds)
        } else {
            indicatif::ProgressBar::hidden()
        };
        for round in 0..config.rounds {
            track.round(kinds, &mut pairs, round % 2 == 1)?;
            bar.inc(1);
        }
        bar.finish_and_clear();
        track.barrier.barrier()?;
        let rows = if track.moved { None } else { track.yardstick.lend_rows() };
        Ok((pairs, memcpy, rows))
    }

    /// One more round, with everything recorded before it thrown away.
    fn trace(&mut self, handle: &Handle) -> Result<(), CliError> {
        let (Some(path), Some(recorder)) = (&self.task.trace_out, self.world.recorder().cloned()) else {
            return Ok(());
        };
        let routing = self.router.routing(&self.task.config, self.world.rank()).map_err(Error::from)?;
        self.group.gather(&[])?;
        recorder.take();
        let (rows, _own) = self.ep.dispatch(&self.x, &routing)?;
        self.ep.combine_into(handle.output()?, handle, &mut self.out)?;
        drop(rows);
        let events = self.group.gather(&serde_json::to_vec(&recorder.take()).unwrap_or_default())?;
        if self.world.rank() == 0 {
            let ranks: Vec<Vec<Event>> =
                events.iter().map(|blob| serde_json::from_slice(blob).unwrap_or_default()).collect();
            let failed = |source| CliError::Write { path: path.clone(), source };
            let mut file = std::io::BufWriter::new(std::fs::File::create(path).map_err(failed)?);
            write_chrome_trace(&mut file, &ranks).map_err(failed)?;
        }
        Ok(())
    }

    fn report(self, pairs: Vec<Pair>, memcpy_gbps: f64) -> Result<Option<Report>, CliError> {
        let config = &self.task.config;
        let node_of: Vec<u32> = (0..config.ranks()).map(|rank| self.world.nodes().node_of(rank)).collect();
        let said = [
            self.right,
            self.compared,
            self.expected.len() as u64,
            self.expected.rows_over_rails(&node_of) as u64,
        ];
        let sums = self.group.gather(bytemuck::cast_slice(&said))?.iter().fold([0; 4], |sums, blob| {
            let words = bytemuck::try_pod_read_unaligned::<[u64; 4]>(blob).unwrap_or([0, 1, 0, 0]);
            std::array::from_fn(|i| sums[i] + words[i])
        });
        let volume = Volume { landed: sums[2] * config.row_bytes(), rail: sums[3] * config.row_bytes() };
        let mut passes = Vec::new();
        for pair in &pairs {
            let real = Laps::rounds_us(&self.group.gather(pair.real.to_bytes())?);
            let floor = Laps::rounds_us(&self.group.gather(pair.floor.to_bytes())?);
            passes.push(Pass::of_rounds(&real, &floor, volume));
        }
        if self.world.rank() != 0 {
            return Ok(None);
        }
        let lane = |name: &str| self.ep.lanes().iter().any(|used| used.lane == name).then(|| name.to_owned());
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let huge_pages_granted = self.world.pages().huge.is_some_and(|bytes| bytes > 0);
        Ok(Some(Report {
            config: Conditions { config: config.clone(), cores, huge_pages_granted },
            verified: sums[0] == sums[1],
            rows_verified: sums[0],
            memcpy_gbps,
            lanes: Lanes { local: lane("shm"), rail: lane("loop") },
            dispatch: passes[0],
            combine: passes[1],
            dispatch_backward: passes.get(2).copied(),
            combine_backward: passes.get(3).copied(),
        }))
    }
}

impl From<ConfigError> for CliError {
    fn from(error: ConfigError) -> Self {
        CliError::Config(Box::new(error))
    }
}
