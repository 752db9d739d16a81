//! The image of a test machine: an initramfs of busybox, the programs to run, and every library
//! they load.
//!
//! Files keep their paths of this machine, so that libraries find their run-time files there
//! (libibverbs: its drivers and their list).

use std::collections::BTreeSet;
use std::env;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{At, Error, Result};
use crate::guest;
use crate::programs::{DRIVER as FAKE_DRIVER, Programs};
use crate::tool::output;

/// Programs of this machine that are copied unchanged. The shell prefers busybox' own versions, for
/// example of `ip`.
const TOOLS: [&str; 5] = ["busybox", "rdma", "ibv_devinfo", "ib_write_lat", "ib_write_bw"];

/// Libraries that are loaded at run time, which `ldd` cannot see.
const LOADED: [&str; 2] = ["libibverbs.so.1", "libgcc_s.so.1"];

/// The NIC's driver for libibverbs, as the start of its file's name.
const DRIVER: &str = "librxe-";
const DRIVER_LIST: &str = "/etc/libibverbs.d/rxe.driver";

/// Place of kernels for the fake CUDA driver.
pub const KERNELS: &str = "/usr/lib/kernels.so";

/// Folders that a first process expects, and old names of folders.
const FOLDERS: [&str; 10] =
    ["dev", "etc", "modules", "proc", "root", "sys", "tmp", "usr/bin", "usr/lib", "usr/lib64"];
const OLD_NAMES: [(&str, &str); 4] =
    [("bin", "usr/bin"), ("sbin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")];

/// Builds `cache/image.cpio` and says where it is.
pub fn build(cache: &Path, modules: &Path, programs: &Programs) -> Result<PathBuf> {
    let root = Root::new(cache.join("root"))?;
    for folder in FOLDERS {
        root.folder(Path::new(folder))?;
    }
    for (name, target) in OLD_NAMES {
        symlink(target, root.at.join(name)).at(root.at.join(name))?;
    }

    let mut files = BTreeSet::new();
    for tool in TOOLS {
        let path = which(tool)?;
        root.copy(&path, &Path::new("usr/bin").join(tool))?;
        libraries(&path, &mut files)?;
    }
    let ours = [
        (&programs.sidelane, "sidelane"),
        (&programs.library_tests, "sidelane-tests"),
        (&programs.agent, "testbed"),
    ];
    for (path, name) in ours {
        root.stripped(path, &Path::new("usr/bin").join(name))?;
        libraries(path, &mut files)?;
    }
    let kernels = Path::new(KERNELS.trim_start_matches('/')).to_owned();
    for (path, to) in
        [(&programs.driver, Path::new("usr/bin").join(FAKE_DRIVER)), (&programs.kernels, kernels)]
    {
        root.stripped(path, &to)?;
        libraries(path, &mut files)?;
    }
    for library in at_run_time()? {
        libraries(&library, &mut files)?;
        files.insert(library);
    }
    files.insert(PathBuf::from(DRIVER_LIST));
    for file in &files {
        root.copy(file, file.strip_prefix("/").unwrap_or(file))?;
    }

    for entry in fs::read_dir(modules).at(modules)? {
        let path = entry.at(modules)?.path();
        root.copy(&path, &Path::new("modules").join(path.file_name().unwrap_or_default()))?;
    }
    root.script(Path::new("init"), guest::INIT)?;
    root.pack(&cache.join("image.cpio"))
}

/// The folder that becomes the machine's root.
struct Root {
    at: PathBuf,
}

impl Root {
    fn new(at: PathBuf) -> Result<Self> {
        if at.exists() {
            fs::remove_dir_all(&at).at(&at)?;
        }
        fs::create_dir_all(&at).at(&at)?;
        Ok(Self { at })
    }

    fn folder(&self, path: &Path) -> Result<()> {
        let path = self.at.join(path);
        fs::create_dir_all(&path).at(path)
    }

    /// The place of a file, with its folder made.
    fn place(&self, path: &Path) -> Result<PathBuf> {
        self.folder(path.parent().unwrap_or(Path::new("")))?;
        Ok(self.at.join(path))
    }

    fn copy(&self, from: &Path, to: &Path) -> Result<()> {
        let to = self.place(to)?;
        fs::copy(from, to).at(from)?;
        Ok(())
    }

    /// Without its debugging information, which would only fill the machine's memory.
    fn stripped(&self, from: &Path, to: &Path) -> Result<()> {
        let to = self.place(to)?;
        output(Command::new("strip").arg("--strip-debug").arg(from).arg("-o").arg(to))?;
        Ok(())
    }

    fn script(&self, path: &Path, text: &str) -> Result<()> {
        let path = self.place(path)?;
        fs::write(&path, text).at(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o755)).at(path)
    }

    fn pack(self, to: &Path) -> Result<PathBuf> {
        let pack = "find . | cpio --quiet -o -H newc -R 0:0 -F \"$0\"";
        output(Command::new("sh").args(["-c", pack]).arg(to).current_dir(&self.at))?;
        Ok(to.to_path_buf())
    }
}

/// Where a program lies.
fn which(name: &str) -> Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")])
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
        .ok_or_else(|| Error::Absent { name: name.into() })
}

/// Adds the libraries that `ldd` names; a static program has none, and `ldd` fails for it.
fn libraries(of: &Path, files: &mut BTreeSet<PathBuf>) -> Result<()> {
    let Ok(answer) = output(Command::new("ldd").arg(of)) else { return Ok(()) };
    for line in answer.lines() {
        if line.contains("not found") {
            return Err(Error::Absent { name: line.trim().into() });
        }
        if let Some(path) = line.split_whitespace().find(|word| word.starts_with('/')) {
            files.insert(path.into());
        }
    }
    Ok(())
}

/// Libraries and drivers that are loaded at run time.
fn at_run_time() -> Result<Vec<PathBuf>> {
    let known = output(Command::new(which("ldconfig")?).arg("-p"))?;
    let find = |name: &str| {
        known
            .lines()
            .find(|line| line.split_whitespace().next() == Some(name))
            .and_then(|line| line.rsplit(" => ").next())
            .map(PathBuf::from)
            .ok_or_else(|| Error::Absent { name: name.into() })
    };
    let mut found = LOADED.into_iter().map(find).collect::<Result<Vec<_>>>()?;

    let drivers = found[0].with_file_name("libibverbs");
    for entry in fs::read_dir(&drivers).at(&drivers)? {
        let path = entry.at(&drivers)?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(DRIVER)) {
            found.push(path);
        }
    }
    Ok(found)
}
