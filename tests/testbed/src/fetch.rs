//! Pieces of the distribution: programs by apt, and a kernel that is unpacked, never installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{At, Error, Result};
use crate::tool::output;

/// Packages of Debian 12, or of any system with apt and these names, that the bed uses.
const PACKAGES: [&str; 11] = [
    "binutils",
    "busybox-static",
    "cpio",
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "kmod",
    "perftest",
    "qemu-system-x86",
    "rdma-core",
    "util-linux",
];

/// Always depends on the newest kernel.
const KERNEL: &str = "linux-image-amd64";

/// The drivers of a test machine. Without `crc32_generic`, `rdma link add` fails with "no such
/// file".
const MODULES: [&str; 6] =
    ["crc32_generic", "virtio_pci", "virtio_net", "virtio_console", "rdma_rxe", "rdma_ucm"];

/// A kernel and the modules of a test machine.
pub struct Kernel {
    /// To boot.
    pub image: PathBuf,
    /// Modules, and `order`, a file that lists them as they must be loaded.
    pub modules: PathBuf,
}

/// Installs missing packages. Without root the error lists them.
pub fn packages() -> Result<()> {
    let missing: Vec<_> = PACKAGES.into_iter().filter(|name| !installed(name)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !rustix::process::geteuid().is_root() {
        return Err(Error::Packages { packages: missing });
    }
    output(Command::new("apt-get").args(["update", "-q"]))?;
    output(
        Command::new("apt-get")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(["install", "-q", "-y", "--no-install-recommends"])
            .args(&missing),
    )?;
    Ok(())
}

fn installed(package: &str) -> bool {
    output(Command::new("dpkg-query").args(["-W", "-f=${db:Status-Status}", package]))
        .is_ok_and(|status| status == "installed")
}

/// The kernel, downloaded once into `cache`; taken from there as long as the modules asked for stay
/// the same.
pub fn kernel(cache: &Path) -> Result<Kernel> {
    let home = cache.join("kernel");
    let kernel = Kernel { image: home.join("vmlinuz"), modules: home.join("modules") };
    let asked = home.join("asked");
    let wanted = MODULES.join(" ");
    if fs::read_to_string(&asked).is_ok_and(|cached| cached == wanted) {
        return Ok(kernel);
    }

    let package = kernel_package()?;
    let fresh = |path: PathBuf| {
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).at(&path)?;
        Ok::<_, Error>(path)
    };
    let work = fresh(cache.join("unpack"))?;
    let tree = work.join("tree");
    output(Command::new("apt-get").current_dir(&work).args(["download", "-q", &package]))?;
    let archive = only_child(&work)?;
    output(Command::new("dpkg").arg("-x").args([&archive, &tree]))?;

    fresh(home)?;
    fs::create_dir_all(&kernel.modules).at(&kernel.modules)?;
    let release = package.trim_start_matches("linux-image-");
    let image = tree.join("boot").join(format!("vmlinuz-{release}"));
    fs::copy(&image, &kernel.image).at(&image)?;
    modules(&tree, release, &kernel.modules)?;
    fs::remove_dir_all(&work).at(&work)?;
    fs::write(&asked, wanted).at(&asked)?;
    Ok(kernel)
}

/// The package behind the name that always points to the newest kernel.
fn kernel_package() -> Result<String> {
    let ask = || {
        let answer = output(Command::new("apt-cache").args(["depends", KERNEL])).ok()?;
        let name = answer.lines().find_map(|line| line.trim().strip_prefix("Depends: linux-image-"))?;
        Some(format!("linux-image-{}", name.trim()))
    };
    if let Some(name) = ask() {
        return Ok(name);
    }
    // A fresh system has no lists yet.
    output(Command::new("apt-get").args(["update", "-q"]))?;
    ask().ok_or(Error::Kernel { package: KERNEL })
}

fn only_child(folder: &Path) -> Result<PathBuf> {
    let mut entries = fs::read_dir(folder).at(folder)?;
    match entries.next() {
        Some(entry) => Ok(entry.at(folder)?.path()),
        None => Err(Error::Absent { name: KERNEL.into() }),
    }
}

/// Copies the modules and all they need, in the order of loading, and writes that order down.
fn modules(tree: &Path, release: &str, to: &Path) -> Result<()> {
    output(Command::new("depmod").arg("-b").arg(tree).arg(release))?;
    let mut order = String::new();
    for module in MODULES {
        let depends = output(Command::new("modprobe").arg("-d").arg(tree).args([
            "-S",
            release,
            "--show-depends",
            module,
        ]))?;
        for path in depends.lines().filter_map(|line| line.strip_prefix("insmod ")).map(str::trim) {
            let name = Path::new(path).file_name().unwrap_or_default().to_string_lossy().into_owned();
            if order.lines().any(|known| known == name) {
                continue;
            }
            fs::copy(path, to.join(&name)).at(path)?;
            order += &name;
            order.push('\n');
        }
    }
    let list = to.join("order");
    fs::write(&list, order).at(list)
}
