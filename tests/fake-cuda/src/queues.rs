//! The queues of a device, and which of them a stream has.
//!
//! ```text
//!                           copies of a stream                  everything else of it
//!   usual                   its one queue                       its one queue
//!   SIDELANE_FAKE_CUDA_COPY_QUEUES      one queue for each direction        its one queue
//!   SIDELANE_FAKE_CUDA_PRIORITY_QUEUES                                      of those of its priority
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::driver::Sticky;
use crate::memory::{MAP, device_of};
use crate::queue::Queue;
use crate::settings::Settings;
use crate::work::{Copy, Source};

/// Where the bytes of a copy come from and go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    ToDevice,
    ToHost,
    Between,
}

pub const DIRECTIONS: [Direction; 3] = [Direction::ToDevice, Direction::ToHost, Direction::Between];

impl Direction {
    /// That of a copy, as its addresses are now.
    pub fn of(copy: &Copy) -> Direction {
        let map = MAP.read().unwrap();
        let from = match copy.from {
            Source::At(from) => device_of(&map, from),
            Source::Kept(_) => None,
        };
        match (from, device_of(&map, copy.to)) {
            (Some(_), Some(_)) => Direction::Between,
            (Some(_), None) => Direction::ToHost,
            (None, _) => Direction::ToDevice,
        }
    }
}

/// The queues of a stream.
#[derive(Clone)]
pub struct Own {
    pub main: Arc<Queue>,
    /// One for each direction, where copies have queues of their own.
    pub copies: Option<[Arc<Queue>; 3]>,
}

impl Own {
    /// The queue for copies of a direction.
    pub fn of(&self, direction: Direction) -> &Arc<Queue> {
        self.copies.as_ref().map_or(&self.main, |copies| &copies[direction as usize])
    }
}

/// All queues of a device's context.
pub struct Queues {
    seed: u64,
    device: usize,
    error: Arc<Sticky>,
    connections: usize,
    copy_connections: usize,
    by_priority: bool,
    room: usize,
    made: Mutex<Made>,
}

#[derive(Default)]
struct Made {
    /// By priority; all streams have those of 0, unless priorities have queues of their own.
    main: BTreeMap<i32, Ring>,
    copies: [Ring; 3],
    /// How many there are: each has chance of its own.
    count: usize,
}

/// Queues that streams take in turn.
#[derive(Default)]
struct Ring {
    queues: Vec<Arc<Queue>>,
    next: usize,
}

impl Queues {
    pub fn new(settings: &Settings, device: usize, error: &Arc<Sticky>) -> Queues {
        Queues {
            seed: settings.seed,
            device,
            error: Arc::clone(error),
            connections: settings.queues,
            copy_connections: settings.copy_queues,
            by_priority: settings.priority_queues,
            room: settings.launch_queue,
            made: Mutex::default(),
        }
    }

    /// The queues of the null stream: the first of the turn, which it does not take.
    pub fn first(&self) -> Own {
        let own = self.next(0);
        let mut made = self.made.lock().unwrap();
        let Made { main, copies, .. } = &mut *made;
        main.values_mut().chain(copies).for_each(|ring| ring.next = 0);
        own
    }

    /// The queues of the next stream. Streams take them in turn.
    pub fn next(&self, priority: i32) -> Own {
        let mut made = self.made.lock().unwrap();
        let priority = if self.by_priority { priority } else { 0 };
        let Made { main, copies, count } = &mut *made;
        let main = self.turn(main.entry(priority).or_default(), self.connections, count);
        let copies = (self.copy_connections > 0).then(|| {
            DIRECTIONS
                .map(|direction| self.turn(&mut copies[direction as usize], self.copy_connections, count))
        });
        Own { main, copies }
    }

    fn turn(&self, ring: &mut Ring, size: usize, count: &mut usize) -> Arc<Queue> {
        if ring.queues.len() < size {
            ring.queues.push(Queue::new(
                (self.seed, self.device, *count),
                self.room,
                Arc::clone(&self.error),
            ));
            *count += 1;
        }
        let queue = Arc::clone(&ring.queues[ring.next % size]);
        ring.next += 1;
        queue
    }

    /// Ends all of them once all is taken.
    pub fn close(&self) {
        let made = self.made.lock().unwrap();
        let rings = made.main.values().chain(&made.copies);
        rings.flat_map(|ring| &ring.queues).for_each(|queue| queue.close());
    }
}
