//! nfsserve's own server on a folder: a program of this one's, as the crate is a library.
//!
//! It says of each WRITE that it is durable and knows no COMMIT, so each is synced.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use async_trait::async_trait;
use nfsserve::fs_util::{metadata_to_fattr3, path_setattr};
use nfsserve::nfs::{fattr3, fileid3, filename3, nfspath3, nfsstat3, sattr3};
use nfsserve::tcp::{NFSTcp, NFSTcpListener};
use nfsserve::vfs::{NFSFileSystem, ReadDirResult, VFSCapabilities};

use crate::failure::Failure;
use crate::load::Target;
use crate::process;
use crate::stop::Stop;

use super::rival::RunningRival;

/// What the line of its address begins with.
const ADDRESS_PREFIX: &str = "NFS  ";

/// The number of the folder itself; files have those that follow.
const ROOT: fileid3 = 1;

/// Starts it as a process of its own.
pub(super) fn start(folder: &Path, stop: &Stop) -> Result<(Target, RunningRival), Failure> {
    let export = folder.join("export");
    std::fs::create_dir(&export).map_err(Failure::at("create", &export))?;
    let program = std::env::current_exe().map_err(Failure::on("find this program"))?;
    let mut command = process::command(program);
    command.arg("serve-directory").arg(&export);
    let mut server = RunningRival::start(command, &folder.join("output"), None)?;
    let address = server.wait(stop, |server| {
        let told = server.told();
        told.lines().find_map(|line| line.strip_prefix(ADDRESS_PREFIX)?.parse().ok())
    })?;
    let target = Target { nfs: address, mount: address, export: "/".to_owned() };
    server.wait_for_export(&target, stop)?;
    Ok((target, server))
}

/// Serves a folder until the process is ended, and prints where.
pub(crate) fn serve_directory(folder: &Path) -> Result<(), Failure> {
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::on("start a runtime"))?;
    runtime.block_on(async {
        let listener = listen(folder).await?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, listener.get_listen_port()));
        writeln!(std::io::stdout(), "{ADDRESS_PREFIX}{address}")
            .map_err(Failure::on("print the address"))?;
        listener.handle_forever().await.map_err(Failure::on("serve"))
    })
}

async fn listen(folder: &Path) -> Result<NFSTcpListener<Folder>, Failure> {
    let folder = Folder { path: folder.to_owned(), files: RwLock::default() };
    NFSTcpListener::bind("127.0.0.1:0", folder).await.map_err(Failure::on("listen on loopback"))
}

/// The files of a folder, without folders below.
#[derive(Debug)]
struct Folder {
    path: PathBuf,
    files: RwLock<Vec<Arc<Entry>>>,
}

/// A file, or what is left of one that was removed.
#[derive(Debug)]
struct Entry {
    name: filename3,
    path: PathBuf,
    file: File,
}

impl Folder {
    fn entry(&self, id: fileid3) -> Result<Arc<Entry>, nfsstat3> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        let index = id.checked_sub(ROOT + 1).and_then(|index| usize::try_from(index).ok());
        let entry = index.and_then(|index| files.get(index));
        entry.cloned().ok_or(nfsstat3::NFS3ERR_STALE)
    }

    fn number(&self, name: &filename3) -> Option<fileid3> {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        let with_number = (ROOT + 1..).zip(files.iter());
        // The newest: a name may have been that of a removed file.
        let found = with_number.filter(|(_, entry)| entry.name.0 == name.0 && entry.path.exists());
        found.map(|(number, _)| number).last()
    }

    fn attributes(&self, id: fileid3) -> Result<fattr3, nfsstat3> {
        let metadata =
            if id == ROOT { self.path.metadata() } else { self.entry(id)?.file.metadata() };
        Ok(metadata_to_fattr3(id, &metadata.map_err(|_| nfsstat3::NFS3ERR_IO)?))
    }
}

#[async_trait]
impl NFSFileSystem for Folder {
    fn capabilities(&self) -> VFSCapabilities {
        VFSCapabilities::ReadWrite
    }

    fn root_dir(&self) -> fileid3 {
        ROOT
    }

    async fn lookup(&self, _: fileid3, name: &filename3) -> Result<fileid3, nfsstat3> {
        self.number(name).ok_or(nfsstat3::NFS3ERR_NOENT)
    }

    async fn getattr(&self, id: fileid3) -> Result<fattr3, nfsstat3> {
        self.attributes(id)
    }

    async fn setattr(&self, id: fileid3, attributes: sattr3) -> Result<fattr3, nfsstat3> {
        path_setattr(&self.entry(id)?.path, &attributes).await?;
        self.attributes(id)
    }

    async fn read(
        &self,
        id: fileid3,
        offset_bytes: u64,
        count: u32,
    ) -> Result<(Vec<u8>, bool), nfsstat3> {
        let entry = self.entry(id)?;
        let mut data = vec![0; usize::try_from(count).unwrap_or(0)];
        let read = entry.file.read_at(&mut data, offset_bytes);
        let length = read.map_err(|_| nfsstat3::NFS3ERR_IO)?;
        let is_end = length < data.len();
        data.truncate(length);
        Ok((data, is_end))
    }

    async fn write(&self, id: fileid3, offset_bytes: u64, data: &[u8]) -> Result<fattr3, nfsstat3> {
        let entry = self.entry(id)?;
        let written = entry.file.write_all_at(data, offset_bytes);
        let synced = written.and_then(|()| entry.file.sync_data());
        synced.map_err(|_| nfsstat3::NFS3ERR_IO)?;
        self.attributes(id)
    }

    async fn create(
        &self,
        directory: fileid3,
        name: &filename3,
        _: sattr3,
    ) -> Result<(fileid3, fattr3), nfsstat3> {
        let id = self.create_exclusive(directory, name).await?;
        Ok((id, self.attributes(id)?))
    }

    async fn create_exclusive(&self, _: fileid3, name: &filename3) -> Result<fileid3, nfsstat3> {
        let path = self.path.join(String::from_utf8_lossy(&name.0).as_ref());
        let mut options = OpenOptions::new();
        let opened = options.read(true).write(true).create_new(true).open(&path);
        let file = opened.map_err(|_| nfsstat3::NFS3ERR_EXIST)?;
        let entry = Arc::new(Entry { name: name.0.as_slice().into(), path, file });
        let mut files = self.files.write().unwrap_or_else(PoisonError::into_inner);
        files.push(entry);
        Ok(ROOT + files.len() as u64)
    }

    async fn remove(&self, _: fileid3, name: &filename3) -> Result<(), nfsstat3> {
        let id = self.number(name).ok_or(nfsstat3::NFS3ERR_NOENT)?;
        let entry = self.entry(id)?;
        // Its space is free once it is empty: the entry keeps it open.
        let emptied = entry.file.set_len(0);
        emptied.and_then(|()| std::fs::remove_file(&entry.path)).map_err(|_| nfsstat3::NFS3ERR_IO)
    }

    async fn mkdir(&self, _: fileid3, _: &filename3) -> Result<(fileid3, fattr3), nfsstat3> {
        Err(nfsstat3::NFS3ERR_NOTSUPP)
    }

    async fn rename(
        &self,
        _: fileid3,
        _: &filename3,
        _: fileid3,
        _: &filename3,
    ) -> Result<(), nfsstat3> {
        Err(nfsstat3::NFS3ERR_NOTSUPP)
    }

    async fn readdir(&self, _: fileid3, _: fileid3, _: usize) -> Result<ReadDirResult, nfsstat3> {
        Err(nfsstat3::NFS3ERR_NOTSUPP)
    }

    async fn symlink(
        &self,
        _: fileid3,
        _: &filename3,
        _: &nfspath3,
        _: &sattr3,
    ) -> Result<(fileid3, fattr3), nfsstat3> {
        Err(nfsstat3::NFS3ERR_NOTSUPP)
    }

    async fn readlink(&self, _: fileid3) -> Result<nfspath3, nfsstat3> {
        Err(nfsstat3::NFS3ERR_NOTSUPP)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::load::{self, Amount, CommitPace, Load, Work};

    /// What it serves is on the disk, and no COMMIT is sent, which it would refuse.
    #[test]
    fn files_are_written_read_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let listener = runtime.block_on(listen(folder.path())).unwrap();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, listener.get_listen_port()));
        runtime.spawn(async move { listener.handle_forever().await });
        let target = Target { nfs: address, mount: address, export: "/".to_owned() };
        let stop = Stop::listen(Duration::from_secs(120)).unwrap();
        let write = Load {
            work: Work::SequentialWrite,
            block_bytes: 64 << 10,
            depth: 2,
            connections: 1,
            span_bytes: 1 << 20,
            amount: Amount::Bytes(1 << 20),
            commit: CommitPace::EachWrite,
            seed: 1,
            file: "file".to_owned(),
            is_verified: false,
        };
        for _ in 0..2 {
            load::run(&target, &write, &stop).unwrap();
            let path = folder.path().join("file");
            assert_eq!(path.metadata().unwrap().len(), 1 << 20);
            let read = Load { work: Work::RandomRead, is_verified: true, ..write.clone() };
            assert_eq!(load::run(&target, &read, &stop).unwrap().operations, 16);
            load::remove(&target, "file").unwrap();
            assert!(!path.exists());
        }
    }
}
