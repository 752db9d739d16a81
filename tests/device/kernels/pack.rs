//! Packing into slots.

use std::collections::BTreeSet;

use sidelane::device::{Addresses, Pack};
use sidelane::dtype::Fp8RowShape;
use sidelane::error::{DeviceError, KernelFault};
use sidelane::plan::{SlotHead, SlotShape};
use sidelane::rows::{Arithmetic, RowKernels, Simd, Stores};

use super::buffer::Buffer;
use super::world::Input;
use super::{Device, with_kernels};
use crate::rows_common::Random;
use crate::rows_common::values::any_row;

const DIGEST: u64 = 0x0123_4567_89ab_cdef;

/// What a launch leaves behind.
pub struct Packed {
    pub slots: Vec<Vec<u8>>,
    pub places: Vec<i32>,
    pub dropped: Vec<u8>,
    pub counter: u64,
}

impl Packed {
    /// What is wrong with the call, as the heads of all slots say.
    fn fault(&self) -> Option<KernelFault> {
        let words = self.slots.iter().map(|slot| {
            let head: SlotHead = bytemuck::pod_read_unaligned(&slot[..size_of::<SlotHead>()]);
            head.refused
        });
        let words: BTreeSet<u32> = words.collect();
        assert_eq!(words.len(), 1, "all heads say the same");
        words.first().and_then(|&word| KernelFault::of(word))
    }
}

/// Packs on the device, after `calls` calls before.
pub fn pack(device: &Device, input: &Input, calls: u64) -> Packed {
    packed(device, input, calls, |pack| device.kernels.pack(&device.stream, pack))
}

fn packed(
    device: &Device,
    input: &Input,
    calls: u64,
    launch: impl FnOnce(&Pack<'_>) -> Result<(), DeviceError>,
) -> Packed {
    let Device { context, stream, .. } = device;
    let (shape, ranks) = (input.shape, input.map.ranks());
    let slots: Vec<Buffer> = (0..ranks).map(|_| Buffer::new(context, shape.bytes())).collect();
    let spans: Vec<_> = slots.iter().map(Buffer::span).collect();
    let table = Buffer::new(context, u64::from(ranks) * 8);
    let (rank_of, local_of) = input.tables();
    let (rank_of, local_of) = (Buffer::words(context, &rank_of), Buffer::words(context, &local_of));
    let (x, places) =
        (Buffer::of(context, &input.x), Buffer::new(context, u64::from(input.tokens * ranks) * 4));
    let (experts, weights) = (Buffer::words(context, &input.experts), Buffer::words(context, &input.weights));
    let dropped = Buffer::new(context, input.experts.len() as u64);
    let counter = Buffer::words(context, &[calls]);
    let pack = Pack {
        shape,
        tokens: input.tokens,
        x: x.span(),
        experts: experts.span(),
        weights: weights.span(),
        n_experts: input.map.experts(),
        rank_of: rank_of.span(),
        local_of: local_of.span(),
        slots: &Addresses::new(stream, table.range(), &spans).unwrap(),
        places: places.span(),
        dropped: dropped.span(),
        counter: counter.word(),
        digest: DIGEST,
        refused: 0,
    };
    launch(&pack).unwrap();
    stream.synchronize().unwrap();
    for (source, bytes) in [(&x, input.x.as_slice()), (&experts, bytemuck::cast_slice(&input.experts))] {
        assert_eq!(source.content(), bytes, "sources stay as they are");
    }
    Packed {
        slots: slots.iter().map(Buffer::content).collect(),
        places: places.read(),
        dropped: dropped.content(),
        counter: counter.read::<u64>()[0],
    }
}

/// Packs, and compares every byte with the reference.
fn check(device: &Device, input: &Input) {
    compare(&pack(device, input, 41), input);
}

/// What the call behind 41 others must leave behind.
fn compare(packed: &Packed, input: &Input) {
    let what = format!("{:?}, {} tokens to {} ranks", input.shape, input.tokens, input.map.ranks());
    for (rank, slot) in (0..).zip(&packed.slots) {
        let expected = input.slot(rank, DIGEST, 42);
        let differs = slot.iter().zip(&expected).position(|(a, b)| a != b);
        assert_eq!((differs, slot.len()), (None, expected.len()), "slot for rank {rank}: {what}");
    }
    assert_eq!(packed.places, input.places(), "{what}");
    assert_eq!(packed.dropped, input.masked(), "{what}");
    assert_eq!((packed.counter, packed.fault()), (42, None), "{what}");
}

#[test]
fn every_byte_of_every_slot_is_that_of_the_reference() {
    with_kernels("kernels::pack::every_byte_of_every_slot_is_that_of_the_reference", |device| {
        let mut random = Random(1);
        // (max_tokens, tokens, top_k, row_bytes, experts, ranks)
        for (max_tokens, tokens, top_k, row_bytes, experts, ranks) in [
            (1, 1, 1, 16, 1, 1),
            (8, 0, 2, 32, 4, 2),
            (8, 8, 8, 48, 4, 4),
            (5, 3, 3, 4112, 7, 3),
            (64, 37, 8, 14336, 16, 8),
            (33, 33, 4, 1024, 3, 5),
            (300, 257, 2, 16, 80, 40),
            (1300, 1299, 3, 16, 8, 2),
            (1100, 1025, 1, 32, 6, 6),
        ] {
            let shape = SlotShape::new(max_tokens, top_k, row_bytes).unwrap();
            for source in [0, ranks - 1] {
                check(device, &Input::any(&mut random, shape, (experts, ranks), source, tokens));
            }
        }
    });
}

#[test]
fn pack_takes_dropped_choices_single_rank_and_repeated_expert() {
    with_kernels("kernels::pack::pack_takes_dropped_choices_single_rank_and_repeated_expert", |device| {
        let shape = SlotShape::new(20, 4, 64).unwrap();
        for experts in [[-1; 4], [0, 1, 2, 3], [5, 5, -1, 5], [7, 0, 7, 0]] {
            let mut input = Input::any(&mut Random(2), shape, (8, 2), 1, 20);
            input.experts = experts.repeat(20);
            check(device, &input);
        }
    });
}

#[test]
fn rows_of_a_slot_are_those_that_the_loops_of_the_host_gather() {
    with_kernels("kernels::pack::rows_of_a_slot_are_those_that_the_loops_of_the_host_gather", |device| {
        let shape = SlotShape::new(48, 2, 2048).unwrap();
        let input = Input::any(&mut Random(3), shape, (8, 4), 2, 48);
        let packed = pack(device, &input, 0);
        for rank in 0..4 {
            let tokens = input.tokens_at(rank);
            let mut rows = vec![0; tokens.len() * 2048];
            let (to, from) = (rows.as_mut_ptr(), input.x.as_ptr());
            // SAFETY: all tokens are rows of `x`, and `rows` has room for each.
            unsafe {
                RowKernels::new(Simd::PORTABLE).gather(to, from, 2048, &tokens, Stores::Cached);
            }
            assert!(!tokens.is_empty());
            assert_eq!(packed.slots[rank as usize][shape.rows_at() as usize..][..rows.len()], rows);
        }
    });
}

#[test]
fn records_are_those_that_the_loops_of_the_host_make_to_the_bit() {
    with_kernels("kernels::pack::records_are_those_that_the_loops_of_the_host_make_to_the_bit", |device| {
        let mut random = Random(9);
        for (hidden, max_tokens, tokens, ranks) in [
            (8, 3, 3, 1),
            (128, 9, 7, 2),
            (136, 40, 40, 4),
            (2048, 33, 30, 3),
            (7168, 8, 8, 4),
            (64, 5, 0, 2),
        ] {
            let record = Fp8RowShape::new(hidden);
            let shape = SlotShape::new(max_tokens, 2, record.bytes() as u64).unwrap();
            let mut input = Input::any(&mut random, shape, (8, ranks), 0, tokens);
            // The reference packs what the host's loops made; the device gets the rows.
            let rows: Vec<u8> =
                (0..tokens).flat_map(|_| any_row(&mut random, Arithmetic::Bf16, hidden as usize)).collect();
            let mut records = vec![0; tokens as usize * record.bytes()];
            RowKernels::new(Simd::best()).quantize(Arithmetic::Bf16, record, &rows, &mut records).unwrap();
            input.x = rows;
            let packed =
                packed(device, &input, 41, |pack| device.kernels.pack_fp8(&device.stream, pack, hidden));
            input.x = records;
            compare(&packed, &input);
        }
    });
}

#[test]
fn every_bf16_gets_fp8_code_of_host_loops_at_every_scale() {
    with_kernels("kernels::pack::every_bf16_gets_fp8_code_of_host_loops_at_every_scale", |device| {
        // A row for each exponent of the largest value: itself, then 127 others that no larger one
        // hides.
        let (hidden, record) = (128, Fp8RowShape::new(128));
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let rows: Vec<u8> = (0..1024_u32)
            .flat_map(|row| {
                let largest = (row as u16 % 255) << 7 | 0x5a;
                let others = all.iter().cycle().skip(row as usize * 129).take(127).copied();
                [largest].into_iter().chain(others).flat_map(u16::to_ne_bytes).collect::<Vec<_>>()
            })
            .collect();
        let shape = SlotShape::new(1024, 1, record.bytes() as u64).unwrap();
        let mut input = Input::any(&mut Random(10), shape, (1, 1), 0, 1024);
        input.experts = vec![0; 1024];
        let mut records = vec![0; 1024 * record.bytes()];
        RowKernels::new(Simd::PORTABLE).quantize(Arithmetic::Bf16, record, &rows, &mut records).unwrap();
        input.x = rows;
        let packed = packed(device, &input, 41, |pack| device.kernels.pack_fp8(&device.stream, pack, hidden));
        input.x = records;
        compare(&packed, &input);
    });
}

#[test]
fn pack_reports_token_of_unknown_expert_and_drops_choice() {
    with_kernels("kernels::pack::pack_reports_token_of_unknown_expert_and_drops_choice", |device| {
        let shape = SlotShape::new(300, 2, 32).unwrap();
        for bad in [8, -2, i32::MAX, i32::MIN] {
            let mut input = Input::any(&mut Random(4), shape, (8, 4), 0, 300);
            (input.experts[2 * 290], input.experts[2 * 271 + 1]) = (bad, bad);
            let packed = pack(device, &input, 6);
            assert_eq!(packed.fault(), Some(KernelFault::ExpertOutOfRange { token: 271 }), "{bad}");
            for rank in 0..4 {
                assert!(packed.slots[rank as usize] == input.slot(rank, DIGEST, 7), "{bad}");
            }
            assert_eq!(packed.places, input.places());
        }
    });
}

#[test]
fn pack_reports_first_token_of_map_to_no_rank_and_drops_it() {
    with_kernels("kernels::pack::pack_reports_first_token_of_map_to_no_rank_and_drops_it", |device| {
        let shape = SlotShape::new(30, 2, 32).unwrap();
        for rank in [4, -1, i32::MAX, i32::MIN] {
            let mut input = Input::any(&mut Random(6), shape, (8, 4), 0, 30);
            input.misplaced = Some((5, rank));
            let token = input.experts.iter().position(|&expert| expert == 5).unwrap() as u32 / 2;
            let packed = pack(device, &input, 6);
            assert_eq!(packed.fault(), Some(KernelFault::RankOutOfRange { token }), "{rank}");
            for rank in 0..4 {
                assert!(packed.slots[rank as usize] == input.slot(rank, DIGEST, 7), "{rank}");
            }
            assert_eq!(packed.places, input.places());
        }
    });
}

#[test]
fn choices_of_a_masked_expert_are_dropped_and_marked() {
    with_kernels("kernels::pack::choices_of_a_masked_expert_are_dropped_and_marked", |device| {
        let shape = SlotShape::new(300, 3, 32).unwrap();
        for expert in [0, 5] {
            let mut input = Input::any(&mut Random(8), shape, (8, 4), 2, 290);
            input.misplaced = Some((expert, Pack::MASKED));
            assert!(input.masked().contains(&1));
            check(device, &input);
        }
    });
}

#[test]
fn pack_operands_too_small_or_misaligned_are_refused_by_name() {
    with_kernels("kernels::pack::pack_operands_too_small_or_misaligned_are_refused_by_name", |device| {
        let Device { context, stream, kernels } = device;
        let shape = SlotShape::new(4, 2, 32).unwrap();
        let memory = Buffer::new(context, 4096);
        let slots = |len| [memory.part(0, len), memory.part(1024, len)];
        let table = Buffer::new(context, 16);
        let addresses = Addresses::new(stream, table.range(), &slots(shape.bytes())).unwrap();
        let small = Addresses::new(stream, table.range(), &slots(shape.bytes() - 1)).unwrap();
        let good = Pack {
            shape,
            tokens: 4,
            x: memory.part(2048, 128),
            experts: memory.part(2176, 32),
            weights: memory.part(2208, 32),
            n_experts: 3,
            rank_of: memory.part(2240, 12),
            local_of: memory.part(2252, 12),
            slots: &addresses,
            places: memory.part(2304, 32),
            dropped: memory.part(2336, 8),
            counter: memory.range().word(2400).unwrap(),
            digest: DIGEST,
            refused: 0,
        };
        let too_small =
            |what, given, needed| Err(DeviceError::TooSmall { kernel: "pack", what, given, needed });
        for (pack, what, given, needed) in [
            (Pack { x: memory.part(2048, 127), ..good }, "x", 127, 128),
            (Pack { experts: memory.part(2176, 31), ..good }, "experts", 31, 32),
            (Pack { weights: memory.part(2208, 31), ..good }, "weights", 31, 32),
            (Pack { rank_of: memory.part(2240, 11), ..good }, "rank_of", 11, 12),
            (Pack { dropped: memory.part(2336, 7), ..good }, "dropped", 7, 8),
            (Pack { local_of: memory.part(2252, 11), ..good }, "local_of", 11, 12),
            (Pack { places: memory.part(2304, 31), ..good }, "places", 31, 32),
            (Pack { slots: &small, ..good }, "slots", shape.bytes() - 1, shape.bytes()),
        ] {
            assert_eq!(kernels.pack(stream, &pack), too_small(what, given, needed));
        }
        let misaligned = kernels.pack(stream, &Pack { x: memory.part(2056, 128), ..good });
        assert!(matches!(misaligned, Err(DeviceError::Misaligned { what: "x", align: 16, .. })));
        for (pack, what, given) in
            [(Pack { tokens: 5, ..good }, "tokens", 5), (Pack { n_experts: 0, ..good }, "n_experts", 0)]
        {
            let Err(DeviceError::Shape { kernel: "pack", what: said, given: seen, .. }) =
                kernels.pack(stream, &pack)
            else {
                panic!("{what}")
            };
            assert_eq!((said, seen), (what, given));
        }
        for (hidden, what) in [(12, "hidden"), (0, "hidden"), (40, "row_bytes")] {
            let Err(DeviceError::Shape { what: said, .. }) = kernels.pack_fp8(stream, &good, hidden) else {
                panic!("{hidden}")
            };
            assert_eq!(said, what);
        }
        stream.synchronize().unwrap();
        assert!(memory.content().iter().all(|&byte| byte == super::buffer::POISON), "nothing was launched");
        assert!(matches!(
            Addresses::new(stream, table.range(), &[memory.part(8, 16)]),
            Err(DeviceError::Misaligned { align: 16, .. })
        ));
        assert!(matches!(
            Addresses::new(stream, table.range(), &[memory.part(0, 16); 3]),
            Err(DeviceError::TooSmall { what: "its memory", given: 16, needed: 24, .. })
        ));
        assert!(matches!(Addresses::new(stream, table.range(), &[]), Err(DeviceError::Shape { .. })));
    });
}
