//! What people and programs get to read.

use std::collections::BTreeMap;
use std::fs;
use std::io::{IsTerminal, stderr};
use std::path::Path;

use comfy_table::{ContentArrangement, LineStyle, Table, TableStyle};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::cell::{Fault, Lane, Phase};
use crate::error::{About, Result};
use crate::judge::{Outcome, Verdict};

/// Version of the JSON.
const SCHEMA: u32 = 1;

/// All cells of a run.
#[derive(Debug, Serialize)]
pub struct Report {
    schema: u32,
    seed: u64,
    counts: BTreeMap<&'static str, usize>,
    slowest_named_seconds: f64,
    seconds: f64,
    cells: Vec<Outcome>,
}

impl Report {
    /// Of a run that took so many seconds.
    pub fn new(seed: u64, cells: Vec<Outcome>, seconds: f64) -> Report {
        let mut counts = BTreeMap::new();
        for verdict in [Verdict::Named, Verdict::Survived, Verdict::NotApplicable, Verdict::Wrong] {
            counts.insert(verdict.text(), cells.iter().filter(|cell| cell.verdict == verdict).count());
        }
        let slowest = cells.iter().filter_map(|cell| cell.named_seconds).fold(0.0, f64::max);
        Report { schema: SCHEMA, seed, counts, slowest_named_seconds: slowest, seconds, cells }
    }

    /// Whether no cell is wrong.
    pub fn is_right(&self) -> bool {
        self.cells.iter().all(|cell| cell.verdict != Verdict::Wrong)
    }

    /// Writes it as JSON.
    ///
    /// # Errors
    /// [`Error::File`](crate::error::Error::File).
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).expect("a report is JSON");
        fs::write(path, text + "\n").of_file(path.display().to_string())
    }

    /// Tables and counts.
    pub fn print(&self) {
        for lane in Lane::ALL {
            let of_lane: Vec<&Outcome> = self.cells.iter().filter(|cell| cell.cell.lane == lane).collect();
            if of_lane.iter().any(|cell| cell.verdict != Verdict::NotApplicable) {
                println!("\n{}\n{}", lane.name(), grid(&of_lane));
            }
        }
        let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
        for cell in self.cells.iter().filter(|cell| cell.verdict == Verdict::NotApplicable) {
            *reasons.entry(&cell.note).or_default() += 1;
        }
        println!();
        for (reason, count) in reasons {
            println!("{count} cells not applicable: {reason}");
        }
        let counts: Vec<String> = self.counts.iter().map(|(text, count)| format!("{count} {text}")).collect();
        let slowest = self.slowest_named_seconds;
        println!(
            "{}; slowest name {slowest:.1} s; {:.0} s; --seed {}",
            counts.join(", "),
            self.seconds,
            self.seed
        );
    }
}

/// Faults by phases of one lane.
fn grid(cells: &[&Outcome]) -> String {
    let rule = LineStyle::none().fill('─').junction('─');
    let mut table = Table::new();
    table.load_style(TableStyle::new().header_separator(rule));
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header([""].into_iter().chain(Phase::ALL.map(Phase::name)));
    for fault in Fault::ALL {
        let of = |phase| cells.iter().find(|cell| (cell.cell.fault, cell.cell.phase) == (fault, phase));
        let row = Phase::ALL.map(|phase| of(phase).map_or(String::new(), |cell| brief(cell)));
        if row.iter().any(|cell| !cell.is_empty()) {
            table.add_row([fault.name().to_owned()].into_iter().chain(row));
        }
    }
    table.trim_fmt()
}

fn brief(cell: &Outcome) -> String {
    match (cell.verdict, cell.named_seconds) {
        (Verdict::NotApplicable, _) => "-".to_owned(),
        (verdict, Some(seconds)) => format!("{} {seconds:.1} s", verdict.text()),
        (verdict, None) => verdict.text().to_owned(),
    }
}

/// One line of a cell, when it is done.
pub fn line(cell: &Outcome) -> String {
    let victim = cell.victim.map_or(String::new(), |rank| format!(" of rank {rank}"));
    let place = format!("{}{victim}", cell.cell);
    format!("{:<16} {place:<46} {:5.1} s  {}", brief(cell), cell.seconds, cell.note)
}

/// A progress bar over so many cells, if standard error is a terminal.
pub fn progress(cells: usize) -> ProgressBar {
    if !stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}, {eta} left");
    ProgressBar::new(cells as u64).with_style(style.expect("the template is constant and valid"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::Cell;

    fn outcome(verdict: Verdict, named_seconds: Option<f64>) -> Outcome {
        let cell = Cell { fault: Fault::Sigkill, phase: Phase::Dispatch, lane: Lane::Shm };
        Outcome { cell, verdict, victim: Some(2), named_seconds, note: "3 Lost".to_owned(), seconds: 1.0 }
    }

    #[test]
    fn wrong_cell_spoils_the_report_and_others_do_not() {
        let right = [outcome(Verdict::Named, Some(0.1)), outcome(Verdict::Survived, None)];
        assert!(Report::new(7, right.to_vec(), 2.0).is_right());
        assert!(!Report::new(7, vec![outcome(Verdict::Wrong, None)], 2.0).is_right());
    }

    #[test]
    fn report_has_cells_counts_and_seed() {
        let report = Report::new(7, vec![outcome(Verdict::Named, Some(0.123))], 2.0);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(
            (&json["schema"], &json["seed"], &json["counts"]["named"]),
            (&1.into(), &7.into(), &1.into())
        );
        assert_eq!(json["cells"][0]["fault"], "sigkill");
        let text = grid(&[&report.cells[0]]);
        assert!(text.contains("named 0.1 s") && text.contains("dispatch"), "{text}");
    }
}
