//! The foundation: NICs, wire, clocks.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::bed::{Bed, address};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::machine::NICS;
use crate::steps::{Asked, Findings};

/// Clocks of guest and host may differ by this many seconds.
const CLOCKS: u64 = 60;

/// Every NIC has an active port, each machine reaches the other on each wire, and clocks are right.
pub fn run(bed: &mut Bed, _: &Asked, deadline: Deadline) -> Result<Findings> {
    let seen = bed.both(
        |machine| {
            format!(
                "for nic in /sys/class/infiniband/*; do ibv_devinfo -d ${{nic##*/}} | grep -q PORT_ACTIVE || exit 1; done; \
                 for address in {}; do ping -c 1 -W 5 $address > /dev/null || exit 2; done; date +%s",
                (0..NICS).map(|nic| address(1 - machine, nic)).collect::<Vec<_>>().join(" ")
            )
        },
        deadline,
    )?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    for one in seen {
        let clock: Option<u64> = one.stdout.trim().parse().ok();
        if clock.is_none_or(|clock| clock.abs_diff(now) > CLOCKS) {
            return Err(Error::Unreadable { program: "date", what: "the time it is", output: one.stdout });
        }
    }
    Ok(Findings::from(format!("{NICS} per machine, {}", bed.accelerator().name())))
}
