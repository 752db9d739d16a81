//! cuBLAS, if it is installed: the products of real layers. Loaded at run time; four of its
//! functions.

use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::Product;
use crate::device::context::Context;
use crate::device::library::symbol;
use crate::device::stream::Stream;
use crate::error::DeviceError;

/// Names for the loader, the newest first.
const NAMES: [&str; 3] = ["libcublas.so.13", "libcublas.so.12", "libcublas.so.11"];

/// Libraries that cuBLAS itself loads, from the same release. Wheels have it in the same folder,
/// where the loader does not look.
const BESIDE: (&str, &str) = ("libcublas.so", "libcublasLt.so");

/// The variable with a path.
const VARIABLE: &str = "SIDELANE_CUBLAS";

// Numbers of the header.
const TRANSPOSED: c_int = 1;
const PLAIN: c_int = 0;
const BF16: c_int = 14;
const SUMS_IN_F32: c_int = 68;
const ANY_ALGORITHM: c_int = -1;

type Handle = *mut c_void;
type Create = unsafe extern "C" fn(*mut Handle) -> c_int;
type Destroy = unsafe extern "C" fn(Handle) -> c_int;
type SetStream = unsafe extern "C" fn(Handle, *mut c_void) -> c_int;
/// `cublasGemmEx`: handle; operations on a and b; m, n, k; alpha; a, its type and pitch; b; beta;
/// c; type of the sums; algorithm.
type Gemm = unsafe extern "C" fn(
    Handle,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const c_void,
    u64,
    c_int,
    c_int,
    u64,
    c_int,
    c_int,
    *const c_void,
    u64,
    c_int,
    c_int,
    c_int,
    c_int,
) -> c_int;

/// cuBLAS, for one device. A thread uses it at a time.
#[derive(Debug)]
pub struct Blas {
    context: Arc<Context>,
    name: String,
    handle: Handle,
    destroy: Destroy,
    set_stream: SetStream,
    gemm: Gemm,
    /// Never unloaded: its handles outlive nothing that way.
    _loaded: ManuallyDrop<libloading::Library>,
}

impl Blas {
    /// Names for the loader, the newest first.
    pub const NAMES: [&str; 3] = NAMES;

    /// Loads the library that `SIDELANE_CUBLAS` names, else the one that the loader finds, else the
    /// first of these files that loads. `None` if there is none.
    ///
    /// # Errors
    /// [`DeviceError::MissingSymbol`], [`DeviceError::Call`] with cuBLAS's status.
    pub fn load(context: &Arc<Context>, files: &[PathBuf]) -> Result<Option<Self>, DeviceError> {
        let named = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
        let usual = NAMES.into_iter().map(PathBuf::from).chain(files.iter().cloned());
        let mut candidates: Vec<PathBuf> = if named.is_some() { Vec::new() } else { usual.collect() };
        candidates.extend(named);
        let Some((name, loaded)) = candidates.iter().find_map(|path| open(path)) else { return Ok(None) };
        let loaded = ManuallyDrop::new(loaded);
        let name = name.as_str();
        // SAFETY: the types are those of the header.
        let create: Create = unsafe { symbol(&loaded, name, "cublasCreate_v2") }?;
        // SAFETY: as above.
        let destroy: Destroy = unsafe { symbol(&loaded, name, "cublasDestroy_v2") }?;
        // SAFETY: as above.
        let set_stream: SetStream = unsafe { symbol(&loaded, name, "cublasSetStream_v2") }?;
        // SAFETY: as above.
        let gemm: Gemm = unsafe { symbol(&loaded, name, "cublasGemmEx") }?;
        let mut handle = std::ptr::null_mut();
        {
            let _entered = context.enter()?;
            // SAFETY: fills the handle, in the current context; destroyed when the value is
            // dropped.
            let status = unsafe { create(&raw mut handle) };
            check("cublasCreate", context, status)?;
        }
        let (context, name) = (context.clone(), name.to_owned());
        Ok(Some(Blas { context, name, handle, destroy, set_stream, gemm, _loaded: loaded }))
    }

    /// The library that was loaded: a path, or the name that the loader was asked for.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Enqueues a product.
    ///
    /// # Errors
    /// [`DeviceError::Shape`], [`DeviceError::TooSmall`], [`DeviceError::Misaligned`],
    /// [`DeviceError::NoAccess`], [`DeviceError::OtherDevice`], [`DeviceError::Call`] with cuBLAS's
    /// status.
    pub fn product(&self, stream: &Stream, product: &Product<'_>) -> Result<(), DeviceError> {
        let (found, expected) = (stream.device(), self.context.device());
        if found != expected {
            return Err(DeviceError::OtherDevice { what: "stream", found, expected });
        }
        let ranges = product.check()?;
        let _held = stream.hold(&ranges)?;
        let _entered = self.context.enter()?;
        // SAFETY: handle and stream live.
        check("cublasSetStream", &self.context, unsafe { (self.set_stream)(self.handle, stream.handle()) })?;
        let size = product.size as c_int;
        let (one, zero) = (1.0_f32, 0.0_f32);
        let (one, zero) = ((&raw const one).cast(), (&raw const zero).cast());
        let (a, b, out) = (product.a.address, product.b.address, product.out.address);
        // In cuBLAS' column order the result is transposed: b comes first. SAFETY: matrices of
        // `size * size` elements, which were checked and stay until the stream is done; the factors
        // are read during the call.
        let status = unsafe {
            (self.gemm)(
                self.handle,
                TRANSPOSED,
                PLAIN,
                size,
                size,
                size,
                one,
                b,
                BF16,
                size,
                a,
                BF16,
                size,
                zero,
                out,
                BF16,
                size,
                SUMS_IN_F32,
                ANY_ALGORITHM,
            )
        };
        check("cublasGemmEx", &self.context, status)
    }
}

/// Loads a file and, before it, its dependencies in the same folder.
fn open(path: &Path) -> Option<(String, libloading::Library)> {
    let beside = path.file_name()?.to_str()?.replace(BESIDE.0, BESIDE.1);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    // SAFETY: the library's initializers may run at any time.
    let first = folder.and_then(|folder| unsafe { libloading::Library::new(folder.join(beside)) }.ok());
    // Never unloaded: the loader returns it for its name from now on.
    std::mem::forget(first);
    // SAFETY: as above.
    let loaded = unsafe { libloading::Library::new(path) }.ok()?;
    Some((path.display().to_string(), loaded))
}

impl Drop for Blas {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: made here.
        let _ = unsafe { (self.destroy)(self.handle) };
    }
}

fn check(call: &'static str, context: &Context, status: c_int) -> Result<(), DeviceError> {
    if status == 0 {
        return Ok(());
    }
    let (device, code) = (Some(context.device()), status as u32);
    Err(DeviceError::Call { call, device, code, name: "a status of cuBLAS".to_owned() })
}
