//! NVIDIA's libraries in packages of Python.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use sidelane::device::{Driver, wheels};

/// Folders of packages, those that `python3` knows among them.
pub fn folders(driver: &Driver) -> Vec<PathBuf> {
    wheels::folders(driver.is_fake(), of_python)
}

/// Files of these names in the packages.
pub fn files(driver: &Driver, names: &[&str]) -> Vec<PathBuf> {
    wheels::among(&folders(driver), names)
}

/// How a user names a library that was not found.
pub fn hint(variable: &str, wheel: &str) -> String {
    let packages = wheels::VARIABLE;
    format!("set {variable} to its path, or {packages} to the folder of Python packages with {wheel}")
}

fn of_python() -> Vec<PathBuf> {
    let mut python = Command::new("python3");
    python.args(["-c", "import sys; print(*filter(None, sys.path), sep='\\n')"]);
    let Ok(said) = python.stdin(Stdio::null()).stderr(Stdio::null()).output() else { return Vec::new() };
    String::from_utf8_lossy(&said.stdout).lines().map(PathBuf::from).collect()
}
