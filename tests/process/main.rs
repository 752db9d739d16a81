//! Worlds of real processes: their exchanges, failures and rebuilds.

mod common;
mod losses;
mod planned;
mod stops;
#[path = "../support/mod.rs"]
mod support;
mod tcp;
mod worlds;

/// The test that a job starts once per rank. Without a job it does nothing.
#[test]
#[ignore = "a job starts it, once per rank"]
fn rank_obeys_its_job() {
    if std::env::var_os(common::rank::MARK).is_none() {
        return;
    }
    match std::env::var_os(planned::PLANNED) {
        Some(_) => planned::serve(),
        None => common::rank::serve(),
    }
}
