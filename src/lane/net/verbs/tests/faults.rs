//! Requests that fail.

use std::os::fd::AsFd;

use rustix::io::Errno;

use super::*;
use crate::error::{CompletionStatus, Operation, VerbsError};

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
        let lost = VerbsError::QueuePairLost {
            card: "b".into(),
            queue_pair: b.pair.endpoint().queue_pair,
            event: "the peer aimed outside what is registered",
        };
        assert_eq!((b.rail.context.check(), b.rail.context.check()), (Err(lost), Ok(())));
        assert_eq!(write(&a, b.place(0)), [(1, flushed())]);
        assert_eq!(write(&b, a.place(0)), [(1, flushed())]);
    }
}

#[test]
fn a_source_that_is_not_of_this_card_is_refused() {
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
        card: "a".into(),
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
        chain.write(at, [a.words(at, 1)], b.place(at), Flags::SIGNALLED).unwrap();
    }
    let full = |taken| VerbsError::Post {
        card: "a".into(),
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
fn places_of_a_queue_are_free_only_when_a_signalled_request_was_polled() {
    let fabric = Fabric::new(&["a", "b"]);
    let (a, b) = connected(&fabric, &Settings::default(), Caps { sends: 3, ..CAPS });
    let mut chain = SendChain::new(CHAIN);
    for at in 0..3 {
        chain.write(at, [a.words(0, 1)], b.place(0), Flags::empty()).unwrap();
    }
    a.pair.post_send(&mut chain).unwrap();
    assert_eq!(a.poll(), []);
    chain.write(3, [a.words(0, 1)], b.place(0), Flags::SIGNALLED).unwrap();
    assert!(matches!(a.pair.post_send(&mut chain), Err(VerbsError::Post { taken: 0, .. })));
}

#[test]
fn a_silent_partner_ends_with_retries_exceeded() {
    let (fabric, a, b) = two();
    fabric.silence("b");
    assert_eq!(write(&a, b.place(0)), []);
    fabric.give_up();
    assert_eq!(a.poll(), [(1, failed(CompletionStatus::RetriesExceeded, 12))]);
    assert_eq!(write(&a, b.place(0)), [(1, flushed())]);
    assert_eq!(b.memory.words()[0], 0);
}

#[test]
fn a_partner_without_receives_is_told_where_retries_end() {
    let fabric = Fabric::new(&["a", "b"]);
    let settings = Settings { rnr_retries: 2, ..Settings::default() };
    let (a, b) = connected(&fabric, &settings, CAPS);
    let mut chain = SendChain::new(CHAIN);
    chain.write_immediate(1, [], b.place(0), 1, Flags::empty()).unwrap();
    a.pair.post_send(&mut chain).unwrap();
    assert_eq!(a.poll(), [(1, failed(CompletionStatus::ReceiverNotReady, 13))]);
}

#[test]
fn a_card_without_atomics_refuses_fetch_add() {
    let fabric = Fabric::new(&["a", "b"]);
    fabric.change("b", |card| card.atomics = false);
    let (a, b) = connected(&fabric, &Settings::default(), CAPS);
    assert!(a.rail.context.attributes().atomics && !b.rail.context.attributes().atomics);
    let mut chain = SendChain::new(CHAIN);
    chain.fetch_add(1, a.words(0, 1), b.place(0), 1, Flags::empty()).unwrap();
    a.pair.post_send(&mut chain).unwrap();
    assert_eq!(a.poll(), [(1, failed(CompletionStatus::RemoteRequest, 9))]);
}

#[test]
fn a_card_that_disappears_is_named_by_its_news_its_posts_and_its_completions() {
    let (fabric, a, b) = two();
    let mut receives = ReceiveChain::new(1, 0);
    receives.receive(5, []).unwrap();
    a.pair.post_receive(&mut receives).unwrap();
    fabric.remove("a");
    assert_eq!(a.rail.context.check(), Err(VerbsError::CardLost { card: "a".into() }));
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
    chain.write(2, [a.words(0, 1)], b.place(0), Flags::SIGNALLED).unwrap();
    a.pair.post_send(&mut chain).unwrap();
    a.pair.error().unwrap();
    assert_eq!(a.poll(), [(1, flushed()), (2, flushed())]);
}

#[test]
fn a_completion_queue_that_overflows_is_told() {
    let (_fabric, a, b) = two();
    let queue = CompletionQueue::create(&a.rail.context, 2).unwrap();
    let queues = Queues { send: &queue, receive: &queue };
    let pair = QueuePair::create(&a.domain, queues, CAPS, &a.rail.path, 1).unwrap();
    let back =
        QueuePair::create(&b.domain, Queues { send: &b.queue, receive: &b.queue }, CAPS, &b.rail.path, 0);
    let back = back.unwrap();
    pair.connect(&back.endpoint()).unwrap();
    back.connect(&pair.endpoint()).unwrap();
    let mut chain = SendChain::new(CHAIN);
    for at in 0..3 {
        chain.write(at, [a.words(0, 1)], b.place(0), Flags::SIGNALLED).unwrap();
    }
    pair.post_send(&mut chain).unwrap();
    assert_eq!(a.rail.context.check(), Err(VerbsError::QueueOverflow { card: "a".into() }));
}

#[test]
fn an_address_that_cannot_be_reached_and_another_network_are_told_apart() {
    let fabric = Fabric::new(&["a", "b"]);
    let settings = Settings::default();
    let (a, b) = (End::new(&fabric, "a", 1, &settings, CAPS), End::new(&fabric, "b", 0, &settings, CAPS));
    let there = Endpoint { link: LinkLayer::InfiniBand, ..b.pair.endpoint() };
    let other = VerbsError::LinkLayers { card: "a".into(), peer: 1 };
    assert_eq!(a.pair.connect(&there), Err(other));
    let there = Endpoint { gid: "::ffff:192.168.9.9".parse().unwrap(), ..b.pair.endpoint() };
    let error = a.pair.connect(&there).unwrap_err();
    let expected = VerbsError::NoRoute {
        card: "a".into(),
        peer: 1,
        gid: a.rail.path.gid,
        remote: there.gid,
        errno: Errno::NETUNREACH.raw_os_error(),
    };
    assert_eq!(error, expected);
    assert!(error.to_string().contains("::ffff:192.168.9.9 of rank 1"), "{error}");
}

#[test]
fn whatever_is_dropped_first_nothing_is_destroyed_too_early_or_left() {
    let (fabric, a, b) = two();
    let End { pair, queue, region, domain, rail, memory } = a;
    drop((rail, domain, queue));
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
    let error = VerbsError::Register { card: "b".into(), bytes: 4096, errno: Errno::INVAL.raw_os_error() };
    assert_eq!(empty.err(), Some(error));
}
