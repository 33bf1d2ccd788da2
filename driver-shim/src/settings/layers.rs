//! How the layers of containerd's images are kept, as the settings say or as fits the kernel.

use std::path::Path;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use slackwater_attach::Attach;

use crate::worker::LayerKind;

use super::SettingsError;
use super::config::value;

/// What paths of a state directory must not have where layers are images: overlayfs takes them as options of its mounts,
/// which such characters separate or quote.
const NOT_FOR_MOUNTS: [char; 4] = [',', ':', '\\', '"'];

/// How the layers of containerd's images are to be kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LayersChoice {
    /// As images where the kernel mounts them without loop devices (6.12 and newer), else as disks
    #[default]
    Auto,
    /// Each as a disk with all layers below it
    Disks,
    /// Each as an EROFS image of its own, for overlayfs
    Images,
}

impl LayersChoice {
    /// How they are kept on this machine, with the state in that directory.
    ///
    /// # Errors
    /// `Value`: images are asked for, and mounts cannot have that directory.
    pub(crate) fn kind(self, state_dir: &Path) -> Result<LayerKind, SettingsError> {
        self.kind_with(state_dir, Attach::mounts_images_from_files())
    }

    fn kind_with(self, state_dir: &Path, is_fast: bool) -> Result<LayerKind, SettingsError> {
        // Mounts have the path behind links; one that is not there yet is made as it is.
        let mounted = state_dir.canonicalize().unwrap_or_else(|_| state_dir.to_owned());
        let is_for_mounts = mounted.to_str().is_some_and(|text| !text.contains(NOT_FOR_MOUNTS));
        match self {
            Self::Auto if is_fast && is_for_mounts => Ok(LayerKind::Images),
            Self::Images if is_for_mounts => Ok(LayerKind::Images),
            Self::Auto | Self::Disks => Ok(LayerKind::Disks),
            Self::Images => Err(value(
                "state-dir",
                &state_dir.to_string_lossy(),
                "expected a path of UTF-8 without `,`, `:`, `\\` and quotes, as options of mounts have it where layers \
                 are images",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USUAL: &str = "/var/lib/driver";

    #[test]
    fn what_is_not_chosen_follows_from_the_kernel() {
        let kind = |choice: LayersChoice, is_fast| choice.kind_with(Path::new(USUAL), is_fast);
        for is_fast in [false, true] {
            assert_eq!(kind(LayersChoice::Disks, is_fast).unwrap(), LayerKind::Disks);
            assert_eq!(kind(LayersChoice::Images, is_fast).unwrap(), LayerKind::Images);
        }
        assert_eq!(kind(LayersChoice::Auto, false).unwrap(), LayerKind::Disks);
        assert_eq!(kind(LayersChoice::Auto, true).unwrap(), LayerKind::Images);
    }

    #[test]
    fn paths_that_options_of_mounts_cannot_have_are_refused_for_images_and_keep_disks_otherwise() {
        for path in ["/a,b", "/a:b", "/a\\b", "/a\"b"] {
            let kind = |choice: LayersChoice| choice.kind_with(Path::new(path), true);
            assert_eq!(kind(LayersChoice::Auto).unwrap(), LayerKind::Disks, "{path}");
            assert_eq!(kind(LayersChoice::Disks).unwrap(), LayerKind::Disks, "{path}");
            let error = kind(LayersChoice::Images).unwrap_err().to_string();
            assert!(error.contains("state-dir") && error.contains("mounts"), "{error}");
        }
    }
}
