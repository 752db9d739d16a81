//! Shapes of meshes, and where their groups lie.
//!
//! ```text
//!   pp x dp x cp x tp      the last dimension varies fastest, so tensor parallel ranks are in a node
//!   edp x ep               the same ranks of a pipeline stage as the experts see them (no expert is cut)
//! ```
//!
//! Dimensions and their order are those of `sidelane_parallel::Mesh`.

use std::fmt;

use serde::Serialize;

/// State that data parallel ranks do not hold twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Zero {
    /// None: plain data parallelism.
    Plain,
    /// ZeRO-1: states of the optimizer.
    Zero1,
    /// ZeRO-2: gradients, too.
    Zero2,
    /// ZeRO-3, FSDP: parameters, too.
    Zero3,
}

impl Zero {
    /// All, from the one that holds most.
    pub const ALL: [Zero; 4] = [Zero::Plain, Zero::Zero1, Zero::Zero2, Zero::Zero3];

    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Zero::Plain => "plain",
            Zero::Zero1 => "zero1",
            Zero::Zero2 => "zero2",
            Zero::Zero3 => "zero3",
        }
    }
}

/// A mesh, and how a step runs on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Shape {
    /// Pipeline stages.
    pub pp: u32,
    /// Data parallel ranks.
    pub dp: u32,
    /// Ranks that share the tokens of a sequence.
    pub cp: u32,
    /// Ranks that cut each layer.
    pub tp: u32,
    /// Ranks that share the experts of a layer: of the `dp x cp x tp` ranks of a stage.
    pub ep: u32,
}

/// A shape, and settings that go with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Mesh {
    /// Its dimensions.
    #[serde(flatten)]
    pub shape: Shape,
    /// State that is cut over data parallel ranks.
    pub zero: Zero,
    /// Microbatches of a step.
    pub microbatches: u32,
}

/// A group: its ranks, and how many of them share a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub size: u32,
    pub local: u32,
}

impl Span {
    /// Ranks that are so far apart, in a job of so many devices on nodes of this size. Where a node
    /// ends within a group, the smaller part counts: its NICs bring most.
    fn new(stride: u32, size: u32, (devices, per_node): (u32, u32)) -> Self {
        let span = stride * size;
        let part = match devices.checked_rem(per_node) {
            _ if devices <= per_node => span,
            Some(rest) if span == devices => {
                if rest == 0 {
                    per_node
                } else {
                    rest
                }
            }
            _ => common_divisor(span, per_node),
        };
        let near = (part / stride).clamp(1, size);
        let divides = |local: &u32| size.is_multiple_of(*local);
        Span { size, local: (1..=near).rev().find(divides).unwrap_or(1) }
    }

    /// Number of nodes, each with as many ranks.
    pub fn nodes(self) -> u32 {
        self.size / self.local
    }
}

impl Shape {
    /// Number of devices.
    pub fn devices(&self) -> u32 {
        self.pp * self.stage()
    }

    /// Ranks of a pipeline stage.
    pub fn stage(&self) -> u32 {
        self.dp * self.cp * self.tp
    }

    /// Ranks that hold the same parameters, but for experts: `dp x cp`.
    pub fn copies(&self) -> u32 {
        self.dp * self.cp
    }

    /// Ranks that hold the same experts: `edp`.
    pub fn expert_copies(&self) -> u32 {
        self.stage() / self.ep
    }

    pub(super) fn tensor(&self, per_node: u32) -> Span {
        Span::new(1, self.tp, (self.devices(), per_node))
    }

    pub(super) fn context(&self, per_node: u32) -> Span {
        Span::new(self.tp, self.cp, (self.devices(), per_node))
    }

    pub(super) fn data(&self, per_node: u32) -> Span {
        Span::new(self.tp, self.copies(), (self.devices(), per_node))
    }

    pub(super) fn experts(&self, per_node: u32) -> Span {
        Span::new(1, self.ep, (self.devices(), per_node))
    }

    pub(super) fn expert_data(&self, per_node: u32) -> Span {
        Span::new(self.ep, self.expert_copies(), (self.devices(), per_node))
    }

    /// Neighboring pipeline stages, at the slowest of their borders: between nodes, if there are
    /// several.
    pub(super) fn neighbors(&self, per_node: u32) -> Span {
        let size = self.pp.min(2);
        Span { size, local: if self.devices() <= per_node { size } else { 1 } }
    }

    /// All shapes of so many devices, with every divisor in every dimension; `ep` is 1.
    pub fn all(devices: u32) -> Vec<Shape> {
        let mut shapes = Vec::new();
        for pp in divisors(devices) {
            for dp in divisors(devices / pp) {
                for cp in divisors(devices / pp / dp) {
                    shapes.push(Shape { pp, dp, cp, tp: devices / pp / dp / cp, ep: 1 });
                }
            }
        }
        shapes
    }

    /// Strategies of the shape in words: `data, tensor, expert`. Context parallelism counts as data
    /// parallelism, whose states its ranks share.
    pub fn family(&self) -> String {
        let ways = [("data", self.copies()), ("pipeline", self.pp), ("tensor", self.tp), ("expert", self.ep)];
        let names: Vec<_> = ways.iter().filter(|(_, ways)| *ways > 1).map(|(name, _)| *name).collect();
        if names.is_empty() { "one device".to_owned() } else { names.join(", ") }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { pp, dp, cp, tp, ep } = self;
        write!(f, "pp {pp} x dp {dp} x cp {cp} x tp {tp}, ep {ep}")
    }
}

/// The largest number that divides both.
fn common_divisor(left: u32, right: u32) -> u32 {
    if right == 0 { left } else { common_divisor(right, left % right) }
}

/// All divisors, ascending.
pub(super) fn divisors(of: u32) -> Vec<u32> {
    let small: Vec<u32> = (1..=of.isqrt()).filter(|&by| of.is_multiple_of(by)).collect();
    let large = small.iter().rev().map(|by| of / by).filter(|&by| by > of.isqrt());
    small.iter().copied().chain(large).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(pp: u32, dp: u32, tp: u32) -> Shape {
        Shape { pp, dp, cp: 1, tp, ep: 1 }
    }

    #[test]
    fn stages_are_neighbors_within_a_node_only_if_all_are() {
        let local = |pp, dp, tp| shape(pp, dp, tp).neighbors(8).local;
        assert_eq!([local(2, 1, 4), local(8, 1, 1), local(2, 2, 1)], [2, 2, 2]);
        // Two stages in each node, and every second border is between nodes.
        assert_eq!([local(12, 1, 4), local(4, 2, 2), local(2, 1, 8)], [1, 1, 1]);
        assert_eq!(shape(1, 2, 8).neighbors(8), Span { size: 1, local: 1 });
    }

    #[test]
    fn groups_that_straddle_nodes_count_their_smaller_part() {
        // Of 24 ranks in groups of 6, the second has two ranks in the first node.
        assert_eq!(shape(1, 4, 6).tensor(8), Span { size: 6, local: 2 });
        assert_eq!(shape(1, 8, 3).tensor(8), Span { size: 3, local: 1 });
        assert_eq!(shape(1, 2, 8).tensor(8), Span { size: 8, local: 8 });
        assert_eq!(shape(1, 2, 16).tensor(8), Span { size: 16, local: 8 });
        assert_eq!(shape(1, 4, 2).data(8), Span { size: 4, local: 4 });
        assert_eq!(shape(1, 8, 2).data(8), Span { size: 8, local: 4 });
        // A job within a node straddles none, and one group alone begins where a node does.
        assert_eq!(shape(1, 1, 6).tensor(8), Span { size: 6, local: 6 });
        assert_eq!(shape(2, 1, 3).tensor(8), Span { size: 3, local: 3 });
        assert_eq!(shape(1, 12, 1).data(8), Span { size: 12, local: 4 });
        assert_eq!(shape(1, 4096, 4).data(8960), Span { size: 4096, local: 1024 });
    }
}
