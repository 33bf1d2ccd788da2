//! A line through measured points.

/// The slope of the line with the least squares: how much `y` grows with one of `x`. `None`
/// for fewer than two different `x`.
pub(crate) fn slope(points: &[(f64, f64)]) -> Option<f64> {
    let count: f64 = points.iter().map(|_| 1.0).sum();
    let mean_x = points.iter().map(|(x, _)| x).sum::<f64>() / count;
    let mean_y = points.iter().map(|(_, y)| y).sum::<f64>() / count;
    let spread: f64 = points.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
    let together: f64 = points.iter().map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    (spread > 0.0).then(|| together / spread)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slope_of_a_line_is_found_and_noise_does_not_move_it() {
        let close = |points: &[(f64, f64)], expected: f64| {
            slope(points).is_some_and(|slope| (slope - expected).abs() < 1e-9)
        };
        assert!(close(&[(1.0, 12.0), (2.0, 14.0), (3.0, 16.0)], 2.0));
        assert!(close(&[(1.0, 5.0), (2.0, 5.0)], 0.0));
        assert!(close(&[(1.0, 11.0), (2.0, 9.0), (3.0, 9.0), (4.0, 11.0)], 0.0));
    }

    #[test]
    fn one_point_has_no_slope() {
        assert_eq!(slope(&[]), None);
        assert_eq!(slope(&[(1.0, 1.0), (1.0, 2.0)]), None);
    }
}
