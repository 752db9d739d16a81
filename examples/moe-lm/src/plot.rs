//! The loss curve, and the passes of a pipeline, as pictures.

use sidelane_parallel::pipeline::{Pass, Span};

use crate::svg::{self, Attribute, Style, Svg, round};
use crate::trainer::History;

const LIGHT: &str = ".curve { fill: none; stroke-width: 1.5; }
.own { stroke: #0969da; fill: none; } .beside { stroke: #bf8700; fill: none; stroke-dasharray: 5 4; }
.held { fill: #1a7f37; stroke: none; }";
const DARK: &str = ".own { stroke: #4493f8; } .beside { stroke: #d29922; } .held { fill: #3fb950; }";

/// Size of the picture, and where the axes end.
const SIZE: (f64, f64) = (720.0, 380.0);
const LEFT: f64 = 52.0;
const RIGHT: f64 = 700.0;
const TOP: f64 = 66.0;
const BOTTOM: f64 = 336.0;

/// Where numbers lie: evenly between zero steps and all, and between round losses.
struct Axes {
    steps: f64,
    losses: (f64, f64),
}

impl Axes {
    fn of(runs: &[&History]) -> Axes {
        let losses = |history: &History| {
            let held = history.held.iter().map(|&(_, loss)| loss);
            history.losses.iter().copied().chain(held).map(f64::from).collect::<Vec<_>>()
        };
        let all: Vec<f64> = runs.iter().flat_map(|history| losses(history)).collect();
        let (least, most) = all.iter().fold((f64::MAX, f64::MIN), |(a, b), &loss| (a.min(loss), b.max(loss)));
        let steps = runs.iter().map(|history| history.losses.len()).max().unwrap_or(0).max(1);
        let halves = |loss: f64, round: fn(f64) -> f64| round(loss * 2.0) / 2.0;
        let from = halves(least, f64::floor);
        Axes { steps: steps as f64, losses: (from, halves(most, f64::ceil).max(from + 0.5)) }
    }

    fn at(&self, step: f64, loss: f64) -> (f64, f64) {
        let (from, to) = self.losses;
        let up = (loss - from) / (to - from);
        (LEFT + (RIGHT - LEFT) * step / self.steps, BOTTOM + (TOP - BOTTOM) * up)
    }

    /// Between lines, of which there are at most 21 however far losses are apart: halves, ones, or
    /// a power of ten.
    fn apart(&self) -> f64 {
        let whole = self.losses.1 - self.losses.0;
        let wide = 10f64.powf((whole / 2.0).log10().floor());
        if whole > 10.0 {
            wide
        } else if whole > 3.0 {
            1.0
        } else {
            0.5
        }
    }

    fn draw(&self, svg: &mut Svg) {
        let (from, to) = self.losses;
        let apart = self.apart();
        for nth in 0..=((to - from) / apart).floor() as u32 {
            let loss = from + f64::from(nth) * apart;
            let ((x, y), (end, _)) = (self.at(0.0, loss), self.at(self.steps, loss));
            svg.line("line", (x, y), (end, y));
            svg.label("quiet end", x - 8.0, y + 4.0, &format!("{loss:.1}"));
        }
        for sixth in 0..=6 {
            let step = (self.steps * f64::from(sixth) / 6.0).round();
            svg.label("quiet middle", self.at(step, from).0, BOTTOM + 18.0, &step.to_string());
        }
        svg.label("quiet middle", (LEFT + RIGHT) / 2.0, BOTTOM + 36.0, "step");
    }
}

/// A run, and another to compare with, each with its name.
pub fn losses(title: &str, (name, own): (&str, &History), beside: Option<(&str, &History)>) -> String {
    let runs: Vec<&History> = std::iter::once(own).chain(beside.map(|(_, run)| run)).collect();
    let axes = Axes::of(&runs);
    svg::picture(SIZE, title, Style { light: LIGHT, dark: DARK }, |svg| {
        axes.draw(svg);
        curve(svg, &axes, "own", own);
        let mut names = vec![("own", name)];
        if let Some((name, run)) = beside {
            curve(svg, &axes, "beside", run);
            names.push(("beside", name));
        }
        for &(step, loss) in &own.held {
            let (x, y) = axes.at(step as f64, loss.into());
            let place: [Attribute<'_>; 4] =
                [("class", &"held"), ("cx", &round(x)), ("cy", &round(y)), ("r", &3)];
            let said = format!("held out, after {step} steps: {loss:.3}");
            svg.element("circle", &place, |svg| svg.element("title", &[], |svg| svg.text(&said)));
        }
        let mut x = LEFT;
        for (class, name) in names {
            svg.line(&format!("curve {class}"), (x, 44.0), (x + 24.0, 44.0));
            svg.label("quiet", x + 30.0, 48.0, name);
            x += 220.0;
        }
        svg.element("circle", &[("class", &"held"), ("cx", &(x + 12.0)), ("cy", &44), ("r", &3)], |_| {});
        svg.label("quiet", x + 30.0, 48.0, "held-out tokens, nats each");
    })
}

fn curve(svg: &mut Svg, axes: &Axes, class: &str, run: &History) {
    let place = |(step, &loss): (usize, &f32)| {
        let (x, y) = axes.at(step as f64, loss.into());
        format!("{},{}", round(x), round(y))
    };
    let points: Vec<String> = run.losses.iter().enumerate().map(place).collect();
    let class = format!("curve {class}");
    svg.element("polyline", &[("class", &class), ("points", &points.join(" "))], |_| {});
}

const PASSES_LIGHT: &str =
    ".forward { fill: #54aeff; } .backward { fill: #4ac26b; } .weight { fill: #d4a72c; }
.pass { stroke: #ffffff; stroke-width: 0.5; }";
const PASSES_DARK: &str = ".forward { fill: #1f6feb; } .backward { fill: #238636; } .weight { fill: #9e6a03; } .pass { stroke: #0d1117; }";

/// Height of a rank's line.
const LINE: f64 = 18.0;

/// Passes of each rank in a step, in nanoseconds: a line for each rank.
pub fn timeline(title: &str, ranks: &[Vec<Span>]) -> String {
    let spans = ranks.iter().flatten();
    let first = spans.clone().map(|span| span.begin).min().unwrap_or(0);
    let whole = spans.map(|span| span.end - first).max().unwrap_or(0).max(1);
    let waits = |spans: &Vec<Span>| whole - spans.iter().map(|span| span.end - span.begin).sum::<u64>();
    let waits = ranks.iter().map(waits).max().unwrap_or(0);
    let scale = (RIGHT - LEFT) / whole as f64;
    let height = TOP + 14.0 + ranks.len() as f64 * LINE + 12.0;
    let style = Style { light: PASSES_LIGHT, dark: PASSES_DARK };
    svg::picture((SIZE.0, height), title, style, |svg| {
        let mut x = LEFT;
        for (class, name) in
            [("forward", "forward"), ("backward", "backward"), ("weight", "gradients of weights alone")]
        {
            rectangle(svg, class, (x, 38.0), (12.0, 12.0));
            svg.label("quiet", x + 18.0, 48.0, name);
            x += 130.0;
        }
        let (whole, waits) = (whole / 1000, waits / 1000);
        let said = format!("{whole} us, of which a rank computes no pass for {waits} at most");
        svg.label("quiet", LEFT, TOP + 4.0, &said);
        for (rank, spans) in ranks.iter().enumerate() {
            let y = TOP + 14.0 + rank as f64 * LINE;
            svg.label("quiet end", LEFT - 8.0, y + 12.0, &rank.to_string());
            spans.iter().for_each(|span| pass(svg, span, (first, scale, y)));
        }
    })
}

fn pass(svg: &mut Svg, span: &Span, (first, scale, y): (u64, f64, f64)) {
    let class = match span.compute.pass {
        Pass::Forward => "forward",
        Pass::Backward | Pass::BackwardInput => "backward",
        Pass::BackwardWeight => "weight",
    };
    let from = LEFT + (span.begin - first) as f64 * scale;
    let width = (span.end - span.begin) as f64 * scale;
    rectangle(svg, class, (from, y), (width, LINE - 4.0));
    let label = span.compute.microbatch.to_string();
    if width > 8.0 * label.len() as f64 {
        svg.label("middle", from + width / 2.0, y + 11.0, &label);
    }
}

fn rectangle(svg: &mut Svg, class: &str, (x, y): (f64, f64), (width, height): (f64, f64)) {
    let class = format!("pass {class}");
    let [x, y, width, height] = [x, y, width, height].map(round);
    let place: [Attribute<'_>; 5] =
        [("class", &class), ("x", &x), ("y", &y), ("width", &width), ("height", &height)];
    svg.element("rect", &place, |_| {});
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_has_a_point_and_every_look_at_held_out_tokens_a_dot() {
        let own = History { losses: vec![7.0, 5.5, 4.0], held: vec![(0, 7.1), (3, 3.9)] };
        let beside = History { losses: vec![7.0, 5.4], held: vec![] };
        let picture = losses("loss", ("a", &own), Some(("b", &beside)));
        let elements = svg::tests::elements(&picture);
        let points = |class: &str| {
            let line = elements
                .iter()
                .find(|element| element.starts_with(&format!("polyline class=\"curve {class}")));
            line.unwrap().matches(',').count()
        };
        assert_eq!((points("own"), points("beside")), (3, 2));
        assert_eq!(elements.iter().filter(|element| element.starts_with("circle")).count(), 2 + 1);
        // The highest lies within the axes.
        assert_eq!(Axes::of(&[&own, &beside]).losses, (3.5, 7.5));
    }

    #[test]
    fn every_pass_of_every_rank_has_a_rectangle_from_the_first_on() {
        use sidelane_parallel::pipeline::{Costs, Schedule};
        let made = Schedule::ZeroBubbleH1.plan(3, 5).unwrap().time(1, Costs::new(2000, 1000, 1000)).unwrap();
        // Clocks that began long before the first pass.
        let later = |span: &Span| Span { begin: span.begin + 5000, end: span.end + 5000, ..*span };
        let ranks: Vec<Vec<Span>> =
            made.stages().iter().map(|spans| spans.iter().map(later).collect()).collect();
        let picture = timeline("a step", &ranks);
        let elements = svg::tests::elements(&picture);
        let passes = |class: &str| {
            let class = format!("rect class=\"pass {class}\"");
            // One of each is in the legend.
            elements.iter().filter(|element| element.starts_with(&class)).count() - 1
        };
        assert_eq!((passes("forward"), passes("backward"), passes("weight")), (15, 15, 15));
        let (time, computed) = (made.time() / 1000, 5 * (2 + 1 + 1));
        let said = format!("{time} us, of which a rank computes no pass for {} at most", time - computed);
        assert!(picture.contains(&said), "{said}");
        let from_left = format!("class=\"pass forward\" x=\"{}\"", round(LEFT));
        assert!(elements.iter().any(|element| element.contains(&from_left)));
    }

    #[test]
    fn losses_of_any_size_have_few_lines() {
        for (most, expected) in [(2.0f32, 5), (8.0, 9), (15.0, 16), (99.0, 10), (1e30, 11), (f32::MAX, 4)] {
            let run = History { losses: vec![0.0, most], held: vec![] };
            let picture = losses("loss", ("a", &run), None);
            let lines = svg::tests::elements(&picture);
            let lines = lines.iter().filter(|element| element.starts_with("line class=\"line\"")).count();
            assert_eq!(lines, expected, "{most}");
        }
    }
}
