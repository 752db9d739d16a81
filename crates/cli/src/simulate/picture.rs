//! Times by number of ranks, dispatch and combine beside each other, both axes logarithmic.

use super::report::{Report, Timed};
use crate::chart::{Curve, Point, Scale};
use crate::svg::{self, Style, Svg};
use crate::table::time;

const WIDTH: f64 = 920.0;
const TOP: f64 = 96.0;
const BOTTOM: f64 = 372.0;
/// Left and right end of each panel.
const PANELS: [(&str, f64, f64); 2] = [("dispatch", 70.0, 452.0), ("combine", 520.0, 902.0)];
/// Of the legend.
const LINE: f64 = 17.0;

/// A colour for each way of one layout, dashed for the other.
const CLASSES: [&str; 12] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];
const STYLE: Style = Style {
    light: "\
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.a { stroke: #2166c2; } .dot.a { fill: #2166c2; }
.b { stroke: #0f8a86; } .dot.b { fill: #0f8a86; }
.c { stroke: #b3541e; } .dot.c { fill: #b3541e; }
.d { stroke: #8250df; } .dot.d { fill: #8250df; }
.e { stroke: #c2185b; } .dot.e { fill: #c2185b; }
.f { stroke: #6b7a00; } .dot.f { fill: #6b7a00; }
.g { stroke: #2166c2; stroke-dasharray: 5 3; } .dot.g { fill: #2166c2; }
.h { stroke: #0f8a86; stroke-dasharray: 5 3; } .dot.h { fill: #0f8a86; }
.i { stroke: #b3541e; stroke-dasharray: 5 3; } .dot.i { fill: #b3541e; }
.j { stroke: #8250df; stroke-dasharray: 5 3; } .dot.j { fill: #8250df; }
.k { stroke: #c2185b; stroke-dasharray: 5 3; } .dot.k { fill: #c2185b; }
.l { stroke: #6b7a00; stroke-dasharray: 5 3; } .dot.l { fill: #6b7a00; }
circle.dot { stroke: none; }",
    dark: "",
};

/// The picture of all groups.
pub fn draw(report: &Report) -> String {
    let mut groups: Vec<_> = report.groups.iter().collect();
    groups.sort_by_key(|group| group.ranks);
    // Ways of the largest group: all that there are. One that is not in a smaller group has no point there.
    let names: Vec<&str> = groups.last().map_or(Vec::new(), |group| group.ways.iter().map(name).collect());
    let points = |of: &str, ns: fn(&Timed) -> u64| -> Vec<Point> {
        let timed = groups.iter().filter_map(|group| {
            let timed = group.ways.iter().find(|timed| timed.name == of)?;
            Some((group.ranks, ns(timed) as f64 / 1e3))
        });
        let point = |(ranks, us): (u32, f64)| Point {
            at: (f64::from(ranks), us),
            said: format!("{ranks} ranks, {of}: {}", time(us)),
        };
        timed.map(point).collect()
    };
    let panel = |ns: fn(&Timed) -> u64| -> Vec<Curve> {
        let named = names.iter().zip(CLASSES.iter().cycle());
        named.map(|(&of, class)| Curve { name: of.to_owned(), class, points: points(of, ns) }).collect()
    };
    let panels = [panel(|timed| timed.dispatch.ns), panel(|timed| timed.combine.ns)];
    let all = || panels.iter().flatten().flat_map(|curve| &curve.points);
    let title = format!("Dispatch and combine by number of ranks, predicted for {}", report.hardware.name);
    let height = BOTTOM + 50.0 + LINE * names.len() as f64;
    svg::picture((WIDTH, height), &title, STYLE, |svg| {
        svg.label("quiet", 16.0, 43.0, &report.config.routing_words());
        let (hidden, dtype) = (report.config.hidden, report.config.dtype.name());
        let ranks = report.config.ranks_per_node;
        svg.label(
            "quiet",
            16.0,
            59.0,
            &format!("rows of {hidden} x {dtype}, nodes of {ranks} ranks; a model, not measured"),
        );
        for ((name, left, right), curves) in PANELS.into_iter().zip(&panels) {
            let across = Scale::of(all().map(|point| point.at.0), (left, right), f64::log2);
            let up = Scale::of(all().map(|point| point.at.1), (BOTTOM, TOP), f64::log10);
            svg.label("", left, TOP - 12.0, name);
            axes(svg, (left, right), &across, &up);
            curves.iter().for_each(|curve| curve.draw(svg, &across, &up));
        }
        for (nth, curve) in panels[0].iter().enumerate() {
            let y = BOTTOM + 44.0 + LINE * nth as f64;
            svg.line(
                &format!("curve {}", curve.class),
                (PANELS[0].1, y - 4.0),
                (PANELS[0].1 + 22.0, y - 4.0),
            );
            svg.label("quiet", PANELS[0].1 + 30.0, y, &curve.name);
        }
    })
}

fn name(timed: &Timed) -> &str {
    &timed.name
}

fn axes(svg: &mut Svg, (left, right): (f64, f64), across: &Scale, up: &Scale) {
    for power in across.powers(12) {
        let x = across.at(2f64.powi(power));
        svg.line("line", (x, TOP), (x, BOTTOM));
        svg.label("quiet middle", x, BOTTOM + 16.0, &(1u64 << power).to_string());
    }
    for power in up.powers(8) {
        let y = up.at(10f64.powi(power));
        svg.line("line", (left, y), (right, y));
        svg.label("quiet end", left - 6.0, y + 4.0, &time(10f64.powi(power)));
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::report;
    use super::*;
    use crate::svg::tests::elements;

    #[test]
    fn every_way_has_a_point_for_each_group_that_has_it() {
        let report = report("--nodes 2 --ranks-per-node 2 --tokens 8 --hidden 128 --svg unused --up-to 8");
        let tags = elements(&draw(&report));
        let count = |name: &str| tags.iter().filter(|tag| tag.starts_with(name)).count();
        let ways = report.groups.iter().map(|group| group.ways.len());
        assert_eq!(report.groups.iter().map(|group| group.nodes).collect::<Vec<_>>(), [2, 1, 4]);
        assert_eq!((count("polyline"), count("circle")), (24, 2 * ways.sum::<usize>()));
    }
}
