//! What the model allows, and what it calls a loss.

use super::*;
use slackwater_benches::wire::reply::Reply;

/// The verifier of a server's life, as it comes over the wire.
fn verifier(life: u8) -> WriteVerifier {
    let mut record = [0; 4 * 9];
    // The call 0, an answer; accepted; NFS3_OK, no attributes; the verifier.
    record[7] = 1;
    record[35] = life;
    let words = [&record[..24], &[0; 12], &record[28..]].concat();
    Reply::parse(&words).unwrap().commit().unwrap()
}

fn answer(is_durable: bool, life: u8) -> WriteReply {
    WriteReply { count: 0, is_durable, verifier: verifier(life) }
}

fn bytes(byte: u8, count: usize) -> Vec<u8> {
    vec![byte; count]
}

fn write(model: &mut FileModel, offset_bytes: u64, data: &[u8], is_durable: bool) {
    model.write_begins(offset_bytes, data);
    model.write_ends(offset_bytes, data, answer(is_durable, 1));
}

fn image(blocks: &[u8]) -> Image {
    let all: Vec<u8> = blocks.iter().flat_map(|&byte| bytes(byte, BLOCK_BYTES)).collect();
    Image::of(all.len() as u64, &all)
}

#[test]
fn what_was_committed_must_be_there_and_what_was_not_may_be_old_or_new() {
    let mut model = FileModel::empty();
    write(&mut model, 0, &bytes(1, 2 * BLOCK_BYTES), false);
    assert!(model.committed(verifier(1)) && model.is_durable());
    write(&mut model, 0, &bytes(2, BLOCK_BYTES), false);
    assert!(model.clone().observe(&image(&[1, 1])).is_ok());
    assert!(model.clone().observe(&image(&[2, 1])).is_ok());
    for lost in [image(&[3, 1]), image(&[0, 1]), image(&[2, 2]), image(&[1]), image(&[1, 1, 0])] {
        assert!(model.clone().observe(&lost).is_err(), "{lost:?}");
    }
}

#[test]
fn what_was_seen_after_a_death_stays_until_it_is_sent_again() {
    let mut model = FileModel::empty();
    write(&mut model, 0, &bytes(1, BLOCK_BYTES), true);
    write(&mut model, 0, &bytes(2, BLOCK_BYTES), false);
    write(&mut model, 0, &bytes(3, BLOCK_BYTES), false);
    model.observe(&image(&[1])).unwrap();
    assert_eq!(model.lost(), [(0, bytes(3, BLOCK_BYTES))]);
    assert!(model.clone().observe(&image(&[2])).is_err());
    assert!(model.clone().observe(&image(&[3])).is_ok());
}

#[test]
fn a_commit_of_another_life_makes_nothing_durable() {
    let mut model = FileModel::empty();
    write(&mut model, 0, &bytes(1, BLOCK_BYTES), false);
    assert!(!model.committed(verifier(2)));
    assert!(!model.is_durable());
    assert!(model.clone().observe(&Image::default()).is_ok());
    assert!(model.committed(verifier(1)));
    assert!(model.observe(&Image::default()).is_err());
}

#[test]
fn a_synchronous_write_within_a_dirty_block_leaves_the_block_to_be_committed() {
    let mut model = FileModel::empty();
    write(&mut model, 0, &bytes(1, BLOCK_BYTES), false);
    write(&mut model, 100, &bytes(2, 10), true);
    assert!(!model.is_durable());
    let mut clean = FileModel::empty();
    write(&mut clean, 0, &bytes(1, BLOCK_BYTES), true);
    write(&mut clean, 100, &bytes(2, 10), true);
    assert!(clean.is_durable());
    assert_eq!(clean.image(), model.image());
    assert!(clean.clone().observe(&image(&[1])).is_err());
    assert!(clean.observe(&model.image()).is_ok());
}

#[test]
fn writes_span_blocks_and_sizes_follow() {
    let mut model = FileModel::empty();
    write(&mut model, 4000, &bytes(7, 5000), false);
    assert_eq!(model.size_bytes(), 9000);
    let lengths: Vec<_> = model.lost().iter().map(|(at, data)| (*at, data.len())).collect();
    assert_eq!(lengths, [(0, 4096), (4096, 4096), (8192, 808)]);
    // Nothing of it, the file as it was.
    assert!(model.clone().observe(&Image::default()).is_ok());
    assert!(model.committed(verifier(1)));
    let mut all = bytes(0, 4000);
    all.extend(bytes(7, 5000));
    assert_eq!(model.image().difference(&Image::of(9000, &all)), None);
    all[8999] = 8;
    assert!(model.image().difference(&Image::of(9000, &all)).unwrap().starts_with("block 2"));
}

#[test]
fn a_new_size_cuts_and_later_growth_shows_zeros() {
    let mut model = FileModel::holding(&image(&[1, 2, 3]));
    model.resized(5000);
    let mut all = bytes(1, 4096);
    all.extend(bytes(2, 904));
    assert_eq!(model.image(), Image::of(5000, &all));
    model.resized(12288);
    all.resize(12288, 0);
    assert_eq!(model.image().difference(&Image::of(12288, &all)), None);
    model.resized(4096);
    assert_eq!(model.image(), image(&[1]));
}
