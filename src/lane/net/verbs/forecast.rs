//! Prediction of a connection's requests from the calls alone, to compare with the NIC's counts.
//!
//! These are the rules of the lane as arithmetic. Puts are pieces: a copied put is one, and rows in
//! place are one for each run of adjacent rows. Pieces with adjacent targets are one request, until
//! it has thirty pieces (twenty in large worlds) or a chunk of bytes, or until a signal. A signal
//! is one request more, or two with a tag, or none if it travels with the puts before it. A word of
//! a device is a request, and begins a batch where it waits for those before it. A batch ends at
//! sixteen requests or a chunk of bytes, and with a signal. It is a doorbell, and a doorbell a
//! completion. The prediction is exact as long as nothing waits for credit. Otherwise a batch may
//! be cut short, and only requests, packets and bytes are exact.

use super::{Remote, SignalMode};
use crate::lane::net::Counters;

/// The rules of one connection.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Bytes of one write.
    pub chunk: u64,
    /// Puts of at most so many bytes are staged wherever they lie.
    pub small: u64,
    /// Pieces of a request.
    pub pieces: usize,
    /// Bytes of one piece of zeros.
    pub zeros: u64,
    /// Requests of a doorbell.
    pub batch: u64,
    /// Bytes of a packet.
    pub mtu: u64,
    /// The largest write, in bytes, that an immediate travels with.
    pub along: u64,
    /// How signals travel.
    pub signal: SignalMode,
}

/// A piece that is staged takes a multiple of so many bytes.
const STAGED: u64 = 64;

/// Predicted requests.
#[derive(Debug)]
pub struct Forecast {
    rules: Rules,
    counters: Counters,
    /// Requests that are not posted, those of them that are due, and the bytes of the others.
    asked: u64,
    due: u64,
    held: u64,
    /// The write that the next put may travel with.
    open: Option<OpenRequest>,
}

#[derive(Clone, Copy, Debug)]
struct OpenRequest {
    /// The place behind it.
    behind: Remote,
    bytes: u64,
    pieces: usize,
    staged: u64,
}

impl Forecast {
    /// Nothing yet.
    pub fn new(rules: Rules) -> Self {
        Forecast { rules, counters: Counters::default(), asked: 0, due: 0, held: 0, open: None }
    }

    /// Prediction so far, without the open write.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Bytes that lie together, in registered memory or not.
    pub fn put(&mut self, to: Remote, len: u64, registered: bool) {
        let copied = !registered || len <= self.rules.small;
        self.stream(to, len, copied, |left, (bytes, _)| (left.min(bytes), 1));
    }

    /// Bytes of a device's memory: no processor could copy them.
    pub fn device(&mut self, to: Remote, len: u64) {
        self.stream(to, len, false, |left, (bytes, _)| (left.min(bytes), 1));
    }

    /// Zeros.
    pub fn zero(&mut self, to: Remote, len: u64) {
        let zeros = self.rules.zeros;
        self.stream(to, len, false, |left, (bytes, pieces)| {
            let bytes = left.min(bytes).min(pieces as u64 * zeros);
            (bytes, bytes.div_ceil(zeros) as usize)
        });
    }

    /// `len` bytes, of which `part` takes as many as there is room for.
    fn stream(
        &mut self,
        mut to: Remote,
        len: u64,
        copied: bool,
        part: impl Fn(u64, (u64, usize)) -> (u64, usize),
    ) {
        let mut left = len;
        while left > 0 {
            let (bytes, pieces) = part(left, self.room(to, 1, copied));
            self.data(to, bytes, pieces, copied);
            (left, to.addr) = (left - bytes, to.addr + bytes);
        }
    }

    /// Rows by index.
    pub fn rows(&mut self, mut to: Remote, rows: &[u32], row_bytes: u64, registered: bool) {
        let chunk = self.rules.chunk;
        let copied = !(registered && row_bytes <= chunk);
        if copied && row_bytes > chunk {
            for _ in rows {
                self.put(to, row_bytes, registered);
                to.addr += row_bytes;
            }
            return;
        }
        let mut rest = rows;
        while !rest.is_empty() {
            let (bytes, most) = self.room(to, row_bytes, copied);
            let (mut taken, mut pieces) = (0, usize::from(copied));
            while taken < rest.len().min((bytes / row_bytes) as usize) {
                let next = taken > 0 && rest[taken - 1].checked_add(1) == Some(rest[taken]);
                if !copied && !next {
                    if pieces == most {
                        break;
                    }
                    pieces += 1;
                }
                taken += 1;
            }
            let bytes = taken as u64 * row_bytes;
            self.data(to, bytes, pieces, copied);
            (rest, to.addr) = (&rest[taken..], to.addr + bytes);
        }
    }

    /// A signal, with a tag or not; `named` if its word has a number and the growth fits beside it.
    pub fn signal(&mut self, tagged: bool, named: bool) {
        let travels = self.open.is_some_and(|open| open.bytes <= self.rules.along);
        self.close();
        match self.rules.signal {
            SignalMode::Immediate if named && !tagged => {
                if !travels {
                    self.request(0);
                }
            }
            SignalMode::Immediate => self.request(64),
            mode => {
                if tagged {
                    self.request(24);
                }
                // An addition carries its number in its header.
                self.request(if mode == SignalMode::Write { 8 } else { 0 });
            }
        }
        self.post();
    }

    /// A word of a device.
    pub fn word(&mut self) {
        self.close();
        if self.rules.signal != SignalMode::Write {
            self.post();
        }
        self.request(8);
        self.post_due();
    }

    /// The report to the peer of how many of its signals were taken: at once, and past a write that
    /// is open.
    pub fn grant(&mut self) {
        self.request(8);
        self.post();
    }

    /// All that is held back goes out.
    pub fn hurry(&mut self) {
        self.close();
        self.post();
    }

    /// Bytes and pieces that still travel with the write that is open, if at least `least` bytes
    /// for `to` do; else of a new one.
    fn room(&mut self, to: Remote, least: u64, copied: bool) -> (u64, usize) {
        let Rules { chunk, pieces, .. } = self.rules;
        if let Some(open) = self.open.filter(|open| open.behind == to && open.pieces < pieces) {
            let unstaged = chunk.saturating_sub(open.staged) / STAGED * STAGED;
            let bytes = (chunk - open.bytes).min(if copied { unstaged } else { u64::MAX });
            if bytes >= least {
                return (bytes, pieces - open.pieces);
            }
        }
        self.close();
        self.post_due();
        (chunk, pieces)
    }

    fn data(&mut self, to: Remote, bytes: u64, pieces: usize, copied: bool) {
        let open = self.open.get_or_insert(OpenRequest { behind: to, bytes: 0, pieces: 0, staged: 0 });
        open.behind.addr += bytes;
        open.bytes += bytes;
        open.pieces += pieces;
        if copied {
            open.staged += bytes.next_multiple_of(STAGED);
            self.counters.copied += bytes;
        }
    }

    /// Nothing more travels with the write that is open.
    fn close(&mut self) {
        if let Some(OpenRequest { bytes, .. }) = self.open.take() {
            self.request(bytes);
        }
    }

    fn request(&mut self, bytes: u64) {
        self.counters.requests += 1;
        self.counters.bytes += bytes;
        self.counters.packets += bytes.div_ceil(self.rules.mtu).max(1);
        (self.asked, self.held) = (self.asked + 1, self.held + bytes);
        if self.asked - self.due >= self.rules.batch || self.held >= self.rules.chunk {
            (self.due, self.held) = (self.asked, 0);
        }
    }

    /// All requests so far are due, and posted.
    fn post(&mut self) {
        (self.due, self.held) = (self.asked, 0);
        self.post_due();
    }

    /// A doorbell for each batch of the requests that are due.
    fn post_due(&mut self) {
        self.counters.doorbells += self.due.div_ceil(self.rules.batch);
        self.counters.completions = self.counters.doorbells;
        (self.asked, self.due) = (self.asked - self.due, 0);
    }
}
