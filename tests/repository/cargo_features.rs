//! No crate of the workspace has features of its own: none would cut enough to be worth a second
//! build (docs/design.md, "No cargo features").

use std::path::{Path, PathBuf};

fn manifests(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            manifests(&path, found);
        } else if name == "Cargo.toml" {
            found.push(path);
        }
    }
}

#[test]
fn no_manifest_has_features() {
    let mut found = Vec::new();
    manifests(Path::new(env!("CARGO_MANIFEST_DIR")), &mut found);
    assert!(found.len() > 15, "the manifests were found: {found:?}");
    for manifest in found {
        let text = std::fs::read_to_string(&manifest).unwrap();
        let features = text.lines().any(|line| line.trim_start().starts_with("[features]"));
        assert!(!features, "{} has features", manifest.display());
    }
}
