//! Encoding of arguments and decoding of results, written apart from the server's own so that
//! a mistake in one does not hide the same mistake in the other.

/// Status codes of RFC 1813 section 2.6.
pub mod status {
    pub const OK: u32 = 0;
    pub const PERM: u32 = 1;
    pub const NOENT: u32 = 2;
    pub const IO: u32 = 5;
    pub const ACCES: u32 = 13;
    pub const EXIST: u32 = 17;
    pub const NOTDIR: u32 = 20;
    pub const ISDIR: u32 = 21;
    pub const INVAL: u32 = 22;
    pub const FBIG: u32 = 27;
    pub const NOSPC: u32 = 28;
    pub const ROFS: u32 = 30;
    pub const NAMETOOLONG: u32 = 63;
    pub const NOTEMPTY: u32 = 66;
    pub const STALE: u32 = 70;
    pub const BADHANDLE: u32 = 10001;
    pub const NOT_SYNC: u32 = 10002;
    pub const NOTSUPP: u32 = 10004;
    pub const TOOSMALL: u32 = 10005;
    pub const SERVERFAULT: u32 = 10006;
    pub const BADTYPE: u32 = 10007;
}

/// Arguments under construction.
#[derive(Clone, Debug, Default)]
pub struct Args(pub Vec<u8>);

impl Args {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn u32(mut self, value: u32) -> Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub fn u64(mut self, value: u64) -> Self {
        self.0.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub fn opaque(self, bytes: &[u8]) -> Self {
        let mut args = self.u32(u32::try_from(bytes.len()).unwrap());
        args.0.extend_from_slice(bytes);
        args.0.resize(args.0.len().next_multiple_of(4), 0);
        args
    }

    /// A directory and a name in it.
    pub fn place(self, directory: &[u8], name: &[u8]) -> Self {
        self.opaque(directory).opaque(name)
    }

    pub fn set(self, set: &SetAttr) -> Self {
        let optional = |args: Self, value: Option<u32>| match value {
            Some(value) => args.u32(1).u32(value),
            None => args.u32(0),
        };
        let mut args = [set.mode, set.uid, set.gid].into_iter().fold(self, optional);
        args = match set.size {
            Some(size) => args.u32(1).u64(size),
            None => args.u32(0),
        };
        for time in [set.atime, set.mtime] {
            args = match time {
                None => args.u32(0),
                Some(Time::Now) => args.u32(1),
                Some(Time::To(seconds, nanos)) => args.u32(2).u32(seconds).u32(nanos),
            };
        }
        args
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Time {
    Now,
    To(u32, u32),
}

/// `sattr3`.
#[derive(Clone, Copy, Debug, Default)]
pub struct SetAttr {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<Time>,
    pub mtime: Option<Time>,
}

impl SetAttr {
    pub fn mode(mode: u32) -> Self {
        Self { mode: Some(mode), ..Self::default() }
    }

    pub fn size(size: u64) -> Self {
        Self { size: Some(size), ..Self::default() }
    }
}

/// `fattr3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fattr {
    pub kind: u32,
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub used: u64,
    pub rdev: u64,
    pub fsid: u64,
    pub fileid: u64,
    pub atime: (u32, u32),
    pub mtime: (u32, u32),
    pub ctime: (u32, u32),
}

/// `wcc_attr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WccAttr {
    pub size: u64,
    pub mtime: (u32, u32),
    pub ctime: (u32, u32),
}

/// `wcc_data`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wcc {
    pub before: Option<WccAttr>,
    pub after: Option<Fattr>,
}

/// Results that are being read. A panic on any of them is a test that failed.
#[derive(Clone, Debug)]
pub struct Body {
    bytes: Vec<u8>,
    at: usize,
}

impl Body {
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, at: 0 }
    }

    fn take(&mut self, length: usize) -> &[u8] {
        let start = self.at;
        self.at += length;
        &self.bytes[start..self.at]
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take(4).try_into().unwrap())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take(8).try_into().unwrap())
    }

    pub fn bool(&mut self) -> bool {
        match self.u32() {
            0 => false,
            1 => true,
            other => panic!("{other} is no boolean"),
        }
    }

    pub fn opaque(&mut self) -> Vec<u8> {
        let length = usize::try_from(self.u32()).unwrap();
        let bytes = self.take(length).to_vec();
        let padding = self.take(length.next_multiple_of(4) - length);
        assert!(padding.iter().all(|&byte| byte == 0), "padding is zeros");
        bytes
    }

    fn time(&mut self) -> (u32, u32) {
        let time = (self.u32(), self.u32());
        assert!(time.1 < 1_000_000_000);
        time
    }

    pub fn fattr(&mut self) -> Fattr {
        Fattr {
            kind: self.u32(),
            mode: self.u32(),
            nlink: self.u32(),
            uid: self.u32(),
            gid: self.u32(),
            size: self.u64(),
            used: self.u64(),
            rdev: self.u64(),
            fsid: self.u64(),
            fileid: self.u64(),
            atime: self.time(),
            mtime: self.time(),
            ctime: self.time(),
        }
    }

    pub fn post_op(&mut self) -> Option<Fattr> {
        self.bool().then(|| self.fattr())
    }

    pub fn post_op_handle(&mut self) -> Option<Vec<u8>> {
        self.bool().then(|| self.opaque())
    }

    pub fn wcc(&mut self) -> Wcc {
        let before = self.bool().then(|| WccAttr {
            size: self.u64(),
            mtime: self.time(),
            ctime: self.time(),
        });
        Wcc { before, after: self.post_op() }
    }

    /// Bytes not read yet.
    pub fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Checks that nothing is left.
    pub fn end(&self) {
        assert_eq!(self.left(), 0, "bytes after the results");
    }
}
