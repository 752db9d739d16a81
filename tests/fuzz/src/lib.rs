//! Inputs by chance, led by coverage, for code that reads what others wrote.
//!
//! ```text
//!   target    a test in the crate that has the code ──► fuzz::run(name, seeds, |input| ..)
//!
//!   each run      inputs of corpus/NAME and seeds ──► target
//!                 mutants of them, a few thousand ──► target
//!   a campaign    mutants for so many seconds; one that reaches a new edge is kept, and mutated further
//!                 at the end: the smallest inputs that reach all edges ──► corpus/NAME
//! ```
//!
//! A target panics where the code is wrong. The input goes to the corpus then, so every later run
//! finds it, too. Coverage comes from LLVM's counters, which the compiler of this repository has in
//! it: `tests/fuzz/campaign` builds with them. Without them a campaign is blind, but works.

mod counters;
mod mutant;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use mutant::mutate;

/// Mutants of a run that is no campaign.
const FEW: u64 = 2_000;
/// The longest input.
const LONGEST: usize = 4 << 10;
/// Seconds of a campaign.
const SECONDS: &str = "FUZZ_SECONDS";
/// Seed of all choices. Another one in each run without it.
const SEED: &str = "FUZZ_SEED";

/// Gives a target inputs by chance. `seeds` are valid inputs, to begin with.
///
/// # Panics
/// As the target does, after the input was kept; if the corpus cannot be read or written.
pub fn run(name: &str, seeds: &[Vec<u8>], target: impl Fn(&[u8])) {
    let seed = number(SEED).unwrap_or_else(|| rand_seed(name));
    println!("{SEED}={seed} repeats all choices");
    let seconds = number(SECONDS).map(Duration::from_secs);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut fuzzer = Fuzzer {
        folder,
        target: &target,
        rng: ChaCha8Rng::seed_from_u64(seed),
        corpus: Vec::new(),
        reached: BTreeSet::new(),
        inputs: 0,
        bytes: 0,
    };
    for input in read(&fuzzer.folder).into_iter().chain(seeds.iter().cloned()) {
        fuzzer.begin_with(input);
    }
    let (of_seeds, began) = (fuzzer.edges(), Instant::now());
    while seconds.map_or(fuzzer.inputs < FEW, |seconds| began.elapsed() < seconds) {
        fuzzer.try_mutant();
    }
    println!(
        "{name}: {} inputs, {} bytes, {} s; {} edges, {of_seeds} by the first inputs; {} inputs kept",
        fuzzer.inputs,
        fuzzer.bytes,
        began.elapsed().as_secs(),
        fuzzer.edges(),
        fuzzer.corpus.len()
    );
    if seconds.is_some() && counters::exist() {
        fuzzer.keep();
    }
}

/// An edge of the program, and how often it was taken: about.
type Feature = (usize, u8);

/// An input that has reached something new, and all that it reaches.
struct Kept {
    input: Vec<u8>,
    features: Vec<Feature>,
}

struct Fuzzer<'a> {
    folder: PathBuf,
    target: &'a dyn Fn(&[u8]),
    rng: ChaCha8Rng,
    corpus: Vec<Kept>,
    reached: BTreeSet<Feature>,
    inputs: u64,
    bytes: u64,
}

impl Fuzzer<'_> {
    fn edges(&self) -> usize {
        self.reached.iter().map(|&(edge, _)| edge).collect::<BTreeSet<_>>().len()
    }

    fn begin_with(&mut self, input: Vec<u8>) {
        let features = self.reach(&input);
        self.reached.extend(&features);
        self.corpus.push(Kept { input, features });
    }

    fn try_mutant(&mut self) {
        let others: Vec<&[u8]> = self.corpus.iter().map(|kept| &kept.input[..]).collect();
        let of = self.rng.random_range(0..others.len().max(1));
        let other = self.rng.random_range(0..others.len().max(1));
        let pair = [of, other].map(|nth| others.get(nth).copied().unwrap_or_default());
        let mut input = mutate(pair, &mut self.rng);
        input.truncate(LONGEST);
        let features = self.reach(&input);
        if features.iter().any(|feature| !self.reached.contains(feature)) {
            self.reached.extend(&features);
            self.corpus.push(Kept { input, features });
        }
    }

    /// Runs the target, and says what it took.
    fn reach(&mut self, input: &[u8]) -> Vec<Feature> {
        self.inputs += 1;
        self.bytes += input.len() as u64;
        counters::reset();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (self.target)(input))) {
            let path = write(&self.folder, "panic", input);
            println!("this input is in {}", path.display());
            resume_unwind(panic);
        }
        counters::taken()
    }

    /// Writes the smallest inputs that reach all edges, in place of those of earlier campaigns.
    /// Inputs at which the target once panicked stay.
    fn keep(&mut self) {
        for path in paths(&self.folder) {
            if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("input-")) {
                fs::remove_file(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            }
        }
        self.corpus.sort_by_key(|kept| kept.input.len());
        let mut first = BTreeMap::new();
        for (nth, kept) in self.corpus.iter().enumerate() {
            for &(edge, _) in &kept.features {
                first.entry(edge).or_insert(nth);
            }
        }
        for nth in first.into_values().collect::<BTreeSet<usize>>() {
            write(&self.folder, "input", &self.corpus[nth].input);
        }
    }
}

/// Files of a folder, which may not be there, in the order of their names.
fn paths(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// All inputs of a folder.
fn read(folder: &Path) -> Vec<Vec<u8>> {
    paths(folder)
        .iter()
        .map(|path| fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
        .collect()
}

/// Writes an input under a name that tells its bytes.
fn write(folder: &Path, kind: &str, input: &[u8]) -> PathBuf {
    // FNV-1a.
    let digest = input.iter().fold(0xcbf2_9ce4_8422_2325_u64, |digest, &byte| {
        (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let path = folder.join(format!("{kind}-{digest:016x}"));
    let written = fs::create_dir_all(folder).and_then(|()| fs::write(&path, input));
    written.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    path
}

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|error| panic!("{name}={value}: {error}")))
}

/// Another one in each run, and for each target.
fn rand_seed(name: &str) -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(name)
}
