//! Agreement: the tags that ranks send on entering a call, and whether they are of one call.
//!
//! ```text
//!   rank 0   tag: kind, refusal, options, handle, base  --entry--> every rank holds the tags of all --> one verdict
//! ```
//!
//! The verdict is a pure function of the tags. So all ranks come to the same one without another
//! word.

use crate::error::{CallError, CallKind};

/// Message of an entry signal: which call this is, and where the receiver may write or read.
///
/// It lies in the flag's own cache line, so calls without a count exchange are checked, too: a rank
/// with another call is found before any result is visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// Which call.
    pub kind: CallKind,
    /// Whether the sender can go on; if not, nothing may move on any rank.
    pub refusal: Refusal,
    /// Which of the sender's dispatch contexts the call uses: metadata lands there. Ranks need not
    /// agree on it.
    pub context: u16,
    /// Digest of the options of this call.
    pub options: u32,
    /// Number of the dispatch whose layout is used; for a dispatch with counts, the bytes that may
    /// be written from `base` on. With [`Refusal::Space`]: the requested bytes.
    pub handle: u64,
    /// First byte in the sender's pool window: a grant to write there (dispatches, rows that are
    /// returned by puts) or the chunk to read (shared memory). With [`Refusal::Space`]: the free
    /// bytes.
    pub base: u64,
}

/// Why a rank cannot take part in a call that it has entered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Refusal {
    /// It can.
    #[default]
    None = 0,
    /// Its caller's input is wrong.
    Input = 1,
    /// Its pool has no room.
    Space = 2,
}

impl Refusal {
    /// The refusal of this number; an unknown one counts as wrong input.
    pub fn from_code(code: u8) -> Refusal {
        match code {
            0 => Refusal::None,
            2 => Refusal::Space,
            _ => Refusal::Input,
        }
    }
}

impl Tag {
    /// As three words, for a flag line or a wire.
    pub fn to_words(self) -> [u64; 3] {
        let choice = u64::from(self.kind as u8) | u64::from(self.refusal as u8) << 8;
        let head = choice | u64::from(self.context) << 16 | u64::from(self.options) << 32;
        [head, self.handle, self.base]
    }

    /// From three words. Anything unknown reads as a kind or refusal that no correct rank agrees
    /// with.
    pub fn from_words([head, handle, base]: [u64; 3]) -> Self {
        Tag {
            kind: CallKind::from_code(head as u8),
            refusal: Refusal::from_code((head >> 8) as u8),
            context: (head >> 16) as u16,
            options: (head >> 32) as u32,
            handle,
            base,
        }
    }
}

impl Default for Tag {
    fn default() -> Self {
        Tag { kind: CallKind::Unknown, refusal: Refusal::None, context: 0, options: 0, handle: 0, base: 0 }
    }
}

/// One call, as the ranks of a group enter it.
#[derive(Clone, Copy, Debug)]
pub struct Agreement {
    /// Number of the call.
    pub call: u64,
    /// This rank.
    pub rank: u32,
    /// Size of the group.
    pub ranks: u32,
    /// Name of the value in the tags' `handle`, where it must be equal everywhere: `"handle"`,
    /// `"bytes"`.
    pub compared: Option<&'static str>,
}

impl Agreement {
    /// Whether all ranks make the call that this rank enters as `mine`. `said` gives the tag of
    /// another rank.
    ///
    /// # Errors
    /// [`CallError::KindsDiffer`], [`CallError::Disagree`]: of the lowest rank that differs. Errors
    /// of `said`.
    pub fn alike<E: From<CallError>>(
        &self,
        mine: Tag,
        said: impl Fn(u32) -> Result<Tag, E>,
    ) -> Result<(), E> {
        let (call, kind, rank) = (self.call, mine.kind, self.rank);
        for peer in self.others() {
            let theirs = said(peer)?;
            if theirs.kind != kind {
                let (mine, theirs) = (kind, theirs.kind);
                return Err(CallError::KindsDiffer { call, rank, peer, mine, theirs }.into());
            }
            if [mine.refusal, theirs.refusal] != [Refusal::None; 2] {
                continue;
            }
            let options = (u64::from(mine.options), u64::from(theirs.options));
            let handles = self.compared.map(|what| (what, (mine.handle, theirs.handle)));
            for (what, (mine, theirs)) in [("options", options)].into_iter().chain(handles) {
                if mine != theirs {
                    return Err(CallError::Disagree { call, kind, what, rank, peer, mine, theirs }.into());
                }
            }
        }
        Ok(())
    }

    /// The lowest other rank that refuses the call, and its tag.
    ///
    /// # Errors
    /// Errors of `said`.
    pub fn refusal<E>(&self, said: impl Fn(u32) -> Result<Tag, E>) -> Result<Option<(u32, Tag)>, E> {
        for peer in self.others() {
            let tag = said(peer)?;
            if tag.refusal != Refusal::None {
                return Ok(Some((peer, tag)));
            }
        }
        Ok(None)
    }

    /// The error that names a rank whose input was refused there.
    pub fn refused_by(&self, peer: u32) -> CallError {
        CallError::PeerRefused { call: self.call, peer }
    }

    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let rank = self.rank;
        (0..self.ranks).filter(move |&peer| peer != rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: Agreement = Agreement { call: 7, rank: 1, ranks: 3, compared: Some("handle") };

    fn tag(kind: CallKind, handle: u64, refusal: Refusal) -> Tag {
        Tag { kind, handle, refusal, ..Tag::default() }
    }

    fn alike(all: [Tag; 3]) -> Result<(), CallError> {
        GROUP.alike(all[1], |peer| Ok(all[peer as usize]))
    }

    #[test]
    fn kinds_are_compared_before_refusals_and_handles_after() {
        let same = tag(CallKind::Combine, 5, Refusal::None);
        assert_eq!(alike([same; 3]), Ok(()));
        let other = tag(CallKind::Dispatch, 5, Refusal::Input);
        assert!(matches!(alike([same, same, other]), Err(CallError::KindsDiffer { peer: 2, .. })));
        let older = tag(CallKind::Combine, 4, Refusal::None);
        assert!(matches!(
            alike([older, same, same]),
            Err(CallError::Disagree { peer: 0, what: "handle", .. })
        ));
        // A rank that refuses has no handle to compare.
        let refused = tag(CallKind::Combine, 0, Refusal::Input);
        assert_eq!(alike([same, same, refused]), Ok(()));
        assert_eq!(alike([same, refused, same]), Ok(()));
    }

    #[test]
    fn lowest_rank_that_refuses_is_named() {
        let (well, refuses) =
            (tag(CallKind::Combine, 5, Refusal::None), tag(CallKind::Combine, 5, Refusal::Space));
        let of = |all: [Tag; 3]| GROUP.refusal(|peer| Ok::<_, CallError>(all[peer as usize])).unwrap();
        assert_eq!(of([well, refuses, well]), None, "its own refusal a rank knows");
        assert_eq!(of([refuses, well, refuses]), Some((0, refuses)));
        assert_eq!(of([well, well, refuses]), Some((2, refuses)));
    }
}
