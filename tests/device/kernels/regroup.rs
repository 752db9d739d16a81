//! Rows by an index.

use sidelane::device::PermuteArgs;
use sidelane::error::DeviceError;
use sidelane::error::KernelFault;
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
