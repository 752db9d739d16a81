//! Files of the library's `sync`.

pub mod primitives;

#[path = "../../../../src/sync/failure.rs"]
pub mod failure;
#[path = "../../../../src/sync/flag.rs"]
pub mod flag;
#[path = "../../../../src/sync/owed_answers.rs"]
pub mod owed_answers;
#[path = "../../../../src/sync/slots.rs"]
pub mod slots;
#[path = "../../../../src/sync/stream_use.rs"]
pub mod stream_use;
#[path = "../../../../src/sync/wake_request.rs"]
pub mod wake_request;
