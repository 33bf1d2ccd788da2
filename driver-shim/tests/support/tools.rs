//! Tools of the system that note how they are called, and fail as is asked.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Where the tools are of a test that runs itself again with others.
const TOOLS: &str = "SLACKWATER_TEST_TOOLS";

/// Tools that note their calls; the `sync` of that number says that writes were lost, as it does where the kernel does.
fn noting_tools(directory: &Path, lost: u32) {
    for (name, program) in [("sync", "/usr/bin/sync"), ("fsfreeze", "/usr/sbin/fsfreeze")] {
        let log = directory.join("log");
        let script = format!(
            "#!/bin/sh\necho {name} $1 >>'{0}'\n\
             if [ {name} = sync ] && [ $(grep -c sync '{0}') = {lost} ]; then\n\
             echo 'sync: error syncing: Input/output error' >&2; exit 1; fi\n\
             exec {program} \"$@\"\n",
            log.display()
        );
        std::fs::write(directory.join(name), script).unwrap();
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(directory.join(name), mode).unwrap();
    }
}

/// Where such tools are. What finds them is the environment: without them the test runs itself
/// again in another, and this is `None`.
pub fn noted(test: &str, lost: u32) -> Option<OsString> {
    if let Some(directory) = std::env::var_os(TOOLS) {
        return Some(directory);
    }
    let directory = tempfile::tempdir().unwrap();
    noting_tools(directory.path(), lost);
    let path = std::env::var("PATH").unwrap();
    let mut again = std::process::Command::new(std::env::current_exe().unwrap());
    again.args(["--exact", test, "--nocapture"]);
    again.env("PATH", format!("{}:{path}", directory.path().display()));
    let ended = again.env(TOOLS, directory.path()).output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    None
}
