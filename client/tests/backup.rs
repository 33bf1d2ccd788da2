//! Backup while the appliance serves, by increments, and the way back: what is laid on what,
//! what is refused, what an interruption costs, and the script that does it each night.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    unreachable_pub,
    dead_code,
    reason = "tests"
)]

#[path = "support/appliance.rs"]
mod appliance;
#[path = "support/images.rs"]
mod images;
#[path = "support/proxy.rs"]
mod proxy;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use appliance::{Appliance, noise, text};
use bytes::Bytes;
use images::{
    MIB, allocated, assert_same_content, begun, exported, image, interrupted,
    interrupted_increment, patch, sent, wait,
};
use proxy::Counted;

/// Changes the file on the appliance, takes a snapshot of that name, and gives its id.
fn changed(appliance: &Appliance, path: &str, name: &str, offset_bytes: u64) -> String {
    let client = slackwater_client::Client::builder(appliance.url.as_str()).build().unwrap();
    let bytes = Bytes::from(noise(offset_bytes + 77, 5000));
    appliance.runtime.block_on(client.write_bytes(path, offset_bytes, bytes)).unwrap();
    appliance.ok(&["snapshot", "create", path, "--name", name]).trim_end().to_owned()
}

/// A file `a.img` of 64 MiB with three snapshots, one, two and three.
fn with_snapshots() -> Appliance {
    let appliance = Appliance::start();
    let original = appliance.local("original.img");
    image(&original, 64 * MIB, &[(0, 8)]);
    appliance.ok(&["import", &original, "a.img"]);
    for (number, name) in (1..).zip(["one", "two", "three"]) {
        changed(&appliance, "a.img", name, number * 20 * MIB - 100);
    }
    appliance
}

/// Exports the snapshot whole.
fn whole(appliance: &Appliance, snapshot: &str) -> String {
    let output = appliance.local(&format!("whole-{snapshot}.img"));
    appliance.ok(&["export", snapshot, &output]);
    output
}

/// A copy of the image that says nothing of what it holds.
fn plain_copy(from: &str, to: &str) {
    let copied = Command::new("cp").args(["--preserve=timestamps", from, to]).status().unwrap();
    assert!(copied.success());
}

#[test]
fn a_wrong_base_is_refused_before_anything_is_touched() {
    let appliance = with_snapshots();
    let output = whole(&appliance, "one");
    let before = fs::read(&output).unwrap();
    let untouched = |output: &str| {
        assert!(fs::read(output).unwrap() == before, "the image was touched");
        assert!(!Path::new(&format!("{output}.partial")).exists());
    };
    // It is known what it holds, and said.
    let one = appliance.json(&["snapshot", "show", "one"])["id"].as_str().unwrap().to_owned();
    let error = appliance.fails(4, &["export", "three", &output, "--base", "two"]);
    assert!(error.contains(&one), "{error}");
    untouched(&output);
    // It is not known: the bytes tell, the same number of them or not.
    let copy = appliance.local("copy.img");
    plain_copy(&output, &copy);
    let error = appliance.fails(4, &["export", "three", &copy, "--base", "two"]);
    let place = 40 * MIB - 100;
    assert!(error.contains(&format!("byte {}", place - place % 4096)), "{error}");
    untouched(&copy);
    // Written to behind our back, by one byte in a hole.
    plain_copy(&output, &copy);
    patch(&copy, 30 * MIB, b"x");
    let error = appliance.fails(4, &["export", "three", &copy, "--base", "one"]);
    assert!(error.contains(&format!("byte {}", 30 * MIB)), "{error}");
    // The same of the one that is known: its time of change gives it away.
    patch(&output, 30 * MIB, b"x");
    appliance.fails(4, &["export", "three", &output, "--base", "one"]);
}

#[test]
fn a_right_base_is_taken_with_and_without_a_note_of_it() {
    let appliance = with_snapshots();
    let output = whole(&appliance, "one");
    let copy = appliance.local("copy.img");
    plain_copy(&output, &copy);
    let arguments = |output: &str| ["export", "two", output, "--base", "one"].map(str::to_owned);
    let run = |output: &str| {
        let arguments = arguments(output);
        let ran = appliance.run(&arguments.each_ref().map(String::as_str));
        let error = text(&ran.stderr);
        assert!(ran.status.success(), "{error}");
        error
    };
    assert!(run(&copy).contains("comparing"), "a copy is compared");
    assert!(!run(&output).contains("comparing"), "what was exported here is known");
    let two = whole(&appliance, "two");
    assert_same_content(&output, &two);
    assert_same_content(&copy, &two);
    // The note has moved on with the image, and back.
    appliance.ok(&["export", "three", &output, "--base", "two"]);
    appliance.ok(&["export", "one", &output, "--base", "three"]);
    let fresh = appliance.local("fresh.img");
    appliance.ok(&["export", "one", &fresh]);
    assert_same_content(&output, &fresh);
}

#[test]
fn an_interrupted_increment_leaves_no_note_of_its_base() {
    let appliance = Appliance::start();
    let (original, output, arguments) = interrupted_increment(&appliance);
    let arguments = arguments.each_ref().map(String::as_str);
    // Somebody takes the mix for the image: it is none, and is not taken for its base.
    let partial = format!("{output}.partial");
    fs::rename(&partial, &output).unwrap();
    let error = appliance.fails(4, &arguments);
    assert!(error.contains("does not hold the base"), "{error}");
    fs::rename(&output, &partial).unwrap();
    appliance.ok(&[&arguments[..], &["--resume"]].concat());
    assert_same_content(&original, &output);
    appliance.fails(4, &arguments);
}

#[test]
fn an_import_on_a_base_sends_what_differs() {
    let appliance = with_snapshots();
    let backup = whole(&appliance, "two");
    let result = appliance.json(&["import", &backup, "back.img", "--base", "one", "--verify"]);
    assert!((1..MIB).contains(&sent(&result)), "{result}");
    assert_same_content(&backup, exported(&appliance, "back.img", "back"));
    // A base of another size, smaller and larger; and what it has and the image has not.
    for (name, size_bytes) in [("larger", 80 * MIB + 17), ("smaller", 20 * MIB + 5)] {
        let local = appliance.local(name);
        image(&local, size_bytes, &[(2, 9)]);
        appliance.ok(&["import", &local, name, "--base", "three"]);
        assert_same_content(&local, exported(&appliance, name, &format!("{name}-back")));
    }
    // The base is as it was.
    let one = appliance.local("one-again.img");
    appliance.ok(&["export", "one", &one]);
    assert!(allocated(&one) < 10 * MIB);

    appliance.fails(4, &["import", &backup, "back.img", "--base", "one"]);
    appliance.fails(3, &["import", &backup, "other.img", "--base", "missing"]);
    let files = appliance.json(&["file", "ls"]);
    let is_there = |path: &str| files.as_array().unwrap().iter().any(|file| file["path"] == path);
    assert!(is_there("back.img") && !is_there("other.img"), "{files}");
}

#[test]
fn an_interrupted_import_on_a_base_goes_on() {
    let appliance = with_snapshots();
    let local = appliance.local("local.img");
    image(&local, 64 * MIB, &[(0, 8), (10, 40)]);
    let budget = i64::try_from(10 * MIB).unwrap();
    let arguments = ["import", &local, "b.img", "--base", "one"];
    interrupted(&appliance, &arguments, Counted::ToAppliance, budget);
    let result = appliance.json(&[&arguments[..], &["--resume"]].concat());
    assert!(sent(&result) < 30 * MIB, "{result}");
    assert_same_content(&local, exported(&appliance, "b.img", "b"));
}

#[test]
fn an_export_is_of_one_moment_while_the_file_is_written() {
    let appliance = Appliance::start();
    let original = appliance.local("original.img");
    image(&original, 64 * MIB, &[(0, 64)]);
    appliance.ok(&["import", &original, "a.img"]);
    appliance.ok(&["snapshot", "create", "a.img", "--name", "moment"]);
    let output = appliance.local("out.img");
    let child = begun(&appliance.url, &["export", "moment", &output]);
    let client = slackwater_client::Client::builder(appliance.url.as_str()).build().unwrap();
    // From the end to the start, across the export, which goes the other way.
    for number in (0..64).rev() {
        let bytes = Bytes::from(noise(number + 1000, 1 << 20));
        appliance.runtime.block_on(client.write_bytes("a.img", number * MIB, bytes)).unwrap();
    }
    let output_of_child = wait(child);
    assert!(output_of_child.status.success(), "{}", text(&output_of_child.stderr));
    assert_same_content(&original, &output);
}

/// Runs the script as a timer would.
fn back_up(appliance: &Appliance, directory: &Path, keep: &str, files: &[&str]) -> Output {
    back_up_with(appliance, directory, keep, files, Path::new("/usr/bin"))
}

/// [`back_up`] with the tools of a folder before those of the machine.
fn back_up_with(
    appliance: &Appliance,
    directory: &Path,
    keep: &str,
    files: &[&str],
    tools: &Path,
) -> Output {
    let program = Path::new(env!("CARGO_BIN_EXE_slackwater"));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/backup/slackwater-backup");
    let path = std::env::var("PATH").unwrap();
    let child = Command::new(script)
        .arg(directory)
        .args(files)
        .env("PATH", format!("{}:{}:{path}", program.parent().unwrap().display(), tools.display()))
        .env("SLACKWATER_API", &appliance.url)
        .env("KEEP", keep)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait(child)
}

/// The image that a successful run made of one file.
fn backed_up(appliance: &Appliance, directory: &Path, keep: &str, file: &str) -> PathBuf {
    let output = back_up(appliance, directory, keep, &[file]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    PathBuf::from(text(&output.stdout).trim_end())
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn snapshot_count(appliance: &Appliance) -> usize {
    appliance.json(&["snapshot", "ls"]).as_array().unwrap().len()
}

#[test]
fn the_backup_script_keeps_whole_images_and_one_snapshot() {
    let appliance = Appliance::start();
    let original = appliance.local("original.img");
    image(&original, 16 * MIB, &[(0, 4)]);
    appliance.ok(&["import", &original, "disks/a.img"]);
    let directory = appliance.folder.path().join("backup");
    let client = slackwater_client::Client::builder(appliance.url.as_str()).build().unwrap();
    let mut generations = Vec::new();
    for number in 0..3_u64 {
        let image = backed_up(&appliance, &directory, "2", "disks/a.img");
        assert_same_content(&original, &image);
        let shown = fs::read_to_string(image.with_extension("json")).unwrap();
        assert!(shown.contains("disks/a.img") && shown.contains("slackwater.backup"), "{shown}");
        assert_eq!(snapshot_count(&appliance), 1, "the base of the next run");
        generations.push((image, fs::read(&original).unwrap()));
        let bytes = noise(number, 70_000);
        patch(&original, (5 + number) * MIB, &bytes);
        let write = client.write_bytes("disks/a.img", (5 + number) * MIB, Bytes::from(bytes));
        appliance.runtime.block_on(write).unwrap();
    }
    let folder = directory.join("disks%2Fa.img");
    assert_eq!(names(&folder).len(), 5, "two generations, and one note: {:?}", names(&folder));
    for (image, content) in &generations[1..] {
        assert!(fs::read(image).unwrap() == *content, "{}", image.display());
    }
    assert!(!generations[0].0.exists());

    // The base is gone: what differs is found by hash.
    let id = fs::read_to_string(generations[2].0.with_extension("id")).unwrap();
    appliance.ok(&["snapshot", "rm", id.trim_end()]);
    appliance.ok(&["file", "resize", "disks/a.img", "20MiB"]);
    let image = backed_up(&appliance, &directory, "2", "disks/a.img");
    patch(&original, 20 * MIB - 1, &[0]);
    assert_same_content(&original, &image);
    // So is what came since an older image, if somebody deletes the newest; its note is deleted then.
    fs::remove_file(image).unwrap();
    let image = backed_up(&appliance, &directory, "2", "disks/a.img");
    assert_same_content(&original, &image);
    assert_eq!(snapshot_count(&appliance), 1);
    // The way back, on another appliance.
    let other = Appliance::start();
    other.ok(&["import", image.to_str().unwrap(), "restored.img", "--verify"]);
    assert_same_content(&original, exported(&other, "restored.img", "restored"));
}

#[test]
fn a_backup_after_the_clock_went_back_is_kept_and_is_the_next_base() {
    let appliance = Appliance::start();
    let original = appliance.local("original.img");
    image(&original, 4 * MIB, &[(0, 2)]);
    appliance.ok(&["import", &original, "a.img"]);
    let directory = appliance.folder.path().join("backup");
    let first = backed_up(&appliance, &directory, "1", "a.img");
    let future = first.with_file_name("2999-01-01T00:00:00.999Z.img");
    for extension in ["img", "json", "id"] {
        fs::rename(first.with_extension(extension), future.with_extension(extension)).unwrap();
    }
    for _ in 0..2 {
        let image = backed_up(&appliance, &directory, "1", "a.img");
        assert!(image.file_name() > future.file_name(), "{}", image.display());
        assert_same_content(&original, &image);
        assert_eq!(names(&directory.join("a.img")).len(), 3, "the one that was made");
        assert_eq!(snapshot_count(&appliance), 1, "its snapshot");
    }
}

#[test]
fn a_backup_that_fails_leaves_what_was_there() {
    let appliance = Appliance::start();
    let original = appliance.local("original.img");
    image(&original, 4 * MIB, &[(0, 2)]);
    appliance.ok(&["import", &original, "a.img"]);
    let directory = appliance.folder.path().join("backup");
    let image = backed_up(&appliance, &directory, "1", "a.img");
    let before = names(&directory.join("a.img"));
    // The image was damaged on the backup's disk: no increment is laid on it.
    patch(&image, MIB, b"damage");
    let output = back_up(&appliance, &directory, "1", &["a.img"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("does not hold the base"), "{}", text(&output.stderr));
    assert_eq!(names(&directory.join("a.img")), before);
    assert_eq!(snapshot_count(&appliance), 1);
    for (keep, files) in [("0", &["a.img"][..]), ("1", &[]), ("1", &["missing"])] {
        let output = back_up(&appliance, &directory, keep, files);
        assert!(!output.status.success() && !output.stderr.is_empty(), "{keep} {files:?}");
    }
    assert_eq!(snapshot_count(&appliance), 1);
    assert!(!directory.join("missing").exists());
}

/// A `sync` that notes what it was called with, and whether an image was begun by then.
fn noting_sync(tools: &Path, folder: &Path, log: &Path) {
    fs::create_dir(tools).unwrap();
    let script = format!(
        "#!/bin/sh\nbegun=$(ls '{}' | grep -cx -e unfinished -e unfinished.partial)\n\
         for path; do echo \"$begun ${{path##*/}} $(stat -c %s \"$path\")\"; done >>'{}'\n\
         exec /usr/bin/sync \"$@\"\n",
        folder.display(),
        log.display()
    );
    let sync = tools.join("sync");
    fs::write(&sync, script).unwrap();
    fs::set_permissions(&sync, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_backup_syncs_the_notes_of_its_snapshot_before_it_relies_on_them() {
    let appliance = Appliance::start();
    let original = appliance.local("original.img");
    image(&original, 4 * MIB, &[(0, 2)]);
    appliance.ok(&["import", &original, "a.img"]);
    let root = appliance.folder.path();
    let (directory, tools, log) = (root.join("backup"), root.join("tools"), root.join("log"));
    noting_sync(&tools, &directory.join("a.img"), &log);
    let output = back_up_with(&appliance, &directory, "1", &["a.img"], &tools);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let image = PathBuf::from(text(&output.stdout).trim_end());
    let id = image.with_extension("id");
    let bytes = fs::metadata(&id).unwrap().len();
    let synced = fs::read_to_string(&log).unwrap();
    let at = |wanted: String| synced.lines().position(|line| line.starts_with(&wanted));
    let noted = at(format!("0 unfinished.id {bytes}")).expect(&synced);
    assert!(at("0 a.img ".to_owned()).expect(&synced) > noted, "the folder after it: {synced}");
    let name = id.file_name().unwrap().to_str().unwrap();
    at(format!("1 {name} {bytes}")).expect(&synced);
}

/// The snapshot of the image before it was to be deleted by then.
#[test]
fn a_backup_that_was_killed_behind_its_image_leaves_no_snapshot_for_ever() {
    let appliance = Appliance::start();
    let original = appliance.local("original.img");
    image(&original, 4 * MIB, &[(0, 2)]);
    appliance.ok(&["import", &original, "a.img"]);
    let root = appliance.folder.path();
    let directory = root.join("backup");
    backed_up(&appliance, &directory, "9", "a.img");
    for (number, work) in ["", "/usr/bin/rm \"$1\"; "].iter().enumerate() {
        let tools = root.join(format!("tools-{number}"));
        fs::create_dir(&tools).unwrap();
        let script = format!(
            "#!/bin/sh\ncase $1 in\n*/unfinished.id) {work}kill -9 $PPID ;;\n\
             *) exec /usr/bin/rm \"$@\" ;;\nesac\n"
        );
        fs::write(tools.join("rm"), script).unwrap();
        fs::set_permissions(tools.join("rm"), fs::Permissions::from_mode(0o755)).unwrap();
        let output = back_up_with(&appliance, &directory, "9", &["a.img"], &tools);
        assert!(output.status.code().is_none(), "it was killed: {}", text(&output.stderr));
        assert_eq!(snapshot_count(&appliance), 2);
        let newest = backed_up(&appliance, &directory, "9", "a.img");
        assert_same_content(&original, &newest);
        assert_eq!(snapshot_count(&appliance), 1, "that of the newest image, {number}");
    }
}

#[test]
fn a_backup_of_all_files_is_made_though_an_old_snapshot_cannot_be_deleted() {
    let appliance = Appliance::start();
    let original = appliance.local("original.img");
    image(&original, 4 * MIB, &[(0, 2)]);
    for file in ["a.img", "b.img"] {
        appliance.ok(&["import", &original, file]);
    }
    let directory = appliance.folder.path().join("backup");
    backed_up(&appliance, &directory, "1", "a.img");
    // A note that cannot be read.
    fs::create_dir(directory.join("a.img/0.id")).unwrap();
    for _ in 0..2 {
        let output = back_up(&appliance, &directory, "1", &["a.img", "b.img"]);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains("0.id stays"), "{error}");
        let images = text(&output.stdout);
        images.lines().for_each(|image| assert_same_content(&original, image));
        assert_eq!((images.lines().count(), snapshot_count(&appliance)), (2, 2));
        assert_eq!(names(&directory.join("a.img")).len(), 4, "one generation, and that note");
    }
}

#[test]
fn a_backup_goes_on_after_a_power_cut_that_emptied_its_notes() {
    let appliance = Appliance::start();
    let original = appliance.local("original.img");
    image(&original, 4 * MIB, &[(0, 2)]);
    appliance.ok(&["import", &original, "a.img"]);
    let directory = appliance.folder.path().join("backup");
    let mut newest = backed_up(&appliance, &directory, "3", "a.img");
    // Of the run that was cut off; of the newest image, whose own snapshot is then left.
    for (is_unfinished, snapshots) in [(true, 1), (false, 2)] {
        let note = match is_unfinished {
            true => newest.with_file_name("unfinished.id"),
            false => newest.with_extension("id"),
        };
        fs::write(&note, "").unwrap();
        let output = back_up(&appliance, &directory, "3", &["a.img"]);
        let error = text(&output.stderr);
        assert!(output.status.success(), "{error}");
        assert!(error.contains(&format!("{} is empty", note.display())), "{error}");
        newest = PathBuf::from(text(&output.stdout).trim_end());
        assert_same_content(&original, &newest);
        assert_eq!(snapshot_count(&appliance), snapshots);
        assert!(!newest.with_file_name("unfinished.id").exists());
    }
}
