//! Chunks of a real layer: dispatch of one concurrent with the experts of another.

use half::bf16;
use sidelane::ep::{ExpertRows, Handle};
use sidelane::gate::Routing;
use sidelane::overlap::{Graph, Handoff, HostExecutor, NodeLabel, Run, StreamId};
use sidelane::{Dtype, Error, ExpertParallel, Group};

use crate::support::{Tokens, on_ranks, small, tokens};

const HIDDEN: usize = 16;
const TOP_K: u32 = 2;
const EXPERTS: u32 = 8;
const CHUNKS: usize = 4;

fn layer(group: &Group) -> ExpertParallel {
    let builder = ExpertParallel::builder(group).experts(EXPERTS).top_k(TOP_K).hidden(HIDDEN);
    builder.dtype(Dtype::Bf16).max_tokens(64).build().unwrap()
}

/// An expert that is not the same for any two: `x * (id + 2) / 3`, rounded once.
fn experts(rows: &ExpertRows, handle: &Handle, first: u32) -> Result<Vec<bf16>, Error> {
    let mut rows = rows.rows::<bf16>()?.chunks_exact(HIDDEN);
    let mut out = Vec::new();
    for (expert, &count) in (first..).zip(handle.tokens_per_expert()) {
        for row in rows.by_ref().take(count as usize) {
            out.extend(row.iter().map(|x| bf16::from_f32(x.to_f32() * (expert + 2) as f32 / 3.0)));
        }
    }
    Ok(out)
}

fn whole(ep: &mut ExpertParallel, mine: &Tokens<bf16>, first: u32) -> Vec<bf16> {
    let routing = Routing::new(TOP_K, mine.ids.as_slice(), mine.weights.as_slice()).unwrap();
    let (rows, handle) = ep.dispatch(&mine.x, &routing).unwrap();
    let y = experts(&rows, &handle, first).unwrap();
    ep.combine(y.as_slice(), &handle).unwrap()
}

/// By slices of tokens: two dispatches ahead of the experts, as slots in the pool allow.
fn chunked(
    ep: &mut ExpertParallel,
    mine: &Tokens<bf16>,
    first: u32,
    executor: &HostExecutor<'_>,
) -> Vec<bf16> {
    let count = mine.x.len() / HIDDEN;
    let bound = |chunk: usize| count * chunk / CHUNKS;
    let slice = |chunk: usize| {
        let (from, to) = (bound(chunk), bound(chunk + 1));
        let choices = from * TOP_K as usize..to * TOP_K as usize;
        let routing = Routing::new(TOP_K, &mine.ids[choices.clone()], &mine.weights[choices]).unwrap();
        (&mine.x[from * HIDDEN..to * HIDDEN], routing)
    };
    let ep = Handoff::new(ep);
    let landed: Vec<Handoff<(ExpertRows, Handle)>> = (0..CHUNKS).map(|_| Handoff::empty()).collect();
    let done: Vec<Handoff<(Vec<bf16>, Handle)>> = (0..CHUNKS).map(|_| Handoff::empty()).collect();
    let mut returned = vec![bf16::NAN; mine.x.len()];
    let mut outs: Vec<&mut [bf16]> = Vec::new();
    let mut rest = returned.as_mut_slice();
    for chunk in 0..CHUNKS {
        let (out, behind) = rest.split_at_mut((bound(chunk + 1) - bound(chunk)) * HIDDEN);
        outs.push(out);
        rest = behind;
    }

    let (ep, landed, done) = (&ep, &landed, &done);
    let mut graph = Graph::new();
    let work = |name, chunk: usize| NodeLabel::new(name, chunk as u32);
    let dispatch = |chunk: usize| {
        move |_: &Run| {
            let (x, routing) = slice(chunk);
            ep.with(|ep| landed[chunk].put(ep.dispatch(x, &routing)?))
        }
    };
    let transfer = StreamId::Transfer(0);
    let mut arrived = graph.add(transfer, work("dispatch", 0), &[], dispatch(0));
    for (chunk, out) in outs.into_iter().enumerate() {
        let next = chunk + 1;
        let next = (next < CHUNKS).then(|| graph.add(transfer, work("dispatch", next), &[], dispatch(next)));
        let computed = graph.add(StreamId::Compute(0), work("experts", chunk), &[arrived], move |_| {
            let (rows, handle) = landed[chunk].take()?;
            done[chunk].put((experts(&rows, &handle, first)?, handle))
        });
        graph.add(transfer, work("combine", chunk), &[computed], move |_| {
            let (y, handle) = done[chunk].take()?;
            ep.with(|ep| ep.combine_into(y.as_slice(), &handle, out))
        });
        arrived = next.unwrap_or(arrived);
    }
    graph.run(executor).unwrap();
    returned
}

#[test]
fn overlapped_token_chunks_have_bits_of_whole() {
    on_ranks(&[0, 0, 0, 0], &small(), |world| {
        let group = world.all().unwrap();
        let (mut one, mut two) = (layer(&group), layer(&group));
        let first = world.rank() * EXPERTS / world.size();
        for round in 0..6 {
            let count = (world.rank() * 7 + round * 5) % 23;
            let mine = tokens(u64::from(round * 10 + world.rank()), count, HIDDEN, TOP_K, EXPERTS);
            let expected = whole(&mut one, &mine, first);
            for overlap in [true, false] {
                let executor = HostExecutor::new().overlap(overlap);
                assert_eq!(chunked(&mut two, &mine, first, &executor), expected, "rank {}", world.rank());
            }
        }
    });
}
