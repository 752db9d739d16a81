//! The floor between machines: as many bytes as a plan sends, in bare writes, to memory that no
//! rank reads.

use std::sync::Arc;

use super::net::{NetConnection, is_copied};
use super::{Lanes, MappedWindow, PeerLane};
use crate::error::Error;

/// Bytes of one write: like the chunks of a connection.
pub const RAW: u64 = 256 << 10;

/// Bare writes over the rails of a rank.
#[derive(Debug)]
pub struct RawWrites {
    lanes: Arc<Lanes>,
    scratch: MappedWindow,
    /// Peer and bytes.
    out: Vec<(u32, u64)>,
}

impl RawWrites {
    /// Writes to `scratch`, [`RAW`] bytes at each rank, from this rank's part of it.
    pub fn new(lanes: Arc<Lanes>, scratch: MappedWindow) -> Self {
        RawWrites { lanes, scratch, out: Vec::new() }
    }

    /// So many bytes more go to a rank. `false` if no wire to another machine leads there, and
    /// nothing will go.
    pub fn add(&mut self, to: u32, bytes: u64) -> bool {
        let wired = matches!(&self.lanes.reach[to as usize], PeerLane::Rail(rail) if !is_copied(rail.lane()));
        if wired {
            match self.out.iter_mut().find(|(peer, _)| *peer == to) {
                Some((_, sum)) => *sum += bytes,
                None => self.out.push((to, bytes)),
            }
        }
        wired
    }

    /// Writes all bytes, a chunk to each peer in turn, and waits until they have landed. A
    /// connection that fails has ended the world, and the measuring rank learns of it at the next
    /// meeting.
    pub fn write(&self) {
        let _ = self.try_write();
    }

    fn try_write(&self) -> Result<(), Error> {
        let most = self.out.iter().map(|&(_, bytes)| bytes.div_ceil(RAW)).max().unwrap_or(0);
        let source = self.scratch.bytes(self.lanes.rank)?;
        for nth in 0..most {
            for &(to, bytes) in &self.out {
                let len = bytes.saturating_sub(nth * RAW).min(RAW);
                if let (Some(rail), true) = (self.rail(to), len > 0) {
                    let target = self.scratch.target(to, 0, len)?;
                    let patience = self.lanes.patience(to);
                    let _ = rail.put(target, &source[..len as usize], patience);
                }
            }
        }
        for &(to, _) in &self.out {
            if let Some(rail) = self.rail(to) {
                let _ = rail.flush(self.lanes.patience(to));
            }
        }
        Ok(())
    }

    fn rail(&self, to: u32) -> Option<&dyn NetConnection> {
        match &self.lanes.reach[to as usize] {
            PeerLane::Rail(rail) => Some(rail.as_ref()),
            _ => None,
        }
    }
}
