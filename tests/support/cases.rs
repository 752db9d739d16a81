//! How many cases a test runs.

/// Cases that a test runs whose cases take long: all if `SIDELANE_TEST_WORLDS` is `all`, else one.
pub fn cases<T>(all: impl IntoIterator<Item = T>, most_demanding: usize) -> Vec<T> {
    let mut all = all.into_iter();
    match std::env::var("SIDELANE_TEST_WORLDS").as_deref() {
        Ok("all") => all.collect(),
        Ok(other) => panic!("SIDELANE_TEST_WORLDS is {other:?}, and only `all` is known"),
        Err(_) => all.nth(most_demanding).into_iter().collect(),
    }
}
