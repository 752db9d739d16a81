//! A case as data: where it stands in the table, its shape, the settings of the builder, the calls.
//!
//! A case runs in several *ways*, on the host and in each mode on a device. The library says which
//! executor serves it there, and its table which features that lacks.

use serde::{Deserialize, Serialize};
use sidelane::Dtype;
use sidelane::device::Priority;
use sidelane::dtype::PartialDtype;
use sidelane::ep::{CallExecutor, Feature, Graphs};
use sidelane::error::PlanError;
use sidelane::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout, Strategy, SumOrder};
use sidelane::topology::Route;
use sidelane_verify::reference;

use crate::ep_settings::{OfDevice, Settings};

/// Place and mode to which a case adds its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// Exact sizes on the host.
    Host,
    /// Exact sizes on a device.
    Exact,
    /// A budget that suffices, on a device.
    Budget,
    /// Rank-major slots for all tokens, summed by rank, on a device.
    Slots,
    /// A budget that suffices and that graphs hold, summed by rank, on a device.
    Graphs,
}

impl Way {
    /// The host first.
    pub const ALL: [Way; 5] = [Way::Host, Way::Exact, Way::Budget, Way::Slots, Way::Graphs];

    /// Whether rows are on a device.
    pub fn is_on_device(self) -> bool {
        self != Way::Host
    }

    /// The executor that usually serves it, where ranks end before they can say.
    pub fn usual_executor(self) -> CallExecutor {
        match self {
            Way::Host => CallExecutor::HostStepper,
            Way::Exact | Way::Budget => CallExecutor::Enqueuer,
            Way::Slots | Way::Graphs => CallExecutor::ConstantProgram,
        }
    }

    /// Words in reports.
    pub fn name(self) -> &'static str {
        match self {
            Way::Host => "host",
            Way::Exact => "device, exact sizes",
            Way::Budget => "device, budget",
            Way::Slots => "device, slots",
            Way::Graphs => "device, a budget that graphs hold",
        }
    }
}

/// A setting of the builder that differs from the default.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Setting {
    /// Order of received rows.
    Layout(RowLayout),
    /// Order of sums.
    Order(SumOrder),
    /// Type of partial sums.
    Partial(PartialDtype),
    /// Rows to a multiple of which segments are padded.
    Align(u32),
    /// Rows of a rank; goes with [`Way::Host`], [`Way::Budget`] and [`Way::Graphs`].
    Budget(u32, Overflow),
    /// Slots of a source; goes with [`Way::Host`] and [`Way::Slots`].
    Slots(u32, Overflow),
    /// Route between nodes.
    Route(Route),
    /// Relays copy spans of rows.
    Spans,
    /// Every token goes to every rank.
    AllGather,
    /// Rows are dispatched as records.
    Fp8,
    /// A combine multiplies rows with their weights.
    Weighted,
    /// Some experts at several ranks, one rank without any.
    Replicas,
    /// Dispatches that may be alive at once.
    MaxInFlight(u32),
    /// Bytes of the device heap.
    DeviceHeap(u64),
    /// Priority of copies.
    CopyPriority(Priority),
    /// Blocks of each kernel.
    MaxBlocks(u32),
}

/// Call of all ranks of a group. A number names the dispatch that it follows, the first
/// one being 0; dispatches stay alive until they are forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// A dispatch of new tokens, which take turns in their numbers.
    Dispatch,
    /// The same in two halves.
    DispatchHalves,
    /// The same from a token buffer.
    TokenBuffer,
    /// A layout whose rows come later.
    Prepare,
    /// Other tokens along a layout.
    Cached(usize),
    /// A combine of the handle's own buffer.
    Combine(usize),
    /// The same in two halves.
    CombineHalves(usize),
    /// A combine of rows that lie elsewhere.
    CombineCopy(usize),
    /// Row gradients and gradients of row weights return to their tokens.
    DispatchBackward(usize),
    /// Token gradients go to the rows of a combine.
    CombineBackward(usize),
    /// In place of a combine.
    Release(usize),
    /// All handles are dropped.
    Forget,
    /// Experts change ranks.
    SetMap,
    /// Only these members are active from now on.
    Mask(&'static [bool]),
    /// The calls that follow go on another stream.
    Stream,
    /// The second member brings this, and all ranks are told.
    Refused(Bad),
    /// A rank needs more than its budget, and all ranks are told.
    OverBudget,
    /// A layer whose experts change nothing, captured once and launched with several inputs.
    Capture,
    /// A dispatch and a combine, between which ranks of a second group begin a dispatch there: they
    /// finish it, and combine, behind that combine.
    Interleaved,
    /// The bare moves of a dispatch.
    Floor,
}

/// Input that no call can use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    /// A row is missing.
    Shape,
    /// An expert that is not there.
    Expert,
}

impl Call {
    /// The feature that it asks for.
    pub fn feature(self) -> Option<Feature> {
        Some(match self {
            Call::TokenBuffer => Feature::TokenBuffers,
            Call::Prepare | Call::Cached(_) => Feature::CachedDispatch,
            Call::DispatchBackward(_) | Call::CombineBackward(_) => Feature::Gradients,
            Call::Release(_) => Feature::Release,
            Call::SetMap => Feature::ExpertMaps,
            Call::Mask(_) => Feature::RankMask,
            Call::Stream => Feature::Streams,
            Call::Capture => Feature::Capture,
            Call::Floor => Feature::Floor,
            _ => return None,
        })
    }
}

/// A line of the suite.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Row of the table.
    pub feature: Feature,
    /// Name among the cases of the feature.
    pub name: &'static str,
    /// Ranks of the world, in the group's order.
    pub group: &'static [u32],
    /// Those of a second group, whose calls take turns with the first one's.
    pub second: &'static [u32],
    /// Number of experts.
    pub experts: u32,
    /// Choices of a token.
    pub top_k: u32,
    /// Elements of a row.
    pub hidden: u32,
    /// Tokens of each member in the first dispatch.
    pub tokens: &'static [u32],
    /// Element type.
    pub dtype: Dtype,
    /// Settings that differ from the default.
    pub settings: &'static [Setting],
    /// Calls, in their order.
    pub calls: &'static [Call],
    /// Ways in which it may run.
    pub ways: &'static [Way],
}

impl Case {
    /// Whether it is for this way.
    pub fn goes(&self, way: Way) -> bool {
        let fits = |setting: &Setting| match setting {
            Setting::Budget(..) => matches!(way, Way::Host | Way::Budget | Way::Graphs),
            Setting::Slots(..) => matches!(way, Way::Host | Way::Slots),
            _ => true,
        };
        self.ways.contains(&way) && self.settings.iter().all(fits)
    }

    /// The most tokens of a rank.
    fn max_tokens(&self) -> u32 {
        self.tokens.iter().copied().max().unwrap_or(0).max(1)
    }

    /// Its settings in a group of ranks on these nodes.
    pub fn settings(&self, way: Way, nodes: &[u32]) -> Result<Settings, PlanError> {
        let (ranks, max_tokens) = (nodes.len() as u32, self.max_tokens());
        let counts: Vec<u32> = self.tokens.iter().copied().cycle().take(nodes.len()).collect();
        let mut case = reference::Case::new(nodes, &counts, self.experts, self.top_k);
        case.hidden = self.hidden as usize;
        // All choices of all ranks, and pads of each expert.
        let rows = (ranks * max_tokens + 16) * self.experts;
        let suffices = ReceiveMode::Budget { rows, overflow: Overflow::Error };
        let mut graphs = Graphs::Off;
        match way {
            Way::Host | Way::Exact => {}
            Way::Budget => case.mode = suffices,
            Way::Graphs => (case.mode, case.order, graphs) = (suffices, SumOrder::Rank, Graphs::Slots),
            Way::Slots => {
                case.mode = ReceiveMode::Slots { rows: max_tokens, overflow: Overflow::Error };
                (case.layout, case.order) = (RowLayout::RankMajor, SumOrder::Rank);
            }
        }
        let (mut fp8, mut device) = (false, OfDevice::default());
        for &setting in self.settings {
            match setting {
                Setting::Layout(layout) => case.layout = layout,
                Setting::Order(order) => case.order = order,
                Setting::Partial(partial) => case.wire = partial,
                Setting::Align(rows) => case.align = rows,
                Setting::Budget(rows, overflow) => case.mode = ReceiveMode::Budget { rows, overflow },
                Setting::Slots(rows, overflow) => case.mode = ReceiveMode::Slots { rows, overflow },
                Setting::Route(route) => case.route = route,
                Setting::Spans => case.spans = true,
                Setting::AllGather => case.strategy = Strategy::AllGather,
                Setting::Fp8 => fp8 = true,
                Setting::Weighted => case.weighted = true,
                Setting::Replicas => case.map = replicated(self.experts, ranks)?,
                Setting::MaxInFlight(dispatches) => device.max_in_flight = Some(dispatches),
                Setting::DeviceHeap(bytes) => device.device_heap = Some(bytes),
                Setting::CopyPriority(priority) => device.priority = Some(priority),
                Setting::MaxBlocks(blocks) => device.max_blocks = Some(blocks),
            }
        }
        Ok(Settings { case, dtype: self.dtype, max_tokens, fp8, graphs, device })
    }

    /// The first feature that it asks for and this executor lacks: settings at build, then calls.
    pub fn refusal(&self, settings: &Settings, executor: CallExecutor) -> Option<Feature> {
        let calls = self.calls.iter().filter_map(|call| call.feature());
        let served = |feature: &Feature| feature.is_served_in(executor, settings.case.mode);
        settings.asked().into_iter().chain(calls).find(|feature| !served(feature))
    }
}

impl Settings {
    /// Features that these settings ask for, in the order of the table.
    pub fn asked(&self) -> Vec<Feature> {
        let case = &self.case;
        let asks = |feature: &Feature| match feature {
            Feature::ExpertMajor => case.layout == RowLayout::ExpertMajor,
            Feature::RankMajor => case.layout == RowLayout::RankMajor,
            Feature::Budget => case.mode.budget().is_some(),
            Feature::ScarceSlots => case.mode.slots().is_some_and(|rows| rows != self.max_tokens),
            Feature::OrderExpert => case.order == SumOrder::Expert && case.layout == RowLayout::ExpertMajor,
            Feature::OrderRank => case.order == SumOrder::Rank,
            Feature::OrderNode => case.order == SumOrder::Node,
            Feature::RoundedPartials => case.order != SumOrder::Expert && case.wire == PartialDtype::Bf16,
            Feature::Alignment => case.align > 1,
            Feature::Relays => case.route == Route::Pxn,
            Feature::Spans => case.spans,
            Feature::AllGather => case.strategy == Strategy::AllGather,
            Feature::Fp8 => self.fp8,
            Feature::Bytes => self.dtype == Dtype::Bytes,
            Feature::WeightedCombine => case.weighted,
            Feature::MaxInFlight => self.device.max_in_flight.is_some(),
            Feature::DeviceHeap => self.device.device_heap.is_some(),
            Feature::Priority => self.device.priority.is_some(),
            Feature::MaxBlocks => self.device.max_blocks.is_some(),
            Feature::Capture => self.graphs != Graphs::Off,
            _ => false,
        };
        Feature::ALL.into_iter().filter(asks).collect()
    }
}

/// Each expert at one rank, in descending blocks, and every third one at the first rank, too. The
/// last rank has none where there are several.
fn replicated(experts: u32, ranks: u32) -> Result<ExpertMap, PlanError> {
    let holders = (ranks - 1).max(1);
    let mut held: Vec<Vec<u32>> = vec![Vec::new(); ranks as usize];
    (0..experts).rev().for_each(|expert| held[(expert % holders) as usize].push(expert));
    for expert in (0..experts).step_by(3) {
        if !held[0].contains(&expert) {
            held[0].push(expert);
        }
    }
    ExpertMap::from_slots(experts, &held)
}

/// The same experts at the ranks in reverse order.
pub(crate) fn reversed(map: &ExpertMap) -> Result<ExpertMap, PlanError> {
    let of_rank = |rank| map.slots_of(rank).map(|slot| map.expert_of(slot)).collect::<Vec<u32>>();
    ExpertMap::from_slots(map.experts(), &(0..map.ranks()).rev().map(of_rank).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::suite::SUITE;

    #[test]
    fn every_case_asks_for_its_feature_in_every_way() {
        for case in SUITE {
            let labels = case.group.iter().map(|&rank| u32::from(rank > 3)).collect::<Vec<_>>();
            for way in Way::ALL.into_iter().filter(|&way| case.goes(way)) {
                let settings = case.settings(way, &labels).unwrap();
                let calls = case.calls.iter().filter_map(|call| call.feature());
                let asked: Vec<Feature> = settings.asked().into_iter().chain(calls).collect();
                assert!(asked.contains(&case.feature), "{}: {} ({way:?})", case.feature.name(), case.name);
            }
        }
        for feature in Feature::ALL {
            assert!(SUITE.iter().any(|case| case.feature == feature), "{}", feature.name());
        }
    }
}
