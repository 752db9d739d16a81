//! Stripes: one stream of puts and signals over several *queues* (queue pairs), between which
//! nothing is ordered.
//!
//! ```text
//!   sender     the lead, queue 0   | bytes | signal 1: striped | bytes | signal 2 |
//!              queue 1             | bytes | tick |
//!   receiver   signal 1 waits for one tick of each other queue; signal 2 waits for no more of them
//! ```
//!
//! A *tick* says that all earlier bytes of its queue have landed. A signal is *striped* if any
//! queue but the lead has got bytes since the one before. Then each other queue owes a tick. The
//! receiver counts ticks, so a tick may come before its signal, or after later bytes.
//!
//! [`Stripes`] is the sender's part, and [`Arrivals`] the receiver's. `sidelane_verify::striped`
//! runs [`Arrivals`] through every order that the queues allow.

use std::collections::VecDeque;

/// Choice of a queue for each stripe: by the bytes of all queues since the last signal, and their
/// speeds. Only calls decide, never time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stripes {
    /// In any unit.
    speeds: Vec<u32>,
    /// Stripes of less are the lead's.
    least: u64,
    sent: Vec<u64>,
    striped: bool,
}

impl Stripes {
    /// Lanes of these speeds, in one unit. If any is unknown (0), all count as equal. Stripes of
    /// less than a quarter of a chunk are the lead's: they are not worth a tick.
    pub fn new(mut speeds: Vec<u32>, chunk: u64) -> Self {
        if speeds.contains(&0) {
            speeds.fill(1);
        }
        let sent = vec![0; speeds.len()];
        Stripes { speeds, least: chunk / 4, sent, striped: false }
    }

    /// The queue that takes so many bytes: the one that is done first, of equal ones the first.
    pub fn pick(&mut self, bytes: u64) -> usize {
        let done = |queue: usize| u128::from(self.sent[queue] + bytes);
        let earlier =
            |a: usize, b: usize| done(a) * u128::from(self.speeds[b]) < done(b) * u128::from(self.speeds[a]);
        let mut queue = 0;
        if bytes >= self.least {
            for other in 1..self.speeds.len() {
                queue = if earlier(other, queue) { other } else { queue };
            }
        }
        self.sent[queue] += bytes;
        self.striped |= queue > 0;
        queue
    }

    /// Whether any queue but the lead has got bytes since the last signal.
    pub fn is_striped(&self) -> bool {
        self.striped
    }

    /// The lead has taken a signal that says so.
    pub fn signalled(&mut self) {
        self.sent.fill(0);
        self.striped = false;
    }
}

/// Signals in the order of the lead, each held back until the ticks have come that it waits for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Arrivals<T> {
    /// Of each queue but the lead: ticks so far.
    ticks: Vec<u64>,
    /// Striped signals so far: as many ticks of each queue does the last of them wait for.
    needed: u64,
    waiting: VecDeque<(u64, T)>,
}

impl<T> Arrivals<T> {
    /// Of so many queues.
    pub fn new(queues: usize) -> Self {
        Arrivals { ticks: vec![0; queues.saturating_sub(1)], needed: 0, waiting: VecDeque::new() }
    }

    /// Number of queues.
    pub fn queues(&self) -> usize {
        self.ticks.len() + 1
    }

    /// A signal has come on the lead.
    pub fn lead(&mut self, signal: T, striped: bool) {
        self.needed += u64::from(striped);
        self.waiting.push_back((self.needed, signal));
    }

    /// A tick has come on another queue. `false` if there is no such queue.
    pub fn tick(&mut self, queue: usize) -> bool {
        let ticks = queue.checked_sub(1).and_then(|at| self.ticks.get_mut(at));
        ticks.map(|ticks| *ticks += 1).is_some()
    }

    /// The next signal, if all before it has landed.
    pub fn pop(&mut self) -> Option<T> {
        let (needed, _) = self.waiting.front()?;
        if self.ticks.iter().any(|ticks| ticks < needed) {
            return None;
        }
        self.waiting.pop_front().map(|(_, signal)| signal)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CHUNK: u64 = 4096;

    proptest! {
        #[test]
        fn queues_end_within_one_stripe_of_each_other(
            speeds in prop::collection::vec(1..500u32, 1..8),
            stripes in 1..200u32,
        ) {
            let mut picked = Stripes::new(speeds.clone(), CHUNK);
            let mut sent = vec![0u64; speeds.len()];
            (0..stripes).for_each(|_| sent[picked.pick(CHUNK)] += CHUNK);
            let last = (0..speeds.len()).map(|queue| sent[queue] as f64 / f64::from(speeds[queue])).fold(0.0, f64::max);
            for (queue, speed) in speeds.iter().enumerate() {
                // With one stripe more it would be the last, or as late.
                let next = (sent[queue] + CHUNK) as f64 / f64::from(*speed);
                prop_assert!(next >= last * (1.0 - 1e-12), "{sent:?} at {speeds:?}");
            }
        }

        #[test]
        fn stripes_of_less_than_quarter_of_chunk_are_the_leads(
            speeds in prop::collection::vec(0..500u32, 1..8),
            lens in prop::collection::vec(0..CHUNK / 4, 0..50),
        ) {
            let mut stripes = Stripes::new(speeds, CHUNK);
            prop_assert!(lens.into_iter().all(|len| stripes.pick(len) == 0));
            prop_assert!(!stripes.is_striped());
        }

        #[test]
        fn signals_leave_in_their_order_when_the_slowest_queue_has_ticked(
            signals in prop::collection::vec(any::<bool>(), 1..30),
            ticks in prop::collection::vec(0..30u64, 1..4),
        ) {
            let mut arrivals = Arrivals::new(ticks.len() + 1);
            signals.iter().enumerate().for_each(|(nth, &striped)| arrivals.lead(nth, striped));
            for (queue, &count) in (1..).zip(&ticks) {
                (0..count).for_each(|_| assert!(arrivals.tick(queue)));
            }
            let slowest = *ticks.iter().min().unwrap();
            let needed = signals.iter().scan(0, |needed, &striped| {
                *needed += u64::from(striped);
                Some(*needed)
            });
            let expected = needed.take_while(|&needed| needed <= slowest).count();
            let left: Vec<usize> = std::iter::from_fn(|| arrivals.pop()).collect();
            prop_assert_eq!(left, (0..expected).collect::<Vec<_>>());
        }
    }

    #[test]
    fn faster_queue_takes_more_and_signal_begins_anew() {
        let mut stripes = Stripes::new(vec![100, 400], CHUNK);
        let picked: Vec<usize> = (0..10).map(|_| stripes.pick(CHUNK)).collect();
        assert_eq!(picked, [1, 1, 1, 0, 1, 1, 1, 1, 0, 1]);
        assert!(stripes.is_striped());
        stripes.signalled();
        assert_eq!((stripes.is_striped(), stripes.pick(CHUNK)), (false, 1));
        let mut unknown = Stripes::new(vec![0, 400, 100], CHUNK);
        assert_eq!([0; 4].map(|_| unknown.pick(CHUNK)), [0, 1, 2, 0]);
    }

    #[test]
    fn tick_of_unknown_queue_is_refused() {
        let mut arrivals = Arrivals::<()>::new(2);
        assert_eq!([0, 1, 2].map(|queue| arrivals.tick(queue)), [false, true, false]);
    }
}
