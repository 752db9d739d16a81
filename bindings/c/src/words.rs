//! Choices as numbers. Where a field may be left out, 0 is its default.

use sidelane::Dtype;
use sidelane::dtype::PartialDtype;
use sidelane::ep::Graphs;
use sidelane::layer::Products;
use sidelane::plan::{Overflow, ReceiveMode, RowLayout, Strategy, SumOrder};
use sidelane::topology::Route;

use crate::fault::ArgumentError;

/// bfloat16: the upper half of a binary32.
pub const SIDELANE_DTYPE_BF16: u32 = 0;
/// IEEE binary16.
pub const SIDELANE_DTYPE_F16: u32 = 1;
/// IEEE binary32.
pub const SIDELANE_DTYPE_F32: u32 = 2;
/// Bytes without arithmetic: dispatch moves them, combine refuses.
pub const SIDELANE_DTYPE_BYTES: u32 = 3;

/// Rows go directly from the source to the destination.
pub const SIDELANE_ROUTE_DIRECT: u32 = 0;
/// Rows go once per remote node, to the rail peer there, which relays them within its node.
pub const SIDELANE_ROUTE_PXN: u32 = 1;

/// A token's rows are summed by ascending expert id: the same bits on every lane, layout and
/// topology.
pub const SIDELANE_ORDER_EXPERT: u32 = 0;
/// Per rank, then the ranks' partial sums by ascending rank.
pub const SIDELANE_ORDER_RANK: u32 = 1;
/// Per node, then the nodes' partial sums by ascending node.
pub const SIDELANE_ORDER_NODE: u32 = 2;

/// Partial sums keep all bits of the f32 sum.
pub const SIDELANE_PARTIAL_F32: u32 = 0;
/// Partial sums are rounded to bf16.
pub const SIDELANE_PARTIAL_BF16: u32 = 1;

/// Rows lie by (local expert, source rank, token).
pub const SIDELANE_LAYOUT_EXPERT_MAJOR: u32 = 0;
/// Rows lie by (source rank, token), one for each token that chose any of the rank's experts.
pub const SIDELANE_LAYOUT_RANK_MAJOR: u32 = 1;

/// Receive memory is as large as the call needs.
pub const SIDELANE_MODE_EXACT: u32 = 0;
/// A rank receives at most `mode_rows` rows.
pub const SIDELANE_MODE_BUDGET: u32 = 1;
/// Each source has `mode_rows` slots per expert (rank-major: per rank); counts are not exchanged.
pub const SIDELANE_MODE_SLOTS: u32 = 2;

/// Rows for which there is no room are an error, and nothing moves.
pub const SIDELANE_OVERFLOW_ERROR: u32 = 0;
/// Rows for which there is no room are dropped.
pub const SIDELANE_OVERFLOW_DROP: u32 = 1;

/// The caller finishes each call, which moves what it needs.
pub const SIDELANE_GRAPHS_OFF: u32 = 0;
/// Calls may be captured into CUDA graphs, or left unfinished: each moves full slots.
pub const SIDELANE_GRAPHS_SLOTS: u32 = 1;

/// Each row goes to the ranks that its token chose.
pub const SIDELANE_STRATEGY_ALL_TO_ALL: u32 = 0;
/// Every row goes to every rank, which copies those of its experts: for small groups.
pub const SIDELANE_STRATEGY_ALL_GATHER: u32 = 1;

/// Memory of the host.
pub const SIDELANE_PLACE_HOST: u32 = 0;
/// Memory that the layer's device reaches: its own, or pinned memory of the host.
pub const SIDELANE_PLACE_DEVICE: u32 = 1;

/// Kernels of the library make the products of a layer on a device, with the bits of the host.
pub const SIDELANE_PRODUCTS_OWN: u32 = 0;
/// cuBLAS makes them, in an order of its own.
pub const SIDELANE_PRODUCTS_CUBLAS: u32 = 1;
/// cuBLAS makes them by tensor cores, with the experts' factors rounded to TF32.
pub const SIDELANE_PRODUCTS_CUBLAS_TF32: u32 = 2;
/// cuBLAS makes them by tensor cores, with the experts' factors in bf16: of layers of bf16 alone.
pub const SIDELANE_PRODUCTS_CUBLAS_BF16: u32 = 3;

/// The call succeeded.
pub const SIDELANE_CALL_OK: u32 = 0;
/// This rank's input was refused: nothing moved, and sums are zeros.
pub const SIDELANE_CALL_REFUSED: u32 = 1;
/// Another rank's input was refused: nothing moved, and sums are zeros.
pub const SIDELANE_CALL_PEER_REFUSED: u32 = 2;
/// A rank has no room, or more rows than its budget: nothing moved, and sums are zeros.
pub const SIDELANE_CALL_NO_ROOM: u32 = 3;
/// Ranks make different calls: nothing moved, and sums are zeros.
pub const SIDELANE_CALL_MISMATCH: u32 = 4;
/// The world has failed.
pub const SIDELANE_CALL_WORLD_FAILED: u32 = 65536;

const _: () = {
    use sidelane::ep::Status;
    assert!(Status::OK.0 == SIDELANE_CALL_OK && Status::REFUSED.0 == SIDELANE_CALL_REFUSED);
    assert!(Status::PEER_REFUSED.0 == SIDELANE_CALL_PEER_REFUSED);
    assert!(Status::NO_ROOM.0 == SIDELANE_CALL_NO_ROOM);
    assert!(Status::MISMATCH.0 == SIDELANE_CALL_MISMATCH);
    assert!(Status::WORLD_FAILED.0 == SIDELANE_CALL_WORLD_FAILED);
};

/// A choice among few, by its number.
pub(crate) fn choice<T: Copy>(
    what: &'static str,
    seen: u32,
    all: &[(u32, T)],
    expected: &'static str,
) -> Result<T, ArgumentError> {
    let found = all.iter().find(|(number, _)| *number == seen);
    found.map(|&(_, choice)| choice).ok_or(ArgumentError::Value { what, seen: seen.into(), expected })
}

/// Takes the place of a number for a choice that C has none for. It is refused when it comes back.
pub(crate) const UNNUMBERED: u32 = u32::MAX;

/// The number of a choice.
pub(crate) fn number<T: PartialEq>(all: &[(u32, T)], of: &T) -> u32 {
    all.iter().find(|(_, choice)| choice == of).map_or(UNNUMBERED, |&(number, _)| number)
}

/// 0 or 1.
pub(crate) fn switch(what: &'static str, seen: u32) -> Result<bool, ArgumentError> {
    choice(what, seen, &[(0, false), (1, true)], "0 or 1")
}

const DTYPES: [(u32, Dtype); 4] = [
    (SIDELANE_DTYPE_BF16, Dtype::Bf16),
    (SIDELANE_DTYPE_F16, Dtype::F16),
    (SIDELANE_DTYPE_F32, Dtype::F32),
    (SIDELANE_DTYPE_BYTES, Dtype::Bytes),
];

pub(crate) fn dtype_number(dtype: Dtype) -> u32 {
    number(&DTYPES, &dtype)
}

pub(crate) fn dtype(seen: u32) -> Result<Dtype, ArgumentError> {
    choice("dtype", seen, &DTYPES, "one of SIDELANE_DTYPE_BF16, _F16, _F32, _BYTES")
}

pub(crate) fn products(seen: u32) -> Result<Products, ArgumentError> {
    let all = [
        (SIDELANE_PRODUCTS_OWN, Products::Own),
        (SIDELANE_PRODUCTS_CUBLAS, Products::Cublas),
        (SIDELANE_PRODUCTS_CUBLAS_TF32, Products::CublasTf32),
        (SIDELANE_PRODUCTS_CUBLAS_BF16, Products::CublasBf16),
    ];
    choice("products", seen, &all, "SIDELANE_PRODUCTS_OWN, _CUBLAS, _CUBLAS_TF32 or _CUBLAS_BF16")
}

pub(crate) fn route(seen: u32) -> Result<Route, ArgumentError> {
    let all = [(SIDELANE_ROUTE_DIRECT, Route::Direct), (SIDELANE_ROUTE_PXN, Route::Pxn)];
    choice("route", seen, &all, "SIDELANE_ROUTE_DIRECT or _PXN")
}

pub(crate) fn sum_order(seen: u32) -> Result<SumOrder, ArgumentError> {
    let all = [
        (SIDELANE_ORDER_EXPERT, SumOrder::Expert),
        (SIDELANE_ORDER_RANK, SumOrder::Rank),
        (SIDELANE_ORDER_NODE, SumOrder::Node),
    ];
    choice("sum_order", seen, &all, "one of SIDELANE_ORDER_EXPERT, _RANK, _NODE")
}

pub(crate) fn partial_dtype(seen: u32) -> Result<PartialDtype, ArgumentError> {
    let all = [(SIDELANE_PARTIAL_F32, PartialDtype::F32), (SIDELANE_PARTIAL_BF16, PartialDtype::Bf16)];
    choice("partial_dtype", seen, &all, "SIDELANE_PARTIAL_F32 or _BF16")
}

pub(crate) fn layout(seen: u32) -> Result<RowLayout, ArgumentError> {
    let all = [
        (SIDELANE_LAYOUT_EXPERT_MAJOR, RowLayout::ExpertMajor),
        (SIDELANE_LAYOUT_RANK_MAJOR, RowLayout::RankMajor),
    ];
    choice("layout", seen, &all, "SIDELANE_LAYOUT_EXPERT_MAJOR or _RANK_MAJOR")
}

pub(crate) fn mode(seen: u32, rows: u32, overflow: u32) -> Result<ReceiveMode, ArgumentError> {
    let overflows = [(SIDELANE_OVERFLOW_ERROR, Overflow::Error), (SIDELANE_OVERFLOW_DROP, Overflow::Drop)];
    let overflow = choice("overflow", overflow, &overflows, "SIDELANE_OVERFLOW_ERROR or _DROP")?;
    let all = [
        (SIDELANE_MODE_EXACT, ReceiveMode::Exact),
        (SIDELANE_MODE_BUDGET, ReceiveMode::Budget { rows, overflow }),
        (SIDELANE_MODE_SLOTS, ReceiveMode::Slots { rows, overflow }),
    ];
    let mode = choice("mode", seen, &all, "one of SIDELANE_MODE_EXACT, _BUDGET, _SLOTS")?;
    match mode {
        ReceiveMode::Exact if rows > 0 => {
            let expected = "0: sizes are exact";
            Err(ArgumentError::Value { what: "mode_rows", seen: rows.into(), expected })
        }
        mode => Ok(mode),
    }
}

pub(crate) fn graphs(seen: u32) -> Result<Graphs, ArgumentError> {
    let all = [(SIDELANE_GRAPHS_OFF, Graphs::Off), (SIDELANE_GRAPHS_SLOTS, Graphs::Slots)];
    choice("graphs", seen, &all, "SIDELANE_GRAPHS_OFF or _SLOTS")
}

pub(crate) fn strategy(seen: u32) -> Result<Strategy, ArgumentError> {
    let all = [
        (SIDELANE_STRATEGY_ALL_TO_ALL, Strategy::AllToAll),
        (SIDELANE_STRATEGY_ALL_GATHER, Strategy::AllGather),
    ];
    choice("strategy", seen, &all, "SIDELANE_STRATEGY_ALL_TO_ALL or _ALL_GATHER")
}
