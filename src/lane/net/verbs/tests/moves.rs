//! Requests that succeed.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::*;
use crate::error::VerbsError;

#[test]
fn a_chain_rings_one_doorbell_and_only_what_is_signalled_completes() {
    let (fabric, a, b) = two();
    a.memory.fill(0, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let mut chain = SendChain::new(CHAIN);
    chain.write(1, [a.words(4, 2), a.words(0, 1)], b.place(10), Flags::empty()).unwrap();
    chain.write(2, [a.words(7, 1)], b.place(20), Flags::empty()).unwrap();
    chain.write(3, [a.words(1, 2)], b.place(30), Flags::SIGNALLED).unwrap();
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
fn nothing_moves_before_the_sender_polls_while_the_fabric_is_held() {
    let (fabric, a, b) = two();
    fabric.hold();
    let mut chain = SendChain::new(CHAIN);
    for at in 0..3 {
        chain.write(at, [a.words(0, 1)], b.place(at), Flags::SIGNALLED).unwrap();
    }
    a.pair.post_send(&mut chain).unwrap();
    // What lies there when a request is executed is what travels.
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
fn a_write_with_immediate_takes_a_receive_and_hands_over_its_number() {
    let (fabric, a, b) = two();
    a.memory.fill(0, &[7]);
    let mut chain = SendChain::new(CHAIN);
    chain.write_immediate(1, [a.words(0, 1)], b.place(5), 0xdead_beef, Flags::SIGNALLED).unwrap();
    chain.write_immediate(2, [], b.place(0), 3, Flags::SIGNALLED).unwrap();
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
    chain.fetch_add(1, a.words(0, 1), b.place(3), 2, Flags::SIGNALLED).unwrap();
    chain.fetch_add(2, a.words(1, 1), b.place(3), u64::MAX, Flags::SIGNALLED | Flags::FENCE).unwrap();
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
    chain.send(1, [a.words(0, 3)], Flags::SIGNALLED).unwrap();
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
    chain.write_inline(2, &7u64.to_ne_bytes(), b.place(2), Flags::SIGNALLED).unwrap();
    a.pair.post_send(&mut chain).unwrap();
    fabric.flush();
    assert_eq!(a.poll(), [(2, done(Kind::Write))]);
    assert_eq!(b.memory.words()[..4], [5, 6, 7, 0]);
}

#[test]
fn a_card_without_inline_grants_none_and_all_else() {
    let fabric = Fabric::new(&["a", "b"]);
    fabric.change("a", |card| card.inline = 0);
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
    chain.write(1, [a.words(0, 1)], b.place(0), Flags::SIGNALLED).unwrap();
    assert_eq!(chain.write(2, [], b.place(0), Flags::empty()), limit("requests", 2, 1));
    a.pair.post_send(&mut chain).unwrap();
    assert_eq!(a.poll(), [(1, done(Kind::Write))]);
    let outside = VerbsError::OutOfRegion { offset: 8, len: 512, size: 512 };
    assert_eq!(a.region.sge(8, 512).err(), Some(outside));
    assert!(a.region.sge(u64::MAX, 8).is_err());
}

#[test]
fn who_waits_is_woken_once_by_what_comes_after_arming() {
    let (_fabric, a, b) = two();
    let readable = || {
        let mut fds = [PollFd::new(&a.queue, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    };
    let mut chain = SendChain::new(CHAIN);
    let mut write = || {
        chain.write(1, [a.words(0, 1)], b.place(0), Flags::SIGNALLED).unwrap();
        a.pair.post_send(&mut chain).unwrap();
    };
    write();
    a.queue.arm().unwrap();
    assert!(!readable() && !a.queue.woken().unwrap());
    write();
    write();
    assert!(readable());
    assert!(a.queue.woken().unwrap() && !a.queue.woken().unwrap() && !readable());
    assert_eq!(a.poll().len(), 3);
}

/// Rank 0 writes odd numbers, rank 1 even ones, each when the other's has come; the last number
/// that it saw.
fn play(fabric: &Arc<Fabric>, rank: u64, to: &Sender<Meeting>, from: &Receiver<Meeting>) -> u64 {
    let (card, peer) = [("a", 1), ("b", 0)][rank as usize];
    let end = End::new(fabric, card, peer, &Settings::default(), CAPS);
    to.send((end.pair.endpoint().to_bytes(), end.place(0))).unwrap();
    let (bytes, there) = from.recv().unwrap();
    end.pair.connect(&Endpoint::from_bytes(peer, &bytes).unwrap()).unwrap();
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
        chain.write(round, [end.words(1, 1)], there, Flags::SIGNALLED).unwrap();
        end.pair.post_send(&mut chain).unwrap();
        while end.poll() != [(round, done(Kind::Write))] {
            assert!(Instant::now() < until, "round {round}");
        }
    }
    // The peer may still write: its last word is awaited before this memory is freed.
    await_word(2 * ROUNDS - rank);
    end.memory.words()[0]
}

type Meeting = ([u8; Endpoint::BYTES], Remote);
const ROUNDS: u64 = 200;

#[test]
fn ranks_in_threads_meet_and_exchange_through_cards() {
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
