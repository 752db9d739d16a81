//! The driver's knowledge of an address.

use std::ffi::{c_int, c_uint, c_void};

use super::call;
use super::pointers::{In, Out};
use crate::code::{Code, Result};
use crate::driver::{self, settings};
use crate::memory::{Kind, MAP, Region};

/// Writes one attribute of the address: nothing is known of it where `region` is none.
fn attribute(out: Out<c_void>, attribute: c_uint, at: u64, region: Option<(u64, &Region)>) -> Result<()> {
    let owner = region.and_then(|(_, region)| region.kind.backing());
    let is_host = region.is_some() && owner.is_none();
    match attribute {
        // The context of the owner, if it is active here.
        1 => out.cast().put(owner.and_then(|owner| driver::active(owner.device)).unwrap_or(0)),
        2 => out.cast().put(if owner.is_some() { 2 } else { c_uint::from(is_host) }),
        3 => out.cast().put(if region.is_some() { at } else { 0 }),
        4 => out.cast().put(if is_host { at } else { 0 }),
        6 => out.cast().put(c_uint::from(false)),
        7 | 11 => out.cast().put(region.map_or(0, |(start, _)| start)),
        8 => out.cast().put(false),
        9 => out.cast().put(owner.map_or(-2, |owner| owner.device as c_int)),
        12 => out.cast().put(region.map_or(0, |(_, region)| region.bytes as usize)),
        13 => out.cast().put(region.is_some()),
        14 => out.cast().put(u64::from(owner.is_some_and(|owner| owner.exportable))),
        15 => out.cast().put(region.is_some_and(|(_, region)| region.kind.is_rdma())),
        16 => out.cast().put(if region.is_some() { 3u32 } else { 0 }),
        _ => Err(Code::NOT_SUPPORTED),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuPointerGetAttribute(out: Out<c_void>, which: c_uint, at: u64) -> c_int {
    call(|| {
        settings()?;
        let map = MAP.read().unwrap();
        let region = map.at(at).ok_or(Code::INVALID_VALUE)?;
        attribute(out, which, at, Some(region))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    which: In<c_uint>,
    outs: In<Out<c_void>>,
    at: u64,
) -> c_int {
    call(|| {
        settings()?;
        let map = MAP.read().unwrap();
        let (which, outs) = (which.all(count as usize)?, outs.all(count as usize)?);
        which.into_iter().zip(outs).try_for_each(|(which, out)| attribute(out, which, at, map.at(at)))
    })
}

/// `SYNC_MEMOPS` alone can be set; it changes nothing that host code could see here.
#[unsafe(no_mangle)]
pub extern "C" fn cuPointerSetAttribute(value: In<c_uint>, which: c_uint, at: u64) -> c_int {
    call(|| {
        settings()?;
        value.get()?;
        let known =
            MAP.read().unwrap().at(at).is_some_and(|(_, region)| !matches!(region.kind, Kind::Registered));
        if which == 6 && known { Ok(()) } else { Err(Code::INVALID_VALUE) }
    })
}
