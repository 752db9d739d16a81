//! Curves between logarithmic axes: what all pictures of figures by size have in common.

use crate::svg::{self, Svg, round};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_powers_and_not_too_many() {
        let scale = Scale::of([8.0, 4_194_304.0].into_iter(), (0.0, 190.0), f64::log2);
        assert_eq!(scale.powers(10).collect::<Vec<_>>(), (3..=22).step_by(2).collect::<Vec<_>>());
        assert_eq!((scale.at(8.0), scale.at(4_194_304.0), scale.at(16.0)), (0.0, 190.0, 10.0));
        let one = Scale::of([1000.0].into_iter(), (0.0, 1.0), f64::log10);
        assert_eq!(one.powers, (3, 4));
    }
}
