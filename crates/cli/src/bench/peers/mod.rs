//! The same calls done the usual way by others, beside ours: `bench --peers`.
//!
//! A peer is a program of `benches/peers` with as many processes as there are ranks. They stay for the whole measurement
//! and take turns with us, round by round, so that a busy moment of the machine meets both; who is not at work sleeps.
//! Rank 0 says whose turn it is, once all ranks are done and the others wait in the barrier that begins the next round.
//!
//! ```text
//!   all ranks --> Folder: shape, ids, x, y          rank 0 --> Contender: the processes, a socket to each
//!   round:  ours, floor | d to MPI | d to gloo |    d: dispatch, c: combine; answer: begin and end
//!   once:   w --> rows, out: each rank compares its own, bit by bit
//! ```

mod contender;
mod folder;
mod report;
mod way;

use std::time::Duration;

use folder::Inputs;
use sidelane::Group;
use way::LAYER;

use super::passes::Kind;
use crate::error::CliError;
use crate::peers::Unavailable;

pub use contender::Contender;
pub use folder::Folder;
pub use report::{PeerPass, PeerReport, Peers};
pub use way::{Programs, Way};

/// Those that run. Only rank 0 knows them.
#[derive(Default)]
pub struct Field {
    running: Vec<Contender>,
    absent: Vec<Unavailable>,
    same: Vec<bool>,
    /// Whether they were asked for.
    asked: bool,
}

/// What the ranks know of a layer, and what came out of it.
pub struct Seen<'a> {
    /// Five words.
    pub shape: [u32; 5],
    /// Expert of each choice.
    pub ids: &'a [i32],
    /// Tokens, as bytes.
    pub x: &'a [u8],
    /// Rows as they were received.
    pub rows: &'a [u8],
    /// What the experts made of them.
    pub y: &'a [u8],
    /// Sums.
    pub out: &'a [u8],
}

impl Field {
    /// Starts whoever is there, and compares what each computes with what was seen here. Collective.
    pub fn open(group: &Group, folder: &Folder, seen: &Seen<'_>) -> Result<Self, CliError> {
        folder.write(group.rank(), &Inputs { shape: seen.shape, ids: seen.ids, x: seen.x, y: seen.y })?;
        group.gather(&[])?;
        let mut field = Field { asked: true, ..Field::default() };
        for way in Way::ALL {
            let mut contender = None;
            if group.rank() == 0 {
                match Contender::start(way, &LAYER, folder, group.size()) {
                    Ok(started) => contender = Some(started),
                    Err(why) => field.absent.push(Unavailable::new(way.name(), &why, way.install())),
                }
            }
            if !arrival(group, way, &mut contender, &mut field.absent, Contender::write)? {
                continue;
            }
            let same = folder.same(group.rank(), &[("rows", seen.rows), ("out", seen.out)])?;
            let all = group.gather(&[u8::from(same)])?;
            field.same.push(all.iter().all(|same| same == &[1]));
            field.running.extend(contender);
        }
        Ok(field)
    }

    /// One round of each, where they have such a call. Runs on rank 0; the others have nobody to ask.
    pub fn lap(&mut self, kind: Kind) -> Result<(), CliError> {
        self.running.iter_mut().try_for_each(|contender| contender.lap(kind))
    }

    /// What was found, beside our own rounds: those of dispatch, and of combine. None if nobody was asked for.
    pub fn report(&self, real_us: [&[f64]; 2]) -> Option<Peers> {
        let ran = self.running.iter().zip(&self.same);
        let ran = ran.map(|(contender, &same)| PeerReport::new(contender, same, real_us)).collect();
        self.asked.then(|| Peers { ran, absent: self.absent.clone() })
    }
}

/// Waits until a peer has come and is ready, or cannot come: then it is absent. Collective: all ranks learn which, and none
/// waits for another for long, as who is silent is taken for lost.
pub fn arrival(
    group: &Group,
    way: Way,
    contender: &mut Option<Contender>,
    absent: &mut Vec<Unavailable>,
    ready: impl Fn(&mut Contender) -> Result<(), CliError>,
) -> Result<bool, CliError> {
    const MOMENT: Duration = Duration::from_secs(2);
    loop {
        let came = match contender {
            Some(running) => running.come(MOMENT).and_then(|came| match came {
                true => ready(running).map(|()| true),
                false => Ok(false),
            }),
            None => Ok(false),
        };
        if let Err(why) = &came {
            absent.push(Unavailable::new(way.name(), why, way.install()));
            *contender = None;
        }
        let state = [u8::from(contender.is_some()), u8::from(came.unwrap_or(false))];
        match group.gather(&state)?[0][..] {
            [1, 0] => {}
            [1, 1] => return Ok(true),
            _ => return Ok(false),
        }
    }
}
