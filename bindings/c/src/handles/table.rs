//! From tickets to objects.
//!
//! ```text
//!   ticket   | kind: 8 bits | generation: 32 | place: 24 |        never 0, no address
//!                                 |               |
//!   table                         |   place  ---> | generation | object |
//!                                 +-- equal? ----------^
//! ```
//!
//! A place that is used again has the next generation, so an old ticket does not meet a new object.

use std::any::Any;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::{Kind, Object};
use crate::fault::HandleError;

const PLACE_BITS: u32 = 24;
const PLACES: usize = 1 << PLACE_BITS;

type Held = Arc<dyn Any + Send + Sync>;

#[derive(Default)]
struct Place {
    generation: u32,
    held: Option<Held>,
}

#[derive(Default)]
struct Places {
    all: Vec<Place>,
    free: Vec<u32>,
}

/// The objects that C has handles of.
pub struct Table {
    places: RwLock<Places>,
}

impl Table {
    pub const fn new() -> Table {
        Table { places: RwLock::new(Places { all: Vec::new(), free: Vec::new() }) }
    }

    /// Gives a ticket for an object.
    ///
    /// # Errors
    /// [`HandleError::TooMany`].
    pub fn insert<T: Object>(&self, object: Arc<T>) -> Result<u64, HandleError> {
        let mut places = self.write();
        let place = match places.free.pop() {
            Some(place) => place as usize,
            None if places.all.len() == PLACES => return Err(HandleError::TooMany { open: PLACES }),
            None => {
                places.all.push(Place::default());
                places.all.len() - 1
            }
        };
        let Place { generation, held } = &mut places.all[place];
        *held = Some(object);
        Ok(u64::from(T::KIND as u8) << 56 | u64::from(*generation) << PLACE_BITS | place as u64)
    }

    /// The object of a ticket.
    ///
    /// # Errors
    /// [`HandleError`], but no [`HandleError::TooMany`].
    pub fn get<T: Object>(&self, ticket: u64) -> Result<Arc<T>, HandleError> {
        let (place, generation) = Self::read_ticket(ticket, T::KIND)?;
        let places = self.read();
        let found = places.all.get(place).ok_or(HandleError::Foreign { seen: ticket, expected: T::KIND })?;
        Self::object(found, generation, ticket)
    }

    /// All objects of a type that tickets were given for.
    pub fn all<T: Object>(&self) -> Vec<Arc<T>> {
        let held = |place: &Place| place.held.clone()?.downcast().ok();
        self.read().all.iter().filter_map(held).collect()
    }

    /// Takes a ticket back, and gives the object.
    ///
    /// # Errors
    /// As [`Table::get`].
    pub fn remove<T: Object>(&self, ticket: u64) -> Result<Arc<T>, HandleError> {
        let (place, generation) = Self::read_ticket(ticket, T::KIND)?;
        let mut places = self.write();
        let Places { all, free } = &mut *places;
        let found = all.get_mut(place).ok_or(HandleError::Foreign { seen: ticket, expected: T::KIND })?;
        let object = Self::object(found, generation, ticket)?;
        *found = Place { generation: generation.wrapping_add(1), held: None };
        free.push(place as u32);
        Ok(object)
    }

    fn read_ticket(ticket: u64, expected: Kind) -> Result<(usize, u32), HandleError> {
        if ticket == 0 {
            return Err(HandleError::Null { expected });
        }
        let kind = Kind::from_code((ticket >> 56) as u8);
        let seen = kind.ok_or(HandleError::Foreign { seen: ticket, expected })?;
        if seen != expected {
            return Err(HandleError::WrongKind { seen, expected });
        }
        Ok((ticket as usize & (PLACES - 1), (ticket >> PLACE_BITS) as u32))
    }

    fn object<T: Object>(place: &Place, generation: u32, ticket: u64) -> Result<Arc<T>, HandleError> {
        let expected = T::KIND;
        // The distance counts in a circle: generations ahead were not given yet.
        match place.generation.wrapping_sub(generation) {
            0 => {}
            1..0x8000_0000 => return Err(HandleError::Closed { kind: expected }),
            _ => return Err(HandleError::Foreign { seen: ticket, expected }),
        }
        let held = place.held.clone().ok_or(HandleError::Closed { kind: expected })?;
        held.downcast().map_err(|_| HandleError::Foreign { seen: ticket, expected })
    }

    fn read(&self) -> RwLockReadGuard<'_, Places> {
        self.places.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Places> {
        self.places.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Apple(u32);
    struct Pear;

    impl Object for Apple {
        const KIND: Kind = Kind::World;
    }
    impl Object for Pear {
        const KIND: Kind = Kind::Gate;
    }

    #[test]
    fn a_closed_ticket_does_not_meet_the_next_object_in_its_place() {
        let table = Table::new();
        let first = table.insert(Arc::new(Apple(1))).unwrap();
        assert_eq!(table.get::<Apple>(first).unwrap().0, 1);
        assert_eq!(table.remove::<Apple>(first).unwrap().0, 1);
        let second = table.insert(Arc::new(Apple(2))).unwrap();
        assert_eq!(first & 0xff_ffff, second & 0xff_ffff, "the place is used again");
        assert_eq!(table.get::<Apple>(first).err(), Some(HandleError::Closed { kind: Kind::World }));
        assert_eq!(table.remove::<Apple>(first).err(), Some(HandleError::Closed { kind: Kind::World }));
        assert_eq!(table.get::<Apple>(second).unwrap().0, 2);
        table.insert(Arc::new(Pear)).unwrap();
        assert_eq!(table.all::<Apple>().iter().map(|apple| apple.0).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn null_another_kind_and_made_up_tickets_are_told_apart() {
        let table = Table::new();
        let (apple, pear) =
            (table.insert(Arc::new(Apple(1))).unwrap(), table.insert(Arc::new(Pear)).unwrap());
        let expected = Kind::World;
        let seen = |ticket| table.get::<Apple>(ticket).err();
        assert_eq!(seen(0), Some(HandleError::Null { expected }));
        assert_eq!(seen(pear), Some(HandleError::WrongKind { seen: Kind::Gate, expected }));
        for made_up in [1, 0x7ffd_1234_5678, u64::MAX, apple + 7, apple + (1 << PLACE_BITS)] {
            assert_eq!(seen(made_up), Some(HandleError::Foreign { seen: made_up, expected }), "{made_up:#x}");
        }
    }

    #[test]
    fn object_in_use_outlives_removal_of_its_ticket() {
        let table = Table::new();
        let ticket = table.insert(Arc::new(Apple(3))).unwrap();
        let used = table.get::<Apple>(ticket).unwrap();
        drop(table.remove::<Apple>(ticket).unwrap());
        assert_eq!((used.0, Arc::strong_count(&used)), (3, 1));
    }
}
