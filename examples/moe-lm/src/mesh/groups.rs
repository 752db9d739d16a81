//! The groups of a rank in its mesh.
//!
//! ```text
//!   pp=2,dp=2,tp=2,ep=4        stage 0             stage 1
//!                           tp 0   tp 1         tp 0   tp 1
//!                    dp 0     0      1            4      5
//!                    dp 1     2      3            6      7
//!
//!   of rank 0    stages {0,4}    tp {0,1}    cp {0}    ep {0,1,2,3}
//!   gradients    of cut tensors {0,2}    of whole ones {0,1,2,3}    of experts {0}
//! ```

use sidelane::collective::Communicator;
use sidelane::{Group, World};
use sidelane_parallel::context::zig_zag_pieces;

use super::pass_calls::{Peers, Progress};
use super::strategy::{Context, Strategy};
use super::tensors::{Place, Sections, part};
use crate::error::Result;
use crate::settings::Settings;

/// The groups over which a rank's layers communicate.
pub struct LayerGroups {
    /// Ranks that cut its matrices.
    pub tp: Communicator,
    /// Ranks that cut its windows.
    pub cp: Communicator,
    /// Ranks that share the experts.
    pub ep: Group,
    /// How far this rank is in its pass.
    pub progress: Progress,
}

impl LayerGroups {
    /// A layer's call of the ranks that cut its matrices.
    ///
    /// # Errors
    /// Those of the call.
    pub fn on_tp<T>(&mut self, call: impl FnOnce(&mut Communicator) -> sidelane::Result<T>) -> Result<T> {
        let made = call(&mut self.tp);
        self.progress.count(Peers::Tp, &made);
        Ok(made?)
    }

    /// A layer's call of the ranks that cut its windows.
    ///
    /// # Errors
    /// Those of the call.
    pub fn on_cp<T>(&mut self, call: impl FnOnce(&mut Communicator) -> Result<T>) -> Result<T> {
        let made = call(&mut self.cp);
        self.progress.count(Peers::Cp, &made);
        made
    }
}

/// The other groups of a rank, and its place in each.
pub struct Groups {
    /// All ranks.
    pub all: Group,
    /// The stages of this rank's pipeline.
    pub pipeline: Group,
    /// Number of them.
    pub stages: u32,
    /// The first and the last of them, if this is one of the two.
    pub ends: Option<Group>,
    /// Ranks that have the same tensors of each kind.
    pub copies: Sections<Communicator>,
    /// Its place, as far as its tensors depend on it.
    pub place: Place,
    /// Its part of the batch, and of each window.
    pub parts: (usize, usize),
}

/// A communicator with small chunks: the symmetric memory of worlds of threads holds all of them.
///
/// # Errors
/// Those of the communicator.
pub fn communicator(group: &Group) -> Result<Communicator> {
    Ok(Communicator::builder(group).chunk(64 << 10).build()?)
}

impl Groups {
    /// Those of a world. Collective.
    ///
    /// # Errors
    /// Those of the mesh and of the communicators.
    pub fn new(world: &World, strategy: &Strategy) -> Result<(Groups, LayerGroups)> {
        let mesh = strategy.sizes.mesh(world.size())?;
        let experts = mesh.experts(strategy.sizes.ep, 1)?;
        let position = |mesh: &sidelane_parallel::Mesh, name| mesh.position(world.rank(), name);
        let sums = |group: Group| communicator(&group);
        let copies = Sections {
            cut: sums(mesh.world_group(world, &["dp", "cp"])?)?,
            whole: sums(mesh.world_group(world, &["dp", "cp", "tp"])?)?,
            experts: sums(experts.world_group(world, &["edp"])?)?,
        };
        let [stage, tp] = ["pp", "tp"].map(|name| position(&mesh, name));
        let [dp, cp] = ["dp", "cp"].map(|name| position(&mesh, name));
        let ep = position(&experts, "ep")?;
        let layers = LayerGroups {
            tp: sums(mesh.world_group(world, &["tp"])?)?,
            cp: sums(mesh.world_group(world, &["cp"])?)?,
            ep: experts.world_group(world, &["ep"])?,
            progress: Progress::default(),
        };
        let groups = Groups {
            all: world.all()?,
            pipeline: mesh.world_group(world, &["pp"])?,
            ends: mesh.world_ends(world, "pp")?,
            stages: strategy.sizes.pp,
            copies,
            place: Place { stage: stage? as usize, tp: tp? as usize, ep: ep as usize },
            parts: (dp? as usize, cp? as usize),
        };
        Ok((groups, layers))
    }

    /// Whether this rank's losses count: it is the first tensor parallel rank of the last stage.
    pub fn counts_losses(&self) -> bool {
        self.place.stage + 1 == self.stages as usize && self.place.tp == 0
    }
}

/// Positions of a context parallel rank's tokens in a window: a part of it, or two pieces where
/// attention is a ring.
pub fn positions(rank: usize, strategy: &Strategy, settings: &Settings) -> Vec<usize> {
    let (window, ranks) = (settings.shape.window, strategy.sizes.cp as usize);
    if strategy.context(&settings.shape) == Context::Ulysses {
        return part(window, rank, ranks).collect();
    }
    let pieces = zig_zag_pieces((rank as u32, ranks as u32)).unwrap_or_default();
    pieces.into_iter().flat_map(|piece| part(window, piece, 2 * ranks)).collect()
}
