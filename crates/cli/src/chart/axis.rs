//! Axes: which number lies where, and the numbers that are marked.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    Linear,
    /// Marks are powers of 2.
    Log2,
    /// Marks are powers of 10.
    Log10,
}

impl Scale {
    fn of(self, number: f64) -> f64 {
        match self {
            Scale::Linear => number,
            Scale::Log2 => number.max(f64::MIN_POSITIVE).log2(),
            Scale::Log10 => number.max(f64::MIN_POSITIVE).log10(),
        }
    }

    /// The number behind one of this scale.
    fn number(self, scaled: f64) -> f64 {
        match self {
            Scale::Linear => scaled,
            Scale::Log2 => scaled.exp2(),
            Scale::Log10 => 10f64.powf(scaled),
        }
    }
}

/// An axis between two places of the picture.
pub struct Axis {
    scale: Scale,
    /// First and last number, scaled.
    range: (f64, f64),
    places: (f64, f64),
}

impl Axis {
    /// With room for all of these numbers: from the least to the most, or between whole powers, and
    /// one power at least.
    pub fn new(scale: Scale, numbers: impl Iterator<Item = f64>, places: (f64, f64)) -> Self {
        let (from, to) = numbers
            .map(|number| scale.of(number))
            .fold((f64::MAX, f64::MIN), |(least, most), number| (least.min(number), most.max(number)));
        let range = match scale {
            _ if from > to => (0.0, 1.0),
            Scale::Linear if from == to => (from, from + 1.0),
            Scale::Linear => (from, to),
            Scale::Log2 | Scale::Log10 => (from.floor(), to.ceil().max(from.floor() + 1.0)),
        };
        Axis { scale, range, places }
    }

    /// The same, but a linear axis begins at 0 and ends at a mark.
    pub fn upward(scale: Scale, numbers: impl Iterator<Item = f64>, places: (f64, f64)) -> Self {
        if scale != Scale::Linear {
            return Axis::new(scale, numbers, places);
        }
        let axis = Axis::new(scale, numbers.chain([0.0]), places);
        let step = axis.step();
        Axis { range: (0.0, (axis.range.1 / step - 1e-9).ceil() * step), ..axis }
    }

    pub fn at(&self, number: f64) -> f64 {
        let ((from, to), (first, last)) = (self.range, self.places);
        first + (self.scale.of(number) - from) / (to - from) * (last - first)
    }

    /// Distance of linear marks: 1, 2 or 5 times a power of ten, so that there are four to ten.
    pub fn step(&self) -> f64 {
        let span = self.range.1 - self.range.0;
        let power = 10f64.powf((span / 4.0).log10().floor());
        // The last one, where the logarithm was rounded up.
        let steps = [5.0, 2.0, 1.0, 0.5].map(|digit| digit * power);
        steps.into_iter().find(|step| span / step >= 4.0).unwrap_or(power)
    }

    /// Numbers that are marked, equally far from each other: of powers at most so many.
    pub fn marks(&self, most: usize) -> impl Iterator<Item = f64> + use<> {
        let ((from, to), scale) = (self.range, self.scale);
        let step = match scale {
            Scale::Linear => self.step(),
            Scale::Log2 | Scale::Log10 => ((to - from) / most as f64).floor() + 1.0,
        };
        let first = if scale == Scale::Linear { (from / step - 1e-9).ceil() * step } else { from };
        let count = ((to - first) / step + 1e-9).floor() as u32;
        (0..=count).map(move |nth| scale.number(first + f64::from(nth) * step))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn marks_are_powers_and_not_too_many() {
        let axis = Axis::new(Scale::Log2, [8.0, 4_194_304.0].into_iter(), (0.0, 190.0));
        let powers: Vec<f64> = (3..=22).step_by(2).map(|power| 2f64.powi(power)).collect();
        assert_eq!(axis.marks(10).collect::<Vec<_>>(), powers);
        assert_eq!((axis.at(8.0), axis.at(4_194_304.0), axis.at(16.0)), (0.0, 190.0, 10.0));
        let one = Axis::new(Scale::Log10, [1000.0].into_iter(), (0.0, 1.0));
        assert_eq!(one.range, (3.0, 4.0));
    }

    #[test]
    fn linear_axes_end_at_their_numbers_and_upward_ones_at_marks() {
        let factors = || [0.25, 4.0].into_iter();
        let across = Axis::new(Scale::Linear, factors(), (70.0, 700.0));
        assert_eq!((across.at(0.25), across.at(4.0)), (70.0, 700.0));
        assert_eq!(across.marks(0).collect::<Vec<_>>(), [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]);
        let up = Axis::upward(Scale::Linear, [0.43, 0.1].into_iter(), (100.0, 0.0));
        assert_eq!((up.range.0, (up.range.1 * 100.0).round()), (0.0, 50.0));
        assert_eq!(up.marks(0).count(), 6);
    }

    #[test]
    fn axes_without_numbers_or_with_one_have_a_length() {
        for numbers in [&[][..], &[3.0], &[0.0]] {
            for scale in [Scale::Linear, Scale::Log2, Scale::Log10] {
                for axis in [
                    Axis::new(scale, numbers.iter().copied(), (0.0, 1.0)),
                    Axis::upward(scale, numbers.iter().copied(), (0.0, 1.0)),
                ] {
                    assert!(
                        axis.range.0 < axis.range.1 && axis.marks(8).count() > 1,
                        "{scale:?} {numbers:?}"
                    );
                }
            }
        }
    }

    proptest! {
        #[test]
        fn there_are_four_to_ten_marks_on_any_linear_axis(span in 40..u64::MAX / 4) {
            let axis = Axis::new(Scale::Linear, [0.0, span as f64].into_iter(), (0.0, 1.0));
            prop_assert!((4..=11).contains(&axis.marks(0).count()), "{}", axis.marks(0).count());
        }
    }
}
