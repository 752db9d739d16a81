//! Curves, bands and bars between axes, in panels next to each other or below each other.

use super::svg::{Attribute, Svg, round};
use super::{Axis, Color, EDGE, LINE, Legend, Scale, WIDTH, picture, rect, top};

/// A figure, and its label under the pointer; without one it is a place of the curve alone.
pub struct Point {
    pub at: (f64, f64),
    pub said: String,
}

/// Curves of one name have one color in all panels.
pub struct Curve {
    pub name: String,
    pub points: Vec<Point>,
}

/// A region behind the curves, between two numbers across.
pub struct Band {
    pub from: f64,
    pub to: f64,
    pub color: Color,
    pub name: &'static str,
}

/// A bar upward from 0, as wide as 1 of the axis across. The first one begins at 0.
pub struct Bar {
    pub tall: f64,
    pub color: Color,
    pub said: String,
}

/// Curves, bands and bars between one pair of axes.
pub struct Panel<'a> {
    pub title: &'a str,
    pub curves: Vec<Curve>,
    /// Regions, from left to right.
    pub bands: Vec<Band>,
    pub bars: Vec<Bar>,
    /// Whether axes are linear. Otherwise marks are powers: of 2 across, of 10 upward.
    pub linear: bool,
    /// Words for marks across, and for those upward.
    pub numbers: &'a dyn Fn(f64) -> String,
    pub figures: &'a dyn Fn(f64) -> String,
}

/// A picture of panels, with conditions above and a legend of curves below.
pub struct Chart<'a> {
    pub title: &'a str,
    pub conditions: Vec<String>,
    pub panels: Vec<Panel<'a>>,
    pub arrangement: Arrangement,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrangement {
    /// Next to each other, on the same axes.
    Alike,
    /// Next to each other, each on its own axes.
    Apart,
    /// Below each other, each on its own axes and as wide as the picture.
    Stacked,
}

/// Room for marks upward.
const LABELS: f64 = 92.0;
/// Height of panels next to each other, and of those below each other; between these.
const HIGH: f64 = 280.0;
const LOW: f64 = 168.0;
const GAP: f64 = 58.0;

impl Chart<'_> {
    pub fn draw(&self) -> String {
        let mut names: Vec<&str> = Vec::new();
        for curve in self.panels.iter().flat_map(|panel| &panel.curves) {
            if !names.contains(&&curve.name[..]) {
                names.push(&curve.name);
            }
        }
        let (columns, height) = match self.arrangement {
            Arrangement::Stacked => (1, LOW),
            Arrangement::Alike | Arrangement::Apart => (self.panels.len(), HIGH),
        };
        let place = |nth: usize| {
            let (column, line) = ((nth % columns) as f64, (nth / columns) as f64);
            let wide = (WIDTH - EDGE) / columns as f64;
            let top = top(&self.conditions) + (height + GAP) * line;
            ((wide * column + LABELS, wide * (column + 1.0)), (top + height, top))
        };
        let (_, (bottom, _)) = place(self.panels.len() - 1);
        let legend = Legend { names, left: LABELS };
        picture(bottom + 40.0 + legend.height(), self.title, &self.conditions, |svg| {
            for (nth, panel) in self.panels.iter().enumerate() {
                let alike = self.arrangement == Arrangement::Alike;
                let same = if alike { &self.panels[..] } else { std::slice::from_ref(panel) };
                panel.draw(svg, place(nth), same, &legend.names);
            }
            legend.draw(svg, bottom + 40.0, |svg, nth, (x, y)| {
                svg.line(&class(nth), (x, y), (x + 22.0, y));
            });
        })
    }
}

/// A color for each curve; dashed once all have been used.
fn class(nth: usize) -> String {
    let dashed = if nth < Color::OF_CURVES.len() { "" } else { " dashed" };
    format!("curve {}{dashed}", Color::nth(nth).class())
}

impl<'a> Panel<'a> {
    /// A panel with nothing in it.
    pub fn new(
        title: &'a str,
        numbers: &'a dyn Fn(f64) -> String,
        figures: &'a dyn Fn(f64) -> String,
    ) -> Self {
        let (curves, bands, bars) = (Vec::new(), Vec::new(), Vec::new());
        Panel { title, curves, bands, bars, linear: false, numbers, figures }
    }

    /// Corners of what is drawn.
    fn corners(&self) -> impl Iterator<Item = (f64, f64)> + Clone {
        let bars = (1..).zip(&self.bars).map(|(nth, bar)| (f64::from(nth), bar.tall));
        let origin = (!self.bars.is_empty()).then_some((0.0, 0.0));
        self.curves.iter().flat_map(|curve| &curve.points).map(|point| point.at).chain(bars).chain(origin)
    }

    /// Between these ends across and upward, on axes that have room for all of these panels.
    fn draw(
        &self,
        svg: &mut Svg,
        ((left, right), (bottom, top)): ((f64, f64), (f64, f64)),
        same: &[Panel<'_>],
        names: &[&str],
    ) {
        let (of_numbers, of_figures) =
            if self.linear { (Scale::Linear, Scale::Linear) } else { (Scale::Log2, Scale::Log10) };
        let all = same.iter().flat_map(Panel::corners);
        let across = Axis::new(of_numbers, all.clone().map(|at| at.0), (left, right));
        let up = Axis::upward(of_figures, all.map(|at| at.1), (bottom, top));
        svg.label("", left, top - 12.0, self.title);
        for Band { from, to, color, name } in &self.bands {
            let [from, to] = [*from, *to].map(|number| across.at(number).clamp(left, right));
            rect(svg, &format!("band {}", color.class()), (from, top, to - from, bottom - top), name);
            if to - from > 6.0 * name.len() as f64 {
                svg.label("quiet middle", (from + to) / 2.0, top + 14.0, name);
            }
        }
        for number in across.marks(((right - left) / 40.0) as usize) {
            let x = across.at(number);
            svg.line("line", (x, top), (x, bottom));
            svg.label("quiet middle", x, bottom + LINE, &(self.numbers)(number));
        }
        for figure in up.marks(8) {
            let y = up.at(figure);
            svg.line("line", (left, y), (right, y));
            svg.label("quiet end", left - 6.0, y + 4.0, &(self.figures)(figure));
        }
        for (Bar { tall, color, said }, nth) in self.bars.iter().zip(0u32..) {
            let [from, to] = [0.0, 0.86].map(|part| across.at(f64::from(nth) + part));
            let (y, class) = (up.at(*tall), format!("bar {}", color.class()));
            rect(svg, &class, (from, y, to - from, bottom - y), said);
        }
        for Curve { name, points } in &self.curves {
            let nth = names.iter().position(|known| known == name).unwrap_or(0);
            let places: Vec<_> =
                points.iter().map(|Point { at: (x, y), .. }| (across.at(*x), up.at(*y))).collect();
            let path: Vec<String> =
                places.iter().map(|&(x, y)| format!("{},{}", round(x), round(y))).collect();
            svg.element("polyline", &[("class", &class(nth)), ("points", &path.join(" "))], |_| {});
            let dot = format!("dot {}", Color::nth(nth).class());
            for (&(x, y), Point { said, .. }) in
                places.iter().zip(points).filter(|(_, at)| !at.said.is_empty())
            {
                let place: [Attribute<'_>; 4] =
                    [("class", &dot), ("cx", &round(x)), ("cy", &round(y)), ("r", &2.5)];
                svg.element("circle", &place, |svg| svg.element("title", &[], |svg| svg.text(said)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{number, points};
    use super::*;
    use crate::chart::svg::tests::elements;

    fn words(number: f64) -> String {
        number.to_string()
    }

    fn chart(panels: Vec<Panel<'_>>) -> Chart<'_> {
        Chart { title: "title", conditions: vec![], panels, arrangement: Arrangement::Apart }
    }

    fn curve(at: &[(f64, f64)]) -> Curve {
        let point = |&at: &(f64, f64)| Point { at, said: "here".to_owned() };
        Curve { name: "curve".to_owned(), points: at.iter().map(point).collect() }
    }

    #[test]
    fn chart_points_lie_between_axes_larger_ones_above_and_right() {
        let given = [(8.0, 0.5), (1e6, 700.0), (4096.0, 3.0)];
        for (count, linear) in [(1, false), (2, false), (3, false), (1, true), (2, true), (3, true)] {
            let curves = vec![curve(&given[..count])];
            let panel = Panel { curves, linear, ..Panel::new("", &words, &words) };
            let tags = elements(&chart(vec![panel]).draw());
            let line = tags.iter().find(|tag| tag.starts_with("polyline")).unwrap();
            let at = points(line);
            let between = |&(x, y): &(f64, f64)| {
                (LABELS..=WIDTH - EDGE).contains(&x) && (62.0..=62.0 + HIGH).contains(&y)
            };
            assert!(at.len() == count && at.iter().all(between), "{at:?}");
            assert!(count < 2 || at[0].0 < at[1].0 && at[0].1 > at[1].1, "{at:?}");
            assert_eq!(tags.iter().filter(|tag| tag.starts_with("circle")).count(), count);
        }
    }

    #[test]
    fn bands_lie_next_to_each_other_and_within_the_panel() {
        let band = |from, to| Band { from, to, color: Color::Teal, name: "band" };
        let (curves, bands) =
            (vec![curve(&[(2.0, 2.0), (32.0, 32.0)])], vec![band(1.0, 8.0), band(8.0, 45.0)]);
        let panel = Panel { curves, bands, ..Panel::new("", &words, &words) };
        let tags = elements(&chart(vec![panel]).draw());
        let bands: Vec<_> = tags.iter().filter(|tag| tag.contains("band teal")).collect();
        let ends: Vec<_> =
            bands.iter().map(|tag| (number(tag, "x"), number(tag, "x") + number(tag, "width"))).collect();
        assert_eq!((ends.len(), ends[0].0, ends[1].1), (2, LABELS, WIDTH - EDGE));
        assert!((ends[0].1 - ends[1].0).abs() < 0.02, "{ends:?}");
    }

    #[test]
    fn a_curve_has_one_color_in_all_panels_and_one_name_in_the_legend() {
        let named = |name: &str| Curve { name: name.to_owned(), ..curve(&[(1.0, 1.0)]) };
        let panel = |names: &[&str]| {
            let curves = names.iter().map(|name| named(name)).collect();
            Panel { curves, ..Panel::new("", &words, &words) }
        };
        let picture = chart(vec![panel(&["x", "y"]), panel(&["y"])]).draw();
        let count = |part: &str| picture.matches(part).count();
        assert_eq!((count("polyline class=\"curve teal\""), count("dot teal"), count(">y<")), (2, 2, 1));
    }
}
