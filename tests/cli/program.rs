//! The program as a user runs it, and how it ends.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// Variables for less than any command asks for: each rank gets that. The default would be 256 MiB,
/// and a rank touches its pages.
pub const SMALL_HEAP: [(&str, &str); 2] = [("SIDELANE_HEAP", "2M"), ("SIDELANE_SYMMETRIC", "1M")];

/// The program with this command line, far from the repository. No line of a report is broken.
pub fn sidelane(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidelane"));
    command.args(line.split_whitespace()).current_dir(std::env::temp_dir());
    command.envs(SMALL_HEAP).env("COLUMNS", "1000");
    command
}

/// Exit status of a command line, and its output.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ended {
    /// Output of a command that must succeed.
    pub fn well(self) -> String {
        assert_eq!(self.code, Some(0), "{}{}", self.out, self.err);
        self.out
    }

    /// Asserts that the command line was refused for a reason that has these words, and nothing
    /// ran.
    pub fn refused(&self, words: &[&str]) {
        assert_eq!((self.code, &self.out[..]), (Some(2), ""), "{}", self.err);
        assert_words(&self.err, words);
    }
}

impl From<Output> for Ended {
    fn from(Output { status, stdout, stderr }: Output) -> Self {
        let [out, err] = [stdout, stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        Ended { code: status.code(), out, err }
    }
}

pub fn run(command: &mut Command) -> Ended {
    command.output().unwrap().into()
}

/// The same with `--json`: the report, or null where none was written.
pub fn run_with_report(command: &mut Command) -> (Ended, Value) {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("report.json");
    let ended = run(command.arg("--json").arg(&json));
    (ended, if json.exists() { read(&json) } else { Value::Null })
}

/// Report of a command line that must succeed.
pub fn report(line: &str) -> Value {
    let (ended, report) = run_with_report(&mut sidelane(line));
    ended.well();
    report
}

/// A file of JSON.
pub fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

pub fn assert_words(text: &str, words: &[&str]) {
    for words in words {
        assert!(text.contains(words), "{words:?} in\n{text}");
    }
}

/// Runs on one device of the fake driver, which has all that the program asks for.
pub fn on_fake_cuda(command: &mut Command) -> &mut Command {
    command
        .env("SIDELANE_CUDA_LIBRARY", fake_cuda::install().unwrap().join("libcuda.so.1"))
        .env("SIDELANE_FAKE_CUDA_KERNELS", fake_cuda::all_kernels().unwrap())
        .env("SIDELANE_FAKE_CUDA_DRIVER", "13010")
        .env("SIDELANE_FAKE_CUDA_DEVICES", "1")
}
