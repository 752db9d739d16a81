//! What crosses between nodes: rows of the dispatch, what they would be without sharing, and the combine of every order.

use std::fmt::Write;

use comfy_table::CellAlignment;
use serde::{Deserialize, Serialize};
use sidelane::dtype::Wire;
use sidelane::plan::{Hops, Order, RowLayout, Traffic};
use sidelane::topology::Route;

use super::config::Config;
use crate::table::{self, volume};

/// Rows of all ranks in one dispatch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Crossing {
    /// What crosses, zeros included.
    pub rows: u64,
    /// What would cross with a row for each (token, expert), or for each (token, rank).
    pub expert_rows: u64,
    pub rank_rows: u64,
    /// Rows that relays hand on, zeros included, and the copies in which they do.
    pub relay_rows: u64,
    pub relay_copies: u64,
    /// How many times less crosses; none if nothing does.
    pub dedup: Option<Dedup>,
    /// What comes home in a combine, for every order and wire that these rows can have.
    pub combine: Vec<Home>,
}

/// By how much sharing saves.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dedup {
    /// Against a row for each (token, expert).
    pub expert: f64,
    /// Against a row for each (token, rank).
    pub rank: f64,
}

/// What one kind of combine moves over rails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home {
    pub order: Order,
    /// Type of partial sums; none where there are none.
    pub wire: Option<Wire>,
    pub bytes: u64,
}

impl Crossing {
    /// What one rank says to the others; `choices` of its tokens are on other nodes.
    pub fn words(traffic: &Traffic, choices: u64) -> [u64; 7] {
        let Traffic { put, wanted, remote_ranks, remote_nodes, handed_on, copies, .. } = *traffic;
        [put.rail, wanted.rail, remote_ranks, remote_nodes, choices, handed_on, copies]
    }

    /// From the sums of what all said.
    pub fn new(config: &Config, words: [u64; 7]) -> Self {
        let [rows, wanted, rank_rows, remote_nodes, expert_rows, relay_rows, relay_copies] = words;
        let all = Traffic {
            put: Hops { rail: rows, ..Hops::default() },
            wanted: Hops { rail: wanted, ..Hops::default() },
            remote_ranks: rank_rows,
            remote_nodes,
            home_row_bytes: config.row_bytes(),
            route: config.route,
            ..Traffic::default()
        };
        let saving = |without: u64| without as f64 / rows as f64;
        let dedup = Dedup { expert: saving(expert_rows), rank: saving(rank_rows) };
        let wires = Wire::ALL.into_iter().filter(|wire| wire.carries(config.dtype.element()));
        let home = |order, wire: Option<Wire>| {
            let partial_bytes = u64::from(config.hidden) * wire.map_or(0, |wire| wire.size() as u64);
            Home { order, wire, bytes: all.home_bytes(order, partial_bytes) }
        };
        let combine = Order::ALL.into_iter().flat_map(|order| match order {
            Order::Expert => vec![home(order, None)],
            Order::Rank | Order::Node => wires.clone().map(|wire| home(order, Some(wire))).collect(),
        });
        Crossing {
            rows,
            expert_rows,
            rank_rows,
            relay_rows,
            relay_copies,
            dedup: (rows > 0).then_some(dedup),
            combine: combine.collect(),
        }
    }

    /// What the combine of these conditions moves.
    pub fn combine_bytes(&self, config: &Config) -> u64 {
        let measured = self.combine.iter().find(|home| home.is_of(config));
        measured.map_or(0, |home| home.bytes)
    }

    /// The rows and what they save, and the combine of every order; nothing if nothing crosses.
    pub fn text(&self, config: &Config) -> Option<String> {
        let Crossing { rows, expert_rows, rank_rows, .. } = self;
        let Dedup { expert, rank } = self.dedup?;
        let mut text = format!(
            "between nodes: {rows} rows, for {expert_rows} (token, expert) and {rank_rows} (token, rank)\n"
        );
        let _ = writeln!(
            text,
            "dedup {expert:.1}x against a row per (token, expert), {rank:.1}x against one per (token, rank)"
        );
        if config.route == Route::Pxn {
            let (relayed, copies) = (self.relay_rows, self.relay_copies);
            let how = if config.spans { "spans" } else { "row by row" };
            let _ = writeln!(text, "relays hand on {relayed} rows in {copies} copies ({how})");
        }
        if config.route == Route::Direct {
            let of = match config.layout {
                RowLayout::ExpertMajor => "expert",
                RowLayout::RankMajor => "rank",
            };
            let _ = write!(text, "combine brings a row home for each (token, {of}), in every order");
            return Some(text);
        }
        let mut table = table::new(["combine", "wire", "rail", ""]);
        text.push('\n');
        for home in &self.combine {
            table.add_row([
                home.order.name(),
                home.wire.map_or("-", Wire::name),
                &volume(home.bytes),
                if home.is_of(config) { "measured" } else { "" },
            ]);
        }
        for column in table.column_iter_mut().skip(2).take(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        Some(text + &table.trim_fmt())
    }
}

impl Home {
    fn is_of(&self, config: &Config) -> bool {
        (self.order, self.wire) == (config.order, config.partials())
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::sample;
    use super::super::row_type::RowType;
    use super::*;

    fn config(route: Route, order: Order, dtype: RowType) -> Config {
        Config { route, order, dtype, hidden: 1000, ..sample().config.config }
    }

    #[test]
    fn every_order_and_wire_has_its_bytes() {
        let crossing =
            Crossing::new(&config(Route::Pxn, Order::Node, RowType::Bf16), [20, 80, 50, 20, 80, 90, 90]);
        let bytes: Vec<u64> = crossing.combine.iter().map(|home| home.bytes / 1000).collect();
        assert_eq!(bytes, [80 * 2, 50 * 4, 50 * 2, 20 * 4, 20 * 2]);
        assert_eq!(crossing.dedup, Some(Dedup { expert: 4.0, rank: 2.5 }));
    }

    #[test]
    fn rows_of_other_types_have_partials_in_f32_alone() {
        let crossing =
            Crossing::new(&config(Route::Pxn, Order::Node, RowType::F16), [20, 80, 50, 20, 80, 90, 90]);
        let wires: Vec<_> = crossing.combine.iter().map(|home| home.wire).collect();
        assert_eq!(wires, [None, Some(Wire::F32), Some(Wire::F32)]);
    }

    #[test]
    fn the_text_marks_what_was_measured() {
        let config = config(Route::Pxn, Order::Node, RowType::Bf16);
        let text = Crossing::new(&config, [20, 80, 50, 20, 80, 90, 90]).text(&config).unwrap();
        assert!(text.contains("20 rows, for 80 (token, expert) and 50 (token, rank)"), "{text}");
        assert!(text.contains("dedup 4.0x against a row per (token, expert), 2.5x against one"), "{text}");
        assert!(text.contains("relays hand on 90 rows in 90 copies (row by row)"), "{text}");
        let marked: Vec<&str> = text.lines().filter(|line| line.ends_with("measured")).collect();
        assert_eq!(marked.len(), 1, "{text}");
        assert!(["node", "bf16", "40.0 kB"].iter().all(|word| marked[0].contains(word)), "{text}");
    }

    #[test]
    fn rows_that_go_straight_save_nothing_and_come_home_as_they_are() {
        let config = config(Route::Direct, Order::Node, RowType::Bf16);
        let crossing = Crossing::new(&config, [80, 80, 50, 20, 80, 0, 0]);
        assert!(crossing.combine.iter().all(|home| home.bytes == 80 * 2000));
        let text = crossing.text(&config).unwrap();
        assert!(text.contains("dedup 1.0x against a row per (token, expert), 0.6x against one"), "{text}");
        assert!(text.ends_with("a row home for each (token, expert), in every order"), "{text}");
    }

    #[test]
    fn where_nothing_crosses_nothing_is_said() {
        let config = config(Route::Direct, Order::Expert, RowType::Bf16);
        let crossing = Crossing::new(&config, [0; 7]);
        assert_eq!((crossing.dedup, crossing.text(&config)), (None, None));
    }
}
