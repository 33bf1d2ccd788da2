//! The store's interface: one method a call, each handed to the module that does it.

use std::fs::File;
use std::sync::Arc;

use bytes::Bytes;

use crate::background::Background;
use crate::core::Core;
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::file_commit::{CommitDuty, Committed};
use crate::id::{InodeId, SnapshotId, StoreId};
use crate::kv::Kv;
use crate::name::{FilePath, Name};
use crate::namespace::Removal;
use crate::open::Opening;
use crate::options::Options;
use crate::time::Timestamp;
use crate::types::{
    Attributes, BlockMap, Change, CreateMode, Created, DiffPage, DirectoryPage, FileInfo,
    LabelChange, ReadReply, SetAttributes, Snapshot, SnapshotFilter, SnapshotRequest, Source,
    Stability, Stats, Written,
};
use crate::{
    attributes, compact, data, diff, file_commit, namespace, open, paths, reserve, snapshot, stats,
    write,
};

/// An open store. All methods are synchronous and may be called from many threads; those that
/// may wait for the disk say so.
///
/// Every change of the namespace, every snapshot and every clone is durable before its call
/// returns. Data is durable after [`Store::commit`], or when written with a [`Stability`] above
/// `Unstable`.
///
/// Common errors, not repeated below: `Closed` after [`Store::close`], `Poisoned` for changes
/// after a failed sync, `Io` and `Index` when the disk fails, `Corrupt` when what is stored is
/// not what was written, `NoSpace` for changes when the store is full.
#[derive(Debug)]
pub struct Store {
    pub(crate) core: Arc<Core>,
    background: Background,
    /// Keeps other processes out of the data directory.
    _lock: Option<File>,
}

impl Store {
    /// Opens the store in `options.data_dir`, or makes one; replays what a crash left in the
    /// log, and starts the background threads.
    ///
    /// # Errors
    /// `Locked` when another process has it, `Format` for a store of another format.
    pub fn open(options: Options) -> Result<Arc<Self>> {
        let lock = open::lock(&options.data_dir)?;
        open::check_format(&options.data_dir)?;
        let (kv, disk) = open::open_local(&options)?;
        Self::assemble(kv, disk, options, Some(lock))
    }

    /// Opens a store on the given index and disk; for tests that inject failures.
    ///
    /// # Errors
    /// As [`Store::open`], but for `Locked`.
    pub fn open_with(kv: Arc<dyn Kv>, disk: Arc<dyn Disk>, options: Options) -> Result<Arc<Self>> {
        Self::assemble(kv, disk, options, None)
    }

    fn assemble(
        kv: Arc<dyn Kv>,
        disk: Arc<dyn Disk>,
        options: Options,
        lock: Option<File>,
    ) -> Result<Arc<Self>> {
        if options.memory_bytes < Options::MEMORY_BYTES_MIN {
            return Err(Error::invalid(format!(
                "memory budget of {} bytes, expected at least {}",
                options.memory_bytes,
                Options::MEMORY_BYTES_MIN
            )));
        }
        let background = options.background;
        let core = Arc::new(open::open_core(kv, disk, options, Opening::Serve)?);
        open::initialize(&core)?;
        reserve::take(&core);
        reserve::warn_if_full(&core);
        let store = Self { core, background: Background::default(), _lock: lock };
        if background {
            store.background.start(&store.core)?;
        }
        Ok(Arc::new(store))
    }

    /// Stops the background threads, commits all that is dirty and makes the index durable, so
    /// that the next start has nothing to replay. Later calls answer `Closed`.
    ///
    /// # Errors
    /// When something could not be committed; the store is closed all the same.
    pub fn close(&self) -> Result<()> {
        if self.core.committer.is_closed() {
            return Ok(());
        }
        self.background.stop();
        let outcome = file_commit::commit_all(&self.core).and(compact::checkpoint(&self.core));
        self.core.committer.close();
        outcome
    }

    // ---- identity; in memory

    /// The store's id.
    #[must_use]
    pub fn store_id(&self) -> StoreId {
        self.core.store
    }

    /// 32 secret random bytes, made with the store and kept in it: the key of file handles.
    #[must_use]
    pub fn handle_key(&self) -> [u8; 32] {
        self.core.handle_key
    }

    /// Random at each start, and new after any failed sync (RFC 1813 section 3.3.7
    /// `writeverf3`).
    #[must_use]
    pub fn write_verifier(&self) -> u64 {
        self.core.committer.verifier()
    }

    /// The options that the store was opened with.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.core.options
    }

    /// Whether changes are taken: an error says why not.
    ///
    /// # Errors
    /// `Poisoned` or `Closed`.
    pub fn healthy(&self) -> Result<()> {
        self.core.committer.healthy()
    }

    // ---- namespace

    /// The attributes of an inode, unflushed writes included. In memory or one look-up.
    ///
    /// # Errors
    /// `Stale` when it is gone.
    pub fn attributes(&self, inode: InodeId) -> Result<Attributes> {
        namespace::attributes(&self.core, inode)
    }

    /// The attributes of a directory's entry. In memory or two look-ups.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, `Stale` when the directory is gone.
    pub fn lookup(&self, directory: InodeId, name: &Name) -> Result<Attributes> {
        namespace::lookup(&self.core, directory, name)
    }

    /// The directory that holds this directory; the root holds itself.
    ///
    /// # Errors
    /// `NotDirectory`, `Stale`.
    pub fn parent(&self, directory: InodeId) -> Result<Attributes> {
        namespace::parent(&self.core, directory)
    }

    /// SETATTR (RFC 1813 section 3.3.2). `guard`: the `changed_at` that the object must have.
    ///
    /// # Errors
    /// `NotSynchronized` when the guard does not match, `FileTooBig`, `WrongKind` for a size of
    /// what is no file, `Stale`.
    pub fn set_attributes(
        &self,
        inode: InodeId,
        set: &SetAttributes,
        guard: Option<Timestamp>,
    ) -> Result<Change> {
        attributes::set_in(&self.core, inode, set, guard)
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// `WrongKind`, `Stale`.
    pub fn read_link(&self, inode: InodeId) -> Result<(Vec<u8>, Attributes)> {
        namespace::read_link(&self.core, inode)
    }

    /// CREATE (RFC 1813 section 3.3.8). Of an existing file that `Unchecked` takes, only the
    /// size is set.
    ///
    /// # Errors
    /// `Exists`, `NotDirectory`, `Stale`, `FileTooBig`, `Invalid` for a reserved name.
    pub fn create(
        &self,
        directory: InodeId,
        name: &Name,
        mode: CreateMode,
        set: &SetAttributes,
    ) -> Result<Created> {
        namespace::create(&self.core, (directory, name), mode, set, None)
    }

    /// MKDIR.
    ///
    /// # Errors
    /// As [`Store::create`].
    pub fn make_directory(
        &self,
        directory: InodeId,
        name: &Name,
        set: &SetAttributes,
    ) -> Result<Created> {
        namespace::make_directory(&self.core, directory, name, set)
    }

    /// SYMLINK.
    ///
    /// # Errors
    /// As [`Store::create`]; `NameTooLong` and `Invalid` for the target.
    pub fn make_symlink(
        &self,
        directory: InodeId,
        name: &Name,
        target: &[u8],
        set: &SetAttributes,
    ) -> Result<Created> {
        namespace::make_symlink(&self.core, directory, name, target, set)
    }

    /// REMOVE of all but directories. O(1): its blocks are reclaimed in the background.
    ///
    /// # Errors
    /// `NotFound`, `IsDirectory`, `NotDirectory`, `Stale`.
    pub fn remove(&self, directory: InodeId, name: &Name) -> Result<Change> {
        namespace::remove(&self.core, directory, name, Removal::NotDirectory)
    }

    /// RMDIR.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, `NotEmpty`, `Stale`.
    pub fn remove_directory(&self, directory: InodeId, name: &Name) -> Result<Change> {
        namespace::remove(&self.core, directory, name, Removal::Directory)
    }

    /// RENAME; a target is replaced as RFC 1813 section 3.3.14 allows. Answers what changed in
    /// the directory it came from and in the one it went to.
    ///
    /// # Errors
    /// `NotFound`, `NotEmpty`, `IsDirectory`, `NotDirectory`, `Invalid` for a directory moved
    /// into itself, `Stale`.
    pub fn rename(
        &self,
        from: InodeId,
        from_name: &Name,
        to: InodeId,
        to_name: &Name,
    ) -> Result<(Change, Change)> {
        let (from, to) = ((from, from_name.clone()), (to, to_name.clone()));
        namespace::rename(&self.core, from, to, None)
    }

    /// LINK of all but directories. Answers its attributes after, and what changed in the
    /// directory.
    ///
    /// # Errors
    /// `Exists`, `IsDirectory`, `NotDirectory`, `TooManyLinks`, `Stale`.
    pub fn link(
        &self,
        inode: InodeId,
        directory: InodeId,
        name: &Name,
    ) -> Result<(Attributes, Change)> {
        namespace::link(&self.core, inode, directory, name)
    }

    /// Entries whose cookie is above `after_cookie` (0: from the start), in order of cookie, at
    /// most `limit`; `.` and `..` are left out. May wait for the disk.
    ///
    /// # Errors
    /// `NotDirectory`, `Stale`.
    pub fn read_directory(
        &self,
        directory: InodeId,
        after_cookie: u64,
        limit: usize,
    ) -> Result<DirectoryPage> {
        namespace::read_directory(&self.core, directory, after_cookie, limit)
    }

    // ---- data

    /// Reads at most `length_bytes`; short at the end of the file. May wait for the disk.
    ///
    /// # Errors
    /// `IsDirectory`, `WrongKind`, `Stale`, `NotFound` for an unknown snapshot.
    pub fn read(
        &self,
        source: Source,
        offset_bytes: u64,
        length_bytes: usize,
    ) -> Result<ReadReply> {
        data::read(&self.core, source, offset_bytes, length_bytes)
    }

    /// The same when all of it is in memory, ours or the kernel's page cache, else `None`: may be
    /// called from an async task.
    #[must_use]
    pub fn try_read(
        &self,
        source: Source,
        offset_bytes: u64,
        length_bytes: usize,
    ) -> Option<Result<ReadReply>> {
        data::try_read(&self.core, source, offset_bytes, length_bytes)
    }

    /// Writes into the file's dirty blocks; with a stability above `Unstable` commits before it
    /// returns. Waits for the disk when too much is dirty, and for partial blocks.
    ///
    /// # Errors
    /// `FileTooBig`, `IsDirectory`, `WrongKind`, `Stale`.
    pub fn write(
        &self,
        inode: InodeId,
        offset_bytes: u64,
        data: Bytes,
        stability: Stability,
    ) -> Result<Written> {
        write::write(&self.core, inode, offset_bytes, data, stability)
    }

    /// Takes unstable data if that needs no waiting: the file is in memory and has room, and so
    /// are the blocks that the data covers in part. `None`: call [`Store::write`].
    ///
    /// # Errors
    /// As [`Store::write`], inside the option.
    #[must_use]
    pub fn try_write(
        &self,
        inode: InodeId,
        offset_bytes: u64,
        data: &Bytes,
    ) -> Option<Result<Written>> {
        write::try_write(&self.core, inode, offset_bytes, data)
    }

    /// As [`Store::commit`], but the outcome is told to `done`: by this thread, or by the one
    /// that is committing the same file already. So callers that commit one file together hold
    /// one thread. While they keep coming, the duty to go on is given back after a few commits:
    /// it goes to [`Store::serve_commits`], by this thread or another.
    #[must_use = "callers may wait for the duty to be done"]
    pub fn commit_then(
        &self,
        inode: InodeId,
        done: impl FnOnce(Result<(Change, u64)>) + Send + 'static,
    ) -> Option<CommitDuty> {
        file_commit::commit_then(&self.core, inode, Box::new(done))
    }

    /// Goes on with the commits of a file for which callers wait, and gives the duty back as
    /// [`Store::commit_then`] does. Waits for the disk.
    #[must_use = "callers may wait for the duty to be done"]
    pub fn serve_commits(&self, duty: CommitDuty) -> Option<CommitDuty> {
        file_commit::serve_commits(&self.core, duty)
    }

    /// As [`Store::commit_then`], for a caller that may not wait: while another thread is
    /// committing the file, which will do it once more. `done` is asked for only then; answers
    /// whether it was.
    pub fn join_commit(&self, inode: InodeId, done: &mut dyn FnMut() -> Committed) -> bool {
        file_commit::join_commit(&self.core, inode, done)
    }

    /// COMMIT of the whole file. Answers its attributes around it, and the write verifier under
    /// which all that was written before is durable. Waits for the disk.
    ///
    /// # Errors
    /// `IsDirectory`, `WrongKind`, `Stale`.
    pub fn commit(&self, inode: InodeId) -> Result<(Change, u64)> {
        file_commit::commit_file(&self.core, inode)
    }

    /// Commits the dirty blocks of every file, and the times of last reads.
    ///
    /// # Errors
    /// The first failure.
    pub fn commit_all(&self) -> Result<()> {
        file_commit::commit_all(&self.core)
    }

    /// A snapshot seen as a read-only file: mode 0444, of root, with an inode number above 2^48
    /// derived from its id.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn snapshot_attributes(&self, id: SnapshotId) -> Result<Attributes> {
        snapshot::load(&self.core, id).map(|record| snapshot::attributes(id, &record))
    }

    /// For each block of the range its hash, or `None` for a hole. The range is widened to
    /// whole blocks and cut at the end of the file. Commits a file's dirty blocks first.
    ///
    /// # Errors
    /// As [`Store::read`].
    pub fn block_map(
        &self,
        source: Source,
        offset_bytes: u64,
        length_bytes: u64,
    ) -> Result<BlockMap> {
        data::block_map(&self.core, source, offset_bytes, length_bytes)
    }

    // ---- paths

    /// The attributes of what is at `path`. No symbolic link is followed.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn resolve(&self, path: &FilePath) -> Result<Attributes> {
        self.attributes(paths::resolve(&self.core, path)?)
    }

    /// The file at `path`.
    ///
    /// # Errors
    /// `NotFound`, `WrongKind` for what is no file.
    pub fn file_info(&self, path: &FilePath) -> Result<FileInfo> {
        paths::file_info(&self.core, path)
    }

    /// Makes a sparse file of mode 0644, and the directories on the way (mode 0755).
    ///
    /// # Errors
    /// `Exists`, `NotDirectory`, `FileTooBig`, `Invalid` for a reserved name.
    pub fn create_file(&self, path: &FilePath, size_bytes: u64) -> Result<FileInfo> {
        paths::create_file(&self.core, path, size_bytes)
    }

    /// Makes the directory at `path`, and those on the way; an existing one is fine.
    ///
    /// # Errors
    /// `NotDirectory`, `Invalid` for a reserved name.
    pub fn create_directories(&self, path: &FilePath) -> Result<Attributes> {
        paths::create_directories(&self.core, path)
    }

    /// Renames a file or directory; the directories of `to` are made. Never replaces.
    ///
    /// # Errors
    /// `NotFound`, `Exists`, `NotDirectory`, `Invalid`.
    pub fn rename_path(&self, from: &FilePath, to: &FilePath) -> Result<()> {
        paths::rename(&self.core, from, to)
    }

    /// Deletes the file or link at `path`, or the directory if it is empty.
    ///
    /// # Errors
    /// `NotFound`, `NotEmpty`.
    pub fn remove_path(&self, path: &FilePath) -> Result<()> {
        paths::remove(&self.core, path)
    }

    /// Regular files whose path begins with the bytes of `prefix` (it may end inside a name), in
    /// order of their names level by level, those behind `after` only, at most `limit`. Those whose
    /// path is longer than [`crate::PATH_BYTES_MAX`] are left out.
    ///
    /// # Errors
    /// The common ones.
    pub fn list_files(
        &self,
        prefix: &str,
        after: Option<&FilePath>,
        limit: usize,
    ) -> Result<Vec<FileInfo>> {
        paths::list(&self.core, prefix, after, limit)
    }

    // ---- snapshots and clones

    /// Takes a snapshot of the file at `path`: what was written to it before this call. Commits
    /// its dirty blocks; beyond that, one synced batch that does not depend on its size.
    ///
    /// # Errors
    /// `NotFound`, `WrongKind`, `Exists` for a name that is taken, `Invalid` labels.
    pub fn snapshot(&self, path: &FilePath, request: SnapshotRequest) -> Result<Snapshot> {
        snapshot::create(&self.core, path, request)
    }

    /// A snapshot by its id.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn snapshot_info(&self, id: SnapshotId) -> Result<Snapshot> {
        snapshot::load(&self.core, id).map(|record| snapshot::describe(id, record))
    }

    /// Snapshots in order of id, at most `limit`.
    ///
    /// # Errors
    /// The common ones.
    pub fn list_snapshots(&self, filter: &SnapshotFilter, limit: usize) -> Result<Vec<Snapshot>> {
        snapshot::list(&self.core, filter, limit)
    }

    /// Makes of the labels what `change` does; no other call comes in between.
    ///
    /// # Errors
    /// `NotFound`, `Invalid`; `NoSpace`, if they are longer than before.
    pub fn change_snapshot_labels(&self, id: SnapshotId, change: LabelChange) -> Result<Snapshot> {
        snapshot::change_labels(&self.core, id, change)
    }

    /// Deletes a snapshot. O(1); clones of it keep working.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn delete_snapshot(&self, id: SnapshotId) -> Result<()> {
        snapshot::delete(&self.core, id)
    }

    /// Makes a writable file at `path` with the snapshot's content, and the directories on the
    /// way. One synced batch that does not depend on the snapshot's size.
    ///
    /// # Errors
    /// `NotFound`, `Exists`, `NotDirectory`, `Invalid` for a reserved name.
    pub fn clone_snapshot(&self, id: SnapshotId, path: &FilePath) -> Result<FileInfo> {
        snapshot::clone(&self.core, id, path)
    }

    /// What differs in `target` from `base` (`None`: from an empty file), from `offset_bytes`
    /// on, at most `limit` extents. Proportional to what changed, not to the size.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn diff(
        &self,
        base: Option<SnapshotId>,
        target: SnapshotId,
        offset_bytes: u64,
        limit: usize,
    ) -> Result<DiffPage> {
        diff::diff(&self.core, base, target, offset_bytes, limit)
    }

    // ---- care

    /// The moment by the clock that dates files and snapshots. It is the machine's, but does not go
    /// back.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.core.clock.now()
    }

    /// Counts and sizes of this moment; in memory.
    #[must_use]
    pub fn stats(&self) -> Stats {
        stats::stats(&self.core)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // Without close() this is a crash, as far as the data is concerned; only the threads
        // are stopped.
        self.background.stop();
    }
}
