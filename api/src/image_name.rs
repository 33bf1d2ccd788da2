//! Names of images, as publishers tell them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Most bytes of an image's name: a repository has 255 at most (distribution's reference grammar), and a host, a tag or
/// a digest stand beside it.
pub const IMAGE_NAME_BYTES_MAX: usize = 512;

/// The name of an image, such as `registry.example/work:1`: letters, digits and `._:/@+-`; or `*`, one whose name is not
/// known; or `?`, one whose name its publisher tells later.
///
/// What the name stands for is the registry's matter, and nothing here depends on it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "server", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "server", schema(value_type = String))]
pub struct ImageName(String);

/// The text is not the name of an image.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "an image's name is 1 to {IMAGE_NAME_BYTES_MAX} letters, digits and `._:/@+-`, such as registry.example/work:1; got \
     `{}`", got.escape_debug()
)]
pub struct ImageNameError {
    /// The text, as far as it is shown.
    pub got: String,
}

impl ImageName {
    /// Stands for an image whose name is not known.
    pub const UNKNOWN: &str = "*";

    /// Stands for an image whose name its publisher tells later, and then ends this.
    pub const UNNAMED: &str = "?";

    /// An image whose name is not known.
    #[must_use]
    pub fn unknown() -> Self {
        Self(Self::UNKNOWN.to_owned())
    }

    /// An image whose name its publisher tells later.
    #[must_use]
    pub fn unnamed() -> Self {
        Self(Self::UNNAMED.to_owned())
    }

    /// Whether it is a name, and does not stand for one.
    #[must_use]
    pub fn is_name(text: &str) -> bool {
        ![Self::UNKNOWN, Self::UNNAMED].contains(&text)
    }

    /// As text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ImageName {
    type Err = ImageNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._:/@+-".contains(&byte);
        let is_name =
            (1..=IMAGE_NAME_BYTES_MAX).contains(&text.len()) && text.bytes().all(is_allowed);
        match is_name || !Self::is_name(text) {
            true => Ok(Self(text.to_owned())),
            false => Err(ImageNameError { got: text.chars().take(64).collect() }),
        }
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for ImageName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ImageName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_the_name_of_an_image() {
        let longest = "a".repeat(IMAGE_NAME_BYTES_MAX);
        for good in ["a", "*", "?", "127.0.0.1:5000/a/b_c:1.2-3+x", "a@sha256:00", &longest] {
            assert_eq!(good.parse::<ImageName>().map(|name| name.to_string()), Ok(good.to_owned()));
        }
        let too_long = format!("{longest}a");
        for bad in ["", "a b", "a=b", "a*", "**", "a\n", "\u{e9}", &too_long] {
            assert!(bad.parse::<ImageName>().is_err(), "{bad}");
        }
    }
}
