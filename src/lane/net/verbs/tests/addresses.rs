//! Addresses and partitions, over fake NICs that refuse or lose what hardware refuses or loses.

use super::*;
use crate::lane::net::verbs::reach::{Pkey, Pkeys};

/// Ranks 0 and 1 over NICs `a` and `b` of InfiniBand, of these LIDs and GIDs.
fn infiniband(ends: [(u16, &str); 2]) -> Arc<Fabric> {
    let fabric = Fabric::new(&["a", "b"]);
    for (nic, (lid, gid)) in ["a", "b"].into_iter().zip(ends) {
        fabric.infiniband(nic, lid, gid);
    }
    fabric
}

/// Whether a write of `a` lands at `b`, and one of `b` at `a`.
fn both_ways(fabric: &Arc<Fabric>) -> [bool; 2] {
    let (a, b) = connected(fabric, &Settings::default(), CAPS);
    [(&a, &b), (&b, &a)].map(|(from, to)| {
        from.memory.fill(0, &[7]);
        write(from, to.place(9));
        to.memory.words()[9] == 7
    })
}

#[test]
fn ports_of_one_subnet_are_reached_by_lid() {
    let fabric = infiniband([(3, "fe80::3"), (4, "fe80::4")]);
    assert_eq!(both_ways(&fabric), [true, true]);
    assert_eq!(fabric.nic("a", &Settings::default()).path.gid_index, 0);
}

#[test]
fn port_that_requires_global_header_exchanges_it_with_all() {
    for requires in [&["a"][..], &["b"], &["a", "b"]] {
        let fabric = infiniband([(3, "fe80::3"), (4, "fe80::4")]);
        requires.iter().for_each(|nic| fabric.change(nic, |nic| nic.needs_global_header = true));
        assert_eq!(both_ways(&fabric), [true, true], "{requires:?}");
    }
}

#[test]
fn port_of_other_subnet_is_reached_by_flid_of_its_switch() {
    let fabric = infiniband([(3, "fec0:0:a001:7::3"), (3, "fec0:0:a002:8::4")]);
    assert_eq!(both_ways(&fabric), [true, true]);
    // One subnet behind two switches: no router between them.
    let fabric = infiniband([(3, "fec0:0:a001:7::3"), (4, "fec0:0:a002:7::4")]);
    assert_eq!(both_ways(&fabric), [true, true]);
}

#[test]
fn write_to_wrong_lid_is_lost_and_exceeds_retries() {
    let fabric = infiniband([(3, "fe80::3"), (4, "fe80::4")]);
    let (a, b) = (
        End::new(&fabric, "a", 1, &Settings::default(), CAPS),
        End::new(&fabric, "b", 0, &Settings::default(), CAPS),
    );
    a.pair.connect(&Endpoint { lid: 9, ..b.pair.endpoint() }).unwrap();
    b.pair.connect(&a.pair.endpoint()).unwrap();
    assert_eq!(write(&a, b.place(0)), []);
    fabric.give_up();
    assert_eq!(a.poll(), [(1, failed(CompletionStatus::RetriesExceeded, 12))]);
}

/// InfiniBand in one subnet, of NICs with these entries in their tables of partition keys.
fn partitions(of_a: &[(u16, u16)], of_b: &[(u16, u16)]) -> Arc<Fabric> {
    let fabric = infiniband([(3, "fe80::3"), (4, "fe80::4")]);
    for (nic, keys) in [("a", of_a), ("b", of_b)] {
        keys.iter().for_each(|&(index, key)| fabric.partition(nic, index, key));
    }
    fabric
}

#[test]
fn two_ports_use_shared_partition_at_any_table_index() {
    for (of_a, of_b) in [
        (&[(0, 0x7fff), (4, 0x8012)][..], &[(0, 0x8012)][..]),
        // Each prefers another one.
        (&[(0, 0x8013), (4, 0x8012)], &[(0, 0x8012), (1, 0xffff)]),
        // A limited member, and a full one.
        (&[(0, 0x7fff)], &[]),
    ] {
        assert_eq!(both_ways(&partitions(of_a, of_b)), [true, true], "{of_a:x?}, {of_b:x?}");
    }
    let report = partitions(&[(0, 0x7fff), (4, 0x8012)], &[]).nic("a", &Settings::default()).to_string();
    assert!(
        report.contains("partition 0x8012 (index 4, or another of 2, if a peer shares that)"),
        "{report}"
    );
}

#[test]
fn ranks_without_common_partition_fail_at_connect() {
    for (of_a, of_b) in [(&[][..], &[(0, 0x8012)][..]), (&[(0, 0x7fff), (1, 0x8013)], &[(0, 0x7fff)])] {
        let (fabric, settings) = (partitions(of_a, of_b), Settings::default());
        let (a, b) = (End::new(&fabric, "a", 1, &settings, CAPS), End::new(&fabric, "b", 0, &settings, CAPS));
        let keys = |end: &End| end.pair.endpoint().reach.pkeys;
        let differ = |nic: &str, peer, mine, theirs| {
            Err(VerbsError::PartitionsDiffer { nic: nic.into(), peer, mine, theirs })
        };
        assert_eq!(a.pair.connect(&b.pair.endpoint()), differ("a", 1, keys(&a), keys(&b)));
        assert_eq!(b.pair.connect(&a.pair.endpoint()), differ("b", 0, keys(&b), keys(&a)));
    }
    let (mine, theirs) = (vec![0x7fff, 0x8013], vec![0x7fff]);
    let text = VerbsError::PartitionsDiffer { nic: "a".into(), peer: 1, mine, theirs }.to_string();
    assert!(
        text.starts_with("NIC a has partition keys 0x7fff, 0x8013, the NIC of rank 1 has 0x7fff:"),
        "{text}"
    );
}

#[test]
fn an_empty_entry_of_a_table_is_refused() {
    let fabric = Fabric::new(&["a", "b"]);
    let nic = fabric.nic("a", &Settings::default());
    let domain = ProtectionDomain::create(&nic.context).unwrap();
    let queue = CompletionQueue::create(&nic.context, 64, None).unwrap();
    let queues = Queues { send: &queue, receive: &queue };
    let create = |path: &super::super::Path| QueuePair::create(&domain, queues, CAPS, path, 1);
    let refused = |call: &'static str| Some(nic.context.failed(call, Errno::INVAL.raw_os_error()));
    let pkeys = vec![Pkey { index: 3, key: 0xffff }];
    let pkeys = Pkeys::of(pkeys, LinkLayer::Ethernet, None, ("a", 1)).unwrap();
    let elsewhere = super::super::Path { pkeys, ..nic.path.clone() };
    assert_eq!(create(&elsewhere).err(), refused("ibv_modify_qp to INIT"));
    let there = End::new(&fabric, "b", 0, &Settings::default(), CAPS).pair.endpoint();
    let elsewhere = super::super::Path { gid_index: 3, ..nic.path.clone() };
    let error = create(&elsewhere).unwrap().connect(&there).unwrap_err();
    assert!(matches!(error, VerbsError::NoRoute { errno, .. } if errno == Errno::INVAL.raw_os_error()));
}

#[test]
fn an_address_of_the_wanted_subnet_is_used_on_every_nic() {
    let fabric = Fabric::new(&["a", "b"]);
    fabric.address("a", 5, "::ffff:10.9.0.1", "eth0.9");
    fabric.address("b", 3, "::ffff:10.9.0.2", "eth1.9");
    let settings = Settings { subnets: vec!["10.9.0.0/16".parse().unwrap()], ..Settings::default() };
    let (a, b) = connected(&fabric, &settings, CAPS);
    assert_eq!((a.nic.path.gid_index, b.nic.path.gid_index), (5, 3));
    a.memory.fill(0, &[7]);
    write(&a, b.place(0));
    assert_eq!(b.memory.words()[0], 7);
    let report = a.nic.to_string();
    assert!(report.contains("10.9.0.1 (GID 5 of eth0.9), partition 0xffff (index 0)"), "{report}");
    let nowhere = Settings { subnets: vec!["10.8.0.0/16".parse().unwrap()], ..naming(&["b"]) };
    let outside = VerbsError::NoGidInSubnets { nic: "b".into(), port: 1 };
    assert_eq!(opened(&fabric, &nowhere, 0), Err(outside));
}

#[test]
fn survey_names_nic_of_each_rank_as_lane_does_and_unused_ones() {
    let fabric = Fabric::new(&["a", "b", "c"]);
    fabric.change("a", |nic| nic.port = 1);
    let survey = |settings: &Settings| NicSurvey::of(&fabric.ground(settings.clone()));
    let named = fabric.nic("b", &Settings::default()).to_string();
    let seen = survey(&Settings::default()).unwrap();
    let down = VerbsError::PortDown { nic: "a".into(), port: 1, state: "down" };
    assert_eq!(seen.left_out, [("a".to_owned(), down.to_string())]);
    // Without a GPU, the first rank stands for all.
    assert!(
        matches!(&seen.ranks[..], [nics] if nics[0].starts_with("b port 1, 10.0.0.2 (GID 1)")),
        "{seen:?}"
    );
    assert_eq!(survey(&naming(&["b"])).unwrap().ranks, [[named]]);
    assert_eq!(survey(&naming(&["a"])), Err(down));
}

/// A device of the kernel's PCI tree: behind a slot of a switch, on a root complex.
fn pci(fabric: &Fabric, numa_node: u32, (complex, slot): (u32, u32)) -> String {
    let (switch, at) = (complex + 1, complex + 2 + slot);
    let path = format!(
        "devices/pci0000:{complex:02x}/0000:{complex:02x}:01.0/0000:{switch:02x}:00.0/0000:{at:02x}:00.0"
    );
    fabric.write(&format!("{path}/numa_node"), &numa_node.to_string());
    path
}

/// NICs with the rates and the places of a machine's, and its GPUs.
fn machine(nics: &[(&str, u32, u32, (u32, u32))], gpus: &[(u32, (u32, u32))]) -> Arc<Fabric> {
    let fabric = Fabric::new(&nics.iter().map(|(name, ..)| *name).collect::<Vec<_>>());
    for &(name, rate, numa_node, place) in nics {
        fabric.write(&format!("class/infiniband/{name}/ports/1/rate"), &format!("{rate} Gb/sec"));
        fabric.link(&format!("class/infiniband/{name}/device"), &pci(&fabric, numa_node, place));
    }
    for &(numa_node, place) in gpus {
        let path = pci(&fabric, numa_node, place);
        fabric.write(&format!("{path}/vendor"), "0x10de");
        fabric.write(&format!("{path}/class"), "0x030200");
        let address = path.rsplit('/').next().unwrap().to_owned();
        fabric.link(&format!("bus/pci/devices/{address}"), &path);
    }
    fabric
}

/// The NIC of each rank, and why; the NICs that none takes, and why.
fn chosen(fabric: &Arc<Fabric>) -> (Vec<String>, Vec<String>) {
    let NicSurvey { ranks, left_out } = NicSurvey::of(&fabric.ground(Settings::default())).unwrap();
    let short = |nics: &Vec<String>| {
        let [nic] = &nics[..] else { panic!("{nics:?}") };
        let (name, rest) = nic.split_once(' ').unwrap();
        let why = rest.rsplit(", writes").nth(1).unwrap().rsplit(", ").next().unwrap();
        format!("{name}: {why}")
    };
    let out = left_out.iter().map(|(nic, why)| format!("{nic}: {why}"));
    (ranks.iter().map(short).collect(), out.collect())
}

#[test]
fn survey_of_a_machine_pairs_gpus_with_nics_of_their_switch() {
    // Two sockets, each with two switches that have a GPU and a NIC; and a NIC of storage.
    let switches = [0x10, 0x20, 0x80, 0x90];
    let numa_node = |complex| u32::from(complex >= 0x80);
    let compute: Vec<_> = ["mlx5_3", "mlx5_2", "mlx5_1", "mlx5_0"].into_iter().zip(switches).collect();
    let mut nics: Vec<_> =
        compute.iter().map(|&(name, complex)| (name, 400, numa_node(complex), (complex, 1))).collect();
    nics.push(("mlx5_4", 100, 0, (0x30, 1)));
    let gpus = switches.map(|complex| (numa_node(complex), (complex, 0)));
    let (ranks, left_out) = chosen(&machine(&nics, &gpus));
    let of = |(name, complex): &(&str, u32)| {
        format!("{name}: same PCI switch as GPU 0000:{:02x}:00.0", complex + 2)
    };
    assert_eq!(ranks, compute.iter().map(of).collect::<Vec<_>>());
    assert_eq!(left_out, ["mlx5_4: less than half of 400 Gb/s"]);
}

#[test]
fn survey_of_a_machine_without_gpus_shows_the_first_rank() {
    let (ranks, left_out) = chosen(&machine(&[("a", 200, 0, (0x10, 0)), ("b", 200, 0, (0x20, 0))], &[]));
    assert_eq!((ranks.len(), left_out), (1, vec![]), "{ranks:?}");
    assert!(ranks[0].starts_with("a: "), "{ranks:?}");
}
