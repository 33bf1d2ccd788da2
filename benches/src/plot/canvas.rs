//! A page that is drawn on in pixels, from the top left corner.

use std::path::Path;

use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::{
    Cartesian2d, Color, DrawingArea, DrawingAreaErrorKind, IntoDrawingArea, IntoFont, PathElement,
    RGBColor, Rectangle, SVGBackend, Text,
};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{FontStyle, TextStyle, WHITE};

use super::scale::Scale;
use super::short;
use crate::failure::Failure;

/// What is written in the foreground.
pub(super) const INK: RGBColor = RGBColor(0x1f, 0x29, 0x33);
/// What explains.
pub(super) const FAINT: RGBColor = RGBColor(0x6b, 0x77, 0x85);
/// Lines that guide the eye.
pub(super) const GRID: RGBColor = RGBColor(0xe3, 0xe7, 0xeb);
/// What was promised and held.
pub(super) const HELD: RGBColor = RGBColor(0x1b, 0x7f, 0x79);
/// What was promised and broken. Told from the other also by those who see no red.
pub(super) const BROKEN: RGBColor = RGBColor(0xd9, 0x5f, 0x02);
/// What nothing was promised of.
pub(super) const PLAIN: RGBColor = RGBColor(0x6f, 0x8f, 0xb3);
/// What rivals reach.
pub(super) const RIVAL: RGBColor = RGBColor(0xb4, 0xbd, 0xc7);

/// Width of every plot in pixels: that of a page of text.
pub(super) const WIDTH: u32 = 1100;

/// The middle of a title, and of what stands below it.
const TITLE_Y: f64 = 26.0;
const SUBTITLE_Y: f64 = 50.0;

/// A point in pixels.
pub(super) type Point = (f64, f64);

/// The library counts a font's size in another measure than an SVG does: this times as large.
const FONT_SCALE: f64 = 1.24;

/// On which side of its point a text stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Middle,
    Right,
}

/// How a text looks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    pub(super) size: f64,
    pub(super) color: RGBColor,
    pub(super) side: Side,
    pub(super) is_bold: bool,
}

impl Look {
    /// An ordinary text to the right of its point.
    pub(super) const fn new(size: f64, color: RGBColor) -> Self {
        Self { size, color, side: Side::Right, is_bold: false }
    }

    pub(super) const fn on(self, side: Side) -> Self {
        Self { side, ..self }
    }

    pub(super) const fn bold(self) -> Self {
        Self { is_bold: true, ..self }
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// Why something could not be drawn.
type Error = DrawingAreaErrorKind<std::io::Error>;

/// The page.
pub(super) struct Canvas<'a> {
    area: Area<'a>,
}

impl<'a> Canvas<'a> {
    fn new(svg: &'a mut String, height: u32) -> Result<Self, Error> {
        let root: DrawingArea<SVGBackend<'a>, Shift> =
            SVGBackend::with_string(svg, (WIDTH, height)).into_drawing_area();
        root.fill(&WHITE)?;
        let pixels = root.get_pixel_range();
        let (width, height) = (f64::from(WIDTH), f64::from(height));
        let coordinates = Cartesian2d::new(0.0..width, 0.0..height, pixels);
        Ok(Self { area: root.apply_coord_spec(coordinates) })
    }

    pub(super) fn rectangle(&self, from: Point, to: Point, color: RGBColor) -> Result<(), Error> {
        self.area.draw(&Rectangle::new([from, to], color.filled()))
    }

    pub(super) fn line(
        &self,
        from: Point,
        to: Point,
        color: RGBColor,
        width: u32,
    ) -> Result<(), Error> {
        self.area.draw(&PathElement::new([from, to], color.stroke_width(width)))
    }

    /// A text whose middle is at the height of the point.
    pub(super) fn text(&self, at: Point, text: &str, look: Look) -> Result<(), Error> {
        let side = match look.side {
            Side::Left => HPos::Right,
            Side::Middle => HPos::Center,
            Side::Right => HPos::Left,
        };
        let font = ("Helvetica, Arial, sans-serif", look.size * FONT_SCALE).into_font();
        let font = if look.is_bold { font.style(FontStyle::Bold) } else { font };
        let style = TextStyle::from(font).color(&look.color).pos(Pos::new(side, VPos::Center));
        self.area.draw(&Text::new(text.to_owned(), at, style))
    }

    pub(super) fn title(&self, title: &str, subtitle: &str) -> Result<(), Error> {
        self.text((MARGIN, TITLE_Y), title, Look::new(20.0, INK).bold())?;
        self.text((MARGIN, SUBTITLE_Y), subtitle, Look::new(13.0, FAINT))
    }

    /// The range of values from the least to the greatest of the samples, at a height.
    pub(super) fn whisker(&self, from: f64, to: f64, y: f64) -> Result<(), Error> {
        self.line((from, y), (to, y), INK, 1)?;
        for x in [from, to] {
            self.line((x, y - WHISKER_END), (x, y + WHISKER_END), INK, 1)?;
        }
        Ok(())
    }
}

/// Space at the left and at the right.
pub(super) const MARGIN: f64 = 24.0;

/// Half the height of the end of a whisker.
const WHISKER_END: f64 = 3.0;

/// A horizontal axis on the page: its scale, and where it begins and ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    pub(super) scale: Scale,
    pub(super) left: f64,
    pub(super) right: f64,
    pub(super) top: f64,
    pub(super) bottom: f64,
}

impl Axis {
    /// Where the value is on the page.
    pub(super) fn x(&self, value: f64) -> f64 {
        self.left + self.scale.place(value) * (self.right - self.left)
    }

    /// The marked values, each a line and below it the value with its unit.
    pub(super) fn draw(&self, canvas: &Canvas<'_>, unit: &str) -> Result<(), Error> {
        for mark in self.scale.marks() {
            let x = self.x(mark);
            canvas.line((x, self.top), (x, self.bottom), GRID, 1)?;
            let text = format!("{}{unit}", trimmed(&short(mark)));
            let look = Look::new(12.0, FAINT).on(Side::Middle);
            canvas.text((x, self.bottom + 14.0), &text, look)?;
        }
        Ok(())
    }
}

/// A text cut to about as many characters as fit.
pub(super) fn cut(text: &str, characters_max: usize) -> String {
    if text.chars().count() <= characters_max {
        return text.to_owned();
    }
    let kept: String = text.chars().take(characters_max.saturating_sub(3)).collect();
    format!("{}...", kept.trim_end())
}

/// A number without zeros at the end of its fraction.
pub(super) fn trimmed(number: &str) -> &str {
    if number.contains('.') { number.trim_end_matches('0').trim_end_matches('.') } else { number }
}

/// Makes a file of what `paint` draws on a page of that height.
pub(super) fn page(
    path: &Path,
    height: u32,
    paint: impl FnOnce(&Canvas<'_>) -> Result<(), Error>,
) -> Result<(), Failure> {
    let mut svg = String::new();
    let painted = Canvas::new(&mut svg, height).and_then(|canvas| {
        paint(&canvas)?;
        canvas.area.present()
    });
    painted.map_err(|source| Failure::Drawing { path: path.to_owned(), source })?;
    std::fs::write(path, svg).map_err(Failure::at("write", path))
}

/// The height of a page with this many lines of `line` pixels below a head and above a foot.
pub(super) fn height_of(lines: usize, line: u32, head_and_foot: u32) -> u32 {
    // Nobody reads a plot of as many rows as would not fit.
    let lines = u32::try_from(lines).unwrap_or(u32::MAX).min(LINES_MAX);
    head_and_foot + lines * line
}

/// Most lines of a plot.
const LINES_MAX: u32 = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_that_count_stay() {
        assert_eq!(trimmed("1.00"), "1");
        assert_eq!(trimmed("0.500"), "0.5");
        assert_eq!(trimmed("100"), "100");
        assert_eq!(trimmed("1,000"), "1,000");
    }

    #[test]
    fn what_does_not_fit_is_cut() {
        assert_eq!(cut("12345678", 8), "12345678");
        assert_eq!(cut("12345 789", 9), "12345 789");
        assert_eq!(cut("12345 7890", 9), "12345...");
    }
}
