//! Input that one rank refuses is an error everywhere, nothing moves, and the next call works.

use sidelane::error::{CallError, GateError, LayerError, OverlapError, PlanError};
use sidelane::gate::{GateConfig, Noise, ScoreFunction};
use sidelane::layer::{Experts, GroupedSwiGlu, Input, MoeLayer, MoeLayerBuilder, Segments};
use sidelane::overlap::ChunkRule;
use sidelane::{Dtype, Error};

use super::case::{Case, Cut, FFN, HIDDEN, WHOLE, balance, gate, step, swiglu, tensors};
use crate::support::{on_ranks, small};

const BAD: usize = 1;

fn refused_by_peer(error: &Error) -> bool {
    let Error::Overlap(OverlapError::Failed { error, .. }) = error else { return false };
    matches!(**error, Error::Call(CallError::PeerRefused { peer, .. }) if peer as usize == BAD)
}

#[test]
fn bad_tensors_of_one_rank_are_refused_on_all_and_the_next_step_is_right() {
    let case = Case::new(&[0, 0, 0], &[5, 3, 0], Cut { chunks: 2, overlap: true, ..WHOLE });
    let expected = case.step::<f32>();
    let seen = on_ranks(&case.nodes, &small(), |world| {
        let me = world.rank() as usize;
        let mut layer = case.layer::<f32>(&world);
        let [x, residual, of_out] = tensors::<f32>(me, case.tokens[me]);
        let told = |error: Error, expected: fn(&Error) -> bool| {
            assert!(if me == BAD { expected(&error) } else { refused_by_peer(&error) }, "rank {me}: {error}");
        };

        let short = if me == BAD { &residual[1..] } else { &residual[..] };
        let error = layer.forward(&Input::new(&x[..]).with_residual(Some(short))).unwrap_err();
        told(error, |error| matches!(error, Error::Plan(PlanError::WrongShape { what: "residual", .. })));
        // As many as two chunks have room for, and one more than was promised for a step.
        let many = vec![0.5; 65 * HIDDEN];
        let error = layer.forward(&Input::new(if me == BAD { &many } else { &x })).unwrap_err();
        told(error, |error| matches!(error, Error::Plan(PlanError::TooManyTokens { tokens: 65, max: 64 })));
        let mut bad = x.clone();
        if me == BAD {
            bad[2] = f32::INFINITY;
        }
        let error = layer.forward(&Input::new(&bad)).unwrap_err();
        told(error, |error| matches!(error, Error::Gate(GateError::NotFinite { .. })));

        let (_, tape) = layer.forward(&Input::new(&x)).unwrap();
        let short = if me == BAD { &of_out[1..] } else { &of_out[..] };
        let error = layer.backward(tape, short).unwrap_err();
        told(error, |error| matches!(error, Error::Plan(PlanError::WrongShape { .. })));
        assert_eq!(world.health().cause(), None, "the world is as good as before");
        step(&mut layer, &x, &residual, &of_out)
    });
    assert_eq!(seen, expected);
}

#[test]
fn a_step_that_finds_no_room_is_refused_on_all_ranks_and_the_next_works() {
    let case = Case::new(&[0, 0], &[60, 64], Cut { chunks: 2, overlap: true, ..WHOLE });
    on_ranks(&case.nodes, &small(), |world| {
        let me = world.rank() as usize;
        let mut layer = case.layer::<f32>(&world);
        let [x, residual, of_out] = tensors::<f32>(me, case.tokens[me]);
        let before = step(&mut layer, &x, &residual, &of_out);
        let taken = (me == 0).then(|| {
            let free = world.pool().report();
            world.pool().alloc(free.total - free.used - 256).unwrap()
        });
        world.all().unwrap().gather(&[]).unwrap();
        let error = layer.forward(&Input::new(&x)).unwrap_err();
        let Error::Overlap(OverlapError::Failed { error, .. }) = error else { panic!("{error}") };
        assert!(matches!(*error, Error::Memory(_)), "{error}");
        drop(taken);
        world.all().unwrap().gather(&[]).unwrap();
        assert_eq!(step(&mut layer, &x, &residual, &of_out), before);
    });
}

/// One rank computes in turn and the others overlap with several transfers in flight; the room of
/// one of them ends somewhere in the step.
#[test]
fn wherever_in_a_step_room_ends_all_ranks_stop_at_the_same_call() {
    let cut = Cut { chunks: 6, transfers: 3, ..WHOLE };
    let case = Case::new(&[0, 0, 0], &[60, 64, 7], cut);
    let stopped = on_ranks(&case.nodes, &small(), |world| {
        let me = world.rank() as usize;
        let own = Case { cut: Cut { overlap: me != 1, ..cut }, ..case.clone() };
        let mut layer = own.layer::<f32>(&world);
        let [x, residual, of_out] = tensors::<f32>(me, case.tokens[me]);
        let before = step(&mut layer, &x, &residual, &of_out);
        let meet = || world.all().unwrap().gather(&[]).unwrap();
        let stop = |rows: u64| {
            let taken = (me == 0).then(|| {
                let free = world.pool().report();
                world.pool().alloc(free.total - free.used - rows * 4 * HIDDEN as u64).unwrap()
            });
            meet();
            let ended = layer.forward(&Input::new(&x));
            meet();
            drop(taken);
            let Err(error) = ended else { return None };
            let Error::Overlap(OverlapError::Failed { at, error, .. }) = error else { panic!("{error}") };
            assert!(matches!(*error, Error::Memory(_)), "{error}");
            Some(at.work)
        };
        let stopped: Vec<_> = (0..16).map(|nth| 16 + 12 * nth).map(stop).collect();
        assert_eq!(world.health().cause(), None, "the world is as good as before");
        assert_eq!(step(&mut layer, &x, &residual, &of_out), before);
        stopped
    });
    assert!(stopped.iter().all(|of_rank| *of_rank == stopped[0]), "{stopped:?}");
    let mut places: Vec<_> = stopped[0].iter().flatten().map(|work| (work.name, work.chunk)).collect();
    places.dedup();
    assert!(places.len() > 3, "it ends in several places: {places:?}");
}

#[test]
fn tapes_go_backward_in_any_order_and_only_in_their_layer() {
    let case = Case::new(&[0, 0], &[6, 11], Cut { chunks: 2, overlap: true, ..WHOLE });
    let expected = case.step::<f32>();
    on_ranks(&case.nodes, &small(), |world| {
        let me = world.rank() as usize;
        let (mut layer, mut other) = (case.layer::<f32>(&world), case.layer::<f32>(&world));
        let [x, _, of_out] = tensors::<f32>(me, case.tokens[me]);
        let (_, first) = layer.forward(&Input::new(&x)).unwrap();
        let (_, second) = layer.forward(&Input::new(&x)).unwrap();
        let (_, foreign) = other.forward(&Input::new(&x)).unwrap();
        let one = layer.backward(first, &of_out).unwrap();
        assert_eq!(layer.backward(second, &of_out).unwrap(), one);
        assert_eq!(one, expected[me].gradients);
        let error = layer.backward(foreign, &of_out).unwrap_err();
        assert!(matches!(error, Error::Layer(LayerError::ForeignTape { .. })), "{error}");
        assert_eq!(world.health().cause(), None);
    });
}

/// Of rows that are too long.
fn wide(experts: usize) -> GroupedSwiGlu {
    let weights = vec![0.0; GroupedSwiGlu::values(experts, HIDDEN + 1, FFN)];
    GroupedSwiGlu::new(experts, HIDDEN + 1, FFN, weights).unwrap()
}

#[test]
fn weights_that_cannot_be_counted_are_not_those_of_any_experts() {
    let refused = GroupedSwiGlu::new(1, 1 << 32, 1 << 32, Vec::new()).unwrap_err();
    assert!(matches!(refused, PlanError::WrongShape { seen: 0, .. }), "{refused}");
}

#[test]
fn segments_that_do_not_add_up_to_their_rows_are_refused_by_grouped_experts() {
    let experts = GroupedSwiGlu::new(2, 4, 3, vec![1.0; GroupedSwiGlu::values(2, 4, 3)]).unwrap();
    let rows = [0.0; 8];
    let refused = |hidden, counts: &[i64], padded: &[i64]| {
        let refused = experts.forward(Segments::new(&rows, hidden, counts, padded)).err().unwrap();
        assert!(
            matches!(refused.downcast_ref(), Some(Error::Plan(PlanError::WrongShape { .. }))),
            "{refused}"
        );
    };
    refused(4, &[2], &[2]);
    refused(4, &[1, 1, 0], &[1, 1, 0]);
    refused(4, &[1, 1], &[1, 0]);
    refused(4, &[2, 1], &[2, 1]);
    refused(4, &[-1, 1], &[1, 1]);
    refused(4, &[0, 0], &[i64::MAX, i64::MAX]);
    refused(2, &[2, 2], &[2, 2]);
    assert!(experts.forward(Segments::new(&rows, 4, &[0, 1], &[1, 1])).is_ok());
}

#[test]
fn ranks_of_which_one_goes_backward_alone_and_one_beside_a_forward_are_told() {
    let case = Case::new(&[0, 0], &[6, 11], Cut { chunks: 2, overlap: true, ..WHOLE });
    let expected = case.step::<f32>();
    let seen = on_ranks(&case.nodes, &small(), |world| {
        let me = world.rank() as usize;
        let mut layer = case.layer::<f32>(&world);
        let [x, residual, of_out] = tensors::<f32>(me, case.tokens[me]);
        let (_, tape) = layer.forward(&Input::new(&x)).unwrap();
        let error = if me == BAD {
            layer.backward(tape, &of_out).unwrap_err()
        } else {
            layer.combined_forward_backward(&Input::new(&x), tape, &of_out).unwrap_err()
        };
        let Error::Overlap(OverlapError::Failed { error, .. }) = &error else { panic!("{error}") };
        assert!(matches!(**error, Error::Call(CallError::KindsDiffer { .. })), "{error}");
        assert_eq!(world.health().cause(), None);
        step(&mut layer, &x, &residual, &of_out)
    });
    assert_eq!(seen, expected);
}

#[test]
fn settings_that_cannot_be_used_are_named_on_the_rank_that_has_them() {
    on_ranks(&[0, 0], &small(), |world| {
        let (group, bad) = (world.all().unwrap(), world.rank() as usize == BAD);
        let builder =
            |experts: std::ops::Range<u32>| MoeLayer::builder(&group, gate(), HIDDEN, swiglu(experts));
        let right = || if bad { builder(3..5) } else { builder(0..3) };
        let wrong = [
            if bad { builder(3..4) } else { right() },
            if bad { right().router(vec![0.0; 3]) } else { right() },
            if bad { right().chunks(0) } else { right() },
            if bad { right().shared(swiglu(0..2)) } else { right() },
            if bad { right().shared(wide(1)) } else { right() },
            if bad { MoeLayer::builder(&group, gate(), HIDDEN, wide(2)) } else { right() },
            if bad { right().dtype(Dtype::Bytes) } else { right() },
            if bad { MoeLayer::builder(&group, gate(), usize::MAX / 2, swiglu(3..5)) } else { right() },
        ];
        for builder in wrong {
            let error = builder.build().unwrap_err();
            assert_eq!(matches!(error, Error::Plan(_)), bad, "{error}");
            assert_eq!(matches!(error, Error::Call(CallError::ConfigsDiffer { .. })), !bad, "{error}");
        }
        let error = right().chunks(2 + world.rank()).build().unwrap_err();
        assert!(matches!(error, Error::Call(CallError::ConfigsDiffer { what: "chunks", .. })), "{error}");
        let error = right().chunks(4).transfers(1 + world.rank()).build().unwrap_err();
        assert!(
            matches!(error, Error::Call(CallError::ConfigsDiffer { what: "transfers at once", .. })),
            "{error}"
        );
        let differ = |builder: MoeLayerBuilder<'_>, of: &str| {
            let error = builder.build().unwrap_err();
            let named =
                matches!(error, Error::Call(CallError::ConfigsDiffer { what, .. }) if what.contains(of));
            assert!(named, "{of}: {error}");
        };
        let otherwise = |change: fn(&mut GateConfig)| {
            let mut gate = gate();
            if bad {
                change(&mut gate);
            }
            MoeLayer::builder(&group, gate, HIDDEN, swiglu(if bad { 3..5 } else { 0..3 }))
        };
        differ(otherwise(|gate| gate.scaling = 2.5), "gate");
        differ(otherwise(|gate| gate.score = ScoreFunction::Sigmoid), "gate");
        differ(right().z_loss(if bad { 0.25 } else { 0.5 }), "losses");
        differ(if bad { right().balance(balance()) } else { right() }, "losses");
        differ(if bad { right().shared(swiglu(0..1)) } else { right() }, "shared expert");
        let rule = ChunkRule::new(64, 1, 2 + world.rank());
        differ(right().slices(rule), "chunks");
        let noisy = gate().with_noise(Noise::Jitter { eps: 0.1 });
        let experts = swiglu(if bad { 3..5 } else { 0..3 });
        let error = MoeLayer::builder(&group, noisy, HIDDEN, experts).build().unwrap_err();
        assert!(matches!(error, Error::Plan(PlanError::BadParameter { parameter: "noise", .. })), "{error}");
        right().build().unwrap();
    });
}
