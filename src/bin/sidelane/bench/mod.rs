//! `sidelane bench`: dispatch and combine between real processes, checked bit by bit and held against a floor.
//!
//! A figure without its conditions is worth nothing, so everything that decides it is resolved once
//! ([`config::Config`]), handed to every rank, and printed with the result ([`report::Report`]). The floor is
//! measured round by round beside the real thing, so that both see the same machine ([`stats`]).

mod args;
mod config;
mod progress;
mod report;
mod source;
mod stats;
mod table;
