//! `sidelane put-bench` as a user sees it: tables, files and refusals. Figures are only checked to
//! exist.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

fn put_bench(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidelane"));
    command.arg("put-bench").args(line.split(' ')).current_dir(std::env::temp_dir());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Text of a measurement.
fn told(line: &str) -> String {
    let output = put_bench(line).output().unwrap();
    assert!(output.status.success(), "{line}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// The words of the table's lines that begin with this.
fn line<'t>(told: &'t str, begin: &str) -> Vec<&'t str> {
    let found = told.lines().find(|line| line.trim_start().starts_with(&format!("{begin} ")));
    found.unwrap_or_else(|| panic!("{begin} in\n{told}")).split_whitespace().collect()
}

#[test]
fn every_test_has_its_figures_on_one_node_and_on_two() {
    let shapes = [
        ("--nodes 1 --ranks-per-node 2", "shm, route direct"),
        ("--nodes 2", "loopback (all nodes on one machine)"),
    ];
    for (shape, lane) in shapes {
        for (test, sizes, columns) in
            [("put-lat", &["8", "4K"][..], 7), ("put-bw", &["8", "4K"], 7), ("put-bibw", &["8", "4K"], 5)]
        {
            let told = told(&format!("{test} {shape} --sizes 8,4096 --iterations 20 --warmup 2"));
            for words in [lane, "verified: what was received last", "1 machine"] {
                assert!(told.contains(words), "{words:?} in\n{told}");
            }
            for size in sizes {
                let cells = line(&told, size);
                assert_eq!((cells.len(), cells[1]), (columns, "20"), "{told}");
                let figures = cells[2..].iter().filter(|cell| **cell != "-");
                assert!(
                    figures.clone().all(|cell| cell.parse::<f64>().is_ok_and(|figure| figure >= 0.0)),
                    "{told}"
                );
                assert!(cells[3].parse::<f64>().unwrap() > 0.0, "{told}");
            }
        }
        let told = told(&format!("signal {shape} --iterations 1000"));
        let cells = line(&told, "0");
        assert_eq!((cells.len(), cells[1]), (7, "1000"), "{told}");
        assert!(cells.iter().all(|cell| *cell != "-"), "a thousand iterations have a p99: {told}");
    }
}

#[test]
fn all_pairs_of_nodes_make_a_matrix() {
    let file = Scratch::new("matrix.json");
    let told =
        told(&format!("put-lat --ranks-per-node 2,1,2 --pairs all --iterations 20 --json {}", file.path()));
    for node in 0..3 {
        let lines: Vec<&str> =
            told.lines().filter(|line| line.trim().starts_with(&format!("node {node} "))).collect();
        let cells: Vec<&str> = lines.last().unwrap().split_whitespace().skip(2).collect();
        assert_eq!(cells.len(), 3, "{told}");
        for (to, cell) in cells.into_iter().enumerate() {
            assert_eq!(cell == "-", to == node, "{told}");
        }
    }
    let report = file.json();
    let pairs = report["pairs"].as_array().unwrap().iter();
    let pairs: Vec<_> = pairs
        .map(|pair| [&pair["from"]["rank"], &pair["to"]["rank"]].map(|rank| rank.as_u64().unwrap()))
        .collect();
    assert_eq!(pairs, [[0, 2], [0, 3], [2, 0], [2, 3], [3, 0], [3, 2]]);
    assert_eq!(report["verified"], true);
}

#[test]
fn a_peer_of_the_own_node_is_measured_while_others_wait() {
    let told = told("put-bw --nodes 2 --ranks-per-node 2 --peer 1 --sizes 1M --iterations 5");
    assert!(
        told.contains("rank 0 (node 0) and rank 1 (node 0)") && told.contains("shm, route direct"),
        "{told}"
    );
}

#[test]
fn the_report_and_the_picture_are_written_by_rank_0() {
    let (json, svg) = (Scratch::new("report.json"), Scratch::new("report.svg"));
    told(&format!("put-bibw --sizes 1..16 --iterations 10 --json {} --svg {}", json.path(), svg.path()));
    let report = json.json();
    let runs = report["pairs"][0]["runs"].as_array().unwrap();
    let sizes: Vec<u64> = runs.iter().map(|run| run["bytes"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [1, 2, 4, 8, 16]);
    for run in runs {
        assert_eq!((&run["verified"], &run["iterations"]), (&true.into(), &10.into()));
        assert!(run["bandwidth"]["mean_mib_s"].as_f64().unwrap() > 0.0, "{run}");
        assert!(run["bandwidth"]["memcpy_mib_s"].is_null() && run["latency"].is_null(), "{run}");
    }
    let picture = std::fs::read_to_string(&svg.0).unwrap();
    assert!(picture.starts_with("<svg ") && picture.contains("lane loopback"), "{picture}");
}

#[test]
fn what_cannot_be_measured_is_refused_before_ranks_start() {
    for (line, said) in [
        ("put-lat --nodes 1 --ranks-per-node 1", "a job of one rank"),
        ("put-lat --peer 0", "rank 0 itself"),
        ("put-lat --peer 2", "2 ranks"),
        ("put-lat --sizes 0", "not 0"),
        ("put-lat --sizes 8..soon", "is no size"),
        ("put-bw --iterations 0", "--iterations must be at least 1"),
        ("signal --sizes 8", "a signal has no size"),
        ("put-bw --pairs all --peer 1", "cannot be used with"),
        ("put-bw --nodes 1 --ranks-per-node 2 --pairs all", "two nodes or more"),
        ("put-bw --node-rank 0", "--master"),
        ("latency", "put-lat"),
    ] {
        let output: Output = put_bench(line).output().unwrap();
        let complaints = text(&output.stderr);
        assert_eq!(
            (output.status.code(), text(&output.stdout).as_str()),
            (Some(2), ""),
            "{line}: {complaints}"
        );
        assert!(complaints.contains(said) && !complaints.contains("(node "), "{line}: {complaints}");
    }
}

/// A file of this test's own, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        Scratch(std::env::temp_dir().join(format!("sidelane-put-bench-{}-{name}", std::process::id())))
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&std::fs::read(&self.0).unwrap()).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
