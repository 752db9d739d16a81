//! Building an `ExpertParallel`: settings, checked here, and compared between all ranks.

use std::sync::Arc;

use super::device::{EnqueuedSettings, HeapLoad};
use super::{CallExecutor, ExpertParallel, Feature};
use crate::device::{Priority, Stream};
use crate::dtype::{Dtype, Fp8RowShape, PartialDtype};
use crate::ep::device::slots::SlotExchange;
use crate::error::{CallKind, Error, PlanError};
use crate::plan::{ExpertMap, PulledSums, ReceiveMode, RowLayout, RowMetadata, RowSizes, Strategy, SumOrder};
use crate::schedule::{CallProperties, Payload};
use crate::topology::{Paths, Route};
use crate::world::Group;

/// Settings that are the same in every call.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub top_k: u32,
    pub hidden: usize,
    pub dtype: Dtype,
    pub sum_order: SumOrder,
    pub align: u32,
    pub max_tokens: u32,
    pub weighted: bool,
    pub map: Arc<ExpertMap>,
    pub route: Route,
    pub partial_dtype: PartialDtype,
    pub layout: RowLayout,
    pub mode: ReceiveMode,
    pub record: Option<Fp8RowShape>,
    pub coalesce_relays: bool,
    pub strategy: Strategy,
    /// Every row goes to every rank; `top_k` is then the number of choices that go along, and 0 if
    /// none do.
    pub gathers: bool,
    /// Limit on the blocks of each kernel, if there is one. Ranks may choose differently.
    pub max_blocks: Option<u32>,
    /// Each rank sums a token's rows before they return.
    pub rank_sums: bool,
    /// On a device, relays sum a token's rows of their node before they return.
    pub node_sums: bool,
}

impl Spec {
    /// Metadata of each row.
    pub fn metadata(&self) -> RowMetadata {
        if self.gathers {
            RowMetadata::Gathered
        } else if self.rank_sums {
            RowMetadata::Summed
        } else {
            RowMetadata::of(self.layout, self.mode, self.coalesce_relays)
        }
    }

    /// Whether copy engines return fewer bytes if a kernel first sums a token's rows at each
    /// rank. That changes no bit where sums are by rank. Partial sums of another type than rows are
    /// longer.
    pub fn gains_by_rank_sums(&self) -> bool {
        let bins = self.layout.most_bins(self.map.slots());
        let several = self.map.ranks() > 1 && self.rows_of_token(bins) > 1;
        let gains = several && self.partial_dtype.dtype() == self.dtype;
        self.sum_order.per_partial(gains, false).unwrap_or_default()
    }

    /// Whether fewer bytes cross on the return if relays of devices, to ranks among these `paths`,
    /// sum a token's rows of their node. That changes no bit where sums are by node. The sum at the
    /// source adds them to own rows, so they have one type.
    pub fn gains_by_node_sums(&self, paths: &Paths<'_>) -> bool {
        let relays = paths.route() == Route::Pxn && paths.is_multi_node();
        let gains = relays && self.top_k > 1 && self.partial_dtype.dtype() == self.dtype;
        self.sum_order.per_partial(false, gains).unwrap_or_default()
    }

    /// Entries of a token at most.
    pub fn entries_of_token(&self) -> u32 {
        if self.gathers { self.map.ranks() } else { self.top_k }
    }

    /// Rows of a token at most, at a rank of so many bins.
    pub fn rows_of_token(&self, bins: u32) -> u32 {
        if self.gathers { 1 } else { bins.min(self.top_k) }
    }

    /// Columns and type of the rows of a call of this kind.
    pub fn sent(&self, kind: CallKind) -> (usize, Dtype) {
        match (self.record, CallProperties::of(kind).payload) {
            (Some(shape), Payload::Tokens) => (shape.bytes(), Dtype::Bytes),
            _ => (self.hidden, self.dtype),
        }
    }

    /// Sizes of what moves in a call of this kind, where relays sum to `partial_bytes`.
    pub fn sizing(&self, kind: CallKind, partial_bytes: Option<u64>) -> RowSizes {
        let (columns, dtype) = self.sent(kind);
        let moves = CallProperties::of(kind).payload != Payload::Nothing;
        let row_bytes = if moves { (columns * dtype.size()) as u64 } else { 0 };
        let return_words = if self.gathers { 0 } else { self.layout.return_words(self.top_k) };
        let words_out = self.metadata().words(self.top_k);
        let (return_bytes, rank_sums) = (self.row_bytes(), self.rank_sums);
        let pulled_bytes = PulledSums::CHUNK_BYTES;
        RowSizes { row_bytes, return_bytes, words_out, return_words, partial_bytes, rank_sums, pulled_bytes }
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> u64 {
        (self.hidden * self.dtype.size()) as u64
    }
}

/// Settings of an [`ExpertParallel`]. All ranks must choose the same, except the stream, its
/// [`priority`](Self::priority) and [`max_blocks`](Self::max_blocks).
#[derive(Clone, Debug)]
pub struct ExpertParallelBuilder<'g> {
    group: &'g Group,
    experts: u32,
    map: Option<ExpertMap>,
    fp8: bool,
    spec: Spec,
    stream: Option<Arc<Stream>>,
    device: DeviceSettings,
}

/// Settings that instances on a device have besides their stream.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DeviceSettings {
    pub graphs: Graphs,
    pub max_in_flight: Option<u32>,
    pub device_heap: Option<u64>,
    pub device_heap_limit: Option<u64>,
    heap_load: HeapLoad,
    pub priority: Option<Priority>,
}

/// Default limit of dispatches that may be alive at once on a device.
const MAX_IN_FLIGHT: u32 = 64;

/// How CUDA graphs may hold the calls of an instance on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Graphs {
    /// Not at all: the caller finishes each call, which moves what it needs.
    #[default]
    Off,
    /// Every call moves full slots, so that all its addresses and sizes are constants.
    Slots,
}

/// Executor of an instance's calls, with the settings that only it has.
pub(super) enum Instance {
    Host,
    Enqueued(EnqueuedSettings),
    Slots(Arc<Stream>),
}

impl Instance {
    fn executor(&self) -> CallExecutor {
        match self {
            Instance::Host => CallExecutor::HostStepper,
            Instance::Enqueued(_) => CallExecutor::Enqueuer,
            Instance::Slots(_) => CallExecutor::ConstantProgram,
        }
    }
}

impl<'g> ExpertParallelBuilder<'g> {
    pub(super) fn new(group: &'g Group) -> Self {
        let spec = Spec {
            top_k: 1,
            hidden: 0,
            dtype: Dtype::Bf16,
            sum_order: SumOrder::default(),
            align: 1,
            max_tokens: 4096,
            weighted: false,
            // `build` makes the map, which is checked there; this one always exists.
            map: Arc::new(ExpertMap::contiguous(1, group.size()).expect("a group has this rank")),
            route: Route::Direct,
            partial_dtype: PartialDtype::F32,
            layout: RowLayout::default(),
            mode: ReceiveMode::Exact,
            record: None,
            coalesce_relays: false,
            strategy: Strategy::AllToAll,
            gathers: false,
            max_blocks: None,
            rank_sums: false,
            node_sums: false,
        };
        ExpertParallelBuilder {
            group,
            experts: 0,
            map: None,
            fp8: false,
            spec,
            stream: None,
            device: DeviceSettings::default(),
        }
    }

    /// Settings of an instance, for this group and map.
    pub(super) fn rebuilt(
        group: &'g Group,
        map: ExpertMap,
        (spec, stream, device): (&Spec, Option<&Arc<Stream>>, DeviceSettings),
    ) -> Self {
        let (experts, fp8) = (spec.map.experts(), spec.record.is_some());
        // The build of the instance derives this from the settings.
        let (spec, stream) = (Spec { rank_sums: false, node_sums: false, ..spec.clone() }, stream.cloned());
        ExpertParallelBuilder { group, experts, map: Some(map), fp8, spec, stream, device }
    }

    /// Number of experts, in contiguous blocks over the ranks unless there is a map.
    pub fn experts(mut self, experts: u32) -> Self {
        self.experts = experts;
        self
    }

    /// Where experts live, if not in contiguous blocks. Sets the number of experts, too: one that
    /// was named must be the same.
    pub fn expert_map(mut self, map: ExpertMap) -> Self {
        self.map = Some(map);
        self
    }

    /// Choices per token.
    pub fn top_k(mut self, top_k: u32) -> Self {
        self.spec.top_k = top_k;
        self
    }

    /// Elements of a row. A row must be a multiple of 16 bytes.
    pub fn hidden(mut self, hidden: usize) -> Self {
        self.spec.hidden = hidden;
        self
    }

    /// Element type of a row. Default: bf16.
    pub fn dtype(mut self, dtype: Dtype) -> Self {
        self.spec.dtype = dtype;
        self
    }

    /// Order in which a token's rows are summed. Default: by expert id.
    pub fn sum_order(mut self, sum_order: SumOrder) -> Self {
        self.spec.sum_order = sum_order;
        self
    }

    /// Type of partial sums, where [`ExpertParallelBuilder::sum_order`] makes them: each is rounded
    /// to it, whether it travels or not. Default: `f32`, which rounds nothing. Does not apply to
    /// [`SumOrder::Expert`]. On a device one sum for each token and rank returns with
    /// [`SumOrder::Rank`] if this is the type of rows, and else all rows.
    pub fn partial_dtype(mut self, partial_dtype: PartialDtype) -> Self {
        self.spec.partial_dtype = partial_dtype;
        self
    }

    /// In which order a rank sees the rows that it received. Default: [`RowLayout::ExpertMajor`].
    pub fn layout(mut self, layout: RowLayout) -> Self {
        self.spec.layout = layout;
        self
    }

    /// Dispatch sends rows in fp8, each a record of values and scales ([`Fp8RowShape`]): `x` is
    /// then `[tokens, record]`, in bytes, as [`ExpertParallel::quantize`] makes it. On a device it
    /// may also be `[tokens, hidden]`, of which packing makes records. What comes back is rows of
    /// [`dtype`](Self::dtype). Default: off.
    pub fn fp8(mut self, fp8: bool) -> Self {
        self.fp8 = fp8;
        self
    }

    /// How receive memory is sized. Default: [`ReceiveMode::Exact`].
    pub fn mode(mut self, mode: ReceiveMode) -> Self {
        self.spec.mode = mode;
        self
    }

    /// Each expert's segment, or rank-major the only one, starts at and is padded to a multiple of
    /// this many rows. Default: 1.
    pub fn align(mut self, rows: u32) -> Self {
        self.spec.align = rows;
        self
    }

    /// The most tokens a rank will pass in one call. With more than one node under [`Route::Pxn`]
    /// it sizes the control window, by what may go with all their rows: about
    /// `16 x max_tokens x top_k` bytes for each rank that one rank relays and as much for each of
    /// its own relays; rank-major, `top_k` times as much. In fixed slots on a device as many rows
    /// move to each rank in every call, so name it there. Default: 4096.
    pub fn max_tokens(mut self, tokens: u32) -> Self {
        self.spec.max_tokens = tokens;
        self
    }

    /// Combine multiplies each row with its routing weight. Default: off, weights are applied
    /// inside the experts.
    pub fn weighted(mut self, weighted: bool) -> Self {
        self.spec.weighted = weighted;
        self
    }

    /// How rows reach other nodes. Default: [`Route::Direct`].
    pub fn route(mut self, route: Route) -> Self {
        self.spec.route = route;
        self
    }

    /// Relays copy rows in spans, each one copy of rows that lie next to each other on both
    /// sides: what a copy engine can do. So that these are few, rows cross in relay order
    /// ([`RelayOrder`](crate::plan::RelayOrder)), and lie in it at the receiver: by source rank,
    /// but not by token. [`ExpertRows::index`](super::ExpertRows::index) says which is which. For
    /// [`RowLayout::RankMajor`] over [`Route::Pxn`]. Default: off.
    pub fn coalesce_relays(mut self, coalesce_relays: bool) -> Self {
        self.spec.coalesce_relays = coalesce_relays;
        self
    }

    /// How rows reach the ranks of their experts. Default: [`Strategy::AllToAll`].
    ///
    /// [`Strategy::AllGather`] is another way out; what is seen, every sum and every gradient are
    /// the same to the bit. Combine is reduce-scatter that leaves out the zeros, and what follows
    /// the handle of an earlier dispatch goes its way, too. While a dispatch lasts, the pool holds
    /// all ranks' tokens beside this rank's rows. That there is no room for these, or more of them
    /// than the budget, is known only when tokens have moved: the error is the same on every rank,
    /// and nothing of the call is visible. Fixed slots and spans are another way by themselves, and
    /// are refused.
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.spec.strategy = strategy;
        self
    }

    /// Rows lie in memory of this stream's device, and calls go on the stream. Default: rows lie on
    /// the host.
    ///
    /// Mode and [`graphs`](Self::graphs) choose how calls are carried out ([`CallExecutor`]), and
    /// [`Feature`] says what that cannot do.
    ///
    /// In slots a stream may wait for calls that another rank has yet to enqueue. So ranks that
    /// share a device keep their tensors until all of them have finished: freeing memory waits
    /// until the device is idle, and the rank that frees cannot enqueue meanwhile.
    ///
    /// All threads of a rank make the calls of all instances, and launch other collectives, in one
    /// order, the same at all ranks.
    pub fn on(mut self, stream: &Arc<Stream>) -> Self {
        self.stream = Some(Arc::clone(stream));
        self
    }

    /// On a device with a budget: whether calls may be captured into CUDA graphs, or left
    /// unfinished ([`PendingDispatch::finish_async`](super::PendingDispatch::finish_async)).
    /// Default: [`Graphs::Off`]. Calls in fixed slots can always be.
    ///
    /// [`Graphs::Slots`] is for [`SumOrder::Rank`] and [`Route::Direct`]. Each rank then has a slot
    /// row for every token that another may send it, and [`max_tokens`](Self::max_tokens) rows move
    /// to each rank in every call. One dispatch is in flight. Within the budget rows, weights,
    /// counts and sums are those of the host to the bit. What was dropped stands in
    /// [`Handle::dropped_mask`](super::Handle::dropped_mask); a call that is refused because a rank
    /// is over its budget leaves zeros at all ranks, and [`Handle::status`](super::Handle::status)
    /// says so.
    pub fn graphs(mut self, graphs: Graphs) -> Self {
        self.device.graphs = graphs;
        self
    }

    /// On a device, with exact sizes or a budget that no graphs hold: dispatches that may be alive
    /// at once. Each has memory for the order of its rows, `3 x max_tokens x top_k x 4` bytes of
    /// the device (`4 x` where combines are weighted), and for what goes with the rows that may
    /// land: 4 bytes of each or, rank-major, `16 x top_k`. Default: 64.
    pub fn max_in_flight(mut self, dispatches: u32) -> Self {
        self.device.max_in_flight = Some(dispatches);
        self
    }

    /// On a device, likewise: bytes of the device's memory in which dispatches receive and
    /// experts write. In a group of several nodes whose NICs do not reach the device, as much
    /// memory of the host is pinned beside it, and beside what dispatches in flight have; over
    /// `pxn` a dispatch takes room for its rows twice, and for what is staged.
    ///
    /// Default: two dispatches of [`max_tokens`](Self::max_tokens) with their experts' outputs, or
    /// one and its gradients, in whole 2 MiB. It does not grow with
    /// [`max_in_flight`](Self::max_in_flight), so set it where more of them are alive.
    ///
    /// ```text
    /// rows     = max_tokens x top_k x 1.5      and pads; at most all that any routing brings:
    ///                                          ranks x max_tokens x min(top_k, experts)
    /// dispatch = rows x (bytes that go out + bytes that return + 4)
    /// default  = 2 x dispatch
    /// ```
    ///
    /// - 1.5 is the margin for uneven routing. A single dispatch may bring three times as many rows
    ///   as even routing does, and two or three ranks may receive anything.
    /// - A rank with more than its share of the experts sets `rows`. A budget takes the place of
    ///   `rows`. Rank-major rows are at most `ranks x max_tokens`, and return `4 x top_k` bytes.
    /// - Small instances take more, up to 256 MiB: all that `2 x max_in_flight` dispatches of any
    ///   routing need.
    ///
    /// 8 ranks of 4,096 tokens with 8 choices and rows of 7,168 bf16 take 2.6 GiB each, and one
    /// rank with rows of 2,048 bf16 takes 514 MiB.
    pub fn device_heap(mut self, bytes: u64) -> Self {
        self.device.device_heap = Some(bytes);
        self
    }

    /// On a device, likewise: bytes to which the device heap may grow. It grows where a call would
    /// lack memory for its rows, or for the outputs that handles may ask for: at all ranks, before
    /// anything moves, by whole chunks of 2 MiB or a sixteenth of the growth allowed. What lies in
    /// it stays where it is. Calls that have memory neither ask nor map anything.
    ///
    /// Default: what two dispatches of any routing need, at most 4 times the default of
    /// [`device_heap`](Self::device_heap). A heap whose size is set does not grow unless this is
    /// set, too; in a group of several nodes no heap grows.
    ///
    /// Memory that an output, a token buffer or a [`HeapAllocator`](super::HeapAllocator) asks for
    /// is no call of all ranks, so the heap does not grow for it at once: the next dispatch makes
    /// room for what was refused.
    pub fn device_heap_limit(mut self, bytes: u64) -> Self {
        self.device.device_heap_limit = Some(bytes);
        self
    }

    /// Load for which the default of the device heap has memory.
    pub(crate) fn heap_load(mut self, load: HeapLoad) -> Self {
        self.device.heap_load = load;
        self
    }

    /// On a device: blocks of each kernel, at most, so that work on other streams keeps its
    /// multiprocessors meanwhile. A block has 256 threads and goes through more rows the fewer
    /// there are. No bit depends on it. Default: as many as the device has at work, which ends the
    /// kernel soonest where it runs alone.
    pub fn max_blocks(mut self, blocks: u32) -> Self {
        self.spec.max_blocks = Some(blocks);
        self
    }

    /// On a device, with exact sizes or a budget that no graphs hold: priority of the instance's
    /// own stream, which has copy engines move rows. Kernels go on the caller's stream, with its
    /// priority. Default: [`Priority::Highest`].
    pub fn priority(mut self, priority: Priority) -> Self {
        self.device.priority = Some(priority);
        self
    }

    /// Allocates what the instance needs and lays missing connections. Collective.
    ///
    /// # Errors
    /// [`PlanError`] if a setting cannot be used, [`PlanError::NotAvailable`] for one that its
    /// place does not have, [`CallError::ConfigsDiffer`](crate::error::CallError::ConfigsDiffer) if
    /// ranks chose differently, [`MemoryError::OutOfSpace`](crate::error::MemoryError) if a rank
    /// has no room for the control window, [`MemoryError::DeviceFull`](crate::error::MemoryError)
    /// if a device lacks so much free memory. [`DeviceError`](crate::error::DeviceError) where the
    /// device lacks something; [`LaneError::PeerUnsupported`](crate::error::LaneError) or
    /// [`MemoryError::NotUsable`](crate::error::MemoryError) on the other ranks.
    pub fn build(mut self) -> Result<ExpertParallel, Error> {
        self.spec.record = self.fp8.then(|| Fp8RowShape::new(self.spec.hidden as u32));
        let instance = self.instance();
        let checked = self.check().and_then(|()| self.check_instance(&instance));
        let map = match (&checked, self.map.take()) {
            (Err(_), _) => None,
            // The mask is that of an instance, and a new one has none.
            (Ok(()), Some(map)) => map.with_active(&vec![true; map.ranks() as usize]).ok(),
            (Ok(()), None) => ExpertMap::contiguous(self.experts, self.group.size()).ok(),
        };
        // A rank with bad settings still takes part in the comparison: the others are told, not
        // left waiting.
        self.compare(map.as_ref())?;
        checked?;
        let ExpertParallelBuilder { group, mut spec, device, .. } = self;
        if let Some(map) = map {
            spec.map = Arc::new(map);
        }
        if matches!(instance, Instance::Host) {
            // Rows and outputs of a balanced call, and half as much again.
            let choices = 3 * u64::from(spec.max_tokens) * u64::from(spec.top_k);
            group.touch_pools(choices.saturating_mul(spec.row_bytes()));
        }
        ExpertParallel::new(group, spec, instance, device)
    }

    /// The executor for these settings, by place and mode.
    fn instance(&self) -> Instance {
        match &self.stream {
            None => Instance::Host,
            Some(stream) if self.is_constant() => Instance::Slots(Arc::clone(stream)),
            Some(stream) => Instance::Enqueued(EnqueuedSettings {
                stream: Arc::clone(stream),
                max_in_flight: self.device.max_in_flight.unwrap_or(MAX_IN_FLIGHT),
                device_heap: self.device.device_heap,
                device_heap_limit: self.device.device_heap_limit,
                load: self.device.heap_load,
                priority: self.device.priority.unwrap_or(Priority::Highest),
            }),
        }
    }

    /// Whether calls on a device are programs of constants.
    fn is_constant(&self) -> bool {
        let mode = self.spec.mode;
        mode.slots().is_some() || mode.budget().is_some() && self.device.graphs == Graphs::Slots
    }

    /// Refuses features that the executor lacks, and numbers that it cannot count with.
    fn check_instance(&self, instance: &Instance) -> Result<(), PlanError> {
        Feature::check((&self.spec, &self.device), instance.executor())?;
        if matches!(instance, Instance::Slots(_)) {
            SlotExchange::check_sizes(&self.spec)?;
        }
        Ok(())
    }

    fn check(&self) -> Result<(), PlanError> {
        let spec = &self.spec;
        let bad = |parameter, seen: u64, expected| Err(PlanError::BadParameter { parameter, seen, expected });
        if let Some(map) = &self.map {
            if map.ranks() != self.group.size() {
                return bad("ranks of the expert map", map.ranks().into(), "the size of the group");
            }
            if self.experts != 0 && map.experts() != self.experts {
                let expected = "as many as were named, or as before";
                return bad("experts of the expert map", map.experts().into(), expected);
            }
        } else if self.experts == 0 {
            return bad("experts", 0, "at least 1");
        }
        let experts = self.map.as_ref().map_or(self.experts, ExpertMap::experts);
        if experts > i32::MAX as u32 {
            return bad("experts", experts.into(), "below 2^31");
        }
        if u64::from(experts) * 4 > self.group.shared.options.config.symmetric {
            return bad("experts", experts.into(), "fewer, or a larger SIDELANE_SYMMETRIC for counts");
        }
        if spec.top_k == 0 || spec.top_k > experts {
            return bad("top_k", spec.top_k.into(), "between 1 and the number of experts");
        }
        if spec.row_bytes() == 0 || !spec.row_bytes().is_multiple_of(16) {
            return bad("bytes of a row", spec.row_bytes(), "a positive multiple of 16");
        }
        if spec.align == 0 {
            return bad("align", 0, "at least 1");
        }
        if spec.max_blocks == Some(0) {
            return bad("max_blocks", 0, "at least 1");
        }
        if u64::from(spec.max_tokens) * u64::from(spec.top_k) > u64::from(u32::MAX / 2) {
            return bad("max_tokens", spec.max_tokens.into(), "fewer: entries are counted in 32 bits");
        }
        if spec.partial_dtype == PartialDtype::Bf16 && !spec.partial_dtype.carries(spec.dtype) {
            return bad("partial_dtype", spec.partial_dtype as u64, "f32, unless rows are bf16");
        }
        spec.layout.check(spec.weighted, spec.coalesce_relays, spec.route)?;
        if spec.strategy == Strategy::AllGather && spec.mode.slots().is_some() {
            return bad("strategy", 1, "all-to-all: with fixed slots no rank knows which rank gets a row");
        }
        if spec.strategy == Strategy::AllGather && spec.coalesce_relays {
            return bad("strategy", 1, "all-to-all: only its relays copy spans");
        }
        if let Some(slots) = spec.mode.slots() {
            // Experts may all move to one rank.
            let slots_of_map = self.map.as_ref().map_or(self.experts, ExpertMap::slots);
            let bins = spec.layout.most_bins(slots_of_map);
            let of_bin = u64::from(slots) * u64::from(self.group.size());
            let rows = of_bin.next_multiple_of(spec.align.into()).saturating_mul(bins.into());
            if slots == 0 || rows > u64::from(u32::MAX / 2) {
                return bad("slots", slots.into(), "at least 1, and fewer: rows are counted in 32 bits");
            }
        }
        if spec.record.is_some() && spec.dtype == Dtype::Bytes {
            return Err(PlanError::NoArithmetic { dtype: spec.dtype });
        }
        if spec.weighted && spec.dtype == Dtype::Bytes {
            return Err(PlanError::NoArithmetic { dtype: spec.dtype });
        }
        Ok(())
    }

    fn compare(&self, map: Option<&ExpertMap>) -> Result<(), Error> {
        let spec = &self.spec;
        let settings: [(&'static str, u64); 20] = [
            ("whether their settings can be used (1: yes)", map.is_some().into()),
            ("experts", map.map_or(0, ExpertMap::experts).into()),
            ("the expert map", map.map_or(0, ExpertMap::digest)),
            ("top_k", spec.top_k.into()),
            ("hidden", spec.hidden as u64),
            ("dtype", spec.dtype as u64),
            ("sum_order", spec.sum_order as u64),
            ("align", spec.align.into()),
            ("max_tokens", spec.max_tokens.into()),
            ("weighted", spec.weighted.into()),
            ("route", spec.route as u64),
            ("partial_dtype", spec.partial_dtype as u64),
            ("fp8", spec.record.is_some().into()),
            ("layout", spec.layout as u64),
            ("mode", spec.mode.words()[0]),
            ("rows of the mode", spec.mode.words()[1]),
            ("coalesce_relays", spec.coalesce_relays.into()),
            ("strategy", spec.strategy as u64),
            ("whether rows lie on a device (1: yes)", self.stream.is_some().into()),
            ("graphs", self.device.graphs as u64),
        ];
        self.group.alike(&settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::World;
    use crate::plan::Overflow;

    /// Every setting by its name. A new one has no place here until it is named.
    fn settings(builder: &ExpertParallelBuilder<'_>) -> Vec<(&'static str, String)> {
        fn text(value: &dyn std::fmt::Debug) -> String {
            format!("{value:?}")
        }
        // Group, map and stream are those of the caller; `fp8` is what the record is made of.
        let ExpertParallelBuilder { group: _, map: _, stream: _, experts, fp8, spec, device } = builder;
        let DeviceSettings { graphs, max_in_flight, device_heap, device_heap_limit, heap_load, priority } =
            device;
        let Spec {
            top_k,
            hidden,
            dtype,
            sum_order,
            align,
            max_tokens,
            weighted,
            map: _,
            route,
            partial_dtype,
            layout,
            mode,
            record: _,
            coalesce_relays,
            strategy,
            gathers: _,
            rank_sums: _,
            node_sums: _,
            max_blocks,
        } = spec;
        vec![
            ("experts", text(experts)),
            ("fp8", text(fp8)),
            ("graphs", text(graphs)),
            ("max_in_flight", text(max_in_flight)),
            ("device_heap", text(device_heap)),
            ("device_heap_limit", text(device_heap_limit)),
            ("heap_load", text(heap_load)),
            ("priority", text(priority)),
            ("top_k", text(top_k)),
            ("hidden", text(hidden)),
            ("dtype", text(dtype)),
            ("sum_order", text(sum_order)),
            ("align", text(align)),
            ("max_tokens", text(max_tokens)),
            ("weighted", text(weighted)),
            ("route", text(route)),
            ("partial_dtype", text(partial_dtype)),
            ("layout", text(layout)),
            ("mode", text(mode)),
            ("coalesce_relays", text(coalesce_relays)),
            ("strategy", text(strategy)),
            ("max_blocks", text(max_blocks)),
        ]
    }

    /// Names of the settings in which two builders differ.
    fn differences(a: &ExpertParallelBuilder<'_>, b: &ExpertParallelBuilder<'_>) -> Vec<&'static str> {
        let pairs = settings(a).into_iter().zip(settings(b));
        pairs.filter(|(a, b)| a != b).map(|(a, _)| a.0).collect()
    }

    #[test]
    fn instance_keeps_every_setting_in_a_rebuild() {
        let world = World::threads(1).unwrap().remove(0);
        let group = world.all().unwrap();
        let plain = || ExpertParallelBuilder::new(&group);
        let budget = ReceiveMode::Budget { rows: 64, overflow: Overflow::Drop };
        let sums = plain().experts(6).top_k(2).hidden(16).dtype(Dtype::F32).align(4).max_tokens(10);
        let sums = sums.weighted(true).mode(budget).route(Route::Pxn).sum_order(SumOrder::Node);
        let records = plain().experts(6).top_k(2).hidden(32).fp8(true).strategy(Strategy::AllGather);
        let spans = plain().experts(6).hidden(8).layout(RowLayout::RankMajor).route(Route::Pxn);
        let spans = spans.coalesce_relays(true).sum_order(SumOrder::Rank);
        let partial = plain().experts(6).hidden(8).sum_order(SumOrder::Node);
        let hosts = [sums, records, spans, partial.partial_dtype(PartialDtype::Bf16)];
        let of_device = plain().experts(6).graphs(Graphs::Slots).max_in_flight(3).device_heap(1 << 20);
        let of_device = of_device.device_heap_limit(2 << 20);
        let load = HeapLoad { landings: 5, outputs: 4 };
        let of_device = of_device.priority(Priority::Normal).max_blocks(5).heap_load(load);
        let mut set = differences(&of_device, &plain());
        for asked in hosts {
            set.extend(differences(&asked, &plain()));
            let ep = asked.clone().build().unwrap();
            let rebuilt = ep.rebuilt(&group, ep.expert_map().clone());
            assert_eq!(differences(&rebuilt, &asked), [""; 0]);
        }
        let ExpertParallelBuilder { spec, device, .. } = &of_device;
        let spec = Spec { map: Arc::new(ExpertMap::contiguous(6, 1).unwrap()), ..spec.clone() };
        let rebuilt = ExpertParallelBuilder::rebuilt(&group, (*spec.map).clone(), (&spec, None, *device));
        assert_eq!(differences(&rebuilt, &of_device), [""; 0]);
        let never: Vec<_> =
            settings(&plain()).into_iter().map(|(name, _)| name).filter(|name| !set.contains(name)).collect();
        assert_eq!(never, [""; 0], "this test asks for no value of theirs but the default");
    }
}
