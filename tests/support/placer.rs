//! The placement of one rank, with everything that belongs to it.

use sidelane::gate::Routing;
use sidelane::plan::{
    Bins, Counts, DispatchLayout, ExpertMap, InterNodeRows, PlanContext, PulledSums, ReceiveMode,
    ReceiveSizes, RowLayout, RowMetadata, RowSizes, SortedRouting, SumOrder,
};
use sidelane::topology::{NodeMap, Paths, Route};

/// Rank 0 of one node, whose other ranks have the same routing.
pub struct Placer {
    map: ExpertMap,
    nodes: NodeMap,
    bins: Bins,
    metadata: RowMetadata,
    sorted: SortedRouting,
    crossing: InterNodeRows,
    counts: Counts,
    sizes: ReceiveSizes,
    layout: DispatchLayout,
}

impl Placer {
    pub fn new(experts: u32, ranks: u32, layout: RowLayout) -> Placer {
        let map = ExpertMap::contiguous(experts, ranks).unwrap();
        let nodes = NodeMap::from_labels(&vec![0; ranks as usize]);
        let bins = Bins::of_layout(layout, &map, SumOrder::Expert, &nodes);
        let metadata = RowMetadata::of(layout, ReceiveMode::Exact, false);
        let (sorted, crossing, counts) =
            (SortedRouting::default(), InterNodeRows::default(), Counts::default());
        let (sizes, layout) = (ReceiveSizes::default(), DispatchLayout::default());
        Placer { map, nodes, bins, metadata, sorted, crossing, counts, sizes, layout }
    }

    /// Sorts and lays out; the number of rows that go out.
    pub fn place(&mut self, routing: &Routing<'_>) -> usize {
        let Placer { map, nodes, bins, metadata, sorted, crossing, counts, sizes, layout } = self;
        let words = metadata.words(routing.top_k());
        let sizing = RowSizes {
            row_bytes: 4096,
            return_bytes: 4096,
            words_out: words,
            return_words: words,
            partial_bytes: None,
            rank_sums: false,
            pulled_bytes: PulledSums::CHUNK_BYTES,
        };
        let paths = Paths::new(nodes, Route::Direct, 0);
        let frame = PlanContext { bins, paths, align: 1, chunks: 4, sizing, mode: ReceiveMode::Exact };
        sorted.fill(map, bins, *metadata, 0, routing).unwrap();
        crossing.fill(bins, &paths, sorted);
        counts.clear(bins.count());
        (0..map.ranks()).for_each(|source| counts.add(0, source, &sorted.counts));
        sizes.fill(bins, 1, &counts.total, None);
        layout.fill(&frame, (sorted, crossing), routing.top_k(), counts, sizes);
        sorted.entries()
    }
}
