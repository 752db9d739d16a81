//! Description of a queue pair for its peer, as it goes through the rendezvous.
//!
//! ```text
//!   byte 0        1        2     3          4           8                    12   14   16
//!        version  network  mtu   atomics    queue pair  first packet number  lid  0    gid (16 bytes)
//! ```
//!
//! Numbers are little-endian. The whole is 32 bytes. The version comes first, so another build is
//! recognized before any other byte is trusted.

use std::net::Ipv6Addr;

use super::port::{LinkLayer, Mtu};
use crate::error::VerbsError;

/// Version of the verbs lane's protocol, the description included.
const VERSION: u8 = 1;

/// Queue pair and packet numbers have so many bits.
const MASK_24: u32 = (1 << 24) - 1;

/// One end of a reliable connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The network it is on.
    pub link: LinkLayer,
    /// The largest packet its port takes.
    pub mtu: Mtu,
    /// Atomics of its peer that it keeps answers for.
    pub atomics_in: u8,
    /// Number of the queue pair on its NIC.
    pub queue_pair: u32,
    /// Number of the first packet it sends.
    pub first_packet: u32,
    /// Address of the port within an InfiniBand subnet; 0 on Ethernet.
    pub lid: u16,
    /// Address of the port.
    pub gid: Ipv6Addr,
}

impl Endpoint {
    /// Bytes of a description.
    pub const BYTES: usize = 32;

    /// The description.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0] = VERSION;
        bytes[1] = self.link.code();
        bytes[2] = self.mtu.code() as u8;
        bytes[3] = self.atomics_in;
        bytes[4..8].copy_from_slice(&self.queue_pair.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.first_packet.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.lid.to_le_bytes());
        bytes[16..].copy_from_slice(&self.gid.octets());
        bytes
    }

    /// Reads what rank `peer` of the world sent.
    ///
    /// # Errors
    /// [`VerbsError::EndpointVersion`], [`VerbsError::EndpointLength`],
    /// [`VerbsError::EndpointField`].
    pub fn from_bytes(peer: u32, bytes: &[u8]) -> Result<Self, VerbsError> {
        if let Some(&seen) = bytes.first().filter(|&&version| version != VERSION) {
            return Err(VerbsError::EndpointVersion { peer, seen, expected: VERSION });
        }
        let Ok(bytes) = <&[u8; Self::BYTES]>::try_from(bytes) else {
            return Err(VerbsError::EndpointLength { peer, seen: bytes.len(), expected: Self::BYTES });
        };
        let wrong = |field, value| VerbsError::EndpointField { peer, field, value };
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let number = |field, at| Some(word(at)).filter(|&n| n <= MASK_24).ok_or(wrong(field, word(at)));
        let link = LinkLayer::from_code(bytes[1]).ok_or(wrong("network", bytes[1].into()))?;
        let mtu = Mtu::from_code(bytes[2].into()).ok_or(wrong("mtu", bytes[2].into()))?;
        let (queue_pair, first_packet) = (number("queue pair", 4)?, number("first packet number", 8)?);
        let gid: [u8; 16] = std::array::from_fn(|i| bytes[16 + i]);
        let (lid, pad) = (word(12) as u16, word(12) >> 16);
        if pad != 0 {
            return Err(wrong("bytes 14 and 15", pad));
        }
        let (atomics_in, gid) = (bytes[3], Ipv6Addr::from(gid));
        Ok(Endpoint { link, mtu, atomics_in, queue_pair, first_packet, lid, gid })
    }

    /// A number for a first packet: not guessable, so that late packets of an older connection do
    /// not fit a new one.
    ///
    /// # Errors
    /// The system's random numbers are not to be had.
    pub(super) fn random_packet() -> Result<u32, getrandom::Error> {
        Ok(getrandom::u32()? & MASK_24)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    prop_compose! {
        fn any_endpoint()(
            ethernet in any::<bool>(),
            mtu in prop::sample::select(&Mtu::ALL[..]),
            numbers in (any::<u8>(), 0..=MASK_24, 0..=MASK_24, any::<u16>()),
            gid in any::<u128>(),
        ) -> Endpoint {
            let link = if ethernet { LinkLayer::Ethernet } else { LinkLayer::InfiniBand };
            let (atomics_in, queue_pair, first_packet, lid) = numbers;
            Endpoint { link, mtu, atomics_in, queue_pair, first_packet, lid, gid: gid.into() }
        }
    }

    proptest! {
        #[test]
        fn a_description_reads_back_as_it_was(endpoint in any_endpoint()) {
            prop_assert_eq!(Endpoint::from_bytes(3, &endpoint.to_bytes()), Ok(endpoint));
        }

        #[test]
        fn any_bytes_are_an_endpoint_or_an_error_that_names_the_rank(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            match Endpoint::from_bytes(9, &bytes) {
                Ok(endpoint) => prop_assert_eq!(&endpoint.to_bytes()[..], &bytes[..]),
                Err(error) => prop_assert!(error.to_string().contains("rank 9"), "{}", error),
            }
        }

        #[test]
        fn a_wrong_byte_is_never_read_as_the_same_endpoint(endpoint in any_endpoint(), at in 0..32usize, flip in 1..=255u8) {
            let mut bytes = endpoint.to_bytes();
            bytes[at] ^= flip;
            prop_assert_ne!(Endpoint::from_bytes(0, &bytes), Ok(endpoint));
        }
    }

    #[test]
    fn another_version_and_a_wrong_length_are_told_apart() {
        let mut bytes = vec![2; 50];
        let seen = Endpoint::from_bytes(7, &bytes);
        assert_eq!(seen, Err(VerbsError::EndpointVersion { peer: 7, seen: 2, expected: 1 }));
        bytes[0] = 1;
        let seen = Endpoint::from_bytes(7, &bytes);
        assert_eq!(seen, Err(VerbsError::EndpointLength { peer: 7, seen: 50, expected: 32 }));
        let seen = Endpoint::from_bytes(7, &[]);
        assert_eq!(seen, Err(VerbsError::EndpointLength { peer: 7, seen: 0, expected: 32 }));
    }
}
