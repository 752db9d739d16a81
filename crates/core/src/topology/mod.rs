//! Which ranks share a load domain, and which paths that leaves between those that do not.
//!
//! A *node* is a load domain: ranks that can reach each other's memory by loads and stores (or by
//! copy engine). Nodes are found by comparing the ranks' reports of where they run, never by
//! arithmetic on rank numbers: jobs interleave, nodes differ in size, and one machine may hold
//! several load domains.

mod nodes;
mod paths;

pub use nodes::NodeMap;
pub use paths::{Paths, Route};
