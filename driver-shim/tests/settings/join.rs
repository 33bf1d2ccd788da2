//! A machine becomes a worker: the command, what it leaves on the disk, and the daemon that goes on with it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use slackwater_api::{Role, Secret, Token};
use slackwater_client::worker::{AddWorker, Worker, WorkerName};
use slackwater_client::{Client, ProblemCode, RetryPolicy};
use slackwater_driver::worker::worker_id_in;
use tokio::runtime::Runtime;

use super::support::Appliance;
use super::{Daemon, Folder, TIME_MAX, command, text};

/// An appliance that asks for tokens, and a state directory of a machine that has none yet.
struct Place {
    appliance: Appliance,
    folder: Folder,
    runtime: Runtime,
    admin: Client,
}

impl Place {
    fn new() -> Self {
        let token = Token {
            name: "root".to_owned(),
            role: Role::Admin,
            secret: Secret::new("root-secret"),
        };
        let appliance = Appliance::start_for(vec![token]);
        let admin = client(&appliance, "root-secret");
        Self { appliance, folder: Folder::new(), runtime: Runtime::new().unwrap(), admin }
    }

    fn state(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    fn credential(&self) -> String {
        fs::read_to_string(self.state().join("credential")).unwrap()
    }

    /// The join token of a new worker.
    fn add(&self, name: &str) -> String {
        let request =
            AddWorker { name: name.parse().unwrap(), join_token_seconds: None, worker_id: None };
        self.runtime.block_on(self.admin.add_worker(&request)).unwrap().join_token
    }

    fn worker(&self, name: &str) -> Worker {
        let name: WorkerName = name.parse().unwrap();
        self.runtime.block_on(self.admin.worker(&name)).unwrap()
    }

    fn revoke(&self, name: &str) {
        let name: WorkerName = name.parse().unwrap();
        self.runtime.block_on(self.admin.revoke_worker(&name)).unwrap();
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let state = self.state();
        let mut command = command(arguments);
        // Where the arguments name others, those count.
        command.env("SLACKWATER_API", &self.appliance.url).env("SLACKWATER_STATE_DIR", &state);
        command
    }

    /// What `join` says to this input, and its exit code.
    fn join(&self, input: &str, more: &[&str]) -> (Option<i32>, String) {
        use std::io::Write;
        let mut command = self.command(&[&["join"], more].concat());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // A command that refuses its settings reads no input.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        said(&child.wait_with_output().unwrap())
    }

    fn run(&self, arguments: &[&str]) -> (Option<i32>, String) {
        said(&self.command(arguments).output().unwrap())
    }

    /// Whether the appliance takes a credential.
    fn opens(&self, credential: &str) -> bool {
        let client = client(&self.appliance, credential.trim());
        match self.runtime.block_on(client.stats()) {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(error.code(), Some(ProblemCode::Unauthenticated), "{error}");
                false
            }
        }
    }
}

fn client(appliance: &Appliance, secret: &str) -> Client {
    let token = slackwater_client::Token::new(secret).unwrap();
    Client::builder(&appliance.url).retry(RetryPolicy::never()).token(token).build().unwrap()
}

fn said(output: &Output) -> (Option<i32>, String) {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    (output.status.code(), String::from_utf8(both).unwrap())
}

#[test]
fn a_machine_joins_and_its_commands_have_the_credential() {
    let place = Place::new();
    let (code, refused) = place.run(&["workers"]);
    assert_eq!(code, Some(1), "{refused}");
    let join_token = place.add("node-7");
    assert_eq!(
        place.join(&format!("{join_token}\n"), &[]),
        (Some(0), "joined as node-7\n".to_owned())
    );
    let path = place.state().join("credential");
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(place.worker("node-7").worker_id, Some(worker_id_in(&place.state()).unwrap()));
    assert!(place.opens(&place.credential()));
    assert_eq!(place.run(&["workers"]).0, Some(0));

    // Once more on this machine is the same; on another one it is refused.
    let before = place.credential();
    assert_eq!(place.join(&join_token, &[]).0, Some(0));
    assert_eq!(place.credential(), before);
    let other = place.folder.path().join("other");
    let (code, used) = place.join(&join_token, &["--state-dir", text(&other)]);
    assert!(code == Some(1) && used.contains("was used at"), "{used}");
    assert!(!used.contains(&join_token) && !other.join("credential").exists(), "{used}");
    let (code, refused) = place.run(&["workers", "sweep", "--older-than", "30d"]);
    assert!(code == Some(2) && refused.contains("--token-file"), "{refused}");
    place.revoke("node-7");
    let (code, revoked) = place.run(&["workers"]);
    assert!(code == Some(1) && revoked.contains("revoked"), "{revoked}");
    // The machine comes back, under another name.
    let file = place.folder.path().join("token");
    fs::write(&file, place.add("node-8")).unwrap();
    let by_file = place.join("", &["--join-token-file", text(&file)]);
    assert_eq!(by_file, (Some(0), "joined as node-8\n".to_owned()));
    assert_eq!(place.run(&["workers"]).0, Some(0));
}

#[test]
fn a_join_that_was_cut_off_goes_on() {
    let place = Place::new();
    let join_token = place.add("node-7");
    assert_eq!(place.join(&join_token, &[]).0, Some(0));
    // Killed before it had the answer.
    let credential = place.credential();
    fs::remove_file(place.state().join("credential")).unwrap();
    assert_eq!(place.join(&join_token, &[]).0, Some(0));
    assert_eq!(place.credential(), credential);
    // What an earlier worker of this machine had is not used again.
    place.revoke("node-7");
    assert_eq!(place.join(&place.add("node-7"), &[]).0, Some(0));
    assert!(place.opens(&place.credential()) && !place.opens(&credential));
}

#[test]
fn a_machine_that_lost_its_state_joins_again() {
    let place = Place::new();
    assert_eq!(place.join(&place.add("node-7"), &[]).0, Some(0));
    fs::remove_file(place.state().join("state.redb")).unwrap();
    let socket = place.folder.path().join("docker.sock");
    let daemon = Daemon::start(&mut place.command(&["--docker-socket", text(&socket)]));
    assert!(!place.state().join("credential").exists(), "that of another id is kept");
    assert_eq!(place.join(&place.add("node-8"), &[]).0, Some(0));
    assert_eq!(daemon.stop(), Some(0));
    assert_eq!(place.worker("node-8").worker_id, Some(worker_id_in(&place.state()).unwrap()));
}

#[test]
fn what_is_no_join_token_is_refused_and_nothing_is_made() {
    let place = Place::new();
    for input in ["", "s3cret-of-something-else", "two words"] {
        let (code, refused) = place.join(input, &[]);
        assert!(code == Some(2) && !refused.contains("s3cret"), "{refused}");
    }
    let (code, refused) = place.join("slackwater-join-0", &["--token-file", "/nonexistent"]);
    assert!(code == Some(2) && refused.contains("token-file"), "{refused}");
    assert!(!place.state().exists());
    let (code, refused) = place.join(&format!("slackwater-join-{}", "0".repeat(64)), &[]);
    assert!(code == Some(1) && refused.contains("slackwater worker add"), "{refused}");
    assert!(!place.state().join("credential").exists());
}

#[test]
fn a_daemon_tells_its_id_and_replaces_an_old_credential() {
    let place = Place::new();
    let socket = place.folder.path().join("docker.sock");
    let start = || Daemon::start(&mut place.command(&["--docker-socket", text(&socket)]));
    let daemon = start();
    assert_eq!(place.join(&place.add("node-7"), &[]).0, Some(0));
    assert_eq!(daemon.stop(), Some(0));
    assert_eq!(place.worker("node-7").worker_id, Some(worker_id_in(&place.state()).unwrap()));

    let first = place.credential();
    let path = place.state().join("credential");
    let touched = Command::new("touch").args(["-d", "31 days ago"]).arg(&path).status().unwrap();
    assert!(touched.success());
    let daemon = start();
    let start = Instant::now();
    while place.credential() == first {
        assert!(start.elapsed() < TIME_MAX, "the credential is not replaced");
        std::thread::sleep(Duration::from_millis(20));
    }
    // Its use ends the old one after the grace, which is none here.
    assert!(place.opens(&place.credential()));
    while place.opens(&first) {
        assert!(start.elapsed() < TIME_MAX, "the old credential still counts");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(daemon.stop(), Some(0));
    assert_eq!(place.run(&["workers"]).0, Some(0));
}
