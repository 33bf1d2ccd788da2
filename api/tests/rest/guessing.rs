//! Who gets in without what is asked for: nobody, by no route and no method; and how often a
//! secret can be guessed.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{Method, Request, header};
use futures_util::future::join_all;
use serde_json::{Value, json};
use slackwater_api::error::ProblemCode;
use slackwater_api::listen::ConnectionInfo;
use slackwater_api::{ApiOptions, Role, Secret, Token, Tokens, VmstoreCredentials};

use crate::harness::{Answer, Face};

const LOGIN: &str = "/api/v310/session/login";
const LOGIN_TYPE: &str = "com.tintri.api.rest.vcommon.dto.rbac.RestApiCredentials";

/// Wrong secrets that one address may present at once.
const GUESSES_AT_ONCE: usize = 33;

/// Wrong secrets that one address may have presented since then: one more each second.
fn most_judged(begun: Instant) -> usize {
    GUESSES_AT_ONCE + usize::try_from(begun.elapsed().as_secs()).unwrap() + 1
}

fn face() -> Face {
    Face::with(ApiOptions {
        tokens: Tokens::new(vec![Token {
            name: "root".to_owned(),
            role: Role::Admin,
            secret: Secret::new("root-secret"),
        }])
        .into(),
        vmstore: Some(VmstoreCredentials {
            username: "cinder".to_owned(),
            password: Secret::new("password"),
        }),
        queue_timeout: Duration::from_millis(10),
        ..ApiOptions::default()
    })
}

/// A request that came from `peer`, by a socket.
fn from(peer: &str, mut request: Request<Body>) -> Request<Body> {
    let peer = SocketAddr::new(peer.parse().unwrap(), 40_000);
    request.extensions_mut().insert(ConnectionInfo { peer, tls: false });
    request
}

async fn with_token(face: &Face, peer: &str, token: &str) -> Answer {
    let request = Request::get("/v1/stats").header(header::AUTHORIZATION, token);
    face.send(from(peer, request.body(Body::empty()).unwrap())).await
}

async fn log_in(face: &Face, peer: &str, password: &str) -> Answer {
    let body = json!({"typeId": LOGIN_TYPE, "username": "cinder", "password": password});
    let request = Request::post(LOGIN).header(header::CONTENT_TYPE, "application/json");
    face.send(from(peer, request.body(Body::from(body.to_string())).unwrap())).await
}

/// The paths of the document with something in the place of their parameters, and what its
/// methods ask for: `open`, `session` or `token`.
fn routes(document: &Value) -> Vec<(String, Vec<(Method, &'static str)>)> {
    let asks = |operation: &Value| match operation["security"].as_array().unwrap().first() {
        None => "open",
        Some(scheme) if scheme.get("session").is_some() => "session",
        Some(scheme) if scheme.get("token").is_some() => "token",
        Some(other) => panic!("an unknown scheme: {other}"),
    };
    let routes = document["paths"].as_object().unwrap().iter().map(|(template, operations)| {
        let id = "6f1f3c1e-5d0c-4d55-9d61-2f5b6f0f6c11";
        let path = template.replace("{id}", id).replace("{uuid}", id).replace("{path}", "gone");
        let path = path.replace("{chain_id}", "x").replace("{size_bytes}", "1");
        let path = path.replace("{name}", "gone");
        let methods = operations.as_object().unwrap().iter().map(|(method, operation)| {
            (Method::from_bytes(method.to_uppercase().as_bytes()).unwrap(), asks(operation))
        });
        (path, methods.collect())
    });
    routes.collect()
}

#[tokio::test]
async fn nothing_but_the_open_routes_answers_without_what_it_asks_for() {
    let face = face();
    let routes = routes(&face.get("/openapi.json").await.expect(200).json());
    let mut open = BTreeSet::new();
    let mut closed_count = 0;
    for (path, documented) in &routes {
        for method in ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "X"] {
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            // HEAD is answered where GET is.
            let as_get = if method == Method::HEAD { Method::GET } else { method.clone() };
            let asks = documented.iter().find(|(known, _)| *known == as_get).map(|(_, asks)| *asks);
            if asks == Some("open") {
                open.insert(path.as_str());
                continue;
            }
            // What opens the one face does not open the other.
            let other = match asks {
                Some("session") => ("authorization", "Bearer root-secret"),
                _ => ("cookie", "JSESSIONID=0000"),
            };
            for headers in [&[][..], &[other], &[("cookie", "JSESSIONID=")]] {
                if asks.is_none() && headers.first() == Some(&other) {
                    continue;
                }
                let answer = face.call(method.clone(), path, headers, None).await;
                let expected = if asks.is_some() { &[401][..] } else { &[401, 405] };
                let about = format!("{method} {path} with {headers:?}: {answer:?}");
                assert!(expected.contains(&answer.status), "{about}");
                closed_count += 1;
            }
        }
    }
    let expected = ["/", "/healthz", "/readyz", "/openapi.json", "/api/info", LOGIN];
    let expected = expected.into_iter().chain(["/api/v310/session/logout"]);
    assert_eq!(open, expected.collect(), "the routes that need nothing");
    assert!(closed_count > 300, "{closed_count}");
}

#[tokio::test]
async fn a_session_ends_with_its_logout() {
    let face = face();
    let answer = log_in(&face, "10.0.0.1", "password").await.expect(200);
    let set = answer.header(header::SET_COOKIE).to_owned();
    assert!(set.contains("; HttpOnly") && set.contains("; SameSite=Strict"), "{set}");
    let headers = [("cookie", set.split(';').next().unwrap())];
    let appliance = "/api/v310/appliance";
    face.call(Method::GET, appliance, &headers, None).await.expect(200);
    face.call(Method::GET, "/v1/stats", &headers, None).await.expect(401);
    face.call(Method::GET, "/api/v310/session/logout", &headers, None).await.expect(204);
    face.call(Method::GET, appliance, &headers, None).await.expect(401);
}

#[tokio::test]
async fn tokens_cannot_be_guessed_fast() {
    let face = face();
    let (begun, mut judged) = (Instant::now(), 0);
    // The last one is refused; a slow machine gives the guesser more time.
    while with_token(&face, "10.0.0.1", "Bearer wrong").await.status == 401 {
        judged += 1;
        assert!(judged <= most_judged(begun), "{judged}");
    }
    assert!(judged >= GUESSES_AT_ONCE, "{judged}");
    // Not even the right one is judged: else a guess would be told from the answer. Which of
    // these tries meets the end of the wait depends on the machine; all of them never do.
    let mut refused = 0;
    for _ in 0..20 {
        with_token(&face, "10.0.0.1", "Bearer wrong").await;
        let answer = with_token(&face, "10.0.0.1", "Bearer root-secret").await;
        if answer.status == 200 {
            continue;
        }
        let seconds: u32 = answer.header(header::RETRY_AFTER).parse().unwrap();
        assert!((1..=2).contains(&seconds), "{seconds}");
        answer.problem(ProblemCode::TooManyAttempts);
        refused += 1;
    }
    assert!(refused > 0, "the right token was always judged");
    // Nobody else is held up, nor a call that needs no secret.
    with_token(&face, "10.0.0.2", "Bearer root-secret").await.expect(200);
    let health = Request::get("/healthz").header(header::AUTHORIZATION, "Bearer wrong");
    face.send(from("10.0.0.1", health.body(Body::empty()).unwrap())).await.expect(200);
}

#[tokio::test]
async fn right_tokens_and_calls_without_one_are_no_guesses() {
    let face = face();
    for _ in 0..GUESSES_AT_ONCE * 2 {
        with_token(&face, "10.0.0.1", "Bearer root-secret").await.expect(200);
        with_token(&face, "10.0.0.1", "Basic Og==").await.expect(401);
        log_in(&face, "10.0.0.1", "password").await.expect(200);
    }
}

#[tokio::test]
async fn passwords_cannot_be_guessed_fast_over_many_connections() {
    let face = face();
    let face_ref = &face;
    let logins = (0..100)
        .map(async |number: u32| log_in(face_ref, "10.0.0.1", &number.to_string()).await.status);
    let begun = Instant::now();
    let statuses = join_all(logins).await;
    let count = |status| statuses.iter().filter(|&&got| got == status).count();
    assert!(count(401) <= 16, "few are judged at once: {statuses:?}");
    let judged = count(401) + count(503);
    assert!((GUESSES_AT_ONCE..=most_judged(begun)).contains(&judged), "{statuses:?}");
    assert_eq!(judged + count(429), 100, "{statuses:?}");
    log_in(&face, "10.0.0.2", "password").await.expect(200);
}

/// Who sends it wrong has guessed nothing, and is told what is wrong however often.
#[tokio::test]
async fn log_ins_that_mean_nothing_are_no_guesses() {
    const PEER: &str = "10.0.0.9";
    let face = face();
    for _ in 0..2 * GUESSES_AT_ONCE {
        let request = Request::post(LOGIN).header(header::CONTENT_TYPE, "application/json");
        let answer = face.send(from(PEER, request.body(Body::from("{")).unwrap())).await;
        assert_eq!(answer.status, 400, "{answer:?}");
    }
    log_in(&face, PEER, "password").await.expect(200);
}
