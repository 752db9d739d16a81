//! Checkpoints of a mesh, which ranks of any other mesh read.
//!
//! ```text
//!   out/step-000300/run.json            the run, its strategy and losses, digests of shards      rank 0
//!                   cut-5.shard         rank 5's shard of the tensors that are cut over tp
//!                   whole-5.shard       of the whole ones
//!                   experts-5.shard     of its experts
//! ```
//!
//! A shard is one of [`sidelane_parallel::data`]: it lies in the order of the tensors of the rank
//! that wrote it. A reader knows that order by the strategy in `run.json`. It reads the shards of
//! all ranks, keeps its own part of each whole tensor, and loads that as a checkpoint of one shard.
//! Names, order of files and crashes are as in [`crate::checkpoint`].

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use sidelane::collective::Communicator;
use sidelane::digest::Digest;
use sidelane_parallel::data::{Checkpoint, DataError};

use super::optimizer::Optimizer;
use super::strategy::Strategy;
use super::tensors::{Place, Sections, Tensor, tensors_of};
use super::train::{MeshTrainer, of_chunks};
use crate::checkpoint::{self, RUN, Run, latest_of_all, publish, run_of, sync};
use crate::error::{Error, Result};

const KINDS: Sections<&str> = Sections { cut: "cut", whole: "whole", experts: "experts" };

fn file(kind: &str, rank: u32) -> String {
    format!("{kind}-{rank}.shard")
}

/// The files of so many ranks.
fn files(ranks: u32) -> Vec<String> {
    let of_rank = |rank| [KINDS.cut, KINDS.whole, KINDS.experts].map(|kind| file(kind, rank));
    (0..ranks).flat_map(of_rank).collect()
}

/// Makes a folder, and proves that each rank can write its shards there. Collective.
///
/// # Errors
/// As [`save`].
pub fn prepare(trainer: &MeshTrainer, out: &Path) -> Result<()> {
    let all = &trainer.groups.all;
    let probe = |rank| format!("rank-{rank}.probe");
    let own = out.join(probe(all.rank()));
    let wrote = fs::create_dir_all(out).map_err(Error::file(out)).and_then(|()| {
        fs::write(&own, "whether a checkpoint can be written here").map_err(Error::file(&own))
    });
    let shared = trainer.agree(wrote).and_then(|()| {
        let probes = (0..all.size()).map(probe).collect();
        on_first(trainer, || find(out, probes))
    });
    let removed = fs::remove_file(&own).map_err(Error::file(&own));
    shared?;
    trainer.agree(removed)
}

/// Does something on the first rank. Collective.
fn on_first(trainer: &MeshTrainer, act: impl FnOnce() -> Result<()>) -> Result<()> {
    trainer.agree(if trainer.writes() { act() } else { Ok(()) })
}

/// Checks that this rank sees what other ranks wrote.
fn find(folder: &Path, files: Vec<String>) -> Result<()> {
    match files.into_iter().find(|file| !folder.join(file).is_file()) {
        Some(file) => Err(Error::NotShared { path: folder.join(file) }),
        None => Ok(()),
    }
}

/// Writes a checkpoint, named by its steps. Collective.
///
/// # Errors
/// On all ranks: [`Error::File`], [`Error::NotShared`], and [`Error::Elsewhere`] where another rank
/// has one. The last checkpoint that was made is still there.
pub fn save(trainer: &MeshTrainer, out: &Path) -> Result<PathBuf> {
    let place = out.join(format!("step-{:06}", trainer.steps()));
    let part = place.with_extension("part");
    on_first(trainer, || checkpoint::remove(&part))?;
    let digests = trainer.agree(write_own(trainer, &part))?;
    let digests = trainer.groups.all.gather(&digests.map(u64::to_le_bytes).concat())?;
    on_first(trainer, || {
        let files = files(trainer.strategy.sizes.ranks());
        find(&part, files.clone())?;
        let (settings, text, strategy) = (trainer.settings, trainer.batches.digest(), Some(trainer.strategy));
        let digests = digests.concat().as_chunks::<8>().0.iter().copied().map(u64::from_le_bytes).collect();
        let history = trainer.history.clone();
        Run { settings, text, files, history, strategy, digests }.write(&part)?;
        sync(&part)?;
        publish(&part, &place)
    })?;
    Ok(place)
}

/// Writes this rank's shards. Returns their digests.
fn write_own(trainer: &MeshTrainer, part: &Path) -> Result<[u64; 3]> {
    fs::create_dir_all(part).map_err(Error::file(part))?;
    let rank = trainer.groups.all.rank();
    let write = |(kind, optimizer): (&str, &Optimizer)| -> Result<u64> {
        let path = part.join(file(kind, rank));
        let mut shard = Vec::new();
        optimizer.save(&mut shard)?;
        fs::write(&path, &shard).map_err(Error::file(&path))?;
        sync(&path)?;
        Ok(Digest::of(shard))
    };
    let Sections { cut, whole, experts } = KINDS.zip(trainer.optimizers.as_ref()).map(write).all()?;
    sync(part)?;
    Ok([cut, whole, experts])
}

/// Brings a trainer of any mesh to where the latest checkpoint in a folder was left. Collective.
///
/// # Errors
/// [`Error::OtherCheckpoint`] if ranks find different ones, [`Error::OtherRun`],
/// [`Error::NoCheckpoint`], [`Error::Data`], and those of files; [`Error::Elsewhere`] where another
/// rank has them.
pub fn resume(trainer: &mut MeshTrainer, out: &Path) -> Result<PathBuf> {
    let place = latest_of_all(out, |name| Ok(trainer.groups.all.gather(name)?))?;
    let read = read(trainer, &place);
    let (run, own) = trainer.agree(read)?;
    let (optimizers, copies) = (trainer.optimizers.as_mut(), trainer.groups.copies.as_mut());
    let load = |((optimizer, group), shard): ((&mut Optimizer, &mut Communicator), Vec<u8>)| {
        optimizer.load(group, &shard[..])
    };
    optimizers.zip(copies).zip(own).map(load).all()?;
    trainer.load_parameters()?;
    trainer.history = run.history;
    Ok(place)
}

/// This rank's part of a tensor: its values, with two means each.
type Part<'a> = (&'a Tensor, Vec<[f32; 3]>);

/// This rank's part of a checkpoint, as one shard of each kind.
fn read(trainer: &MeshTrainer, place: &Path) -> Result<(Run, Sections<Vec<u8>>)> {
    let run = run_of(place)?;
    let wrong = |what| Error::OtherRun { path: place.join(RUN), what };
    let Some(strategy) = run.strategy else { return Err(wrong("the mesh")) };
    if run.settings != trainer.settings {
        return Err(wrong("a setting"));
    }
    if run.text != trainer.batches.digest() {
        return Err(wrong("the text"));
    }
    strategy.check(&run.settings, strategy.sizes.ranks())?;
    let wanted = trainer.tensors();
    let mut parts: HashMap<&str, Part<'_>> = HashMap::new();
    wanted.as_ref().map(|tensors| {
        for tensor in tensors {
            parts.insert(&tensor.name, (*tensor, vec![[0.0; 3]; tensor.elements()]));
        }
    });
    keep(place, &run, &strategy, &mut parts)?;
    let steps = run.history.losses.len() as u64;
    let shard = |tensors: Vec<&Tensor>| -> Result<Vec<u8>> {
        let values = tensors.iter().map(|tensor| &parts[&tensor.name[..]].1);
        let [parameters, first, second] =
            [0, 1, 2].map(|nth| values.clone().flatten().map(|value| value[nth]).collect());
        let mut bytes = Vec::new();
        let checkpoint = Checkpoint { steps, parameters, first, second };
        checkpoint.write(&mut bytes).map_err(DataError::from)?;
        Ok(bytes)
    };
    let own = wanted.map(shard).all()?;
    Ok((run, own))
}

/// Keeps the values that are wanted of all shards of a mesh. They must be those that the run wrote.
fn keep(place: &Path, run: &Run, strategy: &Strategy, parts: &mut HashMap<&str, Part<'_>>) -> Result<()> {
    let ranks = strategy.sizes.ranks();
    let mesh = strategy.sizes.mesh(ranks)?;
    let experts = mesh.experts(strategy.sizes.ep, 1)?;
    let copies = Sections {
        cut: mesh.groups(&["dp", "cp"])?,
        whole: mesh.groups(&["dp", "cp", "tp"])?,
        experts: experts.groups(&["edp"])?,
    };
    type Kind = for<'a> fn(Sections<Vec<&'a Tensor>>) -> Vec<&'a Tensor>;
    let of_kind: Sections<Kind> =
        Sections { cut: |of| of.cut, whole: |of| of.whole, experts: |of| of.experts };
    let digests: HashMap<&str, u64> =
        run.files.iter().map(|file| &file[..]).zip(run.digests.iter().copied()).collect();
    let mut keep = |((kind, of_kind), groups): ((&str, Kind), Vec<Vec<u32>>)| -> Result<()> {
        for group in groups {
            let position = |mesh: &sidelane_parallel::Mesh, name| mesh.position(group[0], name);
            let [stage, tp] = [position(&mesh, "pp")?, position(&mesh, "tp")?].map(|of| of as usize);
            let held = Place { stage, tp, ep: position(&experts, "ep")? as usize };
            let chunks = tensors_of(strategy, &run.settings.shape, held);
            let tensors = of_kind(of_chunks(&chunks));
            let elements = tensors.iter().map(|tensor| tensor.elements()).sum();
            let shard = |rank: &u32| {
                let name = file(kind, *rank);
                let path = place.join(&name);
                let shard = fs::read(&path).map_err(Error::file(&path))?;
                match digests.get(&name[..]) {
                    Some(&digest) if digest == Digest::of(shard.iter().copied()) => Ok(shard),
                    _ => Err(Error::OtherRun { path, what: "the digest" }),
                }
            };
            let shards = group.iter().map(shard).collect::<Result<Vec<_>>>()?;
            let read = Checkpoint::read(elements, shards.iter().map(|shard| &shard[..]));
            let read = read.map_err(DataError::from)?;
            if read.steps != run.history.losses.len() as u64 {
                return Err(Error::OtherRun { path: place.join(RUN), what: "the number of steps" });
            }
            let mut rows = read.parameters.iter().zip(&read.first).zip(&read.second);
            for tensor in tensors {
                let mut own = parts.get_mut(&tensor.name[..]);
                for (place, ((&value, &first), &second)) in tensor.places().zip(&mut rows) {
                    let Some((part, values)) = &mut own else { continue };
                    if let Some(nth) = part.nth(place) {
                        values[nth] = [value, first, second];
                    }
                }
            }
        }
        Ok(())
    };
    KINDS.zip(of_kind).zip(copies).map(&mut keep).all()?;
    Ok(())
}
