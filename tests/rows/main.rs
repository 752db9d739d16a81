//! The loops that copy and sum rows: every instruction set against scalar references.

mod bits;
mod common;
mod moves;
mod partials;
mod records;
