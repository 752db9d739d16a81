//! The programs under test, built by cargo.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

use crate::error::{At, Error, Result};
use crate::tool::output;

/// File name of the fake driver.
pub const DRIVER: &str = "libfake_cuda.so";

/// Programs of this repository that the machines run.
pub struct Programs {
    /// The `sidelane` program.
    pub sidelane: PathBuf,
    /// The library's own tests, the lanes' conformance suite among them.
    pub library_tests: PathBuf,
    /// The fake CUDA driver that those tests load, and its kernels.
    pub driver: PathBuf,
    /// See `driver`.
    pub kernels: PathBuf,
    /// This program: the agent.
    pub agent: PathBuf,
}

/// One of cargo's messages, as far as it is of interest.
#[derive(Deserialize)]
struct Message {
    target: Option<Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

#[derive(Deserialize)]
struct Metadata {
    target_directory: PathBuf,
}

/// The root of the repository.
pub fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Folder of cargo's builds; the bed keeps its own files next to it.
pub fn target_directory() -> Result<PathBuf> {
    let answer = output(cargo().args(["metadata", "--format-version", "1", "--no-deps", "--offline"]))?;
    serde_json::from_str::<Metadata>(&answer)
        .map(|metadata| metadata.target_directory)
        .map_err(|_| Error::Unreadable { program: "cargo", what: "target_directory", output: answer })
}

/// Builds in the given profile of cargo. The features of libraries are those that the packages of
/// one build ask for together, so builds share libraries only if they name the same packages.
pub fn build(profile: &str, all_packages: bool) -> Result<Programs> {
    let agent = env::current_exe().map_err(|source| Error::Start { program: "testbed".into(), source })?;
    // Tests of the program make cargo build it, too, and from the libraries that the other tests
    // have.
    let what: &[&str] = match all_packages {
        true => &["--workspace", "--exclude=moe-lm"],
        false => &["--package=sidelane", "--package=sidelane-cli", "--lib", "--test=cli"],
    };
    let how = ["--profile", profile, "--message-format=json"];
    let messages = output(cargo().args(["test", "--no-run"]).args(what).args(how))?;
    let sidelane = built(&messages, "bin", false)?;
    let library_tests = built(&messages, "lib", true)?;
    // Tests find it next to themselves.
    let driver = library_tests.with_file_name(DRIVER);
    let source = repository().join("cuda/exchange.cu");
    let kernels = fake_cuda::kernels(&source).at(&source)?;
    Ok(Programs { sidelane, library_tests, driver, kernels, agent })
}

/// Finds what cargo built of this kind in its messages: the program itself, or its unit tests.
fn built(messages: &str, kind: &'static str, tests: bool) -> Result<PathBuf> {
    let ours = |target: &Target| target.name == "sidelane" && target.kind.iter().any(|k| k == kind);
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Message>(line).ok())
        .filter(|message| message.target.as_ref().is_some_and(ours))
        .filter(|message| message.profile.as_ref().is_some_and(|profile| profile.test == tests))
        .find_map(|message| message.executable)
        .ok_or(Error::NotBuilt { target: kind })
}

/// The cargo that runs this program, in the repository.
fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
    command.current_dir(repository());
    command
}
