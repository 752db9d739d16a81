//! What goes with rank-major rows, apart.

use sidelane::device::ChoiceArgs;
use sidelane::error::DeviceError;

use super::buffer::{Buffer, POISON};
use super::{Device, with_kernels};
use crate::rows_common::Random;

#[test]
fn experts_and_weights_lie_apart_and_rows_are_counted_by_expert() {
    let test = "kernels::choices::experts_and_weights_lie_apart_and_rows_are_counted_by_expert";
    with_kernels(test, |Device { context, stream, kernels }| {
        let mut random = Random(1);
        for (rows, top_k, n_experts) in
            [(1, 1, 1), (700, 3, 5), (40, 8, 1), (9, 2, 600), (0, 4, 3), (5, 2, 0)]
        {
            let choices = (rows * top_k) as usize;
            let ids: Vec<u32> =
                (0..choices).map(|_| (random.next() % (u64::from(n_experts) + 1)) as u32).collect();
            let weights: Vec<u32> = (0..choices).map(|_| random.next() as u32).collect();
            let both = ids.chunks(top_k as usize).zip(weights.chunks(top_k as usize));
            let metadata: Vec<u32> = both.flat_map(|(ids, weights)| [ids, weights].concat()).collect();
            let metadata = Buffer::words(context, &metadata);
            let [experts, apart] = [0, 1].map(|_| Buffer::new(context, choices as u64 * 4));
            let counts = Buffer::new(context, u64::from(n_experts) * 8);
            let args = ChoiceArgs {
                rows,
                top_k,
                n_experts,
                metadata: metadata.span(),
                experts: experts.span(),
                weights: apart.span(),
                counts: counts.span(),
            };
            kernels.choices(stream, &args).unwrap();
            stream.synchronize().unwrap();
            let expected: Vec<i32> = ids.iter().map(|&id| id as i32 - 1).collect();
            assert_eq!((experts.read::<i32>(), apart.read::<u32>()), (expected, weights));
            let counted = |expert| ids.iter().filter(|&&id| id == expert + 1).count() as i64;
            assert_eq!(counts.read::<i64>(), (0..n_experts).map(counted).collect::<Vec<_>>());
        }
    });
}

#[test]
fn memory_that_is_too_small_is_refused_by_name() {
    with_kernels("kernels::choices::memory_that_is_too_small_is_refused_by_name", |device| {
        let Device { context, stream, kernels } = device;
        let memory = Buffer::new(context, 1024);
        let good = ChoiceArgs {
            rows: 3,
            top_k: 2,
            n_experts: 4,
            metadata: memory.part(0, 48),
            experts: memory.part(128, 24),
            weights: memory.part(256, 24),
            counts: memory.part(512, 32),
        };
        for (choices, what, given, needed) in [
            (ChoiceArgs { metadata: memory.part(0, 47), ..good }, "metadata", 47, 48),
            (ChoiceArgs { experts: memory.part(128, 23), ..good }, "experts", 23, 24),
            (ChoiceArgs { weights: memory.part(256, 23), ..good }, "weights", 23, 24),
            (ChoiceArgs { counts: memory.part(512, 31), ..good }, "counts", 31, 32),
        ] {
            let expected = DeviceError::TooSmall { kernel: "choices", what, given, needed };
            assert_eq!(kernels.choices(stream, &choices), Err(expected));
        }
        let refused = kernels.choices(stream, &ChoiceArgs { top_k: 0, ..good });
        assert!(matches!(refused, Err(DeviceError::Shape { what: "top_k", .. })));
        stream.synchronize().unwrap();
        assert!(memory.content().iter().all(|&byte| byte == POISON), "nothing was launched");
    });
}
