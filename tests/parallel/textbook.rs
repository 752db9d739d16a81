//! Numbers of the usual texts on these strategies, computed by this code or by a model of theirs.

use std::collections::HashSet;

use half::bf16;
use sidelane::World;
use sidelane::collective::{AllReduceAlgorithm, Communicator};
use sidelane::dtype::PartialDtype;
use sidelane::overlap::TokenChunks;
use sidelane_parallel::Mesh;
use sidelane_parallel::context::{AttentionShape, UlyssesAttention, ring_order};
use sidelane_parallel::data::Layout;
use sidelane_parallel::tensor::overlap::{LinearPass, Plan, Work};
use sidelane_parallel::tensor::{
    Activations, ColumnParallelLinear, LinearShape, RowParallelLinear, TiedWeights,
    VocabularyParallelEmbedding, cut_rows,
};

use crate::pipelines::options;
use crate::ranks::on_ranks;

/// A communicator whose calls take one round, and sums as large tensors have them.
fn one_round(world: &World) -> Communicator {
    Communicator::builder(&world.all().unwrap()).chunk(32 << 10).one_shot_bytes(0).build().unwrap()
}

#[test]
fn embedding_of_64000_by_5120_takes_1250_mib_and_tied_ends_send_as_much() {
    let layout = Layout::buckets(&[64_000 * 5_120], usize::MAX).unwrap();
    assert_eq!(layout.elements() * size_of::<f32>(), 1250 << 20);
    // A sum over both ends sends each the bytes of the weights, here of 64 x 32.
    let sent = on_ranks(&[0, 1], &options(), |world| {
        let mut ends = one_round(&world);
        let tied = TiedWeights::new(&mut ends, &[0.0; 64 * 32]).unwrap();
        ends.take_counts();
        tied.sum(&mut ends, &mut [1.0; 64 * 32]).unwrap();
        ends.take_counts().inter_node_bytes
    });
    assert_eq!(sent, [64 * 32 * 4; 2]);
}

#[test]
fn ring_of_3_ranks_sums_6_elements_and_sends_4_thirds_of_the_bytes_in_4_steps() {
    for ranks in [3usize, 4, 6] {
        let nodes: Vec<u32> = (0..ranks as u32).collect();
        let counts = on_ranks(&nodes, &options(), |world| {
            let all = world.all().unwrap();
            let builder = Communicator::builder(&all).chunk(32 << 10).one_shot_bytes(0);
            let mut ring = builder.algorithm(AllReduceAlgorithm::Ring(PartialDtype::F32)).build().unwrap();
            let own = world.rank() as f32;
            let mut six = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0].map(|of| of + 10.0 * own);
            ring.all_reduce(&mut six).unwrap();
            let others = (0..ranks).map(|rank| 10.0 * rank as f32).sum::<f32>();
            assert_eq!(six, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0].map(|of| of * ranks as f32 + others));

            // Shares of a cache line at least, so that all are full.
            let mut data = vec![1.0f32; 16 * ranks];
            ring.take_counts();
            ring.all_reduce(&mut data).unwrap();
            ring.take_counts()
        });
        let (ranks, share) = (ranks as u64, 4 * 16u64);
        for counts in counts {
            assert_eq!(counts.inter_node_bytes * ranks, 2 * (ranks - 1) * (ranks * share));
            // A signal for each share that it sends, and to each other rank that it is here.
            assert_eq!(counts.signals, 2 * (ranks - 1) + (ranks - 1));
        }
    }
}

#[test]
fn rows_that_are_scattered_add_up_to_5_14_8_4_with_means_of_1_667_3_5_4_4() {
    let ids = [0, 1, 2, 0, 1, 3, 1, 0, 2, 1];
    let values = [1.0, 2.0, 3.0, 1.0, 3.0, 4.0, 4.0, 3.0, 5.0, 5.0];
    let parts = on_ranks(&[0, 1], &options(), |world| {
        let mut group = one_round(&world);
        let rows = vec![0.0; 2];
        let embedding =
            VocabularyParallelEmbedding::new(&mut group, 4, 1, Activations::Replicated, rows).unwrap();
        let sums = embedding.backward(&mut group, &ids, &values).unwrap();
        let counts = embedding.backward(&mut group, &ids, &[1.0; 10]).unwrap();
        let means: Vec<f32> = sums.iter().zip(counts).map(|(sum, count)| sum / count).collect();
        (sums, means)
    });
    let (sums, means): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    assert_eq!(sums.concat(), [5.0, 14.0, 8.0, 4.0]);
    let means: Vec<String> = means.concat().iter().map(|mean| format!("{mean:.3}")).collect();
    assert_eq!(means, ["1.667", "3.500", "4.000", "4.000"]);
}

/// TransformerEngine's `split_overlap_rs` on a rank: the rank that each step sends to, and the one
/// that it receives from. Its own product comes last.
fn point_to_point(rank: u32, ranks: u32) -> Vec<[u32; 2]> {
    (1..ranks).map(|step| [(rank + step) % ranks, (rank + ranks - step) % ranks]).collect()
}

/// TransformerEngine's aggregate mode of `split_overlap_ag`: pairs of ranks exchange their tokens,
/// and then both of a pair travel together.
fn aggregated(rank: u32, ranks: u32) -> Option<Vec<[u32; 2]>> {
    let pairs = ranks.is_multiple_of(2).then_some(ranks / 2)?;
    Some((0..pairs).map(|step| (rank / 2 + pairs - step) % pairs).map(|of| [2 * of, 2 * of + 1]).collect())
}

#[test]
fn orders_of_transformer_engine_are_those_of_the_ring_and_ours_move_the_same_chunks() {
    // Its ring of tokens goes as our ring of keys and values does.
    let order = |rank| ring_order((rank, 4)).collect::<Vec<_>>();
    assert_eq!([order(0), order(1)], [[0, 3, 2, 1], [1, 0, 3, 2]]);
    assert_eq!(point_to_point(1, 4)[1], [3, 3]);
    for ranks in 2..=16 {
        for rank in 0..ranks {
            for (step, [to, from]) in point_to_point(rank, ranks).into_iter().enumerate() {
                assert_eq!(point_to_point(to, ranks)[step][1], rank);
                assert_eq!(point_to_point(from, ranks)[step][0], rank);
            }
            let steps = aggregated(rank, ranks);
            assert_eq!(steps.as_ref().map(Vec::len), (ranks % 2 == 0).then_some(ranks as usize / 2));
            let mut seen = steps.into_iter().flatten().flatten().collect::<Vec<_>>();
            seen.sort_unstable();
            assert!(seen.is_empty() || seen.into_iter().eq(0..ranks));
        }
    }
    // Of the products of a rank all but its own leave, and as many come into buffers.
    let steps = point_to_point(1, 4);
    let products: HashSet<u32> = steps.iter().map(|[to, _]| *to).chain([1]).collect();
    let buffers: HashSet<u32> = steps.iter().map(|[_, from]| *from).collect();
    assert_eq!((products.len(), buffers.len()), (4, 3));
    let chunk_bytes = 2 * 8 * size_of::<f32>() as u64;
    let sent = on_ranks(&[0, 1, 2, 3], &options(), |world| {
        let mut group = one_round(&world);
        let (shape, way) = (LinearShape { inputs: 4, outputs: 8 }, Activations::SequenceParallel);
        let layer = RowParallelLinear::new(&mut group, shape, way, vec![1.0; 8], None).unwrap();
        group.take_counts();
        layer.forward(&mut group, &[1.0; 2 * 4]).unwrap();
        group.take_counts().inter_node_bytes
    });
    assert_eq!(sent, [buffers.len() as u64 * chunk_bytes; 4]);
    // Ours is one plan for all ranks, of any number of them, with any number of chunks.
    for (ranks, chunks) in (1..=16).flat_map(|ranks| (1..=5).map(move |chunks| (ranks, chunks))) {
        let plan = Plan::new(LinearPass::RowForward, TokenChunks::new(chunks));
        plan.prove(ranks).unwrap();
        let reduces = plan.steps().iter().filter(|step| matches!(step.work, Work::Reduce(_))).count();
        assert_eq!(reduces, chunks as usize);
    }
}

/// Rounds of messages until a binomial tree has summed all ranks into rank 0, and until all have
/// the sum.
fn tree_rounds(ranks: u32) -> u32 {
    let (mut rounds, mut holding) = (0, ranks);
    while holding > 1 {
        // Each second rank that holds a sum sends it to the one before, and later hears from that.
        holding = holding.div_ceil(2);
        rounds += 2;
    }
    rounds
}

#[test]
fn tree_takes_2_log2_n_messages_one_after_another_and_pays_from_217_ranks_on() {
    for log in 0..=10 {
        assert_eq!(tree_rounds(1 << log), 2 * log);
    }
    // The page's assumptions, in nanoseconds: from word to word, and of the sender's time.
    let (word, send) = (2000, 150);
    let tree = |ranks| tree_rounds(ranks) * (word + send);
    let one_shot = |ranks: u32| word + (ranks - 1) * send;
    assert_eq!([one_shot(64), tree(64)], [11_450, 25_800]);
    assert_eq!([one_shot(1024), tree(1024)], [155_450, 43_000]);
    let meet = (2..1024).find(|&ranks| tree(ranks) <= one_shot(ranks)).unwrap();
    assert_eq!((meet, tree(meet)), (217, 34_400));
}

const RANKS: usize = 4;
const HEADS: usize = 4;
const DIM: usize = 8;
const TOKENS: usize = 32;
const WIDTH: usize = HEADS * DIM;

/// Bytes that a rank sends in a block of tensor and sequence parallelism: forward and backward, and
/// those of the gather of its inputs.
fn of_block(group: &mut Communicator) -> [u64; 2] {
    let (shape, way) = (LinearShape { inputs: WIDTH, outputs: WIDTH }, Activations::SequenceParallel);
    let weight = vec![0.5; WIDTH * WIDTH / RANKS];
    let up = ColumnParallelLinear::new(group, shape, way, weight.clone(), None).unwrap();
    let down = RowParallelLinear::new(group, shape, way, weight, None).unwrap();
    group.take_counts();
    let x = vec![1.0; TOKENS / RANKS * WIDTH];
    let h = up.forward(group, &x).unwrap();
    let gather = group.take_counts().inter_node_bytes;
    let y = down.forward(group, &h).unwrap();
    let of_h = down.backward(group, &h, &y).unwrap();
    up.backward(group, &x, &of_h.input).unwrap();
    [gather + group.take_counts().inter_node_bytes, gather]
}

#[test]
fn tensor_and_sequence_parallelism_send_as_often_the_bytes_of_ulysses_as_there_are_ranks() {
    let sent = on_ranks(&[0, 1, 2, 3], &options(), |world| {
        let mut group = one_round(&world);
        let [block, gather] = of_block(&mut group);
        // Attention and an MLP. The gathers of inputs once more, backward, are no part of 8 N d.
        let tensor = 2 * (block - gather);
        let shape = AttentionShape { query_heads: HEADS, kv_heads: HEADS, head_dim: DIM, causal: false };
        let attention = UlyssesAttention::new(&mut group, shape).unwrap();
        let rows = vec![1.0; TOKENS / RANKS * WIDTH];
        group.take_counts();
        let (_, tape) = attention.forward(&mut group, &rows, &rows, &rows).unwrap();
        tape.backward(&mut group, &rows).unwrap();
        (tensor, group.take_counts().inter_node_bytes)
    });
    // Of each tensor a rank keeps its own part.
    let (ranks, whole) = (RANKS as u64, (8 * TOKENS * WIDTH * size_of::<f32>()) as u64);
    for (tensor, ulysses) in sent {
        assert_eq!(tensor, whole * (ranks - 1) / ranks);
        assert_eq!(ulysses, whole / ranks * (ranks - 1) / ranks);
    }
}

#[test]
fn ulysses_makes_two_all_to_alls_in_each_pass_where_texts_count_four() {
    on_ranks(&[0, 1, 2, 3], &options(), |world| {
        let mut group = one_round(&world);
        let shape = AttentionShape { query_heads: HEADS, kv_heads: HEADS, head_dim: DIM, causal: false };
        let attention = UlyssesAttention::new(&mut group, shape).unwrap().with_rows::<bf16>();
        let rows = vec![bf16::ONE; TOKENS / RANKS * WIDTH];
        let mut received = rows.clone();
        group.take_counts();
        group.all_to_all(&rows, &mut received).unwrap();
        let one = group.take_counts().signals;
        let (_, tape) = attention.forward(&mut group, &rows, &rows, &rows).unwrap();
        assert_eq!(group.take_counts().signals, 2 * one);
        tape.backward(&mut group, &rows).unwrap();
        assert_eq!(group.take_counts().signals, 2 * one);
    });
}

#[test]
fn batch_of_8_makes_4_shards_where_experts_are_on_4_ranks_and_there_twice() {
    let attention = Mesh::new(8, [("dp", 4), ("tp", 2)]).unwrap();
    let experts = attention.experts(4, 1).unwrap();
    assert_eq!((experts.size(&["edp"]), experts.size(&["ep"])), (Ok(2), Ok(4)));
    let batch: Vec<u32> = (0..8).collect();
    let shard = |rank| {
        let shards = attention.size(&["dp"]).unwrap();
        cut_rows(&batch, 1, (attention.position(rank, "dp").unwrap(), shards)).unwrap()
    };
    for (nth, ranks) in attention.groups(&["tp"]).unwrap().into_iter().enumerate() {
        assert!(ranks.into_iter().all(|rank| shard(rank) == &batch[2 * nth..2 * nth + 2]), "{nth}");
    }
}

/// Sizes of the parameters of LLaMA-2 13B, with an output layer of its own.
fn llama() -> Vec<usize> {
    const LAYERS: usize = 40;
    let (hidden, ffn, vocabulary) = (5_120, 13_824, 32_000);
    let attention = [hidden, hidden * hidden, hidden * hidden, hidden * hidden, hidden * hidden];
    let mlp = [hidden, hidden * ffn, hidden * ffn, hidden * ffn];
    let layer = [&attention[..], &mlp].concat();
    let layers = std::iter::repeat_n(layer, LAYERS).flatten();
    [vocabulary * hidden].into_iter().chain(layers).chain([hidden, vocabulary * hidden]).collect()
}

/// Elements of the rank that has most, if each parameter goes whole to the rank that has least, the
/// largest parameter first.
fn greedy(sizes: &[usize], ranks: usize) -> usize {
    let mut sizes = sizes.to_vec();
    sizes.sort_unstable_by_key(|size| std::cmp::Reverse(*size));
    let mut held = vec![0; ranks];
    for size in sizes {
        *held.iter_mut().min().unwrap() += size;
    }
    held.into_iter().max().unwrap()
}

#[test]
fn parts_of_buckets_are_equal_where_whole_parameters_are_not() {
    let sizes = llama();
    let layout = Layout::buckets(&sizes, 25 << 20).unwrap();
    assert_eq!(layout.elements(), 13_015_864_320);
    let shares = [8, 16, 64, 128, 256].map(|ranks| {
        let own = layout.shard_len(ranks as u32);
        let even = layout.elements() as f64 / ranks as f64;
        [greedy(&sizes, ranks), own].map(|most| format!("{:.3}", most as f64 / even))
    });
    let right = [["1.005"], ["1.018"], ["1.083"], ["1.611"], ["3.222"]];
    assert_eq!(shares, right.map(|[greedy]| [greedy, "1.000"].map(String::from)));
}
