//! What a rank learns from its environment.

use std::io;
use std::net::TcpListener;

use sidelane::Error;
use sidelane::bootstrap::{Identity, Secret};

use super::lifeline::Lifeline;
use super::machines::Master;
use crate::error::{CliError, failed, usage};

const LOOPBACK: &str = "127.0.0.1";

/// The part of the environment that all ranks share.
pub struct Meeting(Vec<(&'static str, String)>);

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
    /// All ranks on this machine. Draws a name and a secret, and finds two free ports.
    ///
    /// The ports are free now; the handshake of the ranks notices if somebody else took one meanwhile.
    pub fn here(lifeline: &Lifeline) -> Result<Self, CliError> {
        let (master_port, port) = free_ports().map_err(CliError::prepare("find a free port"))?;
        let job = format!("sidelane-{}", random_hex::<4>()?);
        let master = Master { host: LOOPBACK.to_owned(), port: master_port };
        let mut meeting = Meeting::shared(&master, job, lifeline);
        meeting.0.push(("SIDELANE_PORT", port.to_string()));
        meeting.0.push(("SIDELANE_SECRET", random_hex::<32>()?));
        Ok(meeting)
    }

    /// Ranks on several machines, these of them here. What all machines must say alike is given, or follows from the
    /// port; the secret is in the environment.
    ///
    /// # Errors
    /// Where the ranks would refuse to meet without one.
    pub fn at(master: &Master, here: &[Place], lifeline: &Lifeline) -> Result<Self, CliError> {
        let variable = |name: &str| std::env::var(name).ok();
        let named = variable("SIDELANE_JOB").filter(|name| !name.trim().is_empty());
        let job = named.unwrap_or_else(|| format!("sidelane-{}", master.port));
        let mut meeting = Meeting::shared(master, job.clone(), lifeline);
        meeting.0.push(("SIDELANE_JOB", job));
        for &place in here {
            let own = meeting.variables(place);
            let lookup = |name: &str| {
                own.iter().find(|(own, _)| *own == name).map(|(_, value)| value.clone()).or(variable(name))
            };
            let identity = Identity::from_vars(&lookup).map_err(Error::from)?;
            let secret = Secret::from_vars(&lookup).map_err(Error::from)?;
            if secret.is_none() && !identity.is_local() && !identity.insecure {
                return Err(usage!(
                    "ranks of other machines join at {master}: set the same SIDELANE_SECRET or SIDELANE_SECRET_FILE on each machine (or SIDELANE_INSECURE=1 on a trusted network)"
                ));
            }
        }
        Ok(meeting)
    }

    fn shared(master: &Master, job: String, lifeline: &Lifeline) -> Self {
        Meeting(vec![
            ("MASTER_ADDR", master.host.clone()),
            ("MASTER_PORT", master.port.to_string()),
            ("TORCHELASTIC_RUN_ID", job),
            ("SIDELANE_LAUNCHER_FD", lifeline.number().to_string()),
            ("SIDELANE_LAUNCHER_PID", std::process::id().to_string()),
        ])
    }

    /// The variables of one rank.
    pub fn variables(&self, place: Place) -> Vec<(&'static str, String)> {
        let own = [
            ("RANK", place.rank),
            ("WORLD_SIZE", place.world),
            ("LOCAL_RANK", place.local),
            ("LOCAL_WORLD_SIZE", place.local_world),
            ("GROUP_RANK", place.node),
            ("SIDELANE_NODE", place.node),
        ];
        own.map(|(name, number)| (name, number.to_string())).into_iter().chain(self.0.clone()).collect()
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
    getrandom::fill(&mut bytes).map_err(|error| failed!("cannot draw random bytes: {error}"))?;
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
        let [a, b] = [(); 2].map(|()| Meeting::here(&lifeline).unwrap());
        let value = |meeting: &Meeting, name| {
            meeting.0.iter().find(|(own, _)| *own == name).map(|(_, value)| value.clone()).unwrap()
        };
        assert_eq!(value(&a, "SIDELANE_SECRET").len(), 64);
        for name in ["SIDELANE_SECRET", "TORCHELASTIC_RUN_ID"] {
            assert_ne!(value(&a, name), value(&b, name));
        }
        assert_ne!(value(&a, "MASTER_PORT"), value(&a, "SIDELANE_PORT"));
    }
}
