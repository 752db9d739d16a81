//! Two microbatches at once: Megatron's launch order, literally, and what waits for what.

use std::sync::Mutex;

use proptest::prelude::*;
use sidelane::overlap::{Body, Graph, HostExecutor, LayerStep, Passes, Run, StreamId};

fn names(order: &[LayerStep]) -> Vec<&'static str> {
    order.iter().map(|step| step.name()).collect()
}

#[test]
fn the_launch_order_is_megatrons() {
    let late = [
        "combine backward",
        "before",
        "experts backward",
        "dispatch",
        "experts weights",
        "dispatch backward",
        "experts",
        "combine",
        "before backward",
        "before weights",
    ];
    assert_eq!(names(&LayerStep::one_f_one_b(false)), late);
    let early = [
        "combine backward",
        "before",
        "experts backward",
        "dispatch",
        "experts weights",
        "dispatch backward",
        "before backward",
        "experts",
        "combine",
        "before weights",
    ];
    assert_eq!(names(&LayerStep::one_f_one_b(true)), early);
}

#[test]
fn each_stream_has_its_order() {
    let on = |stream: StreamId| {
        let steps: Vec<LayerStep> =
            LayerStep::one_f_one_b(false).into_iter().filter(|step| step.stream() == stream).collect();
        names(&steps)
    };
    let transfer = ["combine backward", "dispatch", "dispatch backward", "combine"];
    assert_eq!(on(StreamId::Transfer(0)), transfer);
    let compute =
        ["before", "experts backward", "experts weights", "experts", "before backward", "before weights"];
    assert_eq!(on(StreamId::Compute(0)), compute);
}

#[test]
fn every_step_takes_the_result_of_an_earlier_one() {
    for order in [LayerStep::one_f_one_b(false), LayerStep::one_f_one_b(true)] {
        let first: Vec<LayerStep> = order.into_iter().filter(|step| step.after().is_none()).collect();
        assert_eq!(names(&first), ["combine backward", "before"], "one of each pass");
        for (at, step) in order.iter().enumerate() {
            assert!(step.after().is_none_or(|before| order[..at].contains(&before)), "{}", step.name());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Layers with steps left out at random, one behind the other: each pass still goes through all
    /// of its steps in order.
    #[test]
    fn passes_go_through_their_layers_in_order(
        layers in prop::collection::vec((any::<bool>(), prop::array::uniform10(any::<bool>())), 1..5),
        overlap in any::<bool>(),
    ) {
        let log = Mutex::new(Vec::new());
        let mut graph: Graph<'_, Run> = Graph::new();
        let mut expected = Vec::new();
        let mut behind = Passes::default();
        for (layer, (early, has)) in layers.iter().enumerate() {
            let log = &log;
            let order = LayerStep::one_f_one_b(*early);
            behind = graph.add_one_f_one_b(*early, [7, 3], behind, |step| {
                let at = order.iter().position(|one| *one == step).unwrap();
                has[at].then(|| {
                    expected.push((layer, step));
                    Box::new(move |_: &Run| {
                        log.lock().unwrap().push((layer, step));
                        Ok(())
                    }) as Body<'_, Run>
                })
            });
        }
        let chunks: Vec<(&str, u32)> = graph.places().map(|at| (at.work.name, at.work.chunk)).collect();
        for (name, chunk) in chunks {
            let forward = ["before", "dispatch", "experts", "combine"].contains(&name);
            prop_assert_eq!(chunk, if forward { 7 } else { 3 }, "{}", name);
        }
        graph.run(&HostExecutor::new().overlap(overlap)).unwrap();
        let ran = log.into_inner().unwrap();
        prop_assert_eq!(ran.len(), expected.len());
        let pass = |ran: &[(usize, LayerStep)], wanted| {
            ran.iter().filter(|(_, step)| step.pass == wanted).copied().collect::<Vec<_>>()
        };
        use sidelane::overlap::Direction::{Backward, Forward, WeightGradient};
        for wanted in [Forward, Backward, WeightGradient] {
            prop_assert_eq!(pass(&ran, wanted), pass(&expected, wanted));
        }
        for (at, (layer, step)) in ran.iter().enumerate() {
            let before = step.after().map(|before| (*layer, before)).filter(|before| expected.contains(before));
            prop_assert!(before.is_none_or(|before| ran[..at].contains(&before)), "{} {}", layer, step.name());
        }
    }
}
