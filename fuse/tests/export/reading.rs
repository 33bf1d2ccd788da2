//! Reads through a real mount: right bytes, and no more fetched than were read.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use crate::support::appliance::{Appliance, TOKEN};
use crate::support::mount::{LIMIT, Mount, forget_pages};
use crate::support::noise;
use rustix::io::Errno;
use slackwater_api::{Role, Secret, Token};

const BLOCK: usize = 4096;

/// Data, a hole, data that ends within a block.
fn content() -> Vec<u8> {
    let mut content = noise(1, 3 << 20);
    content.resize(5 << 20, 0);
    content.extend(noise(2, (1 << 20) + 777));
    content
}

#[test]
fn bytes_are_those_of_the_export() {
    let appliance = Appliance::start();
    let content = content();
    appliance.file("disks/one", &content);
    let snapshot = appliance.snapshot("disks/one");
    let mount = Mount::new(&appliance);
    let file = mount.open("disks/one");
    let snapshot_path = mount.path(&format!(".snapshot/{snapshot}"));
    let frozen = std::fs::File::open(&snapshot_path).unwrap();
    let size = u64::try_from(content.len()).unwrap();
    assert_eq!(file.metadata().unwrap().len(), size);
    assert_eq!(frozen.metadata().unwrap().len(), size);
    let places = noise(3, 64 * 8);
    for (number, place) in places.as_chunks::<8>().0.iter().enumerate() {
        let place = u64::from_le_bytes(*place);
        let offset = place % size;
        let length = usize::try_from((place >> 32) % 300_000).unwrap();
        let from = usize::try_from(offset).unwrap();
        let expected = &content[from..(from + length).min(content.len())];
        let mut got = vec![0; expected.len()];
        let read_from = if number % 2 == 0 { &file } else { &frozen };
        read_from.read_exact_at(&mut got, offset).unwrap();
        assert!(got == expected, "{length} bytes at {offset}");
        if number % 8 == 0 {
            forget_pages(read_from);
        }
    }
    // Each block was fetched once, from whichever file.
    let data_bytes = (4 << 20) + 777;
    assert!(mount.fetched() <= data_bytes, "{} fetched", mount.fetched());
}

#[test]
fn what_is_read_is_what_is_fetched() {
    let appliance = Appliance::start();
    appliance.file("disks/one", &noise(1, 32 << 20));
    let mount = Mount::new(&appliance);
    let file = mount.open("disks/one");
    let mut block = [0; BLOCK];
    let count = 40;
    for number in 0..count {
        // Far apart, from the back to the front: nobody could take this for a sequence.
        let offset = (count - number) * 700_000 / 4096 * 4096;
        file.read_exact_at(&mut block, offset).unwrap();
    }
    let read = count * 4096;
    assert!(mount.fetched() <= read + read / 10, "{} fetched for {read}", mount.fetched());
    // In sequence the kernel reads ahead, and everything is read once.
    let mut all = vec![0; 32 << 20];
    file.read_exact_at(&mut all, 0).unwrap();
    assert!(all == noise(1, 32 << 20));
    assert!(mount.fetched() <= 32 << 20);
}

#[test]
fn clones_and_a_later_mount_fetch_nothing_again() {
    let appliance = Appliance::start();
    let content = content();
    appliance.file("disks/one", &content);
    let snapshot = appliance.snapshot("disks/one");
    for number in 0..4 {
        appliance.clone_of(snapshot, &format!("disks/clone-{number}"));
    }
    let mut mount = Mount::new(&appliance);
    // All at once: what is under way for one is waited for by the others.
    std::thread::scope(|scope| {
        for number in 0..4 {
            let (mount, content) = (&mount, &content);
            let name = format!("disks/clone-{number}");
            scope.spawn(move || assert!(std::fs::read(mount.path(&name)).unwrap() == *content));
        }
    });
    let data_bytes = (4 << 20) + 777;
    assert_eq!(mount.fetched(), data_bytes);
    assert!(mount.statistics()["map_bytes"].as_u64().unwrap() < data_bytes / 20);
    mount.unmount();
    mount.mount();
    assert!(std::fs::read(mount.path("disks/clone-2")).unwrap() == content);
    assert_eq!(mount.fetched(), 0);
    let statistics = mount.statistics();
    assert!(statistics["cache_hits"].as_u64().unwrap() > 1000, "{statistics}");
}

#[test]
fn a_file_that_changed_behind_the_mount_is_read_as_it_is() {
    let appliance = Appliance::start();
    appliance.file("disks/one", &noise(1, 1 << 20));
    let mount = Mount::new(&appliance);
    let file = mount.open("disks/one");
    let mut block = [0; BLOCK];
    file.read_exact_at(&mut block, 0).unwrap();
    // Over REST, after its map was fetched and before this block of it was.
    let changed = noise(9, BLOCK);
    let write = appliance.client.write_bytes("disks/one", 512 << 10, changed.clone().into());
    appliance.calls.block_on(write).unwrap();
    file.read_exact_at(&mut block, 512 << 10).unwrap();
    assert!(block[..] == changed[..]);
    assert_eq!(mount.statistics()["maps_stale"], 1);
}

#[test]
fn what_is_not_served_is_refused() {
    let appliance = Appliance::start();
    appliance.file("disks/one", &noise(1, 1 << 20));
    let snapshot = appliance.snapshot("disks/one");
    let mount = Mount::new(&appliance);
    let errno = |error: std::io::Error| Errno::from_io_error(&error).unwrap();
    let missing = std::fs::read(mount.path("disks/two")).unwrap_err();
    assert_eq!(errno(missing), Errno::NOENT);
    let unknown = std::fs::read(mount.path(".snapshot/nonsense")).unwrap_err();
    assert_eq!(errno(unknown), Errno::NOENT);
    let frozen = mount.path(&format!(".snapshot/{snapshot}"));
    let written = std::fs::OpenOptions::new().write(true).open(frozen).unwrap_err();
    assert_eq!(errno(written), Errno::ROFS);
    let made = std::fs::write(mount.path("disks/three"), b"x").unwrap_err();
    assert_eq!(errno(made), Errno::NOSYS);
    let cut = mount.open("disks/one").set_len(1).unwrap_err();
    assert_eq!(errno(cut), Errno::PERM);
    assert!(std::fs::remove_file(mount.path("disks/one")).is_err());
    // A file that is made again is another one, also for the kernel.
    assert_eq!(std::fs::read(mount.path("disks/one")).unwrap().len(), 1 << 20);
    appliance.calls.block_on(appliance.client.delete_file("disks/one")).unwrap();
    appliance.file("disks/one", &noise(7, 5000));
    std::thread::sleep(std::time::Duration::from_millis(1100));
    assert!(std::fs::read(mount.path("disks/one")).unwrap() == noise(7, 5000));
    let names: Vec<_> = std::fs::read_dir(mount.path(""))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(names.contains(&".slackwater-stats".to_owned()), "{names:?}");
}

#[test]
fn after_its_token_changed_it_mounts_again() {
    let mut appliance = Appliance::start();
    appliance.file("disks/one", &noise(1, 1 << 20));
    let mount = Mount::new(&appliance);
    let before = mount.open("disks/one");
    appliance.crash();
    // Until now no token was asked for, so that of the mount is gone.
    let (name, role) = ("worker".to_owned(), Role::Worker);
    appliance.restart_for(vec![Token { name, role, secret: Secret::new(TOKEN) }]);
    let refused = before.read_at(&mut [0; BLOCK], 0).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(Errno::ACCESS.raw_os_error()), "{refused}");
    // For a second the kernel takes a name for the file that it was, with the handle that is refused.
    let deadline = Instant::now() + LIMIT;
    let mut block = [0; BLOCK];
    let read =
        |block: &mut [u8]| std::fs::File::open(mount.path("disks/one"))?.read_exact_at(block, 0);
    while let Err(error) = read(&mut block) {
        assert!(Instant::now() < deadline, "{error}");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(block == noise(1, 1 << 20)[..BLOCK]);
}
