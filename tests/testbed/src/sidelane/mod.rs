//! The program under test: one job of two nodes, a node on each machine.

mod bench;
mod collectives;
mod conformance;
mod device;
mod put_bench;
mod rebuilt;

use serde::de::DeserializeOwned;

pub use bench::{Bench, Counted, Route, names_the_lost};
pub use collectives::collectives;
pub use conformance::conformance;
pub use device::{Straight, device};
pub use put_bench::{PutBench, Test};
pub use rebuilt::{CANCEL, GO, REBUILT, Seen, rebuilt};

use crate::bed::{Bed, master};
use crate::deadline::Deadline;
use crate::error::{Error, Result};

/// The lane that is here to be tested.
pub const LANE: &str = "verbs";

/// The NICs' timeout in an undisturbed run: 275 seconds, longer than any such run. Soft-RoCE's
/// timer starts at a request that may have been answered long ago, and repeats all requests in
/// flight when it ends.
const CALM: &str = "SIDELANE_VERBS_TIMEOUT=26 SIDELANE_VERBS_RETRIES=6";

/// In a run with a held wire: 17 seconds, so that no request is repeated meanwhile.
const STOIC: &str = "SIDELANE_VERBS_TIMEOUT=22 SIDELANE_VERBS_RETRIES=6";

/// In a disturbed run: a quarter of a second, six times; seven would mean forever with Soft-RoCE.
const ALERT: &str = "SIDELANE_VERBS_TIMEOUT=16 SIDELANE_VERBS_RETRIES=6";

/// The NICs that ranks use, as rails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nics {
    /// The one whose wire also carries their rendezvous.
    First,
    /// The one whose wire only NICs use.
    Second,
    /// Both: each pair of ranks takes one, and both ends the same.
    Both,
}

impl Nics {
    /// Variable for the ranks.
    fn variable(self) -> &'static str {
        match self {
            Self::First => "SIDELANE_VERBS_NICS=rxe0",
            Self::Second => "SIDELANE_VERBS_NICS=rxe1",
            Self::Both => "SIDELANE_VERBS_NICS=rxe0,rxe1",
        }
    }
}

/// Where machine 0 leaves its report.
const REPORT: &str = "/tmp/report.json";

/// Command of a machine of a job. No launcher knows the other, so both get the secret.
fn command(machine: usize, ranks_per_node: u32, what: &str, nics: Nics, patience: &str) -> String {
    let (master, nics) = (master(), nics.variable());
    format!(
        "SIDELANE_SECRET=two-machines-of-the-test-bed {nics} {patience} exec sidelane {what} --nodes 2 \
         --ranks-per-node {ranks_per_node} --node-rank {machine} --master {master} --net {LANE}"
    )
}

/// Runs a job on both machines to its good end, and reads its report.
fn report<T: DeserializeOwned>(
    bed: &Bed,
    deadline: Deadline,
    command: impl Fn(usize) -> String,
) -> Result<T> {
    let json = |machine| if machine == 0 { format!(" --json {REPORT}") } else { String::new() };
    bed.both(|machine| format!("{}{}", command(machine), json(machine)), deadline)?;
    let text = bed.start(0, format!("cat {REPORT} && rm {REPORT}"))?.succeed(deadline)?.stdout;
    serde_json::from_str(&text).map_err(|_| unreadable("its report", text))
}

/// Whether this many processes have run a test of the library, and it passed: an unknown name
/// passes, too, without running a test.
pub fn demand_passes(output: &str, processes: usize) -> Result<()> {
    match output.matches("test result: ok. 1 passed").count() == processes {
        true => Ok(()),
        false => Err(unreadable("that one test passed", output.to_owned())),
    }
}

fn unreadable(what: &'static str, output: String) -> Error {
    Error::Unreadable { program: "sidelane", what, output }
}
