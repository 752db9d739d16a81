//! Calls of an `ExpertParallel` from Python.
//!
//! Every call is collective. A rank whose input is refused before the library sees it enters the
//! call by [`refuse`](sidelane::ExpertParallel::refuse): the others get `CallError`
//! (`PeerRefused`), no rank waits, and the next call works.
//!
//! ```text
//!   dispatch, dispatch along a handle, gradient of combine:   tokens --> rows
//!   combine, gradient of dispatch:                            rows (an output buffer, or elsewhere) --> tokens
//! ```

use std::sync::Arc;

use pyo3::prelude::*;
use sidelane::Dtype;
use sidelane::device::DeviceRange;
use sidelane::ep::{CallExecutor, Choices, CombineInput, ExpertOutput, Tensor, TensorMut};
use sidelane::error::{CallKind, PlanError};
use sidelane::gate::Routing;

use crate::device::{OnStream, Place};
use crate::errors::{Wrong, first, raise};
use crate::handle::{Handle, Shape};
use crate::input::{Input, Rows};
use crate::lending::LendingCell;
use crate::settings;
use crate::tensor::{self, Element, Kind, Memory, Outputs, extent_of};
use crate::world::OpenWorld;

/// The choices of a dispatch.
pub enum Chosen {
    /// Copied from memory of the host.
    Host(Routing<'static>),
    /// In memory of the device: ids, then weights.
    Device { ranges: [DeviceRange; 2], inputs: Vec<Input> },
}

impl Chosen {
    /// As a call reads them.
    pub fn choices(&self) -> Choices<'_> {
        match self {
            Chosen::Host(routing) => Choices::Host(routing),
            Chosen::Device { ranges: [experts, weights], .. } => Choices::Device { experts, weights },
        }
    }

    /// Memory that a stream may still read after the call.
    pub fn inputs(&self) -> &[Input] {
        match self {
            Chosen::Host(_) => &[],
            Chosen::Device { inputs, .. } => inputs,
        }
    }
}

/// The inputs of a dispatch.
pub struct Tokens {
    pub x: Rows,
    pub chosen: Chosen,
    pub kind: Kind,
}

impl Tokens {
    /// Memory that a stream may still read after the call.
    pub fn inputs(&self) -> impl Iterator<Item = &Input> {
        self.chosen.inputs().iter().chain([&self.x.input])
    }
}

/// Rows that a call brings into a return.
pub struct Brought {
    pub rows: Rows,
    /// The output buffer that they are.
    buffer: Option<Arc<Memory>>,
}

impl Brought {
    /// Checks rows, and whether they are an output buffer of their owner's.
    pub fn look(
        y: &Bound<'_, PyAny>,
        what: &'static str,
        (columns, place): (usize, &Place),
        (outputs, owner): (&Outputs, &str),
    ) -> PyResult<Brought> {
        let rows = place.borrow(y, what)?.columns(columns)?.rows()?;
        let buffer = outputs.find(&rows.input);
        if buffer.as_ref().is_none_or(|memory| memory.is_owned()) {
            return Ok(Brought { rows, buffer });
        }
        let message =
            format!("{what}: this output buffer went into an earlier call: ask for {owner}.output() again");
        Err(Wrong::Closed.error("UsedUp", &message, &[("tensor", what.into())]))
    }

    /// Makes a call with these rows. An output buffer leaves its memory only here, where none but
    /// the library can refuse the call, and is there `again` if that does.
    pub fn lend<R>(
        &self,
        again: impl FnOnce() -> Result<ExpertOutput, sidelane::Error>,
        call: impl FnOnce(CombineInput<'_>) -> Result<R, sidelane::Error>,
    ) -> Result<R, sidelane::Error> {
        let Some(memory) = &self.buffer else { return call(self.rows.tensor().into()) };
        // None if another thread has brought it meanwhile: then it is for the library to refuse.
        let done = call(memory.take::<ExpertOutput>().map_or_else(unusable, CombineInput::from));
        if done.is_err()
            && let Ok(mut again) = again()
            && extent_of(&mut again).is_ok_and(|(address, bytes)| memory.is(address, bytes))
        {
            memory.put_back(Box::new(again));
        }
        done
    }
}

/// An instance, as its calls, pending ones among them, have it.
#[derive(Clone)]
pub struct Instance {
    pub open_world: Arc<OpenWorld>,
    pub cell: Arc<LendingCell<sidelane::ExpertParallel>>,
    pub shape: Shape,
}

impl Instance {
    /// A collective call.
    pub fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut sidelane::ExpertParallel) -> Result<T, sidelane::Error> + Send,
    ) -> PyResult<T> {
        self.open_world.call(py, &self.cell, call)
    }

    /// Goes on with torch's current stream, if calls go there. A stream that is being captured is
    /// for constant programs alone; other calls fork from it.
    ///
    /// # Errors
    /// Those of torch, `DeviceError`, `BusyError`.
    pub fn follow(&self, py: Python<'_>) -> PyResult<()> {
        let Some(on) = self.shape.place.on() else { return Ok(()) };
        let Some(next) = on.moved(py)? else { return Ok(()) };
        let constant = self.cell.lend(|ep| Ok(ep.executor() == CallExecutor::ConstantProgram))?;
        if constant || !on.is_captured(next).map_err(raise)? { self.set_stream(py, on, next) } else { Ok(()) }
    }

    /// Goes on with another stream.
    ///
    /// # Errors
    /// `DeviceError`, `BusyError`, `PlanError`.
    pub fn set_stream(&self, py: Python<'_>, on: &OnStream, stream: usize) -> PyResult<()> {
        self.cell.lend(|ep| py.detach(|| on.set_stream(ep, stream)).map_err(raise))
    }

    /// A collective call along a handle, or the refusal of one whose input cannot be used.
    pub fn along<I: Send, T: Send>(
        &self,
        py: Python<'_>,
        (kind, handle): (CallKind, &Handle),
        input: PyResult<I>,
        call: impl FnOnce(&mut sidelane::ExpertParallel, I, &sidelane::ep::Handle) -> Result<T, sidelane::Error>
        + Send,
    ) -> PyResult<T> {
        match input {
            Ok(input) => handle.cell.lend(|held| self.call(py, |ep| call(ep, input, held))),
            Err(error) => Err(self.refuse(py, kind, Some(handle), error)),
        }
    }

    /// Enters a call that this rank cannot make, so that the others hear of it. Returns the error
    /// to raise here.
    pub fn refuse(&self, py: Python<'_>, kind: CallKind, handle: Option<&Handle>, error: PyErr) -> PyErr {
        let here = || PlanError::RefusedHere.into();
        let said: PyResult<()> = match handle {
            Some(handle) => {
                handle.cell.lend(|held| self.call(py, |ep| Err(ep.refuse(kind, Some(held), here()))))
            }
            None => self.call(py, |ep| Err(ep.refuse(kind, None, here()))),
        };
        first(py, said, error)
    }

    /// Checks the inputs of a dispatch: tokens, ids and weights.
    pub fn tokens(&self, py: Python<'_>, [x, experts, weights]: [&Bound<'_, PyAny>; 3]) -> PyResult<Tokens> {
        let look = || {
            self.follow(py)?;
            Ok(Tokens { x: self.sent(x)?, chosen: self.chosen(experts, weights)?, kind: Kind::of(x) })
        };
        look().map_err(|error| self.refuse(py, CallKind::Dispatch, None, error))
    }

    /// Checks ids and weights.
    pub fn chosen(&self, experts: &Bound<'_, PyAny>, weights: &Bound<'_, PyAny>) -> PyResult<Chosen> {
        let Shape { top_k, place, .. } = &self.shape;
        let mut ids = place.borrow(experts, "experts")?.columns(*top_k)?;
        if ids.range().is_some() && ids.element() == Element::I64 && Kind::of(experts) == Kind::Torch {
            ids = place.borrow(&narrowed(experts)?, "experts")?;
        }
        let weights = place.borrow(weights, "weights")?.columns(*top_k)?.of(Element::F32)?;
        if let (Some(experts), Some(range)) = (ids.range(), weights.range()) {
            let ranges = [experts.clone(), range.clone()];
            return Ok(Chosen::Device { ranges, inputs: vec![ids.of(Element::I32)?, weights] });
        }
        let ids: Vec<i32> = match ids.element() {
            Element::I32 => ids.slice::<i32>()?.to_vec(),
            // What does not fit is no expert, and is named by the library.
            Element::I64 => {
                let narrow = |&id: &i64| i32::try_from(id).unwrap_or(i32::MAX);
                ids.slice::<i64>()?.iter().map(narrow).collect()
            }
            _ => return Err(ids.unfit("int32 or int64")),
        };
        let routing = Routing::new(*top_k as u32, ids, weights.slice::<f32>()?.to_vec());
        Ok(Chosen::Host(routing.map_err(raise)?))
    }

    /// Checks tokens of a dispatch: as they are sent or, on a device, rows that records are made
    /// of.
    pub fn sent(&self, x: &Bound<'_, PyAny>) -> PyResult<Rows> {
        let Shape { place, sent, hidden, dtype, dtype_given, .. } = &self.shape;
        let input = place.borrow(x, "x")?;
        let plain = place.on().is_some() && input.element() != Element::U8;
        let (columns, dtype) = if plain { (*hidden, *dtype) } else { *sent };
        let rows = input.columns(columns)?.rows()?;
        rows.check_default(dtype, *dtype_given)?;
        Ok(rows)
    }

    /// Checks tokens of a call along a handle.
    pub fn rows(&self, x: &Bound<'_, PyAny>, what: &'static str, columns: usize) -> PyResult<Rows> {
        self.shape.place.borrow(x, what)?.columns(columns)?.rows()
    }

    /// Checks expert outputs or gradients of rows.
    pub fn brought(&self, y: &Bound<'_, PyAny>, handle: &Handle, what: &'static str) -> PyResult<Brought> {
        let Shape { hidden, place, .. } = &self.shape;
        Brought::look(y, what, (*hidden, place), (&handle.outputs, "handle"))
    }

    /// Sums of a dispatch's tokens: where the caller wants them, or in new memory.
    pub fn sums<'py>(
        &self,
        py: Python<'py>,
        (tokens, kind): (usize, Kind),
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Sums<'py>> {
        let Shape { hidden, dtype, .. } = self.shape;
        self.target(py, ("out", kind), ([tokens, hidden], dtype), out)
    }

    /// Gradients of the weights of a dispatch's choices, likewise.
    pub fn choices<'py>(
        &self,
        py: Python<'py>,
        (tokens, kind): (usize, Kind),
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Sums<'py>> {
        self.target(py, ("weights_out", kind), ([tokens, self.shape.top_k], Dtype::F32), out)
    }

    /// Records of tokens, likewise.
    pub fn records<'py>(
        &self,
        py: Python<'py>,
        (tokens, kind): (usize, Kind),
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Sums<'py>> {
        let (columns, dtype) = self.shape.sent;
        self.target(py, ("out", kind), ([tokens, columns], dtype), out)
    }

    /// A tensor of this shape to write to: the caller's, or a new one.
    fn target<'py>(
        &self,
        py: Python<'py>,
        (what, kind): (&'static str, Kind),
        (shape, dtype): ([usize; 2], Dtype),
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Sums<'py>> {
        let place = &self.shape.place;
        let tensor = match (out, place.on()) {
            (Some(out), _) => out.clone(),
            (None, None) => return Ok(Sums::new_on_host(shape, dtype, kind)),
            (None, Some(on)) if kind == Kind::Torch => on.torch_empty(py, shape, dtype.into())?,
            (None, Some(_)) => {
                return Err(settings::wrong(what, "needed on a device, but for tensors of torch"));
            }
        };
        let rows = place.borrow(&tensor, what)?.columns(shape[1])?.writable()?.rows()?;
        let torch = if out.is_none() { place.on().cloned() } else { None };
        Ok(Sums::InTensor { rows, tensor, torch })
    }
}

/// A tensor that sums are written to.
pub enum Sums<'py> {
    /// A new one on the host, in whole words.
    OnHost { words: Vec<u64>, shape: [usize; 2], dtype: Dtype, kind: Kind },
    /// One of the caller's library; with a stream, made for this call.
    InTensor { rows: Rows, tensor: Bound<'py, PyAny>, torch: Option<Arc<OnStream>> },
}

impl<'py> Sums<'py> {
    /// Zeros on the host.
    pub fn new_on_host(shape: [usize; 2], dtype: Dtype, kind: Kind) -> Self {
        let bytes = shape[0] * shape[1] * dtype.size();
        Sums::OnHost { words: vec![0; bytes.div_ceil(size_of::<u64>())], shape, dtype, kind }
    }

    /// As a call writes them.
    pub fn tensor_mut(&mut self) -> TensorMut<'_> {
        match self {
            Sums::OnHost { words, shape, dtype, .. } => {
                let len = shape[0] * shape[1] * dtype.size();
                TensorMut::Host { bytes: &mut bytemuck::cast_slice_mut(words)[..len], dtype: *dtype }
            }
            Sums::InTensor { rows, .. } => rows.tensor_mut(),
        }
    }

    /// What a stream may still write when the call is over.
    pub fn input(&self) -> Option<&Input> {
        match self {
            Sums::OnHost { .. } => None,
            Sums::InTensor { rows, .. } => Some(&rows.input),
        }
    }

    /// As the caller gets them.
    pub fn give(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Sums::OnHost { words, shape, dtype, kind } => {
                kind.give(py, tensor::Tensor::of(words, &shape, dtype.into()))
            }
            Sums::InTensor { tensor, torch, .. } => {
                torch.map_or(Ok(()), |on| on.before_torch(py))?;
                Ok(tensor)
            }
        }
    }
}

/// Ids of 64 bits in 32, by torch on the device. What does not fit is no expert, and is refused as
/// such.
fn narrowed<'py>(ids: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let int32 = ids.py().import("torch")?.getattr("int32")?;
    ids.call_method1("clamp", (i32::MIN, i32::MAX))?.call_method1("to", (int32,))
}

/// Rows that every library refuses: bytes cannot be summed.
pub fn unusable<'a>() -> CombineInput<'a> {
    Tensor::Host { bytes: &[], dtype: Dtype::Bytes }.into()
}
