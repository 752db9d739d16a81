//! Check: slots of another call or setup are found before anybody believes them.

use bytemuck::bytes_of;
use sidelane::device::Check;
use sidelane::error::{DeviceError, KernelFault};
use sidelane::plan::{SlotHead, SlotShape};

use super::buffer::Buffer;
use super::{Device, with_kernels};

const DIGEST: u64 = 0xfeed_0123_4567_89ab;
const CALL: u64 = (1 << 32) + 9;
const RANKS: usize = 300;

fn shape() -> SlotShape {
    SlotShape::new(1, 1, 16).unwrap()
}

fn good() -> Vec<SlotHead> {
    vec![SlotHead { digest: DIGEST, call: CALL, ..SlotHead::default() }; RANKS]
}

/// What the device finds in slots with these heads, where the status is this before.
fn check(device: &Device, heads: &[SlotHead], before: u32) -> Option<KernelFault> {
    let (status, verdict, _) = checked(device, heads, (before, 0));
    assert_eq!(verdict, (status, CALL as u32), "the verdict is the status");
    status
}

/// A verdict, and the number of its call modulo 2^32.
type Verdict = (Option<KernelFault>, u32);

/// The status, the verdict and the slots, where the status was this before, at this rank.
fn checked(
    device: &Device,
    heads: &[SlotHead],
    (before, rank): (u32, u32),
) -> (Option<KernelFault>, Verdict, Vec<u8>) {
    let Device { context, stream, kernels } = device;
    let received = Buffer::new(context, shape().bytes() * heads.len() as u64);
    for (at, head) in (0..).step_by(shape().bytes() as usize).zip(heads) {
        received.write(at, bytes_of(head));
    }
    let (counter, status) = (Buffer::words(context, &[CALL]), Buffer::words(context, &[before]));
    let verdict = Buffer::words(context, &[0xcbcb_cbcb_cbcb_u64]);
    let check = Check {
        shape: shape(),
        ranks: heads.len() as u32,
        rank,
        received: received.span(),
        counter: counter.word(),
        status: status.word(),
        verdict: verdict.word(),
        digest: DIGEST,
    };
    kernels.check(stream, &check).unwrap();
    stream.synchronize().unwrap();
    let [word, call] = verdict.read::<u32>()[..] else { panic!("a word of 64 bits") };
    (KernelFault::of(status.read::<u32>()[0]), (KernelFault::of(word), call), received.content())
}

#[test]
fn refusal_of_a_rank_is_the_verdict_of_its_call_and_leaves_no_rows() {
    with_kernels(
        "kernels::check::refusal_of_a_rank_is_the_verdict_of_its_call_and_leaves_no_rows",
        |device| {
            let slot = shape().bytes() as usize;
            let by = |rank: u32| KernelFault::Refused { rank };
            let missing = KernelFault::ExpertOutOfRange { token: 9 };
            for (refusing, rank, expected) in [
                (&[(0, 8)][..], 1, by(0)),
                (&[(299, 8 | 299 << 8), (270, 1 | 3 << 8)], 0, by(270)),
                // A rank's own reason is the verdict there.
                (&[(3, 8 | 3 << 8), (17, 1 | 9 << 8)], 17, missing),
            ] {
                let mut heads = good();
                heads.iter_mut().for_each(|head| head.rows = 1);
                refusing.iter().for_each(|&(rank, word)| heads[rank as usize].refused = word);
                let (status, verdict, slots) = checked(device, &heads, (0, rank));
                assert_eq!((status, verdict), (None, (Some(expected), CALL as u32)));
                for (slot, head) in slots.chunks_exact(slot).zip(&heads) {
                    let left: SlotHead = bytemuck::pod_read_unaligned(&slot[..64]);
                    assert_eq!(left, SlotHead { rows: 0, ..*head });
                    assert_eq!(slot[64..68], (-1_i32).to_ne_bytes(), "no expert");
                }
                // What stays is stronger.
                let (status, verdict, _) = checked(device, &heads, (3, rank));
                assert_eq!((status, verdict), (KernelFault::of(3), (KernelFault::of(3), CALL as u32)));
            }
            let mut heads = good();
            heads.iter_mut().for_each(|head| head.rows = 1);
            let (status, verdict, slots) = checked(device, &heads, (0, 0));
            assert_eq!((status, verdict), (None, (None, CALL as u32)));
            assert!(slots.chunks_exact(slot).all(|slot| slot[..4] == 1_u32.to_ne_bytes()), "rows stay");
        },
    );
}

#[test]
fn slots_of_other_call_or_setup_are_found_naming_first_rank() {
    with_kernels("kernels::check::slots_of_other_call_or_setup_are_found_naming_first_rank", |device| {
        assert_eq!(check(device, &good(), 0), None);
        for (rank, call, digest, expected) in [
            (0, CALL - 1, DIGEST, KernelFault::OtherCall { rank: 0 }),
            (17, CALL + (1 << 32), DIGEST, KernelFault::OtherCall { rank: 17 }),
            (299, CALL, DIGEST ^ (1 << 63), KernelFault::OtherDigest { rank: 299 }),
            (3, 0, 0, KernelFault::OtherDigest { rank: 3 }),
        ] {
            let mut heads = good();
            heads[rank] = SlotHead { call, digest, ..heads[rank] };
            assert_eq!(check(device, &heads, 0), Some(expected));
        }
        let mut heads = good();
        heads[270].call += 1;
        heads[5].digest += 1;
        assert_eq!(check(device, &heads, 0), Some(KernelFault::OtherDigest { rank: 5 }));
        let earlier = Some(KernelFault::ExpertOutOfRange { token: 7 });
        assert_eq!(check(device, &heads, 1 | 7 << 8), earlier, "the first fault stays");
    });
}

#[test]
fn slots_that_are_not_there_are_refused() {
    with_kernels("kernels::check::slots_that_are_not_there_are_refused", |device| {
        let Device { context, stream, kernels } = device;
        let memory = Buffer::new(context, 512);
        let check = Check {
            shape: shape(),
            ranks: 2,
            rank: 1,
            received: memory.part(0, shape().bytes() * 2 - 1),
            counter: memory.range().word(0).unwrap(),
            status: memory.range().word(8).unwrap(),
            verdict: memory.range().word(16).unwrap(),
            digest: DIGEST,
        };
        let outside = kernels.check(stream, &Check { rank: 2, ..check });
        assert!(matches!(outside, Err(DeviceError::Shape { what: "rank", given: 2, .. })), "{outside:?}");
        let needed = shape().bytes() * 2;
        let refused = DeviceError::TooSmall { kernel: "check", what: "received", given: needed - 1, needed };
        assert_eq!(kernels.check(stream, &check), Err(refused));
    });
}
