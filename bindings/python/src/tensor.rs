//! Memory that Python sees: rows, outputs, windows, results.
//!
//! A [`Tensor`] knows nothing but DLPack: torch, numpy and others make their own of it, on the same
//! memory. Results come as what the input was ([`Kind`]).

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use sidelane::Dtype;
use sidelane::ep::{ExpertOutput, TokenBuffer};
use sidelane::memory::Pool;

use crate::device::{Lender, Place};
use crate::dlpack::{self, ElementType, Lending};
use crate::errors::raise;
use crate::input::Input;
use crate::lending::Maker;

/// The element types that go in and out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    F32,
    F16,
    Bf16,
    U8,
    I32,
    I64,
    F64,
    Bool,
}

impl Element {
    const ALL: [Element; 8] = [
        Element::F32,
        Element::F16,
        Element::Bf16,
        Element::U8,
        Element::I32,
        Element::I64,
        Element::F64,
        Element::Bool,
    ];

    /// Its name, as torch and numpy have it.
    pub const fn name(self) -> &'static str {
        match self {
            Element::F32 => "float32",
            Element::F16 => "float16",
            Element::Bf16 => "bfloat16",
            Element::U8 => "uint8",
            Element::I32 => "int32",
            Element::I64 => "int64",
            Element::F64 => "float64",
            Element::Bool => "bool",
        }
    }

    /// As DLPack has it.
    pub const fn code(self) -> ElementType {
        let (code, bits) = match self {
            Element::I32 => (0, 32),
            Element::I64 => (0, 64),
            Element::U8 => (1, 8),
            Element::F16 => (2, 16),
            Element::F32 => (2, 32),
            Element::F64 => (2, 64),
            Element::Bf16 => (4, 16),
            Element::Bool => (6, 8),
        };
        ElementType { code, bits, lanes: 1 }
    }

    /// The one that DLPack has so.
    pub fn of_code(code: ElementType) -> Option<Self> {
        Self::ALL.into_iter().find(|element| element.code() == code)
    }

    /// Bytes of one.
    pub const fn size(self) -> usize {
        self.code().bits as usize / 8
    }
}

impl From<Dtype> for Element {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Element::F32,
            Dtype::F16 => Element::F16,
            Dtype::Bf16 => Element::Bf16,
            Dtype::Bytes => Element::U8,
            other => unreachable!("settings::dtype has no word for {other}"),
        }
    }
}

/// Bytes that lie still, and who owns them.
pub struct Memory {
    maker: Maker,
    address: usize,
    bytes: usize,
    owner: Mutex<Option<Box<dyn Any + Send>>>,
    /// What is taken back by a call stays mapped as long as somebody could look at it.
    _pool: Option<Arc<Pool>>,
    /// The lender, if it is a device's.
    lender: Option<Lender>,
}

impl Memory {
    /// The bytes of `owner` at this address, which do not move when it is moved; the host's, if
    /// they are of no place.
    pub fn at(address: usize, bytes: usize, owner: Box<dyn Any + Send>, place: Option<&Place>) -> Arc<Self> {
        Arc::new(Memory {
            maker: Maker::here(),
            address,
            bytes,
            owner: Mutex::new(Some(owner)),
            _pool: place.and_then(Place::pool),
            lender: place.and_then(Place::lender).cloned(),
        })
    }

    /// Whether a tensor of these bytes is this memory.
    pub fn is(&self, address: usize, bytes: usize) -> bool {
        self.bytes == bytes && (bytes == 0 || self.address == address)
    }

    /// Whether no call has taken it back.
    pub fn is_owned(&self) -> bool {
        self.owner().is_some()
    }

    /// Takes the owner back from Python, if it is there and of this type.
    pub fn take<T: 'static>(&self) -> Option<T> {
        let mut owner = self.owner();
        match owner.take()?.downcast::<T>() {
            Ok(found) => Some(*found),
            Err(other) => {
                *owner = Some(other);
                None
            }
        }
    }

    /// Gives it to Python again.
    pub fn put_back(&self, owner: Box<dyn Any + Send>) {
        self.owner().replace(owner);
    }

    fn owner(&self) -> MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        self.owner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let taken_back = || self.lender.as_ref().is_none_or(|lender| lender.take_back().is_ok());
        if !self.maker.is_here() || !taken_back() {
            // A forked process leaves it to its parent. Memory that a broken device still uses
            // stays as it is.
            std::mem::forget(self.owner.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

/// Output buffers of one handle that Python has.
#[derive(Default)]
pub struct Outputs(Mutex<Vec<Weak<Memory>>>);

impl Outputs {
    /// One more.
    pub fn add(&self, mut output: ExpertOutput, place: &Place) -> PyResult<Arc<Memory>> {
        let (address, bytes) = extent_of(&mut output).map_err(raise)?;
        let memory = Memory::at(address, bytes, Box::new(output), Some(place));
        self.all().push(Arc::downgrade(&memory));
        Ok(memory)
    }

    /// The one that a tensor is, if it is all of one.
    pub fn find(&self, tensor: &Input) -> Option<Arc<Memory>> {
        let (address, bytes) = tensor.place();
        let mut outputs = self.all();
        outputs.retain(|memory| memory.strong_count() > 0);
        // Several may have had one place, those that a call took among them.
        let mut found: Vec<_> = outputs.iter().filter_map(Weak::upgrade).collect();
        found.retain(|memory| bytes > 0 && memory.is(address, bytes));
        let live = found.iter().position(|memory| memory.is_owned());
        if found.is_empty() { None } else { Some(found.swap_remove(live.unwrap_or(0))) }
    }

    fn all(&self) -> MutexGuard<'_, Vec<Weak<Memory>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Address and bytes of an output buffer.
pub fn extent_of(output: &mut ExpertOutput) -> Result<(usize, usize), sidelane::Error> {
    if let Ok(range) = output.range() {
        return Ok((range.address() as usize, range.len() as usize));
    }
    let rows = output.rows_mut::<u8>()?;
    Ok((rows.as_mut_ptr() as usize, rows.len()))
}

/// The same of a token buffer.
pub fn extent_of_tokens(tokens: &mut TokenBuffer) -> Result<(usize, usize), sidelane::Error> {
    if let Ok(range) = tokens.range() {
        return Ok((range.address() as usize, range.len() as usize));
    }
    let rows = tokens.rows_mut::<u8>()?;
    Ok((rows.as_mut_ptr() as usize, rows.len()))
}

/// Memory of the library with a shape. `torch.from_dlpack` and `numpy.from_dlpack` make tensors of
/// it without a copy.
#[pyclass(frozen, skip_from_py_object, module = "sidelane")]
#[derive(Clone)]
pub struct Tensor {
    memory: Arc<Memory>,
    shape: Vec<i64>,
    /// Elements from one to the next, along each axis.
    strides: Vec<i64>,
    element: Element,
}

impl Tensor {
    /// All of a memory, in rows.
    pub fn new(memory: Arc<Memory>, shape: &[usize], element: Element) -> Self {
        let shape: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
        let mut strides = vec![1; shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis];
        }
        Tensor { memory, shape, strides, element }
    }

    /// With so many elements from one to the next along the first axis.
    pub fn apart(mut self, elements: usize) -> Self {
        if let Some(first) = self.strides.first_mut() {
            *first = elements as i64;
        }
        self
    }

    /// A tensor of a vector's elements.
    pub fn of<T: bytemuck::NoUninit + Send>(mut values: Vec<T>, shape: &[usize], element: Element) -> Self {
        let bytes = values.len() * size_of::<T>();
        let memory = Memory::at(values.as_mut_ptr() as usize, bytes, Box::new(values), None);
        Tensor::new(memory, shape, element)
    }
}

#[pymethods]
impl Tensor {
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.element.name()
    }

    fn __len__(&self) -> usize {
        self.shape.first().map_or(0, |&rows| rows as usize)
    }

    fn __repr__(&self) -> String {
        format!("sidelane.Tensor(shape={:?}, dtype={})", self.shape, self.element.name())
    }

    /// Records that this stream uses the memory, as `Handle.used_on` does for all of a handle's.
    fn used_on(&self, stream: usize) {
        if let Some(lender) = &self.memory.lender {
            lender.used_on(stream);
        }
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        match &self.memory.lender {
            None if stream.is_some() || dl_device.is_some_and(|(kind, _)| kind != dlpack::CPU) => {
                return Err(PyBufferError::new_err(
                    "this memory is the host's: it has no stream and no other device",
                ));
            }
            Some(_) if dl_device.is_some_and(|wanted| wanted != self.__dlpack_device__()) => {
                return Err(PyBufferError::new_err("this memory is a device's, and lent there alone"));
            }
            _ => {}
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err(
                "this memory is lent, not copied: clone the tensor made of it",
            ));
        }
        if let Some(lender) = &self.memory.lender {
            let consumer = stream.map(|stream| stream.extract::<isize>()).transpose()?;
            py.detach(|| lender.lend(consumer))?;
        }
        let (shape, strides) = (self.shape.clone(), self.strides.clone());
        let (element, device) = (self.element.code(), self.__dlpack_device__());
        let (address, keep) = (self.memory.address, Arc::clone(&self.memory));
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        dlpack::lend(py, Lending { address, shape, strides, element, device }, keep, versioned)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        let lender = self.memory.lender.as_ref();
        lender.map_or((dlpack::CPU, 0), |lender| (dlpack::CUDA, lender.device() as i32))
    }
}

/// Whose tensors a caller uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Torch,
    Numpy,
    /// Gets a [`Tensor`] as it is.
    Other,
}

impl Kind {
    /// By the module of an object's class.
    pub fn of(object: &Bound<'_, PyAny>) -> Self {
        let module = object.get_type().module().map(|name| name.to_string()).unwrap_or_default();
        match module.split('.').next() {
            Some("torch") => Kind::Torch,
            Some("numpy") => Kind::Numpy,
            // Subclasses of torch's: parameters of other packages, for example.
            _ if object.hasattr("requires_grad").unwrap_or(false) => Kind::Torch,
            _ => Kind::Other,
        }
    }

    /// Makes a tensor that the caller can use.
    pub fn give<'py>(self, py: Python<'py>, tensor: Tensor) -> PyResult<Bound<'py, PyAny>> {
        let of_device = tensor.memory.lender.is_some();
        let tensor = Bound::new(py, tensor)?.into_any();
        let library = match self {
            Kind::Other => return Ok(tensor),
            Kind::Numpy if of_device => return Ok(tensor),
            Kind::Torch => "torch",
            // It has no such type.
            Kind::Numpy if tensor.cast::<Tensor>()?.get().element == Element::Bf16 => return Ok(tensor),
            Kind::Numpy => "numpy",
        };
        py.import(library)?.call_method1("from_dlpack", (tensor,))
    }
}
