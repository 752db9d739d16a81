//! A layer on the survivors' group: its settings, gate and weights, and experts of a lost rank.

use std::time::Duration;

use sidelane::error::{CallError, ExpertKind, ExpertPass, LayerError, PlanError};
use sidelane::layer::{MoeLayer, MoeLayerBuilder};
use sidelane::plan::ExpertMap;
use sidelane::{Dtype, Error};

use super::case::{Case, Cut, EXPERTS, HIDDEN, WHOLE, gate, step, swiglu, tensors, weights_of};
use super::meddled::{Meddled, Meddler};
use crate::support::{on_ranks, small};

const LONG: Duration = Duration::from_secs(60);
const COUNTS: [usize; 3] = [9, 4, 14];
const CUT: Cut = Cut { chunks: 3, groups: 2, transfers: 2, overlap: true, streams: 2, at_once: 2, align: 2 };

/// Replicas have all that rank 0 holds. Of the others' experts some are nowhere else.
const HELD: [&[u32]; 3] = [&[0, 1], &[2, 0, 1], &[4, 3, 0]];

fn map(held: &[Vec<u32>]) -> ExpertMap {
    ExpertMap::from_slots(EXPERTS, held).unwrap()
}

/// The experts of those that are left: the last one takes what nobody has.
fn left_without(victim: u32) -> (Vec<Vec<u32>>, Vec<u32>) {
    let mut held: Vec<Vec<u32>> = HELD.iter().map(|held| held.to_vec()).collect();
    held.remove(victim as usize);
    let lost: Vec<u32> = (0..EXPERTS).filter(|expert| !held.concat().contains(expert)).collect();
    held[1].extend(&lost);
    (held, lost)
}

/// A weight after some training.
fn trained(weight: f32) -> f32 {
    weight * 0.75 + 0.01
}

/// A layer after some training: with other weights than it was built with.
fn train(mut layer: MoeLayer) -> MoeLayer {
    let change = |weights: &mut [f32]| weights.iter_mut().for_each(|weight| *weight = trained(*weight));
    change(layer.router_mut());
    change(layer.experts_mut().weights_mut());
    change(layer.shared_mut().unwrap().weights_mut());
    layer
}

fn given(expert: u32) -> Vec<f32> {
    weights_of(expert).into_iter().map(trained).collect()
}

#[test]
fn rebuilt_layer_has_bits_of_layer_built_for_survivors() {
    for (victim, nodes) in [(0, [0, 0, 0]), (1, [0, 0, 1]), (2, [0, 1, 1])] {
        let (held, lost) = left_without(victim);
        let before = Case { map: map(&HELD.map(<[u32]>::to_vec)), ..Case::new(&nodes, &COUNTS, CUT) };
        let after = Case { map: map(&held), cut: WHOLE, ..before.clone() };
        on_ranks(&nodes, &small(), |world| {
            let layer = train(before.layer::<f32>(&world));
            world.all().unwrap().gather(&[]).unwrap();
            if world.rank() == victim {
                return;
            }
            let next = world.rebuild(LONG, 2).unwrap();
            let (group, me) = (next.all().unwrap(), next.rank() as usize);
            let mut asked = Vec::new();
            let supply = |expert| {
                asked.push(expert);
                Some(given(expert))
            };
            let mut again = layer.rebuilt(&group, after.map.clone(), supply).build().unwrap();
            drop((layer, world));
            assert_eq!(asked, if me == 1 { &lost[..] } else { &[] });
            let [x, residual, of_out] = tensors::<f32>(me, COUNTS[me]);
            let seen = step(&mut again, &x, &residual, &of_out);
            let expected = step(&mut train(after.layer::<f32>(&next)), &x, &residual, &of_out);
            assert_eq!(seen, expected, "rank {me} without {victim}");
            group.gather(&[]).unwrap();
        });
    }
}

#[test]
fn layer_of_a_rank_without_experts_takes_those_that_are_given() {
    let before = Case { map: map(&[vec![0, 1, 2, 3, 4], vec![]]), ..Case::new(&[0, 0], &[5, 6], WHOLE) };
    let after = Case { map: map(&[vec![0, 1], vec![2, 3, 4]]), ..before.clone() };
    on_ranks(&before.nodes, &small(), |world| {
        let (group, me) = (world.all().unwrap(), world.rank() as usize);
        let layer = train(before.layer::<f32>(&world));
        let mut again =
            layer.rebuilt(&group, after.map.clone(), |expert| Some(given(expert))).build().unwrap();
        let [x, residual, of_out] = tensors::<f32>(me, after.tokens[me]);
        let seen = step(&mut again, &x, &residual, &of_out);
        assert_eq!(seen, step(&mut train(after.layer::<f32>(&world)), &x, &residual, &of_out));
        group.gather(&[]).unwrap();
    });
}

/// Experts that nothing is done to.
struct Untouched;

impl Meddler for Untouched {}

#[test]
fn experts_that_rank_cannot_have_are_refused_on_all_ranks() {
    let case = Case { map: map(&HELD.map(<[u32]>::to_vec)), ..Case::new(&[0, 0, 0], &COUNTS, CUT) };
    let moved = map(&[vec![0, 1], vec![2, 0, 4], vec![4, 3, 0]]);
    let whose = ExpertKind::Routed;
    on_ranks(&case.nodes, &small(), |world| {
        let (group, rank) = (world.all().unwrap(), world.rank());
        let layer = case.layer::<f32>(&world);
        let foreign = Meddled { inner: swiglu(case.held(rank)), by: Untouched };
        let foreign = MoeLayer::builder(&group, gate(), HIDDEN, foreign).dtype(Dtype::F32);
        let foreign = foreign.expert_map(case.map.clone()).build().unwrap();
        let refused = |builder: MoeLayerBuilder<'_>, expected: fn(&Error) -> bool| {
            let error = builder.build().unwrap_err();
            let told =
                matches!(error, Error::Call(CallError::ConfigsDiffer { peer: 1, mine: 1, theirs: 0, .. }));
            assert!(if rank == 1 { expected(&error) } else { told }, "rank {rank}: {error}");
        };
        // Expert 4 moves to rank 1, which has no weights of it, or too few.
        refused(layer.rebuilt(&group, moved.clone(), |_| None), |error| {
            *error == LayerError::NoWeights { expert: 4 }.into()
        });
        refused(layer.rebuilt(&group, moved.clone(), |expert| Some(given(expert)[1..].to_vec())), |error| {
            matches!(error, Error::Plan(PlanError::WrongShape { what: "weights of an expert", .. }))
        });
        let map_of_two = if rank == 1 { map(&[vec![0, 1, 2], vec![3, 4]]) } else { moved.clone() };
        refused(layer.rebuilt(&group, map_of_two, |expert| Some(given(expert))), |error| {
            matches!(error, Error::Plan(PlanError::BadParameter { parameter: "experts of the map", .. }))
        });
        let again = foreign.rebuilt(&group, moved.clone(), |expert| Some(given(expert))).build().unwrap_err();
        assert!(
            matches!(&again, Error::Layer(LayerError::Failed { whose: of, pass: ExpertPass::WithWeights, reason })
                if *of == whose && reason.contains("with_weights")),
            "{again}"
        );
        // The layer stays as it is.
        layer.rebuilt(&group, moved.clone(), |expert| Some(given(expert))).build().unwrap();
        group.gather(&[]).unwrap();
    });
}
