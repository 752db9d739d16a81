//! Machines on one switch: network namespaces, joined by a bridge in another one.
//!
//! ```text
//!   namespace 0             namespace "switch"             namespace 1
//!   10.77.0.1 -- veth ---- port 0, bridge, port 1 ---- veth -- 10.77.0.2
//!        └── nft drops SYNs at random, and all packets of machines that this one is cut off from
//! ```
//!
//! Packets that are dropped vanish: no machine sees its link go down, and no answers come.
//!
//! That needs root with the right to make namespaces, and nft. Without them the tests are skipped,
//! with a message; with `SIDELANE_NEED_NAMESPACES` set they fail instead.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The network. Dropping it takes it down.
pub struct Network {
    name: String,
    machines: u32,
}

static COUNT: AtomicU32 = AtomicU32::new(0);

impl Network {
    /// The address of a machine.
    pub fn address(machine: u32) -> String {
        format!("10.77.0.{}", machine + 1)
    }

    /// So many machines; none where this user may not make them.
    pub fn new(machines: u32) -> Option<Arc<Network>> {
        let name = format!("sl{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let network = Network { name, machines };
        match network.build() {
            Ok(()) => Some(Arc::new(network)),
            Err(why) => {
                let needed = std::env::var_os("SIDELANE_NEED_NAMESPACES").is_some();
                assert!(!needed, "no network namespaces: {why}");
                println!("SKIPPED: no network namespaces here: {why}");
                None
            }
        }
    }

    fn build(&self) -> Result<(), String> {
        let switch = self.switch();
        ip(&format!("netns add {switch}"))?;
        ip(&format!("-n {switch} link add bridge type bridge"))?;
        ip(&format!("-n {switch} link set bridge up"))?;
        for machine in 0..self.machines {
            let (namespace, address) = (self.machine(machine), Self::address(machine));
            ip(&format!("netns add {namespace}"))?;
            ip(&format!("-n {namespace} link set lo up"))?;
            ip(&format!("-n {switch} link add port{machine} type veth peer name wire netns {namespace}"))?;
            ip(&format!("-n {switch} link set port{machine} master bridge up"))?;
            ip(&format!("-n {namespace} addr add {address}/24 dev wire"))?;
            ip(&format!("-n {namespace} link set wire up"))?;
            self.nft(machine, "add table inet lossy")?;
            self.nft(machine, "add chain inet lossy input { type filter hook input priority 0; }")?;
        }
        Ok(())
    }

    /// A program that will run on a machine.
    pub fn run(&self, machine: u32, program: &Path) -> Command {
        let mut ip = Command::new("ip");
        ip.args(["netns", "exec", &self.machine(machine)]).arg(program);
        ip
    }

    /// From now on each machine loses one SYN in ten.
    pub fn lose_syns(&self) {
        for machine in 0..self.machines {
            let rule =
                "add rule inet lossy input iif != lo tcp flags & syn == syn numgen random mod 10 0 drop";
            self.nft(machine, rule).expect("a rule");
        }
    }

    /// From now on nothing that one of two machines sends reaches the other.
    pub fn cut(&self, a: u32, b: u32) {
        for (machine, other) in [(a, b), (b, a)] {
            let rule = format!("add rule inet lossy input ip saddr {} drop", Self::address(other));
            self.nft(machine, &rule).expect("a rule");
        }
    }

    /// All packets arrive again.
    pub fn heal(&self) {
        for machine in 0..self.machines {
            self.nft(machine, "flush table inet lossy").expect("a table");
        }
    }

    /// RST segments that a machine has sent so far.
    pub fn resets(&self, machine: u32) -> u64 {
        let table = ip(&format!("netns exec {} cat /proc/net/snmp", self.machine(machine))).expect("a table");
        let mut tcp = table.lines().filter_map(|line| line.strip_prefix("Tcp: "));
        let (names, values) = (tcp.next().expect("names"), tcp.next().expect("values"));
        let counted = names.split(' ').zip(values.split(' ')).find(|(name, _)| *name == "OutRsts");
        counted.expect("Linux counts resets").1.parse().expect("a number")
    }

    fn nft(&self, machine: u32, words: &str) -> Result<String, String> {
        run(Command::new("ip").args(["netns", "exec", &self.machine(machine), "nft", words]))
    }

    fn machine(&self, machine: u32) -> String {
        format!("{}-{machine}", self.name)
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.name)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // Those that were never made are not there.
        for namespace in (0..self.machines).map(|machine| self.machine(machine)).chain([self.switch()]) {
            let _ = ip(&format!("netns del {namespace}"));
        }
    }
}

fn ip(words: &str) -> Result<String, String> {
    run(Command::new("ip").args(words.split(' ')))
}

fn run(program: &mut Command) -> Result<String, String> {
    let done = program.output().map_err(|error| format!("{program:?}: {error}"))?;
    let said = String::from_utf8_lossy(&done.stderr).trim().to_owned();
    let told = String::from_utf8_lossy(&done.stdout).into_owned();
    if done.status.success() { Ok(told) } else { Err(format!("{program:?}: {said}")) }
}
