//! Those who commit one file together: each is answered once, whatever happens.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use super::*;
use crate::disk::Fault;
use crate::error::ErrorKind;
use crate::testing::{World, blocks, options};

type Outcome = Result<(Change, u64)>;

/// Longer than any machine needs.
const PATIENCE: Duration = Duration::from_secs(60);

fn told(sender: &Sender<Outcome>) -> Committed {
    let sender = sender.clone();
    Box::new(move |outcome| sender.send(outcome).unwrap())
}

/// Commits until nobody waits.
fn commit_then(core: &Core, inode: InodeId, done: Committed) {
    let mut duty = super::commit_then(core, inode, done);
    while let Some(left) = duty {
        duty = serve_commits(core, left);
    }
}

fn world() -> (World, InodeId) {
    let world = World::new(options(64 << 20), None);
    let inode = world.create("f");
    world.write(inode, 0, blocks(&[1, 2, 3]));
    (world, inode)
}

/// While one caller holds a thread and waits for the file, many come; answers what they learn.
fn many_commit(world: &World, inode: InodeId, fault: Option<Fault>) -> Vec<Outcome> {
    let file = world.core.file(inode).unwrap();
    let (sender, outcomes): (_, Receiver<Outcome>) = channel();
    thread::scope(|scope| {
        let flushing = file.flush.lock();
        let first = told(&sender);
        scope.spawn(|| commit_then(&world.core, inode, first));
        while !file.waiting.lock().is_served {
            thread::yield_now();
        }
        for _ in 0..20 {
            commit_then(&world.core, inode, told(&sender));
            let mut asked = 0;
            let joined = join_commit(&world.core, inode, &mut || {
                asked += 1;
                told(&sender)
            });
            assert!(joined && asked == 1);
        }
        assert!(outcomes.try_recv().is_err(), "nobody is answered before the commit");
        if let Some(fault) = fault {
            world.disk.inject(fault);
        }
        drop(flushing);
    });
    drop(sender);
    let all: Vec<Outcome> = outcomes.iter().collect();
    assert_eq!(all.len(), 41, "each is answered once");
    assert!(!file.waiting.lock().is_served && file.waiting.lock().told.is_empty());
    all
}

fn commits(world: &World) -> u64 {
    crate::stats::stats(&world.core).commits
}

#[test]
fn many_callers_share_one_commit() {
    let (world, inode) = world();
    let (before, verifier) = (commits(&world), world.core.committer.verifier());
    for outcome in many_commit(&world, inode, None) {
        let (change, under) = outcome.unwrap();
        assert_eq!((change.before.size_bytes, change.after.size_bytes), (3 * 4096, 3 * 4096));
        assert_eq!(change.after.used_bytes, 3 * 4096, "the attributes after it");
        assert_eq!(under, verifier);
    }
    assert_eq!(commits(&world), before + 1);
    assert_eq!(world.core.files.dirty_bytes(), 0);
    let world = world.crash();
    assert!(world.content(inode) == blocks(&[1, 2, 3]), "it was durable");
}

#[test]
fn all_learn_of_a_failure_and_the_next_commit_goes_on() {
    for (fault, kind) in
        [(Fault::NoSpace(0), ErrorKind::NoSpace), (Fault::ShortWrite(0), ErrorKind::Io)]
    {
        let (world, inode) = world();
        for outcome in many_commit(&world, inode, Some(fault)) {
            assert_eq!(outcome.unwrap_err().kind(), kind);
        }
        for outcome in many_commit(&world, inode, None) {
            outcome.unwrap();
        }
        world.check();
    }
}

#[test]
fn all_learn_that_writes_are_refused_for_good() {
    let (world, inode) = world();
    for outcome in many_commit(&world, inode, Some(Fault::Sync(0))) {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Poisoned);
    }
    let (sender, outcomes) = channel();
    commit_then(&world.core, inode, told(&sender));
    let error = outcomes.try_recv().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
    assert!(!join_commit(&world.core, inode, &mut || told(&sender)), "nobody serves");
}

#[test]
fn nobody_joins_where_nobody_commits() {
    let (world, inode) = world();
    let never = &mut || -> Committed { unreachable!("nobody is to be told") };
    assert!(!join_commit(&world.core, inode, never), "nobody serves");
    assert!(!join_commit(&world.core, InodeId::new(1 << 40), never), "there is no such file");
    let file = world.core.file(inode).unwrap();
    let mut waiting = file.waiting.lock();
    waiting.is_served = true;
    assert!(!join_commit(&world.core, inode, never), "it would have to wait");
    waiting.is_served = false;
    drop(waiting);
    let (sender, outcomes) = channel();
    commit_then(&world.core, InodeId::new(1 << 40), told(&sender));
    assert_eq!(outcomes.recv().unwrap().unwrap_err().kind(), ErrorKind::Stale);
    commit_then(&world.core, InodeId::ROOT, told(&sender));
    assert_eq!(outcomes.recv().unwrap().unwrap_err().kind(), ErrorKind::IsDirectory);
}

/// A caller that comes while the commit is under way, and wrote before, is in the next one.
#[test]
fn what_was_written_during_a_commit_is_in_the_next() {
    let (world, inode) = world();
    let file = world.core.file(inode).unwrap();
    let (sender, outcomes) = channel();
    thread::scope(|scope| {
        let leader = world.core.committer.leader.lock();
        let first = told(&sender);
        scope.spawn(|| commit_then(&world.core, inode, first));
        while file.state.read().flushing.is_empty() {
            thread::yield_now();
        }
        world.write(inode, 1, blocks(&[22]));
        assert!(join_commit(&world.core, inode, &mut || told(&sender)));
        drop(leader);
        for _ in 0..2 {
            outcomes.recv_timeout(PATIENCE).unwrap().unwrap();
        }
    });
    let world = world.crash();
    assert!(world.content(inode) == blocks(&[1, 22, 3]));
}

#[test]
fn callers_from_many_threads_are_all_answered() {
    let (world, inode) = world();
    let (sender, outcomes) = channel();
    let is_going = AtomicBool::new(true);
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut seed = 100;
            while is_going.load(Ordering::SeqCst) {
                seed += 1;
                world.write(inode, seed % 7, blocks(&[seed]));
            }
        });
        let callers: Vec<_> = (0..4)
            .map(|_| {
                let (world, sender) = (&world, sender.clone());
                scope.spawn(move || {
                    for _ in 0..100 {
                        if !join_commit(&world.core, inode, &mut || told(&sender)) {
                            commit_then(&world.core, inode, told(&sender));
                        }
                    }
                })
            })
            .collect();
        for caller in callers {
            caller.join().unwrap();
        }
        for _ in 0..400 {
            outcomes.recv_timeout(PATIENCE).unwrap().unwrap();
        }
        is_going.store(false, Ordering::SeqCst);
        writer.join().unwrap();
    });
    assert!(outcomes.try_recv().is_err(), "none is answered twice");
    flush(&world.core, &world.core.file(inode).unwrap()).unwrap();
    assert_eq!(world.core.files.dirty_bytes(), 0);
    world.check();
}

#[test]
fn a_caller_that_panics_takes_no_other_along() {
    let (world, inode) = world();
    let file = world.core.file(inode).unwrap();
    let (sender, outcomes) = channel();
    let panicking: Committed = Box::new(|_| panic!("a caller's own fault"));
    let flushing = file.flush.lock();
    let core = Arc::clone(&world.core);
    let first = told(&sender);
    let serving = thread::spawn(move || commit_then(&core, inode, first));
    while !file.waiting.lock().is_served {
        thread::yield_now();
    }
    commit_then(&world.core, inode, told(&sender));
    commit_then(&world.core, inode, panicking);
    commit_then(&world.core, inode, told(&sender));
    drop(flushing);
    assert!(serving.join().is_err(), "it panicked");
    for _ in 0..3 {
        // The commit was done before; who is told after the panic cannot be sure of it.
        drop(outcomes.recv_timeout(PATIENCE).unwrap());
    }
    commit_then(&world.core, inode, told(&sender));
    outcomes.recv_timeout(PATIENCE).unwrap().unwrap();
}

/// Callers that come during each commit do not keep the thread that commits.
#[test]
fn a_thread_is_not_kept_by_those_who_keep_coming() {
    let (world, inode) = world();
    let (sender, outcomes) = channel();
    let before = commits(&world);
    let core = Arc::clone(&world.core);
    let next = told(&sender);
    let first: Committed = Box::new(move |outcome| {
        outcome.unwrap();
        // Each writes, and comes back when it is told.
        let last = next;
        let second: Committed = Box::new({
            let core = Arc::clone(&core);
            move |outcome| {
                outcome.unwrap();
                assert!(super::commit_then(&core, inode, last).is_none(), "one has the duty");
            }
        });
        assert!(super::commit_then(&core, inode, second).is_none(), "one has the duty");
    });
    let duty = super::commit_then(&world.core, inode, first).expect("one still waits");
    assert!(outcomes.try_recv().is_err());
    assert!(world.core.file(inode).unwrap().waiting.lock().is_served);
    assert!(join_commit(&world.core, inode, &mut || told(&sender)), "it can still be joined");
    assert!(serve_commits(&world.core, duty).is_none());
    for _ in 0..2 {
        outcomes.try_recv().unwrap().unwrap();
    }
    assert_eq!(commits(&world), before + 1, "only the first had something to write");
    assert!(!world.core.file(inode).unwrap().waiting.lock().is_served);
}

#[test]
fn a_duty_that_is_dropped_leaves_nobody_waiting() {
    let (world, inode) = world();
    let (sender, outcomes) = channel();
    let file = world.core.file(inode).unwrap();
    file.waiting.lock().is_served = true;
    commit_then(&world.core, inode, told(&sender));
    drop(CommitDuty { file: Arc::clone(&file), told: Answers::default(), is_done: false });
    assert_eq!(outcomes.try_recv().unwrap().unwrap_err().kind(), ErrorKind::Poisoned);
    commit_then(&world.core, inode, told(&sender));
    outcomes.try_recv().unwrap().unwrap();
}
