//! One virtual machine: QEMU, its monitor, and the channel to the agent inside.

mod channel;
mod monitor;

use std::fs::{self, File};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::deadline::Deadline;
use crate::error::{At, Error, Result};
use crate::tool::tail;

use channel::{Channel, Log};
pub use channel::{Finished, Job};
use monitor::Monitor;

/// How often a condition of this machine is looked at again.
pub const POLL: Duration = Duration::from_millis(10);

/// NICs of each machine; NIC c of one is wired to NIC c of the other.
pub const NICS: usize = 2;

/// Lines of a console that an error shows.
const SHOWN: usize = 12;

/// What executes a machine's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// The processor itself.
    Kvm,
    /// QEMU's translation, everywhere.
    Tcg,
}

impl Accelerator {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "KVM",
            Self::Tcg => "software emulation (TCG)",
        }
    }

    fn option(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg,thread=multi",
        }
    }
}

/// What every machine of a bed is made of.
pub struct Kind {
    /// The kernel.
    pub kernel: PathBuf,
    /// The initramfs.
    pub image: PathBuf,
    /// For sockets: a short path.
    pub sockets: PathBuf,
    /// Folder of consoles and channel logs.
    pub logs: PathBuf,
    /// When the run began.
    pub start: Instant,
}

impl Kind {
    fn socket(&self, machine: usize, name: &str) -> PathBuf {
        self.sockets.join(format!("{name}{machine}"))
    }

    fn log(&self, machine: usize, name: &str) -> PathBuf {
        self.logs.join(format!("{name}{machine}.log"))
    }

    /// QEMU with everything a machine has. It dies with this program.
    fn qemu(&self, machine: usize, accelerator: Accelerator) -> Command {
        let (peer, at) = (1 - machine, |name| self.socket(machine, name));
        let mut qemu = Command::new("setpriv");
        qemu.args(["--pdeathsig", "KILL", "qemu-system-x86_64", "-nodefaults", "-no-user-config"])
            .args(["-M", "q35", "-accel", accelerator.option(), "-cpu", "max", "-smp", "2", "-m", "1024"])
            .args(["-display", "none", "-no-reboot"])
            .arg("-kernel")
            .arg(&self.kernel)
            .arg("-initrd")
            .arg(&self.image)
            .args(["-append", &format!("console=ttyS0 quiet panic=-1 machine={machine}")])
            .args(["-serial", &format!("file:{}", self.log(machine, "console").display())])
            .args(["-chardev", &format!("socket,id=qmp,path={}", at("monitor").display())])
            .args(["-mon", "chardev=qmp,mode=control"])
            .args(["-chardev", &format!("socket,id=agent,path={}", at("agent").display())])
            .args(["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=agent"]);
        for nic in 0..NICS {
            let wire = |machine| self.socket(machine, &format!("wire{nic}-")).display().to_string();
            let (cable, here, there) = (cable(nic), wire(machine), wire(peer));
            qemu.arg("-netdev");
            qemu.arg(format!(
                "dgram,id={cable},local.type=unix,local.path={here},remote.type=unix,remote.path={there}"
            ));
            let mac = format!("52:54:00:00:{nic:02x}:{machine:02x}");
            qemu.arg("-device");
            qemu.arg(format!("virtio-net-pci,netdev={cable},mac={mac},host_mtu=4200,romfile="));
        }
        qemu.stdin(Stdio::null()).stdout(Stdio::null());
        qemu
    }
}

/// A machine that has been switched on and has not yet greeted.
pub struct Starting {
    machine: usize,
    qemu: Process,
    monitor: UnixListener,
    agent: UnixListener,
    console: PathBuf,
    complaints: PathBuf,
    log: Log,
}

/// A machine that runs. Dropped, it is switched off.
pub struct Machine {
    channel: Channel,
    monitor: Monitor,
    _qemu: Process,
}

/// A child that does not outlive its owner.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Starting {
    /// Switches a machine on. The calling thread must live as long as the machine.
    pub fn new(kind: &Kind, machine: usize, accelerator: Accelerator) -> Result<Self> {
        let (console, complaints) = (kind.log(machine, "console"), kind.log(machine, "qemu"));
        let fresh = |path: &Path| File::create(path).at(path);
        fresh(&console)?;
        let monitor = listen(&kind.socket(machine, "monitor"))?;
        let agent = listen(&kind.socket(machine, "agent"))?;
        let log = kind.log(machine, "machine");
        let log = Log::new(File::options().create(true).append(true).open(&log).at(log)?, kind.start);
        let qemu = kind
            .qemu(machine, accelerator)
            .stderr(fresh(&complaints)?)
            .spawn()
            .map_err(|source| Error::Start { program: "qemu-system-x86_64".into(), source })?;
        Ok(Self { machine, qemu: Process(qemu), monitor, agent, console, complaints, log })
    }

    /// Waits until the machine's NICs exist and its agent greets.
    pub fn ready(mut self, within: Duration) -> Result<Machine> {
        let (machine, deadline) = (self.machine, Deadline::after(within));
        let up = || {
            // QEMU connects to both before the machine runs its first instruction.
            let monitor = accept(&self.monitor, &mut self.qemu, deadline)?;
            let agent = accept(&self.agent, &mut self.qemu, deadline)?;
            let monitor = Monitor::open(machine, monitor).ok()?;
            let channel = Channel::open(machine, agent, self.log, deadline).ok()?;
            Some(Machine { channel, monitor, _qemu: self.qemu })
        };
        let said = |path| tail(&fs::read_to_string(path).unwrap_or_default(), SHOWN);
        up().ok_or_else(|| Error::Boot {
            machine,
            within,
            console: said(self.console),
            qemu: said(self.complaints),
        })
    }
}

impl Machine {
    /// Starts a line of shell.
    pub fn start(&self, command: impl Into<String>) -> Result<Job> {
        self.channel.start(command)
    }

    /// Plugs the cable of a NIC in, or pulls it out.
    pub fn set_link(&mut self, nic: usize, up: bool) -> Result<()> {
        self.monitor.set_link(&cable(nic), up)
    }

    /// Holds packets on the cable of a NIC, or releases them.
    pub fn hold(&mut self, nic: usize, held: bool) -> Result<()> {
        if held { self.monitor.hold(&cable(nic)) } else { self.monitor.let_go(&cable(nic)) }
    }
}

/// QEMU's name for the cable of a NIC.
fn cable(nic: usize) -> String {
    format!("n{nic}")
}

/// A connection from QEMU; `None` when it has ended, or time is up.
fn accept(listener: &UnixListener, qemu: &mut Process, deadline: Deadline) -> Option<UnixStream> {
    while deadline.left().is_some() && matches!(qemu.0.try_wait(), Ok(None)) {
        if let Ok((socket, _)) = listener.accept() {
            return socket.set_nonblocking(false).is_ok().then_some(socket);
        }
        thread::sleep(POLL);
    }
    None
}

fn listen(path: &Path) -> Result<UnixListener> {
    let _ = fs::remove_file(path);
    let listener = UnixListener::bind(path).at(path)?;
    listener.set_nonblocking(true).at(path)?;
    Ok(listener)
}
