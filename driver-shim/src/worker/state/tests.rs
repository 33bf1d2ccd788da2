//! The state against a plain model: what is applied is there after the next open, refusals
//! change nothing, and every file is named by one volume, is a disk of upper directories, or listed as obsolete (D1).

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use slackwater_client::types::{SnapshotId, Timestamp};

use super::*;
use crate::worker::volume::{Content, DockerExtra, Extra, LayerKind, SnapshotRef};
use crate::worker::{forget_users_of_another_boot, identity};

fn key(number: u8) -> Key {
    Key::docker(format!("v{number}"))
}

fn uuid(number: u8) -> Uuid {
    Uuid::from_u128(u128::from(number) + 1)
}

fn content(choice: u8, file: u8) -> Content {
    let from = SnapshotRef { id: SnapshotId::from_bytes([9; 16]), size_bytes: 4096 };
    match choice % 5 {
        0 => Content::Inherited,
        1 => Content::Disk { name: uuid(file), from, size_bytes: 4096 },
        2 => Content::Snapshot { snapshot: from, hold: uuid(file) },
        3 => Content::ImageFile { name: uuid(file), inodes: 1 },
        _ => Content::Image { snapshot: from, hold: uuid(file) },
    }
}

pub(super) fn volume(number: u8, parent: Option<u8>, content: Content) -> Volume {
    Volume {
        key: key(number),
        parent: parent.map(key),
        content,
        layers: LayerKind::default(),
        mounted: None,
        users: 0,
        recent_calls: Vec::new(),
        is_kept_mounted: false,
        given: Vec::new(),
        is_damaged: false,
        usage: None,
        created_at: Timestamp::from_nanos(1),
        extra: Extra::Docker(DockerExtra::default()),
    }
}

#[derive(Clone, Debug)]
enum Step {
    Create(u8, Option<u8>),
    /// Lists a new file, then makes the volume name it.
    Become(u8, u8),
    Delete(u8),
    /// Gives the volume another name, and new content with it.
    Rename(u8, u8, Option<u8>),
    /// Gives the volume an upper directory on the current disk, if there is one.
    Upper(u8),
    /// Gives the volume a directory on the current disk as a lower one, if there is such a disk.
    Give(u8),
    /// Lists a new disk, and has it be the current one.
    UpperDisk,
    /// Has no disk be the current one.
    GiveUp,
    /// Says of all on the current disk that it is damaged.
    Damage,
    /// Lists a file that is about to be made, and forgets about it.
    List,
    /// Lists a file that was found on the appliance.
    Strange,
    /// Takes the first listed file back.
    TakeBack,
    Use(u8),
    Reopen,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..8_u8, proptest::option::of(0..8_u8)).prop_map(|(one, of)| Step::Create(one, of)),
        4 => (0..8_u8, 0..5_u8).prop_map(|(one, choice)| Step::Become(one, choice)),
        2 => (0..8_u8, 0..8_u8, proptest::option::of(0..5_u8))
            .prop_map(|(one, to, choice)| Step::Rename(one, to, choice)),
        2 => (0..8_u8).prop_map(Step::Delete),
        4 => (0..8_u8).prop_map(Step::Upper),
        3 => (0..8_u8).prop_map(Step::Give),
        1 => Just(Step::UpperDisk),
        1 => Just(Step::GiveUp),
        1 => Just(Step::Damage),
        1 => Just(Step::List),
        1 => Just(Step::Strange),
        1 => Just(Step::TakeBack),
        1 => (0..8_u8).prop_map(Step::Use),
        1 => Just(Step::Reopen),
    ]
}

/// What the state should hold.
#[derive(Debug, Default)]
struct Model {
    volumes: BTreeMap<Key, Volume>,
    listed: BTreeSet<OwnFile>,
    /// Those of them that are listed in memory alone.
    unsaved: BTreeSet<OwnFile>,
    upper_disk: Option<Uuid>,
    made: u8,
}

impl Model {
    fn has_children(&self, of: &Key) -> bool {
        self.volumes.values().any(|volume| volume.parent.as_ref() == Some(of))
    }

    fn disk(name: Uuid) -> OwnFile {
        OwnFile { kind: FileKind::Disk, name }
    }

    /// Lists what was let go of, if nothing has it any more.
    fn let_go(&mut self, files: BTreeSet<OwnFile>) {
        let is_named = |file: &OwnFile| {
            self.upper_disk.map(Self::disk) == Some(*file)
                || self.volumes.values().any(|volume| files_of(volume).contains(file))
        };
        let gone: Vec<_> = files.into_iter().filter(|file| !is_named(file)).collect();
        self.listed.extend(gone);
    }

    fn list(&mut self, state: &State, file: OwnFile) {
        state.list(file).unwrap();
        self.listed.insert(file);
        self.unsaved.insert(file);
    }

    /// It is named.
    fn take_off(&mut self, file: OwnFile) {
        self.listed.remove(&file);
        self.unsaved.remove(&file);
    }

    /// What is in memory alone is gone.
    fn reopen(&mut self) {
        for file in std::mem::take(&mut self.unsaved) {
            self.listed.remove(&file);
        }
    }

    fn rename(&mut self, state: &State, one: u8, to: u8, choice: Option<u8>) {
        self.made += 1;
        let became = choice.map(|choice| content(choice, self.made));
        let outcome = state.rename(&key(one), |volume| {
            volume.key = key(to);
            volume.content = became.clone().unwrap_or_else(|| volume.content.clone());
        });
        let is_fine = self.volumes.contains_key(&key(one))
            && !self.volumes.contains_key(&key(to))
            && !self.has_children(&key(one));
        assert_eq!(outcome.is_ok(), is_fine, "{outcome:?}");
        if let Ok(renamed) = outcome {
            let before = self.volumes.remove(&key(one));
            self.volumes.insert(key(to), renamed);
            self.let_go(before.as_ref().map(files_of).unwrap_or_default());
        }
    }

    fn take_of_files(&mut self, state: &State, step: &Step) {
        if let Step::TakeBack = step {
            if let Some(file) = self.listed.first().copied() {
                state.strike_off(file).unwrap();
                self.take_off(file);
            }
            return;
        }
        self.made += 1;
        let file = OwnFile { kind: FileKind::Hold, name: uuid(self.made) };
        if let Step::List = step {
            return self.list(state, file);
        }
        state.apply(&[Change::Obsolete(file)]).unwrap();
        self.listed.insert(file);
    }

    fn take_of_uppers(&mut self, state: &State, step: &Step) {
        match *step {
            Step::Upper(one) => {
                let (Some(disk), Some(old)) = (self.upper_disk, self.volumes.get(&key(one))) else {
                    return;
                };
                self.made += 1;
                let content = Content::Upper { disk, name: uuid(self.made) };
                let new = Volume { content: content.clone(), ..old.clone() };
                let files = files_of(old);
                state.update(&key(one), |volume| volume.content = content).unwrap();
                self.volumes.insert(key(one), new);
                self.let_go(files);
            }
            Step::Give(one) => {
                let (Some(disk), Some(old)) = (self.upper_disk, self.volumes.get(&key(one))) else {
                    return;
                };
                self.made += 1;
                // The second takes the place of the first.
                let given = vec![Directory { disk, name: uuid(self.made) }];
                let (new, files) = (Volume { given: given.clone(), ..old.clone() }, files_of(old));
                state.update(&key(one), |volume| volume.given = given).unwrap();
                self.volumes.insert(key(one), new);
                self.let_go(files);
            }
            Step::UpperDisk => {
                self.made += 1;
                let disk = uuid(self.made);
                self.list(state, Self::disk(disk));
                state.apply(&[Change::upper_disk(Some(disk))]).unwrap();
                self.take_off(Self::disk(disk));
                let before = self.upper_disk.replace(disk);
                self.let_go(before.into_iter().map(Self::disk).collect());
            }
            Step::GiveUp => {
                state.apply(&[Change::upper_disk(None)]).unwrap();
                let before = self.upper_disk.take();
                self.let_go(before.into_iter().map(Self::disk).collect());
            }
            _ => {
                let Some(disk) = self.upper_disk.map(Self::disk) else { return };
                let is_on_it = |volume: &Volume| files_of(volume).contains(&disk);
                state.update_matching(is_on_it, |volume| volume.is_damaged = true).unwrap();
                for volume in self.volumes.values_mut().filter(|volume| is_on_it(volume)) {
                    volume.is_damaged = true;
                }
            }
        }
    }

    fn take(&mut self, state: &State, step: &Step) {
        match *step {
            Step::Upper(_) | Step::Give(_) | Step::UpperDisk | Step::GiveUp | Step::Damage => {
                self.take_of_uppers(state, step);
            }
            Step::Create(one, parent) => {
                let new = volume(one, parent, Content::Inherited);
                let outcome = state.apply(&[Change::Create(Box::new(new.clone()))]);
                let is_fine = !self.volumes.contains_key(&key(one))
                    && parent.is_none_or(|parent| self.volumes.contains_key(&key(parent)));
                assert_eq!(outcome.is_ok(), is_fine, "{outcome:?}");
                if is_fine {
                    self.volumes.insert(key(one), new);
                }
            }
            Step::Become(one, choice) => {
                self.made += 1;
                let content = content(choice, self.made);
                let mut new = volume(one, None, content);
                let files = files_of(&new);
                for file in &files {
                    self.list(state, *file);
                }
                let Some(old) = self.volumes.get(&key(one)).cloned() else {
                    let outcome = state.update(&key(one), |_| ());
                    assert!(matches!(outcome, Err(WorkerError::NotFound { .. })));
                    return;
                };
                new.parent.clone_from(&old.parent);
                let content = new.content.clone();
                state.update(&key(one), |volume| volume.content = content).unwrap();
                for file in files {
                    self.take_off(file);
                }
                let before = files_of(&old);
                (new.users, new.is_damaged) = (old.users, old.is_damaged);
                new.given.clone_from(&old.given);
                self.volumes.insert(key(one), new);
                self.let_go(before);
            }
            Step::Delete(one) => {
                let outcome = state.apply(&[Change::Delete(key(one))]);
                let is_fine = self.volumes.contains_key(&key(one)) && !self.has_children(&key(one));
                assert_eq!(outcome.is_ok(), is_fine, "{outcome:?}");
                if is_fine {
                    let before = self.volumes.remove(&key(one));
                    self.let_go(before.as_ref().map(files_of).unwrap_or_default());
                }
            }
            Step::Rename(one, to, choice) => self.rename(state, one, to, choice),
            Step::List | Step::Strange | Step::TakeBack => self.take_of_files(state, step),
            Step::Use(one) => {
                if let Some(volume) = self.volumes.get_mut(&key(one)) {
                    volume.users += 1;
                    state.update(&key(one), |volume| volume.users += 1).unwrap();
                }
            }
            Step::Reopen => self.reopen(),
        }
    }

    fn compare(&self, state: &State) {
        let volumes: Vec<_> = self.volumes.values().cloned().collect();
        assert_eq!(state.of_engine(Engine::Docker), volumes);
        assert_eq!(state.obsolete(), self.listed.iter().copied().collect::<Vec<_>>());
        for one in self.volumes.keys() {
            assert_eq!(!state.children(one).is_empty(), self.has_children(one), "{one}");
        }
        // D1: nothing that is named is listed, and no two volumes name the same but a disk of upper directories.
        let shared = self.volumes.values().flat_map(Volume::directories);
        let disks: BTreeSet<_> = shared.map(|one| Self::disk(one.disk)).collect();
        let named = self.volumes.values().flat_map(files_of).filter(|file| !disks.contains(file));
        let named: Vec<_> = named.collect();
        assert_eq!(named.iter().collect::<BTreeSet<_>>().len(), named.len());
        assert_eq!(state.upper_disk(), self.upper_disk);
        let disks: BTreeSet<_> = disks.into_iter().chain(self.upper_disk.map(Self::disk)).collect();
        let names: BTreeSet<_> = disks.iter().map(|disk| disk.name).collect();
        assert_eq!(state.upper_disks(), names);
        for file in named.into_iter().chain(disks) {
            assert!(!self.listed.contains(&file) && state.knows(file), "{file:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn the_state_is_what_the_model_is(steps in proptest::collection::vec(step(), 1..60)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.redb");
        let mut state = State::open(&path).unwrap();
        let mut model = Model::default();
        for step in &steps {
            model.take(&state, step);
            if matches!(step, Step::Reopen) {
                drop(state);
                state = State::open(&path).unwrap();
            }
            model.compare(&state);
        }
        drop(state);
        model.reopen();
        model.compare(&State::open(&path).unwrap());
    }
}

#[test]
fn a_rename_carries_the_file_and_checks_the_new_name() {
    let folder = tempfile::tempdir().unwrap();
    let state = State::open(&folder.path().join("state.redb")).unwrap();
    let hold = OwnFile { kind: FileKind::Hold, name: uuid(1) };
    let one = volume(1, None, content(2, 1));
    let taken = volume(2, None, Content::Inherited);
    state.apply(&[Change::Create(Box::new(one.clone()))]).unwrap();
    state.apply(&[Change::Create(Box::new(taken))]).unwrap();
    let rename = |to: u8, became: Option<Content>| {
        state.rename(&key(1), |volume| {
            volume.key = key(to);
            volume.content = became.unwrap_or_else(|| volume.content.clone());
        })
    };
    assert!(matches!(rename(2, Some(content(2, 4))), Err(WorkerError::Exists { .. })));
    assert_eq!(state.get(&key(1)), Some(one.clone()));
    assert!(state.obsolete().is_empty());
    rename(3, None).unwrap();
    assert_eq!(state.get(&key(1)), None);
    assert!(state.knows(hold) && state.obsolete().is_empty());
    assert!(matches!(rename(4, None), Err(WorkerError::NotFound { .. })));
    // An image's file stays, as what keeps its snapshot.
    state.apply(&[Change::Create(Box::new(volume(1, None, content(3, 5))))]).unwrap();
    rename(4, Some(content(4, 5))).unwrap();
    assert!(state.obsolete().is_empty());
    // What it had instead goes by the same change.
    state.apply(&[Change::Create(Box::new(volume(1, None, content(3, 6))))]).unwrap();
    rename(5, Some(content(4, 7))).unwrap();
    assert_eq!(state.obsolete(), [OwnFile { kind: FileKind::Hold, name: uuid(6) }]);
}

#[test]
fn a_second_daemon_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.redb");
    let first = State::open(&path).unwrap();
    let error = State::open(&path).unwrap_err();
    assert!(error.to_string().contains("nobody else uses it"), "{error}");
    drop(first);
    State::open(&path).unwrap();
}

#[test]
fn a_copy_of_a_machine_is_another_worker() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let state = State::open(&path.join("state.redb")).unwrap();
    let first = identity(&state, path, "one").unwrap();
    assert_eq!(identity(&state, path, "one").unwrap(), first);
    assert_eq!(identity(&state, path, "").unwrap(), first, "nothing to compare");
    let copied = identity(&state, path, "two").unwrap();
    assert_ne!(copied, first);
    // With volumes it may be either machine: nothing is taken back in the other's name.
    state.apply(&[Change::Create(Box::new(volume(1, None, Content::Inherited)))]).unwrap();
    let refused = identity(&state, path, "three").unwrap_err();
    assert!(matches!(refused, WorkerError::OtherMachine { .. }), "{refused}");
    assert_eq!(identity(&state, path, "two").unwrap(), copied);
}

#[test]
fn after_a_boot_nothing_is_mounted_or_given_and_what_is_committed_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let state = State::open(&folder.path().join("state.redb")).unwrap();
    let (disk, given) = (uuid(1), vec![Directory { disk: uuid(2), name: uuid(3) }]);
    let used = |number, content| Volume {
        given: given.clone(),
        is_damaged: true,
        is_kept_mounted: true,
        ..volume(number, None, content)
    };
    let upper = used(1, Content::Upper { disk, name: uuid(4) });
    let mut lower = used(2, Content::Lower { disk, name: uuid(5) });
    lower.is_kept_mounted = false;
    for one in [upper, lower] {
        state.apply(&[Change::Create(Box::new(one))]).unwrap();
    }
    let fact = Change::Fact("boot_id".to_owned(), "another".to_owned());
    state.apply(&[fact]).unwrap();
    forget_users_of_another_boot(&state).unwrap();
    let (upper, lower) = (state.get(&key(1)).unwrap(), state.get(&key(2)).unwrap());
    assert!(upper.is_damaged && !upper.is_kept_mounted && upper.given.is_empty());
    assert!(!lower.is_damaged, "its disk is mounted again");
    assert_eq!(lower.given, given, "it is above them");
    // Of the same boot nothing is forgotten.
    state.update(&key(2), |volume| volume.is_damaged = true).unwrap();
    forget_users_of_another_boot(&state).unwrap();
    assert!(state.get(&key(2)).unwrap().is_damaged);
}

#[test]
fn after_a_change_that_failed_none_is_taken() {
    let disk = failing::FailingDisk::new();
    let state = disk.state();
    state.apply(&[Change::Create(Box::new(volume(1, None, Content::Inherited)))]).unwrap();
    state.require_certain().unwrap();
    // What is refused by itself leaves no doubt.
    assert!(state.apply(&[Change::Delete(key(2))]).is_err());
    state.require_certain().unwrap();
    disk.fail();
    assert!(state.update(&key(1), |volume| volume.users = 1).is_err());
    let file = OwnFile { kind: FileKind::Hold, name: uuid(1) };
    let refusals =
        [state.require_certain(), state.apply(&[Change::Obsolete(file)]), state.list(file)];
    for refused in refusals {
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("restart slackwater-driver"), "{refused}");
    }
    assert!(state.get(&key(1)).unwrap().users == 0 && state.obsolete().is_empty());
}
