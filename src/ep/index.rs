//! Which row is which, where rows do not lie in visible order.

/// Places of rows that were relayed in
/// [coalesce_relays](super::ExpertParallelBuilder::coalesce_relays), against the *visible* order of
/// rank-major rows: (source rank, token).
///
/// ```text
///   visible order   | source 0: token 0 1 2 | source 1: token 0 2 3 |     row v lies at landing()[v]
///   rows as landed  | source 0: token 0 1 2 | source 1: token 3 0 2 |     row r is visible()[r]
/// ```
///
/// Rows of a source stay together, and pads and unused slots stay in place. Rows of this node lie
/// in visible order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowIndex {
    landing: Vec<u32>,
    visible: Vec<u32>,
}

impl RowIndex {
    /// For each row in visible order, pads counted: where it lies. A gather by this index makes
    /// visible order; a grouped matrix product that takes a row index needs none.
    pub fn landing(&self) -> &[u32] {
        &self.landing
    }

    /// For each row as it lies: which row it is in visible order.
    pub fn visible(&self) -> &[u32] {
        &self.visible
    }

    /// From what rows say of themselves: row + 1 in visible order, 0 for one that stays where it
    /// is.
    pub(super) fn fill(&mut self, said: impl ExactSizeIterator<Item = u32>) {
        for table in [&mut self.landing, &mut self.visible] {
            table.clear();
            table.extend(0..said.len() as u32);
        }
        for (row, said) in (0..).zip(said) {
            if let Some(landing) = self.landing.get_mut((said as usize).wrapping_sub(1)) {
                *landing = row;
                self.visible[row as usize] = said - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_picture_in_the_documentation_is_right() {
        let mut index = RowIndex::default();
        index.fill([1, 2, 3, 6, 4, 5].into_iter());
        assert_eq!((index.landing(), index.visible()), (&[0, 1, 2, 4, 5, 3][..], &[0, 1, 2, 5, 3, 4][..]));
    }

    #[test]
    fn what_says_nothing_or_nonsense_stays_where_it_is() {
        let mut index = RowIndex::default();
        index.fill([0, 3, 2, u32::MAX].into_iter());
        assert_eq!((index.landing(), index.visible()), (&[0, 2, 1, 3][..], &[0, 2, 1, 3][..]));
        index.fill(std::iter::empty());
        assert!(index.landing().is_empty() && index.visible().is_empty());
    }
}
