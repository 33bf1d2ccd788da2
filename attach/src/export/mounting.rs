//! How the export is mounted: by which path, and with what options.
//!
//! ```text
//! PathSource --> EXPORT, or EXPORT/.worker/SECRET, or EXPORT/.export/SECRET
//!            --> a line of a table --> mount(8), on its standard input
//! ```
//! Invariants: a secret path is in no command line and in no text of this program. The kernel shows it as the source of
//! the mount, when it counts for some seconds more.

use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::{Export, FIRST_MOUNT_TIME_LIMIT, SNAPSHOTS, make_directory};
use crate::kernel::{self, MountPoint};
use crate::serving;
use crate::tools::{self, MODPROBE, MOUNT, STAT, Tools};
use crate::{AttachError, Method, MountedBy, Options};

/// The name below which secret paths of workers are.
const WORKER_MOUNTS: &str = ".worker";

/// The names below which secret paths are: of workers, and of others.
const SECRET_MOUNTS: [&str; 2] = [WORKER_MOUNTS, ".export"];

/// The type of a kernel NFS mount.
const NFS_FILE_SYSTEM: &str = "nfs";

/// What the mounts of the export have: their files are disks, and nothing else.
const MOUNT_OPTIONS: &str = "noatime,nosuid,nodev,noexec";

/// How often a mount is tried, each time by another path, if the appliance does not take the one before.
const MOUNT_TRIES: u32 = 2;

/// The mount option with which no symbolic link of a mount is followed.
const NO_LINKS: &str = "nosymfollow";

impl Export {
    /// Whether a mount is the export as the options want it.
    pub(super) fn is_ours(&self, point: &MountPoint) -> bool {
        let address = self.options.nfs_address;
        let port = format!("port={}", address.port());
        let is_same_kind = match self.method {
            Method::Nfs => point.kind == NFS_FILE_SYSTEM,
            Method::Fuse => point.kind == serving::FILE_SYSTEM,
        };
        let is_same_port = self.method == Method::Fuse
            || point.options.split(',').any(|option| option == port)
            // The kernel does not print the port that NFS has by itself.
            || (address.port() == 2049 && !point.options.split(',').any(|o| o.starts_with("port=")));
        let is_same_source =
            point.source == Path::new(&self.source()) || self.mounted_below(point).is_some();
        is_same_kind && is_same_port && is_same_source
    }

    /// Below which name of the export a mount of it has its secret path, if it has one.
    pub(super) fn mounted_below(&self, point: &MountPoint) -> Option<&'static str> {
        // Whole names are compared.
        let is_below = |mounts: &str| {
            let source = format!("{}/{mounts}", self.source());
            point.source.starts_with(source)
        };
        SECRET_MOUNTS.into_iter().find(|&mounts| is_below(mounts))
    }

    /// By what the appliance lets its mount in. A local directory is not mounted.
    pub(crate) fn mounted_by(&self) -> Option<MountedBy> {
        let point = kernel::mounted_at(&self.directory).ok().flatten()?;
        self.is_ours(&point).then(|| match self.mounted_below(&point) {
            Some(WORKER_MOUNTS) => MountedBy::Worker,
            Some(_) => MountedBy::Token,
            None => MountedBy::Address,
        })
    }

    /// Below which name of the export its secret path is from now on, if it is asked for one.
    pub(super) fn mounts_below(&self) -> Option<&'static str> {
        self.options.mount_path.as_ref()?.mounts_below()
    }

    /// Whether a mount goes on by the same path as one that would be made now.
    pub(super) async fn is_mounted_alike(&self, point: &MountPoint) -> bool {
        let Some(source) = &self.options.mount_path else {
            return self.mounted_below(point).is_none();
        };
        // Where that cannot be said, no other mount could be made.
        let now = source.mounts_below();
        if now.is_none() || now == self.mounted_below(point) {
            return true;
        }
        // An appliance of release 0.2 has no secret paths.
        let path = timeout_at(Instant::now() + FIRST_MOUNT_TIME_LIMIT, source.get()).await;
        let is_by_address = matches!(path, Ok(Ok(path)) if path == self.options.export);
        is_by_address && self.mounted_below(point).is_none()
    }

    /// Whether the appliance refuses the handles of a mount by the kernel: those of a token that is gone, or of an address.
    pub(super) async fn is_refused(&self) -> bool {
        // It asks the appliance each time, for what the kernel does not keep.
        let call = self.tools.call(STAT).limit(FIRST_MOUNT_TIME_LIMIT).arguments(["-f", "--"]);
        let outcome = call.argument(&self.directory).run().await;
        outcome.is_err_and(|error| tools::says(&error, "Permission denied"))
    }

    /// Whether the appliance whose export is mounted answers within the limit, whatever it says.
    pub(super) async fn is_answered(&self, limit: Duration) -> bool {
        let call = self.tools.call(STAT).limit(limit).arguments(["-f", "--"]);
        let outcome = call.argument(&self.directory).run().await;
        !matches!(outcome, Err(AttachError::TimedOut { .. }))
    }

    /// What the mount table shows as the source of the export; a secret path has more names behind it.
    pub(super) fn source(&self) -> String {
        let Options { nfs_address, export, .. } = &self.options;
        let export = export.trim_end_matches('/');
        match self.method {
            Method::Nfs => nfs_source(*nfs_address, export),
            Method::Fuse => format!("{nfs_address}{export}"),
        }
    }

    /// Mounts the export and its snapshots where they are not mounted yet.
    pub(super) async fn mount_nfs(&self, limit: Duration) -> Result<(), AttachError> {
        let _turn = self.locks.lock(&self.directory).await;
        let both = [("", &self.directory, "rw"), (SNAPSHOTS, &self.snapshots, "ro")];
        let deadline = Instant::now() + limit;
        for (below, directory, access) in both {
            match kernel::mounted_at(directory)? {
                Some(point) if point.has(NO_LINKS) => continue,
                Some(_) => {}
                None => {
                    make_directory(directory)?;
                    self.mount_nfs_at(directory, below, access, deadline).await?;
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            self.refuse_links(directory, left).await?;
        }
        Ok(())
    }

    /// Mounts what is `below` the export.
    pub(super) async fn mount_nfs_at(
        &self,
        directory: &Path,
        below: &str,
        access: &str,
        deadline: Instant,
    ) -> Result<(), AttachError> {
        let export = &self.options.export;
        let mut tries = MOUNT_TRIES;
        loop {
            tries -= 1;
            let path = self.path_to_mount(deadline).await?;
            let path = path.trim_end_matches('/');
            match self.mount_path_at(path, directory, below, access, deadline).await {
                // What the tool says has the path in it. An appliance that restarts forgets secret paths.
                Err(AttachError::Tool { reason, .. }) if tries == 0 || path == export => {
                    return Err(self.refused(reason.replace(path, export)));
                }
                Err(AttachError::Tool { .. }) => {}
                outcome => return outcome,
            }
        }
    }

    /// The path by which the export is mounted now.
    async fn path_to_mount(&self, deadline: Instant) -> Result<String, AttachError> {
        let Some(source) = &self.options.mount_path else {
            return Ok(self.options.export.clone());
        };
        match timeout_at(deadline, source.get()).await {
            Ok(path) => path.map_err(|reason| AttachError::NoPath {
                address: self.options.nfs_address,
                reason,
            }),
            Err(_) => Err(self.refused("its REST face gave no path in time".to_owned())),
        }
    }

    /// The export cannot be mounted, for this reason.
    fn refused(&self, reason: String) -> AttachError {
        let Options { nfs_address: address, export, .. } = &self.options;
        AttachError::Export { address: *address, export: export.clone(), reason }
    }

    /// Mounts what is `below` a path, which may be a secret and is not for the process list: `mount` reads it as a line of
    /// a file system table. Its errors have the path.
    async fn mount_path_at(
        &self,
        path: &str,
        directory: &Path,
        below: &str,
        access: &str,
        deadline: Instant,
    ) -> Result<(), AttachError> {
        let address = self.options.nfs_address;
        let whole = format!("{path}/{below}");
        let source = nfs_source(address, whole.trim_end_matches('/'));
        let options = nfs_options(address, access);
        let line = table_line(&source, directory, NFS_FILE_SYSTEM, &options);
        let input = tools::input(&line).map_err(|source| AttachError::System {
            action: "make",
            path: "the input of mount".into(),
            source,
        })?;
        let left = deadline.saturating_duration_since(Instant::now());
        // Not `/dev/stdin`, which a machine without udev does not have; and of a file in memory, as `mount` takes no pipe.
        let table = ["-n", "-i", "-T", "/proc/self/fd/0"];
        let call = self.tools.call(MOUNT).limit(left).arguments(table).input(input);
        call.argument(directory).run().await.map(drop)
    }

    /// Has the kernel follow no symbolic link of a mount of the export, for any program. Who may
    /// write the export could put one in the place of a disk, and it would lead to a file of this
    /// machine.
    pub(super) async fn refuse_links(
        &self,
        directory: &Path,
        limit: Duration,
    ) -> Result<(), AttachError> {
        if refuses_links(directory)? {
            return Ok(());
        }
        // It sets all of them, and of this mount only.
        let access = if directory == self.snapshots { "ro" } else { "rw" };
        let options = format!("remount,bind,{access},{MOUNT_OPTIONS},{NO_LINKS}");
        let call = self.tools.call(MOUNT).limit(limit).arguments(["-n", "-i", "-o", &options]);
        let reason = match call.argument(directory).run().await {
            Ok(_) if refuses_links(directory)? => return Ok(()),
            Ok(_) => "the kernel does not know it".to_owned(),
            Err(AttachError::Tool { reason, .. }) => reason,
            Err(other) => return Err(other),
        };
        Err(AttachError::Missing {
            what: format!(
                "the mount option `{NO_LINKS}` ({reason}), without which a link on the appliance may lead to this machine's own files,"
            ),
            advice:
                "use Linux 5.10 or newer, and a mount(8) that knows it, as that of Debian 12 does"
                    .to_owned(),
        })
    }
}

/// The options of an NFS mount. `hard`: I/O waits for the appliance and never fails because of
/// its absence. `lookupcache=positive`: the driver makes files over REST, so that a name which
/// was not there is looked up again.
fn nfs_options(address: SocketAddr, access: &str) -> String {
    let (ip, port) = (address.ip(), address.port());
    let transport = if address.is_ipv6() { "tcp6" } else { "tcp" };
    format!(
        "{access},vers=3,proto={transport},mountproto={transport},addr={ip},mountaddr={ip},\
         port={port},mountport={port},nolock,hard,rsize=1048576,wsize=1048576,\
         lookupcache=positive,{MOUNT_OPTIONS}"
    )
}

fn nfs_source(address: SocketAddr, export: &str) -> String {
    match address {
        SocketAddr::V4(address) => format!("{}:{export}", address.ip()),
        SocketAddr::V6(address) => format!("[{}]:{export}", address.ip()),
    }
}

/// A line of a file system table (fstab(5)), in which what ends a word is written as an octal number.
fn table_line(source: &str, directory: &Path, kind: &str, options: &str) -> Vec<u8> {
    let directory = directory.as_os_str().as_bytes();
    let mut line = Vec::new();
    for word in [source.as_bytes(), directory, kind.as_bytes(), options.as_bytes(), b"0", b"0"] {
        for &byte in word {
            match byte {
                b' ' | b'\t' | b'\n' | b'\\' | b'#' => line.extend(format!("\\{byte:03o}").bytes()),
                _ => line.push(byte),
            }
        }
        line.push(b' ');
    }
    line.push(b'\n');
    line
}

/// The source of a mount as it may be shown.
pub(super) fn without_secret(source: &Path) -> String {
    let source = source.display().to_string();
    let cut = |mounts| {
        let (export, _) = source.split_once(&format!("/{mounts}/"))?;
        Some(format!("{export}/{mounts}/..."))
    };
    SECRET_MOUNTS.into_iter().find_map(cut).unwrap_or(source)
}

/// NFS where the kernel has it, else FUSE.
pub(crate) async fn choose_method(tools: &Tools) -> Method {
    if has_nfs(tools).await { Method::Nfs } else { Method::Fuse }
}

/// Whether the kernel has an NFS client, as a part or as a module.
pub(crate) async fn has_nfs(tools: &Tools) -> bool {
    if !kernel::has_file_system(NFS_FILE_SYSTEM) {
        // Whether there is such a module shows in the list afterwards.
        let _absent = tools.call(MODPROBE).arguments(["-q", "nfsv3"]).run().await;
    }
    kernel::has_file_system(NFS_FILE_SYSTEM)
}

/// Whether no symbolic link of what is mounted there is followed.
fn refuses_links(directory: &Path) -> Result<bool, AttachError> {
    Ok(kernel::mounted_at(directory)?.is_none_or(|point| point.has(NO_LINKS)))
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::sync::Arc;

    use super::super::tests::local;
    use super::*;

    #[test]
    fn addresses_of_both_families_make_options_that_the_kernel_takes() {
        let address = "10.0.0.5:2050".parse().unwrap();
        assert_eq!(nfs_source(address, "/slackwater"), "10.0.0.5:/slackwater");
        let options = nfs_options(address, "rw");
        assert!(options.contains("proto=tcp,") && options.contains("addr=10.0.0.5,"), "{options}");
        assert!(options.contains("port=2050,mountport=2050"), "{options}");
        let address = "[fd00::1]:2049".parse().unwrap();
        assert_eq!(nfs_source(address, "/slackwater"), "[fd00::1]:/slackwater");
        assert!(nfs_options(address, "ro").starts_with("ro,vers=3,proto=tcp6,"));
    }

    #[tokio::test]
    async fn a_mount_is_known_by_its_source() {
        let directory = tempfile::tempdir().unwrap();
        let (nfs, fuse) = (Some(Method::Nfs), Some(Method::Fuse));
        let (worker, whole) = (Some(".worker"), Some(".export"));
        let secret = |mounts: &str| format!("/slackwater/{mounts}/{}", "5a".repeat(32));
        let v4 = |path: &str| format!("10.0.0.5:{path}");
        let (of_worker, of_whole) = (v4(&secret(".worker")), v4(&secret(".export")));
        let of_fuse = |path: &str| format!("10.0.0.5:2050{path}");
        let v6 = format!("[fd00::1]:{}", secret(".worker"));
        let other_names = v4("/slackwater/.workerx/a");
        for (method, address, source, port, is_ours, below) in [
            (nfs, "10.0.0.5:2050", &v4("/slackwater"), "port=2050", true, None),
            (nfs, "10.0.0.5:2050", &of_worker, "port=2050", true, worker),
            (nfs, "10.0.0.5:2050", &of_whole, "port=2050", true, whole),
            (nfs, "10.0.0.5:2050", &of_worker, "port=2051", false, worker),
            (nfs, "10.0.0.5:2049", &of_worker, "hard", true, worker),
            (nfs, "10.0.0.5:2050", &other_names, "port=2050", false, None),
            (nfs, "10.0.0.5:2050", &v4("/slackwater2"), "port=2050", false, None),
            (nfs, "10.0.0.6:2050", &of_worker, "port=2050", false, None),
            (nfs, "[fd00::1]:2050", &v6, "port=2050", true, worker),
            (fuse, "10.0.0.5:2050", &of_fuse("/slackwater"), "", true, None),
            (fuse, "10.0.0.5:2050", &of_fuse("/slackwater/.worker"), "", true, worker),
            (fuse, "10.0.0.5:2050", &of_fuse("/slackwater/.export"), "", true, whole),
            (fuse, "10.0.0.5:2051", &of_fuse("/slackwater/.worker"), "", false, None),
        ] {
            let export = local(directory.path(), method, address).await;
            let kind = if method == nfs { NFS_FILE_SYSTEM } else { serving::FILE_SYSTEM };
            let point = MountPoint {
                target: "/export".into(),
                root: "/".into(),
                kind: kind.to_owned(),
                source: source.into(),
                read_only: false,
                mount_options: "rw".to_owned(),
                options: format!("rw,{port}"),
            };
            assert_eq!(export.is_ours(&point), is_ours, "{source} {port}");
            assert_eq!(export.mounted_below(&point), below, "{source} {port}");
            assert!(!without_secret(&point.source).contains("5a5a"));
        }
        let shown = |source: &str| without_secret(Path::new(source));
        assert_eq!(shown(&of_worker), "10.0.0.5:/slackwater/.worker/...");
        assert_eq!(shown(&of_whole), "10.0.0.5:/slackwater/.export/...");
        assert_eq!(shown("10.0.0.5:/a"), "10.0.0.5:/a");
    }

    /// Gives a path that no appliance has.
    #[derive(Debug)]
    struct Secret;

    impl crate::PathSource for Secret {
        fn mounts_below(&self) -> Option<&'static str> {
            Some(".worker")
        }

        fn get(&self) -> Pin<Box<dyn Future<Output = Result<String, String>> + Send + '_>> {
            Box::pin(async { Ok("/slackwater/.worker/s3cret".to_owned()) })
        }
    }

    /// Without a server, without NFS in the kernel, or without root's rights the mount fails. The error has no path.
    #[tokio::test]
    async fn a_mount_that_fails_does_not_tell_its_secret_path() {
        let directory = tempfile::tempdir().unwrap();
        let export = local(directory.path(), Some(Method::Nfs), "127.0.0.1:9").await;
        let mut export = Arc::into_inner(export).unwrap();
        export.options.mount_path = Some(Arc::new(Secret));
        let deadline = Instant::now() + Duration::from_secs(20);
        let target = make_directory(&directory.path().join("target")).unwrap();
        let error = export.mount_nfs_at(&target, SNAPSHOTS, "ro", deadline).await.unwrap_err();
        assert!(!format!("{error} {error:?}").contains("s3cret"), "{error:?}");
    }

    #[test]
    fn a_line_of_the_table_keeps_its_words() {
        let line = table_line("10.0.0.5:/a", Path::new("/b c\\#\u{e9}"), "nfs", "ro,hard");
        let expected = "10.0.0.5:/a /b\\040c\\134\\043\u{e9} nfs ro,hard 0 0 \n";
        assert_eq!(String::from_utf8(line).unwrap(), expected);
    }
}
