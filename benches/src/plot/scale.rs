//! Axes: where a value stands between the two ends, and which values are marked.

/// How values are laid along an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scale {
    least: f64,
    greatest: f64,
    is_logarithmic: bool,
}

/// Marks of an axis between whose ends there are this many decades: each decade alone.
const DECADES_ALONE: f64 = 3.5;

/// Marks of a linear axis, about.
const LINEAR_MARKS: f64 = 5.0;

impl Scale {
    /// An axis of factors that shows all values that are above zero, with room at both ends.
    pub(super) fn logarithmic(values: impl Iterator<Item = f64>) -> Self {
        let (least, greatest) = ends(values.filter(|value| *value > 0.0)).unwrap_or((1.0, 1.0));
        Self { least: least / 1.4, greatest: greatest * 1.4, is_logarithmic: true }
    }

    /// An axis that begins at zero and shows all values.
    pub(super) fn linear(values: impl Iterator<Item = f64>) -> Self {
        let (_, greatest) = ends(values).unwrap_or((0.0, 1.0));
        let greatest = if greatest > 0.0 { greatest * 1.05 } else { 1.0 };
        Self { least: 0.0, greatest, is_logarithmic: false }
    }

    /// Where on the axis the value is, from 0 to 1; one beyond the ends is at the end.
    pub(super) fn place(self, value: f64) -> f64 {
        let part = if self.is_logarithmic {
            (value / self.least).ln() / (self.greatest / self.least).ln()
        } else {
            (value - self.least) / (self.greatest - self.least)
        };
        if part.is_nan() { 0.0 } else { part.clamp(0.0, 1.0) }
    }

    /// The values to mark.
    pub(super) fn marks(self) -> Vec<f64> {
        let (mut step, factors): (f64, &[f64]) = if self.is_logarithmic {
            let decades = (self.greatest / self.least).log10();
            let factors: &[f64] = if decades > DECADES_ALONE { &[1.0] } else { &[1.0, 2.0, 5.0] };
            (10_f64.powf(self.least.log10().floor()), factors)
        } else {
            return self.linear_marks();
        };
        let mut marks = Vec::new();
        while step <= self.greatest {
            marks.extend(factors.iter().map(|factor| factor * step));
            step *= 10.0;
        }
        marks.retain(|mark| (self.least..=self.greatest).contains(mark));
        marks
    }

    fn linear_marks(self) -> Vec<f64> {
        let rough = self.greatest / LINEAR_MARKS;
        let decade = 10_f64.powf(rough.log10().floor());
        let factors = [1.0, 2.0, 5.0, 10.0];
        let factor = factors.into_iter().find(|factor| factor * decade >= rough).unwrap_or(10.0);
        let step = factor * decade;
        let marks = std::iter::successors(Some(0.0), |mark| Some(mark + step));
        marks.take_while(|mark| *mark <= self.greatest).collect()
    }
}

/// The least and the greatest of the values that are numbers.
fn ends(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.filter(|value| value.is_finite()).fold(None, |ends, value| {
        let (least, greatest) = ends.unwrap_or((value, value));
        Some((f64::min(least, value), f64::max(greatest, value)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_have_the_same_length_everywhere() {
        let scale = Scale::logarithmic([0.1, 1000.0].into_iter());
        let length = |from, to| scale.place(to) - scale.place(from);
        assert!((length(1.0, 2.0) - length(100.0, 200.0)).abs() < 1e-9);
        assert_eq!(scale.marks(), [0.1, 1.0, 10.0, 100.0, 1000.0]);
    }

    #[test]
    fn few_decades_are_marked_within() {
        let scale = Scale::logarithmic([0.5, 4.0].into_iter());
        assert_eq!(scale.marks(), [0.5, 1.0, 2.0, 5.0]);
    }

    #[test]
    fn lengths_begin_at_zero() {
        let scale = Scale::linear([30.0, 90.0].into_iter());
        assert!(scale.place(0.0).abs() < 1e-9 && scale.place(90.0) < 1.0);
        assert_eq!(scale.marks(), [0.0, 20.0, 40.0, 60.0, 80.0]);
    }

    #[test]
    fn no_value_leaves_the_axis() {
        for scale in [Scale::logarithmic([].into_iter()), Scale::linear([0.0].into_iter())] {
            for value in [0.0, f64::NAN, f64::INFINITY, -1.0, 1e300] {
                assert!((0.0..=1.0).contains(&scale.place(value)), "{value}");
            }
            assert!(scale.marks().len() < 100);
        }
    }
}
