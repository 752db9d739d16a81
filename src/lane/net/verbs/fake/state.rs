//! State of a kernel and its NICs: objects by their numbers.

use std::collections::{BTreeMap, VecDeque};
use std::net::Ipv6Addr;
use std::os::fd::BorrowedFd;

use crate::lane::net::verbs::ffi::{self, ibv_qp_cap, ibv_sge, ibv_wc};

/// Counts of a NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Requests taken by send queues.
    pub requests: u64,
    /// Posts to send queues.
    pub doorbells: u64,
    /// Receives taken.
    pub receives: u64,
    /// Completions handed out.
    pub completions: u64,
    /// Bytes that left the NIC.
    pub bytes: u64,
    /// Requests that met no receive.
    pub not_ready: u64,
}

pub struct Card {
    pub gid: Ipv6Addr,
    pub silent: bool,
    pub gone: bool,
    /// The state of its port.
    pub port: u32,
    /// The code of its largest packet.
    pub mtu: u32,
    /// Bytes that may travel inside a request.
    pub inline: u32,
    pub sges: u32,
    pub atomics: bool,
    /// It refuses the next so many regions.
    pub refuses: u32,
    pub statistics: Statistics,
}

impl Card {
    pub fn new(gid: Ipv6Addr) -> Self {
        Card {
            gid,
            silent: false,
            gone: false,
            port: ffi::IBV_PORT_ACTIVE,
            mtu: ffi::IBV_MTU_4096,
            inline: 64,
            sges: 8,
            atomics: true,
            refuses: 0,
            statistics: Statistics::default(),
        }
    }
}

#[derive(Default)]
pub struct State {
    pub cards: Vec<Card>,
    pub contexts: BTreeMap<u32, Opened>,
    /// Of each domain: its context.
    pub domains: BTreeMap<u32, u32>,
    pub regions: BTreeMap<u32, Region>,
    pub queues: BTreeMap<u32, Queue>,
    pub pairs: BTreeMap<u32, Pair>,
    pub held: bool,
    pub too_early: usize,
    numbers: u32,
}

/// A context: its news, each a kind and the address of a queue pair.
pub struct Opened {
    pub card: usize,
    pub fd: i32,
    pub news: VecDeque<(u32, usize)>,
}

pub struct Region {
    pub domain: u32,
    pub base: u64,
    pub at: usize,
    pub len: u64,
    pub access: u32,
    /// Mapped for this region alone.
    pub mapped: bool,
}

pub struct Queue {
    pub context: u32,
    pub card: usize,
    pub capacity: usize,
    pub ready: VecDeque<Ready>,
    pub fd: i32,
    pub armed: bool,
}

/// A completion, and how many places of its send queue are free once it is taken.
pub struct Ready {
    pub wc: ibv_wc,
    pub frees: u32,
}

pub struct Pair {
    pub card: usize,
    pub domain: u32,
    pub send: u32,
    pub receive: u32,
    pub cap: ibv_qp_cap,
    pub state: u32,
    pub partner: u32,
    pub partner_card: usize,
    pub rnr_retries: u8,
    pub jobs: VecDeque<Job>,
    pub receives: VecDeque<(u64, Vec<ibv_sge>)>,
    /// Places of the send queue in use; and those of them that the next completion frees.
    pub used: u32,
    pub unsignalled: u32,
    /// The address of its C structure, for events.
    pub object: usize,
}

/// A request to a send queue.
pub struct Job {
    pub wr_id: u64,
    pub opcode: u32,
    pub flags: u32,
    pub immediate: u32,
    pub addr: u64,
    pub rkey: u32,
    pub add: u64,
    pub pieces: Vec<ibv_sge>,
    pub inline: Option<Vec<u8>>,
    /// It met no receive and was counted.
    pub not_ready: bool,
}

impl State {
    /// A number that no object of this fabric had before.
    pub fn number(&mut self) -> u32 {
        self.numbers += 1;
        0x100 + self.numbers
    }

    pub fn objects(&self) -> usize {
        let kernel = self.contexts.len() + self.domains.len() + self.regions.len();
        kernel + self.queues.len() + self.pairs.len()
    }

    /// Destroys an object unless others use it.
    pub fn destroy<T>(&mut self, free: bool, take: impl FnOnce(&mut Self) -> Option<T>) -> i32 {
        if !free {
            self.too_early += 1;
            return rustix::io::Errno::BUSY.raw_os_error();
        }
        if take(self).is_some() { 0 } else { rustix::io::Errno::INVAL.raw_os_error() }
    }

    pub fn tell(&mut self, card: usize, kind: u32, object: usize) {
        for context in self.contexts.values_mut().filter(|context| context.card == card) {
            context.news.push_back((kind, object));
            ring(context.fd);
        }
    }

    /// Puts a completion into a queue.
    pub fn complete(&mut self, queue: u32, wc: ibv_wc, frees: u32) {
        let Some(queue) = self.queues.get_mut(&queue) else { return };
        if queue.ready.len() == queue.capacity {
            let card = queue.card;
            return self.tell(card, ffi::IBV_EVENT_CQ_ERR, 0);
        }
        queue.ready.push_back(Ready { wc, frees });
        if std::mem::take(&mut queue.armed) {
            ring(queue.fd);
        }
    }

    pub fn take(&mut self, queue: u32) -> Option<ibv_wc> {
        let queue = self.queues.get_mut(&queue)?;
        let Ready { wc, frees } = queue.ready.pop_front()?;
        self.cards[queue.card].statistics.completions += 1;
        if let Some(pair) = self.pairs.get_mut(&wc.qp_num) {
            pair.used -= frees;
        }
        Some(wc)
    }

    pub fn remove(&mut self, card: usize) {
        self.cards[card].gone = true;
        self.tell(card, ffi::IBV_EVENT_DEVICE_FATAL, 0);
        let pairs: Vec<u32> = self.pairs.iter().filter(|(_, p)| p.card == card).map(|(&n, _)| n).collect();
        pairs.into_iter().for_each(|pair| self.fail(pair));
    }
}

/// One event on an eventfd that counts.
fn ring(fd: i32) {
    // SAFETY: contexts and channels close their descriptor only after they are taken out of the
    // state.
    let _ = rustix::io::write(unsafe { BorrowedFd::borrow_raw(fd) }, &1u64.to_ne_bytes());
}
