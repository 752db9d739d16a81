//! What README.md promises, each promise by a program that would fail were it broken. They load the stand-in as host code
//! does, each run in a process of its own.

#![allow(clippy::macro_metavars_in_unsafe, reason = "a call with its arguments is what a test vouches for")]

mod common;

mod batches;
mod binding;
mod capture;
mod copies;
mod errors;
mod kernels;
mod memory;
mod models;
mod processes;
mod versions;
mod waits;
