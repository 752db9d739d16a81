//! Operands of the slots of one program in one call.

use std::rc::Rc;

use sidelane_core::plan::{DispatchLayout, RelayPlan, RowBuffer};
use sidelane_core::schedule::{CallerTables, Calls, Operands, RelayTables, SumOperands};

/// Tables of one program, as an executor would see them, and where its signals go.
#[derive(Debug)]
pub(super) struct FilledOperands {
    pub rank: u32,
    pub ranks: u32,
    pub calls: Calls,
    /// Where signals of this call leave their tag: its number, unless a slip says otherwise.
    pub tag_parity: u64,
    /// Bytes of a partial sum; 0 where relays do not sum.
    pub partial_bytes: u64,
    /// The call that wrote what puts read from windows; `None`: their own.
    pub sources_of: Option<usize>,
    pub tables: Tables,
}

#[derive(Debug)]
pub(super) enum Tables {
    Caller {
        tables: CallerTables,
        layout: Rc<DispatchLayout>,
        row_bytes: u64,
    },
    /// With the chunk that each rank offers, and the rank whose pool holds it: its own.
    Relay {
        tables: RelayTables,
        forward: Rc<RelayPlan>,
        chunks: Vec<RowBuffer>,
        held_by: Vec<u32>,
    },
}

impl FilledOperands {
    pub fn operands(&self) -> Operands<'_> {
        let (call, last_return) = (self.calls.value(), self.calls.last_return());
        match &self.tables {
            Tables::Caller { tables, layout, row_bytes } => {
                let (terms, starts, choices) = layout.summands();
                let (fetched, places) = layout.fetches();
                Operands {
                    table: &tables.table,
                    spans: &tables.spans,
                    runs: &layout.runs,
                    rows: &layout.rows,
                    row_bytes: *row_bytes,
                    sum: SumOperands {
                        terms,
                        starts,
                        choices,
                        groups: &layout.groups,
                        group_starts: &layout.group_starts,
                        held_by: &layout.held_by,
                        bases: &tables.bases,
                        chunks: &layout.chunks,
                        fetched,
                        places,
                        ..SumOperands::default()
                    },
                    tags: &tables.tags,
                    call,
                    last_return,
                }
            }
            Tables::Relay { tables, forward, chunks, held_by } => Operands {
                table: &tables.table,
                spans: &tables.spans,
                runs: &forward.runs,
                rows: &forward.rows,
                sum: SumOperands {
                    terms: &forward.partials.terms,
                    starts: &forward.partials.starts,
                    choices: &forward.partials.entries,
                    held_by,
                    bases: &tables.bases,
                    chunks,
                    ..SumOperands::default()
                },
                call,
                last_return,
                ..Operands::default()
            },
        }
    }
}
