//! Values of keys as the `_id`s of state documents contain them. The server refuses an `_id` in which the name of a field
//! begins with `$`, although a field of a document, and so a key, may contain such names.

use bson::Bson;

use crate::key::Key;

/// The character before a name that the server would refuse, or that begins with this character itself: U+FF04.
const ESCAPE: char = '\u{FF04}';

/// A key as an array for an `_id`.
#[must_use]
pub fn stored(key: &Key) -> Vec<Bson> {
    key.values().iter().map(stored_value).collect()
}

/// The key that [`stored`] has converted.
#[must_use]
pub fn loaded(values: &[Bson]) -> Key {
    Key::new(values.iter().map(loaded_value).collect())
}

/// A value for an `_id`.
#[must_use]
pub fn stored_value(value: &Bson) -> Bson {
    renamed(value, &|name| if name.starts_with(['$', ESCAPE]) { format!("{ESCAPE}{name}") } else { name.to_owned() })
}

/// The value that [`stored_value`] has converted.
#[must_use]
pub fn loaded_value(value: &Bson) -> Bson {
    renamed(value, &|name| name.strip_prefix(ESCAPE).unwrap_or(name).to_owned())
}

/// The value with other names of its fields, at every depth.
fn renamed(value: &Bson, rename: &impl Fn(&str) -> String) -> Bson {
    match value {
        Bson::Document(fields) => {
            Bson::Document(fields.iter().map(|(name, value)| (rename(name), renamed(value, rename))).collect())
        }
        Bson::Array(values) => Bson::Array(values.iter().map(|value| renamed(value, rename)).collect()),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use bson::bson;

    use super::*;

    #[test]
    fn every_key_can_be_in_an_id_and_comes_back() {
        let values = bson!([{"$x": 1, "＄x": 2, "a": [{"＄$b": {"$c": "$d"}}]}, "$e", 7]);
        let Bson::Array(values) = values else { panic!("an array") };
        let key = Key::new(values);
        let stored = stored(&key);
        assert_eq!(
            Bson::Array(stored.clone()),
            bson!([{"＄$x": 1, "＄＄x": 2, "a": [{"＄＄$b": {"＄$c": "$d"}}]}, "$e", 7])
        );
        assert_eq!(loaded(&stored), key);
    }
}
