//! `MoeLayer`: gate, dispatch, experts, combine and gradients, on the host or on a GPU.
//!
//! ```text
//!   Python   x, residual --DLPack--> Input of the host, or a DeviceRange on its stream
//!   MoeLayer   forward  --> (out, Tape)           out: memory of torch, written in place
//!              backward (tape, d_out) --> gradients, into tensors of the caller or new ones
//! ```
//!
//! The class is the same in both places. The library has a type for each, and a layer on a GPU is
//! enqueued on the stream that it was built with: tensors of other streams are ordered with it by
//! DLPack's events.

use std::sync::Arc;

use half::{bf16, f16};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use sidelane::Dtype;
use sidelane::dtype::Element as Value;
use sidelane::error::PlanError;
use sidelane::gate::RngKey;
use sidelane::layer::{
    DeviceGradients, DeviceMoeLayer, DeviceMoeLayerBuilder, DeviceTape, Gradients, GroupedSwiGlu,
    Input as Step, MoeLayer as HostMoeLayer, MoeLayerBuilder, Products, Tape as HostTape,
};

use crate::device::{Lender, OnStream, Place};
use crate::errors::{first, raise};
use crate::expert_parallel::{group_of, map};
use crate::gate::{Decision, config_of};
use crate::input::{Input, Rows};
use crate::lending::{Close, LendingCell};
use crate::losses::balance_of;
use crate::settings;
use crate::tensor::{Element, Kind, Tensor};
use crate::world::OpenWorld;

/// A layer of either place.
enum LayerAt {
    Host(Box<HostMoeLayer>),
    Device(Box<DeviceMoeLayer>),
}

/// A tape of either place.
enum TapeAt {
    Host(Box<HostTape>),
    Device(Box<DeviceTape>),
}

/// Settings that a device alone has.
struct OnDevice {
    on: Arc<OnStream>,
    tapes: u32,
    products: Products,
    heap: Option<u64>,
    max_blocks: Option<u32>,
}

impl LayerAt {
    fn build(builder: MoeLayerBuilder<'_>, there: Option<OnDevice>) -> Result<Self, sidelane::Error> {
        let Some(OnDevice { on, tapes, products, heap, max_blocks }) = there else {
            return Ok(LayerAt::Host(Box::new(builder.build()?)));
        };
        let builder = builder.on(&on.stream()).tapes(tapes).products(products);
        let builder = heap.into_iter().fold(builder, DeviceMoeLayerBuilder::device_heap);
        let builder = max_blocks.into_iter().fold(builder, DeviceMoeLayerBuilder::max_blocks);
        Ok(LayerAt::Device(Box::new(builder.build()?)))
    }

    /// Makes a call that every layer refuses, so that the other ranks hear of it: forward or, with
    /// a tape, backward. Rows of four bytes are none.
    fn refuse(&mut self, tape: Option<TapeAt>) -> Result<(), sidelane::Error> {
        match (self, tape) {
            (LayerAt::Host(layer), Some(TapeAt::Host(tape))) => layer.backward(*tape, &[0.0_f32]).map(drop),
            (LayerAt::Host(layer), _) => layer.forward(&Step::new(&[0.0_f32][..])).map(drop),
            (LayerAt::Device(layer), Some(TapeAt::Device(tape))) => {
                let none = layer.router().part(0, 4)?;
                let into = DeviceGradients::new(&none, &none, &none, None);
                layer.backward(*tape, &none, into)
            }
            (LayerAt::Device(layer), _) => {
                let none = layer.router().part(0, 4)?;
                layer.forward(&Step::new(&none), &none).map(drop)
            }
        }
    }
}

/// A Mixture-of-Experts layer of one rank.
#[pyclass(frozen, weakref, module = "sidelane")]
pub struct MoeLayer {
    open_world: Arc<OpenWorld>,
    cell: Arc<LendingCell<LayerAt>>,
    place: Place,
    dtype: Dtype,
    /// Whether the caller has said it.
    dtype_given: bool,
    #[pyo3(get)]
    rank: u32,
    #[pyo3(get)]
    size: u32,
    #[pyo3(get)]
    hidden: usize,
    /// Rows and columns of the weights, and of their gradients: router, experts, shared expert.
    shapes: [[usize; 2]; 3],
}

/// Tensors of a forward pass while they are lent, and the input of its gate.
struct Asked {
    x: Rows,
    residual: Option<Rows>,
    bias: Option<Input>,
    token_mask: Option<Vec<bool>>,
    training: bool,
    draw: RngKey,
}

impl Asked {
    fn step<'a, X: ?Sized>(&'a self, x: &'a X, residual: Option<&'a X>) -> PyResult<Step<'a, X>> {
        let bias = self.bias.as_ref().map(Input::slice).transpose()?;
        let step =
            Step::new(x).with_residual(residual).with_bias(bias).with_token_mask(self.token_mask.as_deref());
        Ok(step.with_training(self.training).with_draw(self.draw))
    }

    fn inputs(&self) -> impl Iterator<Item = &Input> {
        self.residual.iter().chain([&self.x]).map(|rows| &rows.input)
    }
}

/// A tensor of torch's on the layer's device, to write to.
struct Target<'py> {
    tensor: Bound<'py, PyAny>,
    input: Input,
}

#[pymethods]
impl MoeLayer {
    /// Collective: all ranks of the group choose alike, but for weights, overlap, device, stream
    /// and max_blocks. Weights are float32 on the host: `router` [hidden, experts], `experts` and
    /// `shared` [experts, 3 * hidden * ffn].
    #[new]
    #[pyo3(signature = (
        group, gate, *, hidden, experts, router=None, shared=None, dtype=None, expert_map=None, sum_order="expert",
        route="direct", align=1, max_tokens=4096, balance=None, z_loss=None, chunks=1, overlap=true, device=None,
        stream=None, tapes=1, products="own", device_heap=None, max_blocks=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords are its builder")]
    fn new(
        py: Python<'_>,
        group: &Bound<'_, PyAny>,
        gate: &Bound<'_, PyAny>,
        hidden: usize,
        experts: &Bound<'_, PyAny>,
        router: Option<&Bound<'_, PyAny>>,
        shared: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
        expert_map: Option<Vec<Vec<u32>>>,
        sum_order: &str,
        route: &str,
        align: u32,
        max_tokens: u32,
        balance: Option<&Bound<'_, PyAny>>,
        z_loss: Option<f32>,
        chunks: u32,
        overlap: bool,
        device: Option<&Bound<'_, PyAny>>,
        stream: Option<usize>,
        tapes: u32,
        products: &str,
        device_heap: Option<u64>,
        max_blocks: Option<u32>,
    ) -> PyResult<Self> {
        let group = group_of(group)?;
        let (open_world, members) = (group.get().open_world(), group.get().get()?);
        let dtype_given = dtype.is_some();
        let set = || {
            let dtype = dtype.map_or(Ok(Dtype::Bf16), settings::dtype)?;
            let gate = config_of(gate)?;
            let (routed, of_experts) = swiglu(experts, "experts", hidden)?;
            let shared = shared.map(|shared| swiglu(shared, "shared", hidden)).transpose()?;
            let of_shared = shared.as_ref().map_or([0, 0], |(_, shape)| *shape);
            let shapes = [[hidden, gate.experts as usize], of_experts, of_shared];
            let of_router =
                |router| values(&Input::new(router, "router")?.of(Element::F32)?.shaped(shapes[0])?);
            let router = router.map(of_router).transpose()?;
            let map = expert_map.map(|held| map(Some(gate.experts), &held)).transpose()?;
            let balance = balance.map(balance_of).transpose()?;
            let builder = HostMoeLayer::builder(&members, gate, hidden, routed).dtype(dtype);
            let builder = builder
                .sum_order(settings::word("sum_order", sum_order)?)
                .route(settings::word("route", route)?);
            let builder = builder.align(align).max_tokens(max_tokens).chunks(chunks).overlap(overlap);
            let builder = router.into_iter().fold(builder, MoeLayerBuilder::router);
            let builder = shared.into_iter().fold(builder, |builder, (shared, _)| builder.shared(shared));
            let builder = map.into_iter().fold(builder, MoeLayerBuilder::expert_map);
            let builder = balance.into_iter().fold(builder, MoeLayerBuilder::balance);
            let builder = z_loss.into_iter().fold(builder, MoeLayerBuilder::z_loss);
            let products = products_of(products)?;
            let on = OnStream::open(py, device, stream)?;
            if on.is_none() && (device_heap.is_some() || max_blocks.is_some()) {
                return Err(settings::wrong("device", "needed for device_heap and max_blocks"));
            }
            let there = on.as_ref().map(Arc::clone).map(|on| OnDevice {
                on,
                tapes,
                products,
                heap: device_heap,
                max_blocks,
            });
            Ok(((builder, there), (dtype, shapes, on)))
        };
        let refuse = || refused_layer(&members);
        let build = |(builder, there)| LayerAt::build(builder, there);
        let (cell, (dtype, shapes, on)) = open_world.build(py, "MoeLayer", set(), refuse, build)?;
        let place = match on {
            None => Place::Host(Arc::clone(open_world.world()?.pool())),
            Some(on) => Place::Device(Lender::new(&on)),
        };
        let (rank, size) = (members.rank(), members.size());
        let open_world = Arc::clone(open_world);
        Ok(MoeLayer { open_world, cell, place, dtype, dtype_given, rank, size, hidden, shapes })
    }

    /// Where its tensors lie: "host", or "cuda:" and a number.
    #[getter]
    fn place(&self) -> String {
        self.place.on().map_or("host".to_owned(), |on| format!("cuda:{}", on.device()))
    }

    /// Handle of the stream that a layer on a GPU goes on.
    #[getter]
    fn stream(&self) -> Option<usize> {
        self.place.on().map(|on| on.handle())
    }

    /// Type of its tensors' elements.
    #[getter]
    fn dtype(&self) -> &'static str {
        Element::from(self.dtype).name()
    }

    /// Where experts are chosen: "host", or "cuda:" and a number.
    #[getter]
    fn gate_place(&self) -> PyResult<String> {
        self.cell.lend(|layer| {
            Ok(match layer {
                LayerAt::Host(_) => "host".to_owned(),
                LayerAt::Device(layer) => layer.gate_place().to_string(),
            })
        })
    }

    /// residual + combined + shared, [tokens, hidden], of `x` [tokens, hidden], and the tape for
    /// the gradients. On a GPU tensors are torch's, and the result is there for its current stream.
    #[pyo3(signature = (
        x, residual=None, *, bias=None, token_mask=None, training=false, seed=0, step=0, rank=0
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn forward<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        residual: Option<&Bound<'py, PyAny>>,
        bias: Option<&Bound<'py, PyAny>>,
        token_mask: Option<&Bound<'py, PyAny>>,
        training: bool,
        seed: u64,
        step: u64,
        rank: u32,
    ) -> PyResult<(Bound<'py, PyAny>, Tape)> {
        let kind = Kind::of(x);
        let look = || {
            let asked = Asked {
                x: self.rows(x, "x")?,
                residual: residual.map(|residual| self.rows(residual, "residual")).transpose()?,
                bias: bias.map(|bias| Input::new(bias, "bias")?.of(Element::F32)).transpose()?,
                token_mask: token_mask.map(flags).transpose()?,
                training,
                draw: RngKey::new(seed, step, rank),
            };
            let tokens = asked.x.input.len() / self.hidden;
            let out =
                self.place.on().map(|on| self.target(py, on, kind, ([tokens, self.hidden], self.dtype)));
            Ok((asked, out.transpose()?))
        };
        let (asked, out) = look().map_err(|error| self.refused(py, None, error))?;
        let (out, tape) = match (out, self.dtype) {
            (Some(out), _) => self.forward_there(py, &asked, out)?,
            (None, Dtype::F32) => self.forward_here::<f32>(py, &asked, kind)?,
            (None, Dtype::Bf16) => self.forward_here::<bf16>(py, &asked, kind)?,
            (None, _) => self.forward_here::<f16>(py, &asked, kind)?,
        };
        Ok((out, Tape { cell: LendingCell::new("tape", tape), kind }))
    }

    /// Gradients of a forward pass from that of its output, [tokens, hidden], by name: of `x`,
    /// `router`, `experts` and, if there is one, `shared`. Uses the tape up.
    fn backward<'py>(
        &self,
        py: Python<'py>,
        tape: &Tape,
        gradients: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let (kind, held) = (Kind::of(gradients), &tape.cell);
        let tape = held.take().map_err(|error| self.refused(py, None, error))?;
        // The pass uses the tape up, also if it fails.
        held.close();
        let look = || {
            let of_out = self.rows(gradients, "gradients")?;
            let tokens = of_out.input.len() / self.hidden;
            let targets = self.place.on().map(|on| self.targets(py, on, kind, tokens)).transpose()?;
            Ok((of_out, targets))
        };
        let (of_out, targets) = match look() {
            Ok(looked) => looked,
            Err(error) => return Err(self.refused(py, Some(tape), error)),
        };
        match (targets, self.dtype) {
            (Some(targets), _) => self.backward_there(py, tape, &of_out, targets),
            (None, Dtype::F32) => self.backward_here::<f32>(py, tape, &of_out, kind),
            (None, Dtype::Bf16) => self.backward_here::<bf16>(py, tape, &of_out, kind),
            (None, _) => self.backward_here::<f16>(py, tape, &of_out, kind),
        }
    }

    /// Copies weights into the layer, between steps: tensors of the layer's place, shaped as their
    /// gradients. Nothing is copied if any of them is refused. Local.
    #[pyo3(signature = (*, router=None, experts=None, shared=None))]
    fn set_weights(
        &self,
        py: Python<'_>,
        router: Option<&Bound<'_, PyAny>>,
        experts: Option<&Bound<'_, PyAny>>,
        shared: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let given = [("router", router), ("experts", experts), ("shared", shared)];
        let mut checked = Vec::new();
        for ((what, weights), shape) in given.into_iter().zip(self.shapes) {
            let Some(weights) = weights else { continue };
            if shape[0] == 0 {
                return Err(settings::wrong(what, "the layer has none"));
            }
            checked.push((what, self.place.borrow(weights, what)?.of(Element::F32)?.shaped(shape)?));
        }
        let written = self
            .cell
            .lend(|layer| checked.iter().try_for_each(|(what, weights)| write(layer, what, weights)));
        self.place.keep(checked.iter().map(|(_, weights)| weights));
        written?;
        self.before_torch(py)
    }

    fn __repr__(&self) -> String {
        let (MoeLayer { rank, size, hidden, .. }, place) = (self, self.place());
        format!("sidelane.MoeLayer(rank={rank}, size={size}, hidden={hidden}, place={place})")
    }
}

impl MoeLayer {
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut LayerAt) -> Result<T, sidelane::Error> + Send,
    ) -> PyResult<T> {
        self.open_world.call(py, &self.cell, call)
    }

    /// Tells the other ranks that this one has nothing to bring. Returns the error to raise here.
    fn refused(&self, py: Python<'_>, tape: Option<TapeAt>, error: PyErr) -> PyErr {
        first(py, self.call(py, |layer| layer.refuse(tape)), error)
    }

    /// Rows of this layer.
    fn rows(&self, rows: &Bound<'_, PyAny>, what: &'static str) -> PyResult<Rows> {
        let rows = self.place.borrow(rows, what)?.columns(self.hidden)?.rows()?;
        rows.check_default(self.dtype, self.dtype_given)?;
        if rows.dtype != self.dtype {
            return Err(raise(PlanError::WrongDtype { what, seen: rows.dtype, expected: self.dtype }));
        }
        Ok(rows)
    }

    /// Room for a result on a device.
    fn target<'py>(
        &self,
        py: Python<'py>,
        on: &OnStream,
        kind: Kind,
        (shape, dtype): ([usize; 2], Dtype),
    ) -> PyResult<Target<'py>> {
        if kind != Kind::Torch {
            return Err(settings::wrong("x", "a tensor of torch, on a device"));
        }
        let tensor = on.torch_empty(py, shape, dtype.into())?;
        let input = self.place.borrow(&tensor, "out")?;
        Ok(Target { tensor, input })
    }

    /// The same for all gradients: of tokens, router, experts, shared expert.
    fn targets<'py>(
        &self,
        py: Python<'py>,
        on: &OnStream,
        kind: Kind,
        tokens: usize,
    ) -> PyResult<Vec<(&'static str, Target<'py>)>> {
        let [router, experts, shared] = self.shapes.map(|shape| (shape, Dtype::F32));
        let all = [
            ("x", ([tokens, self.hidden], self.dtype)),
            ("router", router),
            ("experts", experts),
            ("shared", shared),
        ];
        let wanted = all.into_iter().filter(|(name, (shape, _))| *name != "shared" || shape[0] > 0);
        wanted.map(|(name, of)| Ok((name, self.target(py, on, kind, of)?))).collect()
    }

    fn forward_here<'py, E: Value>(
        &self,
        py: Python<'py>,
        asked: &Asked,
        kind: Kind,
    ) -> PyResult<(Bound<'py, PyAny>, TapeAt)> {
        let residual = asked.residual.as_ref().map(|rows| rows.input.slice::<E>()).transpose()?;
        let step = asked.step(asked.x.input.slice::<E>()?, residual)?;
        let (out, tape) = self.call(py, |layer| match layer {
            LayerAt::Host(layer) => layer.forward(&step),
            LayerAt::Device(_) => Err(elsewhere("x")),
        })?;
        let shape = [out.len() / self.hidden, self.hidden];
        Ok((kind.give(py, Tensor::of(out, &shape, self.dtype.into()))?, TapeAt::Host(Box::new(tape))))
    }

    fn forward_there<'py>(
        &self,
        py: Python<'py>,
        asked: &Asked,
        out: Target<'py>,
    ) -> PyResult<(Bound<'py, PyAny>, TapeAt)> {
        let (x, residual) = (range(&asked.x.input)?, asked.residual.as_ref().map(|rows| range(&rows.input)));
        let (step, to) = (asked.step(x, residual.transpose()?)?, range(&out.input)?);
        let made = self.call(py, |layer| match layer {
            LayerAt::Device(layer) => layer.forward(&step, to),
            LayerAt::Host(_) => Err(elsewhere("x")),
        });
        self.place.keep(asked.inputs().chain([&out.input]));
        let tape = TapeAt::Device(Box::new(made?));
        self.before_torch(py)?;
        Ok((out.tensor, tape))
    }

    fn backward_here<'py, E: Value>(
        &self,
        py: Python<'py>,
        tape: TapeAt,
        of_out: &Rows,
        kind: Kind,
    ) -> PyResult<Bound<'py, PyDict>> {
        let of_out = of_out.input.slice::<E>()?;
        let made = self.call(py, |layer| match (layer, tape) {
            (LayerAt::Host(layer), TapeAt::Host(tape)) => layer.backward(*tape, of_out),
            (layer, _) => {
                let _ = layer.refuse(None);
                Err(elsewhere("tape"))
            }
        })?;
        let Gradients { x, router, experts, shared, .. } = made;
        let all = PyDict::new(py);
        let of_tokens = [x.len() / self.hidden, self.hidden];
        all.set_item("x", kind.give(py, Tensor::of(x, &of_tokens, self.dtype.into()))?)?;
        let words = [("router", router), ("experts", experts), ("shared", shared)];
        for ((name, values), shape) in words.into_iter().zip(self.shapes).filter(|(_, shape)| shape[0] > 0) {
            all.set_item(name, kind.give(py, Tensor::of(values, &shape, Element::F32))?)?;
        }
        Ok(all)
    }

    fn backward_there<'py>(
        &self,
        py: Python<'py>,
        tape: TapeAt,
        of_out: &Rows,
        targets: Vec<(&'static str, Target<'py>)>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let ranges = targets.iter().map(|(_, target)| range(&target.input)).collect::<PyResult<Vec<_>>>()?;
        let from = range(&of_out.input)?;
        let into = DeviceGradients::new(ranges[0], ranges[1], ranges[2], ranges.get(3).copied());
        let made = self.call(py, |layer| match (layer, tape) {
            (LayerAt::Device(layer), TapeAt::Device(tape)) => layer.backward(*tape, from, into),
            (layer, _) => {
                let _ = layer.refuse(None);
                Err(elsewhere("tape"))
            }
        });
        self.place.keep(targets.iter().map(|(_, target)| &target.input).chain([&of_out.input]));
        made?;
        self.before_torch(py)?;
        let all = PyDict::new(py);
        targets.into_iter().try_for_each(|(name, target)| all.set_item(name, target.tensor))?;
        Ok(all)
    }

    /// Torch's current stream waits for the enqueued work.
    fn before_torch(&self, py: Python<'_>) -> PyResult<()> {
        self.place.on().map_or(Ok(()), |on| on.before_torch(py))
    }
}

/// One forward pass, kept for its gradients.
#[pyclass(frozen, module = "sidelane")]
pub struct Tape {
    cell: LendingCell<TapeAt>,
    kind: Kind,
}

#[pymethods]
impl Tape {
    /// The gate's decision for this rank's tokens.
    #[getter]
    fn decision(&self) -> PyResult<Decision> {
        self.cell.lend(|tape| {
            let decision = match tape {
                TapeAt::Host(tape) => tape.decision(),
                TapeAt::Device(tape) => tape.decision(),
            };
            Ok(Decision::of(decision.clone(), self.kind))
        })
    }

    /// The balancing loss of this rank's tokens; 0 if there is none.
    #[getter]
    fn balance_loss(&self) -> PyResult<f32> {
        self.cell.lend(|tape| {
            Ok(match tape {
                TapeAt::Host(tape) => tape.balance_loss(),
                TapeAt::Device(tape) => tape.balance_loss(),
            })
        })
    }

    /// The loss on the size of logits; 0 if there is none.
    #[getter]
    fn z_loss(&self) -> PyResult<f32> {
        self.cell.lend(|tape| {
            Ok(match tape {
                TapeAt::Host(tape) => tape.z_loss(),
                TapeAt::Device(tape) => tape.z_loss(),
            })
        })
    }
}

/// Flags of tokens: a sequence of bool.
fn flags(mask: &Bound<'_, PyAny>) -> PyResult<Vec<bool>> {
    mask.extract().map_err(|error| settings::wrong("token_mask", &format!("not a list of bool: {error}")))
}

/// Values of a tensor on the host.
fn values(tensor: &Input) -> PyResult<Vec<f32>> {
    Ok(tensor.slice()?.to_vec())
}

/// Experts of a tensor [experts, 3 * hidden * ffn], and its shape.
fn swiglu(
    weights: &Bound<'_, PyAny>,
    what: &'static str,
    hidden: usize,
) -> PyResult<(GroupedSwiGlu, [usize; 2])> {
    let weights = Input::new(weights, what)?.of(Element::F32)?;
    let axis = |size: Option<&usize>| size.copied().unwrap_or_default();
    let shape @ [experts, columns] = [axis(weights.shape().first()), axis(weights.shape().last())];
    let weights = weights.shaped(shape)?;
    let ffn = columns.checked_div(hidden.saturating_mul(3)).unwrap_or_default();
    Ok((GroupedSwiGlu::new(experts, hidden, ffn, values(&weights)?).map_err(raise)?, shape))
}

/// A layer that no rank can build: no rank has its expert.
fn refused_layer(members: &sidelane::Group) -> Result<(), sidelane::Error> {
    let gate = sidelane::gate::Preset::Mixtral.config(1, 1)?;
    let no_experts = GroupedSwiGlu::new(0, 1, 1, Vec::new())?;
    HostMoeLayer::builder(members, gate, 0, no_experts).build().map(drop)
}

fn products_of(name: &str) -> PyResult<Products> {
    match name {
        "own" => Ok(Products::Own),
        "cublas" => Ok(Products::Cublas),
        "cublas-tf32" => Ok(Products::CublasTf32),
        "cublas-bf16" => Ok(Products::CublasBf16),
        other => {
            let found = format!("`{other}` is not own, cublas, cublas-tf32 or cublas-bf16");
            Err(settings::wrong("products", &found))
        }
    }
}

/// Copies weights into a layer, on its stream where it has one.
fn write(layer: &mut LayerAt, what: &str, weights: &Input) -> PyResult<()> {
    match layer {
        LayerAt::Host(layer) => {
            let to = match what {
                "router" => layer.router_mut(),
                "experts" => layer.experts_mut().weights_mut(),
                _ => layer.shared_mut().map(|shared| shared.weights_mut()).unwrap_or_default(),
            };
            to.copy_from_slice(weights.slice()?);
        }
        LayerAt::Device(layer) => {
            let to = match what {
                "router" => Some(layer.router()),
                "experts" => Some(layer.experts()),
                _ => layer.shared(),
            };
            let from = range(weights)?;
            let copy = |to: &sidelane::device::DeviceRange| {
                layer.stream().copy(to.span(0, to.len())?, from.span(0, from.len())?)
            };
            to.map_or(Ok(()), copy).map_err(raise)?;
        }
    }
    Ok(())
}

/// The memory of a tensor that was checked to lie on the device.
fn range(input: &Input) -> PyResult<&sidelane::device::DeviceRange> {
    input.range().ok_or_else(|| raise(elsewhere("x")))
}

/// That something belongs to a layer in the other place.
fn elsewhere(what: &'static str) -> sidelane::Error {
    PlanError::WrongPlace { what, seen: "the other place", expected: "the layer's" }.into()
}
