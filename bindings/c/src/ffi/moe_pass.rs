//! Passes of a whole layer, forward and backward, and their tapes.

use half::{bf16, f16};
use sidelane::device::DeviceRange;
use sidelane::dtype::Element;
use sidelane::error::PlanError;
use sidelane::gate::{Decision, RngKey};
use sidelane::layer::{DeviceGradients, Gradients, Input, MoeLayer, Tape as HostTape};
use sidelane::{Dtype, Error};

use super::memory::{Out, addresses, apart, optional, optional_flags};
use super::moe::{LayerAt, TapeAt, Whole, elsewhere};
use super::objects::{Moe, Tape};
use super::tensor::{Routing, Source, Target, Tensor};
use super::versioned::{OutStruct, read, versioned};
use super::{border, close, get, give, retract};
use crate::fault::{ArgumentError, Fault};
use crate::handles::{ExclusiveCell, Kind};
use crate::{SIDELANE_PLACE_HOST, Status, words};

/// Tokens of a forward pass, and inputs of their gate.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MoeInput {
    /// sizeof(sidelane_moe_input_t).
    pub size: usize,
    /// The tokens, [tokens, hidden].
    pub x: *const Tensor,
    /// Added to the layer's result, [tokens, hidden]. NULL: nothing.
    pub residual: *const Tensor,
    /// On the host, [experts], for the choice alone. NULL: none.
    pub bias: *const f32,
    /// On the host, [tokens]: 1 for tokens that choose. NULL: all do.
    pub token_mask: *const u8,
    /// Random numbers: the job's.
    pub seed: u64,
    /// The step's.
    pub step: u64,
    /// The rank's.
    pub rank: u32,
    /// 1: a training pass, with noise.
    pub training: u32,
}
versioned!(MoeInput, "sidelane_moe_input_t", training: u32);

/// Where the gradients of a pass go, in the layer's place.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MoeGradients {
    /// sizeof(sidelane_moe_gradients_t).
    pub size: usize,
    /// Of the tokens, [tokens, hidden]. That of the residual is that of the output.
    pub x: *const Tensor,
    /// Of the router, by this rank's tokens, [hidden, experts].
    pub router: *mut f32,
    /// Of this rank's experts, by the tokens of all ranks, in the order of their weights.
    pub experts: *mut f32,
    /// Of the expert that all tokens pass, by this rank's tokens. NULL if there is none.
    pub shared: *mut f32,
}
versioned!(MoeGradients, "sidelane_moe_gradients_t", shared: *mut f32);

/// Decisions of a forward pass. Pointers live as long as the tape.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TapeInfo {
    /// sizeof(sidelane_tape_info_t).
    pub size: usize,
    /// Choices that are left, and their weights, on the host.
    pub routing: Routing,
    /// Choices of each expert, [experts], before any was dropped.
    pub counts_before: *const u32,
    /// Choices of each expert that are left, [experts].
    pub counts_after: *const u32,
    /// The balancing loss of this rank's tokens; 0 if there is none.
    pub balance_loss: f32,
    /// The loss on the size of logits; 0 if there is none.
    pub z_loss: f32,
}
versioned!(TapeInfo, "sidelane_tape_info_t", z_loss: f32);

/// residual + combined + shared, [tokens, hidden], to `out`, and the tape for the gradients, which
/// is the caller's to close or to bring back. Collective.
///
/// On a device the pass is enqueued, and `out` is there for later operations on the stream. The
/// call waits for the choices of experts, and in each dispatch for its sizes.
///
/// The caller guarantees: pointers are NULL or valid; structs, tensors and arrays are as large as
/// they say, and no other thread uses `out` meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_moe_forward(
    moe: *mut Moe,
    input: *const MoeInput,
    out: *const Tensor,
    tape: *mut *mut Tape,
) -> Status {
    border(|| {
        let layer = get(moe)?;
        // SAFETY: as the caller promised.
        let arguments = unsafe { Asked::read(&layer, input, out, tape) };
        layer.cell.lend(|at| {
            let (slot, asked, out) = arguments.map_err(|fault| at.refuse(None, fault))?;
            give(ExclusiveCell::new(Kind::Tape, asked.forward(at, layer.dtype, out)?), slot)
        })
    })
}

/// Gradients of a forward pass from that of its output, [tokens, hidden]. `tape` is used up.
/// Collective: ranks bring their tapes in one order.
///
/// The caller guarantees: as sidelane_moe_forward().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_moe_backward(
    moe: *mut Moe,
    tape: *mut Tape,
    of_out: *const Tensor,
    gradients: *const MoeGradients,
) -> Status {
    border(|| {
        let layer = get(moe)?;
        let kept = retract(tape).and_then(|cell| cell.take());
        let tokens = kept.as_ref().ok().map(TapeAt::tokens);
        // SAFETY: as the caller promised.
        let arguments = unsafe { GradientTargets::read(&layer, tokens, of_out, gradients) };
        layer.cell.lend(|at| {
            let kept = kept.map_err(|fault| at.refuse(None, fault))?;
            match arguments {
                Ok((of_out, targets)) => Ok(targets.backward(at, layer.dtype, (kept, &of_out))?),
                Err(fault) => Err(at.refuse(Some(kept), fault)),
            }
        })
    })
}

/// Says what a forward pass decided.
///
/// The caller guarantees: `info` is NULL, or as large as its size says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_tape_info(tape: *mut Tape, info: *mut TapeInfo) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let out = unsafe { OutStruct::new(info) }?;
        get(tape)?.lend(|tape| {
            let (made, [balance_loss, z_loss]) = (tape.decision(), tape.losses());
            let routing = Routing {
                experts: made.experts().as_ptr(),
                weights: made.weights().as_ptr(),
                tokens: made.tokens().into(),
                top_k: made.top_k(),
                place: SIDELANE_PLACE_HOST,
            };
            let (before, after) = (made.counts_before().as_ptr(), made.counts_after().as_ptr());
            out.write(TapeInfo {
                size: 0,
                routing,
                counts_before: before,
                counts_after: after,
                balance_loss,
                z_loss,
            });
            Ok(())
        })
    })
}

/// Closes the tape without gradients. NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn sidelane_tape_close(tape: *mut Tape) -> Status {
    close(tape)
}

impl TapeAt {
    fn decision(&self) -> &Decision {
        match self {
            TapeAt::Host(tape) => tape.decision(),
            TapeAt::Device(tape) => tape.decision(),
        }
    }

    fn losses(&self) -> [f32; 2] {
        match self {
            TapeAt::Host(tape) => [tape.balance_loss(), tape.z_loss()],
            TapeAt::Device(tape) => [tape.balance_loss(), tape.z_loss()],
        }
    }

    fn tokens(&self) -> u64 {
        self.decision().tokens().into()
    }
}

/// Input of a forward pass.
struct Asked<'a> {
    x: Source<'a>,
    residual: Option<Source<'a>>,
    bias: Option<&'a [f32]>,
    token_mask: Option<&'a [bool]>,
    training: bool,
    draw: RngKey,
}

impl<'a> Asked<'a> {
    /// The same, with where the tape and the output go.
    ///
    /// # Safety
    /// Pointers are null or lead to what is documented.
    unsafe fn read(
        layer: &Whole,
        input: *const MoeInput,
        out: *const Tensor,
        tape: *mut *mut Tape,
    ) -> Result<(Out<*mut Tape>, Self, Target<'a>), Fault> {
        let context = layer.context.as_ref();
        // SAFETY: as the caller promised.
        let (slot, input) = unsafe { (Out::new("tape", tape)?, read(input)?) };
        // SAFETY: as the caller promised.
        let x = unsafe { Source::read(context, "x", input.x, (None, layer.hidden)) }?;
        layer.check("x", x.dtype())?;
        let row = layer.hidden.saturating_mul(layer.dtype.size() as u64).max(1);
        let tokens = x.addresses().len() as u64 / row;
        let residual = match input.residual.is_null() {
            true => None,
            // SAFETY: as the caller promised.
            false => Some(unsafe {
                Source::read(context, "residual", input.residual, (Some(tokens), layer.hidden))
            }?),
        };
        // SAFETY: as the caller promised.
        let (to, bias, token_mask) = unsafe {
            (
                Target::read(context, "out", out, (tokens, layer.hidden))?,
                optional("bias", input.bias, layer.experts)?,
                optional_flags("token_mask", input.token_mask, tokens)?,
            )
        };
        residual.as_ref().map_or(Ok(()), |residual| layer.check("residual", residual.dtype()))?;
        layer.check("out", to.dtype())?;
        let read = [
            ("x", x.addresses()),
            ("residual", residual.as_ref().map_or(0..0, Source::addresses)),
            ("bias", bias.map_or(0..0, addresses)),
            ("token_mask", token_mask.map_or(0..0, addresses)),
        ];
        read.into_iter().try_for_each(|read| apart(read, ("out", to.addresses())))?;
        let draw = RngKey::new(input.seed, input.step, input.rank);
        let training = words::switch("training", input.training)?;
        Ok((slot, Asked { x, residual, bias, token_mask, training, draw }, to))
    }

    fn input<'s, X: ?Sized>(&'s self, x: &'s X, residual: Option<&'s X>) -> Input<'s, X> {
        let Asked { bias, token_mask, training, draw, .. } = *self;
        Input::new(x)
            .with_residual(residual)
            .with_bias(bias)
            .with_token_mask(token_mask)
            .with_training(training)
            .with_draw(draw)
    }

    fn forward(&self, at: &mut LayerAt, dtype: Dtype, mut out: Target<'_>) -> Result<TapeAt, Fault> {
        match (at, &mut out) {
            (LayerAt::Host(layer), Target::Host { bytes, .. }) => Ok(TapeAt::Host(Box::new(match dtype {
                Dtype::F32 => self.forward_here::<f32>(layer, bytes)?,
                Dtype::Bf16 => self.forward_here::<bf16>(layer, bytes)?,
                _ => self.forward_here::<f16>(layer, bytes)?,
            }))),
            (LayerAt::Device(layer), Target::Device { range: to, .. }) => {
                let residual = self.residual.as_ref().map(of_device).transpose()?;
                let input = self.input(of_device(&self.x)?, residual);
                Ok(TapeAt::Device(Box::new(layer.forward(&input, to)?)))
            }
            _ => Err(elsewhere("out")),
        }
    }

    fn forward_here<E: Element>(&self, layer: &mut MoeLayer, out: &mut [u8]) -> Result<HostTape, Error> {
        let residual = self.residual.as_ref().map(of_host::<E>);
        let (made, tape) = layer.forward(&self.input(of_host::<E>(&self.x), residual))?;
        out.copy_from_slice(bytemuck::cast_slice(&made));
        Ok(tape)
    }
}

/// Where the gradients of a pass go.
struct GradientTargets<'a> {
    x: Target<'a>,
    router: Target<'a>,
    experts: Target<'a>,
    shared: Option<Target<'a>>,
}

impl<'a> GradientTargets<'a> {
    /// The same, with the gradient that goes in; of so many tokens, if it is known.
    ///
    /// # Safety
    /// Pointers are null or lead to what is documented.
    unsafe fn read(
        layer: &Whole,
        tokens: Option<u64>,
        of_out: *const Tensor,
        gradients: *const MoeGradients,
    ) -> Result<(Source<'a>, Self), Fault> {
        let (context, hidden) = (layer.context.as_ref(), layer.hidden);
        // SAFETY: as the caller promised.
        let (into, of_out) =
            unsafe { (read(gradients)?, Source::read(context, "of_out", of_out, (tokens, hidden))?) };
        layer.check("of_out", of_out.dtype())?;
        let row = hidden.saturating_mul(layer.dtype.size() as u64).max(1);
        let tokens = of_out.addresses().len() as u64 / row;
        let numbers = |what, data: *mut f32, count| {
            let tensor = Tensor::numbers(data, count, context.is_some());
            // SAFETY: as the caller promised.
            unsafe { Target::read(context, what, &tensor, (count, 1)) }
        };
        // SAFETY: as the caller promised.
        let x = unsafe { Target::read(context, "gradients of x", into.x, (tokens, hidden)) }?;
        let [router, experts, shared] = layer.weights;
        if shared == 0 && !into.shared.is_null() {
            let (what, expected) = ("gradients of the shared expert", "NULL: the layer has none");
            return Err(ArgumentError::Value { what, seen: into.shared.addr() as u64, expected }.into());
        }
        let targets = GradientTargets {
            x,
            router: numbers("gradients of the router", into.router, router)?,
            experts: numbers("gradients of experts", into.experts, experts)?,
            shared: (shared > 0)
                .then(|| numbers("gradients of the shared expert", into.shared, shared))
                .transpose()?,
        };
        layer.check("gradients of x", targets.x.dtype())?;
        targets.apart(&of_out)?;
        Ok((of_out, targets))
    }

    /// Refuses gradients that share bytes with each other, or with the one that goes in.
    fn apart(&self, of_out: &Source<'_>) -> Result<(), Fault> {
        let all = [
            ("of_out", of_out.addresses()),
            ("gradients of x", self.x.addresses()),
            ("gradients of the router", self.router.addresses()),
            ("gradients of experts", self.experts.addresses()),
            ("gradients of the shared expert", self.shared.as_ref().map_or(0..0, Target::addresses)),
        ];
        for (before, written) in all.iter().enumerate() {
            all[..before].iter().try_for_each(|other| apart(other.clone(), written.clone()))?;
        }
        Ok(())
    }

    fn backward(
        mut self,
        at: &mut LayerAt,
        dtype: Dtype,
        (tape, of_out): (TapeAt, &Source<'_>),
    ) -> Result<(), Fault> {
        match (at, tape) {
            (LayerAt::Host(layer), TapeAt::Host(tape)) => match dtype {
                Dtype::F32 => self.backward_here::<f32>(layer, *tape, of_out),
                Dtype::Bf16 => self.backward_here::<bf16>(layer, *tape, of_out),
                _ => self.backward_here::<f16>(layer, *tape, of_out),
            },
            (LayerAt::Device(layer), TapeAt::Device(tape)) => {
                let into = DeviceGradients::new(
                    to_device(&self.x)?,
                    to_device(&self.router)?,
                    to_device(&self.experts)?,
                    self.shared.as_ref().map(to_device).transpose()?,
                );
                Ok(layer.backward(*tape, of_device(of_out)?, into)?)
            }
            (at, _) => Err(at.refuse(None, elsewhere("tape"))),
        }
    }

    fn backward_here<E: Element>(
        &mut self,
        layer: &mut MoeLayer,
        tape: HostTape,
        of_out: &Source<'_>,
    ) -> Result<(), Fault> {
        let Gradients { x, router, experts, shared, .. } = layer.backward(tape, of_host::<E>(of_out))?;
        let GradientTargets { x: of_x, router: of_router, experts: of_experts, shared: of_shared } = self;
        let bytes = [
            (of_x, bytemuck::cast_slice(&x)),
            (of_router, bytemuck::cast_slice(&router)),
            (of_experts, bytemuck::cast_slice(&experts)),
        ];
        let beside = of_shared.as_mut().map(|to| (to, bytemuck::cast_slice(&shared)));
        for (to, from) in bytes.into_iter().chain(beside) {
            let Target::Host { bytes, .. } = to else { return Err(elsewhere("gradients")) };
            bytes.copy_from_slice(from);
        }
        Ok(())
    }
}

impl Whole {
    /// Refuses elements that are not the layer's.
    fn check(&self, what: &'static str, seen: Dtype) -> Result<(), Fault> {
        let expected = self.dtype;
        if seen == expected { Ok(()) } else { Err(PlanError::WrongDtype { what, seen, expected }.into()) }
    }
}

/// Elements that were checked to be of this type; none elsewhere.
fn of_host<'a, E: Element>(source: &'a Source<'_>) -> &'a [E] {
    match source {
        Source::Host { bytes, .. } => bytemuck::try_cast_slice(bytes).unwrap_or_default(),
        Source::Device { .. } => &[],
    }
}

fn of_device<'a>(source: &'a Source<'_>) -> Result<&'a DeviceRange, Fault> {
    match source {
        Source::Device { range, .. } => Ok(range),
        Source::Host { .. } => Err(elsewhere("x")),
    }
}

fn to_device<'a>(target: &'a Target<'_>) -> Result<&'a DeviceRange, Fault> {
    match target {
        Target::Device { range, .. } => Ok(range),
        Target::Host { .. } => Err(elsewhere("gradients")),
    }
}
