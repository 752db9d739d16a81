//! Results as a table in Markdown.

use std::collections::HashMap;
use std::fmt::Write;

use sidelane::gate::Preset;

use super::case::Head;
use super::compare::Seen;

/// A row per preset; below it the rows that a rounding could change.
pub fn table(head: &Head, seen: &HashMap<Preset, Seen>) -> String {
    let mut text = format!("\njudges: {}; seed {}\n\n", head.judges.join(", "), head.seed);
    text += "| preset | cases by judge | tokens | weights | worst, ulp of f64 | beside theirs | worst, relative \
             | rows within 32 ulp | changed | placed | dropped | losses | worst, relative | worst gradient |\n";
    text += "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n";
    for preset in Preset::ALL {
        let Some(of) = seen.get(&preset) else { continue };
        let judges: Vec<String> =
            of.judges.iter().map(|(judge, cases)| format!("{judge}: {cases}")).collect();
        let _ = writeln!(
            text,
            "| {preset} | {} | {} | {} | {} | {} | {:.1e} | {} | {} | {} | {} | {} | {:.1e} | {:.1e} |",
            judges.join(", "),
            of.tokens,
            of.weights,
            of.ulps,
            of.their_weights,
            of.relative,
            of.near.len(),
            of.changed.len(),
            of.placed,
            of.dropped,
            of.losses,
            of.worst_loss,
            of.worst_gradient,
        );
    }
    for (what, list) in
        [("within 32 ulp", lines(seen, |of| &of.near)), ("changed", lines(seen, |of| &of.changed))]
    {
        let _ = writeln!(text, "\n{what}: {}", if list.is_empty() { "none" } else { &list });
    }
    text
}

fn lines(seen: &HashMap<Preset, Seen>, of: impl Fn(&Seen) -> &Vec<String>) -> String {
    let seen = Preset::ALL.iter().filter_map(|preset| seen.get(preset));
    seen.flat_map(of).map(String::as_str).collect::<Vec<_>>().join("; ")
}
