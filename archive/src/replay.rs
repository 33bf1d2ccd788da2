//! The way back: the tar that was unpacked or packed, byte for byte, from its recording and its files.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufReader, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::{ArchiveError, failed};
use crate::recording::{
    CHUNK_BYTES_MAX, CHUNK_END, CHUNK_KEPT, CHUNK_RECORDS, MAGIC, RECORD_CONTENT, RECORD_RAW,
};
use crate::root::Root;

/// Bytes read from a file at once.
const BUFFER_BYTES: usize = 256 << 10;

/// Kind, length, stored length.
const CHUNK_HEAD_BYTES: usize = 1 + 4 + 4;

/// A chunk in the file.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    kind: u8,
    offset: u64,
    bytes: usize,
    stored_bytes: usize,
}

/// An open recording.
struct Recording {
    path: PathBuf,
    file: File,
    /// The chunks of records, in order.
    records: Vec<Chunk>,
    /// The chunks of kept contents with their number, in the order of that; those of one content
    /// in the order of its bytes.
    kept: Vec<(u64, Chunk)>,
    end: Vec<u8>,
}

/// The archive that is written, and what it has to be.
struct Output<'a, W> {
    out: &'a mut W,
    hasher: blake3::Hasher,
    size_bytes: u64,
}

/// Writes to `out` byte for byte the archive whose unpacking or packing made `recording`. `root` is the tree
/// in exactly the state that the unpacking left, or that was packed; it is only read.
///
/// # Errors
/// A file that is not what it was, a damaged recording, and whatever reading and writing can meet.
/// What was written until then is to be thrown away.
pub fn replay(recording: &Path, root: &Path, out: &mut impl Write) -> Result<(), ArchiveError> {
    let recording = Recording::open(recording)?;
    let root = Root::open(root)?;
    let mut output = Output { out, hasher: blake3::Hasher::new(), size_bytes: 0 };
    let mut contents = 0;
    for chunk in &recording.records {
        let bytes = recording.read(*chunk)?;
        let mut records = Fields { rest: &bytes, recording: &recording };
        while !records.rest.is_empty() {
            match records.take(1)?[0] {
                RECORD_RAW => {
                    let length = u32::from_le_bytes(records.array()?);
                    let length = usize::try_from(length).unwrap_or(usize::MAX);
                    output.write(records.take(length)?)?;
                }
                RECORD_CONTENT => {
                    let content = Content::parse(contents, &mut records)?;
                    content.replay(&recording, &root, &mut output)?;
                    contents += 1;
                }
                other => return Err(recording.bad(format!("a record of unknown kind {other}"))),
            }
        }
    }
    let mut end = output.size_bytes.to_le_bytes().to_vec();
    end.extend_from_slice(output.hasher.finalize().as_bytes());
    if end != recording.end {
        return Err(recording.bad("the archive is not what was recorded".to_owned()));
    }
    output.out.flush().map_err(|source| ArchiveError::Write { source })
}

impl Recording {
    /// Opens a recording and finds its chunks.
    fn open(path: &Path) -> Result<Self, ArchiveError> {
        let file = File::open(path).map_err(failed("open the recording", path))?;
        let mut recording = Self {
            path: path.to_owned(),
            file,
            records: Vec::new(),
            kept: Vec::new(),
            end: Vec::new(),
        };
        let file = recording.file.try_clone().map_err(failed("open the recording", path))?;
        let size_bytes = file.metadata().map_err(failed("open the recording", path))?.len();
        let mut reader = BufReader::new(file);
        let mut magic = [0; MAGIC.len()];
        if reader.read_exact(&mut magic).is_err() || &magic != MAGIC {
            return Err(recording.bad("it is no recording".to_owned()));
        }
        let mut offset = magic.len() as u64;
        while recording.end.is_empty() {
            let mut head = [0; CHUNK_HEAD_BYTES];
            reader.read_exact(&mut head).map_err(|_| recording.bad("it is cut off".to_owned()))?;
            offset += head.len() as u64;
            let chunk = recording.chunk(&head, offset)?;
            recording.take_in(chunk)?;
            let skipped = i64::try_from(chunk.stored_bytes).unwrap_or(i64::MAX);
            reader.seek_relative(skipped).map_err(failed("read", path))?;
            offset += chunk.stored_bytes as u64;
        }
        if offset != size_bytes {
            return Err(recording.bad("something follows its end".to_owned()));
        }
        // They stand in the order in which their files went.
        recording.kept.sort_by_key(|(number, _)| *number);
        Ok(recording)
    }

    fn chunk(&self, head: &[u8; CHUNK_HEAD_BYTES], offset: u64) -> Result<Chunk, ArchiveError> {
        let length = |at: usize| {
            let bytes = [head[at], head[at + 1], head[at + 2], head[at + 3]];
            usize::try_from(u32::from_le_bytes(bytes)).unwrap_or(usize::MAX)
        };
        let chunk = Chunk { kind: head[0], offset, bytes: length(1), stored_bytes: length(5) };
        // What does not compress grows a little.
        if chunk.bytes > CHUNK_BYTES_MAX || chunk.stored_bytes > 2 * CHUNK_BYTES_MAX {
            return Err(self.bad(format!("a chunk of {} bytes, over the limit", chunk.bytes)));
        }
        Ok(chunk)
    }

    /// Sorts a chunk in.
    fn take_in(&mut self, chunk: Chunk) -> Result<(), ArchiveError> {
        match chunk.kind {
            CHUNK_RECORDS => self.records.push(chunk),
            CHUNK_KEPT => {
                let bytes = self.read(chunk)?;
                let number = Fields { rest: &bytes, recording: self }.array()?;
                self.kept.push((u64::from_le_bytes(number), chunk));
            }
            CHUNK_END => self.end = self.read(chunk)?,
            other => return Err(self.bad(format!("a chunk of unknown kind {other}"))),
        }
        Ok(())
    }

    /// The bytes of a chunk.
    fn read(&self, chunk: Chunk) -> Result<Vec<u8>, ArchiveError> {
        let mut stored = vec![0; chunk.stored_bytes];
        self.file.read_exact_at(&mut stored, chunk.offset).map_err(failed("read", &self.path))?;
        let bytes = lz4_flex::block::decompress(&stored, chunk.bytes);
        let bytes = bytes.ok().filter(|bytes| bytes.len() == chunk.bytes && !bytes.is_empty());
        bytes.ok_or_else(|| self.bad(format!("the chunk at byte {}", chunk.offset)))
    }

    /// The chunks of a kept content; none if it is not kept.
    fn kept(&self, number: u64) -> &[(u64, Chunk)] {
        let start = self.kept.partition_point(|(other, _)| *other < number);
        let length = self.kept[start..].partition_point(|(other, _)| *other == number);
        &self.kept[start..start + length]
    }

    fn bad(&self, reason: String) -> ArchiveError {
        ArchiveError::BadRecording { path: self.path.clone(), reason }
    }
}

/// What is left of a chunk.
struct Fields<'a> {
    rest: &'a [u8],
    recording: &'a Recording,
}

impl<'a> Fields<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], ArchiveError> {
        let split = self.rest.split_at_checked(length);
        let (taken, rest) =
            split.ok_or_else(|| self.recording.bad("a record is cut off".to_owned()))?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const LENGTH: usize>(&mut self) -> Result<[u8; LENGTH], ArchiveError> {
        let mut array = [0; LENGTH];
        array.copy_from_slice(self.take(LENGTH)?);
        Ok(array)
    }
}

/// A content that the recording names.
struct Content {
    number: u64,
    path: PathBuf,
    size_bytes: u64,
    hash: blake3::Hash,
}

impl Content {
    fn parse(number: u64, records: &mut Fields<'_>) -> Result<Self, ArchiveError> {
        let size_bytes = u64::from_le_bytes(records.array()?);
        let hash = blake3::Hash::from_bytes(records.array()?);
        let length = u16::from_le_bytes(records.array()?);
        let path = Path::new(OsStr::from_bytes(records.take(length.into())?)).to_owned();
        Ok(Self { number, path, size_bytes, hash })
    }

    /// Writes the content, from the recording or else from its file.
    fn replay<W: Write>(
        &self,
        recording: &Recording,
        root: &Root,
        output: &mut Output<'_, W>,
    ) -> Result<(), ArchiveError> {
        let mut hasher = blake3::Hasher::new();
        let mut size_bytes = 0;
        let mut pass_on = |bytes: &[u8]| {
            hasher.update(bytes);
            size_bytes += bytes.len() as u64;
            output.write(bytes)
        };
        let kept = recording.kept(self.number);
        if !kept.is_empty() {
            for (_, chunk) in kept {
                pass_on(&recording.read(*chunk)?[size_of::<u64>()..])?;
            }
        } else {
            let file = root.file(&self.path).map_err(failed("open", &self.path))?;
            // One byte more than expected shows that there is more.
            let mut file = file.take(self.size_bytes.saturating_add(1));
            let mut buffer = vec![0; BUFFER_BYTES];
            loop {
                let length = file.read(&mut buffer).map_err(failed("read", &self.path))?;
                if length == 0 {
                    break;
                }
                pass_on(&buffer[..length])?;
            }
        }
        let hash = hasher.finalize();
        if size_bytes == self.size_bytes && hash == self.hash {
            return Ok(());
        }
        let describe = |size: u64, hash: blake3::Hash| format!("{size} bytes with hash {hash}");
        Err(ArchiveError::ContentDiffers {
            path: self.path.clone(),
            expected: describe(self.size_bytes, self.hash),
            got: describe(size_bytes, hash),
        })
    }
}

impl<W: Write> Output<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), ArchiveError> {
        self.hasher.update(bytes);
        self.size_bytes += bytes.len() as u64;
        self.out.write_all(bytes).map_err(|source| ArchiveError::Write { source })
    }
}
