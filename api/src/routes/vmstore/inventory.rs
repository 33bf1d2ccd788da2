//! What clients ask about before they begin: which version the appliance speaks, which
//! appliance it is, which disk is behind a volume, and that new volumes be noticed.
//!
//! A VMstore learns of disks by watching; here a file is known as soon as it is there, so the
//! answers come from the namespace and a refresh has nothing to do.

use axum::Json;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use slackwater_blockstore::{FileInfo, Result as StoreResult, Store};

use crate::extract::OptionalJsonBody;
use crate::failure::Failure;
use crate::query::{QueryError, Reader};
use crate::routes::vmstore::session::LoggedIn;
use crate::routes::vmstore::{APPLIANCE, HOST_REFRESH, INFO, VIRTUAL_DISK, VmstoreUuid};
use crate::state::Shared;

const APPLIANCE_TYPE: &str = "com.tintri.api.rest.v310.dto.domain.Appliance";
const VIRTUAL_DISK_TYPE: &str = "com.tintri.api.rest.v310.dto.domain.VirtualDisk";

/// Files that the search for a disk looks at.
const SCAN_MAX: usize = 100_000;

/// Files that are read from the store in one go.
const BATCH: usize = 1000;

/// The version of the objects that this face speaks.
const API_VERSION: &str = "v310.21";

/// What VMstore calls itself; scripts stop where they find another name.
const PRODUCT_NAME: &str = "Tintri VMstore";

/// What the appliance speaks.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct VersionInfo {
    preferred_version: &'static str,
    supported_versions: [&'static str; 1],
    product_name: &'static str,
}

/// The appliances: this one.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Appliances {
    items: [VmstoreAppliance; 1],
}

/// An appliance as VMstore shows it.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct VmstoreAppliance {
    type_id: &'static str,
    uuid: VmstoreUuid,
    model: &'static str,
    operating_system_version: &'static str,
}

/// The disks that were found: one or none.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct VirtualDisks {
    filtered_total: usize,
    items: Vec<VirtualDisk>,
}

/// A disk as VMstore shows it.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct VirtualDisk {
    type_id: &'static str,
    name: String,
    path: String,
    vm_name: String,
    vm_uuid: VmstoreUuid,
    instance_uuid: String,
}

/// What was to be noticed; nothing of it is needed here.
#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
pub(crate) struct RefreshSpec {}

/// Tells which version is spoken
///
/// Asked for before the log-in.
#[utoipa::path(
    get, path = INFO, tag = "vmstore", operation_id = "vmstoreInfo",
    responses((status = 200, description = "The version", body = VersionInfo)),
)]
pub(crate) async fn info() -> Json<VersionInfo> {
    Json(VersionInfo {
        preferred_version: API_VERSION,
        supported_versions: [API_VERSION],
        product_name: PRODUCT_NAME,
    })
}

/// Shows the appliance
#[utoipa::path(
    get, path = APPLIANCE, tag = "vmstore", operation_id = "vmstoreAppliance",
    responses((status = 200, description = "A list with this appliance", body = Appliances)),
)]
pub(crate) async fn appliance(State(state): State<Shared>, _session: LoggedIn) -> Json<Appliances> {
    Json(Appliances {
        items: [VmstoreAppliance {
            type_id: APPLIANCE_TYPE,
            uuid: VmstoreUuid::new(state.store.store_id().to_string()),
            model: "Slackwater",
            operating_system_version: env!("CARGO_PKG_VERSION"),
        }],
    })
}

/// Finds the disk behind a volume
///
/// The file whose name holds the volume's UUID.
#[utoipa::path(
    get, path = VIRTUAL_DISK, tag = "vmstore", operation_id = "vmstoreVirtualDisk",
    params(("uuid" = String, Query, description = "The volume's UUID")),
    responses(
        (status = 200, description = "A list with the disk, empty if there is none", body = VirtualDisks),
        (status = 400, description = "The UUID is missing"),
    ),
)]
pub(crate) async fn virtual_disk(
    State(state): State<Shared>,
    _session: LoggedIn,
    RawQuery(query): RawQuery,
) -> Result<Json<VirtualDisks>, Failure> {
    let uuid = Reader::new(query.as_deref().unwrap_or_default())?.one("uuid")?;
    let Some(uuid) = uuid.filter(|uuid| !uuid.is_empty()) else {
        return Err(QueryError::new("uuid", "is missing").into());
    };
    let wanted = uuid.clone();
    let found = state.call(move |store| find(store, wanted.as_bytes())).await?;
    let items: Vec<VirtualDisk> = found.iter().map(|file| show(file, &uuid)).collect();
    Ok(Json(VirtualDisks { filtered_total: items.len(), items }))
}

/// Notices new volumes, which are known already
#[utoipa::path(
    post, path = HOST_REFRESH, tag = "vmstore", operation_id = "vmstoreRefresh",
    request_body = RefreshSpec,
    responses((status = 204, description = "All is known")),
)]
pub(crate) async fn refresh(
    _session: LoggedIn,
    _spec: OptionalJsonBody<RefreshSpec>,
) -> StatusCode {
    StatusCode::NO_CONTENT
}

/// The first file whose last name holds these bytes.
fn find(store: &Store, wanted: &[u8]) -> StoreResult<Option<FileInfo>> {
    let mut after = None;
    for _ in 0..SCAN_MAX / BATCH {
        let batch = store.list_files("", after.as_ref(), BATCH)?;
        let exhausted = batch.len() < BATCH;
        after = batch.last().map(|last| last.path.clone());
        let holds = |file: &FileInfo| {
            file.path.split().1.as_bytes().windows(wanted.len()).any(|window| window == wanted)
        };
        if let Some(file) = batch.into_iter().find(holds) {
            return Ok(Some(file));
        }
        if exhausted {
            break;
        }
    }
    Ok(None)
}

fn show(file: &FileInfo, uuid: &str) -> VirtualDisk {
    let path = file.path.to_string();
    VirtualDisk {
        type_id: VIRTUAL_DISK_TYPE,
        name: path.rsplit('/').next().unwrap_or_default().to_owned(),
        path,
        vm_name: uuid.to_owned(),
        vm_uuid: VmstoreUuid::new(uuid),
        instance_uuid: uuid.to_owned(),
    }
}
