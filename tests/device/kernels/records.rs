//! Records of rows by an index: those of the host's loops, to the bit.

use sidelane::device::{RecordArgs, RunArgs};
use sidelane::dtype::{Dtype, Fp8RowShape};
use sidelane::error::{DeviceError, KernelFault};
use sidelane::rows::{Arithmetic, RowKernels, Simd};

use super::buffer::{Buffer, POISON};
use super::regroup::{placed, runs_of};
use super::{Device, with_kernels};
use crate::rows_common::Random;
use crate::rows_common::values::any_row;

/// The records that the device makes, and its status.
fn records(
    device: &Device,
    (dtype, hidden): (Arithmetic, usize),
    from: &[u8],
    index: Option<&[i32]>,
) -> (Vec<u8>, Option<KernelFault>) {
    let Device { context, stream, kernels } = device;
    let sources = (from.len() / (hidden * dtype.size())) as u32;
    let rows = index.map_or(sources, |index| index.len() as u32);
    let (source, index) = (Buffer::of(context, from), index.map(|index| Buffer::words(context, index)));
    let record = Fp8RowShape::new(hidden as u32).bytes() as u64;
    let (out, status) = (Buffer::new(context, u64::from(rows) * record), Buffer::words(context, &[0_u32]));
    let args = RecordArgs {
        hidden: hidden as u32,
        dtype: dtype.into(),
        sources,
        rows,
        from: source.span(),
        index: index.as_ref().map(Buffer::span),
        out: out.span(),
        runs: None,
        status: status.word(),
    };
    kernels.records(stream, &args).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(source.content(), from);
    (out.content(), KernelFault::of(status.read::<u32>()[0]))
}

/// The same by the loops of the host.
fn of_host((dtype, hidden): (Arithmetic, usize), from: &[u8], index: &[i32]) -> Vec<u8> {
    let shape = Fp8RowShape::new(hidden as u32);
    let mut all = vec![0; from.len() / (hidden * dtype.size()) * shape.bytes()];
    RowKernels::new(Simd::best()).quantize(dtype, shape, from, &mut all).unwrap();
    let one = |row: usize| all[row * shape.bytes()..][..shape.bytes()].to_vec();
    index.iter().flat_map(|&row| usize::try_from(row).map_or(vec![0; shape.bytes()], one)).collect()
}

#[test]
fn records_are_those_of_the_hosts_loops_and_pads_are_zero() {
    with_kernels("kernels::records::records_are_those_of_the_hosts_loops_and_pads_are_zero", |device| {
        let mut random = Random(1);
        for dtype in [Arithmetic::F32, Arithmetic::F16, Arithmetic::Bf16] {
            for (hidden, sources, rows) in
                [(8, 1, 1), (128, 300, 900), (136, 7, 40), (200, 5, 33), (4096, 3, 9), (16, 0, 4), (24, 9, 0)]
            {
                let from: Vec<u8> = (0..sources).flat_map(|_| any_row(&mut random, dtype, hidden)).collect();
                let index: Vec<i32> =
                    (0..rows).map(|_| (random.next() % (sources as u64 + 1)) as i32 - 1).collect();
                let (shape, what) =
                    ((dtype, hidden), format!("{rows} of {sources} rows of {hidden} {dtype:?}"));
                let (seen, status) = records(device, shape, &from, Some(&index));
                assert_eq!(status, None);
                assert!(seen == of_host(shape, &from, &index), "{what}");
                let (seen, status) = records(device, shape, &from, None);
                assert_eq!(status, None);
                let own: Vec<i32> = (0..sources).collect();
                assert!(seen == of_host(shape, &from, &own), "each row its own, {what}");
            }
        }
    });
}

#[test]
fn records_in_runs_go_to_their_places_and_no_byte_else_changes() {
    let test = "kernels::records::records_in_runs_go_to_their_places_and_no_byte_else_changes";
    with_kernels(test, |Device { context, stream, kernels }| {
        let mut random = Random(0x0_0124);
        for (dtype, hidden, sources, entries) in
            [(Arithmetic::Bf16, 128, 30, 300), (Arithmetic::F32, 200, 5, 40), (Arithmetic::F16, 16, 9, 70)]
        {
            let from: Vec<u8> = (0..sources).flat_map(|_| any_row(&mut random, dtype, hidden)).collect();
            let index: Vec<i32> =
                (0..entries).map(|_| (random.next() % (sources as u64 + 1)) as i32 - 1).collect();
            let (runs, places) = runs_of(&mut random, entries);
            let mut words = Vec::new();
            let rows = RunArgs::lay_out(&runs, &mut words);
            let [of_words, of_index] = [Buffer::words(context, &words), Buffer::words(context, &index)];
            let record = Fp8RowShape::new(hidden as u32).bytes();
            let (source, out) =
                (Buffer::of(context, &from), Buffer::new(context, u64::from(places) * record as u64));
            let (count, status) = (runs.len() as u32, Buffer::words(context, &[0_u32]));
            let args = RecordArgs {
                hidden: hidden as u32,
                dtype: dtype.into(),
                sources,
                rows,
                from: source.span(),
                index: Some(of_index.span()),
                out: out.span(),
                runs: Some(RunArgs { runs: of_words.span(), count, entries, places }),
                status: status.word(),
            };
            kernels.records(stream, &args).unwrap();
            stream.synchronize().unwrap();
            let made: Vec<Vec<u8>> =
                index.iter().map(|&row| of_host((dtype, hidden), &from, &[row])).collect();
            assert_eq!(status.read::<u32>()[0], 0);
            assert!(out.content() == placed(&runs, places, &made, record), "{entries} of {hidden} {dtype:?}");
        }
    });
}

#[test]
fn index_without_row_is_reported_and_yields_record_of_zeros() {
    let test = "kernels::records::index_without_row_is_reported_and_yields_record_of_zeros";
    with_kernels(test, |device| {
        let (shape, from) = ((Arithmetic::Bf16, 16), [0x3f; 4 * 32]);
        for bad in [4, -2, i32::MAX, i32::MIN] {
            let (seen, status) = records(device, shape, &from, Some(&[0, 3, bad, 1]));
            assert_eq!(status, Some(KernelFault::IndexOutOfRange { at: 2 }));
            assert!(seen == of_host(shape, &from, &[0, 3, -1, 1]));
        }
    });
}

#[test]
fn memory_that_is_too_small_is_refused_by_name() {
    with_kernels("kernels::records::memory_that_is_too_small_is_refused_by_name", |device| {
        let Device { context, stream, kernels } = device;
        let memory = Buffer::new(context, 1024);
        let good = RecordArgs {
            hidden: 16,
            dtype: Dtype::Bf16,
            sources: 4,
            rows: 3,
            from: memory.part(0, 128),
            index: Some(memory.part(128, 12)),
            out: memory.part(256, 96),
            runs: None,
            status: memory.range().word(512).unwrap(),
        };
        for (records, what, given, needed) in [
            (RecordArgs { from: memory.part(0, 127), ..good }, "from", 127, 128),
            (RecordArgs { index: Some(memory.part(128, 11)), ..good }, "index", 11, 12),
            (RecordArgs { out: memory.part(256, 95), ..good }, "out", 95, 96),
        ] {
            let expected = DeviceError::TooSmall { kernel: "records", what, given, needed };
            assert_eq!(kernels.records(stream, &records), Err(expected));
        }
        for (records, what) in [
            (RecordArgs { hidden: 0, ..good }, "hidden"),
            (RecordArgs { hidden: 12, ..good }, "hidden"),
            (RecordArgs { index: None, rows: 5, ..good }, "rows"),
        ] {
            let refused = kernels.records(stream, &records);
            assert!(matches!(refused, Err(DeviceError::Shape { what: seen, .. }) if seen == what));
        }
        let refused = kernels.records(stream, &RecordArgs { dtype: Dtype::Bytes, ..good });
        assert!(matches!(refused, Err(DeviceError::NoSum { rows: Dtype::Bytes, .. })));
        stream.synchronize().unwrap();
        assert!(memory.content().iter().all(|&byte| byte == POISON), "nothing was launched");
    });
}
