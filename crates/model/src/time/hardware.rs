//! Parts of a machine, as data.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sidelane_core::error::PlanError;

/// Executors of schedules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Executor {
    /// Cores of the host copy and sum; what crosses is copied into a ring and out of it.
    Host,
    /// Copy engines move rows in a node and NICs between nodes; kernels pack and sum.
    Device,
}

/// Figures of a machine. Rates are in MB/s (10^6 bytes), times in ns.
///
/// ```
/// use sidelane_model::time::Hardware;
/// let hardware: Hardware = "h100-cx7".parse()?;
/// assert_eq!((hardware.engines.per_copy, hardware.engines.rate), (2_300, 380_000));
/// # Ok::<(), sidelane_model::time::UnknownHardware>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// Its name.
    pub name: String,
    /// The executor of the schedule.
    pub executor: Executor,
    /// Copy engines; of a host: its copying cores.
    pub engines: Engines,
    /// Links between the ranks of a node.
    pub link: Link,
    /// NICs between nodes.
    pub nic: NicModel,
    /// Kernels that pack, regroup and sum; of a host: its summing cores.
    pub compute: Compute,
    /// Planning and flags.
    pub host: Host,
}

/// Copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Engines {
    /// A copy, however small; of a host: a row.
    pub per_copy: u64,
    /// Rate of a long copy to or from another rank.
    pub rate: u64,
    /// The same within one rank's memory.
    pub local_rate: u64,
    /// A memory operation of a stream: a word written or found raised.
    pub per_word: u64,
    /// The host's time for a call that enqueues a batch of copies or a list of words.
    pub per_call: u64,
}

/// Links of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Rate at which one rank can receive.
    pub rate: u64,
    /// Rate at which kernels of one rank read from its local peers.
    pub load_rate: u64,
    /// From the last byte, or a word, to its being seen.
    pub latency: u64,
}

/// NICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicModel {
    /// Of each node; 0: one for each rank. Ranks share them in equal blocks.
    pub per_node: u32,
    /// Each way.
    pub rate: u64,
    /// A message, however small.
    pub per_message: u64,
    /// Bytes of the longest message.
    pub message_bytes: u64,
    /// From the last byte to its being seen.
    pub latency: u64,
}

/// Kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compute {
    /// Bytes read and bytes written, together.
    pub rate: u64,
    /// From one kernel's being due to its work.
    pub launch: u64,
}

/// Costs of the host's work next to the engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Cores that all ranks of the machine share; 0: each rank has one of its own.
    pub cores: u32,
    /// To raise a word, and to look at one.
    pub signal: u64,
    /// From raised to seen, on the same node.
    pub latency: u64,
    /// Picoseconds for each choice of a token: to sort, before counts are exchanged.
    pub sort: u64,
    /// Picoseconds for each choice: to place, behind that.
    pub place: u64,
    /// Picoseconds for each bin and rank: to add up counts and lay out runs.
    pub per_bin: u64,
}

/// A name that no machine has here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{seen}` is no machine known here: h100-cx7, h200-cx7, h800-400g")]
pub struct UnknownHardware {
    /// The given text.
    pub seen: String,
}

impl Hardware {
    /// Names of the machines known here. Their figures are published ones; `docs/performance.md`
    /// has the source of each.
    pub const NAMES: [&str; 3] = ["h100-cx7", "h200-cx7", "h800-400g"];

    /// Whether calls can be timed on it: no divisor of bytes is 0, no price is above a second (or,
    /// where they are picoseconds, a millisecond), and a machine has 65,536 cores at most.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] with the first figure that is not so.
    pub fn check(&self) -> Result<(), PlanError> {
        let Hardware { engines, link, nic, compute, host, .. } = self;
        let divide = [
            ("engines.rate", engines.rate),
            ("engines.local_rate", engines.local_rate),
            ("link.rate", link.rate),
            ("link.load_rate", link.load_rate),
            ("nic.rate", nic.rate),
            ("nic.message_bytes", nic.message_bytes),
            ("compute.rate", compute.rate),
        ];
        let prices = [
            ("engines.per_copy", engines.per_copy),
            ("engines.per_word", engines.per_word),
            ("engines.per_call", engines.per_call),
            ("link.latency", link.latency),
            ("nic.per_message", nic.per_message),
            ("nic.latency", nic.latency),
            ("compute.launch", compute.launch),
            ("host.signal", host.signal),
            ("host.latency", host.latency),
            ("host.sort", host.sort),
            ("host.place", host.place),
            ("host.per_bin", host.per_bin),
        ];
        let zero = divide.into_iter().filter(|&(_, seen)| seen == 0).map(|of| (of, "1 or more"));
        let dear =
            prices.into_iter().filter(|&(_, seen)| seen > 1_000_000_000).map(|of| (of, "1000000000 or less"));
        let cores = ("host.cores", u64::from(host.cores));
        let many = (host.cores > 1 << 16).then_some((cores, "65536 or less"));
        match zero.chain(dear).chain(many).next() {
            Some(((parameter, seen), expected)) => Err(PlanError::BadParameter { parameter, seen, expected }),
            None => Ok(()),
        }
    }

    fn h100() -> Self {
        Hardware {
            name: "h100-cx7".to_owned(),
            executor: Executor::Device,
            engines: Engines {
                per_copy: 2_300,
                rate: 380_000,
                local_rate: 93_000,
                per_word: 500,
                per_call: 2_300,
            },
            link: Link { rate: 380_000, load_rate: 320_000, latency: 1_000 },
            nic: NicModel {
                per_node: 0,
                rate: 47_000,
                per_message: 230,
                message_bytes: 1 << 30,
                latency: 2_000,
            },
            compute: Compute { rate: 3_000_000, launch: 2_500 },
            host: Host { cores: 0, signal: 100, latency: 300, sort: 9_400, place: 6_400, per_bin: 60_000 },
        }
    }
}

impl FromStr for Hardware {
    type Err = UnknownHardware;

    fn from_str(name: &str) -> Result<Self, UnknownHardware> {
        let h100 = Hardware::h100();
        let (engines, link, compute) = (h100.engines, h100.link, h100.compute);
        match name {
            "h100-cx7" => Ok(h100),
            // The same links and engines, faster memory.
            "h200-cx7" => Ok(Hardware {
                name: name.to_owned(),
                compute: Compute { rate: 4_300_000, ..compute },
                ..h100
            }),
            // NVLink cut down to 400 GB/s both ways together, of which 160 each way are of use.
            "h800-400g" => Ok(Hardware {
                name: name.to_owned(),
                engines: Engines { rate: 160_000, ..engines },
                link: Link { rate: 160_000, load_rate: 160_000, ..link },
                ..h100
            }),
            _ => Err(UnknownHardware { seen: name.to_owned() }),
        }
    }
}

/// Time for so many bytes at a rate in MB/s, rounded up.
pub(super) fn at_rate(bytes: u64, rate: u64) -> u64 {
    (u128::from(bytes) * 1000).div_ceil(u128::from(rate)) as u64
}
