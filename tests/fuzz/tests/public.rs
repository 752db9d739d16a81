//! Targets that other crates offer to all: routing files, and headers of blocks that go over a
//! relay.

use sidelane_core::gate::Recorded;
use sidelane_core::plan::{Bins, Block, ExpertMap, RelayPlan, Segment, SumOrder};
use sidelane_core::topology::NodeMap;

#[test]
fn fuzzed_text_is_fully_routable_recording_or_refused() {
    let lines = [
        r#"{"type": "meta", "model": "small", "num_experts": 8, "top_k": 2}"#,
        r#"{"token":0,"topk_ids":[7, 0],"topk_weights":[0.75, 0.25]}"#,
        r#"{"token":1,"topk_ids":[-1, 3],"topk_weights":[0.0, 1e-3]}"#,
    ];
    let seeds = [lines.join("\n"), lines[1..].join("\n\n"), lines[0].to_owned()].map(String::into_bytes);
    fuzz::run("routing", &seeds, |bytes| {
        let Ok(recorded) = Recorded::parse(&String::from_utf8_lossy(bytes)) else { return };
        let (tokens, top_k) = (recorded.tokens(), recorded.top_k());
        assert!(tokens > 0 && recorded.require(recorded.experts(), Some(top_k)).is_ok());
        let routing = recorded.routing(u64::MAX, tokens as u32).unwrap();
        let experts = recorded.experts().map_or(i64::from(i32::MAX), i64::from);
        assert_eq!(routing.experts().len(), tokens * top_k as usize);
        assert!(routing.experts().iter().all(|&expert| (-1..experts).contains(&i64::from(expert))));
    });
}

/// Words of a header: rows, segments of four bins, and a row for each entry.
fn words(rows: u32, segments: [[u32; 3]; 4], index: &[u32]) -> Vec<u8> {
    let words = [&[rows], segments.as_flattened(), index].concat();
    bytemuck::cast_slice(&words).to_vec()
}

fn block(bytes: &[u8]) -> Option<Block> {
    let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    let (&rows, rest) = words.split_first()?;
    let (segments, index) = rest.split_at_checked(12)?;
    let segment = |words: &[u32; 3]| Segment { to_row: words[0], count: words[1], pad: words[2] };
    let segments = segments.as_chunks::<3>().0.iter().map(segment).collect();
    Some(Block { rows, landed: vec![0; 2], segments, index: index.to_vec(), ..Block::default() })
}

#[test]
fn header_of_a_block_is_unsound_or_every_entry_is_relayed_once() {
    let bins = Bins::experts(
        &ExpertMap::contiguous(4, 2).unwrap(),
        SumOrder::Expert,
        &NodeMap::from_labels(&[0, 0]),
    );
    let seeds = [
        words(3, [[10, 1, 0], [20, 2, 1], [0, 0, 0], [5, 2, 3]], &[0, 1, 2, 0, 2]),
        words(2, [[0, 2, 0], [2, 0, 7], [0, 0, 0], [0, 0, 0]], &[0, 1]),
        words(0, [[0; 3]; 4], &[]),
    ];
    fuzz::run("blocks", &seeds, |bytes| {
        let Some(block) = block(bytes) else { return };
        let entries = block.index.len() as u32;
        // As a relay asks, before it looks at a block.
        if block.rows > entries || !block.is_sound(entries, true) {
            return;
        }
        let pads: u64 = block.segments.iter().map(|segment| u64::from(segment.pad)).sum();
        for (spans, chunks) in [(false, 1), (false, 3), (true, 1), (true, 3)] {
            let mut plan = RelayPlan::default();
            (plan.blocks, plan.spans) = (vec![block.clone()], spans);
            plan.fill(&bins, &[0, 1], chunks, true);
            let runs = (1..=chunks).flat_map(|chunk| (0..2).map(move |member| (chunk, member)));
            let runs = runs.flat_map(|(chunk, member)| plan.runs_of(0, chunk, member));
            let runs: Vec<_> = runs.map(|run| plan.runs[run as usize]).collect();
            let relayed: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
            let padded: u64 = runs.iter().map(|run| u64::from(run.pad)).sum();
            assert_eq!((relayed, padded), (entries.into(), pads));
            assert!(runs.iter().flat_map(|&run| plan.rows_of(run)).all(|row| row < block.rows));
            assert_eq!(plan.partials.entries.len(), entries as usize);
        }
    });
}
