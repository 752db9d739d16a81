//! Files of the library's `sync`.

pub mod primitives;

#[path = "../../../../src/sync/answers.rs"]
pub mod answers;
#[path = "../../../../src/sync/failure.rs"]
pub mod failure;
#[path = "../../../../src/sync/flag.rs"]
pub mod flag;
#[path = "../../../../src/sync/streams.rs"]
pub mod streams;
#[path = "../../../../src/sync/wake_request.rs"]
pub mod wake_request;
