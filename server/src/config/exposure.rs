//! What a configuration opens to machines that no administrator chose: all of the Internet by address rules, and all who see
//! the traffic by REST without TLS.
//!
//! Such a configuration is refused ([`super::check`]), unless an option that begins with `insecure-` takes it: then it
//! is a finding at each start ([`super::findings`]).

use std::net::{IpAddr, SocketAddr};

use slackwater_nfs::ClientRule;

use super::Config;

/// Fewest bits of a network that one site has: those of 10.0.0.0/8, the largest private one (RFC 1918).
const SITE_BITS_V4: u8 = 8;

/// The same of IPv6: the largest assignments to one organisation have more.
const SITE_BITS_V6: u8 = 16;

/// Bits of fc00::/7, which is not routed beyond a site (RFC 4193).
const UNIQUE_LOCAL_BITS: u8 = 7;

/// Bits of fe80::/10, which is not routed at all (RFC 4291 section 2.5.6).
const LINK_LOCAL_BITS: u8 = 10;

/// Whether only this machine reaches the address, `::ffff:127.0.0.1` included.
pub(super) fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

/// Where other machines reach NFS first, and by which setting; none: nowhere.
pub(super) fn open_nfs(config: &Config) -> Option<(&'static str, SocketAddr)> {
    let nfs = config.nfs_listen.iter().map(|address| ("nfs-listen", *address));
    let portmap = config.portmap_listen.iter().map(|address| ("portmap-listen", *address));
    nfs.chain(portmap).find(|(_, address)| !is_loopback(address.ip()))
}

/// The first address rule that holds for more machines than a site has, where other machines reach NFS at all.
pub(super) fn wide_rule(config: &Config) -> Option<ClientRule> {
    let rules = config.nfs_clients.iter().flatten().copied();
    let mut reached = rules.filter(|_| open_nfs(config).is_some());
    reached.find(is_wide)
}

fn is_wide(rule: &ClientRule) -> bool {
    let bits = rule.prefix_bits();
    bits < match rule.address() {
        IpAddr::V4(_) => SITE_BITS_V4,
        IpAddr::V6(address) if address.is_unique_local() => UNIQUE_LOCAL_BITS,
        IpAddr::V6(address) if address.is_unicast_link_local() => LINK_LOCAL_BITS,
        IpAddr::V6(_) => SITE_BITS_V6,
    }
}

/// Whether what is sent to REST can be read by others than this machine.
pub(super) fn is_readable_on_the_way(config: &Config) -> bool {
    config.tls.is_none() && !is_loopback(config.api_listen.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_site_is_told_from_the_internet() {
        for (rule, expected) in [
            ("0.0.0.0/0:rw", true),
            ("0.0.0.0/0:ro", true),
            ("128.0.0.0/1:rw", true),
            ("10.0.0.0/7:rw", true),
            ("10.0.0.0/8:rw", false),
            ("100.64.0.0/10:rw", false),
            ("203.0.113.7:rw", false),
            ("::/0:rw", true),
            ("2000::/3:rw", true),
            ("fc00::/6:rw", true),
            ("fc00::/7:rw", false),
            ("fd00::/8:rw", false),
            ("2001::/16:rw", false),
            ("2001:db8::/32:ro", false),
            ("fe80::/10:rw", false),
            ("fe80::/9:rw", true),
        ] {
            assert_eq!(is_wide(&rule.parse().unwrap()), expected, "{rule}");
        }
    }
}
