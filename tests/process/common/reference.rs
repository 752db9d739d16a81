//! Rounds of dispatch and combine that are compared bit for bit with the naive reference.

use half::bf16;
use sidelane::ep::{ExpertRows, Handle};
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, Strategy};
use sidelane::topology::Route;
use sidelane::{Dtype, Error, ExpertParallel, World};

use crate::support::{Origin, To, Tokens, placement, tokens};

const HIDDEN: usize = 32;
const EXPERTS: u32 = 20;
const TOP_K: u32 = 3;

/// What all ranks dispatch in a round, and what this one must see.
pub struct Round {
    all: Vec<Tokens<bf16>>,
    rows: Vec<Origin>,
    sums: Vec<bf16>,
    map: ExpertMap,
    me: usize,
}

impl Round {
    /// Round `number` of a world: token counts are uneven, one of them zero.
    pub fn new(world: &World, number: u64) -> Round {
        let (ranks, epoch, me) = (world.size(), u64::from(world.epoch()), world.rank() as usize);
        let seed = (epoch << 32) + (number << 16);
        let all: Vec<Tokens<bf16>> = (0..ranks)
            .map(|rank| {
                let count = (rank * 5 + number as u32 * 3) % 17;
                tokens(seed + u64::from(rank), count, HIDDEN, TOP_K, EXPERTS)
            })
            .collect();
        let map = ExpertMap::contiguous(EXPERTS, ranks).expect("experts for all ranks");
        let rows = placement(&all, TOP_K, &map, 1).swap_remove(me);
        let sums = sums(&all[me]);
        Round { all, rows, sums, map, me }
    }

    pub fn builder(world: &World, (route, strategy): (Route, Strategy)) -> Result<ExpertParallel, Error> {
        let group = world.all()?;
        let builder =
            ExpertParallel::builder(&group).experts(EXPERTS).top_k(TOP_K).route(route).strategy(strategy);
        builder.hidden(HIDDEN).dtype(Dtype::Bf16).max_tokens(16).build()
    }

    pub fn x(&self) -> &[bf16] {
        &self.all[self.me].x
    }

    pub fn routing(&self) -> Routing<'_> {
        let mine = &self.all[self.me];
        Routing::new(TOP_K, mine.ids.as_slice(), mine.weights.as_slice())
            .expect("a routing of the right shape")
    }

    /// Checks the rows of a dispatch, runs experts, and checks the results of combine. Returns the
    /// number of compared rows.
    pub fn complete(
        &self,
        ep: &mut ExpertParallel,
        (rows, handle): (ExpertRows, Handle),
        in_halves: bool,
    ) -> Result<u64, Error> {
        let seen = rows.rows::<bf16>()?;
        assert_eq!(rows.len() as usize, self.rows.len(), "rows of rank {}", self.me);
        for (row, origin) in self.rows.iter().enumerate() {
            let (source, token, choice) = origin.expect("no pads without alignment");
            let sent = &self.all[source].x[token * HIDDEN..][..HIDDEN];
            assert_eq!(&seen[row * HIDDEN..][..HIDDEN], sent, "row {row} of rank {}", self.me);
            assert_eq!(handle.row_weights()[row].to_bits(), self.all[source].weights[choice].to_bits());
        }
        let mut y = handle.output()?;
        let experts = self.map.slots_of(self.me as u32).map(|slot| self.map.expert_of(slot));
        let ids = experts.zip(handle.tokens_per_expert());
        let ids = ids.flat_map(|(id, &count)| std::iter::repeat_n(id as i32, count as usize * HIDDEN));
        for ((out, &x), id) in y.rows_mut::<bf16>()?.iter_mut().zip(seen).zip(ids) {
            *out = expert(x, id);
        }
        let compared = u64::from(rows.len()) + (self.sums.len() / HIDDEN) as u64;
        drop(rows);
        let mut returned = vec![bf16::NAN; self.sums.len()];
        match in_halves {
            true => ep.start_combine(y, &handle)?.finish(&mut returned)?,
            false => ep.combine_into(y, &handle, &mut returned)?,
        }
        assert_eq!(returned, self.sums, "sums of rank {}", self.me);
        Ok(compared)
    }
}

/// What expert `id` does to an element.
fn expert(x: bf16, id: i32) -> bf16 {
    (x.to_f32() * (id as f32 + 0.5)).to()
}

/// From +0 in f32, in ascending order of experts, rounded once.
fn sums(mine: &Tokens<bf16>) -> Vec<bf16> {
    let choices = mine.ids.chunks(TOP_K as usize);
    let sum_of = |(x, ids): (&[bf16], &[i32])| {
        let mut ids: Vec<i32> = ids.iter().copied().filter(|&id| id >= 0).collect();
        ids.sort_unstable();
        let sum = |&x: &bf16| ids.iter().fold(0.0f32, |sum, &id| sum + expert(x, id).to_f32()).to();
        x.iter().map(sum).collect::<Vec<bf16>>()
    };
    mine.x.chunks(HIDDEN).zip(choices).flat_map(sum_of).collect()
}
