//! The worked answers of the scaling book, and what must hold of any mesh.

use proptest::prelude::*;

use super::*;
use crate::time::Hardware;

fn model(name: &str) -> Transformer {
    name.parse().unwrap()
}

fn tpu() -> Devices {
    Devices::tpu_v5p()
}

/// Asserts that a figure has the book's value, which it gives to some digits.
#[track_caller]
fn near(figure: f64, book: f64, share: f64) {
    assert!((figure / book - 1.0).abs() <= share, "{figure}, and the book has {book}");
}

/// A question on chips of the book: bytes as there, all transfers overlap.
fn on_tpu(name: &str, count: u32, tokens: u64) -> Question {
    Question {
        model: model(name),
        devices: tpu(),
        hardware: None,
        count,
        tokens,
        sequence: 1,
        precision: Precision::BOOK,
        recompute: false,
        overlap: Overlap::All,
        fixed: Fixed::default(),
    }
}

fn on_gpus(name: &str, count: u32, tokens: u64) -> Question {
    let hardware: Hardware = "h100-cx7".parse().unwrap();
    Question {
        devices: Devices::of(&hardware, 8).unwrap(),
        hardware: Some(hardware),
        sequence: 4096,
        precision: Precision::MIXED,
        overlap: Overlap::Data,
        ..on_tpu(name, count, tokens)
    }
}

/// `dp x tp` on the devices of a question.
fn flat(dp: u32, tp: u32, zero: Zero) -> Mesh {
    Mesh { shape: Shape { pp: 1, dp, cp: 1, tp, ep: 1 }, zero, microbatches: 1 }
}

#[test]
fn data_parallelism_binds_below_2550_tokens_850_on_three_axes() {
    near(least_data_tokens(&tpu(), 1, 1.0), 2550.0, 1e-9);
    near(least_data_tokens(&tpu(), 3, 1.0), 850.0, 1e-9);
    near(850.0 * f64::from(tpu().per_node), 7.6e6, 0.01);
    let int8 = Devices { flops: 2.0 * tpu().flops, ..tpu() };
    near(least_data_tokens(&int8, 1, 1.0), 5100.0, 1e-9);
}

#[test]
fn pods_need_73600_tokens_each() {
    near(least_node_tokens(&tpu(), 1.0), 73_440.0, 1e-9);
    near(least_node_tokens(&Devices { flops: 4.6e14, ..tpu() }, 1.0), 73_600.0, 1e-9);
    near(least_node_tokens(&Devices { flops: 4.46e14, ..tpu() }, 1.0), 71_360.0, 1e-9);
}

#[test]
fn tensor_parallelism_binds_above_width_by_2550_ways() {
    let ways = |width| most_tensor_ways(&tpu(), width, 1);
    assert!(8.0 < ways(30_000) && ways(30_000) < 16.0);
    assert_eq!(ways(50_000).floor(), 19.0);
    near(most_tensor_ways(&tpu(), 30_000, 2), 2.0 * ways(30_000), 1e-9);
}

#[test]
fn mixed_optimum_and_least_tokens_are_those_of_the_book() {
    let mixed = Mixed::of(&tpu(), 48_000.0, 64, 32_768);
    near(mixed.data_ways, 13.69, 1e-3);
    assert_eq!(mixed.shape, (16, 4));
    near(mixed.least_tokens, 99.0, 5e-3);
    // The figure's crossing: 4,096 chips become bound by compute at 4e5 tokens, as 256 x 16.
    let crossing = Mixed::of(&tpu(), 4.1e5, 4_096, 32_768);
    near(crossing.least_tokens * 4_096.0, 4e5, 0.05);
    assert_eq!(crossing.shape, (256, 16));
    // 2M tokens and F = 30k: 2,400 chips by FSDP alone, 108 tokens a chip and 18k chips mixed.
    near(2e6 / least_data_tokens(&tpu(), 3, 1.0), 2_400.0, 0.03);
    let large = Mixed::of(&tpu(), 2e6, 8_192, 30_000);
    near(large.least_tokens, 108.0, 5e-3);
    near(2e6 / large.least_tokens, 18_000.0, 0.03);
    assert_eq!(large.shape, (1_024, 8));
    // Two pods of 1M tokens have 111 a chip: enough in a pod, and between both.
    let per_chip = 1e6 / f64::from(tpu().per_node);
    near(per_chip, 111.0, 0.01);
    assert!(per_chip > large.least_tokens && 1e6 > least_node_tokens(&tpu(), 1.0));
}

#[test]
fn mixed_parallelism_on_switch_links_needs_four_times_tokens() {
    let switch = Devices { fabric: Fabric::Switch, ..tpu() };
    let (shared, own) = (Mixed::of(&switch, 48_000.0, 64, 32_768), Mixed::of(&tpu(), 48_000.0, 64, 32_768));
    near(shared.least_tokens, 4.0 * 2.0 * own.least_tokens, 1e-9);
    near(shared.data_ways, own.data_ways / 2f64.sqrt(), 1e-9);
}

/// Ring attention with as many KV heads as query heads, in bf16.
#[test]
fn blocks_of_c_tokens_hide_in_4_d_c_squared_operations_from_f_over_b_tokens_on() {
    let (model, tpu) = (model("llama-2-13b"), tpu());
    let width = model.kv_width() as f64 / 2.0;
    let times = |tokens: f64| {
        let operations = model.flops_per_pair() as f64 * tokens * tokens;
        near(operations, 2.0 * (2.0 * width * tokens * tokens), 1e-9);
        [operations / tpu.flops, 2.0 * model.kv_width() as f64 * tokens / tpu.link_rate]
    };
    let least = tpu.intensity();
    let [compute, transfer] = times(least);
    near(compute, transfer, 1e-9);
    let [compute, transfer] = times(0.99 * least);
    assert!(compute < transfer);
}

#[test]
fn ten_bytes_a_parameter_put_nine_billion_on_a_chip() {
    assert_eq!(Precision::BOOK.held_bytes(), 10);
    assert_eq!(tpu().memory_bytes / Precision::BOOK.held_bytes() / 1_000_000_000, 9);
}

#[test]
fn chips_and_days_of_large_batches_are_those_of_the_book() {
    let chips = |tokens: f64| tokens / least_data_tokens(&tpu(), 3, 1.0);
    near(chips(40e6), 47_000.0, 2e-3);
    near(chips(16e6), 18_823.0, 1e-4);
    let llama = 70_000_000_000;
    near(training_seconds(&tpu(), llama, 15e12, 18_823, 0.5) / 86_400.0, 17.0, 0.02);
}

#[test]
fn llama_2_13b_has_its_parameters_states_and_activations() {
    let llama = model("llama-2-13b");
    assert_eq!(llama.parameters(), 13_015_449_600);
    assert_eq!(llama.embedding_parameters() * 2, 327_680_000);
    let layer = llama.dense_layer().unwrap().common * 40;
    assert_eq!(layer, 8_493_465_600 + 4_194_304_000);
    let one = on_tpu("llama-2-13b", 1, 16_000_000);
    let memory = one.memory(&flat(1, 1, Zero::Plain));
    near((memory.parameters_bytes + memory.states_bytes) as f64, 130e9, 2e-3);
    near(memory.activations_bytes as f64, 42e12, 2e-3);
}

#[test]
fn llama_2_13b_on_4096_chips_needs_fsdp_and_tensor_parallelism() {
    let question = on_tpu("llama-2-13b", 4_096, 3_000_000);
    let cost = |dp, tp, zero| question.cost(flat(dp, tp, zero)).unwrap();
    // Pure data parallelism does not fit.
    let plain = cost(4_096, 1, Zero::Plain);
    assert!(plain.memory.total_bytes() > question.devices.memory_bytes);
    // FSDP fits, and needs 3.48M tokens.
    let fsdp = cost(4_096, 1, Zero::Zero3);
    near(4_096.0 * least_data_tokens(&tpu(), 3, 1.0), 3.48e6, 1e-3);
    assert!(fsdp.memory.total_bytes() < question.devices.memory_bytes && fsdp.step.bound == Bound::Data);
    // All chips hold 8 TB of 393 TB; layers in flight are not the book's.
    let held = fsdp.memory.total_bytes() - fsdp.memory.in_flight_bytes;
    near(held as f64 * 4_096.0, 7.86e12 + 1.3e11, 2e-3);
    near(question.devices.memory_bytes as f64 * 4_096.0, 393e12, 1e-3);
    // Mixed: from 235 tokens a chip on, and there are 732.
    let mixed = Mixed::of(&tpu(), 3e6, 4_096, 13_824);
    near(mixed.least_tokens, 235.0, 2e-3);
    near(mixed.data_ways, 1_333.0, 1e-3);
    assert_eq!(mixed.shape, (1_024, 4));
    let both = cost(1_024, 4, Zero::Zero3);
    assert_eq!(both.step.bound, Bound::Compute);
    assert!(both.step.step_s < fsdp.step.step_s);
    near(training_seconds(&tpu(), question.model.parameters(), 3e6, 4_096, 0.4), 0.310, 5e-3);
    // The book counts no scores of attention, no gathers within a step, and no optimizer.
    near(both.step.step_s, training_seconds(&tpu(), question.model.parameters(), 3e6, 4_096, 1.0), 0.06);
}

#[test]
fn bytes_of_a_layer_are_those_of_the_book() {
    // One layer: an MLP of three matrices, four of attention, and a vocabulary of one token.
    let config = r#"{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 1,
        "num_attention_heads": 8, "vocab_size": 1, "tie_word_embeddings": true}"#;
    let wide = Devices { per_node: 1 << 20, ..tpu() };
    let model = Transformer::from_config("one layer", config).unwrap();
    let question = Question { model, devices: wide, ..on_tpu("llama-2-13b", 1, 1 << 20) };
    let weights = (3 * 1024 * 4096 + 4 * 1024 * 1024 + 1024) as f64;
    let s = |ways: f64| (ways - 1.0) / ways;
    let received = |dp, tp, zero| question.cost(flat(dp, tp, zero)).unwrap().step.received;
    // 0 + 8 DF, and 4 DF + 8 DF, of two matrices: 4 bytes a parameter, and 6.
    near(received(64, 1, Zero::Plain).data_bytes, 4.0 * weights * s(64.0), 1e-6);
    near(received(64, 1, Zero::Zero1).data_bytes, 6.0 * weights * s(64.0), 1e-6);
    near(received(64, 1, Zero::Zero2).data_bytes, 4.0 * weights * s(64.0), 1e-6);
    near(received(64, 1, Zero::Zero3).data_bytes, 6.0 * weights * s(64.0), 1e-6);
    // 4 BD + 4 BD a block, and two blocks: four all-gathers and four reduce-scatters.
    let tokens = (1 << 20) as f64;
    near(received(1, 8, Zero::Plain).tensor_bytes, 2.0 * 8.0 * tokens * 1024.0 * s(8.0), 1e-6);
    let mixed = received(16, 8, Zero::Zero3);
    near(mixed.tensor_bytes, 2.0 * 8.0 * tokens / 16.0 * 1024.0 * s(8.0), 1e-6);
    near(mixed.data_bytes, 6.0 * weights / 8.0 * s(16.0), 1e-6);
}

#[test]
fn ring_attention_receives_what_its_ranks_send() {
    let question = on_gpus("llama-3-70b", 8, 1 << 16);
    let mesh = Mesh { shape: Shape { pp: 1, dp: 1, cp: 8, tp: 1, ep: 1 }, ..flat(1, 1, Zero::Zero3) };
    // (n-1) T/n 2Kd forward; twice that, and T/n 2Kd, backward; 2 bytes, 80 layers.
    let kv = (2 * 8 * 128 * 2 * 80) as f64;
    let tokens = f64::from(1 << 16) / 8.0;
    near(question.cost(mesh).unwrap().step.received.context_bytes, tokens * kv * (7.0 + 14.0 + 1.0), 1e-9);
}

#[test]
fn states_of_f32_are_those_of_the_table_of_data_parallelism() {
    let question = Question { precision: Precision::F32, ..on_tpu("llama-2-13b", 4, 4) };
    let bytes = question.model.parameters() * 4;
    let held = |zero| {
        let memory = question.memory(&flat(4, 1, zero));
        [memory.parameters_bytes, memory.gradients_bytes, memory.states_bytes]
    };
    assert_eq!(held(Zero::Plain), [bytes, bytes, 2 * bytes]);
    assert_eq!(held(Zero::Zero1), [bytes, bytes, 2 * bytes / 4]);
    assert_eq!(held(Zero::Zero2), [bytes, bytes / 4, 2 * bytes / 4]);
    assert_eq!(held(Zero::Zero3), [bytes / 4, bytes / 4, 2 * bytes / 4]);
}

#[test]
fn microbatches_move_and_hold_amounts_of_data_parallel_table() {
    let question = Question { precision: Precision::F32, ..on_tpu("llama-2-13b", 4, 64) };
    let weights = question.model.parameters() as f64;
    let step = |zero, microbatches| {
        let found = question.cost(Mesh { microbatches, ..flat(4, 1, zero) }).unwrap();
        // Elements that a rank sends, by s W, and that it holds, by W.
        let sent = found.step.received.data_bytes / 4.0 / (0.75 * weights);
        (sent, found.memory.gradients_bytes as f64 / 4.0 / weights)
    };
    for (zero, moved, held) in [
        (Zero::Plain, [2.0, 2.0], [1.0, 1.0]),
        (Zero::Zero1, [3.0, 3.0], [1.0, 1.0]),
        (Zero::Zero2, [2.0, 2.0], [0.25, 1.0]),
        (Zero::Zero3, [3.0, 24.0], [0.25, 0.25]),
    ] {
        for (at, microbatches) in [1, 8].into_iter().enumerate() {
            let (sent, kept) = step(zero, microbatches);
            near(sent, moved[at], 1e-6);
            near(kept, held[at], 1e-6);
        }
    }
    // Sums of ZeRO-2 begin in the last microbatch, and those of ZeRO-3 in the first.
    let window = |zero| question.cost(Mesh { microbatches: 8, ..flat(4, 1, zero) }).unwrap().step.backward;
    near(window(Zero::Zero2).window_s, window(Zero::Zero2).compute_s / 8.0, 1e-9);
    near(window(Zero::Zero3).window_s, window(Zero::Zero3).compute_s, 1e-9);
}

#[test]
fn known_models_have_the_parameters_of_their_names() {
    let billions = |name: &str| {
        let model = model(name);
        (model.parameters() as f64 / 1e9, model.active_parameters() as f64 / 1e9)
    };
    let known = [
        ("llama-2-13b", 13.0, 13.0),
        ("llama-3-70b", 70.6, 70.6),
        ("mixtral-8x7b", 46.7, 12.9),
        ("olmoe-1b-7b", 6.9, 1.3),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235.0, 22.0),
        ("deepseek-v3", 671.0, 37.5),
    ];
    assert_eq!(known.map(|(name, ..)| name), Transformer::NAMES);
    for (name, all, active) in known {
        near(billions(name).0, all, 5e-3);
        near(billions(name).1, active, 2e-2);
    }
}

/// A small configuration with a field of another value, or without it.
fn config(field: &str, value: Option<&str>) -> Result<Transformer, ConfigError> {
    let mut fields: serde_json::Map<String, serde_json::Value> = serde_json::from_str(
        r#"{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 100, "num_experts": 16, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "rope_theta": 10000.0, "architectures": ["Any"]}"#,
    )
    .unwrap();
    match value {
        Some(value) => fields.insert(field.to_owned(), serde_json::from_str(value).unwrap()),
        None => fields.remove(field),
    };
    Transformer::from_config("any", &serde_json::Value::Object(fields).to_string())
}

#[test]
fn fields_that_are_missing_or_impossible_are_named() {
    assert_eq!(
        config("vocab_size", Some("100")).unwrap().parameters(),
        4 * (2 * 64 * 8 * 10 + 64 * 16 + 16 * 3 * 64 * 32) + 2 * 6400
    );
    for field in
        ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "num_experts_per_tok"]
    {
        assert_eq!(config(field, None), Err(ConfigError::Missing { field }));
        assert_eq!(config(field, Some("null")), Err(ConfigError::Missing { field }));
        let zero = config(field, Some("0")).unwrap_err();
        assert!(
            matches!(zero, ConfigError::OutOfRange { field: named, seen: 0, .. } if named == field),
            "{zero}"
        );
        let large = config(field, Some("18446744073709551615")).unwrap_err();
        assert!(matches!(large, ConfigError::OutOfRange { field: named, .. } if named == field), "{large}");
        for wrong in ["-1", "1.5", "\"64\"", "[64]"] {
            let seen = wrong.to_owned();
            assert_eq!(config(field, Some(wrong)), Err(ConfigError::NotANumber { field, seen }));
        }
    }
    let divides =
        |field, value: &str| matches!(config(field, Some(value)), Err(ConfigError::NoDivisor { .. }));
    assert!(divides("num_key_value_heads", "3") && divides("num_attention_heads", "10"));
    let out = |field, value: &str| matches!(config(field, Some(value)), Err(ConfigError::OutOfRange { .. }));
    assert!(
        out("num_experts_per_tok", "17") && out("first_k_dense_replace", "4") && out("moe_layer_freq", "2")
    );
    let text = |text| Transformer::from_config("any", text).unwrap_err();
    assert!(matches!(text("{"), ConfigError::NotJson { .. }));
    assert_eq!(text("[1]"), ConfigError::NotAnObject);
}

#[test]
fn experts_or_choices_beyond_time_model_limits_are_refused() {
    let out = |field: &'static str, seen: u64, most| {
        let refused = config(field, Some(&seen.to_string()));
        assert_eq!(refused, Err(ConfigError::OutOfRange { field, seen, least: 1, most }));
    };
    out("num_experts", 4_097, 4_096);
    out("num_experts", 1 << 20, 4_096);
    out("num_experts_per_tok", 17, 16);
    let many = r#"{"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 100,
        "moe_intermediate_size": 32, "num_experts": 4096, "num_experts_per_tok": 512}"#;
    let (field, most) = ("num_experts_per_tok", 64);
    let refused = ConfigError::OutOfRange { field, seen: 512, least: 1, most };
    assert_eq!(Transformer::from_config("any", many), Err(refused));
}

#[test]
fn layers_that_have_an_mlp_alone_are_counted_if_they_come_first() {
    let dense =
        |value| config("mlp_only_layers", Some(value)).map(|model| model.experts.unwrap().dense_layers);
    assert_eq!(["[]", "null", "[0]", "[0, 1, 2]"].map(|value| dense(value).unwrap()), [0, 0, 1, 3]);
    let field = "mlp_only_layers";
    for seen in ["[1]", "[0,2]", "[0,0]", "[0,1,2,3]", "3", "true", "[\"0\"]"] {
        assert_eq!(dense(seen), Err(ConfigError::NotFirstLayers { field, seen: seen.to_owned() }));
    }
}

#[test]
fn embeddings_are_tied_by_configuration_or_else_architecture() {
    let field = "tie_word_embeddings";
    let tied = |value| config(field, Some(value)).map(|model| model.tied);
    assert_eq!([tied("true"), tied("false"), tied("null")], [Ok(true), Ok(false), Ok(false)]);
    for seen in ["1", "\"true\"", "[]"] {
        assert_eq!(tied(seen), Err(ConfigError::NotABoolean { field, seen: seen.to_owned() }));
    }
    let by_type = |name| config("model_type", Some(name)).unwrap().tied;
    let types = ["\"gemma2\"", "\"cohere\"", "\"qwen3_moe\"", "\"llama\"", "7"];
    assert_eq!(types.map(by_type), [true, true, false, false, false]);
}

#[test]
fn a_shared_expert_of_no_width_is_none() {
    let shared = |value| {
        config("shared_expert_intermediate_size", Some(value)).map(|model| model.experts.unwrap().shared_ffn)
    };
    assert_eq!([shared("0"), shared("48")], [Ok(0), Ok(48)]);
}

#[test]
fn more_parameters_than_can_be_counted_are_refused() {
    let largest = r#"{"hidden_size": 1048576, "intermediate_size": 1048576, "num_hidden_layers": 1048576,
        "num_attention_heads": 1048576, "head_dim": 1048576, "vocab_size": 1048576, "num_experts": 4096,
        "num_experts_per_tok": 64, "n_shared_experts": 256}"#;
    let refused = Transformer::from_config("any", largest).unwrap_err();
    assert!(matches!(refused, ConfigError::TooManyParameters { .. }), "{refused}");
}

#[test]
fn hardware_without_peaks_is_named() {
    let mut hardware: Hardware = "h100-cx7".parse().unwrap();
    hardware.peaks = None;
    assert_eq!(Devices::of(&hardware, 8), Err(NoPeaks { name: "h100-cx7".to_owned() }));
}

#[test]
fn nics_of_a_node_are_shared_by_its_devices() {
    let mut hardware: Hardware = "h100-cx7".parse().unwrap();
    let all = Devices::of(&hardware, 8).unwrap().nic_rate;
    hardware.nic.per_node = 2;
    near(Devices::of(&hardware, 8).unwrap().nic_rate, all / 4.0, 1e-9);
}

#[test]
fn best_mesh_is_no_slower_than_any_that_fits() {
    for question in [on_gpus("olmoe-1b-7b", 16, 1 << 20), on_gpus("llama-3-70b", 128, 1 << 22)] {
        let found = question.search().unwrap();
        let times: Vec<_> = found.fitting.iter().map(|one| one.step.step_s).collect();
        assert!(times.len() > 20 && times.is_sorted_by(|a, b| *a <= b * (1.0 + 1e-9)), "{times:?}");
        for one in found.fitting.iter().take(8) {
            assert_eq!(one.mesh.shape.devices(), question.count);
            assert!(one.memory.total_bytes() <= question.devices.memory_bytes, "{one:?}");
            let settings = Zero::ALL.into_iter().map(|zero| Mesh { zero, ..one.mesh });
            for mesh in settings.filter(|mesh| mesh.shape.copies() > 1) {
                let other = question.cost(mesh).unwrap();
                let fits = other.memory.total_bytes() <= question.devices.memory_bytes;
                assert!(!fits || other.step.step_s >= one.step.step_s * (1.0 - 1e-9), "{other:?} {one:?}");
            }
        }
    }
}

#[test]
fn given_sizes_are_those_of_every_mesh_that_is_found() {
    let fixed = Fixed { tp: Some(2), ep: Some(8), ..Fixed::default() };
    let found = Question { fixed, ..on_gpus("olmoe-1b-7b", 16, 1 << 20) }.search().unwrap();
    assert!(found.fitting.len() > 2);
    assert!(found.fitting.iter().all(|one| (one.mesh.shape.tp, one.mesh.shape.ep) == (2, 8)));
    let fixed = Fixed { tp: Some(3), ..Fixed::default() };
    assert_eq!(Question { fixed, ..on_gpus("olmoe-1b-7b", 16, 1 << 20) }.search().unwrap().shapes, 0);
}

#[test]
fn sizes_that_make_no_mesh_are_named_with_what_they_have_to_fit() {
    let told = |name, count, fixed| {
        let question = Question { fixed, ..on_gpus(name, count, 1 << 20) };
        assert_eq!(question.search().unwrap().shapes, 0);
        question.misfit().unwrap().to_string()
    };
    let any = Fixed::default();
    let tp = |tp| Fixed { tp: Some(tp), ..any };
    let ep = |ep| Fixed { ep: Some(ep), ..any };
    let pp = |pp| Fixed { pp: Some(pp), ..any };
    assert_eq!(told("olmoe-1b-7b", 16, tp(3)), "tp = 3 does not divide devices = 16");
    assert_eq!(told("olmoe-1b-7b", 16, tp(0)), "tp = 0 does not divide devices = 16");
    let both = Fixed { dp: Some(32), pp: Some(4), ..any };
    assert_eq!(told("olmoe-1b-7b", 64, both), "pp x dp = 128 does not divide devices = 64");
    assert_eq!(told("olmoe-1b-7b", 64, tp(32)), "tp = 32 does not divide query heads = 16");
    assert_eq!(told("olmoe-1b-7b", 64, pp(32)), "pp = 32 is more than 16: each stage has a layer");
    let empty = "pp = 32 leaves stages without a layer: of 80, each has 3";
    assert_eq!(told("llama-3-70b", 64, pp(32)), empty);
    let data = Fixed { dp: Some(512), ..any };
    assert_eq!(told("olmoe-1b-7b", 512, data), "dp = 512 is more than 256: each rank has a sequence");
    assert_eq!(told("olmoe-1b-7b", 48, ep(48)), "ep = 48 does not divide experts = 64");
    assert_eq!(told("olmoe-1b-7b", 16, ep(64)), "ep = 64 does not divide devices of a stage = 16");
    assert_eq!(told("llama-3-70b", 16, ep(8)), "ep = 8 is more than 1: the model has no experts");
    let rest = "given sizes make 8 of 1016 devices, and no sizes of other dimensions make the rest";
    let odd = Fixed { tp: Some(8), cp: Some(1), dp: Some(1), ..any };
    assert_eq!(told("olmoe-1b-7b", 1016, odd), rest);
    let on_tpu = Question { fixed: ep(8), ..on_tpu("olmoe-1b-7b", 16, 1 << 20) };
    assert_eq!(on_tpu.misfit(), Some(Misfit::NoTimeModel { ep: 8, hardware: Devices::TPU_V5P.to_owned() }));
    assert_eq!(on_gpus("olmoe-1b-7b", 16, 1 << 20).misfit(), None);
}

#[test]
fn search_by_tokens_finds_what_single_searches_find() {
    let question = on_gpus("olmoe-1b-7b", 8, 1 << 20);
    let found = question.search_by_tokens(&[1 << 18, 1 << 20]).unwrap();
    assert_eq!(found[1], question.search().unwrap());
    assert!(found[0].fitting[0].step.step_s < found[1].fitting[0].step.step_s);
}

#[test]
fn shapes_of_groups_that_cannot_be_timed_are_left_out() {
    let narrow = Transformer { hidden: 2100, ..model("olmoe-1b-7b") };
    let question = Question { model: narrow, ..on_gpus("olmoe-1b-7b", 16, 1 << 20) };
    let found = question.search().unwrap();
    assert!(found.shapes > 0 && found.smallest.is_some());
    assert!(!found.fitting.is_empty() && found.fitting.iter().all(|one| one.mesh.shape.ep == 1));
    let fixed = Fixed { ep: Some(8), ..Fixed::default() };
    let refused = Question { fixed, ..question }.search().unwrap_err();
    assert!(matches!(refused, SearchError::Dispatch(_)), "{refused}");
}

#[test]
fn sequence_is_cut_to_step_that_has_fewer_tokens() {
    let question = |sequence| Question { sequence, ..on_gpus("llama-3-70b", 64, 1024) };
    assert_eq!(question(4096).search().unwrap(), question(1024).search().unwrap());
    let shape = Shape { pp: 1, dp: 1, cp: 64, tp: 1, ep: 1 };
    assert!(question(1 << 20).shapes().contains(&shape));
    assert!(!Question { tokens: 127, ..question(4096) }.shapes().contains(&shape));
    let share = |sequence| {
        let question = question(sequence);
        question.cost(flat(8, 8, Zero::Zero3)).unwrap().step.peak_share(&question)
    };
    near(share(4096), share(1024), 1e-12);
}

#[test]
fn sequences_of_no_tokens_are_refused_without_a_division() {
    let question = Question { sequence: 0, ..on_gpus("llama-3-70b", 64, 1024) };
    assert!(question.shapes().iter().all(|shape| shape.cp == 1));
    let refused = question.search().unwrap_err();
    assert!(matches!(refused, SearchError::OutOfRange { parameter: "sequence", seen: 0, .. }), "{refused}");
}

#[test]
fn steps_of_more_sequences_than_32_bits_count_have_up_to_two_to_the_31_microbatches() {
    let fixed = Fixed { pp: Some(8), ..Fixed::default() };
    let question = Question { sequence: 64, fixed, ..on_gpus("olmoe-1b-7b", 8, 1 << 39) };
    let most = question.search().unwrap().fitting.iter().map(|found| found.mesh.microbatches).max();
    assert!(most.is_some_and(|most| most.is_power_of_two() && most > 1), "{most:?}");
}

#[test]
fn a_model_that_fits_nowhere_has_its_smallest_mesh() {
    let found = on_gpus("deepseek-v3", 8, 1 << 20).search().unwrap();
    assert!(found.fitting.is_empty() && found.shapes > 0);
    let smallest = found.smallest.unwrap();
    assert!(smallest.memory.total_bytes() > 80_000_000_000, "{smallest:?}");
}

#[test]
fn questions_without_devices_or_tokens_are_refused() {
    let refused = |question: Question| question.search().unwrap_err().to_string();
    assert!(refused(on_gpus("olmoe-1b-7b", 0, 1)).starts_with("devices = 0"));
    assert!(refused(on_gpus("olmoe-1b-7b", 1, 0)).starts_with("tokens = 0"));
}

#[test]
fn experts_take_time_model_time_of_dispatch_and_combine() {
    let question = on_gpus("olmoe-1b-7b", 16, 16 * 4096);
    let mesh = |ep| Mesh { shape: Shape { pp: 1, dp: 16, cp: 1, tp: 1, ep }, ..flat(16, 1, Zero::Zero1) };
    let [none, node, all] = [1, 8, 16].map(|ep| question.cost(mesh(ep)).unwrap().step);
    assert_eq!((none.forward.expert_s, none.received.expert_bytes), (0.0, 0.0));
    // At most all rows of eight choices leave, forward and back, in both passes and 16 layers.
    let rows = (16_u64 * 4 * 4096 * 8 * 2048 * 2) as f64;
    assert!((0.5..1.1).contains(&(all.received.expert_bytes / rows)), "{all:?}");
    // Between nodes NICs are slower than links, and more experts of a rank mean more to reduce.
    assert!(all.forward.expert_s > 2.0 * node.forward.expert_s, "{node:?} {all:?}");
    assert!(none.received.data_bytes > node.received.data_bytes);
    assert!(node.received.data_bytes > all.received.data_bytes);
}

#[test]
fn pipelines_idle_less_with_more_microbatches() {
    let question = on_gpus("llama-3-70b", 64, 1 << 22);
    let shape = Shape { pp: 4, dp: 2, cp: 1, tp: 8, ep: 1 };
    let step = |microbatches| question.cost(Mesh { shape, zero: Zero::Zero1, microbatches }).unwrap().step;
    let (few, many) = (step(4), step(32));
    let in_turn = |step: &Step| step.forward.compute_s + step.backward.compute_s;
    near(in_turn(&few), in_turn(&many), 1e-9);
    near(few.bubble_s, 8.0 * many.bubble_s, 1e-9);
    assert!(few.bubble_s > 0.75 * in_turn(&few));
}

#[test]
fn pipeline_binds_if_bubble_and_sends_outlast_both_computes() {
    let question = on_gpus("llama-3-70b", 64, 1 << 22);
    let shape = Shape { pp: 32, dp: 2, cp: 1, tp: 1, ep: 1 };
    let mut seen = [false; 2];
    for microbatches in [8, 16, 24, 32, 40, 64] {
        let step = question.cost(Mesh { shape, zero: Zero::Zero1, microbatches }).unwrap().step;
        let (forward, backward) = (step.forward, step.backward);
        let pipeline = step.bubble_s + forward.sends_s + backward.sends_s;
        let binds = pipeline > forward.compute_s + backward.compute_s;
        assert_eq!(step.bound == Bound::Pipeline, binds, "{microbatches}: {step:?}");
        seen[usize::from(binds)] = true;
    }
    assert_eq!(seen, [true, true]);
}

#[test]
fn tensor_parallelism_across_nodes_binds() {
    let question = on_gpus("llama-3-70b", 16, 1 << 20);
    let step = |dp, tp| question.cost(flat(dp, tp, Zero::Zero3)).unwrap().step;
    assert_eq!(step(1, 16).bound, Bound::Tensor);
    assert_ne!(step(2, 8).bound, Bound::Tensor);
}

/// A strategy that takes all devices that are there.
const FAMILIES: [fn(u32) -> Mesh; 5] = [
    |n| flat(n, 1, Zero::Zero1),
    |n| flat(n, 1, Zero::Zero2),
    |n| flat(n, 1, Zero::Zero3),
    |n| flat(1, n, Zero::Plain),
    |n| Mesh { shape: Shape { pp: 1, dp: n, cp: 1, tp: 1, ep: n }, ..flat(n, 1, Zero::Zero3) },
];

proptest! {
    #[test]
    fn more_devices_never_take_more_memory_each(
        name in 0..Transformer::NAMES.len(),
        family in 0..FAMILIES.len(),
        power in 0..3u32,
        tokens in 1u64..1 << 24,
        recompute: bool,
    ) {
        let question = Question { recompute, ..on_gpus(Transformer::NAMES[name], 1, tokens) };
        let [few, many] = [1 << power, 2 << power].map(|n| question.memory(&FAMILIES[family](n)));
        prop_assert!(many.total_bytes() <= few.total_bytes(), "{few:?} {many:?}");
    }

    #[test]
    fn less_overlap_never_takes_less_time(at in 0..60usize, tokens in 1u64..1 << 22) {
        let question = on_gpus("llama-3-70b", 64, tokens);
        let shapes = question.shapes();
        let mesh = Mesh { shape: shapes[at % shapes.len()], zero: Zero::Zero3, microbatches: 2 };
        let [none, data, all] = Overlap::ALL.map(|overlap| {
            Question { overlap, ..question.clone() }.cost(mesh).unwrap().step.step_s
        });
        prop_assert!(all <= data * (1.0 + 1e-9) && data <= none * (1.0 + 1e-9), "{all} {data} {none}");
    }

    #[test]
    fn shapes_are_all_the_factors_of_the_devices(devices in 1u32..600) {
        let shapes = Shape::all(devices);
        let mut seen = std::collections::BTreeSet::new();
        for shape in &shapes {
            prop_assert!(shape.devices() == devices && seen.insert(*shape));
        }
        let fits = |pp: u32, dp: u32, cp: u32| devices.is_multiple_of(pp * dp * cp);
        let count = (1..=devices).flat_map(|pp| (1..=devices / pp).flat_map(move |dp| (1..=devices / pp / dp)
            .filter(move |&cp| fits(pp, dp, cp)))).count();
        prop_assert_eq!(shapes.len(), count);
    }
}
