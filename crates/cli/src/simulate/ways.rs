//! The ways that are compared: those that the options leave open.

use serde::Serialize;
use sidelane::dtype::Wire;
use sidelane::plan::{Order, RowLayout};
use sidelane::topology::Route;

use super::args::SimulateArgs;

/// One way of rows out and home.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Way {
    pub layout: RowLayout,
    pub route: Route,
    pub order: Order,
    /// Of partial sums, where relays sum.
    pub wire: Option<Wire>,
    /// In how many parts blocks go, where relays hand on.
    pub chunks: Option<u8>,
}

impl Way {
    /// Whether relays sum.
    fn sums(route: Route, order: Order) -> bool {
        route == Route::Pxn && order != Order::Expert
    }

    /// As tables name it.
    pub fn name(&self) -> String {
        let mut name = format!("{}, {}", self.layout.name(), self.route.name());
        if self.order != Order::Expert {
            name += &format!(", {} sums", self.order.name());
        }
        if let Some(wire) = self.wire {
            name += &format!(" in {}", wire.name());
        }
        if let Some(chunks) = self.chunks.filter(|&chunks| chunks != DEFAULT_CHUNKS) {
            name += &format!(", {chunks} chunks");
        }
        name
    }

    /// All that are asked for, where there are so many nodes.
    pub fn all(args: &SimulateArgs, nodes: u32) -> Vec<Way> {
        let layouts = args.layout.map_or(RowLayout::ALL.to_vec(), |layout| vec![layout]);
        let mut routes = args.route.map_or(Route::ALL.to_vec(), |route| vec![route]);
        if nodes == 1 {
            // Nothing crosses: all routes are one.
            routes = vec![args.route.unwrap_or_default()];
        }
        let parts = if args.chunks.is_empty() { &[DEFAULT_CHUNKS][..] } else { &args.chunks };
        let mut ways = Vec::new();
        for (layout, &route) in
            layouts.iter().flat_map(|&layout| routes.iter().map(move |route| (layout, route)))
        {
            let relays = route == Route::Pxn && nodes > 1;
            let orders = match args.order {
                Some(order) => vec![order],
                None if relays => Order::ALL.to_vec(),
                None => vec![Order::Expert],
            };
            for order in orders {
                let sums = relays && Self::sums(route, order);
                let wires = match args.wire {
                    _ if !sums => vec![None],
                    Some(wire) => vec![Some(wire)],
                    None => Wire::ALL.map(Some).to_vec(),
                };
                let chunks = if relays { parts.iter().copied().map(Some).collect() } else { vec![None] };
                for (&wire, &chunks) in wires.iter().flat_map(|w| chunks.iter().map(move |c| (w, c))) {
                    ways.push(Way { layout, route, order, wire, chunks });
                }
            }
        }
        ways
    }
}

/// As everywhere in the library.
pub const DEFAULT_CHUNKS: u8 = 4;
