//! What a rail will ask of its card, told from the calls alone: what the card's own counts are held against.
//!
//! The rules of the lane, as arithmetic: a put is so many chunks; rows in place are so many runs of neighbours, thirty or a
//! chunk to a request; a signal is one request more, or two with a tag, or none if it travels with the put before it. A
//! batch is a doorbell, a doorbell a completion. Exact as long as nothing waits for credit: then a batch may be cut short,
//! and only requests, packets and bytes are.

use super::SignalMode;
use crate::lane::rail::Counters;

/// The rules of one rail.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Bytes of one write.
    pub chunk: u64,
    /// Bytes that are staged at once.
    pub portion: u64,
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
    /// How signals travel.
    pub signal: SignalMode,
}

/// What will have been asked.
#[derive(Debug)]
pub struct Forecast {
    rules: Rules,
    counters: Counters,
    /// Requests that are held back, and whether the last one is a write of data.
    held: u64,
    ends_in_data: bool,
}

impl Forecast {
    /// Nothing yet.
    pub fn new(rules: Rules) -> Self {
        Forecast { rules, counters: Counters::default(), held: 0, ends_in_data: false }
    }

    /// What has been forecast so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Bytes that lie together, in registered memory or not.
    pub fn put(&mut self, len: u64, registered: bool) {
        let in_place = registered && len > self.rules.small;
        self.portions(len, in_place);
    }

    fn portions(&mut self, len: u64, in_place: bool) {
        let most = if in_place { self.rules.chunk } else { self.rules.portion };
        for nth in 0..len.div_ceil(most) {
            self.data((len - nth * most).min(most), !in_place);
        }
    }

    /// Rows by index.
    pub fn rows(&mut self, rows: &[u32], row_bytes: u64, registered: bool) {
        let Rules { chunk, portion, pieces, small, .. } = self.rules;
        if registered && row_bytes <= chunk {
            let most = (chunk / row_bytes) as usize;
            let mut rest = rows;
            while !rest.is_empty() {
                let (mut taken, mut runs) = (0, 0);
                while taken < rest.len().min(most) {
                    let next = taken > 0 && rest[taken - 1].checked_add(1) == Some(rest[taken]);
                    if !next {
                        if runs == pieces {
                            break;
                        }
                        runs += 1;
                    }
                    taken += 1;
                }
                self.data(taken as u64 * row_bytes, false);
                rest = &rest[taken..];
            }
        } else if row_bytes <= portion {
            let group = portion / row_bytes;
            let all = rows.len() as u64;
            for nth in 0..all.div_ceil(group) {
                self.data((all - nth * group).min(group) * row_bytes, true);
            }
        } else {
            rows.iter().for_each(|_| self.portions(row_bytes, registered && row_bytes > small));
        }
    }

    /// Zeros.
    pub fn zero(&mut self, len: u64) {
        let most = self.rules.chunk.min(self.rules.pieces as u64 * self.rules.zeros);
        for nth in 0..len.div_ceil(most) {
            self.data((len - nth * most).min(most), false);
        }
    }

    /// A signal, with a tag or not; `named` if its word has a number and the growth fits beside it.
    pub fn signal(&mut self, tagged: bool, named: bool) {
        match self.rules.signal {
            SignalMode::Immediate if named && !tagged => {
                if !self.ends_in_data {
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
        self.hurry();
    }

    /// The partner is told how many of its signals were taken.
    pub fn grant(&mut self) {
        self.request(8);
        self.hurry();
    }

    /// All that is held back goes out.
    pub fn hurry(&mut self) {
        self.counters.doorbells += self.held.div_ceil(self.rules.batch);
        self.counters.completions = self.counters.doorbells;
        (self.held, self.ends_in_data) = (0, false);
    }

    fn data(&mut self, bytes: u64, copied: bool) {
        self.request(bytes);
        self.ends_in_data = true;
        if copied {
            self.counters.copied += bytes;
        }
    }

    fn request(&mut self, bytes: u64) {
        self.ends_in_data = false;
        self.counters.requests += 1;
        self.counters.bytes += bytes;
        self.counters.packets += bytes.div_ceil(self.rules.mtu).max(1);
        self.held += 1;
        if self.held > self.rules.batch {
            self.held -= self.rules.batch;
            self.counters.doorbells += 1;
            self.counters.completions += 1;
        }
    }
}
