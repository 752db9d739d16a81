//! Whole layers: building them, their weights, and what the FFI boundary needs to know of them.

use std::sync::Arc;

use sidelane::Dtype;
use sidelane::device::{Context, DeviceRange, Stream as Borrowed};
use sidelane::error::PlanError;
use sidelane::gate::{BalanceLoss, GateConfig};
use sidelane::layer::{
    DeviceGradients, DeviceMoeLayer, DeviceMoeLayerBuilder, DeviceTape, GroupedSwiGlu, Input, MoeLayer,
    MoeLayerBuilder, Tape as HostTape,
};
use sidelane::plan;

use super::balance::Balance;
use super::gate_config::RouterConfig;
use super::memory::{Out, optional, slice};
use super::objects::{Group, Moe, Stream};
use super::stream::let_go;
use super::tensor::{ExpertMap, Source, Tensor};
use super::versioned::{read, versioned};
use super::{border, get, give, retract};
use crate::fault::{ArgumentError, Fault};
use crate::handles::{ExclusiveCell, Kind};
use crate::{Status, refuse, words};

/// A layer, and what the FFI boundary needs to know of it.
pub struct Whole {
    pub(super) cell: ExclusiveCell<LayerAt>,
    /// Of the device of its tensors; none on the host.
    pub(super) context: Option<Arc<Context>>,
    stream: Option<Arc<Borrowed>>,
    pub(super) dtype: Dtype,
    pub(super) hidden: u64,
    pub(super) experts: u64,
    /// How many weights router, experts and shared expert have.
    pub(super) weights: [u64; 3],
}

/// A layer of either place.
pub enum LayerAt {
    Host(Box<MoeLayer>),
    Device(Box<DeviceMoeLayer>),
}

/// A tape of either place.
pub enum TapeAt {
    Host(Box<HostTape>),
    Device(Box<DeviceTape>),
}

/// Settings of a whole layer: all ranks must pass the same, except weights, overlap, stream and
/// max_blocks. 0 is the default of every field but `gate`, `experts`, `hidden` and `ffn`. Weights
/// are on the host, and are copied.
///
/// The weights of an expert are w1 and w3, [hidden, ffn], and w2, [ffn, hidden], one after another:
/// a row x becomes (silu(x w1) * x w3) w2.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MoeOptions {
    /// sizeof(sidelane_moe_options_t).
    pub size: usize,
    /// The router: its experts and choices are those of the layer.
    pub gate: *const RouterConfig,
    /// Weights of the router, [hidden, experts]: logits are tokens times them. NULL: zeros.
    pub router: *const f32,
    /// Weights of this rank's experts, [local experts, 3 * hidden * ffn].
    pub experts: *const f32,
    /// Weights of an expert that all tokens pass, [3 * hidden * shared_ffn]. NULL: none.
    pub shared: *const f32,
    /// A loss that balances experts. NULL: none.
    pub balance: *const Balance,
    /// Tensors lie on the device of this stream, and passes go on the stream. NULL: they lie on
    /// the host.
    pub stream: *mut Stream,
    /// Device: bytes of its memory in which dispatches receive and experts write. 0: as much as two
    /// passes of `max_tokens` take, each with half as many rows again as even routing brings.
    pub device_heap: u64,
    /// Elements of a row, which must be a multiple of 16 bytes.
    pub hidden: u32,
    /// Inner width of each expert.
    pub ffn: u32,
    /// The same of the expert that all tokens pass.
    pub shared_ffn: u32,
    /// Type of the elements: SIDELANE_DTYPE_...
    pub dtype: u32,
    /// Order in which a token's rows are summed: SIDELANE_ORDER_...
    pub sum_order: u32,
    /// How rows reach other nodes: SIDELANE_ROUTE_...
    pub route: u32,
    /// Each expert's rows are padded to a multiple of this. Default: 1.
    pub align: u32,
    /// The most tokens of a rank in one pass. Default: 4096.
    pub max_tokens: u32,
    /// Parts of a pass's tokens, each dispatched and combined by itself. Default: 1.
    pub chunks: u32,
    /// 1: transfers of one chunk are not beside the experts of others.
    pub sequential: u32,
    /// Device: what makes the products, SIDELANE_PRODUCTS_...
    pub products: u32,
    /// Device: tapes that may be alive besides that of the pass that runs. Default: 1.
    pub tapes: u32,
    /// Device: blocks of each kernel, at most. 0: as many as the device has at work.
    pub max_blocks: u32,
    /// Coefficient of the loss that keeps logits small. 0: none.
    pub z_loss: f32,
}
versioned!(MoeOptions, "sidelane_moe_options_t", z_loss: f32);

/// Data behind the pointers of an option.
struct Given<'a> {
    gate: GateConfig,
    balance: Option<BalanceLoss>,
    router: Option<&'a [f32]>,
    experts: GroupedSwiGlu,
    shared: Option<GroupedSwiGlu>,
    weights: [u64; 3],
}

impl MoeOptions {
    /// # Safety
    /// Pointers are null or lead to what is documented.
    unsafe fn follow<'a>(
        &self,
        group: &sidelane::Group,
        map: Option<&plan::ExpertMap>,
    ) -> Result<Given<'a>, Fault> {
        // SAFETY: as the caller promised.
        let gate = GateConfig::try_from(&unsafe { read(self.gate) }?)?;
        let balance = match self.balance.is_null() {
            true => None,
            // SAFETY: as the caller promised.
            false => Some(BalanceLoss::try_from(&unsafe { read(self.balance) }?)?),
        };
        let held = match map {
            Some(map) if group.rank() < map.ranks() => map.slots_of(group.rank()).len(),
            Some(_) => 0,
            None => plan::ExpertMap::contiguous(gate.experts, group.size())?.slots_of(group.rank()).len(),
        };
        if !self.shared.is_null() && self.shared_ffn == 0 {
            let (what, expected) = ("shared_ffn", "at least 1 with a shared expert");
            return Err(ArgumentError::Value { what, seen: 0, expected }.into());
        }
        let each = |ffn: u32| product("experts", [3, self.hidden.into(), ffn.into()]);
        let of_router = product("router", [1, self.hidden.into(), gate.experts.into()])?;
        let of_experts = product("experts", [1, held as u64, each(self.ffn)?])?;
        let of_shared = if self.shared.is_null() { 0 } else { each(self.shared_ffn)? };
        // SAFETY: as the caller promised.
        let (router, experts, shared) = unsafe {
            (
                optional("router", self.router, of_router)?,
                slice("experts", self.experts, of_experts)?,
                optional("shared", self.shared, of_shared)?,
            )
        };
        let hidden = self.hidden as usize;
        let experts = GroupedSwiGlu::new(held, hidden, self.ffn as usize, experts.to_vec())?;
        let alone = |values: &[f32]| GroupedSwiGlu::new(1, hidden, self.shared_ffn as usize, values.to_vec());
        let (shared, weights) = (shared.map(alone).transpose()?, [of_router, of_experts, of_shared]);
        Ok(Given { gate, balance, router, experts, shared, weights })
    }

    fn apply<'g>(&self, builder: MoeLayerBuilder<'g>) -> Result<MoeLayerBuilder<'g>, Fault> {
        let mut builder = builder
            .dtype(words::dtype(self.dtype)?)
            .sum_order(words::sum_order(self.sum_order)?)
            .route(words::route(self.route)?)
            .overlap(!words::switch("sequential", self.sequential)?);
        if self.align > 0 {
            builder = builder.align(self.align);
        }
        if self.max_tokens > 0 {
            builder = builder.max_tokens(self.max_tokens);
        }
        if self.chunks > 0 {
            builder = builder.chunks(self.chunks);
        }
        if self.z_loss != 0.0 {
            builder = builder.z_loss(self.z_loss);
        }
        Ok(builder)
    }

    /// On the host there is nothing that only a device has.
    fn host_only<T>(&self, builder: T) -> Result<T, ArgumentError> {
        let fields = [
            ("products", self.products.into()),
            ("tapes", self.tapes.into()),
            ("max_blocks", self.max_blocks.into()),
            ("device_heap", self.device_heap),
        ];
        match fields.into_iter().find(|&(_, seen)| seen > 0) {
            Some((what, seen)) => Err(ArgumentError::Value { what, seen, expected: "0 without a stream" }),
            None => Ok(builder),
        }
    }

    fn apply_on_device<'g>(
        &self,
        builder: DeviceMoeLayerBuilder<'g>,
    ) -> Result<DeviceMoeLayerBuilder<'g>, Fault> {
        let mut builder = builder.products(words::products(self.products)?);
        if self.device_heap > 0 {
            builder = builder.device_heap(self.device_heap);
        }
        if self.tapes > 0 {
            builder = builder.tapes(self.tapes);
        }
        if self.max_blocks > 0 {
            builder = builder.max_blocks(self.max_blocks);
        }
        Ok(builder)
    }
}

/// Settings, with what a device alone has.
enum Builder<'g> {
    Host(MoeLayerBuilder<'g>),
    Device(DeviceMoeLayerBuilder<'g>),
}

impl Builder<'_> {
    fn build(self) -> Result<LayerAt, sidelane::Error> {
        Ok(match self {
            Builder::Host(builder) => LayerAt::Host(Box::new(builder.build()?)),
            Builder::Device(builder) => LayerAt::Device(Box::new(builder.build()?)),
        })
    }
}

/// Builds a whole layer on a group: gate, dispatch, SwiGLU experts, combine. Collective.
/// `expert_map` may be NULL: experts in contiguous blocks.
///
/// The caller guarantees: pointers are NULL or valid; structs are as large as their sizes say, and
/// arrays as documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_moe_build(
    group: *mut Group,
    options: *const MoeOptions,
    expert_map: *const ExpertMap,
    moe: *mut *mut Moe,
) -> Status {
    border(|| {
        let group = get(group)?;
        let arguments = || -> Result<_, Fault> {
            // SAFETY: as the caller promised.
            let (out, options, map) =
                unsafe { (Out::new("moe", moe)?, read(options)?, ExpertMap::read(expert_map)?) };
            let stream = (!options.stream.is_null()).then(|| get(options.stream)).transpose()?;
            let Given { gate, balance, router, experts, shared, weights } =
                // SAFETY: as the caller promised.
                unsafe { options.follow(&group, map.as_ref()) }?;
            let count = gate.experts;
            let builder = options.apply(MoeLayer::builder(&group, gate, options.hidden as usize, experts))?;
            let builder = map.into_iter().fold(builder, MoeLayerBuilder::expert_map);
            let builder = router.into_iter().fold(builder, |builder, of| builder.router(of.to_vec()));
            let builder = shared.into_iter().fold(builder, |builder, shared| builder.shared(shared));
            let builder = balance.into_iter().fold(builder, MoeLayerBuilder::balance);
            let builder = match &stream {
                Some(stream) => Builder::Device(options.apply_on_device(builder.on(stream))?),
                None => Builder::Host(options.host_only(builder)?),
            };
            Ok((out, (words::dtype(options.dtype)?, options.hidden, count, weights), stream, builder))
        };
        let (out, (dtype, hidden, experts, weights), stream, builder) =
            arguments().inspect_err(|_| refuse::moe(&group))?;
        stream.iter().for_each(|stream| let_go(stream));
        let cell = ExclusiveCell::new(Kind::Moe, builder.build()?);
        let context = stream.as_ref().map(|stream| Arc::clone(stream.context()));
        let (hidden, experts) = (hidden.into(), experts.into());
        give(Whole { cell, context, stream, dtype, hidden, experts, weights }, out)
    })
}

/// Copies weights into a layer, between passes: arrays of the layer's place, in the order of the
/// options; NULL leaves those that are there. Local. On a device they are copied by the stream.
/// Nothing is copied if any array is refused.
///
/// The caller guarantees: arrays are NULL or as large as the layer's weights; on a device they stay
/// as they are until the stream has passed the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_moe_set_weights(
    moe: *mut Moe,
    router: *const f32,
    experts: *const f32,
    shared: *const f32,
) -> Status {
    border(|| {
        let layer = get(moe)?;
        let [.., of_shared] = layer.weights;
        if of_shared == 0 && !shared.is_null() {
            let (what, expected) = ("shared", "NULL: the layer has none");
            return Err(ArgumentError::Value { what, seen: shared.addr() as u64, expected }.into());
        }
        let given = [("router", router), ("experts", experts), ("shared", shared)];
        let read = |((what, data), count)| -> Result<_, Fault> {
            let numbers = Tensor::numbers(data, count, layer.context.is_some());
            // SAFETY: as the caller promised.
            Ok((what, unsafe { Source::read(layer.context.as_ref(), what, &numbers, (Some(count), 1)) }?))
        };
        let given = given.into_iter().zip(layer.weights).filter(|((_, data), _)| !data.is_null());
        let checked = given.map(read).collect::<Result<Vec<_>, _>>()?;
        layer.cell.lend(|at| checked.iter().try_for_each(|(what, from)| at.write(what, from)))
    })
}

/// Closes the layer. Tapes that are open stay, but no pass uses them any more. NULL is a no-op.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_moe_close(moe: *mut Moe) -> Status {
    border(|| {
        if moe.is_null() {
            return Ok(());
        }
        let stream = retract(moe)?.stream.clone();
        stream.iter().for_each(|stream| let_go(stream));
        Ok(())
    })
}

impl LayerAt {
    /// Makes a pass that every layer refuses, so that the other ranks hear of it: forward or, with
    /// a tape, backward. Rows of four bytes are none. Returns the error for the caller: `fault`, or
    /// the failure of the world meanwhile.
    pub(super) fn refuse(&mut self, tape: Option<TapeAt>, fault: Fault) -> Fault {
        let refused = match (self, tape) {
            (LayerAt::Host(layer), Some(TapeAt::Host(tape))) => layer.backward(*tape, &[0.0_f32]).map(drop),
            (LayerAt::Host(layer), _) => layer.forward(&Input::new(&[0.0_f32][..])).map(drop),
            (LayerAt::Device(layer), tape) => match (layer.router().part(0, 4), tape) {
                (Ok(none), Some(TapeAt::Device(tape))) => {
                    let into = DeviceGradients::new(&none, &none, &none, None);
                    layer.backward(*tape, &none, into)
                }
                (Ok(none), _) => layer.forward(&Input::new(&none), &none).map(drop),
                (Err(error), _) => Err(error.into()),
            },
        };
        match refused {
            Err(lost @ sidelane::Error::World(_)) => lost.into(),
            _ => fault,
        }
    }

    fn write(&mut self, what: &str, from: &Source<'_>) -> Result<(), Fault> {
        match (self, from) {
            (LayerAt::Host(layer), Source::Host { bytes, .. }) => {
                let to = match what {
                    "router" => layer.router_mut(),
                    "experts" => layer.experts_mut().weights_mut(),
                    _ => layer.shared_mut().map(|shared| shared.weights_mut()).unwrap_or_default(),
                };
                bytemuck::cast_slice_mut(to).copy_from_slice(bytes);
            }
            (LayerAt::Device(layer), Source::Device { range, .. }) => {
                let to = match what {
                    "router" => Some(layer.router()),
                    "experts" => Some(layer.experts()),
                    _ => layer.shared(),
                };
                let copy = |to: &DeviceRange| {
                    layer.stream().copy(to.span(0, to.len())?, range.span(0, range.len())?)
                };
                to.map_or(Ok(()), copy)?;
            }
            _ => return Err(elsewhere("weights")),
        }
        Ok(())
    }
}

/// That something belongs to a layer in the other place.
pub(super) fn elsewhere(what: &'static str) -> Fault {
    PlanError::WrongPlace { what, seen: "the other place", expected: "the layer's" }.into()
}

/// How many weights, if so many can be counted.
fn product(what: &'static str, [a, b, c]: [u64; 3]) -> Result<u64, ArgumentError> {
    let product = a.checked_mul(b).and_then(|ab| ab.checked_mul(c));
    product.ok_or(ArgumentError::TooLarge { what, rows: a.saturating_mul(b), columns: c })
}
