//! Who changed what: the entries of the appliance's audit log.

use serde::{Deserialize, Serialize};

use crate::types::Timestamp;

/// One change that was asked for by REST, or made by the appliance itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct Change {
    /// From 1, one more for each change. One that is missing could not be written, or was passed over.
    pub number: u64,
    /// When it was carried out, by the appliance's clock.
    pub at: Timestamp,
    /// What kind of caller asked for it.
    pub kind: CallerKind,
    /// The name of the token or the worker; empty where there is none.
    pub by: String,
    /// The caller's address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Method and path of the call, as `DELETE /v1/files/disks%2Fone.img`; or what the appliance did.
    pub call: String,
    /// What the path does not say, such as the file that a snapshot was taken of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
    /// The route of what was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made: Option<String>,
    /// The status of the outcome: 200 to 299; with another one a part may have been carried out. Absent where the caller
    /// left before the answer, or it took too long, and the change may have been made; and of the appliance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
}

/// What a caller showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum CallerKind {
    /// A token of the token files, or the appliance's own.
    Token,
    /// The credential of a worker.
    Worker,
    /// The join token of a worker.
    JoinToken,
    /// A session of the VMstore face.
    Vmstore,
    /// Nothing, as the appliance asks for no tokens.
    Open,
    /// It was the appliance itself.
    Appliance,
    /// A kind of a newer server.
    #[serde(other)]
    Unknown,
}

/// A page of changes, the newest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
pub struct ChangePage {
    /// The changes.
    pub items: Vec<Change>,
    /// The `after` of the next page, of older ones; null on the last one.
    #[serde(default)]
    #[cfg_attr(feature = "server", schema(required = true))]
    pub next: Option<String>,
}
