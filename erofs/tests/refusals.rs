//! What an image cannot hold is refused when it is put in, and equal calls write equal bytes.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::fs::File;
use std::io::{Read, Write};

use slackwater_erofs::{Attributes, ErofsError, ImageWriter, Kind, Time, Tree, Xattrs};

const MEMORY: usize = 1 << 20;

fn tree() -> Tree {
    Tree::new(Attributes::default(), MEMORY).unwrap()
}

fn writer() -> ImageWriter {
    ImageWriter::create(tempfile::tempfile().unwrap()).unwrap()
}

#[test]
fn a_file_with_content_is_not_written_over() {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"mine").unwrap();
    let error = ImageWriter::create(file.try_clone().unwrap()).unwrap_err();
    assert!(matches!(error, ErofsError::NotEmpty { got: 4 }), "{error}");
    assert_eq!(file.metadata().unwrap().len(), 4);
    // What an attempt left that was not ended, in a file that keeps its size or not.
    for size_bytes in [0, 1 << 20] {
        let file = tempfile::tempfile().unwrap();
        file.set_len(size_bytes).unwrap();
        let mut writer = ImageWriter::create(file.try_clone().unwrap()).unwrap();
        writer.begin_file(5000).unwrap().write(&[0xff; 5000]).unwrap();
        drop(writer);
        let error = ImageWriter::create(file).unwrap_err();
        assert!(matches!(error, ErofsError::NotEmpty { .. }), "{error}");
    }
}

#[test]
fn a_file_that_keeps_its_size_is_not_outgrown() {
    let write = |room_bytes: u64, content: &[u8]| {
        let file = tempfile::tempfile().unwrap();
        file.set_len(room_bytes).unwrap();
        let mut writer = ImageWriter::create(file.try_clone().unwrap()).unwrap();
        let written = (|| {
            let mut content_of = writer.begin_file(content.len() as u64)?;
            content_of.write(content)?;
            let kind = Kind::File(content_of.finish()?);
            let mut tree = tree();
            tree.add(tree.root(), b"file", Attributes::default(), kind)?;
            writer.finish(&tree, [0; 16])
        })();
        assert_eq!(file.metadata().unwrap().len(), room_bytes);
        written
    };
    // Superblock, content, inodes.
    assert_eq!(write(3 * 4096, b"content").unwrap().size_bytes, 3 * 4096);
    assert_eq!(write(1 << 30, b"content").unwrap().size_bytes, 3 * 4096);
    for (room_bytes, content) in
        [(2 * 4096, &b"content"[..]), (4096, b"content"), (3 * 4096, &[1; 5000])]
    {
        let error = write(room_bytes, content).unwrap_err();
        assert!(matches!(error, ErofsError::Room { .. }), "{room_bytes}: {error}");
    }
}

#[test]
fn names_that_no_directory_holds_are_refused_and_change_nothing() {
    let mut tree = tree();
    let root = tree.root();
    let long = [b'n'; 256];
    let names: [&[u8]; 6] = [b"", b".", b"..", b"a/b", b"a\0", &long];
    for name in names {
        let error = tree.add(root, name, Attributes::default(), Kind::Fifo).unwrap_err();
        assert!(matches!(error, ErofsError::Name { .. }), "{error}");
    }
    let fifo = tree.add(root, &long[..255], Attributes::default(), Kind::Fifo).unwrap();
    let error = tree.link(root, &long[..255], fifo).unwrap_err();
    assert!(matches!(error, ErofsError::Exists { .. }), "{error}");
    let error = tree.add(fifo, b"in", Attributes::default(), Kind::Fifo).unwrap_err();
    assert!(matches!(error, ErofsError::WrongKind { .. }), "{error}");
    let directory = tree.add(root, b"d", Attributes::default(), Kind::Directory).unwrap();
    let error = tree.link(root, b"e", directory).unwrap_err();
    assert!(matches!(error, ErofsError::WrongKind { .. }), "{error}");
    assert_eq!(tree.children(root).count(), 2);
}

#[test]
fn what_an_inode_cannot_hold_is_refused() {
    let mut tree = tree();
    let root = tree.root();
    let with = |kind| (Attributes::default(), kind);
    let link = |target: &[u8]| with(Kind::Symlink(target.into()));
    let time = Time { seconds: 0, nanoseconds: 1_000_000_000 };
    let xattrs = Xattrs::from([(b"system.other".to_vec(), b"v".to_vec())]);
    let user = Xattrs::from([(b"user.a".to_vec(), b"v".to_vec())]);
    let bad = [
        link(b""),
        link(b"a\0b"),
        link(&[b't'; 4096]),
        with(Kind::CharacterDevice { major: 4096, minor: 0 }),
        with(Kind::BlockDevice { major: 0, minor: 1 << 20 }),
        (Attributes { mode: 0o10000, ..Attributes::default() }, Kind::Fifo),
        (Attributes { modified: time, ..Attributes::default() }, Kind::Fifo),
        (Attributes { xattrs, ..Attributes::default() }, Kind::Directory),
        (Attributes { xattrs: user, ..Attributes::default() }, Kind::Fifo),
    ];
    for (attributes, kind) in bad {
        let shown = format!("{attributes:?} {kind:?}");
        tree.add(root, b"bad", attributes, kind).expect_err(&shown);
        assert_eq!(tree.children(root).count(), 0, "{shown}");
    }
}

#[test]
fn a_content_has_the_size_that_was_said() {
    let mut writer = writer();
    let mut file = writer.begin_file(3).unwrap();
    file.write(b"ab").unwrap();
    let error = file.write(b"cd").unwrap_err();
    assert!(matches!(error, ErofsError::Content { expected: 3, got: 4 }), "{error}");
    let error = file.finish().unwrap_err();
    assert!(matches!(error, ErofsError::Content { expected: 3, got: 2 }), "{error}");
    let file = writer.begin_sparse_file(10, &[(2, 3)]).unwrap();
    let error = file.finish().unwrap_err();
    assert!(matches!(error, ErofsError::Content { expected: 3, got: 0 }), "{error}");
}

#[test]
fn parts_of_a_sparse_file_are_in_order_and_within_it() {
    let mut writer = writer();
    let bad: [&[(u64, u64)]; 4] =
        [&[(0, 11)], &[(5, 2), (6, 1)], &[(6, 1), (5, 1)], &[(u64::MAX, 2)]];
    for parts in bad {
        let error = writer.begin_sparse_file(10, parts).unwrap_err();
        assert!(matches!(error, ErofsError::Part { .. }), "{error}");
    }
    writer.begin_sparse_file(10, &[(0, 5), (5, 5)]).unwrap();
}

#[test]
fn an_image_has_no_more_blocks_than_it_can_address() {
    let mut writer = writer();
    let error = writer.begin_file(16 << 40).unwrap_err().to_string();
    assert!(error.contains("16 TiB"), "{error}");
    let error = writer.begin_file(u64::MAX).unwrap_err().to_string();
    assert!(error.contains("16 TiB"), "{error}");
    let size = (16 << 40) - 4096;
    let error = writer.begin_sparse_file(size, &[(0, size)]).unwrap_err().to_string();
    assert!(error.contains("16 TiB"), "{error}");
    writer.begin_file((16 << 40) - (1 << 20)).unwrap();
    let largest = (16 << 40) - 4096;
    writer.begin_sparse_file(largest, &[]).unwrap();
    let error = writer.begin_sparse_file(largest + 1, &[]).unwrap_err();
    assert!(matches!(error, ErofsError::SparseFile { .. }), "{error}");
}

#[test]
fn a_tree_takes_no_more_memory_than_its_limit() {
    let mut tree = tree();
    let root = tree.root();
    let mut count = 0;
    let error = loop {
        let name = format!("{count}");
        match tree.add(root, name.as_bytes(), Attributes::default(), Kind::Fifo) {
            Ok(_) => count += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, ErofsError::Memory { limit_mib: 1 }), "{error}");
    assert!((1000..20_000).contains(&count), "{count} inodes in 1 MiB");
    assert_eq!(tree.children(root).count(), count);
    // What was removed counts, too: adding and removing without end has an end.
    let names: Vec<_> = tree.children(root).map(|(name, _)| name.to_vec()).collect();
    for name in names {
        tree.remove(root, &name);
    }
    tree.add(root, b"x", Attributes::default(), Kind::Fifo).unwrap_err();
}

#[test]
fn a_content_can_be_read_again_while_the_image_is_written() {
    let mut writer = writer();
    let mut sparse = vec![0; 20_000];
    sparse[9000..9005].fill(7);
    let mut contents = vec![b"hello".to_vec(), vec![1; 3 << 20], vec![0; 200_000], Vec::new()];
    let mut extents = Vec::new();
    for content in &contents {
        let mut file = writer.begin_file(content.len() as u64).unwrap();
        file.write(content).unwrap();
        extents.push(file.finish().unwrap());
    }
    let mut file = writer.begin_sparse_file(20_000, &[(9000, 5)]).unwrap();
    file.write(&[7; 5]).unwrap();
    extents.push(file.finish().unwrap());
    contents.push(sparse);
    for (extent, content) in extents.iter().zip(&contents) {
        let mut got = Vec::new();
        writer.content(extent).unwrap().read_to_end(&mut got).unwrap();
        assert!(got == *content, "{} bytes differ", content.len());
        assert_eq!(extent.size_bytes(), content.len() as u64);
    }
}

#[test]
fn a_full_disk_is_an_error_that_says_so() {
    let file = File::options().read(true).write(true).open("/dev/full").unwrap();
    let error = ImageWriter::create(file).unwrap_err().to_string();
    assert!(error.contains("No space left"), "{error}");
}

#[test]
fn equal_calls_write_equal_bytes() {
    let image = || {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut writer = ImageWriter::create(file.reopen().unwrap()).unwrap();
        let mut tree = tree();
        let root = tree.root();
        for number in [3, 1, 2] {
            let mut content = writer.begin_file(5).unwrap();
            content.write(b"hello").unwrap();
            let kind = Kind::File(content.finish().unwrap());
            let name = format!("file{number}");
            tree.add(root, name.as_bytes(), Attributes::default(), kind).unwrap();
        }
        writer.finish(&tree, [7; 16]).unwrap();
        std::fs::read(file.path()).unwrap()
    };
    let first = image();
    assert!(first == image(), "other bytes");
    assert_eq!(first.len(), 5 * 4096);
    assert_eq!(&first[1024..1028], &0xe0f5_e1e2_u32.to_le_bytes());
    assert_eq!(&first[1024 + 48..1024 + 64], &[7; 16]);
}
