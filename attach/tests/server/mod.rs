//! The smallest FUSE server that a loop device can live on: a folder of files, read, written and
//! synced. It keeps nothing in memory, so that another process can go on with its descriptor.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

const ROOT: u64 = 1;
const MODE_DIRECTORY: u32 = 0o040_755;
const MODE_FILE: u32 = 0o100_644;
const WRITE_SIZE_BYTES_MAX: u32 = 1 << 20;
const IN_HEADER_BYTES: usize = 40;
const WRITE_HEADER_BYTES: usize = 40;
const INIT_FLAGS_BIG_WRITES: u32 = 1 << 5;
const NOTIFY_RESEND: i32 = 7;
const ANSWER_VALID_SECONDS: u64 = 1000;

mod operation {
    pub(super) const LOOKUP: u32 = 1;
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const SETATTR: u32 = 4;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const RELEASE: u32 = 18;
    pub(super) const FSYNC: u32 = 20;
    pub(super) const FLUSH: u32 = 25;
    pub(super) const INIT: u32 = 26;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const BATCH_FORGET: u32 = 42;
}

struct Server<'a> {
    folder: &'a Path,
    /// Node ids are places in this list: the names in order, the same in every process.
    names: Vec<PathBuf>,
    /// Takes a write and dies without an answer, if this file was there.
    die: PathBuf,
}

/// Serves `folder` until the export is unmounted.
pub(crate) fn serve(folder: &Path, fuse: BorrowedFd<'_>, resume: bool) {
    if resume {
        // What the dead process had taken from the kernel comes once more.
        let mut message = Vec::new();
        put(&mut message, &[16]);
        message.extend(NOTIFY_RESEND.to_le_bytes());
        message.extend(0_u64.to_le_bytes());
        rustix::io::write(fuse, &message).unwrap();
    }
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut names: Vec<_> = entries.filter(|path| path.is_file()).collect();
    names.sort();
    let server = Server { folder, names, die: folder.with_file_name("die") };
    let mut buffer = vec![0; (WRITE_SIZE_BYTES_MAX as usize) + 4096];
    loop {
        let length = match rustix::io::read(fuse.as_fd(), &mut buffer) {
            Ok(length) => length,
            Err(Errno::INTR | Errno::NOENT | Errno::AGAIN) => continue,
            Err(Errno::NODEV) => return,
            Err(error) => panic!("cannot read requests: {error}"),
        };
        let request = &buffer[..length];
        if let Some(answer) = server.answer(request) {
            let (error, body) = match answer {
                Ok(body) => (0, body),
                Err(error) => (-error.raw_os_error(), Vec::new()),
            };
            let mut message = Vec::with_capacity(16 + body.len());
            put(&mut message, &[u32::try_from(16 + body.len()).unwrap()]);
            message.extend(error.to_le_bytes());
            message.extend(&request[8..16]);
            message.extend(body);
            // A request that was given up meanwhile has no place for its answer.
            let _sent = rustix::io::write(fuse, &message);
        }
    }
}

impl Server<'_> {
    fn answer(&self, request: &[u8]) -> Option<Result<Vec<u8>, Errno>> {
        let node = u64_at(request, 16);
        let body = &request[IN_HEADER_BYTES..];
        Some(match u32_at(request, 4) {
            operation::INIT => Ok(init()),
            operation::LOOKUP => self.look_up(body),
            operation::GETATTR | operation::SETATTR => Ok(self.attributes_answer(node)),
            operation::OPEN | operation::RELEASE | operation::FLUSH => Ok(vec![0; 16]),
            operation::READ => self.read(node, u64_at(body, 8), u32_at(body, 16)),
            operation::WRITE => self.write(node, u64_at(body, 8), &body[WRITE_HEADER_BYTES..]),
            operation::FSYNC => {
                self.file(node).sync_data().unwrap();
                Ok(Vec::new())
            }
            operation::FORGET | operation::BATCH_FORGET | operation::INTERRUPT => return None,
            _ => Err(Errno::NOSYS),
        })
    }

    fn path(&self, node: u64) -> &Path {
        match node {
            ROOT => self.folder,
            _ => &self.names[usize::try_from(node).unwrap() - 2],
        }
    }

    fn file(&self, node: u64) -> File {
        OpenOptions::new().read(true).write(true).open(self.path(node)).unwrap()
    }

    fn look_up(&self, body: &[u8]) -> Result<Vec<u8>, Errno> {
        let name = std::str::from_utf8(body).unwrap().trim_end_matches('\0');
        let path = self.folder.join(name);
        let index = self.names.iter().position(|known| *known == path).ok_or(Errno::NOENT)?;
        let node = u64::try_from(index).unwrap() + 2;
        let mut answer = Vec::new();
        for number in [node, 0, ANSWER_VALID_SECONDS, ANSWER_VALID_SECONDS, 0] {
            answer.extend(number.to_le_bytes());
        }
        answer.extend(self.attributes(node));
        Ok(answer)
    }

    fn attributes_answer(&self, node: u64) -> Vec<u8> {
        let mut answer = Vec::new();
        answer.extend(ANSWER_VALID_SECONDS.to_le_bytes());
        answer.extend(0_u64.to_le_bytes());
        answer.extend(self.attributes(node));
        answer
    }

    fn attributes(&self, node: u64) -> Vec<u8> {
        let metadata = std::fs::metadata(self.path(node)).unwrap();
        let mode = if metadata.is_dir() { MODE_DIRECTORY } else { MODE_FILE };
        let mut bytes = Vec::new();
        for number in [node, metadata.size(), metadata.blocks(), 0, 0, 0] {
            bytes.extend(number.to_le_bytes());
        }
        put(&mut bytes, &[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0]);
        bytes
    }

    fn read(&self, node: u64, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; size as usize];
        let length = self.file(node).read_at(&mut bytes, offset).unwrap();
        bytes.truncate(length);
        Ok(bytes)
    }

    fn write(&self, node: u64, offset: u64, bytes: &[u8]) -> Result<Vec<u8>, Errno> {
        if std::fs::remove_file(&self.die).is_ok() {
            std::process::abort();
        }
        self.file(node).write_all_at(bytes, offset).unwrap();
        let mut answer = Vec::new();
        put(&mut answer, &[u32::try_from(bytes.len()).unwrap(), 0]);
        Ok(answer)
    }
}

fn init() -> Vec<u8> {
    let mut answer = Vec::new();
    put(&mut answer, &[7, 31, 1 << 17, INIT_FLAGS_BIG_WRITES]);
    // In the background at most 12 requests, congested at 9.
    answer.extend(12_u16.to_le_bytes());
    answer.extend(9_u16.to_le_bytes());
    put(&mut answer, &[WRITE_SIZE_BYTES_MAX, 1]);
    answer.resize(64, 0);
    answer
}

fn put(bytes: &mut Vec<u8>, numbers: &[u32]) {
    for number in numbers {
        bytes.extend(number.to_le_bytes());
    }
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(bytes[offset..offset + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(bytes[offset..offset + 8].try_into().unwrap())
}
