//! Tensor parallel layers over the ranks of a node: products of token chunks next to their
//! transfers, by the plans that the layers run.
//!
//! ```text
//!   hidden -> ColumnParallelLinear -> ffn / ranks -> RowParallelLinear -> hidden      activations sequence parallel
//!
//!   gather, reduce     a chunk of every other rank at the rate of the link, and its latency
//!   sums of a reduce   a chunk of every rank at the rate of the memory
//!   products           2 tokens hidden ffn / ranks operations, of the tokens of all ranks
//! ```
//!
//! Not in it: that transfers and products read the same memory, and launches.

use serde::Serialize;
use sidelane::overlap::TokenChunks;
use sidelane_model::time::Hardware;
use sidelane_parallel::tensor::overlap::{LinearPass, Plan, Work};

use super::Task;
use crate::table::{self, time_ns};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorLayers {
    ranks: u32,
    ffn: u32,
    tflops: u32,
    passes: Vec<TensorPass>,
}

/// One pass, in so many chunks. Times in ns.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorPass {
    pass: &'static str,
    token_chunks: u32,
    /// Of all tokens at once, alone.
    products_ns: u64,
    /// The same.
    transfers_ns: u64,
    /// Of chunks, one after another.
    sequential_ns: u64,
    overlapped_ns: u64,
    /// Savings of overlap over all tokens at once, one after another, of the shorter of products
    /// and transfers.
    hidden_share: f64,
}

impl TensorLayers {
    /// All passes in all numbers of chunks, if they are asked for.
    pub fn of(task: &Task) -> Option<Self> {
        let (ranks, tflops) = (task.conditions.ranks_per_node, task.args.tflops);
        let ffn = task.args.tensor_ffn?;
        let costs = Costs { hardware: &task.hardware, ranks, tflops, task, ffn };
        let chunks = task.args.token_chunks.iter().copied();
        let passes = chunks.flat_map(|chunks| LinearPass::ALL.map(|pass| costs.pass(pass, chunks)));
        Some(TensorLayers { ranks, ffn, tflops, passes: passes.collect() })
    }
}

/// Durations of the steps.
struct Costs<'a> {
    hardware: &'a Hardware,
    task: &'a Task<'a>,
    ranks: u32,
    ffn: u32,
    tflops: u32,
}

impl Costs<'_> {
    fn pass(&self, pass: LinearPass, chunks: u32) -> TensorPass {
        let [whole, cut] = [1, chunks].map(|chunks| Plan::new(pass, TokenChunks::new(chunks)));
        let of_all = |transfers: bool| -> u64 {
            let steps = whole.steps().iter().map(|step| step.work);
            steps.filter(|work| is_transfer(*work) == transfers).map(|work| self.step(&whole, work)).sum()
        };
        let (products_ns, transfers_ns) = (of_all(false), of_all(true));
        let times = cut.times(|work| self.step(&cut, work));
        let saved = (products_ns + transfers_ns) as f64 - times.overlapped as f64;
        TensorPass {
            pass: name(pass),
            token_chunks: chunks,
            products_ns,
            transfers_ns,
            sequential_ns: times.in_turn,
            overlapped_ns: times.overlapped,
            hidden_share: saved / products_ns.min(transfers_ns).max(1) as f64,
        }
    }

    fn step(&self, plan: &Plan, work: Work) -> u64 {
        let (tokens, ranks) = (u64::from(self.task.conditions.tokens), u64::from(self.ranks));
        let of_chunk = |nth: u32| {
            let chunk = plan.chunks().of(self.task.conditions.tokens).nth(nth as usize);
            chunk.map_or(0, |tokens| tokens.len() as u64)
        };
        // Where own rows need no transfer, they are multiplied before a chunk comes.
        let has_own = plan.steps().iter().any(|step| step.work == Work::Own);
        match work {
            Work::Compare => self.hardware.link.latency,
            Work::Gather(chunk) => self.moved((ranks - 1) * of_chunk(chunk)),
            Work::Reduce(chunk) => {
                self.moved((ranks - 1) * of_chunk(chunk)) + self.summed(ranks * of_chunk(chunk))
            }
            Work::Own => self.multiplied(tokens),
            Work::Multiply(chunk) => self.multiplied((ranks - u64::from(has_own)) * of_chunk(chunk)),
            Work::Weights => self.multiplied(ranks * tokens),
        }
    }

    /// Rows of `hidden` elements that a rank receives.
    fn moved(&self, rows: u64) -> u64 {
        self.hardware.link.latency + self.bytes(rows) * 1000 / self.hardware.link.rate
    }

    /// Rows that a rank reads to sum them.
    fn summed(&self, rows: u64) -> u64 {
        self.bytes(rows) * 1000 / self.hardware.compute.rate
    }

    fn bytes(&self, rows: u64) -> u64 {
        rows * self.task.return_bytes
    }

    /// A product of so many rows with a rank's part of the weights.
    fn multiplied(&self, rows: u64) -> u64 {
        let part = f64::from(self.task.conditions.hidden) * f64::from(self.ffn / self.ranks);
        (2.0 * rows as f64 * part / (f64::from(self.tflops) * 1e3)).round() as u64
    }
}

fn is_transfer(work: Work) -> bool {
    matches!(work, Work::Compare | Work::Gather(_) | Work::Reduce(_))
}

fn name(pass: LinearPass) -> &'static str {
    match pass {
        LinearPass::ColumnForward => "column forward",
        LinearPass::ColumnBackward => "column backward",
        LinearPass::RowForward => "row forward",
        LinearPass::RowBackward => "row backward",
    }
}

pub fn text(layers: &TensorLayers) -> String {
    let table = table::of(
        &layers.passes,
        &[
            ("tensor parallel", &|one| one.pass.to_owned()),
            ("chunks", &|one| one.token_chunks.to_string()),
            ("products", &|one| time_ns(one.products_ns)),
            ("transfers", &|one| time_ns(one.transfers_ns)),
            ("in chunks", &|one| time_ns(one.sequential_ns)),
            ("overlapped", &|one| time_ns(one.overlapped_ns)),
            ("hidden", &|one| format!("{:.2}", one.hidden_share)),
        ],
    );
    let TensorLayers { ranks, ffn, tflops, .. } = layers;
    format!(
        "{table}\n\nA column and a row parallel layer with {ffn} elements between them, over the {ranks} ranks of a node, at {tflops} TFLOP/s."
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::simulate::report::tests::report;

    /// Passes by their numbers of chunks, with links as fast as those of an H100.
    fn passes(tflops: u32, chunks: &str) -> Vec<TensorPass> {
        let few = "--nodes 1 --ranks-per-node 4 --tokens 512 --hidden 4096 --model mixtral-8x7b";
        let line = format!("{few} --tensor-ffn 16384 --tflops {tflops} --token-chunks {chunks}");
        report(&line).tensor.unwrap().passes
    }

    #[test]
    fn tensor_pass_takes_at_least_longer_half_at_most_sequence() {
        for pass in passes(100, "1,2,4,8") {
            assert!(pass.overlapped_ns <= pass.sequential_ns, "{pass:?}");
            // Each of at most eight chunks is rounded to a nanosecond.
            assert!(pass.overlapped_ns + 8 >= pass.products_ns.max(pass.transfers_ns), "{pass:?}");
        }
    }

    #[test]
    fn one_chunk_hides_nothing_but_next_to_the_gradients_of_weights() {
        let shares: Vec<_> = passes(100, "1").iter().map(|pass| (pass.pass, pass.hidden_share)).collect();
        for (pass, share) in shares {
            assert_eq!(share > 0.0, pass == "column backward", "{pass}: {share}");
        }
    }

    #[test]
    fn slow_products_hide_all_but_first_gather_or_last_reduce() {
        let [whole, cut] = ["1", "4"].map(|chunks| passes(1, chunks));
        for (whole, cut) in whole.iter().zip(&cut) {
            let exposed = cut.overlapped_ns.saturating_sub(cut.products_ns);
            match cut.pass {
                // Own rows need no transfer, and cover the first gather.
                "column forward" | "row backward" => assert!(exposed <= 8, "{cut:?}"),
                // A reduce of a quarter of the tokens.
                "row forward" => assert!(exposed * 3 < whole.transfers_ns, "{cut:?}"),
                _ => assert!(exposed <= 8 && cut.hidden_share > 0.9, "{cut:?}"),
            }
        }
    }
}
