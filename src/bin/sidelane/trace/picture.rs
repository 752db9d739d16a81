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
//! The host steps one operation at a time, but tracks may run side by side: where operations overlap, a rank gets as many
//! lines of boxes as it needs. The picture has its own background, light or dark as the reader prefers, and is 900
//! pixels wide.

use sidelane::exec::{Event, Kind, Timeline};
use sidelane::topology::NodeMap;

use crate::bench::{Config, Words};
use crate::svg::{self, Attribute, Style, Svg, round};
use crate::table::{time, volume};

const WIDTH: f64 = 900.0;
/// Where time begins and ends.
const LEFT: f64 = 112.0;
const RIGHT: f64 = 884.0;
const TOP: f64 = 82.0;
/// Height of a line of calls, and of one of operations.
const CALLS: f64 = 13.0;
const BOXES: f64 = 18.0;
/// Between ranks, and between nodes in addition.
const GAP: f64 = 9.0;
const NODES: f64 = 8.0;
/// Boxes are drawn at least as wide as this; narrower neighbours of one kind are drawn as one.
const NARROW: f64 = 0.7;

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

/// The picture of one round.
pub fn draw(config: &Config, nodes: &NodeMap, timelines: &[Timeline]) -> String {
    let scale = Scale::of(timelines);
    let rows = rows(nodes, timelines);
    let bottom = rows.last().map_or(TOP, |row| row.y + row.height());
    let height = bottom + 72.0;
    svg::picture((WIDTH, height), "One dispatch and combine, operation by operation", STYLE, |svg| {
        head(svg, config);
        axis(svg, &scale, bottom);
        for row in &rows {
            row.draw(svg, &scale);
        }
        legend(svg, timelines, bottom + 50.0);
    })
}

fn head(svg: &mut Svg, config: &Config) {
    let Words { ranks, rows, routing, schedule } = Words::of(config);
    svg.label("quiet", 16.0, 43.0, &format!("ranks: {ranks} · {rows}"));
    svg.label("quiet", 16.0, 59.0, &format!("{routing} · {schedule}"));
}

/// Which time lies where.
struct Scale {
    begin_ns: u64,
    span_ns: u64,
}

impl Scale {
    fn of(timelines: &[Timeline]) -> Self {
        let calls = || timelines.iter().flat_map(|timeline| &timeline.calls);
        let begin_ns = calls().map(|call| call.start_ns).min().unwrap_or(0);
        let end_ns = calls().map(|call| call.start_ns + call.nanos).max().unwrap_or(0);
        Scale { begin_ns, span_ns: (end_ns - begin_ns).max(1) }
    }

    fn x(&self, ns: u64) -> f64 {
        LEFT + ns.saturating_sub(self.begin_ns) as f64 / self.span_ns as f64 * (RIGHT - LEFT)
    }

    /// Distance of marks: 1, 2 or 5 times a power of ten, so that there are between four and ten.
    fn step_ns(&self) -> u64 {
        let power = 10u64.pow((self.span_ns / 4).max(1).ilog10());
        let steps = [5, 2, 1].map(|digit| digit * power);
        steps.into_iter().find(|step| self.span_ns / step >= 4).unwrap_or(power)
    }
}

fn axis(svg: &mut Svg, scale: &Scale, bottom: f64) {
    let step = scale.step_ns();
    for mark in 0..=scale.span_ns / step {
        let x = scale.x(scale.begin_ns + mark * step);
        let (top, bottom) = (TOP - 4.0, bottom + 4.0);
        svg.line("line", (x, top), (x, bottom));
        svg.label("quiet middle", x, bottom + 14.0, &mark_text(mark * step, step));
    }
}

/// As few digits as tell marks apart.
fn mark_text(ns: u64, step: u64) -> String {
    if ns == 0 {
        return "0".into();
    }
    let (unit, name) = if step >= 100_000 { (1_000_000, "ms") } else { (1000, "us") };
    let digits = usize::from(!step.is_multiple_of(unit));
    format!("{:.digits$} {name}", ns as f64 / unit as f64)
}

/// A rank's place in the picture.
struct Row<'a> {
    rank: u32,
    /// Said at the first rank of each node, if there are several.
    node: Option<u32>,
    y: f64,
    timeline: &'a Timeline,
    lines: Vec<Vec<&'a Event>>,
}

/// Ranks in order of their nodes.
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

    fn draw(&self, svg: &mut Svg, scale: &Scale) {
        let middle = self.y + CALLS + BOXES / 2.0 + 4.0;
        svg.label("end", LEFT - 12.0, middle, &format!("rank {}", self.rank));
        if let Some(node) = self.node {
            svg.label("quiet", 16.0, middle, &format!("node {node}"));
        }
        for call in &self.timeline.calls {
            let (from, to) = (scale.x(call.start_ns), scale.x(call.start_ns + call.nanos));
            let place = (from, self.y, to - from, self.height());
            rect(svg, "span", place, &format!("{}: {}", call.name, time(call.nanos as f64 / 1e3)));
            if to - from > 6.0 * call.name.len() as f64 {
                svg.label("call", from + 4.0, self.y + 9.5, &call.name);
            }
        }
        for (line, index) in self.lines.iter().zip(0..) {
            let y = self.y + CALLS + BOXES * f64::from(index);
            let mut boxes = boxes(line, scale);
            // The narrow ones on top, or they would be hidden; and of these what moves bytes, as it takes longer.
            boxes.sort_by_key(|drawn| (drawn.width < NARROW, drawn.event.bytes > 0));
            for drawn in &boxes {
                drawn.draw(svg, y);
            }
        }
    }
}

/// One operation, or several of one kind that are too narrow to be told apart.
struct Drawn<'a> {
    event: &'a Event,
    count: u32,
    nanos: u64,
    x: f64,
    width: f64,
}

fn boxes<'a>(line: &[&'a Event], scale: &Scale) -> Vec<Drawn<'a>> {
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
        let width = self.width.max(NARROW);
        let (kind, time) = (self.event.kind, time(self.nanos as f64 / 1e3));
        let said = match (self.count, self.event.bytes) {
            (1, 0) => format!("{}: {time}", self.event),
            (1, bytes) => format!("{}: {time}, {}", self.event, volume(bytes)),
            (count, _) => format!("{count} x {}: {time}", kind.name()),
        };
        rect(svg, &class(kind, width), (self.x, y, width, BOXES), &said);
        let moves = matches!(kind, Kind::Put | Kind::PutRows);
        let peer = self.event.peer.to_string();
        if moves && self.count == 1 && width > 5.0 + 6.0 * peer.len() as f64 {
            svg.label("peer middle", self.x + width / 2.0, y + BOXES / 2.0 + 3.5, &peer);
        }
    }
}

/// The kinds that occur.
fn legend(svg: &mut Svg, timelines: &[Timeline], y: f64) {
    const SIDE: f64 = 11.0;
    let mut x = LEFT;
    for kind in Kind::ALL {
        if !timelines.iter().flat_map(|timeline| &timeline.events).any(|event| event.kind == kind) {
            continue;
        }
        let said = match kind {
            Kind::Put => "put (to rank)",
            Kind::PutRows => "put rows (to rank)",
            Kind::Reduce => "reduce: read and sum",
            Kind::Signal | Kind::Wait => kind.name(),
        };
        rect(svg, &class(kind, SIDE), (x, y - 9.0, SIDE, SIDE), kind.name());
        svg.label("quiet", x + 16.0, y, said);
        x += 38.0 + 6.0 * said.len() as f64;
    }
}

/// Wide boxes are set off from their neighbours.
fn class(kind: Kind, width: f64) -> String {
    let name = kind.name().replace(' ', "-");
    if width < 4.0 { name } else { format!("wide {name}") }
}

/// A rectangle (x, y, width, height) that says what it is when the mouse is over it.
fn rect(svg: &mut Svg, class: &str, (x, y, width, height): (f64, f64, f64, f64), said: &str) {
    let (x, width) = (round(x), round(width));
    let place: [Attribute<'_>; 5] =
        [("class", &class), ("x", &x), ("y", &y), ("width", &width), ("height", &height)];
    svg.element("rect", &place, |svg| svg.element("title", &[], |svg| svg.text(said)));
}

#[cfg(test)]
#[path = "picture_tests.rs"]
mod tests;
