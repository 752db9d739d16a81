//! One run, from the first piece fetched to the last line of the report.

use std::fs;
use std::time::{Duration, Instant};

use crate::Options;
use crate::bed::{Bed, Sockets};
use crate::counters::Counters;
use crate::deadline::Deadline;
use crate::error::{At, Result};
use crate::machine::Kind;
use crate::report::{Comparison, Packets, Report, Row, Verdict, seconds};
use crate::steps::{Asked, STEPS, Step};
use crate::{fetch, image, programs};

/// How long a command of the caller's may take.
const COMMAND: Duration = Duration::from_secs(300);

/// Whether all was as it should be.
pub fn run(options: &Options) -> Result<bool> {
    let start = Instant::now();
    let say = |what: &str| eprintln!("[{:>5.1} s] {what}", start.elapsed().as_secs_f64());

    let cache = programs::target_directory()?.join("testbed");
    let logs = cache.join("log");
    let _ = fs::remove_dir_all(&logs);
    fs::create_dir_all(&logs).at(&logs)?;
    say("fetching packages and kernel");
    fetch::packages()?;
    let kernel = fetch::kernel(&cache)?;
    say("building the programs under test");
    let programs = programs::build(&options.profile, options.all_packages)?;
    say("building the image");
    let image = image::build(&cache, &kernel.modules, &programs)?;
    say("booting two machines");
    let sockets = Sockets::new()?;
    let kind = Kind { kernel: kernel.image, image, sockets: sockets.path(), logs, start };
    let mut bed = Bed::boot(kind)?;
    if let Some(command) = &options.run {
        return command_on_both(&bed, command);
    }

    let asked = Asked { rounds: options.rounds };
    let wanted = |step: &&Step| options.only.is_empty() || options.only.iter().any(|name| name == step.name);
    let mut report = Report {
        accelerator: bed.accelerator().name(),
        steps: Vec::new(),
        comparisons: Vec::new(),
        seconds: 0.0,
    };
    for step in STEPS.iter().filter(wanted) {
        say(&format!("{}: {}", step.name, step.about));
        let (row, comparisons) = take(step, &mut bed, &asked);
        if row.verdict != Verdict::Passed {
            eprintln!("{}: {}", step.name, row.note);
        }
        report.steps.push(row);
        report.comparisons.extend(comparisons);
    }
    report.seconds = seconds(start.elapsed());
    report.print();
    if let Some(path) = &options.json {
        report.write(path)?;
    }
    Ok(report.good(options.strict))
}

/// One step on a bed that is whole.
fn take(step: &Step, bed: &mut Bed, asked: &Asked) -> (Row, Vec<Comparison>) {
    let mut row = Row {
        step: step.name,
        about: step.about,
        verdict: Verdict::NotRun,
        seconds: 0.0,
        note: String::new(),
        packets: [Packets::default(); 2],
    };
    let ready = bed.heal().and_then(|()| Ok([bed.counters(0)?, bed.counters(1)?]));
    let before = match ready {
        Ok(before) => before,
        Err(error) => return (Row { note: error.to_string(), ..row }, Vec::new()),
    };
    let begin = Instant::now();
    let seen = (step.run)(bed, asked, Deadline::after(step.within(asked)));
    row.seconds = seconds(begin.elapsed());
    for (machine, before) in before.iter().enumerate() {
        // A machine that the step left switched off has no counters.
        row.packets[machine] = Packets::from(
            &bed.counters(machine).as_ref().map_or_else(|_| Counters::default(), |now| now.since(before)),
        );
    }
    match seen {
        Ok(findings) => (Row { verdict: Verdict::Passed, note: findings.note, ..row }, findings.comparisons),
        Err(error) => (Row { verdict: Verdict::Failed, note: error.to_string(), ..row }, Vec::new()),
    }
}

/// For trying things out.
fn command_on_both(bed: &Bed, command: &str) -> Result<bool> {
    let deadline = Deadline::after(COMMAND);
    let jobs = bed.start_both(|_| command.to_owned())?;
    let mut good = true;
    for (machine, job) in jobs.into_iter().enumerate() {
        let finished = job.finish(deadline)?;
        println!("-- machine {machine}: status {}\n{}", finished.status, finished.output);
        good &= finished.status == 0;
    }
    Ok(good)
}
