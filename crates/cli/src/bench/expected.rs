//! Holds what ranks see against the naive reference of `sidelane-verify`, bit by bit.
//!
//! Outputs of experts are numbers of their own, no function of the rows that came: rows are
//! compared when they land, sums when they return.

use sidelane::ep::{Handle, RowIndex};
use sidelane::topology::NodeMap;
use sidelane_verify::reference::{Real, Reference, Row, Tokens};

use super::config::Config;
use crate::error::CliError;
use crate::routing::Router;
use crate::settings::Settings;

/// Numbers of the reference's tensors: tokens, outputs of experts, gradients of weights.
const TENSORS: [u32; 3] = [0, 1, 2];

/// The calls of a measurement, as all ranks together see them.
pub fn reference<E: Real>(config: &Config, router: &Router) -> Result<Reference<E>, CliError> {
    let tokens = |rank| {
        let routing = router.routing(config.share(), rank)?;
        let (ids, weights) = (routing.experts().to_vec(), routing.weights().to_vec());
        Ok(Tokens { x: Vec::new(), ids, weights })
    };
    let all = (0..config.ranks()).map(tokens).collect::<Result<_, CliError>>()?;
    Ok(Reference::of(&config.settings()?.case, all))
}

/// Expected content of one rank's memory.
pub struct Expected<E> {
    reference: Reference<E>,
    settings: Settings,
    me: usize,
    /// Where each row lies, in visible order.
    landing: Vec<usize>,
    tensors: [u32; 3],
}

impl<E: Real> Expected<E> {
    /// For one rank, from the routing of all.
    pub fn new(config: &Config, router: &Router, rank: u32) -> Result<Self, CliError> {
        let reference = reference(config, router)?;
        let landing = (0..reference.seen.rows[rank as usize].len()).collect();
        let tensors = TENSORS.map(|tensor| (config.seed as u32).wrapping_mul(TENSORS.len() as u32) + tensor);
        Ok(Expected { reference, settings: config.settings()?, me: rank as usize, landing, tensors })
    }

    /// The tokens of this rank.
    pub fn tokens(&self) -> Vec<E> {
        self.reference.sent(self.tensors[0], self.me)
    }

    /// Rows lie as the index says, or in visible order.
    pub fn arrange(&mut self, index: Option<&RowIndex>) {
        if let Some(index) = index {
            self.landing = index.landing().iter().map(|&at| at as usize).collect();
        }
    }

    fn rows(&self) -> &[Option<Row>] {
        &self.reference.seen.rows[self.me]
    }

    /// Rows that should land here, pads counted.
    pub fn len(&self) -> usize {
        self.rows().len()
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
            part(&weights, self.len(), row) == part(seen_weights, self.len(), at)
                && part(&experts, self.len(), row) == part(seen_experts, self.len(), at)
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
    /// and where they lie.
    fn count(
        &self,
        rows: &[u8],
        row_bytes: usize,
        sent: impl Fn(&[E]) -> Vec<u8>,
        also: impl Fn(usize, usize) -> bool,
    ) -> u64 {
        if (rows.len(), self.landing.len()) != (self.len() * row_bytes, self.len()) {
            return 0;
        }
        let right = self.rows().iter().zip(&self.landing).enumerate().filter(|&(row, (origin, &at))| {
            let seen = &rows[at * row_bytes..][..row_bytes];
            let same = match origin {
                Some(Row { source, token, .. }) => {
                    sent(&self.reference.row(self.tensors[0], *source, *token)) == seen
                }
                None => seen.iter().all(|&byte| byte == 0),
            };
            same && also(row, at)
        });
        right.count() as u64
    }

    /// The content of rows as they lie, from that in visible order.
    fn lying<T: Copy>(&self, visible: &[T]) -> Vec<T> {
        let mut lying = visible.to_vec();
        let columns = visible.len() / self.len().max(1);
        for (row, &at) in self.landing.iter().enumerate() {
            lying[at * columns..][..columns].copy_from_slice(part(visible, self.len(), row));
        }
        lying
    }

    /// Outputs of the experts of this rank, NaN for pads: no call may read them.
    pub fn outputs(&self) -> Vec<E> {
        self.lying(&self.reference.outputs(self.me, self.tensors[1]))
    }

    /// Number of tokens whose sum of these outputs is bitwise right.
    pub fn right_tokens(&self, out: &[E]) -> u64 {
        let sums = self.reference.sums(self.me, self.tensors[1], false);
        let bytes = |tokens: &[E]| bytemuck::cast_slice::<E, u8>(tokens).to_vec();
        let tokens = out.chunks_exact(self.reference.case.hidden);
        let sums = sums.chunks_exact(self.reference.case.hidden);
        tokens.zip(sums).filter(|(seen, sum)| bytes(seen) == bytes(sum)).count() as u64
    }

    /// Gradients of the weights of received rows.
    pub fn weight_gradients(&self) -> Vec<f32> {
        self.lying(&self.reference.row_words(self.me, self.tensors[2]))
    }

    /// Whether these returned to the choices, zero where one was dropped.
    pub fn right_weights(&self, returned: &[f32]) -> bool {
        returned == self.reference.returned_words(self.me, self.tensors[2])
    }
}

/// The content of one of so many rows.
fn part<T>(content: &[T], rows: usize, row: usize) -> &[T] {
    let columns = content.len() / rows.max(1);
    &content[row * columns..][..columns]
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::bench::config::tests::resolve;

    #[test]
    fn flipped_bit_is_one_row_and_one_token_less() {
        let config = resolve("--nodes 1 --ranks-per-node 2 --tokens 6 --hidden 16");
        let expected: Expected<bf16> =
            Expected::new(&config, &Router::open(&config.routing).unwrap(), 1).unwrap();
        let rows = expected.reference.rows(1, |rank| expected.reference.sent(expected.tensors[0], rank));
        let sums = expected.reference.sums(1, expected.tensors[1], false);
        let flipped = |content: &[bf16]| {
            let mut content = content.to_vec();
            content[17] = bf16::from_bits(content[17].to_bits() ^ 1);
            content
        };
        assert_eq!(expected.right_gradients(&rows), expected.len() as u64);
        assert_eq!(expected.right_gradients(&flipped(&rows)), expected.len() as u64 - 1);
        assert_eq!((expected.right_tokens(&sums), expected.right_tokens(&flipped(&sums))), (6, 5));
        let mut weights = expected.reference.returned_words(1, expected.tensors[2]);
        assert!(expected.right_weights(&weights));
        weights[3] += 1.0;
        assert!(!expected.right_weights(&weights));
    }
}
