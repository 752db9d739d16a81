//! `sidelane bench` between two machines: network namespaces, one launcher in each, the tcp lane
//! between them.

#[path = "../support/network.rs"]
#[allow(dead_code, reason = "each test program uses a part of this")]
mod namespaces;
#[path = "../process/common/wires.rs"]
mod wires;

use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use namespaces::Network;
use rustix::process::Pid;

/// Where the ranks meet.
const PORT: u16 = 29500;

/// A job whose machines have lost each other has ended by then: it detects the loss in two seconds,
/// on a busy machine, too.
const IN_TIME: Duration = Duration::from_secs(20);

/// One launcher, and its output.
struct Machine {
    launcher: Child,
    out: JoinHandle<String>,
    errors: JoinHandle<String>,
}

fn start(network: &Network, machine: u32, rounds: &str) -> Machine {
    let mut program = network.run(machine, Path::new(env!("CARGO_BIN_EXE_sidelane")));
    let words = "bench --nodes 2 --ranks-per-node 2 --tokens 64 --hidden 1024 --rounds";
    program.args(words.split(' ')).args([rounds, "--node-rank", &machine.to_string()]);
    program.args(["--master", &format!("{}:{PORT}", Network::address(0))]);
    for name in ["SECRET_FILE", "INSECURE", "JOB", "PORT", "NET", "TCP_ADDRESS", "NODE"] {
        program.env_remove(format!("SIDELANE_{name}"));
    }
    program.envs(crate::program::SMALL_HEAP).env("COLUMNS", "1000");
    // The NICs of this machine are not in the namespaces.
    program.env("SIDELANE_IBVERBS_LIBRARY", "/nowhere/libibverbs.so.1");
    program.env("SIDELANE_SECRET", "a secret of this test alone").current_dir(std::env::temp_dir());
    let mut launcher = program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a launcher");
    let out = collect(launcher.stdout.take().expect("a pipe"));
    let errors = collect(launcher.stderr.take().expect("a pipe"));
    Machine { launcher, out, errors }
}

fn collect(pipe: impl std::io::Read + Send + 'static) -> JoinHandle<String> {
    std::thread::spawn(move || std::io::read_to_string(pipe).expect("text"))
}

impl Machine {
    /// Whether it succeeded, its output, and its errors.
    fn end(mut self) -> (bool, String, String) {
        let ended = self.launcher.wait().expect("our child");
        (ended.success(), self.out.join().expect("read"), self.errors.join().expect("read"))
    }

    /// The process of a rank, once there is one.
    fn rank(&self, rank: u32) -> Option<Pid> {
        let launcher = self.launcher.id();
        let children = std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children"));
        let children = children.expect("the launcher runs");
        let own = format!("RANK={rank}");
        let is_rank = |pid: &&str| {
            let variables = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            variables.split(|&byte| byte == 0).any(|variable| variable == own.as_bytes())
        };
        let found = children.split_whitespace().find(is_rank).and_then(|pid| pid.parse().ok());
        found.and_then(Pid::from_raw)
    }
}

fn both(network: &Arc<Network>, rounds: &str) -> [Machine; 2] {
    [0, 1].map(|machine| start(network, machine, rounds))
}

#[test]
fn bench_runs_between_machines_and_every_row_is_right() {
    let Some(network) = Network::new(2) else { return };
    let [(well, told, complaints), (well_too, nothing, more)] = both(&network, "5").map(Machine::end);
    assert!(well && well_too, "{complaints}{more}");
    for words in [
        "2 machines",
        "between nodes tcp (the nodes are on several machines, and rank 0 has no usable NIC: ",
        "bit-exact",
    ] {
        assert!(told.contains(words), "{words:?} in\n{told}");
    }
    assert_eq!(nothing, "");
}

/// More rounds than any test waits for.
const ENDLESS: &str = "100000000";

/// Waits until ranks of both machines have connections to each other: then they are in their
/// rounds, or about to be.
fn await_wires([_, there]: &[Machine; 2]) {
    let until = Instant::now() + Duration::from_secs(60);
    let wires = |rank| there.rank(rank).map_or(0, |process| wires::open(process, PORT).len());
    // Two ranks there have a wire each to both here.
    while wires(2) + wires(3) < 4 {
        assert!(Instant::now() < until, "{} and {} wires", wires(2), wires(3));
        std::thread::yield_now();
    }
}

/// Checks that a machine's job has failed because each of its two ranks ended by itself, with its
/// own message.
fn demand_complaints(
    machine: usize,
    (well, _, complaints): (bool, String, String),
    is_right: impl Fn(&str) -> bool,
) {
    assert!(!well && !complaints.contains("sidelane: killed"), "{complaints}");
    for rank in [0, 1].map(|local| machine * 2 + local) {
        let own = format!("[{rank}] sidelane: ");
        let mut complaint = complaints.lines().filter_map(|line| line.strip_prefix(&own));
        assert!(complaint.any(&is_right), "rank {rank}: {complaints}");
    }
}

#[test]
fn every_rank_of_bench_cut_off_by_silence_names_lost_rank() {
    let Some(network) = Network::new(2) else { return };
    let machines = both(&network, ENDLESS);
    await_wires(&machines);
    let cut = Instant::now();
    network.cut(0, 1);
    let ends = machines.map(Machine::end);
    let took = cut.elapsed();
    println!("cut off by silence: ended after {took:?}");
    // The rendezvous is at rank 0, which the other machine loses.
    for ((machine, end), lost) in ends.into_iter().enumerate().zip([&["rank 2", "rank 3"][..], &["rank 0"]]) {
        let silent = |rank: &&str, line: &str| line.contains(&format!("{rank} is lost: no heartbeat for"));
        demand_complaints(machine, end, |line| lost.iter().any(|rank| silent(rank, line)));
    }
    assert!(took < IN_TIME, "{took:?}");
}

#[test]
fn every_rank_of_bench_with_reset_wires_names_one_of_them() {
    let Some(network) = Network::new(2) else { return };
    let machines = both(&network, ENDLESS);
    await_wires(&machines);
    let before = network.resets(1);
    let reset = Instant::now();
    assert_eq!(wires::reset(machines[1].rank(3).unwrap(), PORT), 2, "wires of rank 3");
    let sent = network.resets(1) - before;
    let ends = machines.map(Machine::end);
    let took = reset.elapsed();
    println!("reset by {sent} RST segments: ended after {took:?}");
    assert!(sent >= 2, "each end of a wire in the other machine has been sent one");
    for (machine, end) in ends.into_iter().enumerate() {
        demand_complaints(machine, end, |line| {
            let pair = [0, 1].map(|here| [(3, here), (here, 3)]).concat();
            pair.iter().any(|(by, to)| {
                line.contains(&format!("the connection from rank {by} to rank {to} broke"))
                    || line.contains(&format!("rank {by}: the tcp connection to rank {to} broke"))
            })
        });
    }
    assert!(took < IN_TIME, "{took:?}");
}

#[test]
fn a_bench_whose_other_machine_is_killed_ends() {
    let Some(network) = Network::new(2) else { return };
    let machines = both(&network, ENDLESS);
    await_wires(&machines);
    let [here, mut there] = machines;
    // Its ranks see the end of their launcher, and end.
    there.launcher.kill().expect("our child");
    let killed = Instant::now();
    let (well, _, complaints) = here.end();
    let took = killed.elapsed();
    // A rank that leaves announces it before its connection closes.
    let ends = ["rank 2 is lost", "rank 3 is lost", "rank 2 left the world", "rank 3 left the world"];
    assert!(!well && ends.iter().any(|words| complaints.contains(words)), "{complaints}");
    println!("other machine killed: ended after {took:?}");
    assert!(took < IN_TIME, "{took:?}");
    there.end();
}
