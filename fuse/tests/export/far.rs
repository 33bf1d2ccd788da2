//! Reads from an appliance that is far: with a missed block of a snapshot come those beside it.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{Advice, fadvise};
use rustix::io::Errno;

use crate::support::appliance::Appliance;
use crate::support::gate::Gate;
use crate::support::mount::{Mount, forget_pages};
use crate::support::noise;

const BLOCK: u64 = 4096;

/// What comes at once.
const PLACE: u64 = 256 << 10;

/// A block of the file, of which the kernel reads nothing ahead.
fn read(file: &File, offset: u64) -> std::io::Result<Vec<u8>> {
    let mut block = vec![0; 4096];
    file.read_exact_at(&mut block, offset)?;
    Ok(block)
}

fn open(mount: &Mount, name: &str) -> File {
    let file = File::open(mount.path(name)).unwrap();
    fadvise(&file, 0, None, Advice::Random).unwrap();
    file
}

/// Reads blocks of a file that can be written to, by which it becomes known how far the appliance is.
fn become_known(mount: &Mount) {
    let (file, before) = (open(mount, "disks/other"), mount.fetched());
    let count = 40;
    for number in 0..count {
        read(&file, number * 32 * BLOCK).unwrap();
    }
    assert_eq!(mount.fetched() - before, count * BLOCK, "nothing comes with it");
}

/// Whole places, one that ends in a hole, and one that the file ends in, in the middle of a block.
fn content() -> Vec<u8> {
    let mut content = noise(1, (4 << 20) + 3 * 4096);
    content.resize(8 << 20, 0);
    content.extend(noise(3, (4 << 20) + 2 * 4096 + 777));
    content
}

#[test]
fn what_lies_beside_a_missed_block_of_a_snapshot_comes_with_it_and_nothing_comes_twice() {
    let appliance = Appliance::start();
    let content = content();
    appliance.file("disks/one", &content);
    appliance.file("disks/other", &noise(2, 6 << 20));
    let snapshot = appliance.snapshot("disks/one");
    let gate = Gate::far(appliance.nfs_address);
    let mount = Mount::through(&appliance, gate.address);
    become_known(&mount);

    let file = open(&mount, &format!(".snapshot/{snapshot}"));
    let whole = (0..16).chain(32..48).rev().map(|place| (place, 5, PLACE));
    let cut = [(16, 1, 3 * BLOCK), (48, 0, 2 * BLOCK + 777)];
    let reads: Vec<_> = whole.clone().take(7).chain(cut).chain(whole.skip(7)).collect();
    let (before, mut expected) = (mount.fetched(), 0);
    for (number, (place, block, bytes)) in reads.iter().enumerate() {
        let offset = place * PLACE + block * BLOCK;
        let from = usize::try_from(offset).unwrap();
        assert!(read(&file, offset).unwrap() == content[from..from + 4096], "at {offset}");
        // One in 16 comes alone, so that it is known whether the appliance is far still.
        expected += if number % 16 == 0 { BLOCK } else { *bytes };
        assert_eq!(mount.fetched() - before, expected, "at {offset}");
    }
    let asked_for = reads.len() as u64 * BLOCK;
    assert_eq!(mount.statistics()["bytes_read_beside"], expected - asked_for);
    forget_pages(&file);
    let mut all = vec![0; content.len()];
    file.read_exact_at(&mut all, 0).unwrap();
    assert!(all == content);
    assert_eq!(mount.fetched() - before, (8 << 20) + 5 * BLOCK + 777);
}

#[test]
fn a_block_beside_that_the_appliance_cannot_read_fails_no_read_of_another() {
    let mut appliance = Appliance::start();
    let content = content();
    appliance.file("disks/one", &content);
    appliance.file("disks/other", &noise(2, 6 << 20));
    let snapshot = appliance.snapshot("disks/one");
    appliance.crash();
    appliance.damage(&content[9 * 4096..][..4096]);
    appliance.restart();
    let gate = Gate::far(appliance.nfs_address);
    let mount = Mount::through(&appliance, gate.address);
    become_known(&mount);

    let file = open(&mount, &format!(".snapshot/{snapshot}"));
    // The first one comes alone, the second with its place, and those that lie in the place of the bad one alone.
    let reads = [(3 * PLACE, BLOCK), (4 * PLACE, PLACE), (3 * BLOCK, BLOCK), (5 * BLOCK, BLOCK)];
    let mut before = mount.fetched();
    for (offset, bytes) in reads {
        let from = usize::try_from(offset).unwrap();
        assert!(read(&file, offset).unwrap() == content[from..from + 4096], "at {offset}");
        let now = mount.fetched();
        assert_eq!(now - before, bytes, "at {offset}");
        before = now;
    }
    let error = read(&file, 9 * BLOCK).unwrap_err();
    assert_eq!(Errno::from_io_error(&error), Some(Errno::IO));
    assert_eq!(mount.statistics()["maps_stale"], 0);
}
