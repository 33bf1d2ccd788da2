//! A hostile worker with a valid credential: it calls every route with what is its own, what is of others and what has no
//! meaning, and reads and changes nothing that is not its own.
//!
//! Routes, queries and bodies are those of the OpenAPI document, so a new route is called too. What a worker may do with
//! what is shared (THREATS.md, "A worker that joined") it does; that is left out where the appliance is compared.
//! `SLACKWATER_HOSTILE_SEED=N` gives the seed of the random calls.

mod calls;
mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::iter::repeat_n;
use std::ops::Range;

use axum::body::Body;
use axum::http::{Method, Request, header};
use serde_json::{Value, json};
use slackwater_api::paths;

use crate::harness::Answer;
use crate::random::Random;
use crate::workers::call;
use calls::{Call, Operation, RANGES, odd_paths};
use world::{ADMIN, World, secret, tells_a_secret};

/// Random calls, after those that are made in any case.
const CALLS: usize = 10_000;

/// The attacker, and what came of its calls.
struct Attack {
    world: World,
    document: Value,
    random: Random,
    /// Stands for all paths, or for all ids, of a call.
    target: Option<String>,
    odd_paths: Vec<String>,
    statuses: BTreeMap<u16, usize>,
    /// The operations that did what they are for.
    succeeded: BTreeSet<String>,
}

impl Attack {
    async fn new(world: World) -> Self {
        let document = world.face.get("/openapi.json").await.expect(200).json();
        Self {
            world,
            document,
            random: Random::new(),
            target: None,
            odd_paths: odd_paths(),
            statuses: BTreeMap::new(),
            succeeded: BTreeSet::new(),
        }
    }

    /// Makes a call of this kind, and judges its answer.
    async fn make(&mut self, operation: &Operation) {
        let call = self.choose(operation);
        let mut request = Request::builder()
            .method(call.method.clone())
            .uri(call.uri.as_str())
            .header(header::AUTHORIZATION, format!("Bearer {}", self.world.attacker))
            .header(header::CONTENT_TYPE, call.media_type)
            .header(header::COOKIE, "JSESSIONID=0000");
        if self.strays(4) {
            request = request.header(header::RANGE, *self.random.pick(&RANGES));
        }
        if self.strays(8) {
            request = request.header(paths::IDEMPOTENCY_KEY, "one");
        }
        let request = request.body(Body::from(call.body.clone())).unwrap();
        let answer = self.world.face.send(request).await;
        self.judge(operation, &call, &answer);
    }

    fn judge(&mut self, operation: &Operation, call: &Call, answer: &Answer) {
        let about = || {
            let sent = String::from_utf8_lossy(&call.body);
            let got = String::from_utf8_lossy(&answer.body);
            format!("{} {} {sent}: {} {got}", call.method, call.uri, answer.status)
        };
        assert!(!tells_a_secret(answer), "the answer has a secret: {}", about());
        assert!(answer.status < 500, "{}", about());
        let body: Value = match operation.schema() {
            Some(_) => serde_json::from_slice(&call.body).unwrap_or_default(),
            None => Value::Null,
        };
        if self.world.is_private(&call.uri, &body) {
            assert!(answer.status >= 400, "it is private: {}", about());
            let is_refused = [401, 403, 404].contains(&answer.status);
            assert!(is_refused || self.target.is_none(), "refused for another reason: {}", about());
        }
        if answer.status < 300 {
            let text = String::from_utf8_lossy(&answer.body);
            let hidden = self.world.hidden().find(|hidden| text.contains(hidden.as_str()));
            assert_eq!(hidden, None, "{}", about());
        }
        if call.method == operation.method {
            if let Some(status) = operation.refusal() {
                assert_eq!(answer.status, status, "no worker is let in: {}", about());
            }
            if answer.status < 300 {
                self.succeeded.insert(operation.id());
            }
        }
        *self.statuses.entry(answer.status).or_default() += 1;
        let made = if answer.status == 201 { answer.json() } else { Value::Null };
        self.world.own.extend(made["id"].as_str().map(str::to_owned));
    }

    /// What lets in a worker did what it is for, each at least once.
    fn assert_went_far(&self, operations: &[Operation]) {
        let let_in = operations.iter().filter(|operation| operation.refusal().is_none());
        // It has no password.
        let let_in = let_in.map(Operation::id).filter(|id| id != "vmstoreLogin");
        assert_eq!(self.succeeded, let_in.collect::<BTreeSet<_>>());
        let count = |statuses: Range<u16>| -> usize {
            self.statuses.range(statuses).map(|(_, count)| count).sum()
        };
        let is_enough = count(200..300) > 1000 && count(403..404) > 1000 && count(404..405) > 200;
        assert!(is_enough, "{:?}", self.statuses);
    }
}

#[tokio::test]
async fn a_hostile_worker_reads_and_changes_nothing_of_others_by_any_call() {
    let world = World::new().await;
    world.assert_secrets_are_found().await;
    let before = world.seen().await;
    let mut attack = Attack::new(world).await;
    let operations = Operation::all(&attack.document);
    assert!(operations.len() > 40, "{}", operations.len());
    // Each with all that is private, and with what is there to be read only.
    let mut targets = attack.world.private();
    targets.push("published/readme".to_owned());
    for operation in &operations {
        for target in &targets {
            attack.target = Some(target.clone());
            attack.make(operation).await;
        }
    }
    attack.target = None;
    let often = |operation: &Operation| {
        let is_let_in = operation.refusal().is_none() && operation.template.starts_with("/v1/");
        if is_let_in { 4 } else { 1 }
    };
    let weighted = operations.iter().flat_map(|operation| repeat_n(operation, often(operation)));
    let weighted: Vec<&Operation> = weighted.collect();
    for _ in 0..CALLS {
        let operation = *attack.random.pick(&weighted);
        attack.make(operation).await;
    }
    attack.assert_went_far(&operations);
    let world = attack.world;
    assert_eq!(world.seen().await, before);
    // The victim goes on, and the store is sound.
    let route = paths::file_data(&world.private_paths[0]);
    let read = call(&world.face, &world.victim, Method::GET, &route, None).await.expect(200);
    assert_eq!(read.body, secret(0));
    let check = Some(json!({"data": true}));
    let report = call(&world.face, ADMIN, Method::POST, "/v1/check", check).await.expect(200);
    assert_eq!(report.json()["clean"], true, "{report:?}");
}
