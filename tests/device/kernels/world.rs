//! What a rank packs, by the definition: a slot for each rank, and the places in them.

use bytemuck::{bytes_of, cast_slice};
use sidelane::device::Pack;
use sidelane::plan::{ExpertMap, SlotHead, SlotShape};
use sidelane_verify::random::Random;

/// The input of one rank.
pub struct Input {
    pub shape: SlotShape,
    pub map: ExpertMap,
    /// This rank.
    pub source: u32,
    pub tokens: u32,
    pub x: Vec<u8>,
    pub experts: Vec<i32>,
    pub weights: Vec<f32>,
    /// An expert that the table has at another rank than the map.
    pub misplaced: Option<(usize, i32)>,
}

impl Input {
    /// Any bits as rows and weights; about one choice in four is dropped.
    pub fn any(
        random: &mut Random,
        shape: SlotShape,
        (experts, ranks): (u32, u32),
        source: u32,
        tokens: u32,
    ) -> Self {
        let map = ExpertMap::contiguous(experts, ranks).unwrap();
        let choices = (tokens * shape.top_k()) as usize;
        let mut bytes = |len: usize| -> Vec<u8> { (0..len).map(|_| random.next() as u8).collect() };
        let x = bytes(tokens as usize * shape.row_bytes() as usize);
        let weights = bytes(choices * 4).chunks_exact(4).map(|w| f32::from_bits(word(w))).collect();
        let any_expert =
            |_| if random.next() & 3 == 0 { -1 } else { (random.next() % u64::from(experts)) as i32 };
        let experts = (0..choices).map(any_expert).collect();
        Input { shape, map, source, tokens, x, experts, weights, misplaced: None }
    }

    /// The rank of each expert, and its number there.
    pub fn tables(&self) -> (Vec<i32>, Vec<i32>) {
        let slot = |expert| self.map.slot_for(self.source, expert).unwrap();
        let rank = |expert| self.map.rank_of(slot(expert));
        let local = |expert| slot(expert) - self.map.slots_of(rank(expert)).start;
        let experts = 0..self.map.experts();
        let mut ranks: Vec<i32> = experts.clone().map(|e| rank(e) as i32).collect();
        if let Some((expert, rank)) = self.misplaced {
            ranks[expert] = rank;
        }
        (ranks, experts.map(|e| local(e) as i32).collect())
    }

    /// The token's choices with those at other ranks as -1, by local numbers.
    fn choices_at(&self, token: u32, rank: u32) -> Vec<i32> {
        let (rank_of, local_of) = self.tables();
        let top_k = self.shape.top_k() as usize;
        let at = |&expert: &i32| {
            // Whatever is no expert counts as dropped.
            let expert = usize::try_from(expert).ok().filter(|&expert| expert < rank_of.len());
            expert.filter(|&expert| rank_of[expert] == rank as i32).map_or(-1, |expert| local_of[expert])
        };
        self.experts[token as usize * top_k..][..top_k].iter().map(at).collect()
    }

    /// The tokens that have a row in the slot for `rank`, in order.
    pub fn tokens_at(&self, rank: u32) -> Vec<u32> {
        let has_row = |&token: &u32| self.choices_at(token, rank).iter().any(|&local| local >= 0);
        (0..self.tokens).filter(has_row).collect()
    }

    /// `[tokens, top_k]`: 1 for a choice whose expert is masked.
    pub fn masked(&self) -> Vec<u8> {
        let masked = |expert: &i32| self.misplaced == Some((*expert as usize, Pack::MASKED));
        self.experts.iter().map(|expert| u8::from(masked(expert))).collect()
    }

    /// `[tokens, ranks]`
    pub fn places(&self) -> Vec<i32> {
        let ranks = self.map.ranks();
        let mut places = vec![-1; (self.tokens * ranks) as usize];
        for rank in 0..ranks {
            for (place, token) in self.tokens_at(rank).into_iter().enumerate() {
                places[(token * ranks + rank) as usize] = place as i32;
            }
        }
        places
    }

    /// The word of the first token that has no usable choice; 0 if all have.
    fn refused(&self) -> u32 {
        let (rank_of, _) = self.tables();
        let ranks = 0..self.map.ranks() as i32;
        let code = |&expert: &i32| match usize::try_from(expert).ok().and_then(|at| rank_of.get(at)) {
            None => u32::from(expert != -1),
            Some(rank) if ranks.contains(rank) || *rank == Pack::MASKED => 0,
            Some(_) => 2,
        };
        let tokens = (0..).zip(self.experts.chunks(self.shape.top_k() as usize));
        let mut faults = tokens.filter_map(|(token, choices): (u32, &[i32])| {
            let code = choices.iter().map(code).filter(|&code| code > 0).min()?;
            Some(code | token << 8)
        });
        faults.next().unwrap_or_default()
    }

    /// Every byte of the slot for `rank`.
    pub fn slot(&self, rank: u32, digest: u64, call: u64) -> Vec<u8> {
        let (shape, chosen) = (self.shape, self.tokens_at(rank));
        let (top_k, row_bytes) = (shape.top_k() as usize, shape.row_bytes() as usize);
        let entries = (shape.max_tokens() * shape.top_k()) as usize;
        let (mut experts, mut weights) = (vec![-1; entries], vec![0f32; entries]);
        let mut slot = vec![0; shape.bytes() as usize];
        for (row, &token) in chosen.iter().enumerate() {
            for (k, local) in self.choices_at(token, rank).into_iter().enumerate() {
                if local >= 0 {
                    experts[row * top_k + k] = local;
                    weights[row * top_k + k] = self.weights[token as usize * top_k + k];
                }
            }
            let from = &self.x[token as usize * row_bytes..][..row_bytes];
            slot[shape.rows_at() as usize + row * row_bytes..][..row_bytes].copy_from_slice(from);
        }
        let (rows, tokens, refused) = (chosen.len() as u32, self.tokens, self.refused());
        let head = SlotHead { rows, tokens, digest, call, refused, ..SlotHead::default() };
        slot[..64].copy_from_slice(bytes_of(&head));
        for (at, array) in
            [(shape.experts_at(), cast_slice(&experts)), (shape.weights_at(), cast_slice(&weights))]
        {
            let array: &[u8] = array;
            slot[at as usize..][..array.len()].copy_from_slice(array);
        }
        slot
    }
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_ne_bytes(bytes.try_into().unwrap())
}
