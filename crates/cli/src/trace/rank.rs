//! What every rank of a trace does: check, record, check; rank 0 writes.

use std::process::ExitCode;

use half::{bf16, f16};
use sidelane::dtype::Dtype;

use super::args::Task;
use super::picture;
use super::report::Report;
use crate::bench::{EVENTS, Layer, Number, record, write_trace};
use crate::command;
use crate::error::CliError;

/// Runs this rank's part.
pub fn main(task: &Task) -> Result<ExitCode, CliError> {
    match task.config.dtype.element() {
        Dtype::F32 => run::<f32>(task),
        Dtype::F16 => run::<f16>(task),
        Dtype::Bf16 | Dtype::Bytes => run::<bf16>(task),
    }
}

fn run<E: Number>(task: &Task) -> Result<ExitCode, CliError> {
    let mut layer: Layer<'_, E> = Layer::join(&task.config, task.sizes, task.conditions()?, EVENTS)?;
    let (rows, handle) = layer.dispatch_and_check()?;
    let y = layer.experts(&rows)?;
    drop(rows);
    layer.combine_and_check(&y, &handle)?;
    let timelines = record(&mut layer, &y)?;
    let verdict = layer.verdict()?;
    if layer.world.rank() != 0 {
        return Ok(ExitCode::SUCCESS);
    }
    let nodes = layer.world.nodes();
    let report = Report::new(&task.config, &layer.machines, &verdict, nodes, &timelines, &task.out);
    write_trace(&task.out, nodes, &timelines)?;
    command::draw(&task.svg, || picture::draw(&task.config, nodes, &timelines))?;
    command::finish(&report, &task.json)
}
