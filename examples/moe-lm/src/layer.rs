//! One MoE layer, on the host or on a GPU: tokens come from the host and return there in either
//! case, since candle has them.

use std::sync::Arc;

use sidelane::device::Stream;
use sidelane::error::LayerError;
use sidelane::gate::{BalanceLoss, Decision};
use sidelane::layer::{
    DeviceGradients, DeviceMoeLayer, DeviceTape, Input, MoeLayer, MoeLayerBuilder, Products, Tape,
};
use sidelane::plan::ExpertMap;
use sidelane::{Error, Group};

/// A layer, with the tape of its last forward pass, which a backward pass uses up.
pub enum Layer {
    /// On the host.
    Host(Box<MoeLayer>, Option<Box<Tape>>),
    /// On a GPU.
    Device(Box<DeviceMoeLayer>, Option<Box<DeviceTape>>),
}

/// Settings of a layer that go by the number of ranks.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most tokens of a rank in a step.
    pub tokens: u32,
    /// The loss that keeps experts in use.
    pub balance: BalanceLoss,
}

/// Gradients of a backward pass.
pub struct Gradients {
    /// Of the tokens.
    pub x: Vec<f32>,
    /// Of the router.
    pub router: Vec<f32>,
    /// Of the experts of this rank.
    pub experts: Vec<f32>,
}

impl Layer {
    /// Of these settings, on the device of the stream or else on the host.
    ///
    /// # Errors
    /// Those of the layer's builder.
    pub fn new(
        builder: MoeLayerBuilder<'_>,
        stream: Option<(&Arc<Stream>, Products, u64)>,
    ) -> Result<Layer, Error> {
        Ok(match stream {
            None => Layer::Host(Box::new(builder.build()?), None),
            Some((stream, products, heap)) => {
                let builder = builder.on(stream).products(products).device_heap(heap);
                Layer::Device(Box::new(builder.build()?), None)
            }
        })
    }

    /// The same layer on another group, with these limits: those of a run on fewer ranks. `weights`
    /// has those of experts that move to this rank.
    ///
    /// # Errors
    /// Those of the layer's builder; [`LayerError::NotOnDevice`] for a layer on a GPU.
    pub fn rebuilt(
        &self,
        group: &Group,
        map: ExpertMap,
        weights: impl FnMut(u32) -> Option<Vec<f32>>,
        limits: Limits,
    ) -> Result<Layer, Error> {
        let Layer::Host(layer, _) = self else {
            return Err(LayerError::NotOnDevice { feature: "another group" }.into());
        };
        let Limits { tokens, balance } = limits;
        let builder = layer.rebuilt(group, map, weights).max_tokens(tokens).balance(balance);
        Ok(Layer::Host(Box::new(builder.build()?), None))
    }

    /// Changes the weights of the router and of the experts.
    ///
    /// # Errors
    /// Those of the device.
    pub fn load(&mut self, router: &[f32], experts: &[f32]) -> Result<(), Error> {
        match self {
            Layer::Host(layer, _) => {
                layer.router_mut().copy_from_slice(router);
                layer.experts_mut().weights_mut().copy_from_slice(experts);
            }
            Layer::Device(layer, _) => {
                let [to_router, to_experts] = [layer.router().clone(), layer.experts().clone()];
                layer.send(&to_router, router)?;
                layer.send(&to_experts, experts)?;
            }
        }
        Ok(())
    }

    /// What the layer makes of the tokens. It keeps the tape.
    ///
    /// # Errors
    /// Those of the layer.
    pub fn forward(&mut self, x: &[f32]) -> Result<Vec<f32>, Error> {
        match self {
            Layer::Host(layer, kept) => {
                let (out, tape) = layer.forward(&Input::new(x))?;
                *kept = Some(Box::new(tape));
                Ok(out)
            }
            Layer::Device(layer, kept) => {
                let bytes = size_of_val(x) as u64;
                let (tokens, out) = (layer.tensor(bytes)?, layer.tensor(bytes)?);
                layer.send(tokens.range(), x)?;
                *kept = Some(Box::new(layer.forward(&Input::new(tokens.range()), out.range())?));
                layer.receive(out.range())
            }
        }
    }

    /// The gate's decision in the last forward pass.
    pub fn decision(&self) -> Option<&Decision> {
        match self {
            Layer::Host(_, tape) => tape.as_deref().map(Tape::decision),
            Layer::Device(_, tape) => tape.as_deref().map(DeviceTape::decision),
        }
    }

    /// Gradients of the last forward pass; none if there was none since the last backward pass.
    ///
    /// # Errors
    /// Those of the layer.
    pub fn backward(&mut self, of_out: &[f32]) -> Result<Option<Gradients>, Error> {
        match self {
            Layer::Host(layer, tape) => {
                let Some(tape) = tape.take() else { return Ok(None) };
                let gradients = layer.backward(*tape, of_out)?;
                let (x, router, experts) = (gradients.x, gradients.router, gradients.experts);
                Ok(Some(Gradients { x, router, experts }))
            }
            Layer::Device(layer, tape) => {
                let Some(tape) = tape.take() else { return Ok(None) };
                let bytes = size_of_val(of_out) as u64;
                let (from, of_x) = (layer.tensor(bytes)?, layer.tensor(bytes)?);
                let router = layer.tensor(layer.router().len())?;
                let experts = layer.tensor(layer.experts().len())?;
                layer.send(from.range(), of_out)?;
                let into = DeviceGradients::new(of_x.range(), router.range(), experts.range(), None);
                layer.backward(*tape, from.range(), into)?;
                let x = layer.receive(of_x.range())?;
                let router = layer.receive(router.range())?;
                Ok(Some(Gradients { x, router, experts: layer.receive(experts.range())? }))
            }
        }
    }
}
