//! Time of a step by tokens: a curve for each family of meshes, and regions by the part that binds.

use sidelane_model::parallel::{Bound, Candidate, Question};

use crate::chart::{Arrangement, Band, Chart, Color, Curve, Panel, Point};
use crate::command_frame;
use crate::error::CliError;
use crate::options::Scaled;
use crate::table::time;

/// Halvings and doublings of the tokens that were asked for.
const HALVINGS: u32 = 5;
const DOUBLINGS: u32 = 4;
/// Families of meshes that are drawn, next to the compute.
const FAMILIES: usize = 5;

/// Meshes that fit, the fastest first.
struct Searched {
    tokens: u64,
    fitting: Vec<Candidate>,
}

pub fn draw(question: &Question) -> Result<String, CliError> {
    let least = u64::from(question.sequence).min(question.tokens);
    let halved = (1..=HALVINGS).rev().map(|times| question.tokens >> times);
    let doubled = (1..=DOUBLINGS).map_while(|times| question.tokens.checked_mul(1 << times));
    let doubled = doubled.filter(|&tokens| tokens <= Question::MOST_TOKENS);
    let all: Vec<u64> =
        halved.filter(|&tokens| tokens >= least).chain([question.tokens]).chain(doubled).collect();
    let bar = command_frame::progress(0, all.len() as u64).with_message("numbers of tokens");
    let found = question.search_by_tokens(&all)?;
    bar.finish_and_clear();
    let searched =
        all.into_iter().zip(found).map(|(tokens, found)| Searched { tokens, fitting: found.fitting });
    Ok(drawn(question, &searched.filter(|one| !one.fitting.is_empty()).collect::<Vec<_>>()))
}

/// Families that are fastest at some number of tokens, then others by their time at the most
/// tokens.
fn families(searched: &[Searched]) -> Vec<String> {
    let best = searched.iter().map(|one| &one.fitting[0]);
    let others = searched.last().into_iter().flat_map(|one| &one.fitting);
    let mut names: Vec<String> = Vec::new();
    for name in best.chain(others).map(|one| one.mesh.shape.family()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.truncate(FAMILIES);
    names
}

fn curve(name: &str, searched: &[Searched]) -> Curve {
    let best = searched.iter().filter_map(|one| {
        let of_family = |candidate: &&Candidate| candidate.mesh.shape.family() == name;
        Some((one.tokens, one.fitting.iter().find(of_family)?))
    });
    let point = |(tokens, best): (u64, &Candidate)| {
        let us = best.step.step_s * 1e6;
        let said = format!(
            "{} tokens: {}, {}, {} binds: {}",
            Scaled(tokens),
            best.mesh.shape,
            best.mesh.zero.name(),
            best.step.bound.name(),
            time(us)
        );
        Point { at: (tokens as f64, us), said }
    };
    Curve { name: name.to_owned(), points: best.map(point).collect() }
}

/// Compute of the fastest mesh: what no transfer can shorten.
fn compute(searched: &[Searched]) -> Curve {
    let point = |Searched { tokens, fitting }: &Searched| {
        let step = &fitting[0].step;
        let us = (step.forward.compute_s + step.backward.compute_s) * 1e6;
        Point { at: (*tokens as f64, us), said: format!("{} tokens: compute {}", Scaled(*tokens), time(us)) }
    };
    Curve { name: "compute".to_owned(), points: searched.iter().map(point).collect() }
}

/// Regions of the fastest meshes, by the part that binds them. Between two numbers of tokens the
/// border is in the middle.
fn bands(searched: &[Searched]) -> Vec<Band> {
    let mut bands: Vec<Band> = Vec::new();
    for Searched { tokens, fitting } in searched {
        let (bound, middle) = (fitting[0].step.bound, 2f64.sqrt());
        let (from, to) = (*tokens as f64 / middle, *tokens as f64 * middle);
        match bands.last_mut() {
            Some(last) if last.name == bound.name() => last.to = to,
            _ => {
                let color = Color::nth(Bound::ALL.iter().position(|&known| known == bound).unwrap_or(0));
                bands.push(Band { from, to, color, name: bound.name() });
            }
        }
    }
    bands
}

fn drawn(question: &Question, searched: &[Searched]) -> String {
    let Question { model, devices, count, sequence, precision, overlap, .. } = question;
    let families = families(searched);
    let of_families = families.iter().map(|name| curve(name, searched));
    let curves = std::iter::once(compute(searched)).chain(of_families).collect();
    let numbers = &|tokens| Scaled(tokens as u64).to_string();
    let panel = Panel::new("time of a step by tokens, and the part that binds the fastest", numbers, &time);
    Chart {
        title: &format!(
            "{} on {count} devices of {}: the fastest mesh of each family",
            model.name, devices.name
        ),
        conditions: vec![format!(
            "sequences of {}, {} bytes a parameter, overlap: {}; rooflines, not measured",
            Scaled(u64::from(*sequence)),
            precision.held_bytes(),
            overlap.name()
        )],
        panels: vec![Panel { curves, bands: bands(searched), ..panel }],
        arrangement: Arrangement::Alike,
    }
    .draw()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chart::svg::tests::elements;
    use crate::command_frame::tests::parsed;
    use crate::commands::plan::PlanArgs;

    #[test]
    fn doublings_end_at_the_most_tokens_that_a_step_may_have() {
        let args: PlanArgs = parsed("--model olmoe-1b-7b --devices 8 --pp 1 --tokens 512G").unwrap();
        let picture = draw(&args.question().unwrap()).unwrap();
        assert!(picture.contains(">1024G tokens: ") && !picture.contains(">2048G tokens: "));
    }

    #[test]
    fn small_batches_are_bound_by_data_and_large_ones_by_compute() {
        let line =
            "--model llama-2-13b --hardware tpu-v5p --devices 4096 --tokens 2M --sequence 512 --overlap all";
        let args: PlanArgs = parsed(line).unwrap();
        let picture = draw(&args.question().unwrap()).unwrap();
        let tags = elements(&picture);
        let bands: Vec<_> = tags.iter().filter(|tag| tag.contains("\"band ")).collect();
        assert!(bands.len() >= 2, "{bands:?}");
        assert!(bands.last().unwrap().contains("\"band blue\""), "compute: {bands:?}");
        let curves = tags.iter().filter(|tag| tag.starts_with("polyline")).count();
        assert!((3..=FAMILIES + 1).contains(&curves), "{curves}");
    }
}
