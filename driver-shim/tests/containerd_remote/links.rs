//! The link of a reference, which no engine can make without the driver.

use std::fs;

use slackwater_archive::{REFERENCE_LINK, REFERENCE_LINK_TARGET, REFERENCE_MEMBER};
use tonic::Code;

use crate::support::{Appliance, Machine};
use crate::{bounded, chain, refused, runtime, serve, snapshot, unpack_reference};

#[test]
fn only_a_reference_may_have_its_link() {
    let appliance = Appliance::start();
    let runtime = runtime();
    bounded(&runtime, async {
        let machine = Machine::start(&appliance).await;
        let snapshots = serve(&machine).await;
        snapshots.prepare("one", "").await.unwrap();
        snapshots.commit("base", "one").await.unwrap();
        let taken = snapshot(&machine, "base").await;
        machine.worker.publish(taken.id).await.unwrap();
        let meant = machine.worker.reference_to(taken.id).await.unwrap();
        let write =
            async |key: &str, parent: &str| unpack_reference(&snapshots, key, parent, &meant).await;
        let one = chain('1');
        let key = |name: &str| format!("x/1/extract-{name} {one}");

        // No other engine could unpack it: it is no layer here either, however often that is asked for.
        let root = write(&key("with more"), "").await;
        fs::write(root.join("other"), "content").unwrap();
        for _ in 0..2 {
            let answer = snapshots.commit("x/2/with more", &key("with more")).await;
            let message = refused(answer, Code::FailedPrecondition);
            assert!(message.contains(REFERENCE_LINK_TARGET), "{message}");
        }
        // Without the link it is a layer with a file.
        fs::remove_file(root.join(REFERENCE_LINK)).unwrap();
        snapshots.commit("x/2/with more", &key("with more")).await.unwrap();
        assert_ne!(snapshot(&machine, "x/2/with more").await, taken);
        let view = snapshots.view("view of more", "x/2/with more").await.unwrap();
        let mut names: Vec<_> =
            fs::read_dir(view).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, [REFERENCE_MEMBER, "other"]);

        // The same above a layer that has a file of the name that the link is to.
        let root = snapshots.prepare(&key("3"), "").await.unwrap();
        fs::remove_file(root.join(REFERENCE_LINK_TARGET)).unwrap();
        fs::write(root.join(REFERENCE_LINK_TARGET), "its own").unwrap();
        snapshots.commit("x/2/third", &key("3")).await.unwrap();
        write(&key("4"), "x/2/third").await;
        snapshots.commit("x/2/fourth", &key("4")).await.unwrap();
        assert_eq!(snapshot(&machine, "x/2/fourth").await, taken);
        let root = write(&key("5"), "x/2/third").await;
        fs::remove_file(root.join(REFERENCE_MEMBER)).unwrap();
        let answer = snapshots.commit("x/2/fifth", &key("5")).await;
        refused(answer, Code::FailedPrecondition);
        let view = snapshots.view("view of the third", "x/2/third").await.unwrap();
        assert_eq!(fs::read_to_string(view.join(REFERENCE_LINK_TARGET)).unwrap(), "its own");

        // What runs in a container cannot make it.
        let root = snapshots.prepare("x/1/container", "").await.unwrap();
        slackwater_archive::unpack(&meant.to_archive()[..], &root, None).unwrap_err();
        snapshots.stop().await;
    });
}
