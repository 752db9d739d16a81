//! Times compared with the baseline's, interleaved: the machine's state affects both alike.

use crate::bed::Bed;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::perftest::{Kind, Perftest, Reading};
use crate::report::{Comparison, Limit, Side};
use crate::sidelane::{PutBench, Test};
use crate::steps::{Asked, Findings};

const PORT: u16 = 18515;

/// Round trips of a run.
const TRIPS: usize = 100;

/// Large messages of a run.
const PUTS: usize = 20;

/// A figure of ours, its baseline, and how far ours may be from it.
struct Line {
    name: &'static str,
    unit: &'static str,
    ours: PutBench,
    theirs: Perftest,
    limit: Limit,
}

/// A baseline sends as many packets as ours: a put of 4 KiB fills one, and its signal takes a
/// second one.
const LINES: [Line; 3] = [
    Line {
        name: "signal, 8 B",
        unit: "us",
        ours: PutBench { test: Test::Signal, size: 8, iterations: TRIPS },
        theirs: Perftest { kind: Kind::Latency, size: 8, iterations: TRIPS },
        limit: Limit::BestAtMost(1.5),
    },
    Line {
        name: "put + signal, 4 KiB",
        unit: "us",
        ours: PutBench { test: Test::PutLatency, size: 4096, iterations: TRIPS },
        theirs: Perftest { kind: Kind::Latency, size: 4096 + 8, iterations: TRIPS },
        limit: Limit::BestAtMost(1.5),
    },
    Line {
        name: "puts, 1 MiB",
        unit: "MiB/s",
        ours: PutBench { test: Test::PutBandwidth, size: 1 << 20, iterations: PUTS },
        theirs: Perftest { kind: Kind::Bandwidth, size: 1 << 20, iterations: PUTS },
        limit: Limit::MedianAtLeast(0.7),
    },
];

/// Runs of one line.
#[derive(Default)]
struct Runs {
    ours: Vec<Reading>,
    theirs: Vec<Reading>,
}

/// Alternates between both, round by round.
pub fn run(bed: &mut Bed, asked: &Asked, deadline: Deadline) -> Result<Findings> {
    let mut all = LINES.map(|line| (line, Runs::default()));
    for _ in 0..asked.rounds {
        for (line, runs) in &mut all {
            runs.theirs.push(line.theirs.run(bed, PORT, deadline)?);
            runs.ours.push(line.ours.run(bed, deadline)?);
        }
    }
    let compare = |(line, runs): &(Line, Runs)| {
        let side = |readings| Side::of(line.theirs.kind, readings);
        Some(Comparison::new(line.name, line.unit, side(&runs.ours)?, side(&runs.theirs)?, line.limit))
    };
    let comparisons = all.iter().filter_map(compare).collect();
    Ok(Findings { note: format!("{} rounds", asked.rounds), comparisons })
}
