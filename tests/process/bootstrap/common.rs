//! Common parts of the tests of the module `bootstrap`: worlds over real sockets, in threads of one
//! process.
#![allow(dead_code, reason = "each test program uses a part of this")]

use std::{
    sync::{Arc, Condvar, Mutex},
    thread,
    time::Duration,
};

use sidelane::{
    bootstrap::{Hub, Identity, Secret, Timeouts, connect},
    error::Cause,
};

use crate::support::processes::master_port;

/// Longer than anything takes that works.
pub const LONG: Duration = Duration::from_secs(20);
/// A loss is named within this: five times what the design allows, for machines that do other work.
pub const SOON: Duration = Duration::from_secs(10);

/// The variable with the number of rebuilds of each test of survivors: a few without it. With it
/// worlds are large, too.
pub const REBUILDS: &str = "SIDELANE_TEST_REBUILDS";

/// Meeting point of the ranks of a test. If another process takes one of the ports, there is
/// another, and the job's name distinguishes the tests.
#[derive(Clone)]
pub struct Place {
    pub job: String,
    pub ports: Vec<u16>,
}

pub fn place() -> Place {
    let first = master_port();
    Place { job: format!("test at {first}"), ports: (first..first + 3).collect() }
}

pub fn timeouts() -> Timeouts {
    Timeouts::default().with_rendezvous(LONG)
}

pub fn identity(rank: u32, size: u32, place: &Place) -> Identity {
    Identity::new(rank, size)
        .with_local_rank(Some(rank))
        .with_local_size(Some(size))
        .with_job(place.job.clone())
        .with_master_addr("127.0.0.1".into())
        .with_ports(place.ports.clone())
}

/// Runs `work` for each item in a thread of its own and returns the results in order.
pub fn each<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> = items.into_iter().map(|item| scope.spawn(|| work(item))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub fn world(size: u32) -> Vec<Box<dyn Hub>> {
    let place = place();
    let secret = Secret::random().unwrap();
    let hubs = each((0..size).collect(), |rank| {
        connect(&identity(rank, size, &place), Some(secret.clone()), timeouts()).unwrap()
    });
    assert!(hubs.iter().zip(0..).all(|(hub, rank)| (hub.rank(), hub.size(), hub.epoch()) == (rank, size, 0)));
    hubs
}

/// Something that happens once or several times, and that others wait for.
#[derive(Default)]
pub struct Signal {
    count: Mutex<u32>,
    changed: Condvar,
}

impl Signal {
    pub fn raise(&self) {
        *self.count.lock().unwrap() += 1;
        self.changed.notify_all();
    }

    pub fn wait_for(&self, count: u32) {
        let guard = self.count.lock().unwrap();
        let waited = self.changed.wait_timeout_while(guard, LONG, |seen| *seen < count).unwrap();
        assert!(*waited.0 >= count, "the signal did not come");
    }
}

/// Waits until this hub's world is dead, and says why.
pub fn death(hub: &dyn Hub) -> Cause {
    let signal = Arc::new(Signal::default());
    let tell = signal.clone();
    hub.health().on_failure(move |_| tell.raise());
    signal.wait_for(1);
    hub.health().cause().expect("a world that has failed has a cause")
}
