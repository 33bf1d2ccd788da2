//! The descriptor of `/dev/fuse`: one request a read, one reply a write.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;

use bytes::Bytes;
use rustix::buffer::spare_capacity;
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::wire::{REQUEST_BYTES_MAX, notification, reply_header};

/// Requests below this length are copied, so that the large buffer serves again; a larger one
/// goes on with the buffer. Writes are kept: a buffer may hold little more memory than is counted.
const HANDED_OVER_BYTES_MIN: usize = REQUEST_BYTES_MAX / 4 * 3;

/// The request in the buffer.
fn take_request(buffer: &mut Vec<u8>) -> Bytes {
    if buffer.len() < HANDED_OVER_BYTES_MIN {
        return Bytes::copy_from_slice(buffer);
    }
    Bytes::from(std::mem::take(buffer))
}

/// The kernel's end of the mount.
#[derive(Debug)]
pub(crate) struct Device {
    descriptor: AsyncFd<OwnedFd>,
}

impl Device {
    /// Must be called within a runtime. Makes the descriptor non-blocking, for all who share it.
    #[expect(
        deprecated,
        reason = "the function that replaces it is unsafe, for types whose descriptor may change; \
                  that of an OwnedFd stays open and the same"
    )]
    pub(crate) fn new(descriptor: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&descriptor, true)?;
        // An unmounted file system shows as an error alone.
        let interest = Interest::READABLE | Interest::ERROR;
        Ok(Self { descriptor: AsyncFd::with_interest(descriptor, interest)? })
    }

    /// The next request; `None` once the file system is unmounted. `buffer` is kept by the
    /// caller from one call to the next.
    pub(crate) async fn receive(&self, buffer: &mut Vec<u8>) -> io::Result<Option<Bytes>> {
        loop {
            make_ready(buffer);
            let mut ready = self.descriptor.ready(Interest::READABLE | Interest::ERROR).await?;
            let outcome = ready.try_io(|descriptor| {
                let read = rustix::io::read(descriptor, spare_capacity(buffer));
                read.map_err(io::Error::from)
            });
            match outcome.map(|read| read.map_err(|error| Errno::from_io_error(&error))) {
                Err(_would_block) => {}
                Ok(Ok(_)) => return Ok(Some(take_request(buffer))),
                Ok(Err(Some(Errno::NODEV))) => return Ok(None),
                // The request was taken back by who made it.
                Ok(Err(Some(Errno::NOENT | Errno::INTR))) => {}
                Ok(Err(errno)) => return Err(errno.unwrap_or(Errno::IO).into()),
            }
        }
    }

    /// Answers a request.
    pub(crate) fn reply(&self, unique: u64, outcome: Result<&[Bytes], Errno>) {
        let body_bytes = |pieces: &[Bytes]| pieces.iter().map(Bytes::len).sum();
        let header = reply_header(unique, outcome.map(body_bytes));
        let pieces = outcome.unwrap_or_default();
        let mut parts = Vec::with_capacity(pieces.len() + 1);
        parts.push(IoSlice::new(&header));
        parts.extend(pieces.iter().map(|piece| IoSlice::new(piece)));
        match rustix::io::writev(self.descriptor.get_ref(), &parts) {
            // Who asked has gone, or the mount has.
            Ok(_) | Err(Errno::NOENT | Errno::NODEV) => {}
            Err(errno) => {
                tracing::error!(%errno, unique, "the kernel refuses a reply");
            }
        }
    }

    /// Tells the kernel something.
    pub(crate) fn notify(&self, code: i32) -> Result<(), Errno> {
        rustix::io::write(self.descriptor.get_ref(), &notification(code)).map(|_| ())
    }
}

/// Empties the buffer, and sees that all of it is in memory. If this process is killed while the kernel copies a request to
/// where no memory is yet, the request fails (EIO), and is not handed out again: a disk would have lost a write. It begins
/// without capacity.
fn make_ready(buffer: &mut Vec<u8>) {
    if buffer.capacity() < REQUEST_BYTES_MAX {
        buffer.clear();
        // Zeros could be had without memory.
        buffer.resize(REQUEST_BYTES_MAX, 1);
        std::hint::black_box(&mut *buffer);
    }
    buffer.clear();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_request_that_fills_the_buffer_takes_it_along() {
        for (length, is_copied) in
            [(300_000, true), (HANDED_OVER_BYTES_MIN, false), (REQUEST_BYTES_MAX, false)]
        {
            let mut buffer = Vec::with_capacity(REQUEST_BYTES_MAX);
            buffer.resize(length, 7);
            assert_eq!(take_request(&mut buffer).len(), length);
            assert_eq!(buffer.capacity() > 0, is_copied, "{length}");
        }
    }
}
