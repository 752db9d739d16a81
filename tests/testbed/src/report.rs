//! What people and programs get to read at the end.

use std::fs;
use std::path::Path;
use std::time::Duration;

use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use serde::Serialize;

use crate::counters::Counters;
use crate::error::{At, Result};
use crate::perftest::{Kind, Reading};
use crate::stats::Summary;

/// Characters of a note that the table shows.
const ROOM: usize = 160;

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// As it should.
    Passed,
    /// Otherwise.
    Failed,
    /// It never began.
    NotRun,
}

/// One step in the report.
#[derive(Debug, Serialize)]
pub struct Row {
    /// The step.
    pub step: &'static str,
    /// What passes when it passes.
    pub about: &'static str,
    /// How it ended.
    pub verdict: Verdict,
    /// How long it took.
    pub seconds: f64,
    /// Finding, or reason of the failure.
    pub note: String,
    /// Packets of each machine.
    pub packets: [Packets; 2],
}

/// Counters of one machine's NICs during a step, or since its boot in the middle of it.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Packets {
    /// Sent, acknowledgements among them.
    pub sent: u64,
    /// Received.
    pub received: u64,
    /// Sent again, or seen again.
    pub again: u64,
}

impl From<&Counters> for Packets {
    fn from(counters: &Counters) -> Self {
        Self { sent: counters.sent(), received: counters.received(), again: counters.again() }
    }
}

/// How far ours may be from the baseline.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// Our least at most this many times theirs.
    BestAtMost(f64),
    /// Our median at least this part of theirs.
    MedianAtLeast(f64),
}

/// The runs of one contender.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Side {
    /// The best that any run has seen.
    pub best: f64,
    /// What runs typically see.
    pub typical: Summary,
}

impl Side {
    /// Of at least one reading.
    pub fn of(kind: Kind, readings: &[Reading]) -> Option<Self> {
        let best = readings.iter().map(|reading| reading.best);
        let best = match kind {
            Kind::Latency => best.reduce(f64::min),
            Kind::Bandwidth => best.reduce(f64::max),
        };
        let typical: Vec<_> = readings.iter().map(|reading| reading.typical).collect();
        Some(Self { best: best?, typical: Summary::of(&typical)? })
    }
}

/// One of our figures, compared with the baseline's.
#[derive(Debug, Serialize)]
pub struct Comparison {
    /// Measured quantity.
    pub name: &'static str,
    /// Of all figures.
    pub unit: &'static str,
    /// Sidelane.
    pub ours: Side,
    /// perftest.
    pub theirs: Side,
    /// Ours / theirs: of the best or of the medians, as the limit says.
    pub ratio: f64,
    /// How far ours may be.
    pub limit: Limit,
    /// Whether it is not farther.
    pub within: bool,
}

impl Comparison {
    /// Compares both with the limit.
    pub fn new(name: &'static str, unit: &'static str, ours: Side, theirs: Side, limit: Limit) -> Self {
        let (ratio, within) = match limit {
            Limit::BestAtMost(most) => {
                let ratio = ours.best / theirs.best;
                (ratio, ratio <= most)
            }
            Limit::MedianAtLeast(least) => {
                let ratio = ours.typical.median / theirs.typical.median;
                (ratio, ratio >= least)
            }
        };
        Self { name, unit, ours, theirs, ratio, limit, within }
    }
}

/// Everything.
#[derive(Debug, Serialize)]
pub struct Report {
    /// What executed the machines' instructions.
    pub accelerator: &'static str,
    /// All steps that were asked for.
    pub steps: Vec<Row>,
    /// Figures compared with the baseline's.
    pub comparisons: Vec<Comparison>,
    /// From the first piece fetched to the last step.
    pub seconds: f64,
}

impl Report {
    /// Every step has passed; when strict, every figure lies within its limit too.
    pub fn good(&self, strict: bool) -> bool {
        let steps = self.steps.iter().all(|row| row.verdict == Verdict::Passed);
        steps && !self.steps.is_empty() && (!strict || self.comparisons.iter().all(|one| one.within))
    }

    /// As JSON.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(std::io::Error::from).at(path)?;
        fs::write(path, text + "\n").at(path)
    }

    /// As tables.
    pub fn print(&self) {
        println!("{}", steps(&self.steps));
        if !self.comparisons.is_empty() {
            println!("{}", comparisons(&self.comparisons));
        }
        println!("{:.0} s, {}", self.seconds, self.accelerator);
    }
}

/// Seconds of a step, for a row.
pub fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 10.0).round() / 10.0
}

fn table<const N: usize>(head: [&str; N], right: &[usize]) -> Table {
    let rule = LineStyle::none().fill('─').junction('─');
    let mut table = Table::new();
    table.load_style(TableStyle::new().header_separator(rule));
    table.set_content_arrangement(ContentArrangement::Disabled).set_header(head);
    for &column in right {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

fn steps(rows: &[Row]) -> Table {
    let mut table = table(["step", "", "s", "packets sent", "again", "seen"], &[2, 3, 4]);
    for row in rows {
        let verdict = match row.verdict {
            Verdict::Passed => "passed",
            Verdict::Failed => "FAILED",
            Verdict::NotRun => "NOT RUN",
        };
        let both =
            |count: fn(&Packets) -> u64| format!("{} + {}", count(&row.packets[0]), count(&row.packets[1]));
        table.add_row([
            row.step.to_owned(),
            verdict.to_owned(),
            format!("{:.1}", row.seconds),
            both(|packets| packets.sent),
            both(|packets| packets.again),
            short(&row.note),
        ]);
    }
    table
}

/// The beginning of a note: as much as a table has room for.
fn short(note: &str) -> String {
    let line = note.lines().next().unwrap_or_default();
    match line.char_indices().nth(ROOM) {
        Some((end, _)) => format!("{} ..", &line[..end]),
        None => line.to_owned(),
    }
}

fn comparisons(rows: &[Comparison]) -> Table {
    let mut table = table(
        [
            "",
            "unit",
            "ours: best",
            "median",
            "middle half",
            "perftest: best",
            "median",
            "middle half",
            "ratio",
            "limit",
        ],
        &[2, 3, 4, 5, 6, 7, 8],
    );
    for row in rows {
        let side = |side: &Side| {
            let Summary { low, median, high, .. } = side.typical;
            [format!("{:.1}", side.best), format!("{median:.1}"), format!("{low:.1} .. {high:.1}")]
        };
        let limit = match row.limit {
            Limit::BestAtMost(most) => format!("best <= {most}"),
            Limit::MedianAtLeast(least) => format!("median >= {least}"),
        };
        let [best, median, half] = side(&row.ours);
        let [their_best, their_median, their_half] = side(&row.theirs);
        let mark = if row.within { "" } else { " !" };
        table.add_row([
            row.name.to_owned(),
            row.unit.to_owned(),
            best,
            median,
            half,
            their_best,
            their_median,
            their_half,
            format!("{:.2}{mark}", row.ratio),
            limit,
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(kind: Kind, readings: &[(f64, f64)]) -> Side {
        let readings: Vec<_> = readings.iter().map(|&(best, typical)| Reading { best, typical }).collect();
        Side::of(kind, &readings).unwrap()
    }

    fn row(verdict: Verdict) -> Row {
        let packets = Packets { sent: 7, received: 7, again: 0 };
        Row {
            step: "nics",
            about: "",
            verdict,
            seconds: 1.5,
            note: "all\nof it".into(),
            packets: [packets; 2],
        }
    }

    fn report(verdicts: &[Verdict], ratio: f64) -> Report {
        let (ours, theirs) = (side(Kind::Latency, &[(ratio, 9.0)]), side(Kind::Latency, &[(1.0, 9.0)]));
        Report {
            accelerator: "none",
            steps: verdicts.iter().copied().map(row).collect(),
            comparisons: vec![Comparison::new("write", "us", ours, theirs, Limit::BestAtMost(1.5))],
            seconds: 2.0,
        }
    }

    #[test]
    fn the_best_is_the_least_latency_and_the_highest_bandwidth() {
        let runs = [(2.0, 5.0), (1.0, 7.0), (3.0, 6.0)];
        assert_eq!(side(Kind::Latency, &runs).best, 1.0);
        assert_eq!(side(Kind::Bandwidth, &runs).best, 3.0);
        assert_eq!(side(Kind::Latency, &runs).typical.median, 6.0);
    }

    #[test]
    fn bandwidth_is_judged_by_medians_and_latency_by_the_best() {
        let (slow, fast) = (side(Kind::Bandwidth, &[(9.0, 6.0)]), side(Kind::Bandwidth, &[(9.0, 10.0)]));
        let judged = Comparison::new("write", "MiB/s", slow, fast, Limit::MedianAtLeast(0.7));
        assert_eq!((judged.ratio, judged.within), (0.6, false));
        let judged = Comparison::new("write", "us", slow, fast, Limit::BestAtMost(1.5));
        assert_eq!((judged.ratio, judged.within), (1.0, true));
    }

    #[test]
    fn a_step_that_failed_or_never_began_spoils_the_report() {
        use Verdict::{Failed, NotRun, Passed};
        assert!(report(&[Passed, Passed], 1.0).good(false));
        assert!(!report(&[Passed, Failed], 1.0).good(false));
        assert!(!report(&[NotRun, Passed], 1.0).good(false));
        assert!(!report(&[], 1.0).good(false));
    }

    #[test]
    fn only_a_strict_report_is_spoiled_by_a_figure() {
        assert!(report(&[Verdict::Passed], 2.0).good(false));
        assert!(!report(&[Verdict::Passed], 2.0).good(true));
        assert!(report(&[Verdict::Passed], 1.4).good(true));
    }

    #[test]
    fn a_note_is_cut_between_characters() {
        assert_eq!(short("one\ntwo"), "one");
        assert_eq!(short(&"é".repeat(ROOM)), "é".repeat(ROOM));
        assert_eq!(short(&"é".repeat(ROOM + 1)), "é".repeat(ROOM) + " ..");
    }

    #[test]
    fn tables_show_verdicts_packets_and_what_is_beyond_its_limit() {
        let text = steps(&[row(Verdict::Failed), row(Verdict::NotRun)]).to_string();
        for part in ["FAILED", "NOT RUN", "7 + 7", "0 + 0", "all"] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(!text.contains("of it"));
        let text = comparisons(&report(&[], 2.0).comparisons).to_string();
        assert!(text.contains("2.00 !") && text.contains("best <= 1.5"), "{text}");
    }
}
