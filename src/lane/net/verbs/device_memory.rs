//! GPU memory, registered with a NIC: by a descriptor where there is one, else by its address.

use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::device::{Device, Registered, Source};
use super::keys::{LocalRegion, RegionKeys};
use super::{Access, MemoryRegion};
use crate::device::{Context, DeviceRange, DmaBuf};
use crate::error::VerbsError;
use crate::lane::net::{DeviceAddress, DeviceMemory, NoDmaBuf, NoGpuDirect, Registration};

impl Device {
    /// Registers memory of devices under a number. Returns this rank's part, for
    /// [`say`](super::keys::say).
    ///
    /// # Errors
    /// [`NoGpuDirect::Card`].
    pub fn register_device(
        &self,
        number: u32,
        memory: &DeviceMemory,
        relaxed: bool,
    ) -> Result<(RegionKeys, Registration), NoGpuDirect> {
        let DeviceMemory { context, own, neighbours, rank, strict } = memory;
        let (len, flags) = (own.len(), Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let rows = if relaxed { flags | Access::RELAXED } else { flags };
        let (mut pieces, mut how) = (Vec::new(), Registration::DmaBuf);
        for (offset, len, access) in [(0, *strict, flags), (*strict, len.saturating_sub(*strict), rows)] {
            if len > 0 {
                let (piece, registered) = self.register_range(context, own, (offset, len), access)?;
                pieces.push(piece);
                how = registered;
            }
        }
        let mut others = Vec::new();
        for (member, range) in neighbours {
            let whole = (0, range.len());
            let (piece, registered) = self.register_range(context, range, whole, Access::empty())?;
            others.push((*member, piece));
            // All are reported with the weakest registration of one.
            how = if registered == Registration::DmaBuf { how } else { registered };
        }
        let own_pieces = LocalRegion { pieces };
        let said = own_pieces.said();
        let keep: Vec<DeviceRange> =
            std::iter::once(own).chain(neighbours.iter().map(|(_, range)| range)).cloned().collect();
        self.keep(number, Registered::new(*rank, own_pieces, others, Arc::new(keep)));
        Ok((said, how))
    }

    fn register_range(
        &self,
        context: &Context,
        range: &DeviceRange,
        (offset, len): (u64, u64),
        access: Access,
    ) -> Result<(MemoryRegion, Registration), NoGpuDirect> {
        let address = range.address() + offset;
        let dma_buf = match range.dma_buf(context) {
            Err(_) => NoDmaBuf::Driver,
            Ok(DmaBuf { descriptor, offset: first, .. }) => {
                let (fd, at) = (descriptor.as_fd(), first + offset);
                // SAFETY: the range is kept with the registration; no processor reads or writes it,
                // and its device does under the schedule's write grants.
                let region = unsafe {
                    MemoryRegion::register_dmabuf(&self.domain, fd, at, len as usize, address, access)
                };
                match region {
                    Ok(region) => return Ok((region, Registration::DmaBuf)),
                    Err(VerbsError::Register { errno, .. }) => NoDmaBuf::Card { errno },
                    Err(_) => NoDmaBuf::Library,
                }
            }
        };
        let at = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        let refused = |errno| NoGpuDirect::Card { dma_buf, errno };
        let at = NonNull::new(at).ok_or(refused(rustix::io::Errno::FAULT.raw_os_error()))?;
        // SAFETY: as above; the kernel refuses an address that it does not know.
        match unsafe { MemoryRegion::register(&self.domain, at, len as usize, access) } {
            Ok(region) => Ok((region, Registration::Address(dma_buf))),
            Err(VerbsError::Register { errno, .. }) => Err(refused(errno)),
            Err(_) => Err(refused(rustix::io::Errno::NOSYS.raw_os_error())),
        }
    }

    /// `len` bytes of a device's memory as this NIC may read them, if they are registered.
    pub fn device_source(&self, from: DeviceAddress, len: u64) -> Option<Source> {
        self.piece_of(from.region, from.member, from.offset, len)
    }
}
