//! The typed API over fake NICs: see `fake`.

mod faults;
mod machine;
mod moves;

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::fake::Fabric;
use super::*;

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
    region: MemoryRegion,
    domain: Arc<ProtectionDomain>,
    rail: Nic,
    memory: Memory,
}

const ALL: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_ATOMIC);
const CAPS: Caps = Caps { sends: 16, receives: 8, send_sges: 4, receive_sges: 2, inline: 64 };
const CHAIN: ChainCaps = ChainCaps { requests: 8, sges: 4, inline: 64 };
const WORDS: usize = 64;

impl End {
    fn new(fabric: &Arc<Fabric>, card: &str, peer: u32, settings: &Settings, caps: Caps) -> Self {
        let rail = fabric.rail(card, settings);
        let domain = ProtectionDomain::create(&rail.context).unwrap();
        let queue = CompletionQueue::create(&rail.context, 64).unwrap();
        let memory = Memory::new(WORDS);
        // SAFETY: the memory is dropped after the region, and looked at through atomics alone.
        let region = unsafe { MemoryRegion::register(&domain, memory.at(), WORDS * 8, ALL) }.unwrap();
        let queues = Queues { send: &queue, receive: &queue };
        let pair = QueuePair::create(&domain, queues, caps, &rail.path, peer).unwrap();
        End { pair, queue, region, domain, rail, memory }
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
    let across = |from: &End, peer| Endpoint::from_bytes(peer, &from.pair.endpoint().to_bytes()).unwrap();
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
