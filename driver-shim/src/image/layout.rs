//! An archive of an image: what `docker load` reads (manifest.json) and what `ctr images
//! import`, `skopeo` and others read (an OCI layout), in one file.
//!
//! A layer's entry begins with its name and size, which are known when it was packed. So the
//! place of that header is kept free, and filled in afterwards: no layer is written twice.

use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::digest::{Digest, HashingWriter};
use super::{media, name};
use crate::engine::EngineError;
use crate::engine::daemon::{Daemon, RemoteView};
use crate::error::DriverError;
use crate::worker::{LayerKind, SnapshotRef};

/// Records of a tar have this size.
const RECORD_BYTES: u64 = 512;

/// Writes are gathered up to this size.
const BUFFER_BYTES: usize = 1 << 20;

/// An image that is to be exported.
#[derive(Debug)]
pub struct Export<'a> {
    /// Its name.
    pub image: &'a str,
    /// Its configuration; the digests of the layers are put in.
    pub config: Value,
    /// Its layers, the lowest first.
    pub layers: &'a [SnapshotRef],
}

impl Export<'_> {
    /// Writes the archive with ordinary layers to `output`, which must not be there.
    ///
    /// # Errors
    /// A layer cannot be mounted or read, or the archive not written; then there is none.
    pub async fn write(self, daemon: &Daemon, output: &Path) -> Result<(), DriverError> {
        if output.exists() {
            return Err(DriverError::FileExists { path: output.to_owned() });
        }
        let mut partial = output.as_os_str().to_owned();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let written = self.write_to(daemon, &partial).await;
        let finished = written.and_then(|()| {
            std::fs::rename(&partial, output).map_err(DriverError::io("rename", &partial))?;
            sync_folder(output)
        });
        if finished.is_err() {
            // What is not whole is of no use; there may be nothing.
            let _ = std::fs::remove_file(&partial);
        }
        finished
    }

    async fn write_to(mut self, daemon: &Daemon, path: &Path) -> Result<(), DriverError> {
        let failed = || DriverError::io("write", path);
        let file = File::create(path).map_err(failed())?;
        let mut archive = Archive { file: BufWriter::with_capacity(BUFFER_BYTES, file) };
        let mut layers = Vec::new();
        let mut below = None;
        for (index, snapshot) in self.layers.iter().enumerate() {
            let alone = daemon.view(*snapshot, &[]).await?;
            let kind = LayerKind::of(snapshot.size_bytes);
            let older = below.as_ref().map(|view: &RemoteView| view.path().to_owned());
            let newer = alone.path().to_owned();
            let packing = tokio::task::spawn_blocking(move || {
                let packed = archive.layer(kind, older.as_deref(), &newer);
                packed.map(|layer| (archive, layer))
            });
            let packed = packing.await.map_err(|error| DriverError::Start(error.to_string()))?;
            let (kept, layer) = packed?;
            archive = kept;
            let count = self.layers.len();
            eprintln!("layer {} of {count}: {} bytes", index + 1, layer.length_bytes);
            layers.push(layer);
            below = Some(whole(daemon, &self.layers[..=index], alone).await?);
        }
        let ids: Vec<_> = layers.iter().map(|layer| layer.digest.to_string()).collect();
        self.config["rootfs"] = json!({ "type": "layers", "diff_ids": ids });
        archive.describe(self.image, &self.config, &layers).map_err(failed())?;
        let file = archive.file.into_inner().map_err(|error| failed()(error.into_error()))?;
        file.sync_all().map_err(failed())
    }
}

/// The tree that the highest of these layers shows, which is seen `alone` so far.
async fn whole(
    daemon: &Daemon,
    layers: &[SnapshotRef],
    alone: RemoteView,
) -> Result<RemoteView, EngineError> {
    let is_image = |layer: &&SnapshotRef| LayerKind::of(layer.size_bytes) == LayerKind::Images;
    // A disk has all that is below it.
    let images: Vec<_> = layers.iter().rev().take_while(is_image).copied().collect();
    match images.split_first() {
        Some((highest, below)) if !below.is_empty() => daemon.view(*highest, below).await,
        _ => Ok(alone),
    }
}

/// Makes the name of a file durable.
fn sync_folder(path: &Path) -> Result<(), DriverError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    match File::open(folder).and_then(|folder| folder.sync_all()) {
        // A file system that syncs no folders.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        synced => synced.map_err(DriverError::io("sync", folder)),
    }
}

/// A part of the archive.
struct Blob {
    digest: Digest,
    length_bytes: u64,
}

impl Blob {
    fn path(&self) -> String {
        format!("blobs/sha256/{}", self.digest.hex())
    }

    fn descriptor(&self, media_type: &str) -> Value {
        json!({ "mediaType": media_type, "digest": self.digest.to_string(),
            "size": self.length_bytes })
    }
}

struct Archive<W: Write + Seek> {
    file: W,
}

impl<W: Write + Seek> Archive<W> {
    /// Packs a layer above the tree `older`: what a disk has and that has not, or what the layer's image has.
    fn layer(
        &mut self,
        kind: LayerKind,
        older: Option<&Path>,
        newer: &Path,
    ) -> Result<Blob, DriverError> {
        let failed = || DriverError::io("write the layer of", newer);
        let start = self.file.stream_position().map_err(failed())?;
        self.file.write_all(&[0; 512]).map_err(failed())?;
        let mut hashing = HashingWriter::new(&mut self.file);
        // This is a program of its own, whose memory no other work needs.
        match kind {
            LayerKind::Disks => {
                slackwater_archive::pack(older, newer, &mut hashing, None, usize::MAX)?;
            }
            LayerKind::Images => {
                slackwater_archive::pack_upper(newer, older, &mut hashing, usize::MAX)?;
            }
        }
        let (digest, length_bytes) = hashing.finish();
        let blob = Blob { digest, length_bytes };
        self.finish(start, &blob.path(), length_bytes).map_err(failed())?;
        Ok(blob)
    }

    /// Fills in the header at `start` and goes on behind the content.
    fn finish(&mut self, start: u64, path: &str, length_bytes: u64) -> io::Result<()> {
        let padding = length_bytes.next_multiple_of(RECORD_BYTES) - length_bytes;
        io::copy(&mut io::Read::take(io::repeat(0), padding), &mut self.file)?;
        let end = self.file.stream_position()?;
        let mut header = tar::Header::new_gnu();
        header.set_path(path)?;
        header.set_size(length_bytes);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_cksum();
        self.file.seek(SeekFrom::Start(start))?;
        self.file.write_all(header.as_bytes())?;
        self.file.seek(SeekFrom::Start(end))?;
        Ok(())
    }

    fn entry(&mut self, path: &str, bytes: &[u8]) -> io::Result<()> {
        let start = self.file.stream_position()?;
        self.file.write_all(&[0; 512])?;
        self.file.write_all(bytes)?;
        self.finish(start, path, u64::try_from(bytes.len()).unwrap_or_default())
    }

    fn blob(&mut self, value: &Value) -> io::Result<Blob> {
        let bytes = serde_json::to_vec(value)?;
        let length_bytes = u64::try_from(bytes.len()).unwrap_or_default();
        let blob = Blob { digest: Digest::of(&bytes), length_bytes };
        self.entry(&blob.path(), &bytes)?;
        Ok(blob)
    }

    /// Adds what names the layers, in both forms, and the end of the archive.
    fn describe(&mut self, image: &str, config: &Value, layers: &[Blob]) -> io::Result<()> {
        let config = self.blob(config)?;
        let descriptors: Vec<_> =
            layers.iter().map(|layer| layer.descriptor(media::LAYER)).collect();
        let manifest = self.blob(&json!({ "schemaVersion": 2, "mediaType": media::MANIFEST,
            "config": config.descriptor(media::CONFIG), "layers": descriptors }))?;
        let mut named = manifest.descriptor(media::MANIFEST);
        named["annotations"] = json!({ "io.containerd.image.name": name::in_full(image),
            "org.opencontainers.image.ref.name": name::tag_of(image) });
        let index = json!({ "schemaVersion": 2, "mediaType": media::INDEX, "manifests": [named] });
        self.entry("index.json", &serde_json::to_vec(&index)?)?;
        self.entry("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        let paths: Vec<_> = layers.iter().map(Blob::path).collect();
        let docker = json!([{ "Config": config.path(), "RepoTags": [name::with_tag(image)],
            "Layers": paths }]);
        self.entry("manifest.json", &serde_json::to_vec(&docker)?)?;
        self.file.write_all(&[0; 1024])
    }
}

/// An archive of layers that are at hand, as `docker load` reads it.
pub(super) fn docker_archive(
    image: &str,
    mut config: Value,
    layers: &[(Digest, &[u8])],
) -> io::Result<Vec<u8>> {
    let ids: Vec<_> = layers.iter().map(|(digest, _)| digest.to_string()).collect();
    config["rootfs"] = json!({ "type": "layers", "diff_ids": ids });
    let mut archive = Archive { file: io::Cursor::new(Vec::new()) };
    let mut blobs = Vec::new();
    for (digest, bytes) in layers {
        let length_bytes = u64::try_from(bytes.len()).unwrap_or_default();
        let blob = Blob { digest: *digest, length_bytes };
        archive.entry(&blob.path(), bytes)?;
        blobs.push(blob);
    }
    archive.describe(image, &config, &blobs)?;
    Ok(archive.file.into_inner())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read;

    use super::*;

    #[test]
    fn an_archive_is_read_in_both_forms() {
        let layer = b"a layer of some bytes".as_slice();
        let layers = [(Digest::of(layer), layer)];
        let bytes = docker_archive("web", json!({ "os": "linux" }), &layers).unwrap();
        let mut files = BTreeMap::new();
        for entry in tar::Archive::new(bytes.as_slice()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().to_str().unwrap().to_owned();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            files.insert(path, content);
        }
        let json = |path: &str| serde_json::from_slice::<Value>(&files[path]).unwrap();
        let docker = json("manifest.json");
        assert_eq!(docker[0]["RepoTags"][0], "web:latest");
        assert_eq!(files[docker[0]["Layers"][0].as_str().unwrap()], layer);
        let config = json(docker[0]["Config"].as_str().unwrap());
        assert_eq!(config["rootfs"]["diff_ids"][0], Digest::of(layer).to_string());
        let named = &json("index.json")["manifests"][0];
        assert_eq!(
            named["annotations"]["io.containerd.image.name"],
            "docker.io/library/web:latest"
        );
        let path = |digest: &Value| digest.as_str().unwrap().replace("sha256:", "blobs/sha256/");
        let manifest = json(&path(&named["digest"]));
        assert_eq!(files[&path(&manifest["layers"][0]["digest"])], layer);
        assert_eq!(json(&path(&manifest["config"]["digest"])), config);
        for (path, content) in &files {
            if let Some(hex) = path.strip_prefix("blobs/sha256/") {
                assert_eq!(Digest::of(content).hex(), hex);
            }
        }
    }
}
