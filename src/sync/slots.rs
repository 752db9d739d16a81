//! Slots that threads take and give back, in the order in which they asked.
//!
//! ```text
//!   taker     draw a ticket ──► its turn? ──► take a bit that is set ──► uses the slot
//!   holder    has used the slot ──► set its bit ──► count it as given back
//! ```
//!
//! A taker that holds slots already may draw a ticket only while enough slots are left to others.
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

    /// A free slot, if it is the turn of the ticket. What its last holder did with it is over. A
    /// taker without a ticket draws one, if it spares none or more than `spared` slots are left.
    pub fn take(&self, ticket: &mut Ticket, spared: u64) -> Option<u64> {
        let mine = match ticket.0 {
            Some(mine) => mine,
            None => *ticket.0.insert(self.draw(spared)?),
        };
        // Relaxed, as all counts: they order takers, not what slots hold.
        if mine >= self.count + self.over.load(Ordering::Relaxed) {
            return None;
        }
        for (nth, word) in (0..).zip(&self.free) {
            // Relaxed: the exchange looks again.
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

    fn draw(&self, spared: u64) -> Option<u64> {
        // Relaxed, as all counts.
        if spared == 0 {
            return Some(self.drawn.fetch_add(1, Ordering::Relaxed));
        }
        let mut drawn = self.drawn.load(Ordering::Relaxed);
        // Relaxed: an older count of those that are over leaves more to others.
        while (self.count + self.over.load(Ordering::Relaxed)).saturating_sub(drawn) > spared {
            match self.drawn.compare_exchange(drawn, drawn + 1, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(drawn),
                Err(now) => drawn = now,
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
        // Relaxed, as all counts.
        if ticket.0.take().is_some() {
            self.over.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether more takers wait than slots are free. A hint: takers ask again and again.
    pub fn is_short(&self) -> bool {
        // Relaxed, as all counts.
        self.drawn.load(Ordering::Relaxed) > self.count + self.over.load(Ordering::Relaxed)
    }
}
