//! How fast the link between nodes of one machine is made.

use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::{Duration, Instant};

use sidelane::config::Pace;
use sidelane::layer::{Experts, GroupedSwiGlu, Segments};

use super::task::Shape;

/// What was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PaceArg {
    /// Transfers take as long as the experts.
    Even,
    /// Wires are as fast as they copy.
    None,
    /// This link.
    Link(Pace),
}

/// Not a pace.
#[derive(Debug, thiserror::Error)]
#[error("`even`, `none`, or bytes per second (K, M, G), a slash and microseconds")]
pub struct BadPace;

impl FromStr for PaceArg {
    type Err = BadPace;

    fn from_str(text: &str) -> Result<Self, BadPace> {
        match text {
            "even" => Ok(PaceArg::Even),
            "none" => Ok(PaceArg::None),
            link => Pace::parse(link).map(PaceArg::Link).ok_or(BadPace),
        }
    }
}

/// Of a link that is as fast as the experts: microseconds, as of a network within a room.
const LATENCY: Duration = Duration::from_micros(10);
/// Of these the best: other work only ever adds.
const TRIES: u32 = 5;

impl PaceArg {
    /// The link for a layer of this shape. All cores that ranks will use are at work while experts are timed.
    pub fn resolve(self, shape: &Shape) -> Option<Pace> {
        match self {
            PaceArg::None => None,
            PaceArg::Link(pace) => Some(pace),
            PaceArg::Even => {
                let took = experts_alone(shape).as_secs_f64();
                let rate = shape.bytes_across() as f64 / took.max(1e-6);
                let bytes_per_second = NonZeroU64::new(rate as u64)?;
                Some(Pace { bytes_per_second, latency: LATENCY })
            }
        }
    }
}

/// How long the experts of a rank take for a balanced step, chunk by chunk, of all ranks of this machine at once.
fn experts_alone(shape: &Shape) -> Duration {
    let ranks: u32 = shape.ranks_per_node.iter().sum();
    let (hidden, ffn) = (shape.hidden as usize, shape.ffn as usize);
    let local = shape.experts.div_ceil(ranks) as usize;
    let chunks = shape.chunks as usize;
    let rows = ((u64::from(shape.tokens) * u64::from(shape.top_k)) as usize).div_ceil(chunks);
    // The first experts have what is left over.
    let counts: Vec<i64> = (0..local).map(|nth| ((rows + local - 1 - nth) / local) as i64).collect();
    let weights = vec![0.01; GroupedSwiGlu::values(local, hidden, ffn)];
    let Ok(experts) = GroupedSwiGlu::new(local, hidden, ffn, weights) else { return Duration::ZERO };
    let x = vec![0.5; rows * hidden];
    let one = || {
        let begin = Instant::now();
        for _ in 0..chunks {
            let done = experts.forward(Segments { rows: &x, hidden, counts: &counts, padded: &counts });
            std::hint::black_box(done.map_or(0, |(y, _)| y.len()));
        }
        begin.elapsed()
    };
    let all = || {
        std::thread::scope(|scope| {
            let at_work: Vec<_> = (0..ranks).map(|_| scope.spawn(one)).collect();
            at_work.into_iter().filter_map(|rank| rank.join().ok()).max().unwrap_or_default()
        })
    };
    (0..TRIES).map(|_| all()).min().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_is_even_none_or_a_link() {
        assert_eq!("even".parse::<PaceArg>().unwrap(), PaceArg::Even);
        assert_eq!("none".parse::<PaceArg>().unwrap(), PaceArg::None);
        let PaceArg::Link(pace) = "1G/10".parse().unwrap() else { panic!() };
        assert_eq!((pace.bytes_per_second.get(), pace.latency), (1 << 30, Duration::from_micros(10)));
        assert!("fast".parse::<PaceArg>().is_err());
    }
}
