//! The loss that keeps experts evenly loaded, as numbers: each field of Rust's `Balance`,
//! flattened.

use std::ffi::c_char;

use sidelane::gate::{
    BalanceLoss as Loss, CountDivisor, CountedChoices, LossInput as Taken, PaddingTokens, Preset,
    TokenGroups, Totals,
};

use super::border;
use super::gate_config::SCORES;
use super::losses::{Logits, gradient};
use super::memory::{Out, optional, optional_flags, slice, slice_mut, text};
use super::versioned::{OutStruct, read, versioned};
use crate::Status;
use crate::fault::{ArgumentError, Fault};
use crate::words::{UNNUMBERED, choice, number};

/// The first choice of each token is counted.
pub const SIDELANE_MAP_FIRST_CHOICES: u32 = 0;
/// All choices of each token.
pub const SIDELANE_MAP_ALL_CHOICES: u32 = 1;
/// The best `top_k` experts by the logits anew, without bias, groups, noise or replay.
pub const SIDELANE_MAP_FRESH: u32 = 2;

/// Counts are divided by the tokens.
pub const SIDELANE_SHARE_OF_TOKENS: u32 = 0;
/// By the tokens times `top_k`.
pub const SIDELANE_SHARE_OF_CHOICES: u32 = 1;

/// Tokens that are not used are not there: means are over the others.
pub const SIDELANE_UNUSED_LEFT_OUT: u32 = 0;
/// Their shares are zero: means are over all tokens.
pub const SIDELANE_UNUSED_ZERO: u32 = 1;
/// Their shares are as those of the others.
pub const SIDELANE_UNUSED_SHARED: u32 = 2;

/// `parts` parts of the tokens, one after another, are balanced each for itself.
pub const SIDELANE_PARTS_CONSECUTIVE: u32 = 0;
/// Token t is of part t mod `parts`.
pub const SIDELANE_PARTS_INTERLEAVED: u32 = 1;

/// A loss that is least where all experts are chosen equally often, as data. Begin with that of a
/// preset (sidelane_balance_preset()) and change the fields that differ.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Balance {
    /// sizeof(sidelane_balance_t).
    pub size: usize,
    /// Factor on all.
    pub coefficient: f32,
    /// What shares are made of: SIDELANE_SCORE_...
    pub score: u32,
    /// Which choices are counted: SIDELANE_MAP_...
    pub map: u32,
    /// What counts are divided by: SIDELANE_SHARE_...
    pub share: u32,
    /// What becomes of tokens that are not used: SIDELANE_UNUSED_...
    pub unused: u32,
    /// Parts of the tokens; 0 and 1: all together. The loss is the mean of theirs.
    pub parts: u32,
    /// How tokens are split: SIDELANE_PARTS_...
    pub split: u32,
    /// 0.
    pub reserved: u32,
}
versioned!(Balance, "sidelane_balance_t", reserved: u32);

/// Input of the loss. Arrays are read during the call alone.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BalanceInput {
    /// sizeof(sidelane_balance_input_t).
    pub size: usize,
    /// The router's logits, [tokens, experts].
    pub logits: *const f32,
    /// Tokens.
    pub tokens: u64,
    /// [tokens, top_k]: the choices before dropping, -1 for none. SIDELANE_MAP_FRESH needs none:
    /// NULL.
    pub choices: *const i32,
    /// [tokens]: 1 for tokens that count; or NULL, if all do.
    pub token_mask: *const u8,
    /// [parts, experts]: counts of more than these tokens, as sidelane_balance_counts() gives them,
    /// summed or averaged; or NULL. The loss is then the part of this rank's tokens.
    pub total_counts: *const f64,
    /// How many tokens one of these counts is of, all parts together.
    pub total_tokens: f64,
    /// Experts.
    pub experts: u32,
    /// Choices per token.
    pub top_k: u32,
}
versioned!(BalanceInput, "sidelane_balance_input_t", top_k: u32);

/// The loss that belongs to the router of a system or model (names as of sidelane_gate_preset()),
/// with a coefficient of 1 and all tokens together.
///
/// The caller guarantees: `preset` is NULL or a text; `balance` is NULL, or as large as its size
/// says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_balance_preset(preset: *const c_char, balance: *mut Balance) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let (out, preset) = unsafe { (OutStruct::new(balance)?, text("preset", preset)?) };
        let preset: Preset = preset.parse().map_err(ArgumentError::from)?;
        out.write((&Loss::of(preset)).into());
        Ok(())
    })
}

/// Adds the number of choices of each expert to `counts`, [parts, experts]: ranks add these up for
/// `total_counts`.
///
/// The caller guarantees: structs are NULL, or as large as their sizes say; arrays are NULL or as
/// large as documented.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_balance_counts(
    balance: *const Balance,
    input: *const BalanceInput,
    counts: *mut f64,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let (flat, input) = unsafe { (read(balance)?, read(input)?) };
        let loss = Loss::try_from(&flat)?;
        // SAFETY: as the caller promised.
        let (taken, counts) =
            unsafe { (input.taken(flat.all())?, slice_mut("counts", counts, input.counts(flat.all())?)?) };
        Ok(loss.counts(&taken, counts)?)
    })
}

/// Writes the loss to `loss`. Its gradient is added to `d_logits`, [tokens, experts], unless that
/// is NULL. Without tokens the loss is 0. Further divisors of a system (ranks that share a loss,
/// micro-batches) belong into the coefficient.
///
/// The caller guarantees: as sidelane_balance_counts(); `loss` is NULL or valid, and no other
/// thread uses `d_logits` meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sidelane_balance_loss(
    balance: *const Balance,
    input: *const BalanceInput,
    loss: *mut f32,
    d_logits: *mut f32,
) -> Status {
    border(|| {
        // SAFETY: as the caller promised.
        let (out, flat, input) = unsafe { (Out::new("loss", loss)?, read(balance)?, read(input)?) };
        // SAFETY: as the caller promised.
        let (taken, d_logits) = unsafe { (input.taken(flat.all())?, gradient(d_logits, input.logits()?)?) };
        out.write(Loss::try_from(&flat)?.loss(&taken, d_logits)?);
        Ok(())
    })
}

const MAPS: [(u32, CountedChoices); 3] = [
    (SIDELANE_MAP_FIRST_CHOICES, CountedChoices::FirstChoices),
    (SIDELANE_MAP_ALL_CHOICES, CountedChoices::AllChoices),
    (SIDELANE_MAP_FRESH, CountedChoices::Fresh),
];

const SHARES: [(u32, CountDivisor); 2] = [
    (SIDELANE_SHARE_OF_TOKENS, CountDivisor::OfTokens),
    (SIDELANE_SHARE_OF_CHOICES, CountDivisor::OfChoices),
];

const UNUSED: [(u32, PaddingTokens); 3] = [
    (SIDELANE_UNUSED_LEFT_OUT, PaddingTokens::LeftOut),
    (SIDELANE_UNUSED_ZERO, PaddingTokens::Zero),
    (SIDELANE_UNUSED_SHARED, PaddingTokens::Shared),
];

impl Balance {
    /// Parts of the tokens.
    fn all(&self) -> u64 {
        self.parts.max(1).into()
    }
}

impl TryFrom<&Balance> for Loss {
    type Error = Fault;

    fn try_from(flat: &Balance) -> Result<Loss, Fault> {
        super::tensor::reserved("reserved field of a balance", flat.reserved)?;
        let splits = [
            (SIDELANE_PARTS_CONSECUTIVE, TokenGroups::Consecutive(flat.parts)),
            (SIDELANE_PARTS_INTERLEAVED, TokenGroups::Interleaved(flat.parts)),
        ];
        let split = choice("split", flat.split, &splits, "SIDELANE_PARTS_CONSECUTIVE or _INTERLEAVED")?;
        Ok(Loss::of(Preset::Megatron)
            .with_coefficient(flat.coefficient)
            .with_score(choice("score", flat.score, &SCORES, "a number of SIDELANE_SCORE_...")?)
            .with_map(choice("map", flat.map, &MAPS, "a number of SIDELANE_MAP_...")?)
            .with_share(choice("share", flat.share, &SHARES, "a number of SIDELANE_SHARE_...")?)
            .with_unused(choice("unused", flat.unused, &UNUSED, "a number of SIDELANE_UNUSED_...")?)
            .with_parts(if flat.parts < 2 { TokenGroups::Whole } else { split }))
    }
}

impl From<&Loss> for Balance {
    fn from(loss: &Loss) -> Balance {
        let (parts, split) = match loss.parts {
            TokenGroups::Whole => (1, SIDELANE_PARTS_CONSECUTIVE),
            TokenGroups::Consecutive(parts) => (parts, SIDELANE_PARTS_CONSECUTIVE),
            TokenGroups::Interleaved(parts) => (parts, SIDELANE_PARTS_INTERLEAVED),
            _ => (0, UNNUMBERED),
        };
        Balance {
            size: 0,
            coefficient: loss.coefficient,
            score: number(&SCORES, &loss.score),
            map: number(&MAPS, &loss.map),
            share: number(&SHARES, &loss.share),
            unused: number(&UNUSED, &loss.unused),
            parts,
            split,
            reserved: 0,
        }
    }
}

impl BalanceInput {
    fn logits(&self) -> Result<Logits, ArgumentError> {
        Logits::new(self.tokens, self.experts)
    }

    /// How many counts there are.
    fn counts(&self, parts: u64) -> Result<u64, ArgumentError> {
        let (rows, columns) = (parts, self.experts.into());
        rows.checked_mul(columns).ok_or(ArgumentError::TooLarge { what: "counts", rows, columns })
    }

    /// # Safety
    /// Arrays are null or as large as documented, and no one writes to them during `'a`.
    unsafe fn taken<'a>(&self, parts: u64) -> Result<Taken<'a>, Fault> {
        let (logits, choices) = (self.logits()?, Logits::new(self.tokens, self.top_k)?.elements);
        let choices = if self.choices.is_null() { 0 } else { choices };
        // SAFETY: as the caller promised; the others likewise.
        let counts = unsafe { optional("total_counts", self.total_counts, self.counts(parts)?) }?;
        Ok(Taken {
            // SAFETY: as above.
            logits: unsafe { slice("logits", self.logits, logits.elements) }?,
            experts: self.experts,
            top_k: self.top_k,
            // SAFETY: as above.
            choices: unsafe { slice("choices", self.choices, choices) }?,
            // SAFETY: as above.
            token_mask: unsafe { optional_flags("token_mask", self.token_mask, self.tokens) }?,
            totals: counts.map(|counts| Totals { counts, tokens: self.total_tokens }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_comes_back_from_its_numbers_as_it_was() {
        for preset in Preset::ALL {
            let loss = Loss::of(preset);
            for parts in [TokenGroups::Whole, TokenGroups::Consecutive(3), TokenGroups::Interleaved(4)] {
                let loss = loss.with_parts(parts);
                assert_eq!(Loss::try_from(&Balance::from(&loss)).unwrap(), loss, "{preset}");
            }
        }
    }
}
