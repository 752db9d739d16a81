//! Tells the program what it was built from: `doctor` and the JSON of `bench` print it.
//! Needs nothing: without a git checkout the commit reads "unknown".

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=.git/HEAD");
    println!("cargo:rerun-if-changed=build.rs");
    let commit = Command::new("git")
        .args(["rev-parse", "--short=12", "HEAD"])
        .output()
        .ok()
        .filter(|out| out.status.success())
        .and_then(|out| String::from_utf8(out.stdout).ok())
        .map_or_else(|| "unknown".to_owned(), |text| text.trim().to_owned());
    println!("cargo:rustc-env=SIDELANE_COMMIT={commit}");
    println!("cargo:rustc-env=SIDELANE_TARGET={}", std::env::var("TARGET").unwrap_or_default());
}
