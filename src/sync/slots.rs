//! Slots that threads take and give back, in the order in which they asked.
//!
//! ```text
//!   taker     draw a ticket ──► its turn? ──► take a bit that is set ──► uses the slot
//!   holder    has used the slot ──► set its bit ──► count it as given back
//! ```
//!
//! It is the turn of a ticket when as many slots were given back as there are tickets before it
//! that found none. The turns are for fairness alone. A bit decides who has a slot, and a taker
//! that finds none asks again.

use super::primitives::{AtomicU64, Ordering};

/// The slots, by number.
#[derive(Debug)]
pub struct Slots {
    count: u64,
    /// A bit for each slot that is free.
    free: Vec<AtomicU64>,
    /// Tickets that were drawn, and those that are over: their slot was given back, or they were
    /// given up.
    drawn: AtomicU64,
    over: AtomicU64,
}

/// A taker's place among those that ask, from its first attempt to the one that succeeds.
#[derive(Debug, Default)]
pub struct Ticket(Option<u64>);

impl Ticket {
    /// Whether its taker has asked and got no slot yet.
    pub fn waits(&self) -> bool {
        self.0.is_some()
    }
}

impl Slots {
    /// So many, all free.
    pub fn new(count: u64) -> Self {
        let word = |nth: u64| match count - nth * 64 {
            left @ ..64 => (1 << left) - 1,
            _ => u64::MAX,
        };
        let free = (0..count.div_ceil(64)).map(|nth| AtomicU64::new(word(nth))).collect();
        Slots { count, free, drawn: AtomicU64::new(0), over: AtomicU64::new(0) }
    }

    /// A free slot, if it is the turn of the ticket. What its last holder did with it is over.
    pub fn take(&self, ticket: &mut Ticket) -> Option<u64> {
        // Relaxed, as all counts: they order takers, not what slots hold.
        let mine = *ticket.0.get_or_insert_with(|| self.drawn.fetch_add(1, Ordering::Relaxed));
        if mine >= self.count + self.over.load(Ordering::Relaxed) {
            return None;
        }
        for (nth, word) in (0..).zip(&self.free) {
            let mut bits = word.load(Ordering::Relaxed);
            while bits != 0 {
                let bit = bits.trailing_zeros();
                let rest = bits & !(1 << bit);
                // Acquires what the last holder released.
                match word.compare_exchange(bits, rest, Ordering::Acquire, Ordering::Relaxed) {
                    Ok(_) => {
                        ticket.0 = None;
                        return Some(nth * 64 + u64::from(bit));
                    }
                    Err(now) => bits = now,
                }
            }
        }
        None
    }

    /// Its holder has used it.
    pub fn give_back(&self, slot: u64) {
        // Releases what the holder did with it.
        self.free[slot as usize / 64].fetch_or(1 << (slot % 64), Ordering::Release);
        self.over.fetch_add(1, Ordering::Relaxed);
    }

    /// A taker asks no more: its turn is that of the next one.
    pub fn give_up(&self, ticket: &mut Ticket) {
        if ticket.0.take().is_some() {
            self.over.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether more takers wait than slots are free. A hint: takers ask again and again.
    pub fn is_short(&self) -> bool {
        self.drawn.load(Ordering::Relaxed) > self.count + self.over.load(Ordering::Relaxed)
    }
}
