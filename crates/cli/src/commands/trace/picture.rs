//! The timeline at a glance: calls and operations of each rank, node by node.
//!
//! The host steps one operation at a time, but tracks may run side by side.

use sidelane::exec::{Event, OpKind, Timeline};
use sidelane::topology::NodeMap;

use crate::chart::{self, Color, Row, Span};
use crate::commands::bench::RunSettings;
use crate::table::{time_ns, volume};

fn look(kind: OpKind) -> (Color, &'static str) {
    match kind {
        OpKind::Put => (Color::Teal, "put (to rank)"),
        OpKind::PutRows => (Color::Blue, "put rows (to rank)"),
        OpKind::Signal => (Color::Pink, "signal"),
        OpKind::Wait => (Color::Pale, "wait"),
        OpKind::Reduce => (Color::Orange, "reduce: read and sum"),
    }
}

pub fn draw(config: &RunSettings, nodes: &NodeMap, timelines: &[Timeline]) -> String {
    let [ranks, rows, routing, schedule, sums] = config.words().map(|(_, words)| words);
    let several = nodes.nodes() > 1;
    let row = |node: u32, nth: usize, rank: u32| Row {
        group: (nth == 0 && several).then(|| format!("node {node}")),
        name: format!("rank {rank}"),
        calls: &timelines[rank as usize].calls,
        spans: timelines[rank as usize].events.iter().map(span).collect(),
    };
    let of_node = |node| nodes.members(node).iter().enumerate().map(move |(nth, &rank)| row(node, nth, rank));
    chart::Timeline {
        title: "One dispatch and combine, operation by operation",
        conditions: vec![
            format!("ranks: {ranks} · {rows}"),
            format!("{routing} · {schedule} · sums: {sums}"),
        ],
        kinds: &OpKind::ALL.map(look),
        rows: (0..nodes.nodes()).flat_map(of_node).collect(),
    }
    .draw()
}

fn span(event: &Event) -> Span {
    let Event { kind, start_ns, nanos, bytes, peer, .. } = *event;
    let moved = if bytes > 0 { format!(", {}", volume(bytes)) } else { String::new() };
    let moves = matches!(kind, OpKind::Put | OpKind::PutRows);
    Span {
        kind: OpKind::ALL.iter().position(|&known| known == kind).unwrap_or(0),
        start_ns,
        nanos,
        said: format!("{event}: {}{moved}", time_ns(nanos)),
        inside: if moves { peer.to_string() } else { String::new() },
    }
}

#[cfg(test)]
mod tests {
    use sidelane::exec::TimedCall;
    use sidelane_core::schedule::Flag;

    use super::*;
    use crate::chart::svg::tests::elements;
    use crate::commands::trace::tests::config;

    /// One millisecond of a rank: operation, start and duration, in microseconds.
    fn timeline(events: &[(OpKind, u64, u64)]) -> Timeline {
        let event = |&(kind, start, us): &(OpKind, u64, u64)| Event {
            kind,
            flag: matches!(kind, OpKind::Signal | OpKind::Wait).then_some(Flag::Landed),
            of: 1,
            part: 0,
            release: false,
            track: 9,
            peer: 1,
            start_ns: 5_000_000 + start * 1000,
            nanos: us * 1000,
            bytes: 2_000_000,
        };
        Timeline {
            calls: vec![TimedCall { name: "dispatch".into(), start_ns: 5_000_000, nanos: 1_000_000 }],
            events: events.iter().map(event).collect(),
            ..Timeline::default()
        }
    }

    #[test]
    fn trace_picture_has_row_per_rank_by_node_and_box_per_operation() {
        let two = [
            timeline(&[(OpKind::PutRows, 0, 500)]),
            timeline(&[(OpKind::Wait, 100, 300), (OpKind::Reduce, 400, 600)]),
        ];
        let picture = draw(&config(), &NodeMap::from_labels(&["b", "a"]), &two);
        for class in ["wide box blue", "wide box pale", "wide box orange"] {
            assert_eq!(picture.matches(&format!("\"{class}\"")).count(), 1, "{class}");
        }
        assert!(!picture.contains("box teal"), "the legend names what occurs");
        let places =
            ["node 0<", "rank 0<", "node 1<", "rank 1<"].map(|text| picture.find(&format!(">{text}")));
        assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{places:?}");
        for text in
            ["put rows 1: 500 us, 2.0 MB", "wait landed 1: 300 us", ">dispatch<", "8 on 2 nodes (4 + 4)"]
        {
            assert!(picture.contains(text), "{text} in\n{picture}");
        }
    }

    #[test]
    fn every_kind_of_operation_has_a_color_of_its_own() {
        for kind in OpKind::ALL {
            assert_eq!(OpKind::ALL.iter().filter(|&&other| look(other).0 == look(kind).0).count(), 1);
        }
    }

    #[test]
    fn a_path_with_special_characters_is_shown_as_it_is() {
        let routing = "a <b> & \"c\".jsonl".parse().unwrap();
        let picture =
            draw(&RunSettings { routing, ..config() }, &NodeMap::from_labels(&[0]), &[Timeline::default()]);
        elements(&picture);
        assert!(picture.contains("a &lt;b&gt; &amp; &quot;c&quot;.jsonl"), "{picture}");
    }
}
