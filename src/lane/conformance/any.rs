//! Any puts and signals, over fast and slow NICs: the same bytes land, by the same work requests.

use proptest::prelude::*;

use super::requests::{DATA, End, ROW, SOURCE, asked, counted, fabric, pattern};
use crate::lane::net::{Settings, SignalMode};
use crate::schedule::Tag;

/// A step of a rank that puts this and that.
#[derive(Clone, Debug)]
enum Step {
    Put { len: u64, registered: bool },
    Rows { rows: Vec<u32>, registered: bool },
    Zero { len: u64 },
    Signal { tagged: bool },
    Settle,
    Gap,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let rows = || prop::collection::vec(0..40u32, 1..12);
    let step = prop_oneof![
        4 => (1..6000u64, any::<bool>()).prop_map(|(len, registered)| Step::Put { len, registered }),
        4 => (rows(), any::<bool>()).prop_map(|(rows, registered)| Step::Rows { rows, registered }),
        2 => (1..3000u64).prop_map(|len| Step::Zero { len }),
        1 => any::<bool>().prop_map(|tagged| Step::Signal { tagged }),
        1 => Just(Step::Settle),
        1 => Just(Step::Gap),
    ];
    prop::collection::vec(step, 1..40)
}

/// Contents of the peer's memory after the steps.
fn landed(steps: &[Step]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for step in steps {
        match step {
            Step::Put { len, .. } => bytes.extend((0..*len).map(pattern)),
            Step::Rows { rows, .. } => {
                let row = |&row: &u32| (0..ROW).map(move |i| pattern(u64::from(row) * ROW + i));
                bytes.extend(rows.iter().flat_map(row));
            }
            Step::Zero { len } => bytes.resize(bytes.len() + *len as usize, 0),
            Step::Gap => bytes.resize(bytes.len() + 16, 0),
            Step::Signal { .. } | Step::Settle => {}
        }
    }
    bytes.resize((SOURCE - DATA) as usize, 0);
    bytes
}

fn perform(steps: &[Step], end: &End<'_>) {
    let (mut at, mut value) = (0, 1);
    for step in steps {
        match step {
            Step::Put { len, registered } => {
                end.put(at, *len, *registered);
                at += len;
            }
            Step::Rows { rows, registered } => {
                end.rows(at, rows, *registered);
                at += rows.len() as u64 * ROW;
            }
            Step::Zero { len } => {
                end.zero(at, *len);
                at += len;
            }
            Step::Gap => at += 16,
            Step::Signal { tagged } => {
                value += 1;
                end.signal(value, tagged.then(Tag::default));
            }
            Step::Settle => end.rail.settle(end.patience).unwrap(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Little staging, so that a slow NIC makes its sender wait often, also in the middle of a
    /// write.
    #[test]
    fn how_many_requests_come_of_some_calls_does_not_depend_on_how_fast_the_card_is(
        steps in steps(),
        signal in prop::sample::select(SignalMode::ALL.to_vec()),
        pieces in 2..9u32,
    ) {
        let settings = Settings { chunk: 4096, in_flight: 4096, signal, ..Settings::default() };
        let [fast, slow] = [false, true].map(|held| {
            let (counted, seen) = counted(&fabric(pieces, held), settings.clone(), |end| perform(&steps, end));
            assert!(seen == landed(&steps), "{signal:?}, {pieces}, held {held}");
            asked(counted)
        });
        prop_assert_eq!(fast, slow);
    }
}
