//! Two machines and the wires between them.
//!
//! ```text
//!   machine 0   rank 0, 1 ..    rxe0 10.0.0.1 ====wire 0==== 10.0.0.2 rxe0    .. 2, 3   machine 1
//!                               rxe1 10.0.1.1 ====wire 1==== 10.0.1.2 rxe1
//! ```
//!
//! Ranks meet over wire 0. So wire 1 can be held while they go on talking.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use crate::counters::{self, Counters};
use crate::deadline::Deadline;
use crate::error::{At, Error, Result};
use crate::machine::{Accelerator, Finished, Job, Kind, Machine, NICS, POLL, Starting};

/// A machine under translation is up in 3 to 10 s on an idle processor.
const BOOT: Duration = Duration::from_secs(90);

/// A processor that works needs a second; one that only seems to must not cost minutes.
const BOOT_KVM: Duration = Duration::from_secs(20);

/// For commands that only look something up.
const LOOK: Duration = Duration::from_secs(20);

/// Two machines and the wires between them.
pub struct Bed {
    kind: Kind,
    accelerator: Accelerator,
    machines: [Option<Machine>; 2],
    whole: bool,
    held: Option<usize>,
}

/// The address of a machine on the wire of a NIC.
pub fn address(machine: usize, nic: usize) -> String {
    format!("10.0.{nic}.{}", machine + 1)
}

/// The address at which ranks and programs meet: machine 0's on wire 0.
pub fn master() -> String {
    address(0, 0)
}

impl Bed {
    /// Boots both machines: with KVM where it works, else in software.
    pub fn boot(kind: Kind) -> Result<Self> {
        let mut bed =
            Self { kind, accelerator: Accelerator::Tcg, machines: [None, None], whole: true, held: None };
        if fs::File::options().read(true).write(true).open("/dev/kvm").is_ok() {
            bed.accelerator = Accelerator::Kvm;
            if bed.switch_on(BOOT_KVM).is_ok() {
                return Ok(bed);
            }
            bed.machines = [None, None];
            bed.accelerator = Accelerator::Tcg;
        }
        bed.switch_on(BOOT)?;
        Ok(bed)
    }

    /// What executes the machines' instructions.
    pub fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    /// Boots, at once, the machines that are off.
    fn switch_on(&mut self, within: Duration) -> Result<()> {
        let off = [0, 1].into_iter().filter(|&machine| self.machines[machine].is_none());
        let starting = off
            .map(|machine| Ok((machine, Starting::new(&self.kind, machine, self.accelerator)?)))
            .collect::<Result<Vec<_>>>()?;
        for (machine, starting) in starting {
            self.machines[machine] = Some(starting.ready(within)?);
        }
        Ok(())
    }

    /// Both machines on, all cables in, nothing held.
    pub fn heal(&mut self) -> Result<()> {
        self.switch_on(BOOT)?;
        self.let_go()?;
        if self.whole { Ok(()) } else { self.wires(true) }
    }

    /// Pulls the cables out: machine 0 sees its carrier go, machine 1 sees silence.
    pub fn cut(&mut self) -> Result<()> {
        self.wires(false)
    }

    /// The end of all wires that can be disturbed.
    fn near_end(&mut self) -> Result<&mut Machine> {
        self.machines[0].as_mut().ok_or(Error::Gone { machine: 0 })
    }

    fn wires(&mut self, up: bool) -> Result<()> {
        for nic in 0..NICS {
            self.near_end()?.set_link(nic, up)?;
        }
        self.whole = up;
        Ok(())
    }

    /// From now on packets on the wire of a NIC are held, in both directions.
    pub fn hold(&mut self, nic: usize) -> Result<()> {
        self.near_end()?.hold(nic, true)?;
        self.held = Some(nic);
        Ok(())
    }

    /// Releases the held packets, in order.
    pub fn let_go(&mut self) -> Result<()> {
        self.held.take().map_or(Ok(()), |nic| self.near_end()?.hold(nic, false))
    }

    /// Switches a machine off, as a power cut does.
    pub fn kill(&mut self, machine: usize) {
        self.machines[machine] = None;
        if machine == 0 {
            self.held = None;
        }
    }

    /// Starts a line of shell.
    pub fn start(&self, machine: usize, command: impl Into<String>) -> Result<Job> {
        self.machines[machine].as_ref().ok_or(Error::Gone { machine })?.start(command)
    }

    /// Starts a line of shell on both machines.
    pub fn start_both(&self, command: impl Fn(usize) -> String) -> Result<[Job; 2]> {
        Ok([self.start(0, command(0))?, self.start(1, command(1))?])
    }

    /// Runs a line of shell on both machines at once; both must end well.
    pub fn both(&self, command: impl Fn(usize) -> String, deadline: Deadline) -> Result<[Finished; 2]> {
        let [a, b] = self.start_both(command)?;
        Ok([a.succeed(deadline)?, b.succeed(deadline)?])
    }

    /// Counters of a machine's NICs.
    pub fn counters(&self, machine: usize) -> Result<Counters> {
        let seen = self.start(machine, counters::COMMAND)?.succeed(Deadline::after(LOOK))?;
        Ok(Counters::parse(&seen.stdout))
    }

    /// Waits until a machine's NICs have sent this many more packets: until the job there is
    /// running.
    pub fn under_way(&self, machine: usize, job: &mut Job, packets: u64, deadline: Deadline) -> Result<()> {
        let sent = || {
            let seen = self.start(machine, counters::SENT)?.succeed(Deadline::after(LOOK))?;
            Ok::<_, Error>(Counters::parse(&seen.stdout).sent())
        };
        let goal = sent()? + packets;
        while sent()? < goal {
            job.still_runs()?;
            if deadline.left().is_none() {
                return Err(Error::Idle { machine, packets });
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Waits until a line of shell succeeds on a machine.
    pub fn until(&self, machine: usize, condition: &str, deadline: Deadline) -> Result<()> {
        let look = format!("until {condition}; do usleep 20000; done");
        self.start(machine, look)?.succeed(deadline.within(LOOK))?;
        Ok(())
    }

    /// Waits for a listener on a TCP port of a machine.
    pub fn listening(&self, machine: usize, port: u16, deadline: Deadline) -> Result<()> {
        let listens = format!("cat /proc/net/tcp /proc/net/tcp6 | grep -q ':{port:04X} 0*:0000 0A'");
        self.until(machine, &listens, deadline)
    }
}

/// A folder for sockets, whose paths must be short; removed with the bed.
pub struct Sockets(PathBuf);

impl Sockets {
    /// A fresh one.
    pub fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("testbed-{}", std::process::id()));
        fs::create_dir_all(&path).at(&path)?;
        Ok(Self(path))
    }

    /// Where it is.
    pub fn path(&self) -> PathBuf {
        self.0.clone()
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
