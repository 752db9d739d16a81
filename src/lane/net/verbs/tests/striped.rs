//! A connection over two queue pairs, whose ends no thread serves.

use super::*;
use crate::bootstrap::Health;
use crate::lane::flag::WaitLimits;
use crate::lane::net::RemoteAddress;

/// Signals that an end takes before it reports them.
const REPORTED: u64 = 64;

#[test]
fn wait_that_takes_ticks_lets_the_lead_report_their_signals() {
    const CHUNK: usize = 4096 / 4;
    let fabric = Fabric::new(&["a", "b"]);
    let settings = Settings { queue_pairs: 2, chunk: CHUNK as u64, ..Settings::default() };
    let transports = ranks(&fabric, 2, &settings);
    let ends = [(0, 1), (1, 0)].map(|(at, peer): (usize, u32)| transports[at].open(peer).unwrap());
    let offers = ends.each_ref().map(|end| end.bytes());
    let [a, b] = ends;
    let [theirs, mine] = offers;
    let (a, b) = (a.connect(mine.into()).unwrap(), b.connect(theirs.into()).unwrap());
    let health = Health::new();
    let deadline = Duration::from_secs(20);
    let limits =
        |awaited| WaitLimits { health: &health, oversubscribed: true, awaited, deadline, silent: true };
    for value in 1..=REPORTED {
        a.put(RemoteAddress { region: 0, offset: 1024 }, &[7; 2 * CHUNK], limits(1)).unwrap();
        a.signal(RemoteAddress { region: 0, offset: 0 }, value, None, limits(1)).unwrap();
    }
    // All is here, and none of it was taken. One call takes it: first the signals of the lead, then
    // the ticks that they wait for. Both queue pairs report to the sender.
    b.flush(limits(0)).unwrap();
    assert_eq!((b.counters().received, b.counters().requests), (2 * REPORTED, 2));
}
