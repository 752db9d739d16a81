//! The order of rows that are packed by bin.

use sidelane::device::SortArgs;
use sidelane::error::DeviceError;

use super::buffer::Buffer;
use super::{Device, with_kernels};
use crate::rows_common::Random;

/// Choices: about one in four is dropped, one in eight is no expert.
fn choices(random: &mut Random, count: u32, experts: u32) -> Vec<i32> {
    let any = |_| match random.next() % 8 {
        0 | 1 => -1,
        2 => experts as i32 + (random.next() % 3) as i32 * 1000,
        _ => (random.next() % u64::from(experts)) as i32,
    };
    (0..count).map(any).collect()
}

/// The tokens of the choices, by bin and then token, each once in a bin if asked; -1 behind the
/// last.
fn sorted(choices: &[i32], top_k: u32, bin_of: &[i32], once: bool) -> Vec<i32> {
    let mut rows: Vec<(i32, usize)> = choices
        .iter()
        .enumerate()
        .filter_map(|(at, &expert)| Some((*bin_of.get(usize::try_from(expert).ok()?)?, at)))
        .collect();
    rows.sort();
    let mut rows: Vec<_> = rows.into_iter().map(|(bin, at)| (bin, (at / top_k as usize) as i32)).collect();
    if once {
        rows.dedup();
    }
    let mut order: Vec<i32> = rows.into_iter().map(|(_, token)| token).collect();
    order.resize(choices.len(), -1);
    order
}

#[test]
fn rows_lie_by_bin_and_then_token() {
    with_kernels(
        "kernels::sort_choices::rows_lie_by_bin_and_then_token",
        |Device { context, stream, kernels }| {
            let mut random = Random(1);
            // A word has a bit for each of 64 bins; more are counted otherwise.
            for (tokens, top_k, experts, bins) in [
                (1, 1, 1, 1),
                (7, 3, 5, 7),
                (700, 2, 9, 9),
                (513, 5, 6, 2),
                (400, 8, 40, 3),
                (300, 6, 80, 64),
                (300, 6, 80, 65),
            ] {
                let experts_of = choices(&mut random, tokens * top_k, experts);
                let bin_of: Vec<i32> = (0..experts).map(|_| (random.next() % bins) as i32).collect();
                let (list, map) = (Buffer::words(context, &experts_of), Buffer::words(context, &bin_of));
                let order = Buffer::new(context, u64::from(tokens * top_k) * 4);
                let launch = SortArgs {
                    experts: list.span(),
                    choices: tokens * top_k,
                    top_k,
                    bin_of: map.span(),
                    n_experts: experts,
                    bins: bins as u32,
                    once: false,
                    order: order.span(),
                };
                for once in [false, true] {
                    kernels.sort_choices(stream, &SortArgs { once, ..launch }).unwrap();
                    stream.synchronize().unwrap();
                    let expected = sorted(&experts_of, top_k, &bin_of, once);
                    assert_eq!(order.read::<i32>(), expected, "{tokens} tokens of {top_k}, once: {once}");
                }
                let refused =
                    kernels.sort_choices(stream, &SortArgs { choices: tokens * top_k + 1, ..launch });
                assert!(
                    matches!(refused, Err(DeviceError::TooSmall { kernel: "sort_choices", .. })),
                    "{refused:?}"
                );
            }
        },
    );
}
