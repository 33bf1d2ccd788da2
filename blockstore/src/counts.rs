//! The counts of chunks that a transaction looks at or changes, page by page.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::id::ChunkId;
use crate::kv::{Batch, Family, Kv, Write};
use crate::record::{CountPage, key};

/// A page in the transaction.
#[derive(Debug)]
struct Page {
    counts: CountPage,
    is_changed: bool,
}

/// The counts as the transaction sees them.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pages: BTreeMap<ChunkId, Page>,
    /// What each changed count was before, newest last.
    undo: Vec<(ChunkId, u32)>,
}

impl Counts {
    pub(crate) fn get(&mut self, kv: &dyn Kv, chunk: ChunkId) -> Result<u32> {
        self.page(kv, chunk).map(|page| page.counts.get(chunk))
    }

    pub(crate) fn set(&mut self, kv: &dyn Kv, chunk: ChunkId, count: u32) -> Result<()> {
        let page = self.page(kv, chunk)?;
        page.is_changed = true;
        let before = page.counts.set(chunk, count);
        self.undo.push((chunk, before));
        Ok(())
    }

    fn page(&mut self, kv: &dyn Kv, chunk: ChunkId) -> Result<&mut Page> {
        let first = CountPage::first(chunk);
        match self.pages.entry(first) {
            std::collections::btree_map::Entry::Occupied(entry) => Ok(entry.into_mut()),
            std::collections::btree_map::Entry::Vacant(entry) => {
                let counts = stored(kv, first)?;
                Ok(entry.insert(Page { counts, is_changed: false }))
            }
        }
    }

    /// How many changes there were: a point to go back to.
    pub(crate) fn changes(&self) -> usize {
        self.undo.len()
    }

    /// Takes back all changes but the first `changes`.
    pub(crate) fn roll_back(&mut self, changes: usize) {
        for (chunk, before) in self.undo.drain(changes..).rev() {
            if let Some(page) = self.pages.get_mut(&CountPage::first(chunk)) {
                page.counts.set(chunk, before);
            }
        }
    }

    /// The writes that make the index hold these counts.
    pub(crate) fn finish(self, batch: &mut Batch) {
        for (first, page) in self.pages.into_iter().filter(|(_, page)| page.is_changed) {
            let (key, value) = (key::refs(first), page.counts.encode());
            batch.push(Write { family: Family::Refs, key, value });
        }
    }
}

/// The page that begins with `first`, as the index has it.
pub(crate) fn stored(kv: &dyn Kv, first: ChunkId) -> Result<CountPage> {
    let bytes = kv.get(Family::Refs, &key::refs(first))?;
    bytes.as_deref().map_or_else(|| Ok(CountPage::default()), CountPage::decode)
}
