//! Sessions of the VMstore face.
//!
//! A session is 256 random bits in a cookie; the server keeps its hash only. It ends after
//! 30 minutes without a call, after 12 hours in any case, and with the server. Guessing a
//! password is slowed down: one address has about one guess a second ([`crate::attempts`]), a
//! wrong one is answered after a second, and few log-ins are judged at once, so that no more
//! than eight guesses a second get through however many addresses try.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use parking_lot::Mutex;
use serde::Deserialize;
use tokio::sync::Semaphore;

use crate::crowd::Standing;
use crate::error::ProblemCode;
use crate::extract::{BodyLimit, parse_json, read_body_within, require_media_type};
use crate::failure::Failure;
use crate::listen::ConnectionInfo;
use crate::paths::encode_component;
use crate::routes::vmstore::{LOGIN, LOGOUT, require_type_id};
use crate::state::Shared;

/// The cookie's name, as VMstore's clients expect it.
const COOKIE: &str = "JSESSIONID";

/// A session without calls for this long ends.
const IDLE_MAX: Duration = Duration::from_secs(30 * 60);

/// A session of this age ends.
const AGE_MAX: Duration = Duration::from_secs(12 * 3600);

/// Sessions at once. Clients forget to log out; when there are more, the one that was unused
/// longest ends.
const SESSIONS_MAX: usize = 256;

/// Log-ins that are judged at once.
const LOGINS_MAX: usize = 8;

/// Log-ins that wait to be judged; for more the answer comes at once, as each takes one of the
/// requests of all. At a second for a wrong password they take four.
const LOGINS_WAITING_MAX: usize = 32;

/// What a log-in may send, before anybody knows who it is: name, password, and fields that mean
/// nothing here.
const LOGIN_BODY: BodyLimit = BodyLimit { bytes: 4096, time: Duration::from_secs(3) };

/// How long a wrong password takes.
const WRONG_PASSWORD_DELAY: Duration = Duration::from_secs(1);

/// Random bytes of a session: beyond guessing, and beyond meeting by chance.
const SESSION_BYTES: usize = 32;

const CREDENTIALS_TYPE: &str = ".RestApiCredentials";

/// A log-in. VMstore's clients send more fields, which mean nothing here.
#[derive(Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Credentials {
    type_id: Option<String>,
    username: String,
    password: String,
}

#[derive(Clone, Copy, Debug)]
struct Session {
    began: Instant,
    used: Instant,
}

impl Session {
    fn is_over(&self, now: Instant) -> bool {
        now.duration_since(self.began) >= AGE_MAX || now.duration_since(self.used) >= IDLE_MAX
    }
}

/// The sessions of a server, by the hash of their secret.
#[derive(Debug)]
pub(crate) struct Sessions {
    table: Mutex<HashMap<blake3::Hash, Session>>,
    logins: Semaphore,
    /// Log-ins that are judged or wait for that.
    queue: Semaphore,
}

impl Default for Sessions {
    fn default() -> Self {
        let queue = Semaphore::new(LOGINS_MAX + LOGINS_WAITING_MAX);
        Self { table: Mutex::default(), logins: Semaphore::new(LOGINS_MAX), queue }
    }
}

impl Sessions {
    fn begin(&self, secret: &[u8], now: Instant) {
        let mut table = self.table.lock();
        table.retain(|_, session| !session.is_over(now));
        if table.len() >= SESSIONS_MAX
            && let Some(oldest) = table.iter().min_by_key(|(_, s)| s.used).map(|(key, _)| *key)
        {
            table.remove(&oldest);
        }
        table.insert(blake3::hash(secret), Session { began: now, used: now });
    }

    /// Whether the session is there; a session that is used lives on. The look-up is by hash,
    /// so its time tells nothing about the secrets in the table.
    fn touch(&self, secret: &[u8], now: Instant) -> bool {
        let mut table = self.table.lock();
        let key = blake3::hash(secret);
        match table.get_mut(&key) {
            Some(session) if !session.is_over(now) => {
                session.used = now;
                true
            }
            Some(_) => {
                table.remove(&key);
                false
            }
            None => false,
        }
    }

    fn end(&self, secret: &[u8]) {
        self.table.lock().remove(&blake3::hash(secret));
    }
}

/// Proof that the caller is logged in.
#[derive(Debug)]
pub(crate) struct LoggedIn;

impl FromRequestParts<Shared> for LoggedIn {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &Shared) -> Result<Self, Failure> {
        match cookie(&parts.headers) {
            Some(secret) if state.sessions.touch(secret.as_bytes(), Instant::now()) => {
                if let Some(standing) = parts.extensions.get::<Arc<Standing>>() {
                    standing.make_known();
                }
                Ok(Self)
            }
            Some(_) => Err(Failure::unauthenticated("the session has ended, log in again")),
            None => Err(Failure::unauthenticated("log in first, and send the cookie JSESSIONID")),
        }
    }
}

/// The session's cookie (RFC 6265 section 4.2).
fn cookie(headers: &HeaderMap) -> Option<&str> {
    headers
        .get_all(header::COOKIE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|cookies| cookies.split(';'))
        .find_map(|pair| pair.trim().strip_prefix(COOKIE)?.strip_prefix('='))
}

/// An answer that sets or clears the cookie.
type CookieAnswer = (StatusCode, [(HeaderName, String); 1], Json<&'static str>);

/// Logs in
#[utoipa::path(
    post, path = LOGIN, tag = "vmstore", operation_id = "vmstoreLogin",
    request_body = Credentials,
    responses(
        (status = 200, description = "The role; the session is in the cookie `JSESSIONID`", body = String, content_type = "application/json"),
        (status = 400, description = "The body has no meaning"),
        (status = 401, description = "The name or the password is wrong"),
    ),
)]
pub(crate) async fn login(
    State(state): State<Shared>,
    connection: Option<axum::Extension<ConnectionInfo>>,
    request: Request,
) -> Result<CookieAnswer, Failure> {
    require_media_type(request.headers(), "application/json")?;
    let too_many = || Failure::new(ProblemCode::Overloaded, "too many log-ins at once");
    let _place = state.sessions.queue.try_acquire().map_err(|_| too_many())?;
    let peer = connection.as_ref().map(|connection| connection.peer.ip());
    if let Some(peer) = peer {
        state.attempts.admit(peer, Instant::now())?;
        // Ahead of the judgement, which takes a while: others must not be admitted meanwhile. Nor
        // may one address have many bodies under way that do not come.
        state.attempts.failed(peer, Instant::now());
    }
    // Held while a body comes and a wrong password waits: this is what bounds the guesses.
    let _turn = tokio::time::timeout(state.options.queue_timeout, state.sessions.logins.acquire())
        .await
        .map_err(|_| too_many())?;
    let body = read_body_within(request, &state, LOGIN_BODY).await?;
    let read = parse_json(&body).and_then(|given: Credentials| {
        require_type_id(given.type_id.as_deref(), CREDENTIALS_TYPE).map(|()| given)
    });
    let given = read.inspect_err(|_| {
        // It came, and was no guess.
        if let Some(peer) = peer {
            state.attempts.forgive(peer);
        }
    })?;
    let right = state.options.vmstore.as_ref().is_some_and(|known| {
        let name = crate::tokens::Secret::new(&known.username).matches(given.username.as_bytes());
        let password = known.password.matches(given.password.as_bytes());
        bool::from(name & password)
    });
    if !right {
        tokio::time::sleep(WRONG_PASSWORD_DELAY).await;
        tracing::warn!(?peer, "a log-in to the VMstore face was refused");
        return Err(Failure::unauthenticated("the name or the password is wrong"));
    }
    if let Some(peer) = peer {
        state.attempts.forgive(peer);
    }
    let mut secret = [0; SESSION_BYTES];
    getrandom::fill(&mut secret).map_err(|error| {
        tracing::error!(%error, "no random bytes for a session");
        Failure::new(ProblemCode::Internal, "the system gave no random bytes")
    })?;
    let secret = blake3::Hash::from_bytes(secret).to_hex();
    state.sessions.begin(secret.as_bytes(), Instant::now());
    let secure = connection.is_some_and(|connection| connection.tls);
    Ok((StatusCode::OK, [(header::SET_COOKIE, set_cookie(&secret, secure))], Json("ADMIN")))
}

fn set_cookie(value: &str, secure: bool) -> String {
    let secure = if secure { "; Secure" } else { "" };
    format!(
        "{COOKIE}={}; Path=/; HttpOnly; SameSite=Strict{secure}",
        encode_component(value.as_bytes())
    )
}

/// Logs out
///
/// Also without a session: what is asked for is that there be none.
#[utoipa::path(
    get, path = LOGOUT, tag = "vmstore", operation_id = "vmstoreLogout",
    responses((status = 204, description = "The session is over")),
)]
pub(crate) async fn logout(
    State(state): State<Shared>,
    headers: HeaderMap,
) -> (StatusCode, [(HeaderName, String); 1]) {
    if let Some(secret) = cookie(&headers) {
        state.sessions.end(secret.as_bytes());
    }
    let gone = format!("{COOKIE}=; Path=/; Max-Age=0; HttpOnly; SameSite=Strict");
    (StatusCode::NO_CONTENT, [(header::SET_COOKIE, gone)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_ends_when_unused_and_when_old() {
        let sessions = Sessions::default();
        let start = Instant::now();
        sessions.begin(b"a", start);
        assert!(sessions.touch(b"a", start + IDLE_MAX / 2));
        assert!(sessions.touch(b"a", start + IDLE_MAX));
        assert!(!sessions.touch(b"b", start));
        assert!(!sessions.touch(b"a", start + IDLE_MAX * 2));
        sessions.begin(b"c", start);
        let mut now = start;
        while now < start + AGE_MAX {
            assert!(sessions.touch(b"c", now));
            now += IDLE_MAX / 2;
        }
        assert!(!sessions.touch(b"c", now));
        sessions.begin(b"d", start);
        sessions.end(b"d");
        assert!(!sessions.touch(b"d", start));
    }

    #[test]
    fn the_number_of_sessions_is_bounded() {
        let sessions = Sessions::default();
        let start = Instant::now();
        for number in 0..=SESSIONS_MAX {
            let age = Duration::from_millis(u64::try_from(number).unwrap());
            sessions.begin(number.to_string().as_bytes(), start + age);
        }
        let now = start + Duration::from_secs(1);
        assert_eq!(sessions.table.lock().len(), SESSIONS_MAX);
        assert!(!sessions.touch(b"0", now), "the one unused longest makes room");
        assert!(sessions.touch(b"1", now));
    }

    #[test]
    fn the_cookie_is_found_among_others() {
        let headers = |text: &str| HeaderMap::from_iter([(header::COOKIE, text.parse().unwrap())]);
        assert_eq!(cookie(&headers("a=b; JSESSIONID=xyz; c=d")), Some("xyz"));
        assert_eq!(cookie(&headers("XJSESSIONID=xyz")), None);
        assert_eq!(cookie(&HeaderMap::new()), None);
    }
}
