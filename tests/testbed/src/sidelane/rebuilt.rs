//! Ranks whose world ends in the middle of dispatches and is rebuilt: a test of the library,
//! started once per rank.

use super::{Nics, STOIC, command, demand_passes, unreadable};
use crate::error::Result;

/// The test that plays a rank.
const TEST: &str = "lane::tests::rebuilt::late_packets_of_world_ended_in_dispatch_miss_next_world";

/// Where ranks look for signs.
const SIGNS: &str = "/tmp/signs";

/// Tells a machine that one of its ranks must end the world.
pub const CANCEL: &str = "touch /tmp/signs/cancel";

/// Tells the ranks of a machine to continue in the next world.
pub const GO: &str = "touch /tmp/signs/go";

/// What each rank says when it is in the next world.
pub const REBUILT: &str = "] rebuilt";

/// Report of the ranks of a machine at the end.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// Rows and sums of the next world, all right.
    pub rows: u64,
    /// Work requests of the old world that failed, as far as ranks still counted them.
    pub failed: u64,
}

/// The ranks of one machine, on the second NIC: they meet over the wire of the first.
pub fn rebuilt(machine: usize) -> String {
    let start = command(machine, 2, "launch --tag-output", Nics::Second, STOIC);
    format!(
        "rm -rf {SIGNS} && mkdir {SIGNS} && export SIDELANE_TEST_SIGNS={SIGNS} && {start} -- \
         sidelane-tests --ignored --nocapture --exact {TEST}"
    )
}

impl Seen {
    /// What both ranks of a machine have said.
    pub fn read(output: &str) -> Result<Self> {
        demand_passes(output, 2)?;
        let mut seen = Self::default();
        let ends: Vec<&str> = output.lines().filter(|line| line.contains("] verified ")).collect();
        let missing = || unreadable("what each of two ranks has verified", output.to_owned());
        for line in &ends {
            let mut numbers = line.split_whitespace().filter_map(|word| word.parse::<u64>().ok());
            seen.rows += numbers.next().filter(|&rows| rows > 0).ok_or_else(missing)?;
            seen.failed += numbers.next().ok_or_else(missing)?;
        }
        if ends.len() == 2 { Ok(seen) } else { Err(missing()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: &str = "\
[0] verified 30 rows; requests of the old world that failed: 4
[1] verified 20 rows; requests of the old world that failed: 0
[1] test result: ok. 1 passed; 0 failed
[0] test result: ok. 1 passed; 0 failed
";

    #[test]
    fn both_ranks_have_to_pass_and_to_have_verified_something() {
        let seen = Seen::read(BOTH).unwrap();
        assert_eq!((seen.rows, seen.failed), (50, 4));
        for (what, with) in
            [("20 rows", "0 rows"), ("[1] verified", "[1] saw"), ("[0] test result", "[0] no")]
        {
            assert!(Seen::read(&BOTH.replace(what, with)).is_err(), "{with}");
        }
    }
}
