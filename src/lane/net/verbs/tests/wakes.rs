//! Wake-ups of the thread that serves the connections of a NIC. The test takes the thread's steps,
//! and counts events.

use std::fmt;

use super::*;
use crate::bootstrap::Health;
use crate::error::Error;
use crate::lane::RowSource;
use crate::lane::flag::WaitLimits;
use crate::lane::net::progress_thread::Shared;
use crate::lane::net::{NetConnection, RemoteAddress, SendBlocked};
use crate::schedule::Tag;

const WORD: RemoteAddress = RemoteAddress { region: 0, offset: 0 };

fn limits(health: &Health) -> WaitLimits<'_> {
    WaitLimits { health, oversubscribed: true, awaited: 0, deadline: Duration::from_secs(20), silent: true }
}

/// A connection of rank 0 to a peer, and the peer's end.
fn joined(transports: &[VerbsTransport; 2], peer: u32) -> Result<[Arc<dyn NetConnection>; 2], Error> {
    let [mine, theirs] = [transports[0].open(peer)?, transports[1].open(0)?];
    let offers = [mine.bytes(), theirs.bytes()];
    let [to_them, to_me] = offers;
    Ok([mine.connect(to_me.into())?, theirs.connect(to_them.into())?])
}

/// What happens behind the arming of one connection, and before that of the next.
struct Between<F>(F);

impl<F> fmt::Debug for Between<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Between")
    }
}

impl<F: Fn() + Send + Sync> NetConnection for Between<F> {
    fn lane(&self) -> &'static str {
        "none"
    }

    fn peer(&self) -> u32 {
        u32::MAX
    }

    fn put(&self, _: RemoteAddress, _: &[u8], _: WaitLimits<'_>) -> Result<(), SendBlocked> {
        Ok(())
    }

    fn put_rows(
        &self,
        _: RemoteAddress,
        _: &[u32],
        _: RowSource<'_>,
        _: WaitLimits<'_>,
    ) -> Result<(), SendBlocked> {
        Ok(())
    }

    fn zero(&self, _: RemoteAddress, _: u64, _: WaitLimits<'_>) -> Result<(), SendBlocked> {
        Ok(())
    }

    fn signal(&self, _: RemoteAddress, _: u64, _: Option<Tag>, _: WaitLimits<'_>) -> Result<(), SendBlocked> {
        Ok(())
    }

    fn flush(&self, _: WaitLimits<'_>) -> Result<(), SendBlocked> {
        Ok(())
    }

    fn progress(&self, _: &Health) -> bool {
        false
    }

    fn arm(&self, _: &Health) -> bool {
        (self.0)();
        false
    }
}

#[test]
fn signal_amid_the_arming_of_peers_wakes_the_thread() {
    let fabric = Fabric::new(&["a", "b"]);
    let settings = Settings { signal: Some(SignalMode::Immediate), ..Settings::default() };
    let transports = ranks(&fabric, 4, &settings);
    let [first, sender] = joined(&transports, 1).unwrap();
    let others = [2, 3].map(|peer| joined(&transports, peer).unwrap());
    let (health, next) = (Arc::<Health>::default(), Arc::new(AtomicU64::new(0)));
    let thread = Shared::new(Arc::clone(&health), true).unwrap();
    let signal = {
        let next = Arc::clone(&next);
        move || match next.swap(0, Ordering::Relaxed) {
            0 => {}
            value => sender.signal(WORD, value, None, limits(&health)).unwrap(),
        }
    };
    thread.attach(Arc::clone(&first)).unwrap();
    thread.attach(Arc::new(Between(signal))).unwrap();
    for [connection, _] in &others {
        thread.attach(Arc::clone(connection)).unwrap();
    }
    // The wake-up for new connections.
    assert!(thread.sleep(Duration::ZERO) && !thread.sleep(Duration::ZERO));
    for value in 1..=3 {
        next.store(value, Ordering::Relaxed);
        let news = thread.arm();
        assert_eq!(first.counters().received, value - 1, "it came after the look at its connection");
        assert!(news || thread.sleep(Duration::ZERO), "signal {value} wakes no thread");
        assert!(thread.arm());
        assert_eq!(first.counters().received, value);
        assert!(!thread.arm() && !thread.sleep(Duration::ZERO), "one event is one wake-up");
    }
}
