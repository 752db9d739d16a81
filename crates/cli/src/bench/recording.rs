//! One round as every rank's recorder sees it.
//!
//! ```text
//!   barrier | dispatch | experts | combine |     experts: their outputs are known, so they are only copied
//! ```
//!
//! Times of all ranks are on the clock of rank 0's machine.
//!
//! Rounds differ, most of all where ranks share cores. Several are recorded and the one of median length is kept, so that
//! a timeline shows what is usual.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use sidelane::ep::{ExpertRows, Handle};
use sidelane::exec::{Recorder, Timeline, now, write_chrome_trace};
use sidelane::topology::NodeMap;
use sidelane::{Error, Group};

use super::clock::Laps;
use super::layer::Layer;
use super::tensor::Number;
use crate::error::{CliError, failed};

/// Operations kept for a timeline: one round of calls at 1,024 ranks.
pub const EVENTS: usize = 1 << 16;

/// Names of the calls of a round.
pub const CALLS: [&str; 3] = ["dispatch", "experts", "combine"];

/// Runs rounds with outputs `y` of the experts, checks the last, and tells every rank what all of them did in a usual
/// one. Empty timelines if the layer has no recorder.
pub fn record<E: Number>(layer: &mut Layer<'_, E>, y: &[E]) -> Result<Vec<Timeline>, CliError> {
    const ROUNDS: usize = 15;
    let Some(recorder) = layer.world.recorder().cloned() else {
        return Ok(vec![Timeline::default(); layer.config.ranks() as usize]);
    };
    let mut barrier = layer.group.window(0)?;
    let offset = layer.machines.clock_offset(&layer.group, now)?;
    let (mut laps, mut timelines) = (Laps::default(), Vec::new());
    for number in 1..=ROUNDS {
        barrier.barrier()?;
        recorder.take();
        let (rows, handle) = laps.time(|| round(layer, y, &recorder))?;
        timelines.push(recorder.take());
        // Who is done must not take a core from who is not: checks are long.
        barrier.barrier()?;
        if number == ROUNDS {
            layer.check_rows(&rows, &handle)?;
            layer.check_tokens();
        }
    }
    let lengths = Laps::rounds_us(&layer.group.gather(laps.to_bytes())?, &layer.machines);
    let mut order: Vec<usize> = (0..ROUNDS).collect();
    order.sort_by(|&a, &b| lengths[a].total_cmp(&lengths[b]));
    share(&layer.group, timelines.swap_remove(order[ROUNDS / 2]), offset)
}

/// What all ranks recorded, on the clock of rank 0's machine, which this one's is `offset` behind.
pub fn share(group: &Group, timeline: Timeline, offset: i64) -> Result<Vec<Timeline>, CliError> {
    let json = serde_json::to_vec(&moved(timeline, offset)).expect("names and numbers are always JSON");
    let all = group.gather(&json)?;
    all.iter().map(|blob| serde_json::from_slice(blob).map_err(CliError::told)).collect()
}

/// A timeline on another clock.
fn moved(mut timeline: Timeline, offset: i64) -> Timeline {
    let calls = timeline.calls.iter_mut().map(|call| &mut call.start_ns);
    let spans = timeline.spans.iter_mut().map(|span| &mut span.start_ns);
    let events = timeline.events.iter_mut().map(|event| &mut event.start_ns);
    for start in calls.chain(spans).chain(events) {
        *start = start.wrapping_add_signed(offset);
    }
    timeline
}

fn round<E: Number>(
    layer: &mut Layer<'_, E>,
    y: &[E],
    recorder: &Recorder,
) -> Result<(ExpertRows, Handle), Error> {
    let [dispatch, experts, combine] = CALLS;
    let (rows, handle) = recorder.call(dispatch, || layer.tokens.dispatch(&mut layer.ep, &layer.routing))?;
    let output = recorder.call(experts, || Layer::output(y, &handle))?;
    recorder.call(combine, || layer.ep.combine_into(output, &handle, &mut layer.out))?;
    Ok((rows, handle))
}

/// Writes what was recorded as a Chrome trace.
pub fn write_trace(path: &Path, nodes: &NodeMap, timelines: &[Timeline]) -> Result<(), CliError> {
    let write = || {
        let mut file = BufWriter::new(File::create(path)?);
        write_chrome_trace(&mut file, nodes, timelines)?;
        file.flush()
    };
    write().map_err(|source| failed!("cannot write {path:?}: {source}"))
}
