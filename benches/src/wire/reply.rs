//! Answers, read in place. A READ's payload is looked at only where it is asked for: what comes
//! before it tells all.

use super::call::DirectoryPlace;
use super::{HANDLE_BYTES_MAX, Handle, WireError, WriteVerifier};

/// Attributes of a file on the wire.
const ATTRIBUTES_BYTES: usize = 84;

/// Where the size is in them.
const SIZE_OFFSET_BYTES: usize = 20;

/// Size and times before a change, on the wire.
const BEFORE_BYTES: usize = 24;

/// NFS status of a name that is not there.
const STATUS_NO_ENTRY: u32 = 2;

/// An answer to a call that the server took.
#[derive(Clone, Copy, Debug)]
pub struct Reply<'a> {
    /// Which call it answers.
    pub xid: u32,
    body: Reader<'a>,
}

/// An answer to READ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadReply {
    /// Bytes that were read.
    pub count: u32,
    /// Where they begin in the record.
    pub payload_offset: usize,
}

/// An answer to WRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteReply {
    /// Bytes that were written.
    pub count: u32,
    /// Whether they are durable without a COMMIT.
    pub is_durable: bool,
    /// Of this life of the server.
    pub verifier: WriteVerifier,
}

/// An answer to READDIRPLUS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryPage {
    /// Entries of the page that came with attributes and a handle.
    pub whole_entries: u64,
    /// Others: the client asks for them one by one.
    pub bare_entries: u64,
    /// Where the next page begins.
    pub next: DirectoryPlace,
    /// Whether this is the last one.
    pub is_last: bool,
}

impl<'a> Reply<'a> {
    /// An answer from the beginning of its record.
    ///
    /// # Errors
    /// The server refused the call, or the record is no answer.
    pub fn parse(record: &'a [u8]) -> Result<Self, WireError> {
        let mut body = Reader { record, position: 0 };
        let xid = body.word("xid")?;
        expect("message type", body.word("message type")?, 1)?;
        expect("reply status", body.word("reply status")?, 0)?;
        body.word("verifier")?;
        let verifier_bytes = body.length("verifier")?;
        body.skip(verifier_bytes.next_multiple_of(4), "verifier")?;
        expect("accept status", body.word("accept status")?, 0)?;
        Ok(Self { xid, body })
    }

    /// Of MNT: the handle of the root.
    ///
    /// # Errors
    /// The server's, or the answer is malformed; so with all others.
    pub fn mount(mut self) -> Result<Handle, WireError> {
        self.status("MNT")?;
        self.body.handle()
    }

    /// Of GETATTR: the size in bytes.
    ///
    /// # Errors
    /// As [`Reply::mount`].
    pub fn size(mut self) -> Result<u64, WireError> {
        self.status("GETATTR")?;
        self.body.skip(SIZE_OFFSET_BYTES, "attributes")?;
        self.body.long("size")
    }

    /// Of a call whose answer holds nothing of interest: SETATTR or REMOVE.
    ///
    /// # Errors
    /// As [`Reply::mount`].
    pub fn done(mut self, procedure: &'static str) -> Result<(), WireError> {
        self.status(procedure)
    }

    /// Of LOOKUP: the handle, if there is such a name.
    ///
    /// # Errors
    /// As [`Reply::mount`].
    pub fn lookup(mut self) -> Result<Option<Handle>, WireError> {
        match self.status("LOOKUP") {
            Ok(()) => self.body.handle().map(Some),
            Err(WireError::Status { status: STATUS_NO_ENTRY, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Of READDIRPLUS.
    ///
    /// # Errors
    /// As [`Reply::mount`].
    pub fn directory_page(mut self) -> Result<DirectoryPage, WireError> {
        self.status("READDIRPLUS")?;
        let body = &mut self.body;
        body.optional(ATTRIBUTES_BYTES)?;
        let verifier = body.array("cookie verifier")?;
        let next = DirectoryPlace { cookie: 0, verifier };
        let mut page = DirectoryPage { whole_entries: 0, bare_entries: 0, next, is_last: false };
        while body.word("entry")? != 0 {
            body.long("file id")?;
            let name_bytes = body.length("name")?;
            body.skip(name_bytes.next_multiple_of(4), "name")?;
            page.next.cookie = body.long("cookie")?;
            let before = body.position;
            body.optional(ATTRIBUTES_BYTES)?;
            let has_attributes = body.position > before + 4;
            let has_handle = body.word("handle")? != 0;
            if has_handle {
                let handle_bytes = body.length("handle")?;
                body.skip(handle_bytes.next_multiple_of(4), "handle")?;
            }
            if has_attributes && has_handle {
                page.whole_entries += 1;
            } else {
                page.bare_entries += 1;
            }
        }
        page.is_last = body.word("end of the list")? != 0;
        Ok(page)
    }

    /// Of CREATE or MKDIR: the handle, if the server tells it.
    ///
    /// # Errors
    /// As [`Reply::mount`].
    pub fn create(mut self, procedure: &'static str) -> Result<Option<Handle>, WireError> {
        self.status(procedure)?;
        let is_told = self.body.word("handle")? != 0;
        if is_told { self.body.handle().map(Some) } else { Ok(None) }
    }

    /// Of READ.
    ///
    /// # Errors
    /// As [`Reply::mount`].
    pub fn read(mut self) -> Result<ReadReply, WireError> {
        self.status("READ")?;
        self.body.optional(ATTRIBUTES_BYTES)?;
        let count = self.body.word("count")?;
        self.body.word("end of file")?;
        expect("length of the data", self.body.word("length")?, count)?;
        Ok(ReadReply { count, payload_offset: self.body.position })
    }

    /// Of READ: the bytes.
    ///
    /// # Errors
    /// As [`Reply::mount`].
    pub fn read_bytes(self) -> Result<&'a [u8], WireError> {
        let record = self.body.record;
        let ReadReply { count, payload_offset } = self.read()?;
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let end = payload_offset.saturating_add(count);
        record.get(payload_offset..end).ok_or(WireError::Truncated { what: "data" })
    }

    /// Of WRITE.
    ///
    /// # Errors
    /// As [`Reply::mount`].
    pub fn write(mut self) -> Result<WriteReply, WireError> {
        self.status("WRITE")?;
        self.changed()?;
        let count = self.body.word("count")?;
        let is_durable = self.body.word("stability")? != 0;
        Ok(WriteReply { count, is_durable, verifier: self.body.verifier()? })
    }

    /// Of COMMIT.
    ///
    /// # Errors
    /// As [`Reply::mount`].
    pub fn commit(mut self) -> Result<WriteVerifier, WireError> {
        self.status("COMMIT")?;
        self.changed()?;
        self.body.verifier()
    }

    fn status(&mut self, procedure: &'static str) -> Result<(), WireError> {
        match self.body.word("status")? {
            0 => Ok(()),
            status => Err(WireError::Status { procedure, status }),
        }
    }

    /// What a file was before and is after.
    fn changed(&mut self) -> Result<(), WireError> {
        self.body.optional(BEFORE_BYTES)?;
        self.body.optional(ATTRIBUTES_BYTES)
    }
}

fn expect(what: &'static str, got: u32, expected: u32) -> Result<(), WireError> {
    if got == expected { Ok(()) } else { Err(WireError::Refused { what, got, expected }) }
}

/// A place in a record.
#[derive(Clone, Copy, Debug)]
struct Reader<'a> {
    record: &'a [u8],
    position: usize,
}

impl Reader<'_> {
    fn array<const BYTES: usize>(&mut self, what: &'static str) -> Result<[u8; BYTES], WireError> {
        let rest = self.record.get(self.position..).and_then(<[u8]>::first_chunk);
        let array = *rest.ok_or(WireError::Truncated { what })?;
        self.position += BYTES;
        Ok(array)
    }

    fn word(&mut self, what: &'static str) -> Result<u32, WireError> {
        self.array(what).map(u32::from_be_bytes)
    }

    fn long(&mut self, what: &'static str) -> Result<u64, WireError> {
        self.array(what).map(u64::from_be_bytes)
    }

    fn length(&mut self, what: &'static str) -> Result<usize, WireError> {
        // Where a length does not fit, the record is shorter than it anyway.
        Ok(usize::try_from(self.word(what)?).unwrap_or(usize::MAX >> 1))
    }

    fn skip(&mut self, bytes: usize, what: &'static str) -> Result<(), WireError> {
        let end = self.position.saturating_add(bytes);
        if end > self.record.len() {
            return Err(WireError::Truncated { what });
        }
        self.position = end;
        Ok(())
    }

    /// Skips something that is there or not.
    fn optional(&mut self, bytes: usize) -> Result<(), WireError> {
        if self.word("attributes")? == 0 { Ok(()) } else { self.skip(bytes, "attributes") }
    }

    fn handle(&mut self) -> Result<Handle, WireError> {
        let length = self.length("handle")?;
        if length > HANDLE_BYTES_MAX {
            let (got, expected) = (length as u64, HANDLE_BYTES_MAX as u64);
            return Err(WireError::Unexpected { what: "length of a handle", got, expected });
        }
        let start = self.position;
        self.skip(length.next_multiple_of(4), "handle")?;
        Ok(Handle(self.record[start..start + length].to_vec()))
    }

    fn verifier(&mut self) -> Result<WriteVerifier, WireError> {
        self.array("write verifier").map(WriteVerifier)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The head of an answer to the call 7 that was taken.
    const TAKEN: [u32; 6] = [7, 1, 0, 0, 0, 0];

    fn record(parts: &[&[u32]]) -> Vec<u8> {
        parts.concat().into_iter().flat_map(u32::to_be_bytes).collect()
    }

    fn attributes() -> Vec<u32> {
        let mut attributes = vec![0; ATTRIBUTES_BYTES / 4];
        attributes[SIZE_OFFSET_BYTES / 4 + 1] = 8192;
        attributes
    }

    #[test]
    fn a_read_is_read_with_and_without_attributes() {
        let long = record(&[&TAKEN, &[0, 1], &attributes(), &[4096, 0, 4096]]);
        let reply = Reply::parse(&long).unwrap();
        assert_eq!(reply.xid, 7);
        let expected = ReadReply { count: 4096, payload_offset: long.len() };
        assert_eq!(reply.read().unwrap(), expected);
        let short = record(&[&TAKEN, &[0, 0], &[4096, 1, 4096]]);
        assert_eq!(Reply::parse(&short).unwrap().read().unwrap().count, 4096);
        let data = record(&[&TAKEN, &[0, 0], &[6, 1, 6], &[0x6162_6364, 0x6566_0000]]);
        assert_eq!(Reply::parse(&data).unwrap().read_bytes().unwrap(), b"abcdef");
        assert!(Reply::parse(&data[..data.len() - 4]).unwrap().read_bytes().is_err());
        let wrong = record(&[&TAKEN, &[0, 0], &[4096, 1, 4000]]);
        assert!(Reply::parse(&wrong).unwrap().read().is_err());
    }

    #[test]
    fn write_and_commit_tell_the_verifier_and_whether_it_is_durable() {
        let changed = [&[1][..], &[0; 6], &[1], &attributes()].concat();
        let written = record(&[&TAKEN, &[0], &changed, &[4096, 0, 1, 2]]);
        let write = Reply::parse(&written).unwrap().write().unwrap();
        let verifier = WriteVerifier([0, 0, 0, 1, 0, 0, 0, 2]);
        assert_eq!(write, WriteReply { count: 4096, is_durable: false, verifier });
        let committed = record(&[&TAKEN, &[0, 0, 0, 1, 2]]);
        assert_eq!(Reply::parse(&committed).unwrap().commit().unwrap(), verifier);
    }

    #[test]
    fn names_give_handles_or_nothing() {
        let handle = Handle(vec![1, 2, 3, 4, 5]);
        let found = record(&[&TAKEN, &[0, 5, 0x0102_0304, 0x0500_0000, 0, 0]]);
        assert_eq!(Reply::parse(&found).unwrap().lookup().unwrap(), Some(handle.clone()));
        assert_eq!(Reply::parse(&found).unwrap().mount().unwrap(), handle);
        let missing = record(&[&TAKEN, &[2, 0]]);
        assert_eq!(Reply::parse(&missing).unwrap().lookup().unwrap(), None);
        let created = record(&[&TAKEN, &[0, 1, 5, 0x0102_0304, 0x0500_0000]]);
        assert_eq!(Reply::parse(&created).unwrap().create("CREATE").unwrap(), Some(handle));
        let untold = record(&[&TAKEN, &[0, 0]]);
        assert_eq!(Reply::parse(&untold).unwrap().create("CREATE").unwrap(), None);
        let sized = record(&[&TAKEN, &[0], &attributes()]);
        assert_eq!(Reply::parse(&sized).unwrap().size().unwrap(), 8192);
    }

    #[test]
    fn a_page_of_a_directory_tells_its_entries_and_where_the_next_begins() {
        let entry = |cookie: u32| vec![1, 0, 9, 3, 0x6162_6300, 0, cookie];
        let whole = [entry(5), vec![1], attributes(), vec![1, 4, 0x0102_0304]].concat();
        let bare = [entry(6), vec![0, 0]].concat();
        let head = [&TAKEN[..], &[0, 1], &attributes(), &[7, 8]].concat();
        let page = |entries: &[&[u32]], is_last: u32| {
            let record = record(&[&head, &entries.concat(), &[0, is_last]]);
            Reply::parse(&record).unwrap().directory_page().unwrap()
        };
        let verifier = [0, 0, 0, 7, 0, 0, 0, 8];
        let expected = DirectoryPage {
            whole_entries: 2,
            bare_entries: 1,
            next: DirectoryPlace { cookie: 6, verifier },
            is_last: false,
        };
        assert_eq!(page(&[&whole, &whole, &bare], 0), expected);
        assert!(page(&[], 1).is_last);
        let cut_off = record(&[&head, &whole]);
        assert!(Reply::parse(&cut_off).unwrap().directory_page().is_err());
    }

    #[test]
    fn errors_are_told_and_no_prefix_is_taken_for_an_answer() {
        let stale = record(&[&TAKEN, &[70, 0]]);
        let error = Reply::parse(&stale).unwrap().read().unwrap_err();
        assert_eq!(error.to_string(), "READ was answered with NFS status 70");
        let unavailable = record(&[&[7, 1, 0, 0, 0, 3]]);
        let error = Reply::parse(&unavailable).unwrap_err().to_string();
        assert!(error.contains("accept status is 3"), "{error}");
        let whole = record(&[&TAKEN, &[0, 1], &attributes(), &[4096, 0, 4096]]);
        for length in 0..whole.len() {
            let read = Reply::parse(&whole[..length]).and_then(Reply::read);
            assert!(matches!(read, Err(WireError::Truncated { .. })), "{length}: {read:?}");
        }
        let endless = record(&[&TAKEN, &[0, u32::MAX]]);
        assert!(Reply::parse(&endless).unwrap().mount().is_err());
    }
}
