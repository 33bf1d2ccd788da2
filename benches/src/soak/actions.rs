//! What a worker does while the server lives.

use slackwater_benches::wire::call::{self, Stability};
use slackwater_benches::wire::{Handle, Session};
use slackwater_blockstore::BLOCK_BYTES_U64;
use slackwater_client::types::CreateSnapshot;
use slackwater_client::{ClientError, ProblemCode};

use super::model::{FileModel, Image};
use super::trouble::Trouble;
use super::worker::{Doubt, Held, Line, Taken, Worker};

/// How often, of a hundred.
const STABLE_PERCENT: u64 = 25;
const UNALIGNED_PERCENT: u64 = 20;
const REPLACE_PERCENT: u64 = 40;
const WHOLE_BLOCKS_PERCENT: u64 = 60;

/// Bytes of one READ.
const READ_BYTES: u32 = 256 << 10;

/// A WRITE that is to be sent.
struct Write {
    offset_bytes: u64,
    stability: Stability,
    data: Vec<u8>,
}

impl Worker {
    /// Does something.
    pub(super) fn act(&mut self, line: &mut Line) -> Result<(), Trouble> {
        let Some(name) = self.chance.pick(self.files.keys()).cloned() else {
            return self.create(line);
        };
        match self.chance.below(100) {
            0..40 => {
                let writes = self.draw_writes();
                self.write(line, &name, writes)
            }
            40..55 => self.commit(line, &name),
            55..60 => self.resize(line, &name),
            60..66 => self.create(line),
            66..71 => self.rename(line, name),
            71..75 => self.remove(line, name),
            75..83 => self.read(line, &name),
            83..89 => self.snapshot(line, &name),
            89..94 => self.clone_snapshot(line),
            94..98 => self.delete_snapshot(line),
            _ => self.collect(line),
        }
    }

    /// Makes files and snapshots until there are as many as there may be.
    pub(super) fn fill(&mut self, line: &mut Line) -> Result<(), Trouble> {
        while self.files.len() < self.scale.files_max {
            self.create(line)?;
        }
        while self.snapshots.len() < self.scale.snapshots_max {
            let Some(name) = self.chance.pick(self.files.keys()).cloned() else { return Ok(()) };
            let writes = self.draw_writes();
            self.write(line, &name, writes)?;
            self.snapshot(line, &name)?;
        }
        Ok(())
    }

    /// The file of that name, which is there.
    fn held(&mut self, name: &str) -> Result<&mut Held, Trouble> {
        let unknown = || Trouble::broken(format!("no file {name} in the model"));
        self.files.get_mut(name).ok_or_else(unknown)
    }

    /// WRITEs of which no two touch the same block.
    fn draw_writes(&mut self) -> Vec<Write> {
        let Self { chance, matter, scale, .. } = self;
        let mut block = chance.below(scale.file_blocks_max);
        let mut writes = Vec::new();
        for _ in 0..=chance.below(scale.burst_max) {
            let blocks = 1 + chance.below(scale.write_blocks_max);
            if block + blocks > scale.file_blocks_max {
                break;
            }
            let mut data = matter.blocks(usize::try_from(blocks).unwrap_or(1), chance);
            let mut offset_bytes = block * BLOCK_BYTES_U64;
            if chance.percent(UNALIGNED_PERCENT) {
                let cut = chance.index(data.len());
                offset_bytes += cut as u64;
                data.drain(..cut);
                data.truncate(1 + chance.index(data.len()));
            }
            let is_stable = chance.percent(STABLE_PERCENT);
            let stability = if is_stable { Stability::FileSync } else { Stability::Unstable };
            writes.push(Write { offset_bytes, stability, data });
            block += blocks + chance.below(scale.write_blocks_max);
        }
        writes
    }

    /// Sends the WRITEs, then waits for the answers, which may come in any order.
    fn write(&mut self, line: &mut Line, name: &str, writes: Vec<Write>) -> Result<(), Trouble> {
        let session = line.session(&mut self.chance);
        let mut pending = Vec::new();
        for write in writes {
            let held = self.held(name)?;
            held.model.write_begins(write.offset_bytes, &write.data);
            let place = (write.offset_bytes, write.stability);
            let handle = &held.handle;
            let xid = session.send(|out, xid| call::write(out, xid, handle, place, &write.data))?;
            pending.push((xid, write));
        }
        while !pending.is_empty() {
            let reply = session.receive()?;
            let Some(index) = pending.iter().position(|(xid, _)| *xid == reply.xid) else {
                let xid = reply.xid;
                return Err(Trouble::broken(format!("an answer to a call {xid} that nobody made")));
            };
            let (_, write) = pending.swap_remove(index);
            let reply = reply.write()?;
            let length = write.data.len();
            if usize::try_from(reply.count) != Ok(length) {
                let what = format!("{} bytes were written of {length}", reply.count);
                return Err(Trouble::broken(what));
            }
            if write.stability == Stability::FileSync && !reply.is_durable {
                return Err(Trouble::broken("a FILE_SYNC write was answered UNSTABLE"));
            }
            self.verifiers.saw(reply.verifier)?;
            self.held(name)?.model.write_ends(write.offset_bytes, &write.data, reply);
            match reply.is_durable {
                true => self.counts.stable_writes += 1,
                false => self.counts.unstable_writes += 1,
            }
        }
        Ok(())
    }

    /// Sends again what a server that died has not made durable.
    pub(super) fn resend(&mut self, line: &mut Line, name: &str) -> Result<(), Trouble> {
        let lost = self.held(name)?.model.lost();
        self.counts.resent_blocks += lost.len() as u64;
        let stability = Stability::Unstable;
        for (offset_bytes, data) in lost {
            self.write(line, name, vec![Write { offset_bytes, stability, data }])?;
        }
        Ok(())
    }

    pub(super) fn commit(&mut self, line: &mut Line, name: &str) -> Result<(), Trouble> {
        let handle = self.held(name)?.handle.clone();
        let session = line.session(&mut self.chance);
        let verifier = session.call(|out, xid| call::commit(out, xid, &handle))?.commit()?;
        self.verifiers.saw(verifier)?;
        if !self.held(name)?.model.committed(verifier) {
            return Err(Trouble::broken(format!("COMMIT of {name} has another write verifier")));
        }
        self.counts.commits += 1;
        Ok(())
    }

    /// Sets the size, after a COMMIT as a kernel does it.
    fn resize(&mut self, line: &mut Line, name: &str) -> Result<(), Trouble> {
        self.commit(line, name)?;
        let mut size_bytes = self.chance.below(self.scale.file_blocks_max * BLOCK_BYTES_U64);
        if self.chance.percent(WHOLE_BLOCKS_PERCENT) {
            size_bytes -= size_bytes % BLOCK_BYTES_U64;
        }
        self.doubt = Some(Doubt::Resize { name: name.to_owned(), size_bytes });
        let handle = self.held(name)?.handle.clone();
        line.session(&mut self.chance).set_size(&handle, size_bytes)?;
        self.held(name)?.model.resized(size_bytes);
        self.counts.resizes += 1;
        self.doubt = None;
        Ok(())
    }

    fn create(&mut self, line: &mut Line) -> Result<(), Trouble> {
        if self.files.len() >= self.scale.files_max {
            return Ok(());
        }
        let name = self.new_name();
        self.doubt = Some(Doubt::Create { name: name.clone() });
        let root = line.root.clone();
        let handle = line.session(&mut self.chance).open(&root, &name)?;
        self.files.insert(name, Held { handle, model: FileModel::empty() });
        self.counts.creates += 1;
        self.doubt = None;
        Ok(())
    }

    /// Gives a file another name, at times that of another file, which then is gone.
    fn rename(&mut self, line: &mut Line, from: String) -> Result<(), Trouble> {
        let other = self.chance.pick(self.files.keys()).cloned();
        let is_replacing = self.chance.percent(REPLACE_PERCENT);
        let to = match other.filter(|other| is_replacing && *other != from) {
            Some(other) => other,
            None => self.new_name(),
        };
        self.doubt = Some(Doubt::Rename { from: from.clone(), to: to.clone() });
        let root = line.root.clone();
        let session = line.session(&mut self.chance);
        session.call(|out, xid| call::rename(out, xid, &root, &from, &to))?.done("RENAME")?;
        if let Some(held) = self.files.remove(&from) {
            self.files.insert(to, held);
        }
        self.counts.renames += 1;
        self.doubt = None;
        Ok(())
    }

    fn remove(&mut self, line: &mut Line, name: String) -> Result<(), Trouble> {
        self.doubt = Some(Doubt::Remove { name: name.clone() });
        let root = line.root.clone();
        line.session(&mut self.chance).remove(&root, &name)?;
        self.files.remove(&name);
        self.counts.removes += 1;
        self.doubt = None;
        Ok(())
    }

    /// Reads what was written, committed or not.
    fn read(&mut self, line: &mut Line, name: &str) -> Result<(), Trouble> {
        let held = self.held(name)?.clone();
        let got = read_all(line.session(&mut self.chance), &held.handle)?;
        match held.model.image().difference(&got) {
            None => Ok(()),
            Some(what) => Err(Trouble::broken(format!("{name} while the server lives: {what}"))),
        }
    }

    fn snapshot(&mut self, line: &mut Line, path: &str) -> Result<(), Trouble> {
        if self.snapshots.len() >= self.scale.snapshots_max {
            return self.delete_snapshot(line);
        }
        let name = self.new_name();
        let taken = Taken { name: name.clone(), image: self.held(path)?.model.image() };
        self.doubt = Some(Doubt::Snapshot { taken: taken.clone() });
        let labels = self.labels();
        let path = path.to_owned();
        let request =
            CreateSnapshot { path, name: Some(name), labels, ..CreateSnapshot::default() };
        let made = self.runtime.block_on(line.client.create_snapshot(&request))?;
        self.snapshots.insert(made.id, taken);
        self.counts.snapshots += 1;
        self.doubt = None;
        Ok(())
    }

    fn clone_snapshot(&mut self, line: &mut Line) -> Result<(), Trouble> {
        let Some(id) = self.chance.pick(self.snapshots.keys()).copied() else { return Ok(()) };
        if self.files.len() >= self.scale.files_max {
            return Ok(());
        }
        let (name, image) = (self.new_name(), self.snapshots[&id].image.clone());
        self.doubt = Some(Doubt::Clone { name: name.clone(), image: image.clone() });
        self.runtime.block_on(line.client.create_clone(id, &name))?;
        let root = line.root.clone();
        let session = line.session(&mut self.chance);
        let found = session.call(|out, xid| call::lookup(out, xid, &root, &name))?.lookup()?;
        let missing = || Trouble::broken(format!("the clone {name} is not in the export"));
        let held = Held { handle: found.ok_or_else(missing)?, model: FileModel::holding(&image) };
        self.files.insert(name, held);
        self.counts.clones += 1;
        self.doubt = None;
        Ok(())
    }

    fn delete_snapshot(&mut self, line: &mut Line) -> Result<(), Trouble> {
        let Some(id) = self.chance.pick(self.snapshots.keys()).copied() else { return Ok(()) };
        self.doubt = Some(Doubt::DeleteSnapshot { id });
        self.runtime.block_on(line.client.delete_snapshot(id))?;
        self.snapshots.remove(&id);
        self.counts.deleted_snapshots += 1;
        self.doubt = None;
        Ok(())
    }

    /// Has the server take back what nobody names any more: reclaim and compaction.
    fn collect(&mut self, line: &Line) -> Result<(), Trouble> {
        if self.chance.below(1000) >= self.scale.collect_permille {
            return Ok(());
        }
        match self.runtime.block_on(line.client.gc()) {
            Ok(_) => self.counts.collections += 1,
            // One at a time: another worker's is under way.
            Err(ClientError::Api { code: ProblemCode::Busy, .. }) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

/// Everything that a file holds.
pub(super) fn read_all(session: &mut Session, file: &Handle) -> Result<Image, Trouble> {
    let size_bytes = session.size(file)?;
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < size_bytes {
        let at = bytes.len() as u64;
        let reply = session.call(|out, xid| call::read(out, xid, file, at, READ_BYTES))?;
        let piece = reply.read_bytes()?;
        if piece.is_empty() {
            return Err(Trouble::broken(format!("a READ at {at} of {size_bytes} gave no byte")));
        }
        bytes.extend_from_slice(piece);
    }
    Ok(Image::of(size_bytes, &bytes))
}
