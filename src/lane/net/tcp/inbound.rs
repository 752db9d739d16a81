//! Receiving: headers through a small stage, payloads directly to their places.

use std::io::IoSliceMut;
use std::os::fd::AsFd;

use rustix::io::Errno;

use super::outgoing::LONGEST;
use crate::error::MemoryError;
use crate::lane::net::record::{HEADER, Record};
use crate::lane::net::{Regions, RemoteAddress};

/// Bytes read ahead of the record that is received: several headers, or small puts, with one call.
const STAGE: usize = 4096;
/// Bytes taken in one turn, so that one loud peer does not keep the others waiting.
const GULP: usize = 1 << 20;

/// Received bytes, up to the middle of a record.
#[derive(Debug)]
pub struct Inbound {
    stage: Box<[u8; STAGE]>,
    start: usize,
    end: usize,
    /// Where the rest of the current payload goes.
    payload: Option<(RemoteAddress, usize)>,
}

/// Why nothing more will come.
#[derive(Debug, PartialEq)]
pub enum End {
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
    pub fn take(
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
