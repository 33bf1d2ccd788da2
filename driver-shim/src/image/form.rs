//! Forms of layers: a tar as it is, or compressed.

use std::io::{self, Read, Write};

use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use zstd::stream::read::Decoder as ZstdDecoder;
use zstd::stream::write::Encoder as ZstdEncoder;

/// The media types of the OCI image specification, "Layer Media Types".
const TAR: &str = "application/vnd.oci.image.layer.v1.tar";
const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";

/// The media types of Docker's image manifest version 2, which OCI's go back to.
const DOCKER_TAR: &str = "application/vnd.docker.image.rootfs.diff.tar";
const DOCKER_GZIP: &str = "application/vnd.docker.image.rootfs.diff.tar.gzip";
const DOCKER_ZSTD: &str = "application/vnd.docker.image.rootfs.diff.tar.zstd";

/// How gzip (RFC 1952, section 2.3.1, with the method deflate) and zstd (RFC 8878, section 3.1.1) begin.
const GZIP_BEGINNING: [u8; 3] = [0x1f, 0x8b, 8];
const ZSTD_BEGINNING: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// A frame of zstd that is skipped (RFC 8878, section 3.1.2): 16 numbers, of which this is the last three bytes.
const SKIPPED_BEGINNING: [u8; 3] = [0x2a, 0x4d, 0x18];

/// Levels of compression: the usual ones of gzip and zstd, so that layers are as large as those of other programs.
const GZIP_LEVEL: u32 = 6;
const ZSTD_LEVEL: i32 = 3;

/// How a layer is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Tar,
    Gzip,
    Zstd,
}

impl Form {
    /// The form of a media type, if it is one that is written here. Empty: gzip, as containerd takes it.
    pub(crate) fn of(media_type: &str) -> Option<Self> {
        match media_type {
            TAR => Some(Self::Tar),
            "" | GZIP => Some(Self::Gzip),
            ZSTD => Some(Self::Zstd),
            _ => None,
        }
    }

    pub(crate) fn media_type(self) -> &'static str {
        match self {
            Self::Tar => TAR,
            Self::Gzip => GZIP,
            Self::Zstd => ZSTD,
        }
    }
}

/// Whether a layer of this media type is a tar, compressed or not.
pub(crate) fn is_read(media_type: &str) -> bool {
    [TAR, GZIP, ZSTD, DOCKER_TAR, DOCKER_GZIP, DOCKER_ZSTD].contains(&media_type)
}

/// Reads the tar of a layer, of which the first bytes tell the form, as to containerd for most media types: they are
/// often wrong. zstd takes at most its usual window, 128 MiB.
pub(crate) fn decoder(mut inner: impl Read + 'static) -> io::Result<Box<dyn Read>> {
    let mut beginning = Vec::new();
    let length = u64::try_from(ZSTD_BEGINNING.len()).unwrap_or_default();
    inner.by_ref().take(length).read_to_end(&mut beginning)?;
    let is_gzip = beginning.starts_with(&GZIP_BEGINNING);
    let is_skipped = beginning.first().is_some_and(|byte| byte >> 4 == 5)
        && beginning[1..].starts_with(&SKIPPED_BEGINNING);
    let is_zstd = is_skipped || beginning.starts_with(&ZSTD_BEGINNING);
    let whole = io::Cursor::new(beginning).chain(inner);
    Ok(match (is_gzip, is_zstd) {
        (true, _) => Box::new(MultiGzDecoder::new(whole)),
        (_, true) => Box::new(ZstdDecoder::new(whole)?),
        _ => Box::new(whole),
    })
}

/// Writes in a form.
pub(crate) enum Encoder<W: Write> {
    Tar(W),
    Gzip(GzEncoder<W>),
    Zstd(ZstdEncoder<'static, W>),
}

impl<W: Write> Encoder<W> {
    pub(crate) fn new(form: Form, inner: W) -> io::Result<Self> {
        Ok(match form {
            Form::Tar => Self::Tar(inner),
            Form::Gzip => Self::Gzip(GzEncoder::new(inner, Compression::new(GZIP_LEVEL))),
            Form::Zstd => Self::Zstd(ZstdEncoder::new(inner, ZSTD_LEVEL)?),
        })
    }

    /// Writes the end.
    pub(crate) fn finish(self) -> io::Result<W> {
        match self {
            Self::Tar(inner) => Ok(inner),
            Self::Gzip(encoder) => encoder.finish(),
            Self::Zstd(encoder) => encoder.finish(),
        }
    }
}

impl<W: Write> Write for Encoder<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tar(inner) => inner.write(bytes),
            Self::Gzip(encoder) => encoder.write(bytes),
            Self::Zstd(encoder) => encoder.write(bytes),
        }
    }

    /// Does nothing: bytes that were compressed together so far would be cut there.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn each_form_gives_the_same_bytes_again() {
        let bytes: Vec<u8> =
            (0..300_000_u32).flat_map(|number| (number / 7).to_le_bytes()).collect();
        for form in [Form::Tar, Form::Gzip, Form::Zstd] {
            assert_eq!(Form::of(form.media_type()), Some(form));
            let mut encoder = Encoder::new(form, Vec::new()).unwrap();
            encoder.write_all(&bytes).unwrap();
            encoder.flush().unwrap();
            let encoded = encoder.finish().unwrap();
            let mut decoded = Vec::new();
            match form {
                Form::Tar => decoded.clone_from(&encoded),
                Form::Gzip => {
                    flate2::read::GzDecoder::new(&encoded[..]).read_to_end(&mut decoded).unwrap();
                }
                Form::Zstd => decoded = zstd::decode_all(&encoded[..]).unwrap(),
            }
            assert!(decoded == bytes, "{form:?}");
            assert_eq!(encoded.len() < bytes.len() / 2, form != Form::Tar, "{form:?}");
        }
        assert_eq!(Form::of(""), Some(Form::Gzip));
        assert_eq!(Form::of("application/vnd.oci.image.layer.nondistributable.v1.tar"), None);
    }
}
