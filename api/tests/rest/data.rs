//! Bytes in and out.

use axum::body::{Body, Bytes};
use axum::http::{Method, Request, header};
use futures_util::stream;
use slackwater_api::error::ProblemCode;
use slackwater_api::types::{DataWritten, File};
use slackwater_blockstore::Options;
use slackwater_blockstore::disk::MemoryDisk;

use crate::harness::{Face, memory_store, noise};

#[tokio::test]
async fn what_is_put_is_got() {
    let face = Face::new();
    face.make_file("a", 0).await;
    // Neither the offset nor the length is a multiple of anything.
    let bytes = noise(1, (3 << 20) + 12_345);
    let written = face.put("/v1/files/a/data?offset=777", bytes.clone()).await.expect(200);
    let written: DataWritten = written.parse();
    let length_bytes = u64::try_from(bytes.len()).unwrap();
    let expected = DataWritten { offset_bytes: 777, length_bytes, size_bytes: 777 + length_bytes };
    assert_eq!(written, expected);
    let snapshot = face.take_snapshot("a").await;
    let whole = [vec![0; 777], bytes].concat();
    for route in ["/v1/files/a/data".to_owned(), format!("/v1/snapshots/{}/data", snapshot.id)] {
        let answer = face.get(&route).await.expect(200);
        assert_eq!(answer.header(header::CONTENT_LENGTH), whole.len().to_string());
        assert_eq!(answer.header(header::ACCEPT_RANGES), "bytes");
        assert!(answer.body == whole, "{route} gives other bytes");
    }
}

#[tokio::test]
async fn a_range_is_a_part_and_can_be_resumed() {
    let face = Face::new();
    face.make_file("a", 0).await;
    let bytes = noise(2, 2_500_000);
    face.put("/v1/files/a/data", bytes.clone()).await.expect(200);
    let snapshot = face.take_snapshot("a").await;
    let route = format!("/v1/snapshots/{}/data", snapshot.id);
    let tag = face.get(&route).await.header(header::ETAG).to_owned();
    let ask = async |headers: &[(&str, &str)]| face.call(Method::GET, &route, headers, None).await;

    let part = ask(&[("range", "bytes=1048570-1048585")]).await.expect(206);
    assert_eq!(part.header(header::CONTENT_RANGE), "bytes 1048570-1048585/2500000");
    assert_eq!(part.header(header::CONTENT_LENGTH), "16");
    assert_eq!(part.body, bytes[1_048_570..1_048_586]);
    let rest = ask(&[("range", "bytes=2400000-"), ("if-range", &tag)]).await.expect(206);
    assert!(rest.body == bytes[2_400_000..]);
    let last = ask(&[("range", "bytes=-10")]).await.expect(206);
    assert_eq!(last.body, bytes[2_499_990..]);
    let other = ask(&[("range", "bytes=1-2"), ("if-range", "\"other\"")]).await.expect(200);
    assert_eq!(other.body.len(), bytes.len());
    let beyond = ask(&[("range", "bytes=2500000-")]).await;
    assert_eq!(beyond.header(header::CONTENT_RANGE), "bytes */2500000");
    beyond.problem(ProblemCode::RangeNotSatisfiable);
    let part = face.call(Method::GET, "/v1/files/a/data", &[("range", "bytes=0-0")], None).await;
    assert_eq!(part.expect(206).body, bytes[..1]);
}

#[tokio::test]
async fn the_tag_of_a_file_changes_with_it() {
    let face = Face::new();
    face.make_file("a", 10).await;
    let tag = async || face.get("/v1/files/a/data").await.header(header::ETAG).to_owned();
    let before = tag().await;
    assert_eq!(before, tag().await);
    face.put("/v1/files/a/data", "x").await.expect(200);
    assert_ne!(before, tag().await);
}

#[tokio::test]
async fn bytes_that_the_client_has_are_not_sent_again() {
    let face = Face::new();
    face.make_file("a", 10).await;
    let snapshot = face.take_snapshot("a").await;
    for route in ["/v1/files/a/data".to_owned(), format!("/v1/snapshots/{}/data", snapshot.id)] {
        let tag = face.get(&route).await.header(header::ETAG).to_owned();
        // It counts before the range (RFC 9110 section 13.2.2).
        for headers in [
            &[("if-none-match", tag.as_str())][..],
            &[("if-none-match", tag.as_str()), ("range", "bytes=0-3")],
        ] {
            for method in [Method::GET, Method::HEAD] {
                let answer = face.call(method, &route, headers, None).await.expect(304);
                assert_eq!(answer.header(header::ETAG), tag);
                assert!(answer.body.is_empty());
            }
        }
        let other = [("if-none-match", "\"other\""), ("range", "bytes=0-3")];
        assert_eq!(face.call(Method::GET, &route, &other, None).await.expect(206).body.len(), 4);
    }
}

#[tokio::test]
async fn zeros_take_no_space() {
    let face = Face::new();
    face.make_file("a", 0).await;
    face.put("/v1/files/a/data", vec![0; 1 << 20]).await.expect(200);
    face.put("/v1/files/a/data?offset=524288", noise(5, 4096)).await.expect(200);
    let file: File = face.get("/v1/files/a").await.parse();
    assert_eq!((file.size_bytes, file.used_bytes), (1 << 20, 4096));
}

#[tokio::test]
async fn what_was_answered_outlives_the_server() {
    let directory = tempfile::tempdir().unwrap();
    let options = || {
        let mut options = Options::new(directory.path());
        options.memory_bytes = Options::MEMORY_BYTES_MIN;
        options
    };
    let bytes = noise(6, 1_500_000);
    {
        let store = slackwater_blockstore::Store::open(options()).unwrap();
        let face = Face::over(store, MemoryDisk::new(), slackwater_api::ApiOptions::default());
        face.make_file("a", 0).await;
        face.put("/v1/files/a/data", bytes.clone()).await.expect(200);
        face.store.close().unwrap();
    }
    let store = slackwater_blockstore::Store::open(options()).unwrap();
    let face = Face::over(store, MemoryDisk::new(), slackwater_api::ApiOptions::default());
    assert!(face.get("/v1/files/a/data").await.expect(200).body == bytes);
    face.store.close().unwrap();
}

#[tokio::test]
async fn an_upload_is_synced_before_it_is_answered() {
    let disk = MemoryDisk::new();
    // Without background work nothing else syncs.
    let store = memory_store(&disk, |options| options.background = false);
    let face = Face::over(store, disk, slackwater_api::ApiOptions::default());
    face.make_file("a", 0).await;
    let before = face.disk.syncs();
    face.put("/v1/files/a/data", noise(7, 10_000)).await.expect(200);
    assert!(face.disk.syncs() > before);
}

#[tokio::test]
async fn a_bad_upload_changes_nothing_or_says_what_came() {
    let face = Face::new();
    face.make_file("a", 100).await;
    let request = |uri: &str| Request::put(uri.to_owned());
    let plain = request("/v1/files/a/data").body(Body::from("x")).unwrap();
    face.send(plain).await.problem(ProblemCode::UnsupportedMediaType);
    let octets = ("content-type", "application/octet-stream");
    let high = face.put("/v1/files/a/data?offset=18446744073709551615", "xy").await;
    high.problem(ProblemCode::FileTooBig);
    face.put("/v1/files/a/data?ofset=5", "x").await.problem(ProblemCode::BadQuery);
    face.put("/v1/files/gone/data", "x").await.problem(ProblemCode::NotFound);
    face.make_file("dir/b", 1).await;
    face.put("/v1/files/dir/data", "x").await.problem(ProblemCode::WrongKind);
    assert_eq!(face.get("/v1/files/a").await.parse::<File>().size_bytes, 100);

    let pieces = [Ok(Bytes::from_static(b"abc")), Err(std::io::Error::other("the line went dead"))];
    let broken = request("/v1/files/a/data").header(octets.0, octets.1);
    let broken = broken.body(Body::from_stream(stream::iter(pieces))).unwrap();
    face.send(broken).await.problem(ProblemCode::IncompleteBody);

    let empty = face.put("/v1/files/a/data", Body::empty()).await.expect(200);
    assert_eq!(empty.parse::<DataWritten>().length_bytes, 0);
}

#[tokio::test]
async fn an_upload_that_stops_coming_is_ended() {
    let options = slackwater_api::ApiOptions {
        stall_timeout: std::time::Duration::from_millis(50),
        ..Default::default()
    };
    let face = Face::with(options);
    face.make_file("a", 0).await;
    let stuck = stream::pending::<Result<Bytes, std::io::Error>>();
    face.put("/v1/files/a/data", Body::from_stream(stuck))
        .await
        .problem(ProblemCode::RequestTimeout);
}

#[tokio::test]
async fn an_empty_file_has_no_bytes() {
    let face = Face::new();
    face.make_file("a", 0).await;
    let answer = face.get("/v1/files/a/data").await.expect(200);
    assert_eq!((answer.header(header::CONTENT_LENGTH), answer.body.len()), ("0", 0));
    let answer = face.call(Method::GET, "/v1/files/a/data", &[("range", "bytes=0-")], None).await;
    answer.problem(ProblemCode::RangeNotSatisfiable);
    face.get("/v1/files/gone/data").await.problem(ProblemCode::NotFound);
}
