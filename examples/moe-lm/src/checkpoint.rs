//! Checkpoints: a run that goes on from one has the bits of a run that never stopped.
//!
//! ```text
//!   out/step-000300/run.json              what the run is, and what came of it       rank 0
//!                   dense.safetensors     what all ranks have alike                  rank 0
//!                   experts-16.safetensors   those of a rank, from 16 on             the first that has them
//! ```
//!
//! Each tensor stands beside the two means that its optimizer keeps (`first/..`, `second/..`). A checkpoint is written under
//! another name, and takes its own when all ranks have written: there is none that is half there. `run.json` names its files,
//! and no other is read: a run that was stopped while it wrote may have had its experts in others.

use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor, safetensors};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::settings::Settings;
use crate::trainer::{History, Learned, Ranks, Trainer};

const DENSE: &str = "dense.safetensors";

/// What every rank of a run that goes on must agree on.
#[derive(Serialize, Deserialize)]
struct Run {
    settings: Settings,
    /// Of the text's tokens.
    text: String,
    /// Where the tensors are.
    files: Vec<String>,
    history: History,
}

/// Writes one of a run's, named by its steps. Collective.
///
/// # Errors
/// [`Error::File`]; [`Error::NotShared`] on all ranks if the folder is not one for all; and if a rank does not come.
pub fn save<R: Ranks>(trainer: &Trainer<R>, out: &Path) -> Result<PathBuf> {
    let place = out.join(format!("step-{:06}", trainer.steps()));
    let part = place.with_extension("part");
    let (ranks, files) = (&trainer.ranks, files(trainer));
    if ranks.writes_dense() {
        remove(&part)?;
    }
    ranks.meet()?;
    fs::create_dir_all(&part).map_err(Error::file(&part))?;
    if ranks.writes_dense() {
        write(&trainer.state.dense, &part.join(DENSE))?;
        let (settings, text) = (trainer.settings, trainer.batches.digest());
        let run = Run { settings, text, files: files.clone(), history: trainer.history.clone() };
        let path = part.join("run.json");
        let text = serde_json::to_string(&run).map_err(Error::malformed(&path))?;
        fs::write(&path, text).map_err(Error::file(&path))?;
    }
    if ranks.writes_experts() {
        write(&trainer.state.experts, &part.join(of_experts(ranks.own_experts().start)))?;
    }
    ranks.meet()?;
    let absent = files.iter().find(|file| ranks.writes_dense() && !part.join(file).is_file());
    let said = ranks.gather(absent.map_or(&[], |file| file.as_bytes()))?;
    if let Some(file) = said.iter().find(|file| !file.is_empty()) {
        return Err(Error::NotShared { path: part.join(&*String::from_utf8_lossy(file)) });
    }
    if ranks.writes_dense() {
        remove(&place)?;
        fs::rename(&part, &place).map_err(Error::file(&place))?;
    }
    ranks.meet()?;
    Ok(place)
}

/// What all ranks together write of tensors.
fn files<R: Ranks>(trainer: &Trainer<R>) -> Vec<String> {
    let own = trainer.ranks.own_experts().len().max(1);
    let of_experts = (0..trainer.settings.shape.experts).step_by(own).map(of_experts);
    std::iter::once(DENSE.to_owned()).chain(of_experts).collect()
}

fn of_experts(first: usize) -> String {
    format!("experts-{first}.safetensors")
}

/// A folder that may be there.
fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(Error::file(folder)),
    }
}

/// Brings a trainer to where the latest one in a folder left it. Collective.
///
/// # Errors
/// [`Error::OtherCheckpoint`] if ranks find different ones, and those of [`latest`] and [`load`].
pub fn resume<R: Ranks>(trainer: &mut Trainer<R>, out: &Path) -> Result<()> {
    let found = latest(out);
    let name = found.as_ref().ok().and_then(|place| place.file_name()).unwrap_or_default();
    let names = trainer.ranks.gather(name.as_encoded_bytes())?;
    let place = found?;
    if let Some(rank) = names.iter().position(|name| *name != names[0]) {
        let [seen, expected] = [rank, 0].map(|rank| String::from_utf8_lossy(&names[rank]).into_owned());
        return Err(Error::OtherCheckpoint { rank, seen, expected });
    }
    load(trainer, &place)
}

/// The latest one in a folder.
///
/// # Errors
/// [`Error::NoCheckpoint`].
pub fn latest(out: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(out).map_err(Error::file(out))?.flatten().map(|entry| entry.path());
    let complete = entries.filter(|path| path.join("run.json").is_file());
    let latest = complete.filter_map(|path| Some((steps_of(&path)?, path))).max();
    latest.map(|(_, path)| path).ok_or_else(|| Error::NoCheckpoint { path: out.to_owned() })
}

/// After how many steps a checkpoint was written, by its name; none for one that is half there.
fn steps_of(place: &Path) -> Option<usize> {
    place.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()
}

/// Brings a trainer to where it was.
///
/// # Errors
/// [`Error::OtherRun`] if it is not of this run, [`Error::Missing`], [`Error::Twice`], and those of files.
pub fn load<R: Ranks>(trainer: &mut Trainer<R>, place: &Path) -> Result<()> {
    let path = place.join("run.json");
    let text = fs::read_to_string(&path).map_err(Error::file(&path))?;
    let run: Run = serde_json::from_str(&text).map_err(Error::malformed(&path))?;
    let same =
        [("a setting", run.settings == trainer.settings), ("the text", run.text == trainer.batches.digest())];
    if let Some((what, _)) = same.into_iter().find(|(_, same)| !same) {
        return Err(Error::OtherRun { path, what });
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
fn vectors(learned: &mut Learned) -> [(&'static str, &mut Vec<f32>); 3] {
    let Learned { weights, adam } = learned;
    [("", &mut weights.values), ("first/", &mut adam.first), ("second/", &mut adam.second)]
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
    Ok(safetensors::save(&tensors, path)?)
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
