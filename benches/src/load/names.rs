//! Work on the names of one directory, by one connection: makes files, lists them, removes them.
//!
//! As with [`super::run`], only what was answered as asked is counted; a page that leaves out attributes or
//! handles, or a listing that is not of all names, ends the run.

use std::collections::HashMap;
use std::time::Instant;

use slackwater_benches::wire::call::{self, DirectoryPlace};
use slackwater_benches::wire::{Handle, Session, WireError};

use crate::failure::Failure;
use crate::stop::Stop;

use super::tally::{Measured, Tally};
use super::{DEPTH_MAX, Target};

/// Longest answer to READDIRPLUS that is asked for: a size that all servers which are compared can give.
const PAGE_BYTES: u32 = 32 << 10;

/// What is done with each name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameWork {
    /// Of names that are not there.
    Create,
    /// With attributes and handles, page after page. An operation is an entry, and its time is that of its page.
    List,
    Remove,
}

/// What is asked of a server.
#[derive(Clone, Debug)]
pub(crate) struct NameLoad {
    pub(crate) work: NameWork,
    /// In the root of the export; made if it is missing.
    pub(crate) directory: String,
    /// The files are named by the numbers below this one.
    pub(crate) count: u32,
    /// Calls under way at once; a listing has one.
    pub(crate) depth: usize,
}

/// Puts the load on the server: each name once.
pub(crate) fn run(target: &Target, load: &NameLoad, stop: &Stop) -> Result<Measured, Failure> {
    if load.count == 0 || !(1..=DEPTH_MAX).contains(&load.depth) {
        return Err(Failure::Unfit(format!("no such load: {load:?}")));
    }
    let root = Session::mount(target.mount, &target.export)?;
    let mut session = Session::connect(target.nfs)?;
    let directory = session.open_directory(&root, &load.directory)?;
    let start = Instant::now();
    let mut tally = Tally::new();
    match load.work {
        NameWork::Create | NameWork::Remove => {
            change(&mut session, &directory, load, &mut tally, stop)?;
        }
        NameWork::List => list(&mut session, &directory, load, &mut tally, stop)?,
    }
    Ok(tally.measured(0, start.elapsed()))
}

fn change(
    session: &mut Session,
    directory: &Handle,
    load: &NameLoad,
    tally: &mut Tally,
    stop: &Stop,
) -> Result<(), Failure> {
    let mut under_way = HashMap::new();
    let mut numbers = 0..load.count;
    loop {
        stop.check()?;
        while under_way.len() < load.depth {
            let Some(number) = numbers.next() else {
                break;
            };
            let name = name_of(number);
            let begun = Instant::now();
            let xid = session.send(|out, xid| match load.work {
                NameWork::Remove => call::remove(out, xid, directory, &name),
                _ => call::create(out, xid, directory, &name),
            })?;
            under_way.insert(xid, begun);
        }
        if under_way.is_empty() {
            return Ok(());
        }
        let reply = session.receive()?;
        let Some(begun) = under_way.remove(&reply.xid) else {
            let (what, got) = ("xid", u64::from(reply.xid));
            return Err(WireError::Unexpected { what, got, expected: 0 }.into());
        };
        match load.work {
            NameWork::Remove => reply.done("REMOVE")?,
            _ => reply.create("CREATE").map(|_| ())?,
        }
        tally.count(begun.elapsed());
    }
}

fn list(
    session: &mut Session,
    directory: &Handle,
    load: &NameLoad,
    tally: &mut Tally,
    stop: &Stop,
) -> Result<(), Failure> {
    let mut place = DirectoryPlace::default();
    let (mut listed, mut bare) = (0, 0);
    // Besides `.` and `..`, which a server may leave out.
    let expected = u64::from(load.count);
    while listed <= expected + 2 {
        stop.check()?;
        let begun = Instant::now();
        let encode = |out: &mut Vec<u8>, xid| {
            call::read_directory_plus(out, xid, directory, place, PAGE_BYTES);
        };
        let page = session.call(encode)?.directory_page()?;
        let latency = begun.elapsed();
        (0..page.whole_entries).for_each(|_| tally.count(latency));
        listed += page.whole_entries + page.bare_entries;
        bare += page.bare_entries;
        // `.` and `..` may come without.
        if bare > 2 {
            return Err(Failure::Unfit(format!("{bare} entries have no attributes or handle")));
        }
        if page.is_last {
            break;
        }
        if page.next.cookie == place.cookie {
            return Err(Failure::Unfit("a page that is not the last leads nowhere".to_owned()));
        }
        place = page.next;
    }
    if (expected..=expected + 2).contains(&listed) {
        return Ok(());
    }
    let what = format!("{listed} names are listed, expected {expected}");
    Err(Failure::Unfit(what))
}

fn name_of(number: u32) -> String {
    format!("file-{number}")
}
