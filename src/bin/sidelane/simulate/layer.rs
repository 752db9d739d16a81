//! A whole layer, forward: dispatch and combine of slices of the tokens beside the experts' products.
//!
//! ```text
//!   slices --Placed--> dispatch, combine of one slice --\
//!                                                        +--> the layer's graph, each node with its time --> overlapped
//!   rows of the busiest rank x products / rate ---------/
//! ```
//!
//! The graph is the one that [`MoeLayer`](sidelane::layer::MoeLayer) runs, its order included. Not in it: that copies and products
//! read the same memory, and the launches of the experts' kernels.

use serde::Serialize;
use sidelane::layer::forward_times;

use super::args::SimulateArgs;
use super::task::{SimulateError, Task};
use super::ways::Way;
use crate::table;

/// Sizes of the experts, and how fast their products are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Products {
    /// Width of an expert.
    pub ffn: u32,
    /// Width of the expert that all tokens pass; 0: there is none.
    pub shared_ffn: u32,
    /// TFLOP/s.
    pub tflops: u32,
}

/// One way, in so many slices. Times in ns.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Layered {
    pub way: String,
    pub slices: u32,
    /// Of all tokens at once, alone.
    pub experts_ns: u64,
    /// The same.
    pub transfers_ns: u64,
    /// Of slices, one after another.
    pub sliced_ns: u64,
    pub overlapped_ns: u64,
    /// What overlap saves over all tokens at once, one after another, of the shorter of experts and transfers.
    pub hidden: f64,
    /// What takes longest of what overlaps: `experts`, or what is busiest in transfers.
    pub limit: &'static str,
}

impl Products {
    /// Of the options, and else of the model.
    pub fn of(args: &SimulateArgs) -> Self {
        let layer = args.preset.layer();
        let ffn = args.ffn.unwrap_or(layer.ffn);
        Products { ffn, shared_ffn: layer.shared_ffn, tflops: args.tflops }
    }

    /// Nanoseconds for so many rows of an expert of this width: three products.
    fn ns(&self, rows: u64, hidden: u32, ffn: u32) -> u64 {
        let flop = 6.0 * rows as f64 * f64::from(hidden) * f64::from(ffn);
        (flop / (f64::from(self.tflops) * 1e3)).round() as u64
    }
}

/// Experts, shared expert, dispatch and combine of one step of so many tokens.
struct Parts {
    experts: u64,
    shared: u64,
    dispatch: u64,
    combine: u64,
    busiest: &'static str,
}

impl Parts {
    fn of(task: &Task, way: &Way, products: &Products) -> Result<Self, SimulateError> {
        let group = task.group(task.conditions.nodes)?;
        let [dispatch, combine] = group.time(way)?;
        let hidden = task.conditions.hidden;
        let longer = if dispatch.ns > combine.ns { &dispatch } else { &combine };
        Ok(Parts {
            experts: products.ns(group.busiest_rows(), hidden, products.ffn),
            shared: products.ns(task.conditions.tokens.into(), hidden, products.shared_ffn),
            dispatch: dispatch.ns,
            combine: combine.ns,
            busiest: longer.busiest.part.name(),
        })
    }

    fn compute(&self) -> u64 {
        self.experts + self.shared
    }

    fn transfers(&self) -> u64 {
        self.dispatch + self.combine
    }
}

/// All ways, in all numbers of slices that are asked for.
pub fn all(task: &Task) -> Result<Vec<Layered>, SimulateError> {
    let products = Products::of(task.args);
    let mut found = Vec::new();
    for way in Way::all(task.args, task.conditions.nodes) {
        let whole = Parts::of(task, &way, &products)?;
        for &slices in &task.args.slices {
            let args = SimulateArgs { tokens: task.args.tokens.div_ceil(slices), ..task.args.clone() };
            let slice = Parts::of(&Task::resolve(&args)?, &way, &products)?;
            // The shared expert is not sliced.
            let cost = |name: &str| match name {
                "dispatch" => slice.dispatch,
                "combine" => slice.combine,
                "experts" => slice.experts,
                "shared expert" => whole.shared,
                _ => 0,
            };
            let overlapped_ns = forward_times(slices, cost);
            let (experts_ns, transfers_ns) = (whole.compute(), whole.transfers());
            let saved = (experts_ns + transfers_ns) as f64 - overlapped_ns as f64;
            let of_slices = u64::from(slices) * slice.transfers();
            found.push(Layered {
                way: way.name(),
                slices,
                experts_ns,
                transfers_ns,
                sliced_ns: of_slices + u64::from(slices) * slice.experts + whole.shared,
                overlapped_ns,
                hidden: saved / experts_ns.min(transfers_ns).max(1) as f64,
                limit: if experts_ns > of_slices { "experts" } else { slice.busiest },
            });
        }
    }
    Ok(found)
}

/// A line for each.
pub fn text(products: &Products, layers: &[Layered]) -> String {
    let header = ["layer", "slices", "experts", "transfers", "in slices", "overlapped", "hidden", "limit"];
    let mut table = table::figures(header);
    let us = |ns: u64| table::time(ns as f64 / 1e3);
    for Layered { way, slices, experts_ns, transfers_ns, sliced_ns, overlapped_ns, hidden, limit } in layers {
        table.add_row([
            way.clone(),
            slices.to_string(),
            us(*experts_ns),
            us(*transfers_ns),
            us(*sliced_ns),
            us(*overlapped_ns),
            format!("{hidden:.2}"),
            (*limit).to_owned(),
        ]);
    }
    let Products { ffn, shared_ffn, tflops } = products;
    let shared =
        if *shared_ffn > 0 { format!(", one of {shared_ffn} for all tokens") } else { String::new() };
    format!(
        "{}\n\nExperts of {ffn}{shared}, at {tflops} TFLOP/s. In slices: one after another. Hidden: what overlap saves over all tokens at once,\n\
         one after another, of the shorter of experts and transfers.",
        table.trim_fmt()
    )
}
