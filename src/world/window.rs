//! One-sided windows: memory that the ranks of a group write to each other.
//!
//! Each call is a schedule of one or two operations, stepped by the same executor as a dispatch;
//! bounds are checked before anything is posted. The operations are known at compile time: a put to
//! a rank of this node compiles to its checks and its stores.
//!
//! ```text
//!   put, put_nbi, put_signal, signal    ->  the peer's part, its word of this rank
//!   wait_until, barrier                <-  words that peers raise here
//! ```
//!
//! A window lies in the symmetric heap. [`Registered`] is memory next to it that peers on other
//! nodes write to.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::group::SymmetricRange;
use super::{Group, WorldState};
use crate::bootstrap::exchange_fds;
use crate::dtype::Dtype;
use crate::error::{Error, MemoryError, PlanError};
use crate::exec::HostStepper;
use crate::lane;
use crate::lane::{Io, Lanes, NetConnection, PeerLane, Port, Region, WindowPart};
use crate::memory::{PeerMapping, Segment};
use crate::rows::Stores;
use crate::schedule::{
    ControlLayout, Flag, FlagValue, Op, Operand, OperandId, Operands, PutSource, SpanCopy, TrackOp, WindowId,
};
use crate::topology::Route;

/// A window's bytes, and its flags, in the port's table.
const DATA: WindowId = WindowId(0);
const FLAGS: WindowId = WindowId(1);

/// `len` bytes at every member of a group, and one signal word per pair of members.
///
/// **Bounds.** Every access is (peer, offset, length) and must lie inside the window. Otherwise it
/// returns [`MemoryError::OutOfBounds`], and nothing moves.
///
/// **Order.** Puts to one peer are visible to it after a later signal from the same rank to the
/// same peer. Nothing else is ordered: a put alone may be seen in pieces.
///
/// **Write permission.** The callers agree which rank may write where and when. A rank must not put
/// into bytes that their owner may be reading, until the owner has signaled that it has finished.
/// Dispatch and combine keep this rule themselves; here the library cannot know it.
///
/// ```
/// use sidelane::World;
/// let mut ranks = World::threads(2)?.into_iter();
/// let (a, b) = (ranks.next().unwrap(), ranks.next().unwrap());
/// let sender = std::thread::spawn(move || -> sidelane::Result<()> {
///     let mut window = a.all()?.window(64)?;
///     window.put_signal(1, 16, b"hello", 1)?;       // put, then raise my word at rank 1 to 1
///     window.wait_until(1, 1)                        // its answer: my bytes have been read
/// });
/// let mut window = b.all()?.window(64)?;
/// window.wait_until(0, 1)?;
/// let mut seen = [0; 5];
/// window.read(16, &mut seen)?;
/// assert_eq!(&seen, b"hello");
/// window.signal(0, 1)?;
/// sender.join().unwrap()?;
/// # Ok::<(), sidelane::Error>(())
/// ```
#[derive(Debug)]
pub struct Window {
    port: Port,
    host: HostStepper,
    len: u64,
    barriers: u64,
    /// Per peer: the value last signalled to it.
    signalled: Vec<u64>,
    lanes: Arc<Lanes>,
    _flags: SymmetricRange,
    /// The bytes themselves: symmetric, or registered.
    _data: Data,
    /// The world lives as long as the window, because its threads receive the puts of peers.
    _world: Arc<WorldState>,
}

#[derive(Debug)]
enum Data {
    Symmetric { _range: SymmetricRange },
    Registered { _region: Registered },
}

impl Window {
    pub(super) fn symmetric(group: &Group, len: u64) -> Result<Self, Error> {
        let lanes = group.lanes(Route::Direct)?;
        let range = group.take_symmetric(len)?;
        let window = range.window();
        Self::new(group, lanes, window, len, Data::Symmetric { _range: range })
    }

    pub(super) fn registered(group: &Group, memory: OwnedFd) -> Result<Self, Error> {
        let lanes = group.lanes(Route::Direct)?;
        let own = Self::adopt(group, memory)?;
        let len = own.len();
        let mapped = Arc::new(Self::map_neighbors(group, &lanes, own)?);
        let (region, window) = Registered::new(group, &lanes, mapped)?;
        Self::new(group, lanes, window, len, Data::Registered { _region: region })
    }

    /// This rank's memory, if that of every member can be registered. A rank whose memory cannot be
    /// registered still takes part in the comparison, so the others do not wait for it.
    fn adopt(group: &Group, memory: OwnedFd) -> Result<Segment, Error> {
        let own = Segment::adopt(memory, group.rank());
        let said = match &own {
            Ok(segment) => [1, segment.len()],
            Err(_) => [0, 0],
        };
        let blobs = group.gather(bytemuck::cast_slice(&said))?;
        let own = own?;
        for (blob, rank) in blobs.iter().zip(0..) {
            let [usable, seen] = bytemuck::try_pod_read_unaligned::<[u64; 2]>(blob).unwrap_or_default();
            if usable != 1 {
                return Err(MemoryError::NotUsable { rank }.into());
            }
            if seen != own.len() {
                let (me, expected) = (group.rank(), own.len());
                return Err(MemoryError::SizesDiffer { call: 0, me, rank, seen, expected }.into());
            }
        }
        Ok(own)
    }

    fn map_neighbors(group: &Group, lanes: &Lanes, own: Segment) -> Result<PeerMapping, Error> {
        use std::os::fd::AsFd;
        let me = group.rank();
        let offer = |peer: usize| lanes.nodes.same_node(me, peer as u32).then(|| vec![own.as_fd()]);
        let deadline = group.shared.options.timeouts.rendezvous;
        let (hub, key) = (group.shared.hub.as_ref(), group.step());
        let received = exchange_fds(hub, &key, group.ranks(), me as usize, &offer, deadline)?;
        let mut segments = Vec::new();
        for (fds, peer) in received.into_iter().zip(0..) {
            let segment = fds.into_iter().next().map(|fd| Segment::adopt(fd, peer)).transpose()?;
            segments.push(segment.filter(|_| peer != me));
        }
        segments[me as usize] = Some(own);
        Ok(PeerMapping::new(&segments.iter().map(Option::as_ref).collect::<Vec<_>>())?)
    }

    fn new(
        group: &Group,
        lanes: Arc<Lanes>,
        data: lane::MappedWindow,
        len: u64,
        owner: Data,
    ) -> Result<Self, Error> {
        let flag_bytes = ControlLayout::flag(group.size(), Flag::Read, group.size());
        let flags = group.take_symmetric(flag_bytes)?;
        let port = Port::new(Arc::clone(&lanes), vec![data, flags.window()], FLAGS);
        let host = HostStepper::new(Dtype::Bytes, group.shared.recorder.clone());
        let signalled = vec![0; group.size() as usize];
        let _world = Arc::clone(&group.shared);
        Ok(Window { port, host, len, barriers: 0, signalled, lanes, _flags: flags, _data: owner, _world })
    }

    /// Bytes at each member.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Writes `src` to `offset` of `peer`'s part. When it returns, `src` may be changed; the bytes
    /// may not have landed.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`], the world's cause,
    /// [`LaneError::Deadline`](crate::error::LaneError) if a remote peer takes nothing.
    pub fn put(&mut self, peer: u32, offset: u64, src: &[u8]) -> Result<(), Error> {
        self.step_put(peer, offset, src)?;
        self.port.settle_with(peer)
    }

    /// Writes `len` bytes of this rank's own part, from `from` on, to `offset` of `peer`'s part.
    /// Does not wait (OpenSHMEM's *nonblocking immediate*). The bytes may be read until
    /// [`Window::quiet`] returns: what is written there before that may arrive in their place. A
    /// NIC reads them where they lie. [`Window::put`] waits until it has read such bytes.
    ///
    /// # Errors
    /// As [`Window::put`].
    pub fn put_nbi(&mut self, peer: u32, offset: u64, from: u64, len: u64) -> Result<(), Error> {
        let own = PutSource::Window { owner: self.lanes.rank, window: DATA };
        let span = SpanCopy { from: own, from_offset: from, to: DATA, to_offset: offset, len };
        self.step_span(peer, span, &[])
    }

    /// [`Window::put`], then [`Window::signal`].
    ///
    /// # Errors
    /// As [`Window::put`].
    pub fn put_signal(&mut self, peer: u32, offset: u64, src: &[u8], value: u64) -> Result<(), Error> {
        self.rise(peer, value)?;
        self.step_put(peer, offset, src)?;
        self.step_signal(peer, Flag::Landed, value)?;
        // Behind both, so that the signal can travel with the put before it.
        self.port.settle_with(peer)
    }

    /// Raises this rank's word at `peer` to `value`, after all earlier puts to it. Values must
    /// grow, from 1 on.
    ///
    /// # Errors
    /// As [`Window::put`], and [`PlanError::BadParameter`] if the value does not grow.
    pub fn signal(&mut self, peer: u32, value: u64) -> Result<(), Error> {
        self.rise(peer, value)?;
        self.step_signal(peer, Flag::Landed, value)?;
        self.port.settle_with(peer)
    }

    /// Notes the value of a signal: a lower one than before would be overlooked, or undo the
    /// earlier signal.
    #[inline]
    fn rise(&mut self, peer: u32, value: u64) -> Result<(), Error> {
        if let Some(last) = self.signalled.get_mut(peer as usize) {
            if value <= *last {
                let (parameter, expected) = ("signal", "a value larger than the last one to this peer");
                return Err(PlanError::BadParameter { parameter, seen: value, expected }.into());
            }
            *last = value;
        }
        Ok(())
    }

    /// Waits until the word that `peer` raises here is at least `value`. All that `peer` put here
    /// before that signal is then visible.
    ///
    /// # Errors
    /// [`LaneError::Deadline`](crate::error::LaneError), or the world's cause.
    pub fn wait_until(&mut self, peer: u32, value: u64) -> Result<(), Error> {
        self.step_wait(peer, Flag::Landed, value)
    }

    /// Returns when everything this rank has put or signalled so far has landed at its peers. These
    /// must not have left, because it could not report what has landed.
    ///
    /// # Errors
    /// As [`Window::put`].
    pub fn quiet(&mut self) -> Result<(), Error> {
        self.port.quiet()
    }

    /// Returns when all members are here. Everything they put before has landed then.
    ///
    /// # Errors
    /// As [`Window::wait_until`].
    pub fn barrier(&mut self) -> Result<(), Error> {
        self.barriers += 1;
        let value = self.barriers;
        for peer in self.peers() {
            self.step_signal(peer, Flag::Entry, value)?;
            self.port.settle_with(peer)?;
        }
        for peer in self.peers() {
            self.step_wait(peer, Flag::Entry, value)?;
        }
        Ok(())
    }

    /// Copies bytes of this rank's own part.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        Ok(self.port.read(self.lanes.rank, DATA, offset, into)?)
    }

    /// Writes bytes of this rank's own part.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), Error> {
        Ok(self.port.write(DATA, offset, from)?)
    }

    fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, ranks) = (self.lanes.rank, self.lanes.ranks());
        (1..ranks).map(move |step| (rank + step) % ranks)
    }

    #[inline(always)]
    fn step_put(&mut self, peer: u32, offset: u64, src: &[u8]) -> Result<(), Error> {
        let len = src.len() as u64;
        let span = SpanCopy { from: PutSource::Input, from_offset: 0, to: DATA, to_offset: offset, len };
        self.step_span(peer, span, src)
    }

    #[inline(always)]
    fn step_span(&mut self, peer: u32, span: SpanCopy, src: &[u8]) -> Result<(), Error> {
        let spans = [span];
        let table = [Operand::Spans { first: 0, count: 1 }];
        let operands = Operands { table: &table, spans: &spans, ..Operands::default() };
        self.step(peer, Op::Put { to: peer, operand: OperandId(0) }, &operands, src)
    }

    #[inline(always)]
    fn step_signal(&mut self, peer: u32, flag: Flag, value: u64) -> Result<(), Error> {
        let signal = Op::Signal { to: peer, of: self.lanes.rank, flag, level: FlagValue::Call };
        self.step(peer, signal, &Operands { call: value, ..Operands::default() }, &[])
    }

    #[inline(always)]
    fn step_wait(&mut self, peer: u32, flag: Flag, value: u64) -> Result<(), Error> {
        let wait = Op::Wait { from: peer, flag, level: FlagValue::Call };
        self.step(peer, wait, &Operands { call: value, ..Operands::default() }, &[])
    }

    #[inline(always)]
    fn step(&mut self, track: u32, op: Op, operands: &Operands<'_>, src: &[u8]) -> Result<(), Error> {
        self.lanes.check()?;
        let mut io = Io { input: src, ..Io::default() };
        self.host.step(&self.port, TrackOp { track, op }, operands, &mut io, Stores::Cached)
    }
}

/// This rank's part, and its connections' descriptions of the parts of others. Peers may write to
/// it, and this rank to theirs, as long as this value lives.
#[derive(Debug)]
pub(super) struct Registered {
    world: Arc<WorldState>,
    /// None where there is no net.
    region: Option<u32>,
    /// Regions of peers, by their connections.
    imported: Vec<(Arc<dyn NetConnection>, u32)>,
}

impl Registered {
    /// The memory that is registered under this number.
    pub fn of(group: &Group, number: u32) -> Self {
        Registered { world: Arc::clone(&group.shared), region: Some(number), imported: Vec::new() }
    }

    /// Records a member's description of its part, in memory of its host or of its device, if
    /// a connection leads there.
    ///
    /// # Errors
    /// The lane's error, if that makes no sense.
    pub fn import(
        &mut self,
        lane: &PeerLane,
        (region, description): (u32, &[u8]),
        of_devices: bool,
    ) -> Result<(), Error> {
        let PeerLane::Net(connection) = lane else { return Ok(()) };
        match of_devices {
            true => connection.import_device_region(region, description)?,
            false => connection.import_region(region, description)?,
        }
        self.imported.push((Arc::clone(connection), region));
        Ok(())
    }

    /// Registers this rank's segment of a mapping: the member of its position in the group. All are
    /// equally long. Collective.
    ///
    /// # Errors
    /// [`MemoryError::NotUsable`] if that of another rank cannot be registered; at that rank, the
    /// lane's error.
    pub fn new(
        group: &Group,
        lanes: &Lanes,
        mapped: Arc<PeerMapping>,
    ) -> Result<(Self, lane::MappedWindow), Error> {
        let len = mapped.len_of(group.rank());
        let region = Region { mapped: Arc::clone(&mapped), member: group.rank() };
        let registered = group.shared.net.as_ref().map(|net| net.register(region)).transpose();
        let (number, key) = registered.as_ref().ok().cloned().flatten().unwrap_or_default();
        let mut said = vec![u8::from(registered.is_ok())];
        said.extend(number.to_le_bytes());
        said.extend(key);
        let heard = group.gather(&said)?;
        let region = registered?.map(|_| number);
        let mut registered = Registered { world: Arc::clone(&group.shared), region, imported: Vec::new() };
        let mut parts = Vec::new();
        for (blob, member) in heard.iter().zip(0..) {
            let Some(([1, number @ ..], key)) = blob.split_first_chunk::<5>() else {
                return Err(MemoryError::NotUsable { rank: member }.into());
            };
            let region = u32::from_le_bytes(*number);
            registered.import(&lanes.reach[member as usize], (region, key), false)?;
            parts.push(WindowPart { member, region, offset: 0, len });
        }
        Ok((registered, lane::MappedWindow { parts, mapped, of_devices: false }))
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let (Some(number), Some(net)) = (self.region, &self.world.net) {
            net.deregister(number);
        }
        for (connection, region) in &self.imported {
            connection.forget_region(*region);
        }
    }
}
