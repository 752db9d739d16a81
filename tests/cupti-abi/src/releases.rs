//! CUPTI as published: headers and libraries, fetched once into `target/`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// Wheels, the oldest first: of the first supported version, of the oldest driver that `gpu-check`
/// takes, of the last for CUDA 12, and of one for CUDA 13.
const WHEELS: [(&str, &str); 4] = [
    ("nvidia-cuda-cupti-cu12", "12.1.105"),
    ("nvidia-cuda-cupti-cu12", "12.5.82"),
    ("nvidia-cuda-cupti-cu12", "12.9.79"),
    ("nvidia-cuda-cupti", "13.4.92"),
];

/// One of them, unpacked.
pub struct Release {
    pub version: &'static str,
    pub include: PathBuf,
    pub library: PathBuf,
}

pub static RELEASES: LazyLock<Vec<Release>> = LazyLock::new(|| {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/cupti");
    WHEELS.iter().map(|(name, version)| release(&target, name, version)).collect()
});

fn release(target: &Path, name: &str, version: &'static str) -> Release {
    let home = target.join(version);
    if !home.exists() {
        let python = target.join("venv/bin/python");
        if !python.exists() {
            run(Command::new("python3").args(["-m", "venv"]).arg(target.join("venv")));
        }
        // Whole or not there.
        let fresh = target.join(format!("{version}-{}", std::process::id()));
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target"];
        run(Command::new(python).args(pip).arg(&fresh).arg(format!("{name}=={version}")));
        fs::rename(&fresh, &home).unwrap();
    }
    // The folder between differs from version to version.
    let mut folders = fs::read_dir(home.join("nvidia")).unwrap().map(|entry| entry.unwrap().path());
    let folder = folders.find(|folder| folder.join("include/cupti_activity.h").exists()).unwrap();
    let mut libraries = fs::read_dir(folder.join("lib")).unwrap().map(|entry| entry.unwrap().path());
    let is_cupti = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with("libcupti.so.");
    let library = libraries.find(is_cupti).unwrap();
    Release { version, include: folder.join("include"), library }
}

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}
