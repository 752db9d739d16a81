//! Depths of queue pairs, by the memory that their queues lock.
//!
//! The NIC's driver registers the queues of a queue pair. In a large world they are most of the
//! memory that a rank locks. So queue pairs are the deepest of [`DEPTHS`] that fit into [`LOCKED`]
//! together. The shallowest still has a doorbell's worth of requests, and as many chunks as a
//! window of the usual size.
//!
//! ```text
//!   requests      | 192 + 16 x pieces, in blocks of 64 | ...  a power of two  \  in pages
//!   receives      | 16 | 16 | ...                             a power of two  /
//!   completions   | 64 | 64 | ...   requests, receives, and one more: a power of two, in pages
//!   doorbells     | 64 | 64 |       one of the queue pair, one of its completions
//! ```
//!
//! These are the sizes of mlx5 in rdma-core. A request begins with 192 bytes of the largest
//! operation that a reliable connection may have, which is none of ours. With 20 pieces it has 512
//! bytes, so a power of two of them wastes nothing.

use super::Caps;

/// Bytes that the queues of all queue pairs of a NIC may lock.
const LOCKED: u64 = 32 << 20;
/// A line of the processor, a block of requests, a completion, and a doorbell.
const LINE: u64 = 64;
/// A piece of a request, and a receive of one piece.
const PIECE: u64 = 16;
/// Bytes of a request before its pieces.
const HEAD: u64 = 192;

/// How much one queue pair takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depth {
    /// Requests in flight, and receives where signals are messages.
    pub requests: u32,
    /// Pieces per request.
    pub pieces: u32,
}

/// The deepest first. More pieces are not granted together with so many requests everywhere.
const DEPTHS: [Depth; 5] = [
    Depth { requests: 256, pieces: 30 },
    Depth { requests: 128, pieces: 20 },
    Depth { requests: 64, pieces: 20 },
    Depth { requests: 32, pieces: 20 },
    Depth { requests: 16, pieces: 20 },
];

impl Depth {
    /// Of each of so many queue pairs of one NIC, on a system with pages of so many bytes.
    pub fn of_each(queue_pairs: u64, page: u64) -> Self {
        let fits = |depth: &&Depth| queue_pairs.saturating_mul(depth.locked(page)) <= LOCKED;
        let [.., least] = DEPTHS;
        DEPTHS.iter().find(fits).copied().unwrap_or(least)
    }

    /// Bytes that a queue pair and its completion queue lock.
    fn locked(self, page: u64) -> u64 {
        let Depth { requests, pieces } = self;
        let caps =
            Caps { sends: requests, receives: requests, send_sges: pieces, receive_sges: 1, inline: 0 };
        queue_pair_bytes(caps, page) + completion_queue_bytes(2 * u64::from(requests), page)
    }
}

/// Bytes that a queue pair locks.
pub fn queue_pair_bytes(caps: Caps, page: u64) -> u64 {
    let Caps { sends, receives, send_sges, receive_sges, inline } = caps;
    let pieces = (u64::from(send_sges) * PIECE).max((4 + u64::from(inline)).next_multiple_of(PIECE));
    let request = (HEAD + pieces).next_multiple_of(LINE);
    let receive = (u64::from(receive_sges).max(1) * PIECE).next_power_of_two();
    let queue = |entries: u32, bytes: u64| match entries {
        0 => 0,
        _ => (u64::from(entries) * bytes).next_power_of_two().max(LINE),
    };
    (queue(sends, request) + queue(receives, receive)).next_multiple_of(page) + LINE
}

/// Bytes that a completion queue locks.
pub fn completion_queue_bytes(entries: u64, page: u64) -> u64 {
    ((entries + 1).next_power_of_two() * LINE).next_multiple_of(page) + LINE
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    #[test]
    fn queues_lock_as_many_bytes_as_those_of_mlx5() {
        let caps = |requests, send_sges| Caps {
            sends: requests,
            receives: requests,
            send_sges,
            receive_sges: 1,
            inline: 24,
        };
        let locked = |caps| queue_pair_bytes(caps, PAGE);
        // Requests of 704 bytes are 176 KiB, which a queue of 256 KiB holds.
        assert_eq!(locked(caps(256, 30)), (256 << 10) + (4 << 10) + 64);
        // Of 512 bytes, and a last page that receives alone fill in part.
        assert_eq!(locked(caps(64, 20)), (32 << 10) + (4 << 10) + 64);
        assert_eq!(locked(Caps { receives: 0, ..caps(64, 20) }), (32 << 10) + 64);
        // Bytes inside requests count where they are longer than the pieces.
        assert_eq!(locked(Caps { inline: 800, ..caps(16, 1) }), (16 << 10) + (4 << 10) + 64);
        assert_eq!(
            [63, 64, 128].map(|entries| completion_queue_bytes(entries, PAGE)),
            [4096, 8192, 16384].map(|bytes| bytes + 64)
        );
    }

    #[test]
    fn queue_pairs_are_the_deepest_that_fit_together() {
        let of = |queue_pairs| Depth::of_each(queue_pairs, PAGE).requests;
        assert_eq!([0, 101, 102, 327, 328, 628, 629, 1165].map(of), [256, 256, 128, 128, 64, 64, 32, 32]);
        assert_eq!([1166, 2032, 4095, u64::MAX].map(of), [16; 4]);
        // Pages of 64 KiB hold more than a shallow queue needs.
        assert_eq!(Depth::of_each(128, 64 << 10).requests, 128);
        assert_eq!(Depth::of_each(300, 64 << 10).requests, 16);
        for pair in DEPTHS.windows(2) {
            assert!(pair[0].locked(PAGE) > pair[1].locked(PAGE));
        }
    }
}
