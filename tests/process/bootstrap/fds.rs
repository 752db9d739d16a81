//! Descriptors handed between ranks: memory written by one is read by another.

use std::{
    io::Write,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::FileExt,
    },
    thread,
    time::Duration,
};

use rustix::fs::{MemfdFlags, memfd_create};
use sidelane::{
    bootstrap::{Hub, Location, Timeouts, exchange_fds, threads},
    error::{BootstrapError, Cause, LostReason},
};

const LONG: Duration = Duration::from_secs(20);

fn memory(text: &str) -> OwnedFd {
    let mut file = std::fs::File::from(memfd_create("sidelane-test", MemfdFlags::CLOEXEC).unwrap());
    file.write_all(text.as_bytes()).unwrap();
    file.into()
}

fn content(fd: OwnedFd) -> String {
    // All holders of the descriptor share its position: it must not be moved.
    let file = std::fs::File::from(fd);
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    String::from_utf8(bytes).unwrap()
}

fn each<R: Send>(hubs: Vec<Box<dyn Hub>>, work: impl Fn(Box<dyn Hub>) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> = hubs.into_iter().map(|hub| scope.spawn(|| work(hub))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_linked_pair_reads_the_others_memory() {
    // Rank 3 takes no part, and members come in an order of their own.
    let members = [4, 0, 2, 1];
    let linked = |i: usize, j: usize| i + j != 3;
    let seen = each(threads(5, Timeouts::default()), |hub| {
        let me = members.iter().position(|&rank| rank == hub.rank())?;
        let files: Vec<_> = (0..members.len()).map(|peer| memory(&format!("{me} to {peer}"))).collect();
        let offers = |peer| linked(me, peer).then(|| vec![files[peer].as_fd(), files[me].as_fd()]);
        let received = exchange_fds(&*hub, "files", &members, me, &offers, LONG).unwrap();
        Some(received.into_iter().map(|fds| fds.into_iter().map(content).collect()).collect())
    });
    let seen: Vec<Option<Vec<Vec<String>>>> = seen;
    assert_eq!(seen[3], None);
    for (me, &rank) in members.iter().enumerate() {
        let expected = |peer: usize| match peer != me && linked(me, peer) {
            true => vec![format!("{peer} to {me}"), format!("{peer} to {peer}")],
            false => vec![],
        };
        let expected: Vec<_> = (0..members.len()).map(expected).collect();
        assert_eq!(seen[rank as usize].as_ref(), Some(&expected), "rank {rank}");
    }
}

#[test]
fn more_descriptors_than_one_packet_takes_come_in_order() {
    let counts = [600usize, 1];
    let seen = each(threads(2, Timeouts::default()), |hub| {
        let me = hub.rank() as usize;
        let pipes: Vec<_> = (0..2).map(|k| memory(&format!("{me}.{k}"))).collect();
        let offers = |_| Some((0..counts[me]).map(|k| pipes[k % 2].as_fd()).collect());
        let mut received = exchange_fds(&*hub, "many", &[0, 1], me, &offers, LONG).unwrap();
        let other = received.remove(1 - me);
        let texts: Vec<_> = other.iter().map(|fd| content(fd.try_clone().unwrap())).collect();
        (texts, received.remove(0).len())
    });
    let expected = |from: usize| (0..counts[from]).map(|k| format!("{from}.{}", k % 2)).collect::<Vec<_>>();
    assert_eq!(seen, [(expected(1), 0), (expected(0), 0)]);
}

#[test]
fn a_link_that_only_one_side_wants_is_an_error_for_all() {
    let seen = each(threads(3, Timeouts::default()), |hub| {
        let me = hub.rank() as usize;
        let offers = |peer: usize| (me != 2 || peer != 0).then(Vec::<BorrowedFd<'_>>::new);
        exchange_fds(&*hub, "links", &[0, 1, 2], me, &offers, LONG).map(|_| ())
    });
    for error in seen {
        assert!(
            matches!(&error, Err(BootstrapError::Disagree { step, rank: 2, .. }) if step == "links"),
            "{error:?}"
        );
    }
}

#[test]
fn a_member_that_is_lost_ends_the_exchange() {
    let seen = each(threads(2, Timeouts::default()), |hub| {
        if hub.rank() == 1 {
            hub.abandon();
            return None;
        }
        Some(exchange_fds(&*hub, "never", &[0, 1], 0, &|_| Some(vec![]), LONG).map(|_| ()))
    });
    let lost = Cause::Lost { rank: 1, how: LostReason::Closed };
    assert_eq!(seen[0], Some(Err(BootstrapError::World(lost))));
}

#[test]
fn an_exchange_of_nothing_is_no_exchange() {
    let seen = each(threads(2, Timeouts::default()), |hub| {
        let me = hub.rank() as usize;
        let alone = exchange_fds(&*hub, &format!("alone {me}"), &[me as u32], 0, &|_| None, LONG).unwrap();
        let empty = exchange_fds(&*hub, "empty", &[0, 1], me, &|_| Some(vec![]), LONG).unwrap();
        (alone.len(), empty.iter().map(Vec::len).sum::<usize>())
    });
    assert_eq!(seen, [(1, 0), (1, 0)]);
}

#[test]
fn threads_of_one_process_are_on_one_machine() {
    let labels = each(threads(2, Timeouts::default()), |hub| {
        let label = Location::in_node(&format!("node {}", hub.rank())).unwrap().to_bytes();
        hub.gather("place", hub.rank(), 2, &label, LONG).unwrap()
    });
    let place = |rank: usize| Location::from_bytes(rank as u32, &labels[0][rank]).unwrap();
    assert!(place(0).same_machine(&place(1)) && !place(0).same_node(&place(1)));
}
