//! Ranks that are processes: memory of devices and words of the host go from one to the other as
//! descriptors.

use sidelane::World;

use super::on_fake_driver;
use super::rank::{Case, Rank};
use crate::support::cases;
use crate::support::processes::run_ranks;

const CASE: Case = Case { ranks: 4, experts: 10, top_k: 3, hidden: 24, max_tokens: 3 };
const UNDER_WAY: usize = 25;

/// Rounds are alike: hundreds by default.
fn rounds() -> u64 {
    cases([300, 1000], 0).into_iter().max().expect("a number")
}

#[test]
#[ignore = "started by the test below, once per rank"]
fn a_rank_of_the_world_below() {
    let mut rank = Rank::new(CASE, World::from_env().unwrap());
    let me = rank.me();
    let rounds = rounds();
    rank.rounds(0..rounds, UNDER_WAY);
    println!("rank {me}: {rounds} rounds are right to the bit");
}

#[test]
fn processes_exchange_hundreds_of_rounds_to_the_bit() {
    let test = "slots::processes::processes_exchange_hundreds_of_rounds_to_the_bit";
    on_fake_driver(test, || {
        let test = "slots::processes::a_rank_of_the_world_below";
        let job = run_ranks(&[CASE.ranks], test, &[]);
        let right = job.text.matches(&format!("{} rounds are right to the bit", rounds())).count();
        assert!(job.is_success() && right == CASE.ranks as usize, "{job:?}");
    });
}
