//! A finding: what was found, what it means, and what to do about it.

use clap::ValueEnum;
use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Works, but slower, or without something optional.
    Note,
    /// Something will fail.
    Warn,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub what: String,
    pub level: Level,
    pub found: String,
    pub meaning: &'static str,
    pub advice: Option<&'static str>,
}

impl Finding {
    pub fn new(what: impl Into<String>, found: impl Into<String>) -> Self {
        Finding { what: what.into(), level: Level::Ok, found: found.into(), meaning: "", advice: None }
    }

    pub fn named(self, what: &str) -> Self {
        Finding { what: what.to_owned(), ..self }
    }

    pub fn means(self, meaning: &'static str) -> Self {
        Finding { meaning, ..self }
    }

    pub fn note(self, advice: &'static str) -> Self {
        Finding { level: Level::Note, advice: Some(advice), ..self }
    }

    pub fn warn(self, advice: &'static str) -> Self {
        Finding { level: Level::Warn, advice: Some(advice), ..self }
    }
}

pub fn seen(found: impl Into<String>) -> Finding {
    Finding::new("", found)
}
