//! The write that is being gathered: puts with adjacent targets travel in one request.
//!
//! ```text
//!   put header | put_rows 7 2 9 | zero          at the peer      | header | 7 | 2 | 9 | 0 0 |
//!         \          |  |  |       |
//!       [ staged    in place     zeros ]        a request: at most a chunk of bytes, as many pieces as a NIC takes
//! ```
//!
//! A put to another place ends it, and so does a signal, which may travel with it, and a flush: all
//! of them calls. The progress of the NIC ends nothing, so the number of requests does not depend
//! on time.
//!
//! Its staged part takes at most half of the staging. So a put that waits for room to stage one
//! more piece gets that room when all earlier data has been read, though the write itself is not
//! posted.

use super::block::Block;
use super::{Remote, Sge};

/// Limits of one request.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Bytes.
    pub bytes: u64,
    /// Pieces.
    pub pieces: usize,
    /// Bytes of staging.
    pub staged: u64,
}

impl Bounds {
    /// Space in an empty request; `staged` for copied bytes.
    pub fn room(&self, staged: bool) -> RequestSpace {
        let bytes = if staged { self.bytes.min(self.staged) } else { self.bytes };
        RequestSpace { bytes, pieces: self.pieces }
    }
}

/// Remaining room of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestSpace {
    /// Bytes.
    pub bytes: u64,
    /// Pieces.
    pub pieces: usize,
}

/// Where pieces lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceSource {
    /// In memory of others, which the lane must report as free once it has read them.
    InPlace,
    /// In the ring of staged bytes, which is free up to here once they have been read.
    Staged(u64),
    /// In memory that the NIC can always read.
    Always,
}

/// The write that is being gathered; none while it has no pieces.
pub struct Gather {
    pub bounds: Bounds,
    pub to: Remote,
    pub bytes: u64,
    pub pieces: Vec<Sge>,
    /// Bytes of staging that it holds, and up to where staging is free when it is done.
    staged: u64,
    pub until: Option<u64>,
    /// Whether it reads memory of others.
    pub in_place: bool,
}

impl Gather {
    /// Nothing yet.
    pub fn new(bounds: Bounds) -> Self {
        Gather {
            bounds,
            to: Remote { addr: 0, rkey: 0 },
            bytes: 0,
            pieces: Vec::with_capacity(bounds.pieces),
            staged: 0,
            until: None,
            in_place: false,
        }
    }

    /// Room for data to `to` in the gathered write; `None` if it is empty or ends elsewhere.
    pub fn room(&self, to: Remote, staged: bool) -> Option<RequestSpace> {
        let behind = Remote { addr: self.to.addr + self.bytes, rkey: self.to.rkey };
        if self.pieces.is_empty() || to != behind {
            return None;
        }
        let mut bytes = self.bounds.bytes - self.bytes;
        if staged {
            bytes = bytes.min(Block::whole(self.bounds.staged.saturating_sub(self.staged)));
        }
        Some(RequestSpace { bytes, pieces: self.bounds.pieces - self.pieces.len() })
    }

    /// Pieces for `to`, for which there is room.
    pub fn add(&mut self, to: Remote, pieces: impl IntoIterator<Item = Sge>, kept: PieceSource) {
        if self.pieces.is_empty() {
            (self.to, self.bytes, self.staged, self.until, self.in_place) = (to, 0, 0, None, false);
        }
        let first = self.pieces.len();
        self.pieces.extend(pieces);
        let bytes: u64 = self.pieces[first..].iter().map(|piece| u64::from(piece.len())).sum();
        self.bytes += bytes;
        match kept {
            PieceSource::InPlace => self.in_place = true,
            PieceSource::Staged(until) => {
                self.staged += Block::staged_bytes(bytes);
                self.until = Some(until);
            }
            PieceSource::Always => {}
        }
    }
}
