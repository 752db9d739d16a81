//! Instances on devices between processes: descriptors of device memory and of
//! words are passed, and a killed rank ends the streams of the others.
#![allow(unsafe_code, reason = "memory of a caller's own is named by contract")]

#[path = "../device/devices.rs"]
mod devices;
#[allow(dead_code, reason = "each test program uses a part of this")]
#[path = "../device/enqueued/rank.rs"]
mod rank;

use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::job::{Job, Setup, others};
use crate::common::rank::Talk;
use crate::common::{Command, Failure, Report, SOON, Thread};
use crate::support::{self, cases, tokens};
use fake_cuda::FakeDriver;
use half::bf16;
use sidelane::bootstrap::panic_in;
use sidelane::device::{PinnedMemory, PlainMemory};
use sidelane::ep::Handle;
use sidelane::{Error, World};

use self::rank::{Case, Rank, target};

/// Set in the ranks of this module.
pub const ENQUEUED: &str = "SIDELANE_TEST_ENQUEUED";
/// A round in which all ranks have tokens.
const ALL_SEND: u64 = 3;
/// Longer than anything takes that works.
const LONG: Duration = Duration::from_secs(60);

/// Serves the job that started this process, on a device.
pub fn serve() {
    let mut talk = Talk::new();
    let world = World::from_env().unwrap();
    let group = world.all().unwrap();
    let case = Case::new(world.size(), 6, 3);
    let mut rank = Rank::<bf16>::new(&group, &case);
    let (rank_of, size, epoch) = (world.rank(), world.size(), world.epoch());
    talk.say(&Report::Joined { rank: rank_of, size, epoch, previous: world.previous_ranks().to_vec() });
    let input = |round: u64| {
        let seed = round * 64 + u64::from(world.rank());
        tokens(seed, (seed % 13) as u32, case.hidden, case.top_k, case.map.experts())
    };
    loop {
        match talk.hear() {
            Command::Rounds(rounds) => {
                (0..rounds).for_each(|round| rank.round(&input(round.into())));
                talk.say(&Report::Verified { rounds, rows: rounds.into() });
            }
            Command::Loop => {
                talk.say(&Report::Running);
                let error = (0..).find_map(|round| rank.dispatch(&input(round)).err()).unwrap();
                let since = Instant::now();
                while rank.stream.is_done() == Ok(false) {
                    assert!(since.elapsed() < LONG, "the stream hangs");
                    std::thread::yield_now();
                }
                talk.say(&Report::Failed(error.into()));
            }
            Command::HoldStream => {
                let gate = PinnedMemory::new(rank.stream.context(), 8).unwrap();
                let (_, handle) = rank.dispatch(&input(ALL_SEND)).unwrap();
                rank.stream.wait(gate.range().word::<u32>(0).unwrap(), 1).unwrap();
                combine(&mut rank, &handle).unwrap();
                talk.say(&Report::Running);
                // Until it is killed.
                talk.hear();
            }
            Command::FreeMeanwhile => {
                let memory = PlainMemory::new(rank.stream.context(), 1 << 16).unwrap();
                let (_, handle) = rank.dispatch(&input(ALL_SEND)).unwrap();
                combine(&mut rank, &handle).unwrap();
                let holds = || FakeDriver::loaded().unwrap().counters().lock_holds;
                let before = holds();
                let freeing = std::thread::spawn(move || memory.free());
                while holds() == before {
                    std::thread::yield_now();
                }
                assert!(!freeing.is_finished(), "the free waits for a stream that waits for a rank");
                talk.say(&Report::Running);
                let error = (1..).find_map(|round| rank.dispatch(&input(round)).err()).unwrap();
                freeing.join().unwrap().unwrap();
                talk.say(&Report::Failed(error.into()));
            }
            Command::Doom(thread) => {
                panic_in(&thread.of(world.rank()));
                talk.say(&Report::Doomed);
            }
            Command::End => return,
            other => panic!("{other:?}"),
        }
    }
}

/// Enqueues a combine of rows that nothing was written to.
fn combine(rank: &mut Rank<bf16>, handle: &Handle) -> Result<(), Error> {
    let out = rank.out.part(u64::from(handle.tokens()) * rank.case.hidden as u64 * 2);
    rank.planned.combine_into(handle.output()?, handle, target::<bf16>(&out))
}

fn job(ranks: u32, seed: u64) -> Job {
    setup(ranks, seed).join()
}

fn setup(ranks: u32, seed: u64) -> Setup {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda/exchange.cu");
    let library = fake_cuda::kernels(&source).unwrap();
    Setup::new(ranks)
        .var("LD_LIBRARY_PATH", fake_cuda::install().unwrap().display())
        .var("SIDELANE_FAKE_CUDA_KERNELS", library.display())
        .var("CUDA_MODULE_LOADING", "EAGER")
        .var(ENQUEUED, "1")
        .var("SIDELANE_FAKE_CUDA_SEED", seed)
}

#[test]
fn processes_see_what_the_host_sees() {
    for (ranks, rounds) in cases([(2, 30), (4, 10)], 1) {
        let mut job = job(ranks, 1);
        job.verify(0..ranks, rounds);
        job.end(0..ranks);
    }
}

#[test]
fn a_killed_rank_is_named_and_ends_the_streams_of_all_others() {
    let mut job = job(3, 2);
    job.tell(0..3, Command::Loop);
    for (rank, heard) in job.hear(0..3) {
        assert_eq!(heard.said, Report::Running, "rank {rank}");
    }
    let killed = job.kill(1);
    let lost = Report::Failed(Failure::Lost { rank: 1, silent: false });
    job.demand(others(3, 1), killed, SOON, &lost);
}

/// No call of the driver may be needed to end the streams: a free keeps all others out, until they
/// end.
#[test]
fn rank_killed_while_others_free_memory_is_named_by_all() {
    let mut job = setup(3, 4).var("SIDELANE_FAKE_CUDA_LOCKS", "1").join();
    job.tell([1], Command::HoldStream);
    job.tell(others(3, 1), Command::FreeMeanwhile);
    assert!(job.hear(0..3).values().all(|heard| heard.said == Report::Running));
    let killed = job.kill(1);
    let lost = Report::Failed(Failure::Lost { rank: 1, silent: false });
    job.demand(others(3, 1), killed, SOON, &lost);
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "threads obey orders to panic in builds with assertions alone")]
fn dead_watch_of_a_stream_ends_the_streams_of_all_ranks_by_name() {
    let mut job = job(3, 3);
    job.tell([1], Command::Doom(Thread::Watch));
    assert_eq!(job.hear([1])[&1].said, Report::Doomed);
    job.tell(0..3, Command::Loop);
    assert!(job.hear(0..3).values().all(|heard| heard.said == Report::Running));
    let died = Report::Failed(Failure::Panicked { by: 1, thread: Thread::Watch.of(1) });
    for (rank, heard) in job.hear(0..3) {
        assert_eq!(heard.said, died, "rank {rank}");
    }
}
