//! The timeline at a glance: ranks from top to bottom, time from left to right.
//!
//! ```text
//!   title, conditions
//!   node 0 | rank 0   [ dispatch            ][ experts ][ combine        ]     calls
//!          |          [put rows][put rows]|[ wait    ]  [wait][ reduce   ]     operations, as boxes of their kind
//!          | rank 1   ...
//!                     0         1         2 ms
//!          legend
//! ```
//!
//! The host steps one operation at a time, but tracks may run side by side: where operations
//! overlap, a rank gets as many lines of boxes as it needs. The picture has its own background,
//! light or dark as the reader prefers, and is 900 pixels wide.

use sidelane::exec::{Event, OpKind, Timeline};
use sidelane::topology::NodeMap;

use crate::chart::{LEFT, NARROW, Times, WIDTH, legend, rect, span};
use crate::commands::bench::Conditions;
use crate::svg::{self, Style, Svg};
use crate::table::{time_ns, volume};

const TOP: f64 = 82.0;
/// Height of a line of calls, and of one of operations.
const CALLS: f64 = 13.0;
const BOXES: f64 = 18.0;
/// Between ranks, and between nodes in addition.
const GAP: f64 = 9.0;
const NODES: f64 = 8.0;

const STYLE: Style = Style {
    light: "\
.call { font-size: 9.5px; fill: #59636e; }
.peer { font-size: 10px; fill: #ffffff; }
.span { fill: #eff2f5; }
.wide, .span { stroke: #ffffff; stroke-width: 0.5; }
.put { fill: #0f8a86; } .put-rows { fill: #2166c2; } .signal { fill: #c2307f; }
.wait { fill: #ccd3da; } .reduce { fill: #d9820f; }",
    dark: "\
.call { fill: #9198a1; } .peer { fill: #ffffff; }
.span { fill: #1b2129; }
.wide, .span { stroke: #0d1117; }
.put { fill: #1f9e99; } .put-rows { fill: #3f83dd; } .signal { fill: #e0579f; }
.wait { fill: #414a55; } .reduce { fill: #e0962f; }",
};

pub fn draw(config: &Conditions, nodes: &NodeMap, timelines: &[Timeline]) -> String {
    let calls = timelines.iter().flat_map(|timeline| &timeline.calls);
    let scale = Times::of(calls.map(|call| (call.start_ns, call.nanos)));
    let rows = rows(nodes, timelines);
    let bottom = rows.last().map_or(TOP, |row| row.y + row.height());
    let height = bottom + 72.0;
    svg::picture((WIDTH, height), "One dispatch and combine, operation by operation", STYLE, |svg| {
        head(svg, config);
        scale.axis(svg, (TOP, bottom));
        for row in &rows {
            row.draw(svg, &scale);
        }
        legend(svg, bottom + 50.0, kinds(timelines));
    })
}

fn head(svg: &mut Svg, config: &Conditions) {
    let [ranks, rows, routing, schedule, sums] = config.words().map(|(_, words)| words);
    svg.label("quiet", 16.0, 43.0, &format!("ranks: {ranks} · {rows}"));
    svg.label("quiet", 16.0, 59.0, &format!("{routing} · {schedule} · sums: {sums}"));
}

struct Row<'a> {
    rank: u32,
    /// Said at the first rank of each node, if there are several.
    node: Option<u32>,
    y: f64,
    timeline: &'a Timeline,
    lines: Vec<Vec<&'a Event>>,
}

fn rows<'a>(nodes: &NodeMap, timelines: &'a [Timeline]) -> Vec<Row<'a>> {
    let mut rows: Vec<Row<'a>> = Vec::with_capacity(timelines.len());
    let mut y = TOP;
    for node in 0..nodes.nodes() {
        for (index, &rank) in nodes.members(node).iter().enumerate() {
            let timeline = &timelines[rank as usize];
            let node = (index == 0 && nodes.nodes() > 1).then_some(node);
            let row = Row { rank, node, y, timeline, lines: lines(&timeline.events) };
            y += row.height() + GAP;
            rows.push(row);
        }
        y += NODES;
    }
    rows
}

/// Each event in the first line that is free when it begins.
fn lines(events: &[Event]) -> Vec<Vec<&Event>> {
    let mut events: Vec<&Event> = events.iter().collect();
    events.sort_by_key(|event| event.start_ns);
    let mut lines: Vec<Vec<&Event>> = vec![Vec::new()];
    for event in events {
        let free = |line: &Vec<&Event>| line.last().is_none_or(|last| end_ns(last) <= event.start_ns);
        match lines.iter_mut().find(|line| free(line)) {
            Some(line) => line.push(event),
            None => lines.push(vec![event]),
        }
    }
    lines
}

fn end_ns(event: &Event) -> u64 {
    event.start_ns + event.nanos
}

impl Row<'_> {
    fn height(&self) -> f64 {
        CALLS + BOXES * self.lines.len() as f64
    }

    fn draw(&self, svg: &mut Svg, scale: &Times) {
        let middle = self.y + CALLS + BOXES / 2.0 + 4.0;
        svg.label("end", LEFT - 12.0, middle, &format!("rank {}", self.rank));
        if let Some(node) = self.node {
            svg.label("quiet", 16.0, middle, &format!("node {node}"));
        }
        for call in &self.timeline.calls {
            let (from, to) = (scale.x(call.start_ns), scale.x(call.start_ns + call.nanos));
            let place = (from, self.y, to - from, self.height());
            rect(svg, "span", place, &format!("{}: {}", call.name, time_ns(call.nanos)));
            if to - from > 6.0 * call.name.len() as f64 {
                svg.label("call", from + 4.0, self.y + 9.5, &call.name);
            }
        }
        for (line, index) in self.lines.iter().zip(0..) {
            let y = self.y + CALLS + BOXES * f64::from(index);
            let mut boxes = boxes(line, scale);
            // The narrow ones on top, or they would be hidden; and of these the transfers, which
            // take longer.
            boxes.sort_by_key(|drawn| (drawn.width < NARROW, drawn.event.bytes > 0));
            for drawn in &boxes {
                drawn.draw(svg, y);
            }
        }
    }
}

/// One operation, or several adjacent ones of one kind that are too narrow to distinguish.
struct Drawn<'a> {
    event: &'a Event,
    count: u32,
    nanos: u64,
    x: f64,
    width: f64,
}

fn boxes<'a>(line: &[&'a Event], scale: &Times) -> Vec<Drawn<'a>> {
    let mut boxes: Vec<Drawn<'a>> = Vec::new();
    for &event in line {
        let (from, to) = (scale.x(event.start_ns), scale.x(end_ns(event)));
        match boxes.last_mut() {
            Some(last)
                if last.event.kind == event.kind
                    && to - from < NARROW
                    && last.width / f64::from(last.count) < NARROW
                    && from < last.x + last.width + NARROW =>
            {
                last.count += 1;
                last.nanos += event.nanos;
                last.width = last.width.max(to - last.x);
            }
            _ => boxes.push(Drawn { event, count: 1, nanos: event.nanos, x: from, width: to - from }),
        }
    }
    boxes
}

impl Drawn<'_> {
    fn draw(&self, svg: &mut Svg, y: f64) {
        let (kind, time) = (self.event.kind, time_ns(self.nanos));
        let said = match (self.count, self.event.bytes) {
            (1, 0) => format!("{}: {time}", self.event),
            (1, bytes) => format!("{}: {time}, {}", self.event, volume(bytes)),
            (count, _) => format!("{count} x {}: {time}", kind.name()),
        };
        let moves = matches!(kind, OpKind::Put | OpKind::PutRows) && self.count == 1;
        let peer = if moves { self.event.peer.to_string() } else { String::new() };
        span(svg, &class(kind), (self.x, y, self.width, BOXES), &said, ("peer", &peer));
    }
}

fn kinds(timelines: &[Timeline]) -> impl Iterator<Item = (String, &'static str)> {
    let occurs = |kind: &OpKind| {
        timelines.iter().flat_map(|timeline| &timeline.events).any(|event| event.kind == *kind)
    };
    OpKind::ALL.into_iter().filter(occurs).map(|kind| {
        let said = match kind {
            OpKind::Put => "put (to rank)",
            OpKind::PutRows => "put rows (to rank)",
            OpKind::Reduce => "reduce: read and sum",
            OpKind::Signal | OpKind::Wait => kind.name(),
        };
        (format!("wide {}", class(kind)), said)
    })
}

fn class(kind: OpKind) -> String {
    kind.name().replace(' ', "-")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sidelane::exec::TimedCall;
    use sidelane_core::schedule::Flag;

    use super::*;
    use crate::chart::tests::number;
    use crate::commands::trace::tests::config;
    use crate::svg::tests::elements;

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

    fn draw_one(events: &[(OpKind, u64, u64)]) -> String {
        draw(&config(), &NodeMap::from_labels(&[0]), &[timeline(events)])
    }

    /// How often a class is drawn as an operation: its sample in the legend does not count.
    fn drawn(picture: &str, class: &str) -> usize {
        let tags = elements(picture).into_iter().filter(|tag| tag.starts_with("rect"));
        tags.filter(|tag| tag.contains(&format!("\"{class}\""))).count()
            - usize::from(class.starts_with("wide"))
    }

    #[test]
    fn trace_picture_has_row_per_rank_by_node_and_box_per_operation() {
        let two = [
            timeline(&[(OpKind::PutRows, 0, 500)]),
            timeline(&[(OpKind::Wait, 100, 300), (OpKind::Reduce, 400, 600)]),
        ];
        let picture = draw(&config(), &NodeMap::from_labels(&["b", "a"]), &two);
        for class in ["wide put-rows", "wide wait", "wide reduce"] {
            assert_eq!(drawn(&picture, class), 1, "{class}");
        }
        assert!(!picture.contains("\"wide put\""), "the legend names what occurs");
        let places =
            ["node 0<", "rank 0<", "node 1<", "rank 1<"].map(|text| picture.find(&format!(">{text}")));
        assert!(places.iter().all(Option::is_some), "{places:?}");
        for text in
            ["put rows 1: 500 us, 2.0 MB", "wait landed 1: 300 us", ">dispatch<", "8 on 2 nodes (4 + 4)"]
        {
            assert!(picture.contains(text), "{text} in\n{picture}");
        }
    }

    #[test]
    fn neighbors_of_one_kind_that_are_too_narrow_are_drawn_as_one_box() {
        let signals = draw_one(&[(OpKind::Signal, 10, 0), (OpKind::Signal, 10, 0), (OpKind::Signal, 10, 0)]);
        assert_eq!(drawn(&signals, "signal"), 1);
        assert!(signals.contains("3 x signal"), "{signals}");
        assert_eq!(drawn(&draw_one(&[(OpKind::Signal, 10, 0), (OpKind::Signal, 50, 0)]), "signal"), 2);
        assert_eq!(
            drawn(&draw_one(&[(OpKind::PutRows, 0, 90), (OpKind::PutRows, 90, 90)]), "wide put-rows"),
            2
        );
    }

    #[test]
    fn operations_that_overlap_take_lines_of_their_own() {
        let events = [
            (OpKind::Put, 0, 500),
            (OpKind::Put, 100, 100),
            (OpKind::Put, 200, 100),
            (OpKind::Put, 600, 100),
        ];
        let timeline = timeline(&events);
        let lines = lines(&timeline.events);
        assert_eq!(lines.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
        assert_eq!(drawn(&draw_one(&events), "wide put"), 4);
    }

    #[test]
    fn a_path_with_special_characters_is_shown_as_it_is() {
        let routing = "a <b> & \"c\".jsonl".parse().unwrap();
        let picture =
            draw(&Conditions { routing, ..config() }, &NodeMap::from_labels(&[0]), &[Timeline::default()]);
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
                .map(|&(kind, start, us)| (OpKind::ALL[kind], start, us.min(1000 - start)))
                .collect();
            for tag in elements(&draw_one(&events)).iter().filter(|tag| tag.starts_with("rect")) {
                let (x, width) = (number(tag, "x"), number(tag, "width"));
                prop_assert!(x >= 0.5 && x + width <= WIDTH, "{tag}");
            }
        }
    }
}
