//! Exports in a mount namespace that ends with its processes, as that of a container: whatever ends first, no process
//! waits for ever.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::support::{PATIENCE, Place, run, until};
use crate::*;

/// What `unshare` and the daemon in its namespace are.
struct Ending(Child);

impl Ending {
    fn start(place: &Place) -> Self {
        // What the server needs is a mount of its own there, and it is mounted where nothing needs it.
        let mounting = "mkdir \"$4\" && mount -n --bind \"$3\" \"$3\" && mount -n --bind \"$3\" \"$4\" && \
                        exec \"$1\" ending \"$2\" \"$3\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "--", "sh", "-c", mounting, "sh"]);
        command.arg(this_program()).args([&place.state, &place.export, &beside(place)]);
        command.stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ending = Self(child);
        assert_eq!(line, "mounted\n");
        ending
    }

    /// A path as the daemon sees it.
    fn inside(&self, path: &Path) -> PathBuf {
        Path::new("/proc")
            .join(self.0.id().to_string())
            .join("root")
            .join(path.strip_prefix("/").unwrap())
    }

    /// Waits for its end by a signal.
    fn wait(&mut self) {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                assert_eq!(status.signal(), Some(9), "{status}");
                return;
            }
            assert!(Instant::now() < end, "the daemon hangs as it ends");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        // It is not waited for: whether it ends is what is tested.
        let _ended = self.0.kill();
    }
}

/// Where the folder of the export is mounted as well.
fn beside(place: &Place) -> PathBuf {
    place.export.with_file_name("beside")
}

/// Attaches where mounts end with this process, mounts the disk, says so, and waits to be killed.
#[tokio::main]
pub(crate) async fn daemon(state: &str, folder: &str) {
    assert!(slackwater_attach::mounts_end_with_processes());
    let options = slackwater_attach::Options {
        mounts_end: true,
        ..options_at(Path::new(state), Path::new(folder))
    };
    let attach = Attach::open(options).await.unwrap();
    attach.mount(DISK, &Path::new(state).join("mounts/a"), Access::ReadWrite).await.unwrap();
    println!("mounted");
    std::future::pending::<()>().await;
}

/// A place with a disk that such a daemon has mounted, and the pids of keeper and server.
async fn place_that_ends() -> (Place, Ending, [u32; 2]) {
    let (place, attach) = place().await;
    attach.make_file_system("disk").await.unwrap();
    attach.shut_down().await.unwrap();
    let ending = Ending::start(&place);
    let serving = serving(&place).await;
    (place, ending, serving)
}

async fn serving(place: &Place) -> [u32; 2] {
    for name in ["keeper", "server"] {
        until("the process is written down", async || recorded(place, name).is_some()).await;
    }
    ["keeper", "server"].map(|name| recorded(place, name).unwrap())
}

/// That the disk has what was written, and is whole.
async fn require_written(place: &Place, text: &str) {
    let attach = open_at(&place.state, &place.export).await.unwrap();
    attach.mount(DISK, &target(place), Access::ReadWrite).await.unwrap();
    assert_eq!(fs::read_to_string(target(place).join("written")).unwrap(), text);
    attach.unmount(&target(place)).await.unwrap();
    until("it is released", async || attach.is_released(DISK).await.unwrap()).await;
    attach.shut_down().await.unwrap();
    run("e2fsck", &["-f", "-n", place.export.join("disk").to_str().unwrap()]);
}

pub(crate) async fn keeper_and_server_leave_the_mounts_of_the_disks() {
    let (place, mut ending, serving) = place_that_ends().await;
    let has = |pid: u32, path: &Path| {
        let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
        let path = format!(" {}", path.to_str().unwrap().replace(' ', "\\040"));
        mounts.contains(&path)
    };
    for (pid, is_daemon) in [(ending.0.id(), true), (serving[0], false), (serving[1], false)] {
        assert_eq!(has(pid, &place.state), is_daemon, "disks and export");
        assert_eq!(has(pid, &beside(&place)), is_daemon, "what nobody needs");
        assert!(has(pid, &place.export), "what the server serves");
    }
    // The disks' namespace ends with the daemon, and its disks are unmounted while they are served.
    let text = "hello".repeat(100_000);
    fs::write(ending.inside(&target(&place).join("written")), &text).unwrap();
    run("kill", &["-KILL", &ending.0.id().to_string()]);
    ending.wait();
    until("keeper and server have ended", async || !serving.iter().any(|pid| is_running(*pid)))
        .await;
    require_written(&place, &text).await;
}

pub(crate) async fn all_that_is_killed_at_once_ends() {
    for first in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let (place, mut ending, serving) = place_that_ends().await;
        let target = ending.inside(&target(&place));
        fs::write(target.join("written"), "synced").unwrap();
        run("sync", &["--file-system", target.to_str().unwrap()]);
        fs::write(target.join("late"), "hello".repeat(100_000)).unwrap();
        let all = [ending.0.id(), serving[0], serving[1]].map(|pid| pid.to_string());
        // The last of them may have ended before its turn.
        let order = first.map(|number| all[number].as_str());
        let _one_has_ended = Command::new("kill").arg("-KILL").args(order).status().unwrap();
        ending.wait();
        until("keeper and server have ended", async || !serving.iter().any(|pid| is_running(*pid)))
            .await;
        require_written(&place, "synced").await;
    }
}

pub(crate) async fn a_keeper_and_a_server_there_are_replaced_one_at_a_time() {
    let (place, mut ending, _) = place_that_ends().await;
    let file = ending.inside(&target(&place).join("written"));
    for name in ["server", "keeper", "keeper", "server"] {
        let killed = kill(&place, name).await;
        let (path, text) = (file.clone(), name.repeat(10_000));
        let write = move || {
            let mut written = fs::File::create(path).unwrap();
            std::io::Write::write_all(&mut written, text.as_bytes()).unwrap();
            written.sync_all().unwrap();
        };
        tokio::time::timeout(PATIENCE, tokio::task::spawn_blocking(write)).await.unwrap().unwrap();
        until("it is replaced", async || recorded(&place, name).is_some_and(|pid| pid != killed))
            .await;
    }
    let serving = serving(&place).await;
    run("kill", &["-KILL", &ending.0.id().to_string()]);
    ending.wait();
    until("keeper and server have ended", async || !serving.iter().any(|pid| is_running(*pid)))
        .await;
    require_written(&place, &"server".repeat(10_000)).await;
}
