//! Features that each executor has: the one table by which builders and calls refuse the rest.
//!
//! | place and mode | executor |
//! |---|---|
//! | host | the host stepper |
//! | device; exact sizes or a budget | the enqueuer, in the caller's thread |
//! | device; fixed slots, or a budget that graphs hold | the constant program, a column for each |
//!
//! Settings that no place has are refused by the builder, and numbers that are too large by what
//! counts with them.

use super::builder::{DeviceSettings, Graphs, Spec};
use super::report::CallExecutor;
use crate::dtype::{Dtype, PartialDtype};
use crate::error::PlanError;
use crate::plan::{ReceiveMode, Strategy, SumOrder};
use crate::topology::Route;

/// A feature that settings or a call ask of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Feature {
    /// Rows by local expert ([`RowLayout`](crate::plan::RowLayout)).
    ExpertMajor,
    /// One row per token and rank ([`RowLayout`](crate::plan::RowLayout)).
    RankMajor,
    /// Receive memory within a budget ([`ReceiveMode::Budget`]).
    Budget,
    /// Slots for another number of rows than a rank may have tokens ([`ReceiveMode::Slots`]).
    ScarceSlots,
    /// Sums by expert, of rows that lie by expert ([`SumOrder::Expert`]).
    OrderExpert,
    /// Sums by rank, of rows that lie by expert ([`SumOrder::Rank`]).
    OrderRank,
    /// Sums by node ([`SumOrder::Node`]).
    OrderNode,
    /// Partial sums in bf16 ([`PartialDtype::Bf16`]).
    RoundedPartials,
    /// Segments of aligned size.
    Alignment,
    /// Relays ([`Route::Pxn`]).
    Relays,
    /// Relays that copy spans: an option of host threads, which else copy rows one by one. Copy
    /// engines always copy runs in relay order, and a kernel makes visible order
    /// ([`ExpertRows::arrivals`](super::ExpertRows::arrivals)).
    Spans,
    /// Dispatch by all-gather ([`Strategy::AllGather`]).
    AllGather,
    /// Dispatch of rows in fp8.
    Fp8,
    /// Rows that no sum can be made of ([`Dtype::Bytes`]).
    Bytes,
    /// Combines that multiply rows with routing weights.
    WeightedCombine,
    /// A limit of dispatches in flight
    /// ([`max_in_flight`](super::ExpertParallelBuilder::max_in_flight)). Elsewhere as many are
    /// alive as there is memory for or, in slots, one.
    MaxInFlight,
    /// A device heap whose size is a setting, from which other libraries allocate, too
    /// ([`device_heap`](super::ExpertParallelBuilder::device_heap),
    /// [`heap_allocator`](crate::ExpertParallel::heap_allocator)).
    DeviceHeap,
    /// A priority of the instance's own stream
    /// ([`priority`](super::ExpertParallelBuilder::priority)).
    Priority,
    /// A limit of the blocks of kernels
    /// ([`max_blocks`](super::ExpertParallelBuilder::max_blocks)).
    MaxBlocks,
    /// [`ExpertParallel::prepare`](crate::ExpertParallel::prepare) and
    /// [`dispatch_cached`](crate::ExpertParallel::dispatch_cached).
    CachedDispatch,
    /// [`ExpertParallel::dispatch_backward`](crate::ExpertParallel::dispatch_backward) and
    /// [`combine_backward`](crate::ExpertParallel::combine_backward).
    Gradients,
    /// [`ExpertParallel::set_expert_map`](crate::ExpertParallel::set_expert_map).
    ExpertMaps,
    /// [`ExpertParallel::mask`](crate::ExpertParallel::mask).
    RankMask,
    /// [`ExpertParallel::token_buffer`](crate::ExpertParallel::token_buffer): tokens that NICs read
    /// in place, and on a device copy engines, too, where they go in runs.
    TokenBuffers,
    /// Sizes that stay on the device
    /// ([`PendingDispatch::finish_async`](super::PendingDispatch::finish_async)), and calls that
    /// are captured into a CUDA graph.
    Capture,
    /// [`ExpertParallel::release`](crate::ExpertParallel::release) in place of a combine, where the
    /// next call would else overwrite what landed: in fixed slots. Elsewhere each dispatch has
    /// memory of its own, which is given back when rows and handle are dropped, and no rank waits
    /// for a combine.
    Release,
    /// [`ExpertParallel::set_stream`](crate::ExpertParallel::set_stream): calls on another stream
    /// of the device.
    Streams,
    /// [`ExpertParallel::floor_bench`](crate::ExpertParallel::floor_bench): the floor of a call, by
    /// threads of the host that copy its bytes and sum its rows. Copy engines and kernels have no
    /// such floor on a host: `sidelane gpu-check` measures theirs.
    Floor,
}

impl Feature {
    /// All features.
    pub const ALL: [Feature; 28] = [
        Feature::ExpertMajor,
        Feature::RankMajor,
        Feature::Budget,
        Feature::ScarceSlots,
        Feature::OrderExpert,
        Feature::OrderRank,
        Feature::OrderNode,
        Feature::RoundedPartials,
        Feature::Alignment,
        Feature::Relays,
        Feature::Spans,
        Feature::AllGather,
        Feature::Fp8,
        Feature::Bytes,
        Feature::WeightedCombine,
        Feature::MaxInFlight,
        Feature::DeviceHeap,
        Feature::Priority,
        Feature::MaxBlocks,
        Feature::CachedDispatch,
        Feature::Gradients,
        Feature::ExpertMaps,
        Feature::RankMask,
        Feature::TokenBuffers,
        Feature::Capture,
        Feature::Release,
        Feature::Streams,
        Feature::Floor,
    ];

    /// Name, and whether host stepper, enqueuer and constant program, in fixed slots and within a
    /// budget, have it: the table.
    const fn row(self) -> (&'static str, [bool; 4]) {
        let (yes, no) = (true, false);
        match self {
            Feature::ExpertMajor => ("expert-major rows", [yes, yes, no, yes]),
            Feature::RankMajor => ("rank-major rows", [yes, yes, yes, no]),
            Feature::Budget => ("a receive budget", [yes, yes, no, yes]),
            Feature::ScarceSlots => ("fewer or more slots than tokens", [yes, no, no, no]),
            Feature::OrderExpert => ("sums by expert", [yes, yes, no, no]),
            Feature::OrderRank => ("sums by rank", [yes, yes, yes, yes]),
            Feature::OrderNode => ("sums by node", [yes, yes, no, no]),
            Feature::RoundedPartials => ("partial sums in bf16", [yes, yes, no, yes]),
            Feature::Alignment => ("aligned segments", [yes, yes, no, yes]),
            Feature::Relays => ("relays (route pxn)", [yes, yes, no, no]),
            Feature::Spans => ("relays that copy spans", [yes, no, no, no]),
            Feature::AllGather => ("dispatch by all-gather", [yes, no, no, no]),
            Feature::Fp8 => ("dispatch in fp8", [yes, yes, no, no]),
            Feature::Bytes => ("rows of bytes", [yes, yes, no, no]),
            Feature::WeightedCombine => ("weighted combine", [yes, yes, no, no]),
            Feature::MaxInFlight => ("a limit of dispatches (max_in_flight)", [no, yes, no, no]),
            Feature::DeviceHeap => ("a device heap (device_heap)", [no, yes, no, no]),
            Feature::Priority => ("a priority of copies (priority)", [no, yes, no, no]),
            Feature::MaxBlocks => ("a limit of blocks (max_blocks)", [no, yes, yes, yes]),
            Feature::CachedDispatch => ("cached dispatch", [yes, yes, no, no]),
            Feature::Gradients => ("gradients", [yes, yes, no, no]),
            Feature::ExpertMaps => ("another expert map", [yes, yes, no, no]),
            Feature::RankMask => ("a rank mask", [yes, yes, yes, yes]),
            Feature::TokenBuffers => ("token buffers", [yes, yes, no, no]),
            Feature::Capture => ("sizes on the device, and capture", [no, no, yes, yes]),
            Feature::Release => ("release without combine", [no, no, yes, yes]),
            Feature::Streams => ("calls on several streams", [no, yes, yes, yes]),
            Feature::Floor => ("the floor", [yes, no, no, no]),
        }
    }

    /// Its name in errors and tables.
    pub const fn name(self) -> &'static str {
        self.row().0
    }

    /// Whether an executor has it, in one mode at least.
    pub const fn is_served_by(self, executor: CallExecutor) -> bool {
        let [host, enqueuer, slots, budget] = self.row().1;
        match executor {
            CallExecutor::HostStepper => host,
            CallExecutor::Enqueuer => enqueuer,
            CallExecutor::ConstantProgram => slots || budget,
        }
    }

    /// Whether an executor has it in this mode.
    pub fn is_served_in(self, executor: CallExecutor, mode: ReceiveMode) -> bool {
        let [.., slots, budget] = self.row().1;
        match (executor, mode.slots()) {
            (CallExecutor::ConstantProgram, Some(_)) => slots,
            (CallExecutor::ConstantProgram, None) => budget,
            _ => self.is_served_by(executor),
        }
    }

    /// Refuses what an executor does not have.
    pub(super) fn require(self, executor: CallExecutor) -> Result<(), PlanError> {
        if self.is_served_by(executor) { Ok(()) } else { Err(self.refused_by(executor)) }
    }

    fn refused_by(self, executor: CallExecutor) -> PlanError {
        let place = if executor == CallExecutor::HostStepper { "the host" } else { "a device" };
        PlanError::NotAvailable { feature: self.name(), place, executor: executor.name() }
    }

    /// Whether these settings ask for it.
    fn is_asked(self, spec: &Spec, device: &DeviceSettings) -> bool {
        match self {
            Feature::ExpertMajor => !spec.layout.is_per_rank(),
            Feature::RankMajor => spec.layout.is_per_rank(),
            Feature::Budget => spec.mode.budget().is_some(),
            Feature::ScarceSlots => {
                matches!(spec.mode, ReceiveMode::Slots { rows, .. } if rows != spec.max_tokens)
            }
            Feature::OrderExpert => spec.sum_order == SumOrder::Expert && !spec.layout.is_per_rank(),
            Feature::OrderRank => spec.sum_order == SumOrder::Rank,
            Feature::OrderNode => spec.sum_order == SumOrder::Node,
            Feature::RoundedPartials => {
                spec.sum_order.has_partials() && spec.partial_dtype == PartialDtype::Bf16
            }
            Feature::Alignment => spec.align > 1,
            Feature::Relays => spec.route == Route::Pxn,
            Feature::Spans => spec.coalesce_relays,
            Feature::AllGather => spec.strategy == Strategy::AllGather,
            Feature::Fp8 => spec.record.is_some(),
            Feature::Bytes => spec.dtype == Dtype::Bytes,
            Feature::WeightedCombine => spec.weighted,
            Feature::MaxInFlight => device.max_in_flight.is_some(),
            Feature::DeviceHeap => device.device_heap.or(device.device_heap_limit).is_some(),
            Feature::Priority => device.priority.is_some(),
            Feature::MaxBlocks => spec.max_blocks.is_some(),
            Feature::Capture => device.graphs != Graphs::Off,
            _ => false,
        }
    }

    /// Refuses the first setting that an executor does not have.
    pub(super) fn check(
        (spec, device): (&Spec, &DeviceSettings),
        executor: CallExecutor,
    ) -> Result<(), PlanError> {
        let mut asked = Feature::ALL.into_iter().filter(|feature| feature.is_asked(spec, device));
        asked.try_for_each(|feature| match feature.is_served_in(executor, spec.mode) {
            true => Ok(()),
            false => Err(feature.refused_by(executor)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_has_every_feature_once_and_somewhere() {
        for (at, feature) in Feature::ALL.into_iter().enumerate() {
            let (name, served) = feature.row();
            assert!(served.contains(&true), "{name}");
            assert!(Feature::ALL[..at].iter().all(|other| other.name() != name), "{name}");
        }
    }

    #[test]
    fn refused_feature_names_place_and_executor() {
        let refused = Feature::Gradients.require(CallExecutor::ConstantProgram).unwrap_err();
        assert_eq!(refused.to_string(), "not available on a device (constant-program): gradients");
        assert_eq!(Feature::Gradients.require(CallExecutor::HostStepper), Ok(()));
    }
}
