//! `sidelane bench` between two machines: network namespaces, one launcher in each, the tcp lane between them.
#![cfg(feature = "cli")]

#[path = "process_common/network.rs"]
mod network;

use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use network::Network;

/// One launcher, and what it says.
struct Machine {
    launcher: Child,
    out: JoinHandle<String>,
    errors: JoinHandle<String>,
}

fn start(network: &Network, machine: usize, rounds: &str) -> Machine {
    let mut program = network.run(machine, Path::new(env!("CARGO_BIN_EXE_sidelane")));
    let words = "bench --nodes 2 --ranks-per-node 2 --tokens 64 --hidden 1024 --rounds";
    program.args(words.split(' ')).args([rounds, "--node-rank", &machine.to_string()]);
    program.args(["--master", &format!("{}:29500", Network::ADDRESSES[0])]);
    for name in ["SECRET_FILE", "INSECURE", "JOB", "PORT", "RAIL", "TCP_ADDRESS", "NODE"] {
        program.env_remove(format!("SIDELANE_{name}"));
    }
    // Whatever cards this machine has, they are not in the namespaces.
    program.env("SIDELANE_IBVERBS", "/nowhere/libibverbs.so.1");
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
    /// Whether it ended well, what it printed, and what it complained of.
    fn end(mut self) -> (bool, String, String) {
        let ended = self.launcher.wait().expect("our child");
        (ended.success(), self.out.join().expect("read"), self.errors.join().expect("read"))
    }
}

fn both(network: &Arc<Network>, rounds: &str) -> [Machine; 2] {
    [0, 1].map(|machine| start(network, machine, rounds))
}

#[test]
fn bench_runs_between_machines_and_every_row_is_right() {
    let Some(network) = Network::new() else { return };
    let [(well, told, complaints), (well_too, nothing, more)] = both(&network, "5").map(Machine::end);
    assert!(well && well_too, "{complaints}{more}");
    for words in
        ["2 machines", "rail tcp (the nodes are on several machines, and rank 0 has no card: ", "bit-exact"]
    {
        assert!(told.contains(words), "{words:?} in\n{told}");
    }
    assert_eq!(nothing, "");
}

/// More rounds than anybody waits for.
const ENDLESS: &str = "100000000";

/// Waits until ranks of both machines have wires to each other: they are in their rounds then, or about to be.
fn await_wires(network: &Network) {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let seen = network.connections(1);
        // Two ranks there have a wire each to both here, and each one to the rendezvous.
        if seen >= 4 + 2 {
            return;
        }
        assert!(Instant::now() < until, "{seen} connections");
        std::thread::yield_now();
    }
}

#[test]
fn a_bench_that_is_cut_off_by_silence_ends_on_both_machines() {
    let Some(network) = Network::new() else { return };
    let machines = both(&network, ENDLESS);
    await_wires(&network);
    let cut = Instant::now();
    network.cut();
    let ends = machines.map(Machine::end);
    let took = cut.elapsed();
    for ((well, _, complaints), lost) in
        ends.into_iter().zip([["rank 2 is lost", "rank 3 is lost"], ["rank 0 is lost"; 2]])
    {
        assert!(!well && lost.iter().any(|words| complaints.contains(words)), "{complaints}");
        assert!(complaints.contains("no heartbeat for"), "{complaints}");
    }
    println!("cut off by silence: ended after {took:?}");
    assert!(took < Duration::from_secs(20), "{took:?}");
}

#[test]
fn a_bench_whose_other_machine_is_killed_ends() {
    let Some(network) = Network::new() else { return };
    let [here, mut there] = both(&network, ENDLESS);
    await_wires(&network);
    // Its ranks see the end of their launcher, and end.
    there.launcher.kill().expect("our child");
    let killed = Instant::now();
    let (well, _, complaints) = here.end();
    let took = killed.elapsed();
    // A rank that ends in order says so before its connection closes.
    let ends = ["rank 2 is lost", "rank 3 is lost", "rank 2 left the world", "rank 3 left the world"];
    assert!(!well && ends.iter().any(|words| complaints.contains(words)), "{complaints}");
    println!("other machine killed: ended after {took:?}");
    assert!(took < Duration::from_secs(20), "{took:?}");
    there.end();
}
