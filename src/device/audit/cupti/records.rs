//! Records, as they lie in a buffer and as we know them.

use std::ffi::CStr;

use super::ffi;

/// An activity of the device. Times are nanoseconds of one clock, both 0 where CUPTI does not know
/// them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activity {
    /// Its kind.
    pub did: ActivityKind,
    /// When it began.
    pub start: u64,
    /// When it was done.
    pub end: u64,
}

/// Kinds of activities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ActivityKind {
    /// A kernel, of any launcher.
    Kernel {
        /// As the module has it.
        name: String,
    },
    /// It copied. CUPTI calls that a copy also where multiprocessors do it.
    Copy {
        /// How much; of a batch perhaps all copies together.
        bytes: u64,
        /// Where the work was handed in.
        channel: Channel,
    },
}

/// Which kind of queue of the hardware took the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// A copy within a device. SMs may make it, or the copy engine next to them.
    Compute,
    /// That of a copy engine.
    CopyEngine,
    /// Any other, or unknown, by CUPTI's number.
    Other(u32),
}

/// The unreadable part: the record extends beyond the filled bytes.
#[derive(Debug, PartialEq, Eq)]
pub struct Cut;

/// Reads the record at the beginning; none if it is of a kind that was not asked for.
///
/// # Safety
/// The bytes are a record as CUPTI writes it, and the name that it points to is still there.
pub unsafe fn read(bytes: &[u8]) -> Result<Option<Activity>, Cut> {
    let copy = |bytes, channel| ActivityKind::Copy { bytes, channel: Channel::of(channel) };
    // SAFETY: any bits are a number.
    let kind: u32 = unsafe { first(bytes) }?;
    Ok(match kind {
        ffi::CONCURRENT_KERNEL => {
            // SAFETY: the kind says that the record begins so; numbers and a pointer.
            let ffi::Kernel { start, end, name, .. } = unsafe { first(bytes) }?;
            // SAFETY: null, or by the contract a string with a zero byte at its end.
            let name = (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) });
            let name = name.map_or("a kernel without a name".into(), CStr::to_string_lossy);
            Some(Activity { did: ActivityKind::Kernel { name: name.into_owned() }, start, end })
        }
        ffi::MEMCPY => {
            // SAFETY: the kind says that the record begins so; numbers.
            let ffi::Memcpy { bytes, start, end, channel_type, .. } = unsafe { first(bytes) }?;
            Some(Activity { did: copy(bytes, channel_type), start, end })
        }
        ffi::MEMCPY2 => {
            // SAFETY: as above.
            let ffi::MemcpyPtoP { bytes, start, end, channel_type, .. } = unsafe { first(bytes) }?;
            Some(Activity { did: copy(bytes, channel_type), start, end })
        }
        _ => None,
    })
}

/// # Safety
/// If there are as many bytes as a `T` has, they are one.
unsafe fn first<T: Copy>(bytes: &[u8]) -> Result<T, Cut> {
    let bytes = bytes.get(..size_of::<T>()).ok_or(Cut)?;
    // SAFETY: there are enough; by the contract they are a `T`.
    Ok(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

impl Channel {
    fn of(number: u32) -> Self {
        match number {
            ffi::CHANNEL_COMPUTE => Channel::Compute,
            ffi::CHANNEL_ASYNC_MEMCPY => Channel::CopyEngine,
            other => Channel::Other(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record of so many bytes: words at their places, the rest other than zero.
    fn record(len: usize, words: &[(usize, u64)], numbers: &[(usize, u32)]) -> Vec<u8> {
        let mut bytes = vec![0x5a; len];
        for &(at, word) in words {
            bytes[at..at + 8].copy_from_slice(&word.to_ne_bytes());
        }
        for &(at, number) in numbers {
            bytes[at..at + 4].copy_from_slice(&number.to_ne_bytes());
        }
        bytes
    }

    fn known(bytes: &[u8]) -> Result<Option<Activity>, Cut> {
        // SAFETY: made above, and names are constants.
        unsafe { read(bytes) }
    }

    /// Places as CUDA 12.5 has them (`tests/cupti-abi`).
    #[test]
    fn records_are_read_as_the_header_lays_them_out() {
        let name = c"pack".as_ptr() as u64;
        let kernel = record(200, &[(16, 5), (24, 9), (104, name)], &[(0, 10)]);
        let did = ActivityKind::Kernel { name: "pack".into() };
        assert_eq!(known(&kernel), Ok(Some(Activity { did, start: 5, end: 9 })));
        let nameless = record(200, &[(16, 5), (24, 9), (104, 0)], &[(0, 10)]);
        let Ok(Some(Activity { did: ActivityKind::Kernel { name }, .. })) = known(&nameless) else {
            panic!()
        };
        assert_eq!(name, "a kernel without a name");
        for (kind, at, number, channel) in [
            (1, 80, 1, Channel::Compute),
            (1, 80, 2, Channel::CopyEngine),
            (22, 88, 2, Channel::CopyEngine),
            (22, 88, 7, Channel::Other(7)),
        ] {
            let copy = record(96, &[(8, 921_600), (16, 1), (24, 2)], &[(0, kind), (at, number)]);
            let did = ActivityKind::Copy { bytes: 921_600, channel };
            assert_eq!(known(&copy), Ok(Some(Activity { did, start: 1, end: 2 })));
        }
        assert_eq!(known(&record(48, &[], &[(0, 17)])), Ok(None), "a kind that nobody asked for");
    }

    #[test]
    fn a_record_that_is_cut_is_refused() {
        for (kind, len) in [(10, 111), (1, 83), (22, 91)] {
            assert_eq!(known(&record(len, &[], &[(0, kind)])), Err(Cut));
        }
        assert_eq!(known(&[1, 0]), Err(Cut));
    }
}
