//! Compares the names of fields and collections: `product_id` suggests `products`, `hostId` suggests `hosts`. Pure.

use denormd_model::field_path::FieldPath;

/// Words at the end of a field's name that mark it as a reference without naming the referenced collection.
const REFERRING: [&str; 9] = ["id", "key", "ref", "oid", "uuid", "code", "no", "number", "fk"];
/// Field names common to many collections: equality of such names is no evidence.
const COMMON: [&str; 8] = ["id", "name", "title", "type", "status", "description", "code", "number"];

/// True if a path's name suggests a collection, or equals the name of its key.
#[must_use]
pub fn speaks_of(path: &FieldPath, collection: &str, key: &FieldPath) -> bool {
    let (wanted, found) = (words(collection), meaning(path));
    let same_key = || {
        let (path, key) = (path.names().next_back(), key.names().next_back());
        path == key && path.is_some_and(|name| name != "_id" && !COMMON.contains(&name.to_lowercase().as_str()))
    };
    (!wanted.is_empty() && found.ends_with(&wanted)) || same_key()
}

/// The subject of a referring field, as a prefix for copies from it: `product` of `product_id`, `host` of `host`.
#[must_use]
pub fn about(path: &FieldPath) -> String {
    let words = meaning(path);
    if words.is_empty() { "copied".to_owned() } else { words.join("_") }
}

/// Words in the names of personal or secret fields.
const PERSONAL: [&str; 23] = [
    "email",
    "mail",
    "phone",
    "mobile",
    "telephone",
    "fax",
    "address",
    "street",
    "postcode",
    "zip",
    "birthday",
    "birthdate",
    "dob",
    "ssn",
    "passport",
    "iban",
    "password",
    "passwd",
    "secret",
    "token",
    "salary",
    "gender",
    "ip",
];

/// True if a field's name suggests personal or secret data.
#[must_use]
pub fn looks_personal(path: &FieldPath) -> bool {
    path.names().any(|name| words(name).iter().any(|word| PERSONAL.contains(&word.as_str())))
}

/// The words of the innermost name that is left with any after the reference words are removed.
fn meaning(path: &FieldPath) -> Vec<String> {
    for name in path.names().rev() {
        let mut words = words(name);
        while words.last().is_some_and(|word| REFERRING.contains(&word.as_str())) {
            words.pop();
        }
        if !words.is_empty() {
            return words;
        }
    }
    Vec::new()
}

/// The words of a name, lower case and singular: `[user, profile]` of `UserProfiles` and of `user_profiles`.
fn words(name: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut last = ' ';
    for c in name.chars() {
        if c.is_alphanumeric() {
            let begins = !last.is_alphanumeric() || (c.is_uppercase() && last.is_lowercase());
            match words.last_mut() {
                Some(word) if !begins => word.extend(c.to_lowercase()),
                _ => words.push(c.to_lowercase().collect()),
            }
        }
        last = c;
    }
    words.iter().map(|word| singular(word)).collect()
}

fn singular(word: &str) -> String {
    match word {
        "people" => "person".to_owned(),
        "children" => "child".to_owned(),
        _ => {
            let cut = |ending: &str, with: &str| word.strip_suffix(ending).map(|stem| format!("{stem}{with}"));
            cut("ies", "y")
                .or_else(|| cut("sses", "ss"))
                .or_else(|| cut("xes", "x"))
                .or_else(|| cut("ches", "ch"))
                .or_else(|| if word.ends_with("ss") { Some(word.to_owned()) } else { cut("s", "") })
                .unwrap_or_else(|| word.to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> FieldPath {
        FieldPath::parse(text).unwrap()
    }

    #[test]
    fn names_that_speak() {
        for (field, collection, key) in [
            ("product_id", "products", "_id"),
            ("productId", "products", "_id"),
            ("host", "hosts", "_id"),
            ("parts.$[].id", "parts", "_id"),
            ("parts.$[]", "parts", "_id"),
            ("publisher.$id", "publisher", "_id"),
            ("category_ids.$[]", "categories", "_id"),
            ("shipping_address_id", "addresses", "_id"),
            ("userProfileId", "user_profiles", "_id"),
            ("person", "people", "_id"),
            ("carrier", "airlines", "carrier"),
        ] {
            assert!(speaks_of(&path(field), collection, &path(key)), "{field} of {collection}");
        }
        for (field, collection, key) in [
            ("quantity", "parts", "_id"),
            ("parts.$[].quantity", "parts", "_id"),
            ("name", "airlines", "name"),
            ("_id", "products", "_id"),
            ("origin", "airports", "faa"),
        ] {
            assert!(!speaks_of(&path(field), collection, &path(key)), "{field} of {collection}");
        }
    }

    #[test]
    fn names_of_personal_fields() {
        for name in ["email", "workEmail", "phone_number", "address", "home.address.city", "authToken", "emails"] {
            assert!(looks_personal(&path(name)), "{name}");
        }
        for name in ["name", "price", "title", "zipper", "description"] {
            assert!(!looks_personal(&path(name)), "{name}");
        }
    }

    #[test]
    fn what_a_reference_is_about() {
        for (field, name) in [
            ("product_id", "product"),
            ("hostId", "host"),
            ("carrier", "carrier"),
            ("publisher.$id", "publisher"),
            ("parts.$[].id", "part"),
            ("_id", "copied"),
        ] {
            assert_eq!(about(&path(field)), name);
        }
    }
}
