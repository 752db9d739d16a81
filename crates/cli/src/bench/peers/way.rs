//! Which peers there are, what they need, and how they are started.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::folder::Folder;
use crate::error::{CliError, failed};
use crate::peers;

/// What the processes run: names and texts.
#[derive(Clone, Copy)]
pub struct Programs {
    /// Over MPI.
    pub c: (&'static str, &'static str),
    /// Over torch.
    pub python: (&'static str, &'static str),
}

/// What the programs over MPI include.
const SHARED: (&str, &str) =
    ("line.h", include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/peers/line.h")));

/// Dispatch and combine.
pub const LAYER: Programs = Programs {
    c: (
        "all_to_all_v.c",
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/peers/all_to_all_v.c")),
    ),
    python: (
        "all_to_all.py",
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/peers/all_to_all.py")),
    ),
};

/// A usual way to do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Mpi,
    Gloo,
}

impl Way {
    pub const ALL: [Way; 2] = [Way::Mpi, Way::Gloo];

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Way::Mpi => "mpi",
            Way::Gloo => "gloo",
        }
    }

    /// How to get it.
    pub fn install(self) -> &'static str {
        match self {
            Way::Mpi => "apt install openmpi-bin libopenmpi-dev",
            Way::Gloo => "pip install torch (SIDELANE_PYTHON names another python3)",
        }
    }

    /// Where its processes write what they have to say.
    pub fn log(self, folder: &Folder) -> PathBuf {
        folder.path().join(format!("{}.log", self.name()))
    }

    /// What it complains of there: mpirun says much after the complaint of a process, Python much before it.
    pub fn complaint(self, log: &Path) -> String {
        let text = std::fs::read(log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let line = match self {
            Way::Mpi => lines.next(),
            Way::Gloo => lines.next_back(),
        };
        line.unwrap_or("nothing was said").to_owned()
    }

    /// Starts its processes. Those that run are among the children even if not all could be started.
    pub fn spawn(
        self,
        programs: &Programs,
        folder: &Folder,
        ranks: u32,
        children: &mut Vec<Child>,
    ) -> Result<(), CliError> {
        match self {
            Way::Mpi => {
                let program = compile(programs.c, folder)?;
                let mut command = Command::new("mpirun");
                command.args(["-n", &ranks.to_string()]).arg(program).arg(folder.path());
                // More ranks than cores, and as whoever we are: Open MPI wants to be told, by names of old and new.
                command.envs([
                    ("OMPI_MCA_rmaps_base_oversubscribe", "1"),
                    ("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
                    ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
                    ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
                ]);
                children.push(run(command, self.output(folder)?)?);
            }
            Way::Gloo => {
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

    /// All processes add to one file.
    fn output(self, folder: &Folder) -> Result<File, CliError> {
        let path = self.log(folder);
        let file = File::options().create(true).append(true).open(&path);
        file.map_err(|source| failed!("cannot write {path:?}: {source}"))
    }
}

/// Makes the program over MPI, with all that this processor can do: so are those who would use it.
fn compile((name, text): (&str, &str), folder: &Folder) -> Result<PathBuf, CliError> {
    for (name, text) in [(name, text), SHARED] {
        folder.put(name, text.as_bytes())?;
    }
    let source = folder.path().join(name);
    let program = source.with_extension("");
    let mut command = Command::new("mpicc");
    command.args(["-O3", "-march=native", "-o"]).arg(&program).arg(&source);
    let status = run(command, Way::Mpi.output(folder)?)?
        .wait()
        .map_err(|source| failed!("cannot run mpicc: {source}"))?;
    match status.success() {
        true => Ok(program),
        false => Err(failed!("mpicc ended with {status}: {}", Way::Mpi.complaint(&Way::Mpi.log(folder)))),
    }
}

fn run(mut command: Command, log: File) -> Result<Child, CliError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let errors = log.try_clone().map_err(|source| failed!("cannot run {program}: {source}"))?;
    peers::start(command.stdin(Stdio::null()).stdout(log).stderr(errors))
}
