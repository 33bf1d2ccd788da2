//! READDIR and READDIRPLUS (RFC 1813 sections 3.3.16 and 3.3.17).
//!
//! ```text
//! cookie | 1 | 2  | the store's, above 2, never used again in the directory
//! entry  | . | .. | names in order of their cookies
//! ```
//! Invariants: a page holds the entries above the client's cookie, so one that is there all
//! the time is seen exactly once, whatever comes and goes between the pages; cookies are good
//! for ever, so their verifier is always 0 and none is ever refused. No page is larger on the
//! wire than the client's count.

use nfsserve::nfs::nfsstat3;
use slackwater_blockstore::{Attributes, FileKind, InodeId};

use super::encode::{self, ATTRIBUTES_BYTES};
use super::{Call, Failure, NotRun, Object, Place, handle};
use crate::handle::{HANDLE_BYTES, Handle, Target};
use crate::limits;
use crate::permission::{self, Permission};
use crate::scope::MountScope;
use crate::status;
use crate::xdr::{self, Decoder, Encoder, Malformed, UNIT_BYTES};

const COOKIE_DOT: u64 = 1;
const COOKIE_DOT_DOT: u64 = 2;

/// Of the entry that a worker's view has.
const COOKIE_VIEW: u64 = 3;

/// Zero: cookies are valid for ever.
const COOKIE_VERIFIER: u64 = 0;

/// Bytes of a result before its first entry and after its last, the status left out, as
/// RFC 1813 counts them: attributes, cookie verifier; end of the list, end of the directory.
const FRAME_BYTES: usize =
    UNIT_BYTES + ATTRIBUTES_BYTES + size_of::<u64>() + UNIT_BYTES + UNIT_BYTES;

/// Bytes of an entry's file id and cookie.
const ID_BYTES: usize = 2 * size_of::<u64>();

/// Bytes of what READDIRPLUS adds to an entry.
const PLUS_BYTES: usize =
    UNIT_BYTES + ATTRIBUTES_BYTES + UNIT_BYTES + xdr::opaque_bytes(HANDLE_BYTES);

/// How much the client takes.
#[derive(Clone, Copy)]
struct Room {
    /// Bytes of all entries.
    reply_bytes: usize,
    /// Bytes of their file ids, names and cookies.
    directory_bytes: usize,
}

struct Arguments<'a> {
    handle: &'a [u8],
    cookie: u64,
    /// What the client takes of the whole result, and of names.
    count_bytes: usize,
    directory_bytes: usize,
    is_plus: bool,
}

impl<'a> Arguments<'a> {
    fn decode(arguments: &mut Decoder<'a>, is_plus: bool) -> Result<Self, Malformed> {
        let handle = handle(arguments)?;
        let cookie = arguments.u64()?;
        let _verifier = arguments.u64()?;
        let count = |word: u32| {
            usize::try_from(word).unwrap_or(usize::MAX).min(limits::DIRECTORY_BYTES_MAX)
        };
        let directory_bytes = if is_plus { count(arguments.u32()?) } else { usize::MAX };
        let count_bytes = count(arguments.u32()?);
        Ok(Self { handle, cookie, count_bytes, directory_bytes, is_plus })
    }
}

pub(super) fn read_directory(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    let arguments = Arguments::decode(arguments, false)?;
    Ok(put_page(call, &arguments, reply))
}

pub(super) fn read_directory_plus(
    call: &Call<'_>,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, NotRun> {
    let arguments = Arguments::decode(arguments, true)?;
    Ok(put_page(call, &arguments, reply))
}

fn put_page(call: &Call<'_>, arguments: &Arguments<'_>, reply: &mut Encoder) -> nfsstat3 {
    let start = reply.length();
    match try_put_page(call, arguments, reply) {
        Ok(()) => nfsstat3::NFS3_OK,
        Err(failure) => {
            // What was written of the page is taken back.
            reply.truncate(start);
            encode::status(reply, failure.status);
            call.put_after(reply, failure.attributes.as_ref());
            failure.status
        }
    }
}

fn try_put_page(
    call: &Call<'_>,
    arguments: &Arguments<'_>,
    reply: &mut Encoder,
) -> Result<(), Failure> {
    let directory = call.object(arguments.handle)?;
    let failure = |status| Failure { status, attributes: Some(directory.attributes) };
    check_readable(call, &directory.attributes).map_err(failure)?;
    let entries_bytes = arguments
        .count_bytes
        .checked_sub(FRAME_BYTES)
        .ok_or(failure(nfsstat3::NFS3ERR_TOOSMALL))?;
    encode::status(reply, nfsstat3::NFS3_OK);
    call.put_after(reply, Some(&directory.attributes));
    reply.u64(COOKIE_VERIFIER);
    let room = Room { reply_bytes: entries_bytes, directory_bytes: arguments.directory_bytes };
    let mut page = Page { call, reply, room, is_plus: arguments.is_plus, entries: 0 };
    let is_end = page.fill(&directory, arguments.cookie).map_err(failure)?;
    if page.entries == 0 && !is_end {
        return Err(failure(nfsstat3::NFS3ERR_TOOSMALL));
    }
    reply.bool(false); // no entry follows
    reply.bool(is_end);
    Ok(())
}

fn check_readable(call: &Call<'_>, directory: &Attributes) -> Result<(), nfsstat3> {
    if directory.kind != FileKind::Directory {
        return Err(nfsstat3::NFS3ERR_NOTDIR);
    }
    if !permission::allows(directory, &call.caller.credentials, Permission::Read) {
        return Err(nfsstat3::NFS3ERR_ACCES);
    }
    Ok(())
}

/// A page that is being filled.
struct Page<'a> {
    call: &'a Call<'a>,
    reply: &'a mut Encoder,
    room: Room,
    is_plus: bool,
    entries: usize,
}

/// An entry as it goes into the page.
struct Entry<'a> {
    name: &'a [u8],
    cookie: u64,
    attributes: &'a Attributes,
    handle: Handle,
}

impl Page<'_> {
    /// Adds the entries above `cookie` as far as there is room. Answers whether those were
    /// the last.
    fn fill(&mut self, directory: &Object, cookie: u64) -> Result<bool, nfsstat3> {
        if cookie < COOKIE_DOT && !self.add_object(b".", COOKIE_DOT, directory) {
            return Ok(false);
        }
        if cookie < COOKIE_DOT_DOT {
            let parent = parent(self.call, directory)?;
            if !self.add_object(b"..", COOKIE_DOT_DOT, &parent) {
                return Ok(false);
            }
        }
        match directory.target {
            Target::Inode { inode, .. } => self.fill_from_store(inode, cookie),
            // Its files are reached by name only.
            Target::SnapshotDirectory | Target::Snapshot(_) => Ok(true),
            Target::WorkerRoot | Target::WorkersDirectory => self.fill_from_view(directory, cookie),
        }
    }

    fn fill_from_view(&mut self, directory: &Object, cookie: u64) -> Result<bool, nfsstat3> {
        match self.call.view_entry(directory)? {
            Some((name, found)) if cookie < COOKIE_VIEW => {
                Ok(self.add_object(&name, COOKIE_VIEW, &found))
            }
            _ => Ok(true),
        }
    }

    fn fill_from_store(&mut self, directory: InodeId, cookie: u64) -> Result<bool, nfsstat3> {
        let mut after = if cookie <= COOKIE_DOT_DOT { 0 } else { cookie };
        loop {
            let store = &self.call.shared.store;
            let page = store
                .read_directory(directory, after, limits::DIRECTORY_ENTRIES_STEP)
                .map_err(|error| status::of_error(&error))?;
            for entry in &page.entries {
                let is_added = self.add(&Entry {
                    name: entry.name.as_bytes(),
                    cookie: entry.cookie,
                    attributes: &entry.attributes,
                    handle: self.handle(&entry.attributes),
                });
                if !is_added {
                    return Ok(false);
                }
                after = entry.cookie;
            }
            if page.end || page.entries.is_empty() {
                return Ok(true);
            }
        }
    }

    fn handle(&self, attributes: &Attributes) -> Handle {
        // READDIR has no use for it, and it costs a hash.
        if self.is_plus { self.call.inode_handle(attributes) } else { [0; HANDLE_BYTES] }
    }

    fn add_object(&mut self, name: &[u8], cookie: u64, object: &Object) -> bool {
        let handle = self.call.handle_of(object.target);
        self.add(&Entry { name, cookie, attributes: &object.attributes, handle })
    }

    /// Adds the entry if there is room for it.
    fn add(&mut self, entry: &Entry<'_>) -> bool {
        let directory_bytes = ID_BYTES + xdr::opaque_bytes(entry.name.len());
        let plus_bytes = if self.is_plus { PLUS_BYTES } else { 0 };
        let follows_bytes = UNIT_BYTES;
        let Some(reply_left) =
            self.room.reply_bytes.checked_sub(follows_bytes + directory_bytes + plus_bytes)
        else {
            return false;
        };
        // A first entry that fits the reply is given even past the bound on names: that is a
        // hint on how much to fetch, and an empty page would stop the client for good.
        let directory_left = self.room.directory_bytes.checked_sub(directory_bytes);
        if directory_left.is_none() && self.entries > 0 {
            return false;
        }
        self.room = Room { reply_bytes: reply_left, directory_bytes: directory_left.unwrap_or(0) };
        self.put(entry);
        self.entries += 1;
        true
    }

    fn put(&mut self, entry: &Entry<'_>) {
        self.reply.bool(true);
        self.reply.u64(entry.attributes.inode.get());
        self.reply.opaque(entry.name);
        self.reply.u64(entry.cookie);
        if self.is_plus {
            self.call.put_after(self.reply, Some(entry.attributes));
            encode::some_handle(self.reply, &entry.handle);
        }
    }
}

/// The parent as it is listed. What leads out of a worker's files is listed as the directory itself: the way up ends there.
fn parent(call: &Call<'_>, directory: &Object) -> Result<Object, nfsstat3> {
    let is_of_worker = matches!(call.scope, Some(MountScope::Worker(_)));
    match call.step(directory, &Place { directory: &[], name: b".." }) {
        Err(nfsstat3::NFS3ERR_ACCES | nfsstat3::NFS3ERR_NOENT) if is_of_worker => Ok(*directory),
        other => other,
    }
}
