//! `sidelane put-bench` as a user sees it: tables, files and refusals. Figures are only checked to
//! exist.

use crate::program::{assert_words, report, run, run_with_report, sidelane};

/// Text of a measurement.
fn told(line: &str) -> String {
    run(&mut sidelane(&format!("put-bench {line}"))).well()
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
            assert_words(&told, &[lane, "verified: what was received last", "1 machine"]);
            assert_eq!(told.contains("p99: of 1000 iterations or more"), test == "put-lat", "{told}");
            for size in sizes {
                let cells = line(&told, size);
                assert_eq!((cells.len(), cells[1]), (columns, "20"), "{told}");
                let figures = cells[2..].iter().filter(|cell| **cell != "-");
                assert!(
                    figures.clone().all(|cell| cell.parse::<f64>().is_ok_and(|figure| figure >= 0.0)),
                    "{told}"
                );
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
    let line = "put-bench put-lat --ranks-per-node 2,1,2 --pairs all --iterations 20";
    let (ended, report) = run_with_report(&mut sidelane(line));
    let told = ended.well();
    for node in 0..3 {
        let lines: Vec<&str> =
            told.lines().filter(|line| line.trim().starts_with(&format!("node {node} "))).collect();
        let cells: Vec<&str> = lines.last().unwrap().split_whitespace().skip(2).collect();
        assert_eq!(cells.len(), 3, "{told}");
        for (to, cell) in cells.into_iter().enumerate() {
            assert_eq!(cell == "-", to == node, "{told}");
        }
    }
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
    let svg = tempfile::NamedTempFile::new().unwrap();
    let line = format!("put-bench put-bibw --sizes 1..16 --iterations 10 --svg {}", svg.path().display());
    let report = report(&line);
    let runs = report["pairs"][0]["runs"].as_array().unwrap();
    let sizes: Vec<u64> = runs.iter().map(|run| run["bytes"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [1, 2, 4, 8, 16]);
    for run in runs {
        assert_eq!((&run["verified"], &run["iterations"]), (&true.into(), &10.into()));
        assert!(run["bandwidth"]["mean_mib_s"].as_f64().unwrap() > 0.0, "{run}");
        assert!(run["bandwidth"]["memcpy_mib_s"].is_null() && run["latency"].is_null(), "{run}");
    }
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(picture.starts_with("<svg ") && picture.contains("lane loopback"), "{picture}");
}
