//! Baselines that are measured next to us: programs of `benches/baselines`, a process for each
//! rank, over MPI or torch's gloo.
//!
//! Files of a [`Folder`] and a socket to each process instruct them; its README has the protocol.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use sidelane::Group;
use sidelane_testkit::timing::stats::{Ratio, Summary, ratio_of_medians, summary};
use tempfile::TempDir;

use crate::error::{CliError, failed};
use crate::ranks;

/// One that could not run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unavailable {
    pub name: String,
    pub reason: String,
    pub install: String,
}

impl Unavailable {
    pub fn new(name: &str, why: &CliError, install: &str) -> Self {
        Unavailable { name: name.into(), reason: why.to_string(), install: install.into() }
    }

    pub fn text(&self) -> String {
        let Unavailable { name, reason, install } = self;
        format!("{name} did not run: {reason}; to have it: {install}")
    }
}

/// A process that ends with this value at the latest.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn start(command: &mut Command) -> Result<Process, CliError> {
    let program = command.get_program().to_string_lossy().into_owned();
    command.spawn().map(Process).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => failed!("there is no {program}"),
        _ => failed!("cannot run {program}: {source}"),
    })
}

/// The longest time for all processes of a baseline to start: interpreters that load much, more of
/// them than cores.
const ARRIVAL: Duration = Duration::from_secs(180);
/// The longest time of a call.
const CALL: Duration = Duration::from_secs(60);
/// The longest time for processes to end after the request.
const PARTING: Duration = Duration::from_secs(10);
/// Between two looks at processes that have not come or not gone.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// All processes of one baseline.
pub struct BaselineProcesses {
    way: BaselineKind,
    /// Version that it reports.
    version: String,
    /// Whether its results are ours, bit by bit.
    bitwise_equal: bool,
    /// Microseconds of each round, by command.
    rounds_us: BTreeMap<u8, Vec<f64>>,
    children: Vec<Process>,
    listener: UnixListener,
    socket: PathBuf,
    log: PathBuf,
    since: Instant,
    /// By rank.
    lines: Vec<Option<UnixStream>>,
}

impl BaselineProcesses {
    /// Starts the processes. They come later.
    pub fn start(
        way: BaselineKind,
        programs: &Programs,
        folder: &Folder,
        ranks: u32,
    ) -> Result<Self, CliError> {
        let (socket, log) = (folder.path().join("socket"), folder.path().join(way.log(folder)));
        let failed = |source| failed!("cannot listen at {socket:?}: {source}");
        let listener = UnixListener::bind(&socket).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let mut contender = BaselineProcesses {
            way,
            version: String::new(),
            bitwise_equal: false,
            rounds_us: BTreeMap::new(),
            children: Vec::new(),
            listener,
            socket: socket.clone(),
            log,
            since: Instant::now(),
            lines: (0..ranks).map(|_| None).collect(),
        };
        way.spawn(programs, folder, ranks, &mut contender.children)?;
        Ok(contender)
    }

    /// Waits a moment; whether all have come.
    ///
    /// # Errors
    /// One that has ended, with its last words; one that is late.
    pub fn come(&mut self, moment: Duration) -> Result<bool, CliError> {
        let until = Instant::now() + moment;
        loop {
            let came = self.lines.iter().flatten().count();
            if came == self.lines.len() {
                // The next peer is met at the same place.
                let _ = std::fs::remove_file(&self.socket);
                return Ok(true);
            }
            match self.listener.accept() {
                Ok((line, _)) => {
                    self.greet(line).map_err(|source| self.answer(came, source))?;
                    continue;
                }
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                    return Err(self.answer(came, error));
                }
                Err(_) => {}
            }
            let ended = self.children.iter_mut().find_map(|child| child.0.try_wait().ok().flatten());
            if let Some(status) = ended {
                return Err(failed!(
                    "{} ended with {status}: {}",
                    self.way.name(),
                    self.way.complaint(&self.log)
                ));
            }
            if self.since.elapsed() >= ARRIVAL {
                let (program, ranks, seconds) = (self.way.name(), self.lines.len(), ARRIVAL.as_secs());
                return Err(failed!("{came} of {ranks} processes of {program} have come after {seconds} s"));
            }
            if Instant::now() >= until {
                return Ok(false);
            }
            let mut waiting = [PollFd::new(&self.listener, PollFlags::IN)];
            // Cut short or not, it is looked again.
            let _ = poll(&mut waiting, Some(&LOOK));
        }
    }

    fn greet(&mut self, mut line: UnixStream) -> io::Result<()> {
        const MOST: u32 = 1 << 10;
        line.set_nonblocking(false)?;
        line.set_read_timeout(Some(CALL))?;
        let mut word = [0; 4];
        let mut read = |line: &mut UnixStream| line.read_exact(&mut word).map(|()| u32::from_ne_bytes(word));
        let (rank, length) = (read(&mut line)?, read(&mut line)?);
        let mut version = vec![0; length.min(MOST) as usize];
        line.read_exact(&mut version)?;
        let place = self.lines.get_mut(rank as usize).filter(|place| place.is_none());
        *place.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))? = Some(line);
        self.version = String::from_utf8_lossy(&version).into_owned();
        Ok(())
    }

    /// Its result of a command, next to our rounds of it.
    pub fn pass(&self, command: u8, ours_us: &[f64]) -> BaselinePass {
        BaselinePass::new(self.rounds_us.get(&command).map_or(&[], Vec::as_slice), ours_us)
    }

    pub fn report<T>(&self, calls: T) -> BaselineReport<T> {
        let BaselineProcesses { way, version, bitwise_equal, .. } = self;
        BaselineReport {
            name: way.name().into(),
            version: version.clone(),
            bitwise_equal: *bitwise_equal,
            calls,
        }
    }

    /// From the first one's begin to the last one's end, in microseconds.
    pub fn call(&mut self, command: u8) -> Result<f64, CliError> {
        for rank in 0..self.lines.len() {
            self.say(rank, command).map_err(|source| self.answer(rank, source))?;
        }
        let mut span = [u64::MAX, 0];
        for rank in 0..self.lines.len() {
            let [begin, end] = self.hear(rank).map_err(|source| self.answer(rank, source))?;
            span = [span[0].min(begin), span[1].max(end)];
        }
        Ok(span[1].saturating_sub(span[0]) as f64 / 1e3)
    }

    fn say(&mut self, rank: usize, command: u8) -> io::Result<()> {
        self.line(rank)?.write_all(&[command])
    }

    fn hear(&mut self, rank: usize) -> io::Result<[u64; 2]> {
        let mut lap = [0; 16];
        self.line(rank)?.read_exact(&mut lap)?;
        Ok(bytemuck::cast(lap))
    }

    fn line(&mut self, rank: usize) -> io::Result<&mut UnixStream> {
        self.lines[rank].as_mut().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn answer(&self, rank: usize, source: io::Error) -> CliError {
        let (program, last) = (self.way.name(), self.way.complaint(&self.log));
        failed!("process {rank} of {program} does not answer as it should: {source}; its last words: {last}")
    }
}

impl Drop for BaselineProcesses {
    /// Processes end when their sockets do; the others are killed.
    fn drop(&mut self) {
        self.lines.clear();
        let until = Instant::now() + PARTING;
        for child in &mut self.children {
            while Instant::now() < until && matches!(child.0.try_wait(), Ok(None)) {
                let _ = poll(&mut [], Some(&LOOK));
            }
        }
        let _ = std::fs::remove_file(&self.socket);
    }
}

#[derive(Clone, Copy)]
pub struct Programs {
    /// Over MPI.
    pub c: (&'static str, &'static str),
    /// Over torch.
    pub python: (&'static str, &'static str),
}

const SHARED: (&str, &str) =
    ("line.h", include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/baselines/line.h")));

/// A usual way to do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BaselineKind {
    Mpi,
    Gloo,
}

impl BaselineKind {
    pub const ALL: [BaselineKind; 2] = [BaselineKind::Mpi, BaselineKind::Gloo];

    pub fn name(self) -> &'static str {
        match self {
            BaselineKind::Mpi => "mpi",
            BaselineKind::Gloo => "gloo",
        }
    }

    pub fn install(self) -> &'static str {
        match self {
            BaselineKind::Mpi => "apt install openmpi-bin libopenmpi-dev",
            BaselineKind::Gloo => "pip install torch (SIDELANE_PYTHON names another python3)",
        }
    }

    pub fn log(self, folder: &Folder) -> PathBuf {
        folder.path().join(format!("{}.log", self.name()))
    }

    /// Error in the log: mpirun prints much after the message of a process, Python much before it.
    fn complaint(self, log: &Path) -> String {
        let text = std::fs::read(log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let line = match self {
            BaselineKind::Mpi => lines.next(),
            BaselineKind::Gloo => lines.next_back(),
        };
        line.unwrap_or("nothing was said").to_owned()
    }

    /// Starts its processes. Those that run are among the children even if not all could be
    /// started.
    pub fn spawn(
        self,
        programs: &Programs,
        folder: &Folder,
        ranks: u32,
        children: &mut Vec<Process>,
    ) -> Result<(), CliError> {
        match self {
            BaselineKind::Mpi => {
                let program = compile(programs.c, folder)?;
                let mut command = Command::new("mpirun");
                command.args(["-n", &ranks.to_string()]).arg(program).arg(folder.path());
                // More ranks than cores, and as any user: Open MPI needs options for both, by old
                // and new names.
                command.envs([
                    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
                    ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
                    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
                    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
                ]);
                children.push(run(command, self.output(folder)?)?);
            }
            BaselineKind::Gloo => {
                let (name, text) = programs.python;
                folder.put(name, text.as_bytes())?;
                let python = std::env::var_os("SIDELANE_PYTHON").unwrap_or_else(|| "python3".into());
                for rank in 0..ranks {
                    let mut command = Command::new(&python);
                    command.arg(folder.path().join(name)).arg(folder.path()).arg(rank.to_string());
                    children.push(run(command, self.output(folder)?)?);
                }
            }
        }
        Ok(())
    }

    fn output(self, folder: &Folder) -> Result<File, CliError> {
        let path = self.log(folder);
        let file = File::options().create(true).append(true).open(&path);
        file.map_err(|source| failed!("cannot write {path:?}: {source}"))
    }
}

/// Compiles the program over MPI, with all abilities of this processor, as its users would.
fn compile((name, text): (&str, &str), folder: &Folder) -> Result<PathBuf, CliError> {
    for (name, text) in [(name, text), SHARED] {
        folder.put(name, text.as_bytes())?;
    }
    let source = folder.path().join(name);
    let program = source.with_extension("");
    let mut command = Command::new("mpicc");
    command.args(["-O3", "-march=native", "-o"]).arg(&program).arg(&source);
    let status = run(command, BaselineKind::Mpi.output(folder)?)?
        .0
        .wait()
        .map_err(|source| failed!("cannot run mpicc: {source}"))?;
    match status.success() {
        true => Ok(program),
        false => Err(failed!(
            "mpicc ended with {status}: {}",
            BaselineKind::Mpi.complaint(&BaselineKind::Mpi.log(folder))
        )),
    }
}

fn run(mut command: Command, log: File) -> Result<Process, CliError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let errors = log.try_clone().map_err(|source| failed!("cannot run {program}: {source}"))?;
    start(command.stdin(Stdio::null()).stdout(log).stderr(errors))
}

/// One folder for all ranks. The program that starts them makes it and has it removed, however they
/// end.
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// Makes one, for as long as it is held.
    pub fn make() -> Result<TempDir, CliError> {
        let failed = |source| failed!("cannot make a folder in {:?}: {source}", std::env::temp_dir());
        tempfile::Builder::new().prefix("sidelane-peers-").tempdir().map_err(failed)
    }

    /// The one that was made.
    pub fn at(path: &Path) -> Self {
        Folder { path: path.to_owned() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn put(&self, name: &str, bytes: &[u8]) -> Result<(), CliError> {
        let path = self.path.join(name);
        fs::write(&path, bytes).map_err(|source| failed!("cannot write {path:?}: {source}"))
    }

    /// Whether what all peers have written under these names is this. Collective.
    pub fn all_same(&self, group: &Group, results: &[(&str, &[u8])]) -> Result<bool, CliError> {
        let same = self.same(group.rank(), results)?;
        Ok(ranks::all_say(group, same)?)
    }

    /// Whether this rank's peer has written these bytes under these names. Removes them, so that
    /// the next files cannot be mistaken for them.
    fn same(&self, rank: u32, results: &[(&str, &[u8])]) -> Result<bool, CliError> {
        let mut same = true;
        for &(name, expected) in results {
            let path = self.path.join(format!("{name}.{rank}"));
            let failed = |what| {
                let path = path.clone();
                move |source| failed!("cannot {what} {path:?}: {source}")
            };
            same &= fs::read(&path).map_err(failed("read"))? == *expected;
            fs::remove_file(&path).map_err(failed("remove"))?;
        }
        Ok(same)
    }
}

/// Those that came. All ranks know how many; only rank 0 has them.
#[derive(Default)]
pub struct Field {
    pub running: Vec<BaselineProcesses>,
    pub count: usize,
    pub absent: Vec<Unavailable>,
}

impl Field {
    /// Starts the installed baselines; `ready` instructs each of them on rank 0, and `came` says on
    /// all ranks whether its results are ours. Collective.
    pub fn open(
        group: &Group,
        programs: &Programs,
        folder: &Folder,
        ready: impl Fn(&mut BaselineProcesses) -> Result<(), CliError>,
        came: impl Fn() -> Result<bool, CliError>,
    ) -> Result<Self, CliError> {
        group.gather(&[])?;
        let mut field = Field::default();
        for way in BaselineKind::ALL {
            let mut contender = None;
            if group.rank() == 0 {
                match BaselineProcesses::start(way, programs, folder, group.size()) {
                    Ok(started) => contender = Some(started),
                    Err(why) => field.absent.push(Unavailable::new(way.name(), &why, way.install())),
                }
            }
            if arrival(group, way, &mut contender, &mut field.absent, &ready)? {
                let same = came()?;
                field.running.extend(contender);
                field.running.last_mut().into_iter().for_each(|contender| contender.bitwise_equal = same);
                field.count += 1;
            }
        }
        Ok(field)
    }

    /// Has each of them write what a command gives, and compares it with ours. Collective.
    pub fn compare(
        &mut self,
        group: &Group,
        folder: &Folder,
        command: u8,
        results: &[(&str, &[u8])],
    ) -> Result<(), CliError> {
        for nth in 0..self.count {
            self.running.get_mut(nth).map_or(Ok(0.0), |contender| contender.call(command))?;
            group.gather(&[])?;
            let same = folder.all_same(group, results)?;
            self.running.get_mut(nth).into_iter().for_each(|contender| contender.bitwise_equal = same);
        }
        Ok(())
    }

    /// A round of each: run twice and timed the second time, as ours are. Runs on rank 0; the other
    /// ranks have no baselines.
    pub fn lap(&mut self, command: u8) -> Result<(), CliError> {
        self.running.iter_mut().try_for_each(|contender| {
            contender.call(command)?;
            let us = contender.call(command)?;
            contender.rounds_us.entry(command).or_default().push(us);
            Ok(())
        })
    }
}

pub fn compared(same: bool) -> String {
    if same { "same bits" } else { "NOT THE SAME" }.to_owned()
}

/// Waits until a baseline is ready, or cannot start: then it is absent. Collective: all ranks learn
/// the outcome, and none waits long for another, since a silent rank counts as lost.
fn arrival(
    group: &Group,
    way: BaselineKind,
    contender: &mut Option<BaselineProcesses>,
    absent: &mut Vec<Unavailable>,
    ready: impl Fn(&mut BaselineProcesses) -> Result<(), CliError>,
) -> Result<bool, CliError> {
    const MOMENT: Duration = Duration::from_secs(2);
    loop {
        let came = match contender {
            Some(running) => running.come(MOMENT).and_then(|came| match came {
                true => ready(running).map(|()| true),
                false => Ok(false),
            }),
            None => Ok(false),
        };
        if let Err(why) = &came {
            absent.push(Unavailable::new(way.name(), why, way.install()));
            *contender = None;
        }
        let state = [u8::from(contender.is_some()), u8::from(came.unwrap_or(false))];
        match group.gather(&state)?[0][..] {
            [1, 0] => {}
            [1, 1] => return Ok(true),
            _ => return Ok(false),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BaselinePass {
    #[serde(flatten)]
    pub timing: Summary,
    /// By what factor ours is faster: median by median.
    pub speedup: Ratio,
}

impl BaselinePass {
    pub fn new(theirs_us: &[f64], ours_us: &[f64]) -> Self {
        BaselinePass { timing: summary(theirs_us), speedup: ratio_of_medians(theirs_us, ours_us) }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BaselineReport<T> {
    pub name: String,
    /// Version that it reports.
    pub version: String,
    /// Whether its results are ours, bit by bit.
    pub bitwise_equal: bool,
    #[serde(flatten)]
    pub calls: T,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_other_bit_makes_results_differ_and_each_compares_once() {
        let made = tempfile::tempdir().unwrap();
        let folder = Folder::at(made.path());
        for (rows, out, same) in [([1, 2], [3], true), ([1, 3], [3], false), ([1, 2], [2], false)] {
            folder.put("rows.4", &[1, 2]).unwrap();
            folder.put("out.4", &[3]).unwrap();
            let results: [(&str, &[u8]); 2] = [("rows", &rows), ("out", &out)];
            assert_eq!(folder.same(4, &results).unwrap(), same);
            let again = folder.same(4, &results).unwrap_err().to_string();
            assert!(again.starts_with("cannot read"), "{again}");
        }
    }

    #[test]
    fn ratios_are_theirs_by_ours_of_the_same_rounds() {
        let pass = BaselinePass::new(&[30.0, 10.0, 20.0], &[6.0, 2.0, 4.0]);
        assert_eq!((pass.timing.p50_us, pass.timing.max_us), (20.0, 30.0));
        assert_eq!(pass.speedup, Ratio { value: 5.0, low: 5.0, high: 5.0 });
    }
}
