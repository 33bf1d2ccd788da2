//! A mount of the export, served by a runtime of its own that stands for a process: it can be
//! killed and followed by another one.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::{Advice, fadvise};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use slackwater_client::Client;
use slackwater_fuse::{ServeError, ServeOptions, WorkerCertificate, serve};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use super::appliance::{Appliance, runtime};

/// Longer than anything that a test waits for.
pub const LIMIT: Duration = Duration::from_secs(240);

struct Process {
    runtime: Runtime,
    serving: JoinHandle<Result<(), ServeError>>,
}

/// What keeps a mount alive.
#[derive(Default)]
struct Running {
    process: Option<Process>,
    /// One that was taken for dead.
    earlier: Option<Process>,
    /// As the keeper of a real mount holds it.
    descriptor: Option<OwnedFd>,
}

impl Running {
    /// Closes the last descriptors of the mount: the kernel ends it, and with an error whatever
    /// waits for it. Without this a thread of the test that waits for the mount would keep the
    /// whole process from ending, also when it is killed.
    fn end(&mut self) {
        for process in [self.process.take(), self.earlier.take()].into_iter().flatten() {
            process.runtime.shutdown_timeout(Duration::from_secs(10));
        }
        self.descriptor = None;
    }
}

/// Fields in the order in which they must go.
pub struct Mount {
    running: Arc<Mutex<Running>>,
    _watchdog: mpsc::Sender<()>,
    client: Client,
    nfs_address: SocketAddr,
    certificate: Option<WorkerCertificate>,
    directory: PathBuf,
    is_mounted: bool,
    pub folder: TempDir,
}

impl Mount {
    pub fn new(appliance: &Appliance) -> Self {
        Self::through(appliance, appliance.nfs_address)
    }

    /// With NFS by way of another address.
    pub fn through(appliance: &Appliance, nfs_address: SocketAddr) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let running = Arc::new(Mutex::new(Running::default()));
        let (watchdog, is_over) = mpsc::channel::<()>();
        let watched = Arc::clone(&running);
        std::thread::spawn(move || {
            if is_over.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
                watched.lock().unwrap().end();
            }
        });
        let mut mount = Self {
            running,
            _watchdog: watchdog,
            client: appliance.client.clone(),
            nfs_address,
            certificate: appliance.worker_certificate(),
            directory: folder.path().join("export"),
            is_mounted: false,
            folder,
        };
        std::fs::create_dir(&mount.directory).unwrap();
        mount.mount();
        mount
    }

    /// Mounts it, with what the cache of an earlier mount of this test has.
    pub fn mount(&mut self) {
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse");
        let device = device.expect("this test needs root and /dev/fuse");
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
            device.as_raw_fd()
        );
        let options = CString::new(options).unwrap();
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        rustix::mount::mount("slackwater", &self.directory, "fuse", flags, &*options)
            .expect("this test needs root, to mount");
        self.is_mounted = true;
        self.running.lock().unwrap().descriptor = Some(device.into());
        self.serve(false);
    }

    fn serve(&mut self, resume: bool) {
        let runtime = runtime();
        let options = ServeOptions {
            client: self.client.clone(),
            nfs_address: self.nfs_address,
            certificate: self.certificate.clone(),
            export: "/slackwater".to_owned(),
            cache_directory: self.folder.path().join("cache"),
            cache_size_bytes: 64 << 20,
            state_directory: self.folder.path().join("state"),
        };
        let mut running = self.running.lock().unwrap();
        let descriptor = running.descriptor.as_ref().unwrap().try_clone().unwrap();
        let serving = runtime.spawn(serve(options, descriptor, resume));
        running.process = Some(Process { runtime, serving });
    }

    /// Ends the serving process where it stands.
    pub fn kill(&mut self) {
        let process = self.running.lock().unwrap().process.take().expect("nobody serves");
        process.runtime.shutdown_timeout(LIMIT);
    }

    /// The process that follows one that was killed.
    pub fn resume(&mut self) {
        self.serve(true);
    }

    /// A process that follows one which is alive.
    pub fn resume_too_early(&mut self) {
        let mut running = self.running.lock().unwrap();
        running.earlier = running.process.take();
        drop(running);
        self.serve(true);
    }

    /// Ends the process that was followed too early.
    pub fn kill_earlier(&mut self) {
        let process = self.running.lock().unwrap().earlier.take().expect("there is none");
        process.runtime.shutdown_timeout(LIMIT);
    }

    /// Unmounts, and waits for the serving process, which must end well.
    pub fn unmount(&mut self) {
        let end = Instant::now() + LIMIT;
        while let Err(error) = rustix::mount::unmount(&self.directory, UnmountFlags::empty()) {
            // A loop device on its file may be let go late: by udev, which looks at devices.
            assert!(error == Errno::BUSY && Instant::now() < end, "it is not unmounted: {error}");
            std::thread::sleep(Duration::from_millis(20));
        }
        self.is_mounted = false;
        let mut running = self.running.lock().unwrap();
        let Process { runtime, serving } = running.process.take().expect("nobody serves");
        let ended = runtime.block_on(async { tokio::time::timeout(LIMIT, serving).await });
        ended.expect("it serves an export that is unmounted").unwrap().unwrap();
        runtime.shutdown_timeout(LIMIT);
        running.descriptor = None;
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub fn open(&self, name: &str) -> File {
        let path = self.path(name);
        OpenOptions::new().read(true).write(true).open(&path).unwrap()
    }

    pub fn statistics(&self) -> serde_json::Value {
        let bytes = std::fs::read(self.path(".slackwater-stats")).unwrap();
        serde_json::from_slice(&bytes).unwrap()
    }

    /// Bytes that the mount read from the appliance so far.
    pub fn fetched(&self) -> u64 {
        self.statistics()["bytes_read_from_appliance"].as_u64().unwrap()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.is_mounted {
            let _ = rustix::mount::unmount(&self.directory, UnmountFlags::DETACH);
        }
        self.running.lock().unwrap().end();
    }
}

/// Makes the kernel forget the file's pages, so that they are read anew.
pub fn forget_pages(file: &File) {
    fadvise(file, 0, None, Advice::DontNeed).unwrap();
}

/// Runs a tool, which must succeed within two minutes, and gives what it prints.
pub fn run(command: &[&str]) -> String {
    let mut bounded = Command::new("timeout");
    let output = bounded.args(["-k", "5", "120"]).args(command).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} ends with {}: {error}", output.status);
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// A loop device on a file of the mount, mounted as ext4 once told to.
pub struct LoopMount {
    pub device: String,
    pub directory: PathBuf,
    is_mounted: bool,
}

impl LoopMount {
    pub fn attach(file: &Path, directory: &Path) -> Self {
        std::fs::create_dir_all(directory).unwrap();
        // As the driver does.
        let call = ["losetup", "--find", "--show", "--direct-io=on", file.to_str().unwrap()];
        let device = run(&call);
        Self { device, directory: directory.to_owned(), is_mounted: false }
    }

    pub fn mount(&mut self) {
        run(&["mount", "-t", "ext4", &self.device, self.directory.to_str().unwrap()]);
        self.is_mounted = true;
    }

    pub fn unmount(&mut self) {
        run(&["umount", self.directory.to_str().unwrap()]);
        self.is_mounted = false;
    }
}

impl Drop for LoopMount {
    fn drop(&mut self) {
        let bounded = |command: &[&str]| {
            let _ = Command::new("timeout").args(["-k", "5", "20"]).args(command).status();
        };
        if self.is_mounted {
            bounded(&["umount", "-l", self.directory.to_str().unwrap()]);
        }
        bounded(&["losetup", "-d", &self.device]);
    }
}
