//! Special files: devices, sockets and named pipes (RFC 1813 section 3.3.11).
//!
//! ```text
//! MKNOD -> an inode of kind 4 to 7: attributes, a device's numbers, no layer
//! ```
//! The store keeps names and attributes. What is read from such a file and written to it, the kernel that
//! mounted the export decides: no byte of it comes here, and nothing on the appliance opens one.

use crate::codec::{Decoder, Encoder};
use crate::error::{Error, Result};
use crate::id::InodeId;
use crate::kind::{DeviceNumber, SpecialFile};
use crate::name::Name;
use crate::namespace;
use crate::record::Body;
use crate::store::Store;
use crate::types::{Created, SetAttributes};

/// The kinds of special files in inode records; those before them are in `record.rs`.
const BLOCK_DEVICE: u8 = 4;
const CHARACTER_DEVICE: u8 = 5;
const SOCKET: u8 = 6;
const FIFO: u8 = 7;

impl SpecialFile {
    pub(crate) fn encode(self, encoder: &mut Encoder) {
        match self {
            Self::BlockDevice(device) => {
                encoder.u8(BLOCK_DEVICE).u32(device.major).u32(device.minor);
            }
            Self::CharacterDevice(device) => {
                encoder.u8(CHARACTER_DEVICE).u32(device.major).u32(device.minor);
            }
            Self::Socket => {
                encoder.u8(SOCKET);
            }
            Self::Fifo => {
                encoder.u8(FIFO);
            }
        }
    }

    pub(crate) fn decode(what: &'static str, d: &mut Decoder<'_>) -> Result<Self> {
        match d.u8()? {
            BLOCK_DEVICE => device(d).map(Self::BlockDevice),
            CHARACTER_DEVICE => device(d).map(Self::CharacterDevice),
            SOCKET => Ok(Self::Socket),
            FIFO => Ok(Self::Fifo),
            got @ 1..BLOCK_DEVICE => {
                Err(Error::corrupt(what, format!("version 2, expected 1 for kind {got}")))
            }
            got => Err(Error::corrupt(what, format!("kind {got} of version 2, expected 4 to 7"))),
        }
    }
}

fn device(d: &mut Decoder<'_>) -> Result<DeviceNumber> {
    Ok(DeviceNumber { major: d.u32()?, minor: d.u32()? })
}

impl Store {
    /// MKNOD. Who may make devices is the caller's to decide.
    ///
    /// # Errors
    /// As [`Store::create`].
    pub fn make_special_file(
        &self,
        directory: InodeId,
        name: &Name,
        special: SpecialFile,
        set: &SetAttributes,
    ) -> Result<Created> {
        namespace::make_leaf(&self.core, (directory, name), set, Body::Special(special))
    }
}
