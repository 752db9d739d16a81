//! NICs without hardware: a fake of libibverbs in this process, for tests.
//!
//! A [`Fabric`] is a network of NICs. Its library fills the same table as the real one, so all code
//! above is the code that runs with NICs: contexts, domains, keys with bounds and rights, queue
//! pairs and their states, completions, credit for receives, queues that are full. Writes are
//! copies, done when they are posted, or, while the fabric is [held](Fabric::hold), one at a time
//! when their sender polls: so no code can rely on instant execution.
//!
//! ```text
//!   table    the C functions: find the fabric behind an object, translate
//!   state    what a kernel and its NICs hold: objects by number
//!   execute  what a NIC does with a request
//! ```
//!
//! Faults: a NIC that falls [silent](Fabric::silence), whose peers' retries end on the test's
//! request ([`give_up`](Fabric::give_up)), and a NIC that is [removed](Fabric::remove).

mod execute;
mod state;
mod table;
mod tree;

use std::ffi::CString;
use std::net::Ipv6Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

pub use state::Statistics;
use state::{Card, State};
pub use tree::Tree;

use super::library::Functions;
use super::{Library, Nic, Settings, Sysfs, VerbsEnvironment};

/// A network of NICs, each with one port.
pub struct Fabric {
    state: Mutex<State>,
    devices: Vec<Device>,
    sysfs: Sysfs,
    _tree: Tree,
    /// The table's functions that list this fabric's NICs.
    slot: usize,
}

/// Target of `ibv_device` pointers.
pub struct Device {
    fabric: Weak<Fabric>,
    card: usize,
    name: CString,
}

impl Fabric {
    /// A network of NICs of these names.
    pub fn new(cards: &[&str]) -> Arc<Self> {
        let tree = Tree::new();
        let mut state = State::default();
        for (at, name) in (1u16..).zip(cards) {
            let gid: Ipv6Addr = std::net::Ipv4Addr::new(10, 0, (at >> 8) as u8, at as u8).to_ipv6_mapped();
            let port = format!("class/infiniband/{name}/ports/1");
            tree.write(&format!("{port}/gids/1"), &gid.to_string());
            tree.write(&format!("{port}/gid_attrs/types/1"), "RoCE v2");
            state.cards.push(Card::new(gid));
        }
        Arc::new_cyclic(|fabric: &Weak<Fabric>| {
            let device = |(card, name): (usize, &&str)| Device {
                fabric: fabric.clone(),
                card,
                name: CString::new(*name).unwrap(),
            };
            let devices = cards.iter().enumerate().map(device).collect();
            Fabric {
                state: Mutex::new(state),
                devices,
                sysfs: tree.sysfs(),
                _tree: tree,
                slot: table::enrol(fabric),
            }
        })
    }

    /// The library that drives these NICs.
    pub fn library(&self) -> Arc<Library> {
        Library::of(self.functions())
    }

    /// Its functions, for tests that leave some out.
    pub fn functions(&self) -> Functions {
        table::functions(self.slot)
    }

    /// The kernel's files about these NICs.
    pub fn sysfs(&self) -> &Sysfs {
        &self.sysfs
    }

    /// A machine that has these NICs.
    pub fn ground(&self, settings: Settings) -> VerbsEnvironment {
        VerbsEnvironment { library: self.library(), sysfs: self.sysfs.clone(), settings }
    }

    /// A NIC, open, with these settings.
    pub fn rail(&self, card: &str, settings: &Settings) -> Nic {
        let settings = Settings { cards: vec![card.to_owned()], ..settings.clone() };
        let mut rails = Nic::open(&self.library(), &self.sysfs, &settings, 0).unwrap();
        rails.remove(0)
    }

    /// From now on a request is executed when its sender polls, one per queue pair and poll.
    pub fn hold(&self) {
        self.state().held = true;
    }

    /// Executes all that waits, and from now on when it is posted.
    pub fn flush(&self) {
        let mut state = self.state();
        state.held = false;
        state.run_all();
    }

    /// From now on no bytes go to or from this NIC; posted requests wait for answers.
    pub fn silence(&self, card: &str) {
        let at = self.place(card);
        self.state().cards[at].silent = true;
    }

    /// The retries of all requests that wait for a silent NIC have ended.
    pub fn give_up(&self) {
        self.state().give_up();
    }

    /// Removes a NIC from the machine: its peers see it silent, its owner sees a fatal event and
    /// errors.
    pub fn remove(&self, card: &str) {
        let at = self.place(card);
        self.state().remove(at);
    }

    /// Changes a NIC's abilities, for objects that are opened or made later.
    pub fn change(&self, card: &str, change: impl FnOnce(&mut Card)) {
        let at = self.place(card);
        change(&mut self.state().cards[at]);
    }

    /// Counts of a NIC so far.
    pub fn statistics(&self, card: &str) -> Statistics {
        let at = self.place(card);
        self.state().cards[at].statistics
    }

    /// Objects that are not destroyed, and objects that were destroyed too early: both 0 at the end
    /// of a good program.
    pub fn leftovers(&self) -> (usize, usize) {
        let state = self.state();
        (state.objects(), state.too_early)
    }

    fn place(&self, card: &str) -> usize {
        self.devices.iter().position(|device| device.name.to_bytes() == card.as_bytes()).unwrap()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        table::leave(self.slot);
    }
}
