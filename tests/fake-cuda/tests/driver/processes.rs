//! Two processes, one memory.

use std::env;
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::process::Command;

use sys::CUmemAllocationHandleType as HandleType;

use crate::common::*;
use crate::ok;

const WORDS: usize = 1024;
const ROUNDS: u32 = 2000;
const POSIX: HandleType = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Where the second process finds the descriptor.
const PATH: &str = "FAKE_DRIVER_TEST_DESCRIPTOR";

/// In the shared memory: data, then a flag for each direction in lines of their own.
const FLAG: u64 = WORDS as u64 * 4;
const ACK: u64 = FLAG + 64;

/// Sends words to the other process, or gets them back changed, round after round.
fn exchange(shared: u64, first: bool) {
    let (local, words) = host_words(WORDS);
    let stream = stream();
    let bytes = WORDS * 4;
    let (mine, theirs) = if first { (FLAG, ACK) } else { (ACK, FLAG) };
    let batch = |to, from| assert_eq!(batch(&[(to, from, bytes)], BESIDE, stream), CUresult::CUDA_SUCCESS);
    for round in 1..=ROUNDS {
        if first {
            words.iter_mut().zip(0..).for_each(|(word, i)| *word = round ^ (i << 12));
            batch(shared, local);
            ok!(cuStreamWriteValue32_v2(stream, shared + mine, round, 0));
        }
        ok!(cuStreamWaitValue32_v2(stream, shared + theirs, round, 0));
        batch(local, shared);
        ok!(cuStreamSynchronize(stream));
        let change = if first { 1 } else { 0 };
        assert!(
            words.iter().zip(0..).all(|(&word, i)| word == (round ^ (i << 12)) + change),
            "round {round}"
        );
        if !first {
            words.iter_mut().for_each(|word| *word += 1);
            batch(shared, local);
            ok!(cuStreamWriteValue32_v2(stream, shared + mine, round, 0));
            ok!(cuStreamSynchronize(stream));
        }
    }
}

#[test]
fn two_processes_exchange_through_an_exported_handle() {
    apart("processes::two_processes_exchange_through_an_exported_handle", &seeds(2), || {
        if let Ok(path) = env::var(PATH) {
            start(1);
            let file = File::options().read(true).write(true).open(path).unwrap();
            let descriptor = file.as_raw_fd() as usize as *mut _;
            let handle = made(|out| ok!(cuMemImportFromShareableHandle(out, descriptor, POSIX)));
            drop(file);
            let how = made(|out| ok!(cuMemGetAllocationPropertiesFromHandle(out, handle)));
            assert_eq!(how.location.id, 0, "it lies on the exporter's device");
            return exchange(map_for(handle, GRANULARITY, 1), false);
        }
        start(0);
        let handle = made(|out| ok!(cuMemCreate(out, GRANULARITY, &properties(0, true), 0)));
        let shared = map_for(handle, GRANULARITY, 0);
        fill_words(shared + FLAG, 0, 1);
        fill_words(shared + ACK, 0, 1);
        let mut descriptor: RawFd = -1;
        ok!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle, POSIX, 0));
        let path = format!("/proc/{}/fd/{descriptor}", std::process::id());
        let other =
            Command::new(env::current_exe().unwrap()).args(env::args().skip(1)).env(PATH, path).spawn();
        exchange(shared, true);
        assert!(other.unwrap().wait().unwrap().success());
    });
}
