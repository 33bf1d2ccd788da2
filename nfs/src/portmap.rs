//! PORTMAP version 2 (RFC 1833 section 3): where the programs are. At a port of NFS all of them answer, and it is told
//! for each; at PORTMAP's own port it alone answers, and tells that of NFS.

use crate::procedure::PortmapProcedure;
use crate::xdr::{Decoder, Encoder, Malformed};

/// TCP in `mapping.prot`.
const PROTOCOL_TCP: u32 = 6;
/// UDP there.
const PROTOCOL_UDP: u32 = 17;

/// A program and a version of it that are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// Its number (RFC 5531 section 13).
    pub(crate) number: u32,
    /// The one version that is served.
    pub(crate) version: u32,
}

/// NFS.
pub(crate) const NFS: Program =
    Program { number: nfsserve::nfs::PROGRAM, version: nfsserve::nfs::VERSION };
/// MOUNT.
pub(crate) const MOUNT: Program = Program { number: 100_005, version: 3 };
/// PORTMAP.
pub(crate) const PORTMAP: Program = Program { number: 100_000, version: 2 };

/// The port that calls come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Port {
    /// One of NFS, MOUNT and PORTMAP.
    Nfs(u16),
    /// PORTMAP's own, by TCP and UDP.
    Portmap { own: u16, nfs: u16 },
}

/// A program, by which protocol it is served (`mapping.prot`), and at which port.
type Mapping = (Program, u32, u16);

impl Port {
    /// Whether calls of the program are taken here.
    pub(crate) const fn has(self, program: u32) -> bool {
        match self {
            Self::Nfs(_) => true,
            Self::Portmap { .. } => program == PORTMAP.number,
        }
    }

    /// What is told here.
    fn mappings(self) -> impl Iterator<Item = Mapping> {
        let (nfs, own, is_by_udp) = match self {
            Self::Nfs(port) => (port, port, false),
            Self::Portmap { own, nfs } => (nfs, own, true),
        };
        let by_tcp = [(NFS, nfs), (MOUNT, nfs), (PORTMAP, own)];
        let by_tcp = by_tcp.into_iter().map(|(program, port)| (program, PROTOCOL_TCP, port));
        by_tcp.chain(is_by_udp.then_some((PORTMAP, PROTOCOL_UDP, own)))
    }
}

/// Runs `procedure` for a call that came to `port`.
pub(crate) fn run(
    procedure: PortmapProcedure,
    port: Port,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<(), Malformed> {
    match procedure {
        PortmapProcedure::Null => {}
        PortmapProcedure::GetPort => {
            let asked = Program { number: arguments.u32()?, version: arguments.u32()? };
            let protocol = arguments.u32()?;
            let _port = arguments.u32()?;
            let is_asked = |mapping: &Mapping| (mapping.0, mapping.1) == (asked, protocol);
            let not_registered = 0;
            let port = port.mappings().find(is_asked).map_or(not_registered, |mapping| mapping.2);
            reply.u32(u32::from(port));
        }
        PortmapProcedure::Dump => {
            for (Program { number, version }, protocol, port) in port.mappings() {
                reply.bool(true);
                let words = [number, version, protocol, u32::from(port)];
                words.into_iter().for_each(|word| reply.u32(word));
            }
            reply.bool(false);
        }
    }
    Ok(())
}
