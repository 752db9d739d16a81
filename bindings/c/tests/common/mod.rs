//! C programs: compiled against the header and the library of this build, and run as ranks.
#![allow(dead_code, reason = "each test program uses a part of this")]

use std::env;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde::Deserialize;

/// This package.
pub const PACKAGE: &str = env!("CARGO_MANIFEST_DIR");

const FLAGS: [&str; 8] =
    ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-fno-omit-frame-pointer"];

/// How a program gets the library.
#[derive(Clone, Copy, Debug)]
pub enum Linked {
    Shared,
    Static,
    /// As [`Linked::Shared`], and with CUDA's driver: the fake.
    WithDriver,
}

/// Compiles a program, and says where it is.
pub fn compiled(source: &Path, name: &str, linked: Linked) -> PathBuf {
    let libraries = libraries();
    let program = libraries.join(format!("c-{name}-{linked:?}"));
    let mut compiler = Command::new("cc");
    compiler.args(FLAGS);
    for include in ["include", "examples", "tests", "tests/cuda"] {
        compiler.arg("-I").arg(Path::new(PACKAGE).join(include));
    }
    compiler.arg(source).arg("-o").arg(&program);
    match linked {
        Linked::Shared | Linked::WithDriver => {
            let rpath = format!("-Wl,-rpath,{}", libraries.display());
            with_soname(&libraries);
            compiler.arg("-L").arg(&libraries).arg("-lsidelane_c").arg(rpath);
            if let Linked::WithDriver = linked {
                compiler.arg("-L").arg(fake_cuda::install().expect("a driver")).arg("-lcuda");
            }
        }
        Linked::Static => {
            compiler.arg(libraries.join("libsidelane_c.a")).args(["-lm", "-ldl", "-lrt"]);
        }
    }
    succeeded(&compiler.output().expect("cc runs"), name);
    program
}

/// Folder of this package's libraries: next to the tests.
pub fn libraries() -> PathBuf {
    let test = env::current_exe().expect("a path");
    let folder = test.parent().expect("a folder").to_owned();
    assert!(folder.join("libsidelane_c.so").exists(), "the library is built with the tests");
    folder
}

/// Gives the library the name that programs load: cargo writes one name alone.
fn with_soname(libraries: &Path) {
    let link = libraries.join(soname());
    match std::os::unix::fs::symlink("libsidelane_c.so", &link) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => panic!("{}: {error}", link.display()),
        _ => {}
    }
}

/// The name that programs load the shared library by.
pub fn soname() -> String {
    format!("libsidelane_c.so.{}.{}", env!("CARGO_PKG_VERSION_MAJOR"), env!("CARGO_PKG_VERSION_MINOR"))
}

/// A job of the `sidelane` program, with memory that fits what is tested.
pub fn launch(nodes: u32, ranks_per_node: u32) -> Command {
    let mut command = Command::new(sidelane());
    let (nodes, ranks) = (nodes.to_string(), ranks_per_node.to_string());
    command.args(["launch", "--nodes", &nodes, "--ranks-per-node", &ranks, "--"]);
    command.env("SIDELANE_HEAP", "8M").env("SIDELANE_SYMMETRIC", "4M");
    command.env("SIDELANE_DEADLINE_MS", "120000");
    command
}

/// Gives a program devices: the fake driver, with kernels to run.
pub fn with_devices(command: &mut Command) -> &mut Command {
    command.env("LD_LIBRARY_PATH", fake_cuda::install().expect("a driver"));
    command.env("SIDELANE_FAKE_CUDA_KERNELS", fake_cuda::all_kernels().expect("kernels"))
}

/// The text of a program that ended well.
pub fn succeeded(output: &Output, what: &str) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{what}: {}\n{out}{err}", output.status);
    out
}

#[derive(Deserialize)]
struct Message {
    target: Option<Target>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

/// The `sidelane` program: `SIDELANE_PROGRAM`, where it was built with these tests. Otherwise cargo
/// builds it. This package alone asks its dependencies for other features, so that build takes a
/// minute from nothing.
fn sidelane() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        if let Some(program) = env::var_os("SIDELANE_PROGRAM") {
            return program.into();
        }
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(Path::new(PACKAGE).join("../.."));
        cargo.args(["test", "--no-run", "--package", "sidelane-cli", "--test", "cli"]);
        let output = cargo.args(["--message-format", "json"]).output().expect("cargo runs");
        let messages = succeeded(&output, "cargo test --no-run");
        let ours =
            |target: &Target| target.name == "sidelane" && target.kind.iter().any(|kind| kind == "bin");
        let built = messages
            .lines()
            .filter_map(|line| serde_json::from_str::<Message>(line).ok())
            .filter(|message| message.target.as_ref().is_some_and(ours))
            .find_map(|message| message.executable);
        built.expect("cargo says what it built")
    })
}
