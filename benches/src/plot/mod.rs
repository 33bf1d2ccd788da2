//! Plots of a comparison as SVG.
//!
//! ```text
//! rows -> overview   ratios.svg: how many times as good as its rival each row is
//!      -> medians    medians-UNIT.svg: what both sides reach, one plot for each unit
//!           \-> canvas, scale   pixels and axes
//! ```
//!
//! The text of a plot is text in the SVG, so that no font is needed here, and the background is
//! painted, so that a page in dark mode shows it too.

mod canvas;
mod medians;
mod overview;
mod scale;

use std::path::Path;

use serde::Deserialize;

use crate::arguments::PlotArguments;
use crate::failure::Failure;
use crate::row::Row;

/// What is drawn of a comparison that was kept as JSON.
#[derive(Debug, Deserialize)]
struct Kept {
    machine: String,
    rows: Vec<Row>,
}

/// Draws a comparison that was kept as JSON.
pub(crate) fn run(arguments: &PlotArguments) -> Result<(), Failure> {
    let text =
        std::fs::read_to_string(&arguments.json).map_err(Failure::at("read", &arguments.json))?;
    let kept: Kept = match serde_json::from_str(&text) {
        Ok(kept) => kept,
        Err(error) => {
            let path = arguments.json.display();
            let advice = "expected what `slackwater-bench compare --json FILE` wrote, or that of `containers`";
            return Err(Failure::Unfit(format!("cannot use {path}: {error}; {advice}")));
        }
    };
    draw(&arguments.svg, &kept.rows, &kept.machine)
}

/// Draws all plots of the rows into the directory, which is made if it is missing.
pub(crate) fn draw(directory: &Path, rows: &[Row], machine: &str) -> Result<(), Failure> {
    std::fs::create_dir_all(directory).map_err(Failure::at("create", directory))?;
    overview::draw(&directory.join("ratios.svg"), rows, machine)?;
    for unit in units(rows) {
        let of_unit: Vec<_> =
            rows.iter().filter(|row| row.unit == unit && row.median().is_some()).collect();
        let file = directory.join(format!("medians-{}.svg", file_part(unit)));
        medians::draw(&file, &of_unit, unit, machine)?;
    }
    Ok(())
}

/// The units of what was measured, each once, in the order of the rows.
fn units(rows: &[Row]) -> Vec<&str> {
    let mut units: Vec<&str> = Vec::new();
    for row in rows.iter().filter(|row| row.median().is_some()) {
        if !units.contains(&row.unit.as_str()) {
            units.push(&row.unit);
        }
    }
    units
}

/// A unit as a part of a file's name: `MiB/s` becomes `mib-per-s`.
fn file_part(unit: &str) -> String {
    let words = unit.replace('/', " per ").to_lowercase();
    let words: Vec<_> = words.split(|character: char| !character.is_ascii_alphanumeric()).collect();
    words.into_iter().filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-")
}

/// A number for people: three digits that count, thousands set apart.
pub(crate) fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 999.5 => grouped(&format!("{value:.0}")),
        size if size >= 99.95 => format!("{value:.0}"),
        size if size >= 9.995 => format!("{value:.1}"),
        size if size >= 0.995 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// Whole digits with a comma before every third from the end.
fn grouped(digits: &str) -> String {
    let mut text = String::new();
    for (index, digit) in digits.char_indices() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) && !text.ends_with('-') {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Target;

    fn row(key: &str, unit: &str, samples: &[f64], rival_samples: &[f64]) -> Row {
        Row {
            work: format!("work <{key}> & more"),
            key: key.to_owned(),
            unit: unit.to_owned(),
            higher_is_better: unit != "ms",
            subject: "slackwater".to_owned(),
            rival: (!rival_samples.is_empty()).then(|| "rival".to_owned()),
            samples: samples.to_vec(),
            rival_samples: rival_samples.to_vec(),
            target: Some(Target::RatioAtLeast(2.0)),
            not_run: None,
        }
    }

    fn rows() -> Vec<Row> {
        let mut absent = row("absent", "op/s", &[], &[]);
        absent.not_run = Some("no ganesha".to_owned());
        let mut alone = row("alone", "us", &[10.0, 11.0, 12.0], &[]);
        alone.target = Some(Target::MedianAtMost(12.0));
        vec![
            row("fast", "op/s", &[90e3, 100e3, 110e3], &[40e3, 40e3, 41e3]),
            row("slow", "op/s", &[10e3, 10e3, 11e3], &[40e3, 40e3, 41e3]),
            row("clone", "ms", &[0.08, 0.09], &[1900.0, 1910.0]),
            absent,
            alone,
        ]
    }

    #[test]
    fn every_row_is_in_a_plot_and_nothing_breaks_the_text() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("plots");
        draw(&directory, &rows(), "a machine of 2 cores").unwrap();
        let read = |name: &str| std::fs::read_to_string(directory.join(name)).unwrap();
        let ratios = read("ratios.svg");
        assert!(ratios.contains("&lt;fast&gt; &amp; more"), "{ratios}");
        assert!(ratios.contains("2.50x") && ratios.contains("0.250x"), "{ratios}");
        assert!(ratios.contains("no ganesha") && ratios.contains("a machine of 2 cores"));
        assert!(!ratios.contains("alone"), "a row without a rival has no ratio");
        assert!(read("medians-op-per-s.svg").contains("100,000"));
        assert!(read("medians-us.svg").contains("12.0 us at most"));
        assert!(read("medians-ms.svg").contains("1,905"));
    }

    #[test]
    fn nothing_to_draw_and_strange_numbers_are_drawn() {
        let folder = tempfile::tempdir().unwrap();
        draw(folder.path(), &[], "").unwrap();
        let strange = [
            row("zero", "op/s", &[0.0], &[0.0]),
            row("one zero", "op/s", &[1.0], &[0.0]),
            row("not a number", "op/s", &[f64::NAN], &[1.0]),
        ];
        draw(folder.path(), &strange, "").unwrap();
    }

    #[test]
    fn what_was_kept_is_drawn_and_what_was_not_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let (json, svg) = (folder.path().join("kept.json"), folder.path().join("svg"));
        let kept = serde_json::json!({ "machine": "x, 2 cores", "rows": rows() });
        std::fs::write(&json, kept.to_string()).unwrap();
        let arguments = PlotArguments { json: json.clone(), svg: svg.clone() };
        run(&arguments).unwrap();
        let text = std::fs::read_to_string(svg.join("ratios.svg")).unwrap();
        assert!(text.contains("x, 2 cores"), "{text}");
        std::fs::write(&json, "{}").unwrap();
        let error = run(&arguments).unwrap_err().to_string();
        assert!(error.contains("compare --json"), "{error}");
    }

    #[test]
    fn numbers_are_short() {
        let cases = [
            (0.0123, "0.012"),
            (0.5, "0.500"),
            (2.0, "2.00"),
            (12.34, "12.3"),
            (123.4, "123"),
            (999.7, "1,000"),
            (1_234_567.0, "1,234,567"),
            (-123_456.0, "-123,456"),
        ];
        for (value, text) in cases {
            assert_eq!(short(value), text);
        }
        assert_eq!(file_part("MiB/s"), "mib-per-s");
    }
}
