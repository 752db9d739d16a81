//! Embeds the program's commit and target, which `doctor` prints. Needs nothing: without git or a
//! checkout the commit reads "unknown".

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The log of HEAD changes with every commit and checkout; HEAD itself names a branch and stays
    // the same.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]).filter(|log| Path::new(log).exists()) {
        println!("cargo:rerun-if-changed={log}");
    }
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo:rustc-env=SIDELANE_COMMIT={commit}");
    println!("cargo:rustc-env=SIDELANE_TARGET={}", std::env::var("TARGET").unwrap_or_default());
}

/// What git prints, in one line.
fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
