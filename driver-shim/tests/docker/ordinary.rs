//! What commits and builds made as ordinary tars, which any engine unpacks.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::json;
use slackwater_archive::{REFERENCE_MEMBER, Recognised};
use slackwater_driver::worker::Push;

use crate::plugin::Plugin;
use crate::support::{Appliance, Machine};
use crate::{
    assert_nothing_unnamed, await_files, base, create_container, id, is_read_only, is_there,
    published, read,
};

fn is_reference(tar: &[u8]) -> bool {
    matches!(slackwater_archive::recognise(tar).unwrap(), Recognised::Reference(_))
}

fn members(tar: &[u8]) -> BTreeSet<String> {
    let mut tar = tar::Archive::new(tar);
    let entries = tar.entries().unwrap();
    entries.map(|entry| entry.unwrap().path().unwrap().to_str().unwrap().to_owned()).collect()
}

/// A plugin with the image `image`.
fn plugin(machine: &Machine, image: &str, push: Push) -> Plugin {
    let plugin = Plugin::serve_with(&machine.worker, &machine.path().join("plugin.sock"), push);
    plugin.create(image, "");
    plugin.apply(image, "", &base());
    plugin
}

fn write(plugin: &Plugin, layer: &str, name: &str, content: &str) {
    std::fs::write(plugin.get(layer).join(name), content).unwrap();
    plugin.put(layer);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ordinary_commit_is_what_the_container_changed() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let (image, x, n) = (id('d'), id('1'), id('e'));
    let plugin = plugin(&machine, &image, Push::Ordinary);
    let init = format!("{x}-init");
    create_container(&plugin, &x, &image);
    let root = plugin.get(&x);
    std::fs::write(root.join("etc/made"), vec![b'm'; 1 << 20]).unwrap();
    std::fs::write(root.join("dev/kept"), "the container's").unwrap();
    std::fs::remove_file(root.join("etc/old")).unwrap();

    // While the container has it mounted.
    let tar = plugin.diff(&x, &init);
    let expected = ["dev/", "dev/kept", "etc/", "etc/.wh.old", "etc/made"];
    assert_eq!(members(&tar), expected.map(str::to_owned).into());
    plugin.create(&n, &image);
    assert_eq!(plugin.apply(&n, &image, &tar), (1 << 20) + 15);
    plugin.put(&x);
    assert_eq!(plugin.diff(&n, &image), tar);
    let root = plugin.get(&n);
    assert!(is_read_only(&root) && !is_there(&root, "etc/old") && !is_there(&root, ".dockerenv"));
    assert_eq!(read(&root, "etc/hosts"), "the image's own\n");
    assert_eq!(read(&root, "etc/made").len(), 1 << 20);
    plugin.put(&n);
    assert!(published(&machine).await.is_empty(), "it names no snapshot");
    for name in [&x, &init, &n, &image] {
        plugin.remove(name);
    }
    await_files(&appliance, &machine, "", 0).await;
    assert_nothing_unnamed(&appliance).await;
}

fn recordings(machine: &Machine) -> usize {
    std::fs::read_dir(machine.worker.recordings_directory()).unwrap().count()
}

#[tokio::test(flavor = "multi_thread")]
async fn ordinary_layers_of_buildkit_are_the_same_bytes_for_ever() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let image = id('f');
    let plugin = plugin(&machine, &image, Push::Ordinary);
    let (one, two) = ("0vdk2hqwm1xyz7r8c9t0u1v2w", "1vdk2hqwm1xyz7r8c9t0u1v2w");
    plugin.create(one, &image);
    write(&plugin, one, "etc/one", "one");
    plugin.create(two, one);
    write(&plugin, two, "etc/two", "two");
    // That of a layer whose parent was never asked for its own; asked for by several at once.
    let second = std::thread::scope(|scope| {
        let asked = [(); 4].map(|()| scope.spawn(|| plugin.diff(two, one)));
        let got: BTreeSet<_> = asked.into_iter().map(|diff| diff.join().unwrap()).collect();
        assert_eq!(got.len(), 1, "different bytes");
        got.into_iter().next().unwrap()
    });
    assert_eq!(members(&second), ["etc/", "etc/two"].map(str::to_owned).into());
    let first = plugin.diff(one, &image);
    assert_eq!(members(&first), ["etc/", "etc/one"].map(str::to_owned).into());
    assert!(is_read_only(&plugin.get(two)));
    plugin.put(two);
    // As `docker build --squash` asks: what several layers have.
    let expected = ["etc/", "etc/one", "etc/two"].map(str::to_owned);
    assert_eq!(members(&plugin.diff(two, &image)), expected.into());
    assert!(
        members(&plugin.diff(two, "")).is_superset(&["bin/tool".into(), "etc/two".into()].into())
    );

    // Whatever the setting is later; and what is built then is as it says.
    plugin.stop().await;
    let plugin = Plugin::serve(&machine.worker, &machine.path().join("plugin.sock"));
    assert_eq!((plugin.diff(one, &image), plugin.diff(two, one)), (first, second));
    let three = "2vdk2hqwm1xyz7r8c9t0u1v2w";
    plugin.create(three, two);
    write(&plugin, three, "etc/three", "three");
    let third = plugin.diff(three, two);
    assert!(is_reference(&third) && members(&third).contains(REFERENCE_MEMBER));
    assert_eq!(recordings(&machine), 3);
    for name in [three, two, one, &image] {
        plugin.remove(name);
    }
    assert_eq!(recordings(&machine), 0);
    machine.worker.clean_up().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_may_have_it_otherwise_than_its_worker() {
    let appliance = Appliance::start();
    let machine = Machine::start(&appliance).await;
    let image = id('c');
    let with_option = |plugin: &Plugin, name: &str, value: &str| {
        let request = json!({ "ID": name, "Parent": image, "StorageOpt": { "push": value } });
        plugin.answer("CreateReadWrite", &request)["Err"].as_str().unwrap_or_default().to_owned()
    };
    let first = plugin(&machine, &image, Push::References);
    assert_eq!(with_option(&first, "chosen", "ordinary"), "");
    let refusal = with_option(&first, "odd", "both");
    assert!(refusal.contains("both") && refusal.contains("references or ordinary"), "{refusal}");
    write(&first, "chosen", "made", "content");
    first.create_read_write("plain", &image);
    write(&first, "plain", "made", "content");
    assert!(!is_reference(&first.diff("chosen", &image)));
    assert!(is_reference(&first.diff("plain", &image)));
    first.stop().await;

    let second = Plugin::serve_with(
        &machine.worker,
        Path::new(&machine.path().join("plugin.sock")),
        Push::Ordinary,
    );
    assert_eq!(with_option(&second, "other", "references"), "");
    write(&second, "other", "made", "content");
    assert!(is_reference(&second.diff("other", &image)));
    // What has no option is as the worker does it now; an option stays with its container.
    assert_eq!(members(&second.diff("plain", &image)), ["made".to_owned()].into());
    assert!(!is_reference(&second.diff("chosen", &image)));
    for name in ["chosen", "plain", "other", &image] {
        second.remove(name);
    }
    machine.worker.clean_up().await;
}
