//! Random bytes at the border: each call comes to a status, and the world stays alive.
//!
//! Structs are spoilt in some words, mostly by small numbers, so that some calls are made; handles
//! get random numbers and those of other objects. The caller's guarantee, that memory is as long as
//! declared, holds here. SIDELANE_RANDOM_SECONDS sets the duration (3).
#![allow(unsafe_code, reason = "the functions are C's")]

mod collective;
#[path = "../common/mod.rs"]
mod common;
mod gate;
mod layer;
mod questions;
mod spoilt;

use std::cell::Cell;
use std::ffi::CStr;
use std::hash::{BuildHasher, RandomState};
use std::net::TcpListener;
use std::process::Command;
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use sidelane_c::*;

use collective::{collective, communicator};
use gate::{losses, router};
use layer::{Device, in_slots, layer, on_host, planned};
use questions::{infos, strangers};
use spoilt::spoilt;

/// How much longer it may take until all kinds of objects have worked once.
const PATIENCE: Duration = Duration::from_secs(120);
#[test]
fn random_bytes_come_to_a_status_and_never_to_a_crash() {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let port = free.expect("a free port").port().min(u16::MAX - 32);
    let mut alone = Command::new(std::env::current_exe().expect("this program"));
    alone.args(["in_a_world_of_one", "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    alone.env("RANK", "0").env("WORLD_SIZE", "1");
    alone.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    alone.env("SIDELANE_HEAP", "8M").env("SIDELANE_SYMMETRIC", "4M");
    // So little that no size which is asked for can be had by waiting.
    common::with_devices(&mut alone).env("SIDELANE_FAKE_CUDA_MEMORY", "67108864");
    let output = alone.output().expect("it starts");
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{}: {text}", output.status);
}

#[test]
#[ignore = "a process of its own for the test above"]
fn in_a_world_of_one() {
    let seconds =
        std::env::var("SIDELANE_RANDOM_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3);
    let (mut world, mut group) = (null_mut(), null_mut());
    // SAFETY: the pointers are valid.
    unsafe {
        assert_eq!(sidelane_world_from_env(null(), &mut world), Status::SIDELANE_OK, "{}", message());
        assert_eq!(sidelane_world_group(world, null(), 0, &mut group), Status::SIDELANE_OK);
    }
    let given = std::env::var("SIDELANE_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let first: u64 = given.unwrap_or_else(|| RandomState::new().hash_one(std::process::id()));
    println!("SIDELANE_TEST_SEED={first} repeats these bytes");
    let mut seeds = first..;
    let end = Instant::now() + Duration::from_secs(seconds);
    let (routers, collectives, lost) = (Cell::new(0_u64), Cell::new(0_u64), Cell::new(0_u64));
    let (hosts, enqueued, slots) = (Cell::new(0_u64), Cell::new(0_u64), Cell::new(0_u64));
    let device = Device::new();
    let counts = [&hosts, &enqueued, &slots, &routers, &collectives, &lost];
    // So that this is no test of refusals alone.
    let lacks = || counts.iter().any(|count| count.get() == 0) && Instant::now() < end + PATIENCE;
    while Instant::now() < end || lacks() {
        // Another seed each time; failures are not simplified, as a failed world fails every later
        // call.
        let rng_seed = RngSeed::Fixed(seeds.next().unwrap_or(first));
        let config = Config {
            cases: 32,
            failure_persistence: None,
            max_shrink_iters: 0,
            rng_seed,
            ..Config::default()
        };
        let mut runner = TestRunner::new(config);
        let outcome = runner.run(&(spoilt(), any::<[u64; 4]>()), |(spoilt, numbers)| {
            let done = [
                layer(group, &device, &on_host(), &spoilt),
                layer(group, &device, &planned(&device), &spoilt),
                layer(group, &device, &in_slots(&device), &spoilt),
                router(&spoilt),
                collective(group, &spoilt),
                losses(&spoilt),
                infos(world, group, &spoilt),
                strangers(numbers),
                communicator(group, &spoilt),
            ];
            for (count, calls) in counts.into_iter().zip(&done) {
                count.set(count.get() + u64::from(calls.iter().all(|&status| status == Status::SIDELANE_OK)));
            }
            for status in done.into_iter().flatten() {
                prop_assert!(
                    status == Status::SIDELANE_OK || !message().is_empty(),
                    "{status:?} without a word"
                );
                prop_assert!(status != Status::SIDELANE_ERROR_INTERNAL, "{}", message());
            }
            prop_assert_eq!(
                sidelane_world_check(world),
                Status::SIDELANE_OK,
                "the world lives: {}",
                message()
            );
            Ok(())
        });
        if let Err(error) = outcome {
            panic!("{error}");
        }
    }
    println!(
        "layers that worked: {} on the host, {} planned, {} in slots",
        hosts.get(),
        enqueued.get(),
        slots.get()
    );
    println!("{} routers, {} collectives and {} losses did", routers.get(), collectives.get(), lost.get());
    assert!(counts.iter().all(|count| count.get() > 0));
    assert_eq!(sidelane_stream_close(device.stream), Status::SIDELANE_OK);
    assert_eq!(sidelane_group_close(group), Status::SIDELANE_OK);
    assert_eq!(sidelane_world_close(world), Status::SIDELANE_OK);
}

fn message() -> String {
    // SAFETY: it is a text, and is copied before the next call.
    unsafe { CStr::from_ptr(sidelane_last_message()) }.to_str().expect("UTF-8").to_owned()
}
