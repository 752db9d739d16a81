//! Pictures of reports, as SVG: panels of curves and bars between axes, and timelines of boxes.
//!
//! ```text
//!   report --> Chart     panels.rs      curves, bands and bars between axes        --\
//!         \--> Timeline  timeline.rs    rows of boxes, time from left to right     --+--> svg.rs
//! ```
//!
//! A command gives names, numbers and words; places, colors and marks are decided here, so that all
//! pictures look alike. They are light or dark as the reader prefers, and are 900 pixels wide.
//!
//! No chart crate draws them as well: plotters (five crates, 3.7 s of the first build) writes a
//! color into every element, where no rule for dark paper reaches it, and has neither words under
//! the pointer nor timelines; charming draws by a JavaScript library, in an engine of its own.

mod axis;
mod panels;
pub mod svg;
mod timeline;

use axis::{Axis, Scale};
use svg::{Attribute, Style, Svg, round};

pub use panels::{Arrangement, Band, Bar, Chart, Curve, Panel, Point};
pub use timeline::{Row, Span, Timeline};

/// A color of the palette: the same hue on light and on dark paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Color {
    Blue,
    Teal,
    Brown,
    Violet,
    Pink,
    Olive,
    Orange,
    Gray,
    Pale,
}

impl Color {
    /// Colors of curves, in this order.
    const OF_CURVES: [Color; 6] =
        [Color::Blue, Color::Teal, Color::Brown, Color::Violet, Color::Pink, Color::Olive];

    /// The color of the curve with this number; again from the first one behind the last one.
    pub fn nth(number: usize) -> Self {
        Color::OF_CURVES[number % Color::OF_CURVES.len()]
    }

    fn class(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// Elements take the color of their class as `currentColor`.
const STYLE: Style = Style {
    light: "\
.blue { color: #2166c2; } .teal { color: #0f8a86; } .brown { color: #b3541e; }
.violet { color: #8250df; } .pink { color: #c2307f; } .olive { color: #6b7a00; }
.orange { color: #d9820f; } .gray { color: #8a939c; } .pale { color: #ccd3da; }
.curve { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
.dashed { stroke-dasharray: 5 3; }
.dot, .band, .bar, .box { fill: currentColor; } .band { fill-opacity: 0.14; }
.small { font-size: 9.5px; } .inside { font-size: 9.5px; fill: #ffffff; }
.call { fill: #eff2f5; } .call, .wide { stroke: #ffffff; stroke-width: 0.5; }",
    dark: "\
.blue { color: #3f83dd; } .teal { color: #1f9e99; } .brown { color: #cf7440; }
.violet { color: #a07be8; } .pink { color: #e0579f; } .olive { color: #93a31f; }
.orange { color: #e0962f; } .gray { color: #6b747e; } .pale { color: #414a55; }
.inside { fill: #ffffff; } .call { fill: #1b2129; } .call, .wide { stroke: #0d1117; }",
};

const WIDTH: f64 = 900.0;
/// Between the paper's edge and what is drawn.
const EDGE: f64 = 16.0;
/// Lines of conditions, and of a legend.
const LINE: f64 = 17.0;

/// A picture of this height on its paper, with conditions below its title. `inside` draws below
/// [`top`].
fn picture(height: f64, title: &str, conditions: &[String], inside: impl FnOnce(&mut Svg)) -> String {
    svg::picture((WIDTH, height), title, STYLE, |svg| {
        for (nth, condition) in conditions.iter().enumerate() {
            svg.label("quiet", EDGE, 43.0 + LINE * nth as f64, condition);
        }
        inside(svg);
    })
}

/// Where a picture begins below its conditions and the title of a panel.
fn top(conditions: &[String]) -> f64 {
    62.0 + LINE * conditions.len() as f64
}

/// A rectangle (x, y, width, height) with a label under the pointer.
fn rect(svg: &mut Svg, class: &str, (x, y, width, height): (f64, f64, f64, f64), said: &str) {
    let [x, y, width, height] = [x, y, width, height].map(round);
    let place: [Attribute<'_>; 5] =
        [("class", &class), ("x", &x), ("y", &y), ("width", &width), ("height", &height)];
    svg.element("rect", &place, |svg| svg.element("title", &[], |svg| svg.text(said)));
}

/// Names of what is drawn, in lines of as many columns as fit.
struct Legend<'a> {
    names: Vec<&'a str>,
    left: f64,
}

impl Legend<'_> {
    /// Columns, and the room of each: the longest name decides.
    fn columns(&self) -> (usize, f64) {
        let wide = 40.0 + 6.0 * self.names.iter().map(|name| name.len()).max().unwrap_or(0) as f64;
        let fit = (WIDTH - self.left - EDGE) / wide;
        ((fit as usize).clamp(1, 4), wide)
    }

    fn height(&self) -> f64 {
        LINE * self.names.len().div_ceil(self.columns().0) as f64
    }

    /// `sample` draws what a name stands for, 22 pixels wide.
    fn draw(&self, svg: &mut Svg, y: f64, sample: impl Fn(&mut Svg, usize, (f64, f64))) {
        let (columns, wide) = self.columns();
        for (nth, name) in self.names.iter().enumerate() {
            let (x, y) = (self.left + wide * (nth % columns) as f64, y + LINE * (nth / columns) as f64);
            sample(svg, nth, (x, y));
            svg.label("quiet", x + 28.0, y + 4.0, name);
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// The value of an attribute of an element.
    pub fn value<'t>(tag: &'t str, name: &str) -> &'t str {
        tag.split_once(&format!(" {name}=\"")).unwrap().1.split('"').next().unwrap()
    }

    pub fn number(tag: &str, name: &str) -> f64 {
        value(tag, name).parse().unwrap()
    }

    /// The places of a curve.
    pub fn points(tag: &str) -> Vec<(f64, f64)> {
        let places = value(tag, "points").split(' ').map(|place| place.split_once(',').unwrap());
        places.map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap())).collect()
    }

    #[test]
    fn keys_of_legend_fit_their_names_and_the_picture() {
        for longest in [1, 6, 21, 36, 90] {
            let name = "n".repeat(longest);
            let legend = Legend { names: vec!["a", &name], left: 92.0 };
            let (columns, wide) = legend.columns();
            assert!(wide > 28.0 + 6.0 * longest as f64, "{longest}");
            assert!(columns > 0 && 92.0 + columns as f64 * wide <= WIDTH, "{longest}");
        }
    }

    #[test]
    fn every_color_has_a_rule_for_light_and_for_dark() {
        let all = [Color::Orange, Color::Gray, Color::Pale].into_iter().chain(Color::OF_CURVES);
        for class in all.map(Color::class) {
            let rule = format!(".{class} {{ color: #");
            assert!(STYLE.light.contains(&rule) && STYLE.dark.contains(&rule), "{class}");
        }
    }
}
