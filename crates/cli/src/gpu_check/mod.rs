//! `sidelane gpu-check`: what can be known about one GPU, found out on it.
//!
//! The program alone is enough: kernels are inside, libraries are loaded at run time, nothing is built. Each part runs in a
//! process of its own, which tells its rows one by one; a part that hangs or dies costs its own rows and no others.
//!
//! ```text
//!   gpu-check --+-- part driver          streams, events, memory operations, batches, mapped memory, modules
//!               +-- part kernels         against their definitions, to the bit
//!               +-- part locks           calls of the driver that wait, beside a stream that waits
//!               +-- part queues          copies of other streams beside a stream that waits
//!               +-- part processes       ranks as processes on this GPU, against the host's ExpertParallel
//!               +-- part costs           copies, memory operations, graphs, slots
//!               +-- part audit           transfers while a kernel holds every multiprocessor
//!               +-- part activity        every kernel between packed and landed, by CUPTI's list
//!               +-- part exchange        ranks as threads, against the host's ExpertParallel
//!               +-- part planner         a planner in the process against one in a helper process
//!               +-- part interference    matrix products alone, beside copy engines, beside a copying kernel
//!                      | rows, a line of JSON each
//!                      v
//!                   table, JSON, verdict
//! ```
//!
//! A row says what was asked, what was found, what that shows, and what only several GPUs could show. On the stand-in driver
//! everything runs and no time means anything.

mod activity;
mod args;
mod audit;
mod blocking;
mod check;
mod costs;
mod dispatch;
mod driver;
mod exchange;
mod interference;
mod kernels;
mod listed;
mod memory;
mod parts;
mod planner;
mod report;
mod row;
mod table;
mod task;
mod timer;
mod wheels;

use std::process::ExitCode;

use check::Checks;
use report::Report;
use sidelane::device::{Driver, Version};
use sidelane::error::DeviceError;
use task::{Part, Task};

use crate::command::{self, Command};
use crate::error::CliError;
use crate::ranks;

pub use args::GpuCheckArgs;

impl Command for GpuCheckArgs {
    const NAME: &'static str = "gpu-check";

    /// Runs all parts.
    fn run(self) -> Result<ExitCode, CliError> {
        command::claim(&self.json)?;
        let probe = probe(self.device)?;
        let asked = |part: &Part| self.parts.is_empty() || self.parts.contains(part);
        let chosen: Vec<Part> = Part::ALL.into_iter().filter(asked).collect();
        let rows = parts::run(&Task::of(&self), &chosen, self.minutes)?;
        command::finish(&Report::new(&self, &probe, rows), &self.json)
    }

    /// Runs one part, or one rank of one, and tells its rows.
    fn rank(task: &str) -> Result<ExitCode, CliError> {
        let task: Task = ranks::task(task)?;
        let mut checks = Checks::new(task.part);
        let done = match task.part {
            Part::Driver => driver::run(&task, &mut checks),
            Part::Kernels => kernels::run(&task, &mut checks),
            Part::Locks => blocking::locks(&task, &mut checks),
            Part::Queues => blocking::queues(&task, &mut checks),
            Part::Case => blocking::case(&task),
            Part::Exchange => exchange::threads(&task, &mut checks),
            Part::Processes => exchange::processes(&task, &mut checks),
            Part::Rank => exchange::rank(&task, &mut checks),
            Part::Audit => audit::run(&task, &mut checks),
            Part::Activity => activity::run(&task, &mut checks),
            Part::Interference => interference::run(&task, &mut checks),
            Part::Planner => planner::run(&task, &mut checks),
            Part::Helper => planner::help(&task),
            Part::Costs => costs::run(&task, &mut checks),
        };
        if let Err(error) = done {
            checks.failed("to its end", &error)?;
        }
        Ok(if checks.all_right() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// The driver, if it is there, new enough, and has the device.
fn probe(device: u32) -> Result<sidelane::device::Probe, DeviceError> {
    let driver = Driver::open()?;
    let (version, needed) = (driver.version(), Version::MAPPED_FLAGS);
    if version < needed {
        let (version, needed) = (version.to_string(), needed.to_string());
        return Err(DeviceError::TooOld { feature: "gpu-check", version, needed });
    }
    driver.device(device)?;
    driver.probe()
}
