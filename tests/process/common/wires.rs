//! Connections of a process, broken from outside.

use std::net::TcpStream;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// Ports behind the master's at which ranks may meet.
const RENDEZVOUS: u16 = 32;

/// The TCP connections of a process that are not those of its rendezvous.
pub fn open(process: Pid, master: u16) -> Vec<TcpStream> {
    let handle = pidfd_open(process, PidfdFlags::empty()).expect("the process runs");
    let rendezvous = master..=master + RENDEZVOUS;
    let mut wires = Vec::new();
    let open = std::fs::read_dir(format!("/proc/{}/fd", process.as_raw_nonzero()));
    for entry in open.expect("the kernel tells what is open").flatten() {
        let target = std::fs::read_link(entry.path());
        if !target.is_ok_and(|target| target.to_string_lossy().starts_with("socket:")) {
            continue;
        }
        let number = entry.file_name().to_string_lossy().parse().expect("a number");
        // It may have been closed meanwhile.
        let Ok(socket) = pidfd_getfd(&handle, number, PidfdGetfdFlags::empty()) else { continue };
        let stream = TcpStream::from(socket);
        let (Ok(here), Ok(there)) = (stream.local_addr(), stream.peer_addr()) else { continue };
        if !rendezvous.contains(&here.port()) && !rendezvous.contains(&there.port()) {
            wires.push(stream);
        }
    }
    wires
}

/// Resets them, as the kernel would: the other end gets an RST. Returns how many there were.
pub fn reset(process: Pid, master: u16) -> u32 {
    let wires = open(process, master);
    for wire in &wires {
        rustix::net::connect_unspec(wire).expect("a connection can be reset");
    }
    wires.len() as u32
}
