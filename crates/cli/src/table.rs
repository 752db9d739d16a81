//! The one look of all tables: a rule under the header, nothing else drawn, no blanks at line ends.

use std::io::stdout;

use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Row, Table, TableStyle};
use rustix::termios::tcgetwinsize;

const WIDTH: u16 = 110;

/// An empty table with this header.
pub fn new(header: impl Into<Row>) -> Table {
    let rule = LineStyle::none().fill('─').junction('─');
    let mut table = Table::new();
    table.load_style(TableStyle::new().header_separator(rule));
    table.set_content_arrangement(ContentArrangement::Dynamic);
    let terminal = tcgetwinsize(stdout()).map_or(0, |size| size.ws_col);
    table.set_width(if terminal > 0 { terminal } else { WIDTH });
    table.set_header(header);
    table
}

/// An empty table of figures, named by its first column.
pub fn figures(header: impl Into<Row>) -> Table {
    let mut table = new(header);
    // A figure that is broken over two lines cannot be read.
    table.set_content_arrangement(ContentArrangement::Disabled);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// A column: its header, and the cell of a row.
pub type Column<'c, R> = (&'c str, &'c dyn Fn(&R) -> String);

/// A table of figures with a line for each of these.
pub fn of<R>(rows: impl IntoIterator<Item = R>, columns: &[Column<'_, R>]) -> String {
    let mut table = figures(columns.iter().map(|column| column.0).collect::<Vec<_>>());
    for row in rows {
        table.add_row(columns.iter().map(|(_, cell)| cell(&row)));
    }
    table.trim_fmt()
}

pub fn head(lines: &[(&str, String)]) -> String {
    lines.iter().map(|(key, value)| format!("{key:<10}{value}\n")).collect()
}

/// Why a lane is that one, in brackets.
pub fn because(reason: &Option<String>) -> String {
    reason.as_ref().map_or(String::new(), |reason| format!(" ({reason})"))
}

/// Three digits of a time.
pub fn time(us: f64) -> String {
    let (value, unit) = if us < 1e3 {
        (us, "us")
    } else if us < 1e6 {
        (us / 1e3, "ms")
    } else {
        (us / 1e6, "s")
    };
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {unit}")
}

/// The same of nanoseconds.
pub fn time_ns(ns: u64) -> String {
    time(ns as f64 / 1e3)
}

/// Powers of 1000, as in GB/s.
pub fn volume(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes < 1e6 => format!("{:.1} kB", bytes / 1e3),
        bytes if bytes < 1e9 => format!("{:.1} MB", bytes / 1e6),
        bytes => format!("{:.1} GB", bytes / 1e9),
    }
}

/// A number of bytes, in powers of 1024: `23.5 GiB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let (mut value, mut unit) = (count as f64 / 1024.0, 0);
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    let number = format!("{value:.1}");
    format!("{} {}", number.strip_suffix(".0").unwrap_or(&number), UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_digits() {
        let cases = [
            (0.24, "0.24 us"),
            (57.14, "57.1 us"),
            (999.9, "1000 us"),
            (6120.0, "6.12 ms"),
            (2.5e6, "2.50 s"),
        ];
        for (us, text) in cases {
            assert_eq!(time(us), text);
        }
    }

    #[test]
    fn sizes_are_rounded_to_a_tenth_of_their_unit() {
        let cases = [
            (0, "0 KiB"),
            (8 << 20, "8 MiB"),
            (25_276_502_016, "23.5 GiB"),
            ((1 << 30) - 1, "1 GiB"),
            (64 << 10, "64 KiB"),
        ];
        for (count, text) in cases {
            assert_eq!(bytes(count), text);
        }
    }
}
