//! Runs in turn with another's.

use sidelane::Group;

use super::args::Test;
use super::measure::Pair;
use super::report::Beside;
use super::task::Run;
use super::ucx;
use crate::error::CliError;
use crate::peers::Unavailable;

/// An odd number: its median is one of them.
const TURNS: usize = 9;

/// What is known after turns of one size.
#[derive(Default)]
pub struct Found {
    /// On rank 0.
    pub beside: Option<Beside>,
    /// Why there were none, on all ranks: nobody is asked again.
    pub absent: Option<Unavailable>,
}

/// Runs of ours and of `ucx_perftest` in turn. Collective: who waits for the other's turn is asleep on a socket.
pub fn take(all: &Group, mut pair: Option<&mut Pair<'_>>, test: Test, run: Run) -> Result<Found, CliError> {
    let (mut ours_us, mut theirs_us) = (Vec::new(), Vec::new());
    for _ in 0..TURNS {
        let mut absent = None;
        if all.rank() == 0 {
            match ucx::put_lat(run) {
                Ok(us) => theirs_us.push(us),
                Err(why) => absent = Some(Unavailable::new(ucx::NAME, &why, ucx::INSTALL)),
            }
        }
        let told = all.gather(&serde_json::to_vec(&absent).expect("words are always JSON"))?;
        let absent: Option<Unavailable> = serde_json::from_slice(&told[0]).map_err(CliError::told)?;
        if absent.is_some() {
            return Ok(Found { beside: None, absent });
        }
        if let Some(pair) = &mut pair {
            ours_us.extend(pair.run(test, run, false)?.latency.map(|latency| latency.p50_us));
        }
    }
    let beside = (all.rank() == 0).then(|| Beside::new(ucx::NAME, ours_us, theirs_us));
    Ok(Found { beside, absent: None })
}
