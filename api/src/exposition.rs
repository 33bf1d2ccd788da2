//! Pages of metrics in the format that the client asks for.
//!
//! ```text
//! OpenMetrics 1.0 --Accept names it--> as it is
//!                 --otherwise--------> Prometheus' text format 0.0.4: what `curl | promtool check metrics` reads
//! ```
//! Prometheus itself asks for both, with weights. In the older format a counter's family has the name of its sample, and
//! there are no units, no types `info`, `stateset` and `unknown`, and no mark of the end.

/// OpenMetrics 1.0.
pub const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Prometheus' text format.
pub const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The media type and the page for a request with this `Accept`, from a page in OpenMetrics' format.
#[must_use]
pub fn answer(openmetrics: String, accept: Option<&str>) -> (&'static str, String) {
    if accept.is_some_and(prefers_openmetrics) {
        return (OPENMETRICS, openmetrics);
    }
    (TEXT, text(&openmetrics))
}

/// Whether OpenMetrics is named, with no less weight than plain text (RFC 9110 section 12.5.1). A range that only includes
/// it, such as `*/*`, does not name it.
fn prefers_openmetrics(accept: &str) -> bool {
    let weight = |media_types: &[&str]| {
        // The most specific range counts.
        media_types.iter().find_map(|media_type| {
            let ranges = accept.split(',').filter_map(|range| weight_of(range, media_type));
            ranges.reduce(f64::max)
        })
    };
    let openmetrics = weight(&["application/openmetrics-text"]).unwrap_or(0.0);
    openmetrics > 0.0 && openmetrics >= weight(&["text/plain", "text/*", "*/*"]).unwrap_or(0.0)
}

/// The weight of a range of this media type.
fn weight_of(range: &str, media_type: &str) -> Option<f64> {
    let mut parts = range.split(';').map(str::trim);
    if !parts.next()?.eq_ignore_ascii_case(media_type) {
        return None;
    }
    let weight = parts.find_map(|parameter| {
        let (name, value) = parameter.split_once('=')?;
        name.trim().eq_ignore_ascii_case("q").then_some(value.trim())
    });
    // One that cannot be read is none.
    Some(weight.map_or(1.0, |text| text.parse().unwrap_or(0.0)))
}

/// The same metrics in the older format.
fn text(openmetrics: &str) -> String {
    let mut page = String::with_capacity(openmetrics.len());
    // Its name depends on the type, which comes after it.
    let mut help = None;
    for line in openmetrics.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("HELP"), Some(name), text) => help = Some((name, text.unwrap_or(""))),
            (Some("#"), Some("TYPE"), Some(name), Some(kind)) => {
                let (suffix, kind) = match kind {
                    "counter" => ("_total", kind),
                    "info" => ("_info", "gauge"),
                    "stateset" => ("", "gauge"),
                    "unknown" => ("", "untyped"),
                    _ => ("", kind),
                };
                if let Some((of, text)) = help.take()
                    && of == name
                {
                    page.push_str(&format!("# HELP {name}{suffix} {text}\n"));
                }
                page.push_str(&format!("# TYPE {name}{suffix} {kind}\n"));
            }
            (Some("#"), ..) => {}
            _ => {
                page.push_str(line);
                page.push('\n');
            }
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# HELP a_calls Calls that were answered.\n# TYPE a_calls counter\n\
        a_calls_total{route=\"# TYPE x counter\"} 3\n# HELP b_bytes Bytes.\n# TYPE b_bytes gauge\n\
        # UNIT b_bytes bytes\nb_bytes 7\n# TYPE c info\nc_info{version=\"1\"} 1\n\
        # HELP d Seconds.\n# TYPE d histogram\nd_sum 1.5\nd_count 2\nd_bucket{le=\"+Inf\"} 2\n# EOF\n";

    #[test]
    fn the_older_format_has_the_same_samples() {
        let expected = "# HELP a_calls_total Calls that were answered.\n# TYPE a_calls_total counter\n\
            a_calls_total{route=\"# TYPE x counter\"} 3\n# HELP b_bytes Bytes.\n# TYPE b_bytes gauge\n\
            b_bytes 7\n# TYPE c_info gauge\nc_info{version=\"1\"} 1\n\
            # HELP d Seconds.\n# TYPE d histogram\nd_sum 1.5\nd_count 2\nd_bucket{le=\"+Inf\"} 2\n";
        assert_eq!(answer(PAGE.to_owned(), None), (TEXT, expected.to_owned()));
        assert_eq!(answer(PAGE.to_owned(), Some("*/*")).1, expected);
    }

    #[test]
    fn openmetrics_is_answered_where_it_is_asked_for() {
        for (accept, expected) in [
            // Prometheus 2.x and 3.x, and one that is set to the older format.
            (
                "application/openmetrics-text;version=1.0.0;q=0.5,\
                 application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
                OPENMETRICS,
            ),
            ("text/plain;version=0.0.4;q=0.5,application/openmetrics-text;q=0.2,*/*;q=0.1", TEXT),
            ("application/openmetrics-text", OPENMETRICS),
            ("Application/OpenMetrics-Text; version=1.0.0", OPENMETRICS),
            ("application/openmetrics-text, text/plain", OPENMETRICS),
            ("application/openmetrics-text;q=0", TEXT),
            ("application/openmetrics-text;q=0.1, text/*;q=0.9", TEXT),
            ("application/openmetrics-text; Q=0.5, */*", TEXT),
            ("application/openmetrics-text, */*;q=0.1", OPENMETRICS),
            ("application/openmetrics-text;q=much", TEXT),
            ("text/plain", TEXT),
            ("", TEXT),
        ] {
            assert_eq!(answer(PAGE.to_owned(), Some(accept)).0, expected, "{accept}");
        }
    }
}
