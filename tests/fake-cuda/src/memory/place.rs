//! What an address stands for: the same bytes have the same place, wherever they are mapped.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Mutex;

use super::map::{Kind, MAP};

/// A byte of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Device and inode of its file; zeros for memory without a file, whose addresses are unique.
    pub memory: (u64, u64),
    pub offset: u64,
}

/// Registered memory that a file is behind, by its first address.
static FILES: Mutex<BTreeMap<u64, Place>> = Mutex::new(BTreeMap::new());

const NOWHERE: (u64, u64) = (0, 0);

/// The place of an address.
pub fn place(at: u64) -> Place {
    let map = MAP.read().unwrap();
    let Some((start, region)) = map.at(at) else { return Place { memory: NOWHERE, offset: at } };
    match &region.kind {
        Kind::Mapped { backing, .. } | Kind::Device(backing) => {
            Place { memory: backing.file, offset: at - start }
        }
        Kind::Registered => {
            FILES.lock().unwrap().get(&start).map_or(Place { memory: NOWHERE, offset: at }, |first| Place {
                memory: first.memory,
                offset: first.offset + (at - start),
            })
        }
        Kind::Pinned => Place { memory: NOWHERE, offset: at },
    }
}

/// Records the file behind memory that is being registered.
pub fn remember(start: u64) {
    if let Some(place) = behind(start) {
        FILES.lock().unwrap().insert(start, place);
    }
}

/// Forgets it.
pub fn forget(start: u64) {
    FILES.lock().unwrap().remove(&start);
}

/// The file behind an address, as the kernel lists it.
fn behind(at: u64) -> Option<Place> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        // first-last, permissions, offset, major:minor, inode
        let mut words = line.split_ascii_whitespace();
        let (first, last) = words.next()?.split_once('-')?;
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let (first, last) = (hex(first)?, hex(last)?);
        if !(first..last).contains(&at) {
            return None;
        }
        let offset = hex(words.nth(1)?)?;
        let (major, minor) = words.next()?.split_once(':')?;
        let device = libc::makedev(hex(major)? as u32, hex(minor)? as u32);
        let inode: u64 = words.next()?.parse().ok()?;
        (inode != 0).then_some(Place { memory: (device, inode), offset: offset + (at - first) })
    })
}
