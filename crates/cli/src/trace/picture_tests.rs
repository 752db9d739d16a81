use proptest::prelude::*;
use sidelane::exec::Call;
use sidelane_core::schedule::Flag;

use super::super::report::tests::config;
use super::*;
use crate::svg::tests::elements;

/// One millisecond of a rank: what it does, where it begins, and how long it takes, in microseconds.
fn timeline(events: &[(Kind, u64, u64)]) -> Timeline {
    let event = |&(kind, start, us): &(Kind, u64, u64)| Event {
        kind,
        flag: matches!(kind, Kind::Signal | Kind::Wait).then_some(Flag::Landed),
        of: 1,
        part: 0,
        licence: false,
        track: 9,
        peer: 1,
        start_ns: 5_000_000 + start * 1000,
        nanos: us * 1000,
        bytes: 2_000_000,
    };
    Timeline {
        calls: vec![Call { name: "dispatch".into(), start_ns: 5_000_000, nanos: 1_000_000 }],
        events: events.iter().map(event).collect(),
        ..Timeline::default()
    }
}

fn draw_one(events: &[(Kind, u64, u64)]) -> String {
    draw(&config(), &NodeMap::from_labels(&[0]), &[timeline(events)])
}

/// How often a class is drawn as an operation: its sample in the legend does not count.
fn drawn(picture: &str, class: &str) -> usize {
    let tags = elements(picture).into_iter().filter(|tag| tag.starts_with("rect"));
    tags.filter(|tag| tag.contains(&format!("\"{class}\""))).count() - usize::from(class.starts_with("wide"))
}

#[test]
fn ranks_are_rows_in_order_of_their_nodes_and_operations_boxes_of_their_kind() {
    let two =
        [timeline(&[(Kind::PutRows, 0, 500)]), timeline(&[(Kind::Wait, 100, 300), (Kind::Reduce, 400, 600)])];
    let picture = draw(&config(), &NodeMap::from_labels(&["b", "a"]), &two);
    for class in ["wide put-rows", "wide wait", "wide reduce"] {
        assert_eq!(drawn(&picture, class), 1, "{class}");
    }
    assert!(!picture.contains("\"wide put\""), "the legend names what occurs");
    let places = ["node 0<", "rank 0<", "node 1<", "rank 1<"].map(|text| picture.find(&format!(">{text}")));
    assert!(places.iter().all(Option::is_some), "{places:?}");
    for text in ["put rows 1: 500 us, 2.0 MB", "wait landed 1: 300 us", ">dispatch<", "8 on 2 nodes (4 + 4)"]
    {
        assert!(picture.contains(text), "{text} in\n{picture}");
    }
}

#[test]
fn neighbours_of_one_kind_that_are_too_narrow_are_drawn_as_one_box() {
    let signals = draw_one(&[(Kind::Signal, 10, 0), (Kind::Signal, 10, 0), (Kind::Signal, 10, 0)]);
    assert_eq!(drawn(&signals, "signal"), 1);
    assert!(signals.contains("3 x signal"), "{signals}");
    assert_eq!(drawn(&draw_one(&[(Kind::Signal, 10, 0), (Kind::Signal, 50, 0)]), "signal"), 2);
    assert_eq!(drawn(&draw_one(&[(Kind::PutRows, 0, 90), (Kind::PutRows, 90, 90)]), "wide put-rows"), 2);
}

#[test]
fn operations_that_overlap_take_lines_of_their_own() {
    let events = [(Kind::Put, 0, 500), (Kind::Put, 100, 100), (Kind::Put, 200, 100), (Kind::Put, 600, 100)];
    let timeline = timeline(&events);
    let lines = lines(&timeline.events);
    assert_eq!(lines.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
    assert_eq!(drawn(&draw_one(&events), "wide put"), 4);
}

#[test]
fn a_path_with_special_characters_is_shown_as_it_is() {
    let routing = "a <b> & \"c\".jsonl".parse().unwrap();
    let picture = draw(&Config { routing, ..config() }, &NodeMap::from_labels(&[0]), &[Timeline::default()]);
    elements(&picture);
    assert!(picture.contains("a &lt;b&gt; &amp; &quot;c&quot;.jsonl"), "{picture}");
}

proptest! {
    #[test]
    fn every_picture_is_well_formed_and_every_box_lies_inside(
        events in prop::collection::vec((0..5usize, 0..1000u64, 0..400u64), 0..40),
    ) {
        let events: Vec<_> = events
            .iter()
            .map(|&(kind, start, us)| (Kind::ALL[kind], start, us.min(1000 - start)))
            .collect();
        for tag in elements(&draw_one(&events)).iter().filter(|tag| tag.starts_with("rect")) {
            let value = |name: &str| -> f64 {
                tag.split_once(&format!(" {name}=\"")).unwrap().1.split('"').next().unwrap().parse().unwrap()
            };
            prop_assert!(value("x") >= 0.5 && value("x") + value("width") <= WIDTH, "{tag}");
        }
    }
}
