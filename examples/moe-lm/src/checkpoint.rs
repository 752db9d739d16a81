//! Checkpoints: a run that goes on from one has the bits of a run that never stopped.
//!
//! ```text
//!   out/step-000300/run.json              what the run is, and what came of it       rank 0
//!                   dense.safetensors     what all ranks have alike                  rank 0
//!                   experts-16.safetensors   those of a rank, from 16 on             the first that has them
//!
//!   step-000300.part      being written: each file, then the folder, goes to the disk
//!   step-000300.old       one that had the name before, until the new one has it
//! ```
//!
//! Each tensor comes with the two means of its optimizer (`first/..`, `second/..`). A checkpoint is
//! written under another name, and gets its own when the files of all ranks are on the disk. So
//! whenever a run is stopped, the newest finished checkpoint is complete, under its name or as
//! `.old`. `run.json` names its files, and no other is read: a run that was stopped while it wrote
//! may have had its experts in others. A checkpoint without one of them is skipped.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor, safetensors};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::mesh::Strategy;
use crate::settings::Settings;
use crate::trainer::{History, Learned, Ranks, Trainer};

pub(crate) const RUN: &str = "run.json";
const DENSE: &str = "dense.safetensors";

/// What every rank of a run that goes on must agree on.
#[derive(Serialize, Deserialize)]
pub(crate) struct Run {
    pub settings: Settings,
    /// Of the text's tokens.
    pub text: String,
    /// Where the tensors are.
    pub files: Vec<String>,
    pub history: History,
    /// The strategy of the ranks of a mesh, whose files are shards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<Strategy>,
    /// Digests of these files, in the order of `files`: a shard names neither its run nor its rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub digests: Vec<u64>,
}

impl Run {
    /// Writes it into the folder of a checkpoint, to the disk.
    pub fn write(&self, part: &Path) -> Result<()> {
        let path = part.join(RUN);
        let text = serde_json::to_string(self).map_err(Error::malformed(&path))?;
        fs::write(&path, text).map_err(Error::file(&path))?;
        sync(&path)
    }
}

/// Makes a folder, and proves that each rank can write its part of a checkpoint there. Collective.
///
/// # Errors
/// On all ranks: [`Error::File`], and [`Error::Elsewhere`] where another rank has it;
/// [`Error::NotShared`] if the ranks do not share the folder.
pub fn prepare<R: Ranks>(trainer: &Trainer<R>, out: &Path) -> Result<()> {
    let ranks = &trainer.ranks;
    let probe = |first: usize| format!("{}.probe", of_experts(first));
    let own = ranks.writes_experts().then(|| out.join(probe(ranks.own_experts().start)));
    let wrote = own.as_deref().map_or(Ok(()), |own| {
        fs::create_dir_all(out).map_err(Error::file(out))?;
        fs::write(own, "whether a checkpoint can be written here").map_err(Error::file(own))
    });
    let probes: Vec<String> = parts(trainer).map(probe).collect();
    let shared = ranks.agree(wrote).and_then(|()| check_shared(ranks, out, &probes));
    let removed = own.map_or(Ok(()), |own| fs::remove_file(&own).map_err(Error::file(own)));
    shared?;
    ranks.agree(removed)
}

/// Writes one of a run's, named by its steps. Collective.
///
/// # Errors
/// As [`prepare`], and if a rank does not come. The last one that was made is still there.
pub fn save<R: Ranks>(trainer: &Trainer<R>, out: &Path) -> Result<PathBuf> {
    let place = out.join(format!("step-{:06}", trainer.steps()));
    let part = place.with_extension("part");
    let (ranks, files) = (&trainer.ranks, files(trainer));
    let first = |act: &dyn Fn() -> Result<()>| ranks.agree(if ranks.writes_dense() { act() } else { Ok(()) });
    first(&|| remove(&part))?;
    ranks.agree(write_own(trainer, &part, &files))?;
    check_shared(ranks, &part, &files)?;
    first(&|| publish(&part, &place))?;
    Ok(place)
}

/// Writes a rank's part to the disk.
fn write_own<R: Ranks>(trainer: &Trainer<R>, part: &Path, files: &[String]) -> Result<()> {
    let ranks = &trainer.ranks;
    if !ranks.writes_dense() && !ranks.writes_experts() {
        return Ok(());
    }
    fs::create_dir_all(part).map_err(Error::file(part))?;
    if ranks.writes_dense() {
        write(&trainer.state.dense, &part.join(DENSE))?;
        let (settings, text) = (trainer.settings, trainer.batches.digest());
        let (files, history) = (files.to_vec(), trainer.history.clone());
        Run { settings, text, files, history, strategy: None, digests: Vec::new() }.write(part)?;
    }
    if ranks.writes_experts() {
        write(&trainer.state.experts, &part.join(of_experts(ranks.own_experts().start)))?;
    }
    sync(part)
}

/// Gives the written checkpoint its name. The old checkpoint of that name is deleted when the new
/// one has it.
pub(crate) fn publish(part: &Path, place: &Path) -> Result<()> {
    let old = place.with_extension("old");
    if place.exists() {
        remove(&old)?;
        fs::rename(place, &old).map_err(Error::file(place))?;
    }
    fs::rename(part, place).map_err(Error::file(place))?;
    place.parent().map_or(Ok(()), sync)?;
    remove(&old)
}

/// Whether the first rank sees the files that ranks wrote in a folder. Collective.
fn check_shared<R: Ranks>(ranks: &R, folder: &Path, files: &[String]) -> Result<()> {
    let absent = files.iter().find(|file| ranks.writes_dense() && !folder.join(file).is_file());
    let said = ranks.gather(absent.map_or(&[], |file| file.as_bytes()))?;
    match said.iter().find(|file| !file.is_empty()) {
        Some(file) => Err(Error::NotShared { path: folder.join(&*String::from_utf8_lossy(file)) }),
        None => Ok(()),
    }
}

/// The first expert of each rank that writes experts.
fn parts<R: Ranks>(trainer: &Trainer<R>) -> impl Iterator<Item = usize> {
    let own = trainer.ranks.own_experts().len().max(1);
    (0..trainer.settings.shape.experts).step_by(own)
}

/// What all ranks together write of tensors.
fn files<R: Ranks>(trainer: &Trainer<R>) -> Vec<String> {
    std::iter::once(DENSE.to_owned()).chain(parts(trainer).map(of_experts)).collect()
}

fn of_experts(first: usize) -> String {
    format!("experts-{first}.safetensors")
}

/// A file, or the names in a folder, to the disk.
pub(crate) fn sync(path: &Path) -> Result<()> {
    File::open(path).and_then(|file| file.sync_all()).map_err(Error::file(path))
}

/// A folder that may be there.
pub(crate) fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(Error::file(folder)),
    }
}

/// Brings a trainer to where the latest one in a folder left it, and says which. Collective.
///
/// # Errors
/// [`Error::OtherCheckpoint`] if ranks find different ones, and those of [`latest`] and [`load`];
/// [`Error::Elsewhere`] where another rank has them.
pub fn resume<R: Ranks>(trainer: &mut Trainer<R>, out: &Path) -> Result<PathBuf> {
    let place = latest_of_all(out, |name| trainer.ranks.gather(name))?;
    let loaded = load(trainer, &place);
    trainer.ranks.agree(loaded)?;
    Ok(place)
}

/// The latest one that all ranks find.
pub(crate) fn latest_of_all(
    out: &Path,
    gather: impl FnOnce(&[u8]) -> Result<Vec<Vec<u8>>>,
) -> Result<PathBuf> {
    let found = latest(out);
    let name = found.as_ref().ok().and_then(|place| place.file_name()).unwrap_or_default();
    let names = gather(name.as_encoded_bytes())?;
    let place = found?;
    match names.iter().position(|name| *name != names[0]) {
        Some(rank) => {
            let [seen, expected] = [rank, 0].map(|rank| String::from_utf8_lossy(&names[rank]).into_owned());
            Err(Error::OtherCheckpoint { rank, seen, expected })
        }
        None => Ok(place),
    }
}

/// The latest one in a folder that is whole: all files that it names are there.
///
/// # Errors
/// [`Error::File`], [`Error::NoCheckpoint`].
pub fn latest(out: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(out).map_err(Error::file(out))?.flatten().map(|entry| entry.path());
    let mut named: Vec<_> = entries.filter_map(|path| Some((age(&path)?, path))).collect();
    named.sort_unstable();
    let latest = named.into_iter().rev().map(|(_, path)| path).find(|path| is_whole(path));
    latest.ok_or_else(|| Error::NoCheckpoint { path: out.to_owned() })
}

fn is_whole(place: &Path) -> bool {
    let run = run_of(place);
    run.is_ok_and(|run| run.files.iter().all(|file| place.join(file).is_file()))
}

/// The number of steps of a checkpoint, from its name, and whether the name is final; none for one
/// that is being written.
fn age(place: &Path) -> Option<(usize, bool)> {
    let name = place.file_name()?.to_str()?.strip_prefix("step-")?;
    let old = name.strip_suffix(".old");
    Some((old.unwrap_or(name).parse().ok()?, old.is_none()))
}

pub(crate) fn run_of(place: &Path) -> Result<Run> {
    let path = place.join(RUN);
    let text = fs::read_to_string(&path).map_err(Error::file(&path))?;
    serde_json::from_str(&text).map_err(Error::malformed(&path))
}

/// Brings a trainer to where it was.
///
/// # Errors
/// [`Error::OtherRun`] if it is not of this run, [`Error::Missing`], [`Error::Twice`], and those of
/// files.
pub fn load<R: Ranks>(trainer: &mut Trainer<R>, place: &Path) -> Result<()> {
    let run = run_of(place)?;
    let same = [
        ("a setting", run.settings == trainer.settings),
        ("the text", run.text == trainer.batches.digest()),
        ("the mesh", run.strategy.is_none()),
    ];
    if let Some((what, _)) = same.into_iter().find(|(_, same)| !same) {
        return Err(Error::OtherRun { path: place.join(RUN), what });
    }
    let mut tensors = HashMap::new();
    for file in &run.files {
        let path = place.join(file);
        fs::metadata(&path).map_err(Error::file(&path))?;
        for (name, tensor) in safetensors::load(&path, &Device::Cpu)? {
            if tensors.insert(name.clone(), tensor).is_some() {
                return Err(Error::Twice { path, name });
            }
        }
    }
    read(&mut trainer.state.dense, &tensors, place)?;
    read(&mut trainer.state.experts, &tensors, place)?;
    trainer.history = run.history;
    Ok(())
}

/// The prefix of each of the vectors.
fn vectors(learned: &mut Learned) -> [(&'static str, &mut [f32]); 3] {
    let [values, first, second] = learned.vectors_mut();
    [("", values), ("first/", first), ("second/", second)]
}

fn write(learned: &Learned, path: &Path) -> Result<()> {
    let mut learned = learned.clone();
    let entries = learned.weights.entries.clone();
    let mut tensors = HashMap::new();
    for (prefix, values) in vectors(&mut learned) {
        for entry in &entries {
            let values = &values[entry.range.clone()];
            let tensor = Tensor::from_slice(values, &entry.shape[..], &Device::Cpu)?;
            tensors.insert(format!("{prefix}{}", entry.name), tensor);
        }
    }
    safetensors::save(&tensors, path)?;
    sync(path)
}

fn read(learned: &mut Learned, tensors: &HashMap<String, Tensor>, path: &Path) -> Result<()> {
    let entries = learned.weights.entries.clone();
    for (prefix, values) in vectors(learned) {
        for entry in &entries {
            let name = format!("{prefix}{}", entry.name);
            let Some(tensor) = tensors.get(&name).filter(|tensor| tensor.dims() == entry.shape) else {
                return Err(Error::Missing { path: path.to_owned(), name, values: entry.range.len() });
            };
            let read: Vec<f32> = tensor.flatten_all()?.to_vec1()?;
            values[entry.range.clone()].copy_from_slice(&read);
        }
    }
    Ok(())
}
