//! Plans of choices by the device, against those of the host: bins, order, places and metadata to
//! the bit; and places and metadata of own rows once these have landed.

use sidelane::device::{ChoiceFault, PlaceArgs, PlanArgs, RunArgs, SortArgs};
use sidelane::error::PlanError;
use sidelane::gate::Routing;
use sidelane::plan::{Bins, ExpertMap, ReceiveMode, RowLayout, RowMetadata, RowRun, SortedRouting, SumOrder};
use sidelane::topology::NodeMap;

use crate::TestError;
use crate::device::gpu::{Bench, Guarded, POISON, same};
use crate::values::Random;

/// Choices of a rank, and where experts live.
#[derive(Clone, Debug)]
pub struct Case {
    /// Of the experts.
    pub map: ExpertMap,
    bins: Bins,
    layout: RowLayout,
    me: u32,
    /// Choices of a token.
    pub top_k: u32,
    /// Expert of each choice.
    pub ids: Vec<i32>,
    /// Weight of each choice.
    pub weights: Vec<f32>,
}

/// Memory of a plan.
pub struct Planned {
    order: Guarded,
    rows: Guarded,
    places: Guarded,
    metadata: Guarded,
    kept: Guarded,
    counts: Guarded,
    faults: Guarded,
}

/// Any bits that are a number, zeros and infinities among them.
fn any_number(random: &mut Random) -> f32 {
    let bits = random.next() as u32;
    let weight = f32::from_bits(bits);
    if weight.is_nan() { f32::from_bits(bits & 0xff80_0000) } else { weight }
}

impl Case {
    /// Random choices of a rank: one in five is dropped, the others of a token differ, and weights
    /// are any numbers. A token has no more choices than there are experts.
    pub fn of(
        random: &mut Random,
        (map, me): (ExpertMap, u32),
        (layout, order): (RowLayout, SumOrder),
        (tokens, top_k): (u32, u32),
    ) -> Self {
        let nodes = NodeMap::from_labels(&vec![0; map.ranks() as usize]);
        let bins = Bins::of_layout(layout, &map, order, &nodes);
        let mut ids: Vec<i32> = Vec::new();
        for _ in 0..tokens {
            let first = ids.len();
            while ids.len() < first + top_k as usize {
                let dropped = random.below(5) == 0;
                let id = if dropped { -1 } else { random.below(map.experts()) as i32 };
                if dropped || !ids[first..].contains(&id) {
                    ids.push(id);
                }
            }
        }
        let weights = ids.iter().map(|_| any_number(random)).collect();
        Case { map, bins, layout, me, top_k, ids, weights }
    }

    /// The same with up to three replicas of each expert. A rank may hold none, or be masked.
    ///
    /// # Errors
    /// None, unless the library refuses such a map.
    pub fn any(
        random: &mut Random,
        layout: RowLayout,
        (tokens, top_k): (u32, u32),
    ) -> Result<Self, PlanError> {
        let (ranks, experts) = (1 + random.below(9), top_k + random.below(70));
        let mut held = vec![Vec::new(); ranks as usize];
        for expert in 0..experts {
            for _ in 0..1 + random.below(3) {
                let slots: &mut Vec<u32> = &mut held[random.below(ranks) as usize];
                if !slots.contains(&expert) {
                    slots.push(expert);
                }
            }
        }
        let map = ExpertMap::from_slots(experts, &held)?;
        let me = random.below(ranks);
        let active: Vec<bool> = (0..ranks).map(|rank| rank == me || random.below(4) > 0).collect();
        let map = if random.below(3) == 0 { map.with_active(&active)? } else { map };
        let order = [SumOrder::Expert, SumOrder::Rank, SumOrder::Node][random.below(3) as usize];
        Ok(Self::of(random, (map, me), (layout, order), (tokens, top_k)))
    }

    /// Tokens times `top_k`.
    pub fn choices(&self) -> u32 {
        self.ids.len() as u32
    }

    fn metadata(&self) -> RowMetadata {
        RowMetadata::of(self.layout, ReceiveMode::Exact, false)
    }

    /// As the host sorts it.
    ///
    /// # Errors
    /// The first fault.
    pub fn sorted(&self) -> Result<SortedRouting, PlanError> {
        let routing = Routing::new(self.top_k, &self.ids[..], &self.weights[..])?;
        let mut sorted = SortedRouting::default();
        sorted.fill(&self.map, &self.bins, self.metadata(), self.me, &routing)?;
        Ok(sorted)
    }

    /// Has the device plan it.
    pub fn plan(&self, bench: &Bench) -> Result<Planned, TestError> {
        let Case { map, bins, layout, me, top_k, ids, weights } = self;
        let per_rank = layout.is_per_rank();
        let slots: Vec<Option<u32>> = (0..map.experts()).map(|expert| map.slot_for(*me, expert)).collect();
        let bin = |slot: u32| if per_rank { map.rank_of(slot) } else { slot };
        let local = |slot: u32| slot - map.slots_of(map.rank_of(slot)).start;
        let bin_of: Vec<u32> = slots.iter().map(|slot| slot.map_or(u32::MAX, bin)).collect();
        let local_of: Vec<u32> = slots.iter().map(|slot| slot.map_or(u32::MAX, local)).collect();
        let mut place_of = vec![0_u32; bins.count() as usize];
        for (place, &bin) in (0..).zip(bins.in_order()) {
            place_of[bin as usize] = place;
        }
        let [bin_of, local_of, place_of] =
            [bench.put(&bin_of)?, bench.put(&local_of)?, bench.put(&place_of)?];
        let (experts, weights) = (bench.put(ids)?, bench.put(weights)?);
        let (choices, count) = (self.choices(), u64::from(bins.count()));
        let list = || bench.room(u64::from(choices) * 4);
        let words = u64::from(self.metadata().words(*top_k));
        let made = Planned {
            order: list()?,
            rows: list()?,
            places: list()?,
            metadata: bench.room(u64::from(choices) * words * 4)?,
            kept: list()?,
            counts: bench.room(count * 4)?,
            faults: bench.room(count * 4 * ChoiceFault::WORDS as u64)?,
        };
        let sort = SortArgs {
            experts: experts.span()?,
            choices,
            top_k: *top_k,
            bin_of: bin_of.span()?,
            n_experts: map.experts(),
            bins: bins.count(),
            once: per_rank,
            order: made.order.span()?,
        };
        let args = PlanArgs {
            sort,
            weights: weights.span()?,
            local_of: local_of.span()?,
            place_of: place_of.span()?,
            rows: made.rows.span()?,
            places: made.places.span()?,
            metadata: made.metadata.span()?,
            kept: Some(made.kept.span()?),
            counts: made.counts.span()?,
            faults: made.faults.span()?,
        };
        bench.kernels.plan_choices(&bench.stream, &args)?;
        bench.gpu.finish(&bench.stream, "a plan of choices")?;
        Ok(made)
    }

    /// The first fault of a plan, as a dispatch names it.
    pub fn fault(&self, bench: &Bench, made: &Planned) -> Result<Option<PlanError>, TestError> {
        let faults = bench.words::<ChoiceFault>(&made.faults)?;
        Ok(faults.into_iter().find_map(|fault| fault.error(self.top_k, self.map.experts())))
    }

    /// Compares the device's plan with the host's, then what becomes of it when own rows land.
    pub fn check(&self, bench: &Bench, random: &mut Random) -> Result<(), TestError> {
        let (made, sorted) = (self.plan(bench)?, self.sorted()?);
        if let Some(fault) = self.fault(bench, &made)? {
            return Err(TestError::Wrong(format!("a fault where none is: {fault}")));
        }
        same("rows of bins", &bench.read(&made.counts)?, &sorted.counts)?;
        let mut order = sorted.tokens.clone();
        order.resize(self.ids.len(), u32::MAX);
        same("tokens of rows", &bench.read(&made.order)?, &order)?;
        let (mut rows, mut places) = (Vec::new(), Vec::new());
        sorted.places(&self.bins, self.top_k, &sorted.starts, [&mut rows, &mut places]);
        same("rows of choices", &bench.read(&made.rows)?, &rows)?;
        same("places of choices", &bench.read(&made.places)?, &places)?;
        let metadata = bench.read(&made.metadata)?;
        same("metadata of rows", &metadata[..sorted.metadata.len() * 4], &sorted.metadata)?;
        same("weights that are kept", &bench.read(&made.kept)?, &self.weights)?;
        self.check_landed(bench, &made, &sorted, random)
    }

    /// Own rows land between rows of other ranks, and pads behind them.
    fn check_landed(
        &self,
        bench: &Bench,
        made: &Planned,
        sorted: &SortedRouting,
        random: &mut Random,
    ) -> Result<(), TestError> {
        let (words, behind) = (self.metadata().words(self.top_k) as usize, 100_000);
        let (mut starts, mut to_row, mut runs) = (sorted.starts.clone(), 0, Vec::new());
        for bin in self.bins.of(self.me) {
            let (first, count) = (sorted.starts[bin as usize], sorted.counts[bin as usize]);
            to_row += random.below(5);
            starts[bin as usize] = behind + to_row;
            if count > 0 {
                let pad = random.below(3);
                runs.push(RowRun { to_row, first, count, pad });
                to_row += count + pad;
            }
        }
        if runs.is_empty() {
            return Ok(());
        }
        let landed = to_row as usize + 2;
        let mut expected = vec![u32::from_ne_bytes([POISON; 4]); landed * words];
        for &RowRun { to_row, first, count, pad } in &runs {
            let [to, first, count, pad] = [to_row, first, count, pad].map(|rows| rows as usize * words);
            expected[to..to + count].copy_from_slice(&sorted.metadata[first..first + count]);
            expected[to + count..to + count + pad].fill(0);
        }
        let mut listed = Vec::new();
        let own = RunArgs::lay_out(&runs, &mut listed);
        let (listed, metadata) = (bench.put(&listed)?, bench.room((landed * words * 4) as u64)?);
        let (count, entries, places) = (runs.len() as u32, self.choices(), landed as u32);
        let place = PlaceArgs {
            choices: self.choices(),
            rows: made.rows.span()?,
            behind,
            words: words as u32,
            from: made.metadata.span()?,
            metadata: metadata.span()?,
            own,
            runs: RunArgs { runs: listed.span()?, count, entries, places },
        };
        bench.kernels.place_choices(&bench.stream, &place)?;
        let (mut rows, mut in_order) = (Vec::new(), Vec::new());
        sorted.places(&self.bins, self.top_k, &starts, [&mut rows, &mut in_order]);
        same("rows of choices that landed", &bench.read(&made.rows)?, &rows)?;
        same("metadata of own rows", &bench.read(&metadata)?, &expected)
    }
}
