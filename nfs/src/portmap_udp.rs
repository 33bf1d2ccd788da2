//! PORTMAP by UDP (RFC 1833 section 3), which `showmount`, `rpcinfo` and Windows' client ask first. NFS and MOUNT are
//! served by TCP alone.
//!
//! ```text
//! datagram -> a call of PORTMAP from a listed address? -> NULL, GETPORT: run; all else: unavailable -> reply
//! ```
//! # Invariants
//! - A datagram says itself where it comes from, so what is not from a listed address gets no reply, and no reply is
//!   longer than its call: forged datagrams do not become more, or larger, on their way to somebody else.
//! - One datagram is held at a time, and none waits: what comes faster, the kernel drops, and its client asks again.

use std::net::SocketAddr;
use std::time::Instant;

use bytes::Bytes;
use tokio::net::UdpSocket;
use tokio::time::sleep;

use crate::dispatch::{self, Finished, Peer, Plan};
use crate::limits;
use crate::portmap::Port;
use crate::procedure::{PortmapProcedure, Procedure};
use crate::rpc::{self, Unrunnable};
use crate::server::Shared;

/// A call of PORTMAP has 56 bytes, and up to 400 for each of credential and verifier (RFC 5531 section 8.2).
const CALL_BYTES_MAX: usize = 56 + 2 * 400;

/// Bytes of a record mark, which replies by TCP begin with.
const RECORD_MARK_BYTES: usize = 4;

/// Answers calls at PORTMAP's own port for ever.
pub(crate) async fn serve(shared: &Shared, socket: &UdpSocket, port: Port) {
    // One byte more tells a call that was too long, and is cut off.
    let mut buffer = [0; CALL_BYTES_MAX + 1];
    loop {
        let (length, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                tracing::warn!(%error, "PORTMAP: a datagram could not be received");
                sleep(limits::ACCEPT_WAIT_MAX).await;
                continue;
            }
        };
        let call = buffer.get(..length).unwrap_or_default();
        if let Some(reply) = answer(shared, call, from, port).filter(|reply| reply.len() <= length)
        {
            // A reply that has no room is lost, as each datagram may be.
            let _ = socket.try_send_to(&reply, from);
        }
    }
}

/// The reply to a datagram, if it gets one.
fn answer(shared: &Shared, call: &[u8], from: SocketAddr, port: Port) -> Option<Bytes> {
    if call.len() > CALL_BYTES_MAX {
        return None;
    }
    // By the address alone: who asks from a high port cannot mount, and learns a port number.
    let address = from.ip().to_canonical();
    if shared.options.access_of(address).is_none() {
        tracing::debug!(client = %address, "PORTMAP by UDP: the address is not listed");
        return None;
    }
    let peer = Peer::new(from, port, &shared.options);
    let finished = match dispatch::plan(&Bytes::copy_from_slice(call), peer, Instant::now()) {
        Plan::Close(_) => return None,
        Plan::Answer(reply) | Plan::AskForCertificate(reply) => Finished::from(reply),
        // Its reply is longer than the call.
        Plan::Run(request) if request.procedure == Procedure::Portmap(PortmapProcedure::Dump) => {
            rpc::unrunnable(request.xid, Unrunnable::ProcedureUnavailable).into()
        }
        Plan::Run(request) => request.execute_inline(shared).ok()?,
    };
    Some(Bytes::from(finished.head).split_off(RECORD_MARK_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::Patience;
    use crate::metrics::NfsMetrics;
    use crate::options::NfsOptions;
    use slackwater_blockstore::disk::MemoryDisk;
    use slackwater_blockstore::kv::MemoryKv;
    use slackwater_blockstore::{Options, Store};
    use std::sync::Arc;

    const LISTED: &str = "127.0.0.1:40000";
    const PORT: Port = Port::Portmap { own: 111, nfs: 2049 };

    fn shared(options: NfsOptions) -> Shared {
        let mut of_store = Options::new("unused");
        of_store.background = false;
        of_store.memory_bytes = Options::MEMORY_BYTES_MIN;
        let store =
            Store::open_with(Arc::new(MemoryKv::new()), Arc::new(MemoryDisk::new()), of_store);
        let metrics = Arc::new(NfsMetrics::new());
        Shared::new(store.unwrap(), options, metrics, Patience::default())
    }

    /// A call with an empty credential.
    fn call((program, version, procedure): (u32, u32, u32), arguments: &[u32]) -> Vec<u8> {
        let header = [7, 0, 2, program, version, procedure, 0, 0, 0, 0];
        header.iter().chain(arguments).flat_map(|word| word.to_be_bytes()).collect()
    }

    fn ask(shared: &Shared, call: &[u8], from: &str) -> Option<Vec<u32>> {
        let reply = answer(shared, call, from.parse().unwrap(), PORT)?;
        // What is longer is dropped, so a client would ask in vain.
        assert!(reply.len() <= call.len(), "{call:?}");
        Some(reply.chunks(4).map(|word| u32::from_be_bytes(word.try_into().unwrap())).collect())
    }

    #[tokio::test]
    async fn ports_are_told_and_nothing_else() {
        let shared = shared(NfsOptions::default());
        let ask = |what, arguments: &[u32]| ask(&shared, &call(what, arguments), LISTED);
        let success = [7, 1, 0, 0, 0, 0];
        assert_eq!(ask((100_000, 2, 0), &[]).unwrap(), success);
        for (program, version, protocol, port) in [
            (100_003, 3, 6, 2049),
            (100_005, 3, 6, 2049),
            (100_000, 2, 6, 111),
            (100_000, 2, 17, 111),
            (100_003, 3, 17, 0),
            (100_003, 4, 6, 0),
            (100_024, 1, 6, 0),
        ] {
            let reply = ask((100_000, 2, 3), &[program, version, protocol, 0]).unwrap();
            assert_eq!(reply, [&success[..], &[port]].concat(), "{program}");
        }
        let (procedure_unavailable, program_unavailable) = (3, 1);
        let dump = ask((100_000, 2, 4), &[]).unwrap();
        assert_eq!(dump, [7, 1, 0, 0, 0, procedure_unavailable]);
        // rpcbind's versions 3 and 4 are asked for first.
        assert_eq!(ask((100_000, 4, 3), &[]).unwrap()[5..], [2, 2, 2]);
        for what in
            [(100_003, 3, 1), (100_003, 4, 0), (100_003, 3, 99), (100_005, 3, 5), (100_024, 1, 1)]
        {
            assert_eq!(ask(what, &[]).unwrap(), [7, 1, 0, 0, 0, program_unavailable], "{what:?}");
        }
    }

    #[tokio::test]
    async fn strangers_replies_and_what_is_no_call_get_no_reply() {
        let shared = shared(NfsOptions::default());
        let null = call((100_000, 2, 0), &[]);
        assert!(ask(&shared, &null, LISTED).is_some());
        assert!(ask(&shared, &null, "192.0.2.1:111").is_none());
        let mut reply = null.clone();
        reply[7] = 1;
        for bytes in [&reply[..], &[], &null[..10], &[0xff; 40], &[0; CALL_BYTES_MAX + 1]] {
            assert!(ask(&shared, bytes, LISTED).is_none(), "{bytes:?}");
        }
        // Arguments that do not decode have a reply that fits.
        assert!(ask(&shared, &call((100_000, 2, 3), &[]), LISTED).is_some());
    }

    /// `ask` holds it for whole calls. Of those that are cut off, only what is refused by its header is answered.
    #[tokio::test]
    async fn no_call_has_a_reply_that_is_longer() {
        let shared = shared(NfsOptions::default());
        for program in [100_000, 100_003, 100_005, 100_024] {
            for version in 0..5 {
                for procedure in 0..24 {
                    for arguments in [&[][..], &[100_003, 3, 6, 0], &[100_003, 3]] {
                        let call = call((program, version, procedure), arguments);
                        assert!(ask(&shared, &call, LISTED).is_some(), "{call:?}");
                        for length in 0..call.len() {
                            let _ = answer(&shared, &call[..length], LISTED.parse().unwrap(), PORT);
                        }
                    }
                }
            }
        }
    }
}
