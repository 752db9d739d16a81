//! Second choices, thinned out at random.

use super::random::{Purpose, unit};
use super::{RngKey, SecondExpertPolicy};

impl SecondExpertPolicy {
    /// Drops the second of two choices with the probability that the `weights` leave. Both arrays
    /// are `[tokens, 2]`.
    pub(super) fn thin(self, draw: RngKey, weights: &[f32], ids: &mut [i32]) {
        let SecondExpertPolicy::Random { threshold } = self else { return };
        for (token, (weights, ids)) in (0..).zip(weights.chunks_exact(2).zip(ids.chunks_exact_mut(2))) {
            let lot = unit(&mut draw.stream(Purpose::Second, token));
            if lot * threshold >= weights[1] {
                ids[1] = -1;
            }
        }
    }
}
