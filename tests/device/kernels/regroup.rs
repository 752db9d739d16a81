//! Rows by an index.

use sidelane::device::{PermuteArgs, RunArgs};
use sidelane::error::{DeviceError, KernelFault};
use sidelane::plan::RowRun;
use sidelane::rows::{RowKernels, Simd, Stores};

use super::buffer::{Buffer, POISON};
use super::{Device, with_kernels};
use crate::rows_common::Random;

/// The rows that the device makes, and its status.
fn regroup(device: &Device, row_bytes: u64, from: &[u8], index: &[i32]) -> (Vec<u8>, Option<KernelFault>) {
    let Device { context, stream, kernels } = device;
    let (source, index) = (Buffer::of(context, from), Buffer::words(context, index));
    let rows = index.range().len() / 4;
    let (out, status) = (Buffer::new(context, rows * row_bytes), Buffer::words(context, &[0_u32]));
    let regroup = PermuteArgs {
        row_bytes,
        sources: (from.len() as u64 / row_bytes) as u32,
        rows: rows as u32,
        from: source.span(),
        index: index.span(),
        out: out.span(),
        runs: None,
        status: status.word(),
    };
    kernels.regroup(stream, &regroup).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(source.content(), from);
    (out.content(), KernelFault::of(status.read::<u32>()[0]))
}

/// The same by the loops of the host.
fn of_rows(row_bytes: usize, from: &[u8], index: &[i32]) -> Vec<u8> {
    let mut out = vec![POISON; index.len() * row_bytes];
    let loops = RowKernels::new(Simd::best());
    for (row, &index) in out.chunks_exact_mut(row_bytes).zip(index) {
        let to = row.as_mut_ptr();
        // SAFETY: the row is one, and an index names a row that is there.
        unsafe {
            match u32::try_from(index) {
                Ok(index) => loops.gather(to, from.as_ptr(), row_bytes, &[index], Stores::Cached),
                Err(_) => loops.zero(to, row_bytes, Stores::Cached),
            }
        }
    }
    out
}

#[test]
fn rows_are_those_that_the_index_names_and_pads_are_zero() {
    with_kernels("kernels::regroup::rows_are_those_that_the_index_names_and_pads_are_zero", |device| {
        let mut random = Random(1);
        for (row_bytes, sources, rows) in
            [(16, 1, 1), (16, 300, 9000), (48, 20, 1), (4112, 7, 90), (14336, 5, 33), (32, 0, 4), (64, 9, 0)]
        {
            let from: Vec<u8> = (0..row_bytes * sources).map(|_| random.next() as u8).collect();
            let index: Vec<i32> =
                (0..rows).map(|_| (random.next() % (sources as u64 + 1)) as i32 - 1).collect();
            let (seen, status) = regroup(device, row_bytes as u64, &from, &index);
            assert_eq!(status, None);
            assert!(seen == of_rows(row_bytes, &from, &index), "{rows} of {sources} rows of {row_bytes}");
        }
    });
}

/// Runs of so many entries in any order, their places, which have gaps, and rows of the list.
pub fn runs_of(random: &mut Random, entries: u32) -> (Vec<RowRun>, u32) {
    let (mut runs, mut first, mut to_row) = (Vec::new(), 0, 0);
    while first < entries {
        let mut upto = |most: u32| (random.next() % u64::from(most + 1)) as u32;
        let (gap, count, pad) = (upto(2), upto(9).min(entries - first), upto(3));
        runs.push(RowRun { to_row: to_row + gap, first, count, pad });
        (first, to_row) = (first + count, to_row + gap + count + pad);
    }
    for at in (1..runs.len()).rev() {
        runs.swap(at, (random.next() % (at as u64 + 1)) as usize);
    }
    (runs, to_row)
}

/// Rows of an index in runs: each where its run says, pads of zeros, and no other byte.
pub fn placed(runs: &[RowRun], places: u32, rows: &[Vec<u8>], row_bytes: usize) -> Vec<u8> {
    let mut out = vec![POISON; places as usize * row_bytes];
    for &RowRun { to_row, first, count, pad } in runs {
        let zeros = vec![0; row_bytes];
        let entries = rows[first as usize..][..count as usize].iter();
        for (row, to) in entries.chain(vec![&zeros; pad as usize]).zip(to_row as usize..) {
            out[to * row_bytes..][..row_bytes].copy_from_slice(row);
        }
    }
    out
}

#[test]
fn rows_in_runs_go_to_their_places_and_no_byte_else_changes() {
    let test = "kernels::regroup::rows_in_runs_go_to_their_places_and_no_byte_else_changes";
    with_kernels(test, |Device { context, stream, kernels }| {
        let mut random = Random(0x0_0123);
        for (row_bytes, sources, entries) in [(16, 300, 2000), (4112, 7, 90), (64, 5, 1)] {
            let from: Vec<u8> = (0..row_bytes * sources).map(|_| random.next() as u8).collect();
            let index: Vec<i32> =
                (0..entries).map(|_| (random.next() % (sources as u64 + 1)) as i32 - 1).collect();
            let (runs, places) = runs_of(&mut random, entries);
            let mut words = Vec::new();
            let rows = RunArgs::lay_out(&runs, &mut words);
            let [of_words, of_index] = [Buffer::words(context, &words), Buffer::words(context, &index)];
            let (source, out) =
                (Buffer::of(context, &from), Buffer::new(context, u64::from(places) * row_bytes as u64));
            let (count, status) = (runs.len() as u32, Buffer::words(context, &[0_u32]));
            let list = RunArgs { runs: of_words.span(), count, entries, places };
            let good = PermuteArgs {
                row_bytes: row_bytes as u64,
                sources: sources as u32,
                rows,
                from: source.span(),
                index: of_index.span(),
                out: out.span(),
                runs: Some(list),
                status: status.word(),
            };
            kernels.regroup(stream, &good).unwrap();
            stream.synchronize().unwrap();
            let made: Vec<Vec<u8>> = index.iter().map(|&row| of_rows(row_bytes, &from, &[row])).collect();
            assert_eq!(status.read::<u32>()[0], 0);
            assert!(out.content() == placed(&runs, places, &made, row_bytes), "{entries} of {row_bytes}");

            // A place or an entry that is not there is reported, and nothing is written for it.
            for list in [RunArgs { places: places - 1, ..list }, RunArgs { entries: entries - 1, ..list }] {
                status.write(0, &[0; 4]);
                kernels.regroup(stream, &PermuteArgs { runs: Some(list), ..good }).unwrap();
                stream.synchronize().unwrap();
                let fault = KernelFault::of(status.read::<u32>()[0]);
                assert!(matches!(fault, Some(KernelFault::IndexOutOfRange { .. })), "{fault:?}");
            }
        }
    });
}

#[test]
fn an_index_without_a_row_is_reported_and_gives_zeros() {
    with_kernels("kernels::regroup::an_index_without_a_row_is_reported_and_gives_zeros", |device| {
        let from = [7; 4 * 32];
        for bad in [4, -2, i32::MAX, i32::MIN] {
            let (seen, status) = regroup(device, 32, &from, &[0, 3, bad, 1]);
            assert_eq!(status, Some(KernelFault::IndexOutOfRange { at: 2 }));
            assert_eq!(seen, of_rows(32, &from, &[0, 3, -1, 1]));
        }
    });
}

#[test]
fn memory_that_is_too_small_is_refused_by_name() {
    with_kernels("kernels::regroup::memory_that_is_too_small_is_refused_by_name", |device| {
        let Device { context, stream, kernels } = device;
        let memory = Buffer::new(context, 1024);
        let good = PermuteArgs {
            row_bytes: 32,
            sources: 4,
            rows: 3,
            from: memory.part(0, 128),
            index: memory.part(128, 12),
            out: memory.part(256, 96),
            runs: None,
            status: memory.range().word(512).unwrap(),
        };
        for (regroup, what, given, needed) in [
            (PermuteArgs { from: memory.part(0, 127), ..good }, "from", 127, 128),
            (PermuteArgs { index: memory.part(128, 11), ..good }, "index", 11, 12),
            (PermuteArgs { out: memory.part(256, 95), ..good }, "out", 95, 96),
        ] {
            let expected = DeviceError::TooSmall { kernel: "regroup", what, given, needed };
            assert_eq!(kernels.regroup(stream, &regroup), Err(expected));
        }
        for row_bytes in [0, 24, 1 << 32] {
            let refused = kernels.regroup(stream, &PermuteArgs { row_bytes, ..good });
            assert!(matches!(refused, Err(DeviceError::Shape { what: "row_bytes", .. })));
        }
        stream.synchronize().unwrap();
        assert!(memory.content().iter().all(|&byte| byte == POISON), "nothing was launched");
    });
}
