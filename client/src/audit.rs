//! The audit log: who changed what.

use slackwater_api::change::ChangePage;
use slackwater_api::paths;
use slackwater_api::query::ListChanges;

use crate::error::ClientError;
use crate::transport::{Call, Client};

impl Client {
    /// `GET /v1/audit`: a page of changes, the newest first.
    ///
    /// # Errors
    /// [`ClientError`]; code `forbidden` without the role admin.
    pub async fn changes(&self, query: &ListChanges) -> Result<ChangePage, ClientError> {
        self.call(Call::get(format!("{}{}", paths::AUDIT, query.encode()))).await
    }
}
