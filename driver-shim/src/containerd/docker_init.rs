//! The init layer of Docker with the containerd image store: a snapshot between an image and a container, in which
//! dockerd makes what it mounts things on. It is no part of what `docker commit` gives. It is known by its name alone:
//! another client's snapshot that is called so counts as one, too.

use crate::worker::{BelowContainer, Key, Worker, WorkerError};

/// Ends the name of an init layer: it is that of the container's snapshot and this (moby,
/// `daemon/containerd/image_snapshot_unix.go`).
const SUFFIX: &str = "-init";

/// The name of a snapshot without its namespace and number: `NAMESPACE/NUMBER/KEY`.
fn key_of(name: &str) -> &str {
    name.splitn(3, '/').nth(2).unwrap_or(name)
}

fn parent_of(worker: &Worker, key: &Key) -> Result<Option<Key>, WorkerError> {
    match worker.get(key) {
        Some(volume) => Ok(volume.parent),
        None => Err(WorkerError::NotFound { key: key.clone() }),
    }
}

fn is_init_of(init: &Key, container: &Key) -> bool {
    key_of(&init.name).strip_suffix(SUFFIX) == Some(key_of(&container.name))
}

/// The volume above which a container's layer is to be: what it was made above, or what its init layer was.
///
/// # Errors
/// `NotFound` without the container.
pub(crate) fn image_below(worker: &Worker, container: &Key) -> Result<Option<Key>, WorkerError> {
    match parent_of(worker, container)? {
        Some(init) if is_init_of(&init, container) => parent_of(worker, &init),
        parent => Ok(parent),
    }
}

/// What a container is made from, where it is one of a Docker with an init layer; else nothing.
///
/// # Errors
/// `NotFound` without the container, else as [`Worker::snapshot_of`].
pub(crate) async fn below_container(
    worker: &Worker,
    container: &Key,
) -> Result<BelowContainer, WorkerError> {
    let nothing = BelowContainer::default();
    let Some(init) = parent_of(worker, container)? else { return Ok(nothing) };
    if !is_init_of(&init, container) {
        return Ok(nothing);
    }
    let image = match parent_of(worker, &init)? {
        Some(image) => worker.snapshot_of(&image).await?,
        None => None,
    };
    let init = worker.snapshot_of(&init).await?;
    Ok(BelowContainer { init: init.filter(|init| image != Some(*init)), image })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_of_a_snapshot() {
        assert_eq!(key_of("moby/12/0123abcd-init"), "0123abcd-init");
        assert_eq!(key_of("moby/12/a/b"), "a/b");
        assert_eq!(key_of("layer"), "layer");
    }
}
