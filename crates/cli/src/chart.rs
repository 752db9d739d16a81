//! Curves between logarithmic axes: what all pictures of figures by size have in common.

use crate::svg::{self, Attribute, Svg, round};

/// A line of a picture.
pub struct Curve {
    pub name: String,
    /// Its rule in the style of the picture.
    pub class: &'static str,
    pub points: Vec<Point>,
}

/// A figure, and what is said to whoever points at it.
pub struct Point {
    pub at: (f64, f64),
    pub said: String,
}

impl Curve {
    pub fn draw(&self, svg: &mut Svg, across: &Scale, up: &Scale) {
        let places: Vec<(f64, f64)> =
            self.points.iter().map(|point| (across.at(point.at.0), up.at(point.at.1))).collect();
        let path: Vec<String> = places.iter().map(|(x, y)| format!("{},{}", round(*x), round(*y))).collect();
        let class = format!("curve {}", self.class);
        svg.element("polyline", &[("class", &class), ("points", &path.join(" "))], |_| {});
        for ((x, y), point) in places.into_iter().zip(&self.points) {
            let class = format!("dot {}", self.class);
            let place: [svg::Attribute<'_>; 4] =
                [("class", &class), ("cx", &round(x)), ("cy", &round(y)), ("r", &2.5)];
            svg.element("circle", &place, |svg| svg.element("title", &[], |svg| svg.text(&point.said)));
        }
    }
}

/// Which number lies where: logarithms between powers of a base.
pub struct Scale {
    log: fn(f64) -> f64,
    /// The powers at the ends.
    powers: (i32, i32),
    ends: (f64, f64),
}

impl Scale {
    /// With room for all of these positive numbers; one power at least.
    pub fn of(numbers: impl Iterator<Item = f64>, ends: (f64, f64), log: fn(f64) -> f64) -> Self {
        let (least, most) = numbers.fold((f64::MAX, f64::MIN_POSITIVE), |(least, most), number| {
            (least.min(number.max(f64::MIN_POSITIVE)), most.max(number))
        });
        let (from, to) = (log(least.min(most)).floor() as i32, log(most).ceil() as i32);
        Scale { log, powers: (from, to.max(from + 1)), ends }
    }

    pub fn at(&self, number: f64) -> f64 {
        let (from, to) = (f64::from(self.powers.0), f64::from(self.powers.1));
        let share = ((self.log)(number.max(f64::MIN_POSITIVE)) - from) / (to - from);
        self.ends.0 + share * (self.ends.1 - self.ends.0)
    }

    /// The powers that are marked: equally far from each other, and at most so many.
    pub fn powers(&self, most: i32) -> impl Iterator<Item = i32> + use<> {
        let (from, to) = self.powers;
        let step = ((to - from) / most + 1) as usize;
        (from..=to).step_by(step)
    }
}

pub const WIDTH: f64 = 900.0;
/// Where time begins and ends.
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

/// As few digits as tell marks apart.
fn mark_text(ns: u64, step: u64) -> String {
    if ns == 0 {
        return "0".into();
    }
    let (unit, name) = if step >= 100_000 { (1_000_000, "ms") } else { (1000, "us") };
    let digits = usize::from(!step.is_multiple_of(unit));
    format!("{:.digits$} {name}", ns as f64 / unit as f64)
}

/// A rectangle (x, y, width, height) that says what it is when the mouse is over it.
pub fn rect(svg: &mut Svg, class: &str, (x, y, width, height): (f64, f64, f64, f64), said: &str) {
    let (x, width) = (round(x), round(width));
    let place: [Attribute<'_>; 5] =
        [("class", &class), ("x", &x), ("y", &y), ("width", &width), ("height", &height)];
    svg.element("rect", &place, |svg| svg.element("title", &[], |svg| svg.text(said)));
}

/// Kinds of boxes, by class and in words, beside each other.
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
mod tests {
    use proptest::prelude::*;

    use super::*;

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
