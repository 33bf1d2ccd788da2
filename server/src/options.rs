//! From the checked configuration to the options of each part.

use std::sync::Arc;

use slackwater_api::{ApiOptions, TlsFiles, Tokens, read_certificates};
use slackwater_blockstore::Options;
use slackwater_nfs::{MountGate, NfsOptions, NfsTls, NfsTlsError, TlsPolicy};

use crate::config::{Config, NfsTlsPolicy};
use crate::error::ServerError;

/// The store's options.
pub(crate) fn store(config: &Config) -> Options {
    Options {
        capacity_bytes: config.capacity_bytes,
        memory_bytes: config.memory.store_bytes,
        dirty_age: config.dirty_age,
        compaction_bytes_per_second: config.compaction_bytes_per_second,
        scrub_bytes_per_second: config.scrub_bytes_per_second,
        compress: config.compress,
        ..Options::new(&config.data_dir)
    }
}

/// TLS of NFS, if that is offered.
///
/// # Errors
/// The files of TLS cannot be used.
pub(crate) fn nfs_tls(config: &Config) -> Result<Option<NfsTls>, ServerError> {
    let policy = match &config.nfs_tls {
        NfsTlsPolicy::Off => return Ok(None),
        NfsTlsPolicy::Offered => TlsPolicy::Offered,
        NfsTlsPolicy::Required => TlsPolicy::Required,
        NfsTlsPolicy::Mutual(path) => {
            TlsPolicy::Mutual(read_certificates(path).map_err(ServerError::Api)?)
        }
    };
    let Some(files) = tls(config) else { return Ok(None) };
    let (certificates, key) = files.read().map_err(ServerError::Api)?;
    NfsTls::new(certificates, key, policy).map(Some).map_err(|error| match error {
        NfsTlsError::Identity(source) => ServerError::Api(files.unusable(source)),
        authorities @ NfsTlsError::Authorities(_) => ServerError::ClientAuthorities(authorities),
    })
}

/// The options of NFS.
pub(crate) fn nfs(config: &Config, gate: Arc<dyn MountGate>, tls: Option<NfsTls>) -> NfsOptions {
    let defaults = NfsOptions::default();
    NfsOptions {
        export_path: config.export_path.clone(),
        squash: config.squash,
        anonymous_uid: config.anonymous_uid,
        anonymous_gid: config.anonymous_gid,
        clients: config.nfs_clients.clone().unwrap_or(defaults.clients),
        require_privileged_port: config.nfs_privileged_port,
        mounts_by_address: config.insecure_address_only,
        connections_max: config.nfs_connections,
        in_flight_bytes_max: config.memory.nfs_bytes,
        io_threads: config.nfs_io_threads,
        gate: Some(gate),
        tls,
    }
}

/// The options of the REST API; `secret` is one of the server.
pub(crate) fn api(config: &Config, secret: &[u8]) -> ApiOptions {
    ApiOptions {
        tokens: Tokens::with_key(config.tokens.clone(), secret).into(),
        vmstore: config.vmstore.clone(),
        export_path: config.export_path.clone(),
        published_age_max: config.unpublish_after,
        nfs_tls: config.nfs_tls != NfsTlsPolicy::Off,
        data_streams_max: config.memory.api_data_streams(),
        bodies_bytes_max: config.memory.api_bodies_bytes(),
        ..ApiOptions::default()
    }
}

/// The files of TLS, if the REST API speaks it.
pub(crate) fn tls(config: &Config) -> Option<TlsFiles> {
    config
        .tls
        .as_ref()
        .map(|paths| TlsFiles { cert: paths.certificate.clone(), key: paths.key.clone() })
}
