//! The log over restarts, cuts, full files and faults.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use super::*;

/// Appends, and waits until the change is in the log or lost.
fn append(log: &AuditLog, change: NewChange) {
    if let Some(appended) = log.append(change) {
        appended.blocking_recv().unwrap();
    }
}

fn counted(log: &AuditLog) -> (u64, u64) {
    (log.counts().written.get(), log.counts().lost.get())
}

fn change(by: &str, call: &str) -> NewChange {
    NewChange {
        at: Timestamp::from_nanos(1),
        kind: CallerKind::Token,
        by: by.to_owned(),
        from: Some("10.0.0.9".to_owned()),
        call: call.to_owned(),
        about: None,
        made: None,
        status: Some(204),
    }
}

fn log(directory: &tempfile::TempDir) -> AuditLog {
    AuditLog::open(directory.path().join("audit")).unwrap()
}

fn numbers(log: &AuditLog, before: Option<u64>, limit: usize) -> (Vec<u64>, Option<String>) {
    let page = log.page(&Wanted { before, by: None, limit }).unwrap();
    (page.items.iter().map(|change| change.number).collect(), page.next)
}

fn paths(directory: &tempfile::TempDir) -> Vec<PathBuf> {
    let listed = files::list(&directory.path().join("audit")).unwrap();
    listed.into_iter().map(|file| file.path).collect()
}

#[test]
fn pages_begin_with_the_newest_and_numbers_go_on_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(numbers(&log(&directory), None, 10), (vec![], None));
    assert!(paths(&directory).is_empty(), "nothing is made before the first change");
    for start in [0, 3] {
        let log = log(&directory);
        for number in start..start + 3 {
            append(&log, change(["a", "b"][number % 2], &format!("DELETE /{number}")));
        }
        assert_eq!(counted(&log), (3, 0));
    }
    let log = log(&directory);
    assert_eq!(numbers(&log, None, 4), (vec![6, 5, 4, 3], Some("3".to_owned())));
    assert_eq!(numbers(&log, Some(3), 4), (vec![2, 1], None));
    assert_eq!(numbers(&log, Some(3), 2), (vec![2, 1], None));
    let wanted = Wanted { before: None, by: Some("a".to_owned()), limit: 10 };
    let calls: Vec<_> = log.page(&wanted).unwrap().items.into_iter().map(|c| c.call).collect();
    assert_eq!(calls, ["DELETE /4", "DELETE /2", "DELETE /0"]);
}

#[test]
fn the_files_are_of_their_user_alone() {
    let directory = tempfile::tempdir().unwrap();
    append(&log(&directory), change("a", "x"));
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&directory.path().join("audit")), 0o700);
    assert_eq!(mode(&paths(&directory)[0]), 0o600);
}

#[test]
fn a_line_that_was_cut_is_taken_away() {
    let directory = tempfile::tempdir().unwrap();
    for number in 1..4 {
        append(&log(&directory), change("a", "x"));
        let path = paths(&directory).pop().unwrap();
        let mut file = std::fs::OpenOptions::new().append(true).open(path).unwrap();
        file.write_all(br#"{"number":99,"at":"2025-11-21T09:0"#).unwrap();
        assert_eq!(numbers(&log(&directory), None, 9).0, (1..=number).rev().collect::<Vec<_>>());
    }
}

/// The appliance serves, whatever was written into its files by hand, and goes on with numbers of its own.
#[test]
fn what_is_no_change_is_passed_over() {
    let directory = tempfile::tempdir().unwrap();
    append(&log(&directory), change("a", "x"));
    let path = paths(&directory).pop().unwrap();
    std::fs::write(&path, b"no JSON\n\xff\n{}\n").unwrap();
    std::fs::write(directory.path().join("audit/notes.txt"), "mine").unwrap();
    std::fs::write(directory.path().join("audit/1.jsonl"), "mine").unwrap();
    let log = log(&directory);
    append(&log, change("a", "y"));
    assert_eq!(numbers(&log, None, 9), (vec![1], None));
    assert!(directory.path().join("audit/notes.txt").exists());
}

#[test]
fn the_oldest_files_make_room() {
    let directory = tempfile::tempdir().unwrap();
    let log = log(&directory);
    let long = "x".repeat(4 * TEXT_BYTES_MAX);
    let per_file = FILE_BYTES_MAX / (3 * TEXT_BYTES_MAX as u64);
    let total = per_file * (FILES_MAX as u64 + 3);
    for number in 0..total {
        let about = Some(long.clone());
        let change = NewChange { about, made: Some(long.clone()), ..change(&long, "x") };
        drop(log.append(change));
        // No faster than it is written: what does not fit into the queue is lost.
        if number % 512 == 0 {
            append(&log, self::change("a", "x"));
        }
    }
    append(&log, change("a", "x"));
    let total = total + total.div_ceil(512) + 1;
    let files = paths(&directory);
    assert_eq!(files.len(), FILES_MAX);
    let bytes: u64 = files.iter().map(|path| path.metadata().unwrap().len()).sum();
    assert!(bytes <= FILE_BYTES_MAX * FILES_MAX as u64, "{bytes}");
    assert_eq!(counted(&log), (total, 0));
    let newest = numbers(&log, None, 3).0;
    assert_eq!(newest, [total, total - 1, total - 2]);
    let oldest = files::list(&directory.path().join("audit")).unwrap()[0].first;
    assert!(oldest > 1, "the first file is gone");
    assert_eq!(numbers(&log, Some(oldest + 1), 9), (vec![oldest], None));
}

/// As of a disk without room: the change is lost, is counted, and leaves its number free.
#[test]
fn what_cannot_be_written_is_counted_and_leaves_a_gap() {
    let directory = tempfile::tempdir().unwrap();
    // A file where the directory should be.
    let path = directory.path().join("audit");
    std::fs::write(&path, "").unwrap();
    let log = log(&directory);
    append(&log, change("a", "lost before anything could be read"));
    assert_eq!(counted(&log), (0, 1));
    std::fs::remove_file(&path).unwrap();
    append(&log, change("a", "kept"));
    assert_eq!(numbers(&log, None, 9), (vec![2], None));
    // Moved away, with the file that is written; then a file is in its place.
    let away = directory.path().join("away");
    std::fs::rename(&path, &away).unwrap();
    std::fs::write(&path, "").unwrap();
    let fill = FILE_BYTES_MAX / (3 * TEXT_BYTES_MAX as u64);
    let long = "x".repeat(TEXT_BYTES_MAX);
    let long = || {
        let (about, made) = (Some(long.clone()), Some(long.clone()));
        NewChange { about, made, ..change(&long, "x") }
    };
    let mut sent = 2;
    while counted(&log).1 < 4 {
        append(&log, long());
        sent += 1;
        assert!(sent < 2 * fill, "a full file has a next one, which cannot be made there");
    }
    std::fs::remove_file(&path).unwrap();
    append(&log, long());
    assert_eq!(numbers(&log, None, 9), (vec![sent + 1], None));
    assert_eq!(counted(&log), (sent - 3, 4));
}

/// A page of an older release, and numbers of a newer one.
#[test]
fn kinds_and_fields_of_a_newer_release_are_read() {
    let directory = tempfile::tempdir().unwrap();
    append(&log(&directory), change("a", "x"));
    let path = paths(&directory).pop().unwrap();
    let line = std::fs::read_to_string(&path).unwrap();
    let newer = line.replace("token", "smart-card").replace(":1,", ":7,\"more\":{},");
    std::fs::write(&path, newer).unwrap();
    let log = log(&directory);
    append(&log, change("a", "y"));
    let page = log.page(&Wanted { limit: 9, ..Wanted::default() }).unwrap();
    let kinds: Vec<_> = page.items.iter().map(|change| (change.number, change.kind)).collect();
    assert_eq!(kinds, [(8, CallerKind::Token), (7, CallerKind::Unknown)]);
}

#[test]
fn the_largest_number_stops_nothing() {
    let directory = tempfile::tempdir().unwrap();
    append(&log(&directory), change("a", "x"));
    let path = paths(&directory).pop().unwrap();
    let line = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, line.replace(":1,", &format!(":{},", u64::MAX))).unwrap();
    let log = log(&directory);
    for _ in 0..2 {
        append(&log, change("a", "y"));
    }
    assert_eq!(counted(&log), (2, 0));
}

#[test]
fn what_comes_after_the_end_is_lost() {
    let directory = tempfile::tempdir().unwrap();
    let log = log(&directory);
    append(&log, change("a", "x"));
    log.close();
    append(&log, change("a", "y"));
    log.close();
    assert_eq!(counted(&log), (1, 1));
    assert_eq!(numbers(&log, None, 9), (vec![1], None));
}

#[test]
fn a_long_text_keeps_its_begin_and_its_end() {
    let half = "\u{e9}".repeat(TEXT_BYTES_MAX / 4);
    let cut = bounded(format!("{half}{half}{half}/the end"));
    assert!(cut.starts_with(&format!("{half}...")) && cut.ends_with("/the end"), "{cut}");
    assert!(cut.len() <= TEXT_BYTES_MAX + 3);
    assert_eq!(bounded("short".to_owned()), "short");
}
