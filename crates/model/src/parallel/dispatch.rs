//! Times of dispatch and combine, by the time model.
//!
//! A search asks for many sizes of few groups. So each group is timed at three numbers of tokens,
//! and lines go from one to the next: bytes and prices grow with tokens, and what the host enqueues
//! for each call does not.

use std::collections::BTreeMap;

use sidelane_core::error::PlanError;
use sidelane_core::gate::Routing;
use sidelane_core::plan::{ExpertMap, RowLayout, SumOrder};
use sidelane_core::topology::Route;

use super::mesh::Span;
use super::transformer::Experts;
use crate::time::{Case, Executor, Hardware, Placed};

/// Tokens of a rank at which groups are timed.
const TIMED: [u32; 3] = [256, 1024, 4096];
/// One layer's dispatch and combine, and their gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct LayerTransfers {
    pub forward_s: f64,
    pub backward_s: f64,
    /// Bytes that a rank sends to others, or pulls from them.
    pub forward_bytes: f64,
    pub backward_bytes: f64,
}

impl LayerTransfers {
    fn each(of: impl Fn(fn(&LayerTransfers) -> f64) -> f64) -> Self {
        LayerTransfers {
            forward_s: of(|of| of.forward_s),
            backward_s: of(|of| of.backward_s),
            forward_bytes: of(|of| of.forward_bytes),
            backward_bytes: of(|of| of.backward_bytes),
        }
    }

    /// All of a number of layers and microbatches.
    pub fn times(self, factor: f64) -> Self {
        LayerTransfers::each(|of| of(&self) * factor)
    }
}

/// LayerTransfers by tokens of a rank: those of all points of [`TIMED`].
type Line = [LayerTransfers; TIMED.len()];

/// Times of groups that have been asked for.
#[derive(Debug)]
pub(super) struct DispatchTimes<'h> {
    hardware: &'h Hardware,
    hidden: u32,
    lines: BTreeMap<(u32, u32), Result<Line, PlanError>>,
}

impl<'h> DispatchTimes<'h> {
    /// For rows of so many bf16 elements.
    pub fn new(hardware: &'h Hardware, hidden: u32) -> Self {
        DispatchTimes { hardware, hidden, lines: BTreeMap::new() }
    }

    /// A layer's transfers, each rank with so many tokens.
    ///
    /// # Errors
    /// Those of [`Placed::new`].
    pub fn of(&mut self, experts: &Experts, group: Span, tokens: f64) -> Result<LayerTransfers, PlanError> {
        let key = (group.size, group.local);
        let line = match self.lines.get(&key) {
            Some(known) => known.clone()?,
            None => {
                let timed = |tokens| self.timed(experts, group, tokens);
                let [few, more, most] = TIMED;
                let line = timed(few).and_then(|few| Ok([few, timed(more)?, timed(most)?]));
                self.lines.insert(key, line.clone());
                line?
            }
        };
        // The first and the last line go on.
        let at = usize::from(tokens > TIMED[1].into());
        let [from, to] = [TIMED[at], TIMED[at + 1]].map(f64::from);
        Ok(LayerTransfers::each(|of| {
            let [few, many] = [of(&line[at]), of(&line[at + 1])];
            (few + (many - few) * (tokens - from) / (to - from)).max(0.0)
        }))
    }

    /// The route whose forward calls are faster, by rank-major rows and uniform routing.
    fn timed(&self, experts: &Experts, group: Span, tokens: u32) -> Result<LayerTransfers, PlanError> {
        let map = ExpertMap::contiguous(experts.count, group.size)?;
        // One node stands for all where ranks do not share cores.
        let drawn = if self.hardware.executor == Executor::Host { group.size } else { group.local };
        let draw = |rank| uniform(experts, tokens, rank);
        let routings = (0..drawn).map(draw).collect::<Result<Vec<_>, _>>()?;
        let row_bytes = u64::from(self.hidden) * 2;
        let routes = if group.nodes() > 1 { &Route::ALL[..] } else { &[Route::Direct] };
        let mut best: Option<LayerTransfers> = None;
        for &route in routes {
            let case = Case {
                nodes: group.nodes(),
                map: &map,
                routings: &routings,
                layout: RowLayout::RankMajor,
                route,
                order: SumOrder::Expert,
                chunks: None,
                row_bytes,
                return_bytes: row_bytes,
                partial_bytes: 2 * row_bytes,
                metadata: true,
            };
            let placed = Placed::new(&case, self.hardware)?;
            let calls = [placed.dispatch(), placed.combine(), placed.combine_backward()];
            let [dispatch, combine, gradient] = calls.each_ref().map(|call| call.ns as f64 / 1e9);
            let [sent, pulled, returned] = calls.each_ref().map(|call| {
                let all = call.total.intra_node_bytes + call.total.loaded_bytes + call.total.inter_node_bytes;
                all as f64 / f64::from(call.simulated_ranks)
            });
            let found = LayerTransfers {
                forward_s: dispatch + combine,
                backward_s: gradient + combine,
                forward_bytes: sent + pulled,
                backward_bytes: returned + pulled,
            };
            if best.is_none_or(|best| found.forward_s < best.forward_s) {
                best = Some(found);
            }
        }
        Ok(best.unwrap_or_default())
    }
}

/// Choices of a rank whose router prefers no expert. Each choice costs one draw, by Floyd's
/// sampling without replacement: where the drawn expert is taken, the last of the range is free.
fn uniform(experts: &Experts, tokens: u32, rank: u32) -> Result<Routing<'static>, PlanError> {
    let Experts { count, top_k, .. } = *experts;
    let choices = tokens as usize * top_k as usize;
    let mut ids: Vec<i32> = Vec::with_capacity(choices);
    for token in 0..tokens {
        let first = ids.len();
        for last in count.saturating_sub(top_k)..count {
            let seed = u64::from(rank) << 52 | u64::from(token) << 32 | u64::from(last);
            let expert = (scattered(seed) % (u64::from(last) + 1)) as i32;
            let is_taken = ids[first..].contains(&expert);
            ids.push(if is_taken { last as i32 } else { expert });
        }
    }
    Routing::new(top_k, ids, vec![1.0 / top_k as f32; choices])
}

/// The output of SplitMix64 for a state: neighboring numbers come out far apart.
fn scattered(number: u64) -> u64 {
    let state = number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_through_three_points_meet_the_time_model_at_others() {
        let hardware: Hardware = "h100-cx7".parse().unwrap();
        let experts = Experts { count: 64, top_k: 8, ffn: 1024, shared_ffn: 0, dense_layers: 0 };
        let mut times = DispatchTimes::new(&hardware, 2048);
        for group in [Span { size: 8, local: 8 }, Span { size: 16, local: 8 }] {
            for tokens in [600, 1024, 2500, 6000] {
                let line = times.of(&experts, group, tokens.into()).unwrap();
                let timed = times.timed(&experts, group, tokens).unwrap();
                let figures = |of: LayerTransfers| [of.forward_s, of.backward_s, of.forward_bytes];
                for (line, timed) in figures(line).into_iter().zip(figures(timed)) {
                    assert!((line / timed - 1.0).abs() < 0.05, "{group:?}, {tokens} tokens: {line} {timed}");
                }
            }
        }
        assert_eq!(times.lines.len(), 2, "each group is timed once");
    }

    #[test]
    fn choices_of_a_token_are_distinct_and_no_expert_is_preferred() {
        for (count, top_k) in [(64, 8), (4096, 64), (8, 8), (1, 1)] {
            let experts = Experts { count, top_k, ffn: 1, shared_ffn: 0, dense_layers: 0 };
            let routing = uniform(&experts, 1024, 3).unwrap();
            let mut load = vec![0_u32; count as usize];
            for ids in routing.experts().chunks(top_k as usize) {
                let distinct: std::collections::BTreeSet<_> = ids.iter().collect();
                assert_eq!(distinct.len(), ids.len(), "{ids:?}");
                ids.iter().for_each(|&id| load[id as usize] += 1);
            }
            // Six deviations of a binomial distribution.
            let mean = 1024.0 * f64::from(top_k) / f64::from(count);
            let far = |&&load: &&u32| (f64::from(load) - mean).abs() > 6.0 * mean.sqrt();
            assert_eq!(load.iter().filter(far).count(), 0, "{count} experts, top-{top_k}: {load:?}");
        }
    }

    #[test]
    fn the_most_experts_that_a_configuration_may_have_are_timed() {
        let hardware: Hardware = "h100-cx7".parse().unwrap();
        let experts = Experts { count: 4096, top_k: 64, ffn: 64, shared_ffn: 0, dense_layers: 0 };
        let mut times = DispatchTimes::new(&hardware, 256);
        let layer = times.of(&experts, Span { size: 64, local: 8 }, 512.0).unwrap();
        assert!(layer.forward_s > 0.0 && layer.backward_s > 0.0, "{layer:?}");
    }
}
