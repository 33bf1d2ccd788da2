//! Whether a secret that a person chose can be guessed.
//!
//! No rule tells a good secret. These refuse what people type when they are asked for so many characters; known passwords
//! are not among them.

use std::collections::HashSet;

/// Fewest different characters of a secret. Of sixteen random hexadecimal digits less than one secret in ten thousand
/// has fewer; those that people make up in a hurry do.
pub const DIFFERENT_CHARACTERS_MIN: usize = 6;

/// What makes a secret weak, as what is said of it: "it has ...". It is not shown.
pub(super) fn weakness(secret: &str, characters_min: usize) -> Option<String> {
    let characters: Vec<char> = secret.chars().collect();
    let length = characters.len();
    if length < characters_min {
        return Some(format!("it has {length} characters, at least {characters_min} are needed"));
    }
    let different = characters.iter().collect::<HashSet<_>>().len();
    if different < DIFFERENT_CHARACTERS_MIN {
        return Some(format!(
            "it can be guessed: it has {different} different characters, at least {DIFFERENT_CHARACTERS_MIN} are needed"
        ));
    }
    let repeats = |period: &usize| characters[*period..] == characters[..length - period];
    // Up to what is repeated for half of its own length.
    let period = (1..=length * 2 / 3).find(repeats)?;
    Some(format!("it can be guessed: it repeats its first {period} characters"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_type_to_fill_a_length_is_weak() {
        for (secret, expected) in [
            ("short", "it has 5 characters"),
            ("aaaaaaaaaaaaaaaa", "1 different"),
            ("abababababababab", "2 different"),
            ("1234512345123451", "5 different"),
            ("1234561234561234", "its first 6 "),
            ("passwordpassword", "its first 8 "),
            ("passwordpass", "its first 8 "),
            ("password-password", "its first 9 "),
            ("password1234", ""),
            ("0123456789abcdef", ""),
            ("zzzzzzzz\u{e4}\u{f6}\u{fc}xyw", ""),
        ] {
            let found = weakness(secret, 12).unwrap_or_default();
            assert!(found.contains(expected), "{secret}: {found}");
            assert_eq!(found.is_empty(), expected.is_empty(), "{secret}: {found}");
            assert!(!found.contains(secret));
        }
    }

    #[test]
    fn a_random_secret_is_not_weak() {
        for seed in 0_u32..2_000 {
            let hash = blake3::hash(&seed.to_le_bytes()).to_hex();
            assert_eq!(weakness(&hash, 64), None, "{hash}");
        }
    }
}
