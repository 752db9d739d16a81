//! Work requests of puts and signals: by the connection's own count, by its forecast and by the
//! NIC's count.
//!
//! Fixed sequences have fixed numbers. For random sequences the three agree, and the same bytes
//! land over fast and slow NICs.
//!
//! ```text
//!   put, rows, zero, signal, word --> connection's count     requests, packets, bytes, doorbells
//!                                 --> forecast               the same, from the calls alone
//!                                 --> fake NIC's count       as executed
//!                                 --> window of rank 1       bytes: equal if NICs are fast or held
//! ```

use std::sync::Arc;
use std::time::Instant;

use half::bf16;
use proptest::prelude::*;

use super::nics::{SHORT, on_ranks, options};
use crate::bootstrap::locks;
use crate::config::Config;
use crate::gate::{Pattern, synthetic};
use crate::lane::flag::WaitLimits;
use crate::lane::net::{Fabric, NetConnection, RemoteAddress, Settings, SignalMode};
use crate::lane::{MappedWindow, NicCounters, PeerLane, RowSource};
use crate::plan::{Overflow, ReceiveMode, RowLayout};
use crate::schedule::{Index, Tag};
use crate::topology::Route;
use crate::{ExpertParallel, Options};

/// Bytes of the window: a flag's line, landed bytes and, from `SOURCE` on, sent bytes.
const WINDOW: u64 = 1 << 20;
const DATA: u64 = 64;
const SOURCE: u64 = WINDOW / 2;
const ROW: u64 = 64;

/// One end of a connection, and a window at the other.
struct End<'a> {
    connection: &'a dyn NetConnection,
    window: &'a MappedWindow,
    limits: WaitLimits<'a>,
    /// Data that is sent in place, and the same bytes in memory that is not registered.
    registered: &'a [u8],
    elsewhere: &'a [u8],
}

impl End<'_> {
    fn to(&self, offset: u64) -> RemoteAddress {
        self.window.target(1, offset, 1).unwrap()
    }

    fn source(&self, registered: bool) -> &[u8] {
        if registered { self.registered } else { self.elsewhere }
    }

    /// The first `len` bytes of the source to `DATA + at`.
    fn put(&self, at: u64, len: u64, registered: bool) {
        let bytes = &self.source(registered)[..len as usize];
        self.connection.put(self.to(DATA + at), bytes, self.limits).unwrap();
    }

    fn rows(&self, at: u64, rows: &[u32], registered: bool) {
        let source = RowSource { bytes: self.source(registered), row_bytes: ROW, rows, index: Index::Listed };
        self.connection.put_rows(self.to(DATA + at), rows, source, self.limits).unwrap();
    }

    fn zero(&self, at: u64, len: u64) {
        self.connection.zero(self.to(DATA + at), len, self.limits).unwrap();
    }

    fn signal(&self, value: u64, tag: Option<Tag>) {
        self.connection.signal(self.to(0), value, tag, self.limits).unwrap();
    }

    /// A word behind all that, as of a device.
    fn word(&self, at: u64, value: u64) {
        let devices = self.connection.devices().unwrap();
        devices.write_word(self.to(DATA + at), value, self.limits).unwrap();
    }
}

/// Byte `i` of the source.
fn pattern(i: u64) -> u8 {
    (i.wrapping_mul(37) ^ (i >> 6).wrapping_mul(101)) as u8 | 1
}

/// `count` rows, no two of them local peers.
fn scattered(count: usize) -> Vec<u32> {
    (0..count as u32).map(|row| 2 * (row * 7 % 61)).collect()
}

/// NICs that take `pieces` pieces per request and, if `held`, execute only when they are polled.
fn fabric(pieces: u32, held: bool) -> Arc<Fabric> {
    let fabric = Fabric::new(&["nic0"]);
    fabric.change("nic0", |nic| nic.sges = pieces);
    if held {
        fabric.hold();
    }
    fabric
}

/// Ranks with little memory: there are many of them.
fn small(fabric: &Arc<Fabric>, settings: &Settings) -> Options {
    let config = Config { heap: 4 << 20, symmetric: 2 << 20, ..Config::default() };
    let fake_verbs = Some(fabric.ground(settings.clone()));
    Options { config, fake_verbs, ..options(fabric, settings.signal) }
}

/// Requests of rank 0 to its NIC during `act`, and the contents of rank 1 when all has landed.
fn counted(
    fabric: &Arc<Fabric>,
    settings: Settings,
    act: impl Fn(&End<'_>) + Sync,
) -> (NicCounters, Vec<u8>) {
    let options = small(fabric, &settings);
    let mut seen = on_ranks(&[0, 1], &options, |world| {
        let group = world.all().unwrap();
        let lanes = group.lanes(Route::Direct).unwrap();
        let range = group.take_symmetric(WINDOW).unwrap();
        let window = range.window();
        let part = window.parts[world.rank() as usize];
        let mut counted = NicCounters::default();
        if world.rank() == 0 {
            let elsewhere: Vec<u8> = (0..WINDOW - SOURCE).map(pattern).collect();
            window.mapped.write(0, part.offset + SOURCE, &elsewhere).unwrap();
            let PeerLane::Net(connection) = &lanes.reach[1] else { panic!("over a connection") };
            let (connection, limits) = (connection.as_ref(), lanes.limits_of(1));
            let registered = &window.bytes(0).unwrap()[SOURCE as usize..];
            let end = End { connection, window: &window, limits, registered, elsewhere: &elsewhere };
            // The first signal of a word says more than the others.
            end.signal(1, None);
            connection.flush(limits).unwrap();
            let (before, nic) = (connection.counters(), fabric.statistics("nic0"));
            act(&end);
            connection.flush(limits).unwrap();
            counted = connection.counters() - before;
            let seen = fabric.statistics("nic0");
            assert_eq!(counted.requests, seen.requests - nic.requests);
            assert_eq!(counted.doorbells, seen.doorbells - nic.doorbells);
            assert_eq!(asked(connection.counters()), asked(connection.forecast()));
        }
        group.gather(&[]).unwrap();
        let mut landed = vec![0; (SOURCE - DATA) as usize];
        window.mapped.read(world.rank(), part.offset + DATA, &mut landed).unwrap();
        group.gather(&[]).unwrap();
        (counted, landed)
    });
    (seen[0].0, std::mem::take(&mut seen[1].1))
}

#[test]
fn put_takes_only_connection_lock_unless_region_was_imported() {
    let settings = Settings { signal: Some(SignalMode::Write), ..Settings::default() };
    let _ = counted(&fabric(8, false), settings, |end| {
        let taken = |act: &dyn Fn()| {
            let before = locks::taken();
            act();
            locks::taken() - before
        };
        let calls: [&dyn Fn(); 7] = [
            &|| end.put(0, WINDOW / 4, true),
            &|| end.put(0, WINDOW / 4, false),
            &|| end.rows(0, &scattered(50), true),
            &|| end.rows(0, &scattered(50), false),
            &|| end.zero(0, 100_000),
            &|| end.word(4096, 3),
            &|| end.signal(2, None),
        ];
        assert_eq!(calls.map(taken), [1; 7]);
        // A region of the peer, of no bytes.
        end.connection.import_region(7, &[0, 1]).unwrap();
        assert_eq!([taken(calls[0]), taken(calls[0])], [2, 1]);
    });
}

#[test]
fn window_calls_lock_connection_to_their_peer_alone() {
    for signal in [SignalMode::Write, SignalMode::Immediate] {
        let fabric = fabric(8, false);
        let options = small(&fabric, &Settings { signal: Some(signal), ..Settings::default() });
        on_ranks(&[0, 1, 2], &options, |world| {
            let group = world.all().unwrap();
            let mut window = group.window(4096).unwrap();
            window.barrier().unwrap();
            group.gather(&[]).unwrap();
            if world.rank() == 0 {
                let before = locks::taken();
                window.put(1, 0, &[7; 100]).unwrap();
                let put = locks::taken();
                window.put_signal(2, 0, &[7; 100], 1).unwrap();
                let both = locks::taken();
                window.signal(1, 1).unwrap();
                let signalled = locks::taken();
                window.put_nbi(1, 0, 0, 100).unwrap();
                let taken = [put - before, both - put, signalled - both, locks::taken() - signalled];
                // One for each put, signal and settling.
                assert_eq!(taken, [2, 3, 2, 1], "{signal:?}");
            }
            group.gather(&[]).unwrap();
        });
    }
}

#[test]
fn put_nbi_of_own_part_returns_before_it_was_read() {
    const LEN: u64 = 64 << 10;
    let fabric = fabric(8, false);
    on_ranks(&[0, 1], &small(&fabric, &Settings::default()), |world| {
        let group = world.all().unwrap();
        let mut window = group.window(2 * LEN).unwrap();
        window.barrier().unwrap();
        group.gather(&[]).unwrap();
        if world.rank() == 0 {
            window.write(0, &[7; LEN as usize]).unwrap();
            let copied = world.nic_counters().copied;
            fabric.silence("nic0");
            window.put_nbi(1, LEN, 0, LEN).unwrap();
            fabric.change("nic0", |nic| nic.silent = false);
            fabric.flush();
            window.quiet().unwrap();
            assert_eq!(world.nic_counters().copied, copied, "it is read in place");
        }
        group.gather(&[]).unwrap();
        if world.rank() == 1 {
            let mut seen = vec![0; LEN as usize];
            window.read(LEN, &mut seen).unwrap();
            assert!(seen.iter().all(|&byte| byte == 7));
        }
        group.gather(&[]).unwrap();
    });
}

/// Counts that do not depend on time, even if something waits for credit.
fn asked(counters: NicCounters) -> NicCounters {
    NicCounters { doorbells: 0, completions: 0, received: 0, ..counters }
}

/// How many work requests what `act` does are, with one doorbell for all of them, and a signal.
fn requests(pieces: u32, signal: SignalMode, act: impl Fn(&End<'_>) + Sync) -> u64 {
    let settings = Settings { signal: Some(signal), ..Settings::default() };
    let (counted, _) = counted(&fabric(pieces, false), settings, |end| {
        act(end);
        end.signal(2, None);
    });
    assert_eq!(counted.doorbells, 1);
    counted.requests
}

/// Requests of a signal by itself, when it does not travel with a put.
fn alone(signal: SignalMode) -> u64 {
    u64::from(signal != SignalMode::Immediate)
}

#[test]
fn rows_up_to_pieces_and_signal_are_one_request_more_are_two() {
    for (signal, pieces) in SignalMode::ALL.into_iter().flat_map(|signal| [2, 30].map(|n| (signal, n))) {
        for (rows, expected) in [(1, 1), (pieces as usize, 1), (pieces as usize + 1, 2)] {
            let seen = requests(pieces, signal, |end| end.rows(0, &scattered(rows), true));
            assert_eq!(seen, expected + alone(signal), "{rows} rows of {pieces}, {signal:?}");
        }
        let seen = requests(pieces, signal, |end| end.rows(0, &[5, 6, 7, 8, 9, 10], true));
        assert_eq!(seen, 1 + alone(signal), "adjacent rows are one piece");
    }
}

#[test]
fn header_and_rows_that_fit_are_one_request_one_row_more_two() {
    for (signal, pieces) in SignalMode::ALL.into_iter().flat_map(|signal| [2, 30].map(|n| (signal, n))) {
        // Copied, and large enough to be read in place.
        for header in [ROW, 2048] {
            for (rows, expected) in [(pieces as usize - 1, 1), (pieces as usize, 2)] {
                let seen = requests(pieces, signal, |end| {
                    end.put(0, header, true);
                    end.rows(header, &scattered(rows), true);
                });
                let what = (header, rows, pieces, signal);
                assert_eq!(seen, expected + alone(signal), "{what:?}");
            }
        }
    }
}

#[test]
fn put_to_another_place_begins_a_request() {
    for signal in SignalMode::ALL {
        let two = |act: fn(&End<'_>)| assert_eq!(requests(8, signal, act), 2 + alone(signal), "{signal:?}");
        two(|end| {
            end.put(0, ROW, true);
            end.rows(ROW + 16, &[3], true);
        });
        two(|end| {
            end.put(ROW, ROW, true);
            end.put(0, ROW, true);
        });
        let one = |act: fn(&End<'_>)| assert_eq!(requests(8, signal, act), 1 + alone(signal), "{signal:?}");
        one(|end| {
            end.rows(0, &[3, 9, 1], false);
            end.zero(3 * ROW, 100);
            end.put(3 * ROW + 100, 5000, true);
        });
    }
}

#[test]
fn gathered_write_ends_at_chunk_signal_or_settle() {
    let settings = Settings { chunk: 4096, signal: Some(SignalMode::Immediate), ..Settings::default() };
    let (all, _) = counted(&fabric(8, false), settings, |end| {
        end.put(0, 96, false);
        // Two chunks in all: the first is as long as possible.
        end.put(96, 8096, true);
        end.signal(2, None);
        end.put(8192, 100, false);
        end.signal(3, None);
        end.put(8292, 100, false);
        end.connection.settle(end.limits).unwrap();
        end.put(8392, 100, false);
    });
    assert_eq!((all.requests, all.bytes), (2 + 1 + 1 + 1, 8192 + 300));
    assert_eq!(all.doorbells, 5, "for the full chunk, for each signal, for the settling and for the end");
}

#[test]
fn each_chunk_is_posted_when_next_bytes_come() {
    let settings = Settings { chunk: 4096, signal: Some(SignalMode::Write), ..Settings::default() };
    let acts: [fn(&End<'_>); 4] = [
        |end| end.put(0, 5 * 4096, true),
        |end| end.put(0, 5 * 4096, false),
        // Puts to other places, and rows of which eight are a request.
        |end| (0..10).for_each(|nth| end.put(nth * 8192, 2048, nth % 2 == 0)),
        |end| (0..5).for_each(|_| end.rows(0, &scattered(61), true)),
    ];
    for act in acts {
        let (all, _) = counted(&fabric(8, false), settings.clone(), |end| {
            let doorbells = || (end.connection.counters().doorbells, end.connection.forecast().doorbells);
            let before = doorbells();
            act(end);
            assert_eq!(doorbells(), (before.0 + 4, before.1 + 4));
            end.signal(2, None);
            assert_eq!(doorbells(), (before.0 + 5, before.1 + 5), "the last chunk goes with the signal");
        });
        assert_eq!((all.doorbells, all.completions), (5, 5));
    }
}

#[test]
fn copied_puts_fill_window_before_nic_completes_any() {
    let in_flight = 64 << 10;
    let settings =
        Settings { chunk: 4096, in_flight, signal: Some(SignalMode::Write), ..Settings::default() };
    let fabric = fabric(8, false);
    let _ = counted(&fabric, settings, |end| {
        fabric.silence("nic0");
        let before = end.connection.counters();
        end.put(0, in_flight, false);
        end.connection.settle(end.limits).unwrap();
        let posted = end.connection.counters() - before;
        assert_eq!((posted.requests, posted.completions, posted.copied), (16, 0, in_flight));
        fabric.change("nic0", |nic| nic.silent = false);
        fabric.flush();
    });
}

/// Counts of both ranks' connections for a put of `len` bytes and a signal from rank 0 to rank 1.
fn put_and_signal(fabric: &Arc<Fabric>, signal: Option<SignalMode>, len: usize) -> [NicCounters; 2] {
    let counted = on_ranks(&[0, 1], &options(fabric, signal), |world| {
        let mut window = world.all().unwrap().window(1 << 20).unwrap();
        let group = world.all().unwrap();
        if world.rank() == 0 {
            // The first signal of a word carries more than the others.
            window.signal(1, 1).unwrap();
            window.quiet().unwrap();
        } else {
            window.wait_until(0, 1).unwrap();
        }
        let before = world.nic_counters();
        group.gather(&[]).unwrap();
        if world.rank() == 0 {
            window.put_signal(1, 64, &vec![7; len], 2).unwrap();
            window.quiet().unwrap();
            assert_eq!(world.nic_counters(), world.nic_forecast());
        } else {
            window.wait_until(0, 2).unwrap();
            let mut seen = vec![0; len];
            window.read(64, &mut seen).unwrap();
            assert!(seen.iter().all(|&byte| byte == 7));
        }
        let counted = world.nic_counters() - before;
        group.gather(&[]).unwrap();
        window.barrier().unwrap();
        counted
    });
    [counted[0], counted[1]]
}

#[test]
fn put_and_signal_are_2_requests_or_1_immediate_on_1_doorbell() {
    for len in [8u64, 4096, 8192, 8193] {
        let one_way = |signal| {
            let [from, to] = put_and_signal(&fabric(8, false), Some(signal), len as usize);
            assert_eq!((from.doorbells, from.completions, from.received), (1, 1, 0), "{signal:?}, {len}");
            assert_eq!((to.requests, to.completions), (0, 0), "{signal:?}, {len}");
            (from.requests, from.bytes, to.received)
        };
        assert_eq!(one_way(SignalMode::Write), (2, len + 8, 0));
        assert_eq!(one_way(SignalMode::FetchAdd), (2, len, 0));
        // The packets of a larger write take all paths, which those with an immediate do not.
        let requests = if len > 8192 { 2 } else { 1 };
        assert_eq!(one_way(SignalMode::Immediate), (requests, len, 1));
    }
}

#[test]
fn signals_are_immediates_unless_both_nics_keep_order() {
    const SOFT_ROCE: (u32, u32) = (0xff_ffff, 0);
    const CONNECT_X_7: (u32, u32) = (0x02c9, 4129);
    for (vendors, received) in [
        ([SOFT_ROCE; 2], 0),
        ([SOFT_ROCE, CONNECT_X_7], 1),
        ([CONNECT_X_7, SOFT_ROCE], 1),
        ([CONNECT_X_7; 2], 1),
    ] {
        let fabric = Fabric::new(&["nic0", "nic1"]);
        for (nic, vendor) in ["nic0", "nic1"].into_iter().zip(vendors) {
            fabric.change(nic, |nic| nic.vendor = vendor);
        }
        let [_, to] = put_and_signal(&fabric, None, 64);
        assert_eq!(to.received, received, "{vendors:?}");
        let reports = on_ranks(&[0, 1], &options(&fabric, None), |world| world.net().unwrap().clone());
        for ((report, vendor), nic) in reports.iter().zip(vendors).zip(["nic0", "nic1"]) {
            let known = vendor == SOFT_ROCE;
            let reason = match known {
                true => "requested; signals by write to NICs that place writes in order".to_owned(),
                false => format!("requested; signals by immediate: {nic} may place writes in any order"),
            };
            assert_eq!(report.reason, reason);
            let order = if known { "writes in order: Soft-RoCE" } else { "writes perhaps in any order" };
            assert!(report.nics[0].ends_with(order), "{:?}", report.nics);
        }
    }
}

#[test]
fn word_after_rows_rings_own_doorbell_unless_signals_are_writes() {
    for (signal, doorbells) in [(SignalMode::Write, 1), (SignalMode::FetchAdd, 2), (SignalMode::Immediate, 2)]
    {
        for held in [false, true] {
            let settings = Settings { signal: Some(signal), ..Settings::default() };
            let (seen, landed) = counted(&fabric(8, held), settings, |end| {
                end.rows(0, &scattered(8), true);
                end.word(4096, 3);
                end.signal(2, None);
            });
            // Rows, word and signal; the word travels with nothing.
            assert_eq!((seen.requests, seen.doorbells, seen.completions), (3, doorbells, doorbells));
            assert_eq!(landed[4096..4104], 3u64.to_ne_bytes());
        }
    }
}

#[test]
fn credit_for_taken_signals_does_not_end_gathered_write() {
    let fabric = fabric(8, false);
    let options = small(&fabric, &Settings { signal: Some(SignalMode::Immediate), ..Settings::default() });
    on_ranks(&[0, 1], &options, |world| {
        let group = world.all().unwrap();
        let lanes = group.lanes(Route::Direct).unwrap();
        let range = group.take_symmetric(4096).unwrap();
        let (window, peer) = (range.window(), 1 - world.rank());
        let PeerLane::Net(connection) = &lanes.reach[peer as usize] else { panic!("over a connection") };
        let limits = lanes.limits_of(peer);
        let to = |offset| window.target(peer, offset, 1).unwrap();
        connection.signal(to(0), 1, None, limits).unwrap();
        connection.flush(limits).unwrap();
        let before = connection.counters();
        if world.rank() == 0 {
            connection.put(to(64), &[1; 100], limits).unwrap();
        }
        group.gather(&[]).unwrap();
        if world.rank() == 1 {
            // With the first one a quarter of the receives: then there is a count to report.
            for value in 2..=64 {
                connection.signal(to(0), value, None, limits).unwrap();
            }
            connection.flush(limits).unwrap();
        } else {
            let until = Instant::now() + SHORT;
            while connection.counters().requests == before.requests {
                assert!(Instant::now() < until, "nothing is told");
                lanes.progress();
            }
            connection.put(to(164), &[2; 100], limits).unwrap();
            connection.signal(to(0), 2, None, limits).unwrap();
            connection.flush(limits).unwrap();
            let counted = connection.counters() - before;
            assert_eq!((counted.requests, counted.doorbells, counted.bytes), (2, 2, 8 + 200));
            assert_eq!(asked(connection.counters()), asked(connection.forecast()));
        }
        group.gather(&[]).unwrap();
        let mut seen = [0u8; 200];
        window.mapped.read(world.rank(), window.parts[world.rank() as usize].offset + 64, &mut seen).unwrap();
        group.gather(&[]).unwrap();
        let expected = if world.rank() == 1 { [[1; 100], [2; 100]].concat() } else { vec![0; 200] };
        assert!(seen[..] == expected[..]);
    });
}

/// Parts of a block that is relayed.
const CHUNKS: usize = 4;

/// Requests of each rank in a dispatch of `tokens` tokens into fixed slots, when all words have
/// been named.
fn dispatched(route: Route, signal: SignalMode, tokens: usize, registered: bool) -> Vec<NicCounters> {
    const HIDDEN: usize = 64;
    let nodes: &[u32] = if route == Route::Pxn { &[0, 0, 1, 1] } else { &[0, 1] };
    let experts = 4 * nodes.len() as u32;
    on_ranks(
        nodes,
        &small(&fabric(8, false), &Settings { signal: Some(signal), ..Settings::default() }),
        |world| {
            let group = world.all().unwrap();
            let builder = ExpertParallel::builder(&group).experts(experts).top_k(experts).hidden(HIDDEN);
            let mode = ReceiveMode::Slots { rows: 7, overflow: Overflow::Error };
            let mut ep =
                builder.layout(RowLayout::RankMajor).mode(mode).route(route).max_tokens(7).build().unwrap();
            // Every token goes to every rank.
            let routing =
                synthetic(Pattern::Uniform, experts, experts, tokens as u32, 7, world.rank()).unwrap();
            let mut buffer = ep.token_buffer(tokens as u32).unwrap();
            let elsewhere: Vec<bf16> =
                (0..tokens * HIDDEN).map(|i| bf16::from_f32((i % 97) as f32)).collect();
            buffer.rows_mut::<bf16>().unwrap().copy_from_slice(&elsewhere);
            let mut counted = NicCounters::default();
            for _ in 0..3 {
                group.gather(&[]).unwrap();
                let before = world.nic_counters();
                let x = if registered { buffer.rows::<bf16>().unwrap() } else { &elsewhere };
                let (rows, handle) = ep.dispatch(x, &routing).unwrap();
                counted = world.nic_counters() - before;
                let used = rows.rows::<bf16>().unwrap().chunks(7 * HIDDEN);
                assert!(
                    used.len() == nodes.len()
                        && used.into_iter().all(|slots| {
                            slots[..tokens * HIDDEN] == elsewhere
                                && slots[tokens * HIDDEN..].iter().all(|&x| x == bf16::ZERO)
                        })
                );
                drop((rows, handle));
                assert_eq!(asked(world.nic_counters()), asked(world.nic_forecast()));
            }
            counted
        },
    )
}

#[test]
fn slot_dispatch_posts_as_many_requests_as_puts_and_signals() {
    for (signal, registered) in
        SignalMode::ALL.into_iter().flat_map(|signal| [false, true].map(|r| (signal, r)))
    {
        for tokens in [1, 3, 7] {
            let immediate = signal == SignalMode::Immediate;
            // This node's entry, and the signal; the header of the block, and the signal with its
            // tag.
            let before = if immediate { 1 + 2 } else { 2 + 3 };
            // Rows with the zeros of unused slots; their metadata with its zeros; the signal.
            let slot = if immediate { 1 + 1 } else { 1 + 1 + 1 };
            // Rows of each chunk that has any, and its signal: the relay makes the zeros.
            let chunks = if immediate { CHUNKS } else { CHUNKS.min(tokens) + CHUNKS };
            for (route, expected) in [(Route::Direct, before + slot), (Route::Pxn, before + chunks)] {
                for seen in dispatched(route, signal, tokens, registered) {
                    let what = format!("{route:?}, {tokens} tokens, {signal:?}, registered {registered}");
                    assert_eq!(seen.requests, expected as u64, "{what}");
                }
            }
        }
    }
}

/// A step of a rank that puts this and that.
#[derive(Clone, Debug)]
enum Step {
    Put { len: u64, registered: bool },
    Rows { rows: Vec<u32>, registered: bool },
    Zero { len: u64 },
    Word,
    Signal { tagged: bool },
    Settle,
    Gap,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let rows = || prop::collection::vec(0..40u32, 1..12);
    let step = prop_oneof![
        4 => (1..6000u64, any::<bool>()).prop_map(|(len, registered)| Step::Put { len, registered }),
        4 => (rows(), any::<bool>()).prop_map(|(rows, registered)| Step::Rows { rows, registered }),
        2 => (1..3000u64).prop_map(|len| Step::Zero { len }),
        1 => Just(Step::Word),
        1 => any::<bool>().prop_map(|tagged| Step::Signal { tagged }),
        1 => Just(Step::Settle),
        1 => Just(Step::Gap),
    ];
    prop::collection::vec(step, 1..40)
}

/// Contents of the peer's memory after the steps.
fn landed(steps: &[Step]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for step in steps {
        match step {
            Step::Put { len, .. } => bytes.extend((0..*len).map(pattern)),
            Step::Rows { rows, .. } => {
                let row = |&row: &u32| (0..ROW).map(move |i| pattern(u64::from(row) * ROW + i));
                bytes.extend(rows.iter().flat_map(row));
            }
            Step::Zero { len } => bytes.resize(bytes.len() + *len as usize, 0),
            Step::Gap => bytes.resize(bytes.len() + 16, 0),
            Step::Word => bytes.extend(bytes.len().to_ne_bytes()),
            Step::Signal { .. } | Step::Settle => {}
        }
    }
    bytes.resize((SOURCE - DATA) as usize, 0);
    bytes
}

fn perform(steps: &[Step], end: &End<'_>) {
    let (mut at, mut value) = (0, 1);
    for step in steps {
        match step {
            Step::Put { len, registered } => {
                end.put(at, *len, *registered);
                at += len;
            }
            Step::Rows { rows, registered } => {
                end.rows(at, rows, *registered);
                at += rows.len() as u64 * ROW;
            }
            Step::Zero { len } => {
                end.zero(at, *len);
                at += len;
            }
            Step::Gap => at += 16,
            Step::Word => {
                end.word(at, at);
                at += 8;
            }
            Step::Signal { tagged } => {
                value += 1;
                end.signal(value, tagged.then(Tag::default));
            }
            Step::Settle => end.connection.settle(end.limits).unwrap(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Little staging, so that a slow NIC makes its sender wait often, also in the middle of a
    /// write. It places writes in any order, where signals allow that.
    #[test]
    fn request_count_of_calls_is_independent_of_nic_speed(
        steps in steps(),
        signal in prop::sample::select(SignalMode::ALL.to_vec()),
        pieces in 2..9u32,
    ) {
        let settings = Settings { chunk: 4096, in_flight: 4096, signal: Some(signal), ..Settings::default() };
        let [fast, slow] = [false, true].map(|held| {
            let fabric = fabric(pieces, held);
            if held && signal != SignalMode::Write {
                fabric.shuffle();
            }
            let (counted, seen) = counted(&fabric, settings.clone(), |end| perform(&steps, end));
            assert!(seen == landed(&steps), "{signal:?}, {pieces}, held {held}");
            asked(counted)
        });
        prop_assert_eq!(fast, slow);
    }
}
