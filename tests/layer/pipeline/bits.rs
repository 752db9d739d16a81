//! No bit of a step depends on how it is cut.

use half::bf16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sidelane::layer::{Input, Tape};
use sidelane::plan::ExpertMap;
use sidelane::topology::Route;

use super::case::{Case, Cut, EXPERTS, Real, Seen, WHOLE, tensors};
use crate::support::{To, on_ranks, small};

/// Cuts of all kinds, drawn.
fn cuts(seed: u64, count: usize) -> Vec<Cut> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut one = || {
        let mut pick = |from: u32, to: u32| from + rng.next_u32() % (to - from + 1);
        let (chunks, groups, streams, at_once) = (pick(1, 9), pick(1, 4), pick(1, 3), pick(1, 4));
        let transfers = pick(1, 4);
        let (overlap, align) = (pick(0, 3) > 0, [1, 1, 4][pick(0, 2) as usize]);
        Cut { chunks, groups, transfers, overlap, streams, at_once, align }
    };
    (0..count).map(|_| one()).collect()
}

fn same_in_all_cuts<E: Real>(case: &Case, seed: u64, count: usize)
where
    f32: To<E>,
{
    let whole: Vec<Seen<E>> = Case { cut: WHOLE, ..case.clone() }.step();
    assert!(whole.iter().any(|seen| !seen.out.is_empty()));
    for cut in cuts(seed, count) {
        assert_eq!(Case { cut, ..case.clone() }.step::<E>(), whole, "{cut:?}");
    }
}

#[test]
fn chunks_groups_transfers_streams_and_overlap_change_no_bit() {
    same_in_all_cuts::<f32>(&Case::new(&[0, 0, 0], &[17, 0, 30], WHOLE), 1, 8);
    same_in_all_cuts::<bf16>(&Case::new(&[0, 0], &[9, 21], WHOLE), 2, 6);
    // All experts in one place: groups of many sizes.
    same_in_all_cuts::<f32>(&Case::new(&[0], &[33], WHOLE), 4, 8);
}

#[test]
fn they_change_none_where_nodes_hand_on_and_experts_are_replicated() {
    let held = [vec![4, 0], vec![1, 2], vec![3, 0], vec![2]];
    let map = ExpertMap::from_slots(EXPERTS, &held).unwrap();
    let case = Case::new(&[0, 1, 0, 1], &[12, 5, 1, 20], WHOLE);
    same_in_all_cuts::<f32>(&Case { map, route: Route::Pxn, ..case }, 3, 6);
}

#[test]
fn a_forward_beside_a_backward_has_the_bits_of_both() {
    let (first, second) = ([9, 0, 12], [4, 17, 1]);
    for (chunks, groups, overlap) in [(1, 1, true), (1, 2, false), (3, 2, true)] {
        let cut = Cut { chunks, groups, overlap, ..WHOLE };
        let alone = [first, second].map(|tokens| Case::new(&[0, 0, 0], &tokens, WHOLE).step::<f32>());
        let case = Case::new(&[0, 0, 0], &first, cut);
        let seen = on_ranks(&case.nodes, &small(), |world| {
            let rank = world.rank() as usize;
            let mut layer = case.layer::<f32>(&world);
            let [[x, residual, of_out], [next, of_next, of_next_out]] =
                [first, second].map(|tokens| tensors::<f32>(rank, tokens[rank]));
            let (out, tape) = layer.forward(&Input::new(&x[..]).with_residual(Some(&residual))).unwrap();
            let losses = |tape: &Tape| [tape.balance_loss(), tape.z_loss()];
            let of_first = losses(&tape);
            let input = Input::new(&next[..]).with_residual(Some(&of_next[..]));
            let (out_of_next, tape, gradients) =
                layer.combined_forward_backward(&input, tape, &of_out).unwrap();
            let of_second = losses(&tape);
            let of_next = layer.backward(tape, &of_next_out).unwrap();
            let one = Seen { out, gradients, losses: of_first };
            (one, Seen { out: out_of_next, gradients: of_next, losses: of_second })
        });
        let (one, other): (Vec<_>, Vec<_>) = seen.into_iter().unzip();
        assert_eq!([one, other], alone, "{cut:?}");
    }
}

/// As in a stage of DualPipe, whose two layers have weights and chunks of their own.
#[test]
fn a_forward_beside_the_backward_of_another_layer_has_the_bits_of_both() {
    let tokens = [[9, 0, 12], [4, 17, 1]];
    let [wide, fine] = [Cut { groups: 2, ..WHOLE }, Cut { chunks: 3, overlap: true, ..WHOLE }];
    for cuts in [[wide, fine], [fine, wide]] {
        let cases = [0, 1].map(|nth| Case::new(&[0, 0, 0], &tokens[nth], cuts[nth]));
        let pass = |together: bool| {
            on_ranks(&cases[0].nodes, &small(), |world| {
                let rank = world.rank() as usize;
                let [mut layer, mut other] = [0, 1].map(|nth| cases[nth].layer::<f32>(&world));
                layer.router_mut().iter_mut().for_each(|weight| *weight = 0.5 - *weight);
                let [[x, residual, _], [before, of_before, of_out]] =
                    [0, 1].map(|nth| tensors::<f32>(rank, tokens[nth][rank]));
                let input = Input::new(&x[..]).with_residual(Some(&residual[..]));
                let of_other = Input::new(&before[..]).with_residual(Some(&of_before[..]));
                let (_, tape) = other.forward(&of_other).unwrap();
                let (out, tape, of) = if together {
                    layer.combined_with(&input, &mut other, tape, &of_out).unwrap()
                } else {
                    let (out, made) = layer.forward(&input).unwrap();
                    (out, made, other.backward(tape, &of_out).unwrap())
                };
                let losses = [tape.balance_loss(), tape.z_loss()];
                let seen = Seen { out, gradients: of, losses };
                (seen, layer.backward(tape, &x).unwrap())
            })
        };
        assert_eq!(pass(true), pass(false), "{cuts:?}");
    }
}

#[test]
fn the_number_of_ranks_changes_no_bit_of_tokens_and_experts() {
    let counts = [14, 0, 23];
    let many = Case::new(&[0, 0, 0], &counts, Cut { chunks: 3, overlap: true, ..WHOLE });
    let seen = many.step::<f32>();
    let one = super::dense::joined(&counts);
    let out: Vec<f32> = seen.iter().flat_map(|seen| seen.out.clone()).collect();
    assert_eq!(out, one.out);
    let experts: Vec<f32> = seen.iter().flat_map(|seen| seen.gradients.experts.clone()).collect();
    assert_eq!(experts, one.gradients.experts);
}
