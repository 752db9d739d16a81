//! For tests: kernels as the fake runs them, built by the C compiler that Rust links with.

use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{self, Command};

/// No fused products, and no strict aliasing.
const FLAGS: [&str; 8] = [
    "-std=gnu11",
    "-O2",
    "-Wall",
    "-Werror",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-shared",
    "-fPIC",
];

/// Builds a CUDA source in the common subset of C and CUDA, and returns the library that
/// `SIDELANE_FAKE_CUDA_KERNELS` names. It is built once for each content of the source's folder,
/// next to the test program that calls this.
pub fn kernels(source: &Path) -> io::Result<PathBuf> {
    let program = env::current_exe()?;
    let directory = program.parent().expect("a program is in a directory").join("fake-cuda");
    fs::create_dir_all(&directory)?;
    let library = directory.join(format!("kernels-{:016x}.so", digest(source)?));
    if library.exists() {
        return Ok(library);
    }
    // Other test programs may build the same now: a file under the name is complete.
    let fresh = library.with_extension(format!("{}-{:?}", process::id(), std::thread::current().id()));
    let mut compiler = Command::new("cc");
    compiler.args(FLAGS).arg("-o").arg(&fresh).args(["-x", "c"]).arg(source).arg("-lm");
    let output = compiler.output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(io::Error::other(format!("cc {}: {}\n{said}", source.display(), output.status)));
    }
    fs::rename(&fresh, &library)?;
    Ok(library)
}

/// The same for all kernels of the library.
pub fn all_kernels() -> io::Result<PathBuf> {
    kernels(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../cuda/all_modules.cu"))
}

/// Of the flags and of all files in the folder of the source, by their names.
fn digest(source: &Path) -> io::Result<u64> {
    let folder = source.parent().expect("a file is in a folder");
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "cu" || extension == "h"));
    files.sort();
    let mut hasher = DefaultHasher::new();
    (FLAGS, source).hash(&mut hasher);
    for file in files {
        (&file, fs::read(&file)?).hash(&mut hasher);
    }
    Ok(hasher.finish())
}
