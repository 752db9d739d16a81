//! Output of the first rank during training: a table for people, or a JSON object per line.

use std::io::{IsTerminal, Write, stdout};
use std::path::Path;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};
use moe_lm::mesh::{MeshTrainer, Traffic};
use moe_lm::settings::Settings;
use moe_lm::survival;
use moe_lm::trainer::{History, Ranks, Trainer};
use serde_json::json;

/// The output stream, and its format.
pub struct Report {
    /// Other ranks print nothing.
    speaks: bool,
    json: bool,
    bar: ProgressBar,
    began: Instant,
    /// When the last step failed, until the next is made.
    failed: Option<Instant>,
}

impl Report {
    /// Says what will be trained on what, and from which checkpoint on.
    pub fn new<R: Ranks>(speaks: bool, json: bool, trainer: &Trainer<R>, resumed: Option<&Path>) -> Report {
        let report = Report::begin(speaks, json, (trainer.steps(), trainer.settings.steps));
        let (train, settings) = (trainer.batches.train(), &trainer.settings);
        let own = trainer.state.experts.weights.values.len() / trainer.ranks.own_experts().len().max(1);
        let weights = trainer.state.dense.weights.values.len() + own * settings.shape.experts;
        let data = json!({"train": train, "weights": weights, "settings": settings, "resumed": resumed});
        report.say(data, || {
            let from = resumed.map(|place| format!(", from {} on", place.display())).unwrap_or_default();
            format!(
                "{train} tokens to learn from, {weights} weights, {} ranks, experts over {}{from}\n\n\
                 | steps | loss on held-out tokens, nats per token | seconds |\n|---|---|---|",
                settings.ranks, settings.expert_parallel
            )
        });
        report
    }

    /// Says what will be trained by which strategy, and from which checkpoint on.
    pub fn of_mesh(speaks: bool, json: bool, trainer: &MeshTrainer, resumed: Option<&Path>) -> Report {
        let report = Report::begin(speaks, json, (trainer.steps(), trainer.settings.steps));
        let (settings, strategy) = (&trainer.settings, &trainer.strategy);
        let data = json!({"settings": settings, "strategy": strategy, "resumed": resumed});
        report.say(data, || {
            let from = resumed.map(|place| format!(", from {} on", place.display())).unwrap_or_default();
            let (ranks, sizes) = (strategy.sizes.ranks(), strategy.sizes);
            format!("{ranks} ranks, {sizes}, {} microbatches{from}", strategy.microbatches)
        });
        report
    }

    /// Before the first of the steps that are left.
    fn begin(speaks: bool, json: bool, (made, all): (usize, usize)) -> Report {
        let shown = speaks && !json && std::io::stderr().is_terminal();
        let bar = if shown { ProgressBar::new(all as u64) } else { ProgressBar::hidden() };
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} steps, {elapsed}, loss {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_position(made as u64);
        Report { speaks, json, bar, began: Instant::now(), failed: None }
    }

    /// Bytes of each rank of a mesh: sent in the last step, and held.
    pub fn traffic(&self, ranks: &[Traffic]) {
        self.say(json!({"traffic": ranks}), || {
            let row = |(rank, of): (usize, &Traffic)| {
                let Traffic { tp, cp, dp, pp, ep_bytes, state_bytes, activation_bytes } = of;
                let [tp, cp, dp, pp] = [tp, cp, dp, pp].map(|of| of.intra_node_bytes + of.inter_node_bytes);
                format!(
                    "| {rank} | {tp} | {cp} | {dp} | {pp} | {ep_bytes} | {state_bytes} | {activation_bytes} |"
                )
            };
            let rows: Vec<String> = ranks.iter().enumerate().map(row).collect();
            format!(
                "\nbytes of the last step, a rank's copies to itself included in tp, cp, dp and pp\n\n\
                 | rank | tp | cp | dp | pp | ep | state | activations |\n\
                 |---|---|---|---|---|---|---|---|\n{}",
                rows.join("\n")
            )
        });
    }

    /// The run goes on with other ranks: without some that were lost, which was noticed when a step
    /// failed, or with spares. This rank may be the first now.
    pub fn goes_on<R: Ranks>(&mut self, trainer: &Trainer<R>, failed: Option<Instant>) {
        (self.speaks, self.failed) = (trainer.ranks.writes_dense(), failed);
        let (Settings { ranks, expert_parallel, .. }, step) = (trainer.settings, trainer.steps());
        let data = json!({"ranks": ranks, "expert_parallel": expert_parallel, "from_step": step});
        self.say(data, || format!("\n{ranks} ranks from step {step} on\n"));
    }

    /// A step was made.
    pub fn step(&mut self, history: &History) {
        if let Some(failed) = self.failed.take() {
            let (step, seconds) = (history.losses.len(), failed.elapsed().as_secs_f64());
            let line = || format!("step {step} was made {seconds:.2} s after the loss was noticed\n");
            self.say(json!({"recovered": step, "after_notice": seconds, "at": survival::now()}), line);
        }
        let (step, loss) = (history.losses.len(), history.losses.last().copied().unwrap_or_default());
        self.bar.set_position(step as u64);
        self.bar.set_message(format!("{loss:.3}"));
        if self.speaks && self.json {
            let seconds = self.began.elapsed().as_secs_f64();
            print(&json!({"step": step, "loss": loss, "seconds": seconds}).to_string());
        }
    }

    /// Held-out tokens were looked at.
    pub fn held(&self, history: &History) {
        let Some(&(steps, loss)) = history.held.last() else { return };
        let seconds = self.began.elapsed().as_secs_f64();
        let line = || format!("| {steps} | {loss:.3} | {seconds:.0} |");
        self.say(json!({"steps": steps, "held_out": loss, "seconds": seconds}), line);
    }

    /// A file or folder is there.
    pub fn wrote(&self, path: &Path) {
        self.say(json!({"wrote": path}), || format!("\nwrote {}", path.display()));
    }

    /// How far two runs are from each other.
    pub fn compared(&self, own: &History, other: &History) {
        let apart = own.losses.iter().zip(&other.losses).map(|(own, other)| (own - other).abs());
        let apart: Vec<f32> = apart.collect();
        let most = apart.iter().copied().max_by(f32::total_cmp).unwrap_or_default();
        let last = apart.last().copied().unwrap_or_default();
        let steps = own.losses.len().min(other.losses.len());
        let line = || {
            format!(
                "\nbeside the other run, {steps} steps: losses differ by {most:.2e} at most, by {last:.2e} at the end"
            )
        };
        self.say(json!({"compared": steps, "most": most, "last": last}), line);
    }

    fn say(&self, data: serde_json::Value, words: impl FnOnce() -> String) {
        if self.speaks {
            let line = if self.json { data.to_string() } else { words() };
            self.bar.suspend(|| print(&line));
        }
    }
}

/// A line for the reader: a closed pipe is no reason to stop training.
fn print(line: &str) {
    let mut out = stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
