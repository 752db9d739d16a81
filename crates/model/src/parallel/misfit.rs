//! Reasons why given sizes make no mesh: the first size that does not fit, with what it has to fit.

use super::mesh::Shape;
use super::search::{Fixed, Question};

/// A size that makes no mesh.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Misfit {
    /// A size, or the product of several, does not divide another one.
    #[error("{name} = {size} does not divide {of} = {total}")]
    NoDivisor {
        /// Name of the size.
        name: String,
        /// Its value.
        size: u64,
        /// Name of the number.
        of: &'static str,
        /// Its value.
        total: u64,
    },
    /// More of a dimension than there is to share.
    #[error("{name} = {size} is more than {most}: {reason}")]
    TooMany {
        /// Name of the dimension.
        name: &'static str,
        /// Its value.
        size: u32,
        /// The largest that can be.
        most: u64,
        /// Why there cannot be more.
        reason: &'static str,
    },
    /// Stages that get no layer, because all others have as many as the first.
    #[error("pp = {pp} leaves stages without a layer: of {layers}, each has {per_stage}")]
    EmptyStages {
        /// Pipeline stages.
        pp: u32,
        /// Layers of the model.
        layers: u32,
        /// Layers of a stage.
        per_stage: u32,
    },
    /// Experts that move, and a machine whose dispatches cannot be timed.
    #[error("ep = {ep}, but the time model has no file of {hardware}: experts stay on their ranks there")]
    NoTimeModel {
        /// Expert parallel ranks.
        ep: u32,
        /// Name of the hardware.
        hardware: String,
    },
    /// Each given size fits, and no others make all devices of them.
    #[error("given sizes make {given} of {devices} devices, and no sizes of other dimensions make the rest")]
    NoRest {
        /// Product of the given sizes but `ep`, which is a part of them.
        given: u64,
        /// Number of devices.
        devices: u32,
    },
}

impl Question {
    /// Why there is no shape for these sizes; `None` if there is one.
    pub fn misfit(&self) -> Option<Misfit> {
        if !self.shapes().is_empty() {
            return None;
        }
        let Fixed { pp, dp, cp, tp, ep } = self.fixed;
        let sizes = [("pp", pp), ("dp", dp), ("cp", cp), ("tp", tp)];
        let given: Vec<_> = sizes.iter().filter_map(|(name, size)| Some((*name, (*size)?))).collect();
        let product = given.iter().map(|(_, size)| u64::from(*size)).fold(1, u64::saturating_mul);
        let found = (self.devices_misfit(&given, product))
            .or_else(|| pp.and_then(|pp| self.stages_misfit(pp)))
            .or_else(|| dp.and_then(|dp| self.data_misfit(dp)))
            .or_else(|| cp.and_then(|cp| self.context_misfit(cp)))
            .or_else(|| tp.and_then(|tp| self.tensor_misfit(tp)))
            .or_else(|| ep.and_then(|ep| self.experts_misfit(ep)));
        Some(found.unwrap_or(Misfit::NoRest { given: product, devices: self.count }))
    }

    /// Whether the model can be cut like this, but for its experts.
    pub(super) fn is_cut_by(&self, shape: &Shape) -> bool {
        let Shape { pp, dp, cp, tp, ep: _ } = *shape;
        let misfit = (self.stages_misfit(pp))
            .or_else(|| self.data_misfit(dp))
            .or_else(|| self.context_misfit(cp))
            .or_else(|| self.tensor_misfit(tp));
        misfit.is_none()
    }

    fn data_misfit(&self, dp: u32) -> Option<Misfit> {
        most("dp", dp, self.sequences(), "each rank has a sequence")
    }

    fn context_misfit(&self, cp: u32) -> Option<Misfit> {
        most("cp", cp, (self.length() / 2).max(1), "each rank has two pieces of a sequence")
    }

    fn stages_misfit(&self, pp: u32) -> Option<Misfit> {
        let layers = self.model.layers;
        most("pp", pp, layers.into(), "each stage has a layer").or_else(|| {
            let per_stage = layers.div_ceil(pp.max(1));
            let is_full = u64::from(per_stage) * u64::from(pp.saturating_sub(1)) < u64::from(layers);
            (!is_full).then_some(Misfit::EmptyStages { pp, layers, per_stage })
        })
    }

    fn tensor_misfit(&self, tp: u32) -> Option<Misfit> {
        let shared = self.model.experts.map_or(0, |experts| experts.shared_ffn);
        let widths = [
            ("query heads", self.model.heads),
            ("the width of an MLP", self.model.ffn.unwrap_or(0)),
            ("the width of the shared expert", shared),
        ];
        widths.into_iter().find_map(|(of, width)| divisor("tp", tp.into(), of, width.into()))
    }

    fn experts_misfit(&self, ep: u32) -> Option<Misfit> {
        let Some(experts) = self.model.experts else {
            return most("ep", ep, 1, "the model has no experts");
        };
        let by_count = divisor("ep", ep.into(), "experts", experts.count.into());
        let (is_untimed, hardware) = (ep > 1 && self.hardware.is_none(), &self.devices.name);
        let untimed = || is_untimed.then(|| Misfit::NoTimeModel { ep, hardware: hardware.clone() });
        by_count.or_else(untimed).or_else(|| {
            let of = "devices of a stage";
            let total = self.count / self.fixed.pp.unwrap_or(1).max(1);
            divisor("ep", ep.into(), of, total.into())
        })
    }

    /// Each given size has to divide the devices, and so does the product of all.
    fn devices_misfit(&self, given: &[(&'static str, u32)], product: u64) -> Option<Misfit> {
        let (of, total) = ("devices", u64::from(self.count));
        let alone = given.iter().find_map(|(name, size)| divisor(name, (*size).into(), of, total));
        alone.or_else(|| {
            let names: Vec<_> = given.iter().map(|(name, _)| *name).collect();
            divisor(&names.join(" x "), product, of, total)
        })
    }
}

fn divisor(name: &str, size: u64, of: &'static str, total: u64) -> Option<Misfit> {
    let misfit = || Misfit::NoDivisor { name: name.to_owned(), size, of, total };
    (!total.is_multiple_of(size)).then(misfit)
}

fn most(name: &'static str, size: u32, most: u64, reason: &'static str) -> Option<Misfit> {
    (u64::from(size) > most).then_some(Misfit::TooMany { name, size, most, reason })
}
