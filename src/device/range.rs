//! Addresses that a device can use, as types: a checked address needs no check when it is posted.
//!
//! ```text
//!   DeviceRange --span(offset, len)--> ByteSpan      from_raw(a caller's address) --driver: owner?--> DeviceRange
//!               --word(offset)-------> Word                                         `-- refused with a reason
//! ```
//!
//! A pointer of another library is the one argument that a kernel would use unchecked. So before it
//! becomes a [`DeviceRange`], the driver is asked for its owner. Host memory that is not pinned,
//! and memory of another device, are refused with a reason; a kernel would fault, and with it the
//! whole context.

use std::any::Any;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;

use super::call;
use super::driver::Context;
use crate::error::DeviceError;

/// Keeps memory where it is.
pub(super) type Claim = Arc<dyn Any + Send + Sync>;

/// Which devices may use an address.
#[derive(Clone, Debug)]
pub(super) enum Reach {
    All,
    Devices(Arc<[u32]>),
}

/// How long a range is.
#[derive(Clone)]
enum Length {
    Fixed(u64),
    /// As long as memory is mapped: it grows at its end.
    Mapped(Arc<AtomicU64>),
}

/// A range of addresses, and its claim on the memory behind it. Clones are the same memory.
#[derive(Clone)]
pub struct DeviceRange {
    keep: Claim,
    reach: Reach,
    address: u64,
    len: Length,
}

impl DeviceRange {
    pub(super) fn new(keep: Claim, reach: Reach, address: u64, len: u64) -> Self {
        DeviceRange { keep, reach, address, len: Length::Fixed(len) }
    }

    /// One whose length another thread raises, once memory is mapped there.
    pub(super) fn growing(keep: Claim, reach: Reach, address: u64, len: Arc<AtomicU64>) -> Self {
        DeviceRange { keep, reach, address, len: Length::Mapped(len) }
    }

    /// Memory of another owner, such as a caller's tensor: `len` bytes at a device's `address`,
    /// which `devices` may reach. `keep` is dropped when no stream needs the memory any longer.
    ///
    /// # Safety
    /// While `keep` lives, the memory is there, and those devices may read and write it.
    pub unsafe fn of_caller(
        address: u64,
        len: u64,
        devices: &[u32],
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        DeviceRange::new(keep, Reach::Devices(devices.into()), address, len)
    }

    /// Its first address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size in bytes. Memory that [grows](super::GrowingRange) may have more next time.
    pub fn len(&self) -> u64 {
        match &self.len {
            Length::Fixed(len) => *len,
            // Acquire: pairs with the store behind the mapping, so the driver knows these addresses
            // when a call of this thread names them.
            Length::Mapped(len) => len.load(Ordering::Acquire),
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A part of it, with a claim of its own.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    pub fn part(&self, offset: u64, len: u64) -> Result<DeviceRange, DeviceError> {
        let (address, len) = (self.inside(offset, len)?, Length::Fixed(len));
        Ok(DeviceRange { address, len, keep: Arc::clone(&self.keep), reach: self.reach.clone() })
    }

    /// A part of the range of an owner, with a claim on the owner in place of the memory.
    pub(crate) fn part_of<T: Any + Send + Sync>(
        owner: &Arc<T>,
        range: fn(&T) -> &DeviceRange,
        (offset, len): (u64, u64),
    ) -> Result<DeviceRange, DeviceError> {
        let keep: Claim = Arc::<T>::clone(owner);
        Ok(DeviceRange { keep, ..range(owner).part(offset, len)? })
    }

    /// `len` bytes from `offset` on.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    #[doc(hidden)]
    pub fn span(&self, offset: u64, len: u64) -> Result<ByteSpan<'_>, DeviceError> {
        Ok(ByteSpan { range: self, address: self.inside(offset, len)?, len })
    }

    /// The word at `offset`.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`], [`DeviceError::Misaligned`].
    #[doc(hidden)]
    pub fn word<T: Value>(&self, offset: u64) -> Result<Word<'_, T>, DeviceError> {
        let align = size_of::<T>() as u64;
        let address = self.inside(offset, align)?;
        if !address.is_multiple_of(align) {
            return Err(DeviceError::Misaligned { what: "the address of a word", value: address, align });
        }
        Ok(Word { range: self, address, value: PhantomData })
    }

    /// The address of `len` bytes at `offset`, if they lie in the range.
    fn inside(&self, offset: u64, len: u64) -> Result<u64, DeviceError> {
        let size = self.len();
        if offset.checked_add(len).is_some_and(|end| end <= size) {
            Ok(self.address + offset)
        } else {
            Err(DeviceError::OutOfRange { offset, len, size })
        }
    }

    pub(super) fn keep(&self) -> &Claim {
        &self.keep
    }

    /// Refuses a device that has no access.
    pub(crate) fn check_reach(&self, device: u32) -> Result<(), DeviceError> {
        match &self.reach {
            Reach::Devices(devices) if !devices.contains(&device) => {
                Err(DeviceError::NoAccess { device, address: self.address })
            }
            _ => Ok(()),
        }
    }
}

impl std::fmt::Debug for DeviceRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let DeviceRange { keep: _, reach, address, len: _ } = self;
        let address = format_args!("{address:#x}");
        f.debug_struct("Range")
            .field("address", &address)
            .field("len", &self.len())
            .field("reach", reach)
            .finish()
    }
}

/// Bytes inside a range.
#[derive(Clone, Copy, Debug)]
pub struct ByteSpan<'a> {
    pub(super) range: &'a DeviceRange,
    pub(super) address: u64,
    pub(super) len: u64,
}

/// An aligned word of 32 or 64 bits inside a range: where a flag lives.
#[derive(Debug)]
pub struct Word<'a, T> {
    pub(super) range: &'a DeviceRange,
    pub(super) address: u64,
    value: PhantomData<T>,
}

impl<T> Clone for Word<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Word<'_, T> {}

impl<T> Word<'_, T> {
    /// Its address, for kernels of the caller's.
    pub fn address(&self) -> u64 {
        self.address
    }
}

/// Type that a memory operation writes or waits for: `u32` or `u64`.
pub trait Value: Copy + Into<u64> + sealed::Sealed {}

impl Value for u32 {}
impl Value for u64 {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for u32 {}
    impl Sealed for u64 {}
}

/// Claims on memory that running work needs, each once.
#[derive(Default)]
pub(super) struct Claims(Vec<Claim>);

impl Claims {
    pub fn add(&mut self, keep: &Claim) {
        // Of pointers to trait objects only the address tells.
        let known = |held: &Claim| Arc::as_ptr(held).cast::<()>() == Arc::as_ptr(keep).cast::<()>();
        if !self.0.iter().rev().any(known) {
            self.0.push(keep.clone());
        }
    }

    pub fn add_all(&mut self, others: &Claims) {
        others.0.iter().for_each(|keep| self.add(keep));
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// All of them; none are left.
    pub fn take(&mut self) -> Claims {
        Claims(std::mem::take(&mut self.0))
    }

    /// Takes over the list of others, which has none left, unless it has one.
    pub fn reuse(&mut self, empty: Claims) {
        if self.0.capacity() == 0 {
            *self = empty;
        }
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The memory stays for ever.
    pub fn leak(&mut self) {
        self.0.drain(..).for_each(std::mem::forget);
    }
}

impl std::fmt::Debug for Claims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} claims", self.0.len())
    }
}

/// Kinds of memory, as the driver numbers them; 0 is none that it knows.
const HOST: u32 = 1;
const DEVICE: u32 = 2;

impl DeviceRange {
    /// Memory of a caller for kernels and copies of this device: the device's own, or pinned host
    /// memory. `what` is its name in errors. Streams keep no claim on it.
    ///
    /// # Safety
    /// It stays there until everything that is enqueued with the range is done.
    ///
    /// # Errors
    /// [`DeviceError::UnknownMemory`], [`DeviceError::OtherMemory`], [`DeviceError::Call`].
    pub unsafe fn from_raw(
        context: &Arc<Context>,
        what: &'static str,
        address: u64,
        len: u64,
    ) -> Result<DeviceRange, DeviceError> {
        let device = context.device();
        let unknown = DeviceError::UnknownMemory { what, address, device };
        if len > 0 {
            let last = address.checked_add(len - 1).ok_or_else(|| unknown.clone())?;
            for byte in [address, last] {
                match context.owner_of_memory(byte)? {
                    (HOST, _) => {}
                    (DEVICE, found) if found == device => {}
                    (DEVICE, found) => {
                        return Err(DeviceError::OtherMemory { what, address, found, expected: device });
                    }
                    _ => return Err(unknown),
                }
            }
        }
        // Streams hold each claim once. All foreign memory shares one claim, which keeps nothing
        // alive.
        static NOTHING: OnceLock<Claim> = OnceLock::new();
        let keep = NOTHING.get_or_init(|| Arc::new(()));
        Ok(DeviceRange::new(Arc::clone(keep), Reach::Devices([device].into()), address, len))
    }
}

impl Context {
    /// The kind of memory at an address, and the device it is of.
    fn owner_of_memory(&self, address: u64) -> Result<(u32, u32), DeviceError> {
        use sys::CUpointer_attribute_enum as Attribute;
        let mut which =
            [Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL];
        let (mut kind, mut device): (u32, c_int) = (0, -1);
        let mut answers = [(&raw mut kind).cast(), (&raw mut device).cast()];
        let _entered = self.enter()?;
        // SAFETY: fills as many numbers as requested, of these types; it reads no byte of the
        // memory.
        unsafe {
            let (which, answers) = (which.as_mut_ptr(), answers.as_mut_ptr());
            call!(self.library(), Some(self.device()), cuPointerGetAttributes(2, which, answers, address))
        }?;
        Ok((kind, u32::try_from(device).unwrap_or(u32::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(len: u64, devices: &[u32]) -> DeviceRange {
        // SAFETY: no stream ever sees it.
        unsafe { DeviceRange::of_caller(0x1000, len, devices, Arc::new(())) }
    }

    #[test]
    fn spans_and_words_lie_inside_their_range() {
        let range = range(64, &[0]);
        assert_eq!(range.span(60, 4).unwrap().address, 0x103c);
        assert_eq!(range.span(64, 0).unwrap().len, 0);
        for (offset, len) in [(61, 4), (65, 0), (u64::MAX, 2)] {
            let expected = DeviceError::OutOfRange { offset, len, size: 64 };
            assert_eq!(range.span(offset, len).unwrap_err(), expected);
            assert_eq!(range.part(offset, len).unwrap_err(), expected);
        }
        let part = range.part(32, 16).unwrap();
        assert_eq!((part.address(), part.len()), (0x1020, 16));
        assert_eq!(part.word::<u64>(8).unwrap().address, 0x1028);
        assert!(matches!(part.word::<u64>(12), Err(DeviceError::OutOfRange { .. })));
        assert!(matches!(part.word::<u64>(4), Err(DeviceError::Misaligned { value: 0x1024, align: 8, .. })));
        assert_eq!(part.word::<u32>(4).unwrap().address, 0x1024);
    }

    #[test]
    fn a_device_without_access_is_refused() {
        let range = range(64, &[0, 2]);
        assert_eq!(range.check_reach(2), Ok(()));
        assert_eq!(range.check_reach(1), Err(DeviceError::NoAccess { device: 1, address: 0x1000 }));
    }

    #[test]
    fn a_claim_is_held_once_and_until_it_is_cleared() {
        let keep: Claim = Arc::new(7_u32);
        let mut held = Claims::default();
        held.add(&keep);
        held.add(&keep.clone());
        assert_eq!((held.len(), Arc::strong_count(&keep)), (1, 2));
        held.clear();
        assert_eq!(Arc::strong_count(&keep), 1);
    }
}
