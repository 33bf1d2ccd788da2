//! The table of logical segments, and reading chunks through it.
//!
//! ```text
//! chunk id --> logical segment --> file + directory --> place --> stored bytes
//!              (this table)        (moved by compaction; ids stay)
//! ```
//! A reader takes an `Arc` of a segment and so keeps its file readable, even when compaction
//! has replaced and removed it meanwhile. A chunk that compaction dropped has no place: the
//! reader's map is outdated then, and it looks again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::RwLock;
use quick_cache::sync::Cache;

pub(crate) use crate::damage::DAMAGED_MAX;
use crate::damage::Damage;
use crate::disk::{Disk, DiskFile, FileName};
use crate::error::{Error, Result};
use crate::id::{ChunkId, ContentHash, SegmentId, StoreId};
use crate::large_reads::LargeReads;
use crate::segment_format::{
    self as format, Codec, Directory, PAGE_ENTRIES, Place, decode_hash_page, decode_place_page,
};
use crate::units::BLOCK_BYTES;

/// Segment files held open: enough for a hot set, few enough to leave descriptors to clients.
const OPEN_FILES: usize = 256;

/// Bytes that one page of places takes in memory, for sizing the cache by budget.
const PLACE_PAGE_MEMORY_BYTES: u64 = 4 << 10;

/// The same of a page of hashes.
const HASH_PAGE_MEMORY_BYTES: u64 = 8 << 10;

/// The chunks' directory: in memory while the log appends, on the disk after.
#[derive(Debug)]
enum DirectoryState {
    Open(RwLock<Directory>),
    Sealed { offset_bytes: u64, chunks: u32 },
}

/// A logical segment as it lies now.
#[derive(Debug)]
pub(crate) struct Segment {
    id: SegmentId,
    file: FileName,
    directory: DirectoryState,
}

/// A page of a segment's directory in a file.
type PageKey = (FileName, SegmentId, usize);
type PlacePage = Arc<Vec<Option<Place>>>;
type HashPage = Arc<Vec<ContentHash>>;

/// The table.
#[derive(Debug)]
pub(crate) struct Segments {
    disk: Arc<dyn Disk>,
    table: RwLock<BTreeMap<SegmentId, Arc<Segment>>>,
    files: Cache<FileName, Arc<dyn DiskFile>>,
    pages: Cache<PageKey, PlacePage>,
    hash_pages: Cache<PageKey, HashPage>,
    read_bytes: AtomicU64,
    large_reads: Arc<LargeReads>,
    damage: Damage,
}

impl Segments {
    pub(crate) fn new(disk: Arc<dyn Disk>, memory_bytes: u64) -> Self {
        let pages = |bytes: u64| usize::try_from(memory_bytes / 2 / bytes).unwrap_or(usize::MAX);
        Self {
            disk,
            table: RwLock::new(BTreeMap::new()),
            files: Cache::new(OPEN_FILES),
            pages: Cache::new(pages(PLACE_PAGE_MEMORY_BYTES).max(64)),
            hash_pages: Cache::new(pages(HASH_PAGE_MEMORY_BYTES).max(32)),
            read_bytes: AtomicU64::new(0),
            large_reads: Arc::default(),
            damage: Damage::default(),
        }
    }

    /// Adds or replaces a segment that the log appends to.
    pub(crate) fn put_open(&self, id: SegmentId, file: FileName, directory: Directory) {
        let directory = DirectoryState::Open(RwLock::new(directory));
        self.table.write().insert(id, Arc::new(Segment { id, file, directory }));
    }

    /// Adds or replaces a segment whose directory is in the file.
    pub(crate) fn put_sealed(&self, id: SegmentId, file: FileName, offset_bytes: u64, chunks: u32) {
        let directory = DirectoryState::Sealed { offset_bytes, chunks };
        self.table.write().insert(id, Arc::new(Segment { id, file, directory }));
    }

    pub(crate) fn remove(&self, id: SegmentId) {
        self.table.write().remove(&id);
    }

    /// Forgets an open file, so that a removed one frees its bytes.
    pub(crate) fn close_file(&self, file: FileName) {
        self.files.remove(&file);
    }

    /// Adds chunks to an open segment, in order of index.
    pub(crate) fn extend(&self, id: SegmentId, places: Vec<Place>, hashes: Vec<ContentHash>) {
        if let Some(segment) = self.table.read().get(&id)
            && let DirectoryState::Open(directory) = &segment.directory
        {
            let mut directory = directory.write();
            directory.places.extend(places.into_iter().map(Some));
            directory.hashes.extend(hashes);
        }
    }

    /// Bytes read from segment files since start.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that cached directory pages take in memory.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let bytes = |pages: usize, each: u64| u64::try_from(pages).unwrap_or(u64::MAX) * each;
        bytes(self.pages.len(), PLACE_PAGE_MEMORY_BYTES)
            + bytes(self.hash_pages.len(), HASH_PAGE_MEMORY_BYTES)
    }

    /// Chunks given out in a segment so far.
    pub(crate) fn chunks(&self, id: SegmentId) -> Option<u32> {
        self.segment(id).map(|segment| match &segment.directory {
            DirectoryState::Open(directory) => {
                u32::try_from(directory.read().places.len()).unwrap_or(u32::MAX)
            }
            DirectoryState::Sealed { chunks, .. } => *chunks,
        })
    }

    /// The whole directory of a segment.
    pub(crate) fn directory(&self, id: SegmentId) -> Result<Directory> {
        let segment = self.require(ChunkId::new(id, 0))?;
        match &segment.directory {
            DirectoryState::Open(directory) => Ok(directory.read().clone()),
            DirectoryState::Sealed { chunks, .. } => {
                let count = u64::from(*chunks);
                let places = self.places(&segment, 0, count)?;
                let hashes = self.hashes_of(&segment, 0, count)?;
                Ok(Directory { places, hashes })
            }
        }
    }

    /// Places and hashes of `count` chunks from `first` on, all of one page of one segment; read
    /// from the disk, whatever is cached.
    pub(crate) fn entries(
        &self,
        first: ChunkId,
        count: u64,
    ) -> Result<Vec<(Option<Place>, ContentHash)>> {
        let segment = self.require(first)?;
        let (offset_bytes, chunks) = match &segment.directory {
            DirectoryState::Open(_) => {
                let places = self.places(&segment, first.index(), count)?;
                let hashes = self.hashes_of(&segment, first.index(), count)?;
                return Ok(places.into_iter().zip(hashes).collect());
            }
            DirectoryState::Sealed { offset_bytes, chunks } => (*offset_bytes, *chunks),
        };
        let index = usize::try_from(first.index()).unwrap_or(usize::MAX);
        let page = index / PAGE_ENTRIES;
        let read = |(offset, length)| self.read_file(segment.file, offset, length);
        let places = decode_place_page(&read(format::place_page(offset_bytes, page))?)?;
        let hashes = decode_hash_page(&read(format::hash_page(offset_bytes, chunks, page))?)?;
        let entries = places.into_iter().zip(hashes).skip(index % PAGE_ENTRIES);
        Ok(entries.take(usize::try_from(count).unwrap_or(0)).collect())
    }

    /// The directory of a segment as its groups tell, and chunks that they do not tell of without
    /// a place: for a directory that cannot be read.
    pub(crate) fn salvage(&self, store: StoreId, id: SegmentId) -> Directory {
        let chunks = self.chunks(id).unwrap_or(0);
        let file = self.segment(id).and_then(|segment| self.disk.open(segment.file).ok());
        match file {
            Some(file) => format::walk::salvage(file.as_ref(), store, (id, chunks)),
            None => Directory {
                places: vec![None; usize::try_from(chunks).unwrap_or(0)],
                hashes: vec![ContentHash::new([0; 32]); usize::try_from(chunks).unwrap_or(0)],
            },
        }
    }

    /// The entries of a page of which places or hashes cannot be read: those that the groups tell,
    /// and where they do not, places with the hash of the block that is there.
    pub(crate) fn entries_left(
        &self,
        first: ChunkId,
        count: usize,
        salvaged: &Directory,
    ) -> Vec<(Option<Place>, ContentHash)> {
        let start = usize::try_from(first.index()).unwrap_or(usize::MAX);
        let places = self.segment(first.segment()).and_then(|segment| {
            let DirectoryState::Sealed { offset_bytes, .. } = &segment.directory else {
                return None;
            };
            let (at, length) = format::place_page(*offset_bytes, start / PAGE_ENTRIES);
            decode_place_page(&self.read_file(segment.file, at, length).ok()?).ok()
        });
        let told = salvaged.places.iter().copied().zip(salvaged.hashes.iter().copied());
        let told = told.skip(start).take(count).zip(0_u64..);
        let entry = |((place, hash), step): ((Option<Place>, ContentHash), u64)| {
            let read = places.as_ref()?.get(usize::try_from(step).ok()?).copied()?;
            // Both may know the place; what only the directory knows is verified by checksum.
            match (place, read) {
                (None, Some(place)) => {
                    let stored = self.stored(first.plus(step), &place).ok()?;
                    let block = format::restore_block(&place, &stored).ok()?;
                    Some((Some(place), ContentHash::of(&block)))
                }
                _ => Some((place, hash)),
            }
        };
        told.map(|told| entry(told).unwrap_or(told.0)).collect()
    }

    /// The directory of a segment, page by page; what cannot be read of it is told by the groups.
    pub(crate) fn directory_that_is_left(&self, store: StoreId, id: SegmentId) -> Directory {
        let chunks = usize::try_from(self.chunks(id).unwrap_or(0)).unwrap_or(0);
        let mut salvaged = None;
        let mut directory = Directory::default();
        for first in (0..chunks).step_by(PAGE_ENTRIES) {
            let count = PAGE_ENTRIES.min(chunks - first);
            let start = ChunkId::new(id, u32::try_from(first).unwrap_or(u32::MAX));
            let entries = self.entries(start, u64::try_from(count).unwrap_or(0));
            let entries = entries.unwrap_or_else(|_| {
                let left = salvaged.get_or_insert_with(|| self.salvage(store, id));
                self.entries_left(start, count, left)
            });
            for (place, hash) in entries {
                directory.places.push(place);
                directory.hashes.push(hash);
            }
        }
        directory
    }

    /// The file that a segment lies in.
    pub(crate) fn file_of(&self, id: SegmentId) -> Option<FileName> {
        self.segment(id).map(|segment| segment.file)
    }

    /// The hashes of `count` chunks from `first` on, all of one segment.
    pub(crate) fn hashes(&self, first: ChunkId, count: u64) -> Result<Vec<ContentHash>> {
        let segment = self.require(first)?;
        self.hashes_of(&segment, first.index(), count)
    }

    /// The chunk, which something names, cannot be read; `false` if that was known, or if too many
    /// are.
    pub(crate) fn note_damaged(&self, chunk: ChunkId) -> bool {
        self.damage.note(chunk)
    }

    /// Nothing names the chunk.
    pub(crate) fn note_dead(&self, chunk: ChunkId) {
        self.damage.note_dead(chunk);
    }

    /// The chunk was read, or is no longer stored.
    pub(crate) fn forget_damaged(&self, chunk: ChunkId) {
        self.damage.forget(chunk);
    }

    /// Whether the chunk is known to be damaged.
    pub(crate) fn is_damaged(&self, chunk: ChunkId) -> bool {
        self.damage.contains(chunk)
    }

    /// How many chunks that something names are known to be damaged.
    pub(crate) fn damaged_count(&self) -> u64 {
        self.damage.named()
    }

    /// Whether the chunk is stored, not known to be damaged, and is of this hash. For deduplication: a directory that
    /// cannot be read only hides its chunks there.
    pub(crate) fn has(&self, chunk: ChunkId, hash: &ContentHash) -> bool {
        if self.is_damaged(chunk) {
            return false;
        }
        loop {
            let Some(segment) = self.segment(chunk.segment()) else { return false };
            match self.has_in(&segment, chunk, hash) {
                Ok(has) => return has,
                // Compaction removed the file meanwhile: the new one has the directory.
                Err(_) if !self.is_current(&segment) => {}
                Err(error) => {
                    tracing::warn!(%chunk, %error, "a directory is not readable; its blocks are not shared");
                    return false;
                }
            }
        }
    }

    fn has_in(&self, segment: &Segment, chunk: ChunkId, hash: &ContentHash) -> Result<bool> {
        let index = usize::try_from(chunk.index()).unwrap_or(usize::MAX);
        let (offset_bytes, chunks) = match &segment.directory {
            DirectoryState::Open(directory) => {
                let directory = directory.read();
                return Ok(directory.hashes.get(index) == Some(hash)
                    && directory.places.get(index).is_some_and(Option::is_some));
            }
            DirectoryState::Sealed { offset_bytes, chunks } => (*offset_bytes, *chunks),
        };
        if chunk.index() >= chunks {
            return Ok(false);
        }
        let (page, inside) = (index / PAGE_ENTRIES, index % PAGE_ENTRIES);
        let hashes = self.hash_page(segment, (offset_bytes, chunks), page)?;
        if hashes.get(inside) != Some(hash) {
            return Ok(false);
        }
        let places = self.place_page(segment, offset_bytes, page)?;
        Ok(places.get(inside).is_some_and(Option::is_some))
    }

    fn place_page(&self, segment: &Segment, offset_bytes: u64, page: usize) -> Result<PlacePage> {
        self.pages.get_or_insert_with(&(segment.file, segment.id, page), || {
            let (offset, length) = format::place_page(offset_bytes, page);
            let bytes = self.read_file(segment.file, offset, length)?;
            decode_place_page(&bytes).map(Arc::new)
        })
    }

    fn hash_page(
        &self,
        segment: &Segment,
        (offset_bytes, chunks): (u64, u32),
        page: usize,
    ) -> Result<HashPage> {
        self.hash_pages.get_or_insert_with(&(segment.file, segment.id, page), || {
            let (offset, length) = format::hash_page(offset_bytes, chunks, page);
            let bytes = self.read_file(segment.file, offset, length)?;
            decode_hash_page(&bytes).map(Arc::new)
        })
    }

    fn segment(&self, id: SegmentId) -> Option<Arc<Segment>> {
        self.table.read().get(&id).cloned()
    }

    fn require(&self, chunk: ChunkId) -> Result<Arc<Segment>> {
        self.segment(chunk.segment()).ok_or_else(|| {
            Error::corrupt(format!("segment {}", chunk.segment()), "there is no such segment")
        })
    }

    pub(crate) fn open_file(&self, name: FileName) -> Result<Arc<dyn DiskFile>> {
        self.files.get_or_insert_with(&name, || self.disk.open(name))
    }

    fn read_file(&self, name: FileName, offset: u64, length: usize) -> Result<Bytes> {
        let memory = self.large_reads.take(length);
        let bytes = self.open_file(name)?.read_into(offset, length, memory)?;
        self.read_bytes.fetch_add(u64::try_from(length).unwrap_or(0), Ordering::Relaxed);
        Ok(self.large_reads.lend(bytes))
    }

    fn places(&self, segment: &Segment, first: u32, count: u64) -> Result<Vec<Option<Place>>> {
        let load = |offset_bytes, page| self.place_page(segment, offset_bytes, page).map(Some);
        let found = places_by(segment, (first, count), load)?;
        found.ok_or_else(|| outside(segment.id, first, count))
    }

    /// The places if they are in memory.
    fn places_in_memory(&self, segment: &Segment, first: u32, count: u64) -> Option<Vec<Place>> {
        let cached = |_, page| Ok(self.pages.get(&(segment.file, segment.id, page)));
        places_by(segment, (first, count), cached).ok()??.into_iter().collect()
    }

    fn hashes_of(&self, segment: &Segment, first: u32, count: u64) -> Result<Vec<ContentHash>> {
        let start = usize::try_from(first).unwrap_or(usize::MAX);
        let end = start + usize::try_from(count).unwrap_or(usize::MAX);
        let (offset_bytes, chunks) = match &segment.directory {
            DirectoryState::Open(directory) => {
                let directory = directory.read();
                let found = directory.hashes.get(start..end).map(<[_]>::to_vec);
                return found.ok_or_else(|| outside(segment.id, first, count));
            }
            DirectoryState::Sealed { offset_bytes, chunks } => (*offset_bytes, *chunks),
        };
        if end > usize::try_from(chunks).unwrap_or(usize::MAX) {
            return Err(outside(segment.id, first, count));
        }
        let mut hashes = Vec::with_capacity(end - start);
        let mut position = start;
        while position < end {
            let page = position / PAGE_ENTRIES;
            let entries = self.hash_page(segment, (offset_bytes, chunks), page)?;
            let stop = end.min((page + 1) * PAGE_ENTRIES);
            let from = position % PAGE_ENTRIES;
            hashes.extend_from_slice(&entries[from..from + (stop - position)]);
            position = stop;
        }
        Ok(hashes)
    }

    /// Reads `count` blocks from chunk `first` on, all of one segment, in as few reads of the
    /// disk as their places allow, and verifies each. Contiguous raw chunks come as one piece.
    ///
    /// `None` when compaction has dropped one of them: the caller's map is outdated.
    pub(crate) fn read(&self, first: ChunkId, count: u64) -> Result<Option<Vec<Bytes>>> {
        let Some(segment) = self.segment(first.segment()) else {
            return Ok(None);
        };
        match self.read_segment(&segment, first, count) {
            // Compaction removed the file between the two: the new one has the chunks.
            Err(_) if !self.is_current(&segment) => Ok(None),
            outcome => outcome,
        }
    }

    fn is_current(&self, segment: &Arc<Segment>) -> bool {
        self.segment(segment.id).is_some_and(|now| Arc::ptr_eq(&now, segment))
    }

    /// The same without waiting for the disk; `None` when that cannot be, or when anything is
    /// wrong: [`Segments::read`] tells what.
    pub(crate) fn try_read(&self, first: ChunkId, count: u64) -> Option<Vec<Bytes>> {
        let segment = self.segment(first.segment())?;
        let file = self.files.get(&segment.file)?;
        let places = self.places_in_memory(&segment, first.index(), count)?;
        let read = |offset_bytes, length: usize| {
            let bytes = file.try_read_at(offset_bytes, length);
            self.read_bytes.fetch_add(u64::try_from(length).unwrap_or(0), Ordering::Relaxed);
            Ok(bytes.map(Bytes::from))
        };
        self.read_extents(&segment, first, &places, read).ok()?
    }

    fn read_segment(
        &self,
        segment: &Segment,
        first: ChunkId,
        count: u64,
    ) -> Result<Option<Vec<Bytes>>> {
        let places = self.places(segment, first.index(), count)?;
        let Some(places) = places.into_iter().collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let read = |offset, length| self.read_file(segment.file, offset, length).map(Some);
        self.read_extents(segment, first, &places, read)
    }

    /// A chunk's stored bytes, not yet verified.
    pub(crate) fn stored(&self, chunk: ChunkId, place: &Place) -> Result<Bytes> {
        let mut bytes = self.stored_span(chunk.segment(), &[*place])?;
        bytes.pop().ok_or_else(|| outside(chunk.segment(), chunk.index(), 1))
    }

    /// The stored bytes of chunks that lie one behind the other, gaps between them or not; by
    /// one read of the disk, and not yet verified.
    pub(crate) fn stored_span(&self, id: SegmentId, places: &[Place]) -> Result<Vec<Bytes>> {
        let (Some(first), Some(last)) = (places.first(), places.last()) else {
            return Ok(Vec::new());
        };
        let segment = self.require(ChunkId::new(id, 0))?;
        let start = first.offset_bytes;
        let length = (last.offset_bytes - start) + u32::from(last.stored_bytes);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let bytes = self.read_file(segment.file, u64::from(start), length)?;
        let one = |place: &Place| {
            let from = usize::try_from(place.offset_bytes - start).unwrap_or(usize::MAX);
            bytes.slice(from..from + usize::from(place.stored_bytes))
        };
        Ok(places.iter().map(one).collect())
    }

    /// Reads chunks from `first` on that lie at `places`, each extent by one call of `read` with its
    /// offset and length, and verifies them. `None` when `read` has nothing.
    fn read_extents(
        &self,
        segment: &Segment,
        first: ChunkId,
        places: &[Place],
        read: impl Fn(u64, usize) -> Result<Option<Bytes>>,
    ) -> Result<Option<Vec<Bytes>>> {
        let mut pieces = Vec::new();
        let mut rest = places;
        let mut chunk = first;
        while let Some(start) = rest.first() {
            let together = contiguous(rest);
            let (extent, behind) = rest.split_at(together);
            let length = extent.iter().map(|place| usize::from(place.stored_bytes)).sum();
            let Some(bytes) = read(u64::from(start.offset_bytes), length)? else { return Ok(None) };
            self.verify_extent(segment, chunk, (extent, &bytes), &mut pieces)?;
            chunk = chunk.plus(u64::try_from(together).unwrap_or(0));
            rest = behind;
        }
        Ok(Some(pieces))
    }

    fn verify_extent(
        &self,
        segment: &Segment,
        first: ChunkId,
        (places, bytes): (&[Place], &Bytes),
        pieces: &mut Vec<Bytes>,
    ) -> Result<()> {
        let mut position = 0;
        let mut chunk = first;
        let all_raw = places.iter().all(|place| place.codec == Codec::Raw);
        for place in places {
            let end = position + usize::from(place.stored_bytes);
            let block =
                format::restore_block(place, &bytes.slice(position..end)).map_err(|error| {
                    self.note_damaged(chunk);
                    located(error, segment, chunk, place)
                })?;
            if !all_raw {
                pieces.push(block);
            }
            position = end;
            chunk = chunk.plus(1);
        }
        if all_raw {
            debug_assert_eq!(
                bytes.len(),
                places.len() * BLOCK_BYTES,
                "raw chunks are whole blocks"
            );
            pieces.push(bytes.clone());
        }
        Ok(())
    }
}

/// Places by page: of chunks that the log still appends from memory, of others from what `page`
/// finds for the directory's place and a page's number. `None` when it finds nothing.
fn places_by(
    segment: &Segment,
    (first, count): (u32, u64),
    page: impl Fn(u64, usize) -> Result<Option<PlacePage>>,
) -> Result<Option<Vec<Option<Place>>>> {
    let start = usize::try_from(first).unwrap_or(usize::MAX);
    let end = start + usize::try_from(count).unwrap_or(usize::MAX);
    let (offset_bytes, chunks) = match &segment.directory {
        DirectoryState::Open(directory) => {
            let directory = directory.read();
            let found = directory.places.get(start..end).map(<[_]>::to_vec);
            return found.map(Some).ok_or_else(|| outside(segment.id, first, count));
        }
        DirectoryState::Sealed { offset_bytes, chunks } => (*offset_bytes, *chunks),
    };
    if end > usize::try_from(chunks).unwrap_or(usize::MAX) {
        return Err(outside(segment.id, first, count));
    }
    let mut places = Vec::with_capacity(end - start);
    let mut position = start;
    while position < end {
        let number = position / PAGE_ENTRIES;
        let Some(entries) = page(offset_bytes, number)? else { return Ok(None) };
        let stop = end.min((number + 1) * PAGE_ENTRIES);
        let from = position % PAGE_ENTRIES;
        places.extend_from_slice(&entries[from..from + (stop - position)]);
        position = stop;
    }
    Ok(Some(places))
}

/// How many of the places lie one behind the other, from the first on.
fn contiguous(places: &[Place]) -> usize {
    let follows = |pair: &[Place]| match pair {
        [a, b] => a.offset_bytes + u32::from(a.stored_bytes) == b.offset_bytes,
        _ => false,
    };
    1 + places.windows(2).take_while(|pair| follows(pair)).count()
}

fn outside(segment: SegmentId, first: u32, count: u64) -> Error {
    Error::corrupt(
        format!("segment {segment}"),
        format!("chunks {first} to {} are not in its directory", u64::from(first) + count),
    )
}

/// Says which chunk of which file an error is about.
fn located(error: Error, segment: &Segment, chunk: ChunkId, place: &Place) -> Error {
    match error {
        Error::Corrupt { reason, .. } => Error::corrupt(
            format!("{} at offset {}, chunk {chunk}", segment.file, place.offset_bytes),
            reason,
        ),
        other => other,
    }
}
