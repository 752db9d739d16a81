//! NICs without hardware: a fake of libibverbs in this process, for tests.
//!
//! A [`Fabric`] is a network of NICs. Its library fills the same table as the real one, so all code
//! above is the code that runs with NICs: contexts, domains, keys with bounds and rights, queue
//! pairs and their states, completions, credit for receives, queues that are full. Writes are
//! copies, done when they are posted, or, while the fabric is [held](Fabric::hold), one at a time
//! when their sender polls: so no code can rely on instant execution.
//!
//! **Adaptive routing.** A [`Placement`] says in which order the writes of one queue pair are
//! placed. A send, an immediate and an atomic are executed only after all requests before them, and
//! completions come in order: a completion says that all writes up to it are placed. A fence flag
//! orders nothing here, because the standard has it wait for reads and atomics only. Queue pairs
//! have no order among each other: each is executed when its own sender polls, or held back until
//! the test [lets it go](Fabric::let_go). A fabric that is not held executes in the order of posts.
//!
//! ```text
//!   posted     w0  w1  w2  send  w3          InOrder    w0 w1 w2 send w3
//!              '- a run -'                   Shuffled   w2 w0 w1 send w3      by a seed
//!                                            LastFirst  w2, and w0 w1 because a send stands behind them, send w3
//! ```
//!
//! ```text
//!   table    C functions: find the fabric behind an object, translate
//!   State    objects of a kernel and its NICs, by number
//!   execute  execution of a request by a NIC
//!   Tree     a directory laid out like `/sys`, gone when dropped
//! ```
//!
//! **Addresses.** A queue pair is refused an entry of the tables of addresses and partition keys
//! that is empty, and on Ethernet a path without the global header. InfiniBand drops
//! packets without an answer: for another LID or subnet, without the global header where a port
//! requires it, and of another partition.
//!
//! Delays: a held fabric whose NICs [read late](Fabric::read_late), of which one is
//! [slower](FakeNic::idle_polls), or whose queue pairs [stagger](Fabric::stagger), and a NIC whose
//! [completions are late](Fabric::delay_completions), though all it was asked for is done.
//!
//! Faults: a NIC that falls [silent](Fabric::silence), whose peers' retries end on the test's
//! request ([`give_up`](Fabric::give_up)), a port that is [down](Fabric::port_down) until it is
//! [up](Fabric::port_up) again, a [lost queue pair](Fabric::lose_queue_pair), and a NIC that is
//! [removed](Fabric::remove).

mod execute;
mod table;

use std::collections::{BTreeMap, VecDeque};
use std::ffi::CString;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::net::Ipv6Addr;
use std::ops::{Deref, DerefMut};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::depth::{completion_queue_bytes, queue_pair_bytes};
use super::ffi::{self, ibv_qp_cap, ibv_sge, ibv_wc};
use super::library::Functions;
use super::{Access, Caps, Library, Nic, Settings, Sysfs, VerbsEnvironment};
use crate::counting::InHardware;

/// Names the seed of a run that is to be repeated.
const SEED: &str = "SIDELANE_TEST_SEED";

/// A network of NICs, each with one port that is wired, and perhaps others.
pub struct Fabric {
    state: Mutex<State>,
    devices: Vec<Device>,
    sysfs: Sysfs,
    tree: Tree,
    /// The table's functions that list this fabric's NICs.
    slot: usize,
}

/// Target of `ibv_device` pointers.
pub struct Device {
    fabric: Weak<Fabric>,
    nic: usize,
    name: CString,
}

impl Fabric {
    /// A network of NICs of these names.
    pub fn new(nics: &[&str]) -> Arc<Self> {
        let tree = Tree::new();
        let mut state = State::default();
        for (at, name) in (1u16..).zip(nics) {
            let gid: Ipv6Addr = std::net::Ipv4Addr::new(10, 0, (at >> 8) as u8, at as u8).to_ipv6_mapped();
            let mut nic = FakeNic::default();
            nic.gids.insert(1, tree.gid(name, 1, gid, "RoCE v2"));
            nic.pkeys.insert(0, tree.pkey(name, 0, u16::MAX));
            state.nics.push(nic);
        }
        Arc::new_cyclic(|fabric: &Weak<Fabric>| {
            let device = |(nic, name): (usize, &&str)| Device {
                fabric: fabric.clone(),
                nic,
                name: CString::new(*name).unwrap(),
            };
            let devices = nics.iter().enumerate().map(device).collect();
            Fabric {
                state: Mutex::new(state),
                devices,
                sysfs: tree.sysfs(),
                tree,
                slot: table::enrol(fabric),
            }
        })
    }

    /// The library that drives these NICs.
    pub fn library(&self) -> Arc<Library> {
        Library::of(self.functions())
    }

    /// Its functions, for tests that leave some out.
    pub fn functions(&self) -> Functions {
        table::functions(self.slot)
    }

    /// The kernel's files about these NICs.
    pub fn sysfs(&self) -> &Sysfs {
        &self.sysfs
    }

    /// A machine that has these NICs.
    pub fn ground(&self, settings: Settings) -> VerbsEnvironment {
        VerbsEnvironment { library: self.library(), sysfs: self.sysfs.clone(), settings }
    }

    /// A NIC, open, with these settings.
    pub fn nic(&self, name: &str, settings: &Settings) -> Nic {
        let settings = Settings { nics: vec![name.to_owned()], ..settings.clone() };
        let mut nics = Nic::open(&self.library(), &self.sysfs, &settings, 0).unwrap();
        nics.remove(0)
    }

    /// From now on a request is executed when its sender polls, one per queue pair and poll.
    pub fn hold(&self) {
        self.state().held = true;
    }

    /// While the fabric is [held](Fabric::hold), so many polls execute nothing between two that do.
    /// NICs read sources long after they were posted, unless the sender waits for that.
    pub fn read_late(&self, polls: u32) {
        self.state().idle_polls = polls;
    }

    /// From now on the writes of a queue pair are placed in a random order, another one in each
    /// run. The test's output names the seed of a repetition.
    pub fn shuffle(&self) {
        self.state().placement = Placement::Shuffled(Box::new(self.random()));
    }

    /// While the fabric is [held](Fabric::hold), a poll executes none to four requests of its queue
    /// pair, by chance, another one in each run.
    pub fn stagger(&self) {
        self.state().staggered = Some(Box::new(self.random()));
    }

    fn random(&self) -> ChaCha8Rng {
        let given = std::env::var(SEED).ok().map(|seed| seed.parse().expect("a seed is a number"));
        let seed = given.unwrap_or_else(|| RandomState::new().hash_one(self.slot));
        println!("{SEED}={seed} repeats this order");
        ChaCha8Rng::seed_from_u64(seed)
    }

    /// From now on the nth queue pair from one NIC to another executes nothing, until
    /// [`Fabric::let_go`].
    pub fn hold_back(&self, nic: &str, peer: &str, nth: usize) {
        let (at, peer) = (self.place(nic), self.place(peer));
        let mut state = self.state();
        let number = state.pair_between(at, peer, nth);
        state.pair(number).held_back = true;
    }

    /// All that was held back is executed, and no more is.
    pub fn let_go(&self) {
        let mut state = self.state();
        state.pairs.values_mut().for_each(|pair| pair.held_back = false);
        if !state.held {
            state.run_all();
        }
    }

    /// From now on each write that another one overtakes is placed as late as can be.
    pub fn last_first(&self) {
        self.state().placement = Placement::LastFirst;
    }

    /// Executes all that waits, and from now on when it is posted.
    pub fn flush(&self) {
        let mut state = self.state();
        (state.held, state.placement) = (false, Placement::InOrder);
        state.run_all();
    }

    /// From now on a NIC executes requests of its owner, and reports none of them as done.
    pub fn delay_completions(&self, nic: &str) {
        self.change(nic, |nic| nic.delayed = Some(Vec::new()));
    }

    /// The NIC reports all that it has done meanwhile, and from now on in time.
    pub fn deliver_completions(&self, nic: &str) {
        let at = self.place(nic);
        let mut state = self.state();
        let delayed = state.nics[at].delayed.take().unwrap_or_default();
        delayed.into_iter().for_each(|(queue, Ready { wc, frees })| state.complete(queue, wc, frees));
    }

    /// From now on no bytes go to or from this NIC; posted requests wait for answers.
    pub fn silence(&self, nic: &str) {
        let at = self.place(nic);
        self.state().nics[at].silent = true;
    }

    /// The retries of all requests that wait for a silent NIC have ended.
    pub fn give_up(&self) {
        self.state().give_up();
    }

    /// The port of a NIC goes down: it carries no bytes, and its owner gets an event.
    pub fn port_down(&self, nic: &str) {
        let at = self.place(nic);
        let mut state = self.state();
        (state.nics[at].silent, state.nics[at].port) = (true, ffi::IBV_PORT_DOWN);
        state.tell(at, ffi::IBV_EVENT_PORT_ERR, 1);
    }

    /// It is up again before retries end: what waits is sent again.
    pub fn port_up(&self, nic: &str) {
        let at = self.place(nic);
        let mut state = self.state();
        (state.nics[at].silent, state.nics[at].port) = (false, ffi::IBV_PORT_ACTIVE);
        state.tell(at, ffi::IBV_EVENT_PORT_ACTIVE, 1);
        if !state.held {
            state.run_all();
        }
    }

    /// A NIC reports an event, of one of its ports or queue pairs, to its owner.
    pub fn tell(&self, nic: &str, kind: u32, object: usize) {
        let at = self.place(nic);
        self.state().tell(at, kind, object);
    }

    /// A NIC finds that the other aimed outside what is registered, and tells the owner of its
    /// queue pair.
    pub fn lose_queue_pair(&self, nic: &str, peer: &str) {
        let (at, object) = (self.place(nic), self.fail_queue_pair(nic, peer, 0));
        self.state().tell(at, ffi::IBV_EVENT_QP_ACCESS_ERR, object);
    }

    /// A NIC's nth queue pair to another NIC fails, and its owner is not told yet. Returns its
    /// object.
    pub fn fail_queue_pair(&self, nic: &str, peer: &str, nth: usize) -> usize {
        let (at, peer) = (self.place(nic), self.place(peer));
        let mut state = self.state();
        let number = state.pair_between(at, peer, nth);
        state.fail(number);
        state.pair(number).object
    }

    /// Removes a NIC from the machine: its peers see it silent, its owner sees a fatal event and
    /// errors.
    pub fn remove(&self, nic: &str) {
        let at = self.place(nic);
        self.state().remove(at);
    }

    /// Changes a NIC's abilities, for objects that are opened or made later.
    pub fn change(&self, nic: &str, change: impl FnOnce(&mut FakeNic)) {
        let at = self.place(nic);
        change(&mut self.state().nics[at]);
    }

    /// Writes a file of the kernel.
    pub fn write(&self, path: &str, text: &str) {
        self.tree.write(path, text);
    }

    /// Links a file of the kernel to another.
    pub fn link(&self, path: &str, target: &str) {
        self.tree.link(path, target);
    }

    /// Puts a RoCE v2 address of a network device into a NIC's table.
    pub fn address(&self, nic: &str, index: u8, gid: &str, device: &str) {
        let gid = self.tree.gid(nic, index, gid.parse().unwrap(), "RoCE v2");
        self.tree.write(&format!("class/infiniband/{nic}/ports/1/gid_attrs/ndevs/{index}"), device);
        self.change(nic, |nic| _ = nic.gids.insert(index, gid));
    }

    /// Puts a partition key into a NIC's table.
    pub fn partition(&self, nic: &str, index: u16, key: u16) {
        let key = self.tree.pkey(nic, index, key);
        self.change(nic, |nic| _ = nic.pkeys.insert(index, key));
    }

    /// Gives a NIC so many ports, the last of them wired. The others are in one state, without
    /// addresses.
    pub fn ports(&self, nic: &str, ports: u8, others: u32) {
        self.change(nic, |nic| (nic.wired, nic.others) = (ports, others));
        let root = self.tree.0.join("class/infiniband").join(nic).join("ports");
        fs::rename(root.join("1"), root.join(ports.to_string())).unwrap();
    }

    /// Makes a NIC's port one of InfiniBand, of this LID and this GID alone.
    pub fn infiniband(&self, nic: &str, lid: u16, gid: &str) {
        self.tree.gid(nic, 1, Ipv6Addr::UNSPECIFIED, "IB/RoCE v1");
        let gid = self.tree.gid(nic, 0, gid.parse().unwrap(), "IB/RoCE v1");
        self.change(nic, |nic| {
            (nic.link, nic.lid, nic.gids) = (ffi::IBV_LINK_LAYER_INFINIBAND, lid, BTreeMap::from([(0, gid)]));
        });
    }

    /// Counts of a NIC so far.
    pub fn statistics(&self, nic: &str) -> Statistics {
        let at = self.place(nic);
        self.state().nics[at].statistics
    }

    /// What a NIC holds for its owners.
    pub fn inventory(&self, nic: &str) -> Inventory {
        let at = self.place(nic);
        let state = self.state();
        let count = |nics: &mut dyn Iterator<Item = usize>| nics.filter(|&nic| nic == at).count();
        let nic_of = |domain: u32| state.contexts[&state.domains[&domain]].nic;
        let contexts = count(&mut state.contexts.values().map(|context| context.nic));
        let channels = count(&mut state.channels.values().map(|channel| channel.nic));
        let regions = state.regions.values().filter(|region| nic_of(region.domain) == at);
        let pairs = state.pairs.values().filter(|pair| pair.nic == at);
        let queues = state.queues.values().filter(|queue| queue.nic == at);
        let page = rustix::param::page_size() as u64;
        let of_pairs: u64 = pairs.map(|pair| queue_pair_bytes(Caps::granted(&pair.cap), page)).sum();
        let of_queues: u64 = queues.map(|queue| completion_queue_bytes(queue.capacity as u64, page)).sum();
        Inventory {
            queue_bytes: of_pairs + of_queues,
            regions: regions.clone().count(),
            pinned: regions.map(|region| region.len).sum(),
            channels,
            completion_queues: count(&mut state.queues.values().map(|queue| queue.nic)),
            queue_pairs: count(&mut state.pairs.values().map(|pair| pair.nic)),
            // A context has one for commands and one for events.
            descriptors: 2 * contexts + channels,
        }
    }

    /// Access to the byte at an address, by each registration that has it.
    pub fn accesses(&self, address: usize) -> Vec<Access> {
        let state = self.state();
        let holds = |region: &&Region| (region.at..region.at + region.len as usize).contains(&address);
        let regions = state.regions.values().filter(holds);
        regions.map(|region| Access::from_bits_retain(region.access)).collect()
    }

    /// Objects that are not destroyed, and objects that were destroyed too early: both 0 at the end
    /// of a good program.
    pub fn leftovers(&self) -> (usize, usize) {
        let state = self.state();
        (state.objects(), state.too_early)
    }

    fn place(&self, nic: &str) -> usize {
        self.devices.iter().position(|device| device.name.to_bytes() == nic.as_bytes()).unwrap()
    }

    fn state(&self) -> Locked<'_> {
        let in_hardware = InHardware::begin();
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        Locked { state, _in_hardware: in_hardware }
    }
}

/// State of a fabric, for as long as a thread plays its kernel or a NIC.
struct Locked<'a> {
    state: MutexGuard<'a, State>,
    _in_hardware: InHardware,
}

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        table::leave(self.slot);
    }
}

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
    /// Queries of a port, which may take long, while the caller held the lock of a connection.
    pub locked_queries: u64,
}

/// Objects of a NIC that its owners hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inventory {
    /// Registrations: each has its keys.
    pub regions: usize,
    /// Bytes of them.
    pub pinned: u64,
    /// Bytes that the driver locks for queues, if it is mlx5.
    pub queue_bytes: u64,
    pub channels: usize,
    pub completion_queues: usize,
    pub queue_pairs: usize,
    pub descriptors: usize,
}

pub struct FakeNic {
    /// The network of its port.
    pub link: u8,
    pub lid: u16,
    /// Whether packets from and to its port need the global header.
    pub needs_global_header: bool,
    /// The table of addresses.
    pub gids: BTreeMap<u8, Ipv6Addr>,
    /// The table of partition keys.
    pub pkeys: BTreeMap<u16, u16>,
    pub silent: bool,
    /// Its own requests wait; those of its peers reach it.
    pub mute: bool,
    /// Completions that it keeps back, and their queues.
    pub delayed: Option<Vec<(u32, Ready)>>,
    pub gone: bool,
    /// The number of the wired port: the last.
    pub wired: u8,
    /// The state of that port.
    pub port: u32,
    /// The state of all others.
    pub others: u32,
    /// The code of its largest packet.
    pub mtu: u32,
    /// Bytes that may travel inside a request.
    pub inline: u32,
    pub sges: u32,
    pub atomics: bool,
    /// Its vendor, and the vendor's number of the part.
    pub vendor: (u32, u32),
    /// Bytes that its owners may lock for it.
    pub lockable: u64,
    /// Polls of it that execute nothing between two that do, while the fabric is held.
    pub idle_polls: u32,
    /// It refuses the next so many regions.
    pub refuses: u32,
    pub statistics: Statistics,
}

impl Default for FakeNic {
    /// Of RoCE, without addresses and partitions.
    fn default() -> Self {
        FakeNic {
            link: ffi::IBV_LINK_LAYER_ETHERNET,
            lid: 0,
            needs_global_header: false,
            gids: BTreeMap::new(),
            pkeys: BTreeMap::new(),
            silent: false,
            mute: false,
            delayed: None,
            gone: false,
            wired: 1,
            port: ffi::IBV_PORT_ACTIVE,
            others: ffi::IBV_PORT_DOWN,
            mtu: ffi::IBV_MTU_4096,
            inline: 64,
            sges: 8,
            atomics: true,
            vendor: (0, 0),
            lockable: u64::MAX,
            idle_polls: 0,
            refuses: 0,
            statistics: Statistics::default(),
        }
    }
}

/// In which order the writes of a queue pair are placed, up to the next request of another kind.
#[derive(Default)]
pub enum Placement {
    /// As they were posted.
    #[default]
    InOrder,
    /// Any.
    Shuffled(Box<ChaCha8Rng>),
    /// The last one that was posted, at once. The others follow when a request of another kind
    /// stands behind them, or when the fabric is [flushed](Fabric::flush).
    LastFirst,
}

#[derive(Default)]
pub struct State {
    pub nics: Vec<FakeNic>,
    pub contexts: BTreeMap<u32, Opened>,
    /// Of each domain: its context.
    pub domains: BTreeMap<u32, u32>,
    pub regions: BTreeMap<u32, Region>,
    /// By their descriptors.
    pub channels: BTreeMap<i32, Channel>,
    pub queues: BTreeMap<u32, Queue>,
    pub pairs: BTreeMap<u32, Pair>,
    pub held: bool,
    /// Polls of a held queue that execute nothing, between two that do.
    pub idle_polls: u32,
    /// How many requests a poll of a held queue executes; none: one.
    pub staggered: Option<Box<ChaCha8Rng>>,
    pub placement: Placement,
    pub too_early: usize,
    numbers: u32,
}

/// A context: its news, each a kind and the address of a queue pair.
pub struct Opened {
    pub nic: usize,
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

/// A completion channel, and the queues whose events wait in it.
pub struct Channel {
    pub nic: usize,
    pub events: VecDeque<u32>,
}

pub struct Queue {
    pub context: u32,
    pub nic: usize,
    pub capacity: usize,
    pub ready: VecDeque<Ready>,
    /// Polls since one that executed requests.
    pub polls: u32,
    /// The descriptor of its channel, if it has one.
    pub fd: Option<i32>,
    pub armed: bool,
    /// Its event waits in the channel. Until it is taken, arming has no effect.
    pub told: bool,
    /// Events that were taken and not acknowledged.
    pub unacknowledged: u32,
    /// The address of its C structure.
    pub object: usize,
}

/// A completion, and how many places of its send queue are free once it is taken.
pub struct Ready {
    pub wc: ibv_wc,
    pub frees: u32,
}

pub struct Pair {
    pub nic: usize,
    pub domain: u32,
    pub send: u32,
    pub receive: u32,
    pub cap: ibv_qp_cap,
    pub state: u32,
    pub peer: u32,
    /// None if packets get lost on the way.
    pub peer_nic: Option<usize>,
    pub pkey: u16,
    pub rnr_retries: u8,
    pub jobs: VecDeque<Job>,
    pub receives: VecDeque<(u64, Vec<ibv_sge>)>,
    /// Places of the send queue in use; and those of them that the next completion frees.
    pub used: u32,
    pub unsignaled: u32,
    /// It executes nothing until it is let go.
    pub held_back: bool,
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
    /// A write that was placed before one that was posted earlier.
    pub placed: bool,
}

impl State {
    /// A number that no object of this fabric had before.
    pub fn number(&mut self) -> u32 {
        self.numbers += 1;
        0x100 + self.numbers
    }

    pub fn objects(&self) -> usize {
        let kernel = self.contexts.len() + self.domains.len() + self.regions.len();
        kernel + self.channels.len() + self.queues.len() + self.pairs.len()
    }

    /// Destroys an object unless others use it.
    pub fn destroy<T>(&mut self, free: bool, take: impl FnOnce(&mut Self) -> Option<T>) -> i32 {
        if !free {
            self.too_early += 1;
            return rustix::io::Errno::BUSY.raw_os_error();
        }
        if take(self).is_some() { 0 } else { rustix::io::Errno::INVAL.raw_os_error() }
    }

    pub fn tell(&mut self, nic: usize, kind: u32, object: usize) {
        for context in self.contexts.values_mut().filter(|context| context.nic == nic) {
            context.news.push_back((kind, object));
            ring(context.fd);
        }
    }

    /// Puts a completion into a queue.
    pub fn complete(&mut self, handle: u32, wc: ibv_wc, frees: u32) {
        let Some(queue) = self.queues.get_mut(&handle) else { return };
        if queue.ready.len() == queue.capacity {
            let nic = queue.nic;
            return self.tell(nic, ffi::IBV_EVENT_CQ_ERR, 0);
        }
        queue.ready.push_back(Ready { wc, frees });
        if std::mem::take(&mut queue.armed)
            && let Some(fd) = queue.fd
            && let Some(channel) = self.channels.get_mut(&fd)
        {
            queue.told = true;
            channel.events.push_back(handle);
            ring(fd);
        }
    }

    /// Number of the nth queue pair from one NIC to another, by age.
    fn pair_between(&self, nic: usize, peer: usize, nth: usize) -> u32 {
        let between = |(&number, pair): (&u32, &Pair)| {
            (pair.nic == nic && pair.peer_nic == Some(peer)).then_some(number)
        };
        self.pairs.iter().filter_map(between).nth(nth).unwrap()
    }

    /// How many requests of each queue pair a poll of a queue executes, while the fabric is held.
    pub fn executes(&mut self, queue: u32) -> u32 {
        let Some(queue) = self.queues.get_mut(&queue) else { return 0 };
        let idle_polls = self.idle_polls.max(self.nics[queue.nic].idle_polls);
        queue.polls = (queue.polls + 1) % (idle_polls + 1);
        match &mut self.staggered {
            _ if queue.polls > 0 => 0,
            Some(random) => random.random_range(0..=4),
            None => 1,
        }
    }

    pub fn take(&mut self, queue: u32) -> Option<ibv_wc> {
        let queue = self.queues.get_mut(&queue)?;
        let Ready { wc, frees } = queue.ready.pop_front()?;
        self.nics[queue.nic].statistics.completions += 1;
        if let Some(pair) = self.pairs.get_mut(&wc.qp_num) {
            pair.used -= frees;
        }
        Some(wc)
    }

    pub fn remove(&mut self, nic: usize) {
        self.nics[nic].gone = true;
        self.tell(nic, ffi::IBV_EVENT_DEVICE_FATAL, 0);
        let pairs: Vec<u32> = self.pairs.iter().filter(|(_, p)| p.nic == nic).map(|(&n, _)| n).collect();
        pairs.into_iter().for_each(|pair| self.fail(pair));
    }
}

/// One event on an eventfd that counts.
fn ring(fd: i32) {
    // SAFETY: contexts and channels close their descriptor only after they are taken out of the
    // state.
    let _ = rustix::io::write(unsafe { BorrowedFd::borrow_raw(fd) }, &1u64.to_ne_bytes());
}

pub struct Tree(PathBuf);

impl Tree {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("sidelane-sysfs-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let root = std::env::temp_dir().join(name);
        fs::create_dir_all(&root).unwrap();
        Tree(root)
    }

    pub fn sysfs(&self) -> Sysfs {
        Sysfs::below(&self.0)
    }

    pub fn write(&self, path: &str, text: &str) {
        fs::write(self.place(path), format!("{text}\n")).unwrap();
    }

    /// Writes an entry of a port's table of addresses.
    pub fn gid(&self, nic: &str, index: u8, gid: Ipv6Addr, kind: &str) -> Ipv6Addr {
        let port = format!("class/infiniband/{nic}/ports/1");
        // As the kernel writes it, without compression.
        let text = gid.segments().map(|segment| format!("{segment:04x}")).join(":");
        self.write(&format!("{port}/gids/{index}"), &text);
        self.write(&format!("{port}/gid_attrs/types/{index}"), kind);
        gid
    }

    /// Writes an entry of a port's table of partition keys.
    pub fn pkey(&self, nic: &str, index: u16, key: u16) -> u16 {
        self.write(&format!("class/infiniband/{nic}/ports/1/pkeys/{index}"), &format!("{key:#06x}"));
        key
    }

    pub fn link(&self, path: &str, target: &str) {
        symlink(self.0.join(target), self.place(path)).unwrap();
    }

    fn place(&self, path: &str) -> PathBuf {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap_or(Path::new("/"))).unwrap();
        path
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
