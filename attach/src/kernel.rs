//! What the kernel says is mounted and which files its loop devices are on.
//!
//! ```text
//! /proc/self/mountinfo --> mount_points          read each time
//!                      '-> known_mount_points    read again only once the kernel says that it has changed (poll)
//! /sys/block/loopN     --> loop_devices
//! ```
//! Read from `/proc/self/mountinfo` and sysfs, and `statvfs` of disks, which the kernel answers from memory. Asking a loop device itself would ask the
//! file below, and with it an appliance that may not answer: nothing here does.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Read as _, Seek as _};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::StatVfsMountFlags;

use crate::AttachError;

const MOUNT_TABLE: &str = "/proc/self/mountinfo";
const RELEASE: &str = "/proc/sys/kernel/osrelease";
const BLOCK_DEVICES: &str = "/sys/block";
const EXT4_FILE_SYSTEMS: &str = "/sys/fs/ext4";

/// A table of some dozen mounts.
const TABLE_BYTES: usize = 8 << 10;

/// What the kernel appends to the path of a file whose name it has dropped.
const DELETED_SUFFIX: &[u8] = b" (deleted)";

/// One line of the mount table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MountPoint {
    pub(crate) target: PathBuf,
    /// The directory of the file system that is seen there: `/`, or one below where that was bound.
    pub(crate) root: PathBuf,
    /// `fuse.slackwater`, `nfs`, `ext4`, `erofs`.
    pub(crate) kind: String,
    /// The device, the export, or the file of an image.
    pub(crate) source: PathBuf,
    pub(crate) read_only: bool,
    /// Options of the mount: `rw,nosuid,nodev`.
    pub(crate) mount_options: String,
    /// Options of the file system itself.
    pub(crate) options: String,
}

impl MountPoint {
    /// Whether the mount has this option.
    pub(crate) fn has(&self, option: &str) -> bool {
        self.mount_options.split(',').any(|has| has == option)
    }
}

/// The mount table, in the order in which things were mounted.
pub(crate) fn mount_points() -> Result<Vec<MountPoint>, AttachError> {
    fs::File::open(MOUNT_TABLE).and_then(|mut table| read_table(&mut table)).map_err(unreadable)
}

/// The same as it was read last, if nothing was mounted, unmounted or remounted since in this mount namespace. Whether a file
/// system is read-only it may not know: an error makes one so on kernels before 6.12, and a remount elsewhere on all. See
/// [`is_read_only`].
pub(crate) fn known_mount_points() -> Result<Arc<[MountPoint]>, AttachError> {
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let points = known_table(&mut known).map_err(unreadable)?;
    Ok(points)
}

/// The table as it was read last, and the file that it was read from, of which the kernel says when it has changed.
#[derive(Debug)]
struct KnownTable {
    file: fs::File,
    points: Arc<[MountPoint]>,
}

static KNOWN: Mutex<Option<KnownTable>> = Mutex::new(None);

fn known_table(known: &mut Option<KnownTable>) -> io::Result<Arc<[MountPoint]>> {
    let mut file = match known.take() {
        Some(table) if !has_changed(&table.file)? => {
            return Ok(Arc::clone(&known.insert(table).points));
        }
        Some(table) => table.file,
        None => fs::File::open(MOUNT_TABLE)?,
    };
    // From its opening, or the last time that it was asked, on: what changes while it is read is told the next time.
    file.rewind()?;
    let points = read_table(&mut file)?.into();
    Ok(Arc::clone(&known.insert(KnownTable { file, points }).points))
}

/// Whether the table has changed since its file was opened or was asked last (proc_pid_mounts(5)).
fn has_changed(table: &fs::File) -> io::Result<bool> {
    let mut asked = [PollFd::new(table, PollFlags::PRI)];
    loop {
        match rustix::event::poll(&mut asked, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok(_) => return Ok(!asked[0].revents().is_empty()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn unreadable(source: io::Error) -> AttachError {
    AttachError::System { action: "read", path: MOUNT_TABLE.into(), source }
}

/// Whether what is mounted at `target`, a disk, is read-only now. If that cannot be said, it may be. Newer kernels (6.12)
/// do not call an ext4 so that gave up after an error; each write to it fails, and each sync.
pub(crate) fn is_read_only(target: &Path) -> bool {
    rustix::fs::statvfs(target).map_or(true, |now| now.f_flag.contains(StatVfsMountFlags::RDONLY))
}

/// The kernel gives a page of the table at a time, if it is asked for as much: [`fs::read`] asks for less at first, as
/// the file says no size, and it is read often.
fn read_table(table: &mut fs::File) -> io::Result<Vec<MountPoint>> {
    let (mut text, mut length) = (vec![0; TABLE_BYTES], 0);
    loop {
        if length == text.len() {
            text.resize(2 * length, 0);
        }
        match table.read(&mut text[length..]) {
            Ok(0) => {
                text.truncate(length);
                return Ok(text.split(|byte| *byte == b'\n').filter_map(parse_line).collect());
            }
            Ok(more) => length += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// What is mounted at `target`, on top of whatever else is.
pub(crate) fn mounted_at(target: &Path) -> Result<Option<MountPoint>, AttachError> {
    Ok(mount_points()?.into_iter().rfind(|point| point.target == target))
}

/// Whether the ext4 that is mounted from the device met an error, then or before. If that is not told, it
/// may have.
pub(crate) fn has_ext4_errors(device: &Path) -> bool {
    let name = device.file_name().unwrap_or_default();
    let count = fs::read_to_string(Path::new(EXT4_FILE_SYSTEMS).join(name).join("errors_count"));
    count.map_or(true, |count| count.trim() != "0")
}

/// `36 35 98:0 / /mnt rw,noatime shared:1 - ext4 /dev/loop0 rw,errors=remount-ro`
fn parse_line(line: &[u8]) -> Option<MountPoint> {
    let mut fields = line.split(|byte| *byte == b' ');
    let root = fields.by_ref().nth(3)?;
    let target = fields.next()?;
    let own_options = fields.next()?;
    let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
    let (kind, source, options) = (fields.next()?, fields.next()?, fields.next()?);
    let is_read_only = |options: &[u8]| options.split(|byte| *byte == b',').any(|o| o == b"ro");
    Some(MountPoint {
        target: unescape(target).into(),
        root: unescape(root).into(),
        kind: String::from_utf8_lossy(kind).into_owned(),
        source: unescape(source).into(),
        read_only: is_read_only(own_options) || is_read_only(options),
        mount_options: String::from_utf8_lossy(own_options).into_owned(),
        options: String::from_utf8_lossy(options).into_owned(),
    })
}

/// Takes back `\040` and the like, which the kernel writes for blanks and backslashes.
fn unescape(field: &[u8]) -> OsString {
    let octal = |digits: &[u8]| {
        let text = std::str::from_utf8(digits).ok()?;
        text.bytes().all(|byte| (b'0'..=b'7').contains(&byte)).then_some(())?;
        u8::from_str_radix(text, 8).ok()
    };
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, others)) = rest.split_first() {
        let escaped = (*first == b'\\').then(|| others.get(..3).and_then(octal)).flatten();
        match escaped {
            Some(byte) => {
                bytes.push(byte);
                rest = &others[3..];
            }
            None => {
                bytes.push(*first);
                rest = others;
            }
        }
    }
    OsString::from_vec(bytes)
}

/// A loop device that is on a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LoopDevice {
    pub(crate) device: PathBuf,
    /// The path of the file as the kernel prints it: without the mount's own path once the mount
    /// is gone from the tree.
    pub(crate) file: PathBuf,
    pub(crate) read_only: bool,
    /// Whether the kernel frees it with its last user.
    pub(crate) is_autoclear: bool,
}

impl LoopDevice {
    /// Whether the kernel frees it as soon as a program closes that has it open and mounted nothing from it. Those that look
    /// for a free device, and udev, open those in use for a moment, too.
    pub(crate) fn is_going(&self, points: &[MountPoint]) -> bool {
        self.is_autoclear && points.iter().all(|point| point.source != self.device)
    }
}

/// The loop devices whose files `wanted` holds for.
pub(crate) fn loop_devices(wanted: impl Fn(&Path) -> bool) -> Result<Vec<LoopDevice>, AttachError> {
    let failed =
        |source| AttachError::System { action: "list", path: BLOCK_DEVICES.into(), source };
    let mut devices = Vec::new();
    for entry in fs::read_dir(BLOCK_DEVICES).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_name().as_bytes().starts_with(b"loop")
            && let Some(device) = read_loop_device(&entry.path(), &wanted).map_err(failed)?
        {
            devices.push(device);
        }
    }
    Ok(devices)
}

/// The device at `path` in sysfs; `None` if it is on no file, or not on a wanted one.
fn read_loop_device(
    path: &Path,
    wanted: &impl Fn(&Path) -> bool,
) -> io::Result<Option<LoopDevice>> {
    let read = |name: &str| match fs::read(path.join(name)) {
        Ok(bytes) => Ok(Some(bytes)),
        // Not in use, or let go at this moment.
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(error),
    };
    let Some(file) = read("loop/backing_file")? else {
        return Ok(None);
    };
    let file = backing_path(&file);
    if !wanted(&file) {
        return Ok(None);
    }
    let (Some(read_only), Some(autoclear)) = (read("ro")?, read("loop/autoclear")?) else {
        return Ok(None);
    };
    let name = path.file_name().unwrap_or_default();
    Ok(Some(LoopDevice {
        device: Path::new("/dev").join(name),
        file,
        read_only: read_only.starts_with(b"1"),
        is_autoclear: autoclear.starts_with(b"1"),
    }))
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error())
        || error.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error())
}

fn backing_path(text: &[u8]) -> PathBuf {
    let line = text.strip_suffix(b"\n").unwrap_or(text);
    let path = line.strip_suffix(DELETED_SUFFIX).unwrap_or(line);
    OsString::from_vec(path.to_vec()).into()
}

/// The loop device at `/dev/loopN`; `None` if it is on no file.
pub(crate) fn loop_device(device: &Path) -> Option<LoopDevice> {
    let name = device.strip_prefix("/dev").ok()?;
    read_loop_device(&Path::new(BLOCK_DEVICES).join(name), &|_: &Path| true).ok().flatten()
}

/// The release of the kernel, its first two numbers; `None` if it has no such name.
pub(crate) fn release() -> Option<(u32, u32)> {
    parse_release(&fs::read_to_string(RELEASE).ok()?)
}

/// The first kernel whose ext4 reads bitmaps ahead, and has an option against it.
const BITMAPS_AHEAD_RELEASE: (u32, u32) = (5, 13);

/// Whether the ext4 of a kernel reads the bitmaps of a disk once it is mounted, unless an option says that it shall not.
pub(crate) fn reads_bitmaps_ahead(release: Option<(u32, u32)>) -> bool {
    release.is_some_and(|release| release >= BITMAPS_AHEAD_RELEASE)
}

/// `6.1.0-28-cloud-amd64`
fn parse_release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|letter: char| !letter.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Whether a file system is in the kernel now. It may be one that a module would bring.
pub(crate) fn has_file_system(name: &str) -> bool {
    let text = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    text.lines().any(|line| line.split_whitespace().next_back() == Some(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_mount_table_is_understood() {
        let line = br"42 27 7:0 / /state/my\040disks/a\134b rw,noatime shared:7 master:1 - ext4 /dev/loop0 rw,errors=remount-ro";
        let expected = MountPoint {
            target: r"/state/my disks/a\b".into(),
            root: "/".into(),
            kind: "ext4".to_owned(),
            source: "/dev/loop0".into(),
            read_only: false,
            mount_options: "rw,noatime".to_owned(),
            options: "rw,errors=remount-ro".to_owned(),
        };
        assert!(expected.has("noatime") && !expected.has("atime") && !expected.has("nosuid"));
        assert_eq!(parse_line(line), Some(expected));
    }

    #[test]
    fn a_directory_that_was_bound_is_told_from_the_whole() {
        let line = br"42 27 0:9 /a\040b /x ro - erofs /export/image ro";
        let point = parse_line(line).unwrap();
        assert_eq!((&*point.root, &*point.target), (Path::new("/a b"), Path::new("/x")));
    }

    #[test]
    fn a_line_without_optional_fields_and_read_only_in_either_place() {
        let line = b"42 27 7:0 / /a ro,noatime - ext4 /dev/loop0 rw";
        assert!(parse_line(line).unwrap().read_only);
        let line = b"42 27 7:0 / /a rw - ext4 /dev/loop0 rw,ro";
        assert!(parse_line(line).unwrap().read_only);
        let line = b"42 27 7:0 / /a rw,noatime - ext4 /dev/loop0 rw,errors=remount-ro";
        assert!(!parse_line(line).unwrap().read_only);
    }

    #[test]
    fn lines_that_are_none_are_left_out() {
        for line in [&b""[..], b"42 27 7:0 /", b"42 27 7:0 / /a rw - ext4", b"- - - - - - -"] {
            assert_eq!(parse_line(line), None, "{}", String::from_utf8_lossy(line));
        }
    }

    #[test]
    fn escapes_that_are_none_stay_as_they_are() {
        assert_eq!(unescape(br"a\011b"), OsString::from("a\tb"));
        for text in [r"\", r"\0", r"\99x", r"\+12", r"\777"] {
            assert_eq!(unescape(text.as_bytes()), OsString::from(text));
        }
    }

    #[test]
    fn the_path_of_a_backing_file_loses_what_the_kernel_adds() {
        assert_eq!(backing_path(b"/x/disk one\n"), Path::new("/x/disk one"));
        assert_eq!(backing_path(b"/x/disk (deleted)\n"), Path::new("/x/disk"));
    }

    #[test]
    fn releases_are_compared_as_numbers() {
        assert_eq!(parse_release("6.1.0-28-cloud-amd64\n"), Some((6, 1)));
        assert_eq!(parse_release("5.10-rc1"), Some((5, 10)));
        assert!(parse_release("5.9.16") < Some((5, 10)));
        for text in ["", "linux", "6", "6.x"] {
            assert_eq!(parse_release(text), None, "{text:?}");
        }
        assert!(release().is_some());
        assert!(!reads_bitmaps_ahead(None) && !reads_bitmaps_ahead(Some((5, 12))));
        assert!(reads_bitmaps_ahead(Some((5, 13))) && reads_bitmaps_ahead(Some((6, 1))));
    }

    /// In a mount namespace of its own, as in one that others share much may change.
    #[test]
    fn as_root_the_known_table_is_that_of_now() {
        const AGAIN: &str = "SLACKWATER_TEST_KNOWN_TABLE";
        let Some(target) = std::env::var_os(AGAIN).map(PathBuf::from) else {
            let target = tempfile::tempdir().unwrap();
            let mut again = std::process::Command::new("unshare");
            again.args(["--mount", "--"]).arg(std::env::current_exe().unwrap());
            again.args(["--exact", "kernel::tests::as_root_the_known_table_is_that_of_now"]);
            let target = target.path().canonicalize().unwrap();
            let ended = again.env(AGAIN, target).output().unwrap();
            let said = String::from_utf8_lossy(&ended.stdout);
            assert!(ended.status.success() && said.contains("1 passed"), "{said}");
            return;
        };
        let run = |program: &str, words: &[&str]| {
            let mut command = std::process::Command::new(program);
            assert!(command.args(words).arg(&target).status().unwrap().success(), "{program}");
        };
        let found = |target: &Path| {
            let points = known_mount_points().unwrap();
            let point = points.iter().rfind(|point| point.target == target).cloned();
            assert_eq!(point, mounted_at(target).unwrap());
            point.map(|point| point.read_only)
        };
        assert_eq!(found(&target), None);
        for options in ["rw", "ro"] {
            run("mount", &["-n", "-t", "tmpfs", "-o", options, "test"]);
            assert_eq!(
                (found(&target), is_read_only(&target)),
                (Some(options == "ro"), options == "ro")
            );
            run("mount", &["-n", "-o", "remount,ro"]);
            assert_eq!((found(&target), is_read_only(&target)), (Some(true), true));
            let before = known_mount_points().unwrap();
            assert!(Arc::ptr_eq(&before, &known_mount_points().unwrap()), "it is read again");
            run("umount", &["-n"]);
            assert_eq!(found(&target), None);
        }
        assert!(is_read_only(Path::new("/no/such/folder")), "it may be");
    }

    #[test]
    fn the_table_of_this_machine_has_a_root() {
        assert!(mounted_at(Path::new("/")).unwrap().is_some());
        assert!(mounted_at(Path::new("/no/such/folder")).unwrap().is_none());
    }
}
