//! Load per expert as bars in the terminal: a column for each expert, a band of columns for as many as fit.
//!
//! ```text
//!    2.1x |  █
//!         | ▃█   ▂
//!    1.0x |▇██▅▁▆█
//!       0 +-------
//!          0
//! ```

use std::fmt::Write;

/// Columns of a band.
const BAND: usize = 64;
/// Lines of a band.
const LINES: usize = 6;
/// From nothing to a full character.
const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The bars of these loads, by their mean.
pub fn draw(choices: &[u64]) -> String {
    let most = choices.iter().copied().max().unwrap_or(0);
    let mean = choices.iter().sum::<u64>() as f64 / choices.len() as f64;
    let mut text = String::new();
    for (band, loads) in choices.chunks(BAND).enumerate() {
        for line in (0..LINES).rev() {
            let label = if most == 0 { 0.0 } else { (line + 1) as f64 / LINES as f64 * most as f64 / mean };
            let bars: String = loads.iter().map(|&load| piece(load, most, line)).collect();
            let _ = writeln!(text, "{label:>6.2}x │{}", bars.trim_end());
        }
        let _ = writeln!(text, "      0 └{}", "─".repeat(loads.len()));
        let _ = writeln!(text, "         {}", ruler(band * BAND, loads.len()));
    }
    text
}

/// What a column shows in a line, counted from below. The least load that is not zero is seen.
fn piece(load: u64, most: u64, line: usize) -> char {
    let eighths = (load * (LINES * 8) as u64).div_ceil(most.max(1)) as usize;
    EIGHTHS[eighths.saturating_sub(line * 8).min(8)]
}

/// Every eighth expert's number under its column.
fn ruler(first: usize, columns: usize) -> String {
    let marks = (first..first + columns).step_by(8).map(|expert| format!("{expert:<8}"));
    marks.collect::<String>().trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_expert_fills_its_column_and_the_least_is_seen() {
        let text = draw(&[6000, 3000, 1, 0]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "  2.67x │█");
        assert_eq!(lines[LINES - 1], "  0.44x │██▁");
        assert_eq!(lines[LINES / 2], "  1.33x │██");
        assert_eq!(&lines[LINES..], ["      0 └────", "         0"]);
    }

    #[test]
    fn more_experts_than_columns_get_another_band() {
        let text = draw(&[1; 72]);
        assert_eq!(text.lines().count(), 2 * (LINES + 2));
        assert!(text.lines().last().unwrap().ends_with(" 64"), "{text}");
    }

    #[test]
    fn no_choices_are_no_bars() {
        assert!(!draw(&[0; 5]).contains('█'));
    }
}
