//! Circles of imports: files that use each other can only be understood together, so at most three
//! may.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use syn::visit::{self, Visit};

use crate::module_layering::sources;

/// Files that use each other, at most.
const MOST: usize = 3;
const CRATES: [&str; 9] = [
    "src",
    "crates/core/src",
    "crates/verify/src",
    "crates/model/src",
    "crates/testkit/src",
    "crates/parallel/src",
    "crates/cli/src",
    "bindings/c/src",
    "bindings/python/src",
];

/// Path of a module within its crate.
type Module = Vec<String>;

/// Paths that the code of a file names, but for those of its tests.
#[derive(Default)]
struct Named(Vec<Module>);

impl<'ast> Visit<'ast> for Named {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = match item {
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Use(item) => &item.attrs,
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        let of_tests = |attribute: &syn::Attribute| {
            attribute.path().is_ident("cfg")
                && attribute.meta.require_list().is_ok_and(|list| list.tokens.to_string() == "test")
        };
        if !attributes.iter().any(of_tests) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.tree(&item.tree, Vec::new());
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.0.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }
}

impl Named {
    fn tree(&mut self, tree: &syn::UseTree, mut before: Module) {
        match tree {
            syn::UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.tree(&path.tree, before);
            }
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.tree(tree, before.clone()));
            }
            syn::UseTree::Name(name) => {
                before.push(name.ident.to_string());
                self.0.push(before);
            }
            syn::UseTree::Rename(rename) => {
                before.push(rename.ident.to_string());
                self.0.push(before);
            }
            syn::UseTree::Glob(_) => self.0.push(before),
        }
    }
}

/// The module that a file is.
fn module_of(root: &Path, file: &Path) -> Module {
    let inside = file.strip_prefix(root).unwrap().with_extension("");
    let mut module: Module = inside.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
    if module.last().is_some_and(|last| ["mod", "lib", "main"].contains(&last.as_str())) {
        module.pop();
    }
    module
}

/// The file of the crate that a path named in `from` leads into. What a module above re-exports is
/// its own matter.
fn target(files: &BTreeSet<Module>, from: &Module, path: &[String]) -> Option<Module> {
    let supers = path.iter().take_while(|part| *part == "super").count();
    let (mut module, rest) = match path.first()?.as_str() {
        "crate" => (Vec::new(), &path[1..]),
        "super" => (from[..from.len().checked_sub(supers)?].to_vec(), &path[supers..]),
        "self" => (from.clone(), &path[1..]),
        _ => return None,
    };
    for part in rest {
        module.push(part.clone());
        if !files.contains(&module) {
            module.pop();
            break;
        }
    }
    (!from.starts_with(&module)).then_some(module)
}

/// For each file of a crate: those that it uses.
fn uses(root: &Path) -> BTreeMap<Module, BTreeSet<Module>> {
    let mut paths = Vec::new();
    sources(root, &mut paths);
    let files: BTreeSet<Module> = paths.iter().map(|file| module_of(root, file)).collect();
    let of = |file: &std::path::PathBuf| {
        let from = module_of(root, file);
        let text = std::fs::read_to_string(file).unwrap();
        let mut named = Named::default();
        named.visit_file(
            &syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display())),
        );
        let used = named.0.iter().filter_map(|path| target(&files, &from, path)).collect();
        (from, used)
    };
    paths.iter().map(of).collect()
}

/// Everything that is reached from a file by what it uses.
fn reached<'a>(uses: &'a BTreeMap<Module, BTreeSet<Module>>, from: &'a Module) -> BTreeSet<&'a Module> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(file) = next.pop() {
        next.extend(uses.get(file).into_iter().flatten().filter(|used| seen.insert(*used)));
    }
    seen
}

/// Circles of files that use each other.
fn circles(uses: &BTreeMap<Module, BTreeSet<Module>>) -> BTreeSet<BTreeSet<&Module>> {
    let all: BTreeMap<_, _> = uses.keys().map(|file| (file, reached(uses, file))).collect();
    let mut circles = BTreeSet::new();
    for (&file, after) in &all {
        let back = |other: &&Module| all.get(other).is_some_and(|after| after.contains(file));
        let circle: BTreeSet<&Module> = after.iter().copied().filter(back).collect();
        if !circle.is_empty() {
            circles.insert(circle);
        }
    }
    circles
}

#[test]
fn at_most_three_files_use_each_other() {
    let mut read = 0;
    for root in CRATES {
        let uses = uses(&Path::new(env!("CARGO_MANIFEST_DIR")).join(root));
        read += uses.values().map(BTreeSet::len).sum::<usize>();
        for circle in circles(&uses) {
            let names: Vec<String> = circle.iter().map(|file| file.join("/")).collect();
            assert!(circle.len() <= MOST, "{root}: {names:?} use each other");
        }
    }
    assert!(read > 1000, "the files were read: {read} imports");
}

#[test]
fn a_circle_is_found_and_a_line_is_not_one() {
    let file = |name: &str| vec![name.to_owned()];
    let uses = |edges: &[(&str, &str)]| {
        let mut uses: BTreeMap<Module, BTreeSet<Module>> = BTreeMap::new();
        for (from, to) in edges {
            uses.entry(file(from)).or_default().insert(file(to));
        }
        uses
    };
    assert!(circles(&uses(&[("a", "b"), ("b", "c"), ("a", "c")])).is_empty());
    let round = uses(&[("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")]);
    let [a, b, c] = ["a", "b", "c"].map(file);
    assert_eq!(circles(&round), BTreeSet::from([BTreeSet::from([&a, &b, &c])]));
}
