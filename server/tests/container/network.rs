//! An appliance, a worker and a container in network namespaces: a bridge and masquerading, as engines make them.
//!
//! ```text
//! appliance 10.9.0.1 ---wire--- 10.9.0.2 worker 172.18.0.1 ---bridge--- 172.18.0.2 container
//!                                          masquerades
//! ```

use crate::namespace::Namespace;

/// Where the appliance listens, and the address of the worker.
pub const APPLIANCE: &str = "10.9.0.1";
pub const WORKER: &str = "10.9.0.2";

pub struct Network {
    pub appliance: Namespace,
    pub worker: Namespace,
    pub container: Namespace,
}

impl Network {
    pub fn new() -> Self {
        let [appliance, worker, container] = [(); 3].map(|()| Namespace::new());
        let to = Namespace::keeper;
        appliance.ip(&format!("link add wire type veth peer name eth0 netns {}", to(&worker)));
        appliance.has_address("wire", &format!("{APPLIANCE}/24"));
        worker.has_address("eth0", &format!("{WORKER}/24"));
        worker.ip("link add docker0 type bridge");
        worker.has_address("docker0", "172.18.0.1/16");
        worker.ip(&format!("link add veth0 type veth peer name eth0 netns {}", to(&container)));
        worker.ip("link set veth0 master docker0");
        worker.ip("link set veth0 up");
        container.has_address("eth0", "172.18.0.2/16");
        container.ip("route add default via 172.18.0.1");
        // As seen from within the namespace.
        worker.done("sh", &["-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]);
        // Its lock may be the machine's.
        let masquerade = "-w 60 -t nat -A POSTROUTING -s 172.18.0.0/16 -o eth0 -j MASQUERADE";
        worker.done("iptables", &masquerade.split(' ').collect::<Vec<_>>());
        Self { appliance, worker, container }
    }
}
