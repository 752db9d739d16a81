//! State that chains of both kinds share: requests with places for their pieces, linked when they
//! are posted.
//!
//! ```text
//!   requests   | write | write | write with immediate |  free   |
//!   pieces     | a b   | c     | d e f                |         |   `stride` places per request
//!                 ^ taken by the NIC       ^ refused: stays, first in the next post
//! ```

use std::ptr;

use super::ffi::{ibv_recv_wr, ibv_send_wr, ibv_sge};
use super::memory::Sge;
use crate::error::VerbsError;

/// A request that can be linked to the next.
pub trait Request {
    fn set_pieces(&mut self, at: *mut ibv_sge, count: i32);
    fn pieces(&self) -> i32;
    fn set_next(&mut self, next: *mut Self);
}

impl Request for ibv_send_wr {
    fn set_pieces(&mut self, at: *mut ibv_sge, count: i32) {
        (self.sg_list, self.num_sge) = (at, count);
    }

    fn pieces(&self) -> i32 {
        self.num_sge
    }

    fn set_next(&mut self, next: *mut Self) {
        self.next = next;
    }
}

impl Request for ibv_recv_wr {
    fn set_pieces(&mut self, at: *mut ibv_sge, count: i32) {
        (self.sg_list, self.num_sge) = (at, count);
    }

    fn pieces(&self) -> i32 {
        self.num_sge
    }

    fn set_next(&mut self, next: *mut Self) {
        self.next = next;
    }
}

/// Requests and their pieces.
pub struct Chain<R> {
    requests: Vec<R>,
    sges: Vec<ibv_sge>,
    stride: usize,
    limit: usize,
    /// Requests at the front that a NIC has taken.
    taken: usize,
}

impl<R: Request> Chain<R> {
    pub fn new(limit: usize, stride: usize) -> Self {
        Chain {
            requests: Vec::with_capacity(limit),
            sges: vec![ibv_sge { addr: 0, length: 0, lkey: 0 }; limit * stride],
            stride,
            limit,
            taken: 0,
        }
    }

    /// Requests that wait to be posted.
    pub fn len(&self) -> usize {
        self.requests.len() - self.taken
    }

    /// How many more there is room for.
    #[cfg(test)]
    pub fn room(&self) -> usize {
        self.limit - self.requests.len()
    }

    /// The place of the next request.
    pub fn next_place(&self) -> Result<usize, VerbsError> {
        let (used, limit) = (self.requests.len(), self.limit);
        match used < limit {
            true => Ok(used),
            false => Err(VerbsError::ChainLimit { what: "requests", asked: used + 1, limit }),
        }
    }

    pub fn push(&mut self, mut request: R, sges: impl IntoIterator<Item = Sge>) -> Result<(), VerbsError> {
        let (nth, limit) = (self.next_place()?, self.stride);
        let places = &mut self.sges[nth * limit..][..limit];
        let mut count = 0;
        for Sge(sge) in sges {
            let what = "pieces of memory in a request";
            *places.get_mut(count).ok_or(VerbsError::ChainLimit { what, asked: count + 1, limit })? = sge;
            count += 1;
        }
        request.set_pieces(ptr::null_mut(), count as i32);
        self.requests.push(request);
        Ok(())
    }

    /// Links what waits; null if nothing does. The pointers hold until the chain is next touched.
    pub fn link(&mut self) -> *mut R {
        let (requests, sges, len) = (self.requests.as_mut_ptr(), self.sges.as_mut_ptr(), self.requests.len());
        for nth in self.taken..len {
            // SAFETY: `nth` is a request with its pieces, and but for the last there is a next one.
            unsafe {
                let next = if nth + 1 < len { requests.add(nth + 1) } else { ptr::null_mut() };
                let request = &mut *requests.add(nth);
                request.set_next(next);
                request.set_pieces(sges.add(nth * self.stride), request.pieces());
            }
        }
        // SAFETY: it is a request.
        if self.len() == 0 { ptr::null_mut() } else { unsafe { requests.add(self.taken) } }
    }

    /// Records that the NIC refused from `bad` on; null if it took all. Returns how many it took.
    pub fn settle(&mut self, bad: *const R) -> usize {
        let waiting = self.requests[self.taken..].iter();
        let taken = waiting.take_while(|&request| !ptr::eq(request, bad)).count();
        self.taken += taken;
        if self.len() == 0 {
            self.requests.clear();
            self.taken = 0;
        }
        taken
    }
}
