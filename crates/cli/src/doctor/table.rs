//! The report as people read it.

use comfy_table::{ColumnConstraint, Width};

use super::finding::{Finding, Level};
use crate::table;

/// What was found on the left, what it means on the right.
pub fn table(findings: &[Finding]) -> String {
    let mut table = table::new(["", "what", "found", "what it means, and what to do"]);
    for finding in findings {
        let advice = finding.advice.map_or(String::new(), |advice| format!("\n→ {advice}"));
        table.add_row([
            finding.level.name(),
            &finding.what,
            &finding.found,
            &format!("{}{advice}", finding.meaning),
        ]);
    }
    table.set_constraints([
        ColumnConstraint::ContentWidth,
        ColumnConstraint::UpperBoundary(Width::Percentage(20)),
        ColumnConstraint::UpperBoundary(Width::Percentage(25)),
    ]);
    table.trim_fmt()
}

/// The last line: what to look at first.
pub fn summary(findings: &[Finding]) -> &'static str {
    let any = |level| findings.iter().any(|finding| finding.level == level);
    match (any(Level::Warn), any(Level::Note)) {
        (false, false) => "All as it should be.",
        (false, true) => "No warnings. Notes say what would be faster, and what is optional.",
        (true, _) => "A warning names what fails as soon as it is used.",
    }
}
