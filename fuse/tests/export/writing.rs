//! Writes through a real mount: what was synced is at the appliance, whoever was restarted.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use crate::support::appliance::Appliance;
use crate::support::gate::Gate;
use crate::support::mount::{LoopMount, Mount, forget_pages, run};
use crate::support::noise;
use rustix::io::Errno;

const SIZE: usize = 8 << 20;

/// Writes of many lengths, on and off the borders of blocks, over each other.
fn scribble(file: &std::fs::File, model: &mut [u8], seed: u64, count: usize) {
    let places = noise(seed, count * 8);
    for (number, place) in (seed..).zip(places.as_chunks::<8>().0) {
        let place = u64::from_le_bytes(*place);
        let limit = u64::try_from(model.len()).unwrap() - 200_000;
        let offset = if number % 3 == 0 { place % limit / 4096 * 4096 } else { place % limit };
        let length = usize::try_from((place >> 40) % 100_000).unwrap();
        let data = if number % 5 == 0 { vec![0; length] } else { noise(number, length) };
        file.write_all_at(&data, offset).unwrap();
        let from = usize::try_from(offset).unwrap();
        model[from..from + length].copy_from_slice(&data);
    }
}

fn read_back(file: &std::fs::File) -> Vec<u8> {
    forget_pages(file);
    let mut all = vec![0; SIZE];
    file.read_exact_at(&mut all, 0).unwrap();
    all
}

fn stored(appliance: &Appliance) -> Vec<u8> {
    appliance.bytes("disks/one", 0, u64::try_from(SIZE).unwrap())
}

fn sync_error(file: &std::fs::File) -> Option<Errno> {
    Errno::from_io_error(&file.sync_all().unwrap_err())
}

fn prepared() -> (Appliance, Vec<u8>) {
    let appliance = Appliance::start();
    let model = noise(1, SIZE);
    appliance.file("disks/base", &model);
    let snapshot = appliance.snapshot("disks/base");
    appliance.clone_of(snapshot, "disks/one");
    (appliance, model)
}

#[test]
fn what_is_written_is_read_and_synced() {
    let (mut appliance, mut model) = prepared();
    let mount = Mount::new(&appliance);
    let file = mount.open("disks/one");
    assert!(read_back(&file) == model);
    scribble(&file, &mut model, 10, 60);
    assert!(read_back(&file) == model);
    assert!(mount.statistics()["kept_bytes"].as_u64().unwrap() > 0);
    file.sync_all().unwrap();
    assert_eq!(mount.statistics()["kept_bytes"], 0);
    appliance.crash();
    appliance.restart();
    assert!(stored(&appliance) == model);
    // A sync commits what was written since the one before, too.
    for seed in [20, 30] {
        scribble(&file, &mut model, seed, 20);
        assert!(read_back(&file) == model);
        file.sync_all().unwrap();
        assert_eq!(mount.statistics()["kept_bytes"], 0);
    }
    appliance.crash();
    appliance.restart();
    assert!(stored(&appliance) == model);
}

/// As a journal does: blocks, a sync, a block behind them that says so, a sync.
#[test]
fn a_commit_record_is_durable_with_its_write() {
    let (mut appliance, mut model) = prepared();
    let mount = Mount::new(&appliance);
    let file = mount.open("disks/one");
    let number = |name: &str| mount.statistics()[name].as_u64().unwrap();
    let mut write = |offset: usize| {
        let data = noise(u64::try_from(offset).unwrap(), 4096);
        file.write_all_at(&data, u64::try_from(offset).unwrap()).unwrap();
        model[offset..offset + 4096].copy_from_slice(&data);
    };
    for (transactions, start) in [(1, 0), (2, 12_288), (3, 24_576)] {
        write(start);
        write(start + 4096);
        assert_eq!(number("kept_bytes"), 8192);
        file.sync_all().unwrap();
        write(start + 8192);
        assert_eq!(number("kept_bytes"), 0, "the record is not durable");
        file.sync_all().unwrap();
        assert_eq!(number("commits"), transactions);
    }
    // What others write in between has to be committed in any case, and the record with it.
    write(4 << 20);
    file.sync_all().unwrap();
    write(1 << 20);
    write((4 << 20) + 4096);
    assert_eq!((number("kept_bytes"), number("commits")), (8192, 4));
    file.sync_all().unwrap();
    assert_eq!((number("kept_bytes"), number("commits")), (0, 5));
    write(5 << 20);
    file.sync_all().unwrap();
    write((5 << 20) + 4096);
    // The record is not synced.
    appliance.crash();
    appliance.restart();
    assert!(stored(&appliance) == model);
}

#[test]
fn an_appliance_that_loses_writes_gets_them_again() {
    let (mut appliance, mut model) = prepared();
    let mount = Mount::new(&appliance);
    let file = mount.open("disks/one");
    scribble(&file, &mut model, 30, 40);
    appliance.crash();
    appliance.restart();
    // Before anybody found out: it has not got them, and they are read all the same.
    assert!(read_back(&file) == model);
    // Newer ones over older ones that must be sent again.
    scribble(&file, &mut model, 40, 40);
    file.sync_all().unwrap();
    assert!(mount.statistics()["writes_sent_again"].as_u64().unwrap() > 0);
    appliance.crash();
    appliance.restart();
    assert!(stored(&appliance) == model);
    assert!(read_back(&file) == model);
}

#[test]
fn writers_wait_for_an_appliance_that_is_away() {
    let (mut appliance, mut model) = prepared();
    let mount = Mount::new(&appliance);
    let file = mount.open("disks/one");
    assert!(read_back(&file) == model);
    scribble(&file, &mut model, 50, 10);
    appliance.crash();
    let writer = {
        let (file, mut model) = (file.try_clone().unwrap(), model.clone());
        std::thread::spawn(move || {
            scribble(&file, &mut model, 60, 30);
            file.sync_all().unwrap();
            model
        })
    };
    std::thread::sleep(Duration::from_secs(2));
    assert!(!writer.is_finished(), "nobody is there to answer");
    // What is in the cache is read meanwhile. It was never written to: clones share it.
    appliance.restart();
    let model = writer.join().unwrap();
    assert!(stored(&appliance) == model);
    assert!(read_back(&file) == model);
}

#[test]
fn what_is_cached_is_read_while_the_appliance_is_away() {
    let (mut appliance, model) = prepared();
    let mount = Mount::new(&appliance);
    let file = mount.open("disks/one");
    assert!(read_back(&file) == model);
    appliance.crash();
    assert!(read_back(&file) == model);
    appliance.restart();
}

#[test]
fn a_process_that_died_is_followed_by_one_that_goes_on() {
    let (appliance, mut model) = prepared();
    let gate = Gate::before(appliance.nfs_address);
    let mut mount = Mount::through(&appliance, gate.address);
    let file = mount.open("disks/one");
    scribble(&file, &mut model, 70, 20);
    // Requests that the process takes and cannot answer before it dies.
    let (read_from, write_to) = (mount.open("disks/base"), file.try_clone().unwrap());
    gate.close();
    let data = noise(99, 300_000);
    let (reader, writer) = {
        let data = data.clone();
        let reader = std::thread::spawn(move || {
            let mut bytes = vec![0; 50_000];
            read_from.read_exact_at(&mut bytes, 4_000_000).map(|()| bytes)
        });
        let writer = std::thread::spawn(move || {
            write_to.write_all_at(&data, 1_000_000)?;
            write_to.sync_all()
        });
        (reader, writer)
    };
    std::thread::sleep(Duration::from_millis(500));
    mount.kill();
    assert!(!reader.is_finished() && !writer.is_finished());
    mount.resume();
    gate.open();
    let base = noise(1, SIZE);
    assert!(reader.join().unwrap().unwrap() == base[4_000_000..4_050_000]);
    writer.join().unwrap().unwrap();
    model[1_000_000..1_300_000].copy_from_slice(&data);
    assert!(read_back(&file) == model);
    assert!(stored(&appliance) == model);
    assert_eq!(mount.statistics()["resumed"], true);
    scribble(&file, &mut model, 80, 20);
    file.sync_all().unwrap();
    drop(file);
    mount.unmount();
    assert!(stored(&appliance) == model);
}

#[test]
fn writes_that_two_deaths_lost_are_never_called_synced() {
    let (mut appliance, mut model) = prepared();
    appliance.file("disks/other", &noise(5, 1 << 20));
    let mut mount = Mount::new(&appliance);
    let (file, other) = (mount.open("disks/one"), mount.open("disks/other"));
    scribble(&file, &mut model, 90, 10);
    other.write_all_at(b"synced", 0).unwrap();
    other.sync_all().unwrap();
    mount.kill();
    appliance.crash();
    appliance.restart();
    mount.resume();
    assert_eq!(sync_error(&file), Some(Errno::IO));
    let refused = file.write_all_at(b"more", 0).unwrap_err();
    assert_eq!(Errno::from_io_error(&refused), Some(Errno::IO));
    assert_eq!(mount.statistics()["kept_bytes"], 0);
    assert_eq!(mount.statistics()["files_lost"], 1);
    other.write_all_at(b"again", 0).unwrap();
    other.sync_all().unwrap();
    // A process that follows that one knows it, too.
    mount.kill();
    mount.resume();
    file.write_all_at(b"more", 0).unwrap_err();
    assert_eq!(sync_error(&file), Some(Errno::IO));
    assert_eq!(appliance.bytes("disks/other", 0, 6), b"againd");
}

#[test]
fn a_process_waits_for_the_end_of_the_one_that_it_follows() {
    let (mut appliance, mut model) = prepared();
    let mut mount = Mount::new(&appliance);
    let file = mount.open("disks/one");
    mount.resume_too_early();
    // Time for it to do what it must not.
    std::thread::sleep(Duration::from_millis(500));
    scribble(&file, &mut model, 110, 10);
    appliance.crash();
    mount.kill_earlier();
    appliance.restart();
    // What the first one journaled last is known to the second.
    assert_eq!(sync_error(&file), Some(Errno::IO));
    let statistics = mount.statistics();
    assert_eq!((&statistics["resumed"], &statistics["files_lost"]), (&true.into(), &1.into()));
}

#[test]
fn nothing_is_kept_of_a_file_that_was_deleted() {
    let (appliance, mut model) = prepared();
    let mount = Mount::new(&appliance);
    let file = mount.open("disks/one");
    scribble(&file, &mut model, 120, 10);
    assert!(mount.statistics()["kept_bytes"].as_u64().unwrap() > 0);
    appliance.delete("disks/one");
    assert_eq!(sync_error(&file), Some(Errno::STALE));
    assert_eq!(mount.statistics()["kept_bytes"], 0);
    assert_eq!(mount.statistics()["files_lost"], 1);
    file.write_all_at(b"more", 0).unwrap_err();
    assert_eq!(sync_error(&file), Some(Errno::IO));
    assert_eq!(mount.statistics()["kept_bytes"], 0);
}

#[test]
fn an_fsync_on_ext4_takes_one_commit() {
    const FILES: u64 = 16;
    let appliance = Appliance::start();
    appliance.empty_file("disks/one", 64 << 20);
    let mount = Mount::new(&appliance);
    let target = mount.folder.path().join("target");
    let mut device = LoopMount::attach(&mount.path("disks/one"), &target);
    // The kernel does not write by itself.
    run(&["mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", &device.device]);
    device.mount();
    let commits = || mount.statistics()["commits"].as_u64().unwrap();
    let before = commits();
    for number in 0..FILES {
        let path = target.join(number.to_string());
        std::fs::write(&path, noise(number, 4096)).unwrap();
        std::fs::File::open(path).unwrap().sync_all().unwrap();
    }
    // One for the blocks of the journal, and none for its commit record. The kernel may commit now and then by itself.
    let took = commits() - before;
    assert!((FILES..FILES + FILES / 2).contains(&took), "{took}");
    device.unmount();
}

#[test]
fn ext4_on_a_loop_device_survives_it_all() {
    let mut appliance = Appliance::start();
    appliance.empty_file("disks/one", 256 << 20);
    let mut mount = Mount::new(&appliance);
    let target = mount.folder.path().join("target");
    let mut device = LoopMount::attach(&mount.path("disks/one"), &target);
    run(&["mkfs.ext4", "-q", &device.device]);
    device.mount();
    let write = |number: u64| {
        let path = target.join(number.to_string());
        std::fs::write(&path, noise(number, 2 << 20)).unwrap();
        std::fs::File::open(path).unwrap().sync_all().unwrap();
    };
    (0..4).for_each(write);
    mount.kill();
    mount.resume();
    (4..8).for_each(write);
    appliance.crash();
    appliance.restart();
    (8..12).for_each(write);
    device.unmount();
    let checked = run(&["e2fsck", "-fn", &device.device]);
    assert!(!checked.contains("FIXED") && !checked.contains("WARNING"), "{checked}");
    device.mount();
    for number in 0..12 {
        let path = target.join(number.to_string());
        assert!(std::fs::read(path).unwrap() == noise(number, 2 << 20), "{number}");
    }
    device.unmount();
    drop(device);
    mount.unmount();
    // A snapshot of what was unmounted is clean for everybody else.
    let snapshot = appliance.snapshot("disks/one");
    appliance.clone_of(snapshot, "disks/two");
    mount.mount();
    let mut second = LoopMount::attach(&mount.path("disks/two"), &target);
    run(&["e2fsck", "-fn", &second.device]);
    second.mount();
    assert!(std::fs::read(target.join("11")).unwrap() == noise(11, 2 << 20));
    second.unmount();
}
