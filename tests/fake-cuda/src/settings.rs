//! Settings of the environment, read once by `cuInit`.

use std::env::{self, VarError};
use std::path::PathBuf;
use std::str::FromStr;

/// The hardware queues of a device where nothing is said, as on real devices.
const QUEUES: usize = 8;

/// Granularity of mapped memory: that of small devices, and for one seed in eight that of today's
/// servers. No caller may count on either. Most tests take many
/// small buffers, and all of a buffer's granules are poisoned.
const GRANULARITIES: [u64; 8] = {
    let mut all = [64 << 10; 8];
    all[3] = 2 << 20;
    all
};

/// One reading of the environment; the README lists the variables.
#[derive(Debug)]
pub struct Settings {
    pub seed: u64,
    pub devices: usize,
    pub queues: usize,
    /// Bytes of each device that this process may hold.
    pub memory: u64,
    /// Sizes and addresses of mapped memory are multiples of this.
    pub granularity: u64,
    /// As `cuDriverGetVersion` says it: 1000 * major + 10 * minor.
    pub version: i32,
    /// Sets of devices that reach each other; none means all do.
    pub peers: Option<Vec<Vec<usize>>>,
    /// Kernels are loaded when a module is, not at their first launch.
    pub eager: bool,
    pub kernels: Option<PathBuf>,
    /// As `CU_DEVICE_ATTRIBUTE_COMPUTE_MODE` says it.
    pub compute_mode: i32,
    /// Copies within a device are done by a kernel of the driver's own, whatever was wished.
    pub copy_kernels: bool,
    /// As `cuptiGetVersion` says it.
    pub cupti: u32,
    /// As `cublasGetVersion` says it.
    pub cublas: i32,
    /// Visibility of NICs' writes.
    pub nic_writes: NicWrites,
    /// Calls that wait for the device keep other threads' calls out.
    pub locks: bool,
    /// Entries that a hardware queue holds before enqueueing threads wait; 0 for any number.
    pub launch_queue: usize,
    /// Queues for copies, for each direction; 0 where copies have none of their own.
    pub copy_queues: usize,
    /// Streams of each priority have hardware queues of their own.
    pub priority_queues: bool,
}

/// Order in which streams see NICs' writes into device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NicWrites {
    /// In the order of the NIC.
    Ordered,
    /// In none, until a wait flushes.
    Flushed,
    /// In none.
    Unordered,
}

impl FromStr for NicWrites {
    type Err = ();

    fn from_str(text: &str) -> Result<NicWrites, ()> {
        match text {
            "ordered" => Ok(NicWrites::Ordered),
            "flushed" => Ok(NicWrites::Flushed),
            "unordered" => Ok(NicWrites::Unordered),
            _ => Err(()),
        }
    }
}

impl Settings {
    /// Reads the environment; the text names what cannot be read.
    pub fn from_env() -> Result<Settings, String> {
        let queues = number("CUDA_DEVICE_MAX_CONNECTIONS", QUEUES)?;
        if !(1..=32).contains(&queues) {
            return Err(format!("CUDA_DEVICE_MAX_CONNECTIONS is {queues}, not in 1..=32"));
        }
        let seed: u64 = number("SIDELANE_FAKE_CUDA_SEED", 0)?;
        Ok(Settings {
            seed,
            devices: number("SIDELANE_FAKE_CUDA_DEVICES", 8)?,
            queues,
            memory: number("SIDELANE_FAKE_CUDA_MEMORY", 8 << 30)?,
            granularity: GRANULARITIES[seed as usize % GRANULARITIES.len()],
            version: number("SIDELANE_FAKE_CUDA_DRIVER", 12080)?,
            peers: text("SIDELANE_FAKE_CUDA_PEERS")?.map(|t| sets(&t)).transpose()?,
            eager: text("CUDA_MODULE_LOADING")?.is_some_and(|mode| mode == "EAGER"),
            kernels: text("SIDELANE_FAKE_CUDA_KERNELS")?.map(PathBuf::from),
            compute_mode: number("SIDELANE_FAKE_CUDA_COMPUTE_MODE", 0)?,
            copy_kernels: number("SIDELANE_FAKE_CUDA_COPY_KERNELS", 0)? != 0,
            cupti: number("SIDELANE_FAKE_CUDA_CUPTI", 23)?,
            cublas: number("SIDELANE_FAKE_CUDA_CUBLAS", 120_800)?,
            nic_writes: number("SIDELANE_FAKE_CUDA_NIC_WRITES", NicWrites::Ordered)?,
            locks: number("SIDELANE_FAKE_CUDA_LOCKS", 0)? != 0,
            launch_queue: number("SIDELANE_FAKE_CUDA_LAUNCH_QUEUE", 0)?,
            copy_queues: number("SIDELANE_FAKE_CUDA_COPY_QUEUES", 0)?,
            priority_queues: number("SIDELANE_FAKE_CUDA_PRIORITY_QUEUES", 0)? != 0,
        })
    }

    /// Whether the wish of a batch to overlap with compute counts: from CUDA 13.1 on.
    pub fn heeds_overlap(&self) -> bool {
        self.version >= 13010
    }

    /// Whether streams write and await words in memory of other devices: until CUDA 13.1.
    pub fn has_remote_words(&self) -> bool {
        self.version < 13010
    }

    /// Whether one device's engines and kernels reach the memory of the other.
    pub fn reaches(&self, device: usize, owner: usize) -> bool {
        let together = |set: &Vec<usize>| set.contains(&device) && set.contains(&owner);
        device == owner || self.peers.as_ref().is_none_or(|sets| sets.iter().any(together))
    }
}

fn text(name: &str) -> Result<Option<String>, String> {
    match env::var(name) {
        Ok(text) => Ok(Some(text)),
        Err(VarError::NotPresent) => Ok(None),
        Err(error) => Err(format!("{name}: {error}")),
    }
}

fn number<T: FromStr>(name: &str, otherwise: T) -> Result<T, String> {
    let Some(text) = text(name)? else { return Ok(otherwise) };
    text.parse().map_err(|_| format!("{name}: {text:?} makes no sense"))
}

/// `0,1|2,3`: two sets of two.
fn sets(text: &str) -> Result<Vec<Vec<usize>>, String> {
    let device = |text: &str| {
        text.trim().parse().map_err(|_| format!("SIDELANE_FAKE_CUDA_PEERS: {text:?} is no device"))
    };
    text.split('|').map(|set| set.split(',').map(device).collect()).collect()
}
