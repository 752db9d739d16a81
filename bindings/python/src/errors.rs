//! The library's errors as exceptions.
//!
//! The classes are Python's (`sidelane/errors.py`); which one, the kind and the fields come from
//! the error itself, which is data: `Error::Lane(LaneError::Deadline { rank, peer, .. })` becomes a
//! `LaneError` with `kind` "Deadline", `rank`, `peer` ...

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use serde_json::{Map, Value};
use sidelane::error::{Error, OverlapError};

/// What Python code does wrong by itself, before the library is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// A tensor that cannot be used.
    Input,
    /// The object's world was closed, or the object used up.
    Closed,
    /// The process was forked after the object was made.
    Forked,
    /// Another thread is in a call of the object.
    Busy,
}

impl Wrong {
    /// The exception.
    pub fn error(self, kind: &str, message: &str, fields: &[(&str, Value)]) -> PyErr {
        let class = match self {
            Wrong::Input => "InputError",
            Wrong::Closed => "ClosedError",
            Wrong::Forked => "ForkedError",
            Wrong::Busy => "BusyError",
        };
        let fields = fields.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        Python::attach(|py| make(py, class, kind, message, fields))
    }
}

/// Of this rank's own error and what the refused call said: Ctrl-C comes first.
pub fn first<T>(py: Python<'_>, said: PyResult<T>, own: PyErr) -> PyErr {
    said.err().filter(|said| !said.is_instance_of::<PyException>(py)).unwrap_or(own)
}

/// The exception of an error of the library.
pub fn raise(error: impl Into<sidelane::Error>) -> PyErr {
    let mut error = error.into();
    let message = error.to_string();
    // The message says which node of a layer failed. The error is what it met.
    while let Error::Overlap(OverlapError::Failed { error: met, .. }) = error {
        error = *met;
    }
    // An error is plain data: there is nothing in it that could not be said.
    let (path, fields) = take_apart(serde_json::to_value(&error).unwrap_or_default());
    let layer = match &path[..] {
        // A meeting that ends with its world.
        [_, inner, ..] if inner == "World" => Some(inner),
        _ => path.first(),
    };
    let class = match layer.map(String::as_str) {
        Some("Memory") => "HeapError",
        Some("Bootstrap") => "BootstrapError",
        Some("World") => "WorldError",
        Some("Simd") => "SimdError",
        Some("Device") => "DeviceError",
        Some("Lane") => "LaneError",
        Some("Gate") => "GateError",
        Some("Plan") => "PlanError",
        Some("Call") => "CallError",
        Some("Layer" | "Overlap") => "LayerError",
        _ => "Error",
    };
    let kind = path.last().cloned().unwrap_or_default();
    Python::attach(|py| make(py, class, &kind, &message, fields))
}

/// The variants from the outside in, and the fields of the last: `{"Lane": {"Deadline": {..}}}`.
fn take_apart(mut value: Value) -> (Vec<String>, Map<String, Value>) {
    let mut path = Vec::new();
    loop {
        match value {
            Value::String(unit) => {
                path.push(unit);
                return (path, Map::new());
            }
            Value::Object(mut map) => {
                let variant = map.keys().next().filter(|key| key.starts_with(char::is_uppercase)).cloned();
                let Some(variant) = variant else { return (path, map) };
                value = map.remove(&variant).unwrap_or_default();
                path.push(variant);
            }
            _ => return (path, Map::new()),
        }
    }
}

fn make(py: Python<'_>, class: &str, kind: &str, message: &str, fields: Map<String, Value>) -> PyErr {
    static CLASSES: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let made = || -> PyResult<PyErr> {
        let classes = CLASSES.get_or_try_init(py, || py.import("sidelane.errors").map(Bound::unbind))?;
        let fields: Map<_, _> = fields.into_iter().map(|(name, value)| (name, seconds(value))).collect();
        let fields = pythonize::pythonize(py, &fields)?;
        let error = classes.bind(py).getattr(class)?.call1((message, kind, fields))?;
        Ok(PyErr::from_value(error))
    };
    made().unwrap_or_else(|error| error)
}

/// A duration is a number of seconds in Python.
fn seconds(value: Value) -> Value {
    match (value.get("secs").and_then(Value::as_u64), value.get("nanos").and_then(Value::as_u64)) {
        (Some(secs), Some(nanos)) => (secs as f64 + nanos as f64 * 1e-9).into(),
        _ => value,
    }
}
