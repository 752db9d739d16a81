//! Results, and their JSON. `docs/layer-json.md` describes the keys.

use std::collections::BTreeSet;

use serde::Serialize;
use sidelane::World;
use sidelane::config::EmulatedLink;
use sidelane::exec::{NodeSpan, Timeline};
use sidelane_testkit::machines::{self, Hosts, Machines};
use sidelane_testkit::timing::stats::summary;

use super::{Shape, Task};
use crate::chart::{self, Color, Row, Span};
use crate::command_frame;
use crate::commands::launch::shape_words;
use crate::table::{self, time, time_ns};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub config: RunSettings,
    pub verified: bool,
    pub forward: Pass,
    pub backward: Option<Pass>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunSettings {
    #[serde(flatten)]
    pub shape: Shape,
    pub rounds: u32,
    pub lane: Option<String>,
    pub emulated_link: Option<Link>,
    pub lane_reason: Option<String>,
    #[serde(flatten)]
    pub hosts: Hosts,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Link {
    pub bytes_per_second: u64,
    latency_us: u64,
}

/// One direction: medians of rounds, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Pass {
    /// At the slowest rank, in turn.
    experts_us: f64,
    transfers_us: f64,
    sequential_us: f64,
    overlapped_us: f64,
    /// Savings of overlap, by the shorter of experts and transfers.
    pub hidden_share: f64,
}

impl Pass {
    pub fn of_rounds(experts: &[f64], transfers: &[f64], in_turn: &[f64], overlapped: &[f64]) -> Self {
        let [experts_us, transfers_us, sequential_us, overlapped_us] =
            [experts, transfers, in_turn, overlapped].map(|rounds| summary(rounds).p50_us);
        let hidden_share = (sequential_us - overlapped_us) / experts_us.min(transfers_us);
        Pass { experts_us, transfers_us, sequential_us, overlapped_us, hidden_share }
    }

    /// The share, unless a part alone took longer than the whole step: then the times are noise.
    fn hidden(&self) -> String {
        match self.experts_us.max(self.transfers_us) > self.sequential_us {
            true => "-".to_owned(),
            false => format!("{:.2}", self.hidden_share),
        }
    }
}

impl From<EmulatedLink> for Link {
    fn from(link: EmulatedLink) -> Self {
        let latency_us = u64::try_from(link.latency.as_micros()).unwrap_or(u64::MAX);
        Link { bytes_per_second: link.bytes_per_second.get(), latency_us }
    }
}

impl Report {
    pub fn new(
        task: &Task,
        (world, machines): (&World, &Machines),
        link: Option<EmulatedLink>,
        verified: bool,
        passes: &[Pass],
    ) -> Self {
        let (lane, lane_reason) = machines::net(world).unzip();
        let emulated_link = link.filter(|_| lane.as_deref() == Some("emulated")).map(Link::from);
        let (shape, rounds, hosts) = (task.shape.clone(), task.rounds, machines.hosts());
        let config = RunSettings { shape, rounds, lane, emulated_link, lane_reason, hosts };
        Report { config, verified, forward: passes[0], backward: passes.get(1).copied() }
    }
}

const NOTES: &str = "\
Experts: at work, at the slowest rank, in turn. Transfers: a step whose experts do nothing. Hidden: what overlap saves of the
shorter of the two; 1 is all of it, and below 0 overlap costs more than it hides. It is unknown (-) where a part took longer than the whole.";

impl command_frame::Report for Report {
    fn text(&self) -> String {
        let RunSettings { shape, rounds, lane, emulated_link, lane_reason, hosts } = &self.config;
        let reason = table::because(lane_reason);
        let link = match emulated_link {
            Some(Link { bytes_per_second, latency_us }) => {
                format!(", at {} a second and {latency_us} us", table::volume(*bytes_per_second))
            }
            None => String::new(),
        };
        let lane = lane.as_deref().unwrap_or("shm");
        let passes = [("forward", Some(self.forward)), ("backward", self.backward)];
        let table = table::of(
            passes.into_iter().filter_map(|(name, pass)| Some((name, pass?))),
            &[
                ("", &|(name, _)| (*name).to_owned()),
                ("experts", &|(_, pass)| time(pass.experts_us)),
                ("transfers", &|(_, pass)| time(pass.transfers_us)),
                ("in turn", &|(_, pass)| time(pass.sequential_us)),
                ("overlapped", &|(_, pass)| time(pass.overlapped_us)),
                ("hidden", &|(_, pass)| pass.hidden()),
            ],
        );
        let bits = if self.verified { "the same bits in turn and overlapped" } else { "DIFFERENT BITS" };
        let head = table::head(&[
            ("ranks", format!("{}, {}", shape_words(&shape.ranks_per_node), hosts.text(""))),
            ("layer", shape.words()),
            ("lane", format!("{lane}{link}{reason}")),
            ("checked", format!("{bits}; medians of {rounds} round{}", if *rounds == 1 { "" } else { "s" })),
        ]);
        format!("{head}\n{table}\n\n{NOTES}")
    }

    fn is_right(&self) -> bool {
        self.verified
    }
}

/// Work on a chunk: its color, its words, and its spans; the last entry has all others.
const KINDS: [(Color, &str, &[&str]); 5] = [
    (Color::Blue, "to experts", &["dispatch", "gradient of combine"]),
    (Color::Teal, "returned, summed", &["combine", "gradient of dispatch"]),
    (Color::Orange, "experts, gradients of rows", &["experts", "gradient of rows"]),
    (Color::Brown, "gradients of weights", &["gradient of weights", "gradient of shared weights"]),
    (Color::Gray, "else", &[]),
];

/// One overlapped step at a glance: the streams of every rank. Boxes are chunks.
pub fn draw(shape: &Shape, timelines: &[Timeline]) -> String {
    chart::Timeline {
        title: "One step of a layer: transfers during experts",
        conditions: vec![shape.words()],
        kinds: &KINDS.map(|(color, said, _)| (color, said)),
        rows: timelines
            .iter()
            .enumerate()
            .flat_map(|(rank, timeline)| streams(rank, &timeline.spans))
            .collect(),
    }
    .draw()
}

fn streams(rank: usize, spans: &[NodeSpan]) -> impl Iterator<Item = Row<'_>> {
    let names: BTreeSet<&str> = spans.iter().map(|span| &span.stream[..]).collect();
    names.into_iter().enumerate().map(move |(nth, name)| Row {
        group: (nth == 0).then(|| format!("rank {rank}")),
        name: name.to_owned(),
        calls: &[],
        spans: spans.iter().filter(|span| span.stream == name).map(chunk).collect(),
    })
}

fn chunk(span: &NodeSpan) -> Span {
    let NodeSpan { name, chunk, start_ns, nanos, .. } = span;
    let kind = KINDS.iter().position(|(.., names)| names.contains(&&name[..]));
    Span {
        kind: kind.unwrap_or(KINDS.len() - 1),
        start_ns: *start_ns,
        nanos: *nanos,
        said: format!("{name} {chunk}: {}", time_ns(*nanos)),
        inside: chunk.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chart::svg::tests::elements;
    use crate::chart::tests::number;
    use crate::command_frame::Report as _;
    use crate::command_frame::tests::{assert_page, assert_words};
    use crate::commands::layer::sample as shape;

    fn sample() -> Report {
        let shape = shape();
        let emulated_link = Some(Link { bytes_per_second: 1 << 30, latency_us: 10 });
        let config = RunSettings {
            shape,
            rounds: 3,
            lane: Some("emulated".into()),
            emulated_link,
            lane_reason: Some("said so".into()),
            hosts: Hosts { machines: 1, cores: 2 },
        };
        let forward = Pass::of_rounds(&[90.0, 100.0, 110.0], &[120.0; 3], &[240.0; 3], &[150.0; 3]);
        Report { config, verified: true, forward, backward: Some(forward) }
    }

    #[test]
    fn hidden_is_what_is_saved_of_the_shorter_part() {
        let forward = sample().forward;
        assert_eq!((forward.hidden_share, &*forward.hidden()), (0.9, "0.90"));
        let noise = Pass { transfers_us: forward.sequential_us + 1.0, ..forward };
        assert_eq!(noise.hidden(), "-");
    }

    #[test]
    fn the_document_names_exactly_the_keys_of_the_json() {
        assert_page("layer-json.md", &[sample()]);
    }

    #[test]
    fn the_text_has_a_line_for_each_direction() {
        let text = sample().text();
        assert_words(
            &text,
            &[
                "2 on 2 nodes (1 + 1)",
                "emulated, at 1.1 GB a second and 10 us",
                "forward",
                "backward",
                "0.90",
            ],
        );
    }

    fn span(stream: &str, name: &str, start_us: u64, us: u64) -> NodeSpan {
        let (stream, name) = (stream.to_owned(), name.to_owned());
        NodeSpan { stream, name, chunk: 3, start_ns: 7_000_000 + start_us * 1000, nanos: us * 1000 }
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
        let picture = draw(&shape(), &[timeline.clone(), timeline]);
        let boxes = |class: &str| -> Vec<(f64, f64, f64)> {
            let tags =
                elements(&picture).into_iter().filter(|tag| tag.starts_with("rect") && tag.contains(class));
            tags.map(|tag| (number(&tag, "x"), number(&tag, "y"), number(&tag, "width"))).collect()
        };
        let [rows, out, back] = ["wide box orange", "wide box blue", "wide box teal"].map(boxes);
        assert_eq!((rows.len(), out.len(), back.len()), (2, 2, 2), "once for each rank");
        assert!(rows[0].1 < out[0].1 && out[0].1 == back[0].1 && back[0].1 < rows[1].1);
        let (begin, step) = (out[0].0, out[0].2);
        assert_eq!((rows[0].0, rows[0].2), (begin + step, 3.0 * step), "the last three quarters");
        assert!(!picture.contains(KINDS[3].1), "the legend names what occurs");
        for text in ["experts 3: 300 us", ">transfer 0<", ">rank 1<", "64 tokens a rank in 4 chunks"] {
            assert!(picture.contains(text), "{text} in\n{picture}");
        }
    }

    #[test]
    fn nothing_recorded_is_an_empty_picture() {
        elements(&draw(&shape(), &[Timeline::default()]));
    }
}
