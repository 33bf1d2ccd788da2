//! What a fuzzer drives, from bytes of its choice: record marking, and calls of every program
//! against a live store in memory. Only tests and fuzz targets call it; no program does.
//!
//! ```text
//! bytes -> Choices -> calls (handles that were answered, odd names, extreme numbers) -> plan -> reply
//! ```
//! Each function panics where the front end breaks a promise; a test and a fuzz target find the
//! same faults from the same bytes.

mod worker;

pub use worker::worker_calls;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use slackwater_blockstore::disk::MemoryDisk;
use slackwater_blockstore::kv::MemoryKv;
use slackwater_blockstore::{FILE_BYTES_MAX, Options, Store};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::runtime::Runtime;

use crate::budget::Budget;
use crate::client_certificate::Shown;
use crate::dispatch::{self, Finished, Peer, Plan};
use crate::handle::{HANDLE_BYTES, HandleCodec, claimed_scope};
use crate::limits::{self, Patience};
use crate::metrics::NfsMetrics;
use crate::options::{ClientAccess, NfsOptions, Squash};
use crate::portmap::{MOUNT, NFS, PORTMAP, Program};
use crate::record::{RecordReader, Source};
use crate::scope::MountGate;
use crate::server::Shared;
use crate::xdr::LAST_FRAGMENT;

/// Calls of one session: enough to make a file, fill it, and do away with it.
const CALLS_MAX: usize = 48;

/// Handles that a session remembers.
const HANDLES_MAX: usize = 12;

/// What a reply may hold beyond its call's charge: headers, and attributes of two objects.
const REPLY_BYTES_SPARE: usize = 1024;

/// Names that mean something, or nearly so. Short ones first: they are to meet.
const NAMES: [&[u8]; 14] = [
    b"a",
    b"b",
    b"c",
    b".",
    b"..",
    b".snapshot",
    b"",
    b"a/b",
    b"\0",
    b"a\0",
    b"\xff\xfe",
    &[b'n'; 255],
    &[b'n'; 256],
    &[b'/'; 4096],
];

/// Paths that are mounted.
const MOUNTS: [&[u8]; 5] =
    [b"/slackwater", b"/slackwater/a/../b", b"", &[b'/'; 1025], b"/slackwater/.snapshot"];

/// The names and paths of a session.
#[derive(Clone, Copy)]
struct Words {
    names: &'static [&'static [u8]],
    mounts: &'static [&'static [u8]],
}

/// Bytes taken one after the other; zeros when there are no more.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((&first, rest)) => {
                self.0 = rest;
                first
            }
            None => 0,
        }
    }

    fn index(&mut self, below: usize) -> usize {
        usize::from(self.byte()) % below.max(1)
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.byte()).collect()
    }

    fn number(&mut self) -> u64 {
        let numbers = [
            0,
            1,
            4095,
            4096,
            4097,
            1 << 20,
            1 << 31,
            u64::from(u32::MAX),
            1 << 32,
            FILE_BYTES_MAX - 1,
            FILE_BYTES_MAX,
            FILE_BYTES_MAX + 1,
            1 << 62,
            (1 << 63) - 1,
            1 << 63,
            u64::MAX - 4095,
            u64::MAX,
        ];
        match numbers.get(usize::from(self.byte() % 20)) {
            Some(number) => *number,
            None => self.bytes(8).into_iter().fold(0, |sum, byte| sum << 8 | u64::from(byte)),
        }
    }

    fn word(&mut self) -> u32 {
        let [.., a, b, c, d] = self.number().to_be_bytes();
        u32::from_be_bytes([a, b, c, d])
    }
}

/// What the arguments of a procedure are made of.
#[derive(Clone, Copy)]
enum Field {
    Handle,
    Name,
    Number,
    Word,
    /// 0 to 3: an enumeration or a boolean.
    Small,
    Attributes,
    Data,
    /// A type and what MKNOD wants of such a file.
    Special,
}

/// The arguments of the NFS procedures, in order of their numbers.
const ARGUMENTS: [&[Field]; 22] = {
    use Field::{Attributes, Data, Handle, Name, Number, Small, Special, Word};
    [
        &[],
        &[Handle],
        &[Handle, Attributes, Small, Word, Word],
        &[Handle, Name],
        &[Handle, Word],
        &[Handle],
        &[Handle, Number, Word],
        &[Handle, Number, Data],
        &[Handle, Name, Small, Attributes],
        &[Handle, Name, Attributes],
        &[Handle, Name, Attributes, Name],
        &[Handle, Name, Special],
        &[Handle, Name],
        &[Handle, Name],
        &[Handle, Name, Handle, Name],
        &[Handle, Handle, Name],
        &[Handle, Number, Number, Word],
        &[Handle, Number, Number, Word, Word],
        &[Handle],
        &[Handle],
        &[Handle],
        &[Handle, Number, Word],
    ]
};

/// A call under construction.
#[derive(Default)]
struct CallBytes(Vec<u8>);

impl CallBytes {
    fn word(&mut self, word: u32) {
        self.0.extend_from_slice(&word.to_be_bytes());
    }

    fn opaque(&mut self, bytes: &[u8]) {
        self.word(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        self.0.extend_from_slice(bytes);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn field(
        &mut self,
        field: Field,
        choices: &mut Choices<'_>,
        handles: &[Vec<u8>],
        words: Words,
    ) {
        match field {
            Field::Handle => self.opaque(&handle(choices, handles)),
            Field::Name => match words.names.get(usize::from(choices.byte() % 16)) {
                Some(name) => self.opaque(name),
                None => {
                    let length = usize::from(choices.byte());
                    self.opaque(&choices.bytes(length));
                }
            },
            Field::Number => self.0.extend_from_slice(&choices.number().to_be_bytes()),
            Field::Word => self.word(choices.word()),
            Field::Small => self.word(u32::from(choices.byte() % 4)),
            Field::Attributes => self.attributes(choices),
            Field::Data => self.data(choices),
            Field::Special => {
                let kind = u32::from(choices.byte() % 9);
                self.word(kind);
                self.attributes(choices);
                // Devices have numbers.
                if matches!(kind, 3 | 4) {
                    self.word(choices.word());
                    self.word(choices.word());
                }
            }
        }
    }

    fn attributes(&mut self, choices: &mut Choices<'_>) {
        for is_size in [false, false, false, true] {
            let is_set = choices.byte().is_multiple_of(3);
            self.word(u32::from(is_set));
            match (is_set, is_size) {
                (true, true) => self.0.extend_from_slice(&choices.number().to_be_bytes()),
                (true, false) => self.word(choices.word()),
                (false, _) => {}
            }
        }
        for _ in 0..2 {
            let how = u32::from(choices.byte() % 4);
            self.word(how);
            if how == 2 {
                self.word(choices.word());
                self.word(choices.word());
            }
        }
    }

    /// Count, stability and data of a WRITE.
    fn data(&mut self, choices: &mut Choices<'_>) {
        const LENGTHS: [usize; 6] = [0, 1, 4096, 5000, 65_536, limits::TRANSFER_BYTES_MAX];
        let length = LENGTHS.get(choices.index(LENGTHS.len())).copied().unwrap_or_default();
        let count = u32::try_from(length).unwrap_or(u32::MAX);
        self.word(if choices.byte() == u8::MAX { choices.word() } else { count });
        self.word(u32::from(choices.byte() % 4));
        let fill = choices.byte();
        // Blocks of zeros, of one byte, and of which none is like another.
        let block = |at: usize| {
            let number = u8::try_from(at / 4096 % 251).unwrap_or_default();
            fill.wrapping_mul(number).wrapping_add(fill)
        };
        self.opaque(&(0..length).map(block).collect::<Vec<u8>>());
    }
}

fn handle(choices: &mut Choices<'_>, handles: &[Vec<u8>]) -> Vec<u8> {
    let choice = choices.byte();
    let index = usize::from(choice) % handles.len().max(1);
    let mut handle = handles.get(index).cloned().unwrap_or_default();
    match choice {
        // Forged: one bit is another.
        0xf0..=0xf7 => {
            let at = choices.index(handle.len());
            if let Some(byte) = handle.get_mut(at) {
                *byte ^= 1 << (choice & 7);
            }
        }
        0xf8..=0xfb => handle.truncate(choices.index(HANDLE_BYTES)),
        0xfc..=0xff => handle.extend(choices.bytes(usize::from(choice & 3) * 8)),
        _ => {}
    }
    handle
}

/// The bytes of a whole call.
fn call(xid: u32, choices: &mut Choices<'_>, handles: &[Vec<u8>], words: Words) -> Vec<u8> {
    let mut call = CallBytes::default();
    let choice = choices.byte();
    let (program, procedure, fields): (Program, u32, &[Field]) = match choice {
        0..=219 => {
            let procedure = u32::from(choice % 22);
            (NFS, procedure, ARGUMENTS.get(usize::from(choice % 22)).copied().unwrap_or_default())
        }
        220..=235 => (MOUNT, u32::from(choice % 8), &[]),
        236..=245 => (PORTMAP, u32::from(choice % 8), &[Field::Word; 4]),
        _ => (NFS, choices.word(), &[Field::Handle, Field::Name, Field::Number]),
    };
    let (rpc_version, version) = if choice == u8::MAX { (3, 2) } else { (2, program.version) };
    for word in [xid, 0, rpc_version, program.number, version, procedure] {
        call.word(word);
    }
    credential(&mut call, choices);
    for field in fields {
        call.field(*field, choices, handles, words);
    }
    if program == MOUNT {
        let paths = words.mounts;
        call.opaque(paths.get(choices.index(paths.len())).copied().unwrap_or_default());
    }
    // Some calls end early, or have bytes changed.
    match choices.byte() {
        250..=252 => call.0.truncate(choices.index(256)),
        253..=255 => {
            let at = choices.index(call.0.len());
            let other = choices.byte();
            if let Some(byte) = call.0.get_mut(at) {
                *byte ^= other;
            }
        }
        _ => {}
    }
    call.0
}

fn credential(call: &mut CallBytes, choices: &mut Choices<'_>) {
    let choice = choices.byte();
    if choice >= 250 {
        // Of another flavor, or with a body of any bytes.
        call.word(u32::from(choice % 7));
        let length = choices.index(200);
        let body = choices.bytes(length * 4);
        call.opaque(&body);
    } else {
        let mut body = CallBytes::default();
        body.word(0);
        body.opaque(b"fuzz");
        let user = u32::from(choice % 3) * 1000;
        for word in [user, user, 1, 1000] {
            body.word(word);
        }
        call.word(1);
        call.opaque(&body.0);
    }
    call.word(0);
    call.word(0);
}

/// A server's shared state without its sockets.
struct Service {
    shared: Arc<Shared>,
    metrics: Arc<NfsMetrics>,
    // The lanes of the shared state hold on to it.
    _runtime: Runtime,
}

impl Service {
    fn new(gate: Option<Arc<dyn MountGate>>) -> Self {
        let runtime = match tokio::runtime::Builder::new_current_thread().build() {
            Ok(runtime) => runtime,
            Err(error) => panic!("a runtime for calls: {error}"),
        };
        let mut options = Options::new("unused");
        options.memory_bytes = Options::MEMORY_BYTES_MIN;
        options.hash_threads = 1;
        let (kv, disk) = (Arc::new(MemoryKv::new()), Arc::new(MemoryDisk::new()));
        let store = match Store::open_with(kv, disk, options) {
            Ok(store) => store,
            Err(error) => panic!("a new store in memory: {error}"),
        };
        let metrics = Arc::new(NfsMetrics::new());
        let squash = Squash::NoRootSquash;
        let options = NfsOptions { squash, gate, ..NfsOptions::default() };
        let shared = {
            let _guard = runtime.enter();
            Shared::new(store, options, Arc::clone(&metrics), Patience::default())
        };
        Self { shared: Arc::new(shared), metrics, _runtime: runtime }
    }

    /// The reply to a record, as its reader and its lane would make it.
    fn answer(&self, frame: Bytes) -> Option<Vec<u8>> {
        let access = Some(ClientAccess::ReadWrite);
        let peer = Peer {
            address: std::net::IpAddr::from([127, 0, 0, 1]),
            has_privileged_port: false,
            access,
            port: crate::portmap::Port::Nfs(2049),
            shown: Shown::NotAsked,
        };
        let finished = match dispatch::plan(&frame, peer, Instant::now()) {
            Plan::Close(_) => return None,
            Plan::Answer(reply) | Plan::AskForCertificate(reply) => Finished::from(reply),
            Plan::Run(mut request) => {
                let charged = request.charged_bytes().max(limits::CALL_BYTES_MIN);
                if let dispatch::Resent::Replay(head) = request.check_resent(&self.shared) {
                    return Some(head.to_vec());
                }
                let finished = match request.lane() {
                    crate::procedure::Lane::Namespace | crate::procedure::Lane::Read => {
                        request.execute(&self.shared)
                    }
                    _ => match request.execute_inline(&self.shared) {
                        Ok(finished) => finished,
                        Err(request) => request.execute(&self.shared),
                    },
                };
                let pieces: usize = finished.pieces.iter().map(Bytes::len).sum();
                let length = finished.head.len() + pieces;
                assert!(
                    length <= charged + REPLY_BYTES_SPARE,
                    "a reply of {length} bytes to a call that was charged {charged}"
                );
                finished
            }
        };
        Some([&finished.head[..], &finished.pieces.concat()].concat())
    }

    /// The handles in a reply.
    fn learn(&self, reply: &[u8], handles: &mut Vec<Vec<u8>>) {
        let codec: &HandleCodec = &self.shared.handles;
        for at in (0..reply.len()).step_by(4) {
            let Some(bytes) = reply.get(at..at + HANDLE_BYTES) else { return };
            let is_new = !handles.iter().any(|known| known == bytes);
            let scope = handles.first().and_then(|first| claimed_scope(first));
            // A call whose bytes were changed may have mounted the export itself.
            let is_good = codec.decode(bytes).is_ok_and(|decoded| decoded.scope == scope);
            if is_new && handles.len() < HANDLES_MAX && is_good {
                handles.push(bytes.to_vec());
            }
        }
    }

    /// Sends calls made of `bytes`, on these handles and those that are answered. `look` sees each reply.
    fn session(
        &self,
        bytes: &[u8],
        mut handles: Vec<Vec<u8>>,
        words: Words,
        mut look: impl FnMut(&[u8]),
    ) {
        let mut choices = Choices(bytes);
        for xid in 0..u32::try_from(CALLS_MAX).unwrap_or(u32::MAX) {
            if choices.is_empty() {
                break;
            }
            let frame = Bytes::from(call(xid, &mut choices, &handles, words));
            let Some(reply) = self.answer(frame.clone()) else { continue };
            check_reply(&reply, &frame);
            look(&reply);
            self.learn(&reply, &mut handles);
        }
        assert_eq!(self.metrics.snapshot().panics, 0, "a call panicked");
    }

    /// Checks and closes the store.
    fn end(self) {
        match self.shared.store.check(true) {
            Ok(report) => assert!(report.problems.is_empty(), "{:?}", report.problems),
            Err(error) => panic!("the check of the store: {error}"),
        }
        if let Err(error) = self.shared.store.close() {
            panic!("the store's end: {error}");
        }
    }
}

/// What every reply begins with: its mark, the call's transaction id, that it is a reply.
fn check_reply(reply: &[u8], frame: &[u8]) {
    let word = |at: usize| reply.get(at..at + 4);
    let length = u32::try_from(reply.len() - 4).unwrap_or(u32::MAX);
    assert_eq!(word(0), Some(&(length | LAST_FRAGMENT).to_be_bytes()[..]), "the record mark");
    assert_eq!(reply.len() % 4, 0, "a reply is whole words");
    assert_eq!(word(4), frame.get(..4), "the transaction id");
    assert_eq!(word(8), Some(&[0, 0, 0, 1][..]), "the message type");
}

/// A session of calls. Whatever they are, no call panics, each is answered or the connection
/// closed, no reply is larger than what was charged, and the store stays sound.
///
/// # Panics
/// Where one of these does not hold.
pub fn calls(bytes: &[u8]) {
    let service = Service::new(None);
    let root = match service.shared.store.attributes(slackwater_blockstore::InodeId::ROOT) {
        Ok(root) => root,
        Err(error) => panic!("the root: {error}"),
    };
    let target = crate::handle::Target::Inode { inode: root.inode, generation: root.generation };
    let handles = vec![service.shared.handles.encode(target, None).to_vec()];
    service.session(bytes, handles, Words { names: &NAMES, mounts: &MOUNTS }, |_| {});
    service.end();
}

/// A stream that gives as many bytes at a time as was chosen.
struct Pieces<'a> {
    stream: &'a [u8],
    lengths: &'a [u8],
    at: usize,
}

impl AsyncRead for Pieces<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let length = self.lengths.get(self.at % self.lengths.len().max(1)).copied().unwrap_or(255);
        self.at += 1;
        let length = (usize::from(length) + 1).min(buffer.remaining()).min(self.stream.len());
        let (now, later) = self.stream.split_at(length);
        buffer.put_slice(now);
        self.stream = later;
        Poll::Ready(Ok(()))
    }
}

impl Source for Pieces<'_> {
    /// Nobody waits for a budget here.
    fn is_gone(&self) -> bool {
        false
    }
}

/// The records of a stream by the definition (RFC 5531 section 11), up to the first fault.
fn records_by_definition(mut stream: &[u8], bytes_max: usize) -> Vec<Vec<u8>> {
    let mut records = Vec::new();
    let (mut record, mut fragments) = (Vec::new(), 0);
    while let Some((mark, rest)) = stream.split_first_chunk::<4>() {
        let mark = u32::from_be_bytes(*mark);
        let length = usize::try_from(mark & !LAST_FRAGMENT).unwrap_or(usize::MAX);
        fragments += 1;
        let is_fault = fragments > limits::FRAGMENTS_MAX || record.len() + length > bytes_max;
        let Some((fragment, rest)) = rest.split_at_checked(length).filter(|_| !is_fault) else {
            break;
        };
        record.extend_from_slice(fragment);
        stream = rest;
        if mark & LAST_FRAGMENT != 0 {
            if record.is_empty() {
                break;
            }
            records.push(std::mem::take(&mut record));
            fragments = 0;
        }
    }
    records
}

/// A stream of any bytes, in pieces of any lengths: its records come out as RFC 5531 defines
/// them, whatever the pieces.
///
/// # Panics
/// Where they do not.
pub fn records(bytes: &[u8]) {
    let count = bytes.first().map_or(0, |count| usize::from(*count % 16) + 1);
    let (lengths, stream) = bytes.split_at(count.min(bytes.len()));
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_time().build() else {
        panic!("no runtime for records");
    };
    let budget = Budget::new(limits::IN_FLIGHT_BYTES_DEFAULT, Arc::new(NfsMetrics::new()));
    let mut read = Vec::new();
    runtime.block_on(async {
        let budget = budget.connection();
        let source = Pieces { stream, lengths, at: 0 };
        let patience = Patience::default().record;
        let mut reader =
            RecordReader::new(source, BytesMut::new(), limits::FRAME_BYTES_MAX, patience);
        loop {
            while let Some(record) = reader.buffered() {
                read.push(record.bytes.to_vec());
            }
            match reader.next(&budget).await {
                Ok(Some(record)) => read.push(record.bytes.to_vec()),
                Ok(None) | Err(_) => break,
            }
        }
    });
    assert_eq!(read, records_by_definition(stream, limits::FRAME_BYTES_MAX));
}
