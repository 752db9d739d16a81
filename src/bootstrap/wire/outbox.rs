//! Bytes on their way to one peer: its own, and those that it shares with other peers.
//!
//! ```text
//!   to rank 1   | own: length, ticket | shared |        | own: heartbeat |
//!   to rank 2   | own: length, ticket | shared |             |
//!                                          `-----------------+--► an answer to all ranks: held once
//! ```
//!
//! An answer to N ranks grows with N, so a copy for each rank would take N x N bytes.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Write};
use std::sync::Arc;

/// Pieces that one call to the system takes.
const PIECES: usize = 16;

#[derive(Debug)]
enum Piece {
    Own(Vec<u8>),
    Shared(Arc<[u8]>),
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        match self {
            Piece::Own(bytes) => bytes,
            Piece::Shared(bytes) => bytes,
        }
    }
}

/// Bytes that are queued for one peer, and not yet handed to the system.
#[derive(Debug, Default)]
pub struct Outbox {
    pieces: VecDeque<Piece>,
    /// Bytes of the first piece that the system has.
    sent: usize,
}

impl Outbox {
    /// Queues a copy of these bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        match self.pieces.back_mut() {
            Some(Piece::Own(last)) => last.extend_from_slice(bytes),
            _ if bytes.is_empty() => {}
            _ => self.pieces.push_back(Piece::Own(bytes.to_vec())),
        }
    }

    /// Queues bytes that other outboxes may hold, too.
    pub fn share(&mut self, bytes: &Arc<[u8]>) {
        if !bytes.is_empty() {
            self.pieces.push_back(Piece::Shared(Arc::clone(bytes)));
        }
    }

    /// Whether everything queued has been handed to the system.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Bytes that are queued.
    pub fn len(&self) -> usize {
        self.pieces.iter().map(|piece| piece.bytes().len()).sum::<usize>() - self.sent
    }

    /// Forgets what is queued.
    pub fn clear(&mut self) {
        *self = Outbox::default();
    }

    /// Writes all that the stream takes.
    ///
    /// # Errors
    /// That of the stream: [`ErrorKind::WouldBlock`] where it takes no more.
    pub fn write_to(&mut self, stream: &mut impl Write) -> io::Result<()> {
        while !self.is_empty() {
            let mut slices = [IoSlice::new(&[]); PIECES];
            let mut unsent = self.sent;
            for (slice, piece) in slices.iter_mut().zip(&self.pieces) {
                *slice = IoSlice::new(&piece.bytes()[std::mem::take(&mut unsent)..]);
            }
            match stream.write_vectored(&slices[..self.pieces.len().min(PIECES)]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => self.advance(written),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn advance(&mut self, written: usize) {
        self.sent += written;
        while let Some(first) = self.pieces.front().map(|piece| piece.bytes().len())
            && self.sent >= first
        {
            self.sent -= first;
            self.pieces.pop_front();
        }
    }

    /// Bytes that these outboxes hold together: those that they share count once.
    #[cfg(test)]
    pub fn held(outboxes: &[Outbox]) -> usize {
        let mut seen = std::collections::HashSet::new();
        let pieces = outboxes.iter().flat_map(|outbox| &outbox.pieces);
        pieces.map(Piece::bytes).filter(|bytes| seen.insert(bytes.as_ptr())).map(<[u8]>::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A stream that takes so many bytes at a time, and blocks in between.
    struct Narrow {
        taken: Vec<u8>,
        width: usize,
        blocks: bool,
    }

    impl Write for Narrow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.blocks ^= true;
            if self.blocks {
                return Err(ErrorKind::WouldBlock.into());
            }
            let taken = bytes.len().min(self.width);
            self.taken.extend(&bytes[..taken]);
            Ok(taken)
        }

        fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
            let bytes: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
            self.write(&bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    proptest! {
        #[test]
        fn bytes_leave_in_order_whatever_the_stream_takes(
            pieces in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..40)), 0..40),
            width in 1usize..200,
        ) {
            let (mut outbox, mut expected) = (Outbox::default(), Vec::<u8>::new());
            let mut stream = Narrow { taken: Vec::new(), width, blocks: false };
            for (shares, bytes) in pieces {
                expected.extend(&bytes);
                match shares {
                    true => outbox.share(&bytes.into()),
                    false => outbox.push(&bytes),
                }
                // Some leave before others come.
                let _ = outbox.write_to(&mut stream);
            }
            while !outbox.is_empty() {
                let _ = outbox.write_to(&mut stream);
            }
            prop_assert_eq!(stream.taken, expected);
        }
    }

    #[test]
    fn stream_that_takes_nothing_is_an_error() {
        let (mut outbox, mut full): (Outbox, &mut [u8]) = (Outbox::default(), &mut []);
        outbox.push(&[1]);
        assert_eq!(outbox.write_to(&mut full).unwrap_err().kind(), ErrorKind::WriteZero);
        assert!(!outbox.is_empty());
    }
}
