//! Tensors that are handed in: looked at before they are used, so that errors can say what to do.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use sidelane::Dtype;

use crate::dlpack::{self, Lent};
use crate::errors::Wrong;
use crate::tensor::Element;

/// A contiguous tensor, lent by another library.
pub struct Input {
    lent: Lent,
    what: &'static str,
    element: Element,
    shape: Vec<usize>,
}

fn wrong(what: &str, kind: &str, message: String) -> PyErr {
    Wrong::Input.error(kind, &format!("{what}: {message}"), &[("tensor", what.into())])
}

impl Input {
    /// Borrows a tensor in memory of the host; `what` it is called in errors.
    ///
    /// # Errors
    /// `InputError`, with what to do about it.
    pub fn new(object: &Bound<'_, PyAny>, what: &'static str) -> PyResult<Self> {
        Self::where_it_fits(object, what, None, |device| Self::of_host(device, what))
    }

    /// Borrows a tensor in memory of a device, which is there for what that stream is given next: its library sees to it.
    ///
    /// # Errors
    /// As [`Input::new`].
    pub fn on_device(
        object: &Bound<'_, PyAny>,
        what: &'static str,
        device: u32,
        stream: usize,
    ) -> PyResult<Self> {
        Self::where_it_fits(object, what, Some(stream), |seen| {
            if seen == (dlpack::CUDA, device as i32) {
                return Ok(());
            }
            let message = format!(
                "it lies on {}, and this exchange is of cuda:{device}: pass {what}.to(\"cuda:{device}\")",
                name_of(seen)
            );
            Err(wrong(what, "Device", message))
        })
    }

    fn where_it_fits(
        object: &Bound<'_, PyAny>,
        what: &'static str,
        stream: Option<usize>,
        fits: impl Fn((i32, i32)) -> PyResult<()>,
    ) -> PyResult<Self> {
        if !object.hasattr("__dlpack__")? {
            let class = object.get_type().name()?;
            let message = format!("a {class} is no tensor: pass one that speaks DLPack (torch, numpy)");
            return Err(wrong(what, "NotATensor", message));
        }
        // Before a capsule is asked for: some libraries would copy, or wait for a stream.
        fits(object.call_method0("__dlpack_device__")?.extract()?)?;
        let lent = Lent::take(&Self::capsule(object, what, stream)?)?;
        fits(lent.device())?;
        let element = Element::of_code(lent.element()).ok_or_else(|| {
            let dlpack::ElementType { code, bits, lanes } = lent.element();
            let message = format!(
                "elements of DLPack type {code} with {bits} bits x {lanes} cannot be used: rows are float32, bfloat16, \
                 float16 or uint8, ids int32 or int64, weights float32"
            );
            wrong(what, "Dtype", message)
        })?;
        let input =
            Input { shape: lent.shape().iter().map(|&size| size as usize).collect(), lent, what, element };
        input.check_layout()?;
        if input.len() > 0 && !input.lent.address().is_multiple_of(element.size()) {
            return Err(misaligned(what, element));
        }
        Ok(input)
    }

    fn of_host(device: (i32, i32), what: &str) -> PyResult<()> {
        if [dlpack::CPU, dlpack::CUDA_HOST].contains(&device.0) {
            return Ok(());
        }
        let message = format!(
            "it lies on {}, and this exchange moves rows in host memory: pass {what}.cpu(), or use \
             sidelane.PlannedExchange",
            name_of(device)
        );
        Err(wrong(what, "Device", message))
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

    fn check_layout(&self) -> PyResult<()> {
        let (shape, strides) = (self.lent.shape(), self.lent.strides());
        let mut next = 1;
        let mut contiguous = true;
        for (&size, &stride) in shape.iter().zip(strides).rev() {
            contiguous &= size == 1 || stride == next;
            next *= size;
        }
        if !contiguous && self.len() > 0 {
            let message = format!(
                "it is not contiguous (shape {shape:?}, strides {strides:?}): pass {}.contiguous()",
                self.what
            );
            return Err(wrong(self.what, "NotContiguous", message));
        }
        Ok(())
    }

    /// What was lent, without the description.
    pub fn into_lent(self) -> Lent {
        self.lent
    }

    /// What it is called in errors.
    pub fn what(&self) -> &'static str {
        self.what
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
        (self.lent.address(), self.len() * self.element.size())
    }

    /// An error unless its last axis has `columns` elements.
    pub fn columns(self, columns: usize) -> PyResult<Self> {
        if self.shape.last() == Some(&columns) {
            return Ok(self);
        }
        let message = format!("its shape is {:?}, but rows have {columns} elements", self.shape);
        Err(wrong(self.what, "Shape", message))
    }

    /// An error unless it has so many rows.
    pub fn rows(&self, rows: usize, of: &str) -> PyResult<()> {
        let seen = self.shape.split_last().map_or(1, |(_, axes)| axes.iter().product::<usize>());
        if seen == rows {
            return Ok(());
        }
        let message = format!("its shape is {:?}, but there are {rows} {of}", self.shape);
        Err(wrong(self.what, "Shape", message))
    }

    /// An error unless its elements are these.
    pub fn of(self, element: Element) -> PyResult<Self> {
        if self.element == element {
            return Ok(self);
        }
        Err(self.unfit(element.name()))
    }

    /// As rows, or an error.
    pub fn dtype(&self) -> PyResult<Dtype> {
        match self.element {
            Element::F32 => Ok(Dtype::F32),
            Element::F16 => Ok(Dtype::F16),
            Element::Bf16 => Ok(Dtype::Bf16),
            Element::U8 => Ok(Dtype::Bytes),
            Element::I32 | Element::I64 | Element::F64 | Element::Bool => {
                Err(self.unfit("float32, bfloat16, float16 or uint8"))
            }
        }
    }

    /// That its elements are not what they should be.
    pub fn unfit(&self, expected: &str) -> PyErr {
        wrong(self.what, "Dtype", format!("its elements are {}, not {expected}", self.element.name()))
    }

    /// An error if it must not be written to.
    pub fn writable(self) -> PyResult<Self> {
        if !self.lent.read_only() {
            return Ok(self);
        }
        Err(wrong(self.what, "ReadOnly", "it must not be written to".to_owned()))
    }

    /// Its elements, which are known to be `T`.
    pub fn slice<T: bytemuck::Pod>(&self) -> PyResult<&[T]> {
        let len = self.len() * self.element.size() / size_of::<T>();
        self.lent.elements(len).ok_or_else(|| misaligned(self.what, self.element))
    }

    /// Its elements, to write to.
    pub fn slice_mut<T: bytemuck::Pod>(&mut self) -> PyResult<&mut [T]> {
        let len = self.len() * self.element.size() / size_of::<T>();
        match self.lent.elements_mut(len) {
            Some(elements) => Ok(elements),
            None => Err(misaligned(self.what, self.element)),
        }
    }
}

/// A device as torch writes it.
fn name_of((kind, id): (i32, i32)) -> String {
    match kind {
        dlpack::CPU | dlpack::CUDA_HOST => "the host".to_owned(),
        dlpack::CUDA | 13 => format!("device cuda:{id}"),
        10 | 11 => format!("device rocm:{id}"),
        8 => format!("device mps:{id}"),
        other => format!("device {other}:{id} (DLPack's number)"),
    }
}

fn misaligned(what: &str, element: Element) -> PyErr {
    wrong(
        what,
        "Misaligned",
        format!("its address is not aligned for {}: pass {what}.clone()", element.name()),
    )
}
