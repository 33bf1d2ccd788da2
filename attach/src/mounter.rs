//! The process that mounts and unmounts images: a child of this program with a thread for each call.
//!
//! ```text
//!  Export::mount_image --> Mounter --- number, words ---> child: opens the file, mount(2), on a thread
//!                             ^ '--- number, code, reason ---'
//! ```
//! The calls can hang for as long as the appliance is away, in a sleep that no signal ends; so they are none of this
//! process. A child for each would take longer to start than the mount takes, and a container has many layers.
//!
//! - A child in which a call ran out of time gets no more calls. It lives until those that it has have an answer, and
//!   begins nothing any more for the one whose time is over: some time before that it gives up.
//! - It ends with this process: its end of the line is then closed. One that was killed while a call hangs in it is
//!   noticed when the time of that call is over.
//! - Calls are bounded by the permits that bound all children (`tools.rs`), and so are its threads. The children that
//!   hang have a bound of their own.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::process::{Child, Command};
use tokio::sync::oneshot;

use crate::AttachError;
use crate::sandbox::NOT_BEGUN;

/// How messages name the child.
const PROGRAM: &str = "slackwater-driver run-tool";

/// Most bytes of a call: a few paths, of which Linux has none above 4 KiB.
const CALL_BYTES_MAX: u32 = 32 << 10;

/// Most bytes of a reason: a path, and what the kernel says.
const REASON_BYTES_MAX: usize = 8 << 10;

/// Children at once, with those in which a call hangs: one more is needed each minute at most. Beyond that the appliance
/// is away for long, and what could be mounted is not.
const CHILDREN_MAX: usize = 16;

/// So long before the end of its time a call begins nothing any more: longer than it takes to reach the child.
const MARGIN: Duration = Duration::from_secs(10);

/// Stack of a thread that mounts: it opens a path and calls the kernel.
const STACK_BYTES: usize = 256 << 10;

/// What a call came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    /// 0 if it succeeded.
    pub(crate) code: u8,
    /// What to say of it if not.
    pub(crate) reason: String,
}

/// Calls that have no answer yet, by their numbers; `None` once the child is gone.
type Waiting = Arc<Mutex<Option<HashMap<u32, oneshot::Sender<Answer>>>>>;

/// Starts the child when there is something to mount.
#[derive(Debug, Default)]
pub(crate) struct Mounter {
    current: Mutex<Option<Arc<Line>>>,
    /// Held by each child that lives.
    living: Arc<()>,
}

/// The line to a child, which is killed with the last call that holds this.
#[derive(Debug)]
struct Line {
    writer: tokio::sync::Mutex<(OwnedWriteHalf, u32)>,
    waiting: Waiting,
    _is_held: oneshot::Sender<()>,
}

/// Why there is no answer.
enum Failure {
    /// The child did not get the call.
    NotSent(io::Error),
    /// It did, or may have.
    Unanswered(io::Error),
}

impl Mounter {
    /// Has the child carry out a call within `limit`; `command` gives one if there is none. The words have no NUL.
    ///
    /// # Errors
    /// `ToolStart`; `System` if the child ended before it answered.
    pub(crate) async fn call(
        &self,
        command: impl Fn() -> Command,
        limit: Duration,
        words: &[&OsStr],
    ) -> Result<Answer, AttachError> {
        let call = words.iter().map(|word| word.as_bytes()).collect::<Vec<_>>().join(&0);
        let mut has_failed = false;
        loop {
            let line = self.line(&command)?;
            let unanswered = Unanswered { mounter: self, line: &line, is_over: false };
            let source = match line.ask(limit, &call).await {
                Ok(answer) => {
                    unanswered.end();
                    return Ok(answer);
                }
                // It ended at this moment: the next one gets the call.
                Err(Failure::NotSent(_)) if !has_failed => {
                    has_failed = true;
                    continue;
                }
                Err(Failure::NotSent(source) | Failure::Unanswered(source)) => source,
            };
            let (action, path) = ("mount or unmount an image by", PROGRAM.into());
            return Err(AttachError::System { action, path, source });
        }
    }

    fn line(&self, command: impl Fn() -> Command) -> Result<Arc<Line>, AttachError> {
        let mut current = lock(&self.current);
        if let Some(line) = current.as_ref().filter(|line| line.is_open()) {
            return Ok(Arc::clone(line));
        }
        let (action, path) = ("mount or unmount an image by", PROGRAM.into());
        if Arc::strong_count(&self.living) > CHILDREN_MAX {
            let reason =
                format!("{CHILDREN_MAX} of these processes hang: the appliance does not answer");
            return Err(AttachError::System { action, path, source: io::Error::other(reason) });
        }
        let line = Line::start(command(), Arc::clone(&self.living));
        let line = line.map_err(|source| AttachError::ToolStart {
            program: "slackwater-driver".to_owned(),
            package: "slackwater-driver",
            source,
        })?;
        let line = Arc::new(line);
        *current = Some(Arc::clone(&line));
        Ok(line)
    }

    /// Lets go of the child.
    pub(crate) fn end(&self) {
        lock(&self.current).take();
    }
}

/// A call without an answer. It may be dropped, as it is when its time is over.
struct Unanswered<'a> {
    mounter: &'a Mounter,
    line: &'a Arc<Line>,
    is_over: bool,
}

impl Unanswered<'_> {
    fn end(mut self) {
        self.is_over = true;
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        let mut current = lock(&self.mounter.current);
        // The next call would hang where this one does: it gets another child.
        if !self.is_over && current.as_ref().is_some_and(|line| Arc::ptr_eq(line, self.line)) {
            current.take();
        }
    }
}

/// A frame that is being written. One that is not whole would spoil those behind it: nothing is asked any more then.
struct Frame<'a> {
    waiting: &'a Waiting,
    is_whole: bool,
}

impl Drop for Frame<'_> {
    fn drop(&mut self) {
        if !self.is_whole {
            lock(self.waiting).take();
        }
    }
}

impl Line {
    fn start(mut command: Command, living: Arc<()>) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let (reader, writer) = tokio::net::UnixStream::from_std(ours)?.into_split();
        // A descriptor of this process's would be held as long as a call hangs. And Ctrl-C is for this process, which
        // then ends what it has begun.
        command.stdin(OwnedFd::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.process_group(0).kill_on_drop(true).spawn()?;
        let waiting: Waiting = Arc::new(Mutex::new(Some(HashMap::new())));
        let (is_held, held) = oneshot::channel();
        let tended = Tended(Arc::clone(&waiting));
        tokio::spawn(async move {
            tend(child, reader, tended, held).await;
            drop(living);
        });
        let writer = tokio::sync::Mutex::new((writer, 0));
        Ok(Self { writer, waiting, _is_held: is_held })
    }

    fn is_open(&self) -> bool {
        lock(&self.waiting).is_some()
    }

    async fn ask(&self, limit: Duration, call: &[u8]) -> Result<Answer, Failure> {
        let length = u32::try_from(call.len()).ok().filter(|length| *length <= CALL_BYTES_MAX);
        let length = length.ok_or_else(|| {
            let reason = format!("paths of {} bytes, at most {CALL_BYTES_MAX}", call.len());
            Failure::Unanswered(io::Error::new(io::ErrorKind::InvalidInput, reason))
        })?;
        let ended = || io::Error::other("it ended before it answered: try again");
        let (sender, receiver) = oneshot::channel();
        let mut writer = self.writer.lock().await;
        let number = writer.1;
        writer.1 = number.wrapping_add(1);
        match lock(&self.waiting).as_mut() {
            Some(waiting) => waiting.insert(number, sender),
            None => return Err(Failure::NotSent(ended())),
        };
        let mut frame = Frame { waiting: &self.waiting, is_whole: false };
        let limit = u32::try_from(limit.saturating_sub(MARGIN).as_millis()).unwrap_or(u32::MAX);
        let head = [number, limit, length].map(u32::to_be_bytes).concat();
        writer.0.write_all(&[&head, call].concat()).await.map_err(Failure::NotSent)?;
        frame.is_whole = true;
        drop(frame);
        drop(writer);
        receiver.await.map_err(|_| Failure::Unanswered(ended()))
    }
}

/// What is behind a lock that no code panics under.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Those who wait for a child. They get an error when it, or what reads its answers, is gone.
struct Tended(Waiting);

impl Drop for Tended {
    fn drop(&mut self) {
        lock(&self.0).take();
    }
}

/// Hands on what a child answers until it is gone, or nothing holds its line any more; then it is killed.
async fn tend(
    mut child: Child,
    mut reader: OwnedReadHalf,
    waiting: Tended,
    held: oneshot::Receiver<()>,
) {
    let hand_on = async {
        while let Ok((number, answer)) = read_answer(&mut reader).await {
            let asked = lock(&waiting.0).as_mut().and_then(|waiting| waiting.remove(&number));
            // One whose time is over reads no more.
            let _ = asked.map(|asked| asked.send(answer));
        }
    };
    let has_ended = tokio::select! {
        () = hand_on => true,
        _ = held => false,
    };
    drop((waiting, reader));
    // It fails of one that has ended, which is as well.
    let _ = child.start_kill();
    let status = child.wait().await;
    if has_ended {
        tracing::warn!(
            ?status,
            "the process that mounts images ended; the next mount starts another one"
        );
    }
}

async fn read_answer(reader: &mut OwnedReadHalf) -> io::Result<(u32, Answer)> {
    let number = reader.read_u32().await?;
    let code = reader.read_u8().await?;
    let length = usize::from(reader.read_u16().await?);
    let mut reason = vec![0; length.min(REASON_BYTES_MAX)];
    reader.read_exact(&mut reason).await?;
    Ok((number, Answer { code, reason: String::from_utf8_lossy(&reason).into_owned() }))
}

/// What carries out a call until its time is over: a code, 0 if it succeeded, and a reason.
pub(crate) type CarryOut = fn(&[OsString], Instant) -> (u8, String);

/// A call, as the child has it.
struct Asked {
    number: u32,
    words: Vec<OsString>,
    until: Instant,
}

/// Carries out calls that come on standard input, a socket, until that is closed; a thread for each. Those that hang
/// then end with the process.
pub(crate) fn serve(carry_out: CarryOut) -> io::Result<()> {
    let mut calls = UnixStream::from(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?);
    let answers = Arc::new(Mutex::new(calls.try_clone()?));
    loop {
        let Some(Asked { number, words, until }) = read_call(&mut calls)? else { return Ok(()) };
        let to = Arc::clone(&answers);
        let work = move || {
            let done = std::panic::catch_unwind(|| carry_out(&words, until));
            let fault = |_| (NOT_BEGUN, "a fault of the program that mounts".to_owned());
            let (code, reason) = done.unwrap_or_else(fault);
            // Closed: nothing waits for the answer.
            let _ = answer(&to, number, code, &reason);
        };
        let started = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(work);
        if let Err(error) = started {
            answer(&answers, number, NOT_BEGUN, &format!("no thread: {error}"))?;
        }
    }
}

/// The next call; `None` at the end.
fn read_call(calls: &mut UnixStream) -> io::Result<Option<Asked>> {
    let mut head = [[0; 4]; 3];
    match calls.read_exact(head.as_flattened_mut()) {
        // The second if answers were not read.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
            ) =>
        {
            return Ok(None);
        }
        outcome => outcome?,
    }
    let [number, limit, length] = head.map(u32::from_be_bytes);
    let until = Instant::now() + Duration::from_millis(limit.into());
    if length > CALL_BYTES_MAX {
        let reason = format!("a call of {length} bytes, at most {CALL_BYTES_MAX}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    let mut words = vec![0; usize::try_from(length).unwrap_or_default()];
    calls.read_exact(&mut words)?;
    let words = words.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec()));
    Ok(Some(Asked { number, words: words.collect(), until }))
}

fn answer(to: &Mutex<UnixStream>, number: u32, code: u8, reason: &str) -> io::Result<()> {
    let reason = &reason.as_bytes()[..reason.len().min(REASON_BYTES_MAX)];
    let length = u16::try_from(reason.len()).unwrap_or_default();
    let frame = [&number.to_be_bytes()[..], &[code], &length.to_be_bytes(), reason].concat();
    lock(to).write_all(&frame)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::test_tool;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn as_a_tool() {
        test_tool::become_one(|_| serve(carry_out).map_or(1, |()| 0));
    }

    /// The process id as the reason, and the number of words as the code; a first word `/...` is waited for, without end.
    fn carry_out(words: &[OsString], until: Instant) -> (u8, String) {
        let path = Path::new(&words[0]);
        while path.is_absolute() && !path.exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
        match words[0].to_str() {
            Some("end") => std::process::exit(0),
            Some("fail") => panic!("as it is asked to"),
            _ => {}
        }
        if Instant::now() >= until {
            return (0, "late".to_owned());
        }
        (u8::try_from(words.len()).unwrap(), std::process::id().to_string())
    }

    fn command() -> Command {
        let program = test_tool::program("mounter::tests::as_a_tool");
        let mut command = Command::new(&program[0]);
        command.args(&program[1..]).arg("mount-images");
        command
    }

    async fn ask(mounter: &Mounter, words: &[&str]) -> Result<Answer, AttachError> {
        let words: Vec<_> = words.iter().map(OsStr::new).collect();
        tokio::time::timeout(LIMIT, mounter.call(command, LIMIT, &words)).await.unwrap()
    }

    #[tokio::test]
    async fn children_that_hang_are_bounded() {
        let mounter = Mounter { living: Arc::default(), ..Mounter::default() };
        let hanging: Vec<_> = (0..CHILDREN_MAX).map(|_| Arc::clone(&mounter.living)).collect();
        let error = ask(&mounter, &["x"]).await.unwrap_err().to_string();
        assert!(error.contains("16 of these processes hang"), "{error}");
        drop(hanging);
        ask(&mounter, &["x"]).await.unwrap();
    }

    async fn process_of(mounter: &Mounter) -> String {
        ask(mounter, &["x"]).await.unwrap().reason
    }

    async fn until_gone(process: &str) {
        let end = Instant::now() + LIMIT;
        // One that ended and was not waited for has no command line.
        let line = Path::new("/proc").join(process).join("cmdline");
        while std::fs::read(&line).is_ok_and(|line| !line.is_empty()) {
            assert!(Instant::now() < end, "it does not end");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn calls_are_carried_out_beside_each_other_by_one_process() {
        let folder = tempfile::tempdir().unwrap();
        let (mounter, go) = (Mounter::default(), folder.path().join("a\nb"));
        let path = go.to_str().unwrap();
        let (three, one) = ([path, "", "x"], [path]);
        let (first, second, ()) = tokio::join!(ask(&mounter, &three), ask(&mounter, &one), async {
            assert_eq!(ask(&mounter, &["x", "y"]).await.unwrap().code, 2);
            std::fs::write(&go, "").unwrap();
        });
        let (first, second) = (first.unwrap(), second.unwrap());
        assert_eq!((first.code, second.code), (3, 1));
        assert_eq!(first.reason, second.reason);
        assert_eq!(process_of(&mounter).await, first.reason);
        mounter.end();
        until_gone(&first.reason).await;
    }

    #[tokio::test]
    async fn a_call_that_hangs_keeps_no_other_from_its_answer() {
        let folder = tempfile::tempdir().unwrap();
        let (mounter, go) = (Mounter::default(), folder.path().join("go"));
        let process = process_of(&mounter).await;
        let never = ["/no/such/file"].map(OsStr::new);
        let call = [go.to_str().unwrap()];
        let waiting = ask(&mounter, &call);
        let given_up = async {
            let call = mounter.call(command, LIMIT, &never);
            assert!(tokio::time::timeout(Duration::from_millis(50), call).await.is_err());
            let next = process_of(&mounter).await;
            assert_ne!(next, process);
            std::fs::write(&go, "").unwrap();
            next
        };
        let (answer, next) = tokio::join!(waiting, given_up);
        assert_eq!(answer.unwrap(), Answer { code: 1, reason: process.clone() });
        until_gone(&process).await;
        assert_eq!(process_of(&mounter).await, next);
    }

    #[tokio::test]
    async fn what_is_late_is_not_begun_and_a_fault_is_an_answer() {
        let mounter = Mounter::default();
        let words = [OsStr::new("x")];
        let late = mounter.call(command, Duration::ZERO, &words).await.unwrap();
        assert_eq!(late, Answer { code: 0, reason: "late".to_owned() });
        let fault = ask(&mounter, &["fail"]).await.unwrap();
        assert_eq!(fault.code, NOT_BEGUN);
        assert!(fault.reason.contains("a fault"), "{}", fault.reason);
    }

    /// As it is when the process that asks is killed.
    #[test]
    fn it_ends_when_nothing_can_be_asked_any_more() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let program = test_tool::program("mounter::tests::as_a_tool");
        let mut child = std::process::Command::new(&program[0])
            .args(&program[1..])
            .arg("mount-images")
            .stdin(OwnedFd::from(theirs))
            .spawn()
            .unwrap();
        let never = b"/no/such/file";
        for (number, call) in [(1, &never[..]), (2, b"x")] {
            let length = u32::try_from(call.len()).unwrap();
            ours.write_all(&[number, 60_000, length].map(u32::to_be_bytes).concat()).unwrap();
            ours.write_all(call).unwrap();
        }
        let mut number = [0; 4];
        ours.read_exact(&mut number).unwrap();
        assert_eq!(u32::from_be_bytes(number), 2, "the one that does not hang");
        drop(ours);
        assert!(child.wait().unwrap().success());
    }

    #[tokio::test]
    async fn a_process_that_ended_is_started_again() {
        let mounter = Mounter::default();
        let process = process_of(&mounter).await;
        let error = ask(&mounter, &["end"]).await.unwrap_err().to_string();
        assert!(error.contains("ended before it answered"), "{error}");
        assert_ne!(process_of(&mounter).await, process);
    }

    #[tokio::test]
    async fn a_call_that_is_too_long_is_refused_and_the_next_one_is_not() {
        let mounter = Mounter::default();
        let long = "x".repeat(usize::try_from(CALL_BYTES_MAX).unwrap() + 1);
        let error = ask(&mounter, &[&long]).await.unwrap_err().to_string();
        assert!(error.contains("32769 bytes, at most 32768"), "{error}");
        assert_eq!(ask(&mounter, &[&long[1..]]).await.unwrap().code, 1);
    }

    #[tokio::test]
    async fn what_cannot_be_started_is_named() {
        let none = || Command::new("/no/such/program");
        let words = [OsStr::new("x")];
        let error = Mounter::default().call(none, LIMIT, &words).await.unwrap_err();
        assert!(matches!(error, AttachError::ToolStart { .. }), "{error:?}");
    }
}
