//! Plans of choices by the device: the host's, the first fault by name, and refusals.

use sidelane::device::{PlaceArgs, PlanArgs, RunArgs, SortArgs};
use sidelane::error::DeviceError;
use sidelane::plan::RowLayout;
use sidelane_testkit::device::kernels::plan_choices::Case;

use super::buffer::{Buffer, POISON};
use super::{Device, with_kernels};
use crate::rows_common::Random;

const SEED: u64 = 0x9e1a_77d3;

const SIZES: [(u32, u32); 6] = [(1, 1), (2, 3), (40, 8), (257, 2), (1100, 4), (33, 40)];

#[test]
fn device_plan_equals_host_plan_until_own_rows_have_landed() {
    let test = "kernels::plan_choices::device_plan_equals_host_plan_until_own_rows_have_landed";
    with_kernels(test, |device| {
        println!("seed {SEED:#x}");
        let mut random = Random(SEED);
        for (layout, size) in RowLayout::ALL.into_iter().flat_map(|layout| SIZES.map(|size| (layout, size))) {
            let checked = Case::any(&mut random, layout, size).unwrap().check(&device.bench(), &mut random);
            checked.unwrap_or_else(|error| panic!("{layout:?} {size:?}: {error}"));
        }
    });
}

#[test]
fn the_first_wrong_choice_is_named_as_by_the_host() {
    with_kernels("kernels::plan_choices::the_first_wrong_choice_is_named_as_by_the_host", |device| {
        println!("seed {SEED:#x}");
        let mut random = Random(SEED + 1);
        for (layout, size) in RowLayout::ALL.into_iter().flat_map(|layout| SIZES.map(|size| (layout, size))) {
            for _ in 0..6 {
                let mut case = Case::any(&mut random, layout, size).unwrap();
                let experts = case.map.experts() as i32;
                for _ in 0..3 {
                    let at = (random.next() % u64::from(case.choices())) as usize;
                    match random.next() % 6 {
                        0 => case.ids[at] = experts,
                        1 => case.ids[at] = -2,
                        2 => case.ids[at] = i32::MIN,
                        3 => case.ids[at] = case.ids[at - at % size.1 as usize],
                        _ => case.weights[at] = f32::NAN,
                    }
                }
                let bench = device.bench();
                let fault = case.fault(&bench, &case.plan(&bench).unwrap()).unwrap();
                assert_eq!(fault, case.sorted().err(), "{layout:?} {size:?}");
            }
        }
    });
}

#[test]
fn memory_that_is_too_small_is_refused_by_name() {
    with_kernels("kernels::plan_choices::memory_that_is_too_small_is_refused_by_name", |device| {
        let Device { context, stream, kernels } = device;
        let memory = Buffer::new(context, 2048);
        let sort = SortArgs {
            experts: memory.part(0, 24),
            choices: 6,
            top_k: 2,
            bin_of: memory.part(64, 16),
            n_experts: 4,
            bins: 3,
            once: true,
            order: memory.part(128, 24),
        };
        let good = PlanArgs {
            sort,
            weights: memory.part(192, 24),
            local_of: memory.part(256, 16),
            place_of: memory.part(320, 12),
            rows: memory.part(384, 24),
            places: memory.part(448, 24),
            metadata: memory.part(512, 96),
            kept: Some(memory.part(640, 24)),
            counts: memory.part(704, 12),
            faults: memory.part(768, 36),
        };
        for (plan, what, given, needed) in [
            (PlanArgs { sort: SortArgs { order: memory.part(128, 23), ..sort }, ..good }, "order", 23, 24),
            (PlanArgs { weights: memory.part(192, 23), ..good }, "weights", 23, 24),
            (PlanArgs { local_of: memory.part(256, 15), ..good }, "local_of", 15, 16),
            (PlanArgs { place_of: memory.part(320, 11), ..good }, "place_of", 11, 12),
            (PlanArgs { rows: memory.part(384, 23), ..good }, "rows", 23, 24),
            (PlanArgs { places: memory.part(448, 23), ..good }, "places", 23, 24),
            (PlanArgs { metadata: memory.part(512, 95), ..good }, "metadata", 95, 96),
            (PlanArgs { kept: Some(memory.part(640, 23)), ..good }, "kept", 23, 24),
            (PlanArgs { counts: memory.part(704, 11), ..good }, "counts", 11, 12),
            (PlanArgs { faults: memory.part(768, 35), ..good }, "faults", 35, 36),
        ] {
            let expected = DeviceError::TooSmall { kernel: "plan_choices", what, given, needed };
            assert_eq!(kernels.plan_choices(stream, &plan), Err(expected));
        }
        let none = PlanArgs { sort: SortArgs { bins: 0, ..sort }, ..good };
        let refused = kernels.plan_choices(stream, &none);
        assert!(matches!(refused, Err(DeviceError::Shape { what: "bins", .. })), "{refused:?}");
        let runs = RunArgs { runs: memory.part(832, 16), count: 1, entries: 6, places: 5 };
        let good = PlaceArgs {
            choices: 6,
            rows: memory.part(384, 24),
            behind: 6,
            words: 4,
            from: memory.part(512, 96),
            metadata: memory.part(896, 80),
            own: 3,
            runs,
        };
        for (place, what, given, needed) in [
            (PlaceArgs { rows: memory.part(384, 23), ..good }, "rows", 23, 24),
            (PlaceArgs { from: memory.part(512, 95), ..good }, "from", 95, 96),
            (PlaceArgs { metadata: memory.part(896, 79), ..good }, "metadata", 79, 80),
            (PlaceArgs { runs: RunArgs { runs: memory.part(832, 15), ..runs }, ..good }, "runs", 15, 16),
        ] {
            let expected = DeviceError::TooSmall { kernel: "place_choices", what, given, needed };
            assert_eq!(kernels.place_choices(stream, &place), Err(expected));
        }
        let refused = kernels.place_choices(stream, &PlaceArgs { words: 0, ..good });
        assert!(matches!(refused, Err(DeviceError::Shape { what: "words", .. })), "{refused:?}");
        stream.synchronize().unwrap();
        assert!(memory.content().iter().all(|&byte| byte == POISON), "nothing was launched");
    });
}
