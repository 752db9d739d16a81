//! Proof that both sides know the job's secret, without sending it. No sockets here: messages in,
//! messages out.
//!
//! ```text
//!   guest                                        host
//!     Hello { who, nonce g }  ─────────────►
//!     ◄─────────  Challenge { nonce h }
//!     Proof { HMAC(secret, "guest" | h | Hello) }  ────►
//!     ◄─────────  Proof { HMAC(secret, "host"  | h | Hello) }
//! ```
//!
//! The guest proves first. A host that answered a stranger with a value made of the secret would
//! let the stranger try secrets in its own time; so a host says nothing of the kind before.
//!
//! Fresh nonces of both sides make a recorded exchange useless (*replay*); different roles make a
//! proof useless when it is sent back to its maker (*reflection*). The proof covers the whole
//! Hello, so also rank, size, epoch, job, host and version. This keeps strangers out. It neither
//! encrypts later messages nor defends against an attacker who can alter packets on the network.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use super::message::{Hello, JoinRefusal, Message, PROTOCOL};
use crate::bootstrap::Secret;

/// The digest under which a job is known.
pub fn job_digest(job: &str) -> [u8; 32] {
    Sha256::digest(job.as_bytes()).into()
}

/// The side that connects.
#[derive(Debug)]
pub struct Initiator {
    secret: Secret,
    hello: Hello,
    /// The host's, once it has challenged.
    nonce: Option<[u8; 32]>,
}

impl Initiator {
    pub fn new(secret: Secret, hello: Hello) -> Self {
        Initiator { secret, hello, nonce: None }
    }

    /// The first message.
    pub fn hello(&self) -> Message {
        Message::Hello(self.hello.clone())
    }

    /// The proof that answers the host's challenge.
    pub fn answer(&mut self, challenge: Message) -> Result<Message, JoinRefusal> {
        match challenge {
            Message::Challenge { version, .. } if version != PROTOCOL => Err(JoinRefusal::Version(version)),
            Message::Challenge { nonce, .. } => {
                self.nonce = Some(nonce);
                Ok(proof(&self.secret, b"guest", &nonce, &self.hello))
            }
            // The host has proved nothing yet: accept only answers that make this rank look
            // elsewhere.
            Message::Refused(refusal @ (JoinRefusal::Version(_) | JoinRefusal::OtherJob)) => Err(refusal),
            _ => Err(JoinRefusal::Malformed),
        }
    }

    /// Whether the host has proved itself, too.
    pub fn verify(&self, answer: Message) -> Result<(), JoinRefusal> {
        match (answer, &self.nonce) {
            (Message::Proof(proof), Some(nonce)) => {
                let host = transcript(&self.secret, b"host", nonce, &self.hello);
                host.verify_slice(&proof).map_err(|_| JoinRefusal::WrongSecret)
            }
            // Believed without a proof, because it only makes this rank look elsewhere.
            (Message::Refused(refusal @ JoinRefusal::WrongSecret), _) => Err(refusal),
            _ => Err(JoinRefusal::Malformed),
        }
    }
}

/// Identity of a rendezvous: job, size, epoch and host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RendezvousId {
    pub job: [u8; 32],
    pub size: u32,
    pub epoch: u16,
    pub host: u32,
}

/// The side that accepts: one of these per pending connection.
#[derive(Debug)]
pub struct Responder {
    secret: Secret,
    rendezvous: RendezvousId,
    nonce: [u8; 32],
    hello: Option<Hello>,
}

impl Responder {
    /// `nonce` must be fresh: it makes a recorded proof worthless.
    pub fn new(secret: Secret, rendezvous: RendezvousId, nonce: [u8; 32]) -> Self {
        Responder { secret, rendezvous, nonce, hello: None }
    }

    /// Whether the hello has come and the proof is awaited.
    pub fn challenged(&self) -> bool {
        self.hello.is_some()
    }

    /// The challenge to a hello.
    pub fn challenge(&mut self, message: Message) -> Result<Message, JoinRefusal> {
        let Message::Hello(hello) = message else { return Err(JoinRefusal::Malformed) };
        if hello.version != PROTOCOL {
            return Err(JoinRefusal::Version(PROTOCOL));
        }
        if hello.job != self.rendezvous.job || hello.host != self.rendezvous.host {
            return Err(JoinRefusal::OtherJob);
        }
        self.hello = Some(hello);
        Ok(Message::Challenge { version: PROTOCOL, nonce: self.nonce })
    }

    /// The initiator, which has proved itself, and the host's proof for it.
    pub fn verify(self, message: Message) -> Result<(Authenticated, Message), JoinRefusal> {
        let Responder { secret, rendezvous, nonce, hello } = self;
        let (Message::Proof(theirs), Some(hello)) = (message, hello) else {
            return Err(JoinRefusal::Malformed);
        };
        let initiator = transcript(&secret, b"guest", &nonce, &hello);
        initiator.verify_slice(&theirs).map_err(|_| JoinRefusal::WrongSecret)?;
        let own = proof(&secret, b"host", &nonce, &hello);
        Ok((Authenticated { rendezvous, hello }, own))
    }
}

/// A process that knows the secret.
#[derive(Debug)]
pub struct Authenticated {
    rendezvous: RendezvousId,
    hello: Hello,
}

impl Authenticated {
    /// The authenticated rank, if it belongs to this rendezvous.
    pub fn accept(self) -> Result<Hello, JoinRefusal> {
        let hello = self.hello;
        if hello.epoch != self.rendezvous.epoch {
            return Err(JoinRefusal::Evicted(self.rendezvous.epoch));
        }
        if hello.size != self.rendezvous.size {
            return Err(JoinRefusal::Size(self.rendezvous.size));
        }
        if hello.rank >= hello.size {
            return Err(JoinRefusal::Rank);
        }
        Ok(hello)
    }
}

fn proof(secret: &Secret, role: &[u8], nonce: &[u8; 32], hello: &Hello) -> Message {
    Message::Proof(transcript(secret, role, nonce, hello).finalize().into_bytes().into())
}

fn transcript(secret: &Secret, role: &[u8], nonce: &[u8; 32], hello: &Hello) -> Hmac<Sha256> {
    let mut mac = keyed(secret.bytes());
    // Every part but the role has a fixed length, and no role is a prefix of another.
    mac.update(b"sidelane rendezvous ");
    mac.update(role);
    mac.update(nonce);
    mac.update(&Message::Hello(hello.clone()).encode());
    mac
}

/// HMAC-SHA256 under a key of any length. A longer key than a block is hashed first, as RFC 2104
/// says.
pub fn keyed(key: &[u8]) -> Hmac<Sha256> {
    let mut block = [0; 64];
    if key.len() <= block.len() {
        block[..key.len()].copy_from_slice(key);
    } else {
        block[..32].copy_from_slice(&Sha256::digest(key));
    }
    Hmac::new(&block.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendezvous() -> RendezvousId {
        RendezvousId { job: job_digest("job"), size: 4, epoch: 7, host: 0 }
    }

    fn hello(nonce: u8) -> Hello {
        let RendezvousId { job, size, epoch, host } = rendezvous();
        Hello { version: PROTOCOL, job, rank: 2, size, epoch, host, port: 9, nonce: [nonce; 32] }
    }

    fn guest(secret: &str, nonce: u8) -> Initiator {
        Initiator::new(Secret::from_bytes(secret), hello(nonce))
    }

    fn responder(secret: &str, nonce: u8) -> Responder {
        Responder::new(Secret::from_bytes(secret), rendezvous(), [nonce; 32])
    }

    /// How the host judges a guest, and the guest a host that knows it.
    fn meet(mut guest: Initiator, mut responder: Responder) -> Result<Hello, JoinRefusal> {
        let challenge = responder.challenge(guest.hello())?;
        let (known, own) = responder.verify(guest.answer(challenge)?)?;
        guest.verify(own)?;
        known.accept()
    }

    #[test]
    fn sides_that_share_the_secret_recognize_each_other() {
        assert_eq!(meet(guest("s", 1), responder("s", 2)), Ok(hello(1)));
    }

    #[test]
    fn a_wrong_secret_is_noticed_by_either_side() {
        assert_eq!(meet(guest("right", 1), responder("wrong", 2)), Err(JoinRefusal::WrongSecret));
        let mut guest = guest("right", 1);
        let nonce = [2; 32];
        guest.answer(Message::Challenge { version: PROTOCOL, nonce }).unwrap();
        let liar = proof(&Secret::from_bytes("wrong"), b"host", &nonce, &hello(1));
        assert_eq!(guest.verify(liar), Err(JoinRefusal::WrongSecret));
    }

    #[test]
    fn host_reveals_nothing_of_secret_before_proof_of_guest() {
        let said = |secret| {
            let mut responder = responder(secret, 2);
            let challenge = responder.challenge(guest("guess", 1).hello()).unwrap();
            let refused = responder.verify(Message::Proof([0; 32])).map(drop).unwrap_err();
            (challenge, refused)
        };
        assert_eq!(said("one"), said("another"));
    }

    #[test]
    fn a_replayed_proof_is_refused_because_the_nonce_is_fresh() {
        let (mut guest, mut first) = (guest("s", 1), responder("s", 2));
        let recorded = guest.answer(first.challenge(guest.hello()).unwrap()).unwrap();
        let (_, own) = first.verify(recorded.clone()).unwrap();
        let mut second = responder("s", 3);
        second.challenge(guest.hello()).unwrap();
        assert_eq!(second.verify(recorded).map(drop), Err(JoinRefusal::WrongSecret));
        // And a host's recorded proof does not convince a guest with a fresh nonce.
        let mut later = self::guest("s", 8);
        later.answer(Message::Challenge { version: PROTOCOL, nonce: [2; 32] }).unwrap();
        assert_eq!(later.verify(own), Err(JoinRefusal::WrongSecret));
    }

    #[test]
    fn a_reflected_proof_is_refused_because_roles_differ() {
        let mut guest = guest("s", 1);
        let own = guest.answer(Message::Challenge { version: PROTOCOL, nonce: [2; 32] }).unwrap();
        assert_eq!(guest.verify(own), Err(JoinRefusal::WrongSecret));
    }

    #[test]
    fn changed_hello_fails_the_proof() {
        let (mut guest, mut responder) = (guest("s", 1), responder("s", 2));
        let forged = Hello { rank: 3, ..hello(1) };
        let challenge = responder.challenge(Message::Hello(forged)).unwrap();
        let answer = guest.answer(challenge).unwrap();
        assert_eq!(responder.verify(answer).map(drop), Err(JoinRefusal::WrongSecret));
    }

    #[test]
    fn other_versions_jobs_epochs_and_ranks_are_told_apart() {
        let told = |change: fn(&mut Hello)| {
            let mut hello = hello(1);
            change(&mut hello);
            meet(Initiator::new(Secret::from_bytes("s"), hello), responder("s", 2))
        };
        assert_eq!(told(|hello| hello.version = 9), Err(JoinRefusal::Version(PROTOCOL)));
        assert_eq!(told(|hello| hello.job[0] ^= 1), Err(JoinRefusal::OtherJob));
        assert_eq!(told(|hello| hello.host = 1), Err(JoinRefusal::OtherJob));
        assert_eq!(told(|hello| hello.epoch = 6), Err(JoinRefusal::Evicted(7)));
        assert_eq!(told(|hello| hello.size = 5), Err(JoinRefusal::Size(4)));
        assert_eq!(told(|hello| hello.rank = 4), Err(JoinRefusal::Rank));
        let future = Message::Challenge { version: PROTOCOL + 1, nonce: [0; 32] };
        assert_eq!(guest("s", 1).answer(future), Err(JoinRefusal::Version(PROTOCOL + 1)));
    }

    #[test]
    fn steps_out_of_order_are_malformed() {
        assert_eq!(responder("s", 1).challenge(Message::Bye), Err(JoinRefusal::Malformed));
        let early = responder("s", 1).verify(Message::Proof([0; 32])).map(drop);
        assert_eq!(early, Err(JoinRefusal::Malformed));
        assert_eq!(guest("s", 1).verify(Message::Proof([0; 32])), Err(JoinRefusal::Malformed));
        let refused = Message::Refused(JoinRefusal::Evicted(3));
        assert_eq!(guest("s", 1).answer(refused.clone()), Err(JoinRefusal::Malformed));
        assert_eq!(guest("s", 1).verify(refused), Err(JoinRefusal::Malformed));
    }

    #[test]
    fn keys_of_any_length_follow_the_standard() {
        for length in [0, 20, 64, 65, 200] {
            let key = vec![0xaa; length];
            let mut reference = Hmac::<Sha256>::new_from_slice(&key).unwrap();
            let mut ours = keyed(&key);
            reference.update(b"text");
            ours.update(b"text");
            assert_eq!(ours.finalize().into_bytes(), reference.finalize().into_bytes(), "key of {length}");
        }
    }
}
