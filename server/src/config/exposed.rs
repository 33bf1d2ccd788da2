//! Files with secrets that more people can reach than should.
//!
//! They are named in the log and by `slackwaterd config check`, and used all the same: where
//! secrets are mounted into a container, their modes are not the administrator's to choose.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::settings::Settings;

/// Permission bits that expose a secret: any for others, and writing for the group. A group
/// that may read is a common way to share a key among services.
const EXPOSING_BITS: u32 = 0o027;

/// The files of these settings that hold a secret and are exposed. `file` is the configuration
/// file and what it says.
pub(super) fn find(effective: &Settings, file: Option<(&Path, &Settings)>) -> Vec<PathBuf> {
    let of_file = file.filter(|(_, settings)| settings.vmstore_password.is_some());
    let tokens = effective.token_file.iter().flatten().map(PathBuf::as_path);
    let named = [&effective.vmstore_password_file, &effective.tls_key];
    let all = tokens
        .chain(named.into_iter().flatten().map(PathBuf::as_path))
        .chain(of_file.map(|(path, _)| path));
    all.filter(|path| is_exposed(path)).map(Path::to_owned).collect()
}

/// Whether the file is there and exposed; one that is not there is told when it is read.
fn is_exposed(path: &Path) -> bool {
    let metadata = std::fs::metadata(path);
    metadata.is_ok_and(|metadata| metadata.permissions().mode() & EXPOSING_BITS != 0)
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions, write};

    use super::*;

    #[test]
    fn only_what_others_reach_is_exposed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        let settings = Settings { token_file: Some(vec![path.clone()]), ..Settings::default() };
        assert!(find(&settings, None).is_empty(), "a file that is not there");
        write(&path, "secret").unwrap();
        for (mode, is_exposed) in
            [(0o600, false), (0o400, false), (0o640, false), (0o644, true), (0o660, true)]
        {
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert_eq!(find(&settings, None).is_empty(), !is_exposed, "{mode:o}");
        }
    }

    #[test]
    fn every_file_with_a_secret_is_looked_at() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = directory.path().join(name);
            write(&path, "x").unwrap();
            set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
            path
        };
        let settings = Settings {
            token_file: Some(vec![file("a"), file("b")]),
            vmstore_password_file: Some(file("c")),
            tls_key: Some(file("d")),
            tls_cert: Some(file("public")),
            ..Settings::default()
        };
        let config = file("config");
        let plain = Settings::default();
        assert_eq!(find(&settings, Some((&config, &plain))).len(), 4);
        let with_password =
            Settings { vmstore_password: Some(super::super::Secret::new("p")), ..plain };
        assert_eq!(find(&settings, Some((&config, &with_password))).len(), 5);
    }
}
