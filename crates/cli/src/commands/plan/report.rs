//! Meshes as people read them, and their JSON. `docs/plan-json.md` describes the keys.

use serde::Serialize;
use sidelane_model::parallel::{
    Candidate, Devices, Fixed, Memory, Overlap, Pass, Precision, Question, Received, Rules, Step, Transformer,
};

use crate::command_frame;
use crate::options::Scaled;
use crate::table::{self, time, volume};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub config: RunSettings,
    pub model: Model,
    pub hardware: Devices,
    pub rules: Rules,
    /// The fastest first.
    pub meshes: Vec<Line>,
    /// Shapes that fit, of which the fastest are listed.
    pub fitting_shapes: usize,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunSettings {
    pub devices: u32,
    pub tokens: u64,
    pub sequence: u32,
    pub precision: Precision,
    pub recompute: bool,
    pub overlap: Overlap,
    pub fixed: Fixed,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Model {
    #[serde(flatten)]
    pub sizes: Transformer,
    pub parameters: u64,
    pub active_parameters: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    #[serde(flatten)]
    pub candidate: Candidate,
    /// Of all memory of a device.
    pub memory_bytes: u64,
    pub peak_share: f64,
}

impl Report {
    pub fn new(question: &Question, fitting: Vec<Candidate>, top: u32) -> Self {
        let Question { model, devices, count, tokens, sequence, .. } = question;
        let line = |candidate: &Candidate| Line {
            candidate: *candidate,
            memory_bytes: candidate.memory.total_bytes(),
            peak_share: candidate.step.peak_share(question),
        };
        Report {
            config: RunSettings {
                devices: *count,
                tokens: *tokens,
                sequence: *sequence,
                precision: question.precision,
                recompute: question.recompute,
                overlap: question.overlap,
                fixed: question.fixed,
            },
            model: Model {
                sizes: model.clone(),
                parameters: model.parameters(),
                active_parameters: model.active_parameters(),
            },
            hardware: devices.clone(),
            rules: Rules::of(model, devices, *tokens, *count),
            meshes: fitting.iter().take(top as usize).map(line).collect(),
            fitting_shapes: fitting.len(),
        }
    }

    /// Meshes with their numbers in the tables.
    fn numbered(&self) -> impl Iterator<Item = (usize, &Line)> {
        (1..).zip(&self.meshes)
    }

    fn ranking(&self) -> String {
        let shape = |line: &Line| line.candidate.mesh.shape;
        table::of(
            self.numbered(),
            &[
                ("#", &|(nth, _)| nth.to_string()),
                ("pp", &|(_, line)| shape(line).pp.to_string()),
                ("dp", &|(_, line)| shape(line).dp.to_string()),
                ("cp", &|(_, line)| shape(line).cp.to_string()),
                ("tp", &|(_, line)| shape(line).tp.to_string()),
                ("ep", &|(_, line)| shape(line).ep.to_string()),
                ("zero", &|(_, line)| line.candidate.mesh.zero.name().to_owned()),
                ("mb", &|(_, line)| line.candidate.mesh.microbatches.to_string()),
                ("memory", &|(_, line)| volume(line.memory_bytes)),
                ("step", &|(_, line)| seconds(line.candidate.step.step_s)),
                ("peak", &|(_, line)| format!("{:.2}", line.peak_share)),
                ("binds", &|(_, line)| line.candidate.step.bound.name().to_owned()),
            ],
        )
    }

    fn parts(&self) -> String {
        let both = |line: &Line, of: fn(&Pass) -> f64| {
            let Step { forward, backward, .. } = &line.candidate.step;
            seconds(of(forward) + of(backward))
        };
        table::of(
            self.numbered(),
            &[
                ("time", &|(nth, _)| nth.to_string()),
                ("compute", &|(_, line)| both(line, |pass| pass.compute_s)),
                ("data", &|(_, line)| both(line, |pass| pass.data_s)),
                ("tensor", &|(_, line)| both(line, |pass| pass.tensor_s)),
                ("context", &|(_, line)| both(line, |pass| pass.context_s)),
                ("expert", &|(_, line)| both(line, |pass| pass.expert_s)),
                ("pipeline", &|(_, line)| {
                    let Step { forward, backward, bubble_s, .. } = &line.candidate.step;
                    seconds(forward.sends_s + backward.sends_s + bubble_s)
                }),
                ("update", &|(_, line)| seconds(line.candidate.step.update_s)),
            ],
        )
    }

    fn memory(&self) -> String {
        let held = |line: &Line, of: fn(&Memory) -> u64| some(of(&line.candidate.memory));
        table::of(
            self.numbered(),
            &[
                ("held", &|(nth, _)| nth.to_string()),
                ("parameters", &|(_, line)| held(line, |of| of.parameters_bytes)),
                ("gradients", &|(_, line)| held(line, |of| of.gradients_bytes)),
                ("states", &|(_, line)| held(line, |of| of.states_bytes)),
                ("in flight", &|(_, line)| held(line, |of| of.in_flight_bytes)),
                ("activations", &|(_, line)| held(line, |of| of.activations_bytes)),
            ],
        )
    }

    fn received(&self) -> String {
        let received = |line: &Line, of: fn(&Received) -> f64| some(of(&line.candidate.step.received) as u64);
        table::of(
            self.numbered(),
            &[
                ("received", &|(nth, _)| nth.to_string()),
                ("data", &|(_, line)| received(line, |of| of.data_bytes)),
                ("tensor", &|(_, line)| received(line, |of| of.tensor_bytes)),
                ("context", &|(_, line)| received(line, |of| of.context_bytes)),
                ("expert", &|(_, line)| received(line, |of| of.expert_bytes)),
                ("sends", &|(_, line)| received(line, |of| of.sends_bytes)),
            ],
        )
    }

    /// Where each strategy binds, for any mesh.
    fn rules(&self) -> Vec<(&'static str, String)> {
        let Rules { least_data_tokens, least_node_tokens, most_tensor_ways, mixed } = self.rules;
        let RunSettings { devices, tokens, .. } = self.config;
        let (width, nodes) = (self.model.sizes.tensor_width(), devices.div_ceil(self.hardware.per_node));
        let here = tokens as f64 / f64::from(devices);
        let across = match nodes {
            1 => String::new(),
            _ => format!(
                "\n{:10}across nodes below {least_node_tokens:.0} a node, and here are {:.0}",
                "",
                tokens as f64 / f64::from(nodes)
            ),
        };
        let mut rules = vec![(
            "data",
            format!("binds below {least_data_tokens:.0} tokens a device, and here are {here:.0}{across}"),
        )];
        // The rule is one of MLPs; ways below 1 say that it does not hold.
        if self.model.sizes.ffn.is_some() && most_tensor_ways >= 1.0 {
            let text =
                format!("binds above {most_tensor_ways:.1} ways, for a width of {width}, within a node");
            rules.push(("tensor", text));
        }
        rules.extend(mixed.map(|mixed| {
            let (data, tensor) = mixed.shape;
            let text = format!(
                "FSDP {data} x tensor {tensor} on links alone; binds below {:.0} tokens a device",
                mixed.least_tokens
            );
            ("mixed", text)
        }));
        rules
    }
}

const NOTES: &str = "\
A bound from below, not measured: products at the peak, bytes at their rates, no latency.
A part binds if it takes longer than the compute of its pass, a pipeline than that of both.
Pipeline: sends, and what stages idle. Expert: dispatch and combine, by the model of `simulate`.
The lines above the table are rules of the scaling book, for transfers in bf16.
mb: microbatches; peak: share of the hardware's peak; zero: what data parallel ranks divide.";

fn seconds(seconds: f64) -> String {
    if seconds == 0.0 { "-".to_owned() } else { time(seconds * 1e6) }
}

fn some(bytes: u64) -> String {
    if bytes == 0 { "-".to_owned() } else { volume(bytes) }
}

fn billions(parameters: u64) -> String {
    format!("{:.1} billion", parameters as f64 / 1e9)
}

impl command_frame::Report for Report {
    fn text(&self) -> String {
        let RunSettings { devices, tokens, sequence, precision, recompute, overlap, .. } = &self.config;
        let Model { sizes, parameters, active_parameters } = &self.model;
        let active = match sizes.experts {
            Some(_) => format!(", {} for a token", billions(*active_parameters)),
            None => String::new(),
        };
        let Devices { name, flops, memory_bytes, link_rate, per_node, nic_rate, .. } = &self.hardware;
        let gb = |rate: f64| (rate / 1e8).round() / 10.0;
        let computed = if *recompute { ", forward passes repeated" } else { "" };
        let overlapped = match overlap {
            Overlap::None => "no transfer overlaps",
            Overlap::Data => "transfers of data parallelism overlap",
            Overlap::All => "all transfers overlap",
        };
        let mut lines = vec![
            ("model", format!("{}: {} parameters{active}", sizes.name, billions(*parameters))),
            (
                "step",
                format!(
                    "{} tokens in sequences of {}, {} bytes a parameter{computed}, {overlapped}",
                    Scaled(*tokens),
                    Scaled(u64::from(*sequence)),
                    precision.held_bytes()
                ),
            ),
            (
                "hardware",
                format!(
                    "{devices} of {name}: {:.0} TFLOP/s, {}, link {} GB/s, {per_node} a node, to others {} GB/s",
                    flops / 1e12,
                    volume(*memory_bytes),
                    gb(*link_rate),
                    gb(*nic_rate)
                ),
            ),
        ];
        lines.extend(self.rules());
        let head = table::head(&lines);
        let listed =
            format!("{} of {} meshes that fit, the fastest first", self.meshes.len(), self.fitting_shapes);
        let tables = [self.ranking(), self.parts(), self.memory(), self.received()].join("\n\n");
        format!("{head}\n{listed}:\n\n{tables}\n\n{NOTES}")
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::command_frame::tests::{assert_page, parsed};
    use crate::commands::plan::PlanArgs;

    /// The report of a command line.
    pub fn report(line: &str) -> Report {
        let args: PlanArgs = parsed(line).unwrap();
        let question = args.question().unwrap();
        Report::new(&question, args.fitting(&question).unwrap(), args.top)
    }

    #[test]
    fn rule_of_mlps_is_told_of_models_that_have_one() {
        let told = |line| report(line).rules().iter().any(|(strategy, _)| *strategy == "tensor");
        assert!(!told("--model olmoe-1b-7b --devices 8"));
        assert!(told("--model llama-2-13b --devices 64"));
    }

    #[test]
    fn the_document_names_exactly_the_keys_of_the_json() {
        let with_experts = report("--model deepseek-v3 --devices 256 --pp 16 --tp 4 --ep 8 --top 1");
        let dense = report("--model llama-2-13b --hardware tpu-v5p --devices 64 --top 1");
        assert_page("plan-json.md", &[with_experts, dense]);
    }
}
