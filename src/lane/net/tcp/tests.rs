//! Addresses that a rank offers; and tests at a connection: one end is the lane's, and the test
//! acts as the other one.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connection::{LONGEST, Poller, Shared, TcpConnection};
use super::{ListenAddresses, TcpTransport, parse};
use crate::bootstrap::{Health, Hub, Timeouts, threads};
use crate::config::TcpAddress;
use crate::error::{BootstrapError, Cause, Error, LaneError};
use crate::lane::flag::{WaitError, WaitLimits};
use crate::lane::net::regions::{HEADER, Record};
use crate::lane::net::{NetConnection, NetTransport, Region, Regions, RemoteAddress};
use crate::memory::{PeerMapping, Segment};

const LONG: Duration = Duration::from_secs(60);
const GRACE: Duration = Duration::from_millis(50);
/// Bytes of region 0.
const REGION: u64 = 64 << 10;

/// The end of rank 0, and the stream of rank 1.
struct Pair {
    link: TcpConnection,
    theirs: TcpStream,
    regions: Arc<Regions>,
    hubs: Vec<Box<dyn Hub>>,
}

fn pair() -> Pair {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let ours = listener.accept().unwrap().0;
    ours.set_nonblocking(true).unwrap();
    let regions = Arc::new(Regions::default());
    let segment = Segment::create("sidelane-test", REGION).unwrap();
    let mapped = Arc::new(PeerMapping::new(&[Some(&segment)]).unwrap());
    regions.add(Region { mapped, member: 0 });
    let hubs = threads(2, Timeouts::default());
    let health = Arc::clone(hubs[0].health());
    let (poller, grace) = (Arc::new(Poller::new().unwrap()), GRACE);
    let shared = Shared { rank: 0, regions: Arc::clone(&regions), health, poller, grace };
    Pair { link: TcpConnection::new(1, ours, shared).unwrap(), theirs, regions, hubs }
}

impl Pair {
    fn health(&self) -> &Health {
        self.hubs[0].health()
    }

    fn limits_of(&self, deadline: Duration) -> WaitLimits<'_> {
        WaitLimits { health: self.health(), oversubscribed: false, deadline, awaited: 1, silent: false }
    }

    /// Serves the connection until something holds.
    fn progress_until(&self, holds: impl Fn() -> bool) {
        let until = Instant::now() + LONG;
        while !holds() {
            assert!(Instant::now() < until, "in time");
            self.link.progress(self.health());
            std::thread::yield_now();
        }
    }

    fn seen(&self, offset: u64, len: u64) -> Vec<u8> {
        let copy = |at: Option<std::ptr::NonNull<u8>>| {
            // SAFETY: checked against the region; no one writes there now.
            unsafe { std::slice::from_raw_parts(at.unwrap().as_ptr(), len as usize) }.to_vec()
        };
        self.regions.with(0, offset, len, copy).unwrap()
    }

    fn flag(&self) -> u64 {
        u64::from_ne_bytes(self.seen(0, 8).try_into().unwrap())
    }
}

fn header(record: Record) -> Vec<u8> {
    record.to_bytes().to_vec()
}

fn put(region: u32, offset: u64, bytes: &[u8]) -> Vec<u8> {
    [&header(Record::Put { region, offset, len: bytes.len() as u64 }), bytes].concat()
}

fn signal(value: u64) -> Vec<u8> {
    header(Record::Signal { region: 0, offset: 0, value, tag: None })
}

#[test]
fn records_come_out_whole_however_the_stream_is_cut() {
    let bytes: Vec<u8> = (0..20_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
    for cut in [1, 63, 64, 65, 4095, 4096, 5000, 1 << 20] {
        let mut pair = pair();
        let gone =
            pair.regions.add(Region { mapped: Arc::new(PeerMapping::new(&[None]).unwrap()), member: 0 });
        pair.regions.remove(gone);
        let stream = [
            put(0, 64, &bytes[..10]),
            put(0, 100, &bytes),
            put(0, 99, &[]),
            // In flight when its owner dropped the region.
            put(gone, 1 << 40, &bytes),
            header(Record::Zero { region: 0, offset: 200, len: 50 }),
            put(0, 30_000, &bytes[..5]),
            signal(3),
        ];
        let stream = stream.concat();
        let pieces = if cut == 1 { stream.chunks(97) } else { stream.chunks(cut) };
        for piece in pieces {
            pair.theirs.write_all(piece).unwrap();
            pair.link.progress(pair.health());
        }
        pair.progress_until(|| pair.flag() == 3);
        let mut expected = bytes.clone();
        expected[100..150].fill(0);
        assert_eq!(pair.seen(64, 10), bytes[..10]);
        assert!(pair.seen(100, 20_000) == expected, "in pieces of {cut}");
        assert_eq!(pair.seen(30_000, 5), bytes[..5]);
        assert_eq!(pair.health().check(), Ok(()));
    }
}

#[test]
fn invalid_record_ends_the_world_and_names_its_sender() {
    let far = Record::Put { region: 0, offset: REGION - 9, len: 10 };
    for nonsense in [
        vec![0xff; HEADER],
        put(1, 0, &[1; 10]),
        header(far),
        header(Record::Put { region: 0, offset: u64::MAX, len: 2 }),
        header(Record::Put { region: 0, offset: 0, len: LONGEST as u64 + 1 }),
        header(Record::Zero { region: 0, offset: 0, len: u64::MAX }),
        header(Record::Signal { region: 0, offset: 24, value: 1, tag: None }),
        header(Record::Signal { region: 0, offset: REGION, value: 1, tag: None }),
        header(Record::Skip { len: 64 }),
    ] {
        let mut pair = pair();
        pair.theirs.write_all(&[put(0, 100, b"before"), nonsense.clone()].concat()).unwrap();
        pair.progress_until(|| pair.health().check().is_err());
        assert_eq!(pair.health().cause(), Some(Cause::Protocol { rank: 1 }), "{nonsense:?}");
        assert_eq!((pair.seen(100, 6), pair.link.fault()), (b"before".to_vec(), None));
        assert!(pair.seen(106, REGION - 106).iter().all(|&byte| byte == 0), "nothing else was written");
    }
}

/// Puts more than can be in flight to a peer that reads nothing.
fn give_up(pair: &Pair, deadline: Duration) -> WaitError {
    let bytes = vec![7; 64 << 20];
    let stuck = pair.link.put(RemoteAddress { region: 0, offset: 0 }, &bytes, pair.limits_of(deadline));
    let stuck = stuck.unwrap_err();
    assert!(stuck.awaited > stuck.seen && stuck.seen > 0, "{stuck:?}");
    stuck.why
}

#[test]
fn a_peer_that_takes_nothing_is_waited_for_until_the_deadline() {
    let late = give_up(&pair(), Duration::from_millis(20));
    assert!(matches!(late, WaitError::Late { waited } if waited >= Duration::from_millis(20)), "{late:?}");
}

#[test]
fn a_dead_world_ends_the_wait_for_room_with_its_cause() {
    let (pair, cause) = (pair(), Cause::Cancelled { by: 1 });
    std::thread::scope(|scope| {
        let filling = scope.spawn(|| give_up(&pair, Duration::from_secs(600)));
        pair.health().fail(cause.clone());
        assert_eq!(filling.join().unwrap(), WaitError::Dead(cause));
    });
}

#[test]
fn a_put_that_was_given_up_leaves_the_stream_whole() {
    let pair = pair();
    give_up(&pair, Duration::from_millis(20));
    let mut theirs = pair.theirs.try_clone().unwrap();
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let mut offset = 0;
            loop {
                let mut header = [0; HEADER];
                theirs.read_exact(&mut header).unwrap();
                match Record::from_bytes(header).unwrap() {
                    Record::Put { region: 0, offset: at, len } => {
                        assert_eq!(at, offset);
                        offset += len;
                        let mut payload = vec![0; len as usize];
                        theirs.read_exact(&mut payload).unwrap();
                        assert!(payload.iter().all(|&byte| byte == 7));
                    }
                    Record::Signal { value: 5, .. } => return offset,
                    other => panic!("{other:?}"),
                }
            }
        });
        let to = RemoteAddress { region: 0, offset: 0 };
        pair.link.signal(to, 5, None, pair.limits_of(LONG)).unwrap();
        pair.progress_until(|| reader.is_finished());
        let came = reader.join().unwrap();
        assert!(came > 0 && came < 64 << 20 && came.is_multiple_of(LONGEST as u64), "{came}");
    });
}

#[test]
fn tcp_ask_is_answered_after_earlier_puts_and_answer_ends_flush() {
    let mut pair = pair();
    let question = header(Record::Ask { mark: 9 });
    pair.theirs.write_all(&[put(0, 100, b"landed"), question].concat()).unwrap();
    let mut theirs = pair.theirs.try_clone().unwrap();
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let mut header = [0; HEADER];
            theirs.read_exact(&mut header).unwrap();
            Record::from_bytes(header)
        });
        pair.progress_until(|| reader.is_finished());
        assert_eq!(reader.join().unwrap(), Some(Record::Answer { mark: 9 }));
    });
    assert_eq!(pair.seen(100, 6), b"landed");
    let late = pair.link.flush(pair.limits_of(Duration::from_millis(20))).unwrap_err();
    assert_eq!((late.awaited, late.seen), (1, 0));
    pair.theirs.write_all(&header(Record::Answer { mark: 2 })).unwrap();
    pair.link.flush(pair.limits_of(LONG)).unwrap();
}

#[test]
fn broken_connection_of_live_peer_ends_world_after_grace() {
    for reset in [true, false] {
        let Pair { link, mut theirs, hubs, regions } = pair();
        theirs.write_all(&signal(4)).unwrap();
        if reset {
            rustix::net::sockopt::set_socket_linger(&theirs, Some(Duration::ZERO)).unwrap();
        }
        let broke = Instant::now();
        drop(theirs);
        let health = hubs[0].health();
        while health.check().is_ok() {
            link.progress(health);
            assert!(broke.elapsed() < LONG, "in time");
        }
        assert!(broke.elapsed() >= GRACE, "others are heard first");
        assert_eq!(health.cause(), Some(Cause::Connection { rank: 1, by: 0 }));
        let errno = if reset { rustix::io::Errno::CONNRESET.raw_os_error() } else { 0 };
        assert_eq!(link.fault(), Some(LaneError::Wire { rank: 0, peer: 1, lane: "tcp", errno }));
        // Records that came before the end count.
        assert_eq!(
            regions.with(0, 0, 8, |at| at.map(|at| at.cast::<u64>())).unwrap().map(|at| {
                // SAFETY: eight aligned bytes of the region.
                unsafe { at.as_ptr().read() }
            }),
            Some(4)
        );
        // And a put does not hang.
        let limits = WaitLimits { health, oversubscribed: false, deadline: LONG, awaited: 1, silent: false };
        let stuck = link.put(RemoteAddress { region: 0, offset: 0 }, &[1; 10], limits);
        assert!(stuck.is_ok() || matches!(stuck.unwrap_err().why, WaitError::Dead(_)));
    }
}

#[test]
fn reset_met_by_sender_is_reported_though_read_finds_only_end() {
    let Pair { link, theirs, hubs, .. } = pair();
    rustix::net::sockopt::set_socket_linger(&theirs, Some(Duration::ZERO)).unwrap();
    drop(theirs);
    let health = hubs[0].health();
    let limits = WaitLimits { health, oversubscribed: false, deadline: LONG, awaited: 1, silent: false };
    // A put that finds room reads nothing.
    let stuck = loop {
        if let Err(stuck) = link.put(RemoteAddress { region: 0, offset: 0 }, &[1; 10], limits) {
            break stuck;
        }
    };
    assert_eq!(stuck.why, WaitError::Dead(Cause::Connection { rank: 1, by: 0 }));
    let errno = rustix::io::Errno::CONNRESET.raw_os_error();
    assert_eq!(link.fault(), Some(LaneError::Wire { rank: 0, peer: 1, lane: "tcp", errno }));
}

#[test]
fn a_connection_that_ends_because_its_peer_left_is_no_fault() {
    let Pair { link, theirs, mut hubs, .. } = pair();
    drop(theirs);
    drop(hubs.pop());
    let (health, since) = (hubs[0].health(), Instant::now());
    while since.elapsed() < GRACE * 3 {
        link.progress(health);
        std::thread::park_timeout(GRACE / 10);
    }
    assert_eq!((health.check(), link.fault()), (Ok(()), None));
    let limits = WaitLimits { health, oversubscribed: false, deadline: LONG, awaited: 1, silent: false };
    let stuck = link.put(RemoteAddress { region: 0, offset: 0 }, &vec![1; 64 << 20], limits).unwrap_err();
    let lost = Cause::Lost { rank: 1, how: crate::error::LostReason::Closed };
    assert_eq!(stuck.why, WaitError::Dead(lost), "a wait for it ends");
}

/// How often this thread has let go of its core because there was nothing to do.
fn sleeps_of_this_thread() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
    count.trim().parse().unwrap()
}

#[test]
fn leave_waits_for_last_sends_but_not_for_stuck_peer() {
    let mut pair = pair();
    let (since, sleeps) = (Instant::now(), sleeps_of_this_thread());
    pair.link.leave(since + GRACE);
    assert!(since.elapsed() >= GRACE, "the peer did not answer");
    assert!(sleeps_of_this_thread() > sleeps, "room to send is no news");
    let mut theirs = pair.theirs.try_clone().unwrap();
    pair.theirs.write_all(&header(Record::Answer { mark: 2 })).unwrap();
    pair.link.leave(Instant::now() + LONG);
    let mut asked = [0; 2 * HEADER];
    theirs.read_exact(&mut asked).unwrap();
    let marks = asked.chunks(HEADER).map(|bytes| Record::from_bytes(bytes.try_into().unwrap()));
    assert!(marks.eq([1, 2].map(|mark| Some(Record::Ask { mark }))));
    pair.health().fail(Cause::Cancelled { by: 0 });
    let since = Instant::now();
    pair.link.leave(since + LONG);
    assert!(since.elapsed() < LONG / 2, "a failed world waits for no rank");
}

#[test]
fn one_poll_finds_all_ready_sockets_but_no_removed_one() {
    let poller = Poller::new().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ends: Vec<_> = (0..3)
        .map(|_| {
            let theirs = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let ours = listener.accept().unwrap().0;
            let polled = poller.add(&ours).unwrap();
            (ours, theirs, polled)
        })
        .collect();
    assert!(ends.iter().all(|(.., polled)| !poller.is_ready(polled)));
    for at in [0, 2] {
        ends[at].1.write_all(b"news").unwrap();
    }
    poller.remove(&ends[2].0);
    let until = Instant::now() + LONG;
    while !poller.is_ready(&ends[0].2) {
        assert!(Instant::now() < until, "in time");
    }
    for _ in 0..3 {
        assert!(!poller.is_ready(&ends[1].2) && !poller.is_ready(&ends[2].2));
    }
    assert!(poller.is_ready(&ends[0].2), "as long as no thread reads");
    poller.watch_for_space(&ends[1].0, &ends[1].2, true);
    while !poller.is_ready(&ends[1].2) {
        assert!(Instant::now() < until, "in time");
    }
}

#[test]
fn connect_to_an_unserved_address_names_the_reason() {
    let timeouts = Timeouts { rendezvous: Duration::from_millis(100), ..Timeouts::default() };
    let hubs = threads(2, timeouts);
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (pass, health) = (hubs[1].pass().unwrap(), Arc::clone(hubs[1].health()));
    let wires = TcpTransport::open(pass, &TcpAddress::Any, timeouts, health, Arc::default()).unwrap();
    let offered = address.to_string().into_bytes().into();
    let error = wires.open(0).unwrap().connect(offered).unwrap_err();
    let Error::Lane(LaneError::NoConnection { rank: 1, peer: 0, addresses, reason, .. }) = error else {
        panic!("{error}")
    };
    assert_eq!(addresses, [address]);
    let errno = rustix::io::Errno::CONNREFUSED.raw_os_error();
    assert_eq!(reason.as_deref(), Some(&BootstrapError::System { call: "connect", errno }));
}

#[test]
fn ranks_that_meet_on_loopback_stay_there() {
    let auth = threads(2, Default::default())[1].pass().unwrap();
    let addresses = ListenAddresses::find(&auth, &TcpAddress::Any).unwrap();
    let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
    assert_eq!(addresses, ListenAddresses { bind: loopback, offered: vec![loopback] });
    assert_eq!(parse(addresses.to_text(80).as_bytes(), None), Some(vec![(loopback, 80).into()]));
}

#[test]
fn interface_name_means_its_address_and_missing_one_is_error() {
    let auth = threads(2, Default::default())[0].pass().unwrap();
    let find = |name: &str| ListenAddresses::find(&auth, &TcpAddress::Interface(name.to_owned()));
    assert_eq!(find("lo").unwrap().offered, [IpAddr::from(Ipv4Addr::LOCALHOST)]);
    let error = find("no such interface").unwrap_err();
    assert!(matches!(error, BootstrapError::BadVariable { name: "SIDELANE_TCP_ADDRESS", .. }), "{error}");
}

#[test]
fn unspecified_address_becomes_one_that_rendezvous_sees() {
    let seen = "10.1.2.3".parse().unwrap();
    let (address, other) = ("10.1.2.3:77".parse().unwrap(), "[fd00::1]:77".parse().unwrap());
    assert_eq!(parse(b"0.0.0.0:77,[fd00::1]:77", Some(seen)), Some(vec![address, other]));
    assert_eq!(parse(b"0.0.0.0:77", None), None);
    assert_eq!(parse(b"10.1.2.3", Some(seen)), None);
    assert_eq!(parse(b"\xff", Some(seen)), None);
}
