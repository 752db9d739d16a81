//! Times of rounds: a round begins when the first rank begins and ends when the slowest ends.

use rustix::time::{ClockId, clock_gettime};

/// The clock that all processes of a machine share, in nanoseconds.
pub fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Begin and end of one rank's part of every round.
#[derive(Clone, Debug, Default)]
pub struct Laps(Vec<[u64; 2]>);

impl Laps {
    /// Times one lap.
    pub fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let begin = now();
        let done = work();
        self.0.push([begin, now()]);
        done
    }

    /// For an exchange between ranks.
    pub fn to_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }

    /// Length of every round, in microseconds, from what all ranks measured.
    pub fn rounds_us(ranks: &[Vec<u8>]) -> Vec<f64> {
        let laps: Vec<Vec<[u64; 2]>> =
            ranks.iter().map(|bytes| bytemuck::allocation::pod_collect_to_vec(bytes)).collect();
        (0..laps.iter().map(Vec::len).min().unwrap_or(0))
            .map(|round| {
                let begin = laps.iter().map(|rank| rank[round][0]).min().unwrap_or(0);
                let end = laps.iter().map(|rank| rank[round][1]).max().unwrap_or(0);
                (end - begin) as f64 / 1e3
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_spans_from_the_first_begin_to_the_last_end() {
        let (a, b) = (Laps(vec![[1000, 3000], [9000, 9500]]), Laps(vec![[2000, 6000], [8000, 9100]]));
        let rounds = Laps::rounds_us(&[a.to_bytes().to_vec(), b.to_bytes().to_vec()]);
        assert_eq!(rounds, [5.0, 1.5]);
    }
}
