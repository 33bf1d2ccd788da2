//! From a record to what is done about it, and from a request to its reply.
//!
//! ```text
//! record -> plan -+-> Close      not a call: the stream is out of step
//!                 +-> Answer     refused: program, version, procedure, credential, address
//!                 +-> Request -> execute -> reply
//! ```

use std::net::{IpAddr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use bytes::Bytes;
use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::{Change, Error, InodeId};

use crate::auth::{self, Caller};
use crate::client_certificate::Shown;
use crate::duplicate::{DuplicateKey, Seen, Ticket};
use crate::limits;
use crate::mount;
use crate::options::{ClientAccess, NfsOptions};
use crate::outlet::Outlet;
use crate::portmap::{self, Program};
use crate::proc::{self, Call, NotRun};
use crate::procedure::{Lane, MountProcedure, NfsProcedure, PortmapProcedure, Procedure};
use crate::rpc::{self, AuthStatus, CallHeader, NotACall, Refused, Unrunnable, Xid};
use crate::scope::Mounter;
use crate::server::Shared;
use crate::tls::{Demand, NfsTls};
use crate::xdr::{Decoder, Encoder};

/// The first port that any user may open.
const UNPRIVILEGED_PORT_MIN: u16 = 1024;

/// The other end of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    /// Its address.
    pub(crate) address: IpAddr,
    /// Whether it has a port that only root opens.
    pub(crate) has_privileged_port: bool,
    /// What it may do; `None`: it is refused.
    pub(crate) access: Option<ClientAccess>,
    /// The port that it calls.
    pub(crate) port: portmap::Port,
    /// What its connection has shown of who it is.
    pub(crate) shown: Shown,
}

impl Peer {
    /// The peer at `address`, as the options see it.
    pub(crate) fn new(address: SocketAddr, port: portmap::Port, options: &NfsOptions) -> Self {
        let has_privileged_port = address.port() < UNPRIVILEGED_PORT_MIN;
        let has_port = !options.require_privileged_port || has_privileged_port;
        let ip = address.ip().to_canonical();
        let access = options.access_of(ip).filter(|_| has_port);
        Self { address: ip, has_privileged_port, access, port, shown: Shown::NotAsked }
    }

    /// Notes that its connection is in plain text: it may do nothing, if TLS is required of its machine, and mount
    /// without reaching anything, if a certificate is. Tells whether it may do nothing.
    pub(crate) const fn note_plain_text(&mut self, offered: &NfsTls) -> bool {
        if self.address.is_loopback() {
            return false;
        }
        match offered.demand {
            Demand::Nothing => {}
            Demand::Tls => self.access = None,
            Demand::Certificate => self.shown = Shown::Nothing,
        }
        matches!(offered.demand, Demand::Tls)
    }

    /// Notes what it has shown in TLS.
    pub(crate) fn note_shown(&mut self, shown: Shown, offered: &NfsTls) {
        // The handshake ends without a certificate that is asked for; but if it did not, nothing was shown.
        let is_missing = offered.demand == Demand::Certificate && shown == Shown::NotAsked;
        self.shown = if is_missing { Shown::Nothing } else { shown };
    }

    /// Whether it may do more than it takes to be refused, or to mount without reaching anything.
    pub(crate) fn is_served(self) -> bool {
        self.access.is_some() && self.shown != Shown::Nothing
    }

    /// It, as one that mounts.
    const fn mounter(self) -> Mounter {
        Mounter { address: self.address, has_privileged_port: self.has_privileged_port }
    }
}

/// What is done about a record.
#[derive(Debug)]
pub(crate) enum Plan {
    /// The connection is closed.
    Close(NotACall),
    /// This is the reply.
    Answer(Encoder),
    /// This is the reply to one who lacks a certificate.
    AskForCertificate(Encoder),
    /// A procedure is run. Boxed, for it is moved to another thread.
    Run(Box<Request>),
}

/// A call that is to be run.
#[derive(Debug)]
pub(crate) struct Request {
    /// The transaction id.
    pub(crate) xid: Xid,
    /// The procedure.
    pub(crate) procedure: Procedure,
    claim: auth::Claim,
    frame: Bytes,
    arguments_at: usize,
    peer: Peer,
    received: Instant,
    /// Present for calls that must not be run twice.
    ticket: Option<Ticket>,
    /// Tells whether the client has given the call up; present once it may wait.
    outlet: Option<Outlet>,
}

/// A reply that is ready to be sent.
#[derive(Debug)]
pub(crate) struct Finished {
    /// Record mark, header and results.
    pub(crate) head: Vec<u8>,
    /// The payload after it.
    pub(crate) pieces: Vec<Bytes>,
}

impl From<Encoder> for Finished {
    fn from(reply: Encoder) -> Self {
        let (head, pieces) = reply.finish();
        Self { head, pieces }
    }
}

/// Decides what is done about the record `frame`.
pub(crate) fn plan(frame: &Bytes, peer: Peer, received: Instant) -> Plan {
    let header = match rpc::decode_call(frame) {
        Ok(header) => header,
        Err(Refused::Close(why)) => return Plan::Close(why),
        Err(Refused::Answer(reply)) => return Plan::Answer(reply),
    };
    if !peer.port.has(header.program) {
        return Plan::Answer(rpc::unrunnable(header.xid, Unrunnable::ProgramUnavailable));
    }
    let procedure = match route(&header) {
        Ok(procedure) => procedure,
        Err(why) => return Plan::Answer(rpc::unrunnable(header.xid, why)),
    };
    if let Some(reply) = refusal(procedure, peer, header.xid) {
        return match peer.access {
            Some(_) => Plan::AskForCertificate(reply),
            None => Plan::Answer(reply),
        };
    }
    let CallHeader { xid, claim, arguments_at, .. } = header;
    let frame = frame.clone();
    Plan::Run(Box::new(Request {
        xid,
        procedure,
        claim,
        frame,
        arguments_at,
        peer,
        received,
        ticket: None,
        outlet: None,
    }))
}

/// The procedure that a call is for.
fn route(header: &CallHeader) -> Result<Procedure, Unrunnable> {
    let find = |program: Program, procedure: Option<Procedure>| {
        if header.version == program.version {
            procedure.ok_or(Unrunnable::ProcedureUnavailable)
        } else {
            let only = program.version;
            Err(Unrunnable::ProgramMismatch { low: only, high: only })
        }
    };
    let number = header.procedure;
    match header.program {
        program if program == portmap::NFS.number => {
            find(portmap::NFS, NfsProcedure::from_number(number).map(Procedure::Nfs))
        }
        program if program == portmap::MOUNT.number => {
            find(portmap::MOUNT, MountProcedure::from_number(number).map(Procedure::Mount))
        }
        program if program == portmap::PORTMAP.number => {
            find(portmap::PORTMAP, PortmapProcedure::from_number(number).map(Procedure::Portmap))
        }
        // NFS_ACL (100227) and LOCALIO among them: clients ask and go on without.
        _ => Err(Unrunnable::ProgramUnavailable),
    }
}

/// The reply to a client that is refused by its address or port, or for want of a certificate. NULL and PORTMAP tell
/// nothing, so they are answered to all.
fn refusal(procedure: Procedure, peer: Peer, xid: Xid) -> Option<Encoder> {
    if procedure.is_null() {
        return None;
    }
    if peer.access.is_some() {
        let is_refused = !peer.is_served() && matches!(procedure, Procedure::Nfs(_));
        return is_refused.then(|| rpc::auth_error(xid, AuthStatus::TooWeak));
    }
    match procedure {
        Procedure::Portmap(_) => None,
        Procedure::Mount(MountProcedure::Mount) => {
            let mut reply = rpc::success(xid);
            mount::refuse(&mut reply);
            Some(reply)
        }
        Procedure::Nfs(_) | Procedure::Mount(_) => Some(rpc::auth_error(xid, AuthStatus::TooWeak)),
    }
}

/// Whether a request is to be run, as far as resent calls are concerned.
#[derive(Debug)]
pub(crate) enum Resent {
    /// It is not one, or may be run again.
    No,
    /// The first one is being run; this one is dropped.
    Drop,
    /// The first one's reply is sent again.
    Replay(Bytes),
}

impl Request {
    /// How the request is run.
    pub(crate) const fn lane(&self) -> Lane {
        self.procedure.lane()
    }

    /// Bytes that the request holds and its reply may hold.
    pub(crate) fn charged_bytes(&self) -> usize {
        let reply = match self.procedure {
            Procedure::Nfs(NfsProcedure::Read) => proc::peek_count(&self.arguments()),
            other => other.reply_bytes(),
        };
        self.frame.len() + reply
    }

    /// Has it hold no more memory than it is charged: a small record is a part of the connection's
    /// read buffer, all of which would wait with it.
    pub(crate) fn detach(&mut self) {
        if self.frame.len() <= limits::FRAME_BYTES_SMALL {
            self.frame = Bytes::copy_from_slice(&self.frame);
        }
    }

    fn arguments(&self) -> Decoder<'_> {
        Decoder::at(&self.frame, self.arguments_at)
    }

    /// The request may wait from now on, and its client end the connection meanwhile.
    pub(crate) fn may_outlast(&mut self, outlet: &Outlet) {
        self.outlet = Some(outlet.clone());
    }

    /// Looks the request up among those that were run lately, if it is of the kind that must
    /// not be run twice.
    pub(crate) fn check_resent(&mut self, shared: &Shared) -> Resent {
        let Procedure::Nfs(procedure) = self.procedure else {
            return Resent::No;
        };
        if !procedure.is_replayed() {
            return Resent::No;
        }
        let arguments = self.arguments().rest();
        let scope = match proc::verify_scope(shared, &self.arguments()) {
            Ok(scope) if self.peer.shown.reaches(scope) => scope,
            // Not by what it was answered before it was revoked, nor by what another was.
            Ok(_) | Err(_) => return Resent::No,
        };
        let (client, cache) = (self.peer.address, &shared.duplicates);
        let arguments = cache.arguments(arguments);
        let key = DuplicateKey::new(client, self.claim, self.xid, procedure, arguments, scope);
        match cache.begin(key, self.received) {
            Seen::New(ticket) => {
                self.ticket = Some(ticket);
                Resent::No
            }
            Seen::InProgress => {
                shared.metrics.duplicates_dropped.add(1);
                Resent::Drop
            }
            Seen::Done(reply) => {
                shared.metrics.duplicates_replayed.add(1);
                Resent::Replay(reply)
            }
        }
    }

    /// Runs the request where it may wait for the disk.
    pub(crate) fn execute(self, shared: &Shared) -> Finished {
        let outcome = self.run(shared, |request| request.run_procedure(shared, true));
        debug_assert!(outcome.is_some(), "a call that may block found that it would block");
        match outcome {
            Some(outcome) => self.finish(shared, outcome),
            None => self.fail(shared),
        }
    }

    /// Runs the request unless it would have to wait for the disk: then it comes back.
    pub(crate) fn execute_inline(self: Box<Self>, shared: &Shared) -> Result<Finished, Box<Self>> {
        match self.run(shared, |request| request.run_procedure(shared, false)) {
            Some(outcome) => Ok(self.finish(shared, outcome)),
            None => Err(self),
        }
    }

    /// Answers a COMMIT whose outcome the store has told.
    pub(crate) fn committed(
        self,
        shared: &Shared,
        file: InodeId,
        outcome: Result<(Change, u64), Error>,
    ) -> Finished {
        let encode = |request: &Self| {
            request.with_call(shared, true, |call, _, reply| {
                Ok(proc::put_committed(call, file, outcome, reply))
            })
        };
        match self.run(shared, encode) {
            Some(outcome) => self.finish(shared, outcome),
            None => self.fail(shared),
        }
    }

    /// Answers a request that the server failed.
    pub(crate) fn fail(self, shared: &Shared) -> Finished {
        let failed = (nfsstat3::NFS3ERR_SERVERFAULT, self.failed());
        self.finish(shared, failed)
    }

    /// The file that a COMMIT is for.
    pub(crate) fn committed_file(&self, shared: &Shared) -> Option<InodeId> {
        (self.procedure == Procedure::Nfs(NfsProcedure::Commit)).then(|| self.file(shared))?
    }

    /// The file of a WRITE or COMMIT: what the first handle names.
    pub(crate) fn file(&self, shared: &Shared) -> Option<InodeId> {
        proc::peek_inode(shared, &self.arguments(), self.peer.shown)
    }

    /// Counts the reply, and keeps it for a resent call.
    fn finish(mut self, shared: &Shared, (status, reply): (nfsstat3, Encoder)) -> Finished {
        let is_error = !matches!(status, nfsstat3::NFS3_OK);
        shared.metrics.record(self.procedure, self.received.elapsed(), is_error);
        let finished = Finished::from(reply);
        if let Some(ticket) = self.ticket.take() {
            // Kept from now on: the client of a call that took long is still to ask for its reply.
            ticket.finish(Bytes::copy_from_slice(&finished.head), Instant::now());
        }
        finished
    }

    /// The status and reply, or `None` when the call would block.
    fn run(
        &self,
        shared: &Shared,
        procedure: impl FnOnce(&Self) -> Result<(nfsstat3, Encoder), NotRun>,
    ) -> Option<(nfsstat3, Encoder)> {
        match self.guard(shared, || procedure(self)) {
            Ok(outcome) => Some(outcome),
            Err(NotRun::WouldBlock) => None,
            Err(NotRun::Malformed(error)) => {
                let procedure = self.procedure.name();
                let client = self.peer.address;
                tracing::debug!(procedure, %error, %client, "garbage arguments");
                let reply = rpc::unrunnable(self.xid, Unrunnable::GarbageArguments);
                Some((nfsstat3::NFS3ERR_INVAL, reply))
            }
        }
    }

    /// Runs `procedure`, and answers SERVERFAULT when it panics.
    fn guard(
        &self,
        shared: &Shared,
        procedure: impl FnOnce() -> Result<(nfsstat3, Encoder), NotRun>,
    ) -> Result<(nfsstat3, Encoder), NotRun> {
        // What a panic leaves behind is the store's own state, which guards itself (its locks
        // do not poison, its commits are whole or not at all); the rest is dropped here.
        catch_unwind(AssertUnwindSafe(procedure)).unwrap_or_else(|_| {
            shared.metrics.panics.add(1);
            tracing::error!(procedure = self.procedure.name(), "a call panicked");
            Ok((nfsstat3::NFS3ERR_SERVERFAULT, self.failed()))
        })
    }

    fn run_procedure(
        &self,
        shared: &Shared,
        may_block: bool,
    ) -> Result<(nfsstat3, Encoder), NotRun> {
        self.with_call(shared, may_block, |call, arguments, reply| match self.procedure {
            Procedure::Nfs(procedure) => proc::run(procedure, call, arguments, reply),
            Procedure::Mount(procedure) => {
                Ok(mount::run(procedure, call, self.peer.mounter(), arguments, reply)?)
            }
            Procedure::Portmap(procedure) => {
                portmap::run(procedure, self.peer.port, arguments, reply)?;
                Ok(nfsstat3::NFS3_OK)
            }
        })
    }

    /// A reply with the results that `put` writes into it.
    fn with_call(
        &self,
        shared: &Shared,
        may_block: bool,
        put: impl FnOnce(&Call<'_>, &mut Decoder<'_>, &mut Encoder) -> Result<nfsstat3, NotRun>,
    ) -> Result<(nfsstat3, Encoder), NotRun> {
        let credentials = auth::squash(&self.claim, &shared.options);
        // Only NULL comes here from refused clients.
        let access = self.peer.access.unwrap_or(ClientAccess::ReadOnly);
        let caller = Caller { credentials, access };
        let scope = match self.procedure {
            Procedure::Nfs(_) => proc::peek_scope(&self.arguments()),
            Procedure::Mount(_) | Procedure::Portmap(_) => None,
        };
        let outlet = self.outlet.as_ref();
        let shown = self.peer.shown;
        let call = Call { shared, caller: &caller, may_block, outlet, scope, shown };
        let mut reply = rpc::success(self.xid);
        let status = put(&call, &mut self.arguments(), &mut reply)?;
        Ok((status, reply))
    }

    /// The reply of a call that the server failed.
    pub(crate) fn failed(&self) -> Encoder {
        let status = nfsstat3::NFS3ERR_SERVERFAULT;
        let mut reply = rpc::success(self.xid);
        match self.procedure {
            Procedure::Nfs(procedure) => proc::bare_failure(&mut reply, procedure, status),
            Procedure::Mount(_) | Procedure::Portmap(_) => reply.u32(status as u32),
        }
        reply
    }
}

#[cfg(test)]
mod tests;
