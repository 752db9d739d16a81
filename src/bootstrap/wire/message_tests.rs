use std::{net::IpAddr, sync::Arc, time::Duration};

use proptest::prelude::*;

use super::*;
use crate::error::LostReason;

fn causes() -> impl Strategy<Value = Cause> {
    let time = || any::<u32>().prop_map(|ms| Duration::from_millis(ms.into()));
    prop_oneof![
        any::<u32>().prop_map(|by| Cause::Nic { by }),
        any::<u32>().prop_map(|rank| Cause::Lost { rank, how: LostReason::Closed }),
        (any::<u32>(), time()).prop_map(|(rank, time)| Cause::Lost { rank, how: LostReason::Silent(time) }),
        any::<u32>().prop_map(|pid| Cause::LauncherGone { pid }),
        any::<(u32, u16)>().prop_map(|(rank, epoch)| Cause::Evicted { rank, epoch }),
        (any::<u32>(), any::<u32>(), time()).prop_map(|(rank, by, waited)| Cause::Stalled {
            rank,
            by,
            waited
        }),
        any::<u32>().prop_map(|by| Cause::Cancelled { by }),
        any::<u32>().prop_map(|rank| Cause::Protocol { rank }),
        (any::<u32>(), any::<u32>()).prop_map(|(rank, by)| Cause::Connection { rank, by }),
    ]
}

fn refusals() -> impl Strategy<Value = JoinRefusal> {
    prop_oneof![
        any::<u32>().prop_map(JoinRefusal::Version),
        Just(JoinRefusal::OtherJob),
        Just(JoinRefusal::WrongSecret),
        Just(JoinRefusal::Rank),
        any::<u16>().prop_map(JoinRefusal::Evicted),
        any::<Vec<u32>>().prop_map(JoinRefusal::Missing),
        Just(JoinRefusal::Malformed),
    ]
}

fn answers() -> impl Strategy<Value = Answer> {
    prop_oneof![
        Just(Answer::Done),
        any::<Vec<u8>>().prop_map(|value| Answer::Value(Arc::new(value))),
        prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..5)
            .prop_map(|blobs| Answer::Gathered(Arc::new(blobs))),
        any::<Vec<u32>>().prop_map(Answer::Missing),
        any::<u32>().prop_map(Answer::Left),
        (any::<u32>(), ".{0,9}", ".{0,9}").prop_map(|(rank, seen, expected)| Answer::Disagree {
            rank,
            seen,
            expected
        }),
        any::<u64>().prop_map(Answer::TooLarge),
    ]
}

fn doors() -> impl Strategy<Value = ListenAddress> {
    (any::<Option<IpAddr>>(), any::<u16>()).prop_map(|(ip, port)| ListenAddress { ip, port })
}

fn hellos() -> impl Strategy<Value = Hello> {
    (any::<(u32, [u8; 32], u32, u32)>(), any::<(u16, u32, u16, [u8; 32])>()).prop_map(
        |((version, job, rank, size), (epoch, host, port, nonce))| Hello {
            version,
            job,
            rank,
            size,
            epoch,
            host,
            port,
            nonce,
        },
    )
}

fn messages() -> impl Strategy<Value = Message> {
    prop_oneof![
        hellos().prop_map(Message::Hello),
        any::<(u32, [u8; 32])>().prop_map(|(version, nonce)| Message::Challenge { version, nonce }),
        any::<[u8; 32]>().prop_map(Message::Proof),
        refusals().prop_map(Message::Refused),
        (any::<u32>(), any::<Vec<u32>>(), prop::collection::vec(doors(), 0..5))
            .prop_map(|(rank, members, doors)| Message::Welcome { rank, members, doors }),
        Just(Message::Heartbeat),
        (any::<u64>(), ".{0,9}", any::<Vec<u8>>()).prop_map(|(ticket, key, value)| Message::Set {
            ticket,
            key,
            value
        }),
        (any::<u64>(), ".{0,9}").prop_map(|(ticket, key)| Message::Get { ticket, key }),
        (any::<u64>(), ".{0,9}", any::<u32>(), any::<u32>(), any::<Vec<u8>>()).prop_map(
            |(ticket, key, index, count, blob)| Message::Gather { ticket, key, index, count, blob }
        ),
        any::<u64>().prop_map(|ticket| Message::Withdraw { ticket }),
        (any::<u64>(), answers()).prop_map(|(ticket, answer)| Message::Answer { ticket, answer }),
        causes().prop_map(Message::Dead),
        any::<u32>().prop_map(|rank| Message::Left { rank }),
        Just(Message::Bye),
    ]
}

proptest! {
    #[test]
    fn every_message_comes_back_as_it_was(message in messages()) {
        let frame = message.encode();
        prop_assert_eq!(u32::from_le_bytes([frame[0], frame[1], frame[2], frame[3]]) as usize, frame.len() - 4);
        prop_assert_eq!(Message::decode(&frame[4..]), Ok(message));
    }

    #[test]
    fn a_cut_message_is_malformed_and_so_is_a_long_one(message in messages(), cut in any::<prop::sample::Index>()) {
        let frame = message.encode();
        let body = &frame[4..];
        prop_assert_eq!(Message::decode(&body[..cut.index(body.len())]), Err(Malformed));
        prop_assert_eq!(Message::decode(&[body, &[0]].concat()), Err(Malformed));
    }

    #[test]
    fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        // Whatever decodes must be a message that encodes to the same bytes.
        if let Ok(message) = Message::decode(&bytes) {
            prop_assert_eq!(&message.encode()[4..], &bytes[..]);
        }
    }
}
