//! Threads and streams beside a stream that waits, as `gpu-check` asks about them.

use std::sync::Mutex;
use std::time::Duration;

use fake_cuda::all_kernels;
use sidelane_testkit::device::lock_and_queue::{Answer, Call, Case, Said, Sharing};

use super::gpu;
use crate::apart::apart;

/// What stands still for so long blocks. Calls that wait for the stream are waited for as long.
const BOUND: Duration = Duration::from_secs(3);

/// The answer of a case, behind the word that a stream waits.
fn answer(case: Case) -> Answer {
    let (gpu, said) = (gpu(0), Mutex::new(Vec::new()));
    let hear = |word: &Said| {
        said.lock().unwrap().push(match word {
            Said::Answer(answer, _) => Some(*answer),
            Said::Ready => None,
            Said::Failed(why) => panic!("{why}"),
        });
        Ok(())
    };
    case.ask(&gpu, BOUND, &hear).unwrap();
    match said.into_inner().unwrap()[..] {
        [None, Some(answer)] => answer,
        ref said => panic!("{said:?}"),
    }
}

#[test]
fn copies_of_other_thread_pass_each_call_while_stream_waits() {
    apart(
        "driver::lock_and_queue::copies_of_other_thread_pass_each_call_while_stream_waits",
        &[("SIDELANE_FAKE_CUDA_KERNELS", all_kernels().unwrap().to_str().unwrap())],
        || {
            for call in [Call::Free, Call::Load, Call::FreeHost, Call::Launches] {
                assert_eq!(answer(Case::Lock(call)), Answer::Passes, "{call:?}");
            }
        },
    );
}

#[test]
fn copies_pass_waiting_stream_if_queues_suffice() {
    apart(
        "driver::lock_and_queue::copies_pass_waiting_stream_if_queues_suffice",
        &[("CUDA_DEVICE_MAX_CONNECTIONS", "32")],
        || {
            for priorities in [false, true] {
                let sharing = Sharing { connections: 32, priorities };
                assert_eq!(answer(Case::Queue(sharing)), Answer::Passes, "{priorities}");
            }
        },
    );
}
