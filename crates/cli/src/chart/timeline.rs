//! Boxes in rows, time from left to right.
//!
//! ```text
//!   title, conditions
//!   group
//!     row     call name                         calls, behind the boxes
//!             [ box    ][ box ]|[   box   ]     boxes of their kinds
//!                  [ box ]                      as many lines as boxes overlap
//!     row     ..
//!             0         1         2 ms
//!             legend
//! ```

use sidelane::exec::TimedCall;

use super::svg::Svg;
use super::{Axis, Color, EDGE, LINE, Legend, Scale, WIDTH, picture, rect, top};
use crate::table::time_ns;

/// A box.
pub struct Span {
    /// Its number in [`Timeline::kinds`].
    pub kind: usize,
    pub start_ns: u64,
    pub nanos: u64,
    /// Label under the pointer, and one that is drawn where there is room.
    pub said: String,
    pub inside: String,
}

pub struct Row<'a> {
    /// Said above the first row of a group.
    pub group: Option<String>,
    pub name: String,
    pub calls: &'a [TimedCall],
    pub spans: Vec<Span>,
}

pub struct Timeline<'a> {
    pub title: &'a str,
    pub conditions: Vec<String>,
    /// Kinds of boxes. The legend names those that occur.
    pub kinds: &'a [(Color, &'static str)],
    pub rows: Vec<Row<'a>>,
}

const LEFT: f64 = 112.0;
/// Height of the names of calls, of a line of boxes, and of a box.
const CALLS: f64 = 13.0;
const BOXES: f64 = 20.0;
const BOX: f64 = 18.0;
/// Between rows, and in addition between groups.
const GAP: f64 = 5.0;
const GROUPS: f64 = 15.0;
/// Boxes are drawn at least as wide as this.
const NARROW: f64 = 0.7;

/// Where a time lies.
type At<'a> = &'a dyn Fn(u64) -> f64;

impl Timeline<'_> {
    pub fn draw(&self) -> String {
        let spans = || self.rows.iter().flat_map(|row| &row.spans);
        let calls = self.rows.iter().flat_map(|row| row.calls).map(|call| (call.start_ns, call.nanos));
        let lasting = calls.chain(spans().map(|span| (span.start_ns, span.nanos)));
        let begin_ns = lasting.clone().map(|(start_ns, _)| start_ns).min().unwrap_or(0);
        let end_ns = lasting.map(|(start_ns, nanos)| start_ns + nanos).max().unwrap_or(0);
        let ends = [0.0, (end_ns - begin_ns) as f64].into_iter();
        let axis = Axis::new(Scale::Linear, ends, (LEFT, WIDTH - EDGE));
        let at = |ns: u64| axis.at((ns - begin_ns) as f64);
        let top = top(&self.conditions);
        let (mut bottom, mut rows) = (top - GAP, Vec::new());
        for row in &self.rows {
            bottom += if row.group.is_some() && !rows.is_empty() { GAP + GROUPS } else { GAP };
            rows.push((row, bottom));
            bottom += row.height();
        }
        let occurs = |kind: &usize| spans().any(|span| span.kind == *kind);
        let kinds: Vec<_> = (0..self.kinds.len()).filter(occurs).map(|kind| self.kinds[kind]).collect();
        let legend = Legend { names: kinds.iter().map(|kind| kind.1).collect(), left: LEFT };
        picture(bottom + 44.0 + legend.height(), self.title, &self.conditions, |svg| {
            for ns in axis.marks(0) {
                let x = axis.at(ns);
                svg.line("line", (x, top - 4.0), (x, bottom + 4.0));
                svg.label("quiet middle", x, bottom + LINE, &mark_text(ns, axis.step()));
            }
            rows.iter().for_each(|(row, y)| row.draw(svg, *y, &at, self.kinds));
            legend.draw(svg, bottom + 44.0, |svg, nth, (x, y)| {
                let (color, name) = kinds[nth];
                rect(svg, &format!("sample box {}", color.class()), (x + 11.0, y - 5.5, 11.0, 11.0), name);
            });
        })
    }
}

fn mark_text(ns: f64, step: f64) -> String {
    if ns == 0.0 {
        return "0".into();
    }
    let (unit, name) = if step >= 1e5 { (1e6, "ms") } else { (1e3, "us") };
    let digits = usize::from((step / unit).fract() != 0.0);
    format!("{:.digits$} {name}", ns / unit)
}

impl Row<'_> {
    fn height(&self) -> f64 {
        let calls = if self.calls.is_empty() { 0.0 } else { CALLS };
        calls + BOXES * lines(&self.spans).len() as f64
    }

    /// From this place downward.
    fn draw(&self, svg: &mut Svg, y: f64, at: At<'_>, kinds: &[(Color, &str)]) {
        let (lines, bottom) = (lines(&self.spans), y + self.height());
        let first = bottom - BOXES * lines.len() as f64;
        if let Some(group) = &self.group {
            svg.label("quiet", EDGE, y - 5.0, group);
        }
        svg.label("end", LEFT - 10.0, first + BOX / 2.0 + 4.0, &self.name);
        for TimedCall { name, start_ns, nanos } in self.calls {
            let (from, to) = (at(*start_ns), at(start_ns + nanos));
            let said = format!("{name}: {}", time_ns(*nanos));
            rect(svg, "call", (from, y, to - from, bottom - y), &said);
            if to - from > 6.0 * name.len() as f64 {
                svg.label("quiet small", from + 4.0, y + 9.5, name);
            }
        }
        for (line, nth) in lines.iter().zip(0u32..) {
            let mut boxes = boxes(line, at);
            // The narrow ones on top, or they would be hidden; and of these the longer ones.
            boxes.sort_by_key(|drawn| (drawn.width < NARROW, drawn.nanos));
            boxes.iter().for_each(|drawn| drawn.draw(svg, first + BOXES * f64::from(nth), kinds));
        }
    }
}

/// Each box in the first line that is free when it begins.
fn lines(spans: &[Span]) -> Vec<Vec<&Span>> {
    let mut spans: Vec<&Span> = spans.iter().collect();
    spans.sort_by_key(|span| span.start_ns);
    let mut lines: Vec<Vec<&Span>> = vec![Vec::new()];
    for span in spans {
        let free = |last: &&Span| last.start_ns + last.nanos <= span.start_ns;
        match lines.iter_mut().find(|line| line.last().is_none_or(free)) {
            Some(line) => line.push(span),
            None => lines.push(vec![span]),
        }
    }
    lines
}

/// One box, or several adjacent ones of one kind that are too narrow to distinguish.
struct Drawn<'a> {
    span: &'a Span,
    count: u32,
    nanos: u64,
    x: f64,
    width: f64,
}

fn boxes<'a>(line: &[&'a Span], at: At<'_>) -> Vec<Drawn<'a>> {
    let mut boxes: Vec<Drawn<'a>> = Vec::new();
    for &span in line {
        let (from, to) = (at(span.start_ns), at(span.start_ns + span.nanos));
        match boxes.last_mut() {
            Some(last)
                if last.span.kind == span.kind
                    && to - from < NARROW
                    && last.width / f64::from(last.count) < NARROW
                    && from < last.x + last.width + NARROW =>
            {
                last.count += 1;
                last.nanos += span.nanos;
                last.width = last.width.max(to - last.x);
            }
            _ => boxes.push(Drawn { span, count: 1, nanos: span.nanos, x: from, width: to - from }),
        }
    }
    boxes
}

impl Drawn<'_> {
    fn draw(&self, svg: &mut Svg, y: f64, kinds: &[(Color, &str)]) {
        let (Drawn { span, count, .. }, width) = (self, self.width.max(NARROW));
        let (color, kind) = kinds[span.kind];
        // Wide boxes are set off from adjacent ones.
        let class = format!("{}box {}", if width < 4.0 { "" } else { "wide " }, color.class());
        let (said, inside) = match count {
            1 => (span.said.clone(), &span.inside[..]),
            _ => (format!("{count} x {kind}: {}", time_ns(self.nanos)), ""),
        };
        rect(svg, &class, (self.x, y, width, BOX), &said);
        if width > 4.0 + 6.0 * inside.len() as f64 && !inside.is_empty() {
            svg.label("inside middle", self.x + width / 2.0, y + BOX / 2.0 + 3.5, inside);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::number;
    use super::*;
    use crate::chart::svg::tests::elements;

    const KINDS: [(Color, &str); 2] = [(Color::Blue, "signal"), (Color::Orange, "sum")];

    /// One millisecond of a row: kind, start and duration of boxes, in microseconds.
    fn draw(boxes: &[(usize, u64, u64)]) -> String {
        let calls = [TimedCall { name: "dispatch".into(), start_ns: 5_000_000, nanos: 1_000_000 }];
        let span = |&(kind, start, us): &(usize, u64, u64)| Span {
            kind,
            start_ns: 5_000_000 + start * 1000,
            nanos: us * 1000,
            said: "said".into(),
            inside: "7".into(),
        };
        let row =
            Row { group: None, name: "row".into(), calls: &calls, spans: boxes.iter().map(span).collect() };
        Timeline { title: "title", conditions: vec![], kinds: &KINDS, rows: vec![row] }.draw()
    }

    fn boxes(picture: &str, color: &str) -> Vec<(f64, f64)> {
        let tags = elements(picture).into_iter().filter(|tag| tag.contains(&format!("box {color}")));
        let tags = tags.filter(|tag| !tag.contains("sample"));
        tags.map(|tag| (number(&tag, "y"), number(&tag, "width"))).collect()
    }

    #[test]
    fn neighbors_of_one_kind_that_are_too_narrow_are_drawn_as_one_box() {
        let signals = draw(&[(0, 10, 0), (0, 10, 0), (0, 10, 0)]);
        assert_eq!(boxes(&signals, "blue").len(), 1);
        assert!(signals.contains("3 x signal"), "{signals}");
        assert_eq!(boxes(&draw(&[(0, 10, 0), (0, 50, 0)]), "blue").len(), 2);
        assert_eq!(boxes(&draw(&[(0, 0, 90), (0, 90, 90)]), "blue").len(), 2);
    }

    #[test]
    fn boxes_that_overlap_take_lines_of_their_own() {
        let mut drawn = boxes(&draw(&[(1, 0, 500), (1, 100, 100), (1, 200, 100), (1, 600, 100)]), "orange");
        drawn.sort_by(|a, b| a.0.total_cmp(&b.0));
        assert_eq!(drawn.len(), 4);
        assert!(drawn[0].0 == drawn[1].0 && drawn[1].0 < drawn[2].0 && drawn[2].0 == drawn[3].0, "{drawn:?}");
    }

    #[test]
    fn the_legend_names_kinds_that_occur() {
        let picture = draw(&[(1, 0, 500)]);
        assert!(picture.contains(">sum<") && !picture.contains(">signal<"), "{picture}");
    }

    #[test]
    fn marks_have_as_few_digits_as_tell_them_apart() {
        let cases =
            [(0.0, 500.0, "0"), (1500.0, 500.0, "1.5 us"), (4e4, 2e4, "40 us"), (2.5e6, 5e5, "2.5 ms")];
        for (ns, step, text) in cases {
            assert_eq!(mark_text(ns, step), text);
        }
        assert_eq!(mark_text(4e6, 2e6), "4 ms");
    }

    proptest! {
        #[test]
        fn every_picture_is_well_formed_and_every_box_lies_inside(
            events in prop::collection::vec((0..2usize, 0..1000u64, 0..400u64), 0..40),
        ) {
            let events: Vec<_> =
                events.iter().map(|&(kind, start, us)| (kind, start, us.min(1000 - start))).collect();
            for tag in elements(&draw(&events)).iter().filter(|tag| tag.starts_with("rect")) {
                let (x, width) = (number(tag, "x"), number(tag, "width"));
                prop_assert!(x >= 0.5 && x + width <= WIDTH, "{tag}");
            }
        }
    }
}
