//! Others that do the same, in turn with us. They are told by the protocol of `benches/peers`; see its README.

use sidelane::Group;

use super::task::{MOST_BESIDE, Task};
use crate::bench::peers::{Contender, Folder, Programs, Way, arrival};
use crate::error::CliError;
use crate::peers::Unavailable;

const PROGRAMS: Programs = Programs {
    c: (
        "collectives.c",
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/peers/collectives.c")),
    ),
    python: (
        "collectives.py",
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/peers/collectives.py")),
    ),
};

/// Added to the number of a run: write what comes out.
const WRITE: u8 = MOST_BESIDE as u8;

/// Those that came. All ranks know how many; only rank 0 has them.
#[derive(Default)]
pub struct Rivals {
    running: Vec<Contender>,
    pub count: usize,
    pub absent: Vec<Unavailable>,
}

impl Rivals {
    /// Starts whoever is there. Collective.
    pub fn open(group: &Group, task: &Task) -> Result<Self, CliError> {
        let mut rivals = Rivals::default();
        let Some(path) = &task.peers else { return Ok(rivals) };
        let folder = Folder::at(path);
        if group.rank() == 0 {
            let runs = task.runs.iter();
            let words = runs.flat_map(|run| [run.operation.number(), run.bytes as u32]);
            let shape: Vec<u32> = [group.size(), task.runs.len() as u32].into_iter().chain(words).collect();
            folder.put("shape", bytemuck::cast_slice(&shape))?;
        }
        group.gather(&[])?;
        for way in Way::ALL {
            let mut contender = None;
            if group.rank() == 0 {
                match Contender::start(way, &PROGRAMS, &folder, group.size()) {
                    Ok(started) => contender = Some(started),
                    Err(why) => rivals.absent.push(Unavailable::new(way.name(), &why, way.install())),
                }
            }
            if arrival(group, way, &mut contender, &mut rivals.absent, |_| Ok(()))? {
                rivals.running.extend(contender);
                rivals.count += 1;
            }
        }
        Ok(rivals)
    }

    /// Has one of them write what comes of a run, and compares. Collective.
    pub fn same(
        &mut self,
        group: &Group,
        task: &Task,
        nth: usize,
        run: usize,
        out: &[f32],
    ) -> Result<bool, CliError> {
        if let Some(contender) = self.running.get_mut(nth) {
            contender.call(WRITE | run as u8)?;
        }
        group.gather(&[])?;
        let Some(path) = &task.peers else { return Ok(false) };
        let same = Folder::at(path).same(group.rank(), &[("out", bytemuck::cast_slice(out))])?;
        Ok(group.gather(&[u8::from(same)])?.iter().all(|same| same == &[1]))
    }

    /// A round of each: run twice and timed the second time, as ours are. Runs on rank 0; the others have nobody to ask.
    pub fn lap(&mut self, run: usize, laps_us: &mut [Vec<f64>]) -> Result<(), CliError> {
        for (contender, laps) in self.running.iter_mut().zip(laps_us) {
            contender.call(run as u8)?;
            laps.push(contender.call(run as u8)?);
        }
        Ok(())
    }

    /// Name and version of each, on rank 0.
    pub fn names(&self) -> impl Iterator<Item = (String, String)> + '_ {
        self.running.iter().map(|contender| (contender.way.name().to_owned(), contender.version.clone()))
    }
}
