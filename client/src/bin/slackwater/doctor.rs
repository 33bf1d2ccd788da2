//! `slackwater doctor`: what this machine lacks to attach disks of the appliance.
//!
//! A disk is attached by the kernel's NFS client, or by FUSE where there is none; both end in a
//! loop device with ext4. So a worker needs: (NFS client and mount.nfs) or FUSE; loop; ext4's
//! tools; an appliance that answers.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use clap::Args;
use serde::Serialize;
use slackwater_client::RetryPolicy;

use crate::arguments::Global;
use crate::context::Context;
use crate::failure::Failure;
use crate::output::{Align, Output, Table};
use crate::rpc::{self, Program};

/// Seconds to wait for each answer of the appliance: a diagnosis is to be quick.
const TIMEOUT_SECONDS_MAX: u64 = 5;

/// The port of NFS (RFC 1813 section 2.1).
const NFS_PORT: u16 = 2049;

/// Where system programs are that an ordinary user's PATH may lack.
const SYSTEM_FOLDERS: [&str; 3] = ["sbin", "usr/sbin", "usr/local/sbin"];

/// Checks this machine and the appliance; exit code 6 if something needed is missing.
#[derive(Debug, Args)]
pub(crate) struct DoctorArguments {
    /// Address of the appliance's NFS face, HOST or HOST:PORT [default: host of --api, port 2049]
    #[arg(long, value_name = "ADDRESS", env = "SLACKWATER_NFS")]
    nfs: Option<String>,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Finding {
    name: &'static str,
    ok: bool,
    detail: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

impl Finding {
    fn new(name: &'static str, outcome: Result<String, String>, remedy: &str) -> Self {
        match outcome {
            Ok(detail) => Self { name, ok: true, detail, remedy: None },
            Err(detail) => Self { name, ok: false, detail, remedy: Some(remedy.to_owned()) },
        }
    }
}

/// All that was found.
#[derive(Debug, Serialize)]
struct Report {
    /// Disks can be attached here.
    ready: bool,
    /// In which ways.
    attach: Vec<&'static str>,
    checks: Vec<Finding>,
}

const NFS_CLIENT: &str = "kernel NFS client";
const MOUNT_NFS: &str = "mount.nfs";
const LOOP: &str = "loop devices";
const MKFS: &str = "mkfs.ext4";
const FUSE: &str = "FUSE";
const REST: &str = "appliance, REST";
const TOKEN: &str = "appliance, token";
const NFS: &str = "appliance, NFS";
const MOUNT: &str = "appliance, MOUNT";

pub(crate) async fn run(global: &Global, arguments: DoctorArguments) -> Result<(), Failure> {
    let mut global = global.clone();
    global.timeout = global.timeout.min(TIMEOUT_SECONDS_MAX);
    let context = Context::new(&global)?;
    let (host, port) = nfs_address(arguments.nfs.as_deref(), &global.api)?;
    let machine = Machine { root: PathBuf::from("/"), path: std::env::var_os("PATH") };
    let mut checks = machine.findings().await;
    checks.extend(appliance_findings(&context).await);
    let place = format!("{host}:{port}");
    for (name, program) in [(NFS, rpc::NFS), (MOUNT, rpc::MOUNT)] {
        checks.push(nfs_finding(name, program, &host, port, &place).await);
    }
    let report = judge(checks);
    context.output.result(&report, || describe(&report))?;
    summarize(context.output, &report);
    if report.ready { Ok(()) } else { Err(Failure::Problems) }
}

/// The parts of this machine; `root` is `/` but in tests.
struct Machine {
    root: PathBuf,
    path: Option<std::ffi::OsString>,
}

impl Machine {
    async fn findings(&self) -> Vec<Finding> {
        vec![
            Finding::new(
                NFS_CLIENT,
                self.nfs_client().await,
                "use a kernel with NFS (its module is `nfs`), or attach by FUSE",
            ),
            Finding::new(MOUNT_NFS, self.program("mount.nfs"), "apt-get install nfs-common"),
            Finding::new(LOOP, self.device("dev/loop-control"), "modprobe loop"),
            Finding::new(MKFS, self.program("mkfs.ext4"), "apt-get install e2fsprogs"),
            Finding::new(
                FUSE,
                self.device("dev/fuse"),
                "modprobe fuse; in a container, pass the device /dev/fuse",
            ),
        ]
    }

    async fn nfs_client(&self) -> Result<String, String> {
        let known = std::fs::read_to_string(self.root.join("proc/filesystems")).unwrap_or_default();
        if known.lines().any(|line| line.split_whitespace().last() == Some("nfs")) {
            return Ok("in the kernel".to_owned());
        }
        let modprobe =
            self.find("modprobe").ok_or("not in the kernel, and there is no modprobe")?;
        // -n: only whether it could be loaded; the first mount loads it.
        let dry_run = tokio::process::Command::new(modprobe)
            .args(["-n", "nfs"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        match dry_run.await {
            Ok(status) if status.success() => Ok("a module that can be loaded".to_owned()),
            _ => Err("neither in the kernel nor a module of it".to_owned()),
        }
    }

    fn device(&self, path: &str) -> Result<String, String> {
        let device = self.root.join(path);
        if device.exists() { Ok(format!("/{path}")) } else { Err(format!("no /{path}")) }
    }

    fn program(&self, name: &str) -> Result<String, String> {
        let found = self.find(name).ok_or_else(|| format!("no program {name}"))?;
        Ok(found.display().to_string())
    }

    fn find(&self, name: &str) -> Option<PathBuf> {
        let searched = self.path.as_deref().map(std::env::split_paths).into_iter().flatten();
        let system = SYSTEM_FOLDERS.iter().map(|folder| self.root.join(folder));
        searched.chain(system).map(|folder| folder.join(name)).find(|path| is_program(path))
    }
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

async fn appliance_findings(context: &Context) -> [Finding; 2] {
    let client = context.client.with_retry(RetryPolicy::never());
    let ready = match client.healthz().await {
        Ok(_) => client.readyz().await.map(|_| format!("{} is ready", client.url())),
        Err(error) => Err(error),
    };
    let stats = client.stats().await.map(|stats| format!("accepted; release {}", stats.version));
    [
        Finding::new(
            REST,
            ready.map_err(|error| error.to_string()),
            "start slackwaterd, or set --api (and --ca where it has a certificate of its own)",
        ),
        Finding::new(TOKEN, stats.map_err(|error| error.to_string()), crate::failure::TOKEN_ADVICE),
    ]
}

async fn nfs_finding(
    name: &'static str,
    program: Program,
    host: &str,
    port: u16,
    place: &str,
) -> Finding {
    let outcome = rpc::null(host, port, program).await;
    Finding::new(
        name,
        outcome.map(|()| format!("{place} answers")).map_err(|error| format!("{place}: {error}")),
        "set --nfs to where slackwaterd listens (--nfs-listen), and let the firewall pass it",
    )
}

/// Host and port of the NFS face.
fn nfs_address(given: Option<&str>, api: &str) -> Result<(String, u16), Failure> {
    let refuse =
        |text: &str| Failure::Usage(format!("`{text}` is no address: expected HOST or HOST:PORT"));
    // reqwest's parser knows hosts, ports and IPv6 brackets.
    let text = given.map_or_else(|| api.to_owned(), |given| format!("nfs://{given}"));
    let url = reqwest::Url::parse(&text).map_err(|_| refuse(given.unwrap_or(api)))?;
    let host = url.host_str().filter(|host| !host.is_empty()).ok_or_else(|| refuse(&text))?;
    let port = given.and_then(|_| url.port()).unwrap_or(NFS_PORT);
    Ok((host.trim_matches(['[', ']']).to_owned(), port))
}

fn judge(checks: Vec<Finding>) -> Report {
    let ok = |name: &str| checks.iter().any(|finding| finding.name == name && finding.ok);
    let mut attach = Vec::new();
    let has_disks = ok(LOOP) && ok(MKFS);
    if has_disks && ok(NFS_CLIENT) && ok(MOUNT_NFS) {
        attach.push("nfs");
    }
    if has_disks && ok(FUSE) {
        attach.push("fuse");
    }
    let answers = [REST, TOKEN, NFS, MOUNT].iter().all(|name| ok(name));
    Report { ready: answers && !attach.is_empty(), attach, checks }
}

fn describe(report: &Report) -> String {
    let mut table =
        Table::new(&[("CHECK", Align::Left), ("STATE", Align::Left), ("DETAIL", Align::Left)]);
    let rows: Vec<Vec<String>> = report
        .checks
        .iter()
        .map(|finding| {
            let state = if finding.ok { "OK" } else { "MISSING" };
            let remedy = finding.remedy.iter().map(|remedy| format!("; remedy: {remedy}"));
            let detail = std::iter::once(finding.detail.clone()).chain(remedy).collect();
            vec![finding.name.to_owned(), state.to_owned(), detail]
        })
        .collect();
    table.page(&rows)
}

fn summarize(output: Output, report: &Report) {
    match (report.attach.as_slice(), report.ready) {
        (ways, true) => output.remark(&format!("disks can be attached by {}", ways.join(" and "))),
        ([], false) => {
            output.remark("no disk can be attached here: neither NFS nor FUSE is complete")
        }
        (_, false) => {
            output.remark("no disk can be attached: the appliance does not answer as it should")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn finding(name: &'static str, ok: bool) -> Finding {
        Finding::new(name, if ok { Ok(String::new()) } else { Err("gone".into()) }, "do this")
    }

    fn judged(missing: &[&'static str]) -> Report {
        let all = [NFS_CLIENT, MOUNT_NFS, LOOP, MKFS, FUSE, REST, TOKEN, NFS, MOUNT];
        judge(all.iter().map(|&name| finding(name, !missing.contains(&name))).collect())
    }

    #[test]
    fn one_way_to_attach_is_enough_but_the_appliance_must_answer() {
        assert_eq!(judged(&[]).attach, ["nfs", "fuse"]);
        let without_nfs = judged(&[NFS_CLIENT, MOUNT_NFS]);
        assert!(without_nfs.ready && without_nfs.attach == ["fuse"]);
        assert_eq!(judged(&[FUSE]).attach, ["nfs"]);
        for missing in [LOOP, MKFS, REST, TOKEN, NFS, MOUNT] {
            assert!(!judged(&[missing]).ready, "{missing}");
        }
        assert!(!judged(&[MOUNT_NFS, FUSE]).ready);
    }

    #[test]
    fn what_is_missing_comes_with_its_remedy() {
        let text = describe(&judged(&[MKFS]));
        assert!(text.contains("mkfs.ext4          MISSING  gone; remedy: do this"), "{text}");
        assert_eq!(text.matches("OK").count(), 8);
    }

    #[tokio::test]
    async fn a_machine_is_looked_through() {
        let root = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str, mode: u32| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let machine = Machine { root: root.path().to_owned(), path: None };
        assert!(machine.findings().await.iter().all(|finding| !finding.ok));
        put("proc/filesystems", "nodev\tnfsd\n\text4\n", 0o644);
        put("usr/sbin/mount.nfs", "", 0o644);
        assert!(machine.findings().await.iter().all(|finding| !finding.ok));
        put("proc/filesystems", "nodev\tnfsd\nnodev\tnfs\n\text4\n", 0o644);
        put("usr/sbin/mount.nfs", "", 0o755);
        put("sbin/mkfs.ext4", "", 0o755);
        put("dev/loop-control", "", 0o600);
        put("dev/fuse", "", 0o600);
        let findings = machine.findings().await;
        assert!(findings.iter().all(|finding| finding.ok), "{findings:?}");
    }

    #[test]
    fn the_nfs_face_is_beside_the_rest_face_unless_told_otherwise() {
        let address = |given, api| nfs_address(given, api).unwrap();
        let api = "http://10.0.0.1:8049";
        assert_eq!(address(None, api), ("10.0.0.1".to_owned(), 2049));
        assert_eq!(address(Some("nas:12049"), api), ("nas".to_owned(), 12049));
        assert_eq!(address(Some("[::1]:7"), api), ("::1".to_owned(), 7));
        assert_eq!(address(None, "https://[::1]"), ("::1".to_owned(), 2049));
        assert!(nfs_address(Some("a b"), api).is_err());
    }
}
