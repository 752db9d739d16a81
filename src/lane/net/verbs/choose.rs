//! Choice of NICs for a rank: a pure function, so tests can run it for machines that do not exist.
//!
//! ```text
//!   named          all of them, in the order given: one rail each
//!   else           the nearest NICs by NUMA distance; among equally near ones, the nth rank takes the nth, in turn
//!
//!   node 0: NICs a b, ranks 0 1 2       0 -> a, 1 -> b, 2 -> a       several ranks on a NIC
//!   node 1: NICs c d, ranks 3 4         3 -> d, 4 -> c
//! ```

use crate::error::VerbsError;

/// A usable NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its name.
    pub name: String,
    /// Its NUMA distance from this process; none where either place is unknown: farther than any
    /// that is known.
    pub distance: Option<u32>,
}

/// Indices in `cards` of the NICs that a rank uses, one per rail. `nth` is its rank on its node:
/// ranks that are bound to NUMA nodes in blocks of equal size, or not at all, then spread evenly.
///
/// # Errors
/// [`VerbsError::NoCard`], [`VerbsError::NoSuchCard`].
pub fn choose(cards: &[Candidate], nth: u32, named: &[String]) -> Result<Vec<usize>, VerbsError> {
    if !named.is_empty() {
        let place = |name: &String| {
            cards.iter().position(|card| card.name == *name).ok_or_else(|| VerbsError::NoSuchCard {
                card: name.clone(),
                present: cards.iter().map(|card| card.name.clone()).collect(),
            })
        };
        return named.iter().map(place).collect();
    }
    let farness = |card: &Candidate| card.distance.unwrap_or(u32::MAX);
    let least = cards.iter().map(farness).min().ok_or(VerbsError::NoCard)?;
    let near: Vec<usize> = (0..cards.len()).filter(|&at| farness(&cards[at]) == least).collect();
    Ok(vec![near[nth as usize % near.len()]])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn machine() -> impl Strategy<Value = Vec<Candidate>> {
        let distances = prop::collection::vec(prop::option::of(10..13u32), 1..10);
        distances.prop_map(|distances| {
            let card = |(at, distance)| Candidate { name: format!("card{at}"), distance };
            distances.into_iter().enumerate().map(card).collect()
        })
    }

    proptest! {
        #[test]
        fn a_rank_takes_one_card_and_none_is_nearer(cards in machine(), nth in any::<u32>()) {
            let chosen = choose(&cards, nth, &[]).unwrap();
            prop_assert_eq!(chosen.len(), 1);
            let distance = |card: &Candidate| card.distance.unwrap_or(u32::MAX);
            prop_assert!(cards.iter().all(|card| distance(card) >= distance(&cards[chosen[0]])));
        }

        #[test]
        fn ranks_spread_evenly_over_the_nearest_cards(cards in machine(), ranks in 1..40u32) {
            let mut load = vec![0u32; cards.len()];
            for nth in 0..ranks {
                load[choose(&cards, nth, &[]).unwrap()[0]] += 1;
            }
            let least = cards.iter().map(|card| card.distance.unwrap_or(u32::MAX)).min();
            let near = |at: &usize| Some(cards[*at].distance.unwrap_or(u32::MAX)) == least;
            let loads: Vec<u32> = (0..cards.len()).filter(near).map(|at| load[at]).collect();
            prop_assert_eq!(loads.iter().sum::<u32>(), ranks);
            prop_assert!(loads.iter().max().unwrap() - loads.iter().min().unwrap() <= 1);
        }

        #[test]
        fn named_cards_are_the_rails_in_their_order(cards in machine(), nth in any::<u32>(), order in any::<prop::sample::Index>()) {
            let mut named: Vec<String> = cards.iter().map(|card| card.name.clone()).collect();
            let turn = order.index(named.len());
            named.rotate_left(turn);
            let chosen = choose(&cards, nth, &named).unwrap();
            let names: Vec<String> = chosen.iter().map(|&at| cards[at].name.clone()).collect();
            prop_assert_eq!(names, named);
        }
    }

    #[test]
    fn a_name_that_is_not_there_and_a_machine_without_cards_are_errors() {
        let cards = [Candidate { name: "mlx5_0".into(), distance: None }];
        let missing = VerbsError::NoSuchCard { card: "mlx5_7".into(), present: vec!["mlx5_0".into()] };
        assert_eq!(choose(&cards, 0, &["mlx5_0".into(), "mlx5_7".into()]), Err(missing));
        assert_eq!(choose(&[], 0, &[]), Err(VerbsError::NoCard));
    }
}
