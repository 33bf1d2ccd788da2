//! MOUNT version 3 (RFC 1813 appendix I): from a path to the first file handle, and the
//! advisory list of who has mounted what.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::net::IpAddr;

use nfsserve::nfs::nfsstat3;
use parking_lot::Mutex;

use crate::auth;
use crate::handle::Handle;
use crate::limits;
use crate::proc::Call;
use crate::procedure::MountProcedure;
use crate::scope::{self, MountScope, Mounter};
use crate::xdr::{Decoder, Encoder, Malformed};

/// The mounts that clients told of. Clients may be gone without a word, so the list is for
/// people to read and decides nothing.
#[derive(Debug, Default)]
pub(crate) struct MountList {
    /// Oldest first.
    mounts: Mutex<VecDeque<(IpAddr, Vec<u8>)>>,
}

impl MountList {
    fn add(&self, client: IpAddr, path: &[u8]) {
        let mut mounts = self.mounts.lock();
        mounts.retain(|(address, mounted)| *address != client || mounted != path);
        if mounts.len() == limits::MOUNTS_MAX {
            mounts.pop_front();
        }
        mounts.push_back((client, path.to_vec()));
    }

    fn remove(&self, client: IpAddr, path: &[u8]) {
        self.mounts.lock().retain(|(address, mounted)| *address != client || mounted != path);
    }

    fn remove_all(&self, client: IpAddr) {
        self.mounts.lock().retain(|(address, _)| *address != client);
    }

    fn list(&self) -> Vec<(IpAddr, Vec<u8>)> {
        self.mounts.lock().iter().cloned().collect()
    }
}

/// The answer to MNT from an address that no rule matches.
pub(crate) fn refuse(reply: &mut Encoder) -> nfsstat3 {
    put_status(reply, nfsstat3::NFS3ERR_ACCES)
}

/// Runs `procedure` for `mounter`.
pub(crate) fn run(
    procedure: MountProcedure,
    call: &Call<'_>,
    mounter: Mounter,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, Malformed> {
    let client = mounter.address;
    match procedure {
        MountProcedure::Null => {}
        MountProcedure::Mount => return mount(call, mounter, arguments, reply),
        MountProcedure::Dump => dump(call, reply),
        MountProcedure::Unmount => {
            let path = arguments.opaque(limits::MOUNT_PATH_BYTES_MAX)?;
            call.shared.mounts.remove(client, &listed_path(call, path));
        }
        MountProcedure::UnmountAll => call.shared.mounts.remove_all(client),
        MountProcedure::Export => export(call, reply),
    }
    Ok(nfsstat3::NFS3_OK)
}

fn mount(
    call: &Call<'_>,
    mounter: Mounter,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<nfsstat3, Malformed> {
    let path = arguments.opaque(limits::FRAME_BYTES_SMALL)?;
    if path.len() > limits::MOUNT_PATH_BYTES_MAX {
        return Ok(put_status(reply, nfsstat3::NFS3ERR_NAMETOOLONG));
    }
    let Some(names) = names_below(&call.shared.options.export_path, path) else {
        return Ok(put_status(reply, nfsstat3::NFS3ERR_NOENT));
    };
    match enter(call, mounter, names) {
        Ok(handle) => {
            call.shared.mounts.add(mounter.address, &listed_path(call, path));
            put_status(reply, nfsstat3::NFS3_OK);
            reply.opaque(&handle);
            let flavors = [auth::FLAVOR_SYS];
            reply.u32(1);
            flavors.into_iter().for_each(|flavor| reply.u32(flavor));
            Ok(nfsstat3::NFS3_OK)
        }
        Err(status) => Ok(put_status(reply, mount_status(status))),
    }
}

/// The handle of what the names below the export lead to; of two names of a secret path first, if they begin so.
fn enter<'n>(
    call: &Call<'_>,
    mounter: Mounter,
    names: impl Iterator<Item = &'n [u8]>,
) -> Result<Handle, nfsstat3> {
    let mut names = names.peekable();
    let Some(mounts) = names.next_if(|name| is_of_secrets(name)) else {
        // Also for paths that are not there: who may not mount learns no names.
        if !call.shared.options.mounts_by_address {
            return Err(nfsstat3::NFS3ERR_ACCES);
        }
        check_certificate(call, mounter, None)?;
        return call.walk(names);
    };
    let secret = names.next().unwrap_or_default();
    let scope = call.shared.enter(secret, mounter).filter(|scope| scope.mounts() == mounts);
    let scope = Some(scope.ok_or(nfsstat3::NFS3ERR_ACCES)?);
    check_certificate(call, mounter, scope)?;
    Call { scope, ..*call }.walk(names)
}

/// Refuses a mount of this scope to one whose certificate is for another.
fn check_certificate(
    call: &Call<'_>,
    mounter: Mounter,
    scope: Option<MountScope>,
) -> Result<(), nfsstat3> {
    if call.shown.may_mount(scope) {
        return Ok(());
    }
    let path_of = match scope {
        Some(MountScope::Worker(id)) => format!("worker {id}"),
        Some(MountScope::Export(_)) | None => "the whole export".to_owned(),
    };
    tracing::warn!(client = %mounter.address, path_of, shown = %call.shown,
        "a mount is refused: the client's certificate is not for the path that it mounts");
    Err(nfsstat3::NFS3ERR_ACCES)
}

/// Whether secrets are below this name of the export.
fn is_of_secrets(name: &[u8]) -> bool {
    [scope::WORKER_MOUNTS, scope::EXPORT_MOUNTS].contains(&name)
}

/// The path as lists show it: without a secret, and what comes after it.
fn listed_path<'p>(call: &Call<'_>, path: &'p [u8]) -> Cow<'p, [u8]> {
    let export = call.shared.options.export_path.as_str();
    let first = names_below(export, path).and_then(|mut names| names.next());
    match first.filter(|name| is_of_secrets(name)) {
        Some(name) => Cow::Owned([export.as_bytes(), b"/", name].concat()),
        None => Cow::Borrowed(path),
    }
}

fn put_status(reply: &mut Encoder, status: nfsstat3) -> nfsstat3 {
    reply.u32(status as u32);
    status
}

/// The codes of `mountstat3` are those of `nfsstat3`, but fewer.
const fn mount_status(status: nfsstat3) -> nfsstat3 {
    match status {
        nfsstat3::NFS3ERR_NOENT
        | nfsstat3::NFS3ERR_IO
        | nfsstat3::NFS3ERR_ACCES
        | nfsstat3::NFS3ERR_NOTDIR
        | nfsstat3::NFS3ERR_INVAL
        | nfsstat3::NFS3ERR_NAMETOOLONG => status,
        _ => nfsstat3::NFS3ERR_SERVERFAULT,
    }
}

/// The names of `path` below the export, or `None` when it is outside. Slashes that are
/// doubled or at the end count for nothing.
fn names_below<'p>(export: &str, path: &'p [u8]) -> Option<impl Iterator<Item = &'p [u8]>> {
    if !path.starts_with(b"/") {
        return None;
    }
    let mut names = path.split(|&byte| byte == b'/').filter(|name| !name.is_empty());
    let is_below = export
        .split('/')
        .filter(|name| !name.is_empty())
        .all(|expected| names.next() == Some(expected.as_bytes()));
    is_below.then_some(names)
}

/// Ends a list of `mountlist`, `exports` or `groups`.
fn end_of_list(reply: &mut Encoder) {
    reply.bool(false);
}

fn dump(call: &Call<'_>, reply: &mut Encoder) {
    for (client, path) in call.shared.mounts.list() {
        reply.bool(true);
        reply.opaque(client.to_canonical().to_string().as_bytes());
        reply.opaque(&path);
    }
    end_of_list(reply);
}

fn export(call: &Call<'_>, reply: &mut Encoder) {
    let options = &call.shared.options;
    reply.bool(true);
    reply.opaque(options.export_path.as_bytes());
    for rule in &options.clients {
        reply.bool(true);
        reply.opaque(rule.network().as_bytes());
    }
    end_of_list(reply);
    end_of_list(reply);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn below(path: &str) -> Option<Vec<String>> {
        let text = |name: &[u8]| String::from_utf8(name.to_vec()).unwrap();
        names_below("/slackwater", path.as_bytes()).map(|names| names.map(text).collect())
    }

    #[test]
    fn only_paths_of_the_export_are_walked() {
        assert_eq!(below("/slackwater"), Some(vec![]));
        assert_eq!(below("//slackwater/"), Some(vec![]));
        assert_eq!(below("/slackwater/a//b/"), Some(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(below("/slackwater/.."), Some(vec!["..".to_owned()]));
        for outside in ["", "/", "slackwater", "/slackwaterx", "/other", "/a/slackwater"] {
            assert_eq!(below(outside), None, "{outside}");
        }
    }

    #[test]
    fn the_list_of_mounts_is_bounded() {
        let list = MountList::default();
        let client = |number| IpAddr::V4(Ipv4Addr::from_bits(number));
        let count = u32::try_from(limits::MOUNTS_MAX).unwrap();
        for number in 0..=count {
            list.add(client(number), b"/slackwater");
            list.add(client(number), b"/slackwater");
        }
        let mounts = list.list();
        assert_eq!(mounts.len(), limits::MOUNTS_MAX);
        assert_eq!(mounts[0].0, client(1), "the oldest went");
        list.add(client(5), b"/slackwater/a");
        list.remove(client(5), b"/slackwater");
        let of_five =
            |list: &MountList| list.list().iter().filter(|one| one.0 == client(5)).count();
        assert_eq!(of_five(&list), 1);
        list.remove_all(client(5));
        assert_eq!(of_five(&list), 0);
    }
}
