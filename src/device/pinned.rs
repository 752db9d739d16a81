//! Host memory that devices reach: streams and threads exchange flags and arguments there.

use std::any::Any;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use super::call;
use super::driver::Context;
use super::range::{DeviceRange, Reach};
use crate::error::DeviceError;
use crate::sync::stream_use::is_shared;

/// `PORTABLE | DEVICEMAP`, the same numbers for allocating and registering: all contexts, with an
/// address for devices.
const FOR_ALL_DEVICES: u32 = 1 | 2;

/// Pinned memory of the host. Clones are the same memory.
///
/// Devices write into it whenever they like: it is read and written by atomic accesses only, never
/// seen as a slice of plain bytes. When it is given back, the driver waits for what its context is
/// doing: so no stream may be waiting for a flag then.
#[derive(Clone, Debug)]
pub struct PinnedMemory {
    pinned: Arc<Pinned>,
    range: DeviceRange,
}

impl PinnedMemory {
    /// New memory, zeroed.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], [`DeviceError::Call`].
    pub fn new(context: &Arc<Context>, len: usize) -> Result<Self, DeviceError> {
        const CALL: &str = "cuMemHostAlloc";
        let (library, device) = (context.library(), context.device());
        let entered = context.enter()?;
        let mut address = std::ptr::null_mut();
        // SAFETY: fills the pointer; freed when the last claim is gone.
        let code =
            unsafe { (library.functions.cuMemHostAlloc)(&raw mut address, len.max(1), FOR_ALL_DEVICES) };
        library.check_memory(CALL, device, len as u64, code)?;
        let nothing = DeviceError::OutOfMemory { device, call: CALL, bytes: len as u64 };
        let address = NonNull::new(address.cast::<u8>()).ok_or(nothing)?;
        // SAFETY: just allocated with this size; no one else knows it.
        unsafe { address.write_bytes(0, len) };
        drop(entered);
        Self::of(Pinned { context: context.clone(), address, len, owner: Owner::Driver })
    }

    /// Pins existing memory, such as a shared segment.
    ///
    /// # Safety
    /// While `keep` lives, `len` bytes at `address` are mapped. While a device or a holder of the
    /// returned value may write the bytes, references to them are references to atomics only.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`], [`DeviceError::OutOfMemory`], [`DeviceError::Call`].
    pub unsafe fn register(
        context: &Arc<Context>,
        address: NonNull<u8>,
        len: usize,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, DeviceError> {
        context.require(context.facts().host_register, "pinning of memory that is there")?;
        let (library, device) = (context.library(), context.device());
        let entered = context.enter()?;
        // SAFETY: mapped, by the contract; unregistered before `keep` is dropped.
        let code = unsafe {
            (library.functions.cuMemHostRegister_v2)(address.as_ptr().cast(), len, FOR_ALL_DEVICES)
        };
        library.check_memory("cuMemHostRegister", device, len as u64, code)?;
        drop(entered);
        Self::of(Pinned { context: context.clone(), address, len, owner: Owner::Caller(keep) })
    }

    fn of(pinned: Pinned) -> Result<Self, DeviceError> {
        let mut known = 0;
        {
            let Pinned { context, address, .. } = &pinned;
            let (library, device) = (context.library(), Some(context.device()));
            let _entered = context.enter()?;
            // SAFETY: memory that was pinned for devices; fills the number.
            unsafe {
                let address = address.as_ptr().cast();
                call!(library, device, cuMemHostGetDevicePointer_v2(&raw mut known, address, 0))
            }?;
        }
        let pinned = Arc::new(pinned);
        let range = DeviceRange::new(pinned.clone(), Reach::All, known, pinned.len as u64);
        Ok(PinnedMemory { pinned, range })
    }

    /// The same memory as devices see it.
    pub fn range(&self) -> &DeviceRange {
        &self.range
    }

    /// Whether there are other claims on it: clones and ranges of it, and streams that use it and
    /// have not been found done.
    pub fn is_claimed(&self) -> bool {
        // Two claims are this value's own: the memory, and the range as devices see it.
        is_shared(&self.pinned, 2)
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.pinned.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The word at `offset`, for the host. An acquiring load of the word makes the stream's earlier
    /// writes visible.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`], [`DeviceError::Misaligned`].
    pub fn word(&self, offset: usize) -> Result<&AtomicU64, DeviceError> {
        let address = self.bytes(offset, 8)?.as_ptr().cast::<AtomicU64>();
        if !address.is_aligned() {
            let value = address.addr() as u64;
            return Err(DeviceError::Misaligned { what: "the address of a word", value, align: 8 });
        }
        // SAFETY: eight aligned bytes inside the memory, which stays as long as `self`; accessed as
        // atomics only.
        Ok(unsafe { &*address })
    }

    /// Writes bytes, in no order: eight at a time where the memory is aligned, else one by one.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let (front, words, back) = aligned(self.bytes(offset, bytes.len())?);
        let (first, rest) = bytes.split_at(front.len());
        let (middle, last) = rest.as_chunks::<8>();
        // Atomics, since a device may read the bytes meanwhile, which of plain stores would be a
        // race. The order comes from the launch, or the word, that lets the device read them.
        let store = |(target, &byte): (&AtomicU8, &u8)| target.store(byte, Ordering::Relaxed);
        front.iter().zip(first).chain(back.iter().zip(last)).for_each(store);
        for (target, &word) in words.iter().zip(middle) {
            target.store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Reads bytes, in no order, as [`write`](Self::write) writes them.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let (front, words, back) = aligned(self.bytes(offset, bytes.len())?);
        let (first, rest) = bytes.split_at_mut(front.len());
        let (middle, last) = rest.as_chunks_mut::<8>();
        // Behind an acquiring load of the word by which the device says that it has written.
        let load = |(byte, source): (&mut u8, &AtomicU8)| *byte = source.load(Ordering::Relaxed);
        first.iter_mut().zip(front).chain(last.iter_mut().zip(back)).for_each(load);
        for (word, source) in middle.iter_mut().zip(words) {
            *word = source.load(Ordering::Relaxed).to_ne_bytes();
        }
        Ok(())
    }

    /// Writes words of 32 bits, one by one, in no order.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`], [`DeviceError::Misaligned`].
    pub fn write_words(&self, offset: usize, words: &[u32]) -> Result<(), DeviceError> {
        let targets = self.words(offset, words.len())?;
        // Relaxed: a device sees the words by an operation of its stream, which orders them.
        targets.iter().zip(words).for_each(|(target, &word)| target.store(word, Ordering::Relaxed));
        Ok(())
    }

    /// Reads words of 32 bits, one by one, in no order.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`], [`DeviceError::Misaligned`].
    pub fn read_words(&self, offset: usize, words: &mut [u32]) -> Result<(), DeviceError> {
        let sources = self.words(offset, words.len())?;
        // Relaxed: the caller has awaited the work that wrote them.
        words.iter_mut().zip(sources).for_each(|(word, source)| *word = source.load(Ordering::Relaxed));
        Ok(())
    }

    fn words(&self, offset: usize, count: usize) -> Result<&[AtomicU32], DeviceError> {
        let bytes = self.bytes(offset, count.saturating_mul(4))?;
        let address = bytes.as_ptr().cast::<AtomicU32>();
        if !address.is_aligned() {
            let value = address.addr() as u64;
            return Err(DeviceError::Misaligned { what: "the address of a word", value, align: 4 });
        }
        // SAFETY: aligned, and as many bytes as these words have; accessed as atomics only.
        Ok(unsafe { std::slice::from_raw_parts(address, count) })
    }

    fn bytes(&self, offset: usize, len: usize) -> Result<&[AtomicU8], DeviceError> {
        self.range.span(offset as u64, len as u64)?;
        // SAFETY: inside the memory, which stays as long as `self`; accessed as atomics only.
        Ok(unsafe { std::slice::from_raw_parts(self.pinned.address.as_ptr().add(offset).cast(), len) })
    }
}

/// The aligned words of 64 bits amid these bytes, with what lies in front of them and behind.
fn aligned(bytes: &[AtomicU8]) -> (&[AtomicU8], &[AtomicU64], &[AtomicU8]) {
    // SAFETY: any eight aligned bytes are a word, and all are accessed as atomics only.
    unsafe { bytes.align_to() }
}

/// Owner that frees the memory.
enum Owner {
    Driver,
    Caller(#[expect(dead_code, reason = "held, not read")] Arc<dyn Any + Send + Sync>),
}

struct Pinned {
    context: Arc<Context>,
    address: NonNull<u8>,
    len: usize,
    owner: Owner,
}

// SAFETY: memory that is accessed by atomics only, from any thread.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Drop for Pinned {
    fn drop(&mut self) {
        let functions = &self.context.library().functions;
        let _entered = self.context.enter();
        let address: *mut c_void = self.address.as_ptr().cast();
        // SAFETY: allocated or registered once; streams that use it hold this value until a check
        // finds them done.
        let _ = unsafe {
            match self.owner {
                Owner::Driver => (functions.cuMemFreeHost)(address),
                Owner::Caller(_) => (functions.cuMemHostUnregister)(address),
            }
        };
    }
}

impl std::fmt::Debug for Pinned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pinned")
            .field("address", &self.address)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
