//! A reader of format 2 written from FORMAT.md alone: it shares no code with the store, so that
//! the two hold each other to the document.

use std::collections::BTreeMap;
use std::path::Path;

/// Family numbers (FORMAT.md, "Families").
const INODE: u8 = 1;
const DIRENT: u8 = 2;
const SNAPSHOT: u8 = 4;
const LAYER: u8 = 5;
const MAP: u8 = 7;

const BLOCK_BYTES: usize = 4096;

/// One chunk of a group.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) hash: [u8; 32],
    pub(crate) codec: u8,
    pub(crate) stored: Vec<u8>,
}

/// One change of a commit: family, key, and the value of a put.
pub(crate) type Change = (u8, Vec<u8>, Option<Vec<u8>>);

#[derive(Debug)]
pub(crate) enum Record {
    Group { segment: u64, first: u32, chunks: Vec<Chunk> },
    Commit { sequence: u64, changes: Vec<Change> },
    Directory { segment: u64, chunks: u32, hashes: Vec<u8> },
}

struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    fn number(&mut self, bytes: usize) -> u64 {
        self.take(bytes).iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    fn small(&mut self, bytes: usize) -> u32 {
        u32::try_from(self.number(bytes)).unwrap()
    }

    fn size(&mut self, bytes: usize) -> usize {
        usize::try_from(self.number(bytes)).unwrap()
    }
}

fn number_at(bytes: &[u8], at: usize) -> u64 {
    Cursor(&bytes[at..]).number(8)
}

/// All records of a log file; panics at anything that is not as described.
pub(crate) fn read_log_file(path: &Path, number: u64) -> Vec<Record> {
    let bytes = std::fs::read(path).unwrap();
    let (header, mut rest) = bytes.split_at(64);
    assert_eq!(&header[..8], b"SLKSEG02");
    assert_eq!(header[24..32], [1, 0, 0, 0, 0, 0, 0, 0], "role of a log file, and padding");
    assert_eq!(number_at(header, 32), number);
    assert_eq!(header[40..60], [0; 20]);
    assert_eq!(Cursor(&header[60..]).small(4), crc32c::crc32c(&header[..60]));
    let store = &header[8..24];
    let mut records = Vec::new();
    // Behind the last record there are zeros, as many as there may be.
    while rest.iter().any(|&byte| byte != 0) {
        let (record, length) = match &rest[..4] {
            b"SWCG" => read_group(store, rest),
            b"SWCM" => read_commit(store, rest),
            b"SWDR" => read_directory(rest),
            other => panic!("magic {}", other.escape_ascii()),
        };
        records.push(record);
        rest = &rest[length..];
    }
    records
}

fn read_group(store: &[u8], bytes: &[u8]) -> (Record, usize) {
    let mut c = Cursor(&bytes[4..]);
    let (count, segment, first) = (c.size(4), c.number(8), c.small(4));
    let (payload, padding, crc) = (c.size(4), c.small(4), c.small(4));
    assert_eq!(padding, 0);
    let payload_at = 32 + 40 * count;
    let covered = [store, &bytes[..28], &bytes[32..payload_at]].concat();
    assert_eq!(crc, crc32c::crc32c(&covered));
    let mut stored = Cursor(&bytes[payload_at..payload_at + payload]);
    let chunks = (0..count).map(|_| {
        let hash = c.take(32).try_into().unwrap();
        let (stored_bytes, codec, padding, crc) = (c.size(2), c.small(1), c.small(1), c.small(4));
        assert_eq!(padding, 0);
        let stored = stored.take(stored_bytes).to_vec();
        assert_eq!(crc, crc32c::crc32c(&stored));
        Chunk { hash, codec: u8::try_from(codec).unwrap(), stored }
    });
    let chunks = chunks.collect();
    assert!(stored.0.is_empty(), "payload that belongs to no chunk");
    (Record::Group { segment, first, chunks }, payload_at + payload)
}

fn read_commit(store: &[u8], bytes: &[u8]) -> (Record, usize) {
    let mut c = Cursor(&bytes[4..]);
    let (body, sequence, crc) = (c.size(4), c.number(8), c.small(4));
    let covered = [store, &bytes[..16], &bytes[20..20 + body]].concat();
    assert_eq!(crc, crc32c::crc32c(&covered));
    let mut c = Cursor(&bytes[20..20 + body]);
    let mut changes = Vec::new();
    while !c.0.is_empty() {
        let family = u8::try_from(c.small(1)).unwrap();
        let (put, key_bytes, value_bytes) = (c.small(1), c.size(2), c.size(4));
        let (key, value) = (c.take(key_bytes).to_vec(), c.take(value_bytes).to_vec());
        assert!(put == 1 || (put == 0 && value.is_empty()));
        changes.push((family, key, (put == 1).then_some(value)));
    }
    (Record::Commit { sequence, changes }, 20 + body)
}

fn read_directory(bytes: &[u8]) -> (Record, usize) {
    let mut c = Cursor(&bytes[4..]);
    let (chunks, segment, padding, crc) = (c.small(4), c.number(8), c.small(4), c.small(4));
    assert_eq!((padding, crc), (0, crc32c::crc32c(&bytes[..20])));
    let pages = usize::try_from(chunks).unwrap().div_ceil(256);
    let mut page = |bytes| {
        let body = c.take(bytes).to_vec();
        assert_eq!(c.small(4), crc32c::crc32c(&body));
        body
    };
    (0..pages).for_each(|_| drop(page(256 * 12)));
    let mut hashes: Vec<u8> = (0..pages).flat_map(|_| page(256 * 32)).collect();
    hashes.truncate(usize::try_from(chunks).unwrap() * 32);
    (Record::Directory { segment, chunks, hashes }, 24 + pages * (3076 + 8196))
}

/// The log position of an index copy, and its entries: family, key and value.
pub(crate) type IndexCopy = ([u64; 3], Vec<(u8, Vec<u8>, Vec<u8>)>);

/// An index copy of this store; panics at anything that is not as described.
pub(crate) fn read_index_copy(path: &Path, store: &[u8]) -> IndexCopy {
    let bytes = std::fs::read(path).unwrap();
    let number = u64::from_str_radix(path.file_stem().unwrap().to_str().unwrap(), 16).unwrap();
    let (header, mut rest) = bytes.split_at(64);
    assert_eq!((&header[..8], &header[8..24]), (&b"SLKIDX02"[..], store));
    assert_eq!((number_at(header, 24), &header[56..60]), (number, &[0; 4][..]));
    assert_eq!(Cursor(&header[60..]).small(4), crc32c::crc32c(&header[..60]));
    let mut entries = Vec::new();
    for part in 0.. {
        let mut c = Cursor(&rest[4..]);
        let body = match &rest[..4] {
            b"SWIP" => {
                let (count, body, number) = (c.size(4), c.size(4), c.small(4));
                assert_eq!(number, part);
                let before = entries.len();
                let mut c = Cursor(&rest[20..20 + body]);
                while !c.0.is_empty() {
                    let family = u8::try_from(c.small(1)).unwrap();
                    let (key_bytes, value_bytes) = (c.size(2), c.size(4));
                    entries.push((
                        family,
                        c.take(key_bytes).to_vec(),
                        c.take(value_bytes).to_vec(),
                    ));
                }
                assert_eq!(entries.len() - before, count);
                body
            }
            b"SWIE" => {
                assert_eq!((c.small(4), c.size(8)), (part, entries.len()));
                assert_eq!(rest.len(), 20, "nothing follows the end");
                0
            }
            other => panic!("magic {}", other.escape_ascii()),
        };
        let covered = [header, &rest[..16], &rest[20..20 + body]].concat();
        assert_eq!(Cursor(&rest[16..]).small(4), crc32c::crc32c(&covered));
        rest = &rest[20 + body..];
        if rest.is_empty() {
            break;
        }
    }
    ([32, 40, 48].map(|at| number_at(header, at)), entries)
}

/// A store, replayed from its log.
#[derive(Debug, Default)]
pub(crate) struct Replayed {
    index: BTreeMap<(u8, Vec<u8>), Vec<u8>>,
    chunks: BTreeMap<u64, Chunk>,
    pub(crate) commits: u64,
}

impl Replayed {
    /// What an index copy holds, without any chunks.
    pub(crate) fn entries_of_copy(copy: &IndexCopy) -> Self {
        let put =
            |(family, key, value): &(u8, Vec<u8>, Vec<u8>)| ((*family, key.clone()), value.clone());
        Self { index: copy.1.iter().map(put).collect(), ..Self::default() }
    }

    /// The names in the root directory, in order.
    pub(crate) fn names_in_root(&self) -> Vec<String> {
        let root = 1_u64.to_be_bytes();
        let entries = self.index.keys().filter(|(family, _)| *family == DIRENT);
        let names = entries.filter_map(|(_, key)| key.strip_prefix(&root[..]));
        names.map(|name| String::from_utf8(name.to_vec()).unwrap()).collect()
    }

    /// Replays the log files 1 to `files` of a store that nothing was compacted in.
    pub(crate) fn read(data_dir: &Path, files: u64) -> Self {
        let mut replayed = Self::default();
        for number in 1..=files {
            let path = data_dir.join(format!("log/{number:016x}.seg"));
            let mut hashes = Vec::new();
            for record in read_log_file(&path, number) {
                if let Record::Group { chunks, .. } = &record {
                    chunks.iter().for_each(|chunk| hashes.extend_from_slice(&chunk.hash));
                }
                if let Record::Directory { hashes: listed, .. } = &record {
                    assert_eq!(*listed, hashes, "the directory lists the file's chunks");
                }
                replayed.add(record, number);
            }
        }
        replayed
    }

    fn add(&mut self, record: Record, number: u64) {
        match record {
            Record::Group { segment, first, chunks } => {
                assert_eq!(segment, number);
                for (index, chunk) in (u64::from(first)..).zip(chunks) {
                    let before = self.chunks.insert(segment << 24 | index, chunk);
                    assert!(before.is_none(), "a chunk id is given out once");
                }
            }
            Record::Commit { sequence, changes } => {
                self.commits += 1;
                assert_eq!(sequence, self.commits);
                for (family, key, value) in changes {
                    match value {
                        Some(value) => self.index.insert((family, key), value),
                        None => self.index.remove(&(family, key)),
                    };
                }
            }
            Record::Directory { segment, chunks, .. } => {
                assert_eq!(segment, number);
                let ids = segment << 24..(segment + 1) << 24;
                assert_eq!(self.chunks.range(ids).count(), usize::try_from(chunks).unwrap());
            }
        }
    }

    fn get(&self, family: u8, key: &[u8]) -> &[u8] {
        &self.index[&(family, key.to_vec())]
    }

    /// The content of the file at `path`.
    pub(crate) fn file(&self, path: &str) -> Vec<u8> {
        let mut inode = 1;
        for name in path.split('/') {
            let key = [&u64::to_be_bytes(inode)[..], name.as_bytes()].concat();
            inode = number_at(self.get(DIRENT, &key), 1);
        }
        let record = self.get(INODE, &inode.to_be_bytes());
        assert_eq!((record[0], record[69]), (1, 1), "version 1, kind file");
        self.content(number_at(record, 70), number_at(record, 21))
    }

    /// The content of the snapshot of this name.
    pub(crate) fn snapshot(&self, name: &str) -> Vec<u8> {
        let id = self.get(SNAPSHOT, &[b"n", name.as_bytes()].concat());
        let record = self.get(SNAPSHOT, &[b"i", id].concat());
        self.content(number_at(record, 1), number_at(record, 9))
    }

    fn content(&self, layer: u64, size_bytes: u64) -> Vec<u8> {
        let blocks = size_bytes.div_ceil(4096);
        let mut content: Vec<u8> = (0..blocks).flat_map(|block| self.block(layer, block)).collect();
        content.truncate(usize::try_from(size_bytes).unwrap());
        content
    }

    /// A block of a layer, or of the first layer below it that has an entry for it.
    fn block(&self, layer: u64, block: u64) -> Vec<u8> {
        let mut layer = layer;
        while layer != 0 {
            let key = |block: u64| [layer.to_be_bytes(), block.to_be_bytes()].concat();
            let mut entries = self.index.range((MAP, key(0))..=(MAP, key(block)));
            if let Some(((_, key), run)) = entries.next_back() {
                let into = block - number_at(key, 8);
                if into < number_at(run, 1) {
                    return match (run[0], run.len()) {
                        (1, 9) => vec![0; BLOCK_BYTES],
                        (1, 17) => self.chunk(number_at(run, 9) + into),
                        (2, 10) if run[9] == 1 => panic!("block {block} is lost"),
                        other => panic!("map run of (version, bytes) {other:?}"),
                    };
                }
            }
            layer = number_at(self.get(LAYER, &layer.to_be_bytes()), 1);
        }
        vec![0; BLOCK_BYTES]
    }

    fn chunk(&self, id: u64) -> Vec<u8> {
        let chunk = &self.chunks[&id];
        let block = match chunk.codec {
            0 => chunk.stored.clone(),
            1 => lz4_flex::block::decompress(&chunk.stored, BLOCK_BYTES).unwrap(),
            other => panic!("codec {other}"),
        };
        assert_eq!(block.len(), BLOCK_BYTES);
        assert_eq!(*blake3::hash(&block).as_bytes(), chunk.hash);
        block
    }
}

/// What a log file looks like apart from what differs between two stores: times, random bytes,
/// and what lz4 makes of a block. Writes of one commit are sorted, since some of them come from
/// tables without an order.
pub(crate) fn shape(records: &[Record]) -> Vec<String> {
    let of_one = |record: &Record| match record {
        Record::Group { segment, first, chunks } => {
            let codecs: Vec<_> = chunks.iter().map(|chunk| chunk.codec).collect();
            format!("group {segment}/{first} {codecs:?}")
        }
        Record::Commit { sequence, changes } => {
            let length = |value: &Option<Vec<u8>>| value.as_ref().map(Vec::len);
            let mut writes: Vec<_> = changes
                .iter()
                .map(|(family, key, value)| (family, key.len(), length(value)))
                .collect();
            writes.sort_unstable();
            format!("commit {sequence} {writes:?}")
        }
        Record::Directory { segment, chunks, .. } => format!("directory {segment} {chunks}"),
    };
    records.iter().map(of_one).collect()
}
