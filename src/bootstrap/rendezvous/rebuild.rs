//! Meeting again after a loss.
//!
//! ```text
//!   epoch e      0 ✗    1      2      3          each rank has had a listener since it joined
//!   epoch e+1           0 ◄─── 1 ◄─── 2          the lowest rank not known lost hosts; old order is kept
//! ```
//!
//! The old world's connections stay open meanwhile, so a rank that dies during the rebuild is
//! noticed. A world that a network failure splits in two can become two worlds of the same epoch:
//! ranks cannot distinguish a split from a death. A program that must exclude this compares the
//! size of the new world with the size that it needs.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    connect::{attended, host},
    join::{JoinError, JoinRequest, Membership},
    join_barrier::JoinBarrier,
};
use crate::{
    bootstrap::{
        hub::{Hub, TcpHub},
        os::failed,
        wire::{JoinRefusal, RendezvousId},
    },
    error::{BootstrapError, Cause},
};

/// Where a hub went, and where its ranks come from.
type Rebuilt = (Box<dyn Hub>, Vec<u32>);

/// Meets the survivors in the next epoch.
pub(in crate::bootstrap) fn rebuild(old: &TcpHub, deadline: Duration) -> Result<Rebuilt, BootstrapError> {
    let start = Instant::now();
    let until = start + deadline;
    may_rebuild(old)?;
    let epoch = old.epoch.wrapping_add(1);
    let mut tried = Vec::new();
    loop {
        let absent = old.health().absent();
        let mut candidates = (0..old.size).filter(|rank| !absent.contains(rank) && !tried.contains(rank));
        let Some(candidate) = candidates.next() else {
            let (coordinator, waited) = (tried.first().copied().unwrap_or(old.rank), start.elapsed());
            return Err(BootstrapError::RebuildFailed { epoch, coordinator, waited });
        };
        // Leaves time for the next one, should this one never answer.
        let patience = until.saturating_duration_since(Instant::now());
        let patience = if candidates.next().is_some() { patience / 2 } else { patience };
        let meeting = RendezvousId { job: old.job.digest, size: old.size, epoch, host: candidate };
        let health = old.health().clone();
        let stop = move || health.is_absent(candidate);
        let knock = JoinRequest {
            secret: &old.job.secret,
            meeting,
            rank: old.rank,
            beyond_loopback: old.doors.iter().any(|door| !door.ip().is_loopback()),
            greeted_until: Instant::now() + patience,
            until,
            stop: &stop,
        };
        let seated = if candidate == old.rank {
            lead(old, &knock)
        } else {
            knock.at(old.doors[candidate as usize]).and_then(|seat| sit(old, epoch, seat, None))
        };
        match seated {
            Ok(rebuilt) => return Ok(rebuilt),
            Err(JoinError::Failed(error)) => return Err(error),
            Err(JoinError::Refused(JoinRefusal::Evicted(epoch))) => {
                return Err(Cause::Evicted { rank: old.rank, epoch }.into());
            }
            Err(JoinError::Refused(JoinRefusal::Missing(_))) => {
                let (coordinator, waited) = (candidate, start.elapsed());
                return Err(BootstrapError::RebuildFailed { epoch, coordinator, waited });
            }
            Err(JoinError::Nobody | JoinError::Refused(_)) => tried.push(candidate),
        }
    }
}

/// Some worlds are not rebuilt. One that lives is ended first, so that the others come too.
fn may_rebuild(old: &TcpHub) -> Result<(), BootstrapError> {
    match old.health().check() {
        Err(cause @ (Cause::LauncherGone { .. } | Cause::Evicted { .. })) => Err(cause.into()),
        Err(_) => Ok(()),
        Ok(()) => {
            old.cancel(Cause::Cancelled { by: old.rank });
            Ok(())
        }
    }
}

/// Hosts the meeting and takes part in it.
fn lead(old: &TcpHub, knock: &JoinRequest<'_>) -> Result<Rebuilt, JoinError> {
    let listener = old.standing.try_clone().map_err(|error| JoinError::Failed(failed("dup", &error)))?;
    let barrier = JoinBarrier::again(old.size, old.job.clocks.liveness * 2);
    let health = Arc::clone(old.health());
    let absent = Box::new(move || health.absent());
    let (address, coordinator) =
        host(listener, &old.job, knock.meeting, barrier, absent, knock.until).map_err(JoinError::Failed)?;
    let (seat, coordinator) = attended(knock.at(address), coordinator)?;
    sit(old, knock.meeting.epoch, seat, Some(coordinator))
}

fn sit(
    old: &TcpHub,
    epoch: u16,
    seat: Membership,
    coordinator: Option<std::thread::JoinHandle<()>>,
) -> Result<Rebuilt, JoinError> {
    let members = seat.members.clone();
    let hub = TcpHub::new(old.job.clone(), epoch, seat, coordinator).map_err(JoinError::Failed)?;
    Ok((Box::new(hub), members))
}
