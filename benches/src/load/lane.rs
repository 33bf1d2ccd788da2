//! The calls of one connection: what is sent next, and what follows each answer.

use std::time::Instant;

use slackwater_benches::mix;
use slackwater_benches::wire::reply::{ReadReply, Reply, WriteReply};
use slackwater_benches::wire::{Handle, WireError, WriteVerifier, call, random_xid};
use slackwater_blockstore::BLOCK_BYTES_U64;

use crate::failure::Failure;

use super::fill::{FILL_BYTES, Fill};
use super::outbound::Outbound;
use super::tally::Tally;
use super::{Amount, CommitPace, Load};

/// The part of an xid that names the call's place; the rest counts.
const PLACES: u32 = 4096;

/// Counts of one place before they begin again.
const COUNTS: u32 = u32::MAX / PLACES;

/// What all connections share.
#[derive(Debug)]
pub(super) struct Shared<'a> {
    pub(super) load: &'a Load,
    /// Length of a block as it is sent.
    pub(super) block_count: u32,
    /// When the last operation begins at the latest.
    pub(super) deadline: Option<Instant>,
    /// What is written or verified.
    pub(super) fill: Option<Fill>,
    pub(super) tally: Tally,
    /// Of the first answer that had one.
    pub(super) verifier: Option<WriteVerifier>,
}

/// The calls of one connection.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) outbound: Outbound,
    file: Handle,
    /// One for each operation under way, and one for a COMMIT of its own.
    places: Vec<Place>,
    in_flight: usize,
    /// Operations that have begun.
    begun: u64,
    /// Operations in all, if they are counted.
    quota: Option<u64>,
    /// Blocks before those of this connection, if the work is sequential.
    first_block: u64,
    /// For random work.
    random: u64,
    /// Whether something was written that only a COMMIT makes durable.
    pub(super) is_unstable: bool,
}

/// One call under way, or none.
#[derive(Clone, Copy, Debug)]
struct Place {
    xid: u32,
    state: State,
    begun: Instant,
    offset_bytes: u64,
}

/// What is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Reading,
    Writing,
    /// The second half of an operation.
    Committing,
    /// A COMMIT that is no operation.
    Flushing,
}

impl<'a> Shared<'a> {
    pub(super) fn new(load: &'a Load) -> Self {
        let needs_fill = load.is_write() || load.is_verified;
        Self {
            load,
            block_count: u32::try_from(load.block_bytes).unwrap_or(u32::MAX),
            deadline: None,
            fill: needs_fill.then(|| Fill::new(load.seed)),
            tally: Tally::new(),
            verifier: None,
        }
    }

    /// Whether no two payloads that wait to be sent can share a place of the fill: then they
    /// are sent from there.
    fn is_sent_in_place(&self) -> bool {
        let load = self.load;
        load.connections == 1
            && !load.is_random()
            && load.depth * load.block_bytes <= FILL_BYTES
            && load.span_bytes.is_multiple_of(FILL_BYTES as u64)
    }

    /// A verifier that changes tells of a server that started anew, and of lost writes.
    fn check_verifier(&mut self, got: WriteVerifier) -> Result<(), Failure> {
        let expected = *self.verifier.get_or_insert(got);
        if got == expected {
            return Ok(());
        }
        Err(Failure::Unfit("the server was started anew while it was measured".to_owned()))
    }
}

impl Lane {
    /// The lane of the connection with that number.
    pub(super) fn new(load: &Load, number: u64, file: Handle, now: Instant) -> Self {
        // Counted on from there.
        let xid = random_xid();
        let idle = Place { xid, state: State::Idle, begun: now, offset_bytes: 0 };
        let connections = load.connections as u64;
        let quota = match load.amount {
            Amount::Time(_) => None,
            Amount::Bytes(bytes) => {
                let operations = bytes / load.block_bytes as u64;
                Some(operations / connections + u64::from(number < operations % connections))
            }
        };
        Self {
            outbound: Outbound::default(),
            file,
            places: vec![idle; load.depth + 1],
            in_flight: 0,
            begun: 0,
            quota,
            first_block: number * load.share_blocks(),
            random: mix(load.seed.wrapping_add(mix(number))),
            is_unstable: false,
        }
    }

    pub(super) const fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Begins as many operations as may be under way.
    pub(super) fn begin_all(&mut self, shared: &mut Shared<'_>, now: Instant) {
        for place in 0..shared.load.depth {
            self.begin(place, shared, now);
        }
    }

    /// Begins a COMMIT that is no operation, unless one is under way.
    pub(super) fn flush(&mut self, now: Instant) {
        let place = self.places.len() - 1;
        if self.places[place].state == State::Idle {
            self.in_flight += 1;
            self.places[place].begun = now;
            self.send_commit(place, State::Flushing);
        }
    }

    /// Takes an answer: the beginning of a record, and the length of the whole.
    pub(super) fn answer(
        &mut self,
        (head, record_bytes): (&[u8], usize),
        shared: &mut Shared<'_>,
        now: Instant,
    ) -> Result<(), Failure> {
        let reply = Reply::parse(head)?;
        let place = usize::try_from(reply.xid % PLACES).unwrap_or(usize::MAX);
        let Some(Place { xid, state, .. }) = self.places.get(place).copied() else {
            return Err(strange("xid", reply.xid, 0));
        };
        if reply.xid != xid {
            return Err(strange("xid", reply.xid, xid));
        }
        match state {
            State::Idle => return Err(strange("second answer with xid", xid, 0)),
            State::Reading => {
                self.check_read(place, reply.read()?, (head, record_bytes), shared)?
            }
            State::Writing => {
                let WriteReply { count, is_durable, verifier } = reply.write()?;
                if count != shared.block_count {
                    return Err(strange("length of a WRITE", count, shared.block_count));
                }
                shared.check_verifier(verifier)?;
                if !is_durable && shared.load.commit == CommitPace::EachWrite {
                    self.send_commit(place, State::Committing);
                    return Ok(());
                }
                self.is_unstable |= !is_durable;
            }
            State::Committing | State::Flushing => shared.check_verifier(reply.commit()?)?,
        }
        self.in_flight -= 1;
        self.places[place].state = State::Idle;
        if state != State::Flushing {
            shared.tally.count(now - self.places[place].begun);
            self.begin(place, shared, now);
        }
        Ok(())
    }

    fn check_read(
        &self,
        place: usize,
        read: ReadReply,
        (head, record_bytes): (&[u8], usize),
        shared: &mut Shared<'_>,
    ) -> Result<(), Failure> {
        let ReadReply { count, payload_offset } = read;
        if count != shared.block_count {
            return Err(strange("length of a READ", count, shared.block_count));
        }
        if record_bytes != payload_offset + shared.load.block_bytes {
            let (got, expected) =
                (record_bytes as u64, (payload_offset + shared.load.block_bytes) as u64);
            return Err(WireError::Unexpected { what: "length", got, expected }.into());
        }
        if !shared.load.is_verified {
            return Ok(());
        }
        let offset_bytes = self.places[place].offset_bytes;
        let fill = shared.fill.as_mut();
        if fill.is_some_and(|fill| fill.is_at(offset_bytes, &head[payload_offset..])) {
            return Ok(());
        }
        let what = format!("the block at {offset_bytes} is not what was written");
        Err(Failure::Unfit(what))
    }

    /// Begins the next operation, if there is one.
    fn begin(&mut self, place: usize, shared: &mut Shared<'_>, now: Instant) {
        let is_over = shared.deadline.is_some_and(|deadline| now >= deadline)
            || self.quota.is_some_and(|quota| self.begun >= quota);
        if is_over {
            return;
        }
        let block_bytes = shared.load.block_bytes;
        let offset_bytes = self.next_block(shared.load) * block_bytes as u64;
        let xid = self.next_xid(place);
        let is_write = shared.load.is_write();
        let state = if is_write { State::Writing } else { State::Reading };
        self.places[place] = Place { xid, state, begun: now, offset_bytes };
        self.in_flight += 1;
        let (file, count) = (&self.file, shared.block_count);
        if !is_write {
            self.outbound.push(|out| call::read(out, xid, file, offset_bytes, count));
            return;
        }
        self.outbound.push(|out| call::write_head(out, xid, file, offset_bytes, count));
        let is_sent_in_place = shared.is_sent_in_place();
        if let Some(fill) = &mut shared.fill {
            let payload = if shared.load.is_random() {
                // Lanes count by themselves: far apart, so that no count comes twice.
                let count = (self.first_block << 32) + self.begun;
                fill.unique(offset_bytes, block_bytes, count)
            } else {
                fill.place(offset_bytes, block_bytes)
            };
            if is_sent_in_place {
                self.outbound.push_fill(payload);
            } else {
                self.outbound.push(|out| out.extend_from_slice(&fill.bytes()[payload]));
            }
        }
    }

    fn next_block(&mut self, load: &Load) -> u64 {
        self.begun += 1;
        if load.is_random() {
            self.random = self.random.wrapping_add(BLOCK_BYTES_U64 + 1);
            return mix(self.random) % (load.span_bytes / load.block_bytes as u64);
        }
        self.first_block + (self.begun - 1) % load.share_blocks()
    }

    fn next_xid(&self, place: usize) -> u32 {
        let count = (self.places[place].xid / PLACES + 1) % COUNTS;
        // A place is far below `PLACES`.
        count * PLACES + u32::try_from(place).unwrap_or(0)
    }

    fn send_commit(&mut self, place: usize, state: State) {
        let xid = self.next_xid(place);
        self.places[place].xid = xid;
        self.places[place].state = state;
        let file = &self.file;
        self.outbound.push(|out| call::commit(out, xid, file));
    }
}

fn strange(what: &'static str, got: u32, expected: u32) -> Failure {
    let (got, expected) = (u64::from(got), u64::from(expected));
    WireError::Unexpected { what, got, expected }.into()
}

#[cfg(test)]
mod tests {
    use super::super::{Measured, Work};
    use super::*;
    use std::time::Duration;

    /// A handle as a server gives it.
    fn handle() -> Handle {
        let record = record(&[5, 1, 0, 0, 0, 0, 0, 4, 7]);
        Reply::parse(&record).unwrap().mount().unwrap()
    }

    fn record(words: &[u32]) -> Vec<u8> {
        words.iter().copied().flat_map(u32::to_be_bytes).collect()
    }

    fn load(work: Work, commit: CommitPace) -> Load {
        Load {
            work,
            block_bytes: 4096,
            depth: 1,
            connections: 1,
            span_bytes: 1 << 20,
            amount: Amount::Bytes(8192),
            commit,
            seed: 1,
            file: String::new(),
            is_verified: false,
        }
    }

    /// What becomes of answers, which begin behind the verifier and may name the call by 0.
    fn after(load: &Load, answers: &[&[u32]]) -> Result<(Measured, bool), Failure> {
        let now = Instant::now();
        let mut shared = Shared::new(load);
        let mut lane = Lane::new(load, 0, handle(), now);
        lane.begin_all(&mut shared, now);
        for answer in answers {
            let mut words = vec![answer[0], 1, 0, 0, 0, 0];
            if words[0] == 0 {
                words[0] = lane.places[0].xid;
            }
            words.extend(&answer[1..]);
            let record = record(&words);
            let payload_bytes = if load.is_write() { 0 } else { 4096 };
            lane.answer((&record, record.len() + payload_bytes), &mut shared, now)?;
        }
        Ok((shared.tally.measured(4096, Duration::from_secs(1)), lane.is_idle()))
    }

    /// READ of 4 KiB without attributes; WRITE that a COMMIT must follow, and that.
    const READ: [u32; 6] = [0, 0, 0, 4096, 0, 4096];
    const WRITTEN: [u32; 8] = [0, 0, 0, 0, 4096, 0, 1, 2];
    const COMMITTED: [u32; 6] = [0, 0, 0, 0, 1, 2];

    fn error(load: &Load, answers: &[&[u32]]) -> String {
        after(load, answers).unwrap_err().to_string()
    }

    #[test]
    fn only_whole_reads_of_the_call_that_was_made_are_counted() {
        let load = load(Work::RandomRead, CommitPace::AtEnd);
        let (measured, is_idle) = after(&load, &[&READ]).unwrap();
        assert_eq!((measured.operations, is_idle), (1, false));
        let (measured, is_idle) = after(&load, &[&READ, &READ]).unwrap();
        assert_eq!((measured.operations, is_idle), (2, true));
        let short = error(&load, &[&[0, 0, 0, 4000, 1, 4000]]);
        assert!(short.contains("4000 as its length of a READ, expected 4096"), "{short}");
        let failed = error(&load, &[&[0, 5, 0]]);
        assert!(failed.contains("READ was answered with NFS status 5"), "{failed}");
        // Of a place that has no call, and of none.
        for xid in [1, 7] {
            let mut stranger = READ;
            stranger[0] = xid;
            assert!(error(&load, &[&stranger]).contains("xid"));
        }
        assert!(error(&load, &[&READ, &READ, &READ]).contains("xid"));
    }

    #[test]
    fn a_write_counts_once_it_is_durable_if_each_is_to_be() {
        let each = load(Work::RandomWrite, CommitPace::EachWrite);
        assert_eq!(after(&each, &[&WRITTEN]).unwrap().0.operations, 0);
        assert_eq!(after(&each, &[&WRITTEN, &COMMITTED]).unwrap().0.operations, 1);
        let mut durable = WRITTEN;
        durable[5] = 2;
        assert_eq!(after(&each, &[&durable, &durable]).unwrap().0.operations, 2);
        let at_end = load(Work::RandomWrite, CommitPace::AtEnd);
        assert_eq!(after(&at_end, &[&WRITTEN]).unwrap().0.operations, 1);
    }

    #[test]
    fn a_server_that_started_anew_is_noticed() {
        let each = load(Work::RandomWrite, CommitPace::EachWrite);
        let mut other = COMMITTED;
        other[5] = 3;
        let anew = error(&each, &[&WRITTEN, &other]);
        assert!(anew.contains("started anew"), "{anew}");
    }
}
