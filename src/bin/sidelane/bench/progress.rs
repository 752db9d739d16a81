//! A bar for whoever watches; nothing in logs and pipes.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over all rounds on standard error, if that is a terminal.
pub fn bar(rounds: u32) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}, {eta} left")
        .expect("the template is constant and valid");
    ProgressBar::new(rounds.into()).with_style(style)
}
