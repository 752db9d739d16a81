use std::path::PathBuf;

use sidelane::plan::{Mode, Overflow};

use super::super::args::BenchArgs;
use super::*;
use crate::command::tests::parsed;
use crate::error::CliError;
use crate::routing::Router;

fn resolve(words: &str) -> Result<Config, CliError> {
    let args: BenchArgs = parsed(words).unwrap();
    Config::resolve(&args.conditions, args.backward, args.rounds)
}

/// Why they are refused.
fn refused(words: &str) -> String {
    resolve(words).unwrap_err().to_string()
}

/// A routing file of four experts, top-2, removed at the end.
struct File(PathBuf);

impl File {
    fn new(name: &str, meta: bool) -> Self {
        let path = std::env::temp_dir().join(format!("sidelane-config-{}-{name}.jsonl", std::process::id()));
        let meta = if meta { "{\"type\":\"meta\",\"num_experts\":4,\"top_k\":2}\n" } else { "" };
        let token = "{\"topk_ids\":[3,0],\"topk_weights\":[0.5,0.5]}\n";
        std::fs::write(&path, format!("{meta}{token}")).unwrap();
        File(path)
    }

    fn resolve(&self, words: &str) -> Result<Config, CliError> {
        resolve(&format!("--routing {} {words}", self.0.display()))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn the_main_job_is_two_nodes_of_four_ranks_and_recorded_routing() {
    let config = resolve("").unwrap();
    assert_eq!(config.routing, Source::Recorded);
    assert_eq!((config.ranks_per_node.as_slice(), config.experts, config.top_k), (&[4, 4][..], 64, 8));
    assert_eq!(config.row_bytes(), 4096);
    assert_eq!(config.rounds, 300);
}

#[test]
fn spans_are_for_rank_major_rows_that_are_handed_on() {
    assert!(resolve("--spans --layout rank-major").unwrap().spans);
    for words in ["--spans", "--spans --layout rank-major --route direct"] {
        assert_eq!(refused(words), "--spans is for --layout rank-major --route pxn", "{words}");
    }
}

#[test]
fn there_are_as_many_nodes_as_said_or_listed_and_four_ranks_on_each_unless_said() {
    for (words, sizes) in [
        ("--nodes 3", &[4, 4, 4][..]),
        ("--nodes 1", &[4]),
        ("--ranks-per-node 8", &[8]),
        ("--ranks-per-node 3,5", &[3, 5]),
        ("--nodes 2 --ranks-per-node 8", &[8, 8]),
    ] {
        let config = resolve(words).unwrap();
        assert_eq!(
            (config.nodes as usize, config.ranks_per_node.as_slice()),
            (sizes.len(), sizes),
            "{words}"
        );
    }
    let nodes = resolve("--ranks-per-node 1,2").unwrap().node_map();
    assert_eq!((nodes.members(0), nodes.members(1)), (&[0][..], &[1, 2][..]));
}

#[test]
fn partial_sums_have_a_type_where_the_order_makes_some() {
    for (words, partials) in [
        ("--wire bf16", None),
        ("--order rank", Some(Wire::F32)),
        ("--order node --wire bf16", Some(Wire::Bf16)),
    ] {
        assert_eq!(resolve(words).unwrap().partials(), partials, "{words}");
    }
    let error = resolve("--order rank --wire bf16 --dtype f16").unwrap_err();
    assert_eq!(error.to_string(), "--wire bf16 is for rows of bf16, and these are f16");
}

#[test]
fn small_shapes_run_enough_rounds_for_p99_and_large_ones_end_in_time() {
    assert_eq!(resolve("--tokens 64").unwrap().rounds, 1000);
    assert_eq!(resolve("--tokens 65536 --hidden 7168").unwrap().rounds, 10);
    assert_eq!(resolve("--backward").unwrap().rounds, 100);
    assert_eq!(resolve("--rounds 7").unwrap().rounds, 7);
}

#[test]
fn the_routing_file_decides_what_no_option_says() {
    let file = File::new("decides", true);
    let config = file.resolve("").unwrap();
    assert_eq!((config.experts, config.top_k), (4, 2));
    assert!(file.resolve("--experts 4 --top-k 2").is_ok());
}

#[test]
fn a_file_that_contradicts_the_options_is_refused() {
    let file = File::new("contradicts", true);
    for (words, key) in [("--experts 64", "num_experts"), ("--top-k 8", "top_k")] {
        let error = file.resolve(words).unwrap_err();
        assert!(error.to_string().contains(key), "{error}");
    }
}

#[test]
fn the_recording_named_for_another_shape_is_refused() {
    let error = resolve("--routing recorded --experts 32").unwrap_err();
    assert_eq!(
        error.to_string(),
        "routing recorded: num_experts is 64 in the recording, but 32 was asked for"
    );
}

#[test]
fn another_shape_without_a_routing_is_drawn() {
    for (words, experts, top_k) in [("--experts 32", 32, 8), ("--top-k 4", 64, 4)] {
        let config = resolve(words).unwrap();
        assert_eq!(config.routing, "zipf:1.0".parse().unwrap(), "{words}");
        assert_eq!((config.experts, config.top_k), (experts, top_k));
    }
    assert_eq!(resolve("--experts 64 --top-k 8").unwrap().routing, Source::Recorded);
}

#[test]
fn a_file_without_meta_takes_the_experts_of_the_options_or_the_default() {
    let file = File::new("plain", false);
    assert_eq!(file.resolve("").unwrap().experts, 64);
    assert_eq!(file.resolve("--experts 5").unwrap().experts, 5);
    let error = file.resolve("--experts 3").unwrap_err();
    assert!(error.to_string().contains("line 1: expert 3 is out of range"), "{error}");
}

#[test]
fn a_misspelt_pattern_is_a_missing_file_whose_error_lists_the_patterns() {
    let error = resolve("--routing unifrom").unwrap_err();
    for word in ["unifrom", "recorded", "uniform", "zipf:S", "incast"] {
        assert!(error.to_string().contains(word), "{word} in {error}");
    }
}

#[test]
fn impossible_conditions_are_refused() {
    for (words, said) in [
        ("--hidden 7", "a row of 7 x bf16 has 14 bytes: it must be a multiple of 16"),
        ("--experts 4", "--top-k is 8, but there are only 4 experts"),
        ("--nodes 3 --ranks-per-node 1,2", "--ranks-per-node lists 2 nodes, but --nodes is 3"),
    ] {
        assert_eq!(refused(words), said);
    }
    for option in ["--tokens", "--hidden", "--experts", "--top-k", "--align", "--rounds"] {
        assert_eq!(refused(&format!("{option} 0")), format!("{option} must be at least 1"));
    }
}

#[test]
fn a_configuration_survives_the_way_to_a_rank() {
    let config = resolve("--nodes 2 --ranks-per-node 3,5 --order node --wire bf16 --routing incast").unwrap();
    let json = serde_json::to_string(&config).unwrap();
    for words in [r#""layout":"expert-major""#, r#""route":"pxn""#, r#""order":"node""#, r#""wire":"bf16""#] {
        assert!(json.contains(words), "{json}");
    }
    assert_eq!(serde_json::from_str::<Config>(&json).unwrap(), config);
}

#[test]
fn ranks_of_one_file_read_on_where_the_last_one_ended() {
    let file = File::new("ranks", true);
    let config = file.resolve("--tokens 3").unwrap();
    let router = Router::open(&config.routing).unwrap();
    let routing = router.routing(config.share(), 1).unwrap();
    assert_eq!((routing.tokens(), routing.experts_of(2)), (3, &[3, 0][..]));
}

#[test]
fn room_is_resolved_to_rows_by_what_the_routing_needs() {
    let room = |words: &str| resolve(&format!("--tokens 16 --routing incast {words}")).unwrap().room;
    assert_eq!(room(""), Room::default());
    let budget = room("--mode budget --budget 0.5 --on-overflow drop");
    assert_eq!((budget.rows, budget.mode()), (Some(64), Mode::Budget { rows: 64, overflow: Overflow::Drop }));
    // Everybody's tokens go to the eight experts of rank 0.
    assert_eq!(room("--mode slots").mode(), Mode::Slots { rows: 16, overflow: Overflow::Error });
    let rank_major = room("--layout rank-major --mode budget --budget 8");
    assert_eq!(rank_major.rows, Some(8 * 16), "one row per token, an eighth of all on average");
}

#[test]
fn room_that_does_not_do_is_refused_with_what_would() {
    let error =
        |words: &str| resolve(&format!("--tokens 16 --routing incast {words}")).unwrap_err().to_string();
    let budget = error("--mode budget --budget 1");
    assert!(budget.contains("128 rows") && budget.contains("rank 0 needs 1024"), "{budget}");
    assert!(budget.contains("--budget 8 has room"), "{budget}");
    let slots = error("--mode slots --slots 15");
    assert!(slots.contains("--slots 16 has room"), "{slots}");
    for words in ["--budget 2", "--slots 2", "--on-overflow drop", "--mode slots --budget 2"] {
        assert!(error(words).contains("is for --mode"), "{words}");
    }
    assert_eq!(refused("--mode budget --budget -1"), "--budget -1 is not a positive number");
}
