//! The dashboard: one page that calls the API from the browser.
//!
//! The page holds no data and loads nothing from elsewhere. Its policy lets only its own script
//! and style run, named by a nonce that is new in each answer, and lets it talk to this server
//! alone. Names of files come from clients, so the script writes them as text, never as markup.

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{Html, IntoResponse, Response};

use crate::error::ProblemCode;
use crate::failure::Failure;
use crate::paths;

const PAGE: &str = include_str!("index.html");

/// Stands in the page where the nonce goes.
const NONCE_MARK: &str = "{{nonce}}";

/// Random bytes of a nonce: the 128 bits that Content Security Policy Level 3 asks for.
const NONCE_BYTES: usize = 16;

/// Shows the dashboard
///
/// It asks for a token where one is configured, and keeps it in the page's memory only.
#[utoipa::path(
    get, path = paths::DASHBOARD, tag = "appliance", operation_id = "getDashboard",
    responses((status = 200, description = "The page", body = String, content_type = "text/html")),
)]
pub(crate) async fn page() -> Result<Response, Failure> {
    let mut random = [0; NONCE_BYTES];
    getrandom::fill(&mut random).map_err(|error| {
        tracing::error!(%error, "no random bytes for a nonce");
        Failure::new(ProblemCode::Internal, "the system gave no random bytes")
    })?;
    let nonce: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let mut response = Html(PAGE.replace(NONCE_MARK, &nonce)).into_response();
    let fixed = [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    let headers: [(HeaderName, HeaderValue); 3] =
        fixed.map(|(name, value)| (name, HeaderValue::from_static(value)));
    response.headers_mut().extend(headers);
    if let Ok(policy) = HeaderValue::from_str(&policy) {
        response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
    }
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_loads_nothing_and_writes_no_markup() {
        for forbidden in
            ["http:", "https:", "//cdn", "innerHTML", "outerHTML", "document.write", "localStorage"]
        {
            assert!(!PAGE.contains(forbidden), "{forbidden}");
        }
        assert_eq!(PAGE.matches(NONCE_MARK).count(), 2, "one script, one style");
    }
}
