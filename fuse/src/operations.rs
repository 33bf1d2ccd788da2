//! What each request of the kernel does.

use bytes::Bytes;
use rustix::io::Errno;

use crate::export::Export;
use crate::nodes::{Object, checked_name};
use crate::statistics::FILE_BYTES;
use crate::wire::{
    Attributes, DirectoryEntry, MODE_DIRECTORY, MODE_FILE, NodeId, OPEN_DIRECT, OPEN_KEEP_CACHE,
    Operation, Request, directory_reply, open_reply, write_reply,
};

/// The virtual file of statistics, in the root.
const STATISTICS_NAME: &str = ".slackwater-stats";

/// The body of a reply, in pieces.
type Body = Vec<Bytes>;

fn body(bytes: Vec<u8>) -> Body {
    vec![bytes.into()]
}

/// Known without the appliance, so that a mount can be looked at while that is away.
fn root_attributes() -> Attributes {
    Attributes::of_virtual(NodeId::ROOT, MODE_DIRECTORY | 0o755, 4096)
}

fn statistics_attributes() -> Attributes {
    let size_bytes = u64::try_from(FILE_BYTES).unwrap_or(0);
    Attributes::of_virtual(NodeId::STATISTICS, MODE_FILE | 0o444, size_bytes)
}

impl Export {
    /// Does what is asked; what needs no reply at all does not come here.
    pub(crate) async fn answer(&self, request: Request) -> Result<Body, Errno> {
        let node = request.node;
        match request.operation.ok_or(Errno::IO)? {
            Operation::Lookup { name } => self.look_up(node, &name).await.map(body),
            Operation::GetAttributes => Ok(body(self.attributes(node).await?.reply())),
            Operation::SetAttributes { size_bytes } => {
                let attributes = self.attributes(node).await?;
                // Files are resized over REST, by the driver.
                if size_bytes.is_some_and(|size_bytes| size_bytes != attributes.size_bytes) {
                    return Err(Errno::PERM);
                }
                Ok(body(attributes.reply()))
            }
            Operation::Open { is_for_writing } => self.open(node, is_for_writing).map(body),
            Operation::Read { offset_bytes, size_bytes } => {
                if node == NodeId::STATISTICS {
                    return Ok(vec![self.read_statistics(offset_bytes, size_bytes)]);
                }
                let file = self.nodes.file(node)?;
                self.read(&file, offset_bytes, size_bytes).await
            }
            Operation::Write { offset_bytes, data } => {
                let written = u32::try_from(data.len()).map_err(|_| Errno::INVAL)?;
                let file = self.nodes.file(node)?;
                self.write(&file, offset_bytes, data).await?;
                Ok(body(write_reply(written)))
            }
            Operation::FileSystemStatus => Ok(body(self.nfs.status().await?.reply())),
            Operation::Sync | Operation::Release if node == NodeId::STATISTICS => Ok(Body::new()),
            Operation::Sync => self.sync(&*self.nodes.file(node)?).await.map(|()| Body::new()),
            Operation::Release => self.commit(&*self.nodes.file(node)?).await.map(|()| Body::new()),
            Operation::OpenDirectory => Ok(body(open_reply(0))),
            Operation::ReadDirectory { offset, size_bytes } => {
                Ok(body(directory_reply(&self.list(node)?, offset, size_bytes)))
            }
            Operation::ReleaseDirectory | Operation::Destroy => Ok(Body::new()),
            Operation::Init(_) | Operation::Forget(_) | Operation::Interrupt => Err(Errno::INVAL),
            // FLUSH is among them: a file system need not sync what is closed.
            Operation::Unknown { opcode } => {
                tracing::debug!(opcode, "a request that is not served");
                Err(Errno::NOSYS)
            }
        }
    }

    async fn look_up(&self, parent: NodeId, name: &Bytes) -> Result<Vec<u8>, Errno> {
        let name = checked_name(name)?;
        if parent == NodeId::ROOT && name == STATISTICS_NAME {
            return Ok(statistics_attributes().entry_reply(NodeId::STATISTICS));
        }
        let (path, found) = if parent == NodeId::ROOT {
            (name.to_owned(), self.nfs.lookup_in_root(name).await?)
        } else {
            let (path, object) = self.nodes.get(parent)?;
            let Object::Directory(handle) = object else { return Err(Errno::NOTDIR) };
            (format!("{path}/{name}"), self.nfs.lookup(&handle, name).await?)
        };
        let node = self.nodes.look_up(path, &found)?;
        Ok(found.attributes.entry_reply(node))
    }

    async fn attributes(&self, node: NodeId) -> Result<Attributes, Errno> {
        match node {
            NodeId::ROOT => Ok(root_attributes()),
            NodeId::STATISTICS => Ok(statistics_attributes()),
            _ => self.nfs.attributes(self.nodes.get(node)?.1.handle()).await,
        }
    }

    fn open(&self, node: NodeId, is_for_writing: bool) -> Result<Vec<u8>, Errno> {
        if node == NodeId::STATISTICS {
            return Ok(open_reply(OPEN_DIRECT));
        }
        let file = self.nodes.file(node)?;
        if is_for_writing && !file.is_writable() {
            return Err(Errno::ROFS);
        }
        Ok(open_reply(OPEN_KEEP_CACHE))
    }

    fn read_statistics(&self, offset_bytes: u64, size_bytes: u32) -> Bytes {
        let text = Bytes::from(self.render_statistics());
        let from = usize::try_from(offset_bytes).unwrap_or(usize::MAX).min(text.len());
        let size = usize::try_from(size_bytes).unwrap_or(usize::MAX);
        let to = from.saturating_add(size).min(text.len());
        text.slice(from..to)
    }

    /// What is known of a directory: only what was looked up, since nobody lists an export.
    fn list(&self, node: NodeId) -> Result<Vec<DirectoryEntry>, Errno> {
        let entry = |name: &str, is_directory| DirectoryEntry {
            inode: node.0,
            name: name.to_owned(),
            is_directory,
        };
        let mut entries = vec![entry(".", true), entry("..", true)];
        if node == NodeId::ROOT {
            let inode = NodeId::STATISTICS.0;
            entries.push(DirectoryEntry { inode, ..entry(STATISTICS_NAME, false) });
            entries.extend(self.nodes.entries(""));
        } else {
            entries.extend(self.nodes.entries(&self.nodes.get(node)?.0));
        }
        Ok(entries)
    }
}
