//! `sidelane routing` as a user sees it: bars, tables and files.

use std::process::{Command, Output};

use serde_json::Value;

fn route(line: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidelane"));
    command.arg("routing").args(line.split_whitespace()).current_dir(std::env::temp_dir());
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_bundled_routing_is_shown_as_bars_tables_picture_and_json() {
    let dir = std::env::temp_dir().join(format!("sidelane-route-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (svg, json) = (dir.join("load.svg"), dir.join("load.json"));
    let output = route(&format!("--svg {} --json {}", svg.display(), json.display()));
    let told = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for words in ["recorded, 64 experts, top-8", "8 on 2 nodes (4 + 4)", "█", "evenness", "choices dropped"]
    {
        assert!(told.contains(words), "{words:?} in\n{told}");
    }
    let report: Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    let choices = report["load"]["experts"]["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|n| n.as_u64().unwrap()).sum::<u64>(), 4096 * 8);
    assert!(std::fs::read_to_string(svg).unwrap().starts_with("<svg"));
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_drawn_routing_of_many_experts_has_several_bands() {
    let output = route("--random --experts 256 --ranks-per-node 8,8 --tokens 64");
    let told = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(told.contains("zipf:1.0, 256 experts, top-8") && told.matches("0 └").count() == 4, "{told}");
}
