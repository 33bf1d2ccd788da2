//! The ratios of all rows that have a rival: one bar each, from 1x to the right where it is
//! better and to the left where it is worse, on an axis of factors.

use std::path::Path;

use plotters::prelude::{DrawingAreaErrorKind, RGBColor};

use super::canvas::{
    Axis, BROKEN, Canvas, FAINT, HELD, INK, Look, MARGIN, PLAIN, Side, WIDTH, cut, height_of, page,
    trimmed,
};
use super::scale::Scale;
use super::short;
use crate::failure::Failure;
use crate::row::{Row, Target};

/// Height of a row, which has two lines of text.
const ROW_HEIGHT: u32 = 44;
/// Height of the titles above the rows.
const HEAD: f64 = 76.0;
/// Height of an axis below its rows.
const AXIS_HEIGHT: u32 = 50;
/// Height of titles and legend together.
const HEAD_AND_LEGEND: u32 = 112;
/// Where the axis begins: the texts are to the left of it.
const AXIS_LEFT: f64 = 530.0;
/// Width that the verdicts take, to the right of the axis.
const VERDICT_WIDTH: f64 = 150.0;
/// Half the height of a bar.
const BAR_HALF: f64 = 9.0;
/// Characters of a label, and of a reason in the place of a bar, that surely fit.
const LABEL_CHARACTERS_MAX: usize = 68;
const REASON_CHARACTERS_MAX: usize = 50;

/// Rows with ratios above this have an axis of their own: on it the others would be dots.
const NEAR_RATIO_MAX: f64 = 30.0;

type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// Draws the plot.
pub(super) fn draw(path: &Path, rows: &[Row], machine: &str) -> Result<(), Failure> {
    let shown = rows.iter().filter(|row| is_shown(row));
    let (near, far): (Vec<_>, Vec<_>) =
        shown.partition(|row| values(row).into_iter().all(|value| value <= NEAR_RATIO_MAX));
    let sections: Vec<_> = [near, far].into_iter().filter(|rows| !rows.is_empty()).collect();
    let rows: usize = sections.iter().map(Vec::len).sum();
    let axes = height_of(sections.len(), AXIS_HEIGHT, HEAD_AND_LEGEND);
    let height = height_of(rows, ROW_HEIGHT, axes);
    page(path, height, |canvas| {
        canvas.title("How many times as good as its rival", machine)?;
        let mut top = HEAD;
        for section in &sections {
            top = draw_section(canvas, section, top)? + f64::from(AXIS_HEIGHT);
        }
        legend(canvas, f64::from(height) - 24.0)
    })
}

/// Draws rows that share an axis; answers where they end.
fn draw_section(
    canvas: &Canvas<'_>,
    rows: &[&Row],
    top: f64,
) -> Result<f64, DrawingAreaErrorKind<std::io::Error>> {
    let row_height = f64::from(ROW_HEIGHT);
    let bottom = rows.iter().fold(top, |bottom, _| bottom + row_height);
    let axis = Axis {
        scale: Scale::logarithmic(rows.iter().flat_map(|row| values(row)).chain([0.5, 2.0])),
        left: AXIS_LEFT,
        right: f64::from(WIDTH) - MARGIN - VERDICT_WIDTH,
        top: top - 6.0,
        bottom,
    };
    axis.draw(canvas, "x")?;
    let mut middle = top + row_height / 2.0;
    for row in rows {
        draw_row(canvas, &axis, row, middle)?;
        middle += row_height;
    }
    let one = axis.x(1.0);
    canvas.line((one, axis.top), (one, axis.bottom), INK, 1)?;
    Ok(bottom)
}

/// A row without a rival has no ratio; one that was not run is shown as that.
fn is_shown(row: &Row) -> bool {
    row.ratio().is_some() || row.not_run.is_some()
}

/// The values that the axis must show.
fn values(row: &Row) -> Vec<f64> {
    let spread = row.spread().map(|(least, greatest)| [least, greatest]);
    let mut values: Vec<f64> = spread.into_iter().flatten().chain(row.ratio()).collect();
    values.extend(target(row));
    values
}

fn target(row: &Row) -> Option<f64> {
    match row.target {
        Some(Target::RatioAtLeast(least)) => Some(least),
        _ => None,
    }
}

fn color(row: &Row) -> RGBColor {
    match (row.held(), row.target) {
        (false, _) => BROKEN,
        (true, Some(_)) => HELD,
        (true, None) => PLAIN,
    }
}

fn draw_row(canvas: &Canvas<'_>, axis: &Axis, row: &Row, middle: f64) -> Drawn {
    let label = Look::new(13.0, INK).on(Side::Left);
    let work = cut(&row.work, LABEL_CHARACTERS_MAX);
    canvas.text((AXIS_LEFT - 16.0, middle - 8.0), &work, label)?;
    let rival = row.rival.as_deref().unwrap_or("no rival");
    let against = format!("{} against {rival}", row.subject);
    let look = Look::new(12.0, FAINT).on(Side::Left);
    canvas.text((AXIS_LEFT - 16.0, middle + 9.0), &against, look)?;
    let right = axis.right + 14.0;
    let color = color(row);
    let Some(ratio) = row.ratio().filter(|_| row.not_run.is_none()) else {
        let reason = row.not_run.as_deref().unwrap_or("nothing was measured");
        let reason = cut(reason, REASON_CHARACTERS_MAX);
        canvas.text((axis.x(1.0) + 8.0, middle), &reason, Look::new(12.0, FAINT))?;
        return canvas.text((right, middle), "not run", Look::new(14.0, color).bold());
    };
    let (one, end) = (axis.x(1.0), axis.x(ratio));
    canvas.rectangle(
        (one.min(end), middle - BAR_HALF),
        (one.max(end), middle + BAR_HALF),
        color,
    )?;
    if let Some((least, greatest)) = row.spread() {
        canvas.whisker(axis.x(least), axis.x(greatest), middle)?;
    }
    let verdict = Look::new(15.0, color).bold();
    let Some(target) = target(row) else {
        return canvas.text((right, middle), &times(ratio), verdict);
    };
    let x = axis.x(target);
    canvas.rectangle(
        (x - 1.5, middle - BAR_HALF - 5.0),
        (x + 1.5, middle + BAR_HALF + 5.0),
        INK,
    )?;
    canvas.text((right, middle - 8.0), &times(ratio), verdict)?;
    let promise = format!("promised: {}x", trimmed(&short(target)));
    canvas.text((right, middle + 9.0), &promise, Look::new(12.0, FAINT))
}

fn times(ratio: f64) -> String {
    format!("{}x", short(ratio))
}

fn legend(canvas: &Canvas<'_>, y: f64) -> Drawn {
    let look = Look::new(12.0, FAINT);
    let mut x = MARGIN;
    let entries = [(HELD, "promise held", 110.0), (BROKEN, "promise broken", 124.0)];
    for (color, text, width) in entries.into_iter().chain([(PLAIN, "nothing promised", 136.0)]) {
        canvas.rectangle((x, y - 6.0), (x + 12.0, y + 6.0), color)?;
        canvas.text((x + 18.0, y), text, look)?;
        x += width;
    }
    canvas.rectangle((x + 4.0, y - 8.0), (x + 7.0, y + 8.0), INK)?;
    canvas.text((x + 18.0, y), "what was promised", look)?;
    x += 146.0;
    canvas.whisker(x, x + 24.0, y)?;
    canvas.text((x + 32.0, y), "least and greatest of the rounds; right of 1x is better", look)
}
