//! Execution of a request by a NIC.

use std::net::Ipv6Addr;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use rand::seq::IteratorRandom;
use rustix::io::Errno;

use super::{FakeNic, Job, Pair, Placement, Ready, State};
use crate::lane::net::verbs::ffi::{self, ibv_ah_attr, ibv_sge, ibv_wc};

/// Outcome of a request.
enum Outcome {
    Done,
    /// It waits for the peer, or for a receive.
    Waits,
    Failed(u32),
}

impl State {
    /// Executes what waits in a queue pair's send queue, in order.
    pub fn run(&mut self, pair: u32) {
        while self.step(pair) {}
    }

    pub fn run_all(&mut self) {
        while self.pairs.keys().copied().collect::<Vec<_>>().into_iter().any(|pair| self.step(pair)) {}
    }

    /// Executes one request; false if none can be.
    pub fn step(&mut self, number: u32) -> bool {
        let Some(at) = self.next(number) else { return false };
        let Some(mut job) = self.pair(number).jobs.remove(at) else { return false };
        match self.execute(number, &mut job) {
            Outcome::Waits => {
                self.pair(number).jobs.insert(at, job);
                return false;
            }
            Outcome::Done => {
                job.placed = true;
                self.pair(number).jobs.insert(at, job);
                self.finish_placed(number);
            }
            Outcome::Failed(status) => {
                self.finish(number, &job, status);
                self.fail(number);
            }
        }
        true
    }

    /// Place of the request in a send queue that is executed next.
    fn next(&mut self, number: u32) -> Option<usize> {
        let State { pairs, placement, .. } = self;
        let ready = |pair: &&Pair| pair.state == ffi::IBV_QPS_RTS && !pair.held_back;
        let pair = pairs.get(&number).filter(ready)?;
        let is_write = |job: &Job| job.opcode == ffi::IBV_WR_RDMA_WRITE;
        let run = pair.jobs.iter().take_while(|job| is_write(job)).count();
        let mut waiting = (0..run).filter(|&at| !pair.jobs[at].placed);
        match placement {
            _ if run == 0 => (!pair.jobs.is_empty()).then_some(0),
            Placement::InOrder => waiting.next(),
            Placement::Shuffled(random) => waiting.choose(random),
            Placement::LastFirst if run < pair.jobs.len() => waiting.next_back(),
            Placement::LastFirst => waiting.next_back().filter(|&last| last + 1 == run),
        }
    }

    /// Reports the requests as done that no earlier one keeps back.
    fn finish_placed(&mut self, number: u32) {
        while self.pair(number).jobs.front().is_some_and(|job| job.placed) {
            if let Some(job) = self.pair(number).jobs.pop_front() {
                self.finish(number, &job, ffi::IBV_WC_SUCCESS);
            }
        }
    }

    /// The NIC that packets with this address reach; none if they get lost.
    pub fn destination(&self, from: usize, to: &ibv_ah_attr) -> Result<Option<usize>, Errno> {
        let (own, global) = (&self.nics[from], to.is_global == 1);
        let ethernet = own.link == ffi::IBV_LINK_LAYER_ETHERNET;
        if (ethernet && !global) || (global && !own.gids.contains_key(&to.grh.sgid_index)) {
            return Err(Errno::INVAL);
        }
        // SAFETY: a GID is its bytes.
        let gid = Ipv6Addr::from(unsafe { to.grh.dgid.raw });
        let named = |nic: &FakeNic| nic.link == own.link && nic.gids.values().any(|&known| known == gid);
        if ethernet {
            return self.nics.iter().position(named).map(Some).ok_or(Errno::NETUNREACH);
        }
        // The subnet is the last 16 bits of the network part; the 16 before are the FLID.
        let subnet = |nic: &FakeNic| nic.gids.values().next().map(|gid| gid.segments()[3]);
        Ok(self.nics.iter().position(|there| {
            let inside = there.link == own.link && subnet(there) == subnet(own);
            let is_local = inside && there.lid == to.dlid;
            match global {
                true => named(there) && (is_local || (!inside && gid.segments()[2] == to.dlid)),
                false => is_local && !there.needs_global_header && !own.needs_global_header,
            }
        }))
    }

    fn execute(&mut self, number: u32, job: &mut Job) -> Outcome {
        let pair = &self.pairs[&number];
        let (nic, peer, key) = (pair.nic, pair.peer, pair.pkey);
        let dumb = |at: usize| self.nics[at].silent || self.nics[at].gone;
        // Of one partition, and one of them a full member.
        let heard = |there: &Pair| (there.pkey ^ key) & 0x7fff == 0 && (there.pkey | key) & 0x8000 != 0;
        let listens =
            |there: &Pair| matches!(there.state, ffi::IBV_QPS_RTR | ffi::IBV_QPS_RTS) && heard(there);
        if self.nics[nic].mute
            || dumb(nic)
            || pair.peer_nic.is_none_or(dumb)
            || !self.pairs.get(&peer).is_some_and(listens)
        {
            return Outcome::Waits;
        }
        let takes = matches!(job.opcode, ffi::IBV_WR_SEND | ffi::IBV_WR_RDMA_WRITE_WITH_IMM);
        if takes && self.pairs[&peer].receives.is_empty() {
            self.nics[nic].statistics.not_ready += u64::from(!std::mem::replace(&mut job.not_ready, true));
            let for_ever = self.pairs[&number].rnr_retries == 7;
            return if for_ever { Outcome::Waits } else { Outcome::Failed(ffi::IBV_WC_RNR_RETRY_EXC_ERR) };
        }
        let done = match job.opcode {
            ffi::IBV_WR_ATOMIC_FETCH_AND_ADD => self.fetch_add(number, job),
            _ => self.transfer(number, job),
        };
        match done {
            Ok(bytes) => {
                self.nics[nic].statistics.bytes += bytes;
                Outcome::Done
            }
            Err(status) => {
                if matches!(status, ffi::IBV_WC_REM_ACCESS_ERR | ffi::IBV_WC_REM_INV_REQ_ERR) {
                    let there = self.pair(peer);
                    let (at, object) = (there.nic, there.object);
                    self.tell(at, ffi::IBV_EVENT_QP_ACCESS_ERR, object);
                    self.fail(peer);
                }
                Outcome::Failed(status)
            }
        }
    }

    fn transfer(&mut self, number: u32, job: &Job) -> Result<u64, u32> {
        let (domain, peer) = (self.pairs[&number].domain, self.pairs[&number].peer);
        let bytes = match &job.inline {
            Some(bytes) => bytes.clone(),
            None => self.gather(domain, &job.pieces)?,
        };
        let len = bytes.len() as u64;
        if job.opcode != ffi::IBV_WR_SEND && len > 0 {
            let there = self.pairs[&peer].domain;
            let (addr, rkey) = (job.addr, job.rkey);
            let to = self.find(there, (addr, len, rkey), ffi::IBV_ACCESS_REMOTE_WRITE);
            place(to.ok_or(ffi::IBV_WC_REM_ACCESS_ERR)?, &bytes);
        }
        if job.opcode != ffi::IBV_WR_RDMA_WRITE {
            self.take_receive(peer, job, &bytes)?;
        }
        Ok(len)
    }

    /// Hands a message to the peer's oldest receive.
    fn take_receive(&mut self, peer: u32, job: &Job, bytes: &[u8]) -> Result<(), u32> {
        let there = self.pair(peer);
        let (domain, queue) = (there.domain, there.receive);
        let Some((wr_id, pieces)) = there.receives.pop_front() else { return Ok(()) };
        let mut wc = ibv_wc { wr_id, qp_num: peer, byte_len: bytes.len() as u32, ..EMPTY };
        if job.opcode == ffi::IBV_WR_SEND {
            let mut rest = bytes;
            for piece in &pieces {
                let (now, later) = rest.split_at(rest.len().min(piece.length as usize));
                let at = (piece.addr, now.len() as u64, piece.lkey);
                match self.find(domain, at, ffi::IBV_ACCESS_LOCAL_WRITE) {
                    Some(to) => place(to, now),
                    None => wc.status = ffi::IBV_WC_LOC_PROT_ERR,
                }
                rest = later;
            }
            if !rest.is_empty() {
                wc.status = ffi::IBV_WC_LOC_LEN_ERR;
            }
            wc.opcode = ffi::IBV_WC_RECV;
        } else {
            (wc.opcode, wc.wc_flags) = (ffi::IBV_WC_RECV_RDMA_WITH_IMM, ffi::IBV_WC_WITH_IMM);
            wc.imm_data = job.immediate;
        }
        self.complete(queue, wc, 0);
        if wc.status == ffi::IBV_WC_SUCCESS { Ok(()) } else { Err(ffi::IBV_WC_REM_INV_REQ_ERR) }
    }

    fn fetch_add(&mut self, number: u32, job: &Job) -> Result<u64, u32> {
        let pair = &self.pairs[&number];
        let there = self.pairs[&pair.peer].domain;
        if pair.peer_nic.is_none_or(|at| !self.nics[at].atomics) || !job.addr.is_multiple_of(8) {
            return Err(ffi::IBV_WC_REM_INV_REQ_ERR);
        }
        let old = job.pieces.first().filter(|piece| piece.length == 8).ok_or(ffi::IBV_WC_LOC_LEN_ERR)?;
        let old = self.find(pair.domain, (old.addr, 8, old.lkey), ffi::IBV_ACCESS_LOCAL_WRITE);
        let word = self.find(there, (job.addr, 8, job.rkey), ffi::IBV_ACCESS_REMOTE_ATOMIC);
        let (old, word) = (old.ok_or(ffi::IBV_WC_LOC_PROT_ERR)?, word.ok_or(ffi::IBV_WC_REM_ACCESS_ERR)?);
        // SAFETY: an aligned word inside a region, which is mapped as long as it is registered.
        let before = unsafe { AtomicU64::from_ptr(word.cast()) }.fetch_add(job.add, Ordering::AcqRel);
        place(old, &before.to_ne_bytes());
        Ok(8)
    }

    fn gather(&self, domain: u32, pieces: &[ibv_sge]) -> Result<Vec<u8>, u32> {
        let mut bytes = Vec::new();
        for piece in pieces {
            let at = self.find(domain, (piece.addr, piece.length.into(), piece.lkey), 0);
            let at = at.ok_or(ffi::IBV_WC_LOC_PROT_ERR)?;
            // SAFETY: inside a region, which is mapped as long as it is registered.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(at, piece.length as usize) });
        }
        Ok(bytes)
    }

    /// Where a piece of registered memory lies, if the key is of this domain and allows it.
    fn find(&self, domain: u32, (addr, len, key): (u64, u64, u32), access: u32) -> Option<*mut u8> {
        let region = self.regions.get(&key)?;
        let offset = addr.checked_sub(region.base)?;
        let fits = offset.checked_add(len)? <= region.len;
        let allowed = region.domain == domain && region.access & access == access;
        (fits && allowed).then(|| ptr::with_exposed_provenance_mut(region.at + offset as usize))
    }

    /// Says that a request is done or has failed. Failures are always said, but none overtakes a
    /// completion of its queue pair that is kept back.
    fn finish(&mut self, number: u32, job: &Job, status: u32) {
        let pair = self.pair(number);
        pair.unsignaled += 1;
        if status == ffi::IBV_WC_SUCCESS && job.flags & ffi::IBV_SEND_SIGNALED == 0 {
            return;
        }
        let (nic, queue, frees) = (pair.nic, pair.send, std::mem::take(&mut pair.unsignaled));
        let opcode = match (status, job.opcode) {
            // The other fields of a failed completion are meaningless.
            (1.., _) => u32::MAX,
            (_, ffi::IBV_WR_SEND) => ffi::IBV_WC_SEND,
            (_, ffi::IBV_WR_ATOMIC_FETCH_AND_ADD) => ffi::IBV_WC_FETCH_ADD,
            _ => ffi::IBV_WC_RDMA_WRITE,
        };
        let vendor_err = if status == ffi::IBV_WC_SUCCESS { 0 } else { 0x80 + status };
        let wc = ibv_wc { wr_id: job.wr_id, status, opcode, vendor_err, qp_num: number, ..EMPTY };
        match &mut self.nics[nic].delayed {
            Some(delayed)
                if status == ffi::IBV_WC_SUCCESS
                    || delayed.iter().any(|(_, earlier)| earlier.wc.qp_num == number) =>
            {
                delayed.push((queue, Ready { wc, frees }));
            }
            _ => self.complete(queue, wc, frees),
        }
    }

    /// Leads a queue pair into its error state: all it holds is flushed.
    pub fn fail(&mut self, number: u32) {
        let pair = self.pair(number);
        pair.state = ffi::IBV_QPS_ERR;
        let (jobs, receives) = (std::mem::take(&mut pair.jobs), std::mem::take(&mut pair.receives));
        let (queue, status) = (pair.receive, ffi::IBV_WC_WR_FLUSH_ERR);
        for job in jobs {
            self.finish(number, &job, status);
        }
        for (wr_id, _) in receives {
            let wc = ibv_wc { wr_id, status, opcode: u32::MAX, qp_num: number, ..EMPTY };
            self.complete(queue, wc, 0);
        }
    }

    /// Ends the retries of all requests that wait for an answer.
    pub fn give_up(&mut self) {
        for number in self.pairs.keys().copied().collect::<Vec<_>>() {
            self.run(number);
            let pair = &self.pairs[&number];
            let no_receive = pair.jobs.front().is_none_or(|job| job.not_ready);
            if pair.state != ffi::IBV_QPS_RTS || no_receive {
                continue;
            }
            if let Some(job) = self.pair(number).jobs.pop_front() {
                self.finish(number, &job, ffi::IBV_WC_RETRY_EXC_ERR);
                self.fail(number);
            }
        }
    }

    pub fn pair(&mut self, number: u32) -> &mut Pair {
        self.pairs.get_mut(&number).expect("a queue pair that is there")
    }
}

// SAFETY: all zero is a value of this plain structure.
const EMPTY: ibv_wc = unsafe { std::mem::zeroed() };

/// Writes as a NIC does: whole words where they are aligned, so that other threads may read them
/// meanwhile.
fn place(to: *mut u8, bytes: &[u8]) {
    let (words, rest) = bytes.as_chunks::<8>();
    if !to.addr().is_multiple_of(8) {
        // SAFETY: the region has room for them, and no one holds a reference to it.
        return unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }
    for (at, word) in words.iter().enumerate() {
        // SAFETY: an aligned word of the region.
        unsafe { AtomicU64::from_ptr(to.cast::<u64>().add(at)) }
            .store(u64::from_ne_bytes(*word), Ordering::Release);
    }
    // SAFETY: as above.
    unsafe { ptr::copy_nonoverlapping(rest.as_ptr(), to.add(words.len() * 8), rest.len()) };
}
