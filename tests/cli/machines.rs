//! Jobs whose nodes are started one by one, as on several machines: here two launchers of one
//! machine, which meet at its loopback address.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

/// The program, with no variable in its environment that names a meeting point.
fn sidelane(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sidelane"));
    for name in ["SECRET", "SECRET_FILE", "INSECURE", "JOB", "PORT", "NET"] {
        command.env_remove(format!("SIDELANE_{name}"));
    }
    command.args(words).current_dir(std::env::temp_dir());
    command
}

/// A loopback address whose port was free a moment ago. Ranks look at the ports behind it until
/// they find their job.
fn master() -> String {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    format!("127.0.0.1:{port}")
}

/// One launcher per node, with options of its own.
fn run_nodes(command: &str, all: &[&str], own: [&[&str]; 2]) -> [Output; 2] {
    let master = master();
    let start = |node: usize| -> Child {
        let mut sidelane = sidelane(&[&[command], all, own[node]].concat());
        let node = node.to_string();
        sidelane.args(["--node-rank", &node, "--master", &master]);
        sidelane.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    [start(0), start(1)].map(|child| child.wait_with_output().unwrap())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const SMALL: [&str; 10] =
    ["--nodes", "2", "--ranks-per-node", "2", "--tokens", "16", "--hidden", "64", "--rounds", "2"];

#[test]
fn two_launchers_run_one_bench_that_rank_0_reports() {
    let folder = std::env::temp_dir();
    let file = |node: u32| folder.join(format!("sidelane-machines-{}-{node}.json", std::process::id()));
    let (first, second) = (file(0), file(1));
    let json = [&first, &second].map(|file| ["--json", file.to_str().unwrap()]);
    let [a, b] = run_nodes("bench", &SMALL, [&json[0], &json[1]]);
    assert!(a.status.success() && b.status.success(), "{}{}", text(&a.stderr), text(&b.stderr));
    let told = text(&a.stdout);
    for words in [
        "4 on 2 nodes (2 + 2), 1 machine, ",
        "between nodes loopback (all nodes on one machine)",
        "bit-exact",
    ] {
        assert!(told.contains(words), "{words:?} in\n{told}");
    }
    assert_eq!(text(&b.stdout), "");
    let report: Value = serde_json::from_slice(&std::fs::read(&first).unwrap()).unwrap();
    std::fs::remove_file(&first).unwrap();
    assert_eq!((&report["verified"], &report["config"]["machines"]), (&true.into(), &1.into()));
    assert!(!second.exists(), "rank 0 alone writes files");
}

#[test]
fn put_bench_and_trace_run_across_launchers_too() {
    let [a, b] = run_nodes(
        "put-bench",
        &["put-lat", "--nodes", "2", "--sizes", "8,1M", "--iterations", "20"],
        [&[], &[]],
    );
    assert!(a.status.success() && b.status.success(), "{}{}", text(&a.stderr), text(&b.stderr));
    let told = text(&a.stdout);
    assert!(told.contains("rank 0 (node 0) and rank 1 (node 1)") && told.contains("verified: "), "{told}");

    let out = std::env::temp_dir().join(format!("sidelane-machines-{}-trace.json", std::process::id()));
    let [a, b] =
        run_nodes("trace", &SMALL[..8], [&["--out", out.to_str().unwrap()], &["--out", "elsewhere"]]);
    assert!(a.status.success() && b.status.success(), "{}{}", text(&a.stderr), text(&b.stderr));
    let trace: Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
    std::fs::remove_file(&out).unwrap();
    let ranks =
        trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["name"] == "process_name");
    assert_eq!(ranks.count(), 4);
    assert_eq!((text(&b.stdout), std::env::temp_dir().join("elsewhere").exists()), (String::new(), false));
}

#[test]
fn nodes_under_different_conditions_are_told_which_rank_differs_in_what() {
    let nodes = run_nodes("bench", &SMALL[..4], [&["--tokens", "16"], &["--tokens", "32"]]);
    for node in nodes {
        let (told, complaints) = (text(&node.stdout), text(&node.stderr));
        assert_eq!((node.status.code(), told.as_str()), (Some(2), ""), "{complaints}");
        let differs = "rank 2 was started with other settings than rank 0: ";
        assert!(complaints.contains(differs), "{complaints}");
        assert!(complaints.contains("tokens 32, not 16"), "{complaints}");
    }
}

#[test]
fn node_with_another_number_of_ranks_is_refused_at_once_and_the_option_is_named() {
    let master = master();
    let start = |node: &str, ranks: &str| {
        let mut sidelane = sidelane(&["bench", "--nodes", "2", "--ranks-per-node", ranks]);
        sidelane.args(["--node-rank", node, "--master", &master]);
        sidelane.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let [a, b] = [start("0", "1"), start("1", "2")];
    let refused = b.wait_with_output().unwrap();
    let complaints = text(&refused.stderr);
    assert_eq!((refused.status.code(), text(&refused.stdout).as_str()), (Some(2), ""), "{complaints}");
    let differs = "was started in a job of 4 ranks, but rank 0 in one of 2";
    assert!(complaints.contains(differs) && complaints.contains("--ranks-per-node"), "{complaints}");
    rustix::process::kill_process(rustix::process::Pid::from_child(&a), rustix::process::Signal::TERM)
        .unwrap();
    assert_eq!(a.wait_with_output().unwrap().status.code(), Some(128 + 15));
}

#[test]
fn nodes_that_do_not_know_the_same_secret_do_not_meet() {
    let master = master();
    let start = |node: &str, secret: &str| {
        let mut sidelane = sidelane(&["bench", "--node-rank", node, "--master", &master]);
        sidelane.args(SMALL).env("SIDELANE_SECRET", secret).env("SIDELANE_RENDEZVOUS_MS", "20000");
        sidelane.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let [a, b] = [start("0", "correct horse battery staple"), start("1", "stable battery of other horses")];
    let complaints = text(&b.wait_with_output().unwrap().stderr);
    assert!(complaints.contains("have different secrets"), "{complaints}");
    rustix::process::kill_process(rustix::process::Pid::from_child(&a), rustix::process::Signal::TERM)
        .unwrap();
    assert_eq!(a.wait_with_output().unwrap().status.code(), Some(128 + 15));
}

#[test]
fn second_launcher_of_node_0_is_refused_at_once() {
    let master = master();
    let start = || {
        let mut sidelane = sidelane(&["bench", "--node-rank", "0", "--master", &master]);
        sidelane.args(["--nodes", "2", "--ranks-per-node", "1"]).stdout(Stdio::null()).stderr(Stdio::piped());
        sidelane.spawn().unwrap()
    };
    let mut nodes = [start(), start()];
    // The first to end is the second that came. The other waits for its node 1.
    let ended = loop {
        if let Some(ended) = nodes.iter_mut().position(|node| node.try_wait().unwrap().is_some()) {
            break ended;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    let [a, b] = nodes;
    let (refused, waits) = if ended == 0 { (a, b) } else { (b, a) };
    let complaints = text(&refused.wait_with_output().unwrap().stderr);
    assert!(complaints.contains("rank 0 of 2 was refused at the rendezvous"), "{complaints}");
    assert!(complaints.contains("--node-rank"), "{complaints}");
    rustix::process::kill_process(rustix::process::Pid::from_child(&waits), rustix::process::Signal::TERM)
        .unwrap();
    assert_eq!(waits.wait_with_output().unwrap().status.code(), Some(128 + 15));
}

/// Environment of the ranks of node 1 of 2.
fn environment(master: &str, options: &[&str], given: &[(&str, &str)]) -> Output {
    let mut sidelane =
        sidelane(&["launch", "--ranks-per-node", "1,2", "--node-rank", "1", "--master", master]);
    sidelane.args(options).envs(given.iter().copied());
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $SIDELANE_NODE \
                  $MASTER_ADDR $MASTER_PORT $SIDELANE_JOB ${SIDELANE_SECRET-none} ${SIDELANE_PORT-none} \
                  ${SIDELANE_NET-none}";
    sidelane.args(["--", "sh", "-c", script]).output().unwrap()
}

fn lines(output: &Output) -> BTreeSet<String> {
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).lines().map(str::to_owned).collect()
}

#[test]
fn a_launcher_starts_the_ranks_of_its_node_alone_and_says_what_all_launchers_say() {
    let seen = lines(&environment("127.0.0.1", &[], &[]));
    let shared = "127.0.0.1 29500 sidelane-29500 none none none";
    assert_eq!(seen, [format!("1/3 0/2 1 1 {shared}"), format!("2/3 1/2 1 1 {shared}")].into());
}

#[test]
fn what_is_given_in_the_environment_is_left_as_it_is() {
    let secret = "correct-horse-battery-staple";
    let given = [("SIDELANE_SECRET", secret), ("SIDELANE_JOB", "j"), ("SIDELANE_PORT", "4711")];
    let seen = lines(&environment("node0:4000", &["--net", "tcp"], &given));
    let shared = format!("node0 4000 j {secret} 4711 tcp");
    assert_eq!(seen, [format!("1/3 0/2 1 1 {shared}"), format!("2/3 1/2 1 1 {shared}")].into());
}

#[test]
fn beyond_loopback_a_job_needs_a_secret_or_a_user_who_does_without() {
    let refused = environment("node0", &[], &[]);
    assert_eq!((refused.status.code(), text(&refused.stdout).as_str()), (Some(2), ""));
    let complaints = text(&refused.stderr);
    assert!(complaints.contains("ranks of other machines join at node0:29500"), "{complaints}");
    assert!(complaints.contains("SIDELANE_SECRET_FILE"), "{complaints}");
    assert_eq!(lines(&environment("node0", &[], &[("SIDELANE_INSECURE", "1")])).len(), 2);
    let unreadable = environment("node0", &[], &[("SIDELANE_SECRET_FILE", "/nowhere/secret")]);
    assert!(text(&unreadable.stderr).contains("SIDELANE_SECRET_FILE"), "{}", text(&unreadable.stderr));
    assert!(!unreadable.status.success() && unreadable.stdout.is_empty());
}

#[test]
fn a_part_that_is_none_is_refused_before_anything_starts() {
    for (options, said) in [
        (&["--node-rank", "2", "--master", "127.0.0.1"][..], "--node-rank is 2"),
        (&["--node-rank", "1"], "--master"),
        (&["--master", "127.0.0.1"], "--node-rank"),
        (&["--node-rank", "0", "--master", "a:b"], "HOST:PORT"),
        (
            &["--node-rank", "0", "--master", "192.0.2.1"],
            "--master 192.0.2.1 (192.0.2.1) is no address of this machine",
        ),
        (&["--net", "wire"], "[possible values: auto, verbs, tcp, loopback]"),
    ] {
        for command in ["bench", "launch"] {
            let mut sidelane = sidelane(&[command, "--nodes", "2", "--ranks-per-node", "1"]);
            sidelane.args(options);
            if command == "launch" {
                sidelane.args(["--", "echo", "started"]);
            }
            let output = sidelane.output().unwrap();
            let complaints = text(&output.stderr);
            assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(2), ""), "{complaints}");
            assert!(complaints.contains(said), "{complaints}");
        }
    }
}
