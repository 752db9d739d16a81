//! Collectives and messages of a group, on tensors of the host.
//!
//! Tensors have any shape; the library sees their bytes. Sums know three element types; what is
//! only moved may have any. Each collective call is entered by all ranks, also by one whose tensor
//! cannot be used ([`Communicator::refuse`]).

use std::sync::Arc;

use bytemuck::{try_cast_slice, try_cast_slice_mut};
use pyo3::prelude::*;
use sidelane::Dtype;
use sidelane::collective::{AllReduceAlgorithm, Communicator as Group, CommunicatorBuilder};
use sidelane::dtype::{PartialDtype, with_element};
use sidelane::error::{CallKind, Error, PlanError};

use crate::errors::{Wrong, first};
use crate::expert_parallel::group_of;
use crate::input::Input;
use crate::lending::LendingCell;
use crate::settings;
use crate::tensor::{Element, Kind, Tensor};
use crate::world::OpenWorld;

/// All-reduce, reduce-scatter, broadcast, all-to-all, all-gather and messages over a group of
/// ranks.
#[pyclass(frozen, module = "sidelane")]
pub struct Communicator {
    open_world: Arc<OpenWorld>,
    cell: Arc<LendingCell<Group>>,
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    size: u32,
}

/// A result: in memory of the caller's, or in new memory.
enum Target<'py> {
    Given { input: Input, object: Bound<'py, PyAny> },
    New { words: Vec<u64>, bytes: usize, shape: Vec<usize>, element: Element, kind: Kind },
}

impl<'py> Target<'py> {
    /// Memory for a result of this shape, with elements of `send`'s type.
    fn of(
        out: Option<&Bound<'py, PyAny>>,
        shape: Vec<usize>,
        (send, kind): (&Input, Kind),
    ) -> PyResult<Self> {
        let element = send.element();
        let Some(object) = out else {
            let elements = shape.iter().try_fold(1usize, |all, &size| all.checked_mul(size));
            let bytes = elements.and_then(|all| all.checked_mul(element.size()));
            let mut words = Vec::new();
            let bytes = bytes.filter(|&bytes| words.try_reserve_exact(bytes.div_ceil(8)).is_ok());
            let Some(bytes) = bytes else {
                return Err(settings::wrong("out", "there is no memory for the result"));
            };
            words.resize(bytes.div_ceil(8), 0);
            return Ok(Target::New { words, bytes, shape, element, kind });
        };
        let input = Input::new(object, "out")?.writable()?.of(element)?;
        if input.shape() != shape {
            return Err(shape_error("out", input.shape(), &format!("{shape:?}")));
        }
        send.apart_from(&input)?;
        Ok(Target::Given { input, object: object.clone() })
    }

    fn bytes_mut(&mut self) -> PyResult<&mut [u8]> {
        match self {
            Target::Given { input, .. } => input.bytes_mut(),
            Target::New { words, bytes, .. } => Ok(&mut bytemuck::cast_slice_mut(words)[..*bytes]),
        }
    }

    fn give(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Target::Given { object, .. } => Ok(object),
            Target::New { words, shape, element, kind, .. } => {
                kind.give(py, Tensor::of(words, &shape, element))
            }
        }
    }
}

fn shape_error(what: &str, seen: &[usize], expected: &str) -> PyErr {
    let message = format!("{what}: its shape is {seen:?}, expected {expected}");
    Wrong::Input.error("Shape", &message, &[("tensor", what.into())])
}

/// The type as which a collective call takes the elements of a tensor.
type TypeOf = fn(&Input) -> PyResult<Dtype>;

/// Of elements that a call only moves.
fn moved(input: &Input) -> PyResult<Dtype> {
    Ok(match input.element() {
        Element::F32 => Dtype::F32,
        Element::F16 => Dtype::F16,
        Element::Bf16 => Dtype::Bf16,
        Element::U8 | Element::I32 | Element::I64 | Element::F64 | Element::Bool => Dtype::Bytes,
    })
}

/// Of elements that a call sums.
fn summed(input: &Input) -> PyResult<Dtype> {
    match moved(input)? {
        Dtype::Bytes => Err(input.unfit("float32, bfloat16 or float16, which can be summed")),
        dtype => Ok(dtype),
    }
}

impl Communicator {
    /// Enters a collective call whose tensors cannot be used, so that the others hear of it.
    /// Returns the error to raise here.
    fn refuse(&self, py: Python<'_>, kind: CallKind, error: PyErr) -> PyErr {
        let refuse = |group: &mut Group| Err(group.refuse(kind, PlanError::RefusedHere.into()));
        let said: PyResult<()> = self.open_world.call(py, &self.cell, refuse);
        first(py, said, error)
    }

    /// A call with what a rank sends and where it wants the result, whose shape `shape` makes of
    /// that of `send`.
    fn transfer<'py>(
        &self,
        py: Python<'py>,
        (kind, type_of): (CallKind, TypeOf),
        (send, out): (&Bound<'py, PyAny>, Option<&Bound<'py, PyAny>>),
        shape: impl FnOnce(&[usize]) -> PyResult<Vec<usize>>,
        call: impl FnOnce(&mut Group, Dtype, &[u8], &mut [u8]) -> Result<(), Error> + Send,
    ) -> PyResult<Bound<'py, PyAny>> {
        let refused = |error| self.refuse(py, kind, error);
        let check = || {
            let input = Input::new(send, "send")?;
            let dtype = type_of(&input)?;
            let target = Target::of(out, shape(input.shape())?, (&input, Kind::of(send)))?;
            Ok((input, dtype, target))
        };
        let (input, dtype, mut target) = check().map_err(refused)?;
        let data = input.slice::<u8>().map_err(refused)?;
        let result = target.bytes_mut().map_err(refused)?;
        self.open_world.call(py, &self.cell, |group| call(group, dtype, data, result))?;
        target.give(py)
    }

    /// A call on one tensor, in place.
    fn in_place<'py>(
        &self,
        py: Python<'py>,
        (kind, type_of): (CallKind, TypeOf),
        tensor: &Bound<'py, PyAny>,
        call: impl FnOnce(&mut Group, Dtype, &mut [u8]) -> Result<(), Error> + Send,
    ) -> PyResult<Bound<'py, PyAny>> {
        let refused = |error| self.refuse(py, kind, error);
        let check = || {
            let input = Input::new(tensor, "tensor")?.writable()?;
            let dtype = type_of(&input)?;
            Ok((input, dtype))
        };
        let (mut input, dtype) = check().map_err(refused)?;
        let data = input.bytes_mut().map_err(refused)?;
        self.open_world.call(py, &self.cell, |group| call(group, dtype, data))?;
        Ok(tensor.clone())
    }

    /// First axis of a shape, in a part for each rank.
    fn parts(&self, shape: &[usize]) -> PyResult<usize> {
        let ranks = self.size as usize;
        match shape.first() {
            Some(rows) if rows.is_multiple_of(ranks) => Ok(rows / ranks),
            _ => Err(shape_error("send", shape, &format!("a first axis of {ranks} equal parts"))),
        }
    }
}

#[pymethods]
impl Communicator {
    /// Collective: all ranks of the group choose alike.
    #[new]
    #[pyo3(signature = (group, *, chunk=None, whole=None, sums="direct"))]
    fn new(
        py: Python<'_>,
        group: &Bound<'_, PyAny>,
        chunk: Option<u64>,
        whole: Option<u64>,
        sums: &str,
    ) -> PyResult<Self> {
        let group = group_of(group)?;
        let (open_world, members) = (group.get().open_world(), group.get().get()?);
        let set = || -> PyResult<(CommunicatorBuilder<'_>, ())> {
            let sums = match sums {
                "direct" => AllReduceAlgorithm::Direct,
                "ring" => AllReduceAlgorithm::Ring(PartialDtype::F32),
                "ring-bf16" => AllReduceAlgorithm::Ring(PartialDtype::Bf16),
                other => {
                    let why = format!("`{other}` is none of direct, ring, ring-bf16");
                    return Err(settings::wrong("sums", &why));
                }
            };
            let builder = Group::builder(&members).algorithm(sums);
            let builder = chunk.into_iter().fold(builder, CommunicatorBuilder::chunk);
            Ok((whole.into_iter().fold(builder, CommunicatorBuilder::one_shot_bytes), ()))
        };
        let refuse = || Group::builder(&members).chunk(0).build().map(drop);
        let (cell, ()) = open_world.build(py, "Communicator", set(), refuse, CommunicatorBuilder::build)?;
        Ok(Communicator {
            open_world: Arc::clone(open_world),
            cell,
            rank: members.rank(),
            size: members.size(),
        })
    }

    /// Sums a tensor over all ranks, in place. Returns it.
    fn all_reduce<'py>(&self, py: Python<'py>, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.in_place(py, (CallKind::AllReduce, summed), tensor, |group, dtype, data| {
            with_element!(dtype, E => group.all_reduce::<E>(try_cast_slice_mut(data).unwrap_or_default()))
        })
    }

    /// The tensor of rank `root`, for all, in place. Returns it.
    #[pyo3(signature = (tensor, root=0))]
    fn broadcast<'py>(
        &self,
        py: Python<'py>,
        tensor: &Bound<'py, PyAny>,
        root: u32,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.in_place(py, (CallKind::Broadcast, moved), tensor, |group, dtype, data| {
            with_element!(dtype, E => group.broadcast::<E>(root, try_cast_slice_mut(data).unwrap_or_default()))
        })
    }

    /// Sums over all ranks of this rank's part: [ranks * n, ..] becomes [n, ..].
    #[pyo3(signature = (send, out=None))]
    fn reduce_scatter<'py>(
        &self,
        py: Python<'py>,
        send: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let shape = |send: &[usize]| Ok([&[self.parts(send)?], &send[1..]].concat());
        self.transfer(py, (CallKind::ReduceScatter, summed), (send, out), shape, |group, dtype, send, out| {
            with_element!(dtype, E => group.reduce_scatter::<E>(
                try_cast_slice(send).unwrap_or_default(),
                try_cast_slice_mut(out).unwrap_or_default(),
            ))
        })
    }

    /// Part r of the first axis goes to rank r; part s of the result is from rank s.
    #[pyo3(signature = (send, out=None))]
    fn all_to_all<'py>(
        &self,
        py: Python<'py>,
        send: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let shape = |send: &[usize]| self.parts(send).map(|_| send.to_vec());
        self.transfer(py, (CallKind::AllToAll, moved), (send, out), shape, |group, dtype, send, out| {
            with_element!(dtype, E => group.all_to_all::<E>(
                try_cast_slice(send).unwrap_or_default(),
                try_cast_slice_mut(out).unwrap_or_default(),
            ))
        })
    }

    /// The tensors of all ranks, by rank: [n, ..] becomes [ranks * n, ..].
    #[pyo3(signature = (send, out=None))]
    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        send: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let ranks = self.size as usize;
        let shape = |send: &[usize]| match send {
            [] => Ok(vec![ranks]),
            [rows, rest @ ..] => Ok([&[rows.saturating_mul(ranks)], rest].concat()),
        };
        self.transfer(py, (CallKind::AllGather, moved), (send, out), shape, |group, dtype, send, out| {
            with_element!(dtype, E => group.all_gather::<E>(
                try_cast_slice(send).unwrap_or_default(),
                try_cast_slice_mut(out).unwrap_or_default(),
            ))
        })
    }

    /// Sends a tensor to a rank, whose `receive` takes it. Messages of a pair of ranks keep their
    /// order.
    fn send(&self, py: Python<'_>, peer: u32, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let input = Input::new(tensor, "tensor")?;
        let (dtype, data) = (moved(&input)?, input.slice::<u8>()?);
        self.open_world.call(py, &self.cell, |group| {
            with_element!(dtype, E => group.send::<E>(peer, try_cast_slice(data).unwrap_or_default()))
        })
    }

    /// Receives the next message of a rank into a tensor of its length and type. Returns it.
    fn receive<'py>(
        &self,
        py: Python<'py>,
        peer: u32,
        tensor: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut input = Input::new(tensor, "tensor")?.writable()?;
        let (dtype, data) = (moved(&input)?, input.bytes_mut()?);
        self.open_world.call(py, &self.cell, |group| {
            with_element!(dtype, E => group.receive::<E>(peer, try_cast_slice_mut(data).unwrap_or_default()))
        })?;
        Ok(tensor.clone())
    }

    /// Sends to a rank and receives from it, at once. Returns `receive`.
    fn exchange<'py>(
        &self,
        py: Python<'py>,
        peer: u32,
        send: &Bound<'py, PyAny>,
        receive: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let sent = Input::new(send, "send")?;
        let mut received = Input::new(receive, "receive")?.writable()?.of(sent.element())?;
        sent.apart_from(&received)?;
        let dtype = moved(&sent)?;
        let (data, into) = (sent.slice::<u8>()?, received.bytes_mut()?);
        self.open_world.call(py, &self.cell, |group| {
            with_element!(dtype, E => group.send_receive::<E>(
                peer,
                try_cast_slice(data).unwrap_or_default(),
                try_cast_slice_mut(into).unwrap_or_default(),
            ))
        })?;
        Ok(receive.clone())
    }

    /// Waits until a rank has taken all messages that were sent to it.
    fn flush(&self, py: Python<'_>, peer: u32) -> PyResult<()> {
        self.open_world.call(py, &self.cell, |group| group.flush(peer))
    }

    fn __repr__(&self) -> String {
        format!("sidelane.Communicator(rank={}, size={})", self.rank, self.size)
    }
}
