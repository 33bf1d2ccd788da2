//! What is printed on standard output once the server is ready: how to mount, and a snapshot
//! and a clone to paste. A test runs these very lines.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use slackwater_nfs::Squash;

use crate::config::Config;
use crate::listen::Addresses;

/// The export path that the driver takes unless it is told another.
const DEFAULT_EXPORT_PATH: &str = "/slackwater";

/// The text, as its `Display` form.
#[derive(Debug)]
pub(crate) struct Welcome<'a> {
    config: &'a Config,
    addresses: &'a Addresses,
    command: String,
    driver: String,
    /// Whether this machine's kernel mounts NFS.
    mounts_nfs: bool,
}

impl<'a> Welcome<'a> {
    /// The text of a server with this configuration at these addresses.
    pub(crate) fn new(config: &'a Config, addresses: &'a Addresses) -> Self {
        let this_program = std::env::current_exe().ok();
        Self {
            config,
            addresses,
            command: command("slackwater", this_program.as_deref()),
            driver: command("slackwater-driver", this_program.as_deref()),
            mounts_nfs: mounts_nfs(),
        }
    }

    /// The address of the REST API.
    fn url(&self) -> String {
        let scheme = if self.config.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", reachable(self.addresses.api))
    }

    /// How a client on this machine mounts. Port and mount port are one, and there is no
    /// lock server, so all three must be said.
    fn mount_line(&self) -> String {
        let port = self.addresses.nfs.port();
        let options =
            format!("vers=3,proto=tcp,port={port},mountport={port},nolock,hard,nosuid,nodev");
        let host = match reachable(self.addresses.nfs).ip() {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("[{address}]"),
        };
        let path = match self.config.insecure_address_only {
            true => self.config.export_path.clone(),
            // A secret, which is not for what is printed: it counts for a moment.
            false => format!("\"$({} mount-path)\"", self.client()),
        };
        format!("mount -t nfs -o {options} {host}:{path} /mnt")
    }

    /// How a disk becomes a directory by FUSE.
    fn attach_line(&self) -> String {
        let mut line = format!("{} --api {}", self.driver, self.url());
        line.push_str(&format!(" --nfs {}", reachable(self.addresses.nfs)));
        if self.config.export_path != DEFAULT_EXPORT_PATH {
            line.push_str(&format!(" --export-path {}", quoted(&self.config.export_path)));
        }
        if let Some(tls) = &self.config.tls {
            line.push_str(&format!(" --ca {}", quoted(&tls.certificate.display().to_string())));
        }
        match &self.config.admin_token_file {
            Some(path) => {
                let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
                line.push_str(&format!(" --token-file {}", quoted(&path.display().to_string())));
            }
            None if self.asks_for_tokens() => line.push_str(" --token-file FILE"),
            None => {}
        }
        format!("{line} attach --attach fuse")
    }

    /// Says that calls need a token, if they do.
    fn token_lines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.config.admin_token_file {
            // For a shell in any directory.
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            let path = quoted(&path.display().to_string());
            writeln!(
                f,
                "\n# What follows needs the administrator's token, as root or as the user of the server:"
            )?;
            return writeln!(f, "export SLACKWATER_TOKEN=\"$(cat {path})\"");
        }
        if self.config.tokens.is_empty() {
            return Ok(());
        }
        writeln!(f, "\n# What follows needs a token of the token file:")?;
        writeln!(f, "export SLACKWATER_TOKEN=...")
    }

    /// Whether calls need a token.
    fn asks_for_tokens(&self) -> bool {
        self.config.admin_token_file.is_some() || !self.config.tokens.is_empty()
    }

    /// The command line client with what it needs to reach this server.
    fn client(&self) -> String {
        let mut client = format!("{} --api {}", self.command, self.url());
        if let Some(tls) = &self.config.tls {
            client.push_str(&format!(" --ca {}", tls.certificate.display()));
        }
        client
    }

    /// A POST by curl to this server.
    fn curl(&self) -> String {
        let mut curl = "curl -fsS".to_owned();
        if let Some(tls) = &self.config.tls {
            curl.push_str(&format!(" --cacert {}", tls.certificate.display()));
        }
        if self.asks_for_tokens() {
            // Not as an argument, which all users of the machine see.
            curl.push_str(" -H @<(printf 'Authorization: Bearer %s' \"$SLACKWATER_TOKEN\")");
        }
        curl.push_str(" -H 'Content-Type: application/json'");
        curl
    }
}

impl fmt::Display for Welcome<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (url, client, curl) = (self.url(), self.client(), self.curl());
        let data_dir = self.config.data_dir.display();
        writeln!(f, "Slackwater {} serves {data_dir}", env!("CARGO_PKG_VERSION"))?;
        writeln!(f, "NFS  {}", self.addresses.nfs)?;
        self.addresses.more_nfs.iter().try_for_each(|address| writeln!(f, "NFS  {address}"))?;
        if let Some(portmap) = self.addresses.portmap {
            writeln!(f, "PORTMAP  {portmap}")?;
        }
        writeln!(f, "API  {url}")?;
        if let Some(address) = self.addresses.metrics {
            writeln!(f, "METRICS  http://{address}/metrics")?;
        }
        let is_by_path = !self.config.insecure_address_only;
        if is_by_path {
            self.token_lines(f)?;
        }
        if !self.mounts_nfs {
            let attach = self.attach_line();
            writeln!(
                f,
                "\n# This kernel has no NFS client. A new disk as a directory, by FUSE, and a clone of it (as root):"
            )?;
            writeln!(f, "{attach} --file disks/first.img --create 1GiB /mnt/first")?;
            writeln!(f, "{attach} --clone disks/first.img /mnt/second")?;
        }
        writeln!(f, "\n# Mount it (a Linux machine with nfs-common, as root):")?;
        writeln!(f, "{}", self.mount_line())?;
        if self.config.squash != Squash::NoRootSquash {
            writeln!(f, "# Root of a client is nobody here; --squash no_root_squash changes it.")?;
        }
        if !is_by_path {
            self.token_lines(f)?;
        }
        writeln!(f, "\n# A disk, a snapshot of it, and a clone of that:")?;
        writeln!(f, "{client} file create disks/one.img 1GiB")?;
        writeln!(f, "snapshot=$({client} snapshot create disks/one.img)")?;
        writeln!(f, "{client} clone \"$snapshot\" disks/two.img")?;
        writeln!(f, "\n# The same snapshot and clone with curl (in bash or zsh):")?;
        writeln!(
            f,
            "snapshot=$({curl} {url}/v1/snapshots -d '{{\"path\":\"disks/one.img\"}}' \
             | sed 's/.*\"id\":\"\\([^\"]*\\)\".*/\\1/')"
        )?;
        writeln!(
            f,
            "{curl} {url}/v1/clones \
             -d \"{{\\\"snapshot_id\\\":\\\"$snapshot\\\",\\\"path\\\":\\\"disks/three.img\\\"}}\""
        )
    }
}

/// The address at which this machine reaches a listener: loopback for one that listens on
/// every address.
fn reachable(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => {
            (std::net::Ipv4Addr::LOCALHOST, address.port()).into()
        }
        IpAddr::V6(ip) if ip.is_unspecified() => {
            (std::net::Ipv6Addr::LOCALHOST, address.port()).into()
        }
        _ => address,
    }
}

/// A program of ours: by its path when it lies beside this one and is not found without, as
/// after a build.
fn command(name: &str, this_program: Option<&Path>) -> String {
    let on_path = std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path).any(|directory| directory.join(name).is_file())
    });
    let beside = this_program.and_then(Path::parent).map(|folder| folder.join(name));
    match beside {
        Some(path) if !on_path && path.is_file() => quoted(&path.display().to_string()),
        _ => name.to_owned(),
    }
}

/// Whether this machine's kernel has an NFS client, or a module of one. Where that cannot be told, it has.
fn mounts_nfs() -> bool {
    let Ok(known) = std::fs::read_to_string("/proc/filesystems") else { return true };
    if known.lines().any(|line| line.split_whitespace().last() == Some("nfs")) {
        return true;
    }
    // A kernel without modules has no such file.
    if !Path::new("/proc/modules").exists() {
        return false;
    }
    let Ok(release) = std::fs::read_to_string("/proc/sys/kernel/osrelease") else { return true };
    let modules = Path::new("/lib/modules").join(release.trim()).join("modules.dep");
    std::fs::read_to_string(modules).map_or(true, |modules| modules.contains("/nfs.ko"))
}

/// A word that a shell takes as it is.
fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+@%:,".contains(&byte);
    if word.bytes().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use slackwater_api::{Role, Secret, Token};

    use super::*;
    use crate::config::{Settings, TlsPaths};

    fn text(change: impl FnOnce(&mut Config)) -> String {
        text_where(true, change)
    }

    fn text_where(mounts_nfs: bool, change: impl FnOnce(&mut Config)) -> String {
        let settings = Settings { data_dir: Some("data".into()), ..Settings::default() };
        let mut config = Config::try_from(settings).unwrap();
        change(&mut config);
        let mut nfs = config.nfs_listen.iter().copied();
        let addresses = Addresses {
            nfs: nfs.next().unwrap(),
            more_nfs: nfs.collect(),
            portmap: config.portmap_listen,
            api: config.api_listen,
            metrics: config.metrics_listen,
        };
        let (command, driver) = ("slackwater".to_owned(), "slackwater-driver".to_owned());
        let addresses = &addresses;
        Welcome { config: &config, addresses, command, driver, mounts_nfs }.to_string()
    }

    #[test]
    fn says_what_make_run_promises() {
        let text = text(|_| {});
        for line in [
            "mount -t nfs -o vers=3,proto=tcp,port=2049,mountport=2049,nolock,hard,nosuid,nodev \
             127.0.0.1:\"$(slackwater --api http://127.0.0.1:8049 mount-path)\" /mnt",
            "snapshot=$(slackwater --api http://127.0.0.1:8049 snapshot create disks/one.img)",
            "slackwater --api http://127.0.0.1:8049 clone \"$snapshot\" disks/two.img",
            "curl -fsS -H @<(printf 'Authorization: Bearer %s' \"$SLACKWATER_TOKEN\") -H 'Content-Type: application/json' \
             http://127.0.0.1:8049/v1/clones \
             -d \"{\\\"snapshot_id\\\":\\\"$snapshot\\\",\\\"path\\\":\\\"disks/three.img\\\"}\"",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in:\n{text}");
        }
        let token = std::path::absolute("data/admin-token").unwrap();
        let line = format!("export SLACKWATER_TOKEN=\"$(cat {})\"", token.display());
        assert!(text.lines().any(|found| found == line), "{line} is not in:\n{text}");
    }

    #[test]
    fn says_nothing_of_tokens_where_none_is_asked_for() {
        let text = text(|config| config.admin_token_file = None);
        assert!(!text.contains("TOKEN"), "{text}");
    }

    #[test]
    fn follows_the_configuration() {
        let text = text(|config| {
            config.nfs_listen = vec!["[::]:700".parse().unwrap()];
            config.api_listen = "0.0.0.0:800".parse().unwrap();
            config.admin_token_file = None;
            config.tls = Some(TlsPaths { certificate: "/c.pem".into(), key: "/k.pem".into() });
            config.tokens = vec![Token {
                name: "ops".to_owned(),
                role: Role::Admin,
                secret: Secret::new("0123456789abcdef"),
            }];
        });
        assert!(
            text.contains("port=700,mountport=700,nolock,hard,nosuid,nodev [::1]:\"$(slackw"),
            "{text}"
        );
        assert!(text.contains("--api https://127.0.0.1:800 --ca /c.pem"), "{text}");
        assert!(text.contains(
            "--cacert /c.pem -H @<(printf 'Authorization: Bearer %s' \"$SLACKWATER_TOKEN\")"
        ));
    }

    #[test]
    fn without_an_nfs_client_it_says_how_by_fuse() {
        let shown = text_where(false, |config| config.admin_token_file = None);
        let line = "slackwater-driver --api http://127.0.0.1:8049 --nfs 127.0.0.1:2049 attach --attach fuse --file \
                    disks/first.img --create 1GiB /mnt/first";
        assert!(shown.lines().any(|found| found == line), "{line} is not in:\n{shown}");
        assert!(!text(|_| {}).contains("FUSE"));
        let shown = text_where(false, |config| {
            config.export_path = "/disks".to_owned();
            config.tls = Some(TlsPaths { certificate: "/c.pem".into(), key: "/k.pem".into() });
        });
        let token = std::path::absolute("data/admin-token").unwrap();
        let line = format!(
            "slackwater-driver --api https://127.0.0.1:8049 --nfs 127.0.0.1:2049 --export-path /disks --ca /c.pem \
             --token-file {} attach --attach fuse --clone disks/first.img /mnt/second",
            token.display()
        );
        assert!(shown.lines().any(|found| found == line), "{line} is not in:\n{shown}");
    }

    #[test]
    fn mounts_by_address_where_that_is_enough() {
        let text = text(|config| config.insecure_address_only = true);
        let line = ",nodev 127.0.0.1:/slackwater /mnt";
        assert!(text.lines().any(|found| found.ends_with(line)), "{line} is not in:\n{text}");
    }

    #[test]
    fn words_survive_a_shell() {
        assert_eq!(quoted("/usr/bin/x"), "/usr/bin/x");
        assert_eq!(quoted("/a b/it's"), "'/a b/it'\\''s'");
    }
}
