//! The VMstore face, as its clients use it.

use axum::http::{Method, header};
use serde_json::{Value, json};
use slackwater_api::error::ProblemCode;
use slackwater_api::{ApiOptions, Role, Secret, Token, Tokens, VmstoreCredentials};

use crate::harness::{Answer, Face, noise};

const LOGIN_TYPE: &str = "com.tintri.api.rest.vcommon.dto.rbac.RestApiCredentials";
const SNAPSHOT_TYPE: &str = "com.tintri.api.rest.v310.dto.domain.beans.cinder.CinderSnapshotSpec";
const CLONE_TYPE: &str = "com.tintri.api.rest.v310.dto.domain.beans.cinder.CinderCloneSpec";

fn face() -> Face {
    Face::with(ApiOptions {
        vmstore: Some(VmstoreCredentials {
            username: "cinder".to_owned(),
            password: Secret::new("s3cret"),
        }),
        ..ApiOptions::default()
    })
}

/// A client that is logged in.
struct Client<'a> {
    face: &'a Face,
    cookie: String,
}

impl<'a> Client<'a> {
    async fn log_in(face: &'a Face) -> Self {
        let answer = log_in(face, "cinder", "s3cret").await.expect(200);
        let cookie = answer.header(header::SET_COOKIE).split(';').next().unwrap().to_owned();
        Self { face, cookie }
    }

    async fn call(&self, method: Method, path: &str, body: Option<Value>) -> Answer {
        let headers = [("cookie", self.cookie.as_str())];
        self.face.call(method, &format!("/api/v310/{path}"), &headers, body).await
    }

    async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path, None).await
    }

    async fn snapshot(&self, file: &str, fields: Value) -> Answer {
        let mut body = json!({"typeId": SNAPSHOT_TYPE, "file": file});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        self.call(Method::POST, "cinder/snapshot", Some(body)).await
    }

    async fn clone(&self, uuid: &str, destination: Value) -> Answer {
        let body = json!({
            "typeId": CLONE_TYPE, "tintriSnapshotUuid": uuid, "destinationPaths": destination,
        });
        self.call(Method::POST, "cinder/clone", Some(body)).await
    }
}

async fn log_in(face: &Face, username: &str, password: &str) -> Answer {
    let body = json!({
        "username": username, "password": password, "typeId": LOGIN_TYPE,
        "newPassword": null, "roles": null,
    });
    face.post("/api/v310/session/login", body).await
}

/// Asserts an error in VMstore's form, with the fields that its clients read.
#[track_caller]
fn assert_error(answer: &Answer, status: u16, code: &str) -> Value {
    assert_eq!(answer.status, status, "{answer:?}");
    assert_eq!(answer.header(header::CONTENT_TYPE), "application/json");
    let error = answer.json();
    assert_eq!(error["code"], code, "{error}");
    for field in ["typeId", "message", "causeDetails"] {
        assert!(error[field].as_str().is_some_and(|text| !text.is_empty()), "{field} in {error}");
    }
    error
}

/// The calls of OpenStack's driver, in its order: snapshot a volume, find the snapshot again,
/// clone it, rename the clone from its directory, delete the snapshot twice.
#[tokio::test]
async fn a_volume_is_snapshotted_and_cloned() {
    let face = face();
    face.make_file("cinder/volume-1", 0).await;
    face.put("/v1/files/cinder%2Fvolume-1/data", noise(1, 9000)).await.expect(200);
    let client = Client::log_in(&face).await;

    let answer = client
        .snapshot(
            "/cinder/volume-1",
            json!({
                "vmName": "machine", "description": "snap-1 (1)", "vmTintriUuid": "vm-1",
                "instanceId": "vm-1", "snapshotCreator": "Cinder",
                "deletionPolicy": "DELETE_ON_EXPIRATION",
            }),
        )
        .await
        .expect(200);
    let uuid = answer.json()[0].as_str().unwrap().to_owned();

    let page = client.get("snapshot?vmUuid=vm-1").await.expect(200).json();
    assert_eq!(
        (&page["filteredTotal"], &page["items"][0]["uuid"]["uuid"]),
        (&json!(1), &json!(uuid))
    );
    assert_eq!(page["items"][0]["description"], "snap-1 (1)");
    assert_eq!(page["items"][0]["vmName"], "machine");
    assert_eq!(page["items"][0]["cloneReferenceCount"], 0);
    assert!(page["items"][0]["createTime"].as_u64().unwrap() > 1_700_000_000_000);

    client.clone(&uuid, json!(["/cinder/clone-dir"])).await.expect(204);
    let clone = face.get("/v1/files/cinder%2Fclone-dir%2Fvolume-1/data").await.expect(200);
    assert!(clone.body == noise(1, 9000));
    let moved = json!({"path": "cinder/volume-2"});
    face.patch("/v1/files/cinder%2Fclone-dir%2Fvolume-1", moved).await.expect(200);
    face.delete("/v1/files/cinder%2Fclone-dir").await.expect(204);
    let page = client.get("snapshot?hasClone=Yes").await.expect(200).json();
    assert_eq!(
        (&page["filteredTotal"], &page["items"][0]["cloneReferenceCount"]),
        (&json!(1), &json!(1))
    );

    let route = format!("snapshot/{uuid}");
    client.call(Method::DELETE, &route, None).await.expect(200);
    let gone = client.call(Method::DELETE, &route, None).await;
    let error = assert_error(&gone, 404, "RESOURCE_NOT_FOUND");
    assert!(error["message"].as_str().unwrap().contains("does not exist"));
    assert!(error["causeDetails"].as_str().unwrap().contains("Failed to lookup"));
    face.get("/v1/files/cinder%2Fvolume-2").await.expect(200);
}

/// Newer clients send one path in place of the list, and leave the export's path in.
#[tokio::test]
async fn paths_come_in_every_form_that_clients_use() {
    let face = face();
    face.make_file("cinder/v", 4096).await;
    let client = Client::log_in(&face).await;
    let mut uuids = Vec::new();
    let forms = ["/tintri/cinder/v", "cinder/v", "/cinder/v", "/slackwater/cinder/v"];
    // A share with a trailing slash gives this.
    for file in forms.into_iter().chain(["/slackwater//cinder/v"]) {
        let answer = client.snapshot(file, json!({"deletionPolicy": null})).await.expect(200);
        uuids.push(answer.json()[0].as_str().unwrap().to_owned());
    }
    client.clone(&uuids[0], json!("/cinder/one")).await.expect(204);
    client.clone(&uuids[1], json!(["/tintri/two"])).await.expect(204);
    face.get("/v1/files/cinder%2Fone%2Fv").await.expect(200);
    face.get("/v1/files/two%2Fv").await.expect(200);
    client.clone(&uuids[2].to_uppercase(), json!("three")).await.expect(204);
}

#[tokio::test]
async fn what_has_no_meaning_is_refused_in_vmstores_words() {
    let face = face();
    face.make_file("dir/v", 4096).await;
    let client = Client::log_in(&face).await;
    let answer = client.snapshot("dir/v", json!({})).await.expect(200);
    let uuid = answer.json()[0].as_str().unwrap().to_owned();
    client.clone(&uuid, json!(["x"])).await.expect(204);

    assert_error(&client.clone(&uuid, json!(["x"])).await, 409, "RESOURCE_EXIST");
    assert_error(&client.clone(&uuid, json!([])).await, 400, "INVALID_ARGUMENT");
    assert_error(&client.clone(&uuid, json!(["a", "b"])).await, 400, "INVALID_ARGUMENT");
    assert_error(&client.clone(&uuid, json!(["../x"])).await, 400, "INVALID_ARGUMENT");
    assert_error(&client.clone("no uuid", json!(["y"])).await, 404, "RESOURCE_NOT_FOUND");
    assert_error(&client.snapshot("gone", json!({})).await, 404, "RESOURCE_NOT_FOUND");
    assert_error(&client.snapshot("dir", json!({})).await, 409, "INVALID_ARGUMENT");
    let policy = json!({"deletionPolicy": "NEVER"});
    assert_error(&client.snapshot("dir/v", policy).await, 400, "INVALID_ARGUMENT");
    let other_type = json!({"typeId": CLONE_TYPE});
    assert_error(&client.snapshot("dir/v", other_type).await, 400, "INVALID_ARGUMENT");
    let no_type = json!({"file": "dir/v"});
    let answer = client.call(Method::POST, "cinder/snapshot", Some(no_type)).await;
    assert_error(&answer, 400, "INVALID_ARGUMENT");
    assert_error(&client.get("snapshot?sortOrder=UP").await, 400, "INVALID_ARGUMENT");
    assert_error(&client.get("nothing").await, 404, "RESOURCE_NOT_FOUND");
    let answer = client.call(Method::PUT, "snapshot", None).await;
    assert_error(&answer, 405, "INVALID_ARGUMENT");
    assert_eq!(answer.header(header::ALLOW), "GET,HEAD");
}

#[tokio::test]
async fn lists_are_filtered_sorted_and_paged() {
    let face = face();
    face.make_file("v", 4096).await;
    let client = Client::log_in(&face).await;
    for number in 0..7 {
        let fields = json!({"description": format!("snap-{number}"), "vmName": format!("vm-{}", number % 2)});
        client.snapshot("v", fields).await.expect(200);
    }
    face.take_snapshot("v").await;
    let descriptions = async |query: &str| {
        let page = client.get(&format!("snapshot?{query}")).await.expect(200).json();
        let items = page["items"].as_array().unwrap().iter();
        (
            page["filteredTotal"].as_u64().unwrap(),
            items.map(|item| item["description"].as_str().unwrap().to_owned()).collect::<Vec<_>>(),
        )
    };
    assert_eq!(
        descriptions("type=CINDER_GENERATED_SNAPSHOT&limit=2").await,
        (7, vec!["snap-0".to_owned(), "snap-1".to_owned()]),
        "oldest first"
    );
    assert_eq!(
        descriptions("limit=3&page=3&sortedBy=createTime&sortOrder=DESC").await,
        (8, vec!["snap-1".to_owned(), "snap-0".to_owned()])
    );
    assert_eq!(
        descriptions("contain=VM-1&sortedBy=description&sortOrder=DESC").await,
        (3, vec!["snap-5".to_owned(), "snap-3".to_owned(), "snap-1".to_owned()])
    );
    assert_eq!(descriptions("contain=snap-4").await.0, 1);
    assert_eq!(descriptions("type=USER_GENERATED_SNAPSHOT").await.0, 1);
    assert_eq!(descriptions("since=2100-01-01T00:00:00.000Z").await.0, 0);
    assert_eq!(descriptions("until=2100-01-01T00:00:00.000%2B0100").await.0, 8);
    assert_eq!(descriptions("vmUuid=unknown").await.0, 0);
    // As Cinder's driver looks for images that nothing uses any more, to delete them.
    let cleanup = |until: &str, word: &str| {
        format!(
            "sortedBy=createTime&target=SNAPSHOT&consistency=CRASH_CONSISTENT&hasClone=No&type=CINDER_GENERATED_SNAPSHOT\
             &contain={word}&limit=100&page=1&sortOrder=DESC&since=1970-01-01T00%3A00%3A00&until={until}"
        )
    };
    assert_eq!(descriptions(&cleanup("2100-01-01T00:00:00", "snap-")).await.0, 7);
    assert_eq!(descriptions(&cleanup("2020-01-01T00:00:00", "snap-")).await.0, 0);
    assert_eq!(descriptions(&cleanup("2100-01-01T00:00:00", "image-")).await.0, 0);
    let first = client.get("snapshot?limit=5").await.json();
    assert_eq!((&first["pageTotal"], &first["next"]), (&json!(2), &json!("limit=5&page=2")));
    let last = client.get(&format!("snapshot?{}", first["next"].as_str().unwrap())).await.json();
    assert_eq!((last["items"].as_array().unwrap().len(), &last["next"]), (3, &Value::Null));
}

#[tokio::test]
async fn a_policy_and_a_retention_are_kept() {
    let face = face();
    face.make_file("v", 4096).await;
    let client = Client::log_in(&face).await;
    let fields =
        json!({"deletionPolicy": "DELETE_ON_ZERO_CLONE_REFERENCES", "retentionMinutes": 60});
    let uuid =
        client.snapshot("v", fields).await.expect(200).json()[0].as_str().unwrap().to_owned();
    let shown = face.get(&format!("/v1/snapshots/{uuid}")).await.expect(200).json();
    assert_eq!(shown["deletion_policy"], "on_zero_clones");
    assert!(shown["expires_at"].is_string());
    let listed = client.get(&format!("snapshot?uuid={uuid}")).await.json();
    assert_eq!(listed["items"][0]["deletionPolicy"], "DELETE_ON_ZERO_CLONE_REFERENCES");
    let minutes = |field: &str| listed["items"][0][field].as_u64().unwrap() / 60_000;
    assert!((59..=61).contains(&(minutes("expirationTime") - minutes("createTime"))));
}

#[tokio::test]
async fn without_a_session_nothing_is_shown() {
    let face = face();
    face.make_file("v", 4096).await;
    let answer = face.get("/api/v310/snapshot").await;
    assert_error(&answer, 401, "UNAUTHENTICATED");
    let forged =
        face.call(Method::GET, "/api/v310/snapshot", &[("cookie", "JSESSIONID=00")], None).await;
    assert_error(&forged, 401, "UNAUTHENTICATED");
    for (name, password) in [("cinder", "wrong"), ("other", "s3cret"), ("", "")] {
        let started = std::time::Instant::now();
        let answer = log_in(&face, name, password).await;
        assert_error(&answer, 401, "UNAUTHENTICATED");
        assert_eq!(answer.header(header::SET_COOKIE), "");
        assert!(started.elapsed().as_millis() >= 900, "a wrong password takes its time");
    }
    let no_type = json!({"username": "cinder", "password": "s3cret"});
    let answer = face.post("/api/v310/session/login", no_type).await;
    assert_error(&answer, 400, "INVALID_ARGUMENT");
}

#[tokio::test]
async fn a_session_is_a_cookie_that_ends_with_the_logout() {
    let face = face();
    let answer = log_in(&face, "cinder", "s3cret").await.expect(200);
    let cookie = answer.header(header::SET_COOKIE);
    assert!(cookie.starts_with("JSESSIONID=") && cookie.contains("HttpOnly"), "{cookie}");
    assert!(!cookie.contains("Secure"), "over plain HTTP the client would not send it back");
    let client = Client::log_in(&face).await;
    let other = Client::log_in(&face).await;
    assert_ne!(client.cookie, other.cookie);
    assert!(client.cookie.len() >= "JSESSIONID=".len() + 64);
    client.get("snapshot").await.expect(200);
    client.get("session/logout").await.expect(204);
    assert_error(&client.get("snapshot").await, 401, "UNAUTHENTICATED");
    other.get("snapshot").await.expect(200);
}

/// Nobody knows yet who sends it.
#[tokio::test]
async fn a_log_in_is_short() {
    let answer = log_in(&face(), "cinder", &"x".repeat(5000)).await;
    assert_eq!(answer.status, 413, "{answer:?}");
}

/// An idempotency key must not hand out another client's session.
#[tokio::test]
async fn a_login_is_never_given_again() {
    let face = face();
    let send = async |password: &str| {
        let body = json!({"username": "cinder", "password": password, "typeId": LOGIN_TYPE});
        let headers = [("idempotency-key", "k")];
        face.call(Method::POST, "/api/v310/session/login", &headers, Some(body)).await
    };
    let first = send("s3cret").await.expect(200);
    let second = send("s3cret").await.expect(200);
    assert_ne!(first.header(header::SET_COOKIE), second.header(header::SET_COOKIE));
}

#[tokio::test]
async fn the_driver_finds_appliance_and_disk() {
    let face = face();
    face.make_file("cinder/volume-6f1f3c1e", 4096).await;
    let info = face.get("/api/info").await.expect(200).json();
    assert_eq!(info["productName"], "Tintri VMstore");
    assert!(info["preferredVersion"].as_str().unwrap().starts_with("v310"));
    let client = Client::log_in(&face).await;
    let appliance = client.get("appliance").await.expect(200).json();
    assert_eq!(appliance["items"][0]["uuid"]["uuid"], face.store.store_id().to_string());
    let spec = json!({"typeId": "x.OpenStackHostRefreshSpec", "hostname": "h", "region": "r"});
    client.call(Method::POST, "cinder/host/refresh", Some(spec)).await.expect(204);
    let disk = client.get("virtualDisk?uuid=6f1f3c1e").await.expect(200).json();
    assert_eq!(disk["items"][0]["path"], "cinder/volume-6f1f3c1e");
    assert_eq!(disk["items"][0]["vmUuid"]["uuid"], "6f1f3c1e");
    let none = client.get("virtualDisk?uuid=unknown").await.expect(200).json();
    assert_eq!(none["items"], json!([]));
    assert_error(&client.get("virtualDisk").await, 400, "INVALID_ARGUMENT");
}

/// The face has its own sessions: tokens neither help nor are needed.
#[tokio::test]
async fn tokens_and_sessions_are_separate() {
    let face = Face::with(ApiOptions {
        tokens: Tokens::new(vec![Token {
            name: "root".to_owned(),
            role: Role::Admin,
            secret: Secret::new("root-secret"),
        }])
        .into(),
        vmstore: Some(VmstoreCredentials {
            username: "cinder".to_owned(),
            password: Secret::new("s3cret"),
        }),
        ..ApiOptions::default()
    });
    let bearer = [("authorization", "Bearer root-secret")];
    let answer = face.call(Method::GET, "/api/v310/snapshot", &bearer, None).await;
    assert_error(&answer, 401, "UNAUTHENTICATED");
    let client = Client::log_in(&face).await;
    client.get("snapshot").await.expect(200);
    let cookie = [("cookie", client.cookie.as_str())];
    face.call(Method::GET, "/v1/snapshots", &cookie, None)
        .await
        .problem(ProblemCode::Unauthenticated);
}

#[tokio::test]
async fn the_face_is_off_unless_configured() {
    let face = Face::new();
    log_in(&face, "cinder", "s3cret").await.problem(ProblemCode::UnknownRoute);
}
