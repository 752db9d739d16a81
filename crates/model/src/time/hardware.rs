//! Parts of a machine, as data.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::Value;
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
/// assert_eq!(hardware.engines.peer.last().map(|step| step.rate), Some(380_000));
/// assert!(hardware.source_of("link.latency").is_some_and(|source| source.starts_with("measured")));
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
    /// Limits of one device, for rooflines of whole models. A file without them times calls alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peaks: Option<Peaks>,
    /// Sources of the figures. One without is assumed.
    #[serde(default)]
    pub sources: Vec<Source>,
}

/// Source of some figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Dotted names: `nic.rate`; `engines.host` for all below it.
    pub figures: Vec<String>,
    /// Begins with `measured`, `published` or `assumed`.
    pub source: String,
}

/// Copies, and the words of streams.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Engines {
    /// Copies to or from another rank, by size; of a host: rows, at one price.
    pub peer: Vec<CopyCost>,
    /// Copies within one rank's memory.
    pub own: Vec<CopyCost>,
    /// Copies between memory of the host and of a device.
    pub host: Vec<CopyCost>,
    /// What a batch of copies takes beside its copies.
    pub per_batch: u64,
    /// A memory operation of a stream: a word written or found raised.
    pub per_word: u64,
    /// What a list of memory operations takes beside its words.
    pub per_list: u64,
    /// The host's time for a call of the driver.
    pub per_call: u64,
    /// The host's time for each copy of a batch.
    pub enqueue_copy: u64,
    /// The host's time for each word of a list.
    pub enqueue_word: u64,
    /// One logical engine serves all peers, as behind a switch; else there is one for each peer.
    pub switched: bool,
}

/// Cost of copies of at least so many bytes, one behind the other in a batch: the longer of price
/// and transfer, since an engine prepares a copy while another one moves its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyCost {
    /// The smallest copy that costs this; of the first step: 0.
    pub from_bytes: u64,
    /// The price of a copy, however small.
    pub per_copy: u64,
    /// Rate of a long copy.
    pub rate: u64,
}

/// Memory that a copy reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// That of two ranks of a node.
    Peer,
    /// That of one rank.
    Own,
    /// Memory of the host, and of a device.
    Host,
}

impl Engines {
    /// Copies between these memories, by size.
    pub fn costs(&self, place: Place) -> &[CopyCost] {
        match place {
            Place::Peer => &self.peer,
            Place::Own => &self.own,
            Place::Host => &self.host,
        }
    }

    /// The cost of a copy of this size.
    pub(super) fn cost(&self, place: Place, bytes: u64) -> CopyCost {
        let reached = self.costs(place).iter().take_while(|cost| cost.from_bytes <= bytes);
        *reached.last().expect("checked: the first step begins at 0")
    }

    /// Time of a copy in a batch.
    pub(super) fn copy(&self, place: Place, bytes: u64) -> u64 {
        let cost = self.cost(place, bytes);
        cost.per_copy.max(at_rate(bytes, cost.rate))
    }

    /// The best rate of copies between these memories.
    pub(super) fn best_rate(&self, place: Place) -> u64 {
        self.costs(place).iter().map(|cost| cost.rate).max().unwrap_or(1)
    }
}

/// Links of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Rate at which one rank can send, and can receive.
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
    /// Picoseconds for each choice that a kernel sorts or plans.
    pub sort: u64,
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

/// Limits of one device: published peaks, which no program exceeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peaks {
    /// Products of dense bf16 matrices, in 10^12 operations a second.
    pub tflops: u32,
    /// Memory of the device.
    pub memory_bytes: u64,
}

/// A name that no machine has here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{seen}` is no machine known here: {}", Hardware::NAMES.join(", "))]
pub struct UnknownHardware {
    /// The given text.
    pub seen: String,
}

/// The files of known machines, in the order of [`Hardware::NAMES`].
const FILES: [&str; 4] = [
    include_str!("../../hardware/h100-cx7.json"),
    include_str!("../../hardware/h100-cx7-cliff.json"),
    include_str!("../../hardware/h200-cx7.json"),
    include_str!("../../hardware/h800-400g.json"),
];

impl Hardware {
    /// Names of the machines known here. Each figure's source is in its [`Hardware::sources`].
    pub const NAMES: [&str; 4] = ["h100-cx7", "h100-cx7-cliff", "h200-cx7", "h800-400g"];

    /// The highest price: a second in ns, a millisecond in ps.
    pub const MAX_PRICE: u64 = 1_000_000_000;

    /// Source of a figure, by its dotted name.
    pub fn source_of(&self, figure: &str) -> Option<&str> {
        let names = |source: &&Source| source.figures.iter().any(|name| covers(name, figure));
        self.sources.iter().find(names).map(|source| &source.source[..])
    }

    /// Says where these figures, or all below these names, are from, in place of what was said
    /// before.
    pub fn set_source(&mut self, figures: &[&str], source: &str) {
        let old = |name: &String| !figures.iter().any(|new| covers(new, name));
        for known in &mut self.sources {
            known.figures.retain(old);
        }
        self.sources.retain(|known| !known.figures.is_empty());
        let figures = figures.iter().map(|&name| name.to_owned()).collect();
        self.sources.insert(0, Source { figures, source: source.to_owned() });
    }

    /// Dotted names of all figures.
    pub fn figures(&self) -> Vec<String> {
        let mut names = Vec::new();
        let whole = serde_json::to_value(self).expect("numbers and names are always JSON");
        let parts = whole.as_object().expect("a struct is an object");
        for (part, figures) in parts.iter().filter(|(part, _)| *part != "sources") {
            leaves(part, figures, &mut names);
        }
        names
    }

    /// Names of the figures that have no other source than an assumption.
    pub fn assumed(&self) -> Vec<String> {
        let assumed = |figure: &String| self.source_of(figure).is_none_or(|s| s.starts_with("assumed"));
        self.figures().into_iter().filter(assumed).collect()
    }

    /// Whether calls can be timed on it: no divisor of bytes is 0, no price is above a second (or,
    /// where they are picoseconds, a millisecond), copies of all sizes have a cost, and a machine
    /// has 65,536 cores at most.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`] with the first figure that is not so.
    pub fn check(&self) -> Result<(), PlanError> {
        let Hardware { engines, link, nic, compute, host, peaks, .. } = self;
        let (mut divide, mut prices) = (Vec::new(), Vec::new());
        for (place, steps) in
            [("engines.peer", &engines.peer), ("engines.own", &engines.own), ("engines.host", &engines.host)]
        {
            let rises = steps.windows(2).all(|pair| pair[0].from_bytes < pair[1].from_bytes);
            if steps.first().is_none_or(|first| first.from_bytes > 0) || !rises {
                let seen = steps.first().map_or(0, |first| first.from_bytes);
                let expected = "steps of growing size, the first from 0 bytes on";
                return Err(PlanError::BadParameter { parameter: place, seen, expected });
            }
            divide.extend(steps.iter().map(|step| (place, step.rate)));
            prices.extend(steps.iter().map(|step| (place, step.per_copy)));
        }
        divide.extend([
            ("link.rate", link.rate),
            ("link.load_rate", link.load_rate),
            ("nic.rate", nic.rate),
            ("nic.message_bytes", nic.message_bytes),
            ("compute.rate", compute.rate),
        ]);
        if let Some(Peaks { tflops, memory_bytes }) = *peaks {
            divide.extend([("peaks.tflops", tflops.into()), ("peaks.memory_bytes", memory_bytes)]);
        }
        prices.extend([
            ("engines.per_batch", engines.per_batch),
            ("engines.per_word", engines.per_word),
            ("engines.per_list", engines.per_list),
            ("engines.per_call", engines.per_call),
            ("engines.enqueue_copy", engines.enqueue_copy),
            ("engines.enqueue_word", engines.enqueue_word),
            ("link.latency", link.latency),
            ("nic.per_message", nic.per_message),
            ("nic.latency", nic.latency),
            ("compute.launch", compute.launch),
            ("compute.sort", compute.sort),
            ("host.signal", host.signal),
            ("host.latency", host.latency),
            ("host.sort", host.sort),
            ("host.place", host.place),
            ("host.per_bin", host.per_bin),
        ]);
        let zero = divide.into_iter().filter(|&(_, seen)| seen == 0).map(|of| (of, "1 or more"));
        let dear = prices
            .into_iter()
            .filter(|&(_, seen)| seen > Hardware::MAX_PRICE)
            .map(|of| (of, "1000000000 or less"));
        let cores = ("host.cores", u64::from(host.cores));
        let many = (host.cores > 1 << 16).then_some((cores, "65536 or less"));
        match zero.chain(dear).chain(many).next() {
            Some(((parameter, seen), expected)) => Err(PlanError::BadParameter { parameter, seen, expected }),
            None => Ok(()),
        }
    }
}

/// Whether a name is that of a figure, or of a part that the figure belongs to.
fn covers(name: &str, figure: &str) -> bool {
    figure.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Names of the numbers and switches below a name; steps of a list share theirs, and where a step
/// begins belongs to its cost.
fn leaves(name: &str, value: &Value, names: &mut Vec<String>) {
    match value {
        Value::Object(parts) => {
            let figures = parts.iter().filter(|(part, _)| *part != "from_bytes");
            figures.for_each(|(part, value)| leaves(&format!("{name}.{part}"), value, names));
        }
        Value::Array(steps) => steps.iter().take(1).for_each(|step| leaves(name, step, names)),
        Value::Number(_) | Value::Bool(_) => names.push(name.to_owned()),
        Value::String(_) | Value::Null => {}
    }
}

impl FromStr for Hardware {
    type Err = UnknownHardware;

    fn from_str(name: &str) -> Result<Self, UnknownHardware> {
        let at = Hardware::NAMES.iter().position(|known| *known == name);
        let at = at.ok_or_else(|| UnknownHardware { seen: name.to_owned() })?;
        Ok(serde_json::from_str(FILES[at]).expect("a test reads the files of all known machines"))
    }
}

/// Time for so many bytes at a rate in MB/s, rounded up.
pub(super) fn at_rate(bytes: u64, rate: u64) -> u64 {
    (u128::from(bytes) * 1000).div_ceil(u128::from(rate)) as u64
}
