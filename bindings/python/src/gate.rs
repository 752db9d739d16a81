//! Gates: from the logits of a router to choices and weights.
//!
//! A configuration is a dictionary in Python, the same as the library's own in JSON: `preset` gives
//! that of a system, which may be changed before a `Gate` is made of it.

use std::sync::Arc;

use pyo3::prelude::*;
use sidelane::gate::{GateConfig, GateInput, Preset, RngKey, WeightsInput, weights_backward};

use crate::errors::raise;
use crate::input::Input;
use crate::lending::LendingCell;
use crate::settings;
use crate::tensor::{Element, Kind, Tensor};

/// Names of all presets.
#[pyfunction]
pub fn presets() -> Vec<&'static str> {
    Preset::ALL.iter().map(|preset| preset.name()).collect()
}

/// The configuration of a system, as a dictionary.
#[pyfunction]
pub fn preset<'py>(py: Python<'py>, name: &str, experts: u32, top_k: u32) -> PyResult<Bound<'py, PyAny>> {
    Ok(pythonize::pythonize(py, &preset_of(name)?.config(experts, top_k).map_err(raise)?)?)
}

/// A preset by its name.
pub fn preset_of(name: &str) -> PyResult<Preset> {
    let unknown = |error: sidelane::gate::PresetError| settings::wrong("preset", &error.to_string());
    name.parse().map_err(unknown)
}

/// A configuration from its dictionary.
pub fn config_of(config: &Bound<'_, PyAny>) -> PyResult<GateConfig> {
    pythonize::depythonize(config).map_err(|error| settings::wrong("gate", &error.to_string()))
}

/// What a gate is asked, while tensors are lent.
struct Asked {
    logits: Input,
    bias: Option<Input>,
    noise_std: Option<Input>,
    token_mask: Option<Vec<bool>>,
    replay: Option<Input>,
    global_required: Option<u32>,
    training: bool,
    draw: RngKey,
}

impl Asked {
    fn call(&self) -> PyResult<GateInput<'_>> {
        Ok(GateInput::new(self.logits.slice()?)
            .with_bias(self.bias.as_ref().map(Input::slice).transpose()?)
            .with_noise_std(self.noise_std.as_ref().map(Input::slice).transpose()?)
            .with_token_mask(self.token_mask.as_deref())
            .with_replay(self.replay.as_ref().map(Input::slice).transpose()?)
            .with_global_required(self.global_required)
            .with_training(self.training)
            .with_draw(self.draw))
    }
}

/// A tensor of this type, if there is one.
fn lent(object: Option<&Bound<'_, PyAny>>, what: &'static str, element: Element) -> PyResult<Option<Input>> {
    object.map(|object| Input::new(object, what)?.of(element)).transpose()
}

/// A router. Of calls of one size only the first allocates.
#[pyclass(frozen, module = "sidelane")]
pub struct Gate {
    cell: LendingCell<sidelane::gate::Gate>,
    experts: usize,
    top_k: usize,
}

#[pymethods]
impl Gate {
    #[new]
    fn new(config: &Bound<'_, PyAny>) -> PyResult<Self> {
        let config = config_of(config)?;
        let (experts, top_k) = (config.experts as usize, config.top_k as usize);
        let gate = sidelane::gate::Gate::new(config).map_err(raise)?;
        Ok(Gate { cell: LendingCell::new("gate", gate), experts, top_k })
    }

    #[getter]
    fn config<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let config = self.cell.lend(|gate| Ok(gate.config().clone()))?;
        Ok(pythonize::pythonize(py, &config)?)
    }

    /// Decides for all tokens: `logits` [tokens, experts], float32.
    #[pyo3(signature = (
        logits, *, bias=None, noise_std=None, token_mask=None, replay=None, global_required=None, training=false,
        seed=0, step=0, rank=0
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn route(
        &self,
        py: Python<'_>,
        logits: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        noise_std: Option<&Bound<'_, PyAny>>,
        token_mask: Option<Vec<bool>>,
        replay: Option<&Bound<'_, PyAny>>,
        global_required: Option<u32>,
        training: bool,
        seed: u64,
        step: u64,
        rank: u32,
    ) -> PyResult<Decision> {
        let kind = Kind::of(logits);
        let asked = Asked {
            logits: self.logits(logits)?,
            bias: lent(bias, "bias", Element::F32)?,
            noise_std: lent(noise_std, "noise_std", Element::F32)?,
            token_mask,
            replay: lent(replay, "replay", Element::I32)?,
            global_required,
            training,
            draw: RngKey::new(seed, step, rank),
        };
        let call = asked.call()?;
        let decision = self.cell.lend(|gate| {
            py.detach(|| gate.route(&call).cloned().map_err(sidelane::Error::from)).map_err(raise)
        })?;
        Ok(Decision::of(decision, kind))
    }

    /// The logits that choose in a call, noise and all, [tokens, experts].
    #[pyo3(signature = (logits, *, noise_std=None, training=false, seed=0, step=0, rank=0))]
    #[expect(clippy::too_many_arguments, reason = "they are Python's keywords")]
    fn noisy_logits<'py>(
        &self,
        py: Python<'py>,
        logits: &Bound<'py, PyAny>,
        noise_std: Option<&Bound<'py, PyAny>>,
        training: bool,
        seed: u64,
        step: u64,
        rank: u32,
    ) -> PyResult<Bound<'py, PyAny>> {
        let kind = Kind::of(logits);
        let asked = Asked {
            logits: self.logits(logits)?,
            bias: None,
            noise_std: lent(noise_std, "noise_std", Element::F32)?,
            token_mask: None,
            replay: None,
            global_required: None,
            training,
            draw: RngKey::new(seed, step, rank),
        };
        let call = asked.call()?;
        let mut noisy = vec![0.0; call.logits.len()];
        self.cell.lend(|gate| py.detach(|| gate.noisy_logits(&call, &mut noisy)).map_err(raise))?;
        kind.give(py, Tensor::of(noisy, asked.logits.shape(), Element::F32))
    }

    /// From the gradient of the routing weights [tokens, top_k] to that of the logits [tokens,
    /// experts].
    fn weights_backward<'py>(
        &self,
        py: Python<'py>,
        logits: &Bound<'py, PyAny>,
        choices: &Bound<'py, PyAny>,
        experts: &Bound<'py, PyAny>,
        gradients: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let kind = Kind::of(logits);
        let of_choices = |object: &Bound<'py, PyAny>, what, element| {
            Input::new(object, what)?.columns(self.top_k)?.of(element)
        };
        let logits = self.logits(logits)?;
        let choices = of_choices(choices, "choices", Element::I32)?;
        let experts = of_choices(experts, "experts", Element::I32)?;
        let gradients = of_choices(gradients, "gradients", Element::F32)?;
        let input = WeightsInput {
            logits: logits.slice()?,
            choices: choices.slice()?,
            experts: experts.slice()?,
            d_weights: gradients.slice()?,
        };
        let mut d_logits = vec![0.0; logits.len()];
        self.cell.lend(|gate| {
            py.detach(|| weights_backward(gate.config(), &input, &mut d_logits)).map_err(raise)
        })?;
        kind.give(py, Tensor::of(d_logits, logits.shape(), Element::F32))
    }
}

impl Gate {
    fn logits(&self, logits: &Bound<'_, PyAny>) -> PyResult<Input> {
        Input::new(logits, "logits")?.columns(self.experts)?.of(Element::F32)
    }
}

/// What a router decided.
#[pyclass(frozen, module = "sidelane")]
pub struct Decision {
    decision: Arc<sidelane::gate::Decision>,
    kind: Kind,
    top_k: usize,
}

impl Decision {
    /// For code that uses tensors of this kind.
    pub fn of(decision: sidelane::gate::Decision, kind: Kind) -> Self {
        let top_k = decision.top_k() as usize;
        Decision { decision: Arc::new(decision), kind, top_k }
    }

    fn choices<'py, T: bytemuck::NoUninit + Send>(
        &self,
        py: Python<'py>,
        values: &[T],
        element: Element,
    ) -> PyResult<Bound<'py, PyAny>> {
        let shape = [values.len() / self.top_k, self.top_k];
        self.kind.give(py, Tensor::of(values.to_vec(), &shape, element))
    }
}

#[pymethods]
impl Decision {
    /// What is left of the choices, [tokens, top_k]: expert ids, or -1.
    #[getter]
    fn experts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.choices(py, self.decision.experts(), Element::I32)
    }

    /// Their weights, [tokens, top_k].
    #[getter]
    fn weights<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.choices(py, self.decision.weights(), Element::F32)
    }

    /// What was chosen before any choice was dropped, [tokens, top_k].
    #[getter(choices)]
    fn all_choices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.choices(py, self.decision.choices(), Element::I32)
    }

    /// Place of each choice among the rows of its expert, [tokens, top_k].
    #[getter]
    fn slots<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.choices(py, self.decision.slots(), Element::I32)
    }

    /// Choices of each expert, before any was dropped.
    #[getter]
    fn counts_before(&self) -> Vec<u32> {
        self.decision.counts_before().to_vec()
    }

    /// Choices of each expert that are left.
    #[getter]
    fn counts_after(&self) -> Vec<u32> {
        self.decision.counts_after().to_vec()
    }

    /// Rows per expert.
    #[getter]
    fn capacity(&self) -> u32 {
        self.decision.capacity()
    }

    /// The capacity that would have dropped nothing.
    #[getter]
    fn required(&self) -> u32 {
        self.decision.required()
    }
}
