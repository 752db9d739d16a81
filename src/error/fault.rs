//! What kernels find wrong.

/// The meaning of a status word that is not 0. Numbers of tokens and ranks keep their lower 24
/// bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, serde::Serialize)]
#[non_exhaustive]
pub enum KernelFault {
    /// A choice is neither an expert nor -1. It counts as dropped; a sum of choices gives its token
    /// zeros.
    #[error("token {token} names an expert that does not exist")]
    ExpertOutOfRange {
        /// The token; for pack the first one.
        token: u32,
    },
    /// The map has an expert at a rank that does not exist. The choice counts as dropped; a sum of
    /// choices gives its token zeros.
    #[error("the expert map has an expert of token {token} at a rank that does not exist")]
    RankOutOfRange {
        /// The token that chose it; for pack the first one.
        token: u32,
    },
    /// Check: what lies in the slot of a rank is not of this call.
    #[error("the slot of rank {rank} is of another call")]
    OtherCall {
        /// The first such rank.
        rank: u32,
    },
    /// Check: a rank was set up otherwise.
    #[error("rank {rank} has other settings: its digest differs")]
    OtherDigest {
        /// The first such rank.
        rank: u32,
    },
    /// Sum: a place lies outside of its slot. The results of the token are zeros, those of others
    /// may be sums.
    #[error("a place of token {token} lies outside of its slot")]
    PlaceOutOfRange {
        /// The token.
        token: u32,
    },
    /// Regroup and sums of choices: an index names a row that does not exist. The row, or the
    /// results of the token, are zeros.
    #[error("an index names a row that does not exist, for row or token {at}")]
    IndexOutOfRange {
        /// The row that was to be made, or the token.
        at: u32,
    },
    /// Admit: a rank would get more rows than its budget, in a call that refuses that. Results are
    /// zeros at all ranks; the next call is judged anew.
    #[error("rank {rank} would get more rows than its budget")]
    OverBudget {
        /// The first such rank.
        rank: u32,
    },
    /// A word that no kernel writes: another writer set it.
    #[error("the status word was set to {word:#x}")]
    Foreign {
        /// The word.
        word: u32,
    },
}

impl KernelFault {
    /// Reads a status word; `None` while nothing is wrong.
    pub fn of(word: u32) -> Option<KernelFault> {
        let (code, about) = (word & 0xff, word >> 8);
        Some(match code {
            _ if word == 0 => return None,
            1 => KernelFault::ExpertOutOfRange { token: about },
            2 => KernelFault::RankOutOfRange { token: about },
            3 => KernelFault::OtherCall { rank: about },
            4 => KernelFault::OtherDigest { rank: about },
            5 => KernelFault::PlaceOutOfRange { token: about },
            6 => KernelFault::IndexOutOfRange { at: about },
            7 => KernelFault::OverBudget { rank: about },
            _ => KernelFault::Foreign { word },
        })
    }
}
