//! A whole layer, forward and backward: transfers of token chunks concurrent with the experts'
//! products.
//!
//! ```text
//!   chunks --Placed--> dispatch, combine, gradients of one chunk --\
//!                                                                   +--> the layer's graphs, each node with its time --> overlapped
//!   rows of the busiest rank x products / rate --------------------/
//! ```
//!
//! | | forward | backward |
//! |---|---|---|
//! | out | dispatch | gradient of combine: a dispatch along the layout that is there, rows as they return |
//! | experts, of a chunk | three products | gradients of rows: three |
//! | back | combine | gradient of dispatch: a combine |
//! | of all tokens at once | shared expert | gradients of weights: three for experts, six for the shared one |
//!
//! The graphs are those that [`MoeLayer`](sidelane::layer::MoeLayer) runs, their order included.
//! Not in them: that copies and products read the same memory, the launches of the experts'
//! kernels, sums outside of transfers, and traffic that is small next to rows: returned gradients
//! of routing weights, and the counts of sources.

use clap::ValueEnum;
use serde::Serialize;
use sidelane::layer::{Times, backward_times, forward_times};
use sidelane::overlap::{NodeInfo, TokenChunks};
use sidelane_model::time::{Timing, Variant};

use super::{SimulateArgs, Task};
use crate::error::CliError;
use crate::options::word;
use crate::table::{self, time_ns};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Products {
    pub ffn: u32,
    /// Width of the expert that all tokens pass; 0: there is none.
    pub shared_ffn: u32,
    pub tflops: u32,
}

/// One way, in so many chunks, one pass. Times in ns.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Layered {
    pub variant: String,
    pub token_chunks: u32,
    pub pass: Pass,
    /// Of all tokens at once, alone.
    experts_ns: u64,
    /// The same.
    transfers_ns: u64,
    /// Of chunks, one after another.
    sequential_ns: u64,
    overlapped_ns: u64,
    /// Savings of overlap over all tokens at once, one after another, of the shorter of experts and
    /// transfers.
    pub hidden_share: f64,
    /// The busiest of the overlapping parts: `experts`, or the busiest part of transfers.
    pub limit: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    Forward,
    Backward,
}

impl Pass {
    const BOTH: [Pass; 2] = [Pass::Forward, Pass::Backward];

    fn times(self, chunks: u32, cost: impl Fn(NodeInfo) -> u64) -> Times {
        match self {
            Pass::Forward => forward_times(chunks, cost),
            Pass::Backward => backward_times(chunks, cost),
        }
    }
}

impl Products {
    /// Of the options, and else of the model.
    pub fn of(args: &SimulateArgs) -> Self {
        let (_, own) = args.model.sizes();
        Products { ffn: args.ffn.unwrap_or(own.ffn), shared_ffn: own.shared_ffn, tflops: args.tflops }
    }

    /// Nanoseconds for so many rows of an expert of this width: three products.
    fn ns(&self, rows: u64, hidden: u32, ffn: u32) -> u64 {
        let flop = 6.0 * rows as f64 * f64::from(hidden) * f64::from(ffn);
        (flop / (f64::from(self.tflops) * 1e3)).round() as u64
    }
}

/// Pieces of a step of so many tokens.
struct Parts {
    /// Three products of each row; as many give its gradient, and as many again those of weights.
    experts: u64,
    /// The same of the shared expert.
    shared: u64,
    dispatch: Timing,
    combine: Timing,
    combine_backward: Timing,
}

impl Parts {
    fn of(task: &Task, way: &Variant, products: &Products) -> Result<Self, CliError> {
        let group = task.group(task.conditions.nodes)?;
        let case = group.case(way);
        let placed = group.placed(way)?;
        let hidden = task.conditions.hidden;
        Ok(Parts {
            experts: products.ns(case.busiest_rows(), hidden, products.ffn),
            shared: products.ns(task.conditions.tokens.into(), hidden, products.shared_ffn),
            dispatch: placed.dispatch(),
            combine: placed.combine(),
            combine_backward: placed.combine_backward(),
        })
    }

    fn compute(&self, pass: Pass) -> u64 {
        match pass {
            Pass::Forward => self.experts + self.shared,
            Pass::Backward => 2 * (self.experts + self.shared),
        }
    }

    fn ways(&self, pass: Pass) -> [&Timing; 2] {
        match pass {
            Pass::Forward => [&self.dispatch, &self.combine],
            Pass::Backward => [&self.combine_backward, &self.combine],
        }
    }

    fn transfers(&self, pass: Pass) -> u64 {
        self.ways(pass).iter().map(|timing| timing.ns).sum()
    }

    /// The busiest part of the longer of the two.
    fn busiest(&self, pass: Pass) -> &'static str {
        let [out, back] = self.ways(pass);
        let longer = if out.ns > back.ns { out } else { back };
        longer.bottleneck.part.name()
    }
}

/// Time of a node: of a chunk, or of all tokens.
fn cost(at: NodeInfo, cut: &Cut, whole: &Parts) -> u64 {
    let chunk = || cut.chunk(at.work.chunk);
    match at.work.name {
        "dispatch" => chunk().dispatch.ns,
        "gradient of combine" => chunk().combine_backward.ns,
        "combine" | "gradient of dispatch" => chunk().combine.ns,
        "experts" | "gradient of rows" => chunk().experts,
        "gradient of weights" => whole.experts,
        "shared expert" | "gradient of shared rows" | "gradient of shared weights" => whole.shared,
        // Sums, and the counts of sources.
        _ => 0,
    }
}

/// A step in chunks: pieces of those that are a token longer than others, and of those others.
struct Cut {
    lengths: Vec<u32>,
    sizes: Vec<(u32, Parts)>,
}

impl Cut {
    fn of(task: &Task, way: &Variant, products: &Products, chunks: u32) -> Result<Self, CliError> {
        let lengths: Vec<u32> =
            TokenChunks::new(chunks).of(task.conditions.tokens).map(|chunk| chunk.len() as u32).collect();
        let mut sizes: Vec<(u32, Parts)> = Vec::new();
        for &tokens in &lengths {
            if sizes.iter().all(|(known, _)| *known != tokens) {
                let mut args = task.args.clone();
                args.router.tokens = Some(tokens);
                sizes.push((tokens, Parts::of(&Task::resolve(&args)?, way, products)?));
            }
        }
        Ok(Cut { lengths, sizes })
    }

    fn chunk(&self, nth: u32) -> &Parts {
        let tokens = self.lengths[nth as usize];
        let (_, parts) =
            self.sizes.iter().find(|(known, _)| *known == tokens).expect("every length was placed");
        parts
    }

    fn chunks(&self) -> u32 {
        self.lengths.len() as u32
    }
}

impl Layered {
    fn new(way: &Variant, pass: Pass, whole: &Parts, cut: &Cut) -> Self {
        let chunks = cut.chunks();
        let times = pass.times(chunks, |at| cost(at, cut, whole));
        let (experts_ns, transfers_ns) = (whole.compute(pass), whole.transfers(pass));
        let saved = (experts_ns + transfers_ns) as f64 - times.overlapped as f64;
        let of_chunks: u64 = (0..chunks).map(|nth| cut.chunk(nth).transfers(pass)).sum();
        Layered {
            variant: way.name(),
            token_chunks: chunks,
            pass,
            experts_ns,
            transfers_ns,
            sequential_ns: times.in_turn,
            overlapped_ns: times.overlapped,
            hidden_share: saved / experts_ns.min(transfers_ns).max(1) as f64,
            limit: if experts_ns > of_chunks { "experts" } else { cut.chunk(0).busiest(pass) },
        }
    }
}

/// All ways, in all numbers of chunks that are asked for, both passes.
pub fn all(task: &Task) -> Result<Vec<Layered>, CliError> {
    let products = Products::of(task.args);
    let mut found = Vec::new();
    for way in task.ways(task.conditions.nodes) {
        let whole = Parts::of(task, &way, &products)?;
        for &chunks in &task.args.token_chunks {
            let cut = Cut::of(task, &way, &products, chunks)?;
            found.extend(Pass::BOTH.map(|pass| Layered::new(&way, pass, &whole, &cut)));
        }
    }
    Ok(found)
}

pub fn text(products: &Products, layers: &[Layered]) -> String {
    let table = table::of(
        layers,
        &[
            ("layer", &|one| one.variant.clone()),
            ("pass", &|one| word(&one.pass)),
            ("chunks", &|one| one.token_chunks.to_string()),
            ("experts", &|one| time_ns(one.experts_ns)),
            ("transfers", &|one| time_ns(one.transfers_ns)),
            ("in chunks", &|one| time_ns(one.sequential_ns)),
            ("overlapped", &|one| time_ns(one.overlapped_ns)),
            ("hidden", &|one| format!("{:.2}", one.hidden_share)),
            ("limit", &|one| one.limit.to_owned()),
        ],
    );
    let Products { ffn, shared_ffn, tflops } = products;
    let shared =
        if *shared_ffn > 0 { format!(", one of {shared_ffn} for all tokens") } else { String::new() };
    format!(
        "{table}\n\nExperts of {ffn}{shared}, at {tflops} TFLOP/s. In chunks: one after another. Hidden: what overlap saves over all tokens at once,\n\
         one after another, of the shorter of experts and transfers."
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::simulate::report::tests::report;

    const FEW: &str =
        "--nodes 2 --ranks-per-node 2 --hidden 1024 --layout rank-major --route pxn --sum-order expert";

    /// Forward and backward of so many tokens in so many chunks.
    fn layered(preset: &str, tokens: u32, chunks: u32) -> [Layered; 2] {
        let report = report(&format!("{FEW} --model {preset} --tokens {tokens} --token-chunks {chunks}"));
        report.layer.unwrap().variants.try_into().unwrap()
    }

    #[test]
    fn sequential_layer_pass_takes_sum_of_its_parts() {
        for preset in ["mixtral-8x7b", "deepseek-v3"] {
            for pass in layered(preset, 512, 1) {
                assert_eq!(pass.sequential_ns, pass.experts_ns + pass.transfers_ns, "{pass:?}");
            }
        }
        // Without a shared expert: gradients of weights are half of the experts' backward work, and
        // cover all tokens at once.
        let ([_, whole], [_, in_turn]) = (layered("mixtral-8x7b", 512, 1), layered("mixtral-8x7b", 512, 4));
        let [_, chunk] = layered("mixtral-8x7b", 128, 1);
        let of_chunks = 4 * (chunk.transfers_ns + chunk.experts_ns / 2);
        assert_eq!(in_turn.sequential_ns, of_chunks + whole.experts_ns / 2);
        // Of 5 tokens in 2 chunks: 2 and 3.
        let [one, other] = [2, 3].map(|tokens| layered("mixtral-8x7b", tokens, 1)[0].sequential_ns);
        assert_eq!(layered("mixtral-8x7b", 5, 2)[0].sequential_ns, one + other);
    }

    #[test]
    fn a_backward_pass_computes_twice_as_much_and_plans_nothing() {
        let [forward, backward] = layered("deepseek-v3", 512, 2);
        assert_eq!((forward.pass, backward.pass), (Pass::Forward, Pass::Backward));
        assert_eq!(backward.experts_ns, 2 * forward.experts_ns);
        assert!(backward.transfers_ns < forward.transfers_ns, "{forward:?} {backward:?}");
        assert!(backward.overlapped_ns >= backward.experts_ns.max(backward.transfers_ns), "{backward:?}");
        assert!(backward.overlapped_ns < backward.sequential_ns, "{backward:?}");
    }
}
