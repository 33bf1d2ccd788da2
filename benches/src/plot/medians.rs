//! What both sides reach in one unit: a bar for the median of each, and over it the range of
//! the samples.

use std::path::Path;

use plotters::prelude::{DrawingAreaErrorKind, RGBColor};

use super::canvas::{
    Axis, BROKEN, Canvas, FAINT, HELD, INK, Look, MARGIN, PLAIN, RIVAL, Side, WIDTH, cut,
    height_of, page,
};
use super::scale::Scale;
use super::short;
use crate::failure::Failure;
use crate::row::{Row, Target};

/// Height of a row: a title and two bars.
const ROW_HEIGHT: u32 = 74;
/// Height of the titles above the rows.
const HEAD: f64 = 72.0;
/// Height of titles and axis together.
const HEAD_AND_FOOT: u32 = 124;
/// Where the axis begins: the names of the sides are to the left of it.
const AXIS_LEFT: f64 = 250.0;
/// Width that the values take, to the right of the axis.
const VALUE_WIDTH: f64 = 90.0;
/// Half the height of a bar.
const BAR_HALF: f64 = 8.0;

/// Characters of a row's title that surely fit, with what was promised behind them.
const TITLE_CHARACTERS_MAX: usize = 90;

/// Where the medians differ by more than this, the short bars of a linear axis could not be
/// seen, and the axis is one of factors.
const LINEAR_FACTOR_MAX: f64 = 25.0;

type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// One bar.
struct Bar<'a> {
    name: &'a str,
    samples: &'a [f64],
    median: f64,
    color: RGBColor,
}

/// Draws the plot of rows of one unit.
pub(super) fn draw(path: &Path, rows: &[&Row], unit: &str, machine: &str) -> Result<(), Failure> {
    let height = height_of(rows.len(), ROW_HEIGHT, HEAD_AND_FOOT);
    let axis = Axis {
        scale: scale(rows),
        left: AXIS_LEFT,
        right: f64::from(WIDTH) - MARGIN - VALUE_WIDTH,
        top: HEAD,
        bottom: f64::from(height) - 48.0,
    };
    page(path, height, |canvas| {
        canvas.title(&format!("Medians in {unit}{}", direction(rows)), machine)?;
        axis.draw(canvas, "")?;
        let mut top = HEAD;
        for row in rows {
            draw_row(canvas, &axis, row, top)?;
            top += f64::from(ROW_HEIGHT);
        }
        let note = "Line over a bar: least and greatest sample";
        canvas.text((MARGIN, f64::from(height) - 16.0), note, Look::new(12.0, FAINT))
    })
}

/// Which bars are better, where that is the same for all.
fn direction(rows: &[&Row]) -> &'static str {
    let higher = rows.iter().filter(|row| row.higher_is_better).count();
    match higher {
        0 => ": shorter is better",
        all if all == rows.len() => ": longer is better",
        _ => "",
    }
}

fn scale(rows: &[&Row]) -> Scale {
    let medians = || rows.iter().flat_map(|row| row.median().into_iter().chain(row.rival_median()));
    let samples = rows.iter().flat_map(|row| row.samples.iter().chain(&row.rival_samples)).copied();
    let all = samples.chain(rows.iter().filter_map(|row| target(row)));
    let (least, greatest) =
        (medians().fold(f64::INFINITY, f64::min), medians().fold(0.0, f64::max));
    if least > 0.0 && greatest / least > LINEAR_FACTOR_MAX {
        Scale::logarithmic(all)
    } else {
        Scale::linear(all)
    }
}

fn target(row: &Row) -> Option<f64> {
    match row.target {
        Some(Target::MedianAtMost(limit) | Target::MedianAtLeast(limit)) => Some(limit),
        _ => None,
    }
}

fn draw_row(canvas: &Canvas<'_>, axis: &Axis, row: &Row, top: f64) -> Drawn {
    canvas.text((MARGIN, top + 14.0), &title(row), Look::new(14.0, INK).bold())?;
    let color = match (row.held(), row.target) {
        (false, _) => BROKEN,
        (true, Some(_)) => HELD,
        (true, None) => PLAIN,
    };
    let subject =
        row.median().map(|median| Bar { name: &row.subject, samples: &row.samples, median, color });
    let rival = row.rival_median().map(|median| Bar {
        name: row.rival.as_deref().unwrap_or("rival"),
        samples: &row.rival_samples,
        median,
        color: RIVAL,
    });
    let mut middle = top + 36.0;
    for side in subject.into_iter().chain(rival) {
        draw_side(canvas, axis, &side, middle)?;
        middle += 2.0 * BAR_HALF + 4.0;
    }
    if let Some(target) = target(row) {
        let x = axis.x(target);
        canvas.rectangle((x - 1.5, top + 23.0), (x + 1.5, top + 49.0), INK)?;
    }
    Ok(())
}

/// The work, and what was promised of the median.
fn title(row: &Row) -> String {
    let (work, unit) = (cut(&row.work, TITLE_CHARACTERS_MAX), &row.unit);
    match row.target {
        Some(Target::MedianAtMost(most)) => format!("{work} ({} {unit} at most)", short(most)),
        Some(Target::MedianAtLeast(least)) => format!("{work} ({} {unit} at least)", short(least)),
        _ => work,
    }
}

fn draw_side(canvas: &Canvas<'_>, axis: &Axis, side: &Bar<'_>, middle: f64) -> Drawn {
    let look = Look::new(13.0, FAINT).on(Side::Left);
    canvas.text((AXIS_LEFT - 12.0, middle), side.name, look)?;
    let end = axis.x(side.median);
    canvas.rectangle((axis.left, middle - BAR_HALF), (end, middle + BAR_HALF), side.color)?;
    let least = side.samples.iter().copied().fold(f64::INFINITY, f64::min);
    let greatest = side.samples.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    canvas.whisker(axis.x(least), axis.x(greatest), middle)?;
    let value = Look::new(13.0, INK);
    canvas.text((axis.right + 12.0, middle), &short(side.median), value)
}
