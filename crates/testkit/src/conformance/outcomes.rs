//! What became of the suite: an outcome for each feature on each executor.

use serde::Serialize;
use sidelane::ep::{CallExecutor, Feature};

use crate::conformance::case_run::{Line, Outcome};
use crate::difference::Difference;

/// A feature on an executor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// Its name.
    pub feature: &'static str,
    /// Name of the executor.
    pub executor: &'static str,
    /// Whether the library says that it is served.
    pub served: bool,
    /// Outcome of all cases.
    pub state: State,
    /// Cases whose results are the reference's.
    pub equal: usize,
    /// Cases that were refused by name.
    pub refused: usize,
    /// Cases that are wrong.
    pub wrong: usize,
    /// Why none ran, if so.
    pub reason: Option<String>,
}

/// Outcome of all its cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// All that ran are right.
    Equal,
    /// All are refused by name, as they must be.
    Refused,
    /// One is wrong at least.
    Wrong,
    /// None says anything about the feature.
    NotRun,
}

/// A run that is wrong, and how it first is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Wrong {
    /// Name of the case's feature.
    pub feature: &'static str,
    /// Name of the executor that served it.
    pub executor: String,
    /// Name of the case.
    pub case: &'static str,
    /// Place and mode.
    pub way: &'static str,
    /// The first difference.
    #[serde(flatten)]
    pub first: Difference,
}

impl Cell {
    /// From the lines of all runs. `device_reason` says why nothing ran on a device, if so.
    pub fn new(
        feature: Feature,
        executor: CallExecutor,
        lines: &[Line],
        device_reason: &Option<String>,
    ) -> Self {
        let served = feature.is_served_by(executor);
        let (mut equal, mut refused, mut wrong, mut lacks) = (0, 0, 0, None);
        let here = |line: &&Line| line.run.case().feature == feature && executor_of(line) == executor.name();
        for line in lines.iter().filter(here) {
            match &line.outcome {
                Outcome::Equal => equal += 1,
                Outcome::Wrong(_) => wrong += 1,
                Outcome::Refused(name) => {
                    refused += 1;
                    lacks = Some(name);
                }
            }
        }
        let state = match (wrong, equal, refused) {
            (1.., ..) => State::Wrong,
            (_, 1.., _) => State::Equal,
            (_, _, 1..) if !served => State::Refused,
            _ => State::NotRun,
        };
        let reason = (state == State::NotRun).then(|| match (lacks, device_reason) {
            (Some(name), _) => format!("its cases also ask for {name}"),
            (None, Some(_)) if executor != CallExecutor::HostStepper => "no device".to_owned(),
            _ => "not in this mode".to_owned(),
        });
        let (feature, executor) = (feature.name(), executor.name());
        Cell { feature, executor, served, state, equal, refused, wrong, reason }
    }

    /// In words.
    pub fn text(&self) -> String {
        let cases = |count| if count == 1 { "1 case".to_owned() } else { format!("{count} cases") };
        match self.state {
            State::Equal => format!("equal ({})", cases(self.equal)),
            State::Refused => "refused by name".to_owned(),
            State::Wrong => format!("WRONG ({})", cases(self.wrong)),
            State::NotRun => format!("not run: {}", self.reason.as_deref().unwrap_or_default()),
        }
    }
}

/// Outcome of a feature on the executors of a device.
pub struct Finding {
    /// Its name.
    pub feature: &'static str,
    /// Nothing where no case ran.
    pub correct: Option<bool>,
    /// In words.
    pub text: String,
}

impl Finding {
    /// Of every feature.
    pub fn of(lines: &[Line]) -> Vec<Finding> {
        let on_device = CallExecutor::ALL.into_iter().filter(|&one| one != CallExecutor::HostStepper);
        let finding = |feature: Feature| {
            let cells = on_device.clone().map(|executor| Cell::new(feature, executor, lines, &None));
            let cells: Vec<Cell> = cells.collect();
            let ran = cells.iter().filter(|cell| cell.state != State::NotRun);
            let wrong = lines.iter().filter_map(Wrong::of).filter(|wrong| wrong.feature == feature.name());
            let wrong = wrong.map(|wrong| format!("\n{}", wrong.text().trim_end())).collect::<String>();
            let text = cells.iter().map(|cell| format!("{}: {}", cell.executor, cell.text()));
            Finding {
                feature: feature.name(),
                correct: (ran.count() > 0).then_some(wrong.is_empty()),
                text: text.collect::<Vec<_>>().join("; ") + &wrong,
            }
        };
        Feature::ALL.into_iter().map(finding).collect()
    }
}

/// Name of the executor that served a run, or that would have.
fn executor_of(Line { run, executor, .. }: &Line) -> &str {
    if executor.is_empty() { run.way.usual_executor().name() } else { executor }
}

impl Wrong {
    /// None of a line that is right.
    pub fn of(line: &Line) -> Option<Self> {
        let Line { run, outcome: Outcome::Wrong(found), .. } = line else { return None };
        let case = run.case();
        let unknown = || Difference::outcome(0, "outcome", "equal", "wrong");
        Some(Wrong {
            feature: case.feature.name(),
            executor: executor_of(line).to_owned(),
            case: case.name,
            way: run.way.name(),
            first: found.first().cloned().unwrap_or_else(unknown),
        })
    }

    /// In words, a line.
    pub fn text(&self) -> String {
        let Wrong { feature, executor, case, way, first } = self;
        format!("WRONG: {feature}, {executor} ({case}; {way}): {}\n", first.text())
    }
}
