//! Predictions of `simulate`: as people read them, and their JSON. `docs/simulate-json.md`
//! describes the keys.

use serde::Serialize;
use sidelane_model::time::{
    Assumption, Hardware, Outcome, PhaseTime, Place, Placed, RankWork, Timed, Timing, Variant, outcomes,
};

use super::layer_time::{self, Layered, Products};
use super::tensor_time::{self, TensorLayers};
use super::{MetadataWith, ReceiveKind, RunSettings, Task};
use crate::chart::{Arrangement, Chart, Curve, Panel, Point};
use crate::command_frame;
use crate::error::CliError;
use crate::table::{self, time, time_ns, volume};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub config: RunSettings,
    pub hardware: Hardware,
    /// The group that was asked for, then those of the picture.
    pub groups: Vec<Group>,
    /// The group that was asked for, at other prices of copies and words; of a device alone.
    pub sensitivity: Vec<Outcome>,
    /// The group that was asked for, as a layer with its experts.
    pub layer: Option<Layer>,
    /// Tensor parallel layers over the ranks of a node.
    pub tensor: Option<TensorLayers>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Layer {
    pub products: Products,
    pub variants: Vec<Layered>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    pub nodes: u32,
    pub ranks: u32,
    pub variants: Vec<Timed>,
}

impl Report {
    pub fn new(task: &Task) -> Result<Self, CliError> {
        let mut sizes = vec![task.conditions.nodes];
        sizes.extend(task.nodes_of_picture().filter(|&nodes| nodes != task.conditions.nodes));
        let bar = command_frame::progress(0, sizes.len() as u64).with_message("groups");
        let assumptions = Assumption::of(&task.hardware);
        let (mut groups, mut sensitivity) = (Vec::new(), Vec::new());
        for (nth, &nodes) in sizes.iter().enumerate() {
            let others = if nth == 0 { &assumptions[..] } else { &[] };
            let (group, of_others) = Group::new(task, nodes, others)?;
            if !others.is_empty() {
                sensitivity = outcomes(&task.hardware, &group.variants, &assumptions, &of_others);
            }
            groups.push(group);
            bar.inc(1);
        }
        bar.finish_and_clear();
        let ways = layer_time::all(task)?;
        let layer = (!ways.is_empty()).then(|| Layer { products: Products::of(task.args), variants: ways });
        Ok(Report {
            config: task.conditions.clone(),
            hardware: task.hardware.clone(),
            groups,
            sensitivity,
            layer,
            tensor: TensorLayers::of(task),
        })
    }
}

const NOTES: &str = "\
Predicted by a model, not measured. The bottleneck is what was busy longest at any rank; the roofline is bytes at their rates, all at
once. Copies and messages are those of the rank that has most, bytes are means. Laps are those of the slowest rank: parts of its time, one after another, as to pull rows from local peers, or to wait for rows that relays return. A dispatch that equals an earlier variant's is not listed again. A word is a 32-bit write or wait. Assumed figures are not measured: keys of a --hardware file.";

fn rates(hardware: &Hardware) -> String {
    let gb = |rate: u64| rate as f64 / 1e3;
    let Hardware { engines, link, nic, compute, .. } = hardware;
    format!(
        "copies {} us or {} GB/s, link {} GB/s, NIC {} GB/s, memory {} GB/s",
        hardware.copy_us(),
        gb(engines.costs(Place::Peer).iter().map(|cost| cost.rate).max().unwrap_or(0)),
        gb(link.rate),
        gb(nic.rate),
        gb(compute.rate),
    )
}

impl RunSettings {
    fn routing_words(&self) -> String {
        let RunSettings { model, routing, experts, top_k, tokens, .. } = self;
        let source = match routing {
            Some(source) => source.to_string(),
            None => format!("the router of {model} on random logits"),
        };
        format!("{source}, {experts} experts, top-{top_k}, {tokens} tokens a rank")
    }
}

impl Group {
    /// The group, and its variants on other machines, machine by machine.
    fn new(task: &Task, nodes: u32, others: &[Assumption]) -> Result<(Self, Vec<Vec<Timed>>), CliError> {
        let ranks = nodes * task.conditions.ranks_per_node;
        let (mut variants, mut of_others) = (Vec::new(), vec![Vec::new(); others.len()]);
        let timed = |name: &str, variant: Option<Variant>, [dispatch, combine]: [Timing; 2]| Timed {
            name: name.to_owned(),
            variant,
            dispatch,
            combine,
        };
        if task.conditions.mode == ReceiveKind::Slots {
            variants.push(timed("slots", None, task.slots(&task.hardware)?));
            for (other, found) in others.iter().zip(&mut of_others) {
                found.push(timed("slots", None, task.slots(&other.hardware)?));
            }
            return Ok((Group { nodes, ranks, variants }, of_others));
        }
        let group = task.group(nodes)?;
        for way in task.ways(nodes) {
            let mut placed = group.placed(&way)?;
            let both = |placed: &Placed| [placed.dispatch(), placed.combine()];
            variants.push(timed(&way.name(), Some(way), both(&placed)));
            for (other, found) in others.iter().zip(&mut of_others) {
                placed.set_engines(&other.hardware.engines)?;
                found.push(timed(&way.name(), Some(way), both(&placed)));
            }
        }
        Ok((Group { nodes, ranks, variants }, of_others))
    }

    /// The calls of all variants. A dispatch that is in all figures that of an earlier variant,
    /// which differs in the sums of its combine alone, is not listed again.
    fn calls(&self) -> Vec<(String, &Timing)> {
        let program = |timed: &Timed| timed.variant.map(Variant::of_dispatch);
        let mut calls = Vec::new();
        for (nth, timed) in self.variants.iter().enumerate() {
            let Timed { name, dispatch, combine, .. } = timed;
            let same = |other: &Timed| program(other) == program(timed) && other.dispatch == *dispatch;
            if !self.variants[..nth].iter().any(same) {
                calls.push((format!("{name}: dispatch"), dispatch));
            }
            calls.push((format!("{name}: combine"), combine));
        }
        calls
    }

    fn times(&self) -> String {
        let mean = |timing: &Timing, of: fn(&RankWork) -> u64| {
            volume(of(&timing.total) / u64::from(timing.simulated_ranks))
        };
        table::of(
            self.calls(),
            &[
                ("variant", &|(name, _)| name.clone()),
                ("time", &|(_, timing)| time_ns(timing.ns)),
                ("bottleneck", &|(_, timing)| timing.bottleneck.part.name().to_owned()),
                ("for", &|(_, timing)| time_ns(timing.bottleneck.ns)),
                ("roofline", &|(_, timing)| time_ns(timing.roofline.ns)),
                ("of", &|(_, timing)| timing.roofline.part.name().to_owned()),
                ("copies", &|(_, timing)| timing.max.copies.to_string()),
                ("intra-node", &|(_, timing)| mean(timing, |work| work.intra_node_bytes + work.self_bytes)),
                ("messages", &|(_, timing)| timing.max.messages.to_string()),
                ("inter-node", &|(_, timing)| mean(timing, |work| work.inter_node_bytes)),
            ],
        )
    }

    fn laps(&self) -> String {
        let mut table = table::figures(["laps", "", "", "", "", ""]);
        for (name, timing) in self.calls() {
            let lap = |lap: &PhaseTime| format!("{} {}", lap.phase.name(), time_ns(lap.ns));
            table.add_row(std::iter::once(name).chain(timing.phases.iter().map(lap)));
        }
        table::lines(&table)
    }
}

/// Conclusions of the model for each [assumption](Assumption): a line for each.
fn sensitivity_text(outcomes: &[Outcome]) -> String {
    let table = table::of(
        outcomes,
        &[
            ("sensitivity", &|one| one.assumption.clone()),
            ("fastest dispatch", &|one| one.dispatch.variant.clone()),
            ("dispatch time", &|one| time_ns(one.dispatch.ns)),
            ("dispatch bottleneck", &|one| one.dispatch.bottleneck.name().to_owned()),
            ("fastest combine", &|one| one.combine.variant.clone()),
            ("combine time", &|one| time_ns(one.combine.ns)),
            ("combine bottleneck", &|one| one.combine.bottleneck.name().to_owned()),
            ("flips", &|one| if one.flips.is_empty() { "none".to_owned() } else { one.flips.join("; ") }),
        ],
    );
    format!(
        "{table}\n\nEach line changes one price and leaves the others as given. A flip is a conclusion that is another then."
    )
}

impl command_frame::Report for Report {
    fn text(&self) -> String {
        let RunSettings { nodes, ranks_per_node, tokens, top_k, hidden, dtype, metadata_with, mode, .. } =
            &self.config;
        let group = &self.groups[0];
        let played = group.variants.first().map_or(0, |timed| timed.dispatch.simulated_ranks);
        let how = if played == group.ranks { "every one played" } else { "one node played, for all" };
        let beside = match (mode, metadata_with) {
            (ReceiveKind::Slots, _) => "weights and choices in the slot",
            (ReceiveKind::Exact, MetadataWith::Rows) => "weights and choices as copies next to them",
            (ReceiveKind::Exact, MetadataWith::Counts) => "weights and choices with the counts",
        };
        let decided = match mode {
            ReceiveKind::Slots => ("slots", format!("{tokens} tokens of each rank to each, top-{top_k}")),
            ReceiveKind::Exact => ("routing", self.config.routing_words()),
        };
        let ranks = match nodes {
            1 => format!("{ranks_per_node} on one node"),
            _ => format!("{} on {nodes} nodes of {ranks_per_node}", group.ranks),
        };
        let head = table::head(&[
            decided,
            ("ranks", format!("{ranks}, {how}")),
            ("rows", format!("{hidden} x {}, {beside}", dtype.name())),
            ("hardware", format!("{}: {}", self.hardware.name, rates(&self.hardware))),
            ("assumed", self.hardware.assumed().join(", ")),
        ]);
        let layer = self.layer.as_ref().map(|layer| layer_time::text(&layer.products, &layer.variants));
        let sensitivity = match &self.sensitivity[..] {
            [] => String::new(),
            outcomes => format!("\n\n{}", sensitivity_text(outcomes)),
        };
        let layer = layer.map_or(String::new(), |text| format!("\n\n{text}"));
        let tensor =
            self.tensor.as_ref().map_or(String::new(), |of| format!("\n\n{}", tensor_time::text(of)));
        format!("{head}\n{}\n\n{}\n\n{NOTES}{sensitivity}{layer}{tensor}", group.times(), group.laps())
    }
}

pub fn draw(report: &Report) -> String {
    let mut groups: Vec<_> = report.groups.iter().collect();
    groups.sort_by_key(|group| group.ranks);
    // All variants of the largest group. One that a smaller group lacks has no point there.
    let names: Vec<&str> = groups
        .last()
        .map_or(Vec::new(), |group| group.variants.iter().map(|timed| &timed.name[..]).collect());
    let points = |of: &str, ns: fn(&Timed) -> u64| -> Vec<Point> {
        let timed = groups.iter().filter_map(|group| {
            let timed = group.variants.iter().find(|timed| timed.name == of)?;
            Some((group.ranks, ns(timed) as f64 / 1e3))
        });
        let point = |(ranks, us): (u32, f64)| Point {
            at: (f64::from(ranks), us),
            said: format!("{ranks} ranks, {of}: {}", time(us)),
        };
        timed.map(point).collect()
    };
    let panel = |title, ns: fn(&Timed) -> u64| {
        let curves = names.iter().map(|&of| Curve { name: of.to_owned(), points: points(of, ns) }).collect();
        Panel { curves, ..Panel::new(title, &|ranks| ranks.to_string(), &time) }
    };
    let RunSettings { hidden, dtype, ranks_per_node, .. } = &report.config;
    let rows = format!(
        "rows of {hidden} x {}, nodes of {ranks_per_node} ranks; a model, not measured",
        dtype.name()
    );
    Chart {
        title: &format!("Dispatch and combine by number of ranks, predicted for {}", report.hardware.name),
        conditions: vec![report.config.routing_words(), rows],
        panels: vec![
            panel("dispatch", |timed| timed.dispatch.ns),
            panel("combine", |timed| timed.combine.ns),
        ],
        arrangement: Arrangement::Alike,
    }
    .draw()
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::chart::svg::tests::elements;
    use crate::command_frame::tests::{assert_page, parsed};

    /// The report of a command line.
    pub fn report(line: &str) -> Report {
        Report::new(&Task::resolve(&parsed(line).unwrap()).unwrap()).unwrap()
    }

    #[test]
    fn the_document_names_exactly_the_keys_of_the_json() {
        let report =
            report("--nodes 2 --ranks-per-node 2 --tokens 16 --hidden 128 --token-chunks 2 --tensor-ffn 64");
        assert_page("simulate-json.md", &[report]);
    }

    #[test]
    fn every_way_has_a_point_for_each_group_that_has_it() {
        let report =
            report("--nodes 2 --ranks-per-node 2 --tokens 8 --hidden 128 --svg unused --max-ranks 8");
        let tags = elements(&draw(&report));
        let count = |name: &str| tags.iter().filter(|tag| tag.starts_with(name)).count();
        let ways = report.groups.iter().map(|group| group.variants.len());
        assert_eq!(report.groups.iter().map(|group| group.nodes).collect::<Vec<_>>(), [2, 1, 4]);
        assert_eq!((count("polyline"), count("circle")), (24, 2 * ways.sum::<usize>()));
    }

    #[test]
    fn each_price_has_its_conclusions_and_flips_are_differences() {
        let line = "--nodes 1 --ranks-per-node 4 --tokens 64 --hidden 128 --seed 7";
        let outcomes = report(line).sensitivity;
        let prices: Vec<_> = outcomes.iter().map(|one| (one.copy_us, one.word_us)).collect();
        assert_eq!(prices, [(0.6, 0.63), (0.6, 0.63), (2.3, 0.63), (0.6, 0.1), (0.6, 0.5)]);
        let [given, same, dear_copies, cheap_words, ..] = &outcomes[..] else { panic!("{outcomes:?}") };
        assert_eq!((&given.dispatch, &given.combine), (&same.dispatch, &same.combine));
        assert!(given.flips.is_empty() && same.flips.is_empty());
        assert!(dear_copies.dispatch.ns > given.dispatch.ns && cheap_words.dispatch.ns < given.dispatch.ns);
        for one in &outcomes {
            let moved = one.dispatch.variant != given.dispatch.variant
                || one.combine.variant != given.combine.variant
                || one.dispatch.bottleneck != given.dispatch.bottleneck
                || one.combine.bottleneck != given.combine.bottleneck;
            assert_eq!(moved, !one.flips.is_empty(), "{one:?}");
        }
    }

    #[test]
    fn equal_dispatches_of_one_program_are_one_line() {
        let report = report("--nodes 2 --ranks-per-node 2 --tokens 8 --hidden 128 --layout rank-major");
        let group = &report.groups[0];
        let calls = group.calls();
        let of = |call: &str| calls.iter().filter(|(name, _)| name.ends_with(call)).count();
        assert_eq!(of(": combine"), group.variants.len());
        // Sums by rank take no other dispatch of rank-major rows, and sums by node may.
        assert!((2..group.variants.len() - 1).contains(&of(": dispatch")), "{calls:?}");
        for Timed { dispatch, .. } in &group.variants {
            assert!(calls.iter().any(|(name, timing)| name.ends_with(": dispatch") && *timing == dispatch));
        }
    }

    #[test]
    fn slots_have_conclusions_too() {
        let report = report("--mode slots --nodes 1 --ranks-per-node 4 --tokens 8 --hidden 128");
        assert!(report.sensitivity.iter().all(|one| one.dispatch.variant == "slots"));
        assert_eq!(report.sensitivity.len(), 5);
    }
}
