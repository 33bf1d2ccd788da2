//! One operation at a time on each target and on each source.
//!
//! The target's lock is taken before the source's.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};

/// Locks by path; one that nobody holds or waits for takes no memory.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    by_path: Mutex<HashMap<PathBuf, Weak<AsyncMutex<()>>>>,
}

impl Locks {
    /// Waits for its turn on `path`.
    pub(crate) async fn lock(&self, path: &Path) -> OwnedMutexGuard<()> {
        self.lock_of(path).lock_owned().await
    }

    fn lock_of(&self, path: &Path) -> Arc<AsyncMutex<()>> {
        let mut by_path = self.by_path.lock().unwrap_or_else(PoisonError::into_inner);
        by_path.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = by_path.get(path).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::new(AsyncMutex::new(()));
        by_path.insert(path.to_owned(), Arc::downgrade(&lock));
        lock
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_path_is_held_once_and_others_are_free() {
        let locks = Locks::default();
        let (a, b) = (Path::new("/a"), Path::new("/b"));
        let held = locks.lock(a).await;
        let _other = locks.lock(b).await;
        assert!(locks.lock_of(a).try_lock().is_err());
        drop(held);
        assert!(locks.lock_of(a).try_lock().is_ok());
        assert_eq!(locks.by_path.lock().unwrap().len(), 2);
        drop(_other);
        let _held = locks.lock(a).await;
        assert_eq!(locks.by_path.lock().unwrap().len(), 1, "forgotten when nobody needs it");
    }
}
