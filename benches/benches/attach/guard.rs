//! A folder below which nothing stays mounted, however the bench ends: also when it is killed,
//! as an export whose appliance is gone would make every `sync` of the machine wait for ever.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

/// Waits for the end of its input, which is that of the bench, then gives up the FUSE
/// connections below the folder, unmounts all there, and removes it once it holds no mount.
const SCRIPT: &str = r#"
    trap '' HUP INT TERM
    read -r line
    below() { awk -v d="$1/" 'index($5, d) == 1' /proc/self/mountinfo | tac; }
    if [ -n "$(below "$1")" ]; then
        mkdir "$1.control" && mount -t fusectl none "$1.control"
        below "$1" | grep ' - fuse' | cut -d' ' -f3 | cut -d: -f2 | while read -r id; do
            echo 1 > "$1.control/$id/abort"
        done
        umount "$1.control" && rmdir "$1.control"
        below "$1" | cut -d' ' -f5 | while read -r point; do umount --lazy "$point"; done
    fi
    [ -n "$(below "$1")" ] || rm -rf --one-file-system "$1"
"#;

/// The folder and the process that ends its mounts.
pub(crate) struct Guard {
    process: Child,
    folder: std::path::PathBuf,
}

impl Guard {
    pub(crate) fn new() -> Self {
        let folder = TempDir::with_prefix("slackwater-attach-").expect("a folder").keep();
        let mut command = Command::new("sh");
        command.args(["-c", SCRIPT, "guard"]).arg(&folder).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        Self { process: command.spawn().expect("a guard"), folder }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        // It removes the folder in either case.
        let _ = self.process.wait();
    }
}
