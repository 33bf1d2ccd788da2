//! Closed-loop load on an NFSv3 server, by one thread that does as little as it can: it shares
//! its cores with the server that it measures.
//!
//! ```text
//! run -> driver      poll, one read and one send for many calls
//!        lane        the calls of one connection, and what follows each answer
//!        outbound    calls that wait to be sent      inbound    records as they arrive
//!        fill        what is written                 tally      what is counted
//! names  the same for names: made, listed, removed
//! ```
//!
//! # Invariants
//! - Only work that was answered as asked is counted: an error, a short READ or a changed write
//!   verifier ends the run.
//! - The payload of a READ is received, and not looked at unless it is to be verified.
//! - The memory of a payload does not change before it was sent.

mod driver;
mod fill;
mod inbound;
mod lane;
pub(crate) mod names;
mod outbound;
mod tally;

use std::net::SocketAddr;
use std::time::Duration;

use slackwater_benches::wire::Session;
use slackwater_blockstore::BLOCK_BYTES;

use crate::failure::Failure;
use crate::stop::Stop;

use driver::Driver;
use fill::FILL_BYTES;

pub(crate) use tally::Measured;

/// Most calls of one connection: what fits into the part of an xid that names a call.
const DEPTH_MAX: usize = 4000;

/// An export of a server.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) nfs: SocketAddr,
    pub(crate) mount: SocketAddr,
    /// Such as "/slackwater".
    pub(crate) export: String,
}

/// What is done with each block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    SequentialRead,
    SequentialWrite,
    RandomRead,
    RandomWrite,
}

/// When it is enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Amount {
    Time(Duration),
    /// Sequential work begins again at the front when this is more than the span.
    Bytes(u64),
}

/// When a COMMIT is sent. No pace spares the one after the last WRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommitPace {
    AtEnd,
    /// A WRITE and its COMMIT are one operation.
    EachWrite,
    EverySecond,
}

/// What is asked of a server.
#[derive(Clone, Debug)]
pub(crate) struct Load {
    pub(crate) work: Work,
    /// A whole number of blocks of the store.
    pub(crate) block_bytes: usize,
    /// Operations that each connection has under way.
    pub(crate) depth: usize,
    /// Sequential work shares the span out among them.
    pub(crate) connections: usize,
    /// The part of the file that is worked on, from its beginning.
    pub(crate) span_bytes: u64,
    pub(crate) amount: Amount,
    pub(crate) commit: CommitPace,
    /// Sequential writes of one seed are of the same bytes; no 4 KiB block of another, and none
    /// of random writes, comes twice. Random work of one seed goes to the same places.
    pub(crate) seed: u64,
    /// A name in the root of the export; a file to write to is made if it is missing.
    pub(crate) file: String,
    /// Whether each block read must be what a sequential write of the seed wrote.
    pub(crate) is_verified: bool,
}

impl Load {
    fn is_write(&self) -> bool {
        matches!(self.work, Work::SequentialWrite | Work::RandomWrite)
    }

    fn is_random(&self) -> bool {
        matches!(self.work, Work::RandomRead | Work::RandomWrite)
    }

    /// Blocks that each connection goes through, if the work is sequential.
    fn share_blocks(&self) -> u64 {
        self.span_bytes / self.block_bytes as u64 / self.connections.max(1) as u64
    }

    fn check(&self) -> Result<(), Failure> {
        let is_sound = self.block_bytes > 0
            && self.block_bytes.is_multiple_of(BLOCK_BYTES)
            && FILL_BYTES.is_multiple_of(self.block_bytes)
            && (1..=DEPTH_MAX).contains(&self.depth)
            && self.connections > 0
            && self.share_blocks() > 0;
        if is_sound { Ok(()) } else { Err(Failure::Unfit(format!("no such load: {self:?}"))) }
    }
}

/// Puts the load on the server until its amount is done.
pub(crate) fn run(target: &Target, load: &Load, stop: &Stop) -> Result<Measured, Failure> {
    load.check()?;
    let root = Session::mount(target.mount, &target.export)?;
    let mut connections = Vec::new();
    for _ in 0..load.connections {
        let mut session = Session::connect(target.nfs)?;
        let file = session.open(&root, &load.file)?;
        if !load.is_write() {
            let size_bytes = session.size(&file)?;
            if size_bytes < load.span_bytes {
                let what = format!("{} has {size_bytes} bytes, fewer than are read", load.file);
                return Err(Failure::Unfit(what));
            }
        }
        connections.push((session.into_stream(), file));
    }
    Driver::new(load, connections)?.run(stop)
}

/// Removes a file from the root of the export.
pub(crate) fn remove(target: &Target, file: &str) -> Result<(), Failure> {
    let root = Session::mount(target.mount, &target.export)?;
    Ok(Session::connect(target.nfs)?.remove(&root, file)?)
}
