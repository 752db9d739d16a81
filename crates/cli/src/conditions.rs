//! What the ranks of a job must have in common, wherever they were started.
//!
//! Each machine reads its own command line and its own routing file. The ranks compare what came of it when they meet,
//! before anything is measured, and name the rank and the options that differ.

use serde::Serialize;
use serde_json::{Value, json};
use sidelane::error::BootstrapError;

use crate::error::{CliError, usage};

/// The conditions of a command, as [`sidelane::Options::conditions`] wants them. The program itself is one: two versions
/// may mean different things by the same words.
pub fn words(command: &str, conditions: &impl Serialize) -> String {
    let program = format!("{} ({})", env!("CARGO_PKG_VERSION"), env!("SIDELANE_COMMIT"));
    json!({ "sidelane": program, "command": command, "conditions": conditions }).to_string()
}

/// Says in the words of the command line what differs.
pub fn explain(error: sidelane::Error) -> CliError {
    match error {
        sidelane::Error::Bootstrap(BootstrapError::ConditionsDiffer { rank, seen, expected }) => {
            let differences = differences(&seen, &expected);
            usage!("rank {rank} was started under other conditions than rank 0: {differences}")
        }
        error => error.into(),
    }
}

/// What `seen` has otherwise than `expected`.
fn differences(seen: &str, expected: &str) -> String {
    let [seen, expected] = [seen, expected].map(|words| serde_json::from_str(words).unwrap_or_default());
    let mut found = Vec::new();
    compare("", &seen, &expected, &mut found);
    found.join(", ")
}

/// Keys whose values differ, the innermost ones.
fn compare(path: &str, seen: &Value, expected: &Value, found: &mut Vec<String>) {
    if let (Some(seen), Some(expected)) = (seen.as_object(), expected.as_object()) {
        let keys: std::collections::BTreeSet<&String> = seen.keys().chain(expected.keys()).collect();
        for key in keys {
            let of = |object: &serde_json::Map<String, Value>| object.get(key).cloned().unwrap_or_default();
            compare(key, &of(seen), &of(expected), found);
        }
    } else if seen != expected {
        found.push(format!("{path} {seen}, not {expected}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_is_said() {
        let here = words("bench", &json!({ "tokens": 16, "room": { "mode": "eager" }, "hidden": 64 }));
        let there = words("bench", &json!({ "tokens": 32, "room": { "mode": "slots" }, "hidden": 64 }));
        assert_eq!(differences(&there, &here), r#"mode "slots", not "eager", tokens 32, not 16"#);
        assert_eq!(differences(&words("trace", &1), &words("bench", &1)), r#"command "trace", not "bench""#);
    }
}
