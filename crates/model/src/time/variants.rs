//! Ways of a dispatch and its combine on so many nodes, and what they take.

use serde::Serialize;
use sidelane_core::dtype::PartialDtype;
use sidelane_core::plan::{RowLayout, SumOrder};
use sidelane_core::topology::Route;

use super::Timing;

/// One way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Variant {
    /// Order of received rows.
    pub layout: RowLayout,
    /// Route of rows to other nodes.
    pub route: Route,
    /// Order of sums.
    pub sum_order: SumOrder,
    /// Of partial sums, where relays sum, or ranks of devices.
    pub partial_dtype: Option<PartialDtype>,
    /// Number of parts of blocks, where relays copy and that is said.
    pub relay_parts: Option<u8>,
}

/// Settings that all variants share. `None` compares all values.
#[derive(Clone, Debug, Default)]
pub struct Wishes {
    /// Order of received rows.
    pub layout: Option<RowLayout>,
    /// Route of rows to other nodes.
    pub route: Option<Route>,
    /// Order of sums: by expert where no relay sums.
    pub sum_order: Option<SumOrder>,
    /// Type in which partial sums cross.
    pub partial_dtype: Option<PartialDtype>,
    /// Numbers of parts of a block: if there is none, as many as the library chooses.
    pub relay_parts: Vec<u8>,
}

impl Variant {
    /// In words, the usual left out.
    pub fn name(&self) -> String {
        let mut name = format!("{}, {}", self.layout.name(), self.route.name());
        if self.sum_order != SumOrder::Expert {
            name += &format!(", {} sums", self.sum_order.name());
        }
        if let Some(wire) = self.partial_dtype {
            name += &format!(" in {}", wire.name());
        }
        if let Some(parts) = self.relay_parts {
            name += &format!(", {parts} parts");
        }
        name
    }

    /// The same without settings of sums, which are the combine's alone.
    pub fn of_dispatch(self) -> Self {
        Variant { sum_order: SumOrder::Expert, partial_dtype: None, ..self }
    }

    /// All ways on so many nodes.
    pub fn all(wishes: &Wishes, nodes: u32) -> Vec<Variant> {
        let layouts = wishes.layout.map_or(RowLayout::ALL.to_vec(), |layout| vec![layout]);
        let routes = match wishes.route {
            Some(route) => vec![route],
            // Nothing crosses: all routes are one.
            None if nodes == 1 => vec![Route::default()],
            None => Route::ALL.to_vec(),
        };
        let mut ways = Vec::new();
        for (layout, route) in
            layouts.iter().flat_map(|layout| routes.iter().map(move |&route| (*layout, route)))
        {
            let relays = route == Route::Pxn && nodes > 1;
            let parts = match &wishes.relay_parts[..] {
                said @ [_, ..] if relays => said.iter().copied().map(Some).collect(),
                _ => vec![None],
            };
            let orders = match wishes.sum_order {
                Some(order) => vec![order],
                None if relays => SumOrder::ALL.to_vec(),
                None => vec![SumOrder::Expert],
            };
            for sum_order in orders {
                // Relays sum, or ranks do before rows return.
                let sums = relays || sum_order == SumOrder::Rank && !layout.is_per_rank();
                let wires = match wishes.partial_dtype {
                    _ if !sums || sum_order == SumOrder::Expert => vec![None],
                    Some(wire) => vec![Some(wire)],
                    None => PartialDtype::ALL.map(Some).to_vec(),
                };
                for (partial_dtype, &relay_parts) in
                    wires.into_iter().flat_map(|wire| parts.iter().map(move |parts| (wire, parts)))
                {
                    ways.push(Variant { layout, route, sum_order, partial_dtype, relay_parts });
                }
            }
        }
        ways
    }
}

/// A way, and the times of its calls.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timed {
    /// In words.
    pub name: String,
    /// `None`: fixed slots.
    pub variant: Option<Variant>,
    /// From tokens to landed rows.
    pub dispatch: Timing,
    /// From outputs of experts to sums.
    pub combine: Timing,
}
