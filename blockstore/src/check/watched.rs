//! A view of the index whose scans end once the work is cancelled.

use crate::error::Result;
use crate::kv::{Family, KvRead, Visit, VisitSkipping};
use crate::progress::Progress;

/// The view of a check: each entry that is visited is a point at which it can end.
pub(super) struct Watched<'a> {
    pub(super) view: &'a dyn KvRead,
    pub(super) progress: &'a Progress,
}

impl KvRead for Watched<'_> {
    fn get(&self, family: Family, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.view.get(family, key)
    }

    fn get_many(&self, family: Family, keys: &[Vec<u8>]) -> Result<Vec<Option<Vec<u8>>>> {
        self.view.get_many(family, keys)
    }

    fn last_at_or_before(
        &self,
        family: Family,
        bounds: (&[u8], &[u8]),
        is_wanted: &dyn Fn(&[u8]) -> bool,
    ) -> Result<Option<(Vec<u8>, Vec<u8>)>> {
        self.view.last_at_or_before(family, bounds, is_wanted)
    }

    fn scan_reaching(
        &self,
        family: Family,
        bounds: (&[u8], &[u8], &[u8]),
        visit: &mut Visit<'_>,
    ) -> Result<()> {
        self.view.scan_reaching(family, bounds, &mut |key, value| {
            self.progress.point()?;
            visit(key, value)
        })
    }

    fn scan_skipping(
        &self,
        family: Family,
        bounds: (&[u8], &[u8], &[u8]),
        visit: &mut VisitSkipping<'_>,
    ) -> Result<()> {
        self.view.scan_skipping(family, bounds, &mut |key, value| {
            self.progress.point()?;
            visit(key, value)
        })
    }

    fn scan(&self, family: Family, from: &[u8], to: &[u8], visit: &mut Visit<'_>) -> Result<()> {
        self.view.scan(family, from, to, &mut |key, value| {
            self.progress.point()?;
            visit(key, value)
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::error::Error;
    use crate::progress::Progress;
    use crate::testing::{World, options};
    use crate::{background, check};

    #[test]
    fn what_is_not_wanted_ends_and_leaves_a_sound_store() {
        let world = World::new(options(64 << 10), None);
        let inode = world.create("f");
        world.put(inode, 0, &(1..=40).collect::<Vec<u64>>());
        world.put(inode, 0, &(101..=130).collect::<Vec<u64>>());
        let unwanted = Progress::default();
        unwanted.cancel();
        for data in [false, true] {
            let ended = check::check(&world.core, data, &unwanted);
            assert!(matches!(ended, Err(Error::Cancelled)), "{ended:?}");
        }
        let ended = background::gc_watched(&world.core, &unwanted);
        assert!(matches!(ended, Err(Error::Cancelled)), "{ended:?}");
        world.check();
        let wanted = Progress::default();
        let report = background::gc_watched(&world.core, &wanted).unwrap();
        assert!(report.used_bytes_before > 0 && report.used_bytes > 0, "{report:?}");
        assert_eq!(wanted.step().part, "index");
        world.check();
        let whole = Progress::default();
        check::check(&world.core, true, &whole).unwrap();
        assert_eq!(whole.step().part, "what damage hits");
    }
}
