//! The kinds of objects in the namespace.

use std::fmt;

/// The kind of an inode (RFC 1813 section 2.5 `ftype3`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// A sparse file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A device, a socket or a named pipe.
    Special(SpecialFile),
}

impl fmt::Display for FileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File => f.write_str("file"),
            Self::Directory => f.write_str("directory"),
            Self::Symlink => f.write_str("symbolic link"),
            Self::Special(special) => special.fmt(f),
        }
    }
}

/// Which device a file stands for (RFC 1813 section 2.5 `specdata3`). Linux has 12 bits of major and 20 of
/// minor numbers; all bits are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceNumber {
    /// The driver, as clients number them.
    pub major: u32,
    /// Which of the driver's devices.
    pub minor: u32,
}

/// What a special file is (RFC 1813 section 3.3.11).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SpecialFile {
    /// A block device.
    BlockDevice(DeviceNumber),
    /// A character device.
    CharacterDevice(DeviceNumber),
    /// A socket.
    Socket,
    /// A named pipe.
    Fifo,
}

impl fmt::Display for SpecialFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BlockDevice(DeviceNumber { major, minor }) => {
                write!(f, "block device {major}:{minor}")
            }
            Self::CharacterDevice(DeviceNumber { major, minor }) => {
                write!(f, "character device {major}:{minor}")
            }
            Self::Socket => f.write_str("socket"),
            Self::Fifo => f.write_str("named pipe"),
        }
    }
}
