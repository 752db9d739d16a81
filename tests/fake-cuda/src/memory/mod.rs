//! Memory: what is behind an address, and moving bytes with every byte of the range checked.
//!
//! ```text
//! cuMemCreate ──► Backing (a memfd, poisoned) ◄── descriptor ◄── another process
//!                     ▲
//! cuMemAddressReserve │ cuMemMap       cuMemSetAccess
//! Map: [reserved .....[region of the backing: devices 0 rw, 3 r] .....]
//! ```

mod backing;
mod map;
mod pinned;
mod place;
mod plain;
mod touch;
mod virt;

pub use backing::{Backing, free};
pub use map::{Kind, MAP, Region, device_of};
pub use pinned::{pin, register, unpin, unregister};
pub use place::{Place, place};
pub use plain::{allocate, release};
pub use touch::Engine;
pub use virt::{ALLOCATIONS, Access, address_free, address_reserve, create, grant, granted, map_at, unmap};
