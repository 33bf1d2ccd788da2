//! Options of the NFS front end: the export, its clients, and the bounds of what it takes.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::sync::Arc;

use crate::error::NfsError;
use crate::limits;
use crate::scope::MountGate;
use crate::tls::NfsTls;

/// How to serve a store. Every field has a sane default.
#[derive(Clone, Debug)]
pub struct NfsOptions {
    /// The path that clients mount; the store's root directory is behind it.
    pub export_path: String,
    /// Which users are taken for the anonymous one.
    pub squash: Squash,
    /// The anonymous user.
    pub anonymous_uid: u32,
    /// The anonymous user's group.
    pub anonymous_gid: u32,
    /// Which addresses may do what. The rule with the longest matching prefix counts; of
    /// equally long ones the first. An address that no rule matches is refused.
    pub clients: Vec<ClientRule>,
    /// Refuse calls from ports of 1024 and above, which any user of a client can open.
    pub require_privileged_port: bool,
    /// Whether an address that is listed mounts the whole export, and handles of such mounts are taken.
    /// Otherwise all mount by secret paths. By default they are, as without a gate nothing could be mounted else.
    pub mounts_by_address: bool,
    /// Connections served at once; the first call of one more waits until another one ends.
    /// Connections that have not made a call are not counted, and bounded on their own.
    pub connections_max: usize,
    /// Bytes that all calls in flight may hold, over all connections: requests received and
    /// replies not yet sent. When they are used up, sockets are not read.
    pub in_flight_bytes_max: u64,
    /// Threads that may block in the store at once, for each of three kinds of calls: WRITE
    /// and COMMIT, changes of the namespace, and the rest.
    pub io_threads: usize,
    /// Knows the secret paths by which workers and others mount; without it there are none.
    pub gate: Option<Arc<dyn MountGate>>,
    /// RPC-with-TLS (RFC 9289), for clients that ask for it; without it none do.
    pub tls: Option<NfsTls>,
}

impl Default for NfsOptions {
    fn default() -> Self {
        let read_write = |address, prefix_bits| ClientRule {
            address,
            prefix_bits,
            access: ClientAccess::ReadWrite,
        };
        Self {
            export_path: "/slackwater".to_owned(),
            squash: Squash::default(),
            anonymous_uid: limits::ANONYMOUS_ID,
            anonymous_gid: limits::ANONYMOUS_ID,
            clients: vec![
                read_write(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), 8),
                read_write(IpAddr::V6(Ipv6Addr::LOCALHOST), 128),
            ],
            require_privileged_port: false,
            mounts_by_address: true,
            connections_max: limits::CONNECTIONS_DEFAULT,
            in_flight_bytes_max: limits::IN_FLIGHT_BYTES_DEFAULT,
            io_threads: limits::IO_THREADS_DEFAULT,
            gate: None,
            tls: None,
        }
    }
}

impl NfsOptions {
    /// What the address may do, or `None` when it is refused.
    #[must_use]
    pub fn access_of(&self, address: IpAddr) -> Option<ClientAccess> {
        let matching = self.clients.iter().filter(|rule| rule.matches(address));
        // `max_by_key` would take the last of equal ones.
        let best = matching.reduce(
            |best, rule| {
                if rule.prefix_bits > best.prefix_bits { rule } else { best }
            },
        );
        best.map(|rule| rule.access)
    }

    /// Checks that the options can be served.
    ///
    /// # Errors
    /// [`NfsError::Option`] names the field, its value and what is right.
    pub fn validate(&self) -> Result<(), NfsError> {
        let wrong = |field, got: String, expected| NfsError::Option { field, got, expected };
        let path = self.export_path.as_str();
        let parts_are_names = path.strip_prefix('/').is_some_and(|names| {
            names.split('/').all(|name| !matches!(name, "" | "." | "..") && !name.contains('\0'))
        });
        if !parts_are_names || path.len() > limits::MOUNT_PATH_BYTES_MAX {
            return Err(wrong(
                "export_path",
                path.to_owned(),
                "an absolute path of at most 1024 bytes such as `/slackwater`",
            ));
        }
        if self.connections_max == 0 {
            return Err(wrong("connections_max", "0".to_owned(), "at least 1"));
        }
        if self.io_threads == 0 {
            return Err(wrong("io_threads", "0".to_owned(), "at least 1"));
        }
        if self.in_flight_bytes_max < limits::IN_FLIGHT_BYTES_MIN {
            return Err(wrong(
                "in_flight_bytes_max",
                self.in_flight_bytes_max.to_string(),
                "at least 4 MiB: one largest call of each kind",
            ));
        }
        Ok(())
    }
}

/// Which users the server takes for the anonymous one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Squash {
    /// The superuser: a root on some client is not root here.
    #[default]
    RootSquash,
    /// Nobody.
    NoRootSquash,
    /// Everybody.
    AllSquash,
}

/// The text is not a squash mode.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{got}` is no squash mode: expected root_squash, no_root_squash or all_squash")]
pub struct SquashParseError {
    /// The text.
    pub got: String,
}

impl FromStr for Squash {
    type Err = SquashParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "root_squash" => Ok(Self::RootSquash),
            "no_root_squash" => Ok(Self::NoRootSquash),
            "all_squash" => Ok(Self::AllSquash),
            _ => Err(SquashParseError { got: text.to_owned() }),
        }
    }
}

impl fmt::Display for Squash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RootSquash => "root_squash",
            Self::NoRootSquash => "no_root_squash",
            Self::AllSquash => "all_squash",
        })
    }
}

/// What a client's address allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientAccess {
    /// Reading; changes are answered NFS3ERR_ROFS.
    ReadOnly,
    /// Reading and changing.
    ReadWrite,
}

/// One line of the address list: a network in CIDR form and what it may do, written
/// `10.0.0.0/8:rw` or `::1/128:ro`. An address without a prefix length stands for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientRule {
    address: IpAddr,
    prefix_bits: u8,
    access: ClientAccess,
}

impl ClientRule {
    /// The rule for the network of `prefix_bits` bits that starts at `address`.
    ///
    /// # Errors
    /// When the prefix is longer than the address, or the address has bits past it.
    pub fn new(
        address: IpAddr,
        prefix_bits: u8,
        access: ClientAccess,
    ) -> Result<Self, ClientRuleParseError> {
        let limit = if address.is_ipv4() { 32 } else { 128 };
        if prefix_bits > limit {
            return Err(ClientRuleParseError::Prefix { got: prefix_bits.to_string(), limit });
        }
        let rule = Self { address, prefix_bits, access };
        if !is_start_of_network(address, prefix_bits) {
            return Err(ClientRuleParseError::HostBits { got: address, prefix_bits });
        }
        Ok(rule)
    }

    /// The first address of the network.
    #[must_use]
    pub const fn address(&self) -> IpAddr {
        self.address
    }

    /// How many bits all addresses of the network have in common.
    #[must_use]
    pub const fn prefix_bits(&self) -> u8 {
        self.prefix_bits
    }

    /// What the network may do.
    #[must_use]
    pub const fn access(&self) -> ClientAccess {
        self.access
    }

    /// The network in CIDR form.
    pub(crate) fn network(&self) -> String {
        format!("{}/{}", self.address, self.prefix_bits)
    }

    /// Whether `address` is in the network. An IPv4 address in its IPv6 form is taken for the
    /// IPv4 address that it is: a listener on `::` sees all clients so.
    #[must_use]
    pub fn matches(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(network), IpAddr::V4(address)) => {
                let differing = network.to_bits() ^ address.to_bits();
                differing.leading_zeros() >= u32::from(self.prefix_bits)
            }
            (IpAddr::V6(network), IpAddr::V6(address)) => {
                let differing = network.to_bits() ^ address.to_bits();
                differing.leading_zeros() >= u32::from(self.prefix_bits)
            }
            (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => false,
        }
    }
}

fn is_start_of_network(address: IpAddr, prefix_bits: u8) -> bool {
    let trailing_zeros = match address {
        IpAddr::V4(address) => 32 - address.to_bits().trailing_zeros(),
        IpAddr::V6(address) => 128 - address.to_bits().trailing_zeros(),
    };
    trailing_zeros <= u32::from(prefix_bits)
}

/// The text is not a rule of the address list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientRuleParseError {
    /// No `:rw` or `:ro` at the end.
    #[error(
        "client rule `{got}` does not end with `:rw` or `:ro`; expected for example `10.0.0.0/8:rw`"
    )]
    Access {
        /// The text.
        got: String,
    },
    /// No address before the prefix.
    #[error("`{got}` is no IP address; expected for example `10.0.0.0/8:rw` or `::1/128:ro`")]
    Address {
        /// The text.
        got: String,
    },
    /// The prefix length is no number, or longer than the address.
    #[error("prefix length `{got}` is not a number from 0 to {limit}")]
    Prefix {
        /// The text.
        got: String,
        /// Bits of an address of this family.
        limit: u8,
    },
    /// The address is inside the network, not its start: likely a slip of the hand.
    #[error(
        "address {got} has bits past its prefix of {prefix_bits} bits; write the network's first address"
    )]
    HostBits {
        /// The address.
        got: IpAddr,
        /// The prefix length.
        prefix_bits: u8,
    },
}

impl FromStr for ClientRule {
    type Err = ClientRuleParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let access_error = || ClientRuleParseError::Access { got: text.to_owned() };
        // The last colon: an IPv6 address has others.
        let (network, access) = text.rsplit_once(':').ok_or_else(access_error)?;
        let access = match access {
            "rw" => ClientAccess::ReadWrite,
            "ro" => ClientAccess::ReadOnly,
            _ => return Err(access_error()),
        };
        let (address, prefix) = network
            .split_once('/')
            .map_or((network, None), |(address, bits)| (address, Some(bits)));
        let address: IpAddr = address
            .parse()
            .map_err(|_| ClientRuleParseError::Address { got: address.to_owned() })?;
        let limit = if address.is_ipv4() { 32 } else { 128 };
        let prefix_bits = match prefix {
            None => limit,
            Some(bits) => bits
                .parse()
                .map_err(|_| ClientRuleParseError::Prefix { got: bits.to_owned(), limit })?,
        };
        Self::new(address, prefix_bits, access)
    }
}

impl fmt::Display for ClientRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let access = match self.access {
            ClientAccess::ReadOnly => "ro",
            ClientAccess::ReadWrite => "rw",
        };
        write!(f, "{}:{access}", self.network())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> Result<ClientRule, ClientRuleParseError> {
        text.parse()
    }

    #[test]
    fn rules_are_read_as_they_are_written() {
        for text in ["10.0.0.0/8:rw", "192.168.0.0/16:ro", "::1/128:rw", "0.0.0.0/0:ro", "::/0:rw"]
        {
            assert_eq!(rule(text).unwrap().to_string(), text);
        }
        assert_eq!(rule("10.1.2.3:ro").unwrap().to_string(), "10.1.2.3/32:ro");
        assert_eq!(rule("fe80::1:rw").unwrap().to_string(), "fe80::1/128:rw");
    }

    #[test]
    fn wrong_rules_say_what_is_wrong() {
        use ClientRuleParseError as Error;
        assert!(matches!(rule("10.0.0.0/8"), Err(Error::Access { .. })));
        assert!(matches!(rule("10.0.0.0/8:rx"), Err(Error::Access { .. })));
        assert!(matches!(rule("ten/8:rw"), Err(Error::Address { .. })));
        assert!(matches!(rule("10.0.0.0/33:rw"), Err(Error::Prefix { limit: 32, .. })));
        assert!(matches!(rule("10.0.0.0/-1:rw"), Err(Error::Prefix { .. })));
        assert!(matches!(rule("::/129:rw"), Err(Error::Prefix { limit: 128, .. })));
        assert!(matches!(rule("10.0.0.1/8:rw"), Err(Error::HostBits { prefix_bits: 8, .. })));
    }

    #[test]
    fn a_network_holds_its_addresses_only() {
        let ten = rule("10.0.0.0/8:rw").unwrap();
        assert!(ten.matches("10.255.0.1".parse().unwrap()));
        assert!(ten.matches("::ffff:10.0.0.1".parse().unwrap()));
        assert!(!ten.matches("11.0.0.0".parse().unwrap()));
        assert!(!ten.matches("::a00:1".parse().unwrap()));
        let all = rule("0.0.0.0/0:rw").unwrap();
        assert!(all.matches("255.255.255.255".parse().unwrap()));
        assert!(!all.matches("::1".parse().unwrap()));
    }

    #[test]
    fn the_longest_prefix_counts() {
        let clients = ["10.0.0.0/8:rw", "10.1.0.0/16:ro", "10.1.1.1/32:rw", "10.1.1.1/32:ro"];
        let options = NfsOptions {
            clients: clients.iter().map(|text| rule(text).unwrap()).collect(),
            ..NfsOptions::default()
        };
        let access = |text: &str| options.access_of(text.parse().unwrap());
        assert_eq!(access("10.2.0.1"), Some(ClientAccess::ReadWrite));
        assert_eq!(access("10.1.0.1"), Some(ClientAccess::ReadOnly));
        assert_eq!(access("10.1.1.1"), Some(ClientAccess::ReadWrite));
        assert_eq!(access("127.0.0.1"), None);
    }

    #[test]
    fn by_default_only_loopback_is_served() {
        let options = NfsOptions::default();
        assert!(options.validate().is_ok());
        assert!(options.access_of("127.9.9.9".parse().unwrap()).is_some());
        assert!(options.access_of("::1".parse().unwrap()).is_some());
        assert!(options.access_of("192.168.1.1".parse().unwrap()).is_none());
    }

    #[test]
    fn options_that_cannot_be_served_are_refused() {
        let bad = |change: fn(&mut NfsOptions)| {
            let mut options = NfsOptions::default();
            change(&mut options);
            options.validate().is_err()
        };
        assert!(bad(|options| options.export_path = "slackwater".to_owned()));
        assert!(bad(|options| options.export_path = "/a/../b".to_owned()));
        assert!(bad(|options| options.export_path = "/".to_owned()));
        assert!(bad(|options| options.connections_max = 0));
        assert!(bad(|options| options.io_threads = 0));
        assert!(bad(|options| options.in_flight_bytes_max = 1000));
    }

    #[test]
    fn squash_modes_are_read_as_they_are_written() {
        for squash in [Squash::RootSquash, Squash::NoRootSquash, Squash::AllSquash] {
            assert_eq!(squash.to_string().parse(), Ok(squash));
        }
        assert!("root".parse::<Squash>().is_err());
    }
}
