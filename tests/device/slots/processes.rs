//! Ranks that are processes: memory of devices and words of the host go from one to the other as
//! descriptors.

use sidelane::World;

use super::on_stand_in;
use super::rank::{Case, Rank};
use crate::support::processes::run_ranks;

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
        let test = "slots::processes::a_rank_of_the_world_below";
        let job = run_ranks(&[CASE.ranks], test, &[]);
        let right = job.text.matches(&format!("{ROUNDS} rounds are right to the bit")).count();
        assert!(job.is_success() && right == CASE.ranks as usize, "{job:?}");
    });
}
