//! NVIDIA's libraries in packages of Python (wheels), where the loader does not look.
//!
//! ```text
//!   site-packages / nvidia / cublas, cuda_cupti, cu13 ... / lib / libcublas.so.12
//! ```
//!
//! `SIDELANE_SITE_PACKAGES` names such folders. Else they are those of active environments, and
//! those that the caller knows. Only `sidelane gpu-check` asks `python3`: a library starts no
//! process.

use std::path::{Path, PathBuf};

/// The variable with folders of packages, as `PATH` has its own.
pub const VARIABLE: &str = "SIDELANE_SITE_PACKAGES";

/// Variables that say where an environment of Python lies.
const ENVIRONMENTS: [&str; 2] = ["VIRTUAL_ENV", "CONDA_PREFIX"];

/// Folders of a wheel that have libraries.
const INSIDE: [&str; 2] = ["lib", "extras/CUPTI/lib64"];

/// Folders of packages: those of the variable, else those of active environments and `more`. With
/// the fake driver only the variable counts.
pub fn folders(fake_driver: bool, more: impl FnOnce() -> Vec<PathBuf>) -> Vec<PathBuf> {
    if let Some(named) = std::env::var_os(VARIABLE).filter(|folders| !folders.is_empty()) {
        return std::env::split_paths(&named).collect();
    }
    if fake_driver {
        return Vec::new();
    }
    let environments = ENVIRONMENTS.iter().filter_map(std::env::var_os).map(PathBuf::from);
    let mut all: Vec<PathBuf> = environments.flat_map(|environment| packages_of(&environment)).collect();
    all.extend(more());
    all
}

/// Files of these names, in wheels of these folders, in the order of the names.
pub fn among(folders: &[PathBuf], names: &[&str]) -> Vec<PathBuf> {
    let libraries: Vec<PathBuf> = folders
        .iter()
        .flat_map(|folder| sorted(&folder.join("nvidia")))
        .flat_map(|wheel| INSIDE.map(|inside| wheel.join(inside)))
        .collect();
    let of = |name: &&str| libraries.iter().map(|folder| folder.join(name)).collect::<Vec<_>>();
    names.iter().flat_map(of).filter(|file| file.exists()).collect()
}

/// `lib/python3.*/site-packages` of an environment.
fn packages_of(environment: &Path) -> Vec<PathBuf> {
    let versions = sorted(&environment.join("lib")).into_iter();
    versions.map(|version| version.join("site-packages")).filter(|folder| folder.is_dir()).collect()
}

/// Entries of a folder by name; nothing if there is no folder.
fn sorted(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    all.sort();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_wheels_are_found_in_the_order_of_their_names() {
        let environment = tempfile::tempdir().unwrap();
        let site = environment.path().join("lib/python3.12/site-packages");
        let [old, new] = ["cublas/lib/libcublas.so.12", "cu13/lib/libcublas.so.13"]
            .map(|file| site.join("nvidia").join(file));
        for file in [&old, &new] {
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, "").unwrap();
        }
        let folders = packages_of(environment.path());
        assert_eq!(folders, [site]);
        assert_eq!(among(&folders, &["libcublas.so.13", "libcublas.so.12"]), [new, old]);
        assert!(among(&folders, &["libcupti.so.12"]).is_empty());
        assert!(packages_of(&environment.path().join("none")).is_empty());
    }
}
