//! Ranks stay near their memory: each on processors of one NUMA node.
//!
//! Memory lies where its first writer runs. A rank that the kernel moves to another node reads and writes its heap, and its
//! neighbours read it, through the link between them for the rest of the job.

use clap::ValueEnum;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use sidelane::memory::Numa;

/// Which processors ranks get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Bind {
    /// Those of one NUMA node, in blocks of ranks; of several where there are more nodes than ranks
    #[default]
    Numa,
    /// All that this program may use
    None,
}

/// What is to be had, for ranks that are started one after another.
pub struct Binder {
    numa: Numa,
    allowed: CpuSet,
}

impl Bind {
    /// Nothing, where there is nothing to choose.
    pub fn binder(self) -> Option<Binder> {
        match self {
            Bind::Numa => Some(Binder { numa: Numa::here(), allowed: sched_getaffinity(None).ok()? }),
            Bind::None => None,
        }
    }
}

impl Binder {
    /// Starts the `nth` of `ranks` on its share: a process begins with the processors of the thread that starts it. Where the kernel
    /// refuses, it runs anywhere.
    pub fn start<T>(&self, nth: u32, ranks: u32, start: impl FnOnce() -> T) -> T {
        let allowed = |cpu: u32| (cpu as usize) < CpuSet::MAX_CPU && self.allowed.is_set(cpu as usize);
        let Some(share) = self.numa.share(allowed, nth, ranks) else { return start() };
        let mut set = CpuSet::new();
        share.iter().for_each(|&cpu| set.set(cpu as usize));
        let _ = sched_setaffinity(None, &set);
        let started = start();
        let _ = sched_setaffinity(None, &self.allowed);
        started
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processors() -> Vec<usize> {
        let set = sched_getaffinity(None).unwrap();
        (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
    }

    /// A machine whose nodes have one processor each, of those that this test may use.
    fn binder() -> Binder {
        let dir = std::env::temp_dir().join(format!("sidelane-bind-{}", std::process::id()));
        for (node, cpu) in processors().iter().enumerate() {
            std::fs::create_dir_all(dir.join(format!("node{node}"))).unwrap();
            std::fs::write(dir.join(format!("node{node}/cpulist")), format!("{cpu}\n")).unwrap();
        }
        let binder = Binder { numa: Numa::below(&dir), ..Bind::Numa.binder().unwrap() };
        std::fs::remove_dir_all(dir).unwrap();
        binder
    }

    #[test]
    fn what_is_started_has_its_share_and_what_comes_later_all() {
        let (binder, all) = (binder(), processors());
        let ranks = all.len() as u32;
        for (nth, &cpu) in (0..).zip(&all) {
            assert_eq!(binder.start(nth, ranks, processors), [cpu]);
            assert_eq!(processors(), all);
        }
        assert_eq!(binder.start(0, 1, processors), all);
        assert!(Bind::None.binder().is_none());
    }
}
