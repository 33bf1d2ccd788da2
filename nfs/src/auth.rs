//! Who calls: AUTH_NONE and AUTH_SYS credentials (RFC 5531 sections 8.2 and appendix A), and
//! the squashing of users that the server does not trust.

use bytes::Bytes;

use crate::options::{ClientAccess, NfsOptions, Squash};
use crate::rpc::AuthStatus;
use crate::xdr::{Decoder, Malformed};

/// Supplementary groups of an AUTH_SYS credential (RFC 5531 appendix A).
pub(crate) const GROUPS_MAX: usize = 16;

/// Longest machine name of an AUTH_SYS credential (RFC 5531 appendix A).
const MACHINE_NAME_BYTES_MAX: usize = 255;

/// The superuser, and his group.
const ROOT: u32 = 0;

/// Flavors of credentials (RFC 5531 section 8.1).
mod flavor {
    pub(super) const NONE: u32 = 0;
    pub(super) const SYS: u32 = 1;
    pub(super) const SHORT: u32 = 2;
}

/// The AUTH_SYS flavor's number, which MNT announces.
pub(crate) const FLAVOR_SYS: u32 = flavor::SYS;

/// The user and groups on whose behalf a call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Credentials {
    /// The user.
    pub(crate) uid: u32,
    /// His group.
    pub(crate) gid: u32,
    groups: [u32; GROUPS_MAX],
    group_count: usize,
}

impl Credentials {
    /// Of user `uid` in group `gid` and in `groups`, of which the first [`GROUPS_MAX`] count.
    pub(crate) fn new(uid: u32, gid: u32, groups: &[u32]) -> Self {
        let mut own = [0; GROUPS_MAX];
        let group_count = groups.len().min(GROUPS_MAX);
        own.iter_mut().zip(groups).for_each(|(own, group)| *own = *group);
        Self { uid, gid, groups: own, group_count }
    }

    /// The supplementary groups.
    pub(crate) fn groups(&self) -> &[u32] {
        self.groups.get(..self.group_count).unwrap_or_default()
    }

    /// Whether this is the superuser.
    pub(crate) const fn is_root(&self) -> bool {
        self.uid == ROOT
    }

    /// Whether the user is in `group`.
    pub(crate) fn is_in(&self, group: u32) -> bool {
        self.gid == group || self.groups().contains(&group)
    }
}

/// Who a caller claims to be, before squashing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Claim {
    /// AUTH_NONE.
    Nobody,
    /// AUTH_SYS.
    User(Credentials),
}

/// One call's caller, after squashing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caller {
    /// The user.
    pub(crate) credentials: Credentials,
    /// What the client's address may do.
    pub(crate) access: ClientAccess,
}

/// Decodes the body of a credential of `flavor`.
pub(crate) fn decode_claim(flavor: u32, body: &Bytes) -> Result<Claim, AuthStatus> {
    match flavor {
        flavor::NONE => Ok(Claim::Nobody),
        flavor::SYS => decode_sys(body).map(Claim::User).map_err(|_| AuthStatus::BadCredential),
        flavor::SHORT => Err(AuthStatus::RejectedCredential),
        _ => Err(AuthStatus::BadCredential),
    }
}

fn decode_sys(body: &Bytes) -> Result<Credentials, Malformed> {
    let mut decoder = Decoder::new(body);
    let _stamp = decoder.u32()?;
    let _machine_name = decoder.opaque(MACHINE_NAME_BYTES_MAX)?;
    let uid = decoder.u32()?;
    let gid = decoder.u32()?;
    let count = decoder.length(GROUPS_MAX)?;
    let mut groups = [0; GROUPS_MAX];
    for group in groups.iter_mut().take(count) {
        *group = decoder.u32()?;
    }
    Ok(Credentials::new(uid, gid, groups.get(..count).unwrap_or_default()))
}

/// The user that the server takes for the one claimed.
pub(crate) fn squash(claim: &Claim, options: &NfsOptions) -> Credentials {
    let anonymous = Credentials::new(options.anonymous_uid, options.anonymous_gid, &[]);
    let Claim::User(claimed) = claim else {
        return anonymous;
    };
    match options.squash {
        Squash::NoRootSquash => *claimed,
        Squash::AllSquash => anonymous,
        Squash::RootSquash => squash_root(claimed, &anonymous),
    }
}

fn squash_root(claimed: &Credentials, anonymous: &Credentials) -> Credentials {
    if claimed.is_root() {
        // All of root's groups go with him: they were the superuser's choice too.
        return *anonymous;
    }
    let group = |group: u32| if group == ROOT { anonymous.gid } else { group };
    let groups: Vec<u32> = claimed.groups().iter().copied().map(group).collect();
    Credentials::new(claimed.uid, group(claimed.gid), &groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sys(machine_name: usize, groups: u32) -> Bytes {
        let mut encoder = crate::xdr::Encoder::new();
        encoder.u32(1);
        encoder.opaque(&vec![b'm'; machine_name]);
        encoder.u32(1000);
        encoder.u32(100);
        encoder.u32(groups);
        (0..groups).for_each(|group| encoder.u32(group));
        Bytes::from(encoder.finish().0).slice(4..)
    }

    fn options(squash: Squash) -> NfsOptions {
        NfsOptions { squash, ..NfsOptions::default() }
    }

    #[test]
    fn a_sys_credential_carries_up_to_sixteen_groups() {
        let Ok(Claim::User(user)) = decode_claim(1, &sys(255, 16)) else { panic!("refused") };
        assert_eq!((user.uid, user.gid, user.groups().len()), (1000, 100, 16));
        assert!(user.is_in(100) && user.is_in(15) && !user.is_in(16));
        assert_eq!(decode_claim(1, &sys(255, 17)), Err(AuthStatus::BadCredential));
        assert_eq!(decode_claim(1, &sys(256, 1)), Err(AuthStatus::BadCredential));
        assert_eq!(decode_claim(1, &sys(4, 2).slice(..20)), Err(AuthStatus::BadCredential));
    }

    #[test]
    fn other_flavors_are_refused() {
        assert_eq!(decode_claim(0, &Bytes::new()), Ok(Claim::Nobody));
        assert_eq!(decode_claim(2, &Bytes::new()), Err(AuthStatus::RejectedCredential));
        assert_eq!(decode_claim(6, &Bytes::new()), Err(AuthStatus::BadCredential));
    }

    #[test]
    fn root_is_squashed_with_his_groups() {
        let root = Claim::User(Credentials::new(0, 0, &[5]));
        let squashed = squash(&root, &options(Squash::RootSquash));
        assert_eq!(squashed, Credentials::new(65534, 65534, &[]));
        let wheel = Claim::User(Credentials::new(1000, 0, &[0, 7]));
        assert_eq!(
            squash(&wheel, &options(Squash::RootSquash)),
            Credentials::new(1000, 65534, &[65534, 7])
        );
        assert!(squash(&root, &options(Squash::NoRootSquash)).is_root());
        assert_eq!(squash(&wheel, &options(Squash::AllSquash)).uid, 65534);
        assert_eq!(squash(&Claim::Nobody, &options(Squash::NoRootSquash)).uid, 65534);
    }
}
