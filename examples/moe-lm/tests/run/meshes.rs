//! Ranks of a mesh learn what one process learns that replays their sums, to the bit.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use moe_lm::batches::Batches;
use moe_lm::error::Error;
use moe_lm::mesh::{
    Context, MeshTrainer, ScheduleName, Sizes, Strategy, StrategyError, TensorPart, Traffic, Zero, checkpoint,
};
use moe_lm::reference::Reference;
use moe_lm::settings::{Settings, Shape};
use moe_lm::trainer::{History, Trainer};
use serde_json::Value;
use sidelane::{Options, World};
use sidelane_parallel::pipeline::Pass;

use crate::case::{TEXT, batches, settings};
use crate::program::{many_ranks_of, ranks_of, said};
use crate::rounding::{Exact, Near};

/// A model whose sizes go with all meshes here. A balance of windows would go with none that cuts
/// them.
fn small() -> Settings {
    let of = settings(1, 1);
    let shape = Shape { layers: 4, heads: 4, kv_heads: 4, ..of.shape };
    Settings { shape, balance: 0.0, steps: 2, ..of }
}

fn strategy(sizes: &str) -> Strategy {
    Strategy::of(sizes.parse().unwrap())
}

/// Whole tensors, by name, with the values that ranks have of them.
pub type Tensors = BTreeMap<String, Vec<f32>>;

/// Result of a run: losses, and the whole parameters.
#[derive(Clone, Debug, PartialEq)]
struct Outcome {
    losses: Vec<u32>,
    parameters: Tensors,
}

/// Puts values in their places. Ranks that have the same must have the same bits.
fn put(all: &mut Tensors, named: &[TensorPart]) {
    for TensorPart { name, values } in named {
        let tensor = all.entry(name.clone()).or_default();
        for &(place, value) in values {
            tensor.resize(tensor.len().max(place + 1), f32::NAN);
            let seen = std::mem::replace(&mut tensor[place], value);
            assert!(seen.is_nan() || seen.to_bits() == value.to_bits(), "{name}: copies differ at {place}");
        }
    }
}

/// Does the same on each rank, with its trainer.
fn on_ranks<T: Send>(
    settings: &Settings,
    strategy: &Strategy,
    each: impl Fn(Result<MeshTrainer, Error>) -> T + Sync,
) -> Vec<T> {
    on_ranks_with(settings, strategy, &batches(settings), each)
}

/// The same, of other windows. Each rank is a node of its own, so that bytes to other nodes are
/// those to other ranks.
fn on_ranks_with<T: Send>(
    settings: &Settings,
    strategy: &Strategy,
    batches: &Batches,
    each: impl Fn(Result<MeshTrainer, Error>) -> T + Sync,
) -> Vec<T> {
    let nodes: Vec<u32> = (0..strategy.sizes.ranks()).collect();
    let worlds = World::threads_with(&nodes, &Options::default()).unwrap();
    std::thread::scope(|scope| {
        let ranks = worlds.into_iter().map(|world| {
            let each = &each;
            scope.spawn(move || each(MeshTrainer::new(&world, settings, strategy, batches.clone())))
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// All steps of a run.
fn finish(mut trainer: MeshTrainer) -> (Vec<f32>, Vec<TensorPart>) {
    while trainer.steps() < trainer.settings.steps {
        trainer.step().unwrap();
    }
    let steps = trainer.settings.steps;
    finish_at(trainer, steps)
}

/// Losses and parameters of a run after some steps.
fn finish_at(mut trainer: MeshTrainer, steps: usize) -> (Vec<f32>, Vec<TensorPart>) {
    assert_eq!(trainer.steps(), steps);
    let parameters = trainer.parameters().unwrap();
    (trainer.history.losses.clone(), parameters)
}

fn outcome(ranks: Vec<(Vec<f32>, Vec<TensorPart>)>) -> Outcome {
    let mut parameters = Tensors::new();
    ranks.iter().for_each(|(_, named)| put(&mut parameters, named));
    assert!(parameters.values().flatten().all(|value| !value.is_nan()), "no rank has some value");
    let bits = |losses: &[f32]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    let losses = bits(&ranks[0].0);
    assert!(ranks.iter().all(|(other, _)| bits(other) == losses), "ranks have other losses");
    Outcome { losses, parameters }
}

fn run(settings: &Settings, strategy: &Strategy) -> Outcome {
    outcome(on_ranks(settings, strategy, |trainer| finish(trainer.unwrap())))
}

/// One process that replays all ranks.
fn reference(settings: &Settings, strategy: &Strategy) -> Outcome {
    let world = World::threads(1).unwrap().remove(0);
    let trainer = MeshTrainer::reference(&world, settings, strategy, batches(settings)).unwrap();
    outcome(vec![finish(trainer)])
}

/// Checks that values are within the bound of their roundings.
fn assert_near<T: Copy + Into<f64>>(seen: &[T], exact: &[Near], name: &str) {
    assert_eq!(seen.len(), exact.len(), "{name}");
    for (nth, (&seen, Near { value, off })) in seen.iter().zip(exact).enumerate() {
        let seen: f64 = seen.into();
        assert!((seen - value).abs() <= *off, "{name}[{nth}]: {seen}, not {value} by {off}");
    }
}

/// Means over all ranks that have a value, without a rounding.
fn means(ranks: &[Vec<TensorPart>]) -> BTreeMap<String, Vec<f64>> {
    let mut sums = BTreeMap::<String, Vec<(f64, f64)>>::new();
    for TensorPart { name, values } in ranks.iter().flatten() {
        let tensor = sums.entry(name.clone()).or_default();
        for &(place, value) in values {
            tensor.resize(tensor.len().max(place + 1), (0.0, 0.0));
            tensor[place] = (tensor[place].0 + f64::from(value), tensor[place].1 + 1.0);
        }
    }
    let mean = |(name, sums): (String, Vec<(f64, f64)>)| {
        (name, sums.into_iter().map(|(sum, ranks)| sum / ranks).collect())
    };
    sums.into_iter().map(mean).collect()
}

#[test]
fn a_mesh_and_candles_model_have_the_loss_and_gradients_within_their_roundings() {
    let tiny = small();
    // Few terms a sum, and tokens that do not change with pages: so the bound stays narrow.
    let (vocabulary, window, layers, width, heads, experts, expert_width) = (8, 4, 1, 4, 2, 4, 2);
    let shape = Shape { vocabulary, window, layers, width, heads, experts, expert_width, ..tiny.shape };
    let tokens: Vec<u32> = (0..8192).map(|nth| (nth * nth / 7 + nth) % vocabulary as u32).collect();
    let tiny = Settings { shape, batch: 2, seed: 31, ..tiny };
    for (balance, kv_heads, tied) in [(0.0, 2, true), (1.0, 1, false)] {
        let settings = Settings { balance, shape: Shape { kv_heads, tied, ..shape }, ..tiny };
        let batches = || Batches::new(&tokens, &settings).unwrap();
        let alone = || World::threads(1).unwrap().remove(0);
        let in_turn = Reference::new(alone(), &settings).unwrap();
        let mut plain = Trainer::new(settings, in_turn, batches());
        let mut weights = Tensors::new();
        for learned in [&plain.state.dense, &plain.state.experts] {
            for entry in &learned.weights.entries {
                let values = learned.weights.values[entry.range.clone()].to_vec();
                weights.insert(entry.name.clone(), values);
            }
        }
        let mut exact = Exact::new(&settings, &weights);
        let loss = exact.pass(&batches().of_step(&settings, 0, 0..settings.batch));

        assert_near(&[plain.step().unwrap()], &[loss], "loss");
        // Products that are cut and sums over ranks are sums in another order, and all factors are
        // powers of two.
        let cut = ["tp=2", "tp=2,ep=2", "cp=2", "cp=2,ep=2", "dp=2,tp=2,ep=2", "dp=2,cp=2,ep=4"];
        let whole = ["dp=1", "dp=2", "dp=2,ep=2"];
        for sizes in whole.into_iter().chain(cut.into_iter().filter(|_| balance == 0.0)) {
            let ranks = on_ranks_with(&settings, &strategy(sizes), &batches(), |trainer| {
                let mut mesh = trainer.unwrap();
                (mesh.step().unwrap(), mesh.local_gradients())
            });
            let (losses, gradients): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
            assert_near(&losses, &vec![loss; losses.len()], sizes);
            let gradients = means(&gradients);
            assert!(gradients.keys().eq(exact.gradients.keys()));
            for (name, of_mesh) in &gradients {
                assert_near(of_mesh, &exact.gradients[name], &format!("{sizes}: {name}"));
            }
        }
        // After one step the first mean is a tenth of the gradient.
        let tenth = Near { value: (1.0 - 0.9f64) as f32 as f64, off: 0.0 };
        for learned in [&plain.state.dense, &plain.state.experts] {
            for entry in &learned.weights.entries {
                let expected: Vec<_> = exact.gradients[&entry.name].iter().map(|&of| of * tenth).collect();
                assert_near(&learned.adam.first[entry.range.clone()], &expected, &entry.name);
            }
        }
        // The bound tells a gradient from none.
        for (name, gradient) in &exact.gradients {
            let largest = |of: fn(&Near) -> f64| gradient.iter().map(of).fold(0.0, f64::max);
            let (value, off) = (largest(|of| of.value.abs()), largest(|of| of.off));
            assert!(off < value || value == 0.0, "{name}: {off} of {value}");
        }
    }
}

#[test]
fn data_and_expert_parallel_ranks_have_bits_of_one_process() {
    let small = small();
    for (sizes, batch, experts, microbatches) in [
        ("dp=2", 8, 16, 1),
        ("dp=2,ep=2", 8, 16, 2),
        ("dp=4,ep=2", 8, 16, 2),
        ("dp=4,ep=4", 8, 16, 1),
        ("dp=3,ep=3", 6, 12, 2),
    ] {
        let shape = Shape { experts, ..small.shape };
        let settings = Settings { shape, batch, balance: 0.01, ..small };
        let strategy = Strategy { microbatches, ..strategy(sizes) };
        assert_eq!(run(&settings, &strategy), reference(&settings, &strategy), "{sizes}");
    }
}

#[test]
fn no_schedule_and_no_zero_stage_changes_a_bit() {
    let settings = Settings { balance: 0.01, ..small() };
    let of = |sizes, microbatches| Strategy { microbatches, ..strategy(sizes) };
    let expected = reference(&settings, &of("dp=2,ep=2", 4));
    let orders = [
        ScheduleName::GPipe,
        ScheduleName::OneFOneB,
        ScheduleName::Interleaved(2),
        ScheduleName::ZeroBubbleH1,
    ];
    for order in orders {
        let strategy = Strategy { order: Some(order), ..of("pp=2,dp=2,ep=2", 4) };
        assert_eq!(run(&settings, &strategy), expected, "{order}");
    }
    for zero in [Zero::One, Zero::Two, Zero::Three] {
        let strategy = Strategy { zero, ..of("dp=2,ep=2", 4) };
        assert_eq!(run(&settings, &strategy), expected, "{zero:?}");
    }
    let all =
        Strategy { zero: Zero::Three, order: Some(ScheduleName::ZeroBubbleH1), ..of("pp=4,dp=2,ep=2", 4) };
    assert_eq!(run(&settings, &all), expected);
}

#[test]
fn tensor_and_context_parallel_ranks_have_the_bits_of_one_process_that_replays_them() {
    let settings = small();
    let ring = |sizes| Strategy { context: Some(Context::Ring), ..strategy(sizes) };
    for strategy in [
        strategy("cp=4,ep=2"),
        strategy("dp=2,cp=2,ep=4"),
        ring("cp=2"),
        ring("cp=4,ep=4"),
        strategy("tp=4,ep=2"),
        strategy("dp=2,tp=2,ep=2"),
        // With a window a microbatch, a tensor parallel rank has a part of it between layers.
        Strategy { microbatches: 8, ..strategy("tp=2,ep=2") },
        Strategy { zero: Zero::Three, microbatches: 2, ..strategy("cp=2,tp=2,ep=2") },
        Strategy { microbatches: 2, ..ring("pp=2,cp=2,tp=2,ep=4") },
    ] {
        assert_eq!(run(&settings, &strategy), reference(&settings, &strategy), "{}", strategy.sizes);
    }
}

#[test]
fn ranks_with_fewer_heads_of_keys_have_the_bits_of_one_process() {
    let of = |kv_heads| {
        let small = small();
        Settings { shape: Shape { kv_heads, ..small.shape }, ..small }
    };
    // With one head of keys, Ulysses gives each rank a replica of it.
    for (kv_heads, sizes, context) in [
        (2, "dp=2,tp=2,ep=2", None),
        (2, "cp=2,tp=2", Some(Context::Ulysses)),
        (1, "cp=4,ep=4", Some(Context::Ulysses)),
        (1, "cp=2", Some(Context::Ring)),
    ] {
        let strategy = Strategy { context, ..strategy(sizes) };
        assert_eq!(run(&of(kv_heads), &strategy), reference(&of(kv_heads), &strategy), "{kv_heads}, {sizes}");
    }
}

/// Bytes of tied embeddings and of messages between stages are in this test, too.
#[test]
fn a_head_with_the_weights_of_the_embedding_learns_on_both_ends() {
    let small = small();
    let settings = Settings { shape: Shape { tied: true, ..small.shape }, ..small };
    let Shape { vocabulary, window, width, .. } = settings.shape;
    let interleaved = Some(ScheduleName::Interleaved(2));
    for strategy in [
        strategy("dp=2,tp=2"),
        Strategy { order: interleaved, zero: Zero::Two, microbatches: 4, ..strategy("pp=2,dp=2,ep=2") },
        Strategy { microbatches: 4, ..strategy("pp=4,tp=2") },
        Strategy { microbatches: 2, ..strategy("pp=2,cp=2") },
        Strategy { microbatches: 2, context: Some(Context::Ring), ..strategy("pp=2,cp=2,tp=2") },
    ] {
        // Both ends have the embedding, with the same bits.
        let (seen, traffic) = run_with_traffic(&settings, &strategy);
        assert_eq!(seen, reference(&settings, &strategy), "{}", strategy.sizes);
        assert!(!seen.parameters.contains_key("head"));
        let Sizes { pp, dp, cp, tp, .. } = strategy.sizes;
        let (message, chunks) = (4 * settings.batch * window * width, strategy.model_chunks());
        for (rank, of_rank) in (0..).zip(traffic) {
            let stage = rank / (dp * cp * tp);
            // Outputs go to the next virtual stage, and gradients to the one before.
            let borders = match stage {
                _ if pp == 1 => 0,
                0 => 2 * chunks - 1,
                last if last + 1 == pp => 2 * chunks - 1,
                _ => 2 * chunks,
            };
            let is_end = pp > 1 && (stage == 0 || stage + 1 == pp);
            let token = if is_end { 4 * vocabulary * width / tp as usize } else { 0 };
            let messages = borders as usize * message / (dp * cp * tp) as usize;
            // All stages hear of each whether it has failed.
            let verdicts = pp as usize - 1;
            let sent = (messages + token + verdicts) as u64;
            assert_eq!(of_rank.pp.inter_node_bytes, sent, "{}, {rank}", strategy.sizes);
        }
    }
}

#[test]
fn the_heads_of_ulysses_give_each_token_the_bits_of_one_process() {
    let settings = small();
    let one = on_ranks(&settings, &Strategy::of(Sizes::ONE), |trainer| trainer.unwrap().step().unwrap());
    for sizes in ["cp=2,ep=2", "cp=4", "pp=2,dp=2,cp=2,ep=4"] {
        let ranks = on_ranks(&settings, &strategy(sizes), |trainer| trainer.unwrap().step().unwrap());
        assert!(ranks.iter().all(|loss| loss.to_bits() == one[0].to_bits()), "{sizes}: {ranks:?} {one:?}");
    }
}

#[test]
fn strategies_that_do_not_fit_are_refused_on_every_rank() {
    let settings = small();
    let worlds = [2, 3, 4].map(|ranks| World::threads(ranks).unwrap());
    let refused = |settings: Settings, strategy: Strategy, ranks: usize| {
        let errors = worlds[ranks - 2].iter().map(|world| {
            // One after another: a rank that waited for another one would never end.
            MeshTrainer::new(world, &settings, &strategy, batches(&settings)).err().unwrap().to_string()
        });
        let errors: Vec<_> = errors.collect();
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
        errors[0].clone()
    };
    let shape = |shape| Settings { shape, ..settings };
    let base = settings.shape;
    for (settings, strategy, ranks, expected) in [
        (settings, strategy("dp=2"), 3, "3 ranks, but pp 1 x dp 2 x cp 1 x tp 1 = 2"),
        (settings, strategy("dp=3,ep=2"), 3, "ep 2 x etp 1 = 2 does not divide dp 3 x cp 1 x tp 1 = 3"),
        (settings, strategy("tp=3"), 3, "tokens of a microbatch, by tp: 128 is not a multiple of 3"),
        (
            shape(Shape { heads: 2, kv_heads: 2, ..base }),
            strategy("tp=4"),
            4,
            "heads, by tp: 2 is not a multiple of 4",
        ),
        (settings, strategy("cp=3"), 3, "tokens of a window, by the pieces of cp: 16 is not a multiple of 6"),
        (settings, strategy("pp=3"), 3, "layers, by stages and model chunks: 4 is not a multiple of 3"),
        (
            shape(Shape { experts: 15, ..base }),
            strategy("dp=2,ep=2"),
            2,
            "experts, by ep: 15 is not a multiple of 2",
        ),
        (
            settings,
            Strategy { microbatches: 8, ..strategy("dp=2") },
            2,
            "windows of a step, by dp and microbatches: 8 is not a multiple of 16",
        ),
        (
            settings,
            Strategy { zero: Zero::Two, ..strategy("tp=2") },
            2,
            "--zero cuts state over dp x cp ranks, and the mesh has one: name dp",
        ),
        (
            settings,
            Strategy { order: Some(ScheduleName::GPipe), ..strategy("dp=2") },
            2,
            "--schedule orders the passes of stages, and the mesh has one: name pp",
        ),
        (
            settings,
            Strategy { order: Some(ScheduleName::Interleaved(2)), ..strategy("pp=2") },
            2,
            "1 microbatches on 2 stages: 1 mod 2 = 1, but 2 model chunks need whole rounds",
        ),
        (
            Settings { balance: 0.5, ..settings },
            strategy("tp=2"),
            2,
            "the balance is one of each window, and cp 1 x tp 2 cut windows over ranks: give --balance 0",
        ),
    ] {
        assert_eq!(refused(settings, strategy, ranks), expected, "{}", strategy.sizes);
    }
    for (said, expected) in [
        ("tp=2,dp", StrategyError::Dimension { said: "dp".into() }),
        ("tp=two", StrategyError::Dimension { said: "tp=two".into() }),
        ("etp=2", StrategyError::Dimension { said: "etp=2".into() }),
        ("tp=2,tp=2", StrategyError::Twice { name: "tp".into() }),
    ] {
        assert_eq!(said.parse::<Sizes>(), Err(expected));
    }
}

#[test]
fn a_run_goes_on_over_another_mesh_from_its_checkpoint() {
    for tied in [false, true] {
        let small = small();
        goes_on(&Settings { steps: 4, shape: Shape { tied, ..small.shape }, ..small });
    }
}

fn goes_on(settings: &Settings) {
    let of = |sizes, zero, order| {
        let strategy = strategy(sizes);
        // Windows of dp ranks and microbatches are the same, for any mesh.
        Strategy { zero, order, microbatches: 4, ..strategy }
    };
    let meshes = [
        of("dp=2,ep=2", Zero::None, None),
        of("pp=2,dp=2,ep=2", Zero::Two, Some(ScheduleName::Interleaved(2))),
        of("pp=4,dp=2,ep=2", Zero::Three, Some(ScheduleName::ZeroBubbleH1)),
        of("dp=2,ep=2", Zero::One, None),
    ];
    let expected = reference(settings, &meshes[0]);
    let folder = tempfile::tempdir().unwrap();
    for (nth, strategy) in meshes.iter().enumerate() {
        let ranks = on_ranks(settings, strategy, |trainer| {
            let mut trainer = trainer.unwrap();
            if nth > 0 {
                let place = checkpoint::resume(&mut trainer, folder.path()).unwrap();
                assert!(place.ends_with(format!("step-{nth:06}")), "{place:?}");
            }
            trainer.step().unwrap();
            checkpoint::save(&trainer, folder.path()).unwrap();
            finish_at(trainer, nth + 1)
        });
        if nth + 1 == settings.steps {
            assert_eq!(outcome(ranks), expected);
        }
    }
    // Ranks that cut matrices, windows and experts in other ways read the same values.
    let moved = of("pp=2,cp=2,tp=2,ep=4", Zero::One, None);
    let ranks = on_ranks(settings, &moved, |trainer| {
        let mut trainer = trainer.unwrap();
        checkpoint::resume(&mut trainer, folder.path()).unwrap();
        checkpoint::save(&trainer, folder.path()).unwrap();
        finish_at(trainer, settings.steps)
    });
    assert_eq!(outcome(ranks), expected);
    let back = on_ranks(settings, &meshes[1], |trainer| {
        let mut trainer = trainer.unwrap();
        checkpoint::resume(&mut trainer, folder.path()).unwrap();
        finish_at(trainer, settings.steps)
    });
    assert_eq!(outcome(back), expected);
}

/// A checkpoint of one step by tensor parallel ranks of a seed.
fn checkpoint_of(seed: u64) -> tempfile::TempDir {
    let settings = Settings { seed, ..small() };
    let folder = tempfile::tempdir().unwrap();
    on_ranks(&settings, &strategy("tp=2"), |trainer| {
        let mut trainer = trainer.unwrap();
        trainer.step().unwrap();
        checkpoint::save(&trainer, folder.path()).unwrap();
    });
    folder
}

#[test]
fn shards_that_the_run_did_not_write_stop_all_ranks() {
    let settings = small();
    let [whole, other] = [settings.seed, settings.seed + 1].map(checkpoint_of);
    let damage = |shard: &Path| {
        let mut bytes = std::fs::read(shard).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(shard, bytes).unwrap();
    };
    for case in ["damaged", "swapped", "of another run", "missing", "fewer losses"] {
        let folder = tempfile::tempdir().unwrap();
        let step = folder.path().join("step-000001");
        std::fs::create_dir(&step).unwrap();
        for file in std::fs::read_dir(whole.path().join("step-000001")).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), step.join(file.file_name())).unwrap();
        }
        let [first, second] = ["cut-0.shard", "cut-1.shard"].map(|name| step.join(name));
        match case {
            "damaged" => damage(&second),
            "swapped" => {
                let kept = std::fs::read(&first).unwrap();
                std::fs::copy(&second, &first).unwrap();
                std::fs::write(&second, kept).unwrap();
            }
            "of another run" => {
                let shard = std::fs::read(other.path().join("step-000001/cut-1.shard")).unwrap();
                std::fs::write(&second, shard).unwrap();
            }
            "missing" => std::fs::remove_file(&second).unwrap(),
            _ => {
                let run = step.join("run.json");
                let mut text: serde_json::Value =
                    serde_json::from_slice(&std::fs::read(&run).unwrap()).unwrap();
                text["history"]["losses"] = serde_json::json!([]);
                std::fs::write(&run, text.to_string()).unwrap();
            }
        }
        let errors = on_ranks(&settings, &strategy("tp=2"), |trainer| {
            let mut trainer = trainer.unwrap();
            let error = checkpoint::resume(&mut trainer, folder.path()).unwrap_err();
            assert_eq!(trainer.steps(), 0);
            trainer.step().unwrap();
            error
        });
        for error in errors {
            match case {
                "missing" => {
                    assert!(matches!(error, Error::File { .. } | Error::NoCheckpoint { .. }), "{error}")
                }
                _ => assert!(matches!(error, Error::OtherRun { .. }), "{case}: {error}"),
            }
        }
    }
}

#[test]
fn spans_of_a_step_are_the_passes_of_the_plan_in_their_order() {
    let settings = small();
    let order = Some(ScheduleName::ZeroBubbleH1);
    let strategy = Strategy { order, microbatches: 4, ..strategy("pp=2,dp=2") };
    let plan = strategy.plan().unwrap();
    let ranks = on_ranks(&settings, &strategy, |trainer| {
        let mut trainer = trainer.unwrap();
        trainer.step().unwrap();
        trainer.step().unwrap();
        trainer.spans_of_ranks().unwrap()
    });
    assert!(ranks.iter().all(|of| *of == ranks[0]));
    for (rank, spans) in ranks[0].iter().enumerate() {
        let passes: Vec<_> = spans.iter().map(|span| span.compute).collect();
        assert_eq!(passes, plan.passes(rank as u32 / 2).collect::<Vec<_>>(), "rank {rank}");
        assert!(spans.iter().all(|span| span.begin < span.end));
        assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].begin));
    }
}

/// A run, and what each rank moved and held in its last step.
fn run_with_traffic(settings: &Settings, strategy: &Strategy) -> (Outcome, Vec<Traffic>) {
    let ranks = on_ranks(settings, strategy, |trainer| {
        let mut trainer = trainer.unwrap();
        for _ in 0..settings.steps {
            trainer.step().unwrap();
        }
        (trainer.traffic_of_ranks().unwrap(), finish(trainer))
    });
    let (mut traffic, ranks): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
    assert!(traffic.iter().all(|of| *of == traffic[0]));
    (outcome(ranks), traffic.remove(0))
}

/// Bytes of each rank in its second step.
fn traffic(settings: &Settings, strategy: &Strategy) -> Vec<Traffic> {
    let ranks = on_ranks(settings, strategy, |trainer| {
        let mut trainer = trainer.unwrap();
        trainer.step().unwrap();
        trainer.step().unwrap();
        trainer.traffic_of_ranks().unwrap()
    });
    assert!(ranks.iter().all(|of| *of == ranks[0]));
    ranks[0].clone()
}

#[test]
fn recomputation_changes_no_bit_and_keeps_inputs_and_one_tape() {
    let settings = small();
    let Shape { window, layers, width, heads, vocabulary, experts, expert_width, .. } = settings.shape;
    let (microbatches, stages) = (4, 2);
    let tokens = settings.batch * window / 2 / microbatches as usize;
    // Of a token: inputs, outputs of attention, and their sum; queries, keys, values, outputs, and
    // two sums for each head.
    let block = (3 + 4) * width + 2 * heads;
    let tape = |stage: u32| {
        let head = if stage + 1 == stages { width + vocabulary } else { 0 };
        4 * tokens * (layers / stages as usize * block + head)
    };
    let message = |stage: u32| if stage == 0 { 0 } else { 4 * tokens * width };
    // Inputs and gradients of outputs of linear layers, of which gradients of weights that wait are
    // made; gradients of routers, of experts and of the embedding.
    let delayed = |stage: u32| {
        let own = layers / stages as usize;
        let linear = tokens * (own * 6 * width + if stage + 1 == stages { width + vocabulary } else { 0 });
        let made = own * (width * experts + experts / 2 * 3 * width * expert_width);
        4 * (linear + made + if stage == 0 { (vocabulary + window) * width } else { 0 })
    };
    let most_held = |strategy: &Strategy, stage: u32| {
        let (mut held, mut most) = (0, 0);
        for of in strategy.plan().unwrap().passes(stage) {
            let kept = if strategy.recompute { message(stage) } else { tape(stage) };
            let waits = if of.pass == Pass::BackwardInput { delayed(stage) } else { 0 };
            let steps = match of.pass {
                Pass::Forward => [kept as isize, 0],
                Pass::BackwardWeight => [-(delayed(stage) as isize), 0],
                _ => [tape(stage) as isize - kept as isize, waits as isize - tape(stage) as isize],
            };
            for step in steps {
                held += step;
                most = most.max(held);
            }
        }
        most as u64
    };
    for order in [ScheduleName::GPipe, ScheduleName::ZeroBubbleH1] {
        let kept = Strategy { order: Some(order), microbatches, ..strategy("pp=2,dp=2,ep=2") };
        let repeated = Strategy { recompute: true, ..kept };
        let [(all, of_all), (least, of_least)] =
            [kept, repeated].map(|strategy| run_with_traffic(&settings, &strategy));
        assert_eq!(least, all, "{order}");
        for (rank, (all, least)) in of_all.iter().zip(&of_least).enumerate() {
            let stage = rank as u32 / 2;
            assert_eq!(all.activation_bytes, most_held(&kept, stage), "{order}, {rank}");
            assert_eq!(least.activation_bytes, most_held(&repeated, stage), "{order}, {rank}");
            if order == ScheduleName::GPipe {
                assert_eq!(all.activation_bytes, (microbatches as usize * tape(stage)) as u64);
            }
            // Rows go to their experts and back once more.
            assert_eq!(least.ep_bytes, all.ep_bytes / 4 * 6, "{order}, {rank}");
        }
    }
}

#[test]
fn bytes_of_a_step_are_those_that_the_tables_of_strategies_say() {
    let small = small();
    let settings = Settings { shape: Shape { layers: 2, ..small.shape }, ..small };
    let Shape { vocabulary, window, layers, width, experts, expert_width, .. } = settings.shape;
    let tokens = settings.batch * window;
    let whole = layers * width * experts + window * width;
    let cut = layers * 4 * width * width + 2 * vocabulary * width;
    let of_experts = layers * experts * 3 * width * expert_width;
    let parameters = 4 * (whole + cut + of_experts) as u64;

    // Half of the parameters is another rank's: the gradients there, and the means back. Each of
    // three kinds of tensors compares its steps by 24 bytes.
    for (zero, halves) in [(Zero::None, 2), (Zero::One, 3), (Zero::Two, 2)] {
        let strategy = Strategy { zero, ..strategy("dp=2") };
        for rank in traffic(&settings, &strategy) {
            assert_eq!(rank.dp.inter_node_bytes, halves * parameters / 2 + 3 * 24, "{zero:?}");
        }
    }
    // A gather for the passes, and one that the backward pass of ZeRO-3 makes.
    let three = Strategy { zero: Zero::Three, ..strategy("dp=2") };
    for rank in traffic(&settings, &three) {
        assert_eq!(rank.dp.inter_node_bytes, 3 * parameters / 2 + 3 * 24);
        // Half of the parameters with two means, and the layers' weights with sums of gradients.
        assert_eq!(rank.state_bytes, 3 * parameters / 2 + 2 * parameters);
    }

    // Of a rank's queries, keys and values, and of its outputs, half belongs to the other rank's
    // heads; backward the same.
    for rank in traffic(&settings, &strategy("cp=2")) {
        assert_eq!(rank.cp.inter_node_bytes, (layers * tokens / 2 / 2 * 2 * 4 * width * 4) as u64);
    }

    // Blocks gather or reduce tokens twice forward and three times backward, and embedding and head
    // five times in all. Cross-entropy has three values a token.
    let passes = (5 * layers + 5) as u64;
    for rank in traffic(&settings, &strategy("tp=2")) {
        assert_eq!(rank.tp.inter_node_bytes, passes * (tokens / 2 * width * 4) as u64 + 12 * tokens as u64);
    }
}

#[test]
fn processes_of_a_mesh_write_the_losses_of_one_that_plays_them() {
    let shape = Shape { layers: 2, heads: 2, kv_heads: 2, ..small().shape };
    let settings = Settings { shape, batch: 4, steps: 4, balance: 0.001, seed: 0, ..small() };
    let folder = tempfile::tempdir().unwrap();
    let [text, out] = ["text.md", "out"].map(|name| folder.path().join(name));
    std::fs::write(&text, TEXT).unwrap();
    let command_of = |out: &Path| {
        let sizes = "--vocabulary 256 --window 16 --layers 2 --width 32 --heads 2 --experts 16 --top-k 2";
        let run = "--expert-width 16 --batch 4 --steps 4 --mesh pp=2,dp=2,ep=2 --checkpoint-every 2 --json";
        let mut command = Command::new(env!("CARGO_BIN_EXE_moe-lm"));
        command.args(sizes.split(' ')).args(run.split(' ')).arg("--out").args([out, &text]);
        command.env("RAYON_NUM_THREADS", "1").env("SIDELANE_HEAP", "96M").stdout(Stdio::piped());
        command
    };
    let command = || command_of(&out);
    let lines = said(ranks_of(command, "mesh", |_| &["--schedule", "zb-h1", "--zero", "1"]));
    assert!(lines[1..].iter().all(Vec::is_empty), "only the first rank speaks");
    let traffic = lines[0].iter().find_map(|line| line["traffic"].as_array()).unwrap();
    // A message of each microbatch to the other stage, and whether this one has failed.
    let pp = |rank: &Value| rank["pp"]["intra_node_bytes"].as_u64().unwrap();
    assert!(traffic.len() == 4 && traffic.iter().all(|rank| pp(rank) == 2 * 16 * 32 * 4 + 1));
    let timeline = std::fs::read_to_string(out.join("timeline.svg")).unwrap();
    // Of four ranks and two microbatches, and one of each in the legend.
    for pass in ["forward", "backward", "weight"] {
        assert_eq!(timeline.matches(&format!("class=\"pass {pass}\"")).count(), 4 * 2 + 1);
    }

    let losses = std::fs::read(out.join("losses.json")).unwrap();
    let history: History = serde_json::from_slice(&losses).unwrap();
    let strategy = Strategy { microbatches: 2, ..strategy("dp=2,ep=2") };
    let bits: Vec<u32> = history.losses.iter().map(|loss| loss.to_bits()).collect();
    assert_eq!(bits, reference(&settings, &strategy).losses);
    // One process that plays the mesh writes the same bytes, and goes on from what the ranks wrote.
    let in_turn = folder.path().join("in-turn");
    let played = |more: &[&str]| {
        let output = command_of(&in_turn).args(["--reference", "4"]).args(more).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(std::fs::read(in_turn.join("losses.json")).unwrap(), losses);
    };
    played(&[]);
    std::fs::remove_dir_all(&in_turn).unwrap();
    let place = "step-000002";
    std::fs::create_dir_all(in_turn.join(place)).unwrap();
    for file in std::fs::read_dir(out.join(place)).unwrap() {
        let name = file.unwrap().file_name();
        std::fs::copy(out.join(place).join(&name), in_turn.join(place).join(&name)).unwrap();
    }
    played(&["--resume"]);

    // The last two steps again, from the checkpoint before them, by another strategy.
    std::fs::remove_dir_all(out.join("step-000004")).unwrap();
    let lines =
        said(ranks_of(command, "mesh-again", |_| &["--resume", "--schedule", "gpipe", "--zero", "3"]));
    assert_eq!(lines[0].iter().filter(|line| line["loss"].is_number()).count(), 2);
    assert!(lines[0][0]["resumed"].as_str().unwrap().ends_with("step-000002"));
    assert_eq!(std::fs::read(out.join("losses.json")).unwrap(), losses);

    let output = command().args(["--zero", "2"]).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stderr),
        "moe-lm: 1 ranks, but pp 2 x dp 2 x cp 1 x tp 1 = 4\n"
    );
}

#[test]
fn eight_and_sixteen_processes_write_the_losses_of_one_that_replays_them() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text.md");
    std::fs::write(&text, TEXT).unwrap();
    let cases = [
        (8, "pp=2,dp=2,tp=2,ep=4", "--schedule zb-h1 --zero 3 --tied"),
        (
            16,
            "pp=2,dp=2,cp=2,tp=2,ep=4",
            "--schedule interleaved --zero 1 --attention ring --recompute --kv-heads 2",
        ),
    ];
    for (ranks, mesh, more) in cases {
        let command = |name: &str| {
            let sizes = "--vocabulary 256 --window 8 --layers 4 --width 32 --heads 4 --experts 8 --top-k 2";
            let run = "--expert-width 16 --batch 4 --steps 2 --balance 0 --json --mesh";
            let mut command = Command::new(env!("CARGO_BIN_EXE_moe-lm"));
            command.args(sizes.split(' ')).args(run.split(' ')).arg(mesh).args(more.split(' '));
            command.arg("--out").args([&folder.path().join(name), &text]);
            command.env("RAYON_NUM_THREADS", "1").env("SIDELANE_HEAP", "48M").stdout(Stdio::piped());
            command
        };
        let (together, in_turn) = (format!("{ranks}"), format!("{ranks}-in-turn"));
        let lines = said(many_ranks_of(ranks, || command(&together), &together, |_| &[]));
        let traffic = lines[0].iter().find_map(|line| line["traffic"].as_array()).unwrap();
        assert_eq!(traffic.len(), ranks as usize);
        let replay = command(&in_turn).args(["--reference", &ranks.to_string()]).spawn().unwrap();
        said(vec![replay]);
        let losses = [together, in_turn].map(|name| folder.path().join(name).join("losses.json"));
        let [together, in_turn] = losses.map(|path| std::fs::read_to_string(path).unwrap());
        assert_eq!(together, in_turn, "{mesh}");
    }
}
