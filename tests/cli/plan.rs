//! `sidelane plan` as a user sees it: meshes, files and refusals.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::program::{assert_words, report, run, sidelane};

const SMALL: &str = "plan --model olmoe-1b-7b --devices 16 --tokens 1M";

fn meshes(report: &Value) -> &Vec<Value> {
    report["meshes"].as_array().unwrap()
}

#[test]
fn meshes_fill_the_devices_and_the_fastest_is_first() {
    let report = report(&format!("{SMALL} --top 1000"));
    let meshes = meshes(&report);
    assert_eq!(meshes.len() as u64, report["fitting_shapes"].as_u64().unwrap());
    let size = |mesh: &Value, name: &str| mesh[name].as_u64().unwrap();
    for mesh in meshes {
        let devices: u64 = ["pp", "dp", "cp", "tp"].iter().map(|name| size(mesh, name)).product();
        assert_eq!((devices, devices / size(mesh, "pp") % size(mesh, "ep")), (16, 0), "{mesh}");
        assert!(size(mesh, "memory_bytes") <= report["hardware"]["memory_bytes"].as_u64().unwrap());
    }
    let times: Vec<_> = meshes.iter().map(|mesh| mesh["step"]["step_s"].as_f64().unwrap()).collect();
    assert!(times.len() > 20 && times.is_sorted_by(|a, b| *a <= b * (1.0 + 1e-9)), "{times:?}");
}

#[test]
fn table_names_the_best_meshes_their_parts_and_the_rules() {
    let told = run(&mut sidelane(&format!("{SMALL} --top 3"))).well();
    let words =
        ["6.9 billion parameters, 1.3 billion for a token", "binds below", "3 of ", "expert", "not measured"];
    assert_words(&told, &words);
    let widest = told.lines().skip_while(|line| !line.contains("zero")).take(5);
    assert!(widest.into_iter().all(|line| line.chars().count() <= 80), "{told}");
    let dense =
        run(&mut sidelane("plan --model llama-2-13b --hardware tpu-v5p --devices 4096 --tokens 3M")).well();
    assert_words(&dense, &["FSDP 1024 x tensor 4", "below 850 tokens a device", "below 235 tokens a device"]);
}

#[test]
fn given_dimensions_are_those_of_every_mesh() {
    let report = report(&format!("{SMALL} --tp 2 --ep 8 --recompute --precision f32"));
    assert!(!meshes(&report).is_empty());
    assert!(meshes(&report).iter().all(|mesh| mesh["tp"] == 2 && mesh["ep"] == 8), "{report}");
}

#[test]
fn sizes_that_make_no_mesh_are_explained() {
    let told = |options: &str| run(&mut sidelane(&format!("plan {options}")));
    told("--devices 256 --tp 3")
        .refused(&["make no mesh for deepseek-v3: tp = 3 does not divide devices = 256"]);
    told("--devices 64 --dp 64 --pp 2").refused(&["pp x dp = 128 does not divide devices = 64"]);
    told("--ep 8 --hardware tpu-v5p").refused(&["ep = 8", "no file of tpu-v5p"]);
    told("--hardware nowhere").refused(&["h100-cx7", "tpu-v5p"]);
}

#[test]
fn many_experts_are_planned_and_more_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.json");
    let told = |experts: u32, top_k: u32, hidden: u32| {
        let config = format!(
            r#"{{"hidden_size": {hidden}, "moe_intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 1000,
            "num_attention_heads": 4, "num_experts": {experts}, "num_experts_per_tok": {top_k}}}"#
        );
        fs::write(&file, config).unwrap();
        run(&mut sidelane(&format!("plan --devices 512 --tokens 2M --model {}", file.display())))
    };
    assert_words(&told(512, 10, 256).well(), &["the fastest first"]);
    assert_words(&told(512, 10, 2100).well(), &["the fastest first"]);
    told(4096, 512, 256).refused(&["num_experts_per_tok = 512", "between 1 and 64"]);
    told(1 << 20, 8, 256).refused(&["num_experts = 1048576", "between 1 and 4096"]);
}

#[test]
fn plan_reads_model_configuration_and_names_its_errors() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.json");
    let line = format!("plan --devices 8 --tokens 64K --model {}", file.display());
    fs::write(
        &file,
        r#"{"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
        "vocab_size": 32000, "rope_theta": 10000.0}"#,
    )
    .unwrap();
    let known = report(&line);
    assert_eq!((&known["model"]["experts"], known["model"]["layers"].as_u64()), (&Value::Null, Some(8)));
    fs::write(&file, r#"{"hidden_size": 512, "num_attention_heads": 0}"#).unwrap();
    run(&mut sidelane(&line)).refused(&["config.json", "num_attention_heads = 0"]);
    fs::write(&file, "no model").unwrap();
    run(&mut sidelane(&line)).refused(&["describes no model: not JSON"]);
}

#[test]
fn hardware_of_a_file_needs_peaks() {
    let mut hardware = report("simulate --nodes 1 --ranks-per-node 2 --tokens 8")["hardware"].take();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("machine.json");
    let line = format!("{SMALL} --hardware {}", file.display());
    let mut told = |change: fn(&mut Value)| {
        change(&mut hardware);
        fs::write(&file, hardware.to_string()).unwrap();
        run(&mut sidelane(&line))
    };
    told(|hardware| hardware["peaks"]["tflops"] = 400.into()).well();
    told(|hardware| hardware["peaks"]["tflops"] = 0.into()).refused(&["peaks.tflops = 0"]);
    told(|hardware| hardware["peaks"] = Value::Null).refused(&["no `peaks` (tflops, memory_bytes)"]);
}

#[test]
fn page_shows_what_the_program_prints() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let page = fs::read_to_string(docs.join("parallel.md")).unwrap();
    let line = "plan --model deepseek-v3 --hardware h100-cx7 --devices 256 --tokens 4M --top 4";
    let told = run(&mut sidelane(line)).well();
    assert!(page.contains(&format!("sidelane {line}\n")), "{line}");
    assert!(page.contains(&format!("```text\n{}\n```", told.trim_end())), "{told}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.svg");
    let line = "plan --model llama-3-70b --devices 1024 --tokens 1M --overlap all --svg";
    assert!(page.contains(&format!("sidelane {line} plan.svg\n")), "{line}");
    run(sidelane(line).arg(&file)).well();
    assert_eq!(fs::read_to_string(file).unwrap(), fs::read_to_string(docs.join("plan.svg")).unwrap());
}

#[test]
fn picture_has_a_region_for_each_part_that_binds() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.svg");
    let line = "plan --model llama-3-70b --devices 1024 --overlap all --svg";
    run(sidelane(line).arg(&file)).well();
    let picture = fs::read_to_string(&file).unwrap();
    assert!(picture.starts_with("<svg"));
    assert_words(&picture, &["prefers-color-scheme: dark", ">compute</title>", ">data, tensor</text>"]);
    assert!(picture.matches("class=\"band ").count() > 1);
}
