//! What it takes until a disk is a mounted ext4: of a local file (loop device and mount alone),
//! and of a new clone of an appliance, exported over FUSE by the driver's own program.
//!
//! Needs root, `/dev/fuse` and `slackwater-driver` built; without them it fails and says so.
//!
//! `cargo bench -p slackwater-benches --bench attach -- --quick`
#![allow(clippy::expect_used, reason = "a failure ends the run, whose mounts the guard ends")]

#[path = "../common/mod.rs"]
mod common;
mod guard;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, SamplingMode};
use slackwater_attach::{Access, Attach, Method, Options, Rights, Source};
use slackwater_client::types::CreateSnapshot;
use tokio::runtime::Runtime;

use common::{Appliance, timed};
use guard::Guard;

/// Size of the disks: ext4 with a journal.
const DISK_BYTES: u64 = 256 << 20;

/// Blocks that the export keeps, as the driver's argument.
const CACHE_SIZE: &str = "67108864";

/// What this machine lacks, if anything.
fn lacks(driver: &Path) -> Option<String> {
    if !Path::new("/dev/fuse").exists() {
        return Some("there is no /dev/fuse; load the kernel's module fuse".to_owned());
    }
    if !rustix::process::geteuid().is_root() {
        return Some("mounting needs root".to_owned());
    }
    let advice = "build it: cargo build --release -p slackwater-driver";
    (!driver.is_file()).then(|| format!("there is no {}; {advice}", driver.display()))
}

/// The driver that was built beside this bench, which is one folder deeper.
fn driver() -> PathBuf {
    let program = std::env::current_exe().expect("the path of this program");
    let folder = program.parent().and_then(Path::parent).expect("a target directory");
    folder.join("slackwater-driver")
}

fn options(state: &Path, nfs: std::net::SocketAddr, fuse_program: Vec<OsString>) -> Options {
    Options {
        method: Some(Method::Fuse),
        nfs_address: nfs,
        export: "/slackwater".to_owned(),
        mount_path: None,
        state_directory: state.to_owned(),
        fuse_program,
        tool_program: vec![driver().into(), "run-tool".into()],
        prefers_fuse: false,
        rights: Rights::CONTAINER,
        mounts_end: false,
    }
}

/// Mounts; unmounting is not measured.
fn time_mount(
    runtime: &Runtime,
    attach: &Attach,
    target: &Path,
    prepare: impl FnOnce() -> String,
) -> Duration {
    let start = Instant::now();
    let file = prepare();
    let mounted = runtime.block_on(attach.mount(Source::File(&file), target, Access::ReadWrite));
    let elapsed = start.elapsed();
    mounted.expect("mounted");
    runtime.block_on(attach.unmount(target)).expect("unmounted");
    elapsed
}

fn local(group: &mut BenchmarkGroup<'_, WallTime>, runtime: &Runtime, folder: &Path) {
    let (state, files) = (folder.join("local"), folder.join("files"));
    for folder in [&state, &files.join(".snapshot")] {
        std::fs::create_dir_all(folder).expect("a folder");
    }
    let disk = std::fs::File::create(files.join("disk")).expect("a file");
    disk.set_len(DISK_BYTES).expect("a sparse file");
    drop(disk);
    let nowhere = std::net::SocketAddr::from(([127, 0, 0, 1], 2049));
    let attach = Attach::on_directory(options(&state, nowhere, Vec::new()), files);
    let attach = runtime.block_on(attach).expect("an export");
    runtime.block_on(attach.make_file_system("disk")).expect("a file system");
    let target = state.join("mount");
    group.bench_function("local_file", |bencher| {
        bencher.iter_custom(|count| {
            timed(count, |_| time_mount(runtime, &attach, &target, || "disk".to_owned()))
        });
    });
}

fn over_fuse(
    group: &mut BenchmarkGroup<'_, WallTime>,
    runtime: &Runtime,
    (folder, driver): (&Path, &Path),
) {
    let appliance = Appliance::start();
    let client = appliance.client();
    let (state, cache) = (folder.join("fuse"), folder.join("cache"));
    for folder in [&state, &cache] {
        std::fs::create_dir_all(folder).expect("a folder");
    }
    let mut program: Vec<OsString> = vec![driver.into(), "serve-export".into(), "--keep".into()];
    let mut add = |name: &str, value: OsString| program.extend([name.into(), value]);
    add("--api", appliance.url.clone().into());
    add("--nfs", appliance.nfs.to_string().into());
    add("--state-dir", state.clone().into());
    add("--cache-dir", cache.into());
    add("--cache-size", CACHE_SIZE.into());
    let attach = runtime.block_on(Attach::open(options(&state, appliance.nfs, program)));
    let attach = attach.expect("an export");
    let image = runtime.block_on(async {
        client.create_file("disk", DISK_BYTES).await.expect("a file");
        attach.make_file_system("disk").await.expect("a file system");
        let request = CreateSnapshot { path: "disk".to_owned(), ..CreateSnapshot::default() };
        client.create_snapshot(&request).await.expect("a snapshot").id
    });
    let target = folder.join("mount");
    let mut clones = 0;
    group.bench_function("clone_over_fuse", |bencher| {
        bencher.iter_custom(|count| {
            timed(count, |_| {
                clones += 1;
                // Each another name: no cache of names is in the way or helps.
                let file = format!("clone-{clones}");
                let elapsed = time_mount(runtime, &attach, &target, || {
                    let cloned = runtime.block_on(client.create_clone(image, &file));
                    drop(cloned.expect("a clone"));
                    file.clone()
                });
                runtime.block_on(client.delete_file(&file)).expect("deleted");
                elapsed
            })
        });
    });
    runtime.block_on(attach.shut_down()).expect("the export ended");
}

fn main() -> ExitCode {
    let driver = driver();
    if let Some(reason) = lacks(&driver) {
        eprintln!("attach: cannot be measured here: {reason}");
        return ExitCode::FAILURE;
    }
    let mut criterion = common::criterion();
    let runtime = Runtime::new().expect("a runtime");
    let guard = Guard::new();
    let mut group = criterion.benchmark_group("attach");
    group.sampling_mode(SamplingMode::Flat);
    local(&mut group, &runtime, guard.folder());
    over_fuse(&mut group, &runtime, (guard.folder(), &driver));
    group.finish();
    criterion.final_summary();
    ExitCode::SUCCESS
}
