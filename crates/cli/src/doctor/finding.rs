//! One line of the report.

use serde::Serialize;

/// How much a reader should care.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Works, but slower, or without something optional.
    Note,
    /// Something will fail.
    Warn,
}

impl Level {
    /// The word in the table and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Level::Ok => "ok",
            Level::Note => "note",
            Level::Warn => "warn",
        }
    }
}

/// What was looked at, what was found, what it means, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub what: String,
    pub level: Level,
    pub found: String,
    pub meaning: &'static str,
    pub advice: Option<&'static str>,
}

impl Finding {
    /// Nothing to do.
    pub fn ok(what: impl Into<String>, found: impl Into<String>, meaning: &'static str) -> Self {
        Finding { what: what.into(), level: Level::Ok, found: found.into(), meaning, advice: None }
    }

    /// Works without.
    pub fn note(
        what: impl Into<String>,
        found: impl Into<String>,
        meaning: &'static str,
        advice: &'static str,
    ) -> Self {
        Finding { level: Level::Note, advice: Some(advice), ..Finding::ok(what, found, meaning) }
    }

    /// Will fail.
    pub fn warn(
        what: impl Into<String>,
        found: impl Into<String>,
        meaning: &'static str,
        advice: &'static str,
    ) -> Self {
        Finding { level: Level::Warn, advice: Some(advice), ..Finding::ok(what, found, meaning) }
    }
}

/// A number of bytes, in powers of 1024: `23.5 GiB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let (mut value, mut unit) = (count as f64 / 1024.0, 0);
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    let number = format!("{value:.1}");
    format!("{} {}", number.strip_suffix(".0").unwrap_or(&number), UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn sizes_are_rounded_to_a_tenth_of_their_unit() {
        let cases = [
            (0, "0 KiB"),
            (8 << 20, "8 MiB"),
            (25_276_502_016, "23.5 GiB"),
            ((1 << 30) - 1, "1 GiB"),
            (64 << 10, "64 KiB"),
        ];
        for (count, text) in cases {
            assert_eq!(bytes(count), text);
        }
    }
}
