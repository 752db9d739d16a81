//! A run over a mesh, as a program.

use moe_lm::error::{Error, Result};
use moe_lm::mesh::{MeshTrainer, ScheduleName, checkpoint};
use moe_lm::plot;

use crate::args::Arguments;
use crate::losses_of;
use crate::report::Report;

/// All steps that are left, and what came of them.
pub fn train(arguments: &Arguments, mut trainer: MeshTrainer) -> Result<()> {
    let (out, all) = (&arguments.out, trainer.settings.steps);
    let beside = arguments.beside.as_deref().filter(|_| trainer.writes());
    let beside = trainer.agree(beside.map(losses_of).transpose())?;
    let resumed = arguments.resume.then(|| checkpoint::resume(&mut trainer, out)).transpose()?;
    checkpoint::prepare(&trainer, out)?;
    let mut report = Report::of_mesh(trainer.writes(), arguments.json, &trainer, resumed.as_deref());
    let first = trainer.steps();
    while trainer.steps() < all {
        trainer.step()?;
        report.step(&trainer.history);
        let steps = trainer.steps();
        let due = arguments.checkpoint_every.is_some_and(|every| steps.is_multiple_of(every.get()));
        if due || steps == all {
            report.wrote(&checkpoint::save(&trainer, out)?);
        }
    }
    if all == 0 && resumed.is_none() {
        report.wrote(&checkpoint::save(&trainer, out)?);
    }
    // Of the last step, if this run has made it.
    let stepped = first < all;
    let spans = stepped.then(|| trainer.spans_of_ranks()).transpose()?;
    if stepped {
        report.traffic(&trainer.traffic_of_ranks()?);
    }
    if trainer.writes() {
        let write = |name: &str, text: String| {
            let path = out.join(name);
            std::fs::write(&path, text).map_err(Error::file(&path))?;
            report.wrote(&path);
            Ok::<(), Error>(())
        };
        let text =
            serde_json::to_string(&trainer.history).map_err(Error::malformed(out.join("losses.json")))?;
        write("losses.json", text)?;
        if let Some((_, other)) = &beside {
            report.compared(&trainer.history, other);
        }
        let name = trainer.strategy.sizes.to_string();
        let beside = beside.as_ref().map(|(name, run)| (&name[..], run));
        let own = (&name[..], &trainer.history);
        write("losses.svg", plot::losses("Loss of each step, nats per token", own, beside))?;
        if let Some(spans) = spans.filter(|_| trainer.strategy.sizes.pp > 1) {
            let schedule = trainer.strategy.order.unwrap_or(ScheduleName::OneFOneB);
            write(
                "timeline.svg",
                plot::timeline(&format!("The last step of each rank, {schedule}"), &spans),
            )?;
        }
    }
    Ok(())
}
