//! Common parts of pictures: curves between logarithmic axes, and timelines of labeled boxes.

use crate::svg::{self, Attribute, Style, Svg, round};

/// A figure, and its label under the pointer.
pub struct Point {
    pub at: (f64, f64),
    pub said: String,
}

pub struct Curve {
    pub name: String,
    pub points: Vec<Point>,
}

/// A region behind the curves, between two numbers across.
pub struct Band {
    pub from: f64,
    pub to: f64,
    /// Its color: that of the curve with this number.
    pub color: usize,
    pub name: &'static str,
}

/// Curves between logarithmic axes: powers of 2 across, powers of 10 up.
pub struct Panel<'a> {
    pub title: &'a str,
    pub curves: Vec<Curve>,
    /// Regions, from left to right.
    pub bands: Vec<Band>,
    /// Words for marks across, and for those up.
    pub numbers: &'a dyn Fn(u64) -> String,
    pub figures: &'a dyn Fn(f64) -> String,
}

/// A picture of panels side by side, with conditions above and a legend below.
pub struct Chart<'a> {
    pub title: &'a str,
    pub conditions: Vec<String>,
    pub panels: Vec<Panel<'a>>,
    /// Whether all panels have the same axes.
    pub alike: bool,
}

impl Chart<'_> {
    pub fn draw(&self) -> String {
        let top = 62.0 + 16.0 * self.conditions.len() as f64;
        let bottom = top + HEIGHT;
        let names = || self.panels.iter().take(1).flat_map(|panel| &panel.curves).map(|curve| &curve.name);
        let (keys, wide) = keys(names());
        let lines = names().count().div_ceil(keys);
        let size = (WIDTH, bottom + 40.0 + 17.0 * lines as f64);
        svg::picture(size, self.title, CURVES, |svg| {
            for (nth, condition) in self.conditions.iter().enumerate() {
                svg.label("quiet", 16.0, 43.0 + 16.0 * nth as f64, condition);
            }
            let step = (WIDTH - 16.0) / self.panels.len() as f64;
            for (nth, panel) in self.panels.iter().enumerate() {
                let across = (step * nth as f64 + LABELS, step * (nth + 1) as f64);
                let same = if self.alike { &self.panels[..] } else { std::slice::from_ref(panel) };
                let all = same.iter().flat_map(|panel| &panel.curves).flat_map(|curve| &curve.points);
                panel.draw(svg, across, (bottom, top), all.map(|point| point.at));
            }
            for ((nth, name), class) in names().enumerate().zip(CLASSES.iter().cycle()) {
                let place = (LABELS + wide * (nth % keys) as f64, bottom + 40.0 + 17.0 * (nth / keys) as f64);
                key(svg, class, name, place);
            }
        })
    }
}

/// Height of a panel, and room for its marks up.
const HEIGHT: f64 = 280.0;
const LABELS: f64 = 92.0;

/// Keys in a line of a legend, and the room of each: the longest name decides.
fn keys<'a>(names: impl Iterator<Item = &'a String>) -> (usize, f64) {
    let wide = 40.0 + 6.0 * names.map(String::len).max().unwrap_or(0) as f64;
    let fit = (WIDTH - LABELS - 16.0) / wide;
    ((fit as usize).clamp(1, 4), wide)
}

/// A color for each curve; dashed from the seventh on.
const CLASSES: [&str; 12] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];
const CURVES: Style = Style {
    light: "\
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.a, .g { stroke: #2166c2; } .dot.a, .dot.g, .band.a { fill: #2166c2; }
.b, .h { stroke: #0f8a86; } .dot.b, .dot.h, .band.b { fill: #0f8a86; }
.c, .i { stroke: #b3541e; } .dot.c, .dot.i, .band.c { fill: #b3541e; }
.d, .j { stroke: #8250df; } .dot.d, .dot.j, .band.d { fill: #8250df; }
.e, .k { stroke: #c2185b; } .dot.e, .dot.k, .band.e { fill: #c2185b; }
.f, .l { stroke: #6b7a00; } .dot.f, .dot.l, .band.f { fill: #6b7a00; }
.g, .h, .i, .j, .k, .l { stroke-dasharray: 5 3; }
circle.dot, rect.band { stroke: none; }
.band { fill-opacity: 0.14; }",
    dark: "",
};

impl<'a> Panel<'a> {
    /// A panel without curves.
    pub fn new(
        title: &'a str,
        numbers: &'a dyn Fn(u64) -> String,
        figures: &'a dyn Fn(f64) -> String,
    ) -> Self {
        Panel { title, curves: Vec::new(), bands: Vec::new(), numbers, figures }
    }

    fn draw(
        &self,
        svg: &mut Svg,
        (left, right): (f64, f64),
        (bottom, top): (f64, f64),
        all: impl Iterator<Item = (f64, f64)> + Clone,
    ) {
        let across = Scale::of(all.clone().map(|at| at.0), (left, right), f64::log2);
        let up = Scale::of(all.map(|at| at.1), (bottom, top), f64::log10);
        svg.label("", left, top - 12.0, self.title);
        for Band { from, to, color, name } in &self.bands {
            let [from, to] = [*from, *to].map(|number| across.at(number).clamp(left, right));
            let class = format!("band {}", CLASSES[color % CLASSES.len()]);
            rect(svg, &class, (from, top, to - from, bottom - top), name);
            if to - from > 6.0 * name.len() as f64 {
                svg.label("quiet middle", (from + to) / 2.0, top + 14.0, name);
            }
        }
        for power in across.powers(((right - left) / 40.0) as i32) {
            let x = across.at(2f64.powi(power));
            svg.line("line", (x, top), (x, bottom));
            svg.label("quiet middle", x, bottom + 16.0, &(self.numbers)(1 << power));
        }
        for power in up.powers(8) {
            let y = up.at(10f64.powi(power));
            svg.line("line", (left, y), (right, y));
            svg.label("quiet end", left - 6.0, y + 4.0, &(self.figures)(10f64.powi(power)));
        }
        for (Curve { points, .. }, class) in self.curves.iter().zip(CLASSES.iter().cycle()) {
            let places: Vec<_> =
                points.iter().map(|Point { at: (x, y), said }| (across.at(*x), up.at(*y), said)).collect();
            curve(svg, class, places.iter().map(|&(x, y, _)| (x, y)));
            for (x, y, said) in places {
                let class = format!("dot {class}");
                let place: [Attribute<'_>; 4] =
                    [("class", &class), ("cx", &round(x)), ("cy", &round(y)), ("r", &2.5)];
                svg.element("circle", &place, |svg| svg.element("title", &[], |svg| svg.text(said)));
            }
        }
    }
}

pub fn curve(svg: &mut Svg, class: &str, places: impl Iterator<Item = (f64, f64)>) {
    let path: Vec<String> = places.map(|(x, y)| format!("{},{}", round(x), round(y))).collect();
    let class = format!("curve {class}");
    svg.element("polyline", &[("class", &class), ("points", &path.join(" "))], |_| {});
}

pub fn key(svg: &mut Svg, class: &str, name: &str, (x, y): (f64, f64)) {
    svg.line(&format!("curve {class}"), (x, y), (x + 22.0, y));
    svg.label("quiet", x + 28.0, y + 4.0, name);
}

/// Which number lies where: logarithms between powers of a base.
struct Scale {
    log: fn(f64) -> f64,
    powers: (i32, i32),
    ends: (f64, f64),
}

impl Scale {
    /// With room for all of these positive numbers; one power at least.
    fn of(numbers: impl Iterator<Item = f64>, ends: (f64, f64), log: fn(f64) -> f64) -> Self {
        let (least, most) = numbers.fold((f64::MAX, f64::MIN_POSITIVE), |(least, most), number| {
            (least.min(number.max(f64::MIN_POSITIVE)), most.max(number))
        });
        let (from, to) = (log(least.min(most)).floor() as i32, log(most).ceil() as i32);
        Scale { log, powers: (from, to.max(from + 1)), ends }
    }

    fn at(&self, number: f64) -> f64 {
        let (from, to) = (f64::from(self.powers.0), f64::from(self.powers.1));
        let share = ((self.log)(number.max(f64::MIN_POSITIVE)) - from) / (to - from);
        self.ends.0 + share * (self.ends.1 - self.ends.0)
    }

    /// The powers that are marked: equally far from each other, and at most so many.
    fn powers(&self, most: i32) -> impl Iterator<Item = i32> + use<> {
        let (from, to) = self.powers;
        let step = ((to - from) / most + 1) as usize;
        (from..=to).step_by(step)
    }
}

pub const WIDTH: f64 = 900.0;
pub const LEFT: f64 = 112.0;
pub const RIGHT: f64 = 884.0;
/// Boxes are drawn at least as wide as this.
pub const NARROW: f64 = 0.7;

/// Which time lies where.
pub struct Times {
    begin_ns: u64,
    span_ns: u64,
}

impl Times {
    /// From the first begin to the last end of what began and lasted so many nanoseconds.
    pub fn of(lasting: impl Iterator<Item = (u64, u64)> + Clone) -> Self {
        let begin_ns = lasting.clone().map(|(start_ns, _)| start_ns).min().unwrap_or(0);
        let end_ns = lasting.map(|(start_ns, nanos)| start_ns + nanos).max().unwrap_or(0);
        Times { begin_ns, span_ns: (end_ns - begin_ns).max(1) }
    }

    pub fn x(&self, ns: u64) -> f64 {
        LEFT + ns.saturating_sub(self.begin_ns) as f64 / self.span_ns as f64 * (RIGHT - LEFT)
    }

    /// Distance of marks: 1, 2 or 5 times a power of ten, so that there are between four and ten.
    fn step_ns(&self) -> u64 {
        let power = 10u64.pow((self.span_ns / 4).max(1).ilog10());
        let steps = [5, 2, 1].map(|digit| digit * power);
        steps.into_iter().find(|step| self.span_ns / step >= 4).unwrap_or(power)
    }

    /// Marks of time, behind what lies between top and bottom.
    pub fn axis(&self, svg: &mut Svg, (top, bottom): (f64, f64)) {
        let step = self.step_ns();
        for mark in 0..=self.span_ns / step {
            let x = self.x(self.begin_ns + mark * step);
            svg.line("line", (x, top - 4.0), (x, bottom + 4.0));
            svg.label("quiet middle", x, bottom + 18.0, &mark_text(mark * step, step));
        }
    }
}

fn mark_text(ns: u64, step: u64) -> String {
    if ns == 0 {
        return "0".into();
    }
    let (unit, name) = if step >= 100_000 { (1_000_000, "ms") } else { (1000, "us") };
    let digits = usize::from(!step.is_multiple_of(unit));
    format!("{:.digits$} {name}", ns as f64 / unit as f64)
}

/// A rectangle (x, y, width, height) with a label under the pointer.
pub fn rect(svg: &mut Svg, class: &str, (x, y, width, height): (f64, f64, f64, f64), said: &str) {
    let (x, width) = (round(x), round(width));
    let place: [Attribute<'_>; 5] =
        [("class", &class), ("x", &x), ("y", &y), ("width", &width), ("height", &height)];
    svg.element("rect", &place, |svg| svg.element("title", &[], |svg| svg.text(said)));
}

/// A box at least as wide as can be seen, with a label of its own class inside if that fits.
pub fn span(
    svg: &mut Svg,
    class: &str,
    (x, y, width, height): (f64, f64, f64, f64),
    said: &str,
    (label, text): (&str, &str),
) {
    let width = width.max(NARROW);
    rect(svg, &wide(class, width), (x, y, width, height), said);
    if width > 4.0 + 6.0 * text.len() as f64 && !text.is_empty() {
        svg.label(&format!("{label} middle"), x + width / 2.0, y + height / 2.0 + 3.5, text);
    }
}

/// Wide boxes are set off from adjacent ones.
fn wide(class: &str, width: f64) -> String {
    if width < 4.0 { class.to_owned() } else { format!("wide {class}") }
}

/// Kinds of boxes, by class and in words, side by side.
pub fn legend<'a>(svg: &mut Svg, y: f64, kinds: impl Iterator<Item = (String, &'a str)>) {
    const SIDE: f64 = 11.0;
    let mut x = LEFT;
    for (class, said) in kinds {
        rect(svg, &class, (x, y - 9.0, SIDE, SIDE), said);
        svg.label("quiet", x + 16.0, y, said);
        x += 38.0 + 6.0 * said.len() as f64;
    }
}

#[cfg(test)]
pub mod tests {
    use proptest::prelude::*;

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

    use super::*;
    use crate::svg::tests::elements;

    #[test]
    fn chart_points_lie_between_axes_larger_ones_above_and_right() {
        let given = [(8.0, 0.5), (1e6, 700.0), (4096.0, 3.0)];
        for count in 1..=given.len() {
            let shown = given[..count].iter().map(|&at| Point { at, said: "here".to_owned() });
            let curve = Curve { name: "curve".to_owned(), points: shown.collect() };
            let (numbers, figures) = (&|number: u64| number.to_string(), &|figure: f64| figure.to_string());
            let panel = Panel { curves: vec![curve], ..Panel::new("", numbers, figures) };
            let chart = Chart { title: "title", conditions: vec![], panels: vec![panel], alike: false };
            let tags = elements(&chart.draw());
            let line = tags.iter().find(|tag| tag.starts_with("polyline")).unwrap();
            let at = points(line);
            let between = |&(x, y): &(f64, f64)| {
                (LABELS..=WIDTH - 16.0).contains(&x) && (62.0..=62.0 + HEIGHT).contains(&y)
            };
            assert!(at.len() == count && at.iter().all(between), "{at:?}");
            assert!(count < 2 || at[0].0 < at[1].0 && at[0].1 > at[1].1, "{at:?}");
            assert_eq!(tags.iter().filter(|tag| tag.starts_with("circle")).count(), count);
        }
    }

    #[test]
    fn bands_lie_next_to_each_other_and_within_the_panel() {
        let point = |x: f64| Point { at: (x, x), said: String::new() };
        let curve = Curve { name: "curve".to_owned(), points: vec![point(2.0), point(32.0)] };
        let band = |from, to| Band { from, to, color: 1, name: "band" };
        let (numbers, figures) = (&|number: u64| number.to_string(), &|figure: f64| figure.to_string());
        let bands = vec![band(1.0, 8.0), band(8.0, 45.0)];
        let panel = Panel { curves: vec![curve], bands, ..Panel::new("", numbers, figures) };
        let chart = Chart { title: "title", conditions: vec![], panels: vec![panel], alike: false };
        let tags = elements(&chart.draw());
        let bands: Vec<_> = tags.iter().filter(|tag| tag.contains("band b")).collect();
        let ends: Vec<_> =
            bands.iter().map(|tag| (number(tag, "x"), number(tag, "x") + number(tag, "width"))).collect();
        assert_eq!((ends.len(), ends[0].0, ends[1].1), (2, LABELS, WIDTH - 16.0));
        assert!((ends[0].1 - ends[1].0).abs() < 0.02, "{ends:?}");
    }

    #[test]
    fn keys_of_legend_fit_their_names_and_the_picture() {
        for longest in [1, 6, 21, 36, 90] {
            let names = ["a".to_owned(), "n".repeat(longest)];
            let (keys, wide) = keys(names.iter());
            assert!(wide > 28.0 + 6.0 * longest as f64, "{longest}");
            assert!(keys > 0 && LABELS + keys as f64 * wide <= WIDTH, "{longest}");
        }
    }

    #[test]
    fn marks_are_powers_and_not_too_many() {
        let scale = Scale::of([8.0, 4_194_304.0].into_iter(), (0.0, 190.0), f64::log2);
        assert_eq!(scale.powers(10).collect::<Vec<_>>(), (3..=22).step_by(2).collect::<Vec<_>>());
        assert_eq!((scale.at(8.0), scale.at(4_194_304.0), scale.at(16.0)), (0.0, 190.0, 10.0));
        let one = Scale::of([1000.0].into_iter(), (0.0, 1.0), f64::log10);
        assert_eq!(one.powers, (3, 4));
    }

    proptest! {
        #[test]
        fn there_are_four_to_ten_marks_on_any_axis(span_ns in 40..u64::MAX / 4) {
            let scale = Times { begin_ns: 0, span_ns };
            prop_assert!((4..=10).contains(&(span_ns / scale.step_ns())));
        }
    }

    #[test]
    fn marks_have_as_few_digits_as_tell_them_apart() {
        let cases =
            [(0, 500, "0"), (1500, 500, "1.5 us"), (40_000, 20_000, "40 us"), (2_500_000, 500_000, "2.5 ms")];
        for (ns, step, text) in cases {
            assert_eq!(mark_text(ns, step), text);
        }
        assert_eq!(mark_text(4_000_000, 2_000_000), "4 ms");
    }
}
