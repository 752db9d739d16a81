//! Baselines: the same calls over other libraries: `bench --baselines`.
//!
//! A baseline is a program of `benches/baselines` with as many processes as there are ranks. They
//! stay for the whole measurement and take turns with Sidelane, round by round, so that a busy
//! moment of the machine meets both. Processes sleep while it is not their turn. Rank 0 starts each
//! turn once all ranks are done and the others wait in the barrier that begins the next round.
//!
//! ```text
//!   all ranks --> Folder: shape, ids, x, y          rank 0 --> Contender: the processes, a socket to each
//!   round:  ours, floor | d to MPI | d to gloo |    d: dispatch, c: combine; answer: begin and end
//!   once:   w --> rows, out: each rank compares its own, bit by bit
//! ```

use serde::Serialize;
use sidelane::Group;

use super::run_settings::Kind;
use crate::baselines::{BaselinePass, BaselineReport, Field, Folder, Programs, Unavailable, compared};
use crate::error::CliError;
use crate::table::{self, time};

const LAYER: Programs = Programs {
    c: ("all_to_all_v.c", include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/baselines/all_to_all_v.c"))),
    python: ("all_to_all.py", include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/baselines/all_to_all.py"))),
};

/// Arrays of a layer that the ranks know, and its results.
pub struct LayerArrays<'a> {
    /// Five words.
    pub shape: [u32; 5],
    pub ids: &'a [i32],
    pub x: &'a [u8],
    pub rows: &'a [u8],
    pub y: &'a [u8],
    pub out: &'a [u8],
}

/// Starts the installed baselines, and compares their results with those seen here. Collective.
pub fn open(group: &Group, folder: &Folder, seen: &LayerArrays<'_>) -> Result<Field, CliError> {
    let rank = group.rank();
    if rank == 0 {
        folder.put("shape", bytemuck::cast_slice(&seen.shape))?;
    }
    folder.put(&format!("ids.{rank}"), bytemuck::cast_slice(seen.ids))?;
    folder.put(&format!("x.{rank}"), seen.x)?;
    folder.put(&format!("y.{rank}"), seen.y)?;
    // One call of each kind, and the files with the results.
    let calls = b"dcw";
    Field::open(
        group,
        &LAYER,
        folder,
        |contender| calls.iter().try_for_each(|&command| contender.call(command).map(drop)),
        || folder.all_same(group, &[("rows", seen.rows), ("out", seen.out)]),
    )
}

/// The command of a call, where baselines have such a one.
pub fn command(kind: Kind) -> Option<u8> {
    match kind {
        Kind::Dispatch => Some(b'd'),
        Kind::Combine => Some(b'c'),
        Kind::DispatchBackward | Kind::CombineBackward => None,
    }
}

/// Those that ran and those that could not. Keys are described in `docs/bench-json.md`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Baselines {
    pub results: Vec<BaselineReport<Calls>>,
    pub unavailable: Vec<Unavailable>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Calls {
    pub dispatch: BaselinePass,
    pub combine: BaselinePass,
}

impl Baselines {
    /// Next to our own rounds: those of dispatch, and of combine.
    pub fn new(field: &Field, [dispatch_us, combine_us]: [&[f64]; 2]) -> Self {
        let results = field.running.iter().map(|contender| {
            let (dispatch, combine) = (contender.pass(b'd', dispatch_us), contender.pass(b'c', combine_us));
            contender.report(Calls { dispatch, combine })
        });
        Baselines { results: results.collect(), unavailable: field.absent.clone() }
    }

    /// Whether all that ran have computed what we have.
    pub fn all_same(&self) -> bool {
        self.results.iter().all(|baseline| baseline.bitwise_equal)
    }

    pub fn text(&self) -> String {
        let mut text = String::new();
        if !self.results.is_empty() {
            let table = table::of(
                &self.results,
                &[
                    ("baseline", &|baseline| baseline.version.clone()),
                    ("dispatch", &|baseline| time(baseline.calls.dispatch.timing.p50_us)),
                    ("max", &|baseline| time(baseline.calls.dispatch.timing.max_us)),
                    ("x ours (95%)", &|baseline| baseline.calls.dispatch.speedup.text(1)),
                    ("combine", &|baseline| time(baseline.calls.combine.timing.p50_us)),
                    ("max", &|baseline| time(baseline.calls.combine.timing.max_us)),
                    ("x ours (95%)", &|baseline| baseline.calls.combine.speedup.text(1)),
                    ("result", &|baseline| compared(baseline.bitwise_equal)),
                ],
            );
            text = table + "\n";
        }
        self.unavailable.iter().fold(text, |text, one| text + &one.text() + "\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_frame::tests::assert_words;
    use crate::error::failed;

    #[test]
    fn text_lists_baselines_that_ran_were_absent_or_had_other_bits() {
        let pass = BaselinePass::new(&[34_000.0; 3], &[4000.0; 3]);
        let ran = |bitwise_equal| BaselineReport {
            name: "mpi".into(),
            version: "Open MPI v4".into(),
            bitwise_equal,
            calls: Calls { dispatch: pass, combine: pass },
        };
        let absent = Unavailable::new("gloo", &failed!("there is no python3"), "pip install torch");
        let baselines = Baselines { results: vec![ran(true)], unavailable: vec![absent] };
        let text = baselines.text();
        assert_words(
            &text,
            &["Open MPI v4", "34.0 ms", "8.5 (8.5-8.5)", "same bits", "there is no python3", "pip install"],
        );
        let wrong = Baselines { results: vec![ran(true), ran(false)], unavailable: Vec::new() };
        assert!(baselines.all_same() && !wrong.all_same() && wrong.text().contains("NOT THE SAME"));
    }
}
