//! The files by which peers are told what to work on, and by which they tell what came out.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::error::{CliError, failed};

/// One folder for all ranks. The program that starts them makes it and has it removed, however they end.
pub struct Folder {
    path: PathBuf,
}

/// What a rank works on.
pub struct Inputs<'a> {
    pub shape: [u32; 5],
    pub ids: &'a [i32],
    pub x: &'a [u8],
    pub y: &'a [u8],
}

impl Folder {
    /// Makes one, for as long as it is held.
    pub fn make() -> Result<TempDir, CliError> {
        let failed =
            |source| failed!("cannot make a folder in {path:?}: {source}", path = std::env::temp_dir());
        tempfile::Builder::new().prefix("sidelane-peers-").tempdir().map_err(failed)
    }

    /// The one that was made.
    pub fn at(path: &Path) -> Self {
        Folder { path: path.to_owned() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What this rank's peers read.
    pub fn write(&self, rank: u32, inputs: &Inputs<'_>) -> Result<(), CliError> {
        if rank == 0 {
            self.put("shape", bytemuck::cast_slice(&inputs.shape))?;
        }
        self.put(&format!("ids.{rank}"), bytemuck::cast_slice(inputs.ids))?;
        self.put(&format!("x.{rank}"), inputs.x)?;
        self.put(&format!("y.{rank}"), inputs.y)
    }

    pub fn put(&self, name: &str, bytes: &[u8]) -> Result<(), CliError> {
        let path = self.path.join(name);
        fs::write(&path, bytes).map_err(|source| failed!("cannot write {path:?}: {source}"))
    }

    /// Whether what this rank's peer has written under these names is this. Takes it away, so that the next one's cannot be
    /// taken for it.
    pub fn same(&self, rank: u32, results: &[(&str, &[u8])]) -> Result<bool, CliError> {
        let mut same = true;
        for &(name, expected) in results {
            let path = self.path.join(format!("{name}.{rank}"));
            let failed = |what| {
                let path = path.clone();
                move |source| failed!("cannot {what} {path:?}: {source}")
            };
            same &= fs::read(&path).map_err(failed("read"))? == *expected;
            fs::remove_file(&path).map_err(failed("remove"))?;
        }
        Ok(same)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_bit_makes_the_difference_and_no_result_is_compared_twice() {
        let made = tempfile::tempdir().unwrap();
        let folder = Folder::at(made.path());
        for (rows, out, same) in [([1, 2], [3], true), ([1, 3], [3], false), ([1, 2], [2], false)] {
            folder.put("rows.4", &[1, 2]).unwrap();
            folder.put("out.4", &[3]).unwrap();
            let results: [(&str, &[u8]); 2] = [("rows", &rows), ("out", &out)];
            assert_eq!(folder.same(4, &results).unwrap(), same);
            let again = folder.same(4, &results).unwrap_err().to_string();
            assert!(again.starts_with("cannot read"), "{again}");
        }
    }
}
