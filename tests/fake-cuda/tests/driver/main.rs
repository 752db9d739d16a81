//! Guarantees of README.md, each tested by a program that would fail without it. The programs load
//! the fake as host code does, each run in a process of its own.

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
mod products;
mod versions;
mod waits;
