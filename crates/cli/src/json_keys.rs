//! A page that describes JSON names exactly the keys that are written.

use std::collections::BTreeSet;

use serde_json::Value;

/// Dotted paths of all keys of this JSON; the elements of a list share theirs.
pub fn written(json: &str) -> BTreeSet<String> {
    let mut keys = BTreeSet::new();
    collect(&serde_json::from_str(json).unwrap(), "", &mut keys);
    keys
}

fn collect(value: &Value, path: &str, into: &mut BTreeSet<String>) {
    value.as_array().into_iter().flatten().for_each(|element| collect(element, path, into));
    for (key, value) in value.as_object().into_iter().flatten() {
        collect(value, &format!("{path}{key}."), into);
        into.insert(format!("{path}{key}"));
    }
}

/// The keys in the tables of a page: what stands first in a line, between backquotes.
pub fn documented(page: &str) -> BTreeSet<String> {
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    rows.map(|(key, _)| key.to_owned()).collect()
}
