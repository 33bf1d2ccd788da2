//! Holds answers against the OpenAPI document: the status is documented, the media type too,
//! and a JSON body has the required fields with values of the right types.

use axum::http::Method;
use serde_json::Value;

/// Panics where the answer is not what the document says. Routes that the document does not
/// have are left alone: the tests of unknown routes call them.
pub fn assert_documented(
    document: &Value,
    method: &Method,
    path: &str,
    answer: (u16, &str, &[u8]),
) {
    let (status, media_type, body) = answer;
    let method = if method == Method::HEAD { "get".into() } else { method.as_str().to_lowercase() };
    let Some(operation) = operation(document, &method, path) else {
        return;
    };
    let Some(response) = operation["responses"].get(status.to_string()) else {
        panic!("{method} {path} answered {status}, which is not documented");
    };
    let Some(contents) = response["content"].as_object() else {
        assert!(body.is_empty(), "{method} {path} {status}: a body where none is documented");
        return;
    };
    if body.is_empty() && operation["operationId"].as_str().unwrap().ends_with("Data") {
        return;
    }
    let essence = media_type.split(';').next().unwrap_or("");
    let Some(content) = contents.get(essence) else {
        panic!("{method} {path} {status}: media type {essence} is not documented");
    };
    if essence.ends_with("json") && !body.is_empty() {
        let value: Value = serde_json::from_slice(body).unwrap();
        let faults = check(document, &content["schema"], &value, "$");
        assert!(faults.is_empty(), "{method} {path} {status}: {faults:?} in {value}");
    }
}

fn operation<'a>(document: &'a Value, method: &str, path: &str) -> Option<&'a Value> {
    let paths = document["paths"].as_object()?;
    let matches = |template: &str| {
        let (template, path): (Vec<_>, Vec<_>) =
            (template.split('/').collect(), path.split('/').collect());
        template.len() == path.len()
            && template.iter().zip(path).all(|(part, got)| part.starts_with('{') || *part == got)
    };
    // A route without parameters goes before one with.
    let mut found: Vec<_> = paths.iter().filter(|(template, _)| matches(template)).collect();
    found.sort_by_key(|(template, _)| template.contains('{'));
    found.iter().find_map(|(_, operations)| operations.get(method))
}

fn check(document: &Value, schema: &Value, value: &Value, place: &str) -> Vec<String> {
    if let Some(reference) = schema["$ref"].as_str() {
        let name = reference.rsplit('/').next().unwrap();
        return check(document, &document["components"]["schemas"][name], value, place);
    }
    if let Some(choices) = schema["oneOf"].as_array().or(schema["anyOf"].as_array()) {
        let fits = |choice| check(document, choice, value, place).is_empty();
        return if choices.iter().any(fits) {
            vec![]
        } else {
            vec![format!("{place}: no choice fits")]
        };
    }
    let mut faults = Vec::new();
    let kinds: Vec<&str> = match &schema["type"] {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => vec![],
    };
    if !kinds.is_empty() && !kinds.iter().any(|kind| is_of(kind, value)) {
        faults.push(format!("{place}: {value} is not of {kinds:?}"));
    }
    if let Some(known) = schema["enum"].as_array()
        && !known.contains(value)
    {
        faults.push(format!("{place}: {value} is not among the {} known values", known.len()));
    }
    if let Some(fields) = value.as_object() {
        for name in schema["required"].as_array().into_iter().flatten() {
            let name = name.as_str().unwrap();
            if !fields.contains_key(name) {
                faults.push(format!("{place}.{name} is missing"));
            }
        }
        for (name, value) in fields {
            match schema["properties"].get(name) {
                Some(schema) => {
                    faults.extend(check(document, schema, value, &format!("{place}.{name}")))
                }
                None if schema["properties"].is_object() => {
                    faults.push(format!("{place}.{name} is not documented"))
                }
                None => {}
            }
        }
    }
    for (position, item) in value.as_array().into_iter().flatten().enumerate() {
        faults.extend(check(document, &schema["items"], item, &format!("{place}[{position}]")));
    }
    faults
}

fn is_of(kind: &str, value: &Value) -> bool {
    match kind {
        "string" => value.is_string(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "null" => value.is_null(),
        other => panic!("the document has a type {other}"),
    }
}

#[test]
fn faults_are_found() {
    let document = serde_json::json!({
        "paths": {"/a/{x}": {"get": {"operationId": "a", "responses": {"200": {"content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/A"}}}}}}}},
        "components": {"schemas": {"A": {"type": "object", "required": ["n"],
            "properties": {"n": {"type": "integer"}, "s": {"type": ["string", "null"]}}}}},
    });
    let judge = |status, body: &str| {
        let (document, body) = (document.clone(), body.to_owned());
        std::panic::catch_unwind(move || {
            let answer = (status, "application/json", body.as_bytes());
            assert_documented(&document, &Method::GET, "/a/b", answer);
        })
        .is_ok()
    };
    assert!(judge(200, r#"{"n":1,"s":null}"#));
    for bad in [r#"{"s":"x"}"#, r#"{"n":"1"}"#, r#"{"n":1,"t":2}"#, "[]"] {
        assert!(!judge(200, bad), "{bad}");
    }
    assert!(!judge(204, ""));
}
