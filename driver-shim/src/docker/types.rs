//! What Docker sends and wants to read: names of layers, storage options, requests, answers.

use std::collections::BTreeMap;
use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Deserializer, Serialize};

use super::error::DockerError;
use crate::worker::{Key, Push};

/// Longest name of a layer: Docker's have up to 69 characters; with what is added for the file
/// of its recording it stays a file name.
const ID_LENGTH_MAX: usize = 200;

/// An id of dockerd's layer store: 32 bytes as hexadecimal digits (moby, `stringid.GenerateRandomID`).
const LAYER_STORE_ID_LENGTH: usize = 64;

/// What Docker adds to a container's name for the layer between it and the image.
const INIT_SUFFIX: &str = "-init";

/// The name of a layer or container: characters that can be part of a file's name, none that
/// leads out of a directory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerId(String);

impl LayerId {
    pub(super) fn parse(text: &str) -> Result<Self, DockerError> {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        if text.is_empty() || text.len() > ID_LENGTH_MAX || !text.bytes().all(is_allowed) {
            let got = text.chars().take(ID_LENGTH_MAX).collect();
            return Err(DockerError::Id { got, expected_max: ID_LENGTH_MAX });
        }
        Ok(Self(text.to_owned()))
    }

    /// The parent in a request, where an empty name is none.
    pub(super) fn parse_parent(text: &str) -> Result<Option<Self>, DockerError> {
        if text.is_empty() { Ok(None) } else { Self::parse(text).map(Some) }
    }

    /// Whether it is a container's layer of what dockerd sets up before the container runs.
    pub(super) fn is_init(&self) -> bool {
        self.0.ends_with(INIT_SUFFIX)
    }

    /// Whether the volume of that key is such a layer.
    pub(super) fn is_init_key(key: &Key) -> bool {
        key.name.ends_with(INIT_SUFFIX)
    }

    /// Whether the volume of that key is one of dockerd's layer store, by its id: BuildKit's are of another kind, as are
    /// those of this driver.
    pub(super) fn is_layer_store_key(key: &Key) -> bool {
        key.name.len() == LAYER_STORE_ID_LENGTH
            && key.name.bytes().all(|byte| byte.is_ascii_hexdigit())
    }

    pub(super) fn key(&self) -> Key {
        Key::docker(self.0.as_str())
    }

    /// The name of its recording's file.
    pub(super) fn recording(&self) -> String {
        format!("{RECORDING_PREFIX}{}{RECORDING_SUFFIX}", self.0)
    }

    /// The name of that file until the recording is complete.
    pub(super) fn unfinished_recording(&self) -> String {
        self.recording() + UNFINISHED_SUFFIX
    }

    /// The layer whose recording, complete or not, has that file name.
    pub(super) fn of_recording(name: &str) -> Option<Self> {
        let name = name.strip_suffix(UNFINISHED_SUFFIX).unwrap_or(name);
        let id = name.strip_prefix(RECORDING_PREFIX)?.strip_suffix(RECORDING_SUFFIX)?;
        Self::parse(id).ok()
    }
}

const RECORDING_PREFIX: &str = "docker-";
const RECORDING_SUFFIX: &str = ".recording";
/// What the archive adds while it writes.
const UNFINISHED_SUFFIX: &str = ".partial";

impl fmt::Display for LayerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What `docker run --storage-opt` can ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StorageOptions {
    /// The size of the disk.
    pub(super) size_bytes: Option<u64>,
    /// The root is read-only, and one for all containers of the image.
    pub(super) is_shared: bool,
    /// How the tar of its commits is given, where that is not as the worker does it.
    pub(super) push: Option<Push>,
}

impl StorageOptions {
    pub(super) fn parse(options: &BTreeMap<String, String>) -> Result<Self, DockerError> {
        let mut parsed = Self::default();
        for (name, value) in options {
            match name.to_ascii_lowercase().as_str() {
                "size" => parsed.size_bytes = Some(parse_size(value)?),
                "shared" => parsed.is_shared = parse_shared(value)?,
                "push" => parsed.push = Some(parse_push(value)?),
                _ => return Err(DockerError::UnknownOption { got: name.clone() }),
            }
        }
        Ok(parsed)
    }
}

fn parse_shared(value: &str) -> Result<bool, DockerError> {
    value.parse().map_err(|_| DockerError::OptionValue {
        name: "shared",
        got: value.to_owned(),
        expected: "true or false",
    })
}

fn parse_push(value: &str) -> Result<Push, DockerError> {
    Push::from_str(value, false).map_err(|_| DockerError::OptionValue {
        name: "push",
        got: value.to_owned(),
        expected: "references or ordinary",
    })
}

/// Whole blocks alone: ext4 makes no file system of less.
const SIZE_UNIT_BYTES: u64 = 4096;

fn parse_size(value: &str) -> Result<u64, DockerError> {
    let refused = || DockerError::OptionValue {
        name: "size",
        got: value.to_owned(),
        expected: "a number of bytes above zero, or one with K, M, G or T, such as 20GiB",
    };
    let digits = value.trim_end_matches(|character: char| character.is_ascii_alphabetic());
    // As Docker's own drivers have it, 20G and 20GB are 20GiB.
    let shift = match value[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(refused()),
    };
    let number: u64 = digits.parse().map_err(|_| refused())?;
    let bytes = number.checked_mul(1 << shift).ok_or_else(refused)?;
    match bytes.checked_next_multiple_of(SIZE_UNIT_BYTES) {
        Some(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(refused()),
    }
}

/// Go sends a list or map that was never made as `null`.
fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// `Init`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct InitRequest {
    #[serde(deserialize_with = "null_as_default")]
    pub(super) opts: Vec<String>,
    #[serde(rename = "UIDMaps", deserialize_with = "null_as_default")]
    pub(super) uid_maps: Vec<serde_json::Value>,
    #[serde(rename = "GIDMaps", deserialize_with = "null_as_default")]
    pub(super) gid_maps: Vec<serde_json::Value>,
}

/// `Create` and `CreateReadWrite`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct CreateRequest {
    #[serde(rename = "ID")]
    pub(super) id: String,
    pub(super) parent: String,
    pub(super) mount_label: String,
    #[serde(deserialize_with = "null_as_default")]
    pub(super) storage_opt: BTreeMap<String, String>,
}

/// The calls that name one layer, and perhaps its parent.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct LayerRequest {
    #[serde(rename = "ID")]
    pub(super) id: String,
    pub(super) parent: String,
    pub(super) mount_label: String,
}

/// `ApplyDiff`, in the query.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ApplyQuery {
    pub(super) id: String,
    pub(super) parent: String,
}

/// One line of `docker diff`.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct ChangeAnswer {
    pub(super) path: String,
    pub(super) kind: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let long = "a".repeat(ID_LENGTH_MAX + 1);
        for bad in ["", "..", ".", "a/b", "../x", "a b", "a\0", "init:x", "\u{e4}", &long] {
            assert!(matches!(LayerId::parse(bad), Err(DockerError::Id { .. })), "{bad:?}");
        }
        let longest = "a".repeat(ID_LENGTH_MAX);
        for good in ["a", "0123abc", "abc-init", "A_b-9", &longest] {
            let id = LayerId::parse(good).unwrap();
            assert_eq!(LayerId::of_recording(&id.recording()).as_ref(), Some(&id));
            let unfinished = id.unfinished_recording();
            assert_eq!(LayerId::of_recording(&unfinished).as_ref(), Some(&id));
            assert!(unfinished.len() <= 255);
        }
        assert!(LayerId::parse("abc-init").unwrap().is_init());
        assert!(!LayerId::parse("init").unwrap().is_init());
        assert_eq!(LayerId::parse_parent("").unwrap(), None);
        assert_eq!(LayerId::of_recording("docker-../x.recording"), None);
    }

    #[test]
    fn sizes_are_read_as_dockers_drivers_read_them() {
        for (text, bytes) in [
            ("4096", 4096),
            ("1", 4096),
            ("20G", 20 << 30),
            ("20GiB", 20 << 30),
            ("20gb", 20 << 30),
            ("1t", 1 << 40),
            ("5k", 8192),
            ("3MiB", 3 << 20),
        ] {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
        for bad in ["", "0", "G", "-1", "1.5G", "20X", "18446744073709551615", "17000000T", "1 G"] {
            assert!(matches!(parse_size(bad), Err(DockerError::OptionValue { .. })), "{bad}");
        }
    }

    #[test]
    fn an_unknown_storage_option_is_answered_with_those_there_are() {
        let parse = |name: &str, value: &str| {
            StorageOptions::parse(&BTreeMap::from([(name.to_owned(), value.to_owned())]))
        };
        assert_eq!(parse("size", "1G").unwrap().size_bytes, Some(1 << 30));
        assert!(parse("shared", "true").unwrap().is_shared);
        assert!(parse("shared", "yes").is_err());
        assert_eq!(parse("push", "ordinary").unwrap().push, Some(Push::Ordinary));
        assert_eq!(parse("push", "references").unwrap().push, Some(Push::References));
        let text = parse("push", "Ordinary").unwrap_err().to_string();
        assert!(text.contains("references or ordinary"), "{text}");
        let text = parse("sise", "1G").unwrap_err().to_string();
        for named in ["`sise`", "`size`", "`shared`", "`push`"] {
            assert!(text.contains(named), "{text}");
        }
    }

    #[test]
    fn what_docker_sends_is_read() {
        let text = r#"{"ID":"a-init","Parent":"","MountLabel":"","StorageOpt":null,"New":1}"#;
        let request: CreateRequest = serde_json::from_str(text).unwrap();
        assert_eq!((request.id.as_str(), request.parent.as_str()), ("a-init", ""));
        assert!(request.storage_opt.is_empty());
        let text = r#"{"Home":"/var/lib/docker/slackwater","Opts":null,"UIDMaps":null}"#;
        let request: InitRequest = serde_json::from_str(text).unwrap();
        assert!(request.opts.is_empty() && request.uid_maps.is_empty());
        let request: LayerRequest = serde_json::from_str(r#"{"ID":"b"}"#).unwrap();
        assert_eq!((request.id.as_str(), request.parent.as_str()), ("b", ""));
    }
}
