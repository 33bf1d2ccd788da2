//! Who may call what.
//!
//! | role      | may call                                                               |
//! |-----------|------------------------------------------------------------------------|
//! | read-only | every `GET` but those of workers and the audit log, `/metrics` included |
//! | worker    | also all that changes files, snapshots and clones; to mount the export   |
//! | admin     | also the calls about workers and the audit log, and `POST /v1/check` and `POST /v1/gc`, which load the machine |
//!
//! A role is that of a token of the configuration (see [`crate::tokens`]); a machine that joined (see
//! [`crate::workers`]) has the role worker by its credential, which it alone may replace, for what [`crate::scope`] says
//! that it reaches. A join token is taken for the join call alone.
//!
//! `/healthz`, `/readyz`, `/openapi.json` and the empty dashboard page are open: they tell
//! nothing about the data. The VMstore face has its own sessions.
//!
//! How many guesses an address has is bounded by [`crate::attempts`].

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, Method, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::convert;
use crate::crowd::Standing;
use crate::error::ProblemCode;
use crate::failure::Failure;
use crate::foreign_pages;
use crate::listen::ConnectionInfo;
use crate::options::ApiOptions;
use crate::paths;
use crate::routes::vmstore;
use crate::state::Shared;
use crate::token_id::TokenId;
use crate::tokens::{Role, Secret};
use crate::worker::{CREDENTIAL_PREFIX, SecretHash, WorkerName};
use crate::workers::{Bearer, WorkersError};

/// Who may log in to the VMstore face.
#[derive(Clone, Debug)]
pub struct VmstoreCredentials {
    /// The user's name.
    pub username: String,
    /// The password.
    pub password: Secret,
}

/// An address that others can reach was to be served without tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{address} can be reached from other machines, but no token is configured: \
     configure a token, or listen on a loopback address"
)]
pub struct TokensRequired {
    /// The address.
    pub address: SocketAddr,
}

/// Without tokens everybody who can connect may delete everything, so only a loopback address
/// may be served then. To be called before the address is bound.
///
/// # Errors
/// An address that is not loopback, and no token.
pub fn require_tokens_for(address: SocketAddr, options: &ApiOptions) -> Result<(), TokensRequired> {
    // An IPv4 address in IPv6 form (::ffff:127.0.0.1) is judged as what it is.
    if options.tokens.is_empty() && !address.ip().to_canonical().is_loopback() {
        return Err(TokensRequired { address });
    }
    Ok(())
}

/// What a route asks of its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Nothing.
    Open,
    /// A session of the VMstore face, which that face checks by itself.
    Session,
    /// A token of this role or above, or a worker's credential where it is enough.
    Role(Role),
    /// The join token of a worker.
    JoinToken,
    /// The credential of a worker.
    Credential,
}

/// What the route mounted at `template` asks of callers of `method`.
pub(crate) fn access(method: &Method, template: &str) -> Access {
    match template {
        paths::HEALTHZ | paths::READYZ | paths::OPENAPI | paths::DASHBOARD => Access::Open,
        vmstore::INFO | vmstore::LOGIN | vmstore::LOGOUT => Access::Open,
        paths::CHECK | paths::GC | paths::WORKERS | paths::WORKER | paths::AUDIT => {
            Access::Role(Role::Admin)
        }
        paths::JOIN => Access::JoinToken,
        paths::CREDENTIAL => Access::Credential,
        _ if template.starts_with(vmstore::PREFIX) => Access::Session,
        _ if *method == Method::GET || *method == Method::HEAD => Access::Role(Role::ReadOnly),
        _ => Access::Role(Role::Worker),
    }
}

/// Who sent a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    /// The name of the token or the worker, empty where none is asked for: the scope of its idempotency keys, and the
    /// maker of what it registers.
    pub(crate) name: Arc<str>,
    /// The machine, where it is one.
    pub(crate) machine: Option<Machine>,
    /// The token, where it has one.
    pub(crate) token: TokenId,
}

/// A machine that presented a secret of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Machine {
    /// It may become this worker, by the join token with this hash.
    Invited(WorkerName, SecretHash),
    /// It is this worker, with this id of its driver, by the credential with this hash.
    Worker { name: WorkerName, worker_id: uuid::Uuid, credential: SecretHash },
}

impl Caller {
    fn named(name: &str) -> Self {
        Self { name: Arc::from(name), machine: None, token: TokenId::NONE }
    }

    fn anonymous() -> Self {
        Self::named("")
    }

    fn of(machine: Machine) -> Self {
        let (Machine::Invited(name, _) | Machine::Worker { name, .. }) = &machine;
        Self { name: Arc::from(name.as_str()), machine: Some(machine), token: TokenId::NONE }
    }
}

/// Lets a request pass, or answers 401 or 403.
pub(crate) async fn authorize(
    State(state): State<Shared>,
    mut request: Request,
    next: Next,
) -> Response {
    let template = request.extensions().get::<MatchedPath>().cloned();
    let template = template.as_ref().map_or("", MatchedPath::as_str);
    match judged(&state, &request, template) {
        Ok(caller) => {
            let is_open =
                matches!(access(request.method(), template), Access::Open | Access::Session);
            if let Some(standing) = request.extensions().get::<Arc<Standing>>().filter(|_| !is_open)
            {
                standing.make_known();
            }
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(failure) => failure.into_response(),
    }
}

/// The caller of a request, unless its address has guessed too often.
fn judged(state: &Shared, request: &Request, template: &str) -> Result<Caller, Failure> {
    let (method, headers) = (request.method(), request.headers());
    let access = access(method, template);
    let presented = bearer(headers).filter(|_| !matches!(access, Access::Open | Access::Session));
    let verify = || {
        let machine = presented.and_then(|presented| identified(state, presented));
        caller(&state.options, access, machine, request.uri(), headers)
    };
    let is_guess = presented.is_some_and(|presented| match access {
        Access::Role(_) => must_be_known(&state.options, presented),
        _ => true,
    });
    let Some(peer) = request.extensions().get::<ConnectionInfo>().filter(|_| is_guess) else {
        return verify();
    };
    let (peer, now) = (peer.peer.ip(), Instant::now());
    state.attempts.admit(peer, now)?;
    verify().inspect_err(|failure| {
        if failure.code() == ProblemCode::Unauthenticated {
            state.attempts.failed(peer, now);
            tracing::warn!(%peer, "a token was refused");
        }
    })
}

/// The machine that presents this secret. Once it used a new credential, the previous one ends after a while.
fn identified(state: &Shared, presented: &[u8]) -> Option<Machine> {
    let now = convert::timestamp(state.store.now());
    match state.options.workers.identify(presented, now)? {
        Bearer::Invited { name, join_token } => Some(Machine::Invited(name, join_token)),
        Bearer::Worker { name, worker_id, credential, retires_previous } => {
            if retires_previous {
                tokio::spawn(retire_previous(Arc::clone(state), name.clone(), credential));
            }
            Some(Machine::Worker { name, worker_id, credential })
        }
    }
}

async fn retire_previous(state: Shared, name: WorkerName, used: SecretHash) {
    tokio::time::sleep(state.options.credential_grace).await;
    let (workers, worker) = (Arc::clone(&state.options.workers), name.clone());
    // Beside the runtime, as it writes the file of workers.
    let retired = tokio::task::spawn_blocking(move || workers.retire_previous(&worker, used)).await;
    match retired {
        // Revoked since then.
        Ok(Ok(()) | Err(WorkersError::NotFound { .. })) => {}
        Ok(Err(error)) => {
            tracing::warn!(worker = %name, %error, "the worker's previous credential still counts");
        }
        Err(error) => tracing::error!(%error, "ending a previous credential panicked"),
    }
}

/// Whether what is presented where a role is asked for lets its bearer in or not. A server without tokens lets in all
/// who call it as it is to be called, but no machine that was revoked.
fn must_be_known(options: &ApiOptions, presented: &[u8]) -> bool {
    !options.tokens.is_empty() || presented.starts_with(CREDENTIAL_PREFIX.as_bytes())
}

fn caller(
    options: &ApiOptions,
    access: Access,
    machine: Option<Machine>,
    uri: &Uri,
    headers: &HeaderMap,
) -> Result<Caller, Failure> {
    let presented = bearer(headers);
    match (access, machine) {
        (Access::Open | Access::Session, _) => Ok(Caller::anonymous()),
        (Access::JoinToken, Some(machine @ Machine::Invited(..)))
        | (Access::Credential, Some(machine @ Machine::Worker { .. })) => Ok(Caller::of(machine)),
        (Access::JoinToken, _) => Err(Failure::unauthenticated(
            "the join token is not known here, or its time has passed (it is sent as `Authorization: Bearer TOKEN`): \
             `slackwater worker add NAME` makes one, after `slackwater worker revoke NAME` if the name is taken",
        )),
        (Access::Credential, _) => Err(Failure::unauthenticated(
            "this call is for a machine that joined: send its credential as `Authorization: Bearer CREDENTIAL`",
        )),
        (Access::Role(needed), Some(machine @ Machine::Worker { .. })) => {
            let name = &Caller::of(machine.clone()).name;
            allow(needed, Role::Worker, format_args!("worker `{name}` has"))?;
            Ok(Caller::of(machine))
        }
        (Access::Role(_), Some(Machine::Invited(..))) => {
            Err(Failure::unauthenticated("a join token is taken for POST /v1/join alone"))
        }
        (Access::Role(needed), None) => match presented {
            Some(presented) if must_be_known(options, presented) => {
                let (token, id) =
                    options.tokens.find(presented).ok_or_else(|| unknown(presented))?;
                allow(needed, token.role, format_args!("token `{}` has", token.name))?;
                Ok(Caller { token: id, ..Caller::named(&token.name) })
            }
            _ if options.tokens.is_empty() => {
                foreign_pages::refuse(uri, headers)?;
                Ok(Caller::anonymous())
            }
            _ => Err(Failure::unauthenticated(
                "send the header `Authorization: Bearer TOKEN`: a token of the server's token files, or that of `admin-token` \
                 in its data directory if it has none, or the credential of a worker, which `slackwater-driver join` makes",
            )),
        },
    }
}

fn unknown(presented: &[u8]) -> Failure {
    Failure::unauthenticated(match presented.starts_with(CREDENTIAL_PREFIX.as_bytes()) {
        true => {
            "the credential is not known here: the worker was revoked, or joined another appliance; add it by \
             `slackwater worker add NAME --id ID` (`slackwater-driver status` tells the id), and join again"
        }
        false => "the token is not known here",
    })
}

/// Refuses a call that needs more than `role`.
fn allow(needed: Role, role: Role, bearer_has: fmt::Arguments<'_>) -> Result<(), Failure> {
    if role >= needed {
        return Ok(());
    }
    let detail = format!("{bearer_has} role {role}, this call needs {needed}");
    Err(Failure::new(ProblemCode::Forbidden, detail))
}

/// The secret of `Authorization: Bearer SECRET`; the scheme in any case (RFC 9110 section 11.1).
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, secret) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| secret.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::{Token, Tokens};

    fn options() -> ApiOptions {
        let token = |name: &str, role| Token {
            name: name.to_owned(),
            role,
            secret: Secret::new(&format!("{name}-secret")),
        };
        ApiOptions {
            tokens: Tokens::new(vec![
                token("viewer", Role::ReadOnly),
                token("node", Role::Worker),
                token("root", Role::Admin),
            ])
            .into(),
            ..ApiOptions::default()
        }
    }

    fn with(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())])
    }

    #[test]
    fn roles_allow_what_the_table_says() {
        let cases = [
            (Method::GET, paths::FILES, [true, true, true]),
            (Method::HEAD, paths::SNAPSHOT_DATA, [true, true, true]),
            (Method::GET, paths::METRICS, [true, true, true]),
            (Method::POST, paths::SNAPSHOTS, [false, true, true]),
            (Method::DELETE, paths::FILE, [false, true, true]),
            (Method::PUT, paths::FILE_DATA, [false, true, true]),
            (Method::POST, paths::CHECK, [false, false, true]),
            (Method::POST, paths::GC, [false, false, true]),
        ];
        for (method, template, allowed) in cases {
            for (name, allowed) in ["viewer", "node", "root"].into_iter().zip(allowed) {
                let headers = with(&format!("bearer {name}-secret"));
                let access = access(&method, template);
                let answer = caller(&options(), access, None, &Uri::default(), &headers);
                assert_eq!(answer.is_ok(), allowed, "{name} {method} {template}");
            }
        }
    }

    #[test]
    fn wrong_tokens_are_refused_and_open_routes_are_open() {
        for value in ["Bearer x", "Bearer ", "Basic cm9vdDpyb290", "root-secret", "Bearer"] {
            let uri = Uri::default();
            let failure =
                caller(&options(), Access::Role(Role::ReadOnly), None, &uri, &with(value))
                    .unwrap_err();
            assert_eq!(failure.code(), ProblemCode::Unauthenticated, "{value}");
        }
        for open in [paths::HEALTHZ, paths::READYZ, paths::OPENAPI, paths::DASHBOARD] {
            let (uri, headers) = (Uri::default(), HeaderMap::new());
            let access = access(&Method::GET, open);
            assert!(caller(&options(), access, None, &uri, &headers).is_ok());
        }
    }

    #[test]
    fn only_loopback_is_served_without_tokens() {
        let open = ApiOptions::default();
        for good in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            assert!(require_tokens_for(good.parse().unwrap(), &open).is_ok(), "{good}");
        }
        for bad in ["0.0.0.0:1", "10.0.0.1:1", "[::]:1", "[::ffff:10.0.0.1]:1"] {
            let address = bad.parse().unwrap();
            assert_eq!(require_tokens_for(address, &open), Err(TokensRequired { address }));
            assert!(require_tokens_for(address, &options()).is_ok());
        }
    }
}
