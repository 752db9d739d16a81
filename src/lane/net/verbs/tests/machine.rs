//! Libraries and NICs: present, missing, chosen.

use std::path::Path;

use super::*;
use crate::error::VerbsError;
use crate::lane::net::verbs::fake::Tree;
use crate::lane::net::verbs::library::Functions;

fn rails(fabric: &Arc<Fabric>, settings: &Settings, nth: u32) -> Result<Vec<String>, VerbsError> {
    let rails = Nic::open(&fabric.library(), fabric.sysfs(), settings, nth)?;
    Ok(rails.iter().map(|rail| rail.context.card().to_owned()).collect())
}

fn naming(cards: &[&str]) -> Settings {
    Settings { cards: cards.iter().map(|&card| card.to_owned()).collect(), ..Settings::default() }
}

#[test]
fn a_library_that_is_missing_or_another_is_an_error_that_says_so() {
    let missing = Library::load(Some(Path::new("/nowhere/libibverbs.so.1"))).unwrap_err();
    assert!(
        matches!(&missing, VerbsError::NoLibrary { library, .. } if library == "/nowhere/libibverbs.so.1")
    );
    assert!(missing.to_string().contains("cannot open shared object file"), "{missing}");
    assert!(missing.to_string().contains("SIDELANE_IBVERBS_LIBRARY"), "{missing}");
    let other = Library::load(Some(Path::new("libc.so.6"))).unwrap_err();
    let expected = VerbsError::MissingSymbol { library: "libc.so.6".into(), symbol: "ibv_get_device_list" };
    assert_eq!(other, expected);
}

#[test]
fn the_system_s_library_has_every_symbol_and_lists_its_cards() {
    match Library::load(None) {
        Err(VerbsError::NoLibrary { reason, .. }) => eprintln!("skipped: no libibverbs here: {reason}"),
        library => match Context::names(&library.unwrap()) {
            Ok(names) => assert!(!names.is_empty()),
            Err(error) => assert_eq!(error, VerbsError::NoCard),
        },
    }
}

#[test]
fn an_old_library_refuses_what_it_does_not_know() {
    let fabric = Fabric::new(&["a"]);
    let functions = Functions { reg_mr_iova2: None, reg_dmabuf_mr: None, ..fabric.functions() };
    let context = Context::open(&Library::of(functions), "a").unwrap();
    assert!(!MemoryRegion::can_relax(&context));
    let domain = ProtectionDomain::create(&context).unwrap();
    let memory = Memory::new(1);
    // SAFETY: the memory is dropped after the region, which is not made.
    let error = unsafe { MemoryRegion::register(&domain, memory.at(), 8, ALL | Access::RELAXED) };
    assert!(matches!(error.err(), Some(VerbsError::TooOld { symbol: "ibv_reg_mr_iova2", .. })));
    let file = std::fs::File::open("/dev/null").unwrap();
    let fd = std::os::fd::AsFd::as_fd(&file);
    // SAFETY: no region is made.
    let error = unsafe { MemoryRegion::register_dmabuf(&domain, fd, 0, 8, 0, ALL) };
    assert!(matches!(error.err(), Some(VerbsError::TooOld { symbol: "ibv_reg_dmabuf_mr", .. })));
    // SAFETY: the memory is dropped after the region.
    let region = unsafe { MemoryRegion::register(&domain, memory.at(), 8, ALL) };
    assert_eq!(region.unwrap().len(), 8);
}

#[test]
fn relaxed_memory_is_registered_where_the_library_knows_how() {
    let fabric = Fabric::new(&["a"]);
    let context = Context::open(&fabric.library(), "a").unwrap();
    assert!(MemoryRegion::can_relax(&context));
    let (domain, memory) = (ProtectionDomain::create(&context).unwrap(), Memory::new(1));
    // SAFETY: the memory is dropped after the region.
    let region = unsafe { MemoryRegion::register(&domain, memory.at(), 8, ALL | Access::RELAXED) };
    assert_eq!(region.unwrap().base(), memory.at().addr().get() as u64);
}

#[test]
fn a_machine_without_cards_says_so() {
    let fabric = Fabric::new(&[]);
    assert_eq!(rails(&fabric, &Settings::default(), 0), Err(VerbsError::NoCard));
    let missing = VerbsError::NoSuchCard { card: "c".into(), present: vec!["a".into(), "b".into()] };
    let fabric = Fabric::new(&["a", "b"]);
    assert_eq!(rails(&fabric, &naming(&["b", "c"]), 0), Err(missing.clone()));
    assert_eq!(Context::open(&fabric.library(), "c").err(), Some(missing));
}

#[test]
fn ranks_take_turns_and_cards_that_are_down_are_left_out() {
    let fabric = Fabric::new(&["a", "b", "c"]);
    let seen = |nth| rails(&fabric, &Settings::default(), nth).unwrap();
    assert_eq!([0, 1, 2, 3].map(seen), [["a"], ["b"], ["c"], ["a"]]);
    fabric.change("b", |card| card.port = 1);
    assert_eq!([0, 1, 2].map(seen), [["a"], ["c"], ["a"]]);
    // One that was asked for is not left out.
    let down = VerbsError::PortDown { card: "b".into(), port: 1, state: "down" };
    assert_eq!(rails(&fabric, &naming(&["a", "b"]), 0), Err(down.clone()));
    assert_eq!(rails(&fabric, &naming(&["c", "a"]), 7).unwrap(), ["c", "a"]);
    fabric.remove("a");
    fabric.change("c", |card| card.port = 2);
    assert_eq!(rails(&fabric, &Settings::default(), 0), Err(down));
}

#[test]
fn what_was_asked_of_a_card_is_had_or_refused() {
    let fabric = Fabric::new(&["a"]);
    let refused = |settings: Settings| rails(&fabric, &settings, 0).unwrap_err();
    let no_port = VerbsError::NoSuchPort { card: "a".into(), port: 2, ports: 1 };
    assert_eq!(refused(Settings { port: Some(2), ..naming(&["a"]) }), no_port);
    let no_gid = VerbsError::NoSuchGid { card: "a".into(), port: 1, index: 9 };
    assert_eq!(refused(Settings { gid_index: Some(9), ..Settings::default() }), no_gid);
    let asked = Settings { mtu: Some(Mtu::B1024), timeout: 18, traffic_class: 106, ..Settings::default() };
    let path = fabric.rail("a", &asked).path;
    assert_eq!((path.mtu, path.timeout, path.traffic_class, path.gid_index), (Mtu::B1024, 18, 106, 1));
    fabric.change("a", |card| card.mtu = 3);
    let too_large = VerbsError::MtuTooLarge { card: "a".into(), port: 1, asked: 4096, active: 1024 };
    assert_eq!(refused(Settings { mtu: Some(Mtu::B4096), ..Settings::default() }), too_large);
    let tree = Tree::new();
    let none = Nic::open(&fabric.library(), &tree.sysfs(), &Settings::default(), 0).err();
    assert_eq!(none, Some(VerbsError::NoGid { card: "a".into(), port: 1 }));
}
