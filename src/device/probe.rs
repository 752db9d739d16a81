//! The probe: abilities of the driver and properties of its devices, as data.

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute};
use serde::Serialize;

use super::call;
use super::driver::Driver;
use super::libcuda::{BatchCopy, Code, Library, Version};
use crate::error::DeviceError;

/// When the kernels of a module are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ModuleLoading {
    /// With the module.
    Eager,
    /// At the first launch of each, under a lock of the context.
    Lazy,
    /// A mode that is newer than this library.
    Unknown(u32),
}

/// How the driver takes batches of copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BatchedCopies {
    /// Not at all.
    None,
    /// As CUDA 12.8 does: it says which copy failed.
    First,
    /// As CUDA 13.0 does.
    Second,
}

/// Whether readers see a NIC's writes into device memory in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WriteOrder {
    /// No reader does: a flush is needed.
    None,
    /// By the device itself.
    Owner,
    /// By all devices.
    AllDevices,
}

/// All findings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Probe {
    /// The loaded library.
    pub library: String,
    /// Whether it is the fake driver of the tests.
    pub fake_driver: bool,
    /// The newest CUDA version that the driver can do.
    pub version: Version,
    /// Batches of copies.
    pub batched_copies: BatchedCopies,
    /// When kernels are loaded.
    pub module_loading: ModuleLoading,
    /// Hardware queues that streams are folded on (`CUDA_DEVICE_MAX_CONNECTIONS`; 8 if not set).
    pub queues: u32,
    /// The devices.
    pub devices: Vec<DeviceProperties>,
    /// `peers[a][b]`: device a can reach the memory of device b. True on the diagonal.
    pub peers: Vec<Vec<bool>>,
}

impl Probe {
    pub(super) fn ask(driver: &Driver) -> Result<Self, DeviceError> {
        let count = driver.device_count()?;
        let reaches = |a, b| Ok(a == b || driver.reaches(a, b)?);
        Ok(Probe {
            library: driver.library.name.clone(),
            fake_driver: driver.is_fake(),
            version: driver.version(),
            batched_copies: match driver.library.batch {
                None => BatchedCopies::None,
                Some(BatchCopy::First(_)) => BatchedCopies::First,
                Some(BatchCopy::Second(_)) => BatchedCopies::Second,
            },
            module_loading: driver.module_loading()?,
            queues: driver.hardware_queues(),
            devices: (0..count).map(|device| driver.device(device)).collect::<Result<_, _>>()?,
            peers: (0..count)
                .map(|a| (0..count).map(|b| reaches(a, b)).collect())
                .collect::<Result<_, DeviceError>>()?,
        })
    }
}

/// Properties and abilities of one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceProperties {
    /// Its number in the driver's order.
    pub device: u32,
    /// Its name.
    pub name: String,
    /// Its identity, the same in every process: `GPU-` and 16 bytes in hexadecimal.
    pub uuid: String,
    /// Compute capability: major, minor.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// Copies that can run at once, in different directions, concurrently with kernels.
    pub copy_engines: u32,
    /// Memory operations on words of 64 bits.
    pub wide_memory_operations: bool,
    /// A stream can wait until what other devices wrote before a flag has landed.
    pub flush_remote_writes: bool,
    /// Reserving addresses and mapping memory to them.
    pub virtual_memory: bool,
    /// Memory that can be handed to another process as a file descriptor.
    pub descriptors: bool,
    /// Memory that can be handed to another machine of one NVLink domain.
    pub fabric: bool,
    /// NICs can reach the device's memory.
    pub direct_rdma: bool,
    /// Also memory that is mapped to reserved addresses.
    pub direct_rdma_mapped: bool,
    /// The order in which a NIC's writes are seen.
    pub write_order: WriteOrder,
    /// Memory can be handed to the kernel as a dma-buf.
    pub dma_buf: bool,
    /// One copy can be written to many devices by the switch.
    pub multicast: bool,
    /// Memory of the host can be pinned for the device where it lies.
    pub host_register: bool,
    /// Several processes may use it at once (compute mode `Default`).
    pub several_processes: bool,
    /// Threads of a block.
    pub block_threads: u32,
    /// Threads that a multiprocessor runs at once.
    pub multiprocessor_threads: u32,
    /// Blocks of a grid along x, y and z.
    pub grid: [u32; 3],
}

impl DeviceProperties {
    pub(super) fn ask(library: &Library, device: u32, handle: sys::CUdevice) -> Result<Self, DeviceError> {
        let number = |attribute| attribute_of(library, device, handle, attribute);
        let count = |attribute| Ok::<u32, DeviceError>(u32::try_from(number(attribute)?).unwrap_or(0));
        let yes = |attribute| Ok::<bool, DeviceError>(number(attribute)? > 0);
        let mut memory = 0;
        // SAFETY: fills the number.
        unsafe { call!(library, Some(device), cuDeviceTotalMem_v2(&raw mut memory, handle)) }?;
        Ok(DeviceProperties {
            device,
            name: name_of(library, device, handle)?,
            uuid: uuid_of(library, device, handle)?,
            capability: (
                count(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                count(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: count(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory: memory as u64,
            copy_engines: count(Attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT)?,
            wide_memory_operations: yes(Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)?,
            flush_remote_writes: yes(Attribute::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES)?,
            virtual_memory: yes(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)?,
            descriptors: yes(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?,
            fabric: yes(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)?,
            direct_rdma: yes(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)?,
            direct_rdma_mapped: yes(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)?,
            write_order: match number(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)? {
                200.. => WriteOrder::AllDevices,
                100..200 => WriteOrder::Owner,
                _ => WriteOrder::None,
            },
            dma_buf: yes(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)?,
            multicast: yes(Attribute::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)?,
            host_register: yes(Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED)?,
            several_processes: number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)? == 0,
            block_threads: count(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            multiprocessor_threads: count(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
            grid: [
                count(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X)?,
                count(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y)?,
                count(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z)?,
            ],
        })
    }
}

/// A driver that is older than an attribute does not know it; the device then counts as without it.
fn attribute_of(
    library: &Library,
    device: u32,
    handle: sys::CUdevice,
    attribute: Attribute,
) -> Result<c_int, DeviceError> {
    let mut value = 0;
    // SAFETY: fills the number.
    let code = unsafe { (library.functions.cuDeviceGetAttribute)(&raw mut value, attribute, handle) };
    if code == Code::INVALID_VALUE {
        return Ok(0);
    }
    library.check("cuDeviceGetAttribute", Some(device), code)?;
    Ok(value)
}

fn name_of(library: &Library, device: u32, handle: sys::CUdevice) -> Result<String, DeviceError> {
    let mut text = [0 as c_char; 128];
    let size = text.len() as c_int - 1;
    // SAFETY: writes at most `size` bytes; the last one stays zero.
    unsafe { call!(library, Some(device), cuDeviceGetName(text.as_mut_ptr(), size, handle)) }?;
    // SAFETY: the array ends with a zero.
    Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}

fn uuid_of(library: &Library, device: u32, handle: sys::CUdevice) -> Result<String, DeviceError> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: fills the sixteen bytes.
    unsafe { call!(library, Some(device), cuDeviceGetUuid_v2(&raw mut uuid, handle)) }?;
    let hex = |part: &[c_char]| part.iter().map(|&byte| format!("{:02x}", byte as u8)).collect::<String>();
    let parts = [0..4, 4..6, 6..8, 8..10, 10..16].map(|part| hex(&uuid.bytes[part]));
    Ok(format!("GPU-{}", parts.join("-")))
}
