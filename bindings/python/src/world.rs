//! Worlds and groups.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use pyo3::prelude::*;
use sidelane::Options;
use sidelane::bootstrap::{Identity, Secret, Timeouts};
use sidelane::config::Config;

use crate::errors::{Wrong, first, raise};
use crate::lending::{Close, LendingCell, Maker};
use crate::wait::{self, Interrupt};
use crate::window::Window;

/// A world while it is open, and what was made in it.
pub struct OpenWorld {
    maker: Maker,
    world: Mutex<Option<Arc<sidelane::World>>>,
    children: Mutex<Vec<Weak<dyn Close>>>,
}

/// Worlds that the interpreter's end must close.
static OPEN: Mutex<Vec<Weak<OpenWorld>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl OpenWorld {
    fn new(world: sidelane::World) -> Arc<Self> {
        let world = Mutex::new(Some(Arc::new(world)));
        let open_world = Arc::new(OpenWorld { maker: Maker::here(), world, children: Mutex::default() });
        let mut open = lock(&OPEN);
        open.retain(|other| other.strong_count() > 0);
        open.push(Arc::downgrade(&open_world));
        open_world
    }

    /// The world.
    ///
    /// # Errors
    /// `ForkedError`, `ClosedError`.
    pub fn world(&self) -> PyResult<Arc<sidelane::World>> {
        self.maker.check("world")?;
        lock(&self.world).clone().ok_or_else(|| {
            Wrong::Closed.error("Closed", "this world was closed: sidelane.init() joins another", &[])
        })
    }

    /// Closes something with this world.
    pub fn adopt(&self, child: Weak<dyn Close>) {
        let mut children = lock(&self.children);
        children.retain(|other| other.strong_count() > 0);
        children.push(child);
    }

    /// A collective call on the data path. Ctrl-C cancels the world.
    pub fn call<O: Send, T: Send>(
        &self,
        py: Python<'_>,
        cell: &LendingCell<O>,
        call: impl FnOnce(&mut O) -> Result<T, sidelane::Error> + Send,
    ) -> PyResult<T> {
        let world = self.world()?;
        cell.lend(|object| wait::call(py, &world, Interrupt::Cancels, || call(object)))
    }

    /// Builds what all ranks choose alike; `what` it is called in errors. Settings that cannot be
    /// used are refused by the library, so that the others are told.
    pub fn build<B: Send, S, O: Send + 'static>(
        &self,
        py: Python<'_>,
        what: &'static str,
        set: PyResult<(B, S)>,
        refuse: impl FnOnce() -> Result<(), sidelane::Error> + Send,
        build: impl FnOnce(B) -> Result<O, sidelane::Error> + Send,
    ) -> PyResult<(Arc<LendingCell<O>>, S)> {
        let (builder, settings) = match set {
            Ok(set) => set,
            Err(error) => return Err(first(py, self.meeting(py, refuse), error)),
        };
        let cell = Arc::new(LendingCell::new(what, self.meeting(py, || build(builder))?));
        let child = Arc::downgrade(&cell);
        self.adopt(child);
        Ok((cell, settings))
    }

    /// Waits at the rendezvous; Ctrl-C cancels the world.
    pub fn meeting<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce() -> Result<T, sidelane::Error> + Send,
    ) -> PyResult<T> {
        let world = self.world()?;
        wait::meeting(py, || world.cancel(), call)
    }

    fn close(&self) {
        if !self.maker.is_here() {
            return;
        }
        let world = lock(&self.world).take();
        let children = std::mem::take(&mut *lock(&self.children));
        // Where they are the last to know the world, this is where it says goodbye.
        children.iter().filter_map(Weak::upgrade).for_each(|child| child.close());
        drop(world);
    }
}

impl Drop for OpenWorld {
    fn drop(&mut self) {
        if !self.maker.is_here() {
            std::mem::forget(self.world.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

/// An error in a process that was forked from one whose worlds are open: it has their connections.
fn check_fork() -> PyResult<()> {
    let open: Vec<Arc<OpenWorld>> = lock(&OPEN).iter().filter_map(Weak::upgrade).collect();
    open.iter()
        .filter(|open_world| lock(&open_world.world).is_some())
        .try_for_each(|open_world| open_world.maker.check("world"))
}

/// Closes all worlds that are open: called at the interpreter's exit, so that others hear a
/// goodbye.
#[pyfunction]
pub fn close_all(py: Python<'_>) {
    let open = std::mem::take(&mut *lock(&OPEN));
    py.detach(|| open.iter().filter_map(Weak::upgrade).for_each(|open_world| open_world.close()));
}

/// A job, as variables describe it, those of the environment behind them.
struct Described {
    identity: Identity,
    secret: Option<Secret>,
    options: Options,
}

impl Described {
    fn by(variables: HashMap<String, String>) -> Result<Self, sidelane::Error> {
        let lookup = move |name: &str| variables.get(name).cloned().or_else(|| std::env::var(name).ok());
        let (config, timeouts) = (Config::from_vars(&lookup)?, Timeouts::from_vars(&lookup)?);
        let options = Options::from_env()?.with_config(config).with_timeouts(timeouts);
        Ok(Described {
            identity: Identity::from_vars(&lookup)?,
            secret: Secret::from_vars(&lookup)?,
            options,
        })
    }
}

/// A deadline of so many seconds.
fn limit(deadline: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(deadline).map_err(|error| {
        Wrong::Input.error("Setting", &format!("deadline: {error}"), &[("setting", "deadline".into())])
    })
}

/// All ranks of a job, as one of them sees it.
#[pyclass(frozen, module = "sidelane")]
pub struct World {
    open_world: Arc<OpenWorld>,
}

#[pymethods]
impl World {
    /// Joins the job that these variables describe, those of the environment behind them.
    #[staticmethod]
    fn join(py: Python<'_>, variables: HashMap<String, String>) -> PyResult<Self> {
        check_fork()?;
        let world = wait::joining(py, move || {
            let Described { identity, secret, options } = Described::by(variables)?;
            sidelane::World::join(&identity, secret, options)
        })?;
        Ok(World { open_world: OpenWorld::new(world) })
    }

    /// Waits as a spare until a world of that job takes this process in, for so many seconds.
    #[staticmethod]
    fn spare(py: Python<'_>, variables: HashMap<String, String>, deadline: f64) -> PyResult<Self> {
        check_fork()?;
        let deadline = limit(deadline)?;
        let world = wait::joining(py, move || {
            let Described { identity, secret, options } = Described::by(variables)?;
            sidelane::World::spare(&identity, secret, options, deadline)
        })?;
        Ok(World { open_world: OpenWorld::new(world) })
    }

    #[getter]
    fn rank(&self) -> PyResult<u32> {
        Ok(self.open_world.world()?.rank())
    }

    #[getter]
    fn size(&self) -> PyResult<u32> {
        Ok(self.open_world.world()?.size())
    }

    #[getter]
    fn epoch(&self) -> PyResult<u16> {
        Ok(self.open_world.world()?.epoch())
    }

    /// The node of each rank: ranks of a node share memory.
    #[getter]
    fn nodes(&self) -> PyResult<Vec<u32>> {
        let world = self.open_world.world()?;
        Ok((0..world.size()).map(|rank| world.nodes().node_of(rank)).collect())
    }

    /// For each rank, its rank in the world before. Spares that joined this world are behind those,
    /// and have none.
    #[getter]
    fn previous_ranks(&self) -> PyResult<Vec<u32>> {
        Ok(self.open_world.world()?.previous_ranks().to_vec())
    }

    fn group(&self, ranks: Vec<u32>) -> PyResult<Group> {
        let group = self.open_world.world()?.group(&ranks).map_err(raise)?;
        Ok(Group::new(Arc::clone(&self.open_world), group))
    }

    pub fn all(&self) -> PyResult<Group> {
        let group = self.open_world.world()?.all().map_err(raise)?;
        Ok(Group::new(Arc::clone(&self.open_world), group))
    }

    /// Raises the cause, if the world is dead.
    fn check(&self) -> PyResult<()> {
        self.open_world.world()?.health().check().map_err(raise)
    }

    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        let world = self.open_world.world()?;
        py.detach(|| world.cancel());
        Ok(())
    }

    /// The survivors' next world, of so many ranks at least, more than half if nothing is said;
    /// waits for them for so many seconds. All call it at once: who comes seconds later is out.
    #[pyo3(signature = (deadline=60.0, at_least=None))]
    fn rebuild(&self, py: Python<'_>, deadline: f64, at_least: Option<u32>) -> PyResult<World> {
        let world = self.open_world.world()?;
        let at_least = at_least.unwrap_or(world.size() / 2 + 1);
        let deadline = limit(deadline)?;
        let next = wait::joining(py, move || world.rebuild(deadline, at_least))?;
        Ok(World { open_world: OpenWorld::new(next) })
    }

    /// A larger world, with the spares that ask for it; rank 0 waits for so many seconds for a
    /// first one. All ranks call it, between two steps. Where it raises no `WorldError`, this world
    /// lives on.
    #[pyo3(signature = (deadline=60.0))]
    fn grow(&self, py: Python<'_>, deadline: f64) -> PyResult<World> {
        let world = self.open_world.world()?;
        let deadline = limit(deadline)?;
        let next = wait::joining(py, move || world.grow(deadline))?;
        Ok(World { open_world: OpenWorld::new(next) })
    }

    /// What the receive pool holds, in bytes.
    fn pool_report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(pythonize::pythonize(py, &self.open_world.world()?.pool().report())?)
    }

    /// Leaves the world. Everything that was made in it is closed, too; rows and results stay
    /// readable.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.open_world.close());
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    /// Where an exception comes by, the others must not wait for this rank.
    fn __exit__(
        &self,
        py: Python<'_>,
        class: Option<Bound<'_, PyAny>>,
        _error: Option<Bound<'_, PyAny>>,
        _trace: Option<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        if class.is_some() && lock(&self.open_world.world).is_some() {
            self.cancel(py)?;
        }
        self.close(py);
        Ok(())
    }

    fn __repr__(&self) -> String {
        match self.open_world.world() {
            Ok(world) => format!("sidelane.World(rank={}, size={})", world.rank(), world.size()),
            Err(_) => "sidelane.World(closed)".to_owned(),
        }
    }
}

/// Ordered ranks of a world.
#[pyclass(frozen, module = "sidelane")]
pub struct Group {
    open_world: Arc<OpenWorld>,
    group: Arc<LendingCell<Arc<sidelane::Group>>>,
}

impl Group {
    fn new(open_world: Arc<OpenWorld>, group: sidelane::Group) -> Self {
        let group = Arc::new(LendingCell::new("group", Arc::new(group)));
        let child = Arc::downgrade(&group);
        open_world.adopt(child);
        Group { open_world, group }
    }

    /// The group, while its world is open.
    pub fn get(&self) -> PyResult<Arc<sidelane::Group>> {
        self.open_world.world()?;
        self.group.get()
    }

    /// Its world.
    pub fn open_world(&self) -> &Arc<OpenWorld> {
        &self.open_world
    }
}

#[pymethods]
impl Group {
    #[getter]
    fn rank(&self) -> PyResult<u32> {
        Ok(self.get()?.rank())
    }

    #[getter]
    fn size(&self) -> PyResult<u32> {
        Ok(self.get()?.size())
    }

    #[getter]
    fn ranks(&self) -> PyResult<Vec<u32>> {
        Ok(self.get()?.ranks().to_vec())
    }

    /// What each member contributes, in order. Small things: it goes through the rendezvous.
    fn gather(&self, py: Python<'_>, blob: Vec<u8>) -> PyResult<Vec<Vec<u8>>> {
        let group = self.get()?;
        self.open_world.meeting(py, || group.gather(&blob))
    }

    #[pyo3(signature = (shape, dtype=None))]
    fn window(
        &self,
        py: Python<'_>,
        shape: Vec<usize>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Window> {
        Window::new(py, self, &shape, dtype)
    }

    /// A window of the caller's own memory: `memory` is a descriptor of a sealed memfd, or an
    /// object with a fileno().
    #[pyo3(signature = (memory, shape, dtype=None))]
    fn register(
        &self,
        py: Python<'_>,
        memory: &Bound<'_, PyAny>,
        shape: Vec<usize>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Window> {
        Window::register(py, self, memory, &shape, dtype)
    }
}
