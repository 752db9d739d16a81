//! The file system below a root: `/`, or a machine that a test laid out.

use std::path::{Path, PathBuf};

/// Reads small files of /sys, /proc, /etc and /dev. What is not there or not readable is simply not found.
pub struct Root(PathBuf);

impl Root {
    /// Paths of the other methods are taken below `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Root(path.into())
    }

    /// Where a path of the machine lies.
    pub fn join(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The text of a file, without blanks around it.
    pub fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        std::fs::read_to_string(self.join(path)).ok().map(|text| text.trim().to_owned())
    }

    /// The names in a directory, sorted.
    pub fn list(&self, path: impl AsRef<Path>) -> Vec<String> {
        let entries = std::fs::read_dir(self.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names
    }

    /// Names in a directory that are a prefix and a number: `node0`, `uverbs1`.
    pub fn numbered(&self, path: impl AsRef<Path>, prefix: &str) -> usize {
        let is_number = |rest: &str| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit());
        self.list(path).iter().filter(|name| name.strip_prefix(prefix).is_some_and(is_number)).count()
    }

    /// Whether a path exists.
    pub fn has(&self, path: impl AsRef<Path>) -> bool {
        self.join(path).exists()
    }
}
