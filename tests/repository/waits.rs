//! Waits: what blocks a thread is called by `src/bootstrap/wait.rs` alone, which bounds it. A wait
//! elsewhere would have no deadline, or no way out.

use std::collections::BTreeSet;
use std::path::Path;

use syn::visit::{self, Visit};

use crate::module_layering::sources;

/// The module of waits.
const MODULE: &str = "bootstrap/wait.rs";

/// Functions that block, by the last two names of their path: of the standard library and of
/// rustix.
const FUNCTIONS: [(&str, &str); 11] = [
    ("thread", "sleep"),
    ("thread", "park"),
    ("thread", "park_timeout"),
    ("thread", "yield_now"),
    ("hint", "spin_loop"),
    ("TcpStream", "connect"),
    ("TcpStream", "connect_timeout"),
    ("event", "poll"),
    ("epoll", "wait"),
    ("futex", "wait"),
    ("fs", "flock"),
];

/// Methods that block, with their number of arguments.
const METHODS: [(&str, usize); 12] = [
    ("recv", 0),
    ("recv_timeout", 1),
    ("join", 0),
    ("wait", 1),
    ("wait_while", 2),
    ("wait_timeout", 2),
    ("wait_timeout_while", 3),
    ("to_socket_addrs", 0),
    ("accept", 0),
    ("incoming", 0),
    ("synchronize", 0),
    ("flock", 1),
];

/// Calls that block elsewhere, and the reason that each ends.
const ALLOWED: [(&str, &str, &str); 20] = [
    ("lane/flag.rs", "spin_loop", "the ladder of waits for flags: its turns ask health, deadline and user"),
    ("lane/flag.rs", "yield_now", "as above"),
    ("lane/net/progress_thread.rs", "yield_now", "the progress thread: each round asks health"),
    ("ep/device/slots/proxy.rs", "yield_now", "the slots thread: each turn asks health"),
    ("ep/device/watchdog.rs", "yield_now", "200 ms for a stream, and 32 streams at most"),
    ("ep/device/watchdog.rs", "synchronize", "a new stream with a copy that waits for nothing"),
    ("ep/device/session.rs", "synchronize", "copies of an expert map, behind calls that the guard ends"),
    (
        "ep/device/device_pool.rs",
        "synchronize",
        "freed memory whose pool goes: as cudaFree waits for its users",
    ),
    ("ep/device/enqueued_setup.rs", "synchronize", "a new instance: the stream has its copies alone"),
    ("ep/device/slots/expansion.rs", "synchronize", "as above"),
    ("ep/device/slots/slot_memory.rs", "synchronize", "as above"),
    ("ep/expert_parallel.rs", "synchronize", "the instance's own, which polls"),
    ("device/blas/mod.rs", "synchronize", "copies of addresses, behind calls that the guard ends"),
    ("layer/device/device_memory.rs", "synchronize", "copies of weights, behind calls that the guard ends"),
    ("layer/device/device_moe.rs", "synchronize", "behind the instance's own, which has seen the end"),
    ("ep/host/relay_thread.rs", "recv", "a relay's waits end, and its death closes the channel"),
    ("ep/host/call.rs", "join", "as above: it is the relay's"),
    ("bootstrap/rendezvous/listener.rs", "accept", "a listener that does not block"),
    ("overlap/cuda.rs", "join", "joins streams by events, not threads"),
    ("world/setup.rs", "join", "ranks of this process that build a world: their waits have deadlines"),
];

/// Calls and names of what blocks, but for those of tests.
#[derive(Default)]
struct Blocking(BTreeSet<String>);

fn of_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || attribute.path().is_ident("cfg")
                && attribute.meta.require_list().is_ok_and(|list| list.tokens.to_string() == "test")
    })
}

impl Blocking {
    /// Notes the last name of a path if it blocks.
    fn note(&mut self, path: &[String]) {
        if let [.., module, last] = path
            && FUNCTIONS.contains(&(module, last))
        {
            self.0.insert(last.clone());
        }
    }

    /// Names that a file imports, which it may then call without their module.
    fn import(&mut self, tree: &syn::UseTree, path: &[String]) {
        let below = |name: &syn::Ident| [path, &[name.to_string()]].concat();
        match tree {
            syn::UseTree::Path(tree) => self.import(&tree.tree, &below(&tree.ident)),
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.import(tree, path)),
            syn::UseTree::Name(name) => self.note(&below(&name.ident)),
            syn::UseTree::Rename(name) => self.note(&below(&name.ident)),
            syn::UseTree::Glob(_) => {}
        }
    }
}

impl<'ast> Visit<'ast> for Blocking {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.import(&item.tree, &[]);
    }

    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = match item {
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        if !of_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_expr_path(&mut self, path: &'ast syn::ExprPath) {
        let names: Vec<_> = path.path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.note(&names);
        visit::visit_expr_path(self, path);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        let name = call.method.to_string();
        if METHODS.contains(&(name.as_str(), call.args.len())) {
            self.0.insert(name);
        }
        visit::visit_expr_method_call(self, call);
    }
}

fn blocking(text: &str) -> BTreeSet<String> {
    let mut found = Blocking::default();
    found.visit_file(&syn::parse_file(text).expect("a source file"));
    found.0
}

#[test]
fn only_the_module_of_waits_blocks_a_thread() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut paths = Vec::new();
    sources(&root, &mut paths);
    let mut used = BTreeSet::new();
    let mut found = Vec::new();
    for path in paths {
        let file = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
        let of_tests = file.ends_with("tests.rs") || file.contains("tests/") || file.contains("/fake/");
        if of_tests || file == MODULE {
            continue;
        }
        for name in blocking(&std::fs::read_to_string(&path).unwrap()) {
            match ALLOWED.iter().find(|(place, allowed, _)| (*place, *allowed) == (&file, &name)) {
                Some(allowed) => _ = used.insert(allowed),
                None => found.push(format!("{file}: {name}")),
            }
        }
    }
    assert!(found.is_empty(), "call bootstrap::wait instead, or say why it ends: {found:#?}");
    let unused: Vec<_> = ALLOWED.iter().filter(|allowed| !used.contains(allowed)).collect();
    assert!(unused.is_empty(), "allowed for nothing: {unused:#?}");
}

#[test]
fn waits_are_found_in_each_way_of_writing_them() {
    let found = |body: &str| blocking(&format!("fn f() {{ {body} }}")).into_iter().collect::<Vec<_>>();
    assert_eq!(found("std::thread::sleep(t)"), ["sleep"]);
    assert_eq!(found("turn(thread::sleep)"), ["sleep"]);
    assert_eq!(found("state = changed.wait(state).unwrap()"), ["wait"]);
    assert_eq!(found("let _ = thread.join();"), ["join"]);
    assert_eq!(found("while !ready() { std::hint::spin_loop() }"), ["spin_loop"]);
    assert_eq!(found("path.join(name); port.wait(from, flag, 1)"), [] as [&str; 0]);
    assert_eq!(blocking("use rustix::event::{PollFd, poll};").into_iter().collect::<Vec<_>>(), ["poll"]);
    assert_eq!(blocking("#[cfg(test)] mod tests { fn f() { thread::sleep(t) } }"), BTreeSet::new());
}
