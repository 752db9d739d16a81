//! Compares accesses of planners and callers between stages with those that the proof orders
//! ([footprints](crate::ep::footprints)), in all windows.

use sidelane_verify::unroll::{Call, ProofScenario, SeededBug, UnrolledProgram};

use crate::ep::device::tests::support::{on_ranks, small};
use crate::ep::footprints::{
    BUGS, HIDDEN, Places, REFUSED, ROWS, TOP_K, difference, expected, groups, routings, scenario, seen,
};
use crate::ep::{CombineInput, ExpertParallel, ExpertRows, Handle, Tensor};
use crate::gate::Routing;
use crate::lane::Port;
use crate::memory::access;
use crate::plan::{ExpertMap, Overflow, ReceiveMode, RowLayout, Strategy, SumOrder};
use crate::schedule::ReturnParts;
use crate::topology::{NodeMap, Route};
use crate::{Dtype, World};

const BOTH: ReturnParts = ReturnParts { rows: true, weights: true };
/// Calls with rows that are kept and read late, with outputs in place and copied, and calls that a
/// rank refuses.
const CALLS: [Call; 9] = [
    Call::Dispatch { routing: 0, keep: true },
    Call::Cached { handle: 0 },
    Call::Return { handle: 0, parts: ROWS, copied: false },
    Call::RefusedCached { handle: 0 },
    Call::Dispatch { routing: 1, keep: true },
    Call::Return { handle: 1, parts: BOTH, copied: true },
    Call::RefusedReturn { handle: 1 },
    Call::Agree,
    Call::Dispatch { routing: 1, keep: false },
];
/// Dispatches by all-gather.
const GATHERED: [Call; 2] =
    [Call::Dispatch { routing: 0, keep: true }, Call::Dispatch { routing: 1, keep: true }];

/// Settings of an instance, and where its ranks are.
#[derive(Clone, Copy, Debug)]
struct Case {
    nodes: &'static [u32],
    route: Route,
    layout: RowLayout,
    mode: ReceiveMode,
    order: SumOrder,
    strategy: Strategy,
}

impl Case {
    fn map(&self) -> ExpertMap {
        let ranks = self.nodes.len() as u32;
        ExpertMap::contiguous(2 * ranks, ranks).unwrap()
    }

    fn unroll(
        &self,
        routings: &[Vec<Routing<'static>>],
        calls: &[Call],
        seeded: Option<SeededBug>,
    ) -> UnrolledProgram {
        let Case { route, layout, mode, order, strategy, .. } = *self;
        let (nodes, map) = (NodeMap::from_labels(self.nodes), self.map());
        let hosts = scenario((&nodes, &map), (routings, calls), seeded);
        let scenario = ProofScenario { route, layout, mode, order, strategy, ..hosts };
        UnrolledProgram::unroll(&scenario).unwrap()
    }

    /// Makes the calls at a rank; what it did in each.
    fn make(&self, world: &World, routings: &[Vec<Routing<'static>>], calls: &[Call]) -> Vec<Places> {
        let Case { route, layout, mode, order, strategy, .. } = *self;
        let group = world.all().unwrap();
        let (me, tokens) = (group.rank() as usize, 2 * group.size());
        let builder = ExpertParallel::builder(&group).expert_map(self.map()).top_k(TOP_K).hidden(HIDDEN);
        let builder = builder.dtype(Dtype::Bf16).max_tokens(tokens).route(route).layout(layout);
        let mut ep = builder.mode(mode).sum_order(order).strategy(strategy).build().unwrap();
        let x = vec![half::bf16::ONE; tokens as usize * HIDDEN];
        let mut handles: Vec<(Option<ExpertRows>, Handle)> = Vec::new();
        let mut all = Vec::new();
        for call in calls {
            access::begin();
            match *call {
                Call::Dispatch { routing, keep } => {
                    let (rows, handle) = ep.dispatch(&x, &routings[routing][me]).unwrap();
                    rows.rows::<u8>().unwrap();
                    handles.push((keep.then_some(rows), handle));
                }
                Call::Cached { handle } => {
                    ep.dispatch_cached(&x, &handles[handle].1).unwrap().rows::<u8>().unwrap();
                }
                Call::Return { handle, parts, copied } => {
                    let (rows, handle) = &mut handles[handle];
                    let rows = rows.take();
                    if let Some(rows) = &rows {
                        rows.rows::<u8>().unwrap();
                    }
                    drop(rows);
                    let landed = handle.rows() as usize;
                    let copy = vec![half::bf16::ONE; landed * HIDDEN];
                    let y: CombineInput<'_> = match copied {
                        true => Tensor::from(&copy).into(),
                        false => {
                            let mut output = handle.output().unwrap();
                            output.rows_mut::<u8>().unwrap().fill(0);
                            output.into()
                        }
                    };
                    let ones = vec![1.0; handle.row_weights().len()];
                    if parts.weights {
                        ep.dispatch_backward::<half::bf16>(y, Some(&ones), handle).map(drop).unwrap();
                    } else {
                        ep.combine::<half::bf16>(y, handle).unwrap();
                    }
                }
                Call::RefusedDispatch { routing } => {
                    ep.dispatch(&x, &routings[routing][me]).unwrap_err();
                }
                // One rank brings a tensor of another shape.
                Call::RefusedCached { handle } => {
                    let x = if me == 0 { &x[..HIDDEN] } else { &x[..] };
                    ep.dispatch_cached(x, &handles[handle].1).unwrap_err();
                }
                Call::RefusedReturn { handle } => {
                    let mut output = handles[handle].1.output().unwrap();
                    output.rows_mut::<u8>().unwrap().fill(0);
                    let y: CombineInput<'_> =
                        if me == 0 { Tensor::from(&x[..HIDDEN]).into() } else { output.into() };
                    ep.combine::<half::bf16>(y, &handles[handle].1).unwrap_err();
                }
                Call::Agree => {
                    handles.clear();
                    ep.set_expert_map(self.map()).unwrap();
                }
                _ => unreachable!("not in the lists"),
            }
            let events = access::take();
            let host = ep.host(crate::ep::Feature::Floor).unwrap();
            let gathers = host.gather.as_ref().map(|gather| &*gather.engine.fixed.port);
            let ports: Vec<&Port> = gathers.into_iter().chain([&*host.fixed.port]).collect();
            all.push(seen(events, &ports));
        }
        group.gather(&[]).unwrap();
        all
    }

    /// Makes the calls and compares the accesses of ranks with the unrolled program. Returns the
    /// first difference.
    fn compare(&self, calls: &[Call], seeded: Option<SeededBug>) -> Option<String> {
        let routings = routings(self.nodes.len() as u32);
        let unrolled = self.unroll(&routings, calls, seeded);
        let each = unrolled.calls.len() / calls.len();
        let made = on_ranks(self.nodes, &small(), |world| self.make(&world, &routings, calls));
        let mut all = made
            .iter()
            .enumerate()
            .flat_map(|(rank, made)| made.iter().enumerate().map(move |nth| (rank, nth)));
        all.find_map(|(rank, (nth, seen))| {
            let mut expected = Places::new();
            for call in &unrolled.calls[nth * each..][..each] {
                // A call that another follows at once is not the caller's.
                expected.pop_if(|(name, accesses)| *name == "end" && accesses.is_empty());
                self::expected(&call[rank].scenes, &mut expected);
            }
            let difference = difference(&expected, seen)?;
            Some(format!("{self:?}: rank {rank}, {:?}: {difference}", calls[nth]))
        })
    }

    fn check(&self, calls: &[Call]) {
        assert_eq!(self.compare(calls, None), None);
    }
}

const CASE: Case = Case {
    nodes: &[0, 0, 0],
    route: Route::Direct,
    layout: RowLayout::ExpertMajor,
    mode: ReceiveMode::Exact,
    order: SumOrder::Expert,
    strategy: Strategy::AllToAll,
};

#[test]
fn steps_access_what_the_proof_assumes() {
    for (nodes, route) in groups() {
        for layout in RowLayout::ALL {
            let overflow = Overflow::Drop;
            for mode in [
                ReceiveMode::Exact,
                ReceiveMode::Budget { rows: 9, overflow },
                ReceiveMode::Slots { rows: 3, overflow },
            ] {
                Case { nodes, route, layout, mode, ..CASE }.check(&CALLS);
            }
        }
        Case { nodes, route, order: SumOrder::Node, ..CASE }.check(&CALLS);
        Case { nodes, route, mode: ReceiveMode::Budget { rows: 1, overflow: Overflow::Error }, ..CASE }
            .check(&REFUSED);
        Case { nodes, route, strategy: Strategy::AllGather, ..CASE }.check(&GATHERED);
    }
}

#[test]
fn program_of_another_enqueuer_differs() {
    let case = Case { nodes: &[0, 0, 1, 1], route: Route::Pxn, ..CASE };
    for seeded in BUGS {
        assert!(case.compare(&CALLS, Some(seeded)).is_some(), "{seeded:?}");
    }
}
