//! `sidelane routing` as a user sees it: bars, tables and files.

use crate::program::{assert_words, run, run_with_report, sidelane};

#[test]
fn the_bundled_routing_is_shown_as_bars_tables_picture_and_json() {
    let svg = tempfile::NamedTempFile::new().unwrap();
    let (ended, report) = run_with_report(sidelane("routing --svg").arg(svg.path()));
    let words = ["recorded, 64 experts, top-8", "8 on 2 nodes (4 + 4)", "█", "evenness", "choices dropped"];
    assert_words(&ended.well(), &words);
    let choices = report["load"]["experts"]["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|n| n.as_u64().unwrap()).sum::<u64>(), 4096 * 8);
    assert!(std::fs::read_to_string(svg).unwrap().starts_with("<svg"));
}

#[test]
fn a_drawn_routing_of_many_experts_has_several_bands() {
    let line = "routing --random --experts 256 --ranks-per-node 8,8 --tokens 64";
    let told = run(&mut sidelane(line)).well();
    assert!(told.contains("zipf:1.0, 256 experts, top-8") && told.matches("0 └").count() == 4, "{told}");
}

#[test]
fn a_recording_that_is_repeated_is_named_with_its_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("one.jsonl");
    std::fs::write(&file, "{\"topk_ids\": [3, 9], \"topk_weights\": [0.6, 0.4]}\n").unwrap();
    let ended = run(sidelane("routing --tokens 2 --ranks-per-node 2").arg(&file));
    assert_words(&ended.err, &["one.jsonl: 4 tokens of all ranks repeat the 1 recorded ones"]);
    assert!(!ended.well().contains("-0.0000"));
    let ended = run(&mut sidelane("routing --tokens 2 --ranks-per-node 2"));
    assert_eq!(ended.err, "");
}
