//! Agreement before a world: settings and places that all ranks compare.

use sha2::{Digest, Sha256};

use super::Options;
use crate::bootstrap::Hub;
use crate::error::{BootstrapError, CallError, Error};

/// Digests go round; the words themselves only if these differ, and only of the two that are then
/// named.
pub(super) fn on_conditions(hub: &dyn Hub, options: &Options) -> Result<(), Error> {
    let (rank, size, deadline) = (hub.rank(), hub.size(), options.clocks.rendezvous);
    let mine = Sha256::digest(&options.job_fingerprint);
    let digests = hub.gather("world/conditions", rank, size, mine.as_slice(), deadline)?;
    let Some(differs) = digests.iter().position(|digest| *digest != digests[0]) else { return Ok(()) };
    let named = [0, differs].contains(&(rank as usize));
    let words = if named { options.job_fingerprint.as_bytes() } else { &[] };
    let said = hub.gather("world/conditions/words", rank, size, words, deadline)?;
    let [expected, seen] = [0, differs].map(|rank| String::from_utf8_lossy(&said[rank]).into_owned());
    Err(BootstrapError::FingerprintsDiffer { rank: differs as u32, seen, expected }.into())
}

/// Peers check offsets against sizes that they take to be their own, and hold signals back at both
/// ends of a wire or at none.
pub(super) fn on_sizes(hub: &dyn Hub, options: &Options) -> Result<(), Error> {
    let (rank, size, deadline) = (hub.rank(), hub.size(), options.clocks.rendezvous);
    let pace = options.pace.map_or([0; 2], |pace| {
        [pace.bytes_per_second.get(), u64::try_from(pace.latency.as_nanos()).unwrap_or(u64::MAX)]
    });
    let mine = [options.config.heap, options.config.symmetric, pace[0], pace[1]];
    let said = hub.gather("world/sizes", rank, size, bytemuck::cast_slice(&mine), deadline)?;
    for (blob, peer) in said.iter().zip(0..) {
        let theirs = bytemuck::try_pod_read_unaligned::<[u64; 4]>(blob).unwrap_or_default();
        let names =
            ["SIDELANE_HEAP", "SIDELANE_SYMMETRIC", "SIDELANE_EMULATED_LINK", "SIDELANE_EMULATED_LINK"];
        for ((what, mine), theirs) in names.into_iter().zip(mine).zip(theirs) {
            if mine != theirs {
                return Err(CallError::ConfigsDiffer { what, rank, peer, mine, theirs }.into());
            }
        }
    }
    Ok(())
}

/// A failure at a rank, as the others learn it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    /// Position of the rank among those that answered.
    pub at: usize,
    /// Whether it counts more than failures that are not grave, wherever those are.
    pub grave: bool,
    /// Settings and place of one rank.
    pub reason: String,
}

impl Failure {
    /// A rank's answer to a step that all take: nothing if it could take it.
    pub fn answer<T>(taken: &Result<T, Error>, grave: impl FnOnce(&Error) -> bool) -> Vec<u8> {
        let error = taken.as_ref().err();
        let said = error.map(|error| [&[u8::from(grave(error))], error.to_string().as_bytes()].concat());
        said.unwrap_or_default()
    }

    /// The failure that all ranks name, if there is any: the first grave one, or the first.
    pub fn named(answers: &[Vec<u8>]) -> Option<Self> {
        let failures = answers.iter().enumerate().filter_map(|(at, answer)| {
            let (&grave, reason) = answer.split_first()?;
            Some(Failure { at, grave: grave == 1, reason: String::from_utf8_lossy(reason).into_owned() })
        });
        failures.min_by_key(|failure| !failure.grave)
    }
}

#[cfg(test)]
mod tests {
    use super::super::World;
    use super::*;
    use crate::bootstrap::{self, Timeouts};
    use crate::config::Config;

    #[test]
    fn ranks_under_different_conditions_do_not_make_a_world_and_all_are_told_who_differs() {
        let conditions = ["16 tokens", "16 tokens", "32 tokens"];
        let hubs = bootstrap::threads(3, Timeouts::default()).into_iter();
        std::thread::scope(|scope| {
            let ranks: Vec<_> = hubs
                .zip(conditions)
                .map(|(hub, conditions)| {
                    let options = Options { job_fingerprint: conditions.to_owned(), ..Options::default() };
                    scope.spawn(|| World::of(hub, options, "").unwrap_err())
                })
                .collect();
            let (seen, expected) = ("32 tokens".to_owned(), "16 tokens".to_owned());
            let error = BootstrapError::FingerprintsDiffer { rank: 2, seen, expected };
            for rank in ranks {
                assert_eq!(rank.join().unwrap(), Error::Bootstrap(error.clone()));
            }
        });
    }

    #[test]
    fn ranks_with_heaps_of_different_size_do_not_make_a_world() {
        for nodes in [["a", "a"], ["a", "b"]] {
            std::thread::scope(|scope| {
                let hubs = bootstrap::threads(2, Timeouts::default()).into_iter();
                let ranks: Vec<_> = hubs
                    .zip(nodes)
                    .zip([1u64, 2])
                    .map(|((hub, node), mib)| {
                        scope.spawn(move || {
                            let config = Config { heap: mib << 20, symmetric: 1 << 20, ..Config::default() };
                            let options = Options { config, ..Options::default() };
                            World::of(hub, options, node).unwrap_err()
                        })
                    })
                    .collect();
                for (rank, error) in ranks.into_iter().map(|rank| rank.join().unwrap()).enumerate() {
                    assert!(
                        matches!(error, Error::Call(CallError::ConfigsDiffer { what: "SIDELANE_HEAP", peer, .. })
                            if peer == 1 - rank as u32),
                        "{error:?}"
                    );
                }
            });
        }
    }
}
