//! Building a world, and building it again.
//!
//! ```text
//!   join           a hub: rendezvous of all ranks            epoch 0    ranks 0 1 2 3
//!     Parts          places of all ranks --> nodes
//!                    do all have the same fingerprint, the same sizes?
//!                    heap, and those of the node: descriptors --> one reservation
//!                    net, if there are several nodes
//!
//!   rebuild        a hub: survivors of the old world         epoch 1    ranks 0   2 3  --> 0 1 2
//!   grow, spare    a hub: all old ranks, and spares          epoch 2    ranks 0 1 2 + a spare --> 0 1 2 3
//!     Parts          as above, on the new hub
//! ```
//!
//! A rank that cannot build its part ends the new world, so that the others hear the first reason.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sha2::{Digest, Sha256};
use sidelane_core::with_methods;

use super::net_selection::{NetReport, NetSelection, NetState};
use super::{Group, NicCounters};
use crate::bootstrap::{self, Health, Hub, Identity, Location, Secret, Setting, Timeouts};
use crate::config::{Config, EmulatedLink, NetChoice, TcpAddress};
use crate::error::{BootstrapError, CallError, Cause, Error, LaneError, LostReason, MemoryError};
use crate::exec::Recorder;
use crate::lane::VerbsEnvironment;
use crate::memory::{Heap, HeapSizes, Pool, PoolReport, Segment};
use crate::rows::{RowKernels, Simd};
use crate::topology::NodeMap;

/// How a world is built.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// Sizes of memory.
    pub config: Config,
    /// How long to wait for what.
    pub timeouts: Timeouts,
    /// Keep so many operations of each rank for a timeline, the first ones since the recorder was
    /// emptied; 0 keeps none and costs nothing.
    pub record: usize,
    /// The lane between nodes.
    pub net: NetChoice,
    /// The link that loop connections emulate. All ranks must choose the same.
    pub emulated_link: Option<EmulatedLink>,
    /// Address at which peers connect to this rank, if the lane is tcp.
    pub tcp_address: TcpAddress,
    /// Queue pairs to one peer, from 1 to 8, if the lane is verbs; none: as the environment says.
    pub queue_pairs: Option<u8>,
    /// Predict the requests to NICs ([`World::nic_forecast`]).
    pub forecast: bool,
    /// NICs that replace this machine's.
    #[cfg(test)]
    pub(crate) fake_verbs: Option<VerbsEnvironment>,
    /// Settings beyond these options that all ranks must share, as text of the caller. An example
    /// is the settings of a job whose machines are started one by one. Ranks whose text differs do
    /// not become a world.
    pub job_fingerprint: String,
}

impl Options {
    with_methods! {
        with_config(config: Config),
        with_timeouts(timeouts: Timeouts),
        with_record(record: usize),
        with_net(net: NetChoice),
        with_emulated_link(emulated_link: Option<EmulatedLink>),
        with_tcp_address(tcp_address: TcpAddress),
        with_queue_pairs(queue_pairs: Option<u8>),
        with_forecast(forecast: bool),
        with_job_fingerprint(job_fingerprint: String),
    }

    /// This machine's NICs, or those that replace them.
    pub(super) fn verbs_environment(&self) -> Result<VerbsEnvironment, Error> {
        #[cfg(test)]
        if let Some(ground) = &self.fake_verbs {
            return Ok(ground.clone());
        }
        VerbsEnvironment::here()
    }

    /// From the environment: see [`config`](crate::config).
    ///
    /// # Errors
    /// [`BootstrapError::BadVariable`].
    pub fn from_env() -> Result<Self, BootstrapError> {
        let (config, timeouts, net) = (Config::from_env()?, Timeouts::from_env()?, NetChoice::from_env()?);
        let (emulated_link, tcp_address) = (EmulatedLink::from_env()?, TcpAddress::from_env());
        Ok(Options { config, timeouts, net, emulated_link, tcp_address, ..Options::default() })
    }
}

/// All ranks of a job, as one of them sees it.
#[derive(Debug)]
pub struct World {
    shared: Arc<WorldState>,
    /// For each rank its rank in the world before; spares have none. Identity in a first world.
    previous: Vec<u32>,
}

/// State that groups, windows and calls share. The world lives until the last of them is gone.
pub(crate) struct WorldState {
    /// The net to other nodes; none with only one node. Dropped before the hub leaves, so that a
    /// rank's bytes arrive before others hear that it has left.
    pub(crate) net: Option<NetState>,
    pub(crate) hub: Box<dyn Hub>,
    pub(crate) options: Options,
    pub(crate) nodes: NodeMap,
    pub(crate) heap: Heap,
    pub(crate) rows: RowKernels,
    pub(crate) recorder: Option<Arc<Recorder>>,
    /// How many groups of the same ranks were made before: part of a group's name.
    pub(crate) groups: Mutex<HashMap<Vec<u32>, u32>>,
    machines: Vec<Location>,
}

impl std::fmt::Debug for WorldState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World")
            .field("rank", &self.hub.rank())
            .field("size", &self.hub.size())
            .field("epoch", &self.hub.epoch())
            .finish()
    }
}

impl World {
    /// Joins the job that the environment describes (`sidelane launch`, torchrun, SLURM, Open MPI).
    ///
    /// # Errors
    /// [`BootstrapError`] if the ranks do not meet, [`MemoryError`] if the heap cannot be had.
    pub fn from_env() -> Result<Self, Error> {
        Self::from_env_with(Options::from_env()?)
    }

    /// As [`World::from_env`], with options of the caller's.
    ///
    /// # Errors
    /// As [`World::from_env`].
    pub fn from_env_with(options: Options) -> Result<Self, Error> {
        Self::join(&Identity::from_env()?, Secret::from_env()?, options)
    }

    /// Joins a job that is known otherwise than from a launcher's variables: from another library's
    /// process group, for example.
    ///
    /// # Errors
    /// As [`World::from_env`].
    pub fn join(identity: &Identity, secret: Option<Secret>, options: Options) -> Result<Self, Error> {
        let hub = bootstrap::connect(identity, secret, options.timeouts)?;
        Self::build(hub, options, &Location::here()?, None)
    }

    /// Waits as a spare until a world of the job takes this process in ([`World::grow`]). Returns
    /// that world. The identity tells the job, and where its ranks meet: the address is that of the
    /// machine of the world's rank 0. Its rank and size are ignored; whether all ranks are on one
    /// machine is not. Sizes of memory, the lane, the emulated link, the liveness limit and the
    /// fingerprint must be those of the ranks. So must the other timeouts, which no rank compares.
    ///
    /// A spare that is cut off from rank 0 asks again as soon as rank 0 has been silent for longer
    /// than the liveness limit.
    ///
    /// # Errors
    /// [`BootstrapError::NotTakenIn`] if no world does until the deadline;
    /// [`BootstrapError::SettingsDiffer`] with other options than the ranks. As
    /// [`World::from_env`] otherwise, for example with another secret, or if the growth fails while
    /// this spare builds its part: then ask again.
    pub fn spare(
        identity: &Identity,
        secret: Option<Secret>,
        options: Options,
        deadline: Duration,
    ) -> Result<Self, Error> {
        let settings = shared_settings(&options);
        let (hub, previous) = bootstrap::spare(identity, secret, options.timeouts, &settings, deadline)?;
        let world = Self::build(hub, options, &Location::here()?, Some(previous))?;
        world.meet("world/built")?;
        // Old ranks come to this step once all of them are in.
        world.meet("world/grown")?;
        Ok(world)
    }

    /// A world of `n` ranks that are threads of this process, all on one node. Give each to its
    /// thread.
    ///
    /// # Errors
    /// As [`World::from_env`].
    pub fn threads(n: u32) -> Result<Vec<Self>, Error> {
        let config = Config { heap: 32 << 20, symmetric: 8 << 20, ..Config::default() };
        Self::threads_with(&vec![0; n as usize], &Options { config, ..Options::default() })
    }

    /// A world of threads: rank r acts as if it ran on node `nodes[r]`. Ranks of different nodes
    /// share no memory but the wire between them.
    ///
    /// # Errors
    /// As [`World::from_env`].
    pub fn threads_with(nodes: &[u32], options: &Options) -> Result<Vec<Self>, Error> {
        let hubs = bootstrap::threads(nodes.len() as u32, options.timeouts);
        std::thread::scope(|scope| {
            let ranks: Vec<_> = hubs
                .into_iter()
                .zip(nodes)
                .map(|(hub, node)| {
                    let options = options.clone();
                    scope.spawn(move || {
                        let place = Location::in_node(&node.to_string())?;
                        Self::build(hub, options, &place, None)
                    })
                })
                .collect();
            let (mut worlds, mut errors) = (Vec::new(), Vec::new());
            for rank in ranks {
                match rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
                    Ok(world) => worlds.push(world),
                    Err(error) => errors.push(error),
                }
            }
            // A rank that was left by another is not the reason, nor one that only hears of it.
            let heard = |error: &Error| {
                matches!(error, Error::Bootstrap(BootstrapError::Left { .. }) | Error::World(_))
            };
            match errors.into_iter().min_by_key(heard) {
                Some(error) => Err(error),
                None => Ok(worlds),
            }
        })
    }

    /// A world on this hub, on a node of this name.
    #[cfg(test)]
    pub(crate) fn of(hub: Box<dyn Hub>, options: Options, node: &str) -> Result<Self, Error> {
        Self::build(hub, options, &Location::in_node(node)?, None)
    }

    fn build(
        hub: Box<dyn Hub>,
        options: Options,
        place: &Location,
        previous: Option<Vec<u32>>,
    ) -> Result<Self, Error> {
        let parts = Parts::build(hub.as_ref(), &options, place);
        let Parts { net, nodes, heap, rows, machines } =
            parts.inspect_err(|error| tell_of_failed_build(hub.as_ref(), error))?;
        let recorder = (options.record > 0).then(|| Arc::new(Recorder::new(options.record)));
        let previous = previous.unwrap_or_else(|| (0..hub.size()).collect());
        let shared =
            WorldState { net, hub, options, nodes, heap, rows, recorder, groups: Mutex::default(), machines };
        let shared = Arc::new(shared);
        shared.tell_of_own_faults();
        Ok(World { shared, previous })
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.shared.hub.rank()
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.shared.hub.size()
    }

    /// The number of this world of the job: 0 at first, higher after each rebuild. It stands in the
    /// high bits of every generation.
    pub fn epoch(&self) -> u16 {
        self.shared.hub.epoch()
    }

    /// Which ranks share memory.
    pub fn nodes(&self) -> &NodeMap {
        &self.shared.nodes
    }

    /// For each rank, its rank in the world before. Spares that joined this world are behind those,
    /// and have none.
    pub fn previous_ranks(&self) -> &[u32] {
        &self.previous
    }

    /// Whether the world is alive.
    #[doc(hidden)]
    pub fn health(&self) -> &Health {
        self.shared.hub.health()
    }

    /// Contents of this rank's receive pool.
    pub fn pool_report(&self) -> PoolReport {
        self.pool().report()
    }

    /// This rank's receive pool.
    #[doc(hidden)]
    pub fn pool(&self) -> &Arc<Pool> {
        self.shared.heap.pool()
    }

    /// Which lane joins the nodes; none where there is only one node.
    pub fn net(&self) -> Option<&NetReport> {
        self.shared.net.as_ref().map(|net| &net.report)
    }

    /// Requests to this rank's NICs so far; all 0 if the lane has no NICs.
    #[doc(hidden)]
    pub fn nic_counters(&self) -> NicCounters {
        self.shared.net.as_ref().map(|net| net.thread.counters()).unwrap_or_default()
    }

    /// The same, predicted from the calls alone; all 0 without [`Options::forecast`].
    #[doc(hidden)]
    pub fn nic_forecast(&self) -> NicCounters {
        self.shared.net.as_ref().map(|net| net.thread.forecast()).unwrap_or_default()
    }

    /// Pages that the operating system granted for the heap.
    #[doc(hidden)]
    pub fn pages(&self) -> crate::memory::PageReport {
        self.shared.heap.pages()
    }

    /// Name of the instruction set in use.
    pub fn simd(&self) -> &'static str {
        self.shared.rows.simd().name()
    }

    /// The recorder of this rank's operations, if [`Options::record`] asked for one.
    pub fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.shared.recorder.as_ref()
    }

    /// A group of these ranks, in this order. Collective among them: each must make the same groups
    /// of the same ranks in the same order; other ranks take no part.
    ///
    /// # Errors
    /// [`PlanError::BadParameter`](crate::error::PlanError::BadParameter) if a rank is out of
    /// range, named twice, or this rank is not among them.
    pub fn group(&self, ranks: &[u32]) -> Result<Group, Error> {
        self.shared.hub.health().check()?;
        Group::new(Arc::clone(&self.shared), ranks)
    }

    /// The group of all ranks.
    ///
    /// # Errors
    /// As [`World::group`].
    pub fn all(&self) -> Result<Group, Error> {
        self.group(&(0..self.size()).collect::<Vec<_>>())
    }

    /// Ends the world on every rank: all waits and calls end with [`Cause::Cancelled`] that names
    /// this rank.
    pub fn cancel(&self) {
        self.shared.hub.cancel(Cause::Cancelled { by: self.rank() });
    }

    /// The survivors' next world: new segments, new connections, a later epoch. Collective among
    /// the survivors, which all call it as soon as they hear of the loss: one that comes more than
    /// twice the liveness limit (3.5 s, `SIDELANE_LIVENESS_MS`) behind the others is evicted. A
    /// world of fewer than `at_least` ranks does not begin. With more than half of the ranks no
    /// network failure can make two worlds, so a program that must not continue twice asks for
    /// `world.size() / 2 + 1`. 1 takes any survivors: then a rank that was stopped or cut off
    /// may begin alone while the others go on. Should another rank be lost before the new
    /// world is built, this fails, and the survivors call it again. Handles and windows of the old
    /// world stay readable until they are dropped. What is free in its pool, or for peers to write
    /// alone, goes back to the system before the next heap is mapped; over verbs once the old world
    /// is dropped, as its NICs hold their memory until then. Late writes of a lost rank go to
    /// segments that no rank reads any more.
    ///
    /// # Errors
    /// [`BootstrapError::RebuildFailed`] if too few survivors meet until the deadline, and at once
    /// if this world never had so many ranks; [`Cause::Evicted`] if they continued without this
    /// rank.
    pub fn rebuild(&self, deadline: Duration, at_least: u32) -> Result<World, Error> {
        if at_least > self.size() {
            let (epoch, waited) = (self.epoch(), Duration::ZERO);
            return Err(BootstrapError::RebuildFailed { epoch, at_least, waited }.into());
        }
        let next = self.shared.hub.rebuild(deadline, at_least)?;
        self.stop_net();
        // The next heap takes its place.
        if let Err(error) = self.shared.heap.pool().give_back() {
            tracing::warn!(rank = self.rank(), %error, "memory of a failed world stays");
        }
        self.followed_by(next)
    }

    /// A larger world, with the [spares](World::spare) that ask for it: new segments, new
    /// connections, a later epoch, and spares behind the ranks of this world. Collective among all
    /// ranks, between two steps. Once all are here, rank 0 waits for a first spare until the
    /// deadline, and then takes in all that come within half a second. Without one this world stays
    /// as it is.
    ///
    /// The larger world begins with all ranks and all spares, or not at all. This world lives until
    /// all have built their parts of it, and ends then. Should rank 0 be lost while it tells the
    /// others so, some get the larger world, which fails at once, and the others the error of this
    /// one, which has failed too: each calls [`World::rebuild`] on the world that it has.
    ///
    /// Should a spare be lost before that, all ranks get [`BootstrapError::SpareLost`] within ten
    /// times the liveness limit, and this world lives on; the other spares ask again. A spare with
    /// other options than the ranks is refused when it asks. Should a rank of this world be lost,
    /// this world has failed, and the survivors call [`World::rebuild`]. The majority that excludes
    /// two worlds is that of the world on which they call it: spares count once a growth has
    /// returned the larger one.
    ///
    /// # Errors
    /// [`BootstrapError::NoSpare`] if none comes; [`BootstrapError::NoPort`] if rank 0 cannot
    /// listen at the job's ports; [`BootstrapError::SpareLost`]; if a rank cannot build its part,
    /// its reason there and [`BootstrapError::NotGrown`], which names it, on the others. A spare
    /// that is alive and does not build its part ends in [`BootstrapError::Deadline`] on the ranks
    /// that waited for it ([`Timeouts::rendezvous`]). This world lives on after these. The cause of
    /// its failure otherwise.
    pub fn grow(&self, deadline: Duration) -> Result<World, Error> {
        let settings = shared_settings(&self.shared.options);
        let growth = self.shared.hub.grow(deadline, &settings)?;
        let world = growth.complete(|next| {
            let world = self.followed_by(next)?;
            world.meet("world/built")?;
            Ok(world)
        })?;
        self.stop_net();
        match world.meet("world/grown") {
            Err(error @ BootstrapError::Interrupted { .. }) => Err(error.into()),
            // The larger world is the one that counts, even if it has failed already.
            Ok(()) | Err(_) => Ok(world),
        }
    }

    /// A step of all ranks of a larger world.
    fn meet(&self, step: &str) -> Result<(), BootstrapError> {
        let (hub, timeouts) = (&self.shared.hub, &self.shared.options.timeouts);
        let met = hub.barrier(step, hub.rank(), hub.size(), timeouts.rendezvous + timeouts.deadline);
        met.inspect_err(|error| tell_of_failed_build(hub.as_ref(), &error.clone().into()))
    }

    /// The world of this hub, which follows this one.
    fn followed_by(&self, (hub, previous): (Box<dyn Hub>, Vec<u32>)) -> Result<World, Error> {
        let place = &self.shared.machines[self.rank() as usize];
        Self::build(hub, self.shared.options.clone(), place, Some(previous))
    }

    /// A world that has failed may be kept: its bytes in flight must not reach the next one.
    fn stop_net(&self) {
        if let (Some(net), Err(cause)) = (&self.shared.net, self.shared.hub.health().check()) {
            net.thread.stop(&cause);
        }
    }
}

/// What ranks make together before they are a world.
struct Parts {
    net: Option<NetState>,
    nodes: NodeMap,
    heap: Heap,
    rows: RowKernels,
    machines: Vec<Location>,
}

impl Parts {
    fn build(hub: &dyn Hub, options: &Options, place: &Location) -> Result<Self, Error> {
        let (rank, size, deadline) = (hub.rank(), hub.size(), options.timeouts.rendezvous);
        let rows = RowKernels::new(Simd::from_env()?);
        let labels = hub.gather("world/place", rank, size, &place.to_bytes(), deadline)?;
        let machines: Vec<Location> = labels
            .iter()
            .zip(0..)
            .map(|(label, r)| Location::from_bytes(r, label))
            .collect::<Result<_, _>>()?;
        let nodes = NodeMap::from_labels(&machines);
        compare_fingerprints(hub, options)?;
        compare_sizes(hub, options)?;
        options.config.check()?;
        let heap = Self::map_heaps(hub, options, &nodes)?;
        let net = match nodes.nodes() {
            1 => None,
            _ => {
                let (nodes, machines, heap) = (&nodes, &machines, &heap);
                Some(NetState::open(&NetSelection { hub, machines, nodes, heap, options })?)
            }
        };
        Ok(Parts { net, nodes, heap, rows, machines })
    }

    fn map_heaps(hub: &dyn Hub, options: &Options, nodes: &NodeMap) -> Result<Heap, Error> {
        let rank = hub.rank();
        let sizes = HeapSizes { symmetric: options.config.symmetric, total: options.config.heap };
        let own = Segment::create("sidelane-heap", sizes.total)?;
        let members: Vec<u32> = (0..hub.size()).collect();
        let offer = |peer: usize| nodes.same_node(rank, peer as u32).then(|| vec![own.as_fd()]);
        let received = bootstrap::exchange_fds(
            hub,
            "world/heaps",
            &members,
            rank as usize,
            &offer,
            options.timeouts.rendezvous,
        )?;
        let mut segments: Vec<Option<Segment>> = received
            .into_iter()
            .zip(0..)
            .map(|(fds, peer): (Vec<OwnedFd>, u32)| {
                fds.into_iter().next().map(|fd| Segment::adopt(fd, peer)).transpose()
            })
            .collect::<Result<_, MemoryError>>()?;
        segments[rank as usize] = Some(own);
        Ok(Heap::new(rank, sizes, &segments, hub.health(), options.timeouts.deadline)?)
    }
}

/// A rank that cannot make its part ends the world, so that the others hear the first reason, and
/// not that some rank left. Errors that all ranks find need no word.
fn tell_of_failed_build(hub: &dyn Hub, error: &Error) {
    match error {
        Error::Bootstrap(BootstrapError::Left { rank, .. }) => {
            hub.cancel(Cause::Lost { rank: *rank, how: LostReason::Closed });
        }
        Error::Bootstrap(BootstrapError::System { .. })
        | Error::Lane(LaneError::System { .. } | LaneError::Verbs(_))
        | Error::Memory(MemoryError::System { .. }) => hub.cancel(Cause::Cancelled { by: hub.rank() }),
        _ => {}
    }
}

impl WorldState {
    /// A fault that only this rank has seen, of its NIC or of a thread, ends the world of all.
    fn tell_of_own_faults(self: &Arc<Self>) {
        let (shared, own) = (Arc::downgrade(self), self.hub.rank());
        self.hub.health().on_failure(move |cause| {
            let seen_here = match cause {
                Cause::Protocol { .. } => true,
                Cause::Connection { by, .. } | Cause::Nic { by } | Cause::Panicked { by, .. } => *by == own,
                _ => false,
            };
            if let Some(shared) = shared.upgrade().filter(|_| seen_here) {
                shared.hub.cancel(cause.clone());
            }
        });
    }

    /// An error in the middle of a call ends the world: peers must not wait for a rank that has
    /// given up, nor blame it. A rank that left while it was awaited does not end a world by
    /// itself; the rank that notices it reports it. The error's ranks are positions among `ranks`.
    pub(crate) fn fail(&self, ranks: &[u32], error: Error) -> Error {
        let hub = &self.hub;
        match &error {
            Error::Lane(LaneError::Deadline { peer, waited, .. }) => {
                let rank = ranks.get(*peer as usize).copied().unwrap_or(*peer);
                hub.cancel(Cause::Stalled { rank, by: hub.rank(), waited: *waited });
            }
            Error::World(cause) if hub.health().check().is_ok() => hub.cancel(cause.clone()),
            Error::World(_) => {}
            _ => hub.cancel(Cause::Cancelled { by: hub.rank() }),
        }
        error
    }
    /// Whether this machine has fewer cores for this process than ranks.
    pub(crate) fn oversubscribed(&self) -> bool {
        oversubscribed(&self.machines, self.hub.rank(), 1)
    }

    /// How many groups of these ranks were made before this one.
    pub(crate) fn count_group(&self, ranks: &[u32]) -> u32 {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let count = groups.entry(ranks.to_vec()).or_default();
        *count += 1;
        *count - 1
    }
}

/// Whether the machine of a rank has fewer cores for this process than its ranks have threads that
/// want one.
pub(super) fn oversubscribed(machines: &[Location], rank: u32, threads: usize) -> bool {
    let here = machines.iter().filter(|place| place.same_machine(&machines[rank as usize])).count();
    std::thread::available_parallelism().is_ok_and(|cores| cores.get() < here * threads)
}

/// The settings that all ranks must share, for a spare that asks to join them.
fn shared_settings(options: &Options) -> Vec<Setting> {
    let Options { config, timeouts, net, emulated_link, job_fingerprint, .. } = options;
    let link = emulated_link.map(|link| format!("{}/{}", link.bytes_per_second, link.latency.as_nanos()));
    let settings = [
        ("SIDELANE_HEAP", config.heap.to_string()),
        ("SIDELANE_SYMMETRIC", config.symmetric.to_string()),
        ("SIDELANE_EMULATED_LINK", link.unwrap_or_default()),
        ("SIDELANE_NET", net.name().to_owned()),
        ("SIDELANE_LIVENESS_MS", timeouts.liveness.as_millis().to_string()),
        ("job_fingerprint", job_fingerprint.clone()),
    ];
    settings.map(|(name, value)| Setting { name: name.to_owned(), value }).to_vec()
}

/// Compares the fingerprints of all ranks. Digests go round; the words themselves only if these
/// differ, and only of the two ranks that the error names.
fn compare_fingerprints(hub: &dyn Hub, options: &Options) -> Result<(), Error> {
    let (rank, size, deadline) = (hub.rank(), hub.size(), options.timeouts.rendezvous);
    let mine = Sha256::digest(&options.job_fingerprint);
    let digests = hub.gather("world/conditions", rank, size, mine.as_slice(), deadline)?;
    let Some(differs) = digests.iter().position(|digest| *digest != digests[0]) else { return Ok(()) };
    let named = [0, differs].contains(&(rank as usize));
    let words = if named { options.job_fingerprint.as_bytes() } else { &[] };
    let said = hub.gather("world/conditions/words", rank, size, words, deadline)?;
    let [expected, seen] = [0, differs].map(|rank| String::from_utf8_lossy(&said[rank]).into_owned());
    Err(BootstrapError::FingerprintsDiffer { rank: differs as u32, seen, expected }.into())
}

/// Compares the sizes of heaps and the emulated links of all ranks. Peers check offsets against
/// their own sizes, and hold signals back at both ends of a connection or at none.
fn compare_sizes(hub: &dyn Hub, options: &Options) -> Result<(), Error> {
    let (rank, size, deadline) = (hub.rank(), hub.size(), options.timeouts.rendezvous);
    let emulated_link = options.emulated_link.map_or([0; 2], |emulated_link| {
        [
            emulated_link.bytes_per_second.get(),
            u64::try_from(emulated_link.latency.as_nanos()).unwrap_or(u64::MAX),
        ]
    });
    let mine = [options.config.heap, options.config.symmetric, emulated_link[0], emulated_link[1]];
    let said = hub.gather("world/sizes", rank, size, bytemuck::cast_slice(&mine), deadline)?;
    for (blob, peer) in said.iter().zip(0..) {
        let theirs = bytemuck::try_pod_read_unaligned::<[u64; 4]>(blob).unwrap_or_default();
        let names =
            ["SIDELANE_HEAP", "SIDELANE_SYMMETRIC", "SIDELANE_EMULATED_LINK", "SIDELANE_EMULATED_LINK"];
        for ((what, mine), theirs) in names.into_iter().zip(mine).zip(theirs) {
            if mine != theirs {
                return Err(CallError::ConfigsDiffer { what, rank, peer, mine, theirs }.into());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::interruptible;
    use crate::memory::ReleaseCheck;

    /// Readers that never finish.
    struct Reading;

    impl ReleaseCheck for Reading {
        fn is_released(&self, _: u64) -> bool {
            false
        }
    }

    #[test]
    fn wait_for_readers_ends_on_interrupt_and_on_world_failure() {
        let world = World::threads(1).unwrap().remove(0);
        let pool = world.pool();
        let all = pool.alloc(pool.report().largest_free).unwrap();
        pool.retire(all, &(Arc::new(Reading) as Arc<dyn ReleaseCheck>), 1);
        let asked = interruptible(|| true, || pool.alloc(64).map(drop));
        assert_eq!(asked, Err(crate::error::PlanError::Interrupted.into()));
        world.cancel();
        assert_eq!(pool.alloc(64).map(drop), Err(Cause::Cancelled { by: 0 }.into()));
    }

    /// Bytes of memory behind the mapping of a rank's own heap.
    fn resident(world: &World) -> u64 {
        let at = world.shared.heap.mapped().at(world.rank(), 0, 1).unwrap().as_ptr() as usize;
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let begins = format!("{at:x}-");
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&begins));
        let line = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
    }

    /// The next world of these ranks.
    fn rebuilt(worlds: &[World]) -> Vec<World> {
        std::thread::scope(|scope| {
            let rebuild = |world| scope.spawn(move || World::rebuild(world, Duration::from_secs(20), 2));
            let ranks: Vec<_> = worlds.iter().map(rebuild).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
        })
    }

    #[test]
    fn each_rebuilt_world_has_its_heap_instead_of_the_pools_before() {
        let mut worlds = vec![World::threads(2).unwrap()];
        let config = worlds[0][0].shared.options.config;
        for _ in 0..2 {
            let next = rebuilt(&worlds[worlds.len() - 1]);
            assert!(next.iter().all(|world| resident(world) == config.heap));
            assert!(worlds.iter().flatten().all(|world| resident(world) == config.symmetric));
            worlds.push(next);
        }
    }

    #[test]
    fn old_pool_goes_back_before_a_rebuild_that_fails() {
        let mut worlds = World::threads(2).unwrap();
        let (leaver, world) = (worlds.remove(1), worlds.remove(0));
        let config = world.shared.options.config;
        std::thread::scope(|scope| {
            let leaver = scope.spawn(move || {
                drop(leaver.shared.hub.rebuild(Duration::from_secs(20), 2).unwrap());
                leaver.rebuild(Duration::from_secs(20), 2).unwrap()
            });
            let error = world.rebuild(Duration::from_secs(20), 2).unwrap_err();
            assert_eq!(resident(&world), config.symmetric, "{error}");
            let next = world.rebuild(Duration::from_secs(20), 2).unwrap();
            assert_eq!([resident(&world), resident(&next)], [config.symmetric, config.heap]);
            leaver.join().unwrap();
        });
    }

    #[test]
    fn ranks_with_other_fingerprint_are_named_and_world_is_refused() {
        let conditions = ["16 tokens", "16 tokens", "32 tokens"];
        let hubs = bootstrap::threads(3, Timeouts::default()).into_iter();
        std::thread::scope(|scope| {
            let ranks: Vec<_> = hubs
                .zip(conditions)
                .map(|(hub, conditions)| {
                    let options = Options { job_fingerprint: conditions.to_owned(), ..Options::default() };
                    scope.spawn(|| World::of(hub, options, "").unwrap_err())
                })
                .collect();
            let (seen, expected) = ("32 tokens".to_owned(), "16 tokens".to_owned());
            let error = BootstrapError::FingerprintsDiffer { rank: 2, seen, expected };
            for rank in ranks {
                assert_eq!(rank.join().unwrap(), Error::Bootstrap(error.clone()));
            }
        });
    }

    #[test]
    fn rank_that_cannot_build_its_part_is_the_cause_on_all_ranks() {
        let own = Error::from(BootstrapError::System { call: "recvmsg", errno: 24 });
        let left = Error::from(BootstrapError::Left { rank: 0, step: "world/heaps".to_owned() });
        let lost = Cause::Lost { rank: 0, how: LostReason::Closed };
        for (error, cause) in [(own, Cause::Cancelled { by: 2 }), (left, lost)] {
            let hubs = bootstrap::threads(3, Timeouts::default());
            tell_of_failed_build(hubs[2].as_ref(), &error);
            let seen = hubs[1].gather("next", 1, 3, &[], Duration::from_secs(20));
            assert_eq!(seen, Err(BootstrapError::World(cause)));
        }
        let hubs = bootstrap::threads(2, Timeouts::default());
        let of_all = CallError::ConfigsDiffer { what: "heap", rank: 0, peer: 1, mine: 1, theirs: 2 };
        tell_of_failed_build(hubs[0].as_ref(), &of_all.into());
        assert_eq!(hubs[1].health().cause(), None, "each rank finds it");
    }

    #[test]
    fn ranks_with_heaps_of_different_size_do_not_make_a_world() {
        for nodes in [["a", "a"], ["a", "b"]] {
            std::thread::scope(|scope| {
                let hubs = bootstrap::threads(2, Timeouts::default()).into_iter();
                let ranks: Vec<_> = hubs
                    .zip(nodes)
                    .zip([1u64, 2])
                    .map(|((hub, node), mib)| {
                        scope.spawn(move || {
                            let config = Config { heap: mib << 20, symmetric: 1 << 20, ..Config::default() };
                            let options = Options { config, ..Options::default() };
                            World::of(hub, options, node).unwrap_err()
                        })
                    })
                    .collect();
                for (rank, error) in ranks.into_iter().map(|rank| rank.join().unwrap()).enumerate() {
                    assert!(
                        matches!(error, Error::Call(CallError::ConfigsDiffer { what: "SIDELANE_HEAP", peer, .. })
                            if peer == 1 - rank as u32),
                        "{error:?}"
                    );
                }
            });
        }
    }
}
