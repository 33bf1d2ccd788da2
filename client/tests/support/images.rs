//! Images of this machine, and exports and imports that are cut off.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::appliance::{Appliance, command, noise, text};
use crate::proxy::{Counted, Proxy};

pub const MIB: u64 = 1 << 20;

/// A sparse image of `size_bytes` with noise in these ranges of MiB.
pub fn image(path: impl AsRef<Path>, size_bytes: u64, data: &[(u64, u64)]) {
    let file = File::create(path).unwrap();
    file.set_len(size_bytes).unwrap();
    for &(start, end) in data {
        let bytes = noise(start + 1, usize::try_from((end - start) * MIB).unwrap());
        file.write_all_at(&bytes, start * MIB).unwrap();
    }
}

pub fn patch(path: impl AsRef<Path>, offset_bytes: u64, bytes: &[u8]) {
    OpenOptions::new().write(true).open(path).unwrap().write_all_at(bytes, offset_bytes).unwrap();
}

pub fn assert_same_content(left: impl AsRef<Path>, right: impl AsRef<Path>) {
    let (left, right) = (fs::read(left).unwrap(), fs::read(right).unwrap());
    assert_eq!(left.len(), right.len());
    let differs = left.iter().zip(&right).position(|(left, right)| left != right);
    assert_eq!(differs, None, "the first byte that differs");
}

/// Bytes that the file occupies.
pub fn allocated(path: impl AsRef<Path>) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

pub fn sent(result: &Value) -> u64 {
    result["transferred_bytes"].as_u64().unwrap()
}

/// Waits for the child, bounded.
pub fn wait(mut child: Child) -> std::process::Output {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            panic!("the command did not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}

pub fn signal(child: &Child, name: &str) {
    let kill =
        Command::new("sh").args(["-c", &format!("kill -{name} {}", child.id())]).status().unwrap();
    assert!(kill.success());
}

/// Begins the command, which goes on beside the test.
pub fn begun(url: &str, arguments: &[&str]) -> Child {
    command(url, arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs the command through a network that falls silent after `budget_bytes`, interrupts it
/// then, and gives its standard error.
pub fn interrupted(
    appliance: &Appliance,
    arguments: &[&str],
    counted: Counted,
    budget_bytes: i64,
) -> String {
    let handle = appliance.runtime.handle();
    let proxy = Proxy::start(handle, &appliance.url, counted, budget_bytes);
    let child = begun(&proxy.url, arguments);
    proxy.wait_until_dry(handle);
    signal(&child, "INT");
    let output = wait(child);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(output.stdout.is_empty() && stderr.contains("--resume"), "{stderr}");
    stderr
}

/// Takes a snapshot of the file and exports it; gives the image's path.
pub fn exported(appliance: &Appliance, path: &str, name: &str) -> String {
    let id = appliance.ok(&["snapshot", "create", path, "--name", name]);
    let output = appliance.local(&format!("{name}.img"));
    appliance.ok(&["export", id.trim_end(), &output]);
    output
}

/// An image of which `base` was exported, and then an increment that was cut off; the image that is
/// on the appliance, the output, and the arguments.
pub fn interrupted_increment(appliance: &Appliance) -> (String, String, [String; 5]) {
    let original = appliance.local("original.img");
    image(&original, 64 * MIB, &[(0, 8)]);
    appliance.ok(&["import", &original, "a.img"]);
    let output = exported(appliance, "a.img", "base");
    image(&original, 64 * MIB, &[(1, 40)]);
    appliance.ok(&["import", &original, "a.img", "--resume"]);
    appliance.ok(&["snapshot", "create", "a.img", "--name", "new"]);
    let arguments = ["export", "new", &output, "--base", "base"];
    let budget = i64::try_from(20 * MIB).unwrap();
    interrupted(appliance, &arguments, Counted::FromAppliance, budget);
    let arguments = arguments.map(str::to_owned);
    (original, output, arguments)
}
