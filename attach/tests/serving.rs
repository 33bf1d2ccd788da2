//! The FUSE export and the processes that serve it, killed in all orders. Needs root.
//!
//! Its own main, because the keeper, the server and the daemon are processes of this program:
//! `keep FOLDER`, `serve FOLDER`, `daemon STATE FOLDER`, `ending STATE FOLDER`; anything else runs the tests.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

mod ending;
mod server;
mod support;

use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use ending::{
    a_keeper_and_a_server_there_are_replaced_one_at_a_time, all_that_is_killed_at_once_ends,
    keeper_and_server_leave_the_mounts_of_the_disks,
};
use slackwater_attach::{
    Access, Attach, AttachError, MountedBy, Options, PathSource, Source, keep_serving, run_tool,
};
use support::{PATIENCE, Place, run, until};

const DISK_SIZE_BYTES: u64 = 64 << 20;
const DISK: Source<'static> = Source::File("disk");

fn main() {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let words: Vec<_> = arguments.iter().map(|argument| argument.to_string_lossy()).collect();
    match &words.iter().map(AsRef::as_ref).collect::<Vec<_>>()[..] {
        ["keep", folder, rest @ ..] => keep(folder, rest),
        ["serve", folder, rest @ ..] => {
            server::serve(Path::new(folder), std::io::stdin().as_fd(), rest.contains(&"--resume"));
        }
        ["daemon", state, folder] => daemon(state, folder),
        ["ending", state, folder] => ending::daemon(state, folder),
        ["tool", ..] => std::process::exit(run_tool(&arguments[1..]).into()),
        ["--list", ..] => {}
        other => run_tests(other.first().filter(|word| !word.starts_with('-')).copied()),
    }
}

fn keep(folder: &str, rest: &[&str]) {
    let program = [this_program(), "serve".into(), folder.into()];
    let program: Vec<_> = program.into_iter().chain(rest.iter().map(OsString::from)).collect();
    let fuse = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    assert!(keep_serving(&program, fuse).unwrap().success());
}

fn this_program() -> OsString {
    std::env::current_exe().unwrap().into()
}

fn tool_program() -> Vec<OsString> {
    vec![this_program(), "tool".into()]
}

fn keeper_program(folder: &Path) -> Vec<OsString> {
    vec![this_program(), "keep".into(), folder.into()]
}

/// Attaches, mounts the disk, says so, and waits to be killed.
#[tokio::main]
async fn daemon(state: &str, folder: &str) {
    let attach = open_at(Path::new(state), Path::new(folder)).await.unwrap();
    attach.mount(DISK, &Path::new(state).join("mounts/a"), Access::ReadWrite).await.unwrap();
    println!("mounted");
    std::future::pending::<()>().await;
}

async fn open_at(state: &Path, folder: &Path) -> Result<Attach, AttachError> {
    Attach::open(options_at(state, folder)).await
}

fn options_at(state: &Path, folder: &Path) -> Options {
    Options {
        method: Some(slackwater_attach::Method::Fuse),
        nfs_address: "127.0.0.1:2049".parse().unwrap(),
        export: "/slackwater".to_owned(),
        mount_path: None,
        state_directory: state.to_owned(),
        fuse_program: keeper_program(folder),
        tool_program: tool_program(),
        prefers_fuse: false,
        rights: slackwater_attach::Rights::CONTAINER,
        mounts_end: false,
    }
}

/// The tests, one after the other: each has several processes of its own.
#[tokio::main]
async fn run_tests(filter: Option<&str>) {
    // A file system that nobody serves blocks the thread that uses it, and its time limit too.
    std::thread::spawn(|| {
        std::thread::sleep(15 * PATIENCE);
        eprintln!("the tests take too long: something waits for a server that is gone");
        std::process::abort();
    });
    macro_rules! run_all {
        ($($test:ident),* $(,)?) => {
            $(if filter.is_none_or(|filter| stringify!($test).contains(filter)) {
                tokio::time::timeout(3 * PATIENCE, $test()).await.expect(stringify!($test));
                println!("test {} ... ok", stringify!($test));
            })*
        };
    }
    run_all!(
        a_disk_lives_on_the_export,
        a_killed_keeper_and_a_killed_server_are_replaced,
        a_request_that_a_dead_server_had_taken_is_served_by_the_next,
        a_new_daemon_takes_over_whatever_of_the_old_one_is_left,
        when_all_are_killed_the_disks_are_lost_and_it_begins_anew,
        an_export_of_another_appliance_is_not_taken_for_ours,
        a_machine_that_joined_mounts_again_once_no_disk_is_in_use,
        other_settings_count_once_no_disk_is_in_use,
        a_server_that_cannot_start_is_a_clear_error,
        no_link_of_an_export_is_followed_also_of_one_that_was_mounted_before,
        keeper_and_server_leave_the_mounts_of_the_disks,
        all_that_is_killed_at_once_ends,
        a_keeper_and_a_server_there_are_replaced_one_at_a_time,
    );
}

/// A place with an export of one empty disk.
async fn place() -> (Place, Attach) {
    let place = Place::new();
    place.make_file("disk", DISK_SIZE_BYTES);
    let attach = open_at(&place.state, &place.export).await.unwrap();
    (place, attach)
}

fn target(place: &Place) -> PathBuf {
    place.state.join("mounts/a")
}

/// The process that a record of the state directory names.
fn recorded(place: &Place, name: &str) -> Option<u32> {
    let text = fs::read_to_string(place.state.join(format!("{name}.process"))).ok()?;
    let pid: u32 = text.split(' ').next()?.parse().ok()?;
    is_running(pid).then_some(pid)
}

fn is_running(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'))
}

async fn kill(place: &Place, name: &str) -> u32 {
    until("the process is written down", async || recorded(place, name).is_some()).await;
    let pid = recorded(place, name).unwrap();
    run("kill", &["-KILL", &pid.to_string()]);
    until("it ended", async || !is_running(pid)).await;
    pid
}

/// Writes through the mounted disk to the export's file, and reads it back from there.
async fn exercise(place: &Place, attach: &Attach, text: &str) {
    let (file, expected) = (target(place).join(text), text.repeat(10_000));
    let written = expected.clone();
    let path = file.clone();
    let write = tokio::task::spawn_blocking(move || fs::write(path, written).unwrap());
    tokio::time::timeout(PATIENCE, write).await.unwrap().unwrap();
    attach.sync(&target(place)).await.unwrap();
    // Forgotten by the kernel, so that it must come from the server.
    let opened = fs::File::open(&file).unwrap();
    rustix::fs::fadvise(&opened, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    assert_eq!(fs::read_to_string(file).unwrap(), expected);
}

async fn end(place: Place, attach: Attach) {
    attach.unmount(&target(&place)).await.unwrap();
    until("it is released", async || attach.is_released(DISK).await.unwrap()).await;
    let processes = [recorded(&place, "keeper"), recorded(&place, "server")];
    attach.shut_down().await.unwrap();
    assert!(processes.iter().flatten().all(|pid| !is_running(*pid)), "{processes:?}");
    assert!(!place.state.join("export").exists());
    assert!(place.mounted().is_empty());
    run("e2fsck", &["-f", "-n", place.export.join("disk").to_str().unwrap()]);
}

async fn a_disk_lives_on_the_export() {
    let (place, attach) = place().await;
    attach.make_file_system("disk").await.unwrap();
    attach.mount(DISK, &target(&place), Access::ReadWrite).await.unwrap();
    exercise(&place, &attach, "hello").await;
    assert!(matches!(attach.shut_down().await, Err(AttachError::Busy { .. })));
    let statistics = attach.statistics_file().unwrap();
    assert_eq!(statistics, attach.export_directory().join(".slackwater-stats"));
    let absent = attach.mount(Source::File("none"), &place.state.join("b"), Access::ReadOnly).await;
    assert!(matches!(absent, Err(AttachError::NotFound { .. })), "{absent:?}");
    end(place, attach).await;
}

async fn a_killed_keeper_and_a_killed_server_are_replaced() {
    let (place, attach) = place().await;
    attach.make_file_system("disk").await.unwrap();
    attach.mount(DISK, &target(&place), Access::ReadWrite).await.unwrap();
    let server = kill(&place, "server").await;
    exercise(&place, &attach, "server").await;
    assert_ne!(recorded(&place, "server"), Some(server));

    // It may serve before its keeper has written it down.
    until("the server is written down", async || recorded(&place, "server").is_some()).await;
    let server = recorded(&place, "server");
    let keeper = kill(&place, "keeper").await;
    exercise(&place, &attach, "keeper").await;
    assert_eq!(recorded(&place, "server"), server, "it goes on without its keeper");
    until("there is a keeper", async || recorded(&place, "keeper").is_some()).await;
    assert_ne!(recorded(&place, "keeper"), Some(keeper));
    // The new keeper's own server, once the one that it found has ended.
    kill(&place, "server").await;
    exercise(&place, &attach, "orphan").await;

    kill(&place, "keeper").await;
    kill(&place, "server").await;
    exercise(&place, &attach, "both").await;
    end(place, attach).await;
}

async fn a_request_that_a_dead_server_had_taken_is_served_by_the_next() {
    let (place, attach) = place().await;
    attach.make_file_system("disk").await.unwrap();
    attach.mount(DISK, &target(&place), Access::ReadWrite).await.unwrap();
    let die = place.export.with_file_name("die");
    fs::write(&die, "").unwrap();
    exercise(&place, &attach, "taken").await;
    assert!(!die.exists(), "the server died with a request");
    end(place, attach).await;
}

/// A daemon that is killed and waited for with the test.
struct Daemon(Child);

impl Daemon {
    fn start(place: &Place) -> Self {
        let mut command = Command::new(this_program());
        command.arg("daemon").arg(&place.state).arg(&place.export).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let daemon = Self(child);
        assert_eq!(line, "mounted\n");
        daemon
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A place with a disk that a daemon has mounted; no process serves it here.
async fn place_of_a_daemon() -> (Place, Daemon) {
    let (place, attach) = place().await;
    attach.make_file_system("disk").await.unwrap();
    attach.shut_down().await.unwrap();
    let daemon = Daemon::start(&place);
    (place, daemon)
}

async fn a_new_daemon_takes_over_whatever_of_the_old_one_is_left() {
    for killed in [&[][..], &["keeper"], &["server"]] {
        let (place, daemon) = place_of_a_daemon().await;
        fs::write(target(&place).join("x"), "x").unwrap();
        drop(daemon);
        for process in killed {
            kill(&place, process).await;
        }
        fs::write(target(&place).join("y"), "y").unwrap();
        let attach = open_at(&place.state, &place.export).await.unwrap();
        assert_eq!(attach.lost(), [], "{killed:?}");
        assert_eq!(attach.mounts().await.unwrap().len(), 1);
        exercise(&place, &attach, "adopted").await;
        // All that is left then is the copy of the descriptor that the new one took.
        until("there is a keeper", async || recorded(&place, "keeper").is_some()).await;
        kill(&place, "keeper").await;
        kill(&place, "server").await;
        exercise(&place, &attach, "again").await;
        end(place, attach).await;
    }
}

async fn when_all_are_killed_the_disks_are_lost_and_it_begins_anew() {
    let (place, daemon) = place_of_a_daemon().await;
    fs::write(target(&place).join("synced"), "x").unwrap();
    run("sync", &["--file-system", target(&place).to_str().unwrap()]);
    drop(daemon);
    kill(&place, "keeper").await;
    kill(&place, "server").await;
    let attach = open_at(&place.state, &place.export).await.unwrap();
    assert_eq!(attach.lost().len(), 1);
    assert_eq!((&*attach.lost()[0].source, &attach.lost()[0].target), ("disk", &target(&place)));
    assert_eq!(attach.mounts().await.unwrap(), []);
    assert!(attach.is_released(DISK).await.unwrap());
    attach.mount(DISK, &target(&place), Access::ReadWrite).await.unwrap();
    assert_eq!(fs::read_to_string(target(&place).join("synced")).unwrap(), "x");
    exercise(&place, &attach, "anew").await;
    end(place, attach).await;
}

async fn an_export_of_another_appliance_is_not_taken_for_ours() {
    let (place, attach) = place().await;
    attach.make_file_system("disk").await.unwrap();
    attach.mount(DISK, &target(&place), Access::ReadWrite).await.unwrap();
    let mut options = place.options(keeper_program(&place.export), tool_program());
    options.nfs_address = "127.0.0.1:2050".parse().unwrap();
    let error = Attach::open(options.clone()).await.unwrap_err();
    assert!(matches!(error, AttachError::OtherExport { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("127.0.0.1:2049") && text.contains("127.0.0.1:2050"), "{text}");
    // Nothing uses it any more: then it makes room.
    attach.unmount(&target(&place)).await.unwrap();
    drop(attach);
    let attach = Attach::open(options).await.unwrap();
    attach.mount(DISK, &target(&place), Access::ReadWrite).await.unwrap();
    end(place, attach).await;
}

/// The fields of the export's mount in the table.
fn mount_fields(place: &Place) -> Vec<String> {
    let export = place.state.join("export").to_str().unwrap().replace(' ', "\\040");
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mut lines =
        table.lines().map(|line| line.split(' ').map(str::to_owned).collect::<Vec<_>>());
    lines.find(|fields| fields[4] == export).unwrap()
}

/// The options of the export's mount.
fn mount_options(place: &Place) -> String {
    mount_fields(place)[5].clone()
}

/// What the table shows as the source of the export.
fn mount_source(place: &Place) -> String {
    mount_fields(place).iter().skip_while(|field| *field != "-").nth(2).unwrap().clone()
}

/// A machine that mounts by secret paths below this name.
#[derive(Debug)]
struct Machine {
    mounts: &'static str,
}

impl PathSource for Machine {
    fn mounts_below(&self) -> Option<&'static str> {
        Some(self.mounts)
    }

    fn get(&self) -> Pin<Box<dyn Future<Output = Result<String, String>> + Send + '_>> {
        Box::pin(async { Err("only the kernel's NFS client asks".to_owned()) })
    }
}

async fn a_machine_that_joined_mounts_again_once_no_disk_is_in_use() {
    let (place, attach) = place().await;
    attach.make_file_system("disk").await.unwrap();
    attach.mount(DISK, &target(&place), Access::ReadWrite).await.unwrap();
    drop(attach);
    let (by_address, of_worker) = ("127.0.0.1:2049/slackwater", ".worker");
    let options = |mounts| Options {
        mount_path: Some(Arc::new(Machine { mounts })),
        ..place.options(keeper_program(&place.export), tool_program())
    };
    // With a disk it stays as it is, and serves.
    let attach = Attach::open(options(of_worker)).await.unwrap();
    assert_eq!(mount_source(&place), by_address);
    assert_eq!(attach.mounted_by(), Some(MountedBy::Address));
    exercise(&place, &attach, "in use").await;
    attach.unmount(&target(&place)).await.unwrap();
    until("it is released", async || attach.is_released(DISK).await.unwrap()).await;
    drop(attach);
    // Each way, and not again where nothing changed.
    for mounts in [of_worker, of_worker, ".export", ".export", of_worker] {
        let before = mount_fields(&place)[0].clone();
        let was = mount_source(&place);
        let expected = format!("{by_address}/{mounts}");
        let mounted_by = Attach::open(options(mounts)).await.unwrap().mounted_by();
        let is_of_worker = mounts == of_worker;
        assert_eq!(
            mounted_by,
            Some(if is_of_worker { MountedBy::Worker } else { MountedBy::Token })
        );
        assert_eq!(mount_source(&place), expected);
        // A number may be given to the next mount.
        let is_same = mount_fields(&place)[0] == before;
        assert!(is_same || was != expected, "it was mounted again");
    }
    let attach = Attach::open(options(of_worker)).await.unwrap();
    attach.mount(DISK, &target(&place), Access::ReadWrite).await.unwrap();
    end(place, attach).await;
}

async fn other_settings_count_once_no_disk_is_in_use() {
    let (place, attach) = place().await;
    attach.make_file_system("disk").await.unwrap();
    attach.mount(DISK, &target(&place), Access::ReadWrite).await.unwrap();
    assert!(attach.is_served_alike());
    drop(attach);
    let options = || {
        let mut program = keeper_program(&place.export);
        program.push("another-setting".into());
        place.options(program, tool_program())
    };
    let keeper = recorded(&place, "keeper").unwrap();
    // With a disk it goes on as it is.
    let attach = Attach::open(options()).await.unwrap();
    assert!(!attach.is_served_alike());
    assert_eq!(recorded(&place, "keeper"), Some(keeper));
    exercise(&place, &attach, "in use").await;
    // A keeper that replaces another one has the new settings, and the server still those of before.
    kill(&place, "keeper").await;
    until("the keeper is replaced", async || {
        recorded(&place, "keeper").is_some_and(|pid| pid != keeper)
    })
    .await;
    assert!(!attach.is_served_alike());
    let keeper = recorded(&place, "keeper").unwrap();
    exercise(&place, &attach, "by another keeper").await;
    attach.unmount(&target(&place)).await.unwrap();
    until("it is released", async || attach.is_released(DISK).await.unwrap()).await;
    drop(attach);
    let attach = Attach::open(options()).await.unwrap();
    assert!(attach.is_served_alike() && !is_running(keeper));
    attach.mount(DISK, &target(&place), Access::ReadWrite).await.unwrap();
    // A keeper that replaces another one has one word more, and the same settings.
    let keeper = kill(&place, "keeper").await;
    until("it is replaced", async || recorded(&place, "keeper").is_some_and(|pid| pid != keeper))
        .await;
    assert!(attach.is_served_alike());
    drop(attach);
    let attach = Attach::open(options()).await.unwrap();
    assert!(attach.is_served_alike());
    exercise(&place, &attach, "adopted").await;
    end(place, attach).await;
}

async fn no_link_of_an_export_is_followed_also_of_one_that_was_mounted_before() {
    let (place, attach) = place().await;
    attach.make_file_system("disk").await.unwrap();
    attach.mount(DISK, &target(&place), Access::ReadWrite).await.unwrap();
    let expected = mount_options(&place);
    assert!(expected.contains("nosymfollow"), "{expected}");
    drop(attach);
    // As an older daemon mounted it, under a disk that is in use.
    let older = "remount,bind,rw,nosuid,nodev,noexec,noatime,symfollow";
    run("mount", &["-n", "-i", "-o", older, place.state.join("export").to_str().unwrap()]);
    assert!(!mount_options(&place).contains("nosymfollow"));
    let attach = open_at(&place.state, &place.export).await.unwrap();
    assert_eq!(mount_options(&place), expected);
    exercise(&place, &attach, "adopted").await;
    end(place, attach).await;
}

async fn a_server_that_cannot_start_is_a_clear_error() {
    let place = Place::new();
    let program = vec![place.state.join("no-such-program").into()];
    let error = Attach::open(place.options(program, tool_program())).await.unwrap_err();
    assert!(error.to_string().contains("no-such-program"), "{error}");
    assert!(place.mounted().is_empty());
}
