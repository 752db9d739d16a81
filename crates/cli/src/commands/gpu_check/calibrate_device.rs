//! Figures of this GPU, as a machine for `sidelane simulate --hardware`.
//!
//! ```text
//!   rows of costs and rates --> copies to the host and on the GPU, words, signals, the host's calls, kernels --\
//!                                                                                                              +--> file
//!   h100-cx7                --> NVLink, NICs, planning: what one GPU cannot show ------------------------------/
//! ```
//!
//! Each figure names its source. A file is written only if all rows that it needs were measured.

use sidelane_model::time::{DeviceFigures, Hardware};

use super::costs::{
    self, MANY, OF_HOST, ON_GPU, SIZES, TO_HOST, copy_of_batch, enqueued, one_copy, one_word, word_of_list,
};
use super::rates::{MEGABYTE, SMALL_KERNEL, SORTED_CHOICE};
use super::report::Report;
use super::{Part, word};
use crate::commands::doctor::DriverReport;
use crate::error::{CliError, failed, usage};

/// The machine whose figures stay where one GPU says nothing.
const REST: &str = "h100-cx7";

/// Refuses a choice of parts that leaves out what a file needs.
pub fn require_parts(chosen: &[Part]) -> Result<(), CliError> {
    match [Part::Costs, Part::Rates].iter().find(|part| !chosen.contains(part)) {
        Some(part) => Err(usage!("--calibrate needs the part {}", word(part))),
        None => Ok(()),
    }
}

/// The machine of a report.
///
/// # Errors
/// Names the rows that were not measured.
pub fn hardware(report: &Report) -> Result<Hardware, CliError> {
    let mut rows = Measured { report, missing: Vec::new() };
    let count = MANY[2];
    let (_, small) = SIZES[SIZES.len() - 1];
    let (batch, words) = (copy_of_batch(small, TO_HOST, count), word_of_list(OF_HOST, count));
    let figures = DeviceFigures {
        copies: [TO_HOST, ON_GPU].map(|place| rows.copies(place)),
        batch: [&one_copy(small, TO_HOST), &batch].map(|what| rows.us(Part::Costs, what)),
        list: [&one_word(OF_HOST), &words].map(|what| rows.us(Part::Costs, what)),
        signal: rows.us(Part::Costs, &costs::stream_signal(OF_HOST)),
        enqueue: [&batch, &words].map(|what| rows.us(Part::Costs, &enqueued(what))),
        megabyte: rows.us(Part::Rates, MEGABYTE),
        choice: rows.us(Part::Rates, SORTED_CHOICE),
        kernel: rows.us(Part::Rates, SMALL_KERNEL),
    };
    if !rows.missing.is_empty() {
        return Err(failed!("no figures are written: not measured were {}", rows.missing.join("; ")));
    }
    let rest: Hardware = REST.parse().expect("a machine that is known");
    let DriverReport { name, driver, fake_driver, .. } = &report.driver;
    let source = match fake_driver {
        true => "measured: gpu-check on the fake driver, so it means nothing".to_owned(),
        false => format!("measured: gpu-check on {name}, a driver for CUDA {driver}"),
    };
    Ok(rest.with_device(name, &figures, &source))
}

/// Medians of a report's rows, and the questions that have none.
struct Measured<'r> {
    report: &'r Report,
    missing: Vec<String>,
}

impl Measured<'_> {
    /// Microseconds; 0 of a row that is missing.
    fn us(&mut self, part: Part, what: &str) -> f64 {
        let row = self.report.rows.iter().find(|row| row.part == part && row.what == what);
        let time = row.and_then(|row| row.time);
        if time.is_none() {
            self.missing.push(format!("{what} (part {})", word(&part)));
        }
        time.map_or(0.0, |time| time.of.p50_us)
    }

    /// Copies by size.
    fn copies(&mut self, place: &str) -> Vec<(u64, f64)> {
        let mut sizes = SIZES;
        sizes.sort_unstable();
        let mut us = |size| self.us(Part::Costs, &copy_of_batch(size, place, MANY[2]));
        sizes.map(|(bytes, size)| (bytes, us(size))).to_vec()
    }
}
