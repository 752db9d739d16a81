//! Plans of choices by the device, against those of the host: bins, order, places and metadata to
//! the bit, the first fault by name; and places and metadata of own rows once these have landed.

use sidelane::device::{ChoiceFault, PlaceArgs, PlanArgs, RunArgs, SortArgs};
use sidelane::error::{DeviceError, PlanError};
use sidelane::gate::Routing;
use sidelane::plan::{Bins, ExpertMap, ReceiveMode, RowLayout, RowMetadata, RowRun, SortedRouting, SumOrder};
use sidelane::topology::NodeMap;

use super::buffer::{Buffer, POISON};
use super::{Device, with_kernels};
use crate::rows_common::Random;

const SEED: u64 = 0x9e1a_77d3;

/// Choices of a rank, and where experts live.
struct Case {
    map: ExpertMap,
    bins: Bins,
    layout: RowLayout,
    me: u32,
    top_k: u32,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

impl Case {
    /// Random choices: one in five is dropped, the others of a token differ, and weights are any
    /// numbers. Experts have up to three replicas; a rank may hold none, or be masked.
    fn any(random: &mut Random, layout: RowLayout, (tokens, top_k): (u32, u32)) -> Case {
        let mut below = |n: u32| (random.next() % u64::from(n)) as u32;
        let (ranks, experts) = (1 + below(9), top_k + below(70));
        let mut held = vec![Vec::new(); ranks as usize];
        for expert in 0..experts {
            for _ in 0..1 + below(3) {
                let slots: &mut Vec<u32> = &mut held[below(ranks) as usize];
                if !slots.contains(&expert) {
                    slots.push(expert);
                }
            }
        }
        let map = ExpertMap::from_slots(experts, &held).unwrap();
        let me = below(ranks);
        let active: Vec<bool> = (0..ranks).map(|rank| rank == me || below(4) > 0).collect();
        let map = if below(3) == 0 { map.with_active(&active).unwrap() } else { map };
        let nodes = NodeMap::from_labels(&vec![0; ranks as usize]);
        let order = [SumOrder::Expert, SumOrder::Rank, SumOrder::Node][below(3) as usize];
        let bins = Bins::of_layout(layout, &map, order, &nodes);
        let mut ids = Vec::new();
        for _ in 0..tokens {
            let first = ids.len();
            while ids.len() < first + top_k as usize {
                let id = if below(5) == 0 { -1 } else { below(experts) as i32 };
                if id == -1 || !ids[first..].contains(&id) {
                    ids.push(id);
                }
            }
        }
        let weights = ids.iter().map(|_| any_number(random)).collect();
        Case { map, bins, layout, me, top_k, ids, weights }
    }

    fn notes(&self) -> RowMetadata {
        RowMetadata::of(self.layout, ReceiveMode::Exact, false)
    }

    /// As the host sorts it, or the first fault.
    fn sorted(&self) -> Result<SortedRouting, PlanError> {
        let routing = Routing::new(self.top_k, &self.ids[..], &self.weights[..]).unwrap();
        let mut sorted = SortedRouting::default();
        sorted.fill(&self.map, &self.bins, self.notes(), self.me, &routing)?;
        Ok(sorted)
    }

    fn choices(&self) -> u32 {
        self.ids.len() as u32
    }
}

/// Any bits that are a number, zeros and infinities among them.
fn any_number(random: &mut Random) -> f32 {
    let bits = random.next() as u32;
    let weight = f32::from_bits(bits);
    if weight.is_nan() { f32::from_bits(bits & 0xff80_0000) } else { weight }
}

/// Memory of a plan.
struct Planned {
    order: Buffer,
    rows: Buffer,
    places: Buffer,
    notes: Buffer,
    kept: Buffer,
    counts: Buffer,
    faults: Buffer,
}

impl Planned {
    /// The first fault, as a dispatch names it.
    fn fault(&self, case: &Case) -> Option<PlanError> {
        let errors = self.faults.read::<ChoiceFault>().into_iter();
        errors.into_iter().find_map(|fault| fault.error(case.top_k, case.map.experts()))
    }
}

/// Has the device plan a case.
fn plan(Device { context, stream, kernels }: &Device, case: &Case) -> Planned {
    let Case { map, bins, layout, me, top_k, ids, weights } = case;
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
    let [bin_of, local_of, place_of] = [bin_of, local_of, place_of].map(|of| Buffer::words(context, &of));
    let (experts, weights) = (Buffer::words(context, ids), Buffer::words(context, weights));
    let (choices, count) = (case.choices(), u64::from(bins.count()));
    let list = || Buffer::new(context, u64::from(choices) * 4);
    let words = u64::from(case.notes().words(*top_k));
    let made = Planned {
        order: list(),
        rows: list(),
        places: list(),
        notes: Buffer::new(context, u64::from(choices) * words * 4),
        kept: list(),
        counts: Buffer::new(context, count * 4),
        faults: Buffer::new(context, count * 4 * ChoiceFault::WORDS as u64),
    };
    let sort = SortArgs {
        experts: experts.span(),
        choices,
        top_k: *top_k,
        bin_of: bin_of.span(),
        n_experts: map.experts(),
        bins: bins.count(),
        once: per_rank,
        order: made.order.span(),
    };
    let args = PlanArgs {
        sort,
        weights: weights.span(),
        local_of: local_of.span(),
        place_of: place_of.span(),
        rows: made.rows.span(),
        places: made.places.span(),
        notes: made.notes.span(),
        kept: Some(made.kept.span()),
        counts: made.counts.span(),
        faults: made.faults.span(),
    };
    kernels.plan_choices(stream, &args).unwrap();
    stream.synchronize().unwrap();
    made
}

const SIZES: [(u32, u32); 6] = [(1, 1), (2, 3), (40, 8), (257, 2), (1100, 4), (33, 40)];

#[test]
fn a_plan_by_the_device_is_that_of_the_host() {
    with_kernels("kernels::plan_choices::a_plan_by_the_device_is_that_of_the_host", |device| {
        println!("seed {SEED:#x}");
        let mut random = Random(SEED);
        for (layout, size) in RowLayout::ALL.into_iter().flat_map(|layout| SIZES.map(|size| (layout, size))) {
            let case = Case::any(&mut random, layout, size);
            let (made, sorted) = (plan(device, &case), case.sorted().unwrap());
            assert_eq!(made.fault(&case), None);
            assert_eq!(made.counts.read::<u32>(), sorted.counts, "{layout:?} {size:?}");
            let order: Vec<u32> = made.order.read();
            let (used, behind) = order.split_at(sorted.entries());
            assert_eq!(used, sorted.tokens, "{layout:?} {size:?}");
            assert!(behind.iter().all(|&token| token == u32::MAX));
            let (mut rows, mut places) = (Vec::new(), Vec::new());
            sorted.places(&case.bins, case.top_k, &sorted.starts, [&mut rows, &mut places]);
            assert_eq!((made.rows.read::<i32>(), made.places.read::<i32>()), (rows, places));
            let notes: Vec<u32> = made.notes.read();
            assert_eq!(notes[..sorted.notes.len()], sorted.notes, "{layout:?} {size:?}");
            let bits: Vec<u32> = case.weights.iter().map(|weight| weight.to_bits()).collect();
            assert_eq!(made.kept.read::<u32>(), bits);
        }
    });
}

#[test]
fn the_first_wrong_choice_is_named_as_by_the_host() {
    with_kernels("kernels::plan_choices::the_first_wrong_choice_is_named_as_by_the_host", |device| {
        println!("seed {SEED:#x}");
        let mut random = Random(SEED + 1);
        for (layout, size) in RowLayout::ALL.into_iter().flat_map(|layout| SIZES.map(|size| (layout, size))) {
            for _ in 0..6 {
                let mut case = Case::any(&mut random, layout, size);
                let experts = case.map.experts() as i32;
                for _ in 0..3 {
                    let at = (random.next() % u64::from(case.choices())) as usize;
                    match random.next() % 6 {
                        0 => case.ids[at] = experts,
                        1 => case.ids[at] = -2,
                        2 => case.ids[at] = i32::MIN,
                        3 => case.ids[at] = case.ids[at - at % size.1 as usize],
                        _ => case.weights[at] = f32::NAN,
                    }
                }
                assert_eq!(plan(device, &case).fault(&case), case.sorted().err(), "{layout:?} {size:?}");
            }
        }
    });
}

#[test]
fn choices_of_own_rows_follow_these_to_where_they_land_with_their_metadata() {
    let test =
        "kernels::plan_choices::choices_of_own_rows_follow_these_to_where_they_land_with_their_metadata";
    with_kernels(test, |device| {
        println!("seed {SEED:#x}");
        let mut random = Random(SEED + 2);
        for (layout, size) in RowLayout::ALL.into_iter().flat_map(|layout| SIZES.map(|size| (layout, size))) {
            let case = Case::any(&mut random, layout, size);
            let (made, sorted) = (plan(device, &case), case.sorted().unwrap());
            let (words, behind) = (case.notes().words(case.top_k) as usize, 100_000);
            // Between rows of own bins land those of other ranks, and pads behind them.
            let (mut starts, mut to_row, mut runs) = (sorted.starts.clone(), 0, Vec::new());
            for bin in case.bins.of(case.me) {
                let (first, count) = (sorted.starts[bin as usize], sorted.counts[bin as usize]);
                to_row += (random.next() % 5) as u32;
                starts[bin as usize] = behind + to_row;
                if count > 0 {
                    let pad = (random.next() % 3) as u32;
                    runs.push(RowRun { to_row, first, count, pad });
                    to_row += count + pad;
                }
            }
            if runs.is_empty() {
                continue;
            }
            let landed = to_row as usize + 2;
            let mut expected = vec![u32::from_ne_bytes([POISON; 4]); landed * words];
            for &RowRun { to_row, first, count, pad } in &runs {
                let [to, first, count, pad] = [to_row, first, count, pad].map(|rows| rows as usize * words);
                expected[to..to + count].copy_from_slice(&sorted.notes[first..first + count]);
                expected[to + count..to + count + pad].fill(0);
            }
            let Device { context, stream, kernels } = device;
            let mut listed = Vec::new();
            let own = RunArgs::lay_out(&runs, &mut listed);
            let (listed, notes) =
                (Buffer::words(context, &listed), Buffer::new(context, (landed * words * 4) as u64));
            let (count, entries, places) = (runs.len() as u32, case.choices(), landed as u32);
            let place = PlaceArgs {
                choices: case.choices(),
                rows: made.rows.span(),
                behind,
                words: words as u32,
                from: made.notes.span(),
                notes: notes.span(),
                own,
                runs: RunArgs { runs: listed.span(), count, entries, places },
            };
            kernels.place_choices(stream, &place).unwrap();
            stream.synchronize().unwrap();
            let (mut rows, mut in_order) = (Vec::new(), Vec::new());
            sorted.places(&case.bins, case.top_k, &starts, [&mut rows, &mut in_order]);
            assert_eq!(made.rows.read::<i32>(), rows, "{layout:?} {size:?}");
            assert_eq!(notes.read::<u32>(), expected, "{layout:?} {size:?}");
        }
    });
}

#[test]
fn memory_that_is_too_small_is_refused_by_name() {
    with_kernels("kernels::plan_choices::memory_that_is_too_small_is_refused_by_name", |device| {
        let Device { context, stream, kernels } = device;
        let memory = Buffer::new(context, 2048);
        let sort = SortArgs {
            experts: memory.part(0, 24),
            choices: 6,
            top_k: 2,
            bin_of: memory.part(64, 16),
            n_experts: 4,
            bins: 3,
            once: true,
            order: memory.part(128, 24),
        };
        let good = PlanArgs {
            sort,
            weights: memory.part(192, 24),
            local_of: memory.part(256, 16),
            place_of: memory.part(320, 12),
            rows: memory.part(384, 24),
            places: memory.part(448, 24),
            notes: memory.part(512, 96),
            kept: Some(memory.part(640, 24)),
            counts: memory.part(704, 12),
            faults: memory.part(768, 36),
        };
        for (plan, what, given, needed) in [
            (PlanArgs { sort: SortArgs { order: memory.part(128, 23), ..sort }, ..good }, "order", 23, 24),
            (PlanArgs { weights: memory.part(192, 23), ..good }, "weights", 23, 24),
            (PlanArgs { local_of: memory.part(256, 15), ..good }, "local_of", 15, 16),
            (PlanArgs { place_of: memory.part(320, 11), ..good }, "place_of", 11, 12),
            (PlanArgs { rows: memory.part(384, 23), ..good }, "rows", 23, 24),
            (PlanArgs { places: memory.part(448, 23), ..good }, "places", 23, 24),
            (PlanArgs { notes: memory.part(512, 95), ..good }, "notes", 95, 96),
            (PlanArgs { kept: Some(memory.part(640, 23)), ..good }, "kept", 23, 24),
            (PlanArgs { counts: memory.part(704, 11), ..good }, "counts", 11, 12),
            (PlanArgs { faults: memory.part(768, 35), ..good }, "faults", 35, 36),
        ] {
            let expected = DeviceError::TooSmall { kernel: "plan_choices", what, given, needed };
            assert_eq!(kernels.plan_choices(stream, &plan), Err(expected));
        }
        let none = PlanArgs { sort: SortArgs { bins: 0, ..sort }, ..good };
        let refused = kernels.plan_choices(stream, &none);
        assert!(matches!(refused, Err(DeviceError::Shape { what: "bins", .. })), "{refused:?}");
        let runs = RunArgs { runs: memory.part(832, 16), count: 1, entries: 6, places: 5 };
        let good = PlaceArgs {
            choices: 6,
            rows: memory.part(384, 24),
            behind: 6,
            words: 4,
            from: memory.part(512, 96),
            notes: memory.part(896, 80),
            own: 3,
            runs,
        };
        for (place, what, given, needed) in [
            (PlaceArgs { rows: memory.part(384, 23), ..good }, "rows", 23, 24),
            (PlaceArgs { from: memory.part(512, 95), ..good }, "from", 95, 96),
            (PlaceArgs { notes: memory.part(896, 79), ..good }, "notes", 79, 80),
            (PlaceArgs { runs: RunArgs { runs: memory.part(832, 15), ..runs }, ..good }, "runs", 15, 16),
        ] {
            let expected = DeviceError::TooSmall { kernel: "place_choices", what, given, needed };
            assert_eq!(kernels.place_choices(stream, &place), Err(expected));
        }
        let refused = kernels.place_choices(stream, &PlaceArgs { words: 0, ..good });
        assert!(matches!(refused, Err(DeviceError::Shape { what: "words", .. })), "{refused:?}");
        stream.synchronize().unwrap();
        assert!(memory.content().iter().all(|&byte| byte == POISON), "nothing was launched");
    });
}
