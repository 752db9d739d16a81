//! One overlapped step at a glance: the streams of every rank, one below the other, time from left to right.
//!
//! ```text
//!   title, conditions
//!   rank 0
//!       compute 0     [0][1][2] ..  [weights]      chunks, in the colour of what is done to them
//!       transfer 0  [0][2][0] ..
//!       transfer 1    [1][3][1] ..
//!   rank 1   ..
//!                        0       1       2 ms
//!            legend
//! ```

use sidelane::exec::{Span, Timeline};

use super::task::Shape;
use crate::svg::{self, Style, Svg};
use crate::table::time;
use crate::timeline::{LEFT, NARROW, Scale, WIDTH, legend, rect};

const TOP: f64 = 74.0;
/// Height of a stream, and what is between ranks.
const STREAM: f64 = 22.0;
const GAP: f64 = 22.0;

const STYLE: Style = Style {
    light: "\
.chunk { font-size: 9px; fill: #ffffff; }
.wide { stroke: #ffffff; stroke-width: 0.5; }
.rows { fill: #d9820f; } .weights { fill: #a65208; }
.out { fill: #2166c2; } .home { fill: #0f8a86; } .other { fill: #8a939c; }",
    dark: "\
.chunk { fill: #ffffff; }
.wide { stroke: #0d1117; }
.rows { fill: #e0962f; } .weights { fill: #b96a1e; }
.out { fill: #3f83dd; } .home { fill: #1f9e99; } .other { fill: #6b747e; }",
};

/// What is done to a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Rows,
    Weights,
    Out,
    Home,
    Other,
}

impl Kind {
    const ALL: [Kind; 5] = [Kind::Out, Kind::Home, Kind::Rows, Kind::Weights, Kind::Other];

    fn of(span: &Span) -> Kind {
        match span.name.as_str() {
            "experts" | "gradient of rows" => Kind::Rows,
            "gradient of weights" | "gradient of shared weights" => Kind::Weights,
            "dispatch" | "gradient of combine" => Kind::Out,
            "combine" | "gradient of dispatch" => Kind::Home,
            _ => Kind::Other,
        }
    }

    fn class(self) -> &'static str {
        match self {
            Kind::Rows => "rows",
            Kind::Weights => "weights",
            Kind::Out => "out",
            Kind::Home => "home",
            Kind::Other => "other",
        }
    }

    fn said(self) -> &'static str {
        match self {
            Kind::Rows => "experts, gradients of rows",
            Kind::Weights => "gradients of weights",
            Kind::Out => "to experts",
            Kind::Home => "home, summed",
            Kind::Other => "else",
        }
    }
}

/// The picture of one step of all ranks.
pub fn draw(shape: &Shape, timelines: &[Timeline]) -> String {
    let spans = timelines.iter().flat_map(|timeline| &timeline.spans);
    let scale = Scale::of(spans.clone().map(|span| (span.start_ns, span.nanos)));
    let ranks: Vec<_> = timelines.iter().map(|timeline| streams(&timeline.spans)).collect();
    let lines: usize = ranks.iter().map(Vec::len).sum();
    let bottom = TOP + STREAM * lines as f64 + GAP * ranks.len().saturating_sub(1) as f64;
    let title = "One step of a layer: transfers beside experts";
    svg::picture((WIDTH, bottom + 64.0), title, STYLE, |svg| {
        svg.label("quiet", 16.0, 45.0, &shape.words());
        scale.axis(svg, (TOP, bottom));
        let mut y = TOP;
        for (rank, streams) in ranks.iter().enumerate() {
            svg.label("quiet", 16.0, y - 5.0, &format!("rank {rank}"));
            for (stream, spans) in streams {
                svg.label("end", LEFT - 8.0, y + STREAM / 2.0 + 4.0, stream);
                spans.iter().for_each(|span| draw_span(svg, &scale, y, span));
                y += STREAM;
            }
            y += GAP;
        }
        let occurs = |kind: &Kind| spans.clone().any(|span| Kind::of(span) == *kind);
        let kinds = Kind::ALL.into_iter().filter(occurs);
        legend(svg, bottom + 46.0, kinds.map(|kind| (kind.class().to_owned(), kind.said())));
    })
}

/// What each stream did.
fn streams(spans: &[Span]) -> Vec<(&str, Vec<&Span>)> {
    let mut names: Vec<&str> = spans.iter().map(|span| span.stream.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let of = |name| spans.iter().filter(|span| span.stream == name).collect();
    names.into_iter().map(|name| (name, of(name))).collect()
}

fn draw_span(svg: &mut Svg, scale: &Scale, y: f64, span: &Span) {
    let (from, to) = (scale.x(span.start_ns), scale.x(span.start_ns + span.nanos));
    let (width, chunk) = ((to - from).max(NARROW), span.chunk.to_string());
    let class = Kind::of(span).class();
    let class = if width < 4.0 { class.to_owned() } else { format!("wide {class}") };
    let said = format!("{} {chunk}: {}", span.name, time(span.nanos as f64 / 1e3));
    rect(svg, &class, (from, y, width, STREAM - 2.0), &said);
    if width > 3.0 + 5.5 * chunk.len() as f64 {
        svg.label("chunk middle", from + width / 2.0, y + STREAM / 2.0 + 2.5, &chunk);
    }
}

#[cfg(test)]
mod tests {
    use super::super::task::sample;
    use super::*;
    use crate::svg::tests::elements;

    fn span(stream: &str, name: &str, start_us: u64, us: u64) -> Span {
        let (stream, name) = (stream.to_owned(), name.to_owned());
        Span { stream, name, chunk: 3, start_ns: 7_000_000 + start_us * 1000, nanos: us * 1000 }
    }

    #[test]
    fn streams_lie_below_each_other_and_spans_where_their_time_is() {
        let timeline = Timeline {
            spans: vec![
                span("transfer 0", "dispatch", 0, 100),
                span("compute 0", "experts", 100, 300),
                span("transfer 0", "combine", 200, 200),
            ],
            ..Timeline::default()
        };
        let picture = draw(&sample(), &[timeline.clone(), timeline]);
        let boxes = |class: &str| -> Vec<(f64, f64, f64)> {
            let tags =
                elements(&picture).into_iter().filter(|tag| tag.starts_with("rect") && tag.contains(class));
            let value = |tag: &str, name: &str| -> f64 {
                tag.split_once(&format!(" {name}=\"")).unwrap().1.split('"').next().unwrap().parse().unwrap()
            };
            tags.map(|tag| (value(&tag, "x"), value(&tag, "y"), value(&tag, "width"))).collect()
        };
        let [rows, out, home] = ["wide rows", "wide out", "wide home"].map(boxes);
        assert_eq!((rows.len(), out.len(), home.len()), (2, 2, 2), "once for each rank");
        assert!(rows[0].1 < out[0].1 && out[0].1 == home[0].1 && home[0].1 < rows[1].1);
        assert_eq!((rows[0].0, rows[0].2), (LEFT + 193.0, 579.0), "the last three quarters");
        assert!(!picture.contains(Kind::Weights.said()), "the legend names what occurs");
        for text in ["experts 3: 300 us", ">transfer 0<", ">rank 1<", "64 tokens a rank in 4 chunks"] {
            assert!(picture.contains(text), "{text} in\n{picture}");
        }
    }

    #[test]
    fn nothing_recorded_is_an_empty_picture() {
        elements(&draw(&sample(), &[Timeline::default()]));
    }
}
