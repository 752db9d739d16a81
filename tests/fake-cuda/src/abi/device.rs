//! Initialisation, versions, devices.

use std::ffi::{CStr, c_char, c_int, c_uint};

use super::local;
use super::pointers::Out;
use crate::code::{Code, Result, described};
use crate::driver::{self, settings};
use crate::settings::NicWrites;

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> c_int {
    local(|| if flags == 0 { driver::start() } else { Err(Code::INVALID_VALUE) })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(version: Out<c_int>) -> c_int {
    local(|| {
        // The version is known before the driver is initialised.
        let _ = driver::start();
        version.put(settings()?.version)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(code: c_int, text: Out<*const c_char>) -> c_int {
    error_text(code, text, |(name, _)| name)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(code: c_int, text: Out<*const c_char>) -> c_int {
    error_text(code, text, |(_, sentence)| sentence)
}

type Described = (&'static CStr, &'static CStr);

fn error_text(code: c_int, text: Out<*const c_char>, which: fn(Described) -> &'static CStr) -> c_int {
    local(|| match described(code) {
        Some(both) => text.put(which(both).as_ptr()),
        None => {
            text.put(std::ptr::null())?;
            Err(Code::INVALID_VALUE)
        }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: Out<c_int>) -> c_int {
    local(|| count.put(settings()?.devices as c_int))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) -> c_int {
    local(|| device.put(driver::device(ordinal)? as c_int))
}

fn put_text(out: Out<c_char>, room: c_int, text: &str) -> Result<()> {
    let room =
        usize::try_from(room).ok().filter(|&room| room > 0 && !out.is_null()).ok_or(Code::INVALID_VALUE)?;
    let bytes = text.bytes().take(room - 1).chain([0]);
    out.fill(room, bytes.map(|byte| byte as c_char));
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetName(name: Out<c_char>, room: c_int, device: c_int) -> c_int {
    local(|| {
        driver::device(device)?;
        put_text(name, room, "Sidelane fake")
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetPCIBusId(text: Out<c_char>, room: c_int, device: c_int) -> c_int {
    local(|| put_text(text, room, &format!("0000:{:02X}:00.0", driver::device(device)? + 1)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: c_int) -> c_int {
    local(|| {
        let mut bytes = *b"sidelane-gpu-...";
        bytes[13..].copy_from_slice(&[0, 0, driver::device(device)? as u8]);
        uuid.put(bytes)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) -> c_int {
    cuDeviceGetUuid(uuid, device)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) -> c_int {
    local(|| {
        driver::device(device)?;
        bytes.put(settings()?.memory as usize)
    })
}

/// Attributes as a data-centre device has them, without features that the fake lacks; all others
/// are 0.
#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_int, device: c_int) -> c_int {
    local(|| {
        let device = driver::device(device)?;
        if !(1..=200).contains(&attribute) {
            return Err(Code::INVALID_VALUE);
        }
        value.put(match attribute {
            1..=3 => 1024,
            4 => 64,
            5 => i32::MAX,
            6 | 7 => 65535,
            8 => 48 << 10,
            10 => 32,
            12 | 82 => 65536,
            // Multiprocessors, and threads of each.
            16 => 4,
            20 => settings()?.compute_mode,
            39 => 2048,
            81 => 228 << 10,
            97 => 227 << 10,
            // Copies concurrent with kernels, kernels with kernels, and engines for copies.
            15 | 31 => 1,
            40 => 3,
            33 => device as c_int + 1,
            // Compute capability 9.0.
            75 => 9,
            // Host memory: mapped, unified addresses, registered memory at its own address.
            19 | 41 | 91 | 99 => 1,
            // Stream priorities and memory operations, also of 64 bits and NOR.
            78 | 92 | 93 | 94 | 122 | 123 => 1,
            // Virtual memory, with descriptors as handles.
            102 | 103 => 1,
            // NICs reach device memory; the host can flush their writes, or streams can, or the
            // owner sees them in order.
            110 | 116 | 117 => 1,
            98 => c_int::from(settings()?.nic_writes == NicWrites::Flushed),
            118 if settings()?.nic_writes == NicWrites::Ordered => 100,
            _ => 0,
        })
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceCanAccessPeer(answer: Out<c_int>, device: c_int, peer: c_int) -> c_int {
    local(|| {
        let (device, peer) = (driver::device(device)?, driver::device(peer)?);
        answer.put(c_int::from(device != peer && settings()?.reaches(device, peer)))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetP2PAttribute(
    value: Out<c_int>,
    attribute: c_int,
    from: c_int,
    to: c_int,
) -> c_int {
    local(|| {
        let (from, to) = (driver::device(from)?, driver::device(to)?);
        let reaches = from != to && settings()?.reaches(from, to);
        value.put(match attribute {
            1 => 0,
            2 | 3 => c_int::from(reaches),
            4 => 0,
            _ => return Err(Code::INVALID_VALUE),
        })
    })
}
