//! The library's own suite for lanes, between two processes.

use super::{CALM, LANE, Nics};
use crate::bed::master;

/// The test that runs the suite with the environment's settings.
const TEST: &str = "lane::tests::the_lane_between_two_machines_conforms";

/// One machine's part, with this way to signal.
pub fn conformance(machine: usize, signal: &str) -> String {
    let (master, nic) = (master(), Nics::First.variable());
    format!(
        "RANK={machine} WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR={master} MASTER_PORT=29500 \
         SIDELANE_JOB=conformance-{signal} SIDELANE_SECRET=two-machines-of-the-test-bed SIDELANE_NET={LANE} SIDELANE_VERBS_SIGNAL={signal} \
         {nic} {CALM} exec sidelane-tests --ignored --exact {TEST}"
    )
}
