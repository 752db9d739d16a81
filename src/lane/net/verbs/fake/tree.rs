//! A directory laid out like `/sys`, gone when dropped.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::lane::net::verbs::Sysfs;

pub struct Tree(PathBuf);

impl Tree {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("sidelane-sysfs-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let root = std::env::temp_dir().join(name);
        fs::create_dir_all(&root).unwrap();
        Tree(root)
    }

    pub fn sysfs(&self) -> Sysfs {
        Sysfs::below(&self.0)
    }

    pub fn write(&self, path: &str, text: &str) {
        fs::write(self.place(path), format!("{text}\n")).unwrap();
    }

    pub fn link(&self, path: &str, target: &str) {
        symlink(self.0.join(target), self.place(path)).unwrap();
    }

    fn place(&self, path: &str) -> PathBuf {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap_or(Path::new("/"))).unwrap();
        path
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
