//! Tensors that are handed in: looked at before they are used, so that errors can say what to do.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use sidelane::Dtype;

use crate::dlpack::{self, Lent};
use crate::errors::Wrong;
use crate::tensor::Element;

/// A contiguous tensor in host memory, lent by another library.
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
    /// Borrows a tensor; `what` it is called in errors.
    ///
    /// # Errors
    /// `InputError`, with what to do about it.
    pub fn new(object: &Bound<'_, PyAny>, what: &'static str) -> PyResult<Self> {
        if !object.hasattr("__dlpack__")? {
            let class = object.get_type().name()?;
            let message = format!("a {class} is no tensor: pass one that speaks DLPack (torch, numpy)");
            return Err(wrong(what, "NotATensor", message));
        }
        Self::check_device(object, what)?;
        let lent = Lent::take(&Self::capsule(object, what)?)?;
        Self::of_host(lent.device(), what)?;
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

    /// Before a capsule is asked for: some libraries would copy, or wait for a stream.
    fn check_device(object: &Bound<'_, PyAny>, what: &'static str) -> PyResult<()> {
        Self::of_host(object.call_method0("__dlpack_device__")?.extract()?, what)
    }

    fn of_host((kind, id): (i32, i32), what: &str) -> PyResult<()> {
        if [dlpack::CPU, dlpack::CUDA_HOST].contains(&kind) {
            return Ok(());
        }
        let name = match kind {
            2 | 13 => format!("cuda:{id}"),
            10 | 11 => format!("rocm:{id}"),
            8 => format!("mps:{id}"),
            other => format!("{other}:{id} (DLPack's number)"),
        };
        let message = format!(
            "it lies on device {name}, and this exchange moves rows in host memory only: pass {what}.cpu() (exchanges of GPU \
             memory are not open to Python yet)"
        );
        Err(wrong(what, "Device", message))
    }

    fn capsule<'py>(object: &Bound<'py, PyAny>, what: &'static str) -> PyResult<Bound<'py, PyAny>> {
        let py = object.py();
        let version = pyo3::types::PyDict::new(py);
        version.set_item("max_version", (1, 0))?;
        let asked = match object.call_method("__dlpack__", (), Some(&version)) {
            Err(error) if error.is_instance_of::<PyTypeError>(py) => object.call_method0("__dlpack__"),
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
            Element::I32 | Element::I64 | Element::Bool => {
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

fn misaligned(what: &str, element: Element) -> PyErr {
    wrong(
        what,
        "Misaligned",
        format!("its address is not aligned for {}: pass {what}.clone()", element.name()),
    )
}
