//! Tensors that are handed in: looked at before they are used, so that errors can say what to do.

use std::sync::Arc;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use sidelane::Dtype;
use sidelane::device::DeviceRange;
use sidelane::ep::{Tensor, TensorMut};
use sidelane::error::PlanError;

use crate::device::OnStream;
use crate::dlpack::{self, Lent};
use crate::errors::{Wrong, raise};
use crate::tensor::{Element, Kind};

/// A contiguous tensor, lent by another library.
pub struct Input {
    held: Held,
    what: &'static str,
    kind: Kind,
    element: Element,
    shape: Vec<usize>,
}

/// Memory of a lent tensor.
enum Held {
    Host(Lent),
    /// The stream still needs it when the call is over.
    Device {
        lent: Arc<Lent>,
        range: DeviceRange,
    },
}

fn wrong(what: &str, kind: &str, message: String) -> PyErr {
    Wrong::Input.error(kind, &format!("{what}: {message}"), &[("tensor", what.into())])
}

impl Input {
    /// Borrows a tensor in memory of the host; `what` is its name in errors.
    ///
    /// # Errors
    /// `InputError`, with what to do about it; `PlanError` (`WrongPlace`) for memory of a device.
    pub fn new(object: &Bound<'_, PyAny>, what: &'static str) -> PyResult<Self> {
        Self::borrow(object, what, None)
    }

    /// Borrows a tensor in memory of the host or, with a stream, of the stream's device. Its
    /// library has the tensor ready for what the stream is given next.
    ///
    /// # Errors
    /// As [`Input::new`]; `DeviceError` where the tensor's library says what the driver does not.
    pub fn borrow(object: &Bound<'_, PyAny>, what: &'static str, on: Option<&OnStream>) -> PyResult<Self> {
        if !object.hasattr("__dlpack__")? {
            let class = object.get_type().name()?;
            let message = format!("a {class} is no tensor: pass one that speaks DLPack (torch, numpy)");
            return Err(wrong(what, "NotATensor", message));
        }
        // Before a capsule is asked for: some libraries would copy, or wait for a stream.
        check_place(object.call_method0("__dlpack_device__")?.extract()?, what, on)?;
        let lent = Lent::take(&Self::capsule(object, what, on.map(OnStream::dlpack_stream))?)?;
        check_place(lent.device(), what, on)?;
        let element = Element::of_code(lent.element()).ok_or_else(|| {
            let message = format!(
                "{} cannot be used: rows are float32, bfloat16, float16 or uint8, ids int32 or int64, weights float32",
                lent.element().name()
            );
            wrong(what, "Dtype", message)
        })?;
        let shape: Vec<usize> = lent.shape().iter().map(|&size| size as usize).collect();
        let (address, len) = (lent.address(), shape.iter().product::<usize>());
        let kind = Kind::of(object);
        check_layout(&lent, (what, kind), len)?;
        if len > 0 && !address.is_multiple_of(element.size()) {
            return Err(misaligned(what, kind, element));
        }
        let held = match on {
            None => Held::Host(lent),
            Some(on) => {
                let range = on.range(what, address, len * element.size())?;
                Held::Device { lent: Arc::new(lent), range }
            }
        };
        Ok(Input { held, what, kind, element, shape })
    }

    fn capsule<'py>(
        object: &Bound<'py, PyAny>,
        what: &'static str,
        stream: Option<usize>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = object.py();
        let plain = pyo3::types::PyDict::new(py);
        if let Some(stream) = stream {
            plain.set_item("stream", stream)?;
        }
        let versioned = plain.copy()?;
        versioned.set_item("max_version", (1, 0))?;
        let asked = match object.call_method("__dlpack__", (), Some(&versioned)) {
            Err(error) if error.is_instance_of::<PyTypeError>(py) => {
                object.call_method("__dlpack__", (), Some(&plain))
            }
            asked => asked,
        };
        asked.map_err(|error| {
            let refused =
                wrong(what, "NotLent", format!("its library does not lend it: {}", error.value(py)));
            refused.set_cause(py, Some(error));
            refused
        })
    }

    fn lent(&self) -> &Lent {
        match &self.held {
            Held::Host(lent) => lent,
            Held::Device { lent, .. } => lent,
        }
    }

    /// The loan that a stream needs after the call; none on the host.
    pub fn kept(&self) -> Option<Arc<Lent>> {
        match &self.held {
            Held::Host(_) => None,
            Held::Device { lent, .. } => Some(Arc::clone(lent)),
        }
    }

    /// Its memory on a device.
    pub fn range(&self) -> Option<&DeviceRange> {
        match &self.held {
            Held::Host(_) => None,
            Held::Device { range, .. } => Some(range),
        }
    }

    /// Type of its elements.
    pub fn element(&self) -> Element {
        self.element
    }

    /// Its sizes.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Number of its elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Where its bytes lie, and how many they are.
    pub fn place(&self) -> (usize, usize) {
        (self.lent().address(), self.len() * self.element.size())
    }

    /// An error unless its last axis has `columns` elements.
    pub fn columns(self, columns: usize) -> PyResult<Self> {
        if self.shape.last() == Some(&columns) {
            return Ok(self);
        }
        let message =
            format!("its shape is {:?}, but its last axis must have {columns} elements", self.shape);
        Err(wrong(self.what, "Shape", message))
    }

    /// An error unless it is a matrix of this shape.
    pub fn shaped(self, expected: [usize; 2]) -> PyResult<Self> {
        if self.shape == expected {
            return Ok(self);
        }
        let message = format!("its shape is {:?}, not {expected:?}", self.shape);
        Err(wrong(self.what, "Shape", message))
    }

    /// An error unless its elements are these.
    pub fn of(self, element: Element) -> PyResult<Self> {
        if self.element == element {
            return Ok(self);
        }
        Err(self.unfit(element.name()))
    }

    /// As rows.
    ///
    /// # Errors
    /// `InputError` for elements that rows do not have.
    pub fn rows(self) -> PyResult<Rows> {
        let dtype = match self.element {
            Element::F32 => Dtype::F32,
            Element::F16 => Dtype::F16,
            Element::Bf16 => Dtype::Bf16,
            Element::U8 => Dtype::Bytes,
            Element::I32 | Element::I64 | Element::F64 | Element::Bool => {
                return Err(self.unfit("float32, bfloat16, float16 or uint8"));
            }
        };
        Ok(Rows { input: self, dtype })
    }

    /// That its elements are not what they should be.
    pub fn unfit(&self, expected: &str) -> PyErr {
        wrong(self.what, "Dtype", format!("its elements are {}, not {expected}", self.element.name()))
    }

    /// An error if it must not be written to.
    pub fn writable(self) -> PyResult<Self> {
        if !self.lent().read_only() {
            return Ok(self);
        }
        Err(wrong(self.what, "ReadOnly", "it must not be written to".to_owned()))
    }

    /// Its bytes on the host, to write.
    ///
    /// # Errors
    /// As [`Input::slice`].
    pub fn bytes_mut(&mut self) -> PyResult<&mut [u8]> {
        let (_, bytes) = self.place();
        match &mut self.held {
            Held::Host(lent) => {
                lent.elements_mut(bytes).ok_or_else(|| misaligned(self.what, self.kind, self.element))
            }
            Held::Device { .. } => Err(elsewhere(self.what, A_DEVICE, THE_HOST)),
        }
    }

    /// An error if it shares bytes with one that is written meanwhile.
    pub fn apart_from(&self, written: &Input) -> PyResult<()> {
        let (mine, theirs) = (self.place(), written.place());
        if mine.0 + mine.1 <= theirs.0 || theirs.0 + theirs.1 <= mine.0 {
            return Ok(());
        }
        Err(wrong(self.what, "Overlap", format!("it overlaps {}, which is written meanwhile", written.what)))
    }

    /// Its elements on the host, which are known to be `T`.
    ///
    /// # Errors
    /// `InputError` without an address, `PlanError` on a device.
    pub fn slice<T: bytemuck::Pod>(&self) -> PyResult<&[T]> {
        let len = self.len() * self.element.size() / size_of::<T>();
        match &self.held {
            Held::Host(lent) => {
                lent.elements(len).ok_or_else(|| misaligned(self.what, self.kind, self.element))
            }
            Held::Device { .. } => Err(elsewhere(self.what, A_DEVICE, THE_HOST)),
        }
    }
}

/// A tensor whose elements can be rows: the library checks whether they are the rows that it
/// expects.
pub struct Rows {
    pub input: Input,
    pub dtype: Dtype,
}

impl Rows {
    /// An error if its elements are not those of an object whose dtype was not `given`: the caller
    /// does not know that there is a default.
    pub fn check_default(&self, dtype: Dtype, given: bool) -> PyResult<()> {
        if given || self.dtype == dtype {
            return Ok(());
        }
        let (seen, default) = (self.input.element.name(), Element::from(dtype).name());
        let message = format!(
            "its elements are {seen}, but rows are {default} where no dtype is given: make it with dtype=\"{seen}\""
        );
        Err(wrong(self.input.what, "Dtype", message))
    }

    /// As a call reads it.
    pub fn tensor(&self) -> Tensor<'_> {
        let (_, bytes) = self.input.place();
        match &self.input.held {
            // Without an address there are no rows, which is for the library to refuse.
            Held::Host(lent) => {
                Tensor::Host { bytes: lent.elements(bytes).unwrap_or_default(), dtype: self.dtype }
            }
            Held::Device { range, .. } => Tensor::device(range, self.dtype),
        }
    }

    /// As a call writes it.
    pub fn tensor_mut(&mut self) -> TensorMut<'_> {
        let (_, bytes) = self.input.place();
        match &mut self.input.held {
            Held::Host(lent) => {
                TensorMut::Host { bytes: lent.elements_mut(bytes).unwrap_or_default(), dtype: self.dtype }
            }
            Held::Device { range, .. } => TensorMut::device(range, self.dtype),
        }
    }
}

const THE_HOST: &str = "the host";
const A_DEVICE: &str = "a device";

/// The library's refusal of a tensor of the other place.
fn elsewhere(what: &'static str, seen: &'static str, expected: &'static str) -> PyErr {
    raise(PlanError::WrongPlace { what, seen, expected })
}

/// Refuses memory on a DLPack device that a call on this stream, or on the host, cannot use.
fn check_place(seen: (i32, i32), what: &'static str, on: Option<&OnStream>) -> PyResult<()> {
    let host = [dlpack::CPU, dlpack::CUDA_HOST].contains(&seen.0);
    match on {
        None if host => Ok(()),
        None => Err(elsewhere(what, A_DEVICE, THE_HOST)),
        Some(on) if seen == (dlpack::CUDA, on.device() as i32) => Ok(()),
        Some(_) if host => Err(elsewhere(what, THE_HOST, A_DEVICE)),
        Some(on) => {
            let (seen, device) = (name_of(seen), on.device());
            let message = format!(
                "it lies on {seen}, and rows lie on cuda:{device}: pass {what}.to(\"cuda:{device}\")"
            );
            Err(wrong(what, "Device", message))
        }
    }
}

fn check_layout(lent: &Lent, (what, kind): (&str, Kind), len: usize) -> PyResult<()> {
    let (shape, strides) = (lent.shape(), lent.strides());
    let mut next = 1;
    let mut contiguous = true;
    for (&size, &stride) in shape.iter().zip(strides).rev() {
        contiguous &= size == 1 || stride == next;
        next *= size;
    }
    if !contiguous && len > 0 {
        let copy = match kind {
            Kind::Torch => format!("{what}.contiguous()"),
            Kind::Numpy => format!("numpy.ascontiguousarray({what})"),
            Kind::Other => "a contiguous copy".to_owned(),
        };
        let message = format!("it is not contiguous (shape {shape:?}, strides {strides:?}): pass {copy}");
        return Err(wrong(what, "NotContiguous", message));
    }
    Ok(())
}

/// A device as torch writes it.
fn name_of((kind, id): (i32, i32)) -> String {
    match kind {
        dlpack::CUDA | 13 => format!("device cuda:{id}"),
        10 | 11 => format!("device rocm:{id}"),
        8 => format!("device mps:{id}"),
        other => format!("device {other}:{id} (DLPack's number)"),
    }
}

fn misaligned(what: &str, kind: Kind, element: Element) -> PyErr {
    let copy = match kind {
        Kind::Torch => format!("{what}.clone()"),
        Kind::Numpy => format!("{what}.copy()"),
        Kind::Other => "a copy".to_owned(),
    };
    wrong(what, "Misaligned", format!("its address is not aligned for {}: pass {copy}", element.name()))
}
