//! What has taken over a tool in its sandbox gets at its one file, and at nothing else.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use super::*;
use crate::test_tool as tool;
use crate::tools::{OnFile, Tool, Tools};

/// What has taken a tool over: it does what it likes.
const SHELL: Tool = Tool { program: "sh", package: "dash" };

/// Far more than a shell takes.
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn as_a_tool() {
    tool::become_one(run_tool);
}

/// A directory for an export, with a file `disk`.
fn export() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let export = folder.path().join("export");
    fs::create_dir(&export).unwrap();
    fs::write(export.join("disk"), "content\n").unwrap();
    (folder, export)
}

async fn inside(export: &Path, access: Access, script: &str) -> Result<String, AttachError> {
    let program = tool::program("sandbox::tests::as_a_tool");
    let tools = Tools::new(std::net::SocketAddr::from(([127, 0, 0, 1], 2049)), &program);
    let file = OnFile { directory: export, path: "disk", access };
    tools.call_on(SHELL, file).arguments(["-c", script]).limit(LIMIT).run().await
}

#[tokio::test]
async fn as_root_a_tool_has_its_file_and_no_other() {
    let (folder, export) = export();
    let near = folder.path().join("near");
    fs::write(&near, "secret").unwrap();
    let script = format!("cat {DISK}; echo new >{DISK}; ls /etc /proc; ls -d {near:?} /*");
    let output = inside(&export, Access::ReadWrite, &script).await;
    // `ls` fails for what is not there, and says so where nobody looks.
    let Err(AttachError::Tool { reason, .. }) = output else { panic!("{output:?}") };
    assert!(reason.contains("near': No such file"), "{reason}");
    assert_eq!(fs::read_to_string(export.join("disk")).unwrap(), "new\n");

    // Cargo sets some of its own for every test.
    assert!(std::env::vars().any(|(name, _)| name.starts_with("CARGO")));
    let variables = inside(&export, Access::ReadOnly, "set; export").await.unwrap();
    assert!(variables.contains("PATH=") && !variables.contains("CARGO"), "{variables}");

    let script = format!("cat {DISK}; ls / /.. /etc /proc");
    let output = inside(&export, Access::ReadOnly, &script).await.unwrap();
    let seen: Vec<_> = output.split_whitespace().collect();
    let known = [
        "/:",
        "/..:",
        "/etc:",
        "/proc:",
        "mounts",
        "mtab",
        "mke2fs.conf",
        "etc",
        "proc",
        "disk",
        "new",
        "nix",
    ];
    let is_known = |name: &&str| known.contains(name) || PROGRAM_FOLDERS.contains(name);
    assert!(seen.iter().all(is_known) && seen.contains(&"usr"), "{seen:?}");
}

#[tokio::test]
async fn as_root_a_file_that_is_only_read_cannot_be_written_nor_anything_else() {
    let (_folder, export) = export();
    for script in [
        "echo x >/disk",
        "chmod 666 /disk",
        "echo x >/etc/mtab",
        "touch /new",
        "chmod 4755 /usr/bin/id",
        "touch /usr/bin/new",
        "mount -o remount,rw,bind /usr",
        "mount -t tmpfs none /usr",
        "mknod /disk2 b 7 0",
    ] {
        let begun = format!("cat /disk >&2 && {script}");
        let error = inside(&export, Access::ReadOnly, &begun).await.unwrap_err();
        let AttachError::Tool { reason, .. } = error else { panic!("{script}: {error:?}") };
        assert!(reason.starts_with("content") && reason != "content", "{script}: {reason}");
    }
    let disk = export.join("disk");
    assert_eq!(fs::read_to_string(&disk).unwrap(), "content\n");
    assert_eq!(fs::metadata(disk).unwrap().permissions().mode() & 0o666, 0o644);
}

#[tokio::test]
async fn as_root_a_tool_is_root_in_name_alone() {
    let (_folder, export) = export();
    // Without /proc only what it tries tells. The first two show that the attempts mean something.
    inside(&export, Access::ReadWrite, "echo x >/disk").await.unwrap();
    inside(&export, Access::ReadWrite, "[ $(id -u) = 0 ] && kill -0 1").await.unwrap();
    for (script, why) in [
        ("chown 1000 /disk", "Operation not permitted"),
        ("setpriv --reuid 1000 --clear-groups true", "failed"),
        ("chroot /usr true", "Operation not permitted"),
        ("unshare --mount true", "Operation not permitted"),
        ("unshare --user true", "Operation not permitted"),
    ] {
        let error = inside(&export, Access::ReadWrite, script).await.unwrap_err().to_string();
        assert!(error.contains(why), "{script}: {error}");
    }
}

#[tokio::test]
async fn as_root_processes_of_this_machine_are_out_of_reach() {
    let (_folder, export) = export();
    let mut other = Command::new("sleep").arg("1000").spawn().unwrap();
    let script = format!("kill -KILL {}", other.id());
    let error = inside(&export, Access::ReadWrite, &script).await.unwrap_err().to_string();
    let still = other.try_wait().unwrap();
    other.kill().unwrap();
    other.wait().unwrap();
    assert!(error.contains("No such process") && still.is_none(), "{error}, {still:?}");
}

#[tokio::test]
async fn as_root_a_tool_that_takes_too_long_is_ended_with_what_it_started() {
    let (_folder, export) = export();
    // A time that no other process sleeps for.
    let time = format!("1000.{:09}", std::process::id());
    let program = tool::program("sandbox::tests::as_a_tool");
    let tools = Tools::new(std::net::SocketAddr::from(([127, 0, 0, 1], 2049)), &program);
    let file = OnFile { directory: &export, path: "disk", access: Access::ReadOnly };
    let script = format!("sleep {time} | sleep {time}");
    let call = tools.call_on(SHELL, file).arguments(["-c", &script]);
    let running = || {
        let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
        let is_it = |path: &Path| {
            let line = fs::read_to_string(path.join("cmdline"));
            line.is_ok_and(|line| line == format!("sleep\0{time}\0"))
        };
        let found = entries.filter(|entry| is_it(&entry.path()));
        found.map(|entry| entry.file_name().into_string().unwrap()).collect::<Vec<_>>()
    };
    let end = std::time::Instant::now() + LIMIT;
    let call = tokio::spawn(call.limit(LIMIT).run());
    while running().len() < 2 {
        assert!(std::time::Instant::now() < end, "it does not begin");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // A signal to its process group is one to itself, and it is ended before all others.
    let group = |pid: &str| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit(") ").next().unwrap().split(' ').nth(2).unwrap().to_owned()
    };
    for pid in running() {
        assert_ne!(group(&pid), group("self"));
        let first = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
        assert_eq!(first.trim(), "1000");
    }
    // As its limit does.
    call.abort();
    while !running().is_empty() {
        assert!(std::time::Instant::now() < end, "it goes on");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn as_root_a_tool_that_is_not_there_is_named_with_its_package() {
    let (_folder, export) = export();
    let program = tool::program("sandbox::tests::as_a_tool");
    let tools = Tools::new(std::net::SocketAddr::from(([127, 0, 0, 1], 2049)), &program);
    let file = OnFile { directory: &export, path: "disk", access: Access::ReadOnly };
    let none = Tool { program: "slackwater-no-such-tool", package: "nothing" };
    let error = tools.call_on(none, file).run().await.unwrap_err();
    let AttachError::Tool { status, reason, .. } = error else { panic!("{error:?}") };
    assert_eq!(status.code(), Some(NOT_BEGUN.into()));
    assert!(reason.contains("slackwater-no-such-tool"), "{reason}");
}
