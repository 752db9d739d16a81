//! Objects, locked bytes, keys and descriptors that a rank holds of its NIC in large worlds.
//!
//! One rank is connected to all others. Of each peer there is only its offer.

use super::super::depth::Depth;
use super::super::fake::Inventory;
use super::*;

/// Of a rank whose peers are all on other nodes.
fn held(world: u32, settings: &Settings) -> Inventory {
    let fabric = Fabric::new(&["a", "b"]);
    // As many pieces as NICs of mlx5 take.
    fabric.change("a", |nic| nic.sges = 30);
    let [own, other] = ranks(&fabric, world, settings);
    let offer = || other.open(0).unwrap().bytes();
    let joined = |peer| own.open(peer).unwrap().connect(offer().into()).unwrap();
    let connections: Vec<_> = (1..world).map(joined).collect();
    let held = fabric.inventory("a");
    drop((connections, own, other));
    assert_eq!(fabric.leftovers(), (0, 0));
    held
}

/// `4390912` as `4.2 MiB`.
fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[test]
fn objects_and_locked_bytes_are_those_of_the_docs() {
    let docs = include_str!("../../../../../docs/verbs.md");
    for ranks in [2, 16, 128, 1024, 4096] {
        let seen = held(ranks, &Settings::default());
        // The memory of peers mapped here is registered to send from it.
        let (pinned, queues, keys) = (seen.pinned - 2 * HEAP, seen.queue_bytes, seen.regions - 3);
        let connections = ranks as usize - 1;
        assert_eq!((seen.queue_pairs, seen.completion_queues), (connections, connections));
        assert_eq!((seen.channels, seen.descriptors), (1, 3), "{ranks} ranks");
        let requests = Depth::of_each(connections as u64, rustix::param::page_size() as u64).requests;
        let [registered, of_queues, locked] = [pinned, queues, pinned + queues].map(mebibytes);
        let row = format!(
            "| {ranks} | {connections} | {requests} | {keys} | {registered} | {of_queues} | {locked} | 3 |"
        );
        assert!(docs.contains(&row), "{row}");
        // For each peer a block: words, lines, and receives.
        let block = 192 + 16 * 64 + 64 * u64::from(requests);
        let (slabs, slab) = (connections.div_ceil(64), connections.min(64));
        let staging = if connections == 1 { 4 << 20 } else { 16 << 20 };
        let expected = staging + (64 << 10) + (slabs * slab) as u64 * block;
        assert_eq!((pinned, keys), (expected, 2 + slabs), "{ranks} ranks");
    }
}

#[test]
fn offers_of_a_rank_differ_in_the_numbers_of_queue_pairs() {
    let fabric = Fabric::new(&["a", "b"]);
    let [own, _other] = ranks(&fabric, 200, &Settings::default());
    let ends: Vec<_> = (1..200).map(|peer| own.open(peer).unwrap()).collect();
    let offers: Vec<Vec<u8>> = ends.iter().map(|end| end.bytes()).collect();
    let differs = |at: &usize| offers.iter().any(|offer| offer[*at] != offers[0][*at]);
    let differing = (0..offers[0].len()).filter(differs).count();
    // Numbers of the queue pair and of its first packet, and the address and key of its credit.
    assert!(offers.iter().all(|offer| offer.len() == offers[0].len()));
    assert!(differing <= 4 + 4 + 8 + 4, "{differing} of {} bytes", offers[0].len());
}

#[test]
fn a_thousand_ranks_take_less_than_64_mib_and_64_descriptors_each() {
    for queue_pairs in [1, 2] {
        let seen = held(1024, &Settings { queue_pairs, ..Settings::default() });
        let locked = seen.pinned + seen.queue_bytes;
        assert!(locked < 64 << 20 && seen.descriptors < 64, "{queue_pairs}: {seen:?}");
    }
}

#[test]
fn connection_whose_signals_wake_no_thread_has_no_channel_and_no_receives() {
    for signal in [SignalMode::Write, SignalMode::FetchAdd] {
        let settings = Settings { signal: Some(signal), ..Settings::default() };
        let (silent, waking) = (held(3, &settings), held(3, &Settings::default()));
        assert_eq!((silent.channels, silent.descriptors), (0, 2), "{signal:?}");
        assert_eq!(waking.pinned - silent.pinned, 2 * 256 * 64, "{signal:?}");
    }
}
