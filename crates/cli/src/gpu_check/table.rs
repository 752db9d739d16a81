//! The report as people read it: a table for each part, then the verdict.

use super::report::Report;
use super::row::Row;
use super::task::Part;
use crate::command;
use crate::table;

impl command::Report for Report {
    /// All of it.
    fn text(&self) -> String {
        let report = self;
        let Report { version, commit, target, driver, library, device, name, multiprocessors, .. } = report;
        let mut text = format!(
            "sidelane {version} ({commit}) for {target}\ndevice {device}: {name}, {multiprocessors} SMs; driver for CUDA {driver} ({library})\n"
        );
        if report.stand_in {
            text += "THE STAND-IN DRIVER: no GPU is here. Times mean nothing, and the audit shows nothing.\n";
        }
        for part in Part::ALL {
            let rows: Vec<&Row> = report.rows.iter().filter(|row| row.part == part).collect();
            if !rows.is_empty() {
                text += &format!("\n{}\n{}\n", part.name(), of(&rows));
            }
        }
        if !report.conclusions.is_empty() {
            text += &format!("\n{}\n", report.conclusions.join("\n"));
        }
        text + "\n" + verdict(report)
    }

    fn is_right(&self) -> bool {
        self.holds
    }
}

fn of(rows: &[&Row]) -> String {
    let mut table = table::new(["", "what", "found", "what it shows"]);
    for row in rows {
        let time = row.time.map(|time| {
            let [p50, min, max] = [time.p50_us, time.min_us, time.max_us].map(table::time);
            format!("{p50} ({min} to {max}, {} samples)", time.samples)
        });
        let found: Vec<&str> = time
            .iter()
            .map(String::as_str)
            .chain([row.found.as_str()])
            .filter(|text| !text.is_empty())
            .collect();
        let open = row.open.as_ref().map_or(String::new(), |open| format!("\nopen: {open}"));
        table.add_row([row.state.name(), &row.what, &found.join("\n"), &format!("{}{open}", row.shows)]);
    }
    table.trim_fmt()
}

fn verdict(report: &Report) -> &'static str {
    match (report.correct, report.holds, report.stand_in) {
        (false, ..) => "NOT RIGHT: see the rows that say WRONG.",
        (true, _, true) => {
            "All that was checked is right on the stand-in driver. No GPU was here: nothing is shown about one."
        }
        (true, false, false) => {
            "All that was checked is right, but the audit does not hold: it is open whether transfers need SMs."
        }
        (true, true, false) if !report.audited => {
            "All right: every check that was run. The audit was not run, or not seen."
        }
        (true, true, false) => "All right: every check, and transfers that complete while every SM is held.",
    }
}
