//! What `engines` has counted: as people read it, and its JSON, whose keys are described in `docs/engines-json.md`.

use serde::Serialize;

use super::task::{Conditions, Task};
use super::ways::{self, Way};
use crate::command;
use crate::error::CliError;
use crate::launch::shape_words;
use crate::table::{self, time, volume};

/// Everything that was counted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub config: Conditions,
    /// Bytes of a row that goes out, and of one that comes home.
    pub row_bytes: u64,
    pub home_bytes: u64,
    pub ways: Vec<Way>,
}

impl Report {
    /// Counts.
    pub fn new(task: &Task) -> Result<Self, CliError> {
        Ok(Report {
            config: task.conditions.clone(),
            row_bytes: task.row_bytes,
            home_bytes: task.home_bytes,
            ways: ways::all(task)?,
        })
    }
}

impl command::Report for Report {
    /// Conditions, and a line for each way.
    fn text(&self) -> String {
        let Conditions { routing, experts, top_k, ranks_per_node, tokens, hidden, dtype, .. } = &self.config;
        let Conditions { per_copy, speed, .. } = self.config;
        let mut table = table::figures([
            "way",
            "copies",
            "bytes each",
            "batches",
            "words",
            "lists",
            "engines",
            "cards",
            "time",
        ]);
        for Way { name, mean, most, us } in &self.ways {
            let of = if mean.copies > 0.0 { mean.bytes / mean.copies } else { 0.0 };
            let count = |figure: f64| format!("{figure:.0}");
            table.add_row([
                name.clone(),
                count(most.copies),
                volume(of as u64),
                count(most.batches),
                count(most.words),
                count(most.lists),
                volume(mean.bytes as u64),
                volume(mean.card_bytes as u64),
                time(*us),
            ]);
        }
        format!(
            "routing   {routing}, {experts} experts, top-{top_k}, {tokens} tokens a rank\n\
             ranks     {}\n\
             rows      {hidden} x {}\n\
             time      {per_copy} us a copy and {speed} GB/s, as given: not measured\n\n\
             {}\n\n\
             Copies, batches, words (memory operations) and lists (of them) are those of the rank that has most; bytes are\n\
             means. Times are of the engines of one rank alone, one copy after another. Own rows are moved by none.",
            shape_words(ranks_per_node),
            dtype.name(),
            table.trim_fmt(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::command::tests::{assert_page, parsed};

    const DOCUMENT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/engines-json.md"));

    #[test]
    fn the_document_names_exactly_the_keys_of_the_json() {
        let report =
            Report::new(&Task::resolve(&parsed("--tokens 8 --hidden 32").unwrap()).unwrap()).unwrap();
        assert_page(DOCUMENT, &[report], |key| Some(key.to_owned()));
    }
}
