//! Worlds of real processes: their bootstrap, exchanges, failures and rebuilds.

mod bootstrap;
mod common;
mod cuts;
mod enqueued;
mod losses;
mod stops;
#[path = "../support/mod.rs"]
mod support;
mod tcp;
mod threads;
mod worlds;

/// The test that a job starts once per rank. Without a job it does nothing.
#[test]
#[ignore = "a job starts it, once per rank"]
fn rank_obeys_its_job() {
    if std::env::var_os(common::rank::MARK).is_none() {
        return;
    }
    match std::env::var_os(enqueued::ENQUEUED) {
        Some(_) => enqueued::serve(),
        None => common::rank::serve(),
    }
}
