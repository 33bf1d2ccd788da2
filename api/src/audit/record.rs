//! Requests that change something become changes of the audit log.
//!
//! What a request changed is known once it was answered; one whose caller left before, or that took too long, is recorded
//! without a status, as it may have been carried out. Refused requests changed nothing and are not recorded.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use tokio::sync::oneshot;

use super::NewChange;
use crate::auth::{Access, Caller, Machine, access};
use crate::change::CallerKind;
use crate::convert;
use crate::error::ProblemCode;
use crate::failure::Failure;
use crate::listen::ConnectionInfo;
use crate::paths::{self, decode_component, encode_component};
use crate::routes::vmstore;
use crate::state::Shared;
use crate::types::Timestamp;

/// Longest wait of an answer for its line: far more than a disk takes that works, and less than callers bear.
const LINE_TIME_MAX: Duration = Duration::from_secs(1);

/// Faults of the server with which nothing was begun. Clients try again, and would fill the log.
const REFUSED: [ProblemCode; 4] =
    [ProblemCode::Overloaded, ProblemCode::Busy, ProblemCode::Closed, ProblemCode::NoSpace];

/// What a handler says about a change that its route does not: an extension of each request that is recorded.
#[derive(Clone, Debug, Default)]
pub(crate) struct About(Arc<Said>);

#[derive(Debug, Default)]
struct Said {
    text: OnceLock<String>,
    has_begun: AtomicBool,
}

impl About {
    /// Says it; the first counts.
    pub(crate) fn say(&self, text: impl Into<String>) {
        // An error means that it was said before.
        let _ = self.0.text.set(text.into());
    }

    /// Says that a part is carried out, also if the call is refused in the end.
    pub(crate) fn has_begun(&self) {
        self.0.has_begun.store(true, Ordering::Relaxed);
    }
}

/// Records the request if it changes something.
pub(crate) async fn record(
    State(state): State<Shared>,
    mut request: Request,
    next: Next,
) -> Response {
    let about = About::default();
    request.extensions_mut().insert(about.clone());
    let Some(mut pending) = Pending::of(&state, &request, about) else {
        return next.run(request).await;
    };
    let response = next.run(request).await;
    let made = response.headers().get(header::LOCATION).and_then(|made| made.to_str().ok());
    let code = response.extensions().get::<Failure>().map(Failure::code);
    pending.end(response.status(), code, made.map(str::to_owned)).await;
    response
}

/// The path as this project writes it: callers may spell one in many ways.
fn one_spelling(path: &str) -> String {
    let part = |part: &str| {
        decode_component(part).map_or_else(|_| part.to_owned(), |bytes| encode_component(&bytes))
    };
    path.split('/').map(part).collect::<Vec<_>>().join("/")
}

/// Whether calls of a route change something.
fn changes(method: &Method, template: &str) -> bool {
    let reads = [Method::GET, Method::HEAD, Method::OPTIONS].contains(method);
    // VMstore's clients call the latter before they look.
    let is_idle = access(method, template) == Access::Open || template == vmstore::HOST_REFRESH;
    !reads && !is_idle
}

/// A change whose request is under way. One that is dropped before its end is of a caller that left.
struct Pending {
    state: Shared,
    about: About,
    is_writing: bool,
    /// Whether a sync had failed before: all changes are refused since, and none is begun.
    was_poisoned: bool,
    change: Option<NewChange>,
}

impl Pending {
    fn of(state: &Shared, request: &Request, about: About) -> Option<Self> {
        if !state.recorder.is_on() {
            return None;
        }
        let template = request.extensions().get::<MatchedPath>()?.as_str();
        let method = request.method();
        if !changes(method, template) {
            return None;
        }
        let peer = request.extensions().get::<ConnectionInfo>().map(|info| info.peer.ip());
        let (kind, by) = caller(state, request, template);
        let change = NewChange {
            // Set when it ends.
            at: Timestamp::from_nanos(0),
            kind,
            by,
            from: peer.map(|peer| peer.to_canonical().to_string()),
            call: format!("{method} {}", one_spelling(request.uri().path())),
            about: None,
            made: None,
            status: None,
        };
        let is_writing = template == paths::FILE_DATA;
        let was_poisoned = state.recorder.is_poisoned.load(Ordering::Relaxed);
        let (state, change) = (Arc::clone(state), Some(change));
        Some(Self { state, about, is_writing, was_poisoned, change })
    }

    /// Records how it ended, before the answer goes out.
    async fn end(&mut self, status: StatusCode, code: Option<ProblemCode>, made: Option<String>) {
        let Some(mut change) = self.change.take() else { return };
        let is_poisoned = code == Some(ProblemCode::Poisoned);
        if is_poisoned {
            self.state.recorder.is_poisoned.store(true, Ordering::Relaxed);
        }
        let is_refused =
            code.is_some_and(|code| REFUSED.contains(&code)) || is_poisoned && self.was_poisoned;
        // With another fault of the server a part may have been carried out.
        let is_partial = status.is_server_error() && !is_refused
            || self.about.0.has_begun.load(Ordering::Relaxed);
        if !status.is_success() && !is_partial {
            return;
        }
        change.status = Some(status.as_u16());
        change.made = made;
        if let Some(appended) = self.append(change) {
            // A disk that stalls longer has its line later, or not at all.
            let _ = tokio::time::timeout(LINE_TIME_MAX, appended).await;
        }
    }

    fn append(&self, mut change: NewChange) -> Option<oneshot::Receiver<()>> {
        change.at = convert::timestamp(self.state.store.now());
        change.about = self.about.0.text.get().cloned();
        match self.is_writing {
            true => self.state.recorder.append_writing(change),
            false => self.state.recorder.append(change),
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(change) = self.change.take() {
            drop(self.append(change));
        }
    }
}

fn caller(state: &Shared, request: &Request, template: &str) -> (CallerKind, String) {
    let name = |caller: &Caller| caller.name.to_string();
    match request.extensions().get::<Caller>() {
        _ if access(request.method(), template) == Access::Session => {
            let vmstore = state.options.vmstore.as_ref();
            (CallerKind::Vmstore, vmstore.map(|login| login.username.clone()).unwrap_or_default())
        }
        None => (CallerKind::Open, String::new()),
        Some(caller) => match &caller.machine {
            Some(Machine::Worker { .. }) => (CallerKind::Worker, name(caller)),
            Some(Machine::Invited(..)) => (CallerKind::JoinToken, name(caller)),
            None if caller.name.is_empty() => (CallerKind::Open, String::new()),
            None => (CallerKind::Token, name(caller)),
        },
    }
}
