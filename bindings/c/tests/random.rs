//! Random bytes at the border: each call comes to a status, and the world stays alive.
//!
//! Structs are spoilt in some words, mostly by small numbers, so that some calls are made; handles get random numbers and those of other
//! objects. What the caller must not lie about, that memory is as long as it says, is true here. SIDELANE_RANDOM_SECONDS says
//! for how long (3).
#![allow(unsafe_code, reason = "the functions are C's")]

mod common;

use std::cell::Cell;
use std::ffi::{CStr, c_char};
use std::net::TcpListener;
use std::process::Command;
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use sidelane::device::{Driver, PinnedMemory, Priority};
use sidelane_c::*;

/// As many bytes as any struct may say it has, and one word more.
const WORDS: usize = 1025;
/// How much longer it may take until all kinds of objects have worked once.
const PATIENCE: Duration = Duration::from_secs(120);
/// Experts, tokens and elements of a row for which arrays are large enough.
const ROOM: usize = 1 << 16;

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
    common::with_devices(&mut alone).env("SIDELANE_STAND_IN_MEMORY", "67108864");
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
    let end = Instant::now() + Duration::from_secs(seconds);
    let (layers, routers) = (Cell::new(0_u64), Cell::new(0_u64));
    let (beside_streams, in_slots) = (Cell::new(0_u64), Cell::new(0_u64));
    let (collectives, lost) = (Cell::new(0_u64), Cell::new(0_u64));
    let device = Device::new();
    let counts = [&layers, &routers, &beside_streams, &in_slots, &collectives, &lost];
    // So that this is no test of refusals alone.
    let lacks = || counts.iter().any(|count| count.get() == 0) && Instant::now() < end + PATIENCE;
    while Instant::now() < end || lacks() {
        // Another seed each time; nothing simpler is sought, as a world that ended fails whatever comes next.
        let config =
            Config { cases: 32, failure_persistence: None, max_shrink_iters: 0, ..Config::default() };
        let mut runner = TestRunner::new(config);
        let outcome = runner.run(&(spoilt(), any::<[u64; 4]>()), |(spoilt, numbers)| {
            let done = [
                layer(group, &spoilt),
                router(&spoilt),
                planned(group, &device, &spoilt),
                slots(group, &device, &spoilt),
                collective(group, &spoilt),
                losses(&spoilt),
                infos(world, group, &spoilt),
                strangers(numbers),
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
    println!("{} layers and {} routers worked", layers.get(), routers.get());
    println!("{} exchanges beside a stream and {} in slots did", beside_streams.get(), in_slots.get());
    println!("{} collectives and {} losses did", collectives.get(), lost.get());
    assert!(counts.iter().all(|count| count.get() > 0));
    assert_eq!(sidelane_stream_close(device.stream), Status::SIDELANE_OK);
    assert_eq!(sidelane_group_close(group), Status::SIDELANE_OK);
    assert_eq!(sidelane_world_close(world), Status::SIDELANE_OK);
}

/// What becomes of a struct that is good.
#[derive(Clone, Debug)]
struct Spoilt {
    /// What it says of its size; 0: its own.
    size: u64,
    /// Words that are others.
    words: Vec<(usize, u32)>,
}

fn spoilt() -> impl Strategy<Value = Spoilt> {
    let few = (0_u32..6).prop_map(|eights| eights * 8);
    let word = prop_oneof![4 => 0_u32..3, 3 => few, 2 => 0_u32..40, 1 => any::<u32>(), 1 => Just(u32::MAX)];
    let place = prop_oneof![30 => 2_usize..30, 1 => 0..WORDS];
    let size = prop_oneof![
        6 => Just(0_u64),
        1 => 0_u64..200,
        1 => (0..WORDS as u64 - 1).prop_map(|words| words * 4),
        1 => any::<u64>(),
    ];
    let count = prop_oneof![4 => 0_usize..4, 1 => 0_usize..60];
    let words = count.prop_flat_map(move |count| prop::collection::vec((place.clone(), word.clone()), count));
    (size, words).prop_map(|(size, words)| Spoilt { size, words })
}

/// Options of a layer that can be built: 4 experts, 2 choices, 8 elements of f32.
const LAYER: [u32; 4] = [4, 2, 8, SIDELANE_DTYPE_F32];

/// A router that can be built: 8 experts, 2 choices, softmax, weights times 1.
const ROUTER: [u32; 24] = [8, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x3f80_0000, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// A struct made of words.
struct Struct(Vec<u64>);

impl Struct {
    fn new<T>(good: &[u32], spoilt: &Spoilt) -> Struct {
        let mut words = vec![0; WORDS + 1];
        words[2..][..good.len()].copy_from_slice(good);
        for &(place, word) in &spoilt.words {
            words[place] = word;
        }
        let mut longs: Vec<u64> = words.chunks(2).map(|w| u64::from(w[0]) | u64::from(w[1]) << 32).collect();
        longs[0] = if spoilt.size == 0 { size_of::<T>() as u64 } else { spoilt.size };
        Struct(longs)
    }

    /// A struct in which nothing is set but its size.
    fn empty<T>() -> Struct {
        Struct::new::<T>(&[], &Spoilt { size: 0, words: Vec::new() })
    }

    fn at<T>(&mut self) -> *mut T {
        self.0.as_mut_ptr().cast()
    }
}

/// Builds a layer, dispatches and combines.
fn layer(group: *mut Group, spoilt: &Spoilt) -> Vec<Status> {
    let mut options = Struct::new::<EpOptions>(&LAYER, spoilt);
    let mut ep = null_mut();
    // SAFETY: the struct is as large as any size that is read; the pointer is valid.
    let built = unsafe { sidelane_ep_build(group, options.at(), null(), &mut ep) };
    if built != Status::SIDELANE_OK {
        return vec![built];
    }
    let mut info = Struct::empty::<EpInfo>();
    let mut statuses = Vec::new();
    // SAFETY: arrays are as large as is said; what is dispatched fits them, or is not said to be there.
    unsafe {
        statuses.push(sidelane_ep_info(ep, info.at()));
        let info = *info.at::<EpInfo>();
        let mut data = vec![0_u64; ROOM];
        let columns = if info.record_bytes > 0 { info.record_bytes } else { info.hidden.into() };
        let tokens = 3_u64;
        let fits = columns < ROOM as u64 && u64::from(info.top_k) < ROOM as u64 / tokens;
        let tokens = if fits { tokens } else { 0 };
        let ids: Vec<i32> = (0..tokens).flat_map(|_| 0..info.top_k as i32).collect();
        let weights = vec![0.5_f32; ids.len()];
        let routing = Routing {
            experts: ids.as_ptr(),
            weights: weights.as_ptr(),
            tokens,
            top_k: info.top_k,
            reserved: 0,
        };
        let dtype = if info.record_bytes > 0 { SIDELANE_DTYPE_BYTES } else { info.dtype };
        let x = Tensor { data: data.as_mut_ptr().cast(), rows: tokens, columns, dtype, reserved: 0 };
        let (mut rows, mut handle, mut output) = (null_mut(), null_mut(), null_mut());
        let dispatched = sidelane_ep_dispatch(ep, &x, &routing, &mut rows, &mut handle);
        statuses.push(dispatched);
        if dispatched == Status::SIDELANE_OK {
            let room = tokens * u64::from(info.hidden);
            let mut sums = vec![0_u64; room as usize / 2 + 1];
            let columns = u64::from(info.hidden);
            let y = Tensor {
                data: sums.as_mut_ptr().cast(),
                rows: tokens,
                columns,
                dtype: info.dtype,
                reserved: 0,
            };
            statuses.push(sidelane_handle_output(handle, &mut output));
            statuses.push(sidelane_ep_combine(ep, output, null(), handle, &y));
            assert_eq!(sidelane_rows_close(rows), Status::SIDELANE_OK);
            assert_eq!(sidelane_handle_close(handle), Status::SIDELANE_OK);
        }
        assert_eq!(sidelane_ep_close(ep), Status::SIDELANE_OK);
    }
    statuses
}

/// A stream, and memory that its device reaches.
struct Device {
    stream: *mut Stream,
    memory: PinnedMemory,
    _own: sidelane::device::Stream,
}

impl Device {
    fn new() -> Device {
        let context = Driver::open().and_then(|driver| driver.context(0)).expect("a device");
        let own = sidelane::device::Stream::new(&context, Priority::Usual).expect("a stream");
        let memory = PinnedMemory::new(&context, 12 * ROOM).expect("memory");
        let mut stream = null_mut();
        // SAFETY: the stream lives as long as the handle; the pointer is valid.
        let borrowed = unsafe { sidelane_stream_borrow(0, own.handle(), &mut stream) };
        assert_eq!(borrowed, Status::SIDELANE_OK, "{}", message());
        Device { stream, memory, _own: own }
    }

    /// Tokens and their choices, as many as there is room for: for the first experts. Tokens are what calls before left.
    fn tokens(&self, hidden: u32, top_k: u32, dtype: u32) -> (Tensor, Routing) {
        let at = self.memory.range().address() as usize;
        let fits = (hidden as usize) < ROOM / 4 && (top_k as usize) < ROOM / 4;
        let tokens = if fits { 3 } else { 0 };
        let ids: Vec<u32> = (0..tokens).flat_map(|_| 0..top_k).collect();
        self.memory.write_words(4 * ROOM, &ids).expect("room");
        let (experts, weights) = ((at + 4 * ROOM) as *const i32, (at + 8 * ROOM) as *const f32);
        let x = Tensor { data: at as *mut _, rows: tokens, columns: hidden.into(), dtype, reserved: 0 };
        (x, Routing { experts, weights, tokens, top_k, reserved: 0 })
    }
}

/// Builds an exchange beside a stream, dispatches and combines.
fn planned(group: *mut Group, device: &Device, spoilt: &Spoilt) -> Vec<Status> {
    let mut options = Struct::new::<EpOptions>(&LAYER, spoilt);
    let mut more = Struct::new::<PlannedOptions>(&[1 << 20], spoilt);
    let mut exchange = null_mut();
    // SAFETY: as in `layer`; the memory of tensors stays until the stream is waited for.
    unsafe {
        let built =
            sidelane_planned_build(group, options.at(), null(), more.at(), device.stream, &mut exchange);
        if built != Status::SIDELANE_OK {
            return vec![built];
        }
        let options = *options.at::<EpOptions>();
        let (x, routing) = device.tokens(options.hidden, options.top_k, options.dtype);
        let mut info = Struct::new::<PlannedInfo>(&[], spoilt);
        let mut of_rows = Struct::new::<PlannedRowsInfo>(&[], spoilt);
        let mut of_handle = Struct::new::<PlannedHandleInfo>(&[], spoilt);
        let mut report = Struct::new::<PlannedReport>(&[], spoilt);
        let (mut dispatch, mut combine) = (null_mut(), null_mut());
        let (mut rows, mut handle, mut output) = (null_mut(), null_mut(), null_mut());
        let started = sidelane_planned_dispatch_start(exchange, &x, &routing, &mut dispatch);
        let mut statuses = vec![built, started];
        if started == Status::SIDELANE_OK {
            statuses.push(sidelane_planned_dispatch_finish(dispatch, &mut rows, &mut handle));
        }
        if !handle.is_null() {
            statuses.push(sidelane_planned_handle_output(handle, &mut output));
            statuses.push(sidelane_planned_combine(exchange, output, handle, &x, &mut combine));
            statuses.push(sidelane_planned_combine_finish(combine, null_mut()));
            let asked = [
                sidelane_planned_info(exchange, info.at()),
                sidelane_planned_rows_info(rows, of_rows.at()),
                sidelane_planned_handle_info(handle, of_handle.at()),
                sidelane_planned_handle_report(handle, report.at()),
            ];
            // The same sizes, which may be none of theirs.
            assert!(asked.iter().all(|&status| status == Status::SIDELANE_OK || spoilt.size != 0));
        }
        for closed in [
            sidelane_planned_rows_close(rows),
            sidelane_planned_handle_close(handle),
            sidelane_planned_close(exchange),
        ] {
            assert_eq!(closed, Status::SIDELANE_OK);
        }
        statuses
    }
}

/// Builds an exchange in slots, dispatches and combines.
fn slots(group: *mut Group, device: &Device, spoilt: &Spoilt) -> Vec<Status> {
    let mut options = Struct::new::<SlotsOptions>(&LAYER, spoilt);
    let mut exchange = null_mut();
    // SAFETY: as in `planned`.
    unsafe {
        let built = sidelane_slots_build(group, options.at(), null(), device.stream, &mut exchange);
        if built != Status::SIDELANE_OK {
            return vec![built];
        }
        let options = *options.at::<SlotsOptions>();
        let (x, routing) = device.tokens(options.hidden, options.top_k, options.dtype);
        let mut info = Struct::new::<SlotsInfo>(&[], spoilt);
        let mut report = Struct::new::<SlotsReport>(&[], spoilt);
        let started = sidelane_slots_dispatch_start(exchange, device.stream, &x, &routing);
        let mut statuses = vec![built, started];
        if started == Status::SIDELANE_OK {
            statuses.push(sidelane_slots_dispatch_finish(exchange, device.stream));
            statuses.push(sidelane_slots_combine_start(exchange, device.stream));
            statuses.push(sidelane_slots_combine_finish(exchange, device.stream, &x));
            statuses.push(sidelane_slots_synchronize(exchange, device.stream));
        }
        let asked = [sidelane_slots_info(exchange, info.at()), sidelane_slots_report(exchange, report.at())];
        assert!(asked.iter().all(|&status| status == Status::SIDELANE_OK || spoilt.size != 0));
        assert_eq!(sidelane_slots_close(exchange), Status::SIDELANE_OK);
        statuses
    }
}

/// Builds a router and lets it decide.
fn router(spoilt: &Spoilt) -> Vec<Status> {
    let mut config = Struct::new::<RouterConfig>(&ROUTER, spoilt);
    let mut gate = null_mut();
    // SAFETY: as in `layer`.
    let built = unsafe { sidelane_gate_build(config.at(), &mut gate) };
    if built != Status::SIDELANE_OK {
        return vec![built];
    }
    // SAFETY: a size that was accepted means that the first fields are there.
    let experts = unsafe { *config.at::<RouterConfig>() }.experts as usize;
    let tokens = if experts <= ROOM / 2 { 2 } else { 0 };
    let random = spoilt.words.iter().map(|&(place, word)| f32::from_bits(word ^ place as u32)).chain([0.5]);
    let logits: Vec<f32> = random.cycle().take(tokens * experts).collect();
    let mut call = Struct::empty::<GateCall>();
    let mut decision = Struct::new::<Decision>(&[], spoilt);
    // SAFETY: the arrays are as large as is said.
    unsafe {
        (*call.at::<GateCall>()).logits = logits.as_ptr();
        (*call.at::<GateCall>()).tokens = tokens as u64;
        (*call.at::<GateCall>()).training = spoilt.words.len() as u32 % 3;
        let routed = sidelane_gate_route(gate, call.at(), decision.at());
        vec![built, routed, sidelane_gate_close(gate)]
    }
}

/// Builds a collective, gathers and sums.
fn collective(group: *mut Group, spoilt: &Spoilt) -> Vec<Status> {
    let mut options = Struct::new::<CollectiveOptions>(&[8, SIDELANE_DTYPE_F32], spoilt);
    let mut collective = null_mut();
    // SAFETY: as in `layer`.
    unsafe {
        let built = sidelane_collective_build(group, options.at(), &mut collective);
        if built != Status::SIDELANE_OK {
            return vec![built];
        }
        let CollectiveOptions { columns, dtype, segments, .. } = *options.at();
        let fits = (columns as usize) < ROOM && (segments as usize) < ROOM / columns.max(1) as usize;
        let count = if fits { u64::from(segments.max(1)) } else { 0 };
        let mut data = vec![0_u64; ROOM];
        let mine = Tensor {
            data: data.as_mut_ptr().cast(),
            rows: count,
            columns: columns.into(),
            dtype,
            reserved: 0,
        };
        let (mut rows, mut shares, mut output) = (null_mut(), null_mut(), null_mut());
        let gathered = sidelane_all_gather(collective, &mine, &mut rows, &mut shares);
        let mut statuses = vec![built, gathered];
        if gathered == Status::SIDELANE_OK {
            let mut info = Struct::new::<SharesInfo>(&[], spoilt);
            let asked = sidelane_shares_info(shares, info.at());
            assert!(asked == Status::SIDELANE_OK || spoilt.size != 0);
            statuses.push(sidelane_shares_output(shares, &mut output));
            let summed = sidelane_reduce_scatter(collective, output, null(), shares, &mine);
            statuses.push(if dtype == SIDELANE_DTYPE_BYTES { Status::SIDELANE_OK } else { summed });
        }
        for closed in
            [sidelane_rows_close(rows), sidelane_shares_close(shares), sidelane_collective_close(collective)]
        {
            assert_eq!(closed, Status::SIDELANE_OK);
        }
        statuses
    }
}

/// Takes losses of two tokens, or of none.
fn losses(spoilt: &Spoilt) -> Vec<Status> {
    const EVEN: [f32; 8] = [0.0; 8];
    const FIRST: [i32; 4] = [0, 1, 2, 3];
    let mut balance = Struct::new::<Balance>(&[0x3f80_0000], spoilt);
    let mut of_balance = Struct::empty::<BalanceInput>();
    let mut noised = Struct::empty::<ImportanceInput>();
    let (mut loss, mut gradient, mut counts) = (0.0, [0.0; 8], [0.0; 64]);
    let number = |nth: usize| spoilt.words.get(nth).map_or(0, |&(_, word)| word);
    // SAFETY: the arrays are as large as is said: 64 counts are more than any number of parts that two tokens have.
    unsafe {
        let input: &mut BalanceInput = &mut *of_balance.at();
        let tokens = if number(4) % 3 == 2 { 0 } else { 2 };
        (input.logits, input.tokens, input.choices) = (EVEN.as_ptr(), tokens, FIRST.as_ptr());
        (input.experts, input.top_k) = (4, 1 + number(0) % 2);
        let input: &mut ImportanceInput = &mut *noised.at();
        (input.logits, input.tokens, input.choices) = (EVEN.as_ptr(), 2, FIRST.as_ptr());
        (input.experts, input.top_k, input.noise) = (4, 2, f32::from_bits(number(1)));
        input.coefficient = f32::from_bits(number(2));
        let counted = match (*balance.at::<Balance>()).parts {
            0..16 => sidelane_balance_counts(balance.at(), of_balance.at(), counts.as_mut_ptr()),
            _ => Status::SIDELANE_OK,
        };
        sidelane_importance_loss(noised.at(), &mut loss, gradient.as_mut_ptr());
        sidelane_z_loss(
            f32::from_bits(number(3)),
            EVEN.as_ptr(),
            2,
            4,
            null(),
            &mut loss,
            gradient.as_mut_ptr(),
        );
        vec![counted, sidelane_balance_loss(balance.at(), of_balance.at(), &mut loss, gradient.as_mut_ptr())]
    }
}

/// Asks for information in structs of any size.
fn infos(world: *mut World, group: *mut Group, spoilt: &Spoilt) -> Vec<Status> {
    let mut of_world = Struct::new::<WorldInfo>(&[], spoilt);
    let mut of_group = Struct::new::<GroupInfo>(&[], spoilt);
    let mut preset = Struct::new::<RouterConfig>(&[], spoilt);
    let mut balance = Struct::new::<Balance>(&[], spoilt);
    let name: Vec<c_char> = spoilt.words.iter().map(|&(_, word)| word as c_char).chain([0]).collect();
    let (experts, top_k) = spoilt.words.first().map_or((8, 2), |&(place, word)| (word, place as u32));
    // SAFETY: the structs are as large as any size that is read or written; the name ends with a zero.
    unsafe {
        vec![
            sidelane_world_info(world, of_world.at()),
            sidelane_group_info(group, of_group.at()),
            sidelane_gate_preset(name.as_ptr(), experts, top_k, preset.at()),
            sidelane_gate_preset(c"deepseek_v3".as_ptr(), experts, top_k, preset.at()),
            sidelane_balance_preset(c"tutel".as_ptr(), balance.at()),
            sidelane_world_previous_ranks(world, null_mut(), experts),
        ]
    }
}

/// Handles that nobody gave.
fn strangers(numbers: [u64; 4]) -> Vec<Status> {
    let mut info = Struct::empty::<HandleInfo>();
    let mut of_shares = Struct::empty::<SharesInfo>();
    let mut statuses = Vec::new();
    for number in numbers {
        // All kinds of places, generations and objects.
        for number in [number, number >> 8, number & 0x0f00_0000_0000_0fff, number & 0x0fff] {
            let stranger = number as usize;
            // SAFETY: a number that is no handle is refused before anything is looked at.
            let refused = unsafe {
                [
                    sidelane_handle_info(stranger as *mut Handle, info.at()),
                    sidelane_window_put(stranger as *mut Window, 0, 0, null(), 0),
                    sidelane_ep_dispatch(stranger as *mut Ep, null(), null(), null_mut(), null_mut()),
                    sidelane_dispatch_finish(stranger as *mut PendingDispatch, null_mut(), null_mut()),
                    sidelane_output_close(stranger as *mut Output),
                    sidelane_stream_close(stranger as *mut Stream),
                    sidelane_planned_dispatch_start(stranger as *mut Planned, null(), null(), null_mut()),
                    sidelane_planned_combine_finish(stranger as *mut PlannedCombine, null_mut()),
                    sidelane_slots_synchronize(stranger as *mut Slots, stranger as *mut Stream),
                    sidelane_shares_info(stranger as *mut Shares, of_shares.at()),
                    sidelane_collective_close(stranger as *mut Collective),
                ]
            };
            for status in refused {
                assert!(number == 0 || status == Status::SIDELANE_ERROR_HANDLE, "{number:#x}: {status:?}");
            }
            statuses.extend(refused);
        }
    }
    statuses
}

fn message() -> String {
    // SAFETY: it is a text, and is copied before the next call.
    unsafe { CStr::from_ptr(sidelane_last_message()) }.to_str().expect("UTF-8").to_owned()
}
