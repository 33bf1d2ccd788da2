//! The bytes of every key and every value of the index, as FORMAT.md has them: a change that
//! moves one of them is a new format, and fails here first.

use std::fmt::Debug;

use super::*;
use crate::disk::{FileName, FileRole};
use crate::error::ErrorKind;
use crate::id::ContentHash;
use crate::kind::DeviceNumber;
use crate::kv::{Family, Kv, KvRead, MemoryKv};

/// Bytes from hexadecimal digits; white space only parts the fields.
pub(crate) fn hex(text: &str) -> Vec<u8> {
    let digits: String = text.split_whitespace().collect();
    let pairs = digits.as_bytes().chunks(2);
    pairs.map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// A value's bytes, its decoder, and what the decoder has to make of them.
///
/// `shorter`: lengths at which a value of this kind may end as well, since it ends with a list
/// or with an optional part; cut there it is another valid value, never the same one.
fn assert_golden<T: Debug + PartialEq>(
    decode: impl Fn(&[u8]) -> Result<T>,
    (value, encoded): (&T, Vec<u8>),
    (golden, shorter): (&str, &[usize]),
) {
    assert_bytes(&decode, (value, encoded), (golden, shorter));
    assert_other_versions_refused(decode, &hex(golden));
}

/// As [`assert_golden`], of any version.
fn assert_bytes<T: Debug + PartialEq>(
    decode: impl Fn(&[u8]) -> Result<T>,
    (value, encoded): (&T, Vec<u8>),
    (golden, shorter): (&str, &[usize]),
) {
    let golden = hex(golden);
    assert_eq!(encoded, golden, "{value:?} is encoded otherwise");
    assert_eq!(decode(&golden).unwrap(), *value);
    for length in 0..golden.len() {
        match decode(&golden[..length]) {
            Ok(other) => {
                assert!(shorter.contains(&length), "{length} bytes are enough for {value:?}");
                assert_ne!(other, *value);
            }
            Err(error) => {
                assert!(!shorter.contains(&length), "{length} bytes: {error}");
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            }
        }
    }
    let longer = [&golden[..], &[0]].concat();
    assert!(decode(&longer).is_err(), "a byte too many goes unnoticed in {value:?}");
}

fn assert_other_versions_refused<T: Debug>(decode: impl Fn(&[u8]) -> Result<T>, golden: &[u8]) {
    assert_eq!(golden[0], 1, "every versioned value of format 2 begins with 1");
    for version in (0..=u8::MAX).filter(|&version| version != 1) {
        let mut other = golden.to_vec();
        other[0] = version;
        let error = decode(&other).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains(&format!("version {version}, expected 1")), "{error}");
    }
}

fn snapshot_id() -> SnapshotId {
    SnapshotId::from_bytes(*b"0123456789abcdef")
}

fn inode(body: Body) -> InodeRecord {
    InodeRecord {
        generation: 0xa1b2_c3d4,
        mode: 0o644,
        uid: 1000,
        gid: 1001,
        link_count: 2,
        size_bytes: 0x0102_0304_0506_0708,
        used_blocks: 9,
        accessed_at: Timestamp::from_nanos(0x11),
        modified_at: Timestamp::from_nanos(0x22),
        changed_at: Timestamp::from_nanos(0x33),
        created_at: Timestamp::from_nanos(0x44),
        body,
    }
}

const INODE_ATTRIBUTES: &str = "01 a1b2c3d4 000001a4 000003e8 000003e9 00000002
    0102030405060708 0000000000000009
    0000000000000011 0000000000000022 0000000000000033 0000000000000044";

#[test]
fn inodes() {
    let bodies = [
        (
            Body::File { layer: LayerId::new(7), origin: None, verifier: None },
            "01 0000000000000007 00 00",
        ),
        (
            Body::File {
                layer: LayerId::new(7),
                origin: Some(snapshot_id()),
                verifier: Some(0xfeed_f00d),
            },
            "01 0000000000000007 01 00000010 30313233343536373839616263646566
             01 00000008 00000000feedf00d",
        ),
        (
            Body::Directory { parent: InodeId::ROOT, next_cookie: 3 },
            "02 0000000000000001 0000000000000003",
        ),
        (Body::Symlink { target: b"../a".to_vec() }, "03 00000004 2e2e2f61"),
    ];
    for (body, golden) in bodies {
        let record = inode(body);
        let golden = format!("{INODE_ATTRIBUTES} {golden}");
        assert_golden(InodeRecord::decode, (&record, record.encode()), (&golden, &[]));
    }
    let unknown = hex(&format!("{INODE_ATTRIBUTES} 04 00000000"));
    assert_eq!(InodeRecord::decode(&unknown).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn inodes_of_special_files() {
    let number = DeviceNumber { major: 0x0102_0304, minor: 0xfffe_fdfc };
    let kinds = [
        (SpecialFile::BlockDevice(number), "04 01020304 fffefdfc"),
        (SpecialFile::CharacterDevice(number), "05 01020304 fffefdfc"),
        (SpecialFile::Socket, "06"),
        (SpecialFile::Fifo, "07"),
    ];
    let attributes = INODE_ATTRIBUTES.replacen("01", "02", 1);
    for (special, golden) in kinds {
        let record = inode(Body::Special(special));
        let golden = format!("{attributes} {golden}");
        assert_bytes(InodeRecord::decode, (&record, record.encode()), (&golden, &[]));
        for version in (0..=u8::MAX).filter(|&version| version != 2) {
            let mut other = hex(&golden);
            other[0] = version;
            let error = InodeRecord::decode(&other).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "version {version}: {error}");
        }
    }
    for kind in ["00", "01", "03", "08", "ff"] {
        let unknown = hex(&format!("{attributes} {kind} 0000000000000001 00 00"));
        assert_eq!(InodeRecord::decode(&unknown).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}

#[test]
fn directory_entries_and_cookies() {
    let entry = DirentRecord { inode: InodeId::new(5), cookie: 4 };
    let golden = "01 0000000000000005 0000000000000004";
    assert_golden(DirentRecord::decode, (&entry, entry.encode()), (golden, &[]));

    let golden = hex("01 0000000000000005 612ff1");
    assert_eq!(encode_cookie(InodeId::new(5), b"a/\xf1"), golden);
    assert_eq!(decode_cookie(&golden).unwrap(), (InodeId::new(5), &b"a/\xf1"[..]));
    for length in 0..9 {
        assert!(decode_cookie(&golden[..length]).is_err(), "{length} bytes");
    }
    assert_other_versions_refused(|bytes| decode_cookie(bytes).map(|(inode, _)| inode), &golden);
}

#[test]
fn snapshots() {
    let bare = SnapshotRecord {
        layer: LayerId::new(7),
        size_bytes: 8192,
        used_blocks: 2,
        created_at: Timestamp::from_nanos(0x55),
        clone_count: 3,
        deletion: DeletionPolicy::Keep,
        expires_at: None,
        path: b"a/b".to_vec(),
        name: None,
        labels: Labels::new(),
    };
    let numbers = "01 0000000000000007 0000000000002000 0000000000000002
        0000000000000055 0000000000000003";
    let golden = format!("{numbers} 00 00 00000003 612f62 00");
    assert_golden(SnapshotRecord::decode, (&bare, bare.encode()), (&golden, &[]));

    let label = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    let full = SnapshotRecord {
        deletion: DeletionPolicy::OnZeroClones,
        expires_at: Some(Timestamp::from_nanos(0x66)),
        name: Some("gold".to_owned()),
        labels: Labels::from([label("k", "v"), label("empty", "")]),
        ..bare
    };
    // Labels in the order of their keys' bytes.
    let golden = format!(
        "{numbers} 01 01 00000008 0000000000000066 00000003 612f62 01 00000004 676f6c64
         00000005 656d707479 00000000 00000001 6b 00000001 76"
    );
    let end = hex(&golden).len();
    let without_labels = [end - 10 - 13, end - 10];
    assert_golden(SnapshotRecord::decode, (&full, full.encode()), (&golden, &without_labels));

    let unknown_policy = hex(&format!("{numbers} 02 00 00000003 612f62 00"));
    assert!(SnapshotRecord::decode(&unknown_policy).is_err());
}

#[test]
fn layers() {
    let record = |parent: Option<u64>, state| LayerRecord {
        parent: parent.map(LayerId::new),
        state,
        children: 1,
        snapshots: 2,
        runs: 3,
        blocks: 4,
    };
    let counts = "0000000000000001 0000000000000002 0000000000000003 0000000000000004";
    for (layer, golden) in [
        (record(None, LayerState::Open(InodeId::new(9))), "0000000000000000 01 0000000000000009"),
        (record(Some(8), LayerState::Frozen), "0000000000000008 02 0000000000000000"),
        (record(Some(8), LayerState::Dead), "0000000000000008 03 0000000000000000"),
    ] {
        let golden = format!("01 {golden} {counts}");
        assert_golden(LayerRecord::decode, (&layer, layer.encode()), (&golden, &[]));
    }
    let unknown = hex(&format!("01 0000000000000008 04 0000000000000000 {counts}"));
    assert!(LayerRecord::decode(&unknown).is_err());
}

#[test]
fn map_runs() {
    let hole = Run { first: 10, count: 2, target: Target::Hole };
    let decode = |bytes: &[u8]| Run::decode(10, bytes);
    assert_golden(decode, (&hole, hole.encode()), ("01 0000000000000002", &[]));
    let first = ChunkId::new(SegmentId::new(3), 0x45);
    let data = Run { first: 10, count: 2, target: Target::Chunks(first) };
    // Without its last field it is a hole.
    let golden = "01 0000000000000002 0000000003000045";
    assert_golden(decode, (&data, data.encode()), (golden, &[9]));
    assert!(decode(&hex("01 0000000000000000")).is_err(), "a run of no blocks");
    assert!(decode(&hex("01 fffffffffffffff6")).is_err(), "a run that ends behind 2^64 - 1");
    assert!(decode(&hex("01 fffffffffffffff5")).is_ok(), "the longest run from block 10");
}

#[test]
fn lost_runs() {
    let lost = Run { first: 10, count: 2, target: Target::Lost };
    let golden = hex("02 0000000000000002 01");
    assert_eq!(lost.encode(), golden);
    assert_eq!(Run::decode(10, &golden).unwrap(), lost);
    for length in 0..golden.len() {
        assert!(Run::decode(10, &golden[..length]).is_err(), "{length} bytes are enough");
    }
    for wrong in [
        "02 0000000000000002 01 00",
        "02 0000000000000002 02",
        "02 0000000000000000 01",
        "01 0000000000000002 01",
        "03 0000000000000002 01",
    ] {
        assert_eq!(Run::decode(10, &hex(wrong)).unwrap_err().kind(), ErrorKind::Corrupt, "{wrong}");
    }
}

#[test]
fn segments() {
    let record = |role, directory_offset_bytes| SegmentRecord {
        file: FileName { role, number: SegmentId::new(6) },
        directory_offset_bytes,
        chunks: 0x10,
        stored_chunks: 0x0f,
        live_chunks: 0x0e,
        stored_bytes: 0xd000,
    };
    let counts = "00000010 0000000f 0000000e 000000000000d000";
    for (segment, golden) in [
        (record(FileRole::Log, None), "01 0000000000000006 0000000000000000"),
        (record(FileRole::Log, Some(64)), "01 0000000000000006 0000000000000040"),
        (record(FileRole::Compacted, Some(64)), "02 0000000000000006 0000000000000040"),
    ] {
        let golden = format!("01 {golden} {counts}");
        assert_golden(SegmentRecord::decode, (&segment, segment.encode()), (&golden, &[]));
    }
    let unknown = hex(&format!("01 03 0000000000000006 0000000000000040 {counts}"));
    assert!(SegmentRecord::decode(&unknown).is_err());
}

#[test]
fn counters_and_the_log_position() {
    let counters = Counters {
        next_inode: 1,
        next_layer: 2,
        files: 3,
        inodes: 4,
        snapshots: 5,
        layers: 6,
        dead_layers: 7,
        mapped_blocks: 8,
        live_chunks: 9,
    };
    let golden = "01 0000000000000001 0000000000000002 0000000000000003 0000000000000004
        0000000000000005 0000000000000006 0000000000000007 0000000000000008 0000000000000009";
    assert_golden(Counters::decode, (&counters, counters.encode()), (golden, &[]));

    let position = LogPosition { segment: SegmentId::new(2), offset_bytes: 64, sequence: 0x99 };
    let golden = "01 0000000000000002 0000000000000040 0000000000000099";
    assert_golden(LogPosition::decode, (&position, position.encode()), (golden, &[]));
}

#[test]
fn chunk_ids_have_no_version() {
    assert_eq!(decode_chunk(&hex("0000000003000045")).unwrap().to_string(), "3/69");
    for length in [0, 4, 7, 9] {
        assert!(decode_chunk(&vec![0; length]).is_err(), "{length} bytes");
    }
    let highest = ChunkId::new(SegmentId::new((1 << 40) - 1), (1 << 24) - 1);
    assert_eq!(highest.raw(), u64::MAX);
    assert_eq!(
        ChunkId::new(SegmentId::new(1), 0).raw().to_be_bytes().to_vec(),
        hex("0000000001000000")
    );
}

#[test]
fn pages_of_counts() {
    let mut page = CountPage::default();
    for (index, count) in [(0, 0), (1, 254), (2, 255), (63, 0x0102_0304)] {
        page.set(ChunkId::new(SegmentId::new(1), index), count);
    }
    let ones = "01".repeat(60);
    let golden = format!("01 00 fe ff {ones} ff 000000ff 01020304");
    assert_eq!(page.encode().unwrap(), hex(&golden));
    assert_eq!(CountPage::decode(&hex(&golden)).unwrap(), page);
}

#[test]
fn keys() {
    let (layer, id) = (LayerId::new(7), snapshot_id());
    let id_hex = "30313233343536373839616263646566";
    for (key, golden) in [
        (key::META_STORE.to_vec(), "73746f7265"),
        (key::META_COUNTERS.to_vec(), "636f756e74657273"),
        (key::META_POSITION.to_vec(), "706f736974696f6e"),
        (key::inode(InodeId::new(0x102)), "0000000000000102"),
        (key::dirent(InodeId::ROOT, b"a\xff"), "0000000000000001 61ff"),
        (key::cookie(InodeId::ROOT, 3), "0000000000000001 0000000000000003"),
        (key::snapshot(id), &format!("69 {id_hex}")),
        (key::snapshot_name("gold"), "6e 676f6c64"),
        (key::snapshot_label_prefix("k", "v"), "6c 6b 00 76 00"),
        (key::snapshot_path_prefix(b"a/b"), "70 612f62 00"),
        (key::layer(layer), "0000000000000007"),
        (key::child(layer, LayerId::new(8)), "0000000000000007 0000000000000008"),
        (key::map(layer, 0x1000), "0000000000000007 0000000000001000"),
        (key::META_HASHED.to_vec(), "686173686564"),
        (key::hash(&ContentHash::new([0xab; 32])), "abababababababab"),
        (key::refs(ChunkId::new(SegmentId::new(3), 0x45)), "0000000003000045"),
        (key::segment(SegmentId::new(3)), "0000000000000003"),
        (key::queue_layer(key::QUEUE_DEAD, layer), "01 0000000000000007"),
        (key::queue_layer(key::QUEUE_COLLAPSE, layer), "02 0000000000000007"),
        (key::queue_expiry(0x66, id), &format!("03 0000000000000066 {id_hex}")),
    ] {
        assert_eq!(key, hex(golden), "{golden}");
    }
    let pair = hex("0000000000000007 0000000000001000");
    assert_eq!(split_two("map key", &pair).unwrap(), (7, 0x1000));
    for length in (0..16).chain(17..20) {
        assert!(split_two("map key", &vec![0; length]).is_err(), "{length} bytes");
    }
}

#[test]
fn families_have_these_numbers_and_names() {
    let golden = [
        "meta", "inode", "dirent", "cookie", "snapshot", "layer", "child", "map", "hash", "refs",
        "segment", "queue",
    ];
    for (number, name) in (0..).zip(golden) {
        let family = Family::from_number(number).unwrap();
        assert_eq!((family.number(), family.name()), (number, name));
    }
    assert!((12..=u8::MAX).all(|number| Family::from_number(number).is_none()));
}

/// Opens a store on this index and a new, empty disk.
fn open(
    kv: &std::sync::Arc<MemoryKv>,
    disk: &crate::disk::MemoryDisk,
) -> Result<std::sync::Arc<crate::Store>> {
    let mut options = crate::Options::new("unused");
    options.background = false;
    options.memory_bytes = crate::Options::MEMORY_BYTES_MIN;
    options.hash_threads = 1;
    let kv = std::sync::Arc::clone(kv) as std::sync::Arc<dyn Kv>;
    crate::Store::open_with(kv, std::sync::Arc::new(disk.clone()), options)
}

#[test]
fn the_store_record() {
    let (kv, disk) = (std::sync::Arc::new(MemoryKv::new()), crate::disk::MemoryDisk::new());
    let store = open(&kv, &disk).unwrap();
    let golden =
        [&hex("01 00000002")[..], store.store_id().as_bytes(), &store.handle_key()].concat();
    store.close().unwrap();
    assert_eq!(kv.get(Family::Meta, key::META_STORE).unwrap().unwrap(), golden);
    assert_eq!(golden.len(), 53);

    let reopen_with = |record: &[u8]| {
        let (family, key) = (Family::Meta, key::META_STORE.to_vec());
        kv.apply(&vec![crate::kv::Write { family, key, value: Some(record.to_vec()) }]).unwrap();
        kv.flush().unwrap();
        open(&kv, &disk).map(|store| store.store_id())
    };
    for length in 0..golden.len() {
        assert_eq!(reopen_with(&golden[..length]).unwrap_err().kind(), ErrorKind::Corrupt);
    }
    let with = |position: usize, byte: u8| {
        let mut other = golden.clone();
        other[position] = byte;
        other
    };
    for version in [0, 3, 0xff] {
        assert_eq!(reopen_with(&with(0, version)).unwrap_err().kind(), ErrorKind::Corrupt);
        let error = reopen_with(&with(4, version)).unwrap_err();
        let got = u32::from(version);
        assert!(matches!(error, Error::Format { got: found, expected: 2 } if found == got));
    }
    let of_another = reopen_with(&with(5, golden[5] ^ 1)).unwrap_err();
    assert_eq!(of_another.kind(), ErrorKind::Corrupt, "the log is of another store");
    assert_eq!(reopen_with(&golden).unwrap(), store.store_id());
}
