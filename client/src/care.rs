//! The appliance itself: health, counts, check, garbage collection.

use std::time::Duration;

use reqwest::Method;
use slackwater_api::paths;
use slackwater_api::types::{CheckReport, CheckRequest, GcReport, Health, Stats};

use crate::error::ClientError;
use crate::transport::{Call, Client};

/// Time that a check or a garbage collection may take: they go through the whole store, and
/// the appliance ends them itself after a day, or when the caller leaves.
const CARE_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60 + 60);

impl Client {
    /// `GET /healthz`: whether the process is up. Needs no token.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn healthz(&self) -> Result<Health, ClientError> {
        self.call(Call::get(paths::HEALTHZ)).await
    }

    /// `GET /readyz`: whether the store serves reads and writes. Needs no token.
    ///
    /// # Errors
    /// [`ClientError`]; codes `poisoned` and `closed`.
    pub async fn readyz(&self) -> Result<Health, ClientError> {
        self.call(Call::get(paths::READYZ)).await
    }

    /// `GET /v1/stats`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn stats(&self) -> Result<Stats, ClientError> {
        self.call(Call::get(paths::STATS)).await
    }

    /// `GET /metrics`, in Prometheus' text format.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn metrics(&self) -> Result<String, ClientError> {
        let answer = self.answer(&Call::get(paths::METRICS)).await?;
        String::from_utf8(answer.bytes.to_vec())
            .map_err(|error| answer.unexpected("text", &error.to_string()))
    }

    /// `GET /openapi.json`: the description of the REST face.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn openapi(&self) -> Result<serde_json::Value, ClientError> {
        self.call(Call::get(paths::OPENAPI)).await
    }

    /// `POST /v1/check`: verifies the store's invariants while it serves; with `data`, reads
    /// and hashes every block. Can take long, so it is not sent again once it may have arrived. It ends when the future
    /// is dropped; [`Self::stats`] tells how far it is.
    ///
    /// # Errors
    /// [`ClientError`]; code `forbidden` without the role admin.
    pub async fn check(&self, data: bool) -> Result<CheckReport, ClientError> {
        // Without an idempotency key, with which it would go on after the caller left.
        let call = Call::new(Method::POST, paths::CHECK.to_owned()).json(&CheckRequest { data })?;
        self.call(call.timeout(CARE_TIMEOUT).once()).await
    }

    /// `POST /v1/gc`: reclaims and compacts all that waits for it now. Can take long, so it is
    /// not sent again once it may have arrived. It ends when the future is dropped; what was freed by then stays freed.
    ///
    /// # Errors
    /// [`ClientError`]; code `forbidden` without the role admin.
    pub async fn gc(&self) -> Result<GcReport, ClientError> {
        let call = Call::new(Method::POST, paths::GC.to_owned()).json(&serde_json::json!({}))?;
        self.call(call.timeout(CARE_TIMEOUT).once()).await
    }
}
