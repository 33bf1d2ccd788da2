//! Looks once more at chunks that could not be read, before they are given up for ever: a read
//! may fail for reasons that pass.

use crate::core::Core;
use crate::error::{Error, Result};
use crate::id::{ChunkId, ContentHash, SegmentId};
use crate::segment_format::{Directory, PAGE_ENTRIES, Place, restore_block};

/// What a medium says of sectors that it cannot read: in general, of a critical error, and of
/// checksums of its own.
const MEDIUM_ERRORS: [rustix::io::Errno; 3] =
    [rustix::io::Errno::IO, rustix::io::Errno::NODATA, rustix::io::Errno::ILSEQ];

type Entry = (Option<Place>, ContentHash);

/// Looks at chunks in order of their ids: what it read of a directory serves for the next one.
pub(crate) struct SecondLook<'a> {
    core: &'a Core,
    /// What the groups of a segment tell.
    salvaged: Option<(SegmentId, Directory)>,
    /// A page of a directory, by its first chunk.
    page: Option<(ChunkId, Vec<Entry>)>,
}

impl<'a> SecondLook<'a> {
    pub(crate) fn new(core: &'a Core) -> Self {
        Self { core, salvaged: None, page: None }
    }

    /// Whether the chunk is damaged: the medium cannot read it, or reads what was not written.
    ///
    /// # Errors
    /// Those of a read that tell nothing of the bytes.
    pub(crate) fn is_damaged(&mut self, chunk: ChunkId) -> Result<bool> {
        let Some((Some(place), hash)) = self.entry(chunk)? else { return Ok(true) };
        let stored = self.core.segments.stored(chunk, &place);
        match stored.and_then(|stored| restore_block(&place, &stored)) {
            Ok(block) => Ok(ContentHash::of(&block) != hash),
            Err(error) if is_damage(&error) => Ok(true),
            Err(error) => Err(error),
        }
    }

    fn entry(&mut self, chunk: ChunkId) -> Result<Option<Entry>> {
        let inside = usize::try_from(chunk.index()).unwrap_or(usize::MAX) % PAGE_ENTRIES;
        let step = u32::try_from(inside).unwrap_or(0);
        let first = ChunkId::new(chunk.segment(), chunk.index() - step);
        let page = match self.page.take() {
            Some((known, page)) if known == first => page,
            _ => self.read_page(first)?,
        };
        let entry = page.get(inside).copied();
        self.page = Some((first, page));
        Ok(entry)
    }

    fn read_page(&mut self, first: ChunkId) -> Result<Vec<Entry>> {
        let (segments, id) = (&self.core.segments, first.segment());
        let chunks = segments.chunks(id).unwrap_or(0).saturating_sub(first.index());
        let count = usize::try_from(chunks).unwrap_or(usize::MAX).min(PAGE_ENTRIES);
        match segments.entries(first, u64::try_from(count).unwrap_or(0)) {
            Err(error) if is_damage(&error) => {
                let salvaged = match self.salvaged.take() {
                    Some((known, salvaged)) if known == id => salvaged,
                    _ => segments.salvage(self.core.store, id),
                };
                let left = segments.entries_left(first, count, &salvaged);
                self.salvaged = Some((id, salvaged));
                Ok(left)
            }
            outcome => outcome,
        }
    }
}

/// The bytes are not what was written, or the medium cannot read them.
fn is_damage(error: &Error) -> bool {
    match error {
        Error::Corrupt { .. } => true,
        Error::Io { source, .. } => {
            let of_medium = MEDIUM_ERRORS.map(|errno| Some(errno.raw_os_error()));
            source.kind() == std::io::ErrorKind::UnexpectedEof
                || of_medium.contains(&source.raw_os_error())
        }
        _ => false,
    }
}
