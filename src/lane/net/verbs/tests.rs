//! The typed API over fake NICs (`fake`): NICs that are present, missing or chosen, requests that
//! succeed, and requests that fail.

mod addresses;
mod scale;
mod striped;
mod wakes;

use std::os::fd::AsFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use sidelane_core::nic_choice::LinkLayer;

use super::events::News;
use super::fake::{Fabric, Tree};
use super::library::Functions;
use super::*;
use crate::error::{CompletionStatus, Operation, VerbsError};
use crate::lane::net::{NetTransport, Region, Regions};
use crate::memory::{PeerMapping, Segment};
use crate::topology::NodeMap;

/// Memory that NICs may write: read by words.
struct Memory(Box<[AtomicU64]>);

impl Memory {
    fn new(words: usize) -> Self {
        Memory((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    fn at(&self) -> NonNull<u8> {
        NonNull::from(&self.0[..]).cast()
    }

    fn fill(&self, at: usize, words: &[u64]) {
        self.0[at..].iter().zip(words).for_each(|(to, &word)| to.store(word, Ordering::Relaxed));
    }

    fn words(&self) -> Vec<u64> {
        self.0.iter().map(|word| word.load(Ordering::Acquire)).collect()
    }
}

/// One rank with one NIC, one queue pair and some registered memory.
struct End {
    pair: QueuePair,
    queue: Arc<CompletionQueue>,
    channel: Arc<CompletionChannel>,
    region: MemoryRegion,
    domain: Arc<ProtectionDomain>,
    nic: Nic,
    memory: Memory,
}

const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_ATOMIC);
const CAPS: Caps = Caps { sends: 16, receives: 8, send_sges: 4, receive_sges: 2, inline: 64 };
const CHAIN: ChainCaps = ChainCaps { requests: 8, sges: 4, inline: 64 };
const WORDS: usize = 64;

impl End {
    fn new(fabric: &Arc<Fabric>, name: &str, peer: u32, settings: &Settings, caps: Caps) -> Self {
        let nic = fabric.nic(name, settings);
        let domain = ProtectionDomain::create(&nic.context).unwrap();
        let channel = CompletionChannel::create(&nic.context).unwrap();
        let queue = CompletionQueue::create(&nic.context, 64, Some(&channel)).unwrap();
        let memory = Memory::new(WORDS);
        // SAFETY: the memory is dropped after the region, and looked at through atomics alone.
        let region = unsafe { MemoryRegion::register(&domain, memory.at(), WORDS * 8, ALL) }.unwrap();
        let queues = Queues { send: &queue, receive: &queue };
        let pair = QueuePair::create(&domain, queues, caps, &nic.path, peer).unwrap();
        End { pair, queue, channel, region, domain, nic, memory }
    }

    /// `len` words at word `at`, for a request of this rank.
    fn words(&self, at: u64, len: u32) -> Sge {
        self.region.sge(at * 8, len * 8).unwrap()
    }

    /// Word `at`, for a request of the peer.
    fn place(&self, at: u64) -> Remote {
        Remote { addr: self.region.base() + at * 8, rkey: self.region.rkey() }
    }

    /// All completions there are: number and outcome.
    fn poll(&self) -> Vec<(u64, Result<Done, Failed>)> {
        let (mut places, mut all) = ([Completion::EMPTY; 4], Vec::new());
        loop {
            let some = self.queue.poll(&mut places).unwrap();
            assert!(some.iter().all(|one| one.queue_pair() == self.pair.endpoint().queue_pair));
            all.extend(some.iter().map(|one| (one.wr_id(), one.outcome())));
            if some.is_empty() {
                return all;
            }
        }
    }
}

/// Ranks 0 and 1, connected over NICs `a` and `b`.
fn connected(fabric: &Arc<Fabric>, settings: &Settings, caps: Caps) -> (End, End) {
    let (a, b) = (End::new(fabric, "a", 1, settings, caps), End::new(fabric, "b", 0, settings, caps));
    let across = |from: &End, peer| Endpoint::from_bytes(peer, &from.pair.endpoint().to_bytes()).unwrap().0;
    a.pair.connect(&across(&b, 1)).unwrap();
    b.pair.connect(&across(&a, 0)).unwrap();
    (a, b)
}

fn two() -> (Arc<Fabric>, End, End) {
    let fabric = Fabric::new(&["a", "b"]);
    let (a, b) = connected(&fabric, &Settings::default(), CAPS);
    (fabric, a, b)
}

fn done(kind: Kind) -> Result<Done, Failed> {
    Ok(Done { kind, bytes: 0, immediate: None })
}

fn opened(fabric: &Arc<Fabric>, settings: &Settings, nth: u32) -> Result<Vec<String>, VerbsError> {
    let nics = Nic::open(&fabric.library(), fabric.sysfs(), settings, nth)?;
    Ok(nics.iter().map(|nic| nic.context.name().to_owned()).collect())
}

fn naming(nics: &[&str]) -> Settings {
    Settings { nics: nics.iter().map(|&nic| nic.to_owned()).collect(), ..Settings::default() }
}

#[test]
fn missing_or_foreign_verbs_library_is_error_that_says_so() {
    let missing = Library::load(Some(Path::new("/nowhere/libibverbs.so.1"))).unwrap_err();
    assert!(
        matches!(&missing, VerbsError::NoLibrary { library, .. } if library == "/nowhere/libibverbs.so.1")
    );
    assert!(missing.to_string().contains("cannot open shared object file"), "{missing}");
    assert_eq!(missing.to_string().matches("libibverbs.so.1").count(), 1, "named once: {missing}");
    assert!(missing.to_string().contains("SIDELANE_IBVERBS_LIBRARY"), "{missing}");
    let other = Library::load(Some(Path::new("libc.so.6"))).unwrap_err();
    let expected = VerbsError::MissingSymbol { library: "libc.so.6".into(), symbol: "ibv_get_device_list" };
    assert_eq!(other, expected);
}

#[test]
fn the_system_s_library_has_every_symbol_and_lists_its_nics() {
    match Library::load(None) {
        Err(VerbsError::NoLibrary { reason, .. }) => eprintln!("skipped: no libibverbs here: {reason}"),
        library => match Context::names(&library.unwrap()) {
            Ok(names) => assert!(!names.is_empty()),
            Err(error) => assert_eq!(error, VerbsError::NoNic),
        },
    }
}

#[test]
fn an_old_library_refuses_what_it_does_not_know() {
    let fabric = Fabric::new(&["a"]);
    let functions = Functions { reg_mr_iova2: None, reg_dmabuf_mr: None, ..fabric.functions() };
    let context = Context::open(&Library::of(functions), "a").unwrap();
    assert!(!MemoryRegion::can_relax(&context));
    let domain = ProtectionDomain::create(&context).unwrap();
    let memory = Memory::new(1);
    // SAFETY: the memory is dropped after the region, which is not made.
    let error = unsafe { MemoryRegion::register(&domain, memory.at(), 8, ALL | Access::RELAXED) };
    assert!(matches!(error.err(), Some(VerbsError::TooOld { symbol: "ibv_reg_mr_iova2", .. })));
    let file = std::fs::File::open("/dev/null").unwrap();
    let fd = std::os::fd::AsFd::as_fd(&file);
    // SAFETY: no region is made.
    let error = unsafe { MemoryRegion::register_dmabuf(&domain, fd, 0, 8, 0, ALL) };
    assert!(matches!(error.err(), Some(VerbsError::TooOld { symbol: "ibv_reg_dmabuf_mr", .. })));
    // SAFETY: the memory is dropped after the region.
    let region = unsafe { MemoryRegion::register(&domain, memory.at(), 8, ALL) };
    assert_eq!(region.unwrap().len(), 8);
}

#[test]
fn relaxed_memory_is_registered_where_the_library_knows_how() {
    let fabric = Fabric::new(&["a"]);
    let context = Context::open(&fabric.library(), "a").unwrap();
    assert!(MemoryRegion::can_relax(&context));
    let (domain, memory) = (ProtectionDomain::create(&context).unwrap(), Memory::new(1));
    // SAFETY: the memory is dropped after the region.
    let region = unsafe { MemoryRegion::register(&domain, memory.at(), 8, ALL | Access::RELAXED) };
    assert_eq!(region.unwrap().base(), memory.at().addr().get() as u64);
}

#[test]
fn a_machine_without_nics_says_so() {
    let fabric = Fabric::new(&[]);
    assert_eq!(opened(&fabric, &Settings::default(), 0), Err(VerbsError::NoNic));
    let missing = VerbsError::NoSuchNic { nic: "c".into(), present: vec!["a".into(), "b".into()] };
    let fabric = Fabric::new(&["a", "b"]);
    assert_eq!(opened(&fabric, &naming(&["b", "c"]), 0), Err(missing.clone()));
    assert_eq!(Context::open(&fabric.library(), "c").err(), Some(missing));
}

#[test]
fn ranks_take_turns_and_nics_that_are_down_are_left_out() {
    let fabric = Fabric::new(&["a", "b", "c"]);
    let seen = |nth| opened(&fabric, &Settings::default(), nth).unwrap();
    assert_eq!([0, 1, 2, 3].map(seen), [["a"], ["b"], ["c"], ["a"]]);
    fabric.change("b", |nic| nic.port = 1);
    assert_eq!([0, 1, 2].map(seen), [["a"], ["c"], ["a"]]);
    // One that was asked for is not left out.
    let down = VerbsError::PortDown { nic: "b".into(), port: 1, state: "down" };
    assert_eq!(opened(&fabric, &naming(&["a", "b"]), 0), Err(down.clone()));
    assert_eq!(opened(&fabric, &naming(&["c", "a"]), 7).unwrap(), ["c", "a"]);
    fabric.remove("a");
    fabric.change("c", |nic| nic.port = 2);
    // If none is usable, each has its reason; one that a setting leaves out among them.
    let still = VerbsError::PortDown { nic: "c".into(), port: 1, state: "initializing" };
    let refused = |refused: [&VerbsError; 2]| {
        Err(VerbsError::NoUsableNic { refused: refused.map(VerbsError::clone).to_vec() })
    };
    assert_eq!(opened(&fabric, &Settings::default(), 0), refused([&down, &still]));
    fabric.change("c", |nic| nic.port = 4);
    let elsewhere = Settings { subnets: vec!["10.9.0.0/16".parse().unwrap()], ..Settings::default() };
    let outside = VerbsError::NoGidInSubnets { nic: "c".into(), port: 1 };
    assert_eq!(opened(&fabric, &elsewhere, 0), refused([&down, &outside]));
}

#[test]
fn the_fastest_usable_port_of_a_nic_is_used_and_then_the_first() {
    let fabric = Fabric::new(&["a", "b"]);
    // The first port carries traffic, but has no address.
    fabric.ports("a", 2, 4);
    let (a, b) = connected(&fabric, &Settings::default(), CAPS);
    assert_eq!((a.nic.path.port, b.nic.path.port), (2, 1));
    a.memory.fill(0, &[7]);
    write(&a, b.place(0));
    assert_eq!(b.memory.words()[0], 7);
    let first = Settings { port: Some(1), ..naming(&["a"]) };
    assert_eq!(opened(&fabric, &first, 0), Err(VerbsError::NoGid { nic: "a".into(), port: 1 }));
    // With an address, it is as good; and worse, if the other is faster.
    let port = |settings: &Settings| fabric.nic("a", settings).path.port;
    fabric.write("class/infiniband/a/ports/1/gids/1", "fe80::1");
    fabric.write("class/infiniband/a/ports/1/gid_attrs/types/1", "RoCE v2");
    assert_eq!(port(&Settings::default()), 1);
    fabric.write("class/infiniband/a/ports/1/rate", "25 Gb/sec (1X EDR)");
    fabric.write("class/infiniband/a/ports/2/rate", "100 Gb/sec (4X EDR)");
    assert_eq!((port(&Settings::default()), port(&first)), (2, 1));
    fabric.change("a", |nic| (nic.port, nic.others) = (1, 2));
    let down = |port, state| VerbsError::PortDown { nic: "a".into(), port, state };
    let refused = vec![down(1, "initializing"), down(2, "down")];
    assert_eq!(opened(&fabric, &naming(&["a"]), 0), Err(VerbsError::NoUsableNic { refused }));
}

#[test]
fn a_nic_of_another_network_is_refused_by_its_name() {
    let fabric = Fabric::new(&["a", "b"]);
    // As the kernel describes iWARP: Ethernet, and its type of node.
    fabric.write("class/infiniband/a/node_type", "4: RNIC");
    fabric.write("class/infiniband/b/node_type", "1: CA");
    assert_eq!(opened(&fabric, &Settings::default(), 0).unwrap(), ["b"]);
    let refused = opened(&fabric, &naming(&["a"]), 0).unwrap_err();
    assert!(refused.to_string().starts_with("NIC a speaks iWARP:"), "{refused}");
    fabric.change("b", |nic| nic.link = 0);
    let unknown = VerbsError::OtherNetwork { nic: "b".into(), network: "an unknown network" };
    assert_eq!(opened(&fabric, &naming(&["b"]), 0), Err(unknown));
}

#[test]
fn settings_of_a_nic_are_used_or_refused() {
    let fabric = Fabric::new(&["a"]);
    let refused = |settings: Settings| opened(&fabric, &settings, 0).unwrap_err();
    let no_port = VerbsError::NoSuchPort { nic: "a".into(), port: 2, ports: 1 };
    assert_eq!(refused(Settings { port: Some(2), ..naming(&["a"]) }), no_port);
    let no_gid = VerbsError::NoSuchGid { nic: "a".into(), port: 1, index: 9 };
    assert_eq!(refused(Settings { gid_index: Some(9), ..Settings::default() }), no_gid);
    let asked = Settings { mtu: Some(Mtu::B1024), timeout: 18, traffic_class: 106, ..Settings::default() };
    let path = fabric.nic("a", &asked).path;
    assert_eq!((path.mtu, path.timeout, path.traffic_class, path.gid_index), (Mtu::B1024, 18, 106, 1));
    fabric.change("a", |nic| nic.mtu = 3);
    let too_large = VerbsError::MtuTooLarge { nic: "a".into(), port: 1, asked: 4096, active: 1024 };
    assert_eq!(refused(Settings { mtu: Some(Mtu::B4096), ..Settings::default() }), too_large);
    let tree = Tree::new();
    let none = Nic::open(&fabric.library(), &tree.sysfs(), &Settings::default(), 0).err();
    assert_eq!(none, Some(VerbsError::NoGid { nic: "a".into(), port: 1 }));
}

#[test]
fn chain_rings_one_doorbell_and_completes_signaled_ones_only() {
    let (fabric, a, b) = two();
    a.memory.fill(0, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let mut chain = SendChain::new(CHAIN);
    chain.write(1, [a.words(4, 2), a.words(0, 1)], b.place(10), Flags::empty()).unwrap();
    chain.write(2, [a.words(7, 1)], b.place(20), Flags::empty()).unwrap();
    chain.write(3, [a.words(1, 2)], b.place(30), Flags::SIGNALED).unwrap();
    a.pair.post_send(&mut chain).unwrap();
    assert_eq!(chain.fill(), (0, 8));
    assert_eq!(a.poll(), [(3, done(Kind::Write))]);
    let mut expected = vec![0; WORDS];
    expected[10..13].copy_from_slice(&[5, 6, 1]);
    expected[20] = 8;
    expected[30..32].copy_from_slice(&[2, 3]);
    assert_eq!(b.memory.words(), expected);
    let seen = fabric.statistics("a");
    assert_eq!((seen.requests, seen.doorbells, seen.completions, seen.bytes), (3, 1, 1, 48));
    assert_eq!(fabric.statistics("b"), Default::default());
}

#[test]
fn held_fabric_moves_nothing_before_sender_polls() {
    let (fabric, a, b) = two();
    fabric.hold();
    let mut chain = SendChain::new(CHAIN);
    for at in 0..3 {
        chain.write(at, [a.words(0, 1)], b.place(at), Flags::SIGNALED).unwrap();
    }
    a.pair.post_send(&mut chain).unwrap();
    // A request carries the bytes that lie there when it is executed.
    let mut places = [Completion::EMPTY; 4];
    for step in 1..3 {
        a.memory.fill(0, &[step]);
        assert_eq!(b.memory.words()[step as usize - 1], 0);
        assert_eq!(a.queue.poll(&mut places).unwrap().len(), 1);
    }
    a.memory.fill(0, &[3]);
    fabric.flush();
    assert_eq!(b.memory.words()[..4], [1, 2, 3, 0]);
    assert_eq!(a.poll(), [(2, done(Kind::Write))]);
}

#[test]
fn write_with_immediate_takes_receive_and_delivers_number() {
    let (fabric, a, b) = two();
    a.memory.fill(0, &[7]);
    let mut chain = SendChain::new(CHAIN);
    chain.write_immediate(1, [a.words(0, 1)], b.place(5), 0xdead_beef, Flags::SIGNALED).unwrap();
    chain.write_immediate(2, [], b.place(0), 3, Flags::SIGNALED).unwrap();
    a.pair.post_send(&mut chain).unwrap();
    // No receive is there: it waits, and nothing has landed.
    assert_eq!((a.poll(), b.memory.words()[5], fabric.statistics("a").not_ready), (vec![], 0, 1));
    let mut receives = ReceiveChain::new(2, 0);
    receives.receive(90, []).unwrap();
    receives.receive(91, []).unwrap();
    b.pair.post_receive(&mut receives).unwrap();
    assert_eq!(a.poll(), [(1, done(Kind::Write)), (2, done(Kind::Write))]);
    let got = |bytes, immediate| Ok(Done { kind: Kind::ReceiveImmediate, bytes, immediate: Some(immediate) });
    assert_eq!(b.poll(), [(90, got(8, 0xdead_beef)), (91, got(0, 3))]);
    assert_eq!(b.memory.words()[5], 7);
    assert_eq!(fabric.statistics("b").receives, 2);
}

#[test]
fn fetch_add_adds_and_tells_what_was_there() {
    let (_fabric, a, b) = two();
    b.memory.fill(3, &[40]);
    let mut chain = SendChain::new(CHAIN);
    chain.fetch_add(1, a.words(0, 1), b.place(3), 2, Flags::SIGNALED).unwrap();
    chain.fetch_add(2, a.words(1, 1), b.place(3), u64::MAX, Flags::SIGNALED | Flags::FENCE).unwrap();
    a.pair.post_send(&mut chain).unwrap();
    assert_eq!(a.poll(), [(1, done(Kind::FetchAdd)), (2, done(Kind::FetchAdd))]);
    assert_eq!((a.memory.words()[..2].to_vec(), b.memory.words()[3]), (vec![40, 42], 41));
}

#[test]
fn a_send_fills_the_pieces_of_a_receive() {
    let (_fabric, a, b) = two();
    a.memory.fill(0, &[1, 2, 3]);
    let mut receives = ReceiveChain::new(1, 2);
    receives.receive(9, [b.words(8, 1), b.words(20, 4)]).unwrap();
    b.pair.post_receive(&mut receives).unwrap();
    let mut chain = SendChain::new(CHAIN);
    chain.send(1, [a.words(0, 3)], Flags::SIGNALED).unwrap();
    a.pair.post_send(&mut chain).unwrap();
    assert_eq!(a.poll(), [(1, done(Kind::Send))]);
    assert_eq!(b.poll(), [(9, Ok(Done { kind: Kind::Receive, bytes: 24, immediate: None }))]);
    let seen = b.memory.words();
    assert_eq!((seen[8], &seen[20..23]), (1, &[2, 3, 0][..]));
}

#[test]
fn inline_bytes_travel_inside_the_request() {
    let (fabric, a, b) = two();
    assert_eq!(a.pair.caps().inline, 64);
    fabric.hold();
    let mut chain = SendChain::new(CHAIN);
    for (at, value) in [(0, 5u64), (1, 6)] {
        chain.write_inline(at, &value.to_ne_bytes(), b.place(at), Flags::empty()).unwrap();
    }
    // A chain may be moved, and filled again as soon as it is posted.
    let mut chain = Box::new(chain);
    a.pair.post_send(&mut chain).unwrap();
    chain.write_inline(2, &7u64.to_ne_bytes(), b.place(2), Flags::SIGNALED).unwrap();
    a.pair.post_send(&mut chain).unwrap();
    fabric.flush();
    assert_eq!(a.poll(), [(2, done(Kind::Write))]);
    assert_eq!(b.memory.words()[..4], [5, 6, 7, 0]);
}

#[test]
fn a_nic_without_inline_grants_none_and_all_else() {
    let fabric = Fabric::new(&["a", "b"]);
    fabric.change("a", |nic| nic.inline = 0);
    let (a, b) = connected(&fabric, &Settings::default(), CAPS);
    assert_eq!(a.pair.caps(), Caps { inline: 0, ..CAPS });
    assert_eq!(b.pair.caps(), CAPS);
}

#[test]
fn a_chain_refuses_what_it_was_not_made_for_and_keeps_the_rest() {
    let (_fabric, a, b) = two();
    let mut chain = SendChain::new(ChainCaps { requests: 1, sges: 2, inline: 8 });
    let limit = |what, asked, limit| Err(VerbsError::ChainLimit { what, asked, limit });
    let three = [a.words(0, 1); 3];
    let pieces = "pieces of memory in a request";
    assert_eq!(chain.write(1, three, b.place(0), Flags::empty()), limit(pieces, 3, 2));
    assert_eq!(chain.write_inline(1, &[0; 9], b.place(0), Flags::empty()), limit("inline bytes", 9, 8));
    chain.write(1, [a.words(0, 1)], b.place(0), Flags::SIGNALED).unwrap();
    assert_eq!(chain.write(2, [], b.place(0), Flags::empty()), limit("requests", 2, 1));
    a.pair.post_send(&mut chain).unwrap();
    assert_eq!(a.poll(), [(1, done(Kind::Write))]);
    let outside = VerbsError::OutOfRegion { offset: 8, len: 512, size: 512 };
    assert_eq!(a.region.sge(8, 512).err(), Some(outside));
    assert!(a.region.sge(u64::MAX, 8).is_err());
}

#[test]
fn waiter_is_woken_once_by_a_completion_after_arming() {
    let (_fabric, a, b) = two();
    let readable = || {
        let mut fds = [PollFd::new(&*a.channel, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    };
    let mut chain = SendChain::new(CHAIN);
    let mut write = || {
        chain.write(1, [a.words(0, 1)], b.place(0), Flags::SIGNALED).unwrap();
        a.pair.post_send(&mut chain).unwrap();
    };
    write();
    a.queue.arm().unwrap();
    assert!(!readable() && a.channel.take_events() == Ok(0));
    write();
    write();
    assert!(readable());
    assert_eq!([(); 2].map(|()| a.channel.take_events()), [Ok(1), Ok(0)]);
    assert!(!readable());
    assert_eq!(a.poll().len(), 3);
}

/// Rank 0 writes odd numbers, rank 1 even ones, each when the other's has come; the last number
/// that it saw.
fn play(fabric: &Arc<Fabric>, rank: u64, to: &Sender<PeerAddress>, from: &Receiver<PeerAddress>) -> u64 {
    let (nic, peer) = [("a", 1), ("b", 0)][rank as usize];
    let end = End::new(fabric, nic, peer, &Settings::default(), CAPS);
    to.send((end.pair.endpoint().to_bytes(), end.place(0))).unwrap();
    let (bytes, there) = from.recv().unwrap();
    end.pair.connect(&Endpoint::from_bytes(peer, &bytes).unwrap().0).unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    let await_word = |least: u64| {
        while end.memory.words()[0] < least {
            assert!(Instant::now() < until, "awaiting {least}");
            thread::yield_now();
        }
    };
    let mut chain = SendChain::new(CHAIN);
    for round in 0..ROUNDS {
        await_word(2 * round + rank);
        end.memory.fill(1, &[2 * round + rank + 1]);
        chain.write(round, [end.words(1, 1)], there, Flags::SIGNALED).unwrap();
        end.pair.post_send(&mut chain).unwrap();
        while end.poll() != [(round, done(Kind::Write))] {
            assert!(Instant::now() < until, "round {round}");
        }
    }
    // The peer may still write: its last word is awaited before this memory is freed.
    await_word(2 * ROUNDS - rank);
    end.memory.words()[0]
}

const HEAP: u64 = 4096;

/// Ranks 0 and 1 of a world in which each rank is a node, with NICs `a` and `b` and heaps of
/// [`HEAP`] bytes. No thread serves their connections.
pub(super) fn ranks(fabric: &Arc<Fabric>, world: u32, settings: &Settings) -> [VerbsTransport; 2] {
    let nodes = NodeMap::from_labels(&(0..world).collect::<Vec<_>>());
    let segments = [0, 1].map(|_| Segment::create("sidelane-test", HEAP).unwrap());
    let mapped = Arc::new(PeerMapping::new(&segments.each_ref().map(Some)).unwrap());
    [(0, "a"), (1, "b")].map(|(rank, nic)| {
        let heap = Region { mapped: Arc::clone(&mapped), member: rank };
        let regions = Arc::new(Regions::default());
        regions.add(heap.clone());
        let setup = Setup {
            rank,
            nth: 0,
            nodes: nodes.clone(),
            strict: 64,
            regions,
            health: Arc::default(),
            wake_fd: Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap()),
            forecast: false,
        };
        let settings = Settings { nics: vec![nic.to_owned()], ..settings.clone() };
        let transport = VerbsTransport::open(&fabric.ground(settings), setup).unwrap();
        transport.register(0, &heap).unwrap();
        transport
    })
}

type PeerAddress = (Vec<u8>, Remote);
const ROUNDS: u64 = 200;

#[test]
fn ranks_in_threads_meet_and_exchange_through_nics() {
    let fabric = Fabric::new(&["a", "b"]);
    let ((to_a, from_b), (to_b, from_a)) = (channel(), channel());
    let last = thread::scope(|scope| {
        let fabric = &fabric;
        let a = scope.spawn(move || play(fabric, 0, &to_b, &from_b));
        let b = scope.spawn(move || play(fabric, 1, &to_a, &from_a));
        (a.join().unwrap(), b.join().unwrap())
    });
    assert_eq!(last, (2 * ROUNDS, 2 * ROUNDS - 1));
    assert_eq!(fabric.leftovers(), (0, 0));
}

fn failed(status: CompletionStatus, code: u32) -> Result<Done, Failed> {
    Err(Failed { status, vendor: 0x80 + code })
}

fn flushed() -> Result<Done, Failed> {
    failed(CompletionStatus::Flushed, 5)
}

/// Posts one write, and says how it ends.
fn write(from: &End, to: Remote) -> Vec<(u64, Result<Done, Failed>)> {
    let mut chain = SendChain::new(CHAIN);
    chain.write(1, [from.words(0, 1)], to, Flags::empty()).unwrap();
    from.pair.post_send(&mut chain).unwrap();
    from.poll()
}

#[test]
fn a_write_outside_what_is_registered_fails_and_lands_nowhere() {
    type Aim = fn(&End) -> Remote;
    let beyond: Aim = |b| b.place(WORDS as u64);
    let across: Aim = |b| Remote { addr: b.place(0).addr - 4, ..b.place(0) };
    let stale: Aim = |b| Remote { rkey: b.place(0).rkey + 1000, ..b.place(0) };
    let local_key: Aim = |b| {
        // SAFETY: the memory is dropped after the region.
        let other =
            unsafe { MemoryRegion::register(&b.domain, b.memory.at(), 64, Access::LOCAL_WRITE).unwrap() };
        Remote { addr: other.base(), rkey: other.rkey() }
    };
    for aim in [beyond, across, stale, local_key] {
        let (_fabric, a, b) = two();
        a.memory.fill(0, &[7]);
        assert_eq!(write(&a, aim(&b)), [(1, failed(CompletionStatus::RemoteAccess, 10))]);
        assert_eq!(b.memory.words(), vec![0; WORDS]);
        // The peer gets the error, and both ends are done: later requests are flushed.
        let number = b.pair.endpoint().queue_pair;
        let lost = News::QueuePair(number, "the peer aimed outside what is registered");
        assert_eq!((b.nic.context.news(), b.nic.context.news()), (Ok(Some(lost)), Ok(None)));
        assert_eq!(write(&a, b.place(0)), [(1, flushed())]);
        assert_eq!(write(&b, a.place(0)), [(1, flushed())]);
    }
}

#[test]
fn failure_follows_late_completions_of_its_queue_pair() {
    let (fabric, a, b) = two();
    fabric.delay_completions("a");
    let mut chain = SendChain::new(CHAIN);
    let stale = Remote { rkey: b.place(0).rkey + 1000, ..b.place(0) };
    for (number, to) in [(1, b.place(0)), (2, stale), (3, b.place(1))] {
        chain.write(number, [a.words(0, 1)], to, Flags::SIGNALED).unwrap();
    }
    a.pair.post_send(&mut chain).unwrap();
    assert_eq!(a.poll(), []);
    fabric.deliver_completions("a");
    let refused = failed(CompletionStatus::RemoteAccess, 10);
    assert_eq!(a.poll(), [(1, done(Kind::Write)), (2, refused), (3, flushed())]);
}

#[test]
fn a_source_that_is_not_of_this_nic_is_refused() {
    let (_fabric, a, b) = two();
    let mut chain = SendChain::new(CHAIN);
    chain.write(1, [b.words(0, 1)], b.place(0), Flags::empty()).unwrap();
    a.pair.post_send(&mut chain).unwrap();
    assert_eq!(a.poll(), [(1, failed(CompletionStatus::LocalProtection, 4))]);
}

#[test]
fn a_failed_request_is_named_by_its_number_alone() {
    let (_fabric, a, b) = two();
    let stale = Remote { rkey: 1, ..b.place(0) };
    let (_, outcome) = write(&a, stale).remove(0);
    let error = a.pair.failure(Operation::Write, outcome.unwrap_err());
    let expected = VerbsError::Completion {
        nic: "a".into(),
        queue_pair: a.pair.endpoint().queue_pair,
        peer: 1,
        operation: Operation::Write,
        status: CompletionStatus::RemoteAccess,
        vendor: 0x8a,
    };
    assert_eq!(error, expected);
    let text = error.to_string();
    for part in ["NIC a", "rank 1", "RDMA write failed", "remote access error", "0x8a"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_full_queue_refuses_and_the_chain_keeps_what_was_refused() {
    let fabric = Fabric::new(&["a", "b"]);
    let (a, b) = connected(&fabric, &Settings::default(), Caps { sends: 3, ..CAPS });
    let mut chain = SendChain::new(CHAIN);
    for at in 0..5 {
        a.memory.fill(at as usize, &[at + 1]);
        chain.write(at, [a.words(at, 1)], b.place(at), Flags::SIGNALED).unwrap();
    }
    let full = |taken| VerbsError::Post {
        nic: "a".into(),
        queue_pair: a.pair.endpoint().queue_pair,
        peer: 1,
        call: "ibv_post_send",
        taken,
        errno: Errno::NOMEM.raw_os_error(),
    };
    assert_eq!(a.pair.post_send(&mut chain), Err(full(3)));
    assert_eq!(chain.fill(), (2, 3));
    assert_eq!(a.pair.post_send(&mut chain), Err(full(0)));
    assert!(full(0).to_string().contains("the queue is full"));
    assert_eq!(a.poll(), [0, 1, 2].map(|at| (at, done(Kind::Write))));
    a.pair.post_send(&mut chain).unwrap();
    assert_eq!(a.poll(), [3, 4].map(|at| (at, done(Kind::Write))));
    assert_eq!(b.memory.words()[..6], [1, 2, 3, 4, 5, 0]);
    assert_eq!(fabric.statistics("a").requests, 5);
}

#[test]
fn queue_places_are_freed_only_by_polled_signaled_request() {
    let fabric = Fabric::new(&["a", "b"]);
    let (a, b) = connected(&fabric, &Settings::default(), Caps { sends: 3, ..CAPS });
    let mut chain = SendChain::new(CHAIN);
    for at in 0..3 {
        chain.write(at, [a.words(0, 1)], b.place(0), Flags::empty()).unwrap();
    }
    a.pair.post_send(&mut chain).unwrap();
    assert_eq!(a.poll(), []);
    chain.write(3, [a.words(0, 1)], b.place(0), Flags::SIGNALED).unwrap();
    assert!(matches!(a.pair.post_send(&mut chain), Err(VerbsError::Post { taken: 0, .. })));
}

#[test]
fn a_silent_peer_ends_with_retries_exceeded() {
    let (fabric, a, b) = two();
    fabric.silence("b");
    assert_eq!(write(&a, b.place(0)), []);
    fabric.give_up();
    assert_eq!(a.poll(), [(1, failed(CompletionStatus::RetriesExceeded, 12))]);
    assert_eq!(write(&a, b.place(0)), [(1, flushed())]);
    assert_eq!(b.memory.words()[0], 0);
}

#[test]
fn a_peer_without_receives_is_told_where_retries_end() {
    let fabric = Fabric::new(&["a", "b"]);
    let settings = Settings { rnr_retries: 2, ..Settings::default() };
    let (a, b) = connected(&fabric, &settings, CAPS);
    let mut chain = SendChain::new(CHAIN);
    chain.write_immediate(1, [], b.place(0), 1, Flags::empty()).unwrap();
    a.pair.post_send(&mut chain).unwrap();
    assert_eq!(a.poll(), [(1, failed(CompletionStatus::ReceiverNotReady, 13))]);
}

#[test]
fn a_nic_without_atomics_refuses_fetch_add() {
    let fabric = Fabric::new(&["a", "b"]);
    fabric.change("b", |nic| nic.atomics = false);
    let (a, b) = connected(&fabric, &Settings::default(), CAPS);
    assert!(a.nic.context.attributes().atomics && !b.nic.context.attributes().atomics);
    let mut chain = SendChain::new(CHAIN);
    chain.fetch_add(1, a.words(0, 1), b.place(0), 1, Flags::empty()).unwrap();
    a.pair.post_send(&mut chain).unwrap();
    assert_eq!(a.poll(), [(1, failed(CompletionStatus::RemoteRequest, 9))]);
}

#[test]
fn lost_nic_is_named_by_event_posts_and_completions() {
    let (fabric, a, b) = two();
    let mut receives = ReceiveChain::new(1, 0);
    receives.receive(5, []).unwrap();
    a.pair.post_receive(&mut receives).unwrap();
    fabric.remove("a");
    let lost = News::Nic(VerbsError::NicLost { nic: "a".into() });
    assert_eq!(a.nic.context.news(), Ok(Some(lost)));
    assert_eq!(a.poll().iter().map(|(id, outcome)| (*id, outcome.is_err())).collect::<Vec<_>>(), [(5, true)]);
    let mut chain = SendChain::new(CHAIN);
    chain.write(1, [a.words(0, 1)], b.place(0), Flags::empty()).unwrap();
    let error = a.pair.post_send(&mut chain).unwrap_err();
    let errno = Errno::IO.raw_os_error();
    assert!(matches!(&error, VerbsError::Post { taken: 0, errno: e, .. } if *e == errno), "{error}");
    assert!(error.to_string().contains("the NIC is gone"), "{error}");
    // Its peer sees the same as with a cut cable.
    assert_eq!(write(&b, a.place(0)), []);
    fabric.give_up();
    assert_eq!(b.poll(), [(1, failed(CompletionStatus::RetriesExceeded, 12))]);
    drop((a, b));
    assert_eq!(fabric.leftovers(), (0, 0));
}

#[test]
fn an_ended_connection_flushes_what_is_under_way() {
    let (fabric, a, b) = two();
    fabric.hold();
    let mut chain = SendChain::new(CHAIN);
    chain.write(1, [a.words(0, 1)], b.place(0), Flags::empty()).unwrap();
    chain.write(2, [a.words(0, 1)], b.place(0), Flags::SIGNALED).unwrap();
    a.pair.post_send(&mut chain).unwrap();
    a.pair.error().unwrap();
    assert_eq!(a.poll(), [(1, flushed()), (2, flushed())]);
}

#[test]
fn a_completion_queue_that_overflows_is_told() {
    let (_fabric, a, b) = two();
    let queue = CompletionQueue::create(&a.nic.context, 2, None).unwrap();
    let queues = Queues { send: &queue, receive: &queue };
    let pair = QueuePair::create(&a.domain, queues, CAPS, &a.nic.path, 1).unwrap();
    let back =
        QueuePair::create(&b.domain, Queues { send: &b.queue, receive: &b.queue }, CAPS, &b.nic.path, 0);
    let back = back.unwrap();
    pair.connect(&back.endpoint()).unwrap();
    back.connect(&pair.endpoint()).unwrap();
    let mut chain = SendChain::new(CHAIN);
    for at in 0..3 {
        chain.write(at, [a.words(0, 1)], b.place(0), Flags::SIGNALED).unwrap();
    }
    pair.post_send(&mut chain).unwrap();
    let overflow = News::Nic(VerbsError::QueueOverflow { nic: "a".into() });
    assert_eq!(a.nic.context.news(), Ok(Some(overflow)));
}

#[test]
fn unreachable_address_and_other_link_layer_are_distinct_errors() {
    let fabric = Fabric::new(&["a", "b"]);
    let settings = Settings::default();
    let (a, b) = (End::new(&fabric, "a", 1, &settings, CAPS), End::new(&fabric, "b", 0, &settings, CAPS));
    let mut there = b.pair.endpoint();
    there.reach.link = LinkLayer::InfiniBand;
    let other = VerbsError::LinkLayers { nic: "a".into(), peer: 1 };
    assert_eq!(a.pair.connect(&there), Err(other));
    let there = Endpoint { gid: "::ffff:192.168.9.9".parse().unwrap(), ..b.pair.endpoint() };
    let error = a.pair.connect(&there).unwrap_err();
    let expected = VerbsError::NoRoute {
        nic: "a".into(),
        peer: 1,
        gid: a.nic.path.gid,
        remote: there.gid,
        errno: Errno::NETUNREACH.raw_os_error(),
    };
    assert_eq!(error, expected);
    assert!(error.to_string().contains("::ffff:192.168.9.9 of rank 1"), "{error}");
}

#[test]
fn any_drop_order_destroys_verbs_objects_in_time_and_all() {
    let (fabric, a, b) = two();
    let End { pair, queue, channel, region, domain, nic, memory } = a;
    drop((nic, domain, queue, channel));
    assert_ne!(fabric.leftovers().0, 0);
    drop(region);
    drop((pair, memory, b));
    assert_eq!(fabric.leftovers(), (0, 0));
}

#[test]
fn memory_of_a_device_is_registered_by_its_descriptor() {
    let (_fabric, a, b) = two();
    let fd = rustix::fs::memfd_create("device memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 3 * 4096).unwrap();
    // SAFETY: no one maps the file.
    let region =
        unsafe { MemoryRegion::register_dmabuf(&b.domain, fd.as_fd(), 4096, 8192, 0x7000_0000_0000, ALL) };
    let region = region.unwrap();
    assert_eq!((region.base(), region.len()), (0x7000_0000_0000, 8192));
    a.memory.fill(0, &[u64::from_ne_bytes(*b"by wire!")]);
    let to = Remote { addr: region.base() + 4096, rkey: region.rkey() };
    assert_eq!(write(&a, to), []);
    let mut seen = [0; 8];
    rustix::io::pread(&fd, &mut seen, 8192).unwrap();
    assert_eq!(&seen, b"by wire!");
    // SAFETY: as above.
    let empty = unsafe { MemoryRegion::register_dmabuf(&b.domain, fd.as_fd(), 1, 4096, 0, ALL) };
    let error = VerbsError::Register { nic: "b".into(), bytes: 4096, errno: Errno::INVAL.raw_os_error() };
    assert_eq!(empty.err(), Some(error));
}
