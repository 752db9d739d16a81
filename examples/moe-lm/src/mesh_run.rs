//! A run over a mesh, as a program.

use std::time::Duration;

use moe_lm::error::{Error, Result};
use moe_lm::mesh::{MeshTrainer, ScheduleName, Strategy, checkpoint};
use moe_lm::plot;
use sidelane_parallel::pipeline::Costs;

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
    let times = stepped.then(|| trainer.pass_times()).transpose()?;
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
        if let Some(times) = times.filter(|_| trainer.strategy.sizes.pp > 1) {
            write("timeline.svg", timelines(&trainer.strategy, times)?)?;
        }
    }
    Ok(())
}

/// A step by each schedule, with the times of the passes of this run.
fn timelines(strategy: &Strategy, times: [Duration; 3]) -> Result<String> {
    let mut drawn = Vec::new();
    let mut orders = vec![
        ScheduleName::GPipe,
        ScheduleName::OneFOneB,
        ScheduleName::Interleaved(2),
        ScheduleName::ZeroBubbleH1,
    ];
    orders.extend(strategy.order.filter(|own| !orders.contains(own)));
    for order in orders {
        let of = Strategy { order: Some(order), ..*strategy };
        // Microbatches that do not make whole rounds cannot be interleaved.
        let Ok(plan) = of.plan() else { continue };
        let chunks = u64::from(of.model_chunks());
        let [forward, inputs, weights] = times.map(|time| time.as_micros() as u64 / chunks);
        let unread = plan.least_unread()?.max(1);
        drawn.push((order.to_string(), plan.time(unread, Costs::new(forward, inputs, weights))?));
    }
    Ok(plot::timelines("One step by each schedule, with the times of this run's passes", &drawn))
}
