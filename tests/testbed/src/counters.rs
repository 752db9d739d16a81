//! What the cards count: the packets of Soft-RoCE, from `hw_counters`.

use std::collections::BTreeMap;

/// Writes every counter of every card of a machine.
pub const COMMAND: &str = "cd /sys/class/infiniband && grep . rxe*/ports/1/hw_counters/*_* /dev/null";

/// Writes what every card of a machine has sent.
pub const SENT: &str = "cd /sys/class/infiniband && grep . rxe*/ports/1/hw_counters/sent_pkts /dev/null";

/// Each sum is of packets that were sent again, on either side of the wire.
const AGAIN: [&str; 2] = ["completer_retry_err", "duplicate_request"];

/// Counters of all cards of one machine, added up by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters(BTreeMap<String, u64>);

impl Counters {
    /// From what [`COMMAND`] writes.
    pub fn parse(text: &str) -> Self {
        let mut sums = BTreeMap::new();
        for line in text.lines() {
            let Some((path, value)) = line.rsplit_once(':') else { continue };
            let (Some(name), Ok(value)) = (path.rsplit('/').next(), value.trim().parse::<u64>()) else {
                continue;
            };
            *sums.entry(name.to_owned()).or_insert(0) += value;
        }
        Self(sums)
    }

    /// What was counted since. A machine that was booted in between counts from its boot.
    pub fn since(&self, before: &Self) -> Self {
        let step =
            |(name, &now): (&String, &u64)| (name.clone(), now.checked_sub(before.get(name)).unwrap_or(now));
        Self(self.0.iter().map(step).collect())
    }

    fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// Packets sent, acknowledgements among them.
    pub fn sent(&self) -> u64 {
        self.get("sent_pkts")
    }

    /// Packets received.
    pub fn received(&self) -> u64 {
        self.get("rcvd_pkts")
    }

    /// Packets sent again, or seen again.
    pub fn again(&self) -> u64 {
        AGAIN.iter().map(|name| self.get(name)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "rxe0/ports/1/hw_counters/sent_pkts:10\nrxe1/ports/1/hw_counters/sent_pkts:5\n\
        rxe0/ports/1/hw_counters/completer_retry_err:1\nrxe0/ports/1/hw_counters/duplicate_request:2\n";

    #[test]
    fn cards_are_added_up() {
        let counters = Counters::parse(BEFORE);
        assert_eq!((counters.sent(), counters.received(), counters.again()), (15, 0, 3));
    }

    #[test]
    fn only_what_happened_since_counts() {
        let now = Counters::parse(
            "rxe0/ports/1/hw_counters/sent_pkts:40\nrxe0/ports/1/hw_counters/completer_retry_err:1\n",
        );
        let since = now.since(&Counters::parse(BEFORE));
        assert_eq!((since.sent(), since.again()), (25, 0));
    }

    #[test]
    fn a_machine_that_was_booted_counts_from_there() {
        let since = Counters::parse("rxe0/ports/1/hw_counters/sent_pkts:4").since(&Counters::parse(BEFORE));
        assert_eq!(since.sent(), 4);
    }
}
