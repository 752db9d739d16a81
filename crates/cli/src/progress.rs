//! A bar for whoever watches; nothing in logs and pipes.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over so much work, drawn by rank 0 on standard error if that is a terminal.
pub fn bar(rank: u32, work: u64) -> ProgressBar {
    if rank != 0 || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}, {eta} left")
        .expect("the template is constant and valid");
    ProgressBar::new(work).with_style(style)
}
