//! Jobs whose nodes are started one by one, as on several machines: here two launchers of one
//! machine, which meet at its loopback address.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::program::{self, Ended, assert_words, read, run};

/// The program, with no variable in its environment that names a meeting point.
fn sidelane(line: &str) -> Command {
    let mut command = program::sidelane(line);
    for name in ["SECRET", "SECRET_FILE", "INSECURE", "JOB", "PORT", "NET"] {
        command.env_remove(format!("SIDELANE_{name}"));
    }
    command
}

/// Starts one whose output is read when it has ended.
fn spawn(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn end(child: Child) -> Ended {
    child.wait_with_output().unwrap().into()
}

/// A loopback address whose port was free a moment ago. Ranks look at the ports behind it until
/// they find their job.
fn master() -> String {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    format!("127.0.0.1:{port}")
}

/// One launcher per node, with options of its own.
fn run_nodes(line: &str, own: [&str; 2]) -> [Ended; 2] {
    let master = master();
    let start = |node: usize| {
        spawn(&mut sidelane(&format!("{line} {} --node-rank {node} --master {master}", own[node])))
    };
    [start(0), start(1)].map(end)
}

const SMALL: &str = "--nodes 2 --ranks-per-node 2 --hidden 64";

#[test]
fn two_launchers_run_one_bench_that_rank_0_reports() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|name| folder.path().join(name));
    let json = [&first, &second].map(|file| format!("--json {}", file.display()));
    let [a, b] = run_nodes(&format!("bench {SMALL} --tokens 16 --rounds 2"), [&json[0], &json[1]]);
    let shape = "4 on 2 nodes (2 + 2), 1 machine, ";
    assert_words(&a.well(), &[shape, "between nodes loopback (all nodes on one machine)", "bit-exact"]);
    assert_eq!(b.well(), "");
    let report = read(&first);
    assert_eq!((&report["verified"], &report["config"]["machines"]), (&true.into(), &1.into()));
    assert!(!second.exists(), "rank 0 alone writes files");
}

#[test]
fn put_bench_and_trace_run_across_launchers_too() {
    let [a, b] = run_nodes("put-bench put-lat --nodes 2 --sizes 8,1M --iterations 20", ["", ""]);
    assert_words(&a.well(), &["rank 0 (node 0) and rank 1 (node 1)", "verified: "]);
    assert_eq!(b.well(), "");

    let folder = tempfile::tempdir().unwrap();
    let [out, other] = ["trace.json", "elsewhere"].map(|name| folder.path().join(name));
    let files = [&out, &other].map(|file| format!("--out {}", file.display()));
    let [a, b] = run_nodes(&format!("trace {SMALL} --tokens 16"), [&files[0], &files[1]]);
    a.well();
    assert_eq!((b.well(), other.exists()), (String::new(), false));
    let trace = read(&out);
    let ranks =
        trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["name"] == "process_name");
    assert_eq!(ranks.count(), 4);
}

#[test]
fn nodes_with_different_settings_hear_rank_and_setting() {
    for node in run_nodes(&format!("bench {SMALL}"), ["--tokens 16", "--tokens 32"]) {
        // Once for all ranks of a machine, and nothing that follows from what was set.
        node.refused(&["rank 2 was started with other settings than rank 0: tokens 32, not 16\n"]);
        assert_eq!(node.err.matches("other settings").count(), 1, "{}", node.err);
    }
}

/// Asks a launcher that waits for others to end.
fn stop(launcher: Child) {
    kill_process(Pid::from_child(&launcher), Signal::TERM).unwrap();
    assert_eq!(end(launcher).code, Some(128 + 15));
}

#[test]
fn node_with_other_rank_count_is_refused_with_option_named() {
    let master = master();
    let start = |node: u32, ranks: u32| {
        let line = format!("bench --nodes 2 --ranks-per-node {ranks} --node-rank {node} --master {master}");
        spawn(&mut sidelane(&line))
    };
    let [a, b] = [start(0, 1), start(1, 2)];
    let differs = "was started in a job of 4 ranks, but rank 0 in one of 2";
    end(b).refused(&[differs, "--ranks-per-node"]);
    stop(a);
}

#[test]
fn nodes_that_do_not_know_the_same_secret_do_not_meet() {
    let master = master();
    let start = |node: u32, secret: &str| {
        let mut sidelane = sidelane(&format!("bench {SMALL} --node-rank {node} --master {master}"));
        spawn(sidelane.env("SIDELANE_SECRET", secret).env("SIDELANE_RENDEZVOUS_MS", "20000"))
    };
    let [a, b] = [start(0, "correct horse battery staple"), start(1, "stable battery of other horses")];
    assert_words(&end(b).err, &["have different secrets"]);
    stop(a);
}

#[test]
fn second_launcher_of_node_0_is_refused_at_once() {
    let master = master();
    let line = format!("bench --node-rank 0 --master {master} --nodes 2 --ranks-per-node 1");
    let mut nodes = [(); 2].map(|()| spawn(&mut sidelane(&line)));
    // The first to end is the second that came. The other waits for its node 1.
    let ended = loop {
        if let Some(ended) = nodes.iter_mut().position(|node| node.try_wait().unwrap().is_some()) {
            break ended;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    let [a, b] = nodes;
    let (refused, waits) = if ended == 0 { (a, b) } else { (b, a) };
    assert_words(&end(refused).err, &["rank 0 of 2 was refused at the rendezvous", "--node-rank"]);
    stop(waits);
}

/// Environment of the ranks of node 1 of 2.
fn environment(master: &str, options: &str, given: &[(&str, &str)]) -> Ended {
    let mut sidelane =
        sidelane(&format!("launch --ranks-per-node 1,2 --node-rank 1 --master {master} {options}"));
    sidelane.envs(given.iter().copied());
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $SIDELANE_NODE \
                  $MASTER_ADDR $MASTER_PORT $SIDELANE_JOB ${SIDELANE_SECRET-none} ${SIDELANE_PORT-none} \
                  ${SIDELANE_NET-none}";
    run(sidelane.args(["--", "sh", "-c", script]))
}

fn lines(ended: Ended) -> BTreeSet<String> {
    ended.well().lines().map(str::to_owned).collect()
}

#[test]
fn launcher_starts_only_own_ranks_with_shared_environment() {
    let seen = lines(environment("127.0.0.1", "", &[]));
    let shared = "127.0.0.1 29500 sidelane-29500 none none none";
    assert_eq!(seen, [format!("1/3 0/2 1 1 {shared}"), format!("2/3 1/2 1 1 {shared}")].into());
}

#[test]
fn launcher_keeps_values_given_in_environment() {
    let secret = "correct-horse-battery-staple";
    let given = [("SIDELANE_SECRET", secret), ("SIDELANE_JOB", "j"), ("SIDELANE_PORT", "4711")];
    let seen = lines(environment("node0:4000", "--net tcp", &given));
    let shared = format!("node0 4000 j {secret} 4711 tcp");
    assert_eq!(seen, [format!("1/3 0/2 1 1 {shared}"), format!("2/3 1/2 1 1 {shared}")].into());
}

#[test]
fn job_beyond_loopback_needs_secret_or_insecure_setting() {
    let told = ["ranks of other machines join at node0, ports 29501 to 29516", "SIDELANE_SECRET_FILE"];
    environment("node0", "", &[]).refused(&told);
    assert_eq!(lines(environment("node0", "", &[("SIDELANE_INSECURE", "1")])).len(), 2);
    let unreadable = environment("node0", "", &[("SIDELANE_SECRET_FILE", "/nowhere/secret")]);
    assert_words(&unreadable.err, &["SIDELANE_SECRET_FILE"]);
    assert!(unreadable.code != Some(0) && unreadable.out.is_empty());
}

#[test]
fn a_part_that_is_none_is_refused_before_anything_starts() {
    for (options, said) in [
        ("--node-rank 2 --master 127.0.0.1", "--node-rank is 2"),
        ("--node-rank 1", "--master"),
        ("--master 127.0.0.1", "--node-rank"),
        ("--node-rank 0 --master a:b", "HOST:PORT"),
        ("--node-rank 0 --master 192.0.2.1", "--master 192.0.2.1 (192.0.2.1) is no address of this machine"),
        ("--net wire", "[possible values: auto, verbs, tcp, loopback]"),
    ] {
        for (command, program) in [("bench", ""), ("launch", "-- echo started")] {
            let line = format!("{command} --nodes 2 --ranks-per-node 1 {options} {program}");
            run(&mut sidelane(&line)).refused(&[said]);
        }
    }
}
