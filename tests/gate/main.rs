//! The gate: against oracles, and against numbers worked out by hand.

mod oracles;
mod scores;
