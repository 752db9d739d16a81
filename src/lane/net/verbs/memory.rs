//! Protection domains, registered memory, and the pieces of it that work requests name.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use super::Context;
use super::ffi::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_RELAXED_ORDERING, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_WRITE,
    ibv_mr, ibv_pd, ibv_sge,
};
use super::library::{check_object, trace_failure};
use crate::error::{Error, VerbsError};
use crate::memory::{PeerMapping, Segment};

/// Which queue pairs may use which memory.
#[derive(Debug)]
pub struct ProtectionDomain {
    raw: NonNull<ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: a handle to an object of the kernel, locked there; it belongs to no thread.
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    /// A new domain of a NIC.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn create(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the context is open.
        let raw = check_object(unsafe { (context.functions().alloc_pd)(context.raw()) });
        let raw = raw.map_err(|errno| context.failed("ibv_alloc_pd", errno))?;
        Ok(Arc::new(ProtectionDomain { raw, context: Arc::clone(context) }))
    }

    /// The NIC.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn raw(&self) -> *mut ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: regions and queue pairs of this domain kept it alive, so none is left.
        let answer = unsafe { (self.context.functions().dealloc_pd)(self.raw.as_ptr()) };
        trace_failure(self.context.name(), "ibv_dealloc_pd", answer);
    }
}

bitflags::bitflags! {
    /// Permitted access to registered memory. Reads by the NIC itself are always allowed, reads by
    /// others never.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Access: u32 {
        /// The NIC may write received messages of its own queue pairs.
        const LOCAL_WRITE = IBV_ACCESS_LOCAL_WRITE;
        /// Others may write; asks for `LOCAL_WRITE`.
        const REMOTE_WRITE = IBV_ACCESS_REMOTE_WRITE;
        /// Others may add; asks for `LOCAL_WRITE`.
        const REMOTE_ATOMIC = IBV_ACCESS_REMOTE_ATOMIC;
        /// Reads and writes may pass each other between the NIC and memory. For data; never for
        /// flags.
        const RELAXED = IBV_ACCESS_RELAXED_ORDERING;
    }
}

/// Memory that a NIC accesses directly.
#[derive(Debug)]
pub struct MemoryRegion {
    raw: NonNull<ibv_mr>,
    base: u64,
    len: u64,
    lkey: u32,
    rkey: u32,
    domain: Arc<ProtectionDomain>,
}

// SAFETY: a handle to an object of the kernel, locked there; it belongs to no thread.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

/// A piece of registered memory, as a work request names it: address, length, local key.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Sge(pub(super) ibv_sge);

impl Sge {
    /// Its bytes.
    pub fn len(&self) -> u32 {
        self.0.length
    }
}

/// A place in a peer's registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Address, as the peer's NIC knows it.
    pub addr: u64,
    /// The key of the region.
    pub rkey: u32,
}

impl MemoryRegion {
    /// Whether this libibverbs knows [`Access::RELAXED`].
    pub fn can_relax(context: &Context) -> bool {
        context.functions().reg_mr_iova2.is_some()
    }

    /// Registers memory of the processor. Its address for work requests, here and remote, is its
    /// ordinary one.
    ///
    /// # Safety
    /// The memory is mapped until the region is dropped. From now on NICs may read it, and write it
    /// as `access` allows, at any time: no reference exists to bytes that they write, and bytes
    /// that they read are not borrowed mutably while a work request names them.
    ///
    /// # Errors
    /// [`VerbsError::Register`]; [`VerbsError::TooOld`] if `access` is relaxed and the library does
    /// not support it.
    pub unsafe fn register(
        domain: &Arc<ProtectionDomain>,
        at: NonNull<u8>,
        len: usize,
        access: Access,
    ) -> Result<Self, VerbsError> {
        let functions = domain.context.functions();
        let (addr, base) = (at.as_ptr().cast(), at.as_ptr().expose_provenance() as u64);
        let raw = if access.contains(Access::RELAXED) {
            let register = functions.reg_mr_iova2.ok_or(VerbsError::TooOld {
                feature: "relaxed ordering",
                symbol: "ibv_reg_mr_iova2",
                since: "28",
            })?;
            // SAFETY: the domain lives; the memory is mapped, as the caller promises.
            unsafe { register(domain.raw(), addr, len, base, access.bits()) }
        } else {
            // SAFETY: as above.
            unsafe { (functions.reg_mr)(domain.raw(), addr, len, access.bits() as i32) }
        };
        Self::of(domain, raw, base, len as u64)
    }

    /// Registers `len` bytes at `offset` of a dma-buf: memory of a device, such as a GPU. `iova` is
    /// its address for work requests, here and remote; any number with the same offset within a
    /// page.
    ///
    /// # Safety
    /// As [`MemoryRegion::register`], wherever the same memory is mapped.
    ///
    /// # Errors
    /// [`VerbsError::Register`]; [`VerbsError::TooOld`].
    pub unsafe fn register_dmabuf(
        domain: &Arc<ProtectionDomain>,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<Self, VerbsError> {
        let register = domain.context.functions().reg_dmabuf_mr.ok_or(VerbsError::TooOld {
            feature: "registering memory of a device",
            symbol: "ibv_reg_dmabuf_mr",
            since: "34",
        })?;
        // SAFETY: the domain lives; the kernel holds the buffer as long as it is registered.
        let raw = unsafe { register(domain.raw(), offset, len, iova, fd.as_raw_fd(), access.bits() as i32) };
        Self::of(domain, raw, iova, len as u64)
    }

    fn of(domain: &Arc<ProtectionDomain>, raw: *mut ibv_mr, base: u64, len: u64) -> Result<Self, VerbsError> {
        let nic = || domain.context.name().to_owned();
        let raw =
            check_object(raw).map_err(|errno| VerbsError::Register { nic: nic(), bytes: len, errno })?;
        // SAFETY: the call just returned it.
        let (lkey, rkey) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        Ok(MemoryRegion { raw, base, len, lkey, rkey, domain: Arc::clone(domain) })
    }

    /// The address of its first byte, for work requests.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Its size, in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The key for this rank's own work requests.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The key to give to peers.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// A piece of it.
    ///
    /// # Errors
    /// [`VerbsError::OutOfRegion`].
    pub fn sge(&self, offset: u64, len: u32) -> Result<Sge, VerbsError> {
        match offset.checked_add(u64::from(len)) {
            Some(end) if end <= self.len => {
                Ok(Sge(ibv_sge { addr: self.base + offset, length: len, lkey: self.lkey }))
            }
            _ => Err(VerbsError::OutOfRegion { offset, len: len.into(), size: self.len }),
        }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        let context = &self.domain.context;
        // SAFETY: registered by `of`, and dropped once.
        let answer = unsafe { (context.functions().dereg_mr)(self.raw.as_ptr()) };
        trace_failure(context.name(), "ibv_dereg_mr", answer);
    }
}

/// Memory of this process that is registered with a NIC.
#[derive(Debug)]
pub struct Pinned {
    pub region: MemoryRegion,
    pub at: NonNull<u8>,
    _mapped: Arc<PeerMapping>,
}

// SAFETY: the pointer leads into a mapping that is kept with it; it belongs to no thread.
unsafe impl Send for Pinned {}
// SAFETY: as above. Each part of the memory has one user, who says how it is reached.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// So many zeros.
    ///
    /// # Errors
    /// [`MemoryError`](crate::error::MemoryError), [`VerbsError::Register`].
    pub fn new(domain: &Arc<ProtectionDomain>, name: &str, len: u64, access: Access) -> Result<Self, Error> {
        let segment = Segment::create(name, len)?;
        let mapped = Arc::new(PeerMapping::new(&[Some(&segment)])?);
        let at = mapped.at(0, 0, len)?;
        // SAFETY: `_mapped` is dropped after the region. Peers write words only, as atomics. The
        // NIC writes old values, which are never read, and receives, which are read after their
        // completions only.
        let region = unsafe { MemoryRegion::register(domain, at, len as usize, access) }?;
        Ok(Pinned { region, at, _mapped: mapped })
    }
}
