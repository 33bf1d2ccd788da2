//! PORTMAP version 2 (RFC 1833 section 3), as far as a client needs it that is told one port
//! only: every program answers on the port that the question came to.

use crate::procedure::PortmapProcedure;
use crate::xdr::{Decoder, Encoder, Malformed};

/// TCP in `mapping.prot`.
const PROTOCOL_TCP: u32 = 6;

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

/// All that is served.
pub(crate) const PROGRAMS: [Program; 3] = [NFS, MOUNT, PORTMAP];

/// Runs `procedure` on the server at `port`.
pub(crate) fn run(
    procedure: PortmapProcedure,
    port: u16,
    arguments: &mut Decoder<'_>,
    reply: &mut Encoder,
) -> Result<(), Malformed> {
    let port = u32::from(port);
    match procedure {
        PortmapProcedure::Null => {}
        PortmapProcedure::GetPort => {
            let asked = Program { number: arguments.u32()?, version: arguments.u32()? };
            let protocol = arguments.u32()?;
            let _port = arguments.u32()?;
            let is_served = protocol == PROTOCOL_TCP && PROGRAMS.contains(&asked);
            let not_registered = 0;
            reply.u32(if is_served { port } else { not_registered });
        }
        PortmapProcedure::Dump => {
            for Program { number, version } in PROGRAMS {
                reply.bool(true);
                [number, version, PROTOCOL_TCP, port].into_iter().for_each(|word| reply.u32(word));
            }
            reply.bool(false);
        }
    }
    Ok(())
}
