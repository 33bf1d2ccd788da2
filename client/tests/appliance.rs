//! Every command but import and export against a real appliance: success, main errors, exit
//! codes, JSON.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, unreachable_pub, reason = "tests")]

#[path = "support/appliance.rs"]
mod appliance;

use std::sync::Arc;

use appliance::{Appliance, noise, text};
use slackwater_api::{ApiOptions, AuditLog, Role, Secret, TlsFiles, Token, Tokens};
use slackwater_blockstore::{FilePath, Source, Stability};

/// Writes into a file behind the command's back.
fn write(appliance: &Appliance, path: &str, offset_bytes: u64, bytes: &[u8]) {
    let path = FilePath::parse(path).unwrap();
    let inode = appliance.store.file_info(&path).unwrap().attributes.inode;
    let bytes = bytes::Bytes::copy_from_slice(bytes);
    appliance.store.write(inode, offset_bytes, bytes, Stability::FileSync).unwrap();
    assert!(appliance.store.read(Source::File(inode), offset_bytes, 1).unwrap().length_bytes == 1);
}

#[test]
fn files_are_made_listed_resized_renamed_and_deleted() {
    let appliance = Appliance::start();
    assert_eq!(appliance.ok(&["file", "create", "images/a.img", "8GiB"]), "images/a.img\n");
    assert_eq!(appliance.ok(&["file", "create", "/b.img", "1.5M"]), "b.img\n");
    let made = appliance.json(&["file", "create", "/slackwater/c.img", "4096"]);
    assert_eq!((&made["path"], &made["size_bytes"]), (&"c.img".into(), &4096.into()));

    let table = appliance.ok(&["file", "ls"]);
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 4, "{table}");
    assert!(lines[0].starts_with("PATH          "), "{table}");
    assert!(lines[3].starts_with("images/a.img  8.0 GiB   0 B"), "{table}");
    let paths = |arguments: &[&str]| -> Vec<String> {
        let list = appliance.json(&[&["file", "ls"], arguments].concat());
        list.as_array()
            .unwrap()
            .iter()
            .map(|file| file["path"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(paths(&[]), ["b.img", "c.img", "images/a.img"]);
    assert_eq!(paths(&["/slackwater/im"]), ["images/a.img"]);
    assert_eq!(paths(&["--limit", "2"]), ["b.img", "c.img"]);
    assert!(paths(&["nothing"]).is_empty());
    assert_eq!(appliance.ok(&["file", "ls", "nothing"]), "");

    write(&appliance, "b.img", 0, &noise(1, 4096));
    let stat = appliance.ok(&["file", "stat", "b.img"]);
    assert!(stat.contains("size         1.5 MiB (1572864 bytes)"), "{stat}");
    assert!(stat.contains("used         4.0 KiB (4096 bytes)"), "{stat}");
    assert_eq!(appliance.json(&["file", "stat", "b.img"])["used_bytes"], 4096);

    let refusal = appliance.fails(2, &["file", "resize", "b.img", "1M"]);
    assert!(refusal.contains("--shrink"), "{refusal}");
    assert_eq!(
        appliance.json(&["file", "resize", "b.img", "1M", "--shrink"])["size_bytes"],
        1 << 20
    );
    assert_eq!(appliance.ok(&["file", "resize", "b.img", "2M"]), "");
    appliance.ok(&["file", "mv", "b.img", "/moved/b.img"]);
    assert_eq!(paths(&["moved/"]), ["moved/b.img"]);

    appliance.fails(4, &["file", "create", "c.img", "1"]);
    appliance.fails(4, &["file", "mv", "c.img", "images/a.img"]);
    appliance.fails(3, &["file", "stat", "b.img"]);
    appliance.fails(3, &["file", "mv", "b.img", "d.img"]);
    let stderr = appliance.fails(3, &["file", "rm", "c.img", "missing.img", "images/a.img"]);
    assert!(stderr.contains("missing.img") && stderr.contains("1 of 3 failed"), "{stderr}");
    assert_eq!(paths(&[]), ["moved/b.img"]);
    appliance.ok(&["file", "rm", "--force", "missing.img", "moved/b.img"]);
    assert!(paths(&[]).is_empty());
}

#[test]
fn a_long_list_comes_in_pages_and_whole() {
    let appliance = Appliance::start();
    for number in 0..1005 {
        let path = FilePath::parse(&format!("many/{number:04}")).unwrap();
        appliance.store.create_file(&path, 1).unwrap();
    }
    let list = appliance.json(&["file", "ls", "many/"]);
    let list = list.as_array().unwrap();
    assert_eq!(list.len(), 1005);
    assert_eq!(list[1004]["path"], "many/1004");
    assert_eq!(appliance.ok(&["file", "ls", "--limit", "1002"]).lines().count(), 1003);
}

#[test]
fn a_size_that_is_a_slip_is_asked_back() {
    let appliance = Appliance::start();
    let stats = appliance.json(&["stats"]);
    let huge = (stats["capacity_bytes"].as_u64().unwrap().max(1 << 32) * 2000).to_string();
    let refused = appliance.fails(2, &["file", "create", "huge.img", &huge]);
    assert!(refused.contains("--over-capacity"), "{refused}");
    appliance.ok(&["file", "create", "a.img", "1M"]);
    appliance.fails(2, &["file", "resize", "a.img", &huge]);
    assert_eq!(appliance.json(&["file", "stat", "a.img"])["size_bytes"], 1 << 20);
    appliance.ok(&["file", "create", "huge.img", &huge, "--over-capacity"]);
    appliance.ok(&["file", "resize", "a.img", &huge, "--over-capacity"]);
    // What an export and an import allocate by the thousand is no slip.
    appliance.ok(&["file", "create", "thin.img", "1T"]);
}

/// Takes two snapshots of `a.img`, the first one named and labelled, and gives their ids.
fn two_snapshots(appliance: &Appliance) -> [String; 2] {
    appliance.ok(&["file", "create", "a.img", "1G"]);
    write(appliance, "a.img", 0, &noise(1, 8192));
    let named = ["snapshot", "create", "a.img", "--name", "first"];
    let labels = ["--label", "team=web", "--label", "tier=1"];
    let output = appliance.run(&[&named[..], &labels].concat());
    let first = text(&output.stdout);
    assert_eq!((first.len(), output.status.code()), (37, Some(0)), "the id alone: {first}");
    assert!(text(&output.stderr).contains("8.0 KiB used"));
    write(appliance, "a.img", 1 << 20, &noise(2, 4096));
    write(appliance, "a.img", 4096, &[0; 4096]);
    let expiring = ["snapshot", "create", "/slackwater/a.img", "--expires-in", "7d"];
    let second = appliance.json(&expiring);
    assert!(second["expires_at"].is_string() && second["name"].is_null(), "{second}");
    [first.trim_end().to_owned(), second["id"].as_str().unwrap().to_owned()]
}

fn snapshots_listed(appliance: &Appliance, arguments: &[&str]) -> usize {
    appliance.json(&[&["snapshot", "ls"], arguments].concat()).as_array().unwrap().len()
}

#[test]
fn snapshots_are_taken_compared_and_deleted() {
    let appliance = Appliance::start();
    let [first, second] = two_snapshots(&appliance);
    let diff = appliance.json(&["snapshot", "diff", &second, "--base", "first"]);
    let expected = serde_json::json!([
        { "offset_bytes": 4096, "length_bytes": 4096, "kind": "hole" },
        { "offset_bytes": 1 << 20, "length_bytes": 4096, "kind": "data" },
    ]);
    assert_eq!(diff, expected);
    let table = appliance.ok(&["snapshot", "diff", "first"]);
    assert_eq!(table, "OFFSET  LENGTH  KIND\n     0    8192  data\n");

    let taken = appliance.run(&["--json", "snapshot", "create", "a.img", "--name", "first"]);
    assert_eq!(taken.status.code(), Some(4));
    let error: serde_json::Value = serde_json::from_slice(&taken.stderr).unwrap();
    assert_eq!(error["error"]["existing_snapshot_id"], first, "{error}");
    assert_eq!(error["error"]["code"], "exists");
    appliance.fails(3, &["snapshot", "create", "missing.img"]);
    appliance.fails(3, &["snapshot", "show", "missing"]);
    let unknown = "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11";
    appliance.fails(3, &["snapshot", "diff", "first", "--base", unknown]);
    appliance.fails(3, &["snapshot", "rm", "first", "missing", &second]);
    assert_eq!(snapshots_listed(&appliance, &[]), 0);
    appliance.ok(&["snapshot", "rm", "--force", "missing"]);
}

#[test]
fn snapshots_are_listed_shown_and_labelled() {
    let appliance = Appliance::start();
    let [first, _second] = two_snapshots(&appliance);
    for (filter, expected) in [
        (&[][..], 2),
        (&["--label", "team=web"], 1),
        (&["--label", "team=web", "--label", "tier=2"], 0),
        (&["--name", "first"], 1),
        (&["--path", "/a.img"], 2),
        (&["--path", "b.img"], 0),
        (&["--limit", "1"], 1),
    ] {
        assert_eq!(snapshots_listed(&appliance, filter), expected, "{filter:?}");
    }
    let table = appliance.ok(&["snapshot", "ls"]);
    assert!(table.starts_with("ID                                    NAME "), "{table}");
    appliance.fails(2, &["snapshot", "ls", "--sort", "size"]);

    appliance.ok(&["snapshot", "label", "first", "team=db", "tier-", "new=yes"]);
    let shown = appliance.json(&["snapshot", "show", &first]);
    assert_eq!(shown["labels"], serde_json::json!({ "team": "db", "new": "yes" }));
    let one = appliance.run(&["snapshot", "label", &first, "only=this", "--replace"]);
    assert!(text(&one.stderr).ends_with("now has 1 label\n"), "{}", text(&one.stderr));
    let shown = appliance.ok(&["snapshot", "show", "first"]);
    assert!(shown.ends_with("label        only=this\n"), "{shown}");
}

#[test]
fn snapshots_are_listed_by_time() {
    let appliance = Appliance::start();
    appliance.ok(&["file", "create", "a.img", "1M"]);
    let taken: Vec<String> = (0..12)
        .map(|_| appliance.ok(&["snapshot", "create", "a.img"]).trim_end().to_owned())
        .collect();
    let listed = |arguments: &[&str]| -> Vec<String> {
        let list = appliance.json(&[&["snapshot", "ls"], arguments].concat());
        let ids = list.as_array().unwrap().iter().map(|snapshot| snapshot["id"].as_str().unwrap());
        ids.map(str::to_owned).collect()
    };
    assert_eq!(listed(&["--sort", "oldest"]), taken);
    assert_eq!(listed(&["--sort", "oldest", "--limit", "2"]), taken[..2]);
    let newest: Vec<_> = taken.iter().rev().cloned().collect();
    assert_eq!(listed(&["--sort", "newest"]), newest);
    assert_eq!(listed(&["--sort", "newest", "--limit", "3"]), newest[..3]);
    let mut by_id = taken.clone();
    by_id.sort();
    assert_eq!(listed(&["--sort", "id"]), by_id);
    assert_eq!(listed(&[]), by_id, "JSON comes as it is");
    for (arguments, expected) in [(&[][..], &taken), (&["--sort", "newest"], &newest)] {
        let table = appliance.ok(&[&["snapshot", "ls"], arguments].concat());
        let rows = table.lines().skip(1).map(|line| line.split(' ').next().unwrap());
        assert!(rows.eq(expected.iter().map(String::as_str)), "{table}");
    }
}

#[test]
fn files_of_drivers_are_listed_where_they_are_asked_for() {
    let appliance = Appliance::start();
    let of_worker = "workers/6f4c2a7e-0000-4000-8000-000000000000/disk";
    for path in ["a.img", of_worker, "workers.img", "published/one"] {
        appliance.ok(&["file", "create", path, "4096"]);
    }
    let listed = |arguments: &[&str]| -> Vec<String> {
        let table = appliance.ok(&[&["file", "ls"], arguments].concat());
        table.lines().skip(1).map(|line| line.split(' ').next().unwrap().to_owned()).collect()
    };
    assert_eq!(listed(&[]), ["a.img", "workers.img"]);
    assert_eq!(listed(&["--limit", "1"]), ["a.img"]);
    assert_eq!(listed(&["--limit", "2"]), ["a.img", "workers.img"]);
    let all = ["a.img", "published/one", of_worker, "workers.img"];
    assert_eq!(listed(&["--all"]), all);
    assert_eq!(listed(&["workers/"]), [of_worker]);
    assert_eq!(listed(&["/published"]), ["published/one"]);
    assert_eq!(listed(&["work"]), [of_worker, "workers.img"]);
    assert_eq!(listed(&["a"]), ["a.img"]);
    let json = appliance.json(&["file", "ls"]);
    assert_eq!(json.as_array().unwrap().len(), all.len(), "{json}");
}

#[test]
fn a_clone_prints_its_path_and_keeps_the_content() {
    let appliance = Appliance::start();
    appliance.ok(&["file", "create", "a.img", "1M"]);
    write(&appliance, "a.img", 0, &noise(7, 4096));
    let id = appliance.ok(&["snapshot", "create", "a.img", "--name", "base"]);
    assert_eq!(appliance.ok(&["clone", "base", "/slackwater/clones/b.img"]), "clones/b.img\n");
    let clone = appliance.json(&["clone", id.trim_end(), "clones/c.img"]);
    assert_eq!(clone["origin_snapshot_id"], id.trim_end());
    assert_eq!((&clone["used_bytes"], &clone["unique_bytes"]), (&4096.into(), &0.into()));
    assert_eq!(appliance.json(&["snapshot", "show", "base"])["clone_count"], 2);
    appliance.fails(4, &["clone", "base", "a.img"]);
    appliance.fails(3, &["clone", "missing", "d.img"]);
    appliance.fails(2, &["clone", "base", "../d.img"]);
}

#[test]
fn what_a_delete_frees_is_shown() {
    let appliance = Appliance::start();
    for path in ["a.img", "b.img", "c.img"] {
        appliance.ok(&["file", "create", path, "1M"]);
        // Two are alike.
        let seed = if path == "c.img" { 8 } else { 7 };
        write(&appliance, path, 0, &noise(seed, 8192));
    }
    let files = appliance.json(&["file", "ls", "--reclaimable"]);
    let blocks: Vec<_> =
        files.as_array().unwrap().iter().map(|file| &file["reclaimable"]["blocks"]).collect();
    assert_eq!(blocks, [0, 0, 2]);
    let files = appliance.ok(&["file", "ls", "--reclaimable"]);
    assert!(files.lines().next().unwrap().trim_end().ends_with("RECLAIMABLE"), "{files}");
    let described = appliance.ok(&["file", "stat", "c.img"]);
    assert!(described.contains("bytes in 2 blocks)"), "{described}");
    assert_eq!(appliance.json(&["file", "stat", "c.img"])["reclaimable"]["blocks"], 2);
    appliance.ok(&["snapshot", "create", "c.img", "--name", "kept"]);
    assert_eq!(appliance.json(&["snapshot", "show", "kept"])["reclaimable"]["blocks"], 0);
    appliance.ok(&["file", "rm", "c.img"]);
    appliance.ok(&["gc"]);
    assert_eq!(appliance.json(&["snapshot", "show", "kept"])["reclaimable"]["blocks"], 2);
    for sort in ["oldest", "newest", "id"] {
        let snapshots = appliance.json(&["snapshot", "ls", "--reclaimable", "--sort", sort]);
        assert_eq!(snapshots[0]["reclaimable"]["blocks"], 2, "{snapshots}");
    }
    let plain = appliance.json(&["snapshot", "ls"]);
    assert!(plain[0].get("reclaimable").is_none(), "{plain}");
}

#[test]
fn the_appliance_is_looked_after() {
    let appliance = Appliance::start();
    appliance.ok(&["file", "create", "a.img", "1M"]);
    write(&appliance, "a.img", 0, &noise(7, 8192));
    let stats = appliance.json(&["stats"]);
    assert_eq!((&stats["file_count"], &stats["mapped_blocks"]), (&1.into(), &2.into()));
    let shown = appliance.ok(&["stats"]);
    assert!(
        shown.contains("export           /slackwater\n") && shown.contains("in 2 blocks"),
        "{shown}"
    );
    for data in [&[][..], &["--data"]] {
        let report = appliance.json(&[&["check"], data].concat());
        assert_eq!(report["clean"], true, "{report}");
        assert_eq!(report["data_bytes"] == 0, data.is_empty(), "{report}");
    }
    assert!(appliance.ok(&["check"]).starts_with("verdict         no problems\n"));
    appliance.ok(&["file", "rm", "a.img"]);
    assert!(appliance.json(&["gc"])["freed_bytes"].is_u64());
    assert!(appliance.ok(&["gc"]).starts_with("freed "));
    let lines = appliance.ok(&["--json", "top", "--interval", "1", "--count", "2"]);
    let lines: Vec<serde_json::Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2);
    assert!(lines[0]["elapsed_milliseconds"].as_u64().unwrap() >= 1000);
    assert_eq!(lines[1]["per_second"]["dedup_misses"], 0);
    let shown = appliance.ok(&["top", "--interval", "1", "--count", "1"]);
    assert!(shown.contains("commits            0/s") && !shown.contains('\u{1b}'), "{shown}");
}

#[test]
fn tokens_open_what_their_role_allows() {
    let token = |name: &str, role, secret: &str| Token {
        name: name.to_owned(),
        role,
        secret: Secret::new(secret),
    };
    let tokens = Tokens::new(vec![
        token("reader", Role::ReadOnly, "r3ader"),
        token("worker", Role::Worker, "w0rker"),
    ])
    .into();
    let appliance = Appliance::with(ApiOptions { tokens, ..ApiOptions::default() }, None);
    let none = appliance.fails(1, &["stats"]);
    assert!(none.contains("--token-file"), "{none}");
    let file = |name: &str, content: &str| {
        std::fs::write(appliance.local(name), content).unwrap();
        appliance.local(name)
    };
    let wrong = appliance.fails(1, &["--token-file", &file("wrong", "wr0ng\n"), "stats"]);
    assert!(wrong.contains("unauthenticated") && !wrong.contains("wr0ng"), "{wrong}");
    let reader = file("reader", "r3ader\n");
    appliance.ok(&["--token-file", &reader, "stats"]);
    let refused = appliance.fails(1, &["--token-file", &reader, "file", "create", "a.img", "1M"]);
    assert!(refused.contains("role"), "{refused}");
    let mut worker = appliance.command(&["file", "create", "a.img", "1M"]);
    assert_eq!(worker.env("SLACKWATER_TOKEN", "w0rker").output().unwrap().status.code(), Some(0));
    // One line, as it stands in a command line of `mount`.
    let path =
        appliance.command(&["mount-path"]).env("SLACKWATER_TOKEN", "w0rker").output().unwrap();
    let (path, remark) =
        (String::from_utf8(path.stdout).unwrap(), String::from_utf8(path.stderr).unwrap());
    assert!(path.starts_with("/slackwater/.export/") && path.lines().count() == 1, "{path}");
    assert!(remark.contains("once") && !remark.contains(path.trim()), "{remark}");
    assert!(appliance.fails(1, &["--token-file", &reader, "mount-path"]).contains("role"));
    // The file goes before the environment.
    let mut both = appliance.command(&["--token-file", &reader, "file", "rm", "a.img"]);
    assert_eq!(both.env("SLACKWATER_TOKEN", "w0rker").output().unwrap().status.code(), Some(1));
    let refused = appliance.fails(1, &["--token-file", &file("worker", "w0rker"), "gc"]);
    assert!(refused.contains("admin"), "{refused}");
}

#[test]
fn changes_are_listed_with_who_made_them() {
    let directory = tempfile::tempdir().unwrap();
    let log = AuditLog::open(directory.path().join("audit")).unwrap();
    let audit = Some(Arc::new(log));
    let appliance = Appliance::with(ApiOptions { audit, ..ApiOptions::default() }, None);
    assert_eq!(appliance.ok(&["audit"]), "");
    assert_eq!(appliance.json(&["audit"]), serde_json::json!([]));
    appliance.ok(&["file", "create", "a.img", "1M"]);
    appliance.ok(&["snapshot", "create", "a.img"]);
    let list = appliance.ok(&["audit", "--limit", "1"]);
    let [head, row] = *list.lines().collect::<Vec<_>>() else { panic!("{list}") };
    assert!(head.starts_with("TIME") && head.ends_with("ABOUT"), "{list}");
    assert!(row.contains("127.0.0.1") && row.contains("POST /v1/snapshots"), "{list}");
    assert!(row.ends_with("of a.img"), "{list}");
    let listed = appliance.json(&["audit"]);
    assert_eq!(listed.as_array().unwrap().len(), 2);
    assert_eq!(listed[1]["made"], "/v1/files/a.img");
    assert_eq!(appliance.json(&["audit", "--by", "node-7"]), serde_json::json!([]));
    appliance.fails(2, &["audit", "--limit", "0"]);
}

#[test]
fn workers_are_added_listed_and_revoked() {
    let appliance = Appliance::start();
    assert_eq!(appliance.ok(&["worker", "list"]), "");
    assert_eq!(appliance.json(&["worker", "ls"]), serde_json::json!([]));
    let output = appliance.run(&["worker", "add", "node-7", "--expires-in", "1h"]);
    assert!(output.status.success(), "{output:?}");
    let (token, remark) = (text(&output.stdout), text(&output.stderr));
    assert!(token.starts_with("slackwater-join-") && token.lines().count() == 1, "{token}");
    assert!(remark.contains("`slackwater-driver join` on node-7"), "{remark}");
    assert!(!remark.contains(token.trim()), "the token is printed once");
    let added = appliance.json(&["worker", "add", "node-8"]);
    assert!(added["join_token"].as_str().unwrap().starts_with("slackwater-join-"), "{added}");
    appliance.fails(4, &["worker", "add", "node-7"]);
    let id = "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11";
    let with_id = appliance.json(&["worker", "add", "node-9", "--id", id]);
    assert_eq!(with_id["worker"]["worker_id"], id);
    appliance.fails(4, &["worker", "add", "node-a", "--id", id]);
    appliance.ok(&["worker", "revoke", "node-9"]);
    for bad in [&["Node"][..], &["a", "--expires-in", "31d"], &["a", "--expires-in", "0s"]] {
        appliance.fails(2, &[&["worker", "add"], bad].concat());
    }
    let list = appliance.ok(&["worker", "list"]);
    let lines: Vec<Vec<&str>> =
        list.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!((lines[1][0], lines[1][1], lines[2][0]), ("node-7", "invited", "node-8"), "{list}");
    let listed = appliance.json(&["worker", "list"]);
    assert_eq!(listed[0]["name"], "node-7");
    assert!(!listed.to_string().contains("slackwater-join-"), "{listed}");
    appliance.ok(&["worker", "revoke", "node-7"]);
    let gone = appliance.fails(3, &["worker", "revoke", "node-7", "node-8"]);
    assert!(gone.contains("node-7"), "{gone}");
    assert_eq!(appliance.ok(&["worker", "list"]), "", "the other one is revoked all the same");
}

#[test]
fn a_certificate_is_trusted_only_by_its_authority() {
    let folder = tempfile::tempdir().unwrap();
    let make = |name: &str| {
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let (cert, key) =
            (folder.path().join(format!("{name}.pem")), folder.path().join(format!("{name}.key")));
        std::fs::write(&cert, made.cert.pem()).unwrap();
        std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
        TlsFiles { cert, key }
    };
    let (ours, other) = (make("ours"), make("other"));
    let (ours_pem, other_pem) = (ours.cert.clone(), other.cert.clone());
    let appliance = Appliance::with(ApiOptions::default(), Some(ours));
    appliance.ok(&["--ca", ours_pem.to_str().unwrap(), "stats"]);
    let refused = appliance.fails(5, &["--ca", other_pem.to_str().unwrap(), "stats"]);
    assert!(refused.contains("secure") && refused.contains("--ca"), "{refused}");
    // What `openssl req -x509` makes.
    let mut params = rcgen::CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    let authority = make("authority");
    std::fs::write(&authority.cert, params.self_signed(&key).unwrap().pem()).unwrap();
    std::fs::write(&authority.key, key.serialize_pem()).unwrap();
    let pem = authority.cert.clone();
    let shown = Appliance::with(ApiOptions::default(), Some(authority));
    let refused = shown.fails(5, &["--ca", pem.to_str().unwrap(), "stats"]);
    assert!(refused.contains("slackwaterd certificate"), "{refused}");
    let plain = appliance.url.replace("https:", "http:");
    let output = appliance::command(&plain, &["stats"]).output().unwrap();
    assert!(matches!(output.status.code(), Some(1 | 5)), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("https"), "{}", text(&output.stderr));
}

#[test]
fn doctor_finds_the_appliance() {
    let appliance = Appliance::start();
    // Answers one RPC call after the other with success, as NFS and MOUNT do to NULL.
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = std::thread::spawn(move || {
        use std::io::{Read, Write};
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().unwrap();
            let mut call = [0; 44];
            stream.read_exact(&mut call).unwrap();
            let head =
                [&0x8000_0018_u32.to_be_bytes()[..], &call[4..8], &1_u32.to_be_bytes()].concat();
            stream.write_all(&[head, vec![0; 16]].concat()).unwrap();
        }
    });
    let output = appliance.run(&["--json", "doctor", "--nfs", &address]);
    server.join().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    for check in report["checks"].as_array().unwrap() {
        let is_appliance = check["name"].as_str().unwrap().starts_with("appliance");
        assert!(!is_appliance || check["ok"] == true, "{check}");
    }
    // Whether this machine can attach depends on it; the exit code must say the same.
    let can_attach = !report["attach"].as_array().unwrap().is_empty();
    assert_eq!(report["ready"], can_attach);
    assert_eq!(output.status.code(), Some(if can_attach { 0 } else { 6 }));
}
