//! A process that waits until a world of its job takes it in.
//!
//! ```text
//!   each port of the job, again and again ──► the handshake proves that this is the job
//!   Settings ──► Refused: settings differ │ Admit { number, roster, addresses }
//!   comes to the rebuild of the old ranks, once ──► the larger world, or asks again
//! ```
//!
//! **Liveness.** Spare and rank 0 send heartbeats to each other while rank 0 gathers spares. Then
//! rank 0 sends none: a spare is admitted within the liveness limit, or not by this growth. One
//! that has heard nothing for so long, for example because it is cut off, asks again.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::grow::{YEAR, limit, rendezvous};
use super::join::{
    ANSWER, GREETING, Interrupt, JoinError, PAUSE, candidates, explain, fail, job_of, list, listen_at, miss,
    resolve, shake_hands,
};
use super::lineage::Lineage;
use super::rebuild::{Rebuild, Rebuilt};
use crate::bootstrap::health::{Liveness, Timeouts};
use crate::bootstrap::hub::Job;
use crate::bootstrap::identity::Identity;
use crate::bootstrap::secret::{Secret, random};
use crate::bootstrap::wait;
use crate::bootstrap::wire::{
    Admission, Hello, Initiator, JoinRefusal, Message, MessageConnection, PROTOCOL, RendezvousId, Roster,
    Setting,
};
use crate::error::BootstrapError;

/// Bound of one attempt to connect.
const CONNECT: Duration = Duration::from_secs(1);

/// Waits as a spare until a world of the job takes this process in.
pub fn spare(
    identity: &Identity,
    secret: Option<Secret>,
    timeouts: Timeouts,
    settings: &[Setting],
    deadline: Duration,
) -> Result<Rebuilt, BootstrapError> {
    let (start, until) = (Instant::now(), Instant::now() + deadline.min(YEAR));
    let job = job_of(identity, secret, timeouts)?;
    let interrupt = Interrupt::default();
    let mut foreign = None;
    loop {
        for address in candidates(identity, until) {
            interrupt.check("spare")?;
            match ask(&job, address, settings, until, &interrupt) {
                Ok((lineage, before)) => {
                    if let Some(rebuilt) = enter(&job, lineage, &before)? {
                        return Ok(rebuilt);
                    }
                }
                Err(JoinError::Unreachable | JoinError::Refused(JoinRefusal::OtherJob)) => {}
                Err(JoinError::Failed(error)) => return Err(error),
                Err(JoinError::Refused(JoinRefusal::WrongSecret)) => {
                    foreign.get_or_insert((Instant::now(), address));
                }
                Err(JoinError::Refused(refusal)) => return Err(explain(refusal, identity, address, start)),
            }
        }
        interrupt.check("spare")?;
        let over = Instant::now() + PAUSE >= until;
        if let Some((since, address)) = foreign
            && (over || since.elapsed() > GREETING)
        {
            return Err(explain(JoinRefusal::WrongSecret, identity, address, start));
        }
        if over {
            let address = format!("{} (ports {})", identity.master_addr, list(&identity.ports));
            return Err(BootstrapError::NotTakenIn { address, waited: start.elapsed() });
        }
        wait::nap(PAUSE);
    }
}

/// Asks at an address, and waits there to be admitted.
fn ask(
    job: &Job,
    address: SocketAddr,
    settings: &[Setting],
    until: Instant,
    interrupt: &Interrupt,
) -> Result<(Lineage, Roster), JoinError> {
    let left = until.saturating_duration_since(Instant::now()).min(CONNECT).max(Duration::from_millis(1));
    let stream = wait::connect(address, left).map_err(|_| JoinError::Unreachable)?;
    let local = stream.local_addr().map_err(|_| JoinError::Unreachable)?.ip();
    let mut connection = MessageConnection::new(stream).map_err(|_| JoinError::Unreachable)?;
    let listener = listen_at(local, !job.identity.is_local())?;
    let port = listener.local_addr().map_err(fail("getsockname"))?.port();
    let RendezvousId { job: digest, size, epoch, host } = rendezvous(job);
    let nonce = random().map_err(JoinError::Failed)?;
    let hello = Hello { version: PROTOCOL, job: digest, rank: 0, size, epoch, host, port, nonce };
    let initiator = Initiator::new(job.secret.clone(), hello);
    let (stop, greeted_until) = (|| interrupt.came(), until.min(Instant::now() + GREETING));
    let greeted = shake_hands(&mut connection, initiator, greeted_until, ANSWER, &stop);
    greeted.ok_or(JoinError::Unreachable)?.map_err(miss)?;
    connection.send(&Message::Settings(settings.to_vec()));
    match await_verdict(&mut connection, &job.timeouts, until, &stop).ok_or(JoinError::Unreachable)? {
        Message::Admit(Admission { rank, members, roster, addresses })
            if roster.has(rank)
                && (members as usize) < roster.members.len()
                && roster.members.iter().all(|&member| (member as usize) < addresses.len()) =>
        {
            let before = roster.members[..members as usize].to_vec();
            let before = Roster { epoch: roster.epoch, members: before };
            let addresses = addresses.iter().map(|listens| resolve(listens, address.ip())).collect();
            Ok((Lineage::admitted(rank, addresses, listener, roster), before))
        }
        Message::Refused(refusal) => Err(miss(refusal)),
        _ => Err(JoinError::Unreachable),
    }
}

/// Rank 0's answer to a spare. None if rank 0 falls silent or goes away.
fn await_verdict(
    connection: &mut MessageConnection,
    timeouts: &Timeouts,
    until: Instant,
    stop: &dyn Fn() -> bool,
) -> Option<Message> {
    let mut beat = Instant::now();
    let mut liveness = Liveness::new(1, timeouts.heartbeat, timeouts.liveness, beat);
    loop {
        let now = Instant::now();
        if now >= beat {
            beat = now + timeouts.heartbeat;
            connection.send(&Message::Heartbeat);
        }
        let message = connection.await_message(until.min(beat), stop);
        let now = Instant::now();
        match message {
            Some(Message::Heartbeat) => liveness.heard(0, now),
            Some(verdict) => return Some(verdict),
            None if connection.is_closed() || now >= until || stop() => return None,
            None if !liveness.expired(now).is_empty() => return None,
            None => {}
        }
    }
}

/// One attempt to get into the next world with the members of the one before it. None if it does
/// not begin.
fn enter(job: &Job, lineage: Lineage, before: &Roster) -> Result<Option<Rebuilt>, BootstrapError> {
    let (until, rank, lineage) = (Instant::now() + limit(&job.timeouts), lineage.rank, Arc::new(lineage));
    Rebuild::with_all(job, &lineage, (before, rank), until).attempt()
}
