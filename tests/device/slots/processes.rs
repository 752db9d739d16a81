//! Ranks that are processes: memory of devices and words of the host go from one to the other as
//! descriptors.

use std::process::Command;

use sidelane::World;

use super::on_stand_in;
use super::rank::{Case, Rank};

const CASE: Case = Case { ranks: 4, experts: 10, top_k: 3, hidden: 24, max_tokens: 3 };
const ROUNDS: u64 = 1000;
const UNDER_WAY: usize = 25;

#[test]
#[ignore = "started by the test below, once per rank"]
fn a_rank_of_the_world_below() {
    let mut rank = Rank::new(CASE, World::from_env().unwrap());
    let me = rank.me();
    rank.rounds(0..ROUNDS, UNDER_WAY);
    println!("rank {me}: {ROUNDS} rounds are right to the bit");
}

#[test]
fn processes_exchange_a_thousand_rounds_to_the_bit() {
    let test = "slots::processes::processes_exchange_a_thousand_rounds_to_the_bit";
    on_stand_in(test, || {
        let program = std::env::current_exe().unwrap();
        let job = Command::new(env!("CARGO_BIN_EXE_sidelane"))
            .args(["launch", "--ranks-per-node", &CASE.ranks.to_string(), "--"])
            .arg(program)
            .args(["--exact", "slots::processes::a_rank_of_the_world_below", "--ignored", "--nocapture"])
            .env("SIDELANE_HEAP", "16M")
            .env("SIDELANE_SYMMETRIC", "4M")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&job.stdout);
        let right = text.matches(&format!("{ROUNDS} rounds are right to the bit")).count();
        assert!(job.status.success() && right == CASE.ranks as usize, "{job:?}");
    });
}
