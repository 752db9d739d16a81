//! Words and dtypes as Python writes them.

use pyo3::prelude::*;
use serde::de::DeserializeOwned;
use sidelane::Dtype;

use crate::errors::Wrong;

/// A setting of a few words, by the names that the library itself has for them.
pub fn word<T: DeserializeOwned>(setting: &str, value: &str) -> PyResult<T> {
    let name = serde_json::Value::String(value.replace('_', "-"));
    serde_json::from_value(name).map_err(|error| wrong(setting, &error.to_string()))
}

/// That a setting cannot be used.
pub fn wrong(setting: &str, why: &str) -> PyErr {
    Wrong::Input.error("Setting", &format!("{setting}: {why}"), &[("setting", setting.into())])
}

/// A row type: "bfloat16" or "bf16", `torch.bfloat16`, `numpy.float32`.
pub fn dtype(value: &Bound<'_, PyAny>) -> PyResult<Dtype> {
    let name = match value.extract::<String>() {
        Ok(name) => name,
        Err(_) => match value.getattr("__name__") {
            Ok(name) => name.extract()?,
            Err(_) => value.str()?.to_string(),
        },
    };
    match name.trim_start_matches("torch.") {
        "float32" | "f32" | "float" => Ok(Dtype::F32),
        "bfloat16" | "bf16" => Ok(Dtype::Bf16),
        "float16" | "f16" | "half" => Ok(Dtype::F16),
        "uint8" | "bytes" => Ok(Dtype::Bytes),
        other => Err(wrong("dtype", &format!("`{other}` is none of float32, bfloat16, float16, uint8"))),
    }
}

/// A device's number: 1, "cuda:1", `torch.device("cuda", 1)`. None is torch's current one: "cuda".
pub fn device(value: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
    let name = value.str()?.to_string();
    if name == "cuda" {
        return Ok(None);
    }
    let number = name.strip_prefix("cuda:").unwrap_or(&name).parse();
    number
        .map(Some)
        .map_err(|_| wrong("device", &format!("`{name}` is no GPU: pass its number, or \"cuda\"")))
}
