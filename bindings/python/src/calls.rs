//! How calls of an `ExpertParallel` are made from Python.
//!
//! Every call is collective, so a rank whose input is refused before the library sees it still enters the call, with
//! something that the library refuses: the others get `CallError` (`PeerRefused`), nobody waits, and the next call works.
//!
//! ```text
//!   outward   dispatch along a handle, gradient of combine:   tokens --> rows
//!   bring     combine, gradient of dispatch:                  rows (an output buffer, or elsewhere) --> tokens
//! ```

use std::sync::Arc;

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use sidelane::Dtype;
use sidelane::ep::{Contribution, ExpertOutput, ExpertRows};
use sidelane::gate::Routing;
use sidelane::memory::Pool;

use crate::errors::{Wrong, raise};
use crate::handle::{Handle, Shape};
use crate::input::Input;
use crate::parallel::ExpertParallel;
use crate::slot::Slot;
use crate::tensor::{Element, Kind, Memory, Outputs, Tensor};
use crate::world::Seat;

/// Runs code for the element type of rows.
macro_rules! typed {
    ($dtype:expr, $name:ident => $body:expr) => {
        match $dtype {
            Dtype::F32 => {
                type $name = f32;
                $body
            }
            Dtype::Bf16 => {
                type $name = half::bf16;
                $body
            }
            Dtype::F16 => {
                type $name = half::f16;
                $body
            }
            Dtype::Bytes => {
                type $name = u8;
                $body
            }
        }
    };
}
pub(crate) use typed;

/// The inputs of a dispatch.
pub struct Tokens {
    pub x: Input,
    pub dtype: Dtype,
    pub routing: Routing<'static>,
    pub kind: Kind,
}

/// What a call brings into a return.
pub enum Brought {
    /// The memory of an output buffer: it leaves it by [`with_buffer`].
    Buffer(Arc<Memory>),
    /// Any tensor.
    Elsewhere(Input),
}

impl Brought {
    /// Checks rows, and whether they are an output buffer of their owner's.
    pub fn look(
        y: &Bound<'_, PyAny>,
        what: &'static str,
        columns: usize,
        (outputs, owner): (&Outputs, &str),
    ) -> PyResult<Brought> {
        let y = Input::new(y, what)?.columns(columns)?;
        y.dtype()?;
        let Some(memory) = outputs.find(&y) else { return Ok(Brought::Elsewhere(y)) };
        if memory.is_owned() {
            return Ok(Brought::Buffer(memory));
        }
        let message =
            format!("{what}: this output buffer went into an earlier call: ask for {owner}.output() again");
        Err(Wrong::Closed.error("UsedUp", &message, &[("tensor", what.into())]))
    }
}

/// Makes a call with an output buffer. It leaves its memory only here, where nobody but the library can refuse the call,
/// and is there `again` if that does.
pub fn with_buffer<R>(
    memory: &Memory,
    again: impl FnOnce() -> Result<ExpertOutput, sidelane::Error>,
    call: impl FnOnce(Contribution<'_>) -> Result<R, sidelane::Error>,
) -> Result<R, sidelane::Error> {
    // None if another thread has brought it meanwhile: then it is for the library to refuse.
    let done = call(memory.take::<ExpertOutput>().map_or_else(unusable, Contribution::from));
    if done.is_err()
        && let Ok(mut again) = again()
        && again.rows_mut::<u8>().is_ok_and(|rows| memory.is(rows.as_ptr() as usize, rows.len()))
    {
        memory.put_back(Box::new(again));
    }
    done
}

impl ExpertParallel {
    /// What pending calls put back.
    pub fn parts(&self) -> (&Arc<Seat>, &Arc<Slot<sidelane::ExpertParallel>>, &Shape) {
        (&self.seat, &self.slot, &self.shape)
    }

    /// Elements and type of a row that is dispatched.
    pub fn sent(&self) -> (usize, Dtype) {
        self.sent
    }

    /// A collective call.
    pub fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut sidelane::ExpertParallel) -> Result<T, sidelane::Error> + Send,
    ) -> PyResult<T> {
        self.seat.call(py, &self.slot, call)
    }

    /// As [`ExpertParallel::call`], along a handle.
    pub fn along<T: Send>(
        &self,
        py: Python<'_>,
        handle: &Handle,
        call: impl FnOnce(&mut sidelane::ExpertParallel, &sidelane::ep::Handle) -> Result<T, sidelane::Error>
        + Send,
    ) -> PyResult<T> {
        handle.slot.lend(|held| self.call(py, |ep| call(ep, held)))
    }

    /// Checks tokens, ids and weights.
    pub fn tokens(
        &self,
        x: &Bound<'_, PyAny>,
        experts: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
    ) -> PyResult<Tokens> {
        let kind = Kind::of(x);
        let x = Input::new(x, "x")?.columns(self.sent.0)?;
        let dtype = x.dtype()?;
        Ok(Tokens { x, dtype, routing: self.routing(experts, weights)?, kind })
    }

    /// Checks ids and weights.
    pub fn routing(
        &self,
        experts: &Bound<'_, PyAny>,
        weights: &Bound<'_, PyAny>,
    ) -> PyResult<Routing<'static>> {
        let top_k = self.shape.top_k;
        let ids = Input::new(experts, "experts")?.columns(top_k)?;
        let ids: Vec<i32> = match ids.element() {
            Element::I32 => ids.slice::<i32>()?.to_vec(),
            // What does not fit is no expert, and is named by the library.
            Element::I64 => {
                let narrow = |&id: &i64| i32::try_from(id).unwrap_or(i32::MAX);
                ids.slice::<i64>()?.iter().map(narrow).collect()
            }
            _ => return Err(ids.unfit("int32 or int64")),
        };
        let weights = Input::new(weights, "weights")?.columns(top_k)?.of(Element::F32)?;
        Routing::new(top_k as u32, ids, weights.slice::<f32>()?.to_vec()).map_err(raise)
    }

    /// Checks expert outputs or gradients of rows.
    pub fn brought(&self, y: &Bound<'_, PyAny>, handle: &Handle, what: &'static str) -> PyResult<Brought> {
        Brought::look(y, what, self.shape.hidden, (&handle.outputs, "handle"))
    }

    /// A return along a handle: combine, or the gradient of dispatch. `call` gets nothing where the input was refused.
    pub fn bring<T: Send>(
        &self,
        py: Python<'_>,
        handle: &Handle,
        brought: PyResult<Brought>,
        call: impl FnOnce(
            &mut sidelane::ExpertParallel,
            Contribution<'_>,
            &sidelane::ep::Handle,
        ) -> Result<T, sidelane::Error>
        + Send,
    ) -> PyResult<T> {
        match brought {
            Ok(Brought::Elsewhere(rows)) => {
                let rows = contribution(&rows)?;
                self.along(py, handle, |ep, handle| call(ep, rows, handle))
            }
            Ok(Brought::Buffer(memory)) => self.along(py, handle, |ep, handle| {
                with_buffer(&memory, || handle.output(), |rows| call(ep, rows, handle))
            }),
            Err(error) => {
                let refused = self.along(py, handle, |ep, handle| call(ep, unusable(), handle));
                Err(first(py, refused, error))
            }
        }
    }

    /// Rows that came, as Python sees them.
    pub fn rows<'py>(
        &self,
        py: Python<'py>,
        rows: ExpertRows,
        kind: Kind,
        sent: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (columns, dtype) = if sent { self.sent } else { (self.shape.hidden, self.shape.dtype) };
        rows_of(py, rows, kind, (columns, dtype), &self.shape.pool)
    }

    /// Enters a dispatch in which this rank's input is refused.
    pub fn refuse(&self, py: Python<'_>, error: PyErr) -> PyErr {
        let top_k = self.shape.top_k;
        let refused = self.call(py, |ep| ep.dispatch::<u8>(&[], &other_routing(top_k)?));
        first(py, refused, error)
    }

    /// Tokens along a handle: gives `call` the element type, and something to refuse where the input cannot be used.
    pub fn outward<T: Send>(
        &self,
        py: Python<'_>,
        handle: &Handle,
        (x, what, columns, sent): (&Bound<'_, PyAny>, &'static str, usize, Dtype),
        call: impl FnOnce(
            &mut sidelane::ExpertParallel,
            Rows<'_>,
            &sidelane::ep::Handle,
        ) -> Result<T, sidelane::Error>
        + Send,
    ) -> PyResult<T> {
        let checked = Input::new(x, what).and_then(|x| x.columns(columns)).and_then(|x| Ok((x.dtype()?, x)));
        match checked {
            Ok((dtype, x)) => {
                let rows = Rows { bytes: x.slice::<u8>()?, dtype };
                self.along(py, handle, |ep, handle| call(ep, rows, handle))
            }
            Err(error) => {
                let dtype = if sent == Dtype::Bytes { Dtype::F32 } else { Dtype::Bytes };
                let refused =
                    self.along(py, handle, |ep, handle| call(ep, Rows { bytes: &[], dtype }, handle));
                Err(first(py, refused, error))
            }
        }
    }
}

/// Rows of a type that is known at run time.
pub struct Rows<'a> {
    pub bytes: &'a [u8],
    pub dtype: Dtype,
}

/// Bytes as the elements that they are known to be; where there are none, their address means nothing.
pub fn typed_rows<E: bytemuck::Pod>(bytes: &[u8]) -> &[E] {
    if bytes.is_empty() { &[] } else { bytemuck::cast_slice(bytes) }
}

/// As [`typed_rows`], to write to.
pub fn typed_mut<E: bytemuck::Pod>(bytes: &mut [u8]) -> &mut [E] {
    if bytes.is_empty() { &mut [] } else { bytemuck::cast_slice_mut(bytes) }
}

/// Rows in the pool as a tensor of the caller's kind.
pub fn rows_of<'py>(
    py: Python<'py>,
    mut rows: ExpertRows,
    kind: Kind,
    (columns, dtype): (usize, Dtype),
    pool: &Arc<Pool>,
) -> PyResult<Bound<'py, PyAny>> {
    let count = rows.len() as usize;
    let bytes = rows.rows_mut::<u8>().map_err(raise)?;
    let (address, len) = (bytes.as_mut_ptr() as usize, bytes.len());
    let memory = Memory::at(address, len, Box::new(rows), Some(Arc::clone(pool)));
    kind.give(py, Tensor::new(memory, &[count, columns], dtype.into()))
}

/// Rows elsewhere, in whatever type they are: the library compares.
pub fn contribution(rows: &Input) -> PyResult<Contribution<'_>> {
    Ok(Contribution::Elsewhere { bytes: rows.slice::<u8>()?, dtype: rows.dtype()? })
}

/// Rows that every library refuses: bytes cannot be summed.
pub fn unusable<'a>() -> Contribution<'a> {
    Contribution::Elsewhere { bytes: &[], dtype: Dtype::Bytes }
}

/// A routing that is refused: of another number of choices.
pub fn other_routing(top_k: usize) -> Result<Routing<'static>, sidelane::Error> {
    Ok(Routing::new(top_k as u32 + 1, Vec::new(), Vec::new())?)
}

/// Of this rank's own error and what the refused call said: Ctrl-C comes first.
pub fn first<T>(py: Python<'_>, said: PyResult<T>, own: PyErr) -> PyErr {
    said.err().filter(|said| !said.is_instance_of::<PyException>(py)).unwrap_or(own)
}

impl ExpertParallel {
    /// A tensor of sums, of tokens.
    pub fn sums<E: bytemuck::Pod + Send>(&self, sums: Vec<E>) -> Tensor {
        let rows = sums.len() / self.shape.hidden;
        Tensor::of(sums, &[rows, self.shape.hidden], self.shape.dtype.into())
    }

    pub fn choices(&self, weights: Vec<f32>) -> Tensor {
        let rows = weights.len() / self.shape.top_k;
        Tensor::of(weights, &[rows, self.shape.top_k], Element::F32)
    }

    /// A tensor that sums are written to.
    pub fn home(&self, out: &Bound<'_, PyAny>) -> PyResult<Input> {
        let out = Input::new(out, "out")?.columns(self.shape.hidden)?.writable()?;
        out.dtype().map(|_| out)
    }
}
