//! The one look of all tables: a rule under the header, nothing else drawn, no blanks at line ends.

use comfy_table::{ContentArrangement, LineStyle, Row, Table, TableStyle};

/// Used where no terminal says how wide it is.
const WIDTH: u16 = 110;

/// An empty table with this header.
pub fn new(header: impl Into<Row>) -> Table {
    let rule = LineStyle::none().fill('─').junction('─');
    let mut table = Table::new();
    table.load_style(TableStyle::new().header_separator(rule));
    table.set_content_arrangement(ContentArrangement::Dynamic);
    if !table.is_tty() {
        table.set_width(WIDTH);
    }
    table.set_header(header);
    table
}
