//! Figures of this GPU, as a machine for `sidelane simulate --hardware`.
//!
//! ```text
//!   rows of costs and rates --> copies to the host and on the GPU, words, signals, the host's calls, kernels --\
//!                                                                                                              +--> file
//!   h100-cx7                --> NVLink, NICs, planning: what one GPU cannot show ------------------------------/
//! ```
//!
//! Each figure names its source. A file is written only if all rows that it needs were measured.

use sidelane_model::time::{CopyCost, Hardware};

use super::costs::{
    self, MANY, OF_HOST, ON_GPU, SIZES, TO_HOST, copy_of_batch, enqueued, one_copy, one_word, word_of_list,
};
use super::rates::{MEGABYTE, SMALL_KERNEL, SORTED_CHOICE};
use super::report::Report;
use super::{Part, word};
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
    let batch = copy_of_batch(small, TO_HOST, count);
    let [to_host, on_gpu] = [TO_HOST, ON_GPU].map(|place| rows.copies(place));
    let (alone, together) = (rows.us(Part::Costs, &one_copy(small, TO_HOST)), rows.us(Part::Costs, &batch));
    let words = word_of_list(OF_HOST, count);
    let (one, listed) = (rows.us(Part::Costs, &one_word(OF_HOST)), rows.us(Part::Costs, &words));
    let signal = rows.us(Part::Costs, &costs::stream_signal(OF_HOST));
    let enqueue_copy = rows.us(Part::Costs, &enqueued(&batch));
    let enqueue_word = rows.us(Part::Costs, &enqueued(&words));
    let [megabyte, choice, kernel] =
        [MEGABYTE, SORTED_CHOICE, SMALL_KERNEL].map(|what| rows.us(Part::Rates, what));
    if !rows.missing.is_empty() {
        return Err(failed!("no figures are written: not measured were {}", rows.missing.join("; ")));
    }
    let mut hardware: Hardware = REST.parse().expect("a machine that is known");
    hardware.name = report.driver.name.clone();
    // Those of an H100: nothing here says what this GPU has.
    hardware.peaks = None;
    hardware.sources.retain(|known| !known.figures.iter().any(|figure| figure == "peaks"));
    let engines = &mut hardware.engines;
    (engines.host, engines.own) = (to_host, on_gpu);
    (engines.per_batch, engines.per_list) = (ns(alone - together), ns(one - listed));
    engines.per_word = ns(listed);
    (engines.enqueue_copy, engines.enqueue_word) = (ns(enqueue_copy), ns(enqueue_word));
    hardware.link.latency = ns(signal - 2.0 * listed);
    let compute = &mut hardware.compute;
    compute.rate = rate(1e6, megabyte);
    (compute.sort, compute.launch) = (ns(choice * 1e3), ns(kernel));
    let source = match report.driver.stand_in {
        true => "measured: gpu-check on the fake driver, so it means nothing".to_owned(),
        false => format!(
            "measured: gpu-check on {}, a driver for CUDA {}",
            report.driver.name, report.driver.driver
        ),
    };
    hardware.set_source(&FIGURES, &source);
    Ok(hardware)
}

/// What is measured here.
const FIGURES: [&str; 11] = [
    "engines.host",
    "engines.own",
    "engines.per_batch",
    "engines.per_list",
    "engines.per_word",
    "engines.enqueue_copy",
    "engines.enqueue_word",
    "link.latency",
    "compute.rate",
    "compute.sort",
    "compute.launch",
];

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

    /// Copies by size. The price is that of the smallest; each rate holds from its size on.
    fn copies(&mut self, place: &str) -> Vec<CopyCost> {
        let mut sizes = SIZES;
        sizes.sort_unstable();
        let times = sizes.map(|(_, size)| self.us(Part::Costs, &copy_of_batch(size, place, MANY[2])));
        let cost = |(nth, (&(bytes, _), &us)): (usize, (&(u64, &str), &f64))| CopyCost {
            from_bytes: if nth == 0 { 0 } else { bytes },
            per_copy: ns(times[0]),
            rate: rate(bytes as f64, us),
        };
        sizes.iter().zip(&times).enumerate().map(cost).collect()
    }
}

/// A price that the model takes, on whatever driver: kernels of the fake one may take seconds.
fn ns(us: f64) -> u64 {
    (us * 1e3).round().clamp(0.0, Hardware::MAX_PRICE as f64) as u64
}

/// MB/s of so many bytes.
fn rate(bytes: f64, us: f64) -> u64 {
    (bytes / us.max(1e-6)).round().max(1.0) as u64
}
