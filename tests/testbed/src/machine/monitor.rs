//! QEMU's monitor (QMP): orders to the machine itself, one JSON value a line.

use std::io::{BufRead, BufReader, Lines};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::protocol::send;

/// An order is a matter of milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long a wire is held at most, in microseconds: longer than any run takes.
const HELD_US: u32 = u32::MAX;

/// QEMU's monitor.
pub struct Monitor {
    machine: usize,
    orders: UnixStream,
    answers: Lines<BufReader<UnixStream>>,
}

impl Monitor {
    /// Takes a connection from QEMU.
    pub fn open(machine: usize, socket: UnixStream) -> Result<Self> {
        let failed = |source| Error::Channel { machine, source };
        socket.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
        let answers = BufReader::new(socket.try_clone().map_err(failed)?).lines();
        let mut monitor = Self { machine, orders: socket, answers };
        monitor.order("qmp_capabilities", json!({}))?;
        Ok(monitor)
    }

    /// Plugs a NIC's cable in, or pulls it out: its guest sees the carrier go, the other side sees
    /// silence.
    pub fn set_link(&mut self, name: &str, up: bool) -> Result<()> {
        self.order("set_link", json!({ "name": name, "up": up }))
    }

    /// From now on packets on a NIC's cable are held, in both directions, in order.
    pub fn hold(&mut self, name: &str) -> Result<()> {
        self.order(
            "object-add",
            json!({ "qom-type": "filter-buffer", "id": filter(name), "netdev": name, "interval": HELD_US }),
        )
    }

    /// Releases the held packets.
    pub fn let_go(&mut self, name: &str) -> Result<()> {
        self.order("object-del", json!({ "id": filter(name) }))
    }

    fn order(&mut self, order: &'static str, arguments: Value) -> Result<()> {
        let machine = self.machine;
        let failed = |source| Error::Channel { machine, source };
        send(&self.orders, &json!({ "execute": order, "arguments": arguments })).map_err(failed)?;
        // Greeting and events come in between.
        for line in &mut self.answers {
            let answer: Value = serde_json::from_str(&line.map_err(failed)?).unwrap_or_default();
            if answer.get("return").is_some() {
                return Ok(());
            }
            if let Some(error) = answer.get("error") {
                return Err(Error::Monitor { machine, order, answer: error.to_string() });
            }
        }
        Err(Error::Gone { machine })
    }
}

/// QEMU's name for the filter that holds a NIC's cable.
fn filter(name: &str) -> String {
    format!("hold-{name}")
}
