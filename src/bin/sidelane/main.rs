//! The `sidelane` program: `bench`, `launch`, `doctor`.

fn main() {}
