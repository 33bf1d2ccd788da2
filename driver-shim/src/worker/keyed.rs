//! Locks by name: work on one volume, or on one shared mount, is done one at a time.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

/// Number of locks from which on those that nobody holds are forgotten.
const SWEEP_COUNT: usize = 1024;

/// Locks that exist while somebody holds or awaits them.
#[derive(Debug)]
pub(crate) struct KeyedLocks<K> {
    locks: Mutex<HashMap<K, Weak<tokio::sync::Mutex<()>>>>,
}

impl<K> Default for KeyedLocks<K> {
    fn default() -> Self {
        Self { locks: Mutex::default() }
    }
}

impl<K: Eq + Hash + Clone> KeyedLocks<K> {
    /// Waits for the lock of that name.
    pub(crate) async fn lock(&self, key: &K) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.locks.lock();
            if locks.len() >= SWEEP_COUNT {
                locks.retain(|_, lock| lock.strong_count() > 0);
            }
            match locks.get(key).and_then(Weak::upgrade) {
                Some(lock) => lock,
                None => {
                    let lock = Arc::default();
                    locks.insert(key.clone(), Arc::downgrade(&lock));
                    lock
                }
            }
        };
        lock.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_name_is_one_lock_and_nobody_is_forgotten() {
        let locks = KeyedLocks::default();
        let first = locks.lock(&1).await;
        for key in 2..3000 {
            drop(locks.lock(&key).await);
        }
        assert!(locks.locks.lock().len() <= SWEEP_COUNT);
        let waiting = tokio::time::timeout(std::time::Duration::from_millis(20), locks.lock(&1));
        assert!(waiting.await.is_err());
        drop(first);
        drop(locks.lock(&1).await);
    }
}
