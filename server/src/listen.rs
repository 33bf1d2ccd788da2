//! Binds all addresses, before the store is opened: a second server, started by mistake,
//! then says so at once and touches no data.

use std::net::SocketAddr;

use slackwater_nfs::PortmapListeners;
use tokio::net::{TcpListener, UdpSocket};

use crate::config::Config;
use crate::error::ServerError;

/// All listeners, and the addresses that they got (port 0 takes a free one).
#[derive(Debug)]
pub(crate) struct Listeners {
    pub(crate) nfs: slackwater_nfs::Listeners,
    pub(crate) api: TcpListener,
    /// For the page of metrics alone.
    pub(crate) metrics: Option<TcpListener>,
    pub(crate) addresses: Addresses,
}

/// Where the servers are reached.
#[derive(Clone, Debug)]
pub(crate) struct Addresses {
    /// The first address of NFS, which is the one that is told.
    pub(crate) nfs: SocketAddr,
    /// Further ones.
    pub(crate) more_nfs: Vec<SocketAddr>,
    pub(crate) portmap: Option<SocketAddr>,
    pub(crate) api: SocketAddr,
    pub(crate) metrics: Option<SocketAddr>,
}

impl Addresses {
    /// All addresses of NFS, as a text.
    pub(crate) fn nfs_text(&self) -> String {
        let all = std::iter::once(&self.nfs).chain(&self.more_nfs);
        all.map(SocketAddr::to_string).collect::<Vec<_>>().join(", ")
    }
}

/// Binds what the configuration names.
///
/// # Errors
/// An address is in use, or not of this machine.
pub(crate) async fn bind(config: &Config) -> Result<Listeners, ServerError> {
    let (mut nfs, mut nfs_addresses) = (Vec::new(), Vec::new());
    for address in &config.nfs_listen {
        let (listener, address) = bind_one(*address, "nfs-listen").await?;
        nfs.push(listener);
        nfs_addresses.push(address);
    }
    let portmap = match config.portmap_listen {
        Some(address) => Some(bind_portmap(address).await?),
        None => None,
    };
    let (api, api_address) = bind_one(config.api_listen, "api-listen").await?;
    let metrics = match config.metrics_listen {
        Some(address) => Some(bind_one(address, "metrics-listen").await?),
        None => None,
    };
    let (portmap, portmap_address) = portmap.unzip();
    let (metrics, metrics_address) = metrics.unzip();
    let mut nfs_addresses = nfs_addresses.into_iter();
    let addresses = Addresses {
        // The configuration has one at least.
        nfs: nfs_addresses.next().unwrap_or(api_address),
        more_nfs: nfs_addresses.collect(),
        portmap: portmap_address,
        api: api_address,
        metrics: metrics_address,
    };
    let nfs = slackwater_nfs::Listeners { nfs, portmap };
    Ok(Listeners { nfs, api, metrics, addresses })
}

/// Tries to find a port that is free by TCP and by UDP.
const FREE_PORT_TRIES: usize = 16;

/// Binds PORTMAP by TCP and, at the same port, by UDP.
async fn bind_portmap(address: SocketAddr) -> Result<(PortmapListeners, SocketAddr), ServerError> {
    const SETTING: &str = "portmap-listen";
    let mut tries = if address.port() == 0 { FREE_PORT_TRIES } else { 1 };
    loop {
        let (tcp, bound) = bind_one(address, SETTING).await?;
        match UdpSocket::bind(bound).await {
            Ok(udp) => return Ok((PortmapListeners { tcp, udp }, bound)),
            Err(source) if tries == 1 => {
                return Err(ServerError::Listen {
                    address: bound,
                    protocol: "UDP",
                    setting: SETTING,
                    source,
                });
            }
            Err(_) => tries -= 1,
        }
    }
}

/// Binds one address. Tokio sets `SO_REUSEADDR`, so that a restart need not wait for the
/// connections of the last run to time out.
async fn bind_one(
    address: SocketAddr,
    setting: &'static str,
) -> Result<(TcpListener, SocketAddr), ServerError> {
    let fault = |source| ServerError::Listen { address, protocol: "TCP", setting, source };
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
