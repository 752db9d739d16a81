//! Where the dynamic loader would find a library, without loading it: loading runs foreign code.

use std::path::PathBuf;

use super::facts::Facts;
use super::root::Root;

/// Directories that loaders search when nothing is configured.
const USUAL: [&str; 6] = ["/usr/local/lib", "/usr/local/lib64", "/lib64", "/usr/lib64", "/lib", "/usr/lib"];

/// The first place where one of these names lies.
pub fn find(root: &Root, facts: &Facts, names: &[&str]) -> Option<PathBuf> {
    let paths =
        directories(root, facts).into_iter().flat_map(|dir| names.iter().map(move |name| dir.join(name)));
    paths.into_iter().find(|path| root.has(path))
}

/// In the loader's order: the environment, the configuration, the usual places.
fn directories(root: &Root, facts: &Facts) -> Vec<PathBuf> {
    const CONFIGURED: &str = "/etc/ld.so.conf.d";
    let mut texts: Vec<String> = root.read("/etc/ld.so.conf").into_iter().collect();
    texts.extend(root.list(CONFIGURED).iter().filter_map(|name| root.read(format!("{CONFIGURED}/{name}"))));
    let configured = texts.iter().flat_map(|text| text.lines()).map(str::trim).filter(|l| l.starts_with('/'));
    facts.library_path.iter().cloned().chain(configured.chain(USUAL).map(PathBuf::from)).collect()
}
