//! The suite: lines of data, by the features of the table. A new case is a new line.

use sidelane::Dtype;
use sidelane::device::Priority;
use sidelane::dtype::PartialDtype;
use sidelane::ep::Feature;
use sidelane::plan::{Overflow, RowLayout, SumOrder};
use sidelane::topology::Route;

use crate::conformance::case::{Bad, Call, Case, Setting, Way};
use Call::{
    Cached, Capture, Combine, CombineBackward, CombineCopy, CombineHalves, Dispatch, DispatchBackward,
    DispatchHalves, Floor, Forget, Interleaved, Mask, OverBudget, Prepare, Refused, Release, SetMap, Stream,
    TokenBuffer,
};
use Overflow::{Drop, Error};
use Setting::{
    Align, AllGather, Budget, CopyPriority, DeviceHeap, Fp8, Layout, MaxBlocks, MaxInFlight, Order, Partial,
    Replicas, Slots, Spans, Weighted,
};

/// Ranks of each node of the job in which all cases run.
pub const RANKS_PER_NODE: [u32; 2] = [4, 2];

// Groups, by ranks of that job: 0 to 3 are one node, 4 and 5 the other.
const ONE_NODE: &[u32] = &[0, 1, 2, 3];
const TWO_NODES: &[u32] = &[0, 1, 4, 5];
const UNEVEN: &[u32] = &[0, 1, 2, 4];
const MIXED: &[u32] = &[4, 0, 5, 1];
const ALL: &[u32] = &[0, 1, 2, 3, 4, 5];

const EXPERT_MAJOR: Setting = Layout(RowLayout::ExpertMajor);
const RANK_MAJOR: Setting = Layout(RowLayout::RankMajor);
const PXN: Setting = Setting::Route(Route::Pxn);
const BY_EXPERT: Setting = Order(SumOrder::Expert);
const BY_RANK: Setting = Order(SumOrder::Rank);
const BY_NODE: Setting = Order(SumOrder::Node);
const ROUNDED: Setting = Partial(PartialDtype::Bf16);

const LAYER: &[Call] = &[Dispatch, Combine(0), Dispatch, Combine(1)];
const TRAINING: &[Call] =
    &[Dispatch, Combine(0), DispatchBackward(0), CombineBackward(0), Forget, Dispatch, Combine(0)];
const ALIVE: &[Call] = &[Dispatch, Dispatch, Dispatch, Combine(1), Combine(0), Combine(2)];
const SHAPE: &[Call] = &[Dispatch, Combine(0), Refused(Bad::Shape), Dispatch, Combine(1)];
const EXPERT: &[Call] = &[Dispatch, Combine(0), Refused(Bad::Expert), Dispatch, Combine(1)];

const HALVES: &[Call] = &[DispatchHalves, CombineHalves(0)];
const INTERLEAVED: &[Call] = &[Interleaved, Interleaved];
/// Two microbatches, whose backward passes run in the reverse order.
const MICROBATCHES: &[Call] = &[
    Dispatch,
    Combine(0),
    DispatchHalves,
    CombineHalves(1),
    CombineBackward(1),
    DispatchBackward(1),
    CombineBackward(0),
    DispatchBackward(0),
];
/// Bad input between a forward pass and its backward pass.
const SHAPE_AMID: &[Call] =
    &[Dispatch, Combine(0), Refused(Bad::Shape), CombineBackward(0), DispatchBackward(0)];
const MOVING: &[Call] =
    &[Dispatch, Combine(0), Forget, SetMap, Dispatch, Combine(0), Forget, SetMap, Dispatch, Combine(0)];
const MOVING_ALIVE: &[Call] = &[
    Dispatch,
    Dispatch,
    Combine(1),
    Combine(0),
    Forget,
    SetMap,
    Dispatch,
    Dispatch,
    Cached(0),
    Combine(1),
    Combine(0),
];
/// Each of two ranks in turns, then both, then none: of four members.
const MASKING: &[Call] = &[
    Mask(&[true, true, false, true]),
    Dispatch,
    Combine(0),
    Forget,
    Mask(&[false, true, true, true]),
    Dispatch,
    Combine(0),
    Forget,
    Mask(&[false, true, false, true]),
    Dispatch,
    Combine(0),
    Forget,
    Mask(&[true; 4]),
    Dispatch,
    Combine(0),
];

const EVERYWHERE: &[Way] = &Way::ALL;
/// Slots take their calls in turns.
const COUNTED: &[Way] = &[Way::Host, Way::Exact, Way::Budget];
const ON_HOST: &[Way] = &[Way::Host];
const ON_DEVICE: &[Way] = &[Way::Exact, Way::Budget, Way::Slots, Way::Graphs];

const fn row(feature: Feature, settings: &'static [Setting]) -> Case {
    Case {
        feature,
        name: "one node",
        group: ONE_NODE,
        second: &[],
        experts: 6,
        top_k: 3,
        hidden: 24,
        tokens: &[5, 0, 12, 3],
        dtype: Dtype::Bf16,
        settings,
        calls: LAYER,
        ways: EVERYWHERE,
    }
}

/// The same between nodes of 4 and 2.
const fn of_six(case: Case) -> Case {
    Case { name: "nodes of 4 and 2", group: ALL, experts: 9, top_k: 5, ..case }
}

const EXPERTS: Case = row(Feature::ExpertMajor, &[EXPERT_MAJOR]);
const RANKS: Case = row(Feature::RankMajor, &[RANK_MAJOR]);
const BUDGET: Case = row(Feature::Budget, &[Budget(14, Drop)]);
const SCARCE: Case = row(Feature::ScarceSlots, &[RANK_MAJOR, BY_RANK, Slots(2, Drop)]);
const BY_EXPERTS: Case = row(Feature::OrderExpert, &[EXPERT_MAJOR, BY_EXPERT]);
const BY_RANKS: Case = row(Feature::OrderRank, &[BY_RANK]);
const BY_NODES: Case = row(Feature::OrderNode, &[BY_NODE]);
const PARTIALS: Case = row(Feature::RoundedPartials, &[BY_RANK, ROUNDED]);
const ALIGNED: Case = row(Feature::Alignment, &[Align(4)]);
const RELAYED: Case = Case { group: TWO_NODES, name: "two nodes", ..row(Feature::Relays, &[PXN]) };
const IN_SPANS: Case =
    Case { group: TWO_NODES, name: "two nodes", ..row(Feature::Spans, &[RANK_MAJOR, PXN, Spans]) };
const GATHERED: Case = Case { ways: COUNTED, ..row(Feature::AllGather, &[AllGather]) };
const RECORDS: Case = Case { hidden: 200, ..row(Feature::Fp8, &[Fp8]) };
const OF_BYTES: Case =
    Case { dtype: Dtype::Bytes, hidden: 48, calls: &[Dispatch], ..row(Feature::Bytes, &[]) };
const WEIGHED: Case = row(Feature::WeightedCombine, &[EXPERT_MAJOR, Weighted]);
const IN_FLIGHT: Case = row(Feature::MaxInFlight, &[MaxInFlight(3)]);
const HEAP: Case = row(Feature::DeviceHeap, &[DeviceHeap(2 << 20)]);
const COPIES_FIRST: Case = row(Feature::Priority, &[CopyPriority(Priority::Normal)]);
const FEW_BLOCKS: Case = row(Feature::MaxBlocks, &[MaxBlocks(1)]);
const CACHED: Case =
    Case { calls: &[Dispatch, Combine(0), Cached(0), Cached(0)], ..row(Feature::CachedDispatch, &[]) };
const PREPARED: Case =
    Case { name: "prepared", calls: &[Prepare, Cached(0), Combine(0), Cached(0)], ..CACHED };
const GRADIENTS: Case = Case { calls: TRAINING, ..row(Feature::Gradients, &[]) };
const MAPS: Case = Case { calls: MOVING, ..row(Feature::ExpertMaps, &[]) };
const MASKED: Case = Case {
    name: "slots",
    calls: MASKING,
    ..row(Feature::RankMask, &[RANK_MAJOR, BY_RANK, Slots(12, Error), Replicas])
};
const BUFFERS: Case = Case { calls: &[TokenBuffer, Combine(0)], ..row(Feature::TokenBuffers, &[]) };
const CAPTURED: Case = Case { calls: &[Capture], ..row(Feature::Capture, &[]) };
const RELEASED: Case =
    Case { calls: &[Dispatch, Release(0), Dispatch, Combine(1)], ..row(Feature::Release, &[]) };
const STREAMS: Case = Case {
    calls: &[Dispatch, Combine(0), Stream, Dispatch, Combine(1), Stream, Dispatch, Combine(2)],
    ways: ON_DEVICE,
    ..row(Feature::Streams, &[])
};
const FLOOR: Case = Case { calls: &[Floor], ..row(Feature::Floor, &[]) };

/// All cases, in the order in which they run.
pub const SUITE: &[Case] = &[
    EXPERTS,
    Case { name: "one rank", group: &[2], tokens: &[7], ..EXPERTS },
    Case { name: "two nodes", group: TWO_NODES, ..EXPERTS },
    Case { name: "nodes of 3 and 1", group: UNEVEN, ..EXPERTS },
    Case { name: "nodes in turns", group: MIXED, ..EXPERTS },
    Case { tokens: &[9, 2, 20, 0, 5, 1], ..of_six(EXPERTS) },
    Case { name: "ranks without experts", experts: 3, top_k: 2, ..EXPERTS },
    Case { name: "no tokens", tokens: &[0], ..EXPERTS },
    Case { name: "tokens of one rank", tokens: &[0, 0, 9, 0], ..EXPERTS },
    Case { name: "one choice", top_k: 1, ..EXPERTS },
    Case { name: "every token to every expert", experts: 4, top_k: 4, ..EXPERTS },
    Case { name: "replicas", settings: &[EXPERT_MAJOR, Replicas], ..EXPERTS },
    Case { name: "f32", dtype: Dtype::F32, ..EXPERTS },
    Case { name: "f16", dtype: Dtype::F16, hidden: 40, ..EXPERTS },
    Case { name: "rows elsewhere", calls: &[Dispatch, CombineCopy(0)], ..EXPERTS },
    Case { name: "halves", calls: HALVES, ..EXPERTS },
    Case { name: "halves, two nodes", group: TWO_NODES, calls: HALVES, ..EXPERTS },
    Case { name: "several handles", calls: ALIVE, ways: COUNTED, ..EXPERTS },
    Case { name: "two groups in turns", second: &[3, 1], ..EXPERTS },
    Case { name: "two groups in turns, two nodes", group: TWO_NODES, second: &[4, 0], ..EXPERTS },
    Case { name: "two groups in turns, halves", second: &[3, 1], calls: HALVES, ..EXPERTS },
    Case { name: "two groups interleaved", second: &[3, 1], calls: INTERLEAVED, ..EXPERTS },
    Case {
        name: "two groups interleaved, two nodes",
        group: TWO_NODES,
        second: &[4, 0],
        calls: INTERLEAVED,
        ..EXPERTS
    },
    Case { name: "several handles, two nodes", group: TWO_NODES, calls: ALIVE, ways: COUNTED, ..EXPERTS },
    Case { name: "slots", settings: &[EXPERT_MAJOR, Slots(12, Error)], ways: ON_HOST, ..EXPERTS },
    Case { name: "a row is missing", tokens: &[5, 4, 12, 3], calls: SHAPE, ..EXPERTS },
    Case { name: "an unknown expert", tokens: &[5, 4, 12, 3], calls: EXPERT, ..EXPERTS },
    RANKS,
    Case { name: "one rank", group: &[2], tokens: &[7], ..RANKS },
    Case { name: "two nodes", group: TWO_NODES, ..RANKS },
    Case { name: "nodes in turns", group: MIXED, ..RANKS },
    Case { name: "ranks without experts", experts: 3, top_k: 2, ..RANKS },
    Case { name: "no tokens", tokens: &[0], ..RANKS },
    Case { name: "replicas", settings: &[RANK_MAJOR, Replicas], ..RANKS },
    Case { name: "f32", dtype: Dtype::F32, ..RANKS },
    Case { name: "f16", dtype: Dtype::F16, hidden: 40, ..RANKS },
    Case { name: "rows elsewhere", calls: &[Dispatch, CombineCopy(0)], ..RANKS },
    Case { name: "halves", calls: HALVES, ..RANKS },
    Case { name: "two groups in turns", second: &[3, 1], ..RANKS },
    Case { name: "two groups interleaved", second: &[3, 1], calls: INTERLEAVED, ..RANKS },
    Case { name: "an unknown expert", tokens: &[5, 4, 12, 3], calls: EXPERT, ..RANKS },
    Case { name: "a row is missing", tokens: &[5, 4, 12, 3], calls: SHAPE, ..RANKS },
    Case { name: "slots", settings: &[RANK_MAJOR, Slots(12, Error)], ways: ON_HOST, ..RANKS },
    Case { name: "several handles", calls: ALIVE, ways: COUNTED, ..RANKS },
    BUDGET,
    Case { name: "a budget of nothing", settings: &[Budget(0, Drop)], ..BUDGET },
    Case { name: "two nodes, aligned", group: TWO_NODES, settings: &[Budget(14, Drop), Align(4)], ..BUDGET },
    Case { name: "rank-major", settings: &[Budget(9, Drop), RANK_MAJOR], ..BUDGET },
    Case { name: "over the budget", settings: &[Budget(2, Error)], calls: &[OverBudget], ..BUDGET },
    Case { name: "a row is missing", tokens: &[5, 4, 12, 3], calls: SHAPE, ..BUDGET },
    Case { name: "two groups interleaved", second: &[3, 1], calls: INTERLEAVED, ..BUDGET },
    SCARCE,
    Case { name: "expert-major", settings: &[EXPERT_MAJOR, Slots(3, Drop)], ..SCARCE },
    Case {
        name: "expert-major, two nodes",
        group: TWO_NODES,
        settings: &[EXPERT_MAJOR, PXN, Slots(1, Drop)],
        ..SCARCE
    },
    BY_EXPERTS,
    Case { name: "two nodes", group: TWO_NODES, ..BY_EXPERTS },
    BY_RANKS,
    Case { name: "two nodes", group: TWO_NODES, ..BY_RANKS },
    Case {
        name: "nodes in turns, f32, replicas",
        group: MIXED,
        dtype: Dtype::F32,
        settings: &[BY_RANK, Replicas],
        ..BY_RANKS
    },
    BY_NODES,
    Case { name: "two nodes", group: TWO_NODES, ..BY_NODES },
    Case { name: "relays", group: TWO_NODES, settings: &[BY_NODE, PXN], ..BY_NODES },
    Case { name: "nodes of 4 and 2, relays", settings: &[BY_NODE, PXN], ..of_six(BY_NODES) },
    PARTIALS,
    Case { name: "by node, relays", group: TWO_NODES, settings: &[BY_NODE, ROUNDED, PXN], ..PARTIALS },
    Case {
        name: "rank-major, two nodes",
        group: TWO_NODES,
        settings: &[RANK_MAJOR, BY_RANK, ROUNDED],
        ..PARTIALS
    },
    ALIGNED,
    Case { name: "to 16, two nodes, relays", group: TWO_NODES, settings: &[Align(16), PXN], ..ALIGNED },
    Case { name: "no tokens", tokens: &[0], ..ALIGNED },
    Case { name: "rank-major", settings: &[Align(8), RANK_MAJOR], ..ALIGNED },
    Case { name: "an unknown expert", tokens: &[5, 4, 12, 3], calls: EXPERT, ..ALIGNED },
    RELAYED,
    Case { name: "nodes of 3 and 1", group: UNEVEN, ..RELAYED },
    Case { name: "nodes in turns", group: MIXED, ..RELAYED },
    of_six(RELAYED),
    Case { name: "halves", calls: HALVES, ..RELAYED },
    Case { name: "rank-major", settings: &[PXN, RANK_MAJOR], ..RELAYED },
    Case { name: "a row is missing", tokens: &[5, 4, 12, 3], calls: SHAPE, ..RELAYED },
    Case { name: "an unknown expert", tokens: &[5, 4, 12, 3], calls: EXPERT, ..RELAYED },
    Case { name: "several handles", calls: ALIVE, ways: COUNTED, ..RELAYED },
    Case { name: "two groups interleaved", second: &[4, 0], calls: INTERLEAVED, ..RELAYED },
    IN_SPANS,
    of_six(IN_SPANS),
    Case {
        name: "aligned, gradients",
        settings: &[RANK_MAJOR, PXN, Spans, Align(4)],
        calls: TRAINING,
        ..IN_SPANS
    },
    GATHERED,
    Case { name: "two nodes, relays", group: TWO_NODES, settings: &[AllGather, PXN], ..GATHERED },
    Case { name: "rank-major, a budget", settings: &[AllGather, RANK_MAJOR, Budget(9, Drop)], ..GATHERED },
    RECORDS,
    Case { name: "two nodes, relays, aligned", group: TWO_NODES, settings: &[Fp8, PXN, Align(4)], ..RECORDS },
    Case { name: "rank-major", settings: &[Fp8, RANK_MAJOR], ..RECORDS },
    Case { name: "cached", calls: &[Dispatch, Cached(0), Combine(0)], ..RECORDS },
    Case { name: "halves", calls: HALVES, ..RECORDS },
    Case { name: "several handles", calls: ALIVE, ..RECORDS },
    Case { name: "a row is missing", tokens: &[5, 4, 12, 3], calls: SHAPE, ..RECORDS },
    Case { name: "a budget that drops", settings: &[Fp8, Budget(14, Drop)], ..RECORDS },
    OF_BYTES,
    Case { name: "halves, cached", calls: &[DispatchHalves, Cached(0), Cached(0)], ..OF_BYTES },
    Case { name: "rank-major, aligned", settings: &[RANK_MAJOR, Align(4)], ..OF_BYTES },
    Case { name: "a budget that drops", settings: &[Budget(14, Drop)], ..OF_BYTES },
    Case { name: "two nodes, relays", group: TWO_NODES, settings: &[PXN], ..OF_BYTES },
    WEIGHED,
    Case { name: "halves", calls: HALVES, ..WEIGHED },
    Case { name: "several handles", calls: ALIVE, ..WEIGHED },
    Case { name: "an unknown expert", tokens: &[5, 4, 12, 3], calls: EXPERT, ..WEIGHED },
    Case { name: "two nodes, relays", group: TWO_NODES, settings: &[EXPERT_MAJOR, Weighted, PXN], ..WEIGHED },
    Case {
        name: "by node, f32",
        group: TWO_NODES,
        dtype: Dtype::F32,
        settings: &[EXPERT_MAJOR, Weighted, BY_NODE],
        ..WEIGHED
    },
    IN_FLIGHT,
    Case { name: "several handles", calls: ALIVE, ..IN_FLIGHT },
    HEAP,
    COPIES_FIRST,
    Case {
        name: "two nodes, relays",
        group: TWO_NODES,
        settings: &[PXN, CopyPriority(Priority::Normal)],
        ..COPIES_FIRST
    },
    FEW_BLOCKS,
    Case { name: "two nodes, relays", group: TWO_NODES, settings: &[PXN, MaxBlocks(2)], ..FEW_BLOCKS },
    CACHED,
    PREPARED,
    Case { name: "two nodes, relays, aligned", group: TWO_NODES, settings: &[PXN, Align(4)], ..CACHED },
    Case { name: "prepared, two nodes", group: TWO_NODES, ..PREPARED },
    Case { name: "two groups in turns", second: &[3, 1], ..CACHED },
    Case {
        name: "an unknown expert",
        tokens: &[5, 4, 12, 3],
        calls: &[Prepare, Refused(Bad::Expert), Cached(0), Combine(0)],
        ..CACHED
    },
    Case { name: "rank-major", settings: &[RANK_MAJOR], ..CACHED },
    GRADIENTS,
    Case { name: "two nodes", group: TWO_NODES, settings: &[Align(4)], ..GRADIENTS },
    Case { name: "relays, replicas", group: MIXED, settings: &[PXN, Replicas], ..GRADIENTS },
    Case { name: "weighted", settings: &[EXPERT_MAJOR, Weighted], ..GRADIENTS },
    Case { name: "two microbatches", calls: MICROBATCHES, ..GRADIENTS },
    Case {
        name: "two microbatches, weighted, relays",
        group: TWO_NODES,
        settings: &[EXPERT_MAJOR, Weighted, PXN],
        calls: MICROBATCHES,
        ..GRADIENTS
    },
    Case { name: "two groups in turns", second: &[3, 1], ..GRADIENTS },
    Case { name: "a row is missing", tokens: &[5, 4, 12, 3], calls: SHAPE_AMID, ..GRADIENTS },
    Case {
        name: "weighted, relays, f32",
        group: TWO_NODES,
        dtype: Dtype::F32,
        settings: &[EXPERT_MAJOR, Weighted, PXN],
        ..GRADIENTS
    },
    Case { name: "by node, rounded", group: TWO_NODES, settings: &[BY_NODE, ROUNDED, PXN], ..GRADIENTS },
    Case { name: "rank-major", settings: &[RANK_MAJOR], ..GRADIENTS },
    Case { name: "rank-major, relays", group: TWO_NODES, settings: &[RANK_MAJOR, PXN], ..GRADIENTS },
    Case { name: "a budget that drops", settings: &[Budget(14, Drop)], ..GRADIENTS },
    Case { name: "slots that drop", settings: &[EXPERT_MAJOR, Slots(2, Drop)], ..GRADIENTS },
    Case { name: "all-gather", settings: &[AllGather], ways: COUNTED, ..GRADIENTS },
    Case { name: "fp8", hidden: 128, settings: &[Fp8], ..GRADIENTS },
    MAPS,
    Case { name: "two nodes, relays", group: TWO_NODES, settings: &[PXN], ..MAPS },
    Case { name: "replicas, rank-major", settings: &[RANK_MAJOR, Replicas], ..MAPS },
    Case { name: "several handles", calls: MOVING_ALIVE, ways: COUNTED, ..MAPS },
    Case {
        name: "several handles, relays, replicas",
        group: TWO_NODES,
        settings: &[PXN, Replicas],
        calls: MOVING_ALIVE,
        ways: COUNTED,
        ..MAPS
    },
    MASKED,
    Case { name: "slots, two nodes", group: TWO_NODES, ..MASKED },
    Case {
        name: "expert-major slots, relays",
        group: TWO_NODES,
        settings: &[EXPERT_MAJOR, PXN, Slots(12, Error), Replicas],
        ways: ON_HOST,
        ..MASKED
    },
    Case { name: "no replicas", settings: &[], ..MASKED },
    Case { name: "replicas, two nodes, relays", group: TWO_NODES, settings: &[PXN, Replicas], ..MASKED },
    Case { name: "weighted, aligned", settings: &[EXPERT_MAJOR, Weighted, Replicas, Align(4)], ..MASKED },
    Case { name: "rank-major, rounded", settings: &[RANK_MAJOR, BY_RANK, ROUNDED, Replicas], ..MASKED },
    Case { name: "a budget that drops", settings: &[Budget(14, Drop), Replicas], ..MASKED },
    Case {
        name: "all-gather",
        group: TWO_NODES,
        settings: &[AllGather, PXN, Replicas],
        ways: ON_HOST,
        ..MASKED
    },
    Case {
        name: "gradients",
        calls: &[
            Mask(&[true, false, true, true]),
            Dispatch,
            Combine(0),
            DispatchBackward(0),
            CombineBackward(0),
            Cached(0),
        ],
        settings: &[Replicas],
        ways: COUNTED,
        ..MASKED
    },
    BUFFERS,
    Case { name: "two nodes", group: TWO_NODES, ..BUFFERS },
    Case { name: "two nodes, relays", group: TWO_NODES, settings: &[PXN], ..BUFFERS },
    Case {
        name: "fp8, several",
        hidden: 200,
        settings: &[Fp8],
        calls: &[TokenBuffer, TokenBuffer, Combine(0), Combine(1)],
        ..BUFFERS
    },
    CAPTURED,
    Case { name: "two nodes", group: TWO_NODES, ..CAPTURED },
    RELEASED,
    Case { name: "two nodes", group: TWO_NODES, ..RELEASED },
    STREAMS,
    Case { name: "two nodes", group: TWO_NODES, ..STREAMS },
    Case {
        name: "several handles",
        calls: &[Dispatch, Stream, Dispatch, Combine(0), Stream, Combine(1)],
        ways: &[Way::Exact, Way::Budget],
        ..STREAMS
    },
    FLOOR,
    Case { name: "two nodes", group: TWO_NODES, ..FLOOR },
];
