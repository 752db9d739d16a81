//! What a router is trained by: losses with their gradients to the logits.
//!
//! A balance is a dictionary in Python, the same as the library's own in JSON: `balance` gives that
//! of a system, which may be changed.

use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use sidelane::error::GateError;
use sidelane::gate::{BalanceLoss, ImportanceInput, LossInput, Preset, Totals, importance_loss, z_loss};

use crate::errors::raise;
use crate::gate::preset_of;
use crate::input::Input;
use crate::settings;
use crate::tensor::{Element, Kind, Tensor};

/// The most counts that are made where there are no tokens.
const MOST_BLANK: usize = 1 << 24;

/// Puts all of them into the module.
pub fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(balance, module)?)?;
    module.add_function(wrap_pyfunction!(balance_counts, module)?)?;
    module.add_function(wrap_pyfunction!(balance_loss, module)?)?;
    module.add_function(wrap_pyfunction!(z_loss_of, module)?)?;
    module.add_function(wrap_pyfunction!(importance_loss_of, module)?)
}

/// A tensor `[tokens, experts]`, and how many experts there are.
fn logits_of(logits: &Bound<'_, PyAny>, what: &'static str) -> PyResult<(Input, usize)> {
    let logits = Input::new(logits, what)?.of(Element::F32)?;
    let columns = logits.shape().last().copied().unwrap_or_default();
    Ok((logits.columns(columns.max(1))?, columns))
}

/// What a balance loss is taken of, while tensors are lent.
struct Taken {
    logits: Input,
    experts: usize,
    top_k: u32,
    choices: Option<Input>,
    token_mask: Option<Vec<bool>>,
}

impl Taken {
    fn of(
        logits: &Bound<'_, PyAny>,
        top_k: u32,
        choices: Option<&Bound<'_, PyAny>>,
        token_mask: Option<Vec<bool>>,
    ) -> PyResult<Self> {
        let (logits, experts) = logits_of(logits, "logits")?;
        let choices = choices.map(|choices| Input::new(choices, "choices")?.of(Element::I32)).transpose()?;
        Ok(Taken { logits, experts, top_k, choices, token_mask })
    }

    fn input(&self) -> PyResult<LossInput<'_>> {
        Ok(LossInput {
            logits: self.logits.slice()?,
            experts: self.experts as u32,
            top_k: self.top_k,
            choices: self.choices.as_ref().map_or(Ok(&[][..]), Input::slice)?,
            token_mask: self.token_mask.as_deref(),
            totals: None,
        })
    }
}

/// A loss, and its gradient in the shape of the logits.
fn lost<'py>(
    py: Python<'py>,
    logits: &Input,
    kind: Kind,
    loss: impl FnOnce(&mut [f32]) -> Result<f32, GateError> + Send,
) -> PyResult<(f32, Bound<'py, PyAny>)> {
    let mut gradient = vec![0.0; logits.len()];
    let loss = py.detach(|| loss(&mut gradient)).map_err(raise)?;
    Ok((loss, kind.give(py, Tensor::of(gradient, logits.shape(), Element::F32))?))
}

/// The balance loss of a system, as a dictionary, with a coefficient of 1.
#[pyfunction]
fn balance<'py>(py: Python<'py>, preset: &str) -> PyResult<Bound<'py, PyAny>> {
    let preset: Preset = preset_of(preset)?;
    Ok(pythonize::pythonize(py, &BalanceLoss::of(preset))?)
}

/// A balance from its dictionary.
pub fn balance_of(balance: &Bound<'_, PyAny>) -> PyResult<BalanceLoss> {
    pythonize::depythonize(balance).map_err(|error| settings::wrong("balance", &error.to_string()))
}

/// Choices of each expert, [parts, experts] in float64: what ranks add up.
#[pyfunction]
#[pyo3(signature = (balance, logits, *, top_k, choices=None, token_mask=None))]
fn balance_counts<'py>(
    py: Python<'py>,
    balance: &Bound<'py, PyAny>,
    logits: &Bound<'py, PyAny>,
    top_k: u32,
    choices: Option<&Bound<'py, PyAny>>,
    token_mask: Option<Vec<bool>>,
) -> PyResult<Bound<'py, PyAny>> {
    let (kind, balance) = (Kind::of(logits), balance_of(balance)?);
    let taken = Taken::of(logits, top_k, choices, token_mask)?;
    let (input, parts) = (taken.input()?, balance.parts.count());
    balance.check(&input).map_err(raise)?;
    // Without tokens there may be any number of parts, and more counts than memory.
    let len = parts.checked_mul(taken.experts).filter(|&len| len <= MOST_BLANK.max(taken.logits.len()));
    let len = len.ok_or_else(|| PyMemoryError::new_err(format!("no memory for counts of {parts} parts")))?;
    let mut counts = vec![0.0; len];
    py.detach(|| balance.counts(&input, &mut counts)).map_err(raise)?;
    kind.give(py, Tensor::of(counts, &[parts, taken.experts], Element::F64))
}

/// The loss that keeps experts evenly loaded, and its gradient. `totals`: counts of more than these
/// tokens, and how many tokens they are of.
#[pyfunction]
#[pyo3(signature = (balance, logits, *, top_k, choices=None, token_mask=None, totals=None))]
fn balance_loss<'py>(
    py: Python<'py>,
    balance: &Bound<'py, PyAny>,
    logits: &Bound<'py, PyAny>,
    top_k: u32,
    choices: Option<&Bound<'py, PyAny>>,
    token_mask: Option<Vec<bool>>,
    totals: Option<(Bound<'py, PyAny>, f64)>,
) -> PyResult<(f32, Bound<'py, PyAny>)> {
    let (kind, balance) = (Kind::of(logits), balance_of(balance)?);
    let taken = Taken::of(logits, top_k, choices, token_mask)?;
    let totals = totals
        .map(|(counts, tokens)| PyResult::Ok((Input::new(&counts, "totals")?.of(Element::F64)?, tokens)))
        .transpose()?;
    let totals = match &totals {
        Some((counts, tokens)) => Some(Totals { counts: counts.slice()?, tokens: *tokens }),
        None => None,
    };
    let input = LossInput { totals, ..taken.input()? };
    lost(py, &taken.logits, kind, |gradient| balance.loss(&input, Some(gradient)))
}

/// The loss that keeps logits small, and its gradient.
#[pyfunction(name = "z_loss")]
#[pyo3(signature = (coefficient, logits, *, token_mask=None))]
fn z_loss_of<'py>(
    py: Python<'py>,
    coefficient: f32,
    logits: &Bound<'py, PyAny>,
    token_mask: Option<Vec<bool>>,
) -> PyResult<(f32, Bound<'py, PyAny>)> {
    let kind = Kind::of(logits);
    let (logits, experts) = logits_of(logits, "logits")?;
    let values = logits.slice()?;
    let token_mask = token_mask.as_deref();
    lost(py, &logits, kind, |gradient| {
        z_loss(coefficient, values, experts as u32, token_mask, Some(gradient))
    })
}

/// The loss that keeps importance and load even where noise chooses, and its gradient to the clean
/// logits.
#[pyfunction(name = "importance_loss")]
#[pyo3(signature = (coefficient, logits, choices, *, noise, noisy=None))]
fn importance_loss_of<'py>(
    py: Python<'py>,
    coefficient: f32,
    logits: &Bound<'py, PyAny>,
    choices: &Bound<'py, PyAny>,
    noise: f32,
    noisy: Option<&Bound<'py, PyAny>>,
) -> PyResult<(f32, Bound<'py, PyAny>)> {
    let kind = Kind::of(logits);
    let (logits, experts) = logits_of(logits, "logits")?;
    let noisy = noisy.map(|noisy| logits_of(noisy, "noisy")).transpose()?;
    let choices = Input::new(choices, "choices")?.of(Element::I32)?;
    let input = ImportanceInput {
        logits: logits.slice()?,
        noisy: noisy.as_ref().map(|(noisy, _)| noisy.slice()).transpose()?,
        experts: experts as u32,
        top_k: choices.shape().last().copied().unwrap_or_default() as u32,
        choices: choices.slice()?,
        noise,
    };
    lost(py, &logits, kind, |gradient| importance_loss(coefficient, &input, Some(gradient)))
}
