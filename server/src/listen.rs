//! Binds both addresses, before the store is opened: a second server, started by mistake,
//! then says so at once and touches no data.

use std::net::SocketAddr;

use tokio::net::TcpListener;

use crate::config::Config;
use crate::error::ServerError;

/// Both listeners, and the addresses that they got (port 0 takes a free one).
#[derive(Debug)]
pub(crate) struct Listeners {
    pub(crate) nfs: TcpListener,
    pub(crate) api: TcpListener,
    pub(crate) addresses: Addresses,
}

/// Where the servers are reached.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Addresses {
    pub(crate) nfs: SocketAddr,
    pub(crate) api: SocketAddr,
}

/// Binds what the configuration names.
///
/// # Errors
/// An address is in use, or not of this machine.
pub(crate) async fn bind(config: &Config) -> Result<Listeners, ServerError> {
    let (nfs, nfs_address) = bind_one(config.nfs_listen, "nfs-listen").await?;
    let (api, api_address) = bind_one(config.api_listen, "api-listen").await?;
    let addresses = Addresses { nfs: nfs_address, api: api_address };
    Ok(Listeners { nfs, api, addresses })
}

/// Binds one address. Tokio sets `SO_REUSEADDR`, so that a restart need not wait for the
/// connections of the last run to time out.
async fn bind_one(
    address: SocketAddr,
    setting: &'static str,
) -> Result<(TcpListener, SocketAddr), ServerError> {
    let fault = |source| ServerError::Listen { address, setting, source };
    let listener = TcpListener::bind(address).await.map_err(fault)?;
    let bound = listener.local_addr().map_err(fault)?;
    Ok((listener, bound))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_address_in_use_is_named() {
        let address = (std::net::Ipv4Addr::LOCALHOST, 0).into();
        let (_first, taken) = bind_one(address, "nfs-listen").await.unwrap();
        assert_ne!(taken.port(), 0);
        let error = bind_one(taken, "api-listen").await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&taken.to_string()), "{text}");
        assert!(text.contains("--api-listen"), "{text}");
        assert!(text.contains("in use"), "{text}");
    }
}
