//! What a rank learns from its environment.

use std::io;
use std::net::TcpListener;

use super::lifeline::Lifeline;
use crate::error::CliError;

const LOOPBACK: &str = "127.0.0.1";

/// The part of the environment that all ranks share.
pub struct Meeting {
    master_port: u16,
    port: u16,
    job: String,
    secret: String,
    lifeline: i32,
}

/// Where one rank stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub rank: u32,
    pub world: u32,
    pub node: u32,
    pub local: u32,
    pub local_world: u32,
}

impl Meeting {
    /// Draws a name and a secret, and finds two free ports.
    ///
    /// The ports are free now; the handshake of the ranks notices if somebody else took one meanwhile.
    pub fn new(lifeline: &Lifeline) -> Result<Self, CliError> {
        let (master_port, port) =
            free_ports().map_err(|source| CliError::Prepare { what: "find a free port", source })?;
        let job = format!("sidelane-{}", random_hex::<4>()?);
        Ok(Meeting { master_port, port, job, secret: random_hex::<32>()?, lifeline: lifeline.number() })
    }

    /// The variables of one rank.
    pub fn variables(&self, place: Place) -> [(&'static str, String); 13] {
        [
            ("RANK", place.rank.to_string()),
            ("WORLD_SIZE", place.world.to_string()),
            ("LOCAL_RANK", place.local.to_string()),
            ("LOCAL_WORLD_SIZE", place.local_world.to_string()),
            ("GROUP_RANK", place.node.to_string()),
            ("MASTER_ADDR", LOOPBACK.to_owned()),
            ("MASTER_PORT", self.master_port.to_string()),
            ("TORCHELASTIC_RUN_ID", self.job.clone()),
            ("SIDELANE_NODE", place.node.to_string()),
            ("SIDELANE_PORT", self.port.to_string()),
            ("SIDELANE_SECRET", self.secret.clone()),
            ("SIDELANE_LAUNCHER_FD", self.lifeline.to_string()),
            ("SIDELANE_LAUNCHER_PID", std::process::id().to_string()),
        ]
    }
}

/// The ranks of nodes of these sizes, node by node.
pub fn places(nodes: &[u32]) -> Vec<Place> {
    let world = nodes.iter().sum();
    let slots =
        nodes.iter().zip(0..).flat_map(|(&size, node)| (0..size).map(move |local| (node, local, size)));
    slots
        .zip(0..)
        .map(|((node, local, local_world), rank)| Place { rank, world, node, local, local_world })
        .collect()
}

/// Two different ports: both are held until both are known.
fn free_ports() -> io::Result<(u16, u16)> {
    let (first, second) = (TcpListener::bind((LOOPBACK, 0))?, TcpListener::bind((LOOPBACK, 0))?);
    Ok((first.local_addr()?.port(), second.local_addr()?.port()))
}

fn random_hex<const N: usize>() -> Result<String, CliError> {
    let mut bytes = [0u8; N];
    getrandom::fill(&mut bytes).map_err(|error| CliError::Prepare {
        what: "draw random bytes",
        source: io::Error::other(error.to_string()),
    })?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_numbered_node_by_node() {
        let places = places(&[2, 1]);
        let place = |rank, node, local, local_world| Place { rank, world: 3, node, local, local_world };
        assert_eq!(places, [place(0, 0, 0, 2), place(1, 0, 1, 2), place(2, 1, 0, 1)]);
    }

    #[test]
    fn every_job_has_a_secret_and_ports_of_its_own() {
        let lifeline = Lifeline::new().unwrap();
        let (a, b) = (Meeting::new(&lifeline).unwrap(), Meeting::new(&lifeline).unwrap());
        assert_eq!(a.secret.len(), 64);
        assert_ne!(a.secret, b.secret);
        assert_ne!(a.job, b.job);
        assert_ne!(a.master_port, a.port);
    }
}
