//! Groups of meshes, against nested loops.

use std::collections::BTreeSet;

use sidelane::collective::Communicator;
use sidelane::gate::Routing;
use sidelane::{Dtype, ExpertParallel, World};
use sidelane_parallel::{Mesh, MeshError};

use crate::pipelines::options;
use crate::ranks::{on_ranks, tiny};

/// Ranks by their positions, counted in nested loops as Megatron's order of `tp-cp-ep-dp-pp` has
/// it: tensor parallel ranks are next to each other.
fn counted([pp, dp, cp, tp]: [u32; 4]) -> Vec<[u32; 4]> {
    let mut positions = Vec::new();
    for pp in 0..pp {
        for dp in 0..dp {
            for cp in 0..cp {
                for tp in 0..tp {
                    positions.push([pp, dp, cp, tp]);
                }
            }
        }
    }
    positions
}

const NAMES: [&str; 4] = ["pp", "dp", "cp", "tp"];

#[test]
fn groups_hold_ranks_that_differ_in_their_dimensions_alone() {
    for sizes in [[2, 2, 1, 2], [3, 1, 2, 4], [1, 5, 1, 1], [2, 3, 2, 2], [4, 2, 3, 1]] {
        let positions = counted(sizes);
        let ranks = positions.len() as u32;
        let mesh = Mesh::new(ranks, NAMES.into_iter().zip(sizes)).unwrap();
        for subset in 0..16usize {
            let of: Vec<_> = (0..4).filter(|nth| subset >> nth & 1 == 1).collect();
            let names: Vec<_> = of.iter().rev().map(|&nth| NAMES[nth]).collect();
            let alike = |a: u32, b: u32| {
                (0..4)
                    .all(|nth| of.contains(&nth) || positions[a as usize][nth] == positions[b as usize][nth])
            };
            let mut right = BTreeSet::new();
            for rank in 0..ranks {
                let group: Vec<_> = (0..ranks).filter(|&other| alike(rank, other)).collect();
                assert_eq!(mesh.group(rank, &names).unwrap(), group, "{sizes:?} {names:?} of {rank}");
                assert_eq!(mesh.size(&names).unwrap() as usize, group.len());
                right.insert(group);
            }
            assert_eq!(mesh.groups(&names).unwrap(), right.into_iter().collect::<Vec<_>>());
        }
        for (rank, position) in (0..).zip(&positions) {
            for (name, right) in NAMES.iter().zip(position) {
                assert_eq!(mesh.position(rank, name), Ok(*right));
            }
        }
    }
}

#[test]
fn experts_fold_ranks_of_a_stage_as_megatron_does() {
    // (tp, cp, dp, pp, ep, etp): groups of an expert generator with tp = etp, cp = 1, dp = edp.
    for [tp, cp, dp, pp, ep, etp] in
        [[2, 1, 4, 1, 4, 1], [2, 1, 4, 2, 4, 2], [4, 2, 2, 2, 2, 4], [1, 1, 8, 1, 8, 1], [2, 2, 2, 3, 4, 1]]
    {
        let ranks = tp * cp * dp * pp;
        let mesh = Mesh::new(ranks, [("pp", pp), ("dp", dp), ("cp", cp), ("tp", tp)]).unwrap();
        let experts = mesh.experts(ep, etp).unwrap();
        let edp = tp * cp * dp / (ep * etp);
        let sizes: Vec<_> = experts.dimensions().collect();
        assert_eq!(sizes, [("pp", pp), ("edp", edp), ("ep", ep), ("etp", etp)]);
        assert_eq!(experts.groups(&["pp"]), mesh.groups(&["pp"]), "stages stay");
        for rank in 0..ranks {
            let in_stage = rank % (tp * cp * dp);
            assert_eq!(experts.position(rank, "etp"), Ok(in_stage % etp));
            assert_eq!(experts.position(rank, "ep"), Ok(in_stage / etp % ep));
            assert_eq!(experts.position(rank, "edp"), Ok(in_stage / (etp * ep)));
        }
    }
}

#[test]
fn eight_ranks_have_attention_tp2_dp4_and_experts_ep4_dp2() {
    let attention = Mesh::new(8, [("dp", 4), ("tp", 2)]).unwrap();
    assert_eq!(attention.groups(&["dp"]).unwrap(), [[0, 2, 4, 6], [1, 3, 5, 7]]);
    let experts = attention.experts(4, 1).unwrap();
    assert_eq!(experts.groups(&["ep"]).unwrap(), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!(experts.groups(&["edp"]).unwrap(), [[0, 4], [1, 5], [2, 6], [3, 7]]);
}

#[test]
fn deepspeed_expert_groups_of_tp2_ep2_skip_tensor_ranks() {
    let mesh = Mesh::new(4, [("ep", 2), ("tp", 2)]).unwrap();
    assert_eq!(mesh.groups(&["ep"]).unwrap(), [[0, 2], [1, 3]]);
    // Megatron with expert tensor parallelism cuts each expert over the same tensor ranks.
    let cut = Mesh::new(4, [("dp", 2), ("tp", 2)]).unwrap().experts(2, 2).unwrap();
    assert_eq!(cut.groups(&["ep"]).unwrap(), [[0, 2], [1, 3]]);
    assert_eq!(cut.groups(&["etp"]).unwrap(), [[0, 1], [2, 3]]);
}

#[test]
fn sequence_ranks_of_dp2_sp4_are_next_to_each_other() {
    let mesh = Mesh::new(8, [("dp", 2), ("sp", 4)]).unwrap();
    assert_eq!(mesh.groups(&["sp"]).unwrap(), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    assert_eq!(mesh.groups(&["dp"]).unwrap(), [[0, 4], [1, 5], [2, 6], [3, 7]]);
}

#[test]
fn sizes_that_do_not_fit_are_refused_with_the_arithmetic() {
    let text = |result: Result<Mesh, MeshError>| result.unwrap_err().to_string();
    assert_eq!(text(Mesh::new(8, [("pp", 2), ("dp", 3)])), "8 ranks, but pp 2 x dp 3 = 6");
    assert_eq!(text(Mesh::new(2, [])), "2 ranks, but 1 = 1");
    let huge = Mesh::new(8, [("a", u32::MAX), ("b", u32::MAX), ("c", u32::MAX)]);
    assert!(matches!(huge, Err(MeshError::Sizes { product: u64::MAX, .. })));
    let all = [("pp", 2), ("dp", 2), ("cp", 1), ("tp", 2), ("ep", 4), ("etp", 1)];
    assert_eq!(
        Mesh::new(8, all).unwrap_err().to_string(),
        "8 ranks, but pp 2 x dp 2 x cp 1 x tp 2 x ep 4 x etp 1 = 32: leave edp, ep and etp out, and give \
         ep and etp to Mesh::experts"
    );
    assert!(matches!(Mesh::new(0, [("dp", 0)]), Err(MeshError::NoSize { .. })));
    assert!(matches!(Mesh::new(4, [("dp", 2), ("dp", 2)]), Err(MeshError::Twice { .. })));

    let mesh = Mesh::new(12, [("pp", 2), ("dp", 3), ("tp", 2)]).unwrap();
    assert_eq!(text(mesh.experts(2, 2)), "ep 2 x etp 2 = 4 does not divide dp 3 x tp 2 = 6");
    assert!(matches!(mesh.experts(0, 1), Err(MeshError::Experts { .. })));
    assert!(matches!(mesh.experts(u32::MAX, u32::MAX), Err(MeshError::Experts { .. })));
    let apart = Mesh::new(8, [("dp", 2), ("pp", 2), ("tp", 2)]).unwrap();
    assert_eq!(
        text(apart.experts(2, 1)),
        "pp lies between the dimensions that hold a layer: move tp before it"
    );

    assert_eq!(mesh.group(0, &["cp"]).unwrap_err().to_string(), "no dimension cp: the mesh has pp, dp, tp");
    assert_eq!(mesh.group(12, &["tp"]), Err(MeshError::NoRank { rank: 12, ranks: 12 }));
    assert!(matches!(mesh.groups(&["tp", "tp"]), Err(MeshError::Twice { .. })));
}

#[test]
fn mesh_refuses_a_world_of_another_size() {
    let mesh = Mesh::new(4, [("dp", 2), ("tp", 2)]).unwrap();
    for world in World::threads(2).unwrap() {
        let refused = mesh.world_group(&world, &["tp"]).err();
        assert_eq!(refused, Some(MeshError::OtherWorld { ranks: 4, world: 2 }));
        let refused = mesh.world_ends(&world, "dp").err();
        assert_eq!(refused, Some(MeshError::OtherWorld { ranks: 4, world: 2 }));
    }
}

#[test]
fn tokens_are_sliced_over_tensor_ranks_of_whole_experts_only() {
    let attention = Mesh::new(4, [("dp", 2), ("tp", 2)]).unwrap();
    let (whole, cut) = (attention.experts(4, 1).unwrap(), attention.experts(2, 2).unwrap());
    let buffer: Vec<f32> = (0..2 * 4 * 4).map(|at| at as f32).collect();
    let slices = on_ranks(&[0, 0, 1, 1], &tiny(), |world| {
        let refused = attention.token_slices(&world, &cut, [2, 4, 4], Dtype::F32).unwrap_err();
        assert_eq!(refused, MeshError::CutExperts { expert_tensor: 2 });
        assert!(matches!(
            attention.token_slices(&world, &attention, [2, 4, 4], Dtype::F32),
            Err(MeshError::Unknown { .. })
        ));
        let mut slices = attention.token_slices(&world, &whole, [2, 4, 4], Dtype::F32).unwrap();
        let slice = slices.drop_tokens(&buffer).unwrap();
        assert_eq!(slices.gather_tokens(&slice).unwrap().rows::<f32>().unwrap(), buffer);
        slice
    });
    // Two tokens of each expert on each rank.
    let half = |from: usize| [&buffer[from..from + 8], &buffer[from + 16..from + 24]].concat();
    assert_eq!(slices, [half(0), half(8), half(0), half(8)]);
}

/// A pyramid as PR-MoE has it: later layers have more experts, over more ranks. An expert doubles a
/// row and adds its number. Copies of an expert add the gradients of that number.
#[test]
fn layers_have_experts_and_groups_of_their_own_forward_and_backward() {
    const HIDDEN: usize = 4;
    let mesh = Mesh::new(4, [("dp", 4), ("tp", 1)]).unwrap();
    let layers = [(4, 1), (4, 2), (8, 4)].map(|(experts, ep)| (experts, mesh.experts(ep, 1).unwrap()));
    let tokens = |of: [f32; 3], rank: u32| of.map(|token| [token + 10.0 * rank as f32; HIDDEN]).concat();
    let (input, of_output) = (|rank| tokens([1.0, 2.0, 3.0], rank), |rank| tokens([5.0, 7.0, 9.0], rank));
    let chosen = |experts: u32, rank: u32| [0, 1, 2].map(|token| (5 * rank + 3 * token) % experts);
    let results = on_ranks(&[0, 0, 1, 1], &options(), |world| {
        let (mut x, mut passed) = (input(world.rank()), Vec::new());
        for (experts, mesh) in &layers {
            let group = mesh.world_group(&world, &["ep"]).unwrap();
            let builder = ExpertParallel::builder(&group).experts(*experts).top_k(1).hidden(HIDDEN);
            let mut ep = builder.dtype(Dtype::F32).max_tokens(4).build().unwrap();
            let ids = chosen(*experts, world.rank()).map(|id| id as i32);
            let routing = Routing::new(1, &ids[..], &[1.0; 3][..]).unwrap();
            let (rows, handle) = ep.dispatch(&x, &routing).unwrap();
            let first = group.rank() * (experts / group.size());
            let mut y = rows.to_vec::<f32>().unwrap();
            let mut rest = &mut y[..];
            for (expert, &rows) in (first..).zip(handle.tokens_per_expert()) {
                let (own, others) = rest.split_at_mut(rows as usize * HIDDEN);
                own.iter_mut().for_each(|y| *y = *y * 2.0 + expert as f32);
                rest = others;
            }
            x = ep.combine(&y, &handle).unwrap();
            let copies = mesh.world_group(&world, &["edp"]).unwrap();
            passed.push((ep, handle, first, Communicator::builder(&copies).chunk(2048).build().unwrap()));
        }
        let (mut of_x, mut of_experts) = (of_output(world.rank()), Vec::new());
        for (mut ep, handle, first, mut copies) in passed.into_iter().rev() {
            let (rows, _) = ep.combine_backward(&of_x, &handle).unwrap();
            let mut of_rows = rows.to_vec::<f32>().unwrap();
            let mut rest = &of_rows[..];
            let sums = handle.tokens_per_expert().iter().map(|&rows| {
                let (own, others) = rest.split_at(rows as usize * HIDDEN);
                rest = others;
                own.iter().sum::<f32>()
            });
            let mut sums: Vec<f32> = sums.collect();
            copies.all_reduce(&mut sums).unwrap();
            of_experts.push((first as usize, sums));
            of_rows.iter_mut().for_each(|of| *of *= 2.0);
            of_x = ep.dispatch_backward(&of_rows, None, &handle).unwrap().0;
        }
        (x, of_x, of_experts)
    });
    // Gradients of the numbers of all experts, the last layer first.
    let of_numbers = layers.iter().rev().zip([1.0, 2.0, 4.0]).map(|((experts, _), factor)| {
        let mut sums = vec![0.0; *experts as usize];
        for rank in 0..4 {
            let of_rows = of_output(rank);
            for (of_row, expert) in of_rows.chunks_exact(HIDDEN).zip(chosen(*experts, rank)) {
                sums[expert as usize] += factor * of_row.iter().sum::<f32>();
            }
        }
        sums
    });
    let of_numbers: Vec<Vec<f32>> = of_numbers.collect();
    for (rank, (seen, of_x, of_experts)) in (0..).zip(results) {
        let mut right = input(rank);
        for (experts, _) in &layers {
            for (token, expert) in right.chunks_exact_mut(HIDDEN).zip(chosen(*experts, rank)) {
                token.iter_mut().for_each(|x| *x = *x * 2.0 + expert as f32);
            }
        }
        assert_eq!(seen, right, "rank {rank}");
        assert_eq!(of_x, of_output(rank).iter().map(|of| of * 8.0).collect::<Vec<_>>(), "rank {rank}");
        for ((first, sums), right) in of_experts.into_iter().zip(&of_numbers) {
            assert_eq!(sums, right[first..][..sums.len()], "rank {rank}");
        }
    }
}
