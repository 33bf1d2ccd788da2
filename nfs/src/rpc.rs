//! ONC RPC version 2 (RFC 5531): the header of a call and the headers of its replies.
//!
//! ```text
//! call:  | xid | 0 | 2 | program | version | procedure | credential | verifier | arguments
//! reply: | xid | 1 | 0 | verifier (none) | accept status | results
//!        | xid | 1 | 1 | reject status   | why
//! ```
#![deny(clippy::indexing_slicing)]

use bytes::Bytes;

use crate::auth::{self, Claim};
use crate::xdr::{Decoder, Encoder, Malformed};

/// The only version of RPC (RFC 5531 section 9).
const RPC_VERSION: u32 = 2;

/// Longest body of a credential or verifier (RFC 5531 section 8.2).
const AUTH_BODY_BYTES_MAX: usize = 400;

const MESSAGE_CALL: u32 = 0;
const MESSAGE_REPLY: u32 = 1;
const REPLY_ACCEPTED: u32 = 0;
const REPLY_DENIED: u32 = 1;
const DENIED_RPC_MISMATCH: u32 = 0;
const DENIED_AUTH_ERROR: u32 = 1;
const AUTH_NONE: u32 = 0;

/// A call's transaction id, chosen by the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Xid(pub(crate) u32);

/// Why a credential is refused (RFC 5531 section 9 `auth_stat`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AuthStatus {
    /// The credential is malformed or of a flavor that is not served.
    BadCredential,
    /// The client is to begin a new session: it used a shorthand that was never given.
    RejectedCredential,
    /// The verifier is malformed.
    BadVerifier,
    /// Refused for security reasons: the client's address or port.
    TooWeak,
}

impl AuthStatus {
    const fn code(self) -> u32 {
        match self {
            Self::BadCredential => 1,
            Self::RejectedCredential => 2,
            Self::BadVerifier => 3,
            Self::TooWeak => 5,
        }
    }
}

/// Why an accepted call is not run (RFC 5531 section 9 `accept_stat`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unrunnable {
    /// No such program on this port.
    ProgramUnavailable,
    /// The program has other versions only.
    ProgramMismatch {
        /// The lowest version served.
        low: u32,
        /// The highest.
        high: u32,
    },
    /// The program has no such procedure.
    ProcedureUnavailable,
    /// The arguments cannot be decoded.
    GarbageArguments,
}

/// The header of a call, and where its arguments start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CallHeader {
    /// The transaction id.
    pub(crate) xid: Xid,
    /// The program's number.
    pub(crate) program: u32,
    /// Its version.
    pub(crate) version: u32,
    /// The procedure's number.
    pub(crate) procedure: u32,
    /// Who the caller claims to be.
    pub(crate) claim: Claim,
    /// Where the arguments start in the frame.
    pub(crate) arguments_at: usize,
}

/// A frame that is not a call to run.
#[derive(Debug)]
pub(crate) enum Refused {
    /// Nothing can be answered: the connection is out of step and is closed.
    Close(NotACall),
    /// This reply is the answer.
    Answer(Encoder),
}

/// The frame is no call, so nothing after it on the connection can be trusted either.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotACall {
    /// It ends inside the fixed part of the header.
    #[error("RPC header: {0}")]
    Header(#[from] Malformed),
    /// It is a reply, or of an unknown type.
    #[error("RPC message of type {got}, expected a call ({MESSAGE_CALL})")]
    MessageType {
        /// The type.
        got: u32,
    },
}

impl From<NotACall> for Refused {
    fn from(not_a_call: NotACall) -> Self {
        Self::Close(not_a_call)
    }
}

/// Decodes the header of the call in `frame`.
pub(crate) fn decode_call(frame: &Bytes) -> Result<CallHeader, Refused> {
    let mut decoder = Decoder::new(frame);
    let (xid, fixed) = decode_fixed(&mut decoder)?;
    let [rpc_version, program, version, procedure] = fixed;
    if rpc_version != RPC_VERSION {
        return Err(Refused::Answer(rpc_mismatch(xid)));
    }
    let claim = decode_credential(&mut decoder)
        .map_err(|status| Refused::Answer(auth_error(xid, status)))?;
    decode_verifier(&mut decoder)
        .map_err(|_| Refused::Answer(auth_error(xid, AuthStatus::BadVerifier)))?;
    let arguments_at = decoder.position();
    Ok(CallHeader { xid, program, version, procedure, claim, arguments_at })
}

fn decode_fixed(decoder: &mut Decoder<'_>) -> Result<(Xid, [u32; 4]), NotACall> {
    let xid = Xid(decoder.u32()?);
    let got = decoder.u32()?;
    if got != MESSAGE_CALL {
        return Err(NotACall::MessageType { got });
    }
    Ok((xid, [decoder.u32()?, decoder.u32()?, decoder.u32()?, decoder.u32()?]))
}

fn decode_credential(decoder: &mut Decoder<'_>) -> Result<Claim, AuthStatus> {
    let decoded =
        decoder.u32().and_then(|flavor| Ok((flavor, decoder.opaque_shared(AUTH_BODY_BYTES_MAX)?)));
    let (flavor, body) = decoded.map_err(|_| AuthStatus::BadCredential)?;
    auth::decode_claim(flavor, &body)
}

fn decode_verifier(decoder: &mut Decoder<'_>) -> Result<(), Malformed> {
    decoder.u32()?;
    decoder.opaque(AUTH_BODY_BYTES_MAX)?;
    Ok(())
}

/// A reply that is open for the results of a call that ran.
pub(crate) fn success(xid: Xid) -> Encoder {
    accepted(xid, 0)
}

/// The reply to a call that cannot be run.
pub(crate) fn unrunnable(xid: Xid, why: Unrunnable) -> Encoder {
    match why {
        Unrunnable::ProgramUnavailable => accepted(xid, 1),
        Unrunnable::ProgramMismatch { low, high } => {
            let mut reply = accepted(xid, 2);
            reply.u32(low);
            reply.u32(high);
            reply
        }
        Unrunnable::ProcedureUnavailable => accepted(xid, 3),
        Unrunnable::GarbageArguments => accepted(xid, 4),
    }
}

/// The reply to a call whose caller is refused.
pub(crate) fn auth_error(xid: Xid, status: AuthStatus) -> Encoder {
    let mut reply = denied(xid, DENIED_AUTH_ERROR);
    reply.u32(status.code());
    reply
}

fn rpc_mismatch(xid: Xid) -> Encoder {
    let mut reply = denied(xid, DENIED_RPC_MISMATCH);
    reply.u32(RPC_VERSION);
    reply.u32(RPC_VERSION);
    reply
}

fn accepted(xid: Xid, status: u32) -> Encoder {
    let mut reply = Encoder::new();
    let verifier_length = 0;
    for word in [xid.0, MESSAGE_REPLY, REPLY_ACCEPTED, AUTH_NONE, verifier_length, status] {
        reply.u32(word);
    }
    reply
}

fn denied(xid: Xid, status: u32) -> Encoder {
    let mut reply = Encoder::new();
    for word in [xid.0, MESSAGE_REPLY, REPLY_DENIED, status] {
        reply.u32(word);
    }
    reply
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, reason = "a panic fails the test")]
mod tests {
    use super::*;

    fn frame(words: &[u32]) -> Bytes {
        words.iter().flat_map(|word| word.to_be_bytes()).collect::<Vec<_>>().into()
    }

    fn answer(words: &[u32]) -> Vec<u32> {
        match decode_call(&frame(words)) {
            Err(Refused::Answer(reply)) => reply.finish().0[4..]
                .chunks(4)
                .map(|word| u32::from_be_bytes(word.try_into().unwrap()))
                .collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_call_is_decoded_up_to_its_arguments() {
        let header = decode_call(&frame(&[9, 0, 2, 100_003, 3, 1, 0, 0, 0, 0, 77])).unwrap();
        assert_eq!((header.xid, header.procedure), (Xid(9), 1));
        assert_eq!(header.claim, Claim::Nobody);
        assert_eq!(header.arguments_at, 40);
    }

    #[test]
    fn each_truncation_of_the_header_is_refused() {
        let whole = [9, 0, 2, 100_003, 3, 1, 0, 0, 0, 0];
        for words in 0..6 {
            let refused = decode_call(&frame(&whole[..words]));
            assert!(matches!(refused, Err(Refused::Close(NotACall::Header(_)))), "{words}");
        }
        for words in 6..8 {
            assert_eq!(answer(&whole[..words]), [9, 1, 1, 1, 1], "bad credential, {words}");
        }
        for words in 8..10 {
            assert_eq!(answer(&whole[..words]), [9, 1, 1, 1, 3], "bad verifier, {words}");
        }
        assert!(decode_call(&frame(&whole)).is_ok());
    }

    #[test]
    fn a_reply_closes_the_connection() {
        let refused = decode_call(&frame(&[9, 1, 2, 100_003, 3, 1, 0, 0, 0, 0]));
        assert!(matches!(refused, Err(Refused::Close(NotACall::MessageType { got: 1 }))));
    }

    #[test]
    fn another_rpc_version_is_told_the_one_served() {
        assert_eq!(answer(&[9, 0, 3, 100_003, 3, 1, 0, 0, 0, 0]), [9, 1, 1, 0, 2, 2]);
    }

    #[test]
    fn bodies_over_the_limit_are_refused() {
        assert_eq!(answer(&[9, 0, 2, 100_003, 3, 1, 0, 404]), [9, 1, 1, 1, 1]);
        assert_eq!(answer(&[9, 0, 2, 100_003, 3, 1, 0, 0, 0, 404]), [9, 1, 1, 1, 3]);
    }

    #[test]
    fn the_refusals_of_an_accepted_call() {
        let words = |why| unrunnable(Xid(5), why).finish().0.len() / 4 - 1;
        assert_eq!(words(Unrunnable::ProgramUnavailable), 6);
        assert_eq!(words(Unrunnable::ProgramMismatch { low: 3, high: 3 }), 8);
    }
}
