//! Mutants of a protocol: one order or one fence of the library's code is weaker.
//!
//! ```text
//!   run all models      each access and fence of the library notes where it is, and its order
//!   for each of these   one step weaker: run models until one fails ──► caught
//!                                        none fails                 ──► the order is not needed
//! ```
//!
//! loom runs the threads of a model one at a time, all in the thread that checks it. So what a
//! model notes, and the mutation it runs with, are kept for each thread of the system.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use loom::model::Builder;

/// A place in the library's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Site {
    file: &'static str,
    line: u32,
    column: u32,
}

/// What is at a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ordered {
    Access(Ordering),
    /// A fence; none is the weakest.
    Fence(Option<Ordering>),
}

/// One place, and what is there in place of the library's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mutation {
    site: Site,
    given: Ordered,
    weaker: Ordered,
}

impl fmt::Display for Mutation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mutation { site: Site { file, line, .. }, given, weaker } = self;
        let file = file.rsplit("../").next().unwrap_or(file);
        write!(f, "{file}:{line}: {weaker:?} instead of {given:?}")
    }
}

#[derive(Default)]
struct Notes {
    mutation: Option<Mutation>,
    sites: BTreeMap<Site, Ordered>,
}

thread_local! {
    static NOTES: RefCell<Notes> = RefCell::default();
}

/// The order to use for an access of this order.
pub(crate) fn order(given: Ordering, at: &'static Location<'static>) -> Ordering {
    assert!(given != Ordering::SeqCst, "{at}: loom takes this access for one of order AcqRel");
    match mutated(Ordered::Access(given), at) {
        Ordered::Access(order) => order,
        Ordered::Fence(_) => unreachable!("{at} is an access"),
    }
}

/// The order to use for a fence of this order; none if there is to be no fence.
pub(crate) fn fence_order(given: Ordering, at: &'static Location<'static>) -> Option<Ordering> {
    match mutated(Ordered::Fence(Some(given)), at) {
        Ordered::Fence(order) => order,
        Ordered::Access(_) => unreachable!("{at} is a fence"),
    }
}

fn mutated(given: Ordered, at: &'static Location<'static>) -> Ordered {
    // Models make accesses of their own.
    if !at.file().contains("/src/") {
        return given;
    }
    let site = Site { file: at.file(), line: at.line(), column: at.column() };
    NOTES.with_borrow_mut(|notes| {
        notes.sites.insert(site, given);
        notes.mutation.filter(|mutation| mutation.site == site).map_or(given, |mutation| mutation.weaker)
    })
}

/// What is one step weaker.
fn weaker(given: Ordered) -> Vec<Ordered> {
    use Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
    match given {
        Ordered::Access(AcqRel) => vec![Ordered::Access(Acquire), Ordered::Access(Release)],
        Ordered::Access(Acquire | Release) => vec![Ordered::Access(Relaxed)],
        Ordered::Fence(Some(SeqCst)) => vec![Ordered::Fence(Some(AcqRel))],
        Ordered::Fence(Some(AcqRel)) => vec![Ordered::Fence(Some(Acquire)), Ordered::Fence(Some(Release))],
        Ordered::Fence(Some(Acquire | Release)) => vec![Ordered::Fence(None)],
        Ordered::Access(_) | Ordered::Fence(_) => Vec::new(),
    }
}

/// A model: what threads do, and what must hold then.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    name: &'static str,
    /// The most preemptions of a run; none if all interleavings are run.
    preemptions: Option<usize>,
    body: fn(),
}

impl Model {
    /// Run in all interleavings.
    pub fn new(name: &'static str, body: fn()) -> Self {
        Model { name, preemptions: None, body }
    }

    /// Run in the interleavings with at most so many preemptions, for models of many steps.
    pub fn within(name: &'static str, preemptions: usize, body: fn()) -> Self {
        Model { name, preemptions: Some(preemptions), body }
    }
}

/// Runs a model. Returns the number of its runs and the places of the library that they came
/// through, or how one failed.
fn run(model: Model, mutation: Option<Mutation>) -> Result<(u64, BTreeMap<Site, Ordered>), String> {
    let Model { name, preemptions, body } = model;
    let runs = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&runs);
    let check = move || {
        NOTES.with_borrow_mut(|notes| notes.mutation = mutation);
        let checked = catch_unwind(AssertUnwindSafe(|| {
            let mut builder = Builder::new();
            builder.preemption_bound = preemptions;
            builder.check(move || {
                counter.fetch_add(1, Ordering::Relaxed);
                body();
            });
        }));
        let message = |panic: Box<dyn std::any::Any + Send>| match panic.downcast::<String>() {
            Ok(message) => *message,
            Err(panic) => panic.downcast::<&str>().map_or_else(|_| "a panic".into(), |text| text.to_string()),
        };
        checked.map_err(message).map(|()| NOTES.take().sites)
    };
    let thread = std::thread::Builder::new().name(name.into()).spawn(check);
    let sites = thread.expect("a thread").join().expect("panics were caught")?;
    Ok((runs.load(Ordering::Relaxed), sites))
}

/// Checks that all models hold, and that at least one of them fails with each order in these files
/// of the library weakened.
///
/// # Panics
/// If a model fails, an order is not needed, or the models come through none of these files.
pub fn prove(files: &[&str], models: &[Model]) {
    let mut sites = BTreeMap::new();
    for &model in models {
        match run(model, None) {
            Ok((runs, seen)) => {
                println!("{}: {runs} runs", model.name);
                sites.extend(seen);
            }
            Err(why) => panic!("{}: {why}", model.name),
        }
    }
    for file in files {
        assert!(sites.keys().any(|site| site.file.ends_with(file)), "no model comes through {file}");
    }
    sites.retain(|site, _| files.iter().any(|file| site.file.ends_with(file)));
    let all = sites.into_iter().flat_map(|(site, given)| {
        weaker(given).into_iter().map(move |weaker| Mutation { site, given, weaker })
    });
    let mut missed = Vec::new();
    for mutation in all {
        let failed = models.iter().find_map(|&model| Some((model.name, run(model, Some(mutation)).err()?)));
        match failed {
            Some((model, why)) => {
                println!("{mutation}: {model} fails: {}", why.lines().next().unwrap_or_default());
            }
            None => missed.push(mutation.to_string()),
        }
    }
    assert!(missed.is_empty(), "no model needs these orders: {missed:#?}");
}
