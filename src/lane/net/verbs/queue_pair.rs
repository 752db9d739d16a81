//! Queue pairs: reliable connections between two NICs.
//!
//! ```text
//!   create --> init: receives may be posted --connect(peer)--> ready to receive, ready to send --error--> error
//!                                                                             |
//!                                          a request fails, retries run out --+--> error: all else is flushed
//! ```
//!
//! An [`Endpoint`] describes a queue pair to its peer. It goes through the rendezvous.
//!
//! ```text
//!   byte 0        1    2        3              4           8                    12   14   30
//!        version  mtu  atomics  global header  queue pair  first packet number  lid  gid  network, partition keys
//! ```
//!
//! Numbers are little-endian. Byte 3 is 1 if packets to this end need the global header. The end is
//! as long as the port has keys ([`Reach`]). The version comes first, so another build is
//! recognized before any other byte is trusted.

use std::net::Ipv6Addr;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::io::Errno;
use sidelane_core::nic_choice::LinkLayer;

use super::ffi::{
    self, ibv_ah_attr, ibv_gid, ibv_global_route, ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_init_attr,
};
use super::library::{check_object, check_status, trace_failure};
use super::nic::Mtu;
use super::reach::{Pkey, Pkeys, Reach, flid, same_subnet};
use super::work::{Chain, CompletionQueue, Failed, Request};
use super::{Context, ProtectionDomain, ReceiveChain, SendChain};
use crate::error::{Operation, VerbsError};

/// Atomics in flight that are worth having: signals, a few per peer.
const ATOMICS: u8 = 16;

/// Wait for a peer whose request met no receive: 0.64 ms, about a time slice of a busy receiver.
const RNR_TIMER: u8 = 12;

/// Routers that a packet may pass.
const HOPS: u8 = 255;

/// How much a queue pair holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Requests in the send queue.
    pub sends: u32,
    /// Requests in the receive queue.
    pub receives: u32,
    /// Pieces of memory in a send.
    pub send_sges: u32,
    /// Pieces of memory in a receive.
    pub receive_sges: u32,
    /// Bytes that may travel inside a send.
    pub inline: u32,
}

/// Which completion queues it reports to.
#[derive(Clone, Copy, Debug)]
pub struct Queues<'a> {
    /// Sends.
    pub send: &'a Arc<CompletionQueue>,
    /// Receives.
    pub receive: &'a Arc<CompletionQueue>,
}

/// One end of a reliable connection.
#[derive(Debug)]
pub struct QueuePair {
    raw: NonNull<ibv_qp>,
    number: u32,
    peer: u32,
    first_packet: u32,
    caps: Caps,
    path: Path,
    domain: Arc<ProtectionDomain>,
    _send: Arc<CompletionQueue>,
    _receive: Arc<CompletionQueue>,
}

// SAFETY: drivers lock their queues; none belongs to a thread.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// A queue pair towards rank `peer` of the world. Receives may be posted at once, before it is
    /// connected.
    ///
    /// No inline bytes may be granted (see [`caps`](Self::caps)); everything else is granted as
    /// requested, or more.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn create(
        domain: &Arc<ProtectionDomain>,
        queues: Queues<'_>,
        caps: Caps,
        path: &Path,
        peer: u32,
    ) -> Result<Self, VerbsError> {
        let context = domain.context();
        let first_packet = Endpoint::random_packet().map_err(|e| {
            let errno = e.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
            context.failed("getrandom", errno)
        })?;
        let (raw, caps) = Self::allocate(domain, queues, caps)?;
        // SAFETY: the call just returned it.
        let number = unsafe { (*raw.as_ptr()).qp_num };
        let (_send, _receive) = (Arc::clone(queues.send), Arc::clone(queues.receive));
        let (path, domain) = (path.clone(), Arc::clone(domain));
        let this = QueuePair { raw, number, peer, first_packet, caps, path, domain, _send, _receive };
        this.init().map_err(|errno| this.context().failed("ibv_modify_qp to INIT", errno))?;
        Ok(this)
    }

    /// Drivers refuse an inline size that they cannot give instead of giving less: then without.
    fn allocate(
        domain: &Arc<ProtectionDomain>,
        queues: Queues<'_>,
        caps: Caps,
    ) -> Result<(NonNull<ibv_qp>, Caps), VerbsError> {
        let context = domain.context();
        let create = |inline| {
            let mut attr = ibv_qp_init_attr {
                qp_context: ptr::null_mut(),
                send_cq: queues.send.raw(),
                recv_cq: queues.receive.raw(),
                srq: ptr::null_mut(),
                cap: ibv_qp_cap {
                    max_send_wr: caps.sends,
                    max_recv_wr: caps.receives,
                    max_send_sge: caps.send_sges,
                    max_recv_sge: caps.receive_sges,
                    max_inline_data: inline,
                },
                qp_type: ffi::IBV_QPT_RC,
                sq_sig_all: 0,
            };
            // SAFETY: the domain and both queues live, and are kept alive by the queue pair.
            let raw = unsafe { (context.functions().create_qp)(domain.raw(), &mut attr) };
            check_object(raw).map(|raw| (raw, Caps::granted(&attr.cap)))
        };
        let mut answer = create(caps.inline);
        if caps.inline > 0 && answer.is_err() {
            answer = create(0);
        }
        answer.map_err(|errno| context.failed("ibv_create_qp", errno))
    }

    fn init(&self) -> Result<(), i32> {
        let mut attr = blank(ffi::IBV_QPS_INIT);
        // The peer decides with it which key is used: any will do until then.
        attr.pkey_index = self.path.pkeys.preferred().index;
        attr.port_num = self.path.port;
        attr.qp_access_flags = ffi::IBV_ACCESS_REMOTE_WRITE;
        // Some drivers refuse features that their NIC lacks.
        if self.context().attributes().atomics {
            attr.qp_access_flags |= ffi::IBV_ACCESS_REMOTE_ATOMIC;
        }
        self.modify(attr, ffi::IBV_QP_PKEY_INDEX | ffi::IBV_QP_PORT | ffi::IBV_QP_ACCESS_FLAGS)
    }

    /// The description that the peer needs to connect.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint {
            reach: self.path.reach(),
            mtu: self.path.mtu,
            atomics_in: self.atomics_in(),
            queue_pair: self.number,
            first_packet: self.first_packet,
            lid: self.path.lid,
            gid: self.path.gid,
            needs_global_header: self.path.needs_global_header,
        }
    }

    fn atomics_in(&self) -> u8 {
        ATOMICS.min(self.context().attributes().atomics_in)
    }

    /// Connects to the peer's queue pair: from here on requests may be posted. The peer must have
    /// connected too, or will soon: until then requests are sent again and again, as retries allow.
    ///
    /// # Errors
    /// [`VerbsError::NoRoute`], [`VerbsError::LinkLayers`], [`VerbsError::PartitionsDiffer`],
    /// [`VerbsError::Call`].
    pub fn connect(&self, remote: &Endpoint) -> Result<(), VerbsError> {
        let key = self.path.reach().key_to(&remote.reach, self.context().name(), self.peer)?;
        let pkey = self.path.pkeys.find(key).unwrap_or(self.path.pkeys.preferred());
        self.ready_to_receive(remote, pkey).map_err(|errno| self.no_route(remote.gid, errno))?;
        self.ready_to_send(remote).map_err(|errno| self.context().failed("ibv_modify_qp to RTS", errno))
    }

    fn ready_to_receive(&self, remote: &Endpoint, pkey: Pkey) -> Result<(), i32> {
        let mut attr = blank(ffi::IBV_QPS_RTR);
        attr.pkey_index = pkey.index;
        attr.path_mtu = self.path.mtu.min(remote.mtu).code();
        attr.dest_qp_num = remote.queue_pair;
        attr.rq_psn = remote.first_packet;
        attr.max_dest_rd_atomic = self.atomics_in();
        attr.min_rnr_timer = RNR_TIMER;
        attr.ah_attr = ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw: remote.gid.octets() },
                flow_label: 0,
                sgid_index: self.path.gid_index,
                hop_limit: HOPS,
                traffic_class: self.path.traffic_class,
            },
            dlid: self.path.lid_towards(remote),
            sl: self.path.service_level,
            src_path_bits: 0,
            static_rate: 0,
            is_global: self.path.is_global(remote).into(),
            port_num: self.path.port,
        };
        let mask = ffi::IBV_QP_AV | ffi::IBV_QP_PATH_MTU | ffi::IBV_QP_DEST_QPN | ffi::IBV_QP_RQ_PSN;
        let mask = mask | ffi::IBV_QP_MAX_DEST_RD_ATOMIC | ffi::IBV_QP_MIN_RNR_TIMER;
        self.modify(attr, mask | ffi::IBV_QP_PKEY_INDEX)
    }

    fn ready_to_send(&self, remote: &Endpoint) -> Result<(), i32> {
        let mut attr = blank(ffi::IBV_QPS_RTS);
        attr.sq_psn = self.first_packet;
        attr.timeout = self.path.timeout;
        attr.retry_cnt = self.path.retries;
        attr.rnr_retry = self.path.rnr_retries;
        // At most the number of answers that the peer keeps.
        attr.max_rd_atomic = ATOMICS.min(self.context().attributes().atomics_out).min(remote.atomics_in);
        let mask = ffi::IBV_QP_SQ_PSN | ffi::IBV_QP_TIMEOUT | ffi::IBV_QP_RETRY_CNT;
        self.modify(attr, mask | ffi::IBV_QP_RNR_RETRY | ffi::IBV_QP_MAX_QP_RD_ATOMIC)
    }

    /// Ends the connection: requests in flight are flushed, no more messages of the peer are taken.
    /// Does not wait for it.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn error(&self) -> Result<(), VerbsError> {
        self.modify(blank(ffi::IBV_QPS_ERR), 0)
            .map_err(|errno| self.context().failed("ibv_modify_qp to ERR", errno))
    }

    /// Posts the requests of the chain, with one doorbell. Requests that the NIC refuses stay in
    /// the chain.
    ///
    /// # Errors
    /// [`VerbsError::Post`]: how many were taken, and the errno. `ENOMEM` says that the queue is
    /// full.
    pub fn post_send(&self, chain: &mut SendChain) -> Result<(), VerbsError> {
        // SAFETY: the context is open.
        let post = unsafe { (*self.context().raw()).ops.post_send };
        self.post("ibv_post_send", post, chain.chain())
    }

    /// Posts receives, as [`post_send`](Self::post_send).
    ///
    /// # Errors
    /// [`VerbsError::Post`].
    pub fn post_receive(&self, chain: &mut ReceiveChain) -> Result<(), VerbsError> {
        // SAFETY: the context is open.
        let post = unsafe { (*self.context().raw()).ops.post_recv };
        self.post("ibv_post_recv", post, chain.chain())
    }

    fn post<R: Request>(
        &self,
        call: &'static str,
        post: Option<unsafe extern "C" fn(*mut ibv_qp, *mut R, *mut *mut R) -> i32>,
        chain: &mut Chain<R>,
    ) -> Result<(), VerbsError> {
        let mut bad = chain.link();
        if bad.is_null() {
            return Ok(());
        }
        let first = std::mem::replace(&mut bad, ptr::null_mut());
        let answer = match post {
            // SAFETY: the queue pair lives. The chain is linked, and stays as it is while the
            // driver copies it. The memory of its pieces is registered, so the NIC may read it;
            // otherwise the NIC refuses.
            Some(post) => check_status(unsafe { post(self.raw.as_ptr(), first, &mut bad) }),
            None => Err(Errno::NOSYS.raw_os_error()),
        };
        // A driver that refuses without saying which one refuses the first.
        let refused = if answer.is_err() && bad.is_null() { first } else { bad };
        let taken = chain.settle(if answer.is_ok() { ptr::null() } else { refused });
        answer.map_err(|errno| VerbsError::Post {
            nic: self.context().name().to_owned(),
            queue_pair: self.number,
            peer: self.peer,
            call,
            taken,
            errno,
        })
    }

    /// The error of a request of this queue pair, identified by its number.
    pub fn failure(&self, operation: Operation, failed: Failed) -> VerbsError {
        VerbsError::Completion {
            nic: self.context().name().to_owned(),
            queue_pair: self.number,
            peer: self.peer,
            operation,
            status: failed.status,
            vendor: failed.vendor,
        }
    }

    /// The peer (in the world).
    pub fn peer(&self) -> u32 {
        self.peer
    }

    /// The granted limits.
    pub fn caps(&self) -> Caps {
        self.caps
    }

    fn context(&self) -> &Arc<Context> {
        self.domain.context()
    }

    fn no_route(&self, remote: Ipv6Addr, errno: i32) -> VerbsError {
        let nic = self.context().name().to_owned();
        VerbsError::NoRoute { nic, peer: self.peer, gid: self.path.gid, remote, errno }
    }

    fn modify(&self, mut attr: ibv_qp_attr, mask: i32) -> Result<(), i32> {
        let functions = self.context().functions();
        // SAFETY: the queue pair lives; the structure is as the call expects it.
        check_status(unsafe { (functions.modify_qp)(self.raw.as_ptr(), &mut attr, mask | ffi::IBV_QP_STATE) })
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: created here, and dropped once; its domain and queues are still there.
        let answer = unsafe { (self.context().functions().destroy_qp)(self.raw.as_ptr()) };
        trace_failure(self.context().name(), "ibv_destroy_qp", answer);
    }
}

impl Caps {
    /// As a driver writes them.
    pub fn granted(cap: &ibv_qp_cap) -> Self {
        Caps {
            sends: cap.max_send_wr,
            receives: cap.max_recv_wr,
            send_sges: cap.max_send_sge,
            receive_sges: cap.max_recv_sge,
            inline: cap.max_inline_data,
        }
    }
}

fn blank(state: u32) -> ibv_qp_attr {
    // SAFETY: all zero is a value of this plain structure.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.qp_state = state;
    attr
}

/// Version of the verbs lane's protocol, the description included.
const VERSION: u8 = 5;

/// Queue pair and packet numbers have so many bits.
const MASK_24: u32 = (1 << 24) - 1;

/// One end of a reliable connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The network it is on, and its partition keys.
    pub reach: Reach,
    /// The largest packet its port takes.
    pub mtu: Mtu,
    /// Atomics of its peer that it keeps answers for.
    pub atomics_in: u8,
    /// Number of the queue pair on its NIC.
    pub queue_pair: u32,
    /// Number of the first packet it sends.
    pub first_packet: u32,
    /// Address of the port within an InfiniBand subnet; 0 on Ethernet.
    pub lid: u16,
    /// Address of the port.
    pub gid: Ipv6Addr,
    /// Whether packets to it need the global header.
    pub needs_global_header: bool,
}

impl Endpoint {
    /// Bytes of a description before those of its reach.
    const FIXED: usize = 30;

    /// The description.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes =
            vec![VERSION, self.mtu.code() as u8, self.atomics_in, self.needs_global_header.into()];
        bytes.extend(self.queue_pair.to_le_bytes());
        bytes.extend(self.first_packet.to_le_bytes());
        bytes.extend(self.lid.to_le_bytes());
        bytes.extend(self.gid.octets());
        bytes.extend(self.reach.to_bytes());
        bytes
    }

    /// From the start of what rank `peer` of the world sent, and the bytes behind it.
    ///
    /// # Errors
    /// [`VerbsError::EndpointVersion`], [`VerbsError::EndpointLength`],
    /// [`VerbsError::EndpointField`].
    pub fn from_bytes(peer: u32, bytes: &[u8]) -> Result<(Self, &[u8]), VerbsError> {
        if let Some(&seen) = bytes.first().filter(|&&version| version != VERSION) {
            return Err(VerbsError::EndpointVersion { peer, seen, expected: VERSION });
        }
        let short = VerbsError::EndpointLength { peer, seen: bytes.len(), expected: Self::FIXED };
        let (fixed, rest) = bytes.split_first_chunk::<{ Self::FIXED }>().ok_or(short)?;
        let wrong = |field, value| VerbsError::EndpointField { peer, field, value };
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| fixed[at + i]));
        let number = |field, at| Some(word(at)).filter(|&n| n <= MASK_24).ok_or(wrong(field, word(at)));
        let &[_, mtu, atomics_in, flag, ..] = fixed;
        let mtu = Mtu::from_code(mtu.into()).ok_or(wrong("mtu", mtu.into()))?;
        let needs_global_header = match flag {
            0 | 1 => flag == 1,
            _ => return Err(wrong("global header", flag.into())),
        };
        let (queue_pair, first_packet) = (number("queue pair", 4)?, number("first packet number", 8)?);
        let (lid, gid) = (word(12) as u16, std::array::from_fn::<u8, 16, _>(|i| fixed[14 + i]).into());
        let (reach, rest) = Reach::from_bytes(peer, rest)?;
        let endpoint =
            Endpoint { reach, mtu, atomics_in, queue_pair, first_packet, lid, gid, needs_global_header };
        Ok((endpoint, rest))
    }

    /// A number for a first packet: not guessable, so that late packets of an older connection do
    /// not fit a new one.
    ///
    /// # Errors
    /// The system's random numbers are not to be had.
    fn random_packet() -> Result<u32, getrandom::Error> {
        Ok(getrandom::u32()? & MASK_24)
    }
}

/// Our side of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// The port's number.
    pub port: u8,
    /// Its network.
    pub link: LinkLayer,
    /// Its address within an InfiniBand subnet.
    pub lid: u16,
    /// Whether all packets from and to it need the global header.
    pub needs_global_header: bool,
    /// Place of its GID in the port's table.
    pub gid_index: u8,
    /// That GID.
    pub gid: Ipv6Addr,
    /// The largest packet; a connection uses the smaller of both ends.
    pub mtu: Mtu,
    /// The partition keys of which a connection uses one.
    pub pkeys: Pkeys,
    /// InfiniBand's service level; the priority on Ethernet.
    pub service_level: u8,
    /// Traffic class of the global header: DSCP and ECN of RoCE v2.
    pub traffic_class: u8,
    /// Time for an answer: 4.096 us * 2^timeout; 0 waits for ever.
    pub timeout: u8,
    /// How often an unanswered request is sent again, at most 7.
    pub retries: u8,
    /// How often one is sent again that met no receive; 7 is for ever.
    pub rnr_retries: u8,
}

impl Path {
    /// Whom it reaches.
    pub fn reach(&self) -> Reach {
        Reach::of(self.link, &self.pkeys)
    }

    /// Whether packets to the peer need the global header: always on Ethernet; on InfiniBand beyond
    /// the subnet, and where the port of either end requires it.
    fn is_global(&self, remote: &Endpoint) -> bool {
        let required = self.needs_global_header || remote.needs_global_header;
        self.link == LinkLayer::Ethernet || required || !same_subnet(self.gid, remote.gid)
    }

    /// The LID to which packets for the peer go: its own, or that by which routers know its switch.
    fn lid_towards(&self, remote: &Endpoint) -> u16 {
        let router = flid(remote.gid).filter(|_| !same_subnet(self.gid, remote.gid));
        router.unwrap_or(remote.lid)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    prop_compose! {
        fn any_endpoint()(
            ethernet in any::<bool>(),
            pkeys in prop::collection::vec(1..=u16::MAX >> 1, 0..4),
            mtu in prop::sample::select(&Mtu::ALL[..]),
            numbers in (any::<u8>(), 0..=MASK_24, 0..=MASK_24, any::<u16>()),
            gid in any::<u128>(),
            needs_global_header in any::<bool>(),
        ) -> Endpoint {
            let link = if ethernet { LinkLayer::Ethernet } else { LinkLayer::InfiniBand };
            let (atomics_in, queue_pair, first_packet, lid) = numbers;
            let (reach, gid) = (Reach { link, pkeys }, gid.into());
            Endpoint { reach, mtu, atomics_in, queue_pair, first_packet, lid, gid, needs_global_header }
        }
    }

    proptest! {
        #[test]
        fn a_description_reads_back_as_it_was(endpoint in any_endpoint()) {
            let bytes = endpoint.to_bytes();
            prop_assert_eq!(Endpoint::from_bytes(3, &bytes), Ok((endpoint, &[][..])));
        }

        #[test]
        fn any_bytes_are_an_endpoint_or_an_error_that_names_the_rank(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            match Endpoint::from_bytes(9, &bytes) {
                Ok((endpoint, rest)) => prop_assert_eq!([&endpoint.to_bytes(), rest].concat(), bytes),
                Err(error) => prop_assert!(error.to_string().contains("rank 9"), "{}", error),
            }
        }

        #[test]
        fn a_wrong_byte_is_never_read_as_the_same_endpoint(endpoint in any_endpoint(), at in 0..Endpoint::FIXED + 3, flip in 1..=255u8) {
            let mut bytes = endpoint.to_bytes();
            bytes[at] ^= flip;
            prop_assert_ne!(Endpoint::from_bytes(0, &bytes), Ok((endpoint, &[][..])));
        }
    }

    #[test]
    fn another_version_and_a_wrong_length_are_told_apart() {
        let mut bytes = vec![1; 50];
        let seen = Endpoint::from_bytes(7, &bytes);
        assert_eq!(seen, Err(VerbsError::EndpointVersion { peer: 7, seen: 1, expected: VERSION }));
        bytes[0] = VERSION;
        for len in [0, 1, 29] {
            let seen = Endpoint::from_bytes(7, &bytes[..len]);
            assert_eq!(seen, Err(VerbsError::EndpointLength { peer: 7, seen: len, expected: 30 }));
        }
    }
}
