//! What a worker has on the appliance.

use std::time::{Duration, Instant};

use slackwater_client::query::ListFiles;

use crate::support::{Appliance, Machine};

/// Longest time in which the background takes back what was removed.
const REAP_TIME: Duration = Duration::from_secs(60);

/// The files of a worker on the appliance, below this folder.
pub(crate) async fn files(appliance: &Appliance, machine: &Machine, folder: &str) -> Vec<String> {
    let prefix = format!("workers/{}/{folder}", machine.worker.worker_id());
    let query = ListFiles { prefix: Some(prefix), ..ListFiles::default() };
    let page = appliance.client().files(&query).await.unwrap();
    // The lease lives as long as the worker.
    page.items.into_iter().map(|file| file.path).filter(|path| !path.ends_with("/lease")).collect()
}

/// Waits until a worker has that many files in a folder.
pub(crate) async fn await_files(
    appliance: &Appliance,
    machine: &Machine,
    folder: &str,
    count: usize,
) {
    let deadline = Instant::now() + REAP_TIME;
    loop {
        machine.worker.clean_up().await;
        let files = files(appliance, machine, folder).await;
        if files.len() == count {
            return;
        }
        assert!(Instant::now() < deadline, "expected {count} in {folder}: {files:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
