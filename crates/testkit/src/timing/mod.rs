//! What the program and the benches time alike: [steps of planning](planning_steps), a [chain] of
//! calls, and [figures](stats) from rounds of ranks.

pub mod chain;
pub mod planning_steps;
pub mod stats;
