//! Two machines on one switch: network namespaces, joined by a bridge in a third one.
//!
//! ```text
//!   namespace 0            namespace "switch"             namespace 1
//!   10.77.0.1 -- veth ---- port 0, bridge, port 1 ---- veth -- 10.77.0.2
//! ```
//!
//! Taking a port off the bridge makes packets vanish: neither machine sees its link go down, and no
//! answers come. That needs root with the right to make namespaces. Without it the tests are
//! skipped, with a message; with `SIDELANE_NEED_NAMESPACES` set they fail instead.

use std::path::Path;
use std::process::Command as Program;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The network. Dropping it takes it down.
pub struct Network {
    name: String,
}

static COUNT: AtomicU32 = AtomicU32::new(0);

impl Network {
    /// Addresses of the two machines.
    pub const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];

    /// A network; none where this user may not make one.
    pub fn new() -> Option<Arc<Network>> {
        let name = format!("sl{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let network = Network { name };
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
        for (machine, address) in Self::ADDRESSES.iter().enumerate() {
            let namespace = self.machine(machine);
            ip(&format!("netns add {namespace}"))?;
            ip(&format!("-n {namespace} link set lo up"))?;
            ip(&format!("-n {switch} link add port{machine} type veth peer name wire netns {namespace}"))?;
            ip(&format!("-n {switch} link set port{machine} master bridge up"))?;
            ip(&format!("-n {namespace} addr add {address}/24 dev wire"))?;
            ip(&format!("-n {namespace} link set wire up"))?;
        }
        Ok(())
    }

    /// A program that will run on a machine.
    pub fn run(&self, machine: usize, program: &Path) -> Program {
        let mut ip = Program::new("ip");
        ip.args(["netns", "exec", &self.machine(machine)]).arg(program);
        ip
    }

    /// From now on nothing that one machine sends reaches the other.
    pub fn cut(&self) {
        ip(&format!("-n {} link set port1 nomaster", self.switch())).expect("the port is on the bridge");
    }

    /// RST segments that a machine has sent so far.
    pub fn resets(&self, machine: usize) -> u64 {
        let table = ip(&format!("netns exec {} cat /proc/net/snmp", self.machine(machine))).expect("a table");
        let mut tcp = table.lines().filter_map(|line| line.strip_prefix("Tcp: "));
        let (names, values) = (tcp.next().expect("names"), tcp.next().expect("values"));
        let counted = names.split(' ').zip(values.split(' ')).find(|(name, _)| *name == "OutRsts");
        counted.expect("Linux counts resets").1.parse().expect("a number")
    }

    fn machine(&self, machine: usize) -> String {
        format!("{}-{machine}", self.name)
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.name)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // Those that were never made are not there.
        for namespace in [self.machine(0), self.machine(1), self.switch()] {
            let _ = ip(&format!("netns del {namespace}"));
        }
    }
}

fn ip(words: &str) -> Result<String, String> {
    let done = Program::new("ip").args(words.split(' ')).output().map_err(|error| format!("ip: {error}"))?;
    let said = String::from_utf8_lossy(&done.stderr);
    let told = String::from_utf8_lossy(&done.stdout).into_owned();
    if done.status.success() { Ok(told) } else { Err(format!("ip {words}: {}", said.trim())) }
}
