//! Import and export against a real appliance: content, holes, resumption, bases, interruption.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    unreachable_pub,
    dead_code,
    reason = "tests"
)]

#[path = "support/appliance.rs"]
mod appliance;
#[path = "support/images.rs"]
mod images;
#[path = "support/proxy.rs"]
mod proxy;

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Output, Stdio};

use appliance::{Appliance, noise, text};
use images::{
    MIB, allocated, assert_same_content, begun, exported, image, interrupted,
    interrupted_increment, patch, sent, wait,
};
use proxy::{Counted, Proxy};
use serde_json::Value;

#[test]
fn a_sparse_image_goes_there_and_back_with_its_holes() {
    let appliance = Appliance::start();
    let original = appliance.local("a.img");
    // Not a whole number of blocks, and data in the last one.
    image(&original, 200 * MIB + 1234, &[(3, 5), (50, 75), (199, 200)]);
    patch(&original, 200 * MIB + 1000, b"the end");
    patch(&original, 120 * MIB, &vec![0; 8 << 20]);
    let result = appliance.json(&["import", &original, "/slackwater/d/a.img", "--verify"]);
    assert_eq!(
        (&result["path"], &result["size_bytes"]),
        (&"d/a.img".into(), &(200 * MIB + 1234).into())
    );
    assert!((28 * MIB..29 * MIB).contains(&sent(&result)), "holes and zeros stay here: {result}");
    let used = appliance.json(&["file", "stat", "d/a.img"])["used_bytes"].as_u64().unwrap();
    assert_eq!(used, 28 * MIB + 4096);

    appliance.ok(&["snapshot", "create", "d/a.img", "--name", "s"]);
    let back = appliance.local("back.img");
    let result = appliance.json(&["export", "s", &back, "--verify"]);
    assert!((28 * MIB..29 * MIB).contains(&sent(&result)), "{result}");
    assert_same_content(&original, &back);
    assert!(allocated(&back) < 29 * MIB, "{}", allocated(&back));
    assert!(!Path::new(&format!("{back}.partial")).exists());
    assert_eq!(appliance.ok(&["import", &original, "plain.img"]), "plain.img\n");
}

#[test]
fn an_empty_image_and_one_of_holes_only_are_images_too() {
    let appliance = Appliance::start();
    for (name, size_bytes) in [("empty", 0), ("holes", 3 * MIB + 7)] {
        let original = appliance.local(name);
        image(&original, size_bytes, &[]);
        assert_eq!(sent(&appliance.json(&["import", &original, name])), 0);
        let back = exported(&appliance, name, &format!("{name}-back"));
        assert_eq!(fs::metadata(back).unwrap().len(), size_bytes);
    }
}

/// Runs the command with these bytes as its standard input.
fn piped(appliance: &Appliance, arguments: &[&str], input: Vec<u8>) -> Output {
    let mut command = appliance.command(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // A command that refuses does not read it.
    let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

#[test]
fn an_image_goes_there_and_back_through_pipes() {
    let appliance = Appliance::start();
    // Data at odd places, over several requests, zeros before, between and after it.
    let mut bytes = vec![0; 23 * 1024 * 1024 + 777];
    for (seed, at, length) in [(1, 5000, 70_000), (2, 3_900_000, 9_000_000), (3, 20 << 20, 4096)] {
        bytes[at..at + length].copy_from_slice(&noise(seed, length));
    }
    let output = piped(&appliance, &["import", "-", "d/a.img"], bytes.clone());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "d/a.img\n");
    let files = appliance.json(&["file", "ls"]);
    assert_eq!(files.as_array().unwrap().len(), 1, "the partial one is gone: {files}");
    assert!(files[0]["used_bytes"].as_u64().unwrap() < 10 * MIB, "zeros are holes: {files}");

    appliance.ok(&["snapshot", "create", "d/a.img", "--name", "s"]);
    let output = appliance.run(&["export", "s", "-", "--jobs", "3"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(output.stdout == bytes, "{} bytes came back", output.stdout.len());
    let output = appliance.run(&["export", "--file", "d/a.img", "-"]);
    assert!(output.stdout == bytes, "{} bytes came back", output.stdout.len());
    assert_eq!(appliance.json(&["snapshot", "ls"]).as_array().unwrap().len(), 1);

    for (size, name) in [(0, "empty"), (12_345, "zeros")] {
        let output = piped(&appliance, &["--json", "import", "-", name], vec![0; size]);
        let result: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&result["size_bytes"], sent(&result)), (&size.into(), 0), "{result}");
        let output = appliance.run(&["export", "--file", name, "-"]);
        assert!(output.status.success() && output.stdout == vec![0; size], "{name}");
    }
}

#[test]
fn a_pipe_is_refused_what_it_cannot_do_and_leaves_nothing_by_half() {
    let appliance = Appliance::start();
    appliance.ok(&["file", "create", "a.img", "1M"]);
    appliance.ok(&["snapshot", "create", "a.img", "--name", "s"]);
    for arguments in [
        &["import", "-", "b.img", "--resume"][..],
        &["import", "-", "b.img", "--base", "s"],
        &["import", "-", "b.img", "--verify"],
        &["export", "s", "-", "--resume"],
        &["export", "s", "-", "--force"],
        &["export", "s", "-", "--verify"],
        &["--json", "export", "s", "-"],
    ] {
        appliance.fails(2, arguments);
    }
    let refused = piped(&appliance, &["import", "-", "a.img"], vec![1; 10]);
    assert_eq!(refused.status.code(), Some(4), "{}", text(&refused.stderr));

    // A reader that leaves early has no image.
    let mut child = appliance.command(&["export", "--file", "a.img", "-"]);
    let mut child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("before the image was whole"));
    assert_eq!(appliance.json(&["snapshot", "ls"]).as_array().unwrap().len(), 1);

    // An input that fails is no end of the image.
    let mut child = appliance.command(&["import", "-", "b.img"]);
    let directory = fs::File::open(appliance.folder.path()).unwrap();
    let output = child.stdin(directory).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert_eq!(appliance.json(&["file", "ls"]).as_array().unwrap().len(), 1, "only a.img");
}

#[test]
fn nothing_is_overwritten_unasked() {
    let appliance = Appliance::start();
    let original = appliance.local("a.img");
    image(&original, MIB, &[(0, 1)]);
    appliance.ok(&["import", &original, "a.img"]);
    assert!(appliance.fails(4, &["import", &original, "a.img"]).contains("--resume"));
    image(&original, 2 * MIB, &[(0, 1)]);
    appliance.fails(4, &["import", &original, "a.img", "--resume"]);
    appliance.fails(3, &["import", &appliance.local("missing"), "b.img"]);
    appliance.fails(2, &["import", &appliance.local("."), "b.img"]);
    assert_eq!(appliance.json(&["file", "ls"]).as_array().unwrap().len(), 1);

    appliance.ok(&["snapshot", "create", "a.img", "--name", "s"]);
    let output = appliance.local("out.img");
    fs::write(&output, b"precious").unwrap();
    assert!(appliance.fails(4, &["export", "s", &output]).contains("--force"));
    assert_eq!(fs::read(&output).unwrap(), b"precious");
    let partial = format!("{output}.partial");
    fs::write(&partial, b"x").unwrap();
    appliance.ok(&["export", "s", &output, "--force"]);
    assert_eq!(fs::metadata(&output).unwrap().len(), MIB);
    fs::write(&partial, b"x").unwrap();
    fs::remove_file(&output).unwrap();
    assert!(appliance.fails(4, &["export", "s", &output]).contains("--resume"));
    appliance.fails(3, &["export", "missing", &output, "--resume"]);
    appliance.fails(2, &["export", "s", "/"]);
    appliance.fails(2, &["export", "s", &appliance.local("."), "--force"]);
}

#[test]
fn an_interrupted_import_goes_on_where_it_was() {
    let appliance = Appliance::start();
    let original = appliance.local("a.img");
    image(&original, 100 * MIB, &[(0, 40), (90, 100)]);
    let budget = i64::try_from(20 * MIB).unwrap();
    let advice =
        interrupted(&appliance, &["import", &original, "a.img"], Counted::ToAppliance, budget);
    assert!(advice.contains(&format!("slackwater import {original} a.img --resume")), "{advice}");
    // A block that arrived is damaged meanwhile, one that was a hole is written.
    let handle = appliance.runtime.handle();
    let client = slackwater_client::Client::builder(appliance.url.as_str()).build().unwrap();
    let junk = bytes::Bytes::from_static(b"junk");
    handle.block_on(client.write_bytes("a.img", 0, junk.clone())).unwrap();
    handle.block_on(client.write_bytes("a.img", 60 * MIB, junk)).unwrap();
    let result = appliance.json(&["import", &original, "a.img", "--resume"]);
    // At most what was on its way in four requests is sent twice.
    assert!((30 * MIB..50 * MIB).contains(&sent(&result)), "{result}");
    assert_same_content(&original, exported(&appliance, "a.img", "back"));
    let again = appliance.json(&["import", &original, "a.img", "--resume"]);
    assert_eq!(sent(&again), 0, "{again}");
    // A resumed import that never began begins.
    assert_eq!(sent(&appliance.json(&["import", &original, "b.img", "--resume"])), 50 * MIB);
}

#[test]
fn an_interrupted_export_goes_on_where_it_was() {
    let appliance = Appliance::start();
    let original = appliance.local("a.img");
    image(&original, 100 * MIB, &[(0, 40), (90, 100)]);
    appliance.ok(&["import", &original, "a.img"]);
    appliance.ok(&["snapshot", "create", "a.img", "--name", "s"]);
    let output = appliance.local("out.img");
    let partial = format!("{output}.partial");
    let budget = i64::try_from(25 * MIB).unwrap();
    interrupted(&appliance, &["export", "s", &output], Counted::FromAppliance, budget);
    assert!(!Path::new(&output).exists() && Path::new(&partial).exists());
    patch(&partial, 5, b"junk");
    patch(&partial, 60 * MIB, b"junk in a hole");
    let result = appliance.json(&["export", "s", &output, "--resume"]);
    assert!((20 * MIB..50 * MIB).contains(&sent(&result)), "{result}");
    assert_same_content(&original, &output);
    assert!(allocated(&output) < 51 * MIB && !Path::new(&partial).exists());
    // Done is done: there is nothing to go on with.
    appliance.fails(4, &["export", "s", &output, "--resume"]);
}

#[test]
fn an_export_on_a_base_fetches_what_changed() {
    let appliance = Appliance::start();
    let original = appliance.local("a.img");
    image(&original, 64 * MIB, &[(0, 32)]);
    appliance.ok(&["import", &original, "a.img"]);
    let output = exported(&appliance, "a.img", "base");
    // Changed, made a hole, and written where a hole was; and the file grows.
    patch(&original, 5 * MIB + 100, &noise(99, 10_000));
    patch(&original, 10 * MIB, &vec![0; 1 << 20]);
    patch(&original, 50 * MIB, &noise(98, 4096));
    patch(&original, 70 * MIB, b"new end");
    appliance.ok(&["file", "resize", "a.img", &fs::metadata(&original).unwrap().len().to_string()]);
    appliance.ok(&["import", &original, "a.img", "--resume"]);
    appliance.ok(&["snapshot", "create", "a.img", "--name", "new"]);
    let before = allocated(&output);
    let result = appliance.json(&["export", "new", &output, "--base", "base"]);
    assert!((MIB..2 * MIB).contains(&sent(&result)), "{result}");
    assert_same_content(&original, &output);
    assert!(allocated(&output) < before, "the new hole is one in the image too");
    // And back, to the smaller one.
    appliance.ok(&["export", "base", &output, "--base", "new", "--verify"]);
    let fresh = appliance.local("fresh.img");
    appliance.ok(&["export", "base", &fresh]);
    assert_same_content(&fresh, &output);

    appliance.fails(4, &["export", "base", &output, "--base", "new"]);
    appliance.fails(3, &["export", "new", &appliance.local("missing.img"), "--base", "base"]);
    appliance.fails(3, &["export", "new", &output, "--base", "missing"]);
    assert_same_content(&fresh, &output);
}

#[test]
fn an_interrupted_export_on_a_base_goes_on() {
    let appliance = Appliance::start();
    let (original, output, arguments) = interrupted_increment(&appliance);
    let arguments = arguments.each_ref().map(String::as_str);
    assert!(!Path::new(&output).exists(), "a mix never bears the final name");
    appliance.fails(4, &arguments);
    appliance.ok(&[&arguments[..], &["--resume"]].concat());
    assert_same_content(&original, &output);
}

#[test]
fn a_file_is_exported_as_of_one_moment_and_leaves_no_snapshot() {
    let appliance = Appliance::start();
    let original = appliance.local("a.img");
    image(&original, 20 * MIB, &[(2, 12)]);
    appliance.ok(&["import", &original, "a.img"]);
    let output = appliance.local("out.img");
    appliance.ok(&["export", "--file", "/slackwater/a.img", &output]);
    assert_same_content(&original, &output);
    assert_eq!(appliance.json(&["snapshot", "ls"]), Value::Array(vec![]));
    fs::remove_file(&output).unwrap();
    // Interrupted, it says which snapshot to go on with and to delete.
    let budget = i64::try_from(5 * MIB).unwrap();
    let advice = interrupted(
        &appliance,
        &["export", "--file", "a.img", &output],
        Counted::FromAppliance,
        budget,
    );
    let snapshots = appliance.json(&["snapshot", "ls"]);
    let id = snapshots[0]["id"].as_str().unwrap();
    assert!(advice.contains(&format!("slackwater snapshot rm {id}")), "{advice}");
    appliance.ok(&["export", id, &output, "--resume"]);
    assert_same_content(&original, &output);
}

#[test]
fn a_short_interruption_of_the_network_is_ridden_out() {
    let appliance = Appliance::start();
    let original = appliance.local("a.img");
    image(&original, 40 * MIB, &[(0, 40)]);
    let handle = appliance.runtime.handle();
    let budget = i64::try_from(10 * MIB).unwrap();
    let silent = Proxy::start(handle, &appliance.url, Counted::ToAppliance, budget);
    // An address of our own, first led through the network that fails.
    let listener = handle.block_on(tokio::net::TcpListener::bind(("127.0.0.1", 0))).unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (bad, good) = (silent.url.clone(), appliance.url.clone());
    let (heal, healed) = tokio::sync::watch::channel(false);
    let forward = handle.spawn(async move {
        let mut connections = tokio::task::JoinSet::new();
        loop {
            let (mut client, _) = listener.accept().await.unwrap();
            let mut healed = healed.clone();
            let target = if *healed.borrow() { &good } else { &bad };
            let target: std::net::SocketAddr =
                target.strip_prefix("http://").unwrap().parse().unwrap();
            let is_bad = !*healed.borrow();
            connections.spawn(async move {
                let mut server = tokio::net::TcpStream::connect(target).await.unwrap();
                let copied = tokio::io::copy_bidirectional(&mut client, &mut server);
                // Healing cuts the connections that hang.
                tokio::select! {
                    _ = copied => {}
                    _ = healed.wait_for(|healed| *healed), if is_bad => {}
                }
            });
        }
    });
    let child = begun(&url, &["import", &original, "a.img"]);
    silent.wait_until_dry(handle);
    heal.send(true).unwrap();
    let output = wait(child);
    forward.abort();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_same_content(&original, exported(&appliance, "a.img", "back"));
}
