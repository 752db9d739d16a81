//! Time and memory of planning by number of ranks, beside each other, both axes logarithmic.

use sidelane::topology::Route;

use super::{Cost, PlanningArgs, Row};
use crate::chart::{Curve, Point, Scale};
use crate::svg::{self, Style, Svg};
use crate::table::{time, volume};

const SIZE: (f64, f64) = (760.0, 380.0);
const TOP: f64 = 92.0;
const BOTTOM: f64 = 316.0;

const STYLE: Style = Style {
    light: "\
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
circle.dot { stroke: none; }
.direct { stroke: #2166c2; } .dot.direct { fill: #2166c2; }
.pxn { stroke: #0f8a86; } .dot.pxn { fill: #0f8a86; }",
    dark: "",
};

/// A panel: its name, its ends, what it shows and how that is said.
struct Panel {
    name: &'static str,
    ends: (f64, f64),
    of: fn(&Cost) -> f64,
    say: fn(f64) -> String,
}

const PANELS: [Panel; 2] = [
    Panel { name: "time", ends: (76.0, 366.0), of: Cost::together, say: time },
    Panel {
        name: "memory of the tables",
        ends: (452.0, 742.0),
        of: |cost| cost.bytes as f64,
        say: |bytes| volume(bytes as u64),
    },
];

/// The picture of all groups.
pub fn draw(args: &PlanningArgs, rows: &[Row]) -> String {
    let title = "What a rank's operands cost, by number of ranks";
    svg::picture(SIZE, title, STYLE, |svg| {
        let PlanningArgs { tokens, top_k, layout, ranks_per_node, .. } = args;
        let conditions =
            format!("{tokens} tokens, top-{top_k}, {}, nodes of {ranks_per_node} ranks", layout.name());
        svg.label("quiet", 16.0, 43.0, &conditions);
        PANELS.iter().for_each(|panel| draw_panel(svg, panel, rows));
        for (nth, route) in Route::ALL.into_iter().enumerate() {
            let (x, y) = (PANELS[0].ends.0 + 90.0 * nth as f64, BOTTOM + 44.0);
            svg.line(&format!("curve {}", route.name()), (x, y), (x + 22.0, y));
            svg.label("quiet", x + 28.0, y + 4.0, route.name());
        }
    })
}

fn draw_panel(svg: &mut Svg, panel: &Panel, rows: &[Row]) {
    let curve = |route: Route| {
        let of_route = rows.iter().filter(|row| row.shape.route == route);
        let point = |row: &Row| {
            let (ranks, figure) = (row.shape.ranks, (panel.of)(&row.cost));
            let said = format!("{ranks} ranks, {}: {}", route.name(), (panel.say)(figure));
            Point { at: (f64::from(ranks), figure), said }
        };
        Curve { name: route.name().to_owned(), class: route.name(), points: of_route.map(point).collect() }
    };
    let curves = Route::ALL.map(curve);
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let across = Scale::of(points().map(|point| point.at.0), panel.ends, f64::log2);
    let up = Scale::of(points().map(|point| point.at.1), (BOTTOM, TOP), f64::log10);
    svg.label("", panel.ends.0, TOP - 12.0, panel.name);
    for power in across.powers(10) {
        let x = across.at(2f64.powi(power));
        svg.line("line", (x, TOP), (x, BOTTOM));
        svg.label("quiet middle", x, BOTTOM + 16.0, &(1u64 << power).to_string());
    }
    for power in up.powers(6) {
        let y = up.at(10f64.powi(power));
        svg.line("line", (panel.ends.0, y), (panel.ends.1, y));
        svg.label("quiet end", panel.ends.0 - 6.0, y + 4.0, &(panel.say)(10f64.powi(power)));
    }
    curves.iter().for_each(|curve| curve.draw(svg, &across, &up));
}
