//! From router scores to a [`Routing`]. Pure: no memory but its own, no I/O.

mod routing;

pub use routing::Routing;
