//! nfs-ganesha on a folder, as Debian packages it, with the settings of its manual for NFSv3
//! alone.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;

use crate::failure::Failure;
use crate::load::Target;
use crate::process;
use crate::stop::Stop;

use super::rival::RunningRival;

/// Where every rpcbind listens.
const RPCBIND: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 111);

/// Starts it, with an rpcbind where none runs: it does not serve without.
pub(super) fn start(folder: &Path, stop: &Stop) -> Result<(Target, RunningRival), Failure> {
    let export = folder.join("export");
    std::fs::create_dir(&export).map_err(Failure::at("create", &export))?;
    let (nfs, mount) = free_addresses()?;
    let settings = folder.join("settings");
    std::fs::write(&settings, text(&export, nfs, mount))
        .map_err(Failure::at("write", &settings))?;
    let rpcbind = start_rpcbind(folder, stop)?;
    let mut command = process::command("ganesha.nfsd");
    command.arg("-F").arg("-f").arg(&settings);
    command.arg("-L").arg("STDERR").arg("-p").arg(folder.join("pid"));
    let mut server = RunningRival::start(command, &folder.join("output"), rpcbind)?;
    let target = Target { nfs, mount, export: export.to_string_lossy().into_owned() };
    server.wait_for_export(&target, stop)?;
    Ok((target, server))
}

fn text(export: &Path, nfs: SocketAddr, mount: SocketAddr) -> String {
    let (nfs, mount, export) = (nfs.port(), mount.port(), export.display());
    format!(
        "NFS_CORE_PARAM {{ NFS_Port = {nfs}; MNT_Port = {mount}; Protocols = 3; \
         Enable_NLM = false; Enable_RQUOTA = false; Bind_addr = 127.0.0.1; }}\n\
         EXPORT {{ Export_Id = 1; Path = {export}; Pseudo = /export; Protocols = 3; \
         Transports = TCP; SecType = sys; Access_Type = RW; Squash = No_root_squash; \
         PrivilegedPort = false; FSAL {{ Name = VFS; }} \
         CLIENT {{ Clients = *; Access_Type = RW; Squash = No_root_squash; }} }}\n"
    )
}

fn start_rpcbind(folder: &Path, stop: &Stop) -> Result<Option<RunningRival>, Failure> {
    let answers = || TcpStream::connect(RPCBIND).is_ok();
    if answers() {
        return Ok(None);
    }
    let mut command = process::command("rpcbind");
    // In the foreground, so that it ends with us. (With -h 127.0.0.1 that of Debian 12 crashes.)
    command.args(["-w", "-f"]);
    let mut rpcbind = RunningRival::start(command, &folder.join("rpcbind"), None)?;
    rpcbind.wait(stop, |_| answers().then_some(()))?;
    Ok(Some(rpcbind))
}

/// Two addresses that nobody listens on now: it does not tell which it took for a port 0.
fn free_addresses() -> Result<(SocketAddr, SocketAddr), Failure> {
    let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let find = || {
        let (first, second) = (bind()?, bind()?);
        Ok((first.local_addr()?, second.local_addr()?))
    };
    find().map_err(Failure::on("find free ports"))
}
