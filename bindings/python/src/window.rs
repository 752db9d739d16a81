//! Windows: tensors that other ranks write to.
//!
//! The memory is a memfd of this process's own, mapped here and registered there, so that torch and
//! numpy see it like any other.

use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rustix::fs::{MemfdFlags, SealFlags};
use sidelane::error::MemoryError;

use crate::errors::{Wrong, raise};
use crate::input::Input;
use crate::lending::LendingCell;
use crate::settings;
use crate::tensor::{Element, Memory, Tensor};
use crate::wait::{self, Interrupt};
use crate::world::{Group, OpenWorld};

/// A tensor at every member of a group, and one signal word per pair of members.
#[pyclass(frozen, module = "sidelane")]
pub struct Window {
    open_world: Arc<OpenWorld>,
    window: Arc<LendingCell<sidelane::Window>>,
    local: Tensor,
    shape: Vec<usize>,
    element: Element,
}

impl Window {
    /// Collective.
    pub fn new(
        py: Python<'_>,
        group: &Group,
        shape: &[usize],
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        Self::of(py, group, shape, || {
            let (element, bytes) = extent(shape, dtype)?;
            let (memory, mapped) = make(bytes as u64).map_err(raise)?;
            Ok((element, bytes, memory, mapped))
        })
    }

    /// Collective. The descriptor is duplicated, and mapped here once more.
    pub fn register(
        py: Python<'_>,
        group: &Group,
        memory: &Bound<'_, PyAny>,
        shape: &[usize],
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        Self::of(py, group, shape, || {
            let (element, bytes) = extent(shape, dtype)?;
            let file = duplicate(memory)?;
            let seen = file.metadata().map_err(failed("fstat", bytes as u64)).map_err(raise)?.len();
            if seen != bytes as u64 {
                let message =
                    format!("memory: it has {seen} bytes, and a tensor of shape {shape:?} has {bytes}");
                return Err(Wrong::Input.error("Setting", &message, &[("setting", "shape".into())]));
            }
            let mapped =
                MmapOptions::new().map_raw(&file).map_err(failed("mmap", bytes as u64)).map_err(raise)?;
            Ok((element, bytes, file.into(), mapped))
        })
    }

    fn of(
        py: Python<'_>,
        group: &Group,
        shape: &[usize],
        prepare: impl FnOnce() -> PyResult<(Element, usize, OwnedFd, MmapRaw)>,
    ) -> PyResult<Self> {
        let members = group.get()?;
        let (element, bytes, memory, mapped) = match prepare() {
            Ok(prepared) => prepared,
            Err(error) => {
                // The others are told, not left waiting: this can be registered nowhere.
                let unsealed = rustix::fs::memfd_create("sidelane-refused", MemfdFlags::CLOEXEC);
                let unsealed = unsealed.map_err(failed("memfd_create", 0)).map_err(raise)?;
                let _ = group.open_world().meeting(py, || members.register(unsealed));
                return Err(error);
            }
        };
        let window = group.open_world().meeting(py, || members.register(memory))?;
        let address = mapped.as_mut_ptr() as usize;
        let local = Tensor::new(Memory::at(address, bytes, Box::new(mapped), None), shape, element);
        let window = Arc::new(LendingCell::new("window", window));
        let child = Arc::downgrade(&window);
        group.open_world().adopt(child);
        Ok(Window {
            open_world: Arc::clone(group.open_world()),
            window,
            local,
            shape: shape.to_vec(),
            element,
        })
    }

    /// A call on the data path. It waits for no other rank's input, so an error in this rank's
    /// input is raised here alone.
    fn call(
        &self,
        py: Python<'_>,
        interrupt: Interrupt,
        call: impl FnOnce(&mut sidelane::Window) -> Result<(), sidelane::Error> + Send,
    ) -> PyResult<()> {
        let world = self.open_world.world()?;
        self.window.lend(|window| wait::call(py, &world, interrupt, || call(window)))
    }

    fn source(&self, src: &Bound<'_, PyAny>) -> PyResult<Input> {
        Input::new(src, "src")?.of(self.element)
    }
}

/// What a tensor of this shape is made of, and how many bytes it has.
fn extent(shape: &[usize], dtype: Option<&Bound<'_, PyAny>>) -> PyResult<(Element, usize)> {
    let element = dtype.map_or(Ok(Element::F32), |dtype| settings::dtype(dtype).map(Element::from))?;
    let bytes = shape.iter().try_fold(element.size(), |all, &size| all.checked_mul(size));
    let Some(bytes @ 1..) = bytes.filter(|&bytes| isize::try_from(bytes).is_ok()) else {
        let message = format!("window: a tensor of shape {shape:?} is empty, or larger than any memory");
        return Err(Wrong::Input.error("Setting", &message, &[("setting", "shape".into())]));
    };
    Ok((element, bytes))
}

/// A descriptor of Python's, once more.
fn duplicate(memory: &Bound<'_, PyAny>) -> PyResult<File> {
    let number: i32 = match memory.extract() {
        Ok(number) => number,
        Err(_) => memory.call_method0("fileno")?.extract()?,
    };
    // Opened by its name, as the number may be of nothing.
    let opened = OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{number}"));
    opened.map_err(|error| {
        let message = format!("memory: {number} is no descriptor of memory to write to: {error}");
        Wrong::Input.error("Setting", &message, &[("setting", "memory".into())])
    })
}

/// Sealed shared memory, and a mapping of it. The system gives more than it has, and ends processes
/// that use it: so what this machine can never have is refused first.
fn make(bytes: u64) -> Result<(OwnedFd, MmapRaw), MemoryError> {
    let machine = rustix::system::sysinfo();
    if bytes > machine.totalram.saturating_mul(machine.mem_unit.into()) {
        return Err(failed("memfd_create", bytes)(rustix::io::Errno::NOMEM));
    }
    let fd = rustix::fs::memfd_create("sidelane-window", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    let fd = fd.map_err(failed("memfd_create", bytes))?;
    rustix::fs::ftruncate(&fd, bytes).map_err(failed("ftruncate", bytes))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&fd, seals).map_err(failed("fcntl", bytes))?;
    let file = File::from(fd);
    let mapped = MmapOptions::new().map_raw(&file).map_err(failed("mmap", bytes))?;
    Ok((file.into(), mapped))
}

/// The library's error of a system call.
fn failed<E: Into<std::io::Error>>(call: &'static str, bytes: u64) -> impl FnOnce(E) -> MemoryError {
    move |error| {
        let errno = error.into().raw_os_error().unwrap_or_default();
        MemoryError::System { call, bytes, errno }
    }
}

#[pymethods]
impl Window {
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.element.name()
    }

    /// This rank's own part.
    #[getter]
    fn local(&self) -> Tensor {
        self.local.clone()
    }

    fn put(&self, py: Python<'_>, peer: u32, offset: u64, src: &Bound<'_, PyAny>) -> PyResult<()> {
        let src = self.source(src)?;
        let (bytes, offset) = (src.slice::<u8>()?, self.bytes(offset));
        self.call(py, Interrupt::Cancels, |window| window.put(peer, offset, bytes))
    }

    /// `count` elements of this rank's own part, from `first` on.
    fn put_nbi(&self, py: Python<'_>, peer: u32, offset: u64, first: u64, count: u64) -> PyResult<()> {
        let [offset, from, len] = [offset, first, count].map(|elements| self.bytes(elements));
        self.call(py, Interrupt::Cancels, |window| window.put_nbi(peer, offset, from, len))
    }

    fn put_signal(
        &self,
        py: Python<'_>,
        peer: u32,
        offset: u64,
        src: &Bound<'_, PyAny>,
        value: u64,
    ) -> PyResult<()> {
        let src = self.source(src)?;
        let (bytes, offset) = (src.slice::<u8>()?, self.bytes(offset));
        self.call(py, Interrupt::Cancels, |window| window.put_signal(peer, offset, bytes, value))
    }

    fn signal(&self, py: Python<'_>, peer: u32, value: u64) -> PyResult<()> {
        self.call(py, Interrupt::Cancels, |window| window.signal(peer, value))
    }

    /// Ctrl-C ends the wait, not the world: it may be made again.
    fn wait(&self, py: Python<'_>, peer: u32, value: u64) -> PyResult<()> {
        self.call(py, Interrupt::Ends, |window| window.wait_until(peer, value))
    }

    fn quiet(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, Interrupt::Cancels, |window| window.quiet())
    }

    /// Ctrl-C cancels the world, here as in every call that others may have seen a part of.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, Interrupt::Cancels, |window| window.barrier())
    }
}

impl Window {
    fn bytes(&self, elements: u64) -> u64 {
        elements.saturating_mul(self.element.size() as u64)
    }
}
