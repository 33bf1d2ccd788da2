//! What this machine has of what attaching needs, with advice for what it has not.

use std::net::SocketAddr;
use std::path::Path;

use crate::export::has_nfs;
use crate::image;
use crate::tools::{MODPROBE, NEEDED, SANDBOXED, Tool, Tools, search_path};
use crate::{Attach, Method, kernel, sandbox, serving};

/// What `probe` found of one need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What was looked for.
    pub what: String,
    /// Whether it is there.
    pub is_present: bool,
    /// Whether nothing works without it.
    pub is_required: bool,
    /// What to do where it is not; empty where it is.
    pub advice: String,
}

/// What the kernel and the tools of this machine can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// The method that would be taken; `None` if none works.
    pub method: Option<Method>,
    /// Whether EROFS images can be mounted.
    pub has_images: bool,
    /// One line for each need.
    pub findings: Vec<Finding>,
}

impl Finding {
    fn new(what: &str, is_present: bool, is_required: bool, advice: &str) -> Self {
        let advice = if is_present { String::new() } else { advice.to_owned() };
        Self { what: what.to_owned(), is_present, is_required, advice }
    }
}

/// The first kernel with the mount option `nosymfollow`.
const NO_LINKS_RELEASE: (u32, u32) = (5, 10);

/// Looks at this machine. `wanted` is the method that the settings ask for.
pub(crate) async fn probe(wanted: Option<Method>) -> Probe {
    // No tool is started that would wait for an appliance.
    let tools = Tools::new(SocketAddr::from(([0, 0, 0, 0], 0)), &[]);
    let is_root = rustix::process::geteuid().is_root();
    let has_nfs = has_nfs(&tools).await;
    let has_fuse = Path::new("/dev/fuse").exists() && serving::has_descriptors();
    let method = match wanted {
        Some(Method::Nfs) | None if has_nfs => Some(Method::Nfs),
        Some(Method::Fuse) | None if has_fuse => Some(Method::Fuse),
        _ => None,
    };
    let needs_nfs = wanted == Some(Method::Nfs);
    let needs_fuse = wanted == Some(Method::Fuse) || (wanted.is_none() && !has_nfs);
    let mut findings = vec![
        Finding::new("root", is_root, true, "run it as root: it mounts file systems"),
        Finding::new(
            "loop devices",
            Path::new("/dev/loop-control").exists(),
            true,
            "modprobe loop, or take a kernel with CONFIG_BLK_DEV_LOOP",
        ),
        Finding::new(
            "ext4",
            has_file_system(&tools, "ext4").await,
            true,
            "modprobe ext4, or take a kernel with CONFIG_EXT4_FS",
        ),
        Finding::new(
            "NFS client of the kernel",
            has_nfs,
            needs_nfs,
            "modprobe nfsv3, take a kernel with CONFIG_NFS_V3, or use --attach fuse",
        ),
        Finding::new(
            "FUSE with descriptors of other processes (Linux 5.6)",
            has_fuse,
            needs_fuse,
            "modprobe fuse, take Linux 5.6 or newer, or use --attach nfs",
        ),
    ];
    findings.push(Finding::new(
        "mounts that follow no symbolic links (Linux 5.10)",
        kernel::release().is_some_and(|release| release >= NO_LINKS_RELEASE),
        true,
        "take Linux 5.10 or newer",
    ));
    let has_images = has_file_system(&tools, image::FILE_SYSTEM).await;
    findings.push(Finding::new(
        "EROFS, for layers as images",
        has_images,
        false,
        "modprobe erofs, or take a kernel with CONFIG_EROFS_FS; without it layers are disks",
    ));
    findings.push(Finding::new(
        "images without a loop device (Linux 6.12)",
        Attach::mounts_images_from_files(),
        false,
        "take Linux 6.12 or newer; older ones mount each image through a loop device",
    ));
    findings.extend(NEEDED.iter().map(|tool| {
        let advice = format!("apt-get install {}", tool.package);
        let is_there = match SANDBOXED.contains(tool) {
            true => sandbox::program(tool.program.as_ref()).is_some(),
            false => is_installed(tool),
        };
        Finding::new(tool.program, is_there, true, &advice)
    }));
    Probe { method, has_images, findings }
}

/// Whether the kernel has a file system, or a module that brings it.
pub(crate) async fn has_file_system(tools: &Tools, name: &str) -> bool {
    if !kernel::has_file_system(name) {
        // Whether there is such a module shows in the list afterwards.
        let _absent = tools.call(MODPROBE).arguments(["-q", name]).run().await;
    }
    kernel::has_file_system(name)
}

fn is_installed(tool: &Tool) -> bool {
    std::env::split_paths(&search_path()).any(|folder| folder.join(tool.program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_missing_comes_with_advice_and_what_is_there_without() {
        let probe = probe(None).await;
        assert!(probe.findings.len() > NEEDED.len());
        for finding in &probe.findings {
            assert_eq!(finding.is_present, finding.advice.is_empty(), "{finding:?}");
        }
        let absent = Tool { program: "slackwater-no-such-tool", package: "nothing" };
        assert!(!is_installed(&absent));
    }
}
