//! Pairs of a dispatch and a combine, back to back: the time that a layer pays for a pair while a
//! model runs, without a barrier or a check between. `bench --chained`.
//!
//! ```text
//!   barrier | dispatch, experts, combine | dispatch, experts, combine | .. | barrier | check
//!               ^ tokens        returned tokens --^
//! ```
//!
//! The method is that of CollectiveX, SemiAnalysis's benchmark of such libraries: the same number
//! of chains, of pairs that count and of pairs before them, and the same reductions over the ranks.
//! Here each pair also sends what the one before returned ([`sidelane_testkit::timing::chain`]).

use serde::Serialize;
use sidelane::ep::Handle;
use sidelane::gate::Routing;
use sidelane::{Error, Window};
use sidelane_testkit::timing::chain::Chain;
use sidelane_testkit::timing::stats::{Laps, Percentiles, Summary, median, percentiles, summary};
use sidelane_verify::reference::Real;

use super::checked_layer::Layer;
use crate::command_frame;
use crate::error::CliError;
use crate::ranks;
use crate::table::time;

const CHAINS: usize = 4;
/// Pairs of a chain. One more than CollectiveX has: an odd number never turns rows, which have an
/// even number of columns, all the way round.
const PAIRS: usize = 129;
/// Of these, pairs that do not count: they fill the pipeline.
const FILL: usize = 17;

/// Calls of one rank.
#[derive(Default)]
pub struct Timed {
    pairs: Laps,
    dispatches: Laps,
    experts: Laps,
    combines: Laps,
    /// Whether all chains of this rank have ended as they must.
    right: bool,
}

/// Runs the chains, and checks what each returns. Collective.
pub fn run<E: Real>(
    layer: &mut Layer<'_, E>,
    barrier: &mut Window,
    handle: &Handle,
) -> Result<Timed, CliError> {
    let chain = Chain::new(&layer.routing, handle.dropped(), layer.config.shape.hidden as usize);
    let experts = layer.routing.experts().to_vec();
    let routing = Routing::new(layer.config.top_k, experts, chain.weights().to_vec()).map_err(Error::from)?;
    let tokens = layer.tokens.x()?.to_vec();
    let returned = chain.returned(&tokens, PAIRS);
    let mut timed = Timed { right: true, ..Timed::default() };
    let bar = command_frame::progress(layer.world.rank(), CHAINS as u64);
    for _ in 0..CHAINS {
        barrier.barrier()?;
        for _ in 0..PAIRS {
            timed.pair(layer, &chain, &routing)?;
        }
        // Checks are long: a rank that is done takes no core from the others.
        barrier.barrier()?;
        timed.right &= layer.check_returned(&returned)?;
        layer.tokens.x_mut()?.copy_from_slice(&tokens);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(timed)
}

impl Timed {
    fn pair<E: Real>(
        &mut self,
        layer: &mut Layer<'_, E>,
        chain: &Chain,
        routing: &Routing<'_>,
    ) -> Result<(), Error> {
        let Layer { ep, tokens, .. } = layer;
        let Timed { pairs, dispatches, experts, combines, .. } = self;
        pairs.time(|| {
            let (rows, handle) = dispatches.time(|| tokens.dispatch(ep, routing))?;
            let output = experts.time(|| {
                let mut output = handle.output()?;
                chain.experts(rows.rows::<E>()?, handle.row_weights(), output.rows_mut()?);
                Ok::<_, Error>(output)
            })?;
            drop(rows);
            combines.time(|| ep.combine_into(output, &handle, tokens.x_mut()?))
        })
    }

    /// The figures of all ranks. Collective.
    pub fn report<E: Real>(&self, layer: &Layer<'_, E>) -> Result<ChainReport, Error> {
        let of = |laps: &Laps| laps.of_ranks(&layer.group);
        let pairs = of(&self.pairs)?;
        Ok(ChainReport {
            verified: ranks::all_say(&layer.group, self.right)?,
            chains: CHAINS,
            pairs: PAIRS,
            fill: FILL,
            period: summary(&by_chain(&pairs, period, median)),
            pair: percentiles(&by_pair(&pairs, median)),
            experts: percentiles(&by_pair(&of(&self.experts)?, median)),
            dispatch_least: percentiles(&by_pair(&of(&self.dispatches)?, least)),
            combine_least: percentiles(&by_pair(&of(&self.combines)?, least)),
            spread: percentiles(&by_pair(&pairs, |us| greatest(us) - least(us))),
            gap: percentiles(&by_chain(&pairs, gap, median)),
        })
    }
}

/// Begin and end of each lap, in nanoseconds, by rank.
type Ranks = [Vec<[u64; 2]>];

fn us([begin, end]: [u64; 2]) -> f64 {
    end.saturating_sub(begin) as f64 / 1e3
}

/// One figure for each lap that counts, from what its ranks took.
fn by_pair(ranks: &Ranks, reduce: impl Fn(&mut [f64]) -> f64) -> Vec<f64> {
    let laps = (0..CHAINS * PAIRS).filter(|lap| lap % PAIRS >= FILL);
    laps.map(|lap| reduce(&mut ranks.iter().map(|laps| us(laps[lap])).collect::<Vec<_>>())).collect()
}

/// One figure for each chain, from one for the laps of each rank that count.
fn by_chain(ranks: &Ranks, of: impl Fn(&[[u64; 2]]) -> f64, reduce: impl Fn(&mut [f64]) -> f64) -> Vec<f64> {
    let laps = |chain: usize| chain * PAIRS + FILL..(chain + 1) * PAIRS;
    let chain = |chain| reduce(&mut ranks.iter().map(|rank| of(&rank[laps(chain)])).collect::<Vec<_>>());
    (0..CHAINS).map(chain).collect()
}

/// Time of these laps by their number.
fn period(laps: &[[u64; 2]]) -> f64 {
    us([laps[0][0], laps[laps.len() - 1][1]]) / laps.len() as f64
}

/// Time between two laps: from begin to begin, less a lap.
fn gap(laps: &[[u64; 2]]) -> f64 {
    let mut starts: Vec<f64> = laps.windows(2).map(|two| us([two[0][0], two[1][0]])).collect();
    median(&mut starts) - median(&mut laps.iter().copied().map(us).collect::<Vec<_>>())
}

fn least(us: &mut [f64]) -> f64 {
    us.iter().copied().fold(f64::INFINITY, f64::min)
}

fn greatest(us: &mut [f64]) -> f64 {
    us.iter().copied().fold(0.0, f64::max)
}

/// Times are in microseconds. Keys are described in `docs/bench-json.md`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ChainReport {
    pub verified: bool,
    pub chains: usize,
    pub pairs: usize,
    pub fill: usize,
    pub period: Summary,
    pub pair: Percentiles,
    pub experts: Percentiles,
    pub dispatch_least: Percentiles,
    pub combine_least: Percentiles,
    pub spread: Percentiles,
    pub gap: Percentiles,
}

impl ChainReport {
    /// Pairs that count, in all chains.
    pub fn samples(&self) -> usize {
        self.chains * (self.pairs - self.fill)
    }

    pub fn text(&self) -> String {
        let ChainReport { period, pair, experts, spread, .. } = self;
        let [period, p50, p99] = [period.p50_us, pair.p50_us, pair.p99_us].map(time);
        let [experts, spread] = [experts.p50_us, spread.p50_us].map(time);
        let result = if self.verified { "bit-exact" } else { "WRONG" };
        format!(
            "chained: {period} a pair, p50 {p50}, p99 {p99}, of which experts copy {experts}\n\
             {} chains of {} pairs, ends {result}; ranks differ by {spread} in a pair",
            self.chains, self.pairs
        )
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Laps of a rank that begin every `period` ns and take `length` of it; those of the fill take
    /// a hundred times as long.
    fn rank(period: u64, length: u64) -> Vec<[u64; 2]> {
        let mut at = 0;
        let mut lap = |lap: usize| {
            let slow = if lap % PAIRS < FILL { 100 } else { 1 };
            at += period * slow;
            [at - period * slow, at - (period - length) * slow]
        };
        (0..CHAINS * PAIRS).map(&mut lap).collect()
    }

    #[test]
    fn the_fill_does_not_count() {
        let ranks = [rank(3000, 3000), rank(3000, 2000), rank(3000, 1000)];
        assert_eq!(by_pair(&ranks, median), [2.0; CHAINS * (PAIRS - FILL)]);
        assert_eq!(by_pair(&ranks, least), [1.0; CHAINS * (PAIRS - FILL)]);
        assert_eq!(by_chain(&ranks, gap, median), [1.0; CHAINS]);
        assert_eq!(by_chain(&ranks, period, greatest), [3.0; CHAINS]);
    }

    #[test]
    fn a_chain_with_a_wrong_end_cannot_be_overlooked() {
        assert!(sample().text().contains("4 chains of 129 pairs, ends bit-exact"));
        assert!(ChainReport { verified: false, ..sample() }.text().contains("ends WRONG"));
    }

    pub fn sample() -> ChainReport {
        let one = percentiles(&[12_500.0]);
        ChainReport {
            verified: true,
            chains: CHAINS,
            pairs: PAIRS,
            fill: FILL,
            period: summary(&[12_600.0]),
            pair: one,
            experts: one,
            dispatch_least: one,
            combine_least: one,
            spread: one,
            gap: one,
        }
    }
}
