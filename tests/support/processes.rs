//! Worlds of processes: a test starts its own program once per rank, as a launcher would.

use std::io::Read;
use std::net::TcpStream;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// Outcome of all ranks.
#[derive(Debug)]
pub struct Outcome {
    /// How each rank ended.
    pub ends: Vec<ExitStatus>,
    /// What all ranks printed.
    pub text: String,
}

impl Outcome {
    /// Whether every rank succeeded.
    pub fn is_success(&self) -> bool {
        self.ends.iter().all(ExitStatus::success)
    }
}

/// A master port for one job: the first of a run of ports that no connection takes by chance.
///
/// Ranks try this port and those after it, and identify each other by the job's name. Linux gives
/// connections ports from 32768 on: a master's port among those could collide with a connection's.
/// This function does not listen at the port to see whether it is free: a process that another
/// thread forks meanwhile would keep a copy of the listener until it executes its program.
pub fn master_port() -> u16 {
    static JOBS: AtomicU32 = AtomicU32::new(0);
    loop {
        let job = std::process::id().wrapping_mul(7).wrapping_add(JOBS.fetch_add(1, Ordering::Relaxed));
        let port = 10_000 + (job % 680) as u16 * 33;
        if TcpStream::connect(("127.0.0.1", port)).is_err() {
            return port;
        }
    }
}

/// Runs an ignored test of this program as the ranks of one world. `nodes` are sizes of nodes, all
/// on this machine.
pub fn run_ranks(nodes: &[u32], test: &str, variables: &[(&str, &str)]) -> Outcome {
    let program = std::env::current_exe().expect("this program");
    let port = master_port();
    let (mut heard, said) = std::io::pipe().expect("a pipe");
    let (world, mut ranks): (u32, _) = (nodes.iter().sum(), Vec::new());
    for (node, &size) in nodes.iter().enumerate() {
        for local in 0..size {
            let own = [
                ("RANK", ranks.len() as u32),
                ("WORLD_SIZE", world),
                ("LOCAL_RANK", local),
                ("LOCAL_WORLD_SIZE", size),
                ("GROUP_RANK", node as u32),
                ("SIDELANE_NODE", node as u32),
                ("MASTER_PORT", u32::from(port)),
            ];
            let rank = Command::new(&program)
                .args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"])
                .envs(own.map(|(name, number)| (name, number.to_string())))
                .env("MASTER_ADDR", "127.0.0.1")
                .env("SIDELANE_JOB", format!("{} at {port}", std::process::id()))
                .envs([("SIDELANE_HEAP", "2M"), ("SIDELANE_SYMMETRIC", "1M")])
                .envs(variables.iter().copied())
                .stdin(Stdio::null())
                .stdout(said.try_clone().expect("a second handle"))
                .stderr(said.try_clone().expect("a second handle"))
                .spawn();
            ranks.push(rank.expect("a process"));
        }
    }
    drop(said);
    let mut text = Vec::new();
    heard.read_to_end(&mut text).expect("what ranks print");
    let ends = ranks.iter_mut().map(|rank| rank.wait().expect("the end of a rank")).collect();
    Outcome { ends, text: String::from_utf8_lossy(&text).into_owned() }
}
