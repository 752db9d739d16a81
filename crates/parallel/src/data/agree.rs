//! What ranks must have alike: compared when an instance is built.

use sidelane::collective::Communicator;
use sidelane::error::CallKind;

use super::error::DataError;
use crate::calls::Calls;
use crate::check::alike;

/// FNV-1a, for values that ranks and readers compare.
#[derive(Clone, Copy, Debug)]
pub(super) struct Digest(pub u64);

impl Default for Digest {
    fn default() -> Self {
        Digest(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    pub fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    pub fn of(numbers: impl IntoIterator<Item = u64>) -> u64 {
        let mut digest = Digest::default();
        numbers.into_iter().for_each(|number| digest.add(&number.to_le_bytes()));
        digest.0
    }
}

/// Compares settings between all ranks. A rank whose own cannot be used says so to the others.
pub(super) fn agree(
    group: &mut Communicator,
    settings: Result<Vec<(&'static str, u64)>, DataError>,
) -> Result<(), DataError> {
    let settings = match settings {
        Ok(settings) => settings,
        Err(error) => return Err(Calls::new(group, vec![CallKind::AllGather]).refuse(error)),
    };
    Ok(alike(group, &settings)?)
}
