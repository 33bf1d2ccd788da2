//! The graphdriver plugin when things go wrong: broken tars, references to nowhere, names that
//! lead elsewhere, a driver that was killed, an appliance that is away.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

#[path = "support/plugin.rs"]
mod plugin;
mod support;

use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use slackwater_archive::Reference;
use slackwater_driver::worker::Key;
use uuid::Uuid;

use self::plugin::{Plugin, layer, set_up_init};
use self::support::{Appliance, DISK_BYTES, Machine, Trust, kernel_release};

fn socket(machine: &Machine) -> std::path::PathBuf {
    machine.path().join("plugin.sock")
}

fn recordings(machine: &Machine) -> usize {
    std::fs::read_dir(machine.worker.recordings_directory()).unwrap().count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_came_in_part_is_never_used() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &socket(&machine));
    let large = "x".repeat(300_000);
    let whole = layer(&[("one", &large), ("two", &large)]);
    // The connection broke; dockerd sends what is left of its reader to the next one.
    plugin.create("cut", "");
    plugin.apply_cut("cut", "", &whole[..400_000]);
    let refusal = plugin.apply_refused("cut", "", &whole[400_000..]);
    assert!(refusal.contains("pull again"), "{refusal}");
    // A body that ends as it should, of a tar that does not.
    plugin.create("short", "");
    let refusal = plugin.apply_refused("short", "", &whole[..400_000]);
    assert!(refusal.contains("truncated"), "{refusal}");
    plugin.create("none", "");
    plugin.apply_refused("none", "", b"");
    plugin.create("noise", "");
    plugin.apply_refused("noise", "", &[7; 200_000]);
    plugin.create("escape", "");
    let mut escape = layer(&[("aa/evil", "gotcha")]);
    rename_member(&mut escape, b"./aa/evil", b"../../evil");
    let refusal = plugin.apply_refused("escape", "", &escape);
    assert!(refusal.contains("evil"), "{refusal}");

    for name in ["cut", "short", "none", "noise", "escape"] {
        let named = json!({ "ID": name });
        assert!(plugin.refused("Get", &named).contains("pull again"));
        assert!(plugin.diff_refused(name).contains("pull again"));
        plugin.refused("Create", &json!({ "ID": "above", "Parent": name }));
        plugin.refused("CreateReadWrite", &json!({ "ID": "above", "Parent": name }));
        plugin.remove(name);
    }
    assert_eq!(recordings(&machine), 0);
    // Pulled again.
    plugin.create("cut", "");
    plugin.apply("cut", "", &whole);
    assert_eq!(plugin.diff("cut", ""), whole);
    let refusal = plugin.apply_refused("cut", "", &whole);
    assert!(refusal.contains("content already"), "{refusal}");
    assert_eq!(plugin.diff("cut", ""), whole);
}

/// Gives the member of that name another one in a ustar header, with its checksum.
fn rename_member(tar: &mut [u8], old: &[u8], new: &[u8]) {
    let start = tar.chunks(512).position(|block| block.starts_with(old)).unwrap() * 512;
    let header = &mut tar[start..start + 512];
    header[..100].fill(0);
    header[..new.len()].copy_from_slice(new);
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

#[tokio::test(flavor = "multi_thread")]
async fn references_to_nowhere_are_refused_with_the_reason() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &socket(&machine));
    let store_id = machine.worker.store_id().await.unwrap();
    let reference = |store_id: &str| Reference {
        store_id: store_id.to_owned(),
        snapshot_id: Uuid::from_u128(7),
        size_bytes: DISK_BYTES,
        mac: Some("07".repeat(32).parse().unwrap()),
    };
    plugin.create("unknown", "");
    let refusal = plugin.apply_refused("unknown", "", &reference(&store_id).to_archive());
    assert!(refusal.contains(&Uuid::from_u128(7).to_string()), "{refusal}");
    assert!(refusal.contains(&appliance.url), "{refusal}");
    plugin.create("foreign", "");
    let other = Uuid::from_u128(9).to_string();
    let refusal = plugin.apply_refused("foreign", "", &reference(&other).to_archive());
    assert!(refusal.contains(&other) && refusal.contains(&store_id), "{refusal}");
    plugin.create("padded", "");
    let mut padded = reference(&store_id).to_archive();
    padded.resize(1 << 20, 0);
    plugin.apply_refused("padded", "", &padded);
    for name in ["unknown", "foreign", "padded"] {
        assert!(plugin.refused("Get", &json!({ "ID": name })).contains("pull again"));
        plugin.remove(name);
    }
}

/// What runs in a container can write a reference, and knows ids of what runs beside it.
#[tokio::test(flavor = "multi_thread")]
async fn references_that_anything_could_have_written_are_refused() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &socket(&machine));
    plugin.create("own", "");
    plugin.apply("own", "", &layer(&[("file", "secret")]));
    let own = machine.worker.get(&Key::docker("own")).unwrap().snapshot().unwrap();
    let made = machine.worker.reference_to(own.id).await.unwrap();
    assert_eq!(made.snapshot_id, Uuid::from_bytes(*own.id.as_bytes()));
    let refused = |name: &str, reference: &Reference, said: &str| {
        plugin.create(name, "");
        let refusal = plugin.apply_refused(name, "", &reference.to_archive());
        assert!(refusal.contains(&own.id.to_string()) && refusal.contains(said), "{refusal}");
        assert!(plugin.refused("Get", &json!({ "ID": name })).contains("pull again"));
        plugin.remove(name);
    };
    let forged = [
        Reference { mac: Some("07".repeat(32).parse().unwrap()), ..made.clone() },
        Reference { size_bytes: made.size_bytes + 4096, ..made.clone() },
    ];
    let without = Reference { mac: None, ..made.clone() };
    for is_published in [false, true] {
        if is_published {
            machine.worker.publish(own.id).await.unwrap();
        }
        for forged in &forged {
            refused("forged", forged, "forged");
        }
        refused("without", &without, "insecure-references-without-mac");
    }
    plugin.create("pulled", "");
    plugin.apply("pulled", "", &made.to_archive());
    machine.worker.unpublish(own.id).await.unwrap();
    refused("late", &made, "not published");
}

#[tokio::test(flavor = "multi_thread")]
async fn references_of_release_0_2_are_taken_where_that_is_set() {
    let appliance = Appliance::start();
    let trust = Trust { references_without_mac: true, ..Trust::default() };
    let machine = Machine::start_with(&appliance, trust).await;
    let plugin = Plugin::serve(&machine.worker, &socket(&machine));
    plugin.create("own", "");
    plugin.apply("own", "", &layer(&[("file", "content")]));
    let own = machine.worker.get(&Key::docker("own")).unwrap().snapshot().unwrap();
    let made = machine.worker.reference_to(own.id).await.unwrap();
    let without = Reference { mac: None, ..made.clone() };
    let larger = Reference { size_bytes: made.size_bytes + 4096, ..without.clone() };
    for name in ["early", "pulled", "larger", "forged"] {
        plugin.create(name, "");
    }
    let refusal = plugin.apply_refused("early", "", &without.to_archive());
    assert!(refusal.contains("not published"), "{refusal}");
    machine.worker.publish(own.id).await.unwrap();
    plugin.apply("pulled", "", &without.to_archive());
    // It is pushed as it was pulled: registries know it by its bytes.
    assert_eq!(plugin.diff("pulled", ""), without.to_archive());
    let refusal = plugin.apply_refused("larger", "", &larger.to_archive());
    assert!(refusal.contains("forged"), "{refusal}");
    // One with a MAC must have the right one all the same.
    let forged = Reference { mac: Some("07".repeat(32).parse().unwrap()), ..made };
    let refusal = plugin.apply_refused("forged", "", &forged.to_archive());
    assert!(refusal.contains("forged"), "{refusal}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_driver_goes_on_without_init() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &socket(&machine));
    let tar = layer(&[("file", "content")]);
    plugin.create("image", "");
    plugin.apply("image", "", &tar);
    plugin.create_read_write("x-init", "image");
    set_up_init(&plugin.get("x-init"));
    plugin.put("x-init");
    plugin.create_read_write("x", "x-init");
    let root = plugin.get("x");
    std::fs::write(root.join("written"), "before").unwrap();
    plugin.create("half", "");
    plugin.apply_cut("half", "", &tar[..512]);
    // An orphan of a process that died between two steps.
    let orphan = machine.worker.recordings_directory().join("docker-gone.recording");
    let unfinished = machine.worker.recordings_directory().join("docker-gone.recording.partial");
    for path in [&orphan, &unfinished] {
        std::fs::write(path, "").unwrap();
    }
    plugin.stop().await;
    let machine = machine.restart(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &socket(&machine));
    assert_eq!(std::fs::read_to_string(root.join("written")).unwrap(), "before");
    assert_eq!(plugin.get("x"), root, "the same mount");
    plugin.put("x");
    plugin.put("x");
    assert!(plugin.apply_refused("half", "", &tar).contains("pull again"));
    assert_eq!(plugin.diff("image", ""), tar);
    // It goes in the background.
    for _ in 0..600 {
        if !orphan.exists() && !unfinished.exists() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    assert!(!orphan.exists() && !unfinished.exists());
    // Repeated calls whose first answer was lost with the old process.
    plugin.create_read_write("y", "x-init");
    plugin.create_read_write("y", "x-init");
    let refusal = plugin.refused("CreateReadWrite", &json!({ "ID": "y", "Parent": "image" }));
    assert!(refusal.contains("exists already"), "{refusal}");
    let refusal = plugin.refused("Create", &json!({ "ID": "image", "Parent": "" }));
    assert!(refusal.contains("exists already"), "{refusal}");
    plugin.put("never-was");
    plugin.remove("never-was");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tar_whose_beginning_another_process_was_sent_is_refused() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &socket(&machine));
    let tar = layer(&[("file", "content")]);
    // Killed before it read the call, whose bytes were in the socket: the rest of dockerd's
    // reader is zeros, which is a good tar of nothing.
    for name in ["cut", "again"] {
        plugin.create(name, "");
    }
    plugin.stop().await;
    let machine = machine.restart(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &socket(&machine));
    let refusal = plugin.apply_refused("cut", "", &[0; 1024]);
    assert!(refusal.contains("interrupted"), "{refusal}");
    let reference = Reference {
        store_id: machine.worker.store_id().await.unwrap(),
        snapshot_id: Uuid::from_u128(7),
        size_bytes: DISK_BYTES,
        mac: None,
    };
    let refusal = plugin.apply_refused("cut", "", &reference.to_archive());
    assert!(refusal.contains("interrupted"), "{refusal}");
    plugin.remove("cut");
    assert!(!plugin.exists("cut"));
    plugin.create("empty", "");
    assert_eq!(plugin.apply("empty", "", &[0; 1024]), 0);
    // A repeated Create comes before the first byte.
    plugin.create("again", "");
    plugin.apply("again", "", &tar);
    assert_eq!(plugin.diff("again", ""), tar);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_make_no_sense_are_refused() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &socket(&machine));
    let long = "a".repeat(300);
    for name in ["", "..", "../x", "a/b", "init:x", "a\u{0}", &long] {
        let named = json!({ "ID": name, "Parent": "" });
        for call in [
            "Create",
            "CreateReadWrite",
            "Remove",
            "Get",
            "Put",
            "GetMetadata",
            "Exists",
            "Changes",
            "DiffSize",
        ] {
            let refusal = plugin.refused(call, &named);
            assert!(refusal.contains("no name of a layer"), "{call}: {refusal}");
        }
        plugin.refused(
            "Create",
            &json!({ "ID": "good", "Parent": if name.is_empty() { "/" } else { name } }),
        );
        plugin.diff_refused(name);
    }
    plugin.apply_refused("..%2Fx", "", &layer(&[("a", "a")]));
    assert_eq!(plugin.raw(b"POST /GraphDriver.Mount HTTP/1.0\r\n\r\n").0, 404);
    let broken = b"POST /GraphDriver.Create HTTP/1.0\r\nContent-Length: 1\r\n\r\n{";
    let answer: Value = serde_json::from_slice(&plugin.raw(broken).1).unwrap();
    assert_ne!(answer["Err"], "");
    let refusal = plugin.refused("Init", &json!({ "Home": "/h", "Opts": ["size=1G"] }));
    assert!(refusal.contains("--storage-opt"), "{refusal}");
    let map = json!([{ "container_id": 0, "host_id": 1000, "size": 1 }]);
    plugin.refused("Init", &json!({ "Home": "/h", "Opts": null, "UIDMaps": map }));
    plugin.ok("Init", &json!({ "Home": "/h", "Opts": null, "UIDMaps": null, "GIDMaps": [] }));
    plugin.ok("Cleanup", &json!({}));
    for name in ["missing", "missing-init"] {
        plugin.refused("Get", &json!({ "ID": name }));
        plugin.refused("GetMetadata", &json!({ "ID": name }));
        plugin.refused("CreateReadWrite", &json!({ "ID": "x", "Parent": name }));
        plugin.diff_refused(name);
    }
    assert!(!plugin.exists("x"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_appliance_that_is_away_is_named() {
    let mut appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &socket(&machine));
    let tar = layer(&[("file", "content")]);
    plugin.create("image", "");
    plugin.apply("image", "", &tar);
    appliance.stop();
    plugin.create("next", "image");
    let refusal = plugin.apply_refused("next", "image", &tar);
    assert!(refusal.contains(appliance.url.trim_start_matches("http://")), "{refusal}");
    assert!(plugin.exists("image"));
    let status = plugin.ok("Status", &json!({}))["Status"].to_string();
    assert!(status.contains(&appliance.url), "{status}");
    plugin.remove("next");
    appliance.serve();
    plugin.create("next", "image");
    plugin.apply("next", "image", &tar);
    assert_eq!(plugin.diff("next", "image"), tar);
}

const WRITERS: u8 = 4;
const PIECES: u64 = 32;
const PIECE_BYTES: usize = 256 << 10;
/// Longest time that the writes may take between two faults, also on a busy machine.
const ENDED_WITHIN: Duration = Duration::from_secs(120);

/// What the piece of a writer holds.
fn piece(writer: u8, number: u64) -> Vec<u8> {
    let first = number.wrapping_mul(31).wrapping_add(writer.into());
    let byte = |at: u64| u8::try_from((first + at / 512) % 251).unwrap();
    (0..PIECE_BYTES as u64).map(byte).collect()
}

/// The kernel sends what goes to a disk side by side (Linux 6.9 and newer).
#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_side_by_side_is_whole_over_kills_of_the_server_and_cut_connections() {
    let mut appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let plugin = Plugin::serve(&machine.worker, &socket(&machine));
    plugin.create_read_write("live", "");
    let root = plugin.get("live");
    let log = || {
        let log = std::fs::read_to_string(machine.path().join("state/serve-export.log"));
        log.unwrap_or_default()
    };
    let syncs = Arc::new(AtomicU64::new(0));
    // Each writes the same pieces again and again, until all has happened.
    let is_over = Arc::new(AtomicBool::new(false));
    let writers = (0..WRITERS).map(|writer| {
        let path = root.join(format!("file-{writer}"));
        let (syncs, is_over) = (Arc::clone(&syncs), Arc::clone(&is_over));
        std::thread::spawn(move || {
            let file = std::fs::File::create(path).unwrap();
            for number in (0..PIECES).cycle() {
                file.write_all_at(&piece(writer, number), number * PIECE_BYTES as u64).unwrap();
                if number % 8 == 7 {
                    file.sync_data().unwrap();
                    syncs.fetch_add(1, Ordering::Relaxed);
                }
                if number == PIECES - 1 && is_over.load(Ordering::Relaxed) {
                    return;
                }
            }
        })
    });
    let writers: Vec<_> = writers.collect();
    // Before 6.9 the kernel does not hand out again what a dead server had taken.
    let is_resent = kernel_release() >= (6, 9);
    for round in 0..6 {
        // A sync that began after the round before has ended: what a server left that was killed is settled.
        let until = syncs.load(Ordering::Relaxed) + u64::from(WRITERS) + 1;
        let deadline = Instant::now() + ENDED_WITHIN;
        while syncs.load(Ordering::Relaxed) < until {
            assert!(Instant::now() < deadline, "nothing is synced any more: {}", log());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        if is_resent && round % 2 == 0 {
            let record = std::fs::read_to_string(machine.path().join("state/server.process"));
            let record = record.unwrap();
            let process = record.split(' ').next().unwrap();
            // The one before may have ended, and the next not be written down yet.
            let _ = std::process::Command::new("kill").args(["-KILL", process]).status();
        } else {
            appliance.stop();
            appliance.serve();
        }
    }
    is_over.store(true, Ordering::Relaxed);
    let deadline = Instant::now() + ENDED_WITHIN;
    while !writers.iter().all(std::thread::JoinHandle::is_finished) {
        assert!(Instant::now() < deadline, "the writers do not end: {}", log());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for writer in writers {
        assert!(writer.join().is_ok(), "{}", log());
    }
    for writer in 0..WRITERS {
        let file = std::fs::File::open(root.join(format!("file-{writer}"))).unwrap();
        // So that it comes from the appliance.
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let mut found = vec![0; PIECE_BYTES];
        for number in 0..PIECES {
            file.read_exact_at(&mut found, number * PIECE_BYTES as u64).unwrap();
            assert!(found == piece(writer, number), "piece {number} of writer {writer}");
        }
    }
    plugin.put("live");
    plugin.remove("live");
}
