//! Times of rounds: a round begins when the first rank begins and ends when the slowest ends.
//!
//! Clocks of different machines are not compared: there a round takes as long as on the machine on which it takes longest.
//! A round follows a barrier, so no machine begins more than a signal's way later than another.

use sidelane::exec::now;

use crate::machines::Machines;

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
    pub fn rounds_us(ranks: &[Vec<u8>], machines: &Machines) -> Vec<f64> {
        let laps: Vec<Vec<[u64; 2]>> =
            ranks.iter().map(|bytes| bytemuck::allocation::pod_collect_to_vec(bytes)).collect();
        (0..laps.iter().map(Vec::len).min().unwrap_or(0))
            .map(|round| {
                let mut spans = vec![[u64::MAX, 0]; machines.count()];
                for (rank, laps) in laps.iter().enumerate() {
                    let ([begin, end], span) = (laps[round], &mut spans[machines.of_rank(rank) as usize]);
                    *span = [span[0].min(begin), span[1].max(end)];
                }
                spans.iter().map(|[begin, end]| end - begin).max().unwrap_or(0) as f64 / 1e3
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
        let laps = [a, b].map(|rank| rank.to_bytes().to_vec());
        assert_eq!(Laps::rounds_us(&laps, &vec![0, 0].into()), [5.0, 1.5]);
    }

    #[test]
    fn a_round_on_two_machines_takes_as_long_as_on_the_slower_one_whatever_their_clocks_say() {
        let laps = [[1000, 3000], [2000, 6000], [900_000, 904_500], [901_000, 902_000]];
        let laps = laps.map(|lap| Laps(vec![lap]).to_bytes().to_vec());
        assert_eq!(Laps::rounds_us(&laps, &vec![0, 0, 1, 1].into()), [5.0]);
    }
}
