//! Slots to expert-major rows within a budget: what `tally` counts, `admit` lays out and `expand`
//! finds. The loops over choices take 1024 at a time.

use bytemuck::{bytes_of, cast_slice};
use sidelane::device::{Addresses, Admit, Expand, Tally};
use sidelane::error::{DeviceError, KernelFault};
use sidelane::plan::{Overflow, SlotHead, SlotShape};

use super::buffer::{Buffer, POISON};
use super::{Device, with_kernels};
use crate::rows_common::Random;

/// A word that nobody wrote.
const UNTOUCHED: u32 = u32::from_ne_bytes([POISON; 4]);

fn shape(choices: (u32, u32), bins: u32) -> SlotShape {
    SlotShape::new(choices.0, choices.1, 16).unwrap().with_counts(bins).unwrap()
}

/// Numbers from -1 to this, each as often as the others.
fn up_to(random: &mut Random, most: u32) -> i32 {
    (random.next() % (u64::from(most) + 2)) as i32 - 1
}

/// Tallies these experts for so many ranks on the device, and compares every byte.
fn tallied(device: &Device, shape: SlotShape, ranks: usize, (experts, bin_of): (&[i32], &[u32])) {
    let Device { context, stream, kernels } = device;
    let (choices, bins) = (experts.len(), shape.bins());
    let slots: Vec<Buffer> = (0..ranks).map(|_| Buffer::new(context, shape.bytes())).collect();
    let spans: Vec<_> = slots.iter().map(Buffer::span).collect();
    let table = Buffer::new(context, ranks as u64 * 8);
    let (ids, of_experts) = (Buffer::words(context, experts), Buffer::words(context, bin_of));
    let [bin_of_choices, before] = [0, 1].map(|_| Buffer::new(context, choices as u64 * 4));
    let tally = Tally {
        shape,
        choices: choices as u32,
        experts: ids.span(),
        n_experts: bin_of.len() as u32,
        bin_of: of_experts.span(),
        slots: &Addresses::new(stream, table.range(), &spans).unwrap(),
        bins: bin_of_choices.span(),
        before: before.span(),
    };
    kernels.tally(stream, &tally).unwrap();
    stream.synchronize().unwrap();
    let bin = |&id: &i32| usize::try_from(id).ok().and_then(|id| bin_of.get(id).copied());
    let mut counts = vec![0_u32; bins as usize];
    let places = experts.iter().map(|id| {
        let Some(bin) = bin(id) else { return (-1, UNTOUCHED) };
        let count = &mut counts[bin as usize];
        *count += 1;
        (bin as i32, *count - 1)
    });
    let (expected, places): (Vec<i32>, Vec<u32>) = places.unzip();
    let what = format!("{choices} choices, {bins} bins, {ranks} ranks");
    assert_eq!(bin_of_choices.read::<i32>(), expected, "bins of {what}");
    assert_eq!(before.read::<u32>(), places, "places of {what}");
    let mut slot = vec![POISON; shape.bytes() as usize];
    slot[shape.counts_at() as usize..][..counts.len() * 4].copy_from_slice(cast_slice(&counts));
    for seen in &slots {
        assert!(seen.content() == slot, "a slot of {what}");
    }
}

#[test]
fn choices_get_bin_and_position_and_slots_get_all_counts() {
    let test = "kernels::expand::choices_get_bin_and_position_and_slots_get_all_counts";
    with_kernels(test, |device| {
        let mut random = Random(1);
        for (choices, bins, n_experts, ranks) in [
            (0, 3, 3, 2),
            (1, 1, 1, 1),
            (31, 2, 5, 2),
            (1023, 5, 4, 3),
            (1024, 4, 4, 2),
            (1025, 3, 9, 2),
            (2049, 1, 1, 1),
            (5000, 7, 6, 4),
            (40, 300, 280, 1),
            (90, 4, 4, 300),
        ] {
            let shape = shape((5000, 1), bins);
            let bin_of: Vec<u32> = (0..n_experts).map(|_| (random.next() % u64::from(bins)) as u32).collect();
            // Some experts are none, and some do not exist.
            let any: Vec<i32> = (0..choices).map(|_| up_to(&mut random, n_experts)).collect();
            tallied(device, shape, ranks, (&any, &bin_of));
            for one in [-1, n_experts as i32 - 1] {
                tallied(device, shape, ranks, (&vec![one; choices], &bin_of));
            }
        }
    });
}

/// Rows of all ranks for all bins, and the budget of each rank.
struct Counted {
    /// The first bin of each rank, and of none.
    starts: Vec<u32>,
    /// Of each source, by bin.
    counts: Vec<Vec<u32>>,
    me: usize,
    budget: u32,
    align: u32,
    overflow: Overflow,
    /// What kernels found before.
    status: u32,
    /// The rank that refuses the call, if one does.
    refuses: Option<u32>,
}

/// The call, as `pack` counts it.
const CALL: u64 = (5 << 32) + 77;

/// The verdict before: that of a refusal, which stays.
const BEFORE: u32 = 8 | 1 << 8;

/// What `admit` makes of it.
#[derive(Debug, PartialEq)]
struct Admitted {
    begin: Vec<u32>,
    room: Vec<u32>,
    first: Vec<u32>,
    counts: Vec<i64>,
    verdict: u32,
    refusal: u32,
}

impl Counted {
    fn ranks(&self) -> usize {
        self.counts.len()
    }

    fn bins(&self) -> usize {
        self.starts[self.ranks()] as usize
    }

    /// Bins of a rank.
    fn bins_of(&self, rank: usize) -> std::ops::Range<usize> {
        self.starts[rank] as usize..self.starts[rank + 1] as usize
    }

    /// Rows of the sources before this one for a bin; of all, for the number of ranks.
    fn before(&self, source: usize, bin: usize) -> u64 {
        self.counts[..source].iter().map(|counts| u64::from(counts[bin])).sum()
    }

    /// The same by the definition.
    fn expected(&self) -> Admitted {
        let (budget, ranks, own) = (u64::from(self.budget), self.ranks(), self.bins_of(self.me));
        let visible = |from: u64, rows: u64| (from + rows).min(budget) - from.min(budget);
        let (mut begin, mut counts, mut padded) = (vec![0_u64; self.bins()], Vec::new(), Vec::new());
        let mut over = None;
        for rank in 0..ranks {
            let mut row = 0;
            for bin in self.bins_of(rank) {
                let rows = self.before(ranks, bin);
                let with_pads = rows.next_multiple_of(self.align.into());
                if rank == self.me {
                    counts.push(visible(row, rows) as i64);
                    padded.push(visible(row, with_pads) as i64);
                }
                begin[bin] = row;
                row += with_pads;
            }
            over = over.or((row > budget && self.overflow == Overflow::Error).then_some(rank as u32));
        }
        let over = over.map_or(0, |rank| 7 | rank << 8);
        let refusal = self.refuses.map_or(over, |rank| 8 | rank << 8);
        let verdict = match (self.refuses, self.status) {
            (Some(_), _) => BEFORE,
            (None, 0) => over,
            (None, status) => status,
        };
        let word = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let place = |source: usize, bin: usize| begin[bin] + self.before(source, bin);
        let room = |bin| match refusal {
            0 => word(budget.saturating_sub(place(self.me, bin))),
            _ => u32::MAX,
        };
        let counts: Vec<i64> = [counts, padded].concat();
        let firsts = |source: usize| own.clone().map(move |bin| (source, bin));
        Admitted {
            room: (0..self.bins()).map(room).collect(),
            first: (0..ranks).flat_map(firsts).map(|(source, bin)| word(place(source, bin))).collect(),
            counts: if refusal == 0 { counts } else { vec![0; counts.len()] },
            begin: begin.iter().map(|&row| word(row)).collect(),
            verdict,
            refusal,
        }
    }

    /// The same on the device.
    fn seen(&self, device: &Device) -> Admitted {
        let Device { context, stream, kernels } = device;
        let (shape, ranks, own) = (shape((3, 2), self.bins() as u32), self.ranks(), self.bins_of(self.me));
        let received = Buffer::new(context, shape.bytes() * ranks as u64);
        for (source, counts) in (0..).zip(&self.counts) {
            let refused = if self.refuses == Some(source as u32) { 1 } else { 0 };
            let head = SlotHead { refused, call: CALL, ..SlotHead::default() };
            received.write(source * shape.bytes(), bytes_of(&head));
            received.write(source * shape.bytes() + shape.counts_at(), cast_slice(counts));
        }
        let came = received.content();
        let starts = Buffer::words(context, &self.starts);
        let words = |count: usize| Buffer::new(context, count as u64 * 4);
        let (begin, room, first) = (words(self.bins()), words(self.bins()), words(ranks * own.len()));
        let (index, weights) = (words(self.budget as usize), words(self.budget as usize));
        let (counts, refusal) = (words(4 * own.len()), words(1));
        let verdict = Buffer::words(context, &[u64::from(BEFORE) | CALL << 32]);
        let status = Buffer::words(context, &[self.status]);
        let admit = Admit {
            shape,
            ranks: ranks as u32,
            rank: self.me as u32,
            own: own.len() as u32,
            budget: self.budget,
            overflow: self.overflow,
            align: self.align,
            received: received.span(),
            starts: starts.span(),
            begin: begin.span(),
            room: room.span(),
            first: first.span(),
            counts: counts.span(),
            index: index.span(),
            weights: weights.span(),
            status: status.word(),
            verdict: verdict.word(),
            refusal: refusal.word(),
        };
        kernels.admit(stream, &admit).unwrap();
        stream.synchronize().unwrap();
        assert!(index.read::<i32>().iter().all(|&source| source == -1), "no row has a source yet");
        assert!(weights.read::<u32>().iter().all(|&bits| bits == 0), "no row has a weight yet");
        assert!(received.content() == came && starts.read::<u32>() == self.starts, "sources stay");
        assert_eq!(status.read::<u32>(), [self.status], "the status is for others to write");
        let [word, call] = verdict.read::<u32>()[..] else { panic!("a word of 64 bits") };
        assert_eq!(call, CALL as u32, "the verdict names the call");
        Admitted {
            begin: begin.read(),
            room: room.read(),
            first: first.read(),
            counts: counts.read(),
            verdict: word,
            refusal: refusal.read::<u32>()[0],
        }
    }

    fn check(&self, device: &Device) -> Admitted {
        let seen = self.seen(device);
        let Counted { me, budget, align, overflow, .. } = self;
        assert_eq!(
            seen,
            self.expected(),
            "rank {me} of {}, budget {budget}, to {align}, {overflow:?}",
            self.ranks()
        );
        seen
    }

    /// The most rows of a rank, pads included.
    fn required(&self) -> u32 {
        let align = u64::from(self.align);
        let rows = |bin| self.before(self.ranks(), bin).next_multiple_of(align);
        (0..self.ranks()).map(|rank| self.bins_of(rank).map(rows).sum::<u64>()).max().unwrap() as u32
    }
}

#[test]
fn rows_are_laid_out_by_bin_and_source_up_to_budget() {
    let test = "kernels::expand::rows_are_laid_out_by_bin_and_source_up_to_budget";
    with_kernels(test, |device| {
        let mut random = Random(2);
        for (bins_of_ranks, most, align) in [
            (&[1][..], 100, 1),
            (&[2, 1], 9, 4),
            (&[3, 0, 2], 40, 1),
            (&[3, 0, 2], 40, 8),
            (&[290, 11], 5, 3),
            (&[2; 5], 900, 16),
            (&[1; 300], 3, 2),
        ] {
            let starts = bins_of_ranks.iter().scan(0, |bin, &bins| {
                *bin += bins;
                Some(*bin)
            });
            let starts: Vec<u32> = [0].into_iter().chain(starts).collect();
            let ranks = bins_of_ranks.len();
            let bins = starts[ranks];
            let mut any = || (0..bins).map(|_| (random.next() % (most + 1)) as u32).collect();
            let counts: Vec<Vec<u32>> = (0..ranks).map(|_| any()).collect();
            for me in [0, ranks / 2, ranks - 1] {
                for overflow in [Overflow::Drop, Overflow::Error] {
                    let mut counted = Counted {
                        starts: starts.clone(),
                        counts: counts.clone(),
                        me,
                        budget: 0,
                        align,
                        overflow,
                        status: 0,
                        refuses: None,
                    };
                    let all = counted.required();
                    for budget in [0, 1, all / 2, all.saturating_sub(1), all, all + 300] {
                        counted.budget = budget;
                        let verdict = counted.check(device).verdict;
                        let fits = overflow == Overflow::Drop || budget >= all;
                        assert_eq!(verdict == 0, fits, "{budget} of {all} rows");
                    }
                }
            }
        }
    });
}

#[test]
fn first_rank_over_budget_is_named_unless_earlier_fault_stands() {
    let test = "kernels::expand::first_rank_over_budget_is_named_unless_earlier_fault_stands";
    with_kernels(test, |device| {
        let counted = |status| Counted {
            starts: vec![0, 1, 2, 3],
            counts: vec![vec![1, 4, 9], vec![2, 2, 0], vec![1, 1, 0]],
            me: 0,
            budget: 6,
            align: 2,
            overflow: Overflow::Error,
            status,
            refuses: None,
        };
        let over = Some(KernelFault::OverBudget { rank: 1 });
        assert_eq!(KernelFault::of(counted(0).check(device).verdict), over);
        for overflow in [Overflow::Error, Overflow::Drop] {
            // A fault of this rank alone: what all ranks find does not depend on it.
            let earlier = Counted { overflow, ..counted(3 | 2 << 8) }.check(device);
            assert_eq!(KernelFault::of(earlier.verdict), Some(KernelFault::OtherCall { rank: 2 }));
            let expected = if overflow == Overflow::Error { over } else { None };
            assert_eq!(KernelFault::of(earlier.refusal), expected);
            let refused = Counted { overflow, refuses: Some(2), ..counted(0) }.check(device);
            assert_eq!(KernelFault::of(refused.refusal), Some(KernelFault::Refused { rank: 2 }));
        }
    });
}

#[test]
fn counts_beyond_words_find_no_room() {
    with_kernels("kernels::expand::counts_beyond_words_find_no_room", |device| {
        for (overflow, align) in [(Overflow::Drop, 1), (Overflow::Drop, 128), (Overflow::Error, 4)] {
            for me in 0..2 {
                let counts = vec![vec![5, 3_000_000_000, 7, u32::MAX], vec![3, 3_000_000_000, 1, u32::MAX]];
                let starts = vec![0, 3, 4];
                Counted { starts, counts, me, budget: 5000, align, overflow, status: 0, refuses: None }
                    .check(device);
            }
        }
    });
}

/// What came to a rank: of each source the local experts and weights of all choices of a slot.
struct Came {
    shape: SlotShape,
    own: u32,
    budget: u32,
    align: usize,
    experts: Vec<Vec<i32>>,
    weights: Vec<Vec<u32>>,
    refusal: u32,
}

impl Came {
    /// Some choices are at another rank, and some at an expert that this one has not.
    fn any(random: &mut Random, shape: SlotShape, (sources, own): (usize, u32), align: usize) -> Self {
        let choices = shape.max_tokens() * shape.top_k();
        let mut list = || (0..choices).map(|_| up_to(random, own)).collect();
        let experts: Vec<Vec<i32>> = (0..sources).map(|_| list()).collect();
        let mut words = || (0..choices).map(|_| random.next() as u32).collect();
        let weights = (0..sources).map(|_| words()).collect();
        Came { shape, own, budget: 0, align, experts, weights, refusal: 0 }
    }

    /// The source and choice of each row, without a budget; and the first row of each source at
    /// each bin.
    fn rows(&self) -> (Vec<Option<(usize, usize)>>, Vec<u32>) {
        let (mut rows, mut first) = (Vec::new(), vec![0; self.experts.len() * self.own as usize]);
        for bin in 0..self.own as usize {
            for (source, experts) in self.experts.iter().enumerate() {
                first[source * self.own as usize + bin] = rows.len() as u32;
                let chosen = (0..experts.len()).filter(|&choice| experts[choice] == bin as i32);
                rows.extend(chosen.map(|choice| Some((source, choice))));
            }
            rows.resize(rows.len().next_multiple_of(self.align), None);
        }
        (rows, first)
    }

    /// Expands it on the device beside choices of this rank's own, and compares every word.
    fn check(&self, device: &Device, random: &mut Random) {
        let Device { context, stream, kernels } = device;
        let Came { shape, own, budget, .. } = *self;
        let (sources, choices) = (self.experts.len(), self.experts[0].len());
        let received = Buffer::new(context, shape.bytes() * sources as u64);
        for (source, (experts, weights)) in (0..).zip(self.experts.iter().zip(&self.weights)) {
            received.write(source * shape.bytes() + shape.experts_at(), cast_slice(experts));
            received.write(source * shape.bytes() + shape.weights_at(), cast_slice(weights));
        }
        let came = received.content();
        let (laid, first) = self.rows();
        let place: Vec<i32> = (0..own as i32).map(|bin| 3 * (own as i32 - bin)).collect();
        let own_choices = choices - usize::from(choices > 1);
        let own_bins: Vec<i32> = (0..own_choices).map(|_| up_to(random, shape.bins() - 1)).collect();
        let before: Vec<u32> = (0..own_choices).map(|_| (random.next() % 9) as u32).collect();
        let room: Vec<u32> = (0..shape.bins()).map(|_| (random.next() % 9) as u32).collect();
        let [first, room_of, before_of] = [&first, &room, &before].map(|words| Buffer::words(context, words));
        let (places, bins) = (Buffer::words(context, &place), Buffer::words(context, &own_bins));
        let [rows, sums] = [0, 1].map(|_| Buffer::new(context, (sources * choices) as u64 * 4));
        let index = Buffer::words(context, &vec![-1_i32; budget as usize]);
        let weights = Buffer::words(context, &vec![0_u32; budget as usize]);
        let dropped = Buffer::of(context, &vec![0; own_choices]);
        let refusal = Buffer::words(context, &[self.refusal]);
        let expand = Expand {
            shape,
            ranks: sources as u32,
            own,
            budget,
            choices: own_choices as u32,
            received: received.span(),
            first: first.span(),
            place: places.span(),
            rows: rows.span(),
            sums: sums.span(),
            index: index.span(),
            weights: weights.span(),
            bins: bins.span(),
            before: before_of.span(),
            room: room_of.span(),
            dropped: dropped.span(),
            refusal: refusal.word(),
        };
        kernels.expand(stream, &expand).unwrap();
        stream.synchronize().unwrap();
        assert!(received.content() == came, "slots stay as they are");

        let (mut row_of, mut sum_of) = (vec![-1; sources * choices], vec![-1; sources * choices]);
        let (mut source_of, mut weight_of) = (vec![-1; budget as usize], vec![0; budget as usize]);
        for (row, origin) in laid.iter().enumerate() {
            let &Some((source, choice)) = origin else { continue };
            sum_of[source * choices + choice] = place[self.experts[source][choice] as usize];
            if row >= budget as usize || self.refusal != 0 {
                continue;
            }
            row_of[source * choices + choice] = row as i32;
            let in_slot = shape.header_rows() as usize + choice / shape.top_k() as usize;
            source_of[row] = (source * shape.slot_rows() as usize + in_slot) as i32;
            weight_of[row] = self.weights[source][choice];
        }
        let mask = own_bins.iter().zip(&before);
        let mask = mask.map(|(&bin, &before)| u8::from(bin >= 0 && before >= room[bin.max(0) as usize]));
        let what = format!("{sources} sources of {choices} choices, {own} bins, budget {budget}");
        assert_eq!(rows.read::<i32>(), row_of, "rows of {what}");
        assert_eq!(sums.read::<i32>(), sum_of, "sums of {what}");
        assert_eq!(index.read::<i32>(), source_of, "index of {what}");
        assert_eq!(weights.read::<u32>(), weight_of, "weights of {what}");
        assert_eq!(dropped.content(), mask.collect::<Vec<_>>(), "dropped of {what}");
    }
}

#[test]
fn each_row_has_its_source_and_each_choice_that_fits_its_row() {
    let test = "kernels::expand::each_row_has_its_source_and_each_choice_that_fits_its_row";
    with_kernels(test, |device| {
        let mut random = Random(3);
        for (sources, own, max_tokens, top_k, bins, align) in [
            (1, 1, 1, 1, 1, 1),
            (2, 3, 12, 3, 5, 4),
            (3, 2, 1023, 1, 4, 1),
            (2, 4, 205, 5, 6, 8),
            (3, 1, 700, 3, 2, 16),
            (2, 5, 600, 4, 9, 1),
            (3, 2, 1250, 4, 7, 2),
            (2, 0, 300, 4, 3, 1),
        ] {
            let shape = shape((max_tokens, top_k), bins);
            let mut came = Came::any(&mut random, shape, (sources, own), align);
            let all = came.rows().0.len() as u32;
            let mut budgets = vec![0, all / 3, all.saturating_sub(1), all, all + 40];
            budgets.dedup();
            for budget in budgets {
                came.budget = budget;
                came.check(device, &mut random);
            }
            came.refusal = 7 | 1 << 8;
            came.check(device, &mut random);
            // All choices of all sources at the last expert.
            (came.refusal, came.budget) = (0, 1500);
            came.experts.iter_mut().for_each(|experts| experts.fill(own as i32 - 1));
            came.check(device, &mut random);
        }
    });
}

#[test]
fn memory_that_is_too_small_for_a_tally_is_refused_by_name() {
    with_kernels("kernels::expand::memory_that_is_too_small_for_a_tally_is_refused_by_name", |device| {
        let Device { context, stream, kernels } = device;
        let (memory, shape) = (Buffer::new(context, 1024), shape((3, 2), 4));
        let (table, short) = (Buffer::new(context, 8), Buffer::new(context, 8));
        let slots = Addresses::new(stream, table.range(), &[memory.part(0, shape.bytes())]).unwrap();
        let few = Addresses::new(stream, short.range(), &[memory.part(0, shape.bytes() - 1)]).unwrap();
        let good = Tally {
            shape,
            choices: 6,
            experts: memory.part(512, 24),
            n_experts: 5,
            bin_of: memory.part(576, 20),
            slots: &slots,
            bins: memory.part(640, 24),
            before: memory.part(704, 24),
        };
        for (tally, what, given, needed) in [
            (Tally { experts: memory.part(512, 23), ..good }, "experts", 23, 24),
            (Tally { bin_of: memory.part(576, 19), ..good }, "bin_of", 19, 20),
            (Tally { slots: &few, ..good }, "slots", shape.bytes() - 1, shape.bytes()),
            (Tally { bins: memory.part(640, 23), ..good }, "bins", 23, 24),
            (Tally { before: memory.part(704, 23), ..good }, "before", 23, 24),
        ] {
            let expected = DeviceError::TooSmall { kernel: "tally", what, given, needed };
            assert_eq!(kernels.tally(stream, &tally), Err(expected));
        }
        let plain = SlotShape::new(3, 2, 16).unwrap();
        for (tally, what) in [
            (Tally { choices: 7, ..good }, "choices"),
            (Tally { n_experts: 0, ..good }, "n_experts"),
            (Tally { shape: plain, ..good }, "bins"),
        ] {
            let Err(DeviceError::Shape { what: said, .. }) = kernels.tally(stream, &tally) else {
                panic!("{what}")
            };
            assert_eq!(said, what);
        }
        stream.synchronize().unwrap();
        assert!(memory.content().iter().all(|&byte| byte == POISON), "nothing was launched");
    });
}

#[test]
fn memory_that_is_too_small_for_a_layout_is_refused_by_name() {
    with_kernels("kernels::expand::memory_that_is_too_small_for_a_layout_is_refused_by_name", |device| {
        let Device { context, stream, kernels } = device;
        let (memory, shape) = (Buffer::new(context, 2048), shape((3, 2), 4));
        let slots = 2 * shape.bytes();
        assert!(slots <= 1024);
        let good = Admit {
            shape,
            ranks: 2,
            rank: 1,
            own: 3,
            budget: 5,
            overflow: Overflow::Drop,
            align: 1,
            received: memory.part(0, slots),
            starts: memory.part(1024, 12),
            begin: memory.part(1088, 16),
            room: memory.part(1152, 16),
            first: memory.part(1216, 24),
            counts: memory.part(1280, 48),
            index: memory.part(1344, 20),
            weights: memory.part(1408, 20),
            status: memory.range().word(1472).unwrap(),
            verdict: memory.range().word(1536).unwrap(),
            refusal: memory.range().word(1600).unwrap(),
        };
        for (admit, what, given, needed) in [
            (Admit { received: memory.part(0, slots - 1), ..good }, "received", slots - 1, slots),
            (Admit { starts: memory.part(1024, 11), ..good }, "starts", 11, 12),
            (Admit { begin: memory.part(1088, 15), ..good }, "begin", 15, 16),
            (Admit { room: memory.part(1152, 15), ..good }, "room", 15, 16),
            (Admit { first: memory.part(1216, 23), ..good }, "first", 23, 24),
            (Admit { counts: memory.part(1280, 47), ..good }, "counts", 47, 48),
            (Admit { index: memory.part(1344, 19), ..good }, "index", 19, 20),
            (Admit { weights: memory.part(1408, 19), ..good }, "weights", 19, 20),
        ] {
            let expected = DeviceError::TooSmall { kernel: "admit", what, given, needed };
            assert_eq!(kernels.admit(stream, &admit), Err(expected));
        }
        for (admit, what) in [
            (Admit { rank: 2, ..good }, "rank"),
            (Admit { align: 0, ..good }, "align"),
            (Admit { budget: 1 << 31, ..good }, "budget"),
        ] {
            let Err(DeviceError::Shape { what: said, .. }) = kernels.admit(stream, &admit) else {
                panic!("{what}")
            };
            assert_eq!(said, what);
        }
        stream.synchronize().unwrap();
        assert!(memory.content().iter().all(|&byte| byte == POISON), "nothing was launched");
    });
}

#[test]
fn memory_that_is_too_small_for_rows_is_refused_by_name() {
    with_kernels("kernels::expand::memory_that_is_too_small_for_rows_is_refused_by_name", |device| {
        let Device { context, stream, kernels } = device;
        let (memory, shape) = (Buffer::new(context, 2048), shape((3, 2), 4));
        let slots = 2 * shape.bytes();
        let good = Expand {
            shape,
            ranks: 2,
            own: 3,
            budget: 5,
            choices: 6,
            received: memory.part(0, slots),
            first: memory.part(1024, 24),
            place: memory.part(1088, 12),
            rows: memory.part(1152, 48),
            sums: memory.part(1216, 48),
            index: memory.part(1280, 20),
            weights: memory.part(1344, 20),
            bins: memory.part(1408, 24),
            before: memory.part(1472, 24),
            room: memory.part(1536, 16),
            dropped: memory.part(1600, 6),
            refusal: memory.range().word(1664).unwrap(),
        };
        for (expand, what, given, needed) in [
            (Expand { received: memory.part(0, slots - 1), ..good }, "received", slots - 1, slots),
            (Expand { first: memory.part(1024, 23), ..good }, "first", 23, 24),
            (Expand { place: memory.part(1088, 11), ..good }, "place", 11, 12),
            (Expand { rows: memory.part(1152, 47), ..good }, "rows", 47, 48),
            (Expand { sums: memory.part(1216, 47), ..good }, "sums", 47, 48),
            (Expand { index: memory.part(1280, 19), ..good }, "index", 19, 20),
            (Expand { weights: memory.part(1344, 19), ..good }, "weights", 19, 20),
            (Expand { bins: memory.part(1408, 23), ..good }, "bins", 23, 24),
            (Expand { before: memory.part(1472, 23), ..good }, "before", 23, 24),
            (Expand { room: memory.part(1536, 15), ..good }, "room", 15, 16),
            (Expand { dropped: memory.part(1600, 5), ..good }, "dropped", 5, 6),
        ] {
            let expected = DeviceError::TooSmall { kernel: "expand", what, given, needed };
            assert_eq!(kernels.expand(stream, &expand), Err(expected));
        }
        for (expand, what) in [
            (Expand { choices: 7, ..good }, "choices"),
            (Expand { budget: 1 << 31, ..good }, "budget"),
            (Expand { ranks: (1 << 16) - 1, ..good }, "ranks"),
        ] {
            let Err(DeviceError::Shape { what: said, .. }) = kernels.expand(stream, &expand) else {
                panic!("{what}")
            };
            assert_eq!(said, what);
        }
        stream.synchronize().unwrap();
        assert!(memory.content().iter().all(|&byte| byte == POISON), "nothing was launched");
    });
}
