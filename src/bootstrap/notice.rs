//! What the members of an exchange of descriptors tell each other first: where each listens, and to
//! whom it offers how many.
//!
//! ```text
//!   rank 9 of 4,096, on a node of 8       links   8: 1 member, 1 descriptor    10: 6 members, 1 descriptor
//! ```
//!
//! Every rank gets the notices of all. So a notice has the few members that are linked, and not the
//! many that are not: those of N ranks are N small messages, and not N x N counts.

use rustix::net::SocketAddrUnix;

use super::secret::random;
use super::system;
use super::wire::{Malformed, Reader, Writer};
use crate::error::BootstrapError;

/// Adjacent members to each of which a member offers as many descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Link {
    first: u32,
    members: u32,
    descriptors: u32,
}

impl Link {
    fn all(counts: impl Iterator<Item = Option<u32>>) -> Vec<Link> {
        let mut links: Vec<Link> = Vec::new();
        for (member, descriptors) in (0..).zip(counts) {
            let Some(descriptors) = descriptors else { continue };
            match links.last_mut() {
                Some(last) if last.end() == member && last.descriptors == descriptors => last.members += 1,
                _ => links.push(Link { first: member, members: 1, descriptors }),
            }
        }
        links
    }

    /// The member behind the last one.
    fn end(self) -> u32 {
        self.first.saturating_add(self.members)
    }
}

/// Message of a member to the others over the hub.
pub struct Notice {
    name: [u8; 16],
    pub nonce: [u8; 32],
    /// Ascending.
    links: Vec<Link>,
}

impl Notice {
    /// That of a member, given the number of descriptors that it offers each; None where not
    /// linked.
    ///
    /// # Errors
    /// [`BootstrapError::System`] if there is no source of randomness.
    pub fn new(counts: impl Iterator<Item = Option<u32>>) -> Result<Self, BootstrapError> {
        Ok(Notice { name: random()?, nonce: random()?, links: Link::all(counts) })
    }

    /// Where the member listens.
    ///
    /// # Errors
    /// [`BootstrapError::System`].
    pub fn address(&self) -> Result<SocketAddrUnix, BootstrapError> {
        let name: String = self.name.iter().map(|byte| format!("{byte:02x}")).collect();
        SocketAddrUnix::new_abstract_name(format!("sidelane-{name}").as_bytes())
            .map_err(|errno| system("bind", errno))
    }

    /// Descriptors for a member; None where not linked.
    pub fn offers(&self, member: usize) -> Option<u32> {
        let behind = self.links.partition_point(|link| link.first as usize <= member);
        let link = self.links[..behind].last().filter(|link| member < link.end() as usize)?;
        Some(link.descriptors)
    }

    fn linked(&self) -> impl Iterator<Item = usize> {
        self.links.iter().flat_map(|link| link.first as usize..link.end() as usize)
    }

    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.array(&self.name);
        w.array(&self.nonce);
        w.u32(self.links.len() as u32);
        for &Link { first, members, descriptors } in &self.links {
            [first, members, descriptors].into_iter().for_each(|number| w.u32(number));
        }
        w.finish()
    }

    /// From bytes, in an exchange of so many members.
    ///
    /// # Errors
    /// [`Malformed`], also for a link to a member that there is not.
    pub fn decode(blob: &[u8], members: usize) -> Result<Self, Malformed> {
        let mut outer = Reader::new(blob);
        let body = outer.bytes()?;
        outer.end()?;
        let mut r = Reader::new(body);
        let (name, nonce) = (r.array()?, r.array()?);
        let links = r.list(|r| Ok(Link { first: r.u32()?, members: r.u32()?, descriptors: r.u32()? }))?;
        r.end()?;
        let ascending = links.is_sorted_by(|one, next| one.end() <= next.first);
        if !ascending || links.last().is_some_and(|last| last.end() as usize > members) {
            return Err(Malformed);
        }
        Ok(Notice { name, nonce, links })
    }
}

/// Every member looks at every link, so that all of them stop if one pair disagrees.
///
/// # Errors
/// [`BootstrapError::Disagree`], the same on all members.
pub fn agree(key: &str, members: &[u32], notices: &[Notice]) -> Result<(), BootstrapError> {
    let links = notices.iter().enumerate().flat_map(|(i, notice)| notice.linked().map(move |j| (i, j)));
    let one_sided = links.filter(|&(i, j)| notices[j].offers(i).is_none());
    let Some((i, j)) = one_sided.map(|(i, j)| (i.min(j), i.max(j))).min() else { return Ok(()) };
    let word = |from: usize, to| if notices[from].offers(to).is_some() { "linked" } else { "not linked" };
    Err(BootstrapError::Disagree {
        step: key.to_owned(),
        rank: members[j],
        seen: format!("{} with rank {}", word(j, i), members[i]),
        expected: word(i, j).to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn notice(counts: &[Option<u32>]) -> Notice {
        Notice::new(counts.iter().copied()).unwrap()
    }

    proptest! {
        #[test]
        fn notice_brings_the_count_of_each_member(counts in prop::collection::vec(prop::option::of(0u32..3), 1..40)) {
            let sent = Notice::decode(&notice(&counts).encode(), counts.len()).ok().unwrap();
            let seen: Vec<_> = (0..counts.len()).map(|member| sent.offers(member)).collect();
            prop_assert_eq!(&seen, &counts);
            prop_assert_eq!(sent.offers(counts.len()), None);
            prop_assert_eq!(sent.linked().count(), counts.iter().flatten().count());
            prop_assert!(counts.last() == Some(&None) || Notice::decode(&notice(&counts).encode(), counts.len() - 1).is_err());
        }
    }

    #[test]
    fn links_that_overlap_or_descend_are_malformed() {
        for links in [[(2, 2), (3, 1)], [(3, 1), (2, 1)], [(1, u32::MAX), (2, 1)]] {
            let links = links.map(|(first, members)| Link { first, members, descriptors: 1 }).to_vec();
            let bytes = Notice { links, ..notice(&[]) }.encode();
            assert_eq!(Notice::decode(&bytes, 8).map(drop), Err(Malformed));
        }
    }

    #[test]
    fn first_pair_that_disagrees_is_named_whichever_side_wants_it() {
        let alike = [[None, Some(1), None], [Some(2), None, None], [None; 3]];
        let named =
            |counts: [[Option<u32>; 3]; 3]| agree("step", &[5, 6, 7], &counts.map(|counts| notice(&counts)));
        assert_eq!(named(alike), Ok(()));
        let disagree = |rank, seen: &str, expected: &str| {
            let [seen, expected] = [seen, expected].map(str::to_owned);
            Err(BootstrapError::Disagree { step: "step".to_owned(), rank, seen, expected })
        };
        let mut higher = alike;
        higher[2] = [None, Some(1), None];
        assert_eq!(named(higher), disagree(7, "linked with rank 6", "not linked"));
        higher[0] = [None, None, Some(1)];
        assert_eq!(named(higher), disagree(6, "linked with rank 5", "not linked"));
    }
}
