//! What is done about records, by who sends them.

use super::*;
use std::sync::Arc;

use slackwater_blockstore::{Options, Store};

use crate::limits::Patience;
use crate::metrics::NfsMetrics;

fn frame(program: u32, version: u32, procedure: u32) -> Bytes {
    let words = [7, 0, 2, program, version, procedure, 0, 0, 0, 0];
    words.iter().flat_map(|word: &u32| word.to_be_bytes()).collect::<Vec<_>>().into()
}

fn peer(access: Option<ClientAccess>) -> Peer {
    let address = "10.0.0.1".parse().unwrap();
    let (port, shown) = (portmap::Port::Nfs(2049), Shown::NotAsked);
    Peer { address, has_privileged_port: false, access, port, shown }
}

fn answer(frame: &Bytes, access: Option<ClientAccess>) -> Option<Vec<u32>> {
    match plan(frame, peer(access), Instant::now()) {
        Plan::Answer(reply) => Some(
            reply.finish().0[8..]
                .chunks(4)
                .map(|word| u32::from_be_bytes(word.try_into().unwrap()))
                .collect(),
        ),
        Plan::Run(_) => None,
        other => panic!("{other:?}"),
    }
}

const LISTED: Option<ClientAccess> = Some(ClientAccess::ReadWrite);

#[test]
fn calls_that_are_not_served_are_told_why() {
    assert_eq!(answer(&frame(100_227, 3, 0), LISTED), Some(vec![1, 0, 0, 0, 1]));
    assert_eq!(answer(&frame(100_003, 4, 1), LISTED), Some(vec![1, 0, 0, 0, 2, 3, 3]));
    assert_eq!(answer(&frame(100_005, 1, 1), LISTED), Some(vec![1, 0, 0, 0, 2, 3, 3]));
    assert_eq!(answer(&frame(100_000, 4, 3), LISTED), Some(vec![1, 0, 0, 0, 2, 2, 2]));
    assert_eq!(answer(&frame(100_003, 3, 22), LISTED), Some(vec![1, 0, 0, 0, 3]));
    assert_eq!(answer(&frame(100_000, 2, 5), LISTED), Some(vec![1, 0, 0, 0, 3]));
    assert_eq!(answer(&frame(100_003, 3, 21), LISTED), None);
}

#[test]
fn an_address_that_is_not_listed_is_refused_on_each_call() {
    for procedure in 1..22 {
        let refused = answer(&frame(100_003, 3, procedure), None);
        assert_eq!(refused, Some(vec![1, 1, 1, 5]), "NFS procedure {procedure}");
    }
    assert_eq!(answer(&frame(100_005, 3, 1), None), Some(vec![1, 0, 0, 0, 0, 13]));
    assert_eq!(answer(&frame(100_005, 3, 5), None), Some(vec![1, 1, 1, 5]));
    for program in [portmap::NFS, portmap::MOUNT, portmap::PORTMAP] {
        assert_eq!(answer(&frame(program.number, program.version, 0), None), None);
    }
}

#[test]
fn without_a_certificate_that_is_asked_for_mount_alone_is_served() {
    let without = Peer { shown: Shown::Nothing, ..peer(LISTED) };
    let is_refused = |program: Program, procedure| {
        let frame = frame(program.number, program.version, procedure);
        match plan(&frame, without, Instant::now()) {
            Plan::AskForCertificate(reply) => {
                let words = [1, 1, 1, 5_u32].map(u32::to_be_bytes).concat();
                assert_eq!(reply.finish().0[8..], words);
                true
            }
            Plan::Run(_) => false,
            other => panic!("{other:?}"),
        }
    };
    for procedure in 1..22 {
        assert!(is_refused(portmap::NFS, procedure), "NFS procedure {procedure}");
    }
    for procedure in 0..6 {
        assert!(!is_refused(portmap::MOUNT, procedure), "MOUNT procedure {procedure}");
    }
    assert!(!is_refused(portmap::NFS, 0) && !is_refused(portmap::PORTMAP, 0));
}

#[test]
fn a_privileged_port_is_asked_for_when_it_is_required() {
    let options = NfsOptions { require_privileged_port: true, ..NfsOptions::default() };
    let port = portmap::Port::Nfs(2049);
    let access = |address: &str| Peer::new(address.parse().unwrap(), port, &options).access;
    for (address, expected) in
        [("127.0.0.1:1023", true), ("127.0.0.1:1024", false), ("[::ffff:127.0.0.1]:7", true)]
    {
        for options in [&options, &NfsOptions::default()] {
            let mounter = Peer::new(address.parse().unwrap(), port, options).mounter();
            assert_eq!(mounter.has_privileged_port, expected, "{address}");
            assert_eq!(mounter.address.to_string(), "127.0.0.1");
        }
    }
    assert!(access("127.0.0.1:1023").is_some());
    assert!(access("127.0.0.1:1024").is_none());
    assert!(access("[::ffff:127.0.0.1]:1").is_some());
    assert!(access("10.0.0.1:1").is_none());
}

/// Of which the client has not heard yet, as its connection broke while the disk stalled.
#[tokio::test]
async fn the_reply_of_a_call_that_took_long_is_kept_as_long_as_any() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(Options::new(directory.path())).unwrap();
    let metrics = Arc::new(NfsMetrics::new());
    let options = NfsOptions::default();
    let shared = Shared::new(store, options, metrics, Patience::default());
    let request = |received| {
        // REMOVE, with arguments that are none.
        match plan(&frame(100_003, 3, 12), peer(LISTED), received) {
            Plan::Run(request) => request,
            other => panic!("{other:?}"),
        }
    };
    let long_ago = Instant::now().checked_sub(limits::DUPLICATES_AGE * 2).unwrap();
    let mut first = request(long_ago);
    assert!(matches!(first.check_resent(&shared), Resent::No));
    let reply = first.execute(&shared).head;
    match request(Instant::now()).check_resent(&shared) {
        Resent::Replay(again) => assert_eq!(again, reply),
        other => panic!("{other:?}"),
    }
    shared.store.close().unwrap();
}

#[test]
fn a_call_that_waits_keeps_nothing_but_itself() {
    let call = frame(100_003, 3, 12);
    let buffer = Bytes::from([&call[..], &[0; limits::READ_BUFFER_BYTES]].concat());
    let Plan::Run(mut request) = plan(&buffer.slice(..call.len()), peer(LISTED), Instant::now())
    else {
        panic!("refused")
    };
    assert!(!buffer.is_unique());
    request.detach();
    assert!(buffer.is_unique() && request.frame == call);
}

#[tokio::test]
async fn a_panic_is_answered_and_counted() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(Options::new(directory.path())).unwrap();
    let metrics = Arc::new(NfsMetrics::new());
    let options = NfsOptions::default();
    let shared = Shared::new(store, options, metrics, Patience::default());
    // Words after the status: one for each optional attribute set that is absent, of the
    // failure types in RFC 1813 section 3.3.
    for (procedure, words) in [(1, 0), (2, 2), (3, 1), (6, 1), (7, 2), (14, 4), (15, 3)] {
        let frame = frame(100_003, 3, procedure);
        let Plan::Run(request) = plan(&frame, peer(LISTED), Instant::now()) else {
            panic!("refused")
        };
        let (status, reply) = request.guard(&shared, || panic!("of a test")).unwrap();
        assert!(matches!(status, nfsstat3::NFS3ERR_SERVERFAULT));
        let head = reply.finish().0;
        assert_eq!(head[28..32], 10006_u32.to_be_bytes());
        assert_eq!(head[32..], vec![0; words * 4], "procedure {procedure}");
    }
    assert_eq!(shared.metrics.snapshot().panics, 7);
    shared.store.close().unwrap();
}
