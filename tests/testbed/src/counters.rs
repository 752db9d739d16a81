//! Counters of the NICs: packets of Soft-RoCE, from `hw_counters`, and of the kernel below them:
//! arrived datagrams, whether a NIC took them or not.

use std::collections::BTreeMap;

/// Writes every counter of every NIC of a machine. Only NICs get datagrams there.
pub const COMMAND: &str = "cd /sys/class/infiniband && grep . rxe*/ports/1/hw_counters/*_* /dev/null; \
    awk '/^Udp:/ { n = $2 } END { print \"udp/arrived:\" n }' /proc/net/snmp";

/// Writes the packets sent by every NIC of a machine.
pub const SENT: &str = "cd /sys/class/infiniband && grep . rxe*/ports/1/hw_counters/sent_pkts /dev/null";

/// Each sum is of packets that were sent again, on either side of the wire.
const AGAIN: [&str; 2] = ["completer_retry_err", "duplicate_request"];

/// Counters of one machine, by NIC and name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters(BTreeMap<(String, String), u64>);

/// Fate of packets whose sender had given them up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Late {
    /// Datagrams that arrived.
    pub arrived: u64,
    /// Packets that a NIC took for one of its connections.
    pub taken: u64,
    /// Packets that were sent meanwhile: answers.
    pub answered: u64,
}

impl Counters {
    /// From what [`COMMAND`] writes.
    pub fn parse(text: &str) -> Self {
        let mut counters = BTreeMap::new();
        for line in text.lines() {
            let Some((path, value)) = line.rsplit_once(':') else { continue };
            let (Some((nic, _)), Some((_, name))) = (path.split_once('/'), path.rsplit_once('/')) else {
                continue;
            };
            if let Ok(value) = value.trim().parse() {
                counters.insert((nic.to_owned(), name.to_owned()), value);
            }
        }
        Self(counters)
    }

    /// The difference since an earlier count. A machine that was booted in between counts from its
    /// boot.
    pub fn since(&self, before: &Self) -> Self {
        let step = |(key, &now): (&(String, String), &u64)| {
            let earlier = before.0.get(key).copied().unwrap_or_default();
            (key.clone(), now.checked_sub(earlier).unwrap_or(now))
        };
        Self(self.0.iter().map(step).collect())
    }

    /// Of all NICs.
    fn get(&self, name: &str) -> u64 {
        self.0.iter().filter(|((_, counter), _)| counter == name).map(|(_, value)| value).sum()
    }

    /// Datagrams that have arrived, wanted or not.
    pub fn arrived(&self) -> u64 {
        self.get("arrived")
    }

    /// As what became of late packets, if there are no others.
    pub fn late(&self) -> Late {
        Late { arrived: self.arrived(), taken: self.received(), answered: self.sent() }
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
    fn nics_are_added_up() {
        let counters = Counters::parse(BEFORE);
        assert_eq!((counters.sent(), counters.received(), counters.again()), (15, 0, 3));
    }

    #[test]
    fn datagrams_are_counted_beside_the_packets_that_nics_took() {
        let text = format!("{BEFORE}rxe0/ports/1/hw_counters/rcvd_pkts:4\nudp/arrived:9\n");
        assert_eq!(Counters::parse(&text).late(), Late { arrived: 9, taken: 4, answered: 15 });
    }

    #[test]
    fn only_what_happened_since_counts() {
        let now = Counters::parse(
            "rxe0/ports/1/hw_counters/sent_pkts:40\nrxe0/ports/1/hw_counters/completer_retry_err:1\n\
            rxe1/ports/1/hw_counters/sent_pkts:5\n",
        );
        let since = now.since(&Counters::parse(BEFORE));
        assert_eq!((since.sent(), since.again()), (30, 0));
    }

    #[test]
    fn a_machine_that_was_booted_counts_from_there() {
        let since = Counters::parse("rxe0/ports/1/hw_counters/sent_pkts:4").since(&Counters::parse(BEFORE));
        assert_eq!(since.sent(), 4);
    }
}
