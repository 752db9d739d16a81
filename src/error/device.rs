//! Errors of GPUs: the driver, missing abilities, refused calls, and faults that kernels find.

use crate::dtype::Dtype;

/// A GPU is unusable, or did not do what it was asked to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum DeviceError {
    /// libcuda is not there.
    #[error(
        "cannot load {library}: {reason} (install NVIDIA's driver; in a container --gpus all with the NVIDIA container toolkit; or set SIDELANE_CUDA_LIBRARY to its path)"
    )]
    NoLibrary {
        /// The library to load.
        library: String,
        /// Message of the loader.
        reason: String,
    },
    /// The loaded library is another one, or incomplete.
    #[error("{library} has no {symbol}: it is another library, or one that is too old")]
    MissingSymbol {
        /// The loaded library.
        library: String,
        /// The missing symbol.
        symbol: &'static str,
    },
    /// The driver does not start.
    #[error("{library}: cuInit failed with {code} ({name}){}", init_advice(*code))]
    Init {
        /// The loaded library.
        library: String,
        /// The driver's code.
        code: u32,
        /// Its name.
        name: String,
    },
    /// This driver is too old for something.
    #[error("{feature} needs a driver for CUDA {needed}, this one is for {version}: update the driver")]
    TooOld {
        /// The requested feature.
        feature: &'static str,
        /// The CUDA version of the driver.
        version: String,
        /// The first version that can do it.
        needed: String,
    },
    /// CUPTI is not there.
    #[error(
        "no CUPTI: {library}: {reason} (a CUDA toolkit has it in extras/CUPTI/lib64, PyPI as nvidia-cuda-cupti; set LD_LIBRARY_PATH, or SIDELANE_CUPTI_LIBRARY to its path)"
    )]
    NoCupti {
        /// The library to load.
        library: String,
        /// Message of the loader.
        reason: String,
    },
    /// cuBLAS is not there.
    #[error(
        "no cuBLAS: {} (a CUDA toolkit has it, PyPI as nvidia-cublas or nvidia-cublas-cu12; set LD_LIBRARY_PATH, SIDELANE_SITE_PACKAGES to the folder of Python packages, or SIDELANE_CUBLAS_LIBRARY to its path)",
        .tried.join("; ")
    )]
    NoCublas {
        /// The libraries that were to be loaded, each with the loader's message.
        tried: Vec<String>,
    },
    /// CUPTI's records have another layout than those that are read.
    #[error(
        "{library} is version {version} of CUPTI, and its records are read from {needed} on: take that of CUDA 12 or 13"
    )]
    OldCupti {
        /// The loaded library.
        library: String,
        /// Its version, by CUPTI's own count.
        version: u32,
        /// The first version whose records are read.
        needed: u32,
    },
    /// CUPTI's list is not whole.
    #[error("CUPTI lost {lost} records")]
    LostRecords {
        /// How many are missing, or could not be read.
        lost: u64,
    },
    /// There are not so many devices.
    #[error("no device {device}: the driver shows {count} (CUDA_VISIBLE_DEVICES hides others)")]
    NoSuchDevice {
        /// The device asked for.
        device: u32,
        /// How many there are.
        count: u32,
    },
    /// This device, or its driver, cannot do something.
    #[error("device {device} has no {feature}")]
    Unsupported {
        /// The device.
        device: u32,
        /// The requested feature.
        feature: &'static str,
    },
    /// The device has not so much memory free.
    #[error("device {device}: {call} of {bytes} bytes: out of memory")]
    OutOfMemory {
        /// The device.
        device: u32,
        /// The call.
        call: &'static str,
        /// Bytes asked for.
        bytes: u64,
    },
    /// Any other refusal of the driver.
    #[error("{call} failed with {code} ({name}){}", on(*device))]
    Call {
        /// The call.
        call: &'static str,
        /// The device, where one is concerned.
        device: Option<u32>,
        /// The driver's code.
        code: u32,
        /// Its name.
        name: String,
    },
    /// A batch of copies was refused.
    #[error("device {device}: {call} failed with {code} ({name}){}", at_copy(*copy))]
    Batch {
        /// The call.
        call: &'static str,
        /// The device.
        device: u32,
        /// The copy that the driver names, counted over the whole batch.
        copy: Option<usize>,
        /// The driver's code.
        code: u32,
        /// Its name.
        name: String,
    },
    /// Something belongs to another device than the one it is used with.
    #[error("a {what} of device {found} is used with device {expected}")]
    OtherDevice {
        /// Kind of the object: a stream, an event, a function.
        what: &'static str,
        /// Where it belongs.
        found: u32,
        /// Where it was used.
        expected: u32,
    },
    /// A stream belongs to a context that is not the primary one of its device.
    #[error("the stream belongs to a context of device {device} that is not its primary one")]
    OtherContext {
        /// The device.
        device: u32,
    },
    /// Memory that the driver knows nothing of.
    #[error(
        "{what} at {address:#x} is not memory of device {device}, nor pinned: pass memory of cudaMalloc or cudaHostAlloc"
    )]
    UnknownMemory {
        /// The memory that should lie there.
        what: &'static str,
        /// Where.
        address: u64,
        /// The device it is for.
        device: u32,
    },
    /// Memory of another device than the one it is for.
    #[error("{what} at {address:#x} lies on device {found}, and is for device {expected}")]
    OtherMemory {
        /// Kind of memory at the address.
        what: &'static str,
        /// Where.
        address: u64,
        /// The device that owns the memory.
        found: u32,
        /// The device it is for.
        expected: u32,
    },
    /// A stream that is another one in each thread.
    #[error("the per-thread default stream is another one in each thread: make a stream, and pass that")]
    PerThreadStream,
    /// A device may not reach the memory of a range.
    #[error("device {device} has no access to the memory at {address:#x}")]
    NoAccess {
        /// The device.
        device: u32,
        /// Where the range begins.
        address: u64,
    },
    /// An access outside a range of addresses.
    #[error("offset {offset} + {len} bytes is outside a range of {size} bytes")]
    OutOfRange {
        /// First byte of the access.
        offset: u64,
        /// Length of the access.
        len: u64,
        /// Size of the range.
        size: u64,
    },
    /// An address or a length is not aligned as the operation asks.
    #[error("{what} {value:#x} is not a multiple of {align}")]
    Misaligned {
        /// The misaligned argument.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The alignment.
        align: u64,
    },
    /// A copy between spans of different length.
    #[error("a copy of {from} bytes into a span of {to}")]
    Lengths {
        /// Bytes of the target.
        to: u64,
        /// Bytes of the source.
        from: u64,
    },
    /// A member's place in a reservation is taken.
    #[error("member {member} of the reservation is mapped already")]
    Taken {
        /// The member.
        member: usize,
    },
    /// The reservation has not so many members.
    #[error("no member {member}: the reservation was made for {members}")]
    NoSuchMember {
        /// The member.
        member: usize,
        /// How many there are.
        members: usize,
    },
    /// Something that a stream cannot do while it is captured into a graph.
    #[error("{call} cannot be captured into a graph: use single copies there")]
    Capturing {
        /// The call.
        call: &'static str,
    },
    /// Something that no copy engine does.
    #[error("copy engines cannot {operation}")]
    NoEngine {
        /// The requested operation.
        operation: &'static str,
    },
    /// The driver handed out a descriptor that is none.
    #[error("{call} handed out descriptor {descriptor}")]
    Descriptor {
        /// The call.
        call: &'static str,
        /// The returned descriptor.
        descriptor: i32,
    },
    /// The driver's compiler refused a module.
    #[error("device {device}: module {module} does not load: {code} ({name})\n{log}")]
    Module {
        /// The device.
        device: u32,
        /// The module.
        module: String,
        /// The driver's code.
        code: u32,
        /// Its name.
        name: String,
        /// Message of the compiler.
        log: String,
    },
    /// A module has no such function.
    #[error("module {module} has no function {function}")]
    NoFunction {
        /// The module.
        module: String,
        /// The function.
        function: String,
    },
    /// A parameter block that does not match a function's parameters.
    #[error("{function} was given {}, and takes {}", parameter(*index, *given), parameter(*index, *taken))]
    Parameters {
        /// The function.
        function: String,
        /// The first parameter that differs.
        index: usize,
        /// Its size in bytes as given; `None` if none was.
        given: Option<u64>,
        /// Its size in bytes as the function takes it; `None` if it takes none.
        taken: Option<u64>,
    },
    /// A launch that is larger than the device or the function allows.
    #[error("{function}: {what} of {asked} requested, 1 to {limit} are possible")]
    Launch {
        /// The function.
        function: String,
        /// The argument out of bounds.
        what: &'static str,
        /// The requested number.
        asked: u64,
        /// The limit.
        limit: u64,
    },
    /// Memory that is smaller than a kernel's reads or writes there.
    #[error("{kernel}: {what} has {given} bytes, {needed} are needed")]
    TooSmall {
        /// The kernel.
        kernel: &'static str,
        /// Which of its operands.
        what: &'static str,
        /// Bytes that it has.
        given: u64,
        /// Bytes that the shapes ask for.
        needed: u64,
    },
    /// A number that a kernel is not made for.
    #[error("{kernel}: {what} = {given}, expected {expected}")]
    Shape {
        /// The kernel.
        kernel: &'static str,
        /// The number.
        what: &'static str,
        /// Its value.
        given: u64,
        /// Description of a valid value.
        expected: &'static str,
    },
    /// Rows of this type are not summed to results of that type.
    #[error("no kernel sums rows of {rows} to {out}")]
    NoSum {
        /// Type of the rows.
        rows: Dtype,
        /// Type of the results.
        out: Dtype,
    },
    /// A kernel found an error: results computed since are worthless.
    #[error("device {device}: {fault}")]
    Fault {
        /// The device.
        device: u32,
        /// The error.
        fault: KernelFault,
    },
}

fn on(device: Option<u32>) -> String {
    device.map_or_else(String::new, |device| format!(" on device {device}"))
}

fn at_copy(copy: Option<usize>) -> String {
    copy.map_or_else(String::new, |copy| format!(" at copy {copy}"))
}

fn parameter(index: usize, size: Option<u64>) -> String {
    size.map_or_else(|| format!("no parameter {index}"), |size| format!("{size} bytes as parameter {index}"))
}

fn init_advice(code: u32) -> &'static str {
    match code {
        34 => " (this is the toolkit's stub, made to link against: take lib64/stubs out of LD_LIBRARY_PATH)",
        100 => " (no GPU is visible: look at CUDA_VISIBLE_DEVICES; in a container --gpus all)",
        802 => " (the system is not ready: on NVSwitch machines start nvidia-fabricmanager)",
        803 => {
            " (library and kernel module are of different versions: reboot, or take the compat folder out of LD_LIBRARY_PATH)"
        }
        999 => " (often after suspend or a driver update: reload nvidia_uvm, or reboot)",
        _ => "",
    }
}

/// The meaning of a status word that is not 0. Numbers of tokens and ranks keep their lower 24
/// bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum KernelFault {
    /// A choice is neither an expert nor -1. It counts as dropped; a sum of choices gives its token
    /// zeros. In slots the rank refuses the call.
    #[error("token {token} names an expert that does not exist")]
    ExpertOutOfRange {
        /// The token; for pack the first one.
        token: u32,
    },
    /// The map has an expert at a rank that does not exist. The choice counts as dropped; a sum of
    /// choices gives its token zeros. In slots the rank refuses the call.
    #[error("the expert map has an expert of token {token} at a rank that does not exist")]
    RankOutOfRange {
        /// The token that chose it; for pack the first one.
        token: u32,
    },
    /// Check: what lies in the slot of a rank is not of this call.
    #[error("the slot of rank {rank} is of another call")]
    OtherCall {
        /// The first such rank.
        rank: u32,
    },
    /// Check: a rank was set up otherwise.
    #[error("rank {rank} has other settings: its digest differs")]
    OtherDigest {
        /// The first such rank.
        rank: u32,
    },
    /// Sum: a place lies outside of its slot. The results of the token are zeros, those of others
    /// may be sums.
    #[error("a place of token {token} lies outside of its slot")]
    PlaceOutOfRange {
        /// The token.
        token: u32,
    },
    /// Regroup and sums of choices: an index names a row that does not exist. The row, or the
    /// results of the token, are zeros.
    #[error("an index names a row that does not exist, for row or token {at}")]
    IndexOutOfRange {
        /// The row that was to be made, or the token.
        at: u32,
    },
    /// Admit: a rank would get more rows than its budget, in a call that refuses that. Results are
    /// zeros at all ranks; the next call is judged anew.
    #[error("rank {rank} would get more rows than its budget")]
    OverBudget {
        /// The first such rank.
        rank: u32,
    },
    /// In slots, a rank refuses the call: it has nothing usable to bring, or its host could not
    /// make the call. No rank has rows, and results are zeros at all ranks; the next call is judged
    /// anew.
    #[error("rank {rank} refuses the call")]
    Refused {
        /// The first such rank.
        rank: u32,
    },
    /// A word that no kernel writes: another writer set it.
    #[error("the status word was set to {word:#x}")]
    Foreign {
        /// The word.
        word: u32,
    },
}

impl KernelFault {
    /// The status word of a rank that refuses a call.
    pub(crate) const fn refused_by(rank: u32) -> u32 {
        8 | rank << 8
    }

    /// Reads a status word; `None` while nothing is wrong.
    pub fn of(word: u32) -> Option<KernelFault> {
        let (code, about) = (word & 0xff, word >> 8);
        Some(match code {
            _ if word == 0 => return None,
            1 => KernelFault::ExpertOutOfRange { token: about },
            2 => KernelFault::RankOutOfRange { token: about },
            3 => KernelFault::OtherCall { rank: about },
            4 => KernelFault::OtherDigest { rank: about },
            5 => KernelFault::PlaceOutOfRange { token: about },
            6 => KernelFault::IndexOutOfRange { at: about },
            7 => KernelFault::OverBudget { rank: about },
            8 => KernelFault::Refused { rank: about },
            _ => KernelFault::Foreign { word },
        })
    }
}
