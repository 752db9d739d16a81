//! Errors of the rendezvous and the hub, and the cause that ends a world.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Meeting the other ranks of the job failed.
#[derive(Debug, Clone, PartialEq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum BootstrapError {
    /// The environment does not identify this process.
    #[error(
        "no launcher's variables found: set RANK, WORLD_SIZE and MASTER_ADDR, or start with `sidelane launch`, torchrun, srun or mpirun"
    )]
    NoEnvironment,
    /// An environment variable has another name now.
    #[error("{name} is now {new}")]
    RenamedVariable {
        /// The variable that is set.
        name: &'static str,
        /// Its name now.
        new: &'static str,
    },
    /// An environment variable has nearly the name of one that is read, and would do nothing.
    #[error("{name} is no variable of Sidelane, {near} is")]
    MisspeltVariable {
        /// The variable that is set.
        name: String,
        /// The variable that it may be meant to be.
        near: &'static str,
    },
    /// An environment variable has a value that cannot be used.
    #[error("environment variable {name}={value:?}: expected {expected}")]
    BadVariable {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// Description of a valid value.
        expected: &'static str,
    },
    /// The symmetric part takes the whole heap, or more.
    #[error(
        "a heap of {heap} bytes (SIDELANE_HEAP) has no room for rows next to its symmetric part of {symmetric} bytes (SIDELANE_SYMMETRIC)"
    )]
    NoRoomForRows {
        /// Bytes of a rank's heap.
        heap: u64,
        /// Bytes of its symmetric part.
        symmetric: u64,
    },
    /// Rank 0 can listen on none of the ports of the rendezvous.
    #[error(
        "rank 0 cannot listen on {}: {}: join a job once in a process; if another process has the port, set SIDELANE_PORT to a free one on all ranks",
        ports(*first, *last),
        std::io::Error::from_raw_os_error(*errno)
    )]
    NoPort {
        /// The first port.
        first: u16,
        /// The last port.
        last: u16,
        /// Why the last try failed.
        errno: i32,
    },
    /// An environment variable that is needed is missing.
    #[error("environment variable {name} is missing: {hint}")]
    MissingVariable {
        /// The variable.
        name: &'static str,
        /// Value to set.
        hint: &'static str,
    },
    /// No answer at the rendezvous.
    #[error("no rank of this job answered at {address} within {} ms{}", waited.as_millis(), other(other_job))]
    NoRendezvous {
        /// Where it was looked for.
        address: String,
        /// How long.
        waited: Duration,
        /// Where a job of another name answered.
        other_job: Option<String>,
    },
    /// One of the two sides could not prove that it knows the other's secret.
    #[error(
        "this rank and {peer} have different secrets, so the rendezvous refused the join: set the same SIDELANE_SECRET or SIDELANE_SECRET_FILE on all machines"
    )]
    WrongSecret {
        /// Address of the other side.
        peer: String,
    },
    /// The other side speaks another version.
    #[error("{peer} speaks protocol version {seen}, expected {expected}")]
    Version {
        /// Address of the other side.
        peer: String,
        /// Its version.
        seen: u32,
        /// Ours.
        expected: u32,
    },
    /// A rank that is not of this job, or came twice.
    #[error(
        "rank {rank} of {size} was refused at the rendezvous: another process has this rank (is one --node-rank given twice, or do lists of --ranks-per-node differ?), or this process joined before"
    )]
    RankRefused {
        /// The rank.
        rank: u32,
        /// The size of the job.
        size: u32,
    },
    /// Ranks were started for one job with different numbers of ranks.
    #[error(
        "rank {rank} was started in a job of {seen} ranks, but rank 0 in one of {expected}: give all machines the same --nodes and --ranks-per-node (WORLD_SIZE), and each job a name of its own (SIDELANE_JOB)"
    )]
    JobSizesDiffer {
        /// The rank that was refused.
        rank: u32,
        /// Number of ranks that it was started with.
        seen: u32,
        /// Number of ranks that the host was started with.
        expected: u32,
    },
    /// The name of the master has no address.
    #[error("the name {name} has no address (tried for {} ms)", waited.as_millis())]
    NoAddress {
        /// The name.
        name: String,
        /// How long it was looked up.
        waited: Duration,
    },
    /// Listening beyond this machine without a secret.
    #[error(
        "refusing to listen on {address} without a secret: set SIDELANE_SECRET or SIDELANE_SECRET_FILE (or SIDELANE_INSECURE=1 on a trusted network)"
    )]
    NoSecret {
        /// The address.
        address: String,
    },
    /// A secret that can be guessed.
    #[error(
        "{name} is too weak: {}: set it to what `openssl rand -hex 32` prints",
        strength(*bits, *least)
    )]
    WeakSecret {
        /// The variable.
        name: &'static str,
        /// Bits that the text has at most; 0 if it has fewer than 8 different characters.
        bits: u32,
        /// Bits that are needed.
        least: u32,
    },
    /// The key that proves ranks of one machine to be of one user may be known to others.
    #[error("{path} is not a key that user {user} alone can read: remove it, or set SIDELANE_SECRET")]
    UserKey {
        /// The file.
        path: String,
        /// This user.
        user: u32,
    },
    /// The deadline of a rendezvous step passed.
    #[error(
        "{} within {} ms{}",
        incomplete(step, missing),
        waited.as_millis(),
        with(refused)
    )]
    Deadline {
        /// The key of the step.
        step: String,
        /// The missing ranks (positions in the group), where known.
        missing: Vec<u32>,
        /// How long it was waited for.
        waited: Duration,
        /// Joins that rank 0 refused meanwhile, because their secret is another.
        refused: Option<RefusedJoins>,
    },
    /// Ranks disagree about a collective step.
    #[error("ranks disagree about {step:?}: rank {rank} said {seen}, expected {expected}")]
    Disagree {
        /// The step.
        step: String,
        /// The rank that differs.
        rank: u32,
        /// Its value.
        seen: String,
        /// The expected value.
        expected: String,
    },
    /// Ranks of one job were started with different settings
    /// ([`Options::job_fingerprint`](crate::Options::job_fingerprint)).
    #[error("rank {rank} was started with other settings than rank 0: {seen:?}, not {expected:?}")]
    FingerprintsDiffer {
        /// The first rank that differs from rank 0.
        rank: u32,
        /// Its conditions.
        seen: String,
        /// Those of rank 0.
        expected: String,
    },
    /// A rank left the world in peace while a step needed it.
    #[error("rank {rank} left the world: step {step:?} cannot be completed")]
    Left {
        /// The rank that left.
        rank: u32,
        /// The key of the step.
        step: String,
    },
    /// A step carries more bytes than one message can.
    #[error("step {step:?} carries {bytes} bytes, at most {limit} go through the rendezvous")]
    TooLarge {
        /// The key of the step.
        step: String,
        /// Its size.
        bytes: u64,
        /// The bound.
        limit: u64,
    },
    /// A process of another user asked for descriptors.
    #[error(
        "process {pid} belongs to user {seen}, not {expected}: descriptors are shared within one user only"
    )]
    OtherUser {
        /// The process.
        pid: u32,
        /// Its user.
        seen: u32,
        /// Ours.
        expected: u32,
    },
    /// A rank sits on another machine, which the lane that was asked for does not reach.
    #[error("rank {rank} is on another machine than rank {me}: the loopback lane does not reach it")]
    Unreachable {
        /// This rank.
        me: u32,
        /// The rank out of reach.
        rank: u32,
    },
    /// The user of this thread asked to stop
    /// ([`interruptible`](crate::bootstrap::interruptible)).
    #[error("interrupted in rendezvous step {step:?}")]
    Interrupted {
        /// The step.
        step: String,
    },
    /// Too few ranks came to a rebuild.
    #[error("rebuild of epoch {epoch}: no world of {at_least} or more ranks within {} ms", waited.as_millis())]
    RebuildFailed {
        /// The epoch that was to be rebuilt.
        epoch: u16,
        /// The fewest ranks that this rank wanted.
        at_least: u32,
        /// How long they were waited for.
        waited: Duration,
    },
    /// No spare asked to join a world that was to grow. The world lives.
    #[error("no spare asked to join within {} ms", waited.as_millis())]
    NoSpare {
        /// How long they were waited for.
        waited: Duration,
    },
    /// A spare has other settings than the world that it asked to join. That world goes on without
    /// it.
    #[error("this spare has another {setting} than the ranks: {seen:?}, not {expected:?}")]
    SettingsDiffer {
        /// The first setting that differs: the name of its variable, or of its field in
        /// [`Options`](crate::Options).
        setting: String,
        /// The spare's value.
        seen: String,
        /// That of the ranks.
        expected: String,
    },
    /// A spare was lost, or could not build its part, while a world took it in. The world lives,
    /// without it.
    #[error("spare at {address} was lost while it was taken in as rank {rank}: the world stays as it was")]
    SpareLost {
        /// The rank that it was to have in the larger world.
        rank: u32,
        /// Where it listened.
        address: SocketAddr,
    },
    /// A rank could not go on to the larger world. This world lives.
    #[error("rank {rank} did not get into the larger world: the world stays as it was")]
    NotGrown {
        /// The first such rank.
        rank: u32,
    },
    /// No world took a spare in.
    #[error("no world of this job took this spare in within {} ms at {address}: do its ranks call World::grow?", waited.as_millis())]
    NotTakenIn {
        /// Where it asked.
        address: String,
        /// How long.
        waited: Duration,
    },
    /// The world died while it was being set up.
    #[error(transparent)]
    World(#[from] super::Cause),
    /// A system call failed.
    #[error("{call} failed: {}", std::io::Error::from_raw_os_error(*errno))]
    System {
        /// The call.
        call: &'static str,
        /// Its errno.
        errno: i32,
    },
    /// A message that no correct peer sends.
    #[error("{peer} sent a malformed message")]
    Malformed {
        /// Address of the other side.
        peer: String,
    },
}

/// Joins that rank 0 refused because their secret is another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct RefusedJoins {
    /// Number of attempts: a rank tries again for two seconds.
    pub joins: u32,
    /// Address of the last one.
    pub last: IpAddr,
}

/// The ports that rank 0 tried.
fn ports(first: u16, last: u16) -> String {
    if first == last { format!("port {first}") } else { format!("any of the ports {first} to {last}") }
}

/// The reason why a secret is weak.
fn strength(bits: u32, least: u32) -> String {
    match bits {
        0 => "it has fewer than 8 different characters".to_owned(),
        _ => format!("by its characters it has at most {bits} bits, and {least} are needed"),
    }
}

/// A step, and the ranks that did not come to it.
fn incomplete(step: &str, missing: &[u32]) -> String {
    let step = if step == "rendezvous" { "the rendezvous".to_owned() } else { format!("step {step:?}") };
    match missing {
        [] => format!("{step} was not complete"),
        [rank] => format!("rank {rank} did not come to {step}"),
        _ => format!("ranks {} did not come to {step}", some(missing)),
    }
}

/// The hint that another job answered.
fn other(job: &Option<String>) -> String {
    match job {
        Some(address) => format!(
            "; {address} serves a job of another name: set the same SIDELANE_JOB and master on all machines"
        ),
        None => String::new(),
    }
}

/// The hint that ranks came with another secret.
fn with(refused: &Option<RefusedJoins>) -> String {
    match refused {
        Some(RefusedJoins { joins, last }) => {
            format!("; {joins} joins with another secret were refused, the last from {last}")
        }
        None => String::new(),
    }
}

/// The first of these ranks, and how many others there are.
fn some(ranks: &[u32]) -> String {
    const NAMED: usize = 16;
    let named = &ranks[..ranks.len().min(NAMED)];
    match ranks.len() - named.len() {
        0 => format!("{named:?}"),
        others => format!("{named:?} and {others} others"),
    }
}

/// How a rank was found to be gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub enum LostReason {
    /// Its connection closed: the process ended.
    Closed,
    /// Its connection is open, but no heartbeat came for this long.
    Silent(Duration),
}

impl std::fmt::Display for LostReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LostReason::Closed => f.write_str("its process ended, or left the world"),
            LostReason::Silent(time) => write!(f, "no heartbeat for {} ms", time.as_millis()),
        }
    }
}

/// The first failure of a world. It is sticky: every wait ends with it, and every new call is
/// refused with it, until a rebuild.
#[derive(Debug, Clone, PartialEq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum Cause {
    /// Another rank is gone.
    #[error("rank {rank} is lost: {how}")]
    Lost {
        /// The lost rank (in the world).
        rank: u32,
        /// How it was noticed.
        how: LostReason,
    },
    /// The launcher that started this job is gone.
    #[error("the launcher (process {pid}) is gone")]
    LauncherGone {
        /// Its process id.
        pid: u32,
    },
    /// The others declared this rank lost (it was stopped for too long) and went on without it.
    #[error("rank {rank} was declared lost in epoch {epoch}: the others continued without it")]
    Evicted {
        /// This rank.
        rank: u32,
        /// The epoch it was thrown out of.
        epoch: u16,
    },
    /// A rank is alive but did not do its part before the deadline. Or it holds most of the staging
    /// of a NIC, for which a put to another rank waited.
    #[error("rank {by} waited {} ms for rank {rank}, which is alive but silent", waited.as_millis())]
    Stalled {
        /// The silent rank.
        rank: u32,
        /// The rank whose deadline passed first.
        by: u32,
        /// How long it waited.
        waited: Duration,
    },
    /// A rank called cancel on its world, or left the world while others were in a call.
    #[error("cancelled by rank {by}")]
    Cancelled {
        /// The rank that cancelled.
        by: u32,
    },
    /// A wire between two ranks broke, although both may live.
    #[error("the connection from rank {by} to rank {rank} broke")]
    Connection {
        /// The rank at its other end.
        rank: u32,
        /// The rank that noticed.
        by: u32,
    },
    /// The NIC of a rank failed, although the rank lives.
    #[error("the NIC of rank {by} failed")]
    Nic {
        /// The rank.
        by: u32,
    },
    /// A thread panicked that other threads or other ranks wait for: a bug of the library, or a
    /// panic of a function that a node of a layer calls.
    #[error("{thread} of rank {by} panicked: {message}")]
    Panicked {
        /// The rank.
        by: u32,
        /// Name of the thread, or of the node.
        thread: String,
        /// The panic's message.
        message: String,
    },
    /// A peer sent something over a lane that no correct peer sends.
    #[error("rank {rank} broke the lane's protocol")]
    Protocol {
        /// The offending rank.
        rank: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_ranks_of_large_job_are_counted() {
        let (step, waited) = ("rendezvous".to_owned(), Duration::from_secs(1));
        let missing = (1..2000).collect();
        let error = BootstrapError::Deadline { step, missing, waited, refused: None }.to_string();
        assert!(error.contains("14, 15, 16] and 1983 others did not come to the rendezvous"), "{error}");
    }

    #[test]
    fn missing_rank_may_be_the_one_with_another_secret() {
        let (step, waited) = ("rendezvous".to_owned(), Duration::from_secs(1));
        let refused = Some(RefusedJoins { joins: 7, last: [10, 0, 0, 2].into() });
        let error = BootstrapError::Deadline { step, missing: vec![1], waited, refused }.to_string();
        let whole = "rank 1 did not come to the rendezvous within 1000 ms; \
                     7 joins with another secret were refused, the last from 10.0.0.2";
        assert_eq!(error, whole);
    }

    #[test]
    fn a_step_without_known_ranks_is_named_alone() {
        let (step, waited) = ("nothing".to_owned(), Duration::from_millis(50));
        let error = BootstrapError::Deadline { step, missing: Vec::new(), waited, refused: None };
        assert_eq!(error.to_string(), "step \"nothing\" was not complete within 50 ms");
    }

    #[test]
    fn one_port_is_no_range_and_a_second_join_is_the_first_guess() {
        let said = |last| BootstrapError::NoPort { first: 29501, last, errno: 98 }.to_string();
        let one = "rank 0 cannot listen on port 29501: Address already in use (os error 98): join a job once";
        assert!(said(29501).starts_with(one), "{}", said(29501));
        assert!(said(29516).contains("on any of the ports 29501 to 29516: "), "{}", said(29516));
    }
}
