//! What one rank of a measurement must see, bit by bit.
//!
//! Outputs of experts are numbers of their own, no function of the rows that came: rows are
//! compared when they land, sums when they return.

use sidelane::ep::{Handle, RowIndex};
use sidelane::topology::NodeMap;
use sidelane_verify::reference::{Real, Reference, Row};

use crate::ep_settings::Settings;

/// Places of a rank's rows: as an index says, or in visible order.
#[derive(Clone, Debug, Default)]
pub struct Landing(Option<Vec<usize>>);

impl Landing {
    /// Places by this index, if there is one.
    pub fn of(index: Option<&RowIndex>) -> Self {
        Landing(index.map(|index| index.landing().iter().map(|&at| at as usize).collect()))
    }

    /// Place of a row.
    fn at(&self, row: usize) -> usize {
        self.0.as_ref().map_or(row, |landing| landing[row])
    }

    /// Rows of `columns` elements as they lie, from those in visible order.
    pub fn lying<T: Copy>(&self, visible: &[T], columns: usize) -> Vec<T> {
        let mut lying = visible.to_vec();
        for (row, &at) in self.0.iter().flatten().enumerate() {
            lying[at * columns..][..columns].copy_from_slice(&visible[row * columns..][..columns]);
        }
        lying
    }

    /// The same rows in visible order, from those that lie here. Rows that are missing stay so.
    pub fn visible<T: Copy>(&self, lying: &[T], columns: usize) -> Vec<T> {
        let Some(landing) = &self.0 else { return lying.to_vec() };
        let row = |&at: &usize| lying.get(at * columns..(at + 1) * columns).unwrap_or_default();
        landing.iter().flat_map(row).copied().collect()
    }
}

/// Numbers of the reference's tensors: tokens, outputs of experts, gradients of weights.
const TENSORS: [u32; 3] = [0, 1, 2];

/// Expected content of one rank's memory.
pub struct Expected<E> {
    reference: Reference<E>,
    settings: Settings,
    me: usize,
    landing: Landing,
    tensors: [u32; 3],
}

impl<E: Real> Expected<E> {
    /// For one rank, from the routing of all; `seed` draws tokens and outputs.
    pub fn new(reference: Reference<E>, settings: Settings, rank: u32, seed: u64) -> Self {
        let tensors = TENSORS.map(|tensor| (seed as u32).wrapping_mul(TENSORS.len() as u32) + tensor);
        Expected { reference, settings, me: rank as usize, landing: Landing::default(), tensors }
    }

    /// The tokens of this rank.
    pub fn tokens(&self) -> Vec<E> {
        self.reference.sent(self.tensors[0], self.me)
    }

    /// Rows lie as this index says, if there is one.
    pub fn arrange(&mut self, index: Option<&RowIndex>) {
        self.landing = Landing::of(index);
    }

    fn rows(&self) -> &[Option<Row>] {
        &self.reference.seen.rows[self.me]
    }

    /// Rows that should land here, pads counted.
    pub fn row_count(&self) -> u64 {
        self.rows().len() as u64
    }

    /// Choices of this rank whose expert is on another node, and which have room.
    pub fn crossing_choices(&self) -> u64 {
        let Reference { case, ids, seen, .. } = &self.reference;
        let (nodes, me) = (NodeMap::from_labels(&case.nodes), self.me as u32);
        let kept = ids[self.me].iter().zip(&seen.dropped[self.me]).filter(|&(&id, &lost)| id >= 0 && !lost);
        let slots = kept.filter_map(|(&id, _)| case.map.slot_for(me, id as u32));
        slots.filter(|&slot| !nodes.same_node(me, case.map.rank_of(slot))).count() as u64
    }

    /// Whether a handle says which choices have no room, and how many rows each rank needs.
    pub fn right_handle(&self, handle: &Handle) -> bool {
        let seen = &self.reference.seen;
        handle.dropped() == seen.dropped[self.me] && handle.required_rows() == seen.required
    }

    /// Number of dispatched rows that are bitwise right, with their metadata.
    pub fn right_rows(&self, rows: &[u8], handle: &Handle) -> u64 {
        let (weights, experts) = self.reference.metadata(self.me);
        let (seen_weights, seen_experts) = (handle.row_weights(), handle.row_experts());
        if (seen_weights.len(), seen_experts.len()) != (weights.len(), experts.len()) {
            return 0;
        }
        let right_metadata = |row: usize, at: usize| {
            self.of_row(&weights, row) == self.of_row(seen_weights, at)
                && self.of_row(&experts, row) == self.of_row(seen_experts, at)
        };
        let sent = |row: &[E]| self.settings.sent(row).unwrap_or_default();
        self.count(rows, self.settings.sent_shape().1, sent, right_metadata)
    }

    /// Number of gradients of rows that are bitwise right: those of the tokens are the tokens.
    pub fn right_gradients(&self, rows: &[E]) -> u64 {
        let row_bytes = self.reference.case.hidden * size_of::<E>();
        let bytes = |row: &[E]| bytemuck::cast_slice(row).to_vec();
        self.count(bytemuck::cast_slice(rows), row_bytes, bytes, |_, _| true)
    }

    /// Rows that are what `sent` makes of their tokens, or zero; and `also` right, in visible order
    /// and where they lie. One row after another: all rows of a large job would not fit twice.
    fn count(
        &self,
        rows: &[u8],
        row_bytes: usize,
        sent: impl Fn(&[E]) -> Vec<u8>,
        also: impl Fn(usize, usize) -> bool,
    ) -> u64 {
        let indexed = self.landing.0.as_ref().is_none_or(|landing| landing.len() == self.rows().len());
        if rows.len() != self.rows().len() * row_bytes || !indexed {
            return 0;
        }
        let right = self.rows().iter().enumerate().filter(|(row, origin)| {
            let at = self.landing.at(*row);
            let seen = &rows[at * row_bytes..][..row_bytes];
            let same = match origin {
                Some(Row { source, token, .. }) => {
                    sent(&self.reference.row(self.tensors[0], *source, *token)) == seen
                }
                None => seen.iter().all(|&byte| byte == 0),
            };
            same && also(*row, at)
        });
        right.count() as u64
    }

    /// Words of one row.
    fn of_row<'c, T>(&self, content: &'c [T], row: usize) -> &'c [T] {
        let columns = content.len() / self.rows().len().max(1);
        &content[row * columns..][..columns]
    }

    /// Outputs of the experts of this rank, NaN for pads: no call may read them.
    pub fn outputs(&self) -> Vec<E> {
        self.landing.lying(&self.reference.outputs(self.me, self.tensors[1]), self.reference.case.hidden)
    }

    /// Number of tokens whose sum of these outputs is bitwise right.
    pub fn right_tokens(&self, out: &[E]) -> u64 {
        let sums = self.reference.sums(self.me, self.tensors[1], false);
        let token = self.reference.case.hidden * size_of::<E>();
        let [seen, sums] =
            [out, &sums[..]].map(|rows| bytemuck::cast_slice::<E, u8>(rows).chunks_exact(token));
        seen.zip(sums).filter(|(seen, sum)| seen == sum).count() as u64
    }

    /// Gradients of the weights of received rows.
    pub fn weight_gradients(&self) -> Vec<f32> {
        self.landing.lying(&self.reference.row_words(self.me, self.tensors[2]), self.reference.words())
    }

    /// Whether these returned to the choices, zero where one was dropped.
    pub fn right_weights(&self, returned: &[f32]) -> bool {
        returned == self.reference.returned_words(self.me, self.tensors[2])
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use sidelane::Dtype;
    use sidelane::ep::Graphs;
    use sidelane_verify::reference::Case;

    use super::*;
    use crate::ep_settings::OfDevice;

    #[test]
    fn flipped_bit_is_one_row_and_one_token_less() {
        let case = Case { hidden: 16, ..Case::new(&[0, 0], &[6, 6], 64, 8) };
        let settings = Settings {
            case: case.clone(),
            dtype: Dtype::Bf16,
            max_tokens: 6,
            fp8: false,
            graphs: Graphs::Off,
            device: OfDevice::default(),
        };
        let expected = Expected::<bf16>::new(Reference::seeded(&case, 1), settings, 1, 0);
        let rows = expected.reference.rows(1, |rank| expected.reference.sent(expected.tensors[0], rank));
        let sums = expected.reference.sums(1, expected.tensors[1], false);
        let flipped = |content: &[bf16]| {
            let mut content = content.to_vec();
            content[17] = bf16::from_bits(content[17].to_bits() ^ 1);
            content
        };
        assert_eq!(expected.right_gradients(&rows), expected.row_count());
        assert_eq!(expected.right_gradients(&flipped(&rows)), expected.row_count() - 1);
        assert_eq!((expected.right_tokens(&sums), expected.right_tokens(&flipped(&sums))), (6, 5));
        let mut weights = expected.reference.returned_words(1, expected.tensors[2]);
        assert!(expected.right_weights(&weights));
        weights[3] += 1.0;
        assert!(!expected.right_weights(&weights));
    }

    #[test]
    fn rows_lie_where_their_index_says_and_come_back() {
        let landing = Landing(Some(vec![2, 0, 1]));
        let lying = landing.lying(&[1, 2, 3, 4, 5, 6], 2);
        assert_eq!(lying, [3, 4, 5, 6, 1, 2]);
        assert_eq!(landing.visible(&lying, 2), [1, 2, 3, 4, 5, 6]);
        assert_eq!(landing.visible(&lying[..4], 2), [3, 4, 5, 6], "the first row is missing");
    }
}
