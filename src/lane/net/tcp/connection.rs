//! One rank's end of the tcp connection to one rank of another node.
//!
//! ```text
//!   put, signal --> Outgoing --sendmsg--> socket --readv--> Inbound --> payloads to their places
//!                   outbox: the rest of begun records       stage: headers, up to the middle of one
//!   progress    <-- Poller: one system call for all sockets of a rank
//! ```
//!
//! A rank that waits serves each of its connections again and again. Polling every socket would
//! cost a system call each time, so one call covers a whole round.

use std::io::{IoSlice, IoSliceMut};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};

use crate::bootstrap::wait::{epoll_for, park, poll_for};
use crate::bootstrap::{FatalGuard, FatalLock, Health};
use crate::error::{Cause, LaneError, MemoryError};
use crate::lane::flag::{WaitLimits, Waiter};
use crate::lane::net::regions::{HEADER, Record};
use crate::lane::net::{NetConnection, Regions, RemoteAddress, SendBlocked, system};
use crate::lane::{FlagLine, RowSource, flag};
use crate::schedule::Tag;
use crate::sync::owed_answers::Answers;

/// State that all connections of a rank share.
#[derive(Clone, Debug)]
pub struct Shared {
    /// This rank.
    pub rank: u32,
    /// Where peers may write.
    pub regions: Arc<Regions>,
    /// Whether the world is alive.
    pub health: Arc<Health>,
    /// Which ends have news.
    pub poller: Arc<Poller>,
    /// How long the rendezvous is given to say why a connection ended.
    pub grace: Duration,
}

/// An end: puts and signals out, records in.
#[derive(Debug)]
pub struct TcpConnection {
    shared: Shared,
    /// The peer's rank in the world.
    peer: u32,
    socket: TcpStream,
    polled: PolledSocket,
    out: FatalLock<Outgoing>,
    inbound: FatalLock<Inbound>,
    /// Whether all that the peer has sent has landed.
    answers: Answers,
    /// The last question of ours that the peer has answered.
    landed: Landed,
    /// When the connection ended, and how.
    ended: OnceLock<(Instant, Option<Errno>)>,
}

/// A flag line of this process alone.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Landed([AtomicU64; 8]);

impl Landed {
    fn line(&self) -> FlagLine<'_> {
        // SAFETY: 64 aligned bytes of atomics that live as long as the line, and are only used as
        // atomics.
        unsafe { FlagLine::new(NonNull::from(&self.0).cast()) }
    }
}

impl TcpConnection {
    /// An end of a connection whose other end is authenticated as `peer`.
    ///
    /// # Errors
    /// [`LaneError::System`].
    pub fn new(peer: u32, socket: TcpStream, shared: Shared) -> Result<Self, LaneError> {
        let polled = shared.poller.add(&socket)?;
        let (rank, health) = (shared.rank, &shared.health);
        let (out, inbound) = (FatalLock::new(Outgoing::default(), rank, health), Inbound::default());
        let inbound = FatalLock::new(inbound, rank, health);
        Ok(TcpConnection {
            shared,
            peer,
            socket,
            polled,
            out,
            inbound,
            answers: Answers::default(),
            landed: Landed::default(),
            ended: OnceLock::new(),
        })
    }
}

impl NetConnection for TcpConnection {
    fn lane(&self) -> &'static str {
        "tcp"
    }

    fn peer(&self) -> u32 {
        self.peer
    }

    fn put(&self, to: RemoteAddress, bytes: &[u8], limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.sending(|out| {
            let mut to = to;
            for chunk in bytes.chunks(LONGEST) {
                let len = chunk.len() as u64;
                let header = Record::Put { region: to.region, offset: to.offset, len }.to_bytes();
                self.send(out, &mut [IoSlice::new(&header), IoSlice::new(chunk)], limits)?;
                to = to.behind(len);
            }
            Ok(())
        })
    }

    fn put_rows(
        &self,
        to: RemoteAddress,
        rows: &[u32],
        source: RowSource<'_>,
        limits: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        let row_bytes = source.row_bytes as usize;
        let at_once = (LONGEST / row_bytes.max(1)).min(PIECES - 1);
        let mut to = to;
        if at_once == 0 {
            for &row in rows {
                self.put(to, source.row(row), limits)?;
                to = to.behind(source.row_bytes);
            }
            return Ok(());
        }
        self.sending(|out| {
            for group in rows.chunks(at_once) {
                let len = group.len() as u64 * source.row_bytes;
                let header = Record::Put { region: to.region, offset: to.offset, len }.to_bytes();
                let mut pieces = [IoSlice::new(&[]); PIECES];
                pieces[0] = IoSlice::new(&header);
                for (piece, &row) in pieces[1..].iter_mut().zip(group) {
                    *piece = IoSlice::new(source.row(row));
                }
                self.send(out, &mut pieces[..=group.len()], limits)?;
                to = to.behind(len);
            }
            Ok(())
        })
    }

    fn zero(&self, to: RemoteAddress, len: u64, limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.send_header(Record::Zero { region: to.region, offset: to.offset, len }, limits)
    }

    fn signal(
        &self,
        to: RemoteAddress,
        value: u64,
        tag: Option<Tag>,
        limits: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        self.send_header(Record::Signal { region: to.region, offset: to.offset, value, tag }, limits)
    }

    fn flush(&self, limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        let mark = self.sending(|out| {
            out.asked += 1;
            let mark = out.asked;
            self.send(out, &mut [IoSlice::new(&Record::Ask { mark }.to_bytes())], limits)?;
            Ok(mark)
        })?;
        flag::until(self.landed.line(), mark, limits, || {
            self.progress(limits.health);
        })
        .map_err(|(seen, why)| SendBlocked { awaited: mark, seen, why })
    }

    /// Receives pending records, unless another thread is doing so, and sends pending ones.
    fn progress(&self, health: &Health) -> bool {
        if self.ended.get().is_some() {
            self.report_end(health);
            return false;
        }
        if !self.shared.poller.is_ready(&self.polled) {
            return false;
        }
        let news = self.receive(health);
        self.tidy();
        news
    }

    /// Keeps the event descriptor readable while there is work.
    fn arm(&self, _: &Health) -> bool {
        false
    }

    fn event_fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.shared.poller.as_fd()]
    }

    fn fault(&self) -> Option<LaneError> {
        let (rank, peer) = (self.shared.rank, self.peer);
        let (_, errno) = *self.ended.get()?;
        let caused = self.shared.health.cause() == Some(Cause::Connection { rank: peer, by: rank });
        // The system reports an error once; if it reported it to the sender, reading finds only the
        // end. A broken pipe only says that the other end closed it.
        let errno = errno.or_else(|| self.out.lock().failed.filter(|&errno| errno != Errno::PIPE));
        let errno = errno.map_or(0, Errno::raw_os_error);
        caused.then_some(LaneError::Wire { rank, peer, lane: self.lane(), errno })
    }

    /// Data that the peer has not read yet would be lost with the socket, if unread data from it
    /// lies here.
    fn leave(&self, until: Instant) {
        let health = &self.shared.health;
        let mark = {
            let mut out = self.out.lock();
            out.asked += 1;
            let mark = out.asked;
            out.keep(&Record::Ask { mark }.to_bytes());
            mark
        };
        self.tidy();
        while self.landed.line().value() < mark
            && self.ended.get().is_none()
            && health.check().is_ok()
            && !health.is_absent(self.peer)
        {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let room = self.out.lock().wants_room();
            self.await_socket(left.min(Duration::from_millis(10)), room);
            self.progress(health);
        }
    }
}

impl TcpConnection {
    fn send_header(&self, record: Record, limits: WaitLimits<'_>) -> Result<(), SendBlocked> {
        self.sending(|out| self.send(out, &mut [IoSlice::new(&record.to_bytes())], limits))
    }

    /// Sends without interruption by another thread, and answers the peer's questions that arrived
    /// meanwhile.
    fn sending<T>(
        &self,
        send: impl FnOnce(&mut Outgoing) -> Result<T, SendBlocked>,
    ) -> Result<T, SendBlocked> {
        let sent = send(&mut self.out.lock());
        if self.answers.is_owed() || sent.is_err() {
            self.tidy();
        }
        sent
    }

    /// Sends a record. Waits for room, and receives meanwhile. A wait that ends in the middle of
    /// the record leaves the rest of it in the outbox; one that ends before has sent nothing.
    fn send(
        &self,
        out: &mut Outgoing,
        mut pieces: &mut [IoSlice<'_>],
        limits: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        self.answer(out);
        let len: usize = pieces.iter().map(|piece| piece.len()).sum();
        let awaited = out.sent + (out.waiting() + len) as u64;
        let mut begun = false;
        let mut waiter = Waiter::new(limits);
        loop {
            let sent = if out.empty(&self.socket) { out.offer(&self.socket, pieces) } else { 0 };
            IoSlice::advance_slices(&mut pieces, sent);
            if pieces.is_empty() {
                return Ok(());
            }
            begun |= sent > 0;
            if sent > 0 {
                continue;
            }
            self.progress(limits.health);
            waiter.turn(|slice| self.await_socket(slice, out.failed.is_none())).map_err(|why| {
                if begun {
                    pieces.iter().for_each(|piece| out.keep(piece));
                }
                SendBlocked { awaited, seen: out.sent, why }
            })?;
        }
    }

    /// Answers the peer's last request: all earlier bytes have landed.
    fn answer(&self, out: &mut Outgoing) {
        if let Some(mark) = self.answers.take() {
            out.keep(&Record::Answer { mark }.to_bytes());
        }
    }

    /// Sends answers and what else waits, without waiting, unless another thread is sending.
    fn tidy(&self) {
        let serve = |out: &mut FatalGuard<'_, Outgoing>| {
            // A peer that sends requests without reading the answers gets the last one only.
            let empty = out.empty(&self.socket);
            if empty {
                self.answer(out);
            }
            out.empty(&self.socket);
            let waits = out.wants_room();
            if waits != out.watches_for_space {
                out.watches_for_space = waits;
                self.shared.poller.watch_for_space(&self.socket, &self.polled, waits);
            }
            empty && !waits
        };
        self.answers.tend(|| self.out.try_lock(), serve);
    }

    fn receive(&self, health: &Health) -> bool {
        let Some(mut inbound) = self.inbound.try_lock() else { return false };
        let regions = &self.shared.regions;
        let taken = inbound.take(&self.socket, regions, |record| match record {
            Record::Zero { .. } | Record::Signal { .. } => {
                // SAFETY: neither of them has a payload.
                unsafe { regions.apply(record, std::ptr::null()) }.map_err(End::from)
            }
            Record::Ask { mark } => {
                self.answers.ask(mark);
                Ok(())
            }
            Record::Answer { mark } => {
                self.landed.line().raise(mark, None);
                Ok(())
            }
            Record::Put { .. } | Record::Skip { .. } => Err(End::Nonsense),
        });
        match taken {
            Ok(any) => return any,
            Err(End::Closed) => self.end(None),
            Err(End::Failed(errno)) => self.end(Some(errno)),
            Err(End::Nonsense) => {
                self.end(None);
                health.fail(Cause::Protocol { rank: self.peer });
            }
        }
        true
    }

    /// Nothing more will come.
    fn end(&self, errno: Option<Errno>) {
        self.ended.get_or_init(|| (Instant::now(), errno));
        // A socket that has ended would ring for ever.
        self.shared.poller.remove(&self.socket);
    }

    /// The connection has ended. The rendezvous knows better why, and reports first: a peer
    /// may have left, or died.
    fn report_end(&self, health: &Health) {
        let over = self.ended.get().is_some_and(|(since, _)| since.elapsed() >= self.shared.grace);
        if over && health.check().is_ok() && !health.is_absent(self.peer) {
            health.fail(Cause::Connection { rank: self.peer, by: self.shared.rank });
        }
    }

    /// Sleeps until the socket has news, or room if that is wanted.
    fn await_socket(&self, slice: Duration, room: bool) {
        if self.ended.get().is_some() {
            // It would never sleep again.
            return park(slice);
        }
        let room = if room { PollFlags::OUT } else { PollFlags::empty() };
        let _ = poll_for(&mut [PollFd::new(&self.socket, PollFlags::IN | room)], slice);
    }
}

/// Longest payload of a record: the most that a sender must keep when it gives up in the middle of
/// one.
pub const LONGEST: usize = 1 << 20;
/// Most pieces of a record, the header counted.
const PIECES: usize = 256;

/// One direction of a connection.
#[derive(Debug, Default)]
struct Outgoing {
    /// Bytes that the socket has taken.
    sent: u64,
    /// Unsent rest of records that have begun.
    outbox: Vec<u8>,
    /// Bytes of the outbox that it has.
    gone: usize,
    /// Number of the last question whether everything has landed.
    asked: u64,
    /// Whether the poller reports room to send.
    watches_for_space: bool,
    /// How sending failed: nothing is sent any more.
    failed: Option<Errno>,
}

impl Outgoing {
    /// Whether nothing waits.
    fn is_empty(&self) -> bool {
        self.outbox.len() == self.gone
    }

    /// Bytes that wait.
    fn waiting(&self) -> usize {
        self.outbox.len() - self.gone
    }

    /// Whether something waits that the socket will take once it has room.
    fn wants_room(&self) -> bool {
        !self.is_empty() && self.failed.is_none()
    }

    /// Bytes that go before anything that comes later.
    fn keep(&mut self, bytes: &[u8]) {
        self.outbox.extend_from_slice(bytes);
    }

    /// Sends what waits. Returns whether nothing waits any more.
    fn empty(&mut self, socket: &TcpStream) -> bool {
        while !self.is_empty() {
            let outbox = std::mem::take(&mut self.outbox);
            let sent = self.offer(socket, &[IoSlice::new(&outbox[self.gone..])]);
            self.outbox = outbox;
            match sent {
                0 => return false,
                sent => self.gone += sent,
            }
        }
        self.outbox.clear();
        self.gone = 0;
        true
    }

    /// Hands bytes to the socket. Returns how many it took; none, too, if it takes nothing any
    /// more.
    fn offer(&mut self, socket: &TcpStream, pieces: &[IoSlice<'_>]) -> usize {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        while self.failed.is_none() {
            match rustix::net::sendmsg(socket, pieces, &mut SendAncillaryBuffer::default(), flags) {
                Ok(sent) => {
                    self.sent += sent as u64;
                    return sent;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return 0,
                // The peer's earlier bytes are still to be read: reading will find the end.
                Err(errno) => self.failed = Some(errno),
            }
        }
        0
    }
}

/// Bytes read ahead of the record that is received: several headers, or small puts, with one call.
const STAGE: usize = 4096;
/// Bytes taken in one turn, so that one loud peer does not keep the others waiting.
const GULP: usize = 1 << 20;

/// Received bytes, up to the middle of a record.
#[derive(Debug)]
struct Inbound {
    stage: Box<[u8; STAGE]>,
    start: usize,
    end: usize,
    /// Where the rest of the current payload goes.
    payload: Option<(RemoteAddress, usize)>,
}

/// Why nothing more will come.
#[derive(Debug, PartialEq)]
enum End {
    /// The peer closed its end.
    Closed,
    /// The socket failed.
    Failed(Errno),
    /// The peer sent what no correct peer sends.
    Nonsense,
}

impl From<MemoryError> for End {
    fn from(_: MemoryError) -> Self {
        End::Nonsense
    }
}

impl Default for Inbound {
    fn default() -> Self {
        Inbound { stage: Box::new([0; STAGE]), start: 0, end: 0, payload: None }
    }
}

impl Inbound {
    /// Takes what has come: writes payloads to `regions`, and passes on all other records. Returns
    /// whether there was anything.
    ///
    /// # Errors
    /// [`End`], after everything before it was taken.
    fn take(
        &mut self,
        socket: impl AsFd,
        regions: &Regions,
        mut act: impl FnMut(Record) -> Result<(), End>,
    ) -> Result<bool, End> {
        let mut taken = 0;
        while taken < GULP {
            let (room, read) = match self.read(&socket, regions) {
                Ok((_, 0)) => return Err(End::Closed),
                Ok(read) => read,
                Err(End::Failed(Errno::AGAIN)) => break,
                Err(End::Failed(Errno::INTR)) => continue,
                Err(end) => return Err(end),
            };
            taken += read;
            self.digest(regions, &mut act)?;
            if read < room {
                break;
            }
        }
        Ok(taken > 0)
    }

    /// One read, the payload first. The stage is empty then, or holds the beginning of a header.
    /// Returns how many bytes there was room for, and how many came.
    fn read(&mut self, socket: impl AsFd, regions: &Regions) -> Result<(usize, usize), End> {
        self.stage.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let ahead = &mut self.stage[self.end..];
        let room = ahead.len();
        let ahead = IoSliceMut::new(ahead);
        let read = match self.payload {
            Some((target, left)) => {
                regions.with(target.region, target.offset, left as u64, |to| match to {
                    Some(to) => {
                        // SAFETY: checked against its region, which stays mapped meanwhile; the
                        // sender has a grant to write there, so no one else reads or writes these
                        // bytes now.
                        let payload = unsafe { std::slice::from_raw_parts_mut(to.as_ptr(), left) };
                        let read = rustix::io::readv(&socket, &mut [IoSliceMut::new(payload), ahead]);
                        read.map(|read| (left + room, read, read.min(left)))
                    }
                    // A region that its owner has dropped: its bytes are discarded from the stage.
                    None => rustix::io::readv(&socket, &mut [ahead]).map(|read| (room, read, 0)),
                })?
            }
            None => rustix::io::readv(&socket, &mut [ahead]).map(|read| (room, read, 0)),
        };
        let (room, read, placed) = read.map_err(End::Failed)?;
        self.end += read - placed;
        self.advance(placed);
        Ok((room, read))
    }

    /// Processes the staged bytes.
    fn digest(
        &mut self,
        regions: &Regions,
        act: &mut impl FnMut(Record) -> Result<(), End>,
    ) -> Result<(), End> {
        loop {
            if let Some((target, left)) = self.payload {
                let staged = &self.stage[self.start..self.end];
                let len = staged.len().min(left);
                if len == 0 {
                    return Ok(());
                }
                regions.with(target.region, target.offset, len as u64, |to| {
                    if let Some(to) = to {
                        // SAFETY: the target was checked against its region; the stage is not part
                        // of any.
                        unsafe { std::ptr::copy_nonoverlapping(staged.as_ptr(), to.as_ptr(), len) };
                    }
                })?;
                self.start += len;
                self.advance(len);
                continue;
            }
            let Some((header, _)) = self.stage[self.start..self.end].split_first_chunk::<HEADER>() else {
                return Ok(());
            };
            let record = Record::from_bytes(*header).ok_or(End::Nonsense)?;
            self.start += HEADER;
            match record {
                Record::Put { len, .. } if len > LONGEST as u64 => return Err(End::Nonsense),
                Record::Put { region, offset, len } => {
                    // All of it fits, or nothing is written.
                    regions.with(region, offset, len, |_| ())?;
                    self.payload = (len > 0).then_some((RemoteAddress { region, offset }, len as usize));
                }
                other => act(other)?,
            }
        }
    }

    /// So many bytes of the payload are where they belong.
    fn advance(&mut self, len: usize) {
        if let Some((target, left)) = self.payload {
            self.payload = (len < left).then(|| (target.behind(len as u64), left - len));
        }
    }
}

/// The sockets of a rank.
#[derive(Debug)]
pub struct Poller {
    set: OwnedFd,
    /// How often they were looked at.
    polls: AtomicU64,
    ready: RwLock<Vec<Arc<AtomicBool>>>,
}

/// One of them.
#[derive(Debug)]
pub struct PolledSocket {
    number: u64,
    ready: Arc<AtomicBool>,
    /// The last poll that its owner knows of.
    seen: AtomicU64,
}

/// Sockets found ready in one poll; the system offers the others first the next time.
const AT_ONCE: usize = 16;

impl Poller {
    /// # Errors
    /// [`LaneError::System`].
    pub fn new() -> Result<Self, LaneError> {
        let set = epoll::create(CreateFlags::CLOEXEC).map_err(system("epoll_create"))?;
        Ok(Poller { set, polls: AtomicU64::new(0), ready: RwLock::default() })
    }

    /// Listens to one more socket, until it is closed or removed.
    ///
    /// # Errors
    /// [`LaneError::System`].
    pub fn add(&self, socket: impl AsFd) -> Result<PolledSocket, LaneError> {
        let mut all = self.ready.write().unwrap_or_else(PoisonError::into_inner);
        let polled =
            PolledSocket { number: all.len() as u64, ready: Arc::default(), seen: AtomicU64::new(0) };
        let data = EventData::new_u64(polled.number);
        epoll::add(&self.set, socket, data, EventFlags::IN).map_err(system("epoll_ctl"))?;
        all.push(Arc::clone(&polled.ready));
        Ok(polled)
    }

    /// Whether to ring when there is room to send, too.
    pub fn watch_for_space(&self, socket: impl AsFd, polled: &PolledSocket, room: bool) {
        let more = if room { EventFlags::OUT } else { EventFlags::empty() };
        // Fails only for a socket that was removed.
        let _ = epoll::modify(&self.set, socket, EventData::new_u64(polled.number), EventFlags::IN | more);
    }

    /// No longer listens to a socket.
    pub fn remove(&self, socket: impl AsFd) {
        let _ = epoll::delete(&self.set, socket);
    }

    /// Whether a socket has news. Polls all of them, if no thread has since its owner last asked.
    pub fn is_ready(&self, polled: &PolledSocket) -> bool {
        // Relaxed counts: of two threads that look at once both may poll, or one a turn later.
        if polled.seen.load(Ordering::Relaxed) == self.polls.load(Ordering::Relaxed) {
            self.poll();
        }
        polled.seen.store(self.polls.load(Ordering::Relaxed), Ordering::Relaxed);
        // The mark comes off before the socket is read: bytes that arrive later set it again.
        polled.ready.load(Ordering::Relaxed) && polled.ready.swap(false, Ordering::Acquire)
    }

    fn poll(&self) {
        // Relaxed: see `is_ready`.
        self.polls.fetch_add(1, Ordering::Relaxed);
        let mut events = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; AT_ONCE];
        let ready = epoll_for(&self.set, &mut events, Duration::ZERO);
        if ready > 0 {
            let all = self.ready.read().unwrap_or_else(PoisonError::into_inner);
            for event in &events[..ready] {
                if let Some(ready) = all.get(event.data.u64() as usize) {
                    // Pairs with the swap above: the thread that takes the mark reads the socket
                    // behind it.
                    ready.store(true, Ordering::Release);
                }
            }
        }
    }
}

impl AsFd for Poller {
    /// Readable when one of the sockets has news.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::lane::net::Region;
    use crate::memory::{PeerMapping, Segment};

    /// Bytes of region 0.
    const REGION: u64 = 4096;

    /// An empty region after the records of a stream, other records, and why the stream ends.
    fn expected(mut stream: &[u8]) -> (Vec<u8>, Vec<Record>, Option<End>) {
        let (mut region, mut others) = (vec![0; REGION as usize], Vec::new());
        while let Some((header, rest)) = stream.split_first_chunk::<HEADER>() {
            match Record::from_bytes(*header) {
                Some(Record::Put { region: 0, offset, len }) if fits(offset, len) => {
                    let (payload, behind) = rest.split_at(rest.len().min(len as usize));
                    region[offset as usize..][..payload.len()].copy_from_slice(payload);
                    stream = behind;
                }
                None | Some(Record::Put { .. }) => return (region, others, Some(End::Nonsense)),
                Some(other) => {
                    others.push(other);
                    stream = rest;
                }
            }
        }
        (region, others, None)
    }

    fn fits(offset: u64, len: u64) -> bool {
        len <= LONGEST as u64 && offset.checked_add(len).is_some_and(|end| end <= REGION)
    }

    #[test]
    fn records_write_what_they_say_and_nothing_else() {
        let put = |offset, payload: &[u8]| {
            let header = Record::Put { region: 0, offset, len: payload.len() as u64 }.to_bytes();
            [&header[..], payload].concat()
        };
        let signal = Record::Signal { region: 0, offset: 64, value: 3, tag: Some(Tag::default()) }.to_bytes();
        let seeds = [
            [put(8, &[7; 40]), signal.to_vec(), put(4000, &[9; 96])].concat(),
            [Record::Ask { mark: 1 }.to_bytes(), Record::Answer { mark: 1 }.to_bytes()].concat(),
            put(4090, &[1; 7]),
        ];
        let (theirs, ours) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        fuzz::run("records", &seeds, |bytes| {
            let regions = Regions::default();
            let segment = Segment::create("sidelane-test", REGION).unwrap();
            let mapped = Arc::new(PeerMapping::new(&[Some(&segment)]).unwrap());
            regions.add(Region { mapped: Arc::clone(&mapped), member: 0 });
            let (mut inbound, mut others, mut end) = (Inbound::default(), Vec::new(), None);
            // In two pieces, cut by the first byte.
            let cut = bytes.first().map_or(0, |&first| bytes.len() * usize::from(first) / 256);
            for piece in [&bytes[..cut], &bytes[cut..]] {
                (&theirs).write_all(piece).unwrap();
                let taken = inbound.take(&ours, &regions, |record| {
                    others.push(record);
                    Ok(())
                });
                end = end.or(taken.err());
                if end.is_some() {
                    break;
                }
            }
            // Bytes behind a malformed record are ignored.
            let _ = (&ours).read_to_end(&mut Vec::new());
            let mut region = vec![0u8; REGION as usize];
            mapped.read(0, 0, &mut region).unwrap();
            let (of_region, of_others, of_end) = expected(bytes);
            assert_eq!((others, end), (of_others, of_end));
            assert!(region == of_region);
        });
    }
}
