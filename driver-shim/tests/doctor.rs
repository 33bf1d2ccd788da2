//! The command as a person runs it.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "tests")]

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Output};

fn doctor(api: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_slackwater-driver"))
        .args(["doctor", "--api", api])
        .env_remove("SLACKWATER_TOKEN_FILE")
        .output()
        .unwrap()
}

#[test]
fn an_appliance_that_is_not_there_is_named() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let output = doctor(&format!("http://127.0.0.1:{port}"));
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains(&format!("127.0.0.1:{port}")), "{text}");
}

#[test]
fn an_appliance_that_refuses_is_reported_with_its_reason() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let api = format!("http://{}", listener.local_addr().unwrap());
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 4096];
        let _ = stream.read(&mut request).unwrap();
        let body = r#"{"type":"about:blank","title":"Poisoned","status":503,"code":"poisoned","detail":"a sync failed"}"#;
        let head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/problem+json\r\n";
        let length = body.len();
        let answer = format!("{head}connection: close\r\ncontent-length: {length}\r\n\r\n{body}");
        stream.write_all(answer.as_bytes()).unwrap();
    });
    let output = doctor(&api);
    server.join().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.contains("a sync failed"), "{text}");
}
