//! The whole layer, with a linear map as each expert: its gradients against finite differences of
//! the loss.

use crate::support::{Tokens, on_ranks, tiny, tokens};
use sidelane::gate::Routing;
use sidelane::plan::{ExpertMap, SumOrder};
use sidelane::topology::Route;
use sidelane::{Dtype, ExpertParallel, World};

const HIDDEN: usize = 4;
const TOP_K: u32 = 2;
const EXPERTS: u32 = 5;
const COUNTS: [u32; 4] = [2, 0, 3, 1];

/// Element (row, column) of the matrix of an expert: multiples of 1/4, so that `f32` sums of this
/// size are exact.
fn matrix(expert: u32, row: usize, column: usize) -> f32 {
    ((expert as usize * 5 + row * 3 + column * 7) % 9) as f32 / 4.0 - 1.0
}

/// Weight of an output element in the loss.
fn loss_weight(rank: u32, index: usize) -> f32 {
    ((rank as usize * 3 + index * 5) % 7) as f32 / 4.0 - 0.75
}

/// `y = x M`, or, transposed, `x = y M^T`, for every row of every local expert.
fn experts(ep: &ExpertParallel, handle: &sidelane::ep::Handle, rows: &[f32], transposed: bool) -> Vec<f32> {
    let slots = ep.expert_map().slots_of(ep.rank());
    let owners = slots
        .zip(handle.padded_tokens_per_expert())
        .flat_map(|(slot, &rows)| std::iter::repeat_n(ep.expert_map().expert_of(slot), rows as usize));
    let product = |(row, expert): (&[f32], u32)| {
        let row = row.to_vec();
        (0..HIDDEN).map(move |to| {
            let m =
                |from: usize| if transposed { matrix(expert, to, from) } else { matrix(expert, from, to) };
            row.iter().enumerate().map(|(from, x)| x * m(from)).sum()
        })
    };
    rows.chunks_exact(HIDDEN).zip(owners).flat_map(product).collect()
}

/// One rank's share of the loss, and what its gradients are made of.
struct Layer {
    ep: ExpertParallel,
    world: World,
    weighted: bool,
}

impl Layer {
    /// The loss of all ranks.
    fn loss(&mut self, tokens: &Tokens<f32>) -> f64 {
        let (out, ..) = self.forward(tokens);
        let share: f64 =
            out.iter().enumerate().map(|(i, &y)| f64::from(y * loss_weight(self.world.rank(), i))).sum();
        let shares = self.world.all().unwrap().gather(&share.to_le_bytes()).unwrap();
        shares.iter().map(|share| f64::from_le_bytes(share.as_slice().try_into().unwrap())).sum()
    }

    /// Outputs, the rows the experts saw, the experts' outputs, and the handle. Without weighted
    /// combines the weights are applied inside the experts.
    fn forward(&mut self, tokens: &Tokens<f32>) -> (Vec<f32>, Vec<f32>, Vec<f32>, sidelane::ep::Handle) {
        let routing = Routing::new(TOP_K, tokens.ids.as_slice(), tokens.weights.as_slice()).unwrap();
        let (rows, handle) = self.ep.dispatch(&tokens.x, &routing).unwrap();
        let rows = rows.to_vec::<f32>().unwrap();
        let made = experts(&self.ep, &handle, &rows, false);
        let given = if self.weighted { made.clone() } else { scaled(&made, handle.row_weights()) };
        let out = self.ep.combine(&given, &handle).unwrap();
        (out, rows, made, handle)
    }

    /// Gradients of the loss by tokens and by routing weights.
    fn backward(&mut self, tokens: &Tokens<f32>) -> (Vec<f32>, Vec<f32>) {
        let (out, _, made, handle) = self.forward(tokens);
        let g: Vec<f32> = (0..out.len()).map(|i| loss_weight(self.world.rank(), i)).collect();
        let (rows, weights) = self.ep.combine_backward(&g, &handle).unwrap();
        let rows = rows.to_vec::<f32>().unwrap();
        if let Some(weights) = weights {
            let back = experts(&self.ep, &handle, &rows, true);
            let (x, _) = self.ep.dispatch_backward::<f32>(&back, None, &handle).unwrap();
            return (x, weights);
        }
        let products: Vec<f32> = rows
            .chunks_exact(HIDDEN)
            .zip(made.chunks_exact(HIDDEN))
            .map(|(g, y)| g.iter().zip(y).map(|(g, y)| g * y).sum())
            .collect();
        let back = experts(&self.ep, &handle, &scaled(&rows, handle.row_weights()), true);
        let (x, weights) = self.ep.dispatch_backward::<f32>(&back, Some(&products), &handle).unwrap();
        (x, weights.unwrap())
    }
}

fn scaled(rows: &[f32], weights: &[f32]) -> Vec<f32> {
    rows.chunks_exact(HIDDEN).zip(weights).flat_map(|(row, w)| row.iter().map(move |x| x * w)).collect()
}

/// The loss is linear in each input, so a central difference is exact but for rounding, however
/// large the step.
fn agree(seen: f32, plus: f64, minus: f64, what: &str) {
    let difference = (plus - minus) / 2.0;
    assert!((f64::from(seen) - difference).abs() < 1e-4, "{what}: {seen}, by differences {difference}");
}

fn differentiate(nodes: &[u32], route: Route, order: SumOrder, align: u32, weighted: bool, map: &ExpertMap) {
    on_ranks(nodes, &tiny(), |world| {
        let group = world.all().unwrap();
        let builder = ExpertParallel::builder(&group).expert_map(map.clone()).route(route);
        let builder = builder.top_k(TOP_K).hidden(HIDDEN).dtype(Dtype::F32).sum_order(order).align(align);
        let ep = builder.weighted(weighted).max_tokens(16).build().unwrap();
        let me = world.rank();
        let mut layer = Layer { ep, world, weighted };
        let mine = tokens::<f32>(u64::from(me) + 60, COUNTS[me as usize], HIDDEN, TOP_K, EXPERTS);
        let (x, weights) = layer.backward(&mine);
        for (rank, &count) in (0..).zip(&COUNTS) {
            // All ranks take part in each evaluation; one of them moves one of its inputs.
            let inputs = count as usize * (HIDDEN + TOP_K as usize);
            for input in 0..inputs {
                let of_x = count as usize * HIDDEN;
                let losses = [1.0, -1.0].map(|step| {
                    let mut moved = mine.clone();
                    if rank == me {
                        match input.checked_sub(of_x) {
                            None => moved.x[input] += step,
                            Some(choice) => moved.weights[choice] += step,
                        }
                    }
                    layer.loss(&moved)
                });
                if rank == me {
                    let seen = if input < of_x { x[input] } else { weights[input - of_x] };
                    agree(seen, losses[0], losses[1], &format!("input {input} of rank {rank}, {nodes:?}"));
                }
            }
        }
    });
}

#[test]
fn gradients_are_the_slopes_of_the_loss() {
    let plain = ExpertMap::contiguous(EXPERTS, 4).unwrap();
    let replicated = ExpertMap::from_slots(EXPERTS, &[vec![4, 0], vec![1], vec![2, 4, 3], vec![0]]).unwrap();
    let cases = [[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 2, 3]];
    for (nodes, route) in cases.into_iter().flat_map(|nodes| Route::ALL.map(|route| (nodes, route))) {
        for weighted in [false, true] {
            differentiate(&nodes, route, SumOrder::Expert, 1, weighted, &plain);
            let order = if weighted { SumOrder::Rank } else { SumOrder::Node };
            differentiate(&nodes, route, order, 4, weighted, &replicated);
        }
    }
}
