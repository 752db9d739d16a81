//! The one look of all tables: a rule under the header, nothing else drawn, no blanks at line ends.
//!
//! ```text
//!   wide enough          a terminal that is too narrow: figures        and words
//!
//!   name   a   b   c     name   a   b                                  name
//!   ────────────────     ────────────                                    a: its words, on as many
//!   one    1   2   3     one    1   2                                    lines as they need
//!   two    4   5   6     two    4   5
//!
//!                        name   c
//!                        ────────
//!                        one    3
//!                        two    6
//! ```

use std::collections::BTreeSet;
use std::io::stdout;

use comfy_table::{CellAlignment, ContentArrangement, LineStyle, Row, Table, TableStyle};
use rustix::termios::tcgetwinsize;

/// Columns in a pipe: a report that is pasted elsewhere keeps its lines. A table of words needs as
/// many: with fewer its columns have room for a word or two.
const WIDTH: usize = 80;

/// Columns of the terminal; where there is none as many as `COLUMNS` says, or those of a pipe.
pub fn width() -> usize {
    let terminal = tcgetwinsize(stdout()).map_or(0, |size| size.ws_col.into());
    let said = || std::env::var("COLUMNS").ok()?.parse().ok().filter(|&columns| columns > 0);
    Some(terminal).filter(|&columns| columns > 0).or_else(said).unwrap_or(WIDTH)
}

/// An empty table with this header.
pub fn new(header: impl Into<Row>) -> Table {
    let rule = LineStyle::none().fill('─').junction('─');
    let mut table = Table::new();
    table.load_style(TableStyle::new().header_separator(rule));
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table.set_width(width().try_into().unwrap_or(u16::MAX));
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

/// The lines of a table, which fit into the width.
pub fn lines(table: &Table) -> String {
    let text = table.trim_fmt();
    let of_figures = matches!(table.content_arrangement(), ContentArrangement::Disabled);
    match width() {
        width if of_figures && widest(&text) > width => panels(table, width),
        width if !of_figures && width < WIDTH => stacked(table),
        _ => text,
    }
}

fn widest(text: &str) -> usize {
    text.lines().map(|line| line.chars().count()).max().unwrap_or(0)
}

fn cells(row: &Row) -> Vec<String> {
    row.cell_iter().map(|cell| cell.content()).collect()
}

/// Columns that tell the rows apart: the first ones, as many as that takes.
fn keys(rows: &[Vec<String>], columns: usize) -> usize {
    let distinct = |keys: &usize| {
        let mut seen = BTreeSet::new();
        rows.iter().all(|row| seen.insert(&row[..(*keys).min(row.len())]))
    };
    (1..columns).find(distinct).unwrap_or(1)
}

/// Several tables below each other, of as many columns as fit. Each begins with the columns that
/// tell the rows apart, or with the first one where these leave no room.
fn panels(table: &Table, width: usize) -> String {
    let header = table.header().map(cells).unwrap_or_default();
    let rows: Vec<_> = table.row_iter().map(cells).collect();
    let panel = |keys: usize, columns: &[usize]| {
        let of = |cells: &[String]| {
            let places = (0..keys).chain(columns.iter().copied());
            places.map(|place| cells.get(place).cloned().unwrap_or_default()).collect::<Vec<_>>()
        };
        let mut table = figures(of(&header));
        table.add_rows(rows.iter().map(|row| of(row)));
        table.trim_fmt()
    };
    let keys = keys(&rows, header.len());
    let fits = |columns: &[usize]| widest(&panel(keys, columns)) <= width;
    let keys = if (keys..header.len()).all(|column| fits(&[column])) { keys } else { 1 };
    let mut parts: Vec<Vec<usize>> = Vec::new();
    for column in keys..header.len() {
        match parts.last_mut() {
            Some(part) if widest(&panel(keys, &[part.as_slice(), &[column]].concat())) <= width => {
                part.push(column)
            }
            _ => parts.push(vec![column]),
        }
    }
    parts.iter().map(|part| panel(keys, part)).collect::<Vec<_>>().join("\n\n")
}

/// Each row below the other: its name, which ends with the first column that has a header, and a
/// line for each further cell.
fn stacked(table: &Table) -> String {
    let header = table.header().map(cells).unwrap_or_default();
    let named = header.iter().position(|name| !name.is_empty()).map_or(1, |first| first + 1);
    let mut blocks = Vec::new();
    for row in table.row_iter().map(cells) {
        let name: Vec<_> = row.iter().take(named).filter(|cell| !cell.is_empty()).cloned().collect();
        let mut block = vec![name.join("  ")];
        for (cell, header) in row.iter().zip(&header).skip(named).filter(|(cell, _)| !cell.is_empty()) {
            let said = if header.is_empty() { cell.clone() } else { format!("{header}: {cell}") };
            block.extend(said.lines().map(|line| format!("  {line}")));
        }
        blocks.push(block.join("\n"));
    }
    blocks.join("\n")
}

/// Begins a line with a command to copy, which is not broken.
pub const AS_ROOT: &str = "As root: ";

/// Text whose lines are broken at blanks to fit into the width. What a line goes on with stands
/// below its value, if the line begins with a key. A sentence of several lines flows on.
pub fn fitted(text: &str) -> String {
    wrapped(text, width())
}

fn wrapped(text: &str, width: usize) -> String {
    let (mut wrapped, mut sentence) = (Vec::new(), String::new());
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        sentence += line;
        let goes_on =
            is_prose(line) && !line.ends_with('.') && lines.peek().is_some_and(|next| is_prose(next));
        if goes_on && sentence.chars().count() > width {
            sentence.push(' ');
        } else {
            wrapped.push(broken(&std::mem::take(&mut sentence), width));
        }
    }
    wrapped.join("\n")
}

/// Whether a line has no columns.
fn is_prose(line: &str) -> bool {
    !line.is_empty() && !line.starts_with(' ') && !line.contains("  ")
}

fn broken(line: &str, width: usize) -> String {
    if line.chars().count() <= width || line.starts_with(AS_ROOT) {
        return line.to_owned();
    }
    let blanks = line.chars().take_while(|&char| char == ' ').count();
    let key = !is_prose(line)
        && line.split(' ').next().is_some_and(|first| {
            first.len() < KEY
                && line[first.len()..].chars().take_while(|&char| char == ' ').count() == KEY - first.len()
        });
    let hang = " ".repeat(if blanks == 0 && key { KEY } else { blanks }.min(width / 2));
    let (mut lines, mut last, mut room) = (Vec::new(), String::new(), width);
    for word in line.split_inclusive(' ') {
        let mut word = word;
        if !last.is_empty() && last.chars().count() + word.trim_end().chars().count() > room {
            lines.push(std::mem::take(&mut last));
            room = width - hang.len();
        }
        // A path may be longer than any line.
        while last.is_empty() && word.trim_end().chars().count() > room {
            let at = word.char_indices().nth(room).map_or(word.len(), |(at, _)| at);
            lines.push(word[..at].to_owned());
            (word, room) = (&word[at..], width - hang.len());
        }
        last += word;
    }
    lines.push(last);
    lines.iter().map(|line| line.trim_end()).collect::<Vec<_>>().join(&format!("\n{hang}"))
}

/// A column: its header, and the cell of a row.
pub type Column<'c, R> = (&'c str, &'c dyn Fn(&R) -> String);

/// A table of figures with a line for each of these.
pub fn of<R>(rows: impl IntoIterator<Item = R>, columns: &[Column<'_, R>]) -> String {
    let mut table = figures(columns.iter().map(|column| column.0).collect::<Vec<_>>());
    for row in rows {
        table.add_row(columns.iter().map(|(_, cell)| cell(&row)));
    }
    self::lines(&table)
}

/// Columns of a key in front of its value.
const KEY: usize = 10;

pub fn head(lines: &[(&str, String)]) -> String {
    lines.iter().map(|(key, value)| format!("{key:<KEY$}{value}\n")).collect()
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
    fn wide_figures_become_panels_that_repeat_row_names() {
        let mut table = figures(["name", "first", "second", "third"]);
        table.add_row(["one", "1.00", "22.00", "333.00"]).add_row(["two", "4.00", "5.00", "6.00"]);
        let text = panels(&table, 24);
        assert!(widest(&text) <= 24 && widest(&table.trim_fmt()) > 24, "{text}");
        let tables: Vec<_> = text.split("\n\n").collect();
        let words = |table: &str, line: usize| {
            table.lines().nth(line).unwrap().split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(tables.len(), 2, "{text}");
        assert_eq!(words(tables[0], 2), ["one", "1.00", "22.00"]);
        assert_eq!(words(tables[1], 0), ["name", "third"]);
        assert_eq!(words(tables[1], 3), ["two", "6.00"]);
    }

    #[test]
    fn words_that_are_too_wide_stand_below_their_names() {
        let mut table = new(["", "what", "found", "means"]);
        table.add_row(["ok", "memory", "2 GiB", "Enough.\n→ Nothing to do."]);
        let expected = "ok  memory\n  found: 2 GiB\n  means: Enough.\n  → Nothing to do.";
        assert_eq!(stacked(&table), expected);
    }

    #[test]
    fn long_lines_are_broken_at_blanks_and_go_on_below_their_value() {
        let line = "ranks     4 on 2 nodes (2 + 2), 1 machine";
        assert_eq!(broken(line, 31), "ranks     4 on 2 nodes (2 + 2),\n          1 machine");
        assert_eq!(broken("  two words", 9), "  two\n  words");
        assert_eq!(broken("/a/path/that/is/long", 8), "/a/path/\nthat/is/\nlong");
        assert_eq!(broken("short", 8), "short");
        let command = "As root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled";
        assert_eq!(broken(command, 40), command);
        assert_eq!(broken("Predicted by a model", 12), "Predicted by\na model");
    }

    #[test]
    fn sentences_flow_on_over_their_lines_and_columns_do_not() {
        let text = "a sentence of two\nlines. The end.\nkey       value\nkey       value";
        assert_eq!(
            wrapped(text, 12),
            "a sentence\nof two\nlines. The\nend.\nkey\n      value\nkey\n      value"
        );
        assert_eq!(
            wrapped(text, 15),
            "a sentence of\ntwo lines. The\nend.\nkey       value\nkey       value"
        );
        assert_eq!(wrapped(text, 17), text);
    }

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
