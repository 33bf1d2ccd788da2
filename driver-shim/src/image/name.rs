//! Names of images, as people write them and as engines keep them.

use slackwater_client::types::ImageName;

/// The name with its tag: `latest` where there is none.
#[must_use]
pub fn with_tag(name: &str) -> String {
    match has_tag(name) {
        true => name.to_owned(),
        false => format!("{name}:latest"),
    }
}

/// Whether the name has a tag or a digest.
#[must_use]
pub fn has_tag(name: &str) -> bool {
    name.rsplit('/').next().is_some_and(|last| last.contains([':', '@']))
}

/// The name in full, with registry, repository and tag.
#[must_use]
pub fn in_full(name: &str) -> String {
    let tagged = with_tag(name);
    // The hub's two names; what is left out behind them is left out without them.
    let tagged = ["docker.io/", "index.docker.io/"]
        .iter()
        .find_map(|host| tagged.strip_prefix(host))
        .map_or(tagged.clone(), str::to_owned);
    match tagged.split_once('/') {
        None => format!("docker.io/library/{tagged}"),
        Some((host, _)) if host.contains(['.', ':']) || host == "localhost" => tagged,
        Some(_) => format!("docker.io/{tagged}"),
    }
}

/// The name by which what is published for the image is found again: in full.
#[must_use]
pub fn of_publication(name: &str) -> ImageName {
    in_full(name).parse().unwrap_or_else(|_| ImageName::unknown())
}

/// The tag alone.
#[must_use]
pub fn tag_of(name: &str) -> String {
    let tagged = with_tag(name);
    let last = tagged.rsplit('/').next().unwrap_or(&tagged);
    last.split_once(':').map_or("latest", |(_, tag)| tag).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_added() {
        for (name, full, tag) in [
            ("debian", "docker.io/library/debian:latest", "latest"),
            ("me/web:2", "docker.io/me/web:2", "2"),
            ("docker.io/debian:12", "docker.io/library/debian:12", "12"),
            ("index.docker.io/me/web", "docker.io/me/web:latest", "latest"),
            ("docker.io/library/debian:12", "docker.io/library/debian:12", "12"),
            ("127.0.0.1:5000/web", "127.0.0.1:5000/web:latest", "latest"),
            ("localhost/web:x", "localhost/web:x", "x"),
        ] {
            assert_eq!((in_full(name).as_str(), tag_of(name).as_str()), (full, tag));
        }
    }
}
