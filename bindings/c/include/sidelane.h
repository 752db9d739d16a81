// Sidelane from C: worlds, one-sided windows, expert-parallel dispatch and combine, collectives,
// the gate.
//
// A layer has its rows on the host, or on a GPU with its calls on a stream of yours, if its options
// name one. The functions are the same. On a device they enqueue, and results are there for the
// operations that you enqueue next.
//
// Every call returns a status; sidelane_last_message() describes the error in a sentence. Handles
// are tickets, not addresses: they may be closed in any order, and a closed one is refused, not
// dereferenced. Structs that begin with `size` may grow: set it to sizeof, and every field that
// you do not use to 0. Calls on one object come one after another; a second thread gets
// SIDELANE_ERROR_BUSY. docs/from-c.md shows whole programs.
//
// Made by cbindgen from bindings/c: do not edit.


#ifndef SIDELANE_H
#define SIDELANE_H

#include <stddef.h>
#include <stdint.h>

// Softmax over all experts, then the choice.
#define SIDELANE_SCORE_SOFTMAX 0

// The choice by logits, then softmax over the chosen.
#define SIDELANE_SCORE_SOFTMAX_OF_CHOSEN 1

// Logistic function of each logit.
#define SIDELANE_SCORE_SIGMOID 2

// Square root of softplus of each logit.
#define SIDELANE_SCORE_SQRT_SOFTPLUS 3

// A token chooses the best of all experts.
#define SIDELANE_SELECT_BEST 0

// The best of the best groups: `groups`, `groups_kept`, `group_best`.
#define SIDELANE_SELECT_GROUPS 1

// The best after Sinkhorn's balancing: `tolerance`.
#define SIDELANE_SELECT_SINKHORN 2

// No noise.
#define SIDELANE_NOISE_NONE 0

// Gumbel noise on all logits for the choice alone.
#define SIDELANE_NOISE_GUMBEL 1

// The first choice is the best; the others are sampled among what is left.
#define SIDELANE_NOISE_GUMBEL_AFTER_FIRST 2

// Logits times a factor drawn from 1 - `noise_size` to 1 + `noise_size`.
#define SIDELANE_NOISE_JITTER 3

// Normal noise with a standard deviation of `noise_size`.
#define SIDELANE_NOISE_NORMAL 4

// Weights are not divided by their sum.
#define SIDELANE_NORMALIZE_NEVER 0

// Over all choices, before any is dropped.
#define SIDELANE_NORMALIZE_BEFORE_DROP 1

// Over the choices that are left.
#define SIDELANE_NORMALIZE_AFTER_DROP 2

// Weights are divided by their sum plus `divisor_value`.
#define SIDELANE_DIVISOR_SUM_PLUS 0

// Weights are divided by their sum, or by `divisor_value` if that is larger.
#define SIDELANE_DIVISOR_SUM_AT_LEAST 1

// Dropless.
#define SIDELANE_CAPACITY_NONE 0

// ceil(S * K / E * factor) in f64 (Megatron).
#define SIDELANE_CAPACITY_CEIL_F64 1

// ceil((S / E) * (factor * K)) in f32 (DeepSpeed).
#define SIDELANE_CAPACITY_CEIL_F32 2

// trunc(S * factor / E) (GShard, Switch).
#define SIDELANE_CAPACITY_TRUNC 3

// K * trunc(factor * ceil(S / E)); 0: as needed; below 0: as needed, but at most that of its
// absolute value (Tutel).
#define SIDELANE_CAPACITY_TUTEL 4

// `capacity_rows`.
#define SIDELANE_CAPACITY_ROWS 5

// As many as the fullest expert needs.
#define SIDELANE_CAPACITY_NEEDED 6

// The highest weights are kept.
#define SIDELANE_DROP_SCORE 0

// The first tokens are kept.
#define SIDELANE_DROP_POSITION 1

// All first choices in token order, then all second ones.
#define SIDELANE_DROP_FIRST_CHOICES 2

// As SIDELANE_DROP_FIRST_CHOICES, but tokens come by falling highest score.
#define SIDELANE_DROP_PRIORITY 3

// Drawn at random.
#define SIDELANE_DROP_RANDOM 4

// The first choice of each token is counted.
#define SIDELANE_MAP_FIRST_CHOICES 0

// All choices of each token.
#define SIDELANE_MAP_ALL_CHOICES 1

// The best `top_k` experts by the logits anew, without bias, groups, noise or replay.
#define SIDELANE_MAP_FRESH 2

// Counts are divided by the tokens.
#define SIDELANE_SHARE_OF_TOKENS 0

// By the tokens times `top_k`.
#define SIDELANE_SHARE_OF_CHOICES 1

// Tokens that are not used are not there: means are over the others.
#define SIDELANE_UNUSED_LEFT_OUT 0

// Their shares are zero: means are over all tokens.
#define SIDELANE_UNUSED_ZERO 1

// Their shares are as those of the others.
#define SIDELANE_UNUSED_SHARED 2

// `parts` parts of the tokens, one after another, are balanced each for itself.
#define SIDELANE_PARTS_CONSECUTIVE 0

// Token t is of part t mod `parts`.
#define SIDELANE_PARTS_INTERLEAVED 1

// Sums are made over ranks.
#define SIDELANE_NODE_SUMS_NONE 0

// Per node first, then over nodes; what crosses keeps all bits of the f32 sum.
#define SIDELANE_NODE_SUMS_F32 1

// Likewise, and what crosses is rounded to bf16.
#define SIDELANE_NODE_SUMS_BF16 2

// By ascending rank, rounded once: the same bits on every lane and for every number of nodes.
#define SIDELANE_ALGORITHM_DIRECT 0

// From rank to rank, for many nodes; partial sums keep all bits of the f32 sum.
#define SIDELANE_ALGORITHM_RING_F32 1

// Likewise, with partial sums that are rounded to bf16: for elements of that type.
#define SIDELANE_ALGORITHM_RING_BF16 2

// bfloat16: the upper half of a binary32.
#define SIDELANE_DTYPE_BF16 0

// IEEE binary16.
#define SIDELANE_DTYPE_F16 1

// IEEE binary32.
#define SIDELANE_DTYPE_F32 2

// Bytes without arithmetic: dispatch moves them, combine refuses.
#define SIDELANE_DTYPE_BYTES 3

// Rows go directly from the source to the destination.
#define SIDELANE_ROUTE_DIRECT 0

// Rows go once per remote node, to the rail peer there, which relays them within its node.
#define SIDELANE_ROUTE_PXN 1

// A token's rows are summed by ascending expert id: the same bits on every lane, layout and
// topology.
#define SIDELANE_ORDER_EXPERT 0

// Per rank, then the ranks' partial sums by ascending rank.
#define SIDELANE_ORDER_RANK 1

// Per node, then the nodes' partial sums by ascending node.
#define SIDELANE_ORDER_NODE 2

// Partial sums keep all bits of the f32 sum.
#define SIDELANE_PARTIAL_F32 0

// Partial sums are rounded to bf16.
#define SIDELANE_PARTIAL_BF16 1

// Rows lie by (local expert, source rank, token).
#define SIDELANE_LAYOUT_EXPERT_MAJOR 0

// Rows lie by (source rank, token), one for each token that chose any of the rank's experts.
#define SIDELANE_LAYOUT_RANK_MAJOR 1

// Receive memory is as large as the call needs.
#define SIDELANE_MODE_EXACT 0

// A rank receives at most `mode_rows` rows.
#define SIDELANE_MODE_BUDGET 1

// Each source has `mode_rows` slots per expert (rank-major: per rank); counts are not exchanged.
#define SIDELANE_MODE_SLOTS 2

// Rows for which there is no room are an error, and nothing moves.
#define SIDELANE_OVERFLOW_ERROR 0

// Rows for which there is no room are dropped.
#define SIDELANE_OVERFLOW_DROP 1

// The caller finishes each call, which moves what it needs.
#define SIDELANE_GRAPHS_OFF 0

// Calls may be captured into CUDA graphs, or left unfinished: each moves full slots.
#define SIDELANE_GRAPHS_SLOTS 1

// Each row goes to the ranks that its token chose.
#define SIDELANE_STRATEGY_ALL_TO_ALL 0

// Every row goes to every rank, which copies those of its experts: for small groups.
#define SIDELANE_STRATEGY_ALL_GATHER 1

// Memory of the host.
#define SIDELANE_PLACE_HOST 0

// Memory that the layer's device reaches: its own, or pinned memory of the host.
#define SIDELANE_PLACE_DEVICE 1

// Kernels of the library make the products of a layer on a device, with the bits of the host.
#define SIDELANE_PRODUCTS_OWN 0

// cuBLAS makes them, in an order of its own.
#define SIDELANE_PRODUCTS_CUBLAS 1

// cuBLAS makes them by tensor cores, with the experts' factors rounded to TF32.
#define SIDELANE_PRODUCTS_CUBLAS_TF32 2

// cuBLAS makes them by tensor cores, with the experts' factors in bf16: of layers of bf16 alone.
#define SIDELANE_PRODUCTS_CUBLAS_BF16 3

// The call succeeded.
#define SIDELANE_CALL_OK 0

// This rank's input was refused: nothing moved, and sums are zeros.
#define SIDELANE_CALL_REFUSED 1

// Another rank's input was refused: nothing moved, and sums are zeros.
#define SIDELANE_CALL_PEER_REFUSED 2

// A rank has no room, or more rows than its budget: nothing moved, and sums are zeros.
#define SIDELANE_CALL_NO_ROOM 3

// Ranks make different calls: nothing moved, and sums are zeros.
#define SIDELANE_CALL_MISMATCH 4

// The world has failed.
#define SIDELANE_CALL_WORLD_FAILED 65536

// Outcome of a call. `sidelane_last_message()` describes it in a sentence.
enum sidelane_status_t
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    // Done.
    SIDELANE_OK = 0,
    // An argument is invalid: a null pointer, an unknown number, a struct of an unknown size, a
    // wrong shape.
    SIDELANE_ERROR_ARGUMENT = 1,
    // A handle was closed, is of another kind, or was never given.
    SIDELANE_ERROR_HANDLE = 2,
    // The object is in a call of another thread, or between the halves of a call.
    SIDELANE_ERROR_BUSY = 3,
    // This process was forked from one that uses the library.
    SIDELANE_ERROR_FORKED = 4,
    // A bug of the library: it is caught, and the object that was in use can only be closed. The
    // worlds of this process with open handles are cancelled, so that no other rank waits for this
    // one.
    SIDELANE_ERROR_INTERNAL = 5,
    // The ranks did not meet.
    SIDELANE_ERROR_BOOTSTRAP = 16,
    // The world has failed: a rank is lost, or a rank cancelled it. Rebuild it.
    SIDELANE_ERROR_WORLD = 17,
    // Memory could not be had, or an access lies outside its window.
    SIDELANE_ERROR_MEMORY = 18,
    // The instruction set that was asked for cannot be used.
    SIDELANE_ERROR_SIMD = 19,
    // A GPU could not be used.
    SIDELANE_ERROR_DEVICE = 20,
    // Bytes or signals could not be moved, or did not come.
    SIDELANE_ERROR_LANE = 21,
    // The input of a router is wrong.
    SIDELANE_ERROR_GATE = 22,
    // The input of a call is wrong: nothing moved on any rank.
    SIDELANE_ERROR_PLAN = 23,
    // Ranks disagree about a call, or it is used wrongly: nothing moved on any rank.
    SIDELANE_ERROR_CALL = 24,
    // Experts of a whole layer failed or took too long, or a layer on a device does not have what
    // was asked for.
    SIDELANE_ERROR_LAYER = 25,
    // No spare asked while the world waited to grow. The world lives.
    SIDELANE_ERROR_NO_SPARE = 26,
    // A spare was lost while the world took it in; the message names its rank. The world lives.
    SIDELANE_ERROR_SPARE_LOST = 27,
    // Another rank could not go on to the larger world; the message names it. The world lives.
    SIDELANE_ERROR_NOT_GROWN = 28,
    // This spare has other settings than the ranks; the message names the first.
    SIDELANE_ERROR_SETTINGS_DIFFER = 29,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum sidelane_status_t sidelane_status_t;
#else
typedef int32_t sidelane_status_t;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// All-reduce, reduce-scatter, broadcast, all-to-all, all-gather and messages over a group.
typedef struct sidelane_communicator_t sidelane_communicator_t;

// Dispatch and combine over a group.
typedef struct sidelane_ep_t sidelane_ep_t;

// A router.
typedef struct sidelane_gate_t sidelane_gate_t;

// Ordered ranks of a world.
typedef struct sidelane_group_t sidelane_group_t;

// The layout of one dispatch: combine, cached dispatch and the gradients follow it.
typedef struct sidelane_handle_t sidelane_handle_t;

// Allocates from the device heap of a layer for another library.
typedef struct sidelane_heap_allocator_t sidelane_heap_allocator_t;

// A whole layer: gate, dispatch, experts, combine.
typedef struct sidelane_moe_t sidelane_moe_t;

// What experts write into: peers read it in place.
typedef struct sidelane_output_t sidelane_output_t;

// A combine that was started.
typedef struct sidelane_pending_combine_t sidelane_pending_combine_t;

// A dispatch that was started.
typedef struct sidelane_pending_dispatch_t sidelane_pending_dispatch_t;

// All-gather and reduce-scatter over a group.
typedef struct sidelane_row_collective_t sidelane_row_collective_t;

// How many rows each rank has, and so where they lie among those of all.
typedef struct sidelane_row_partition_t sidelane_row_partition_t;

// Rows that a dispatch brought. They go back to the receive pool when they are closed.
typedef struct sidelane_rows_t sidelane_rows_t;

// A CUDA stream of the caller's, and the device it is of.
typedef struct sidelane_stream_t sidelane_stream_t;

// A forward pass of a whole layer, kept for its gradients.
typedef struct sidelane_tape_t sidelane_tape_t;

// Tokens that NICs read in place.
typedef struct sidelane_tokens_t sidelane_tokens_t;

// Memory that the ranks of a group write to each other.
typedef struct sidelane_window_t sidelane_window_t;

// All ranks of a job, as this process sees them.
typedef struct sidelane_world_t sidelane_world_t;

// Options of joining a world. A 0 is replaced by the environment's value or the default. heap and
// symmetric must be equal on all ranks.
typedef struct {
    // sizeof(sidelane_world_options_t).
    size_t size;
    // Bytes of each rank's heap (SIDELANE_HEAP).
    uint64_t heap;
    // Of these, for control and windows (SIDELANE_SYMMETRIC).
    uint64_t symmetric;
    // How long a live but silent rank is waited for (SIDELANE_DEADLINE_MS), at most a day.
    uint64_t deadline_ms;
    // How long ranks are waited for at start (SIDELANE_RENDEZVOUS_MS), at most a day.
    uint64_t rendezvous_ms;
} sidelane_world_options_t;

// Description of a world.
typedef struct {
    // sizeof(sidelane_world_info_t).
    size_t size;
    // This rank.
    uint32_t rank;
    // Number of ranks.
    uint32_t ranks;
    // Number of this world of the job: 0 at first, higher after each rebuild.
    uint32_t epoch;
    // Number of nodes: ranks of one share memory.
    uint32_t nodes;
    // The node of this rank.
    uint32_t node;
    // Ranks of that node.
    uint32_t ranks_of_node;
    // The lane that joins the nodes, "loopback", "verbs" or "tcp"; empty where there is one node.
    char net[16];
    // The instruction set in use.
    char simd[16];
} sidelane_world_info_t;

// Description of a group.
typedef struct {
    // sizeof(sidelane_group_info_t).
    size_t size;
    // This rank's position.
    uint32_t rank;
    // Number of ranks.
    uint32_t ranks;
    // Number of nodes.
    uint32_t nodes;
    // The node of this rank.
    uint32_t node;
} sidelane_group_info_t;

// A router, as data. Begin with a preset (sidelane_gate_preset()) and change what differs.
typedef struct {
    // sizeof(sidelane_gate_config_t).
    size_t size;
    // Experts, at most 2^20.
    uint32_t experts;
    // Choices per token.
    uint32_t top_k;
    // From logits to scores: SIDELANE_SCORE_...
    uint32_t score;
    // Which experts a token chooses: SIDELANE_SELECT_...
    uint32_t select;
    // Groups of experts / groups experts.
    uint32_t groups;
    // Groups that are kept.
    uint32_t groups_kept;
    // A group is worth the sum of its best so many; 0: its best.
    uint32_t group_best;
    // Of Sinkhorn: mean change at which the iteration ends.
    float tolerance;
    // Noise on the logits: SIDELANE_NOISE_...
    uint32_t noise;
    // Its size.
    float noise_size;
    // Above 0: a second choice is kept with probability min(1, weight / this) while training.
    float second_threshold;
    // When weights are divided by their sum: SIDELANE_NORMALIZE_...
    uint32_t normalize;
    // By what: SIDELANE_DIVISOR_...
    uint32_t divisor;
    // And with which number.
    float divisor_value;
    // Factor on all weights, above 0.
    float scaling;
    // Room per expert: SIDELANE_CAPACITY_...
    uint32_t capacity;
    // Capacity factor.
    double capacity_factor;
    // Rows, for SIDELANE_CAPACITY_ROWS.
    uint32_t capacity_rows;
    // Never less than this.
    uint32_t capacity_minimum;
    // Rounded up to a multiple of this; 1 for none.
    uint32_t capacity_align;
    // Local groups: equal parts of the tokens with a capacity each; 1 for all together.
    uint32_t capacity_groups;
    // Choices that a full expert keeps: SIDELANE_DROP_...
    uint32_t drop_policy;
    // 1: every expert gets exactly its capacity in rows, unused ones zero.
    uint32_t pad;
} sidelane_gate_config_t;

// One forward pass over the tokens of a rank. Only tokens and logits are required. Arrays are read
// during the call alone.
typedef struct {
    // sizeof(sidelane_gate_call_t).
    size_t size;
    // The router's logits, [tokens, experts].
    const float *logits;
    // Tokens.
    uint64_t tokens;
    // [experts], added to the scores for the choice alone; or NULL.
    const float *bias;
    // [tokens, experts]: factors on the standard deviation of normal noise; or NULL.
    const float *noise_std;
    // [tokens]: 1 for tokens that choose, 0 for padding; or NULL.
    const uint8_t *token_mask;
    // [tokens, top_k]: choices that were recorded, -1 for none; or NULL.
    const int32_t *replay;
    // Seed of the run.
    uint64_t seed;
    // Step of the run: passes that are to differ have different steps.
    uint64_t step;
    // Rank that the tokens belong to.
    uint32_t rank;
    // 1: this is a training pass: else there is only such noise as is always there.
    uint32_t training;
    // 1: `global_required` counts.
    uint32_t has_global_required;
    // The largest number of rows that any rank needs for one expert, for a capacity that follows
    // the need.
    uint32_t global_required;
} sidelane_gate_call_t;

// The choices of this rank's tokens, two arrays `[tokens, top_k]`. An id of -1 is a dropped
// choice. The memory is the caller's, like that of a tensor.
typedef struct {
    // Expert ids.
    const int32_t *experts;
    // Weights.
    const float *weights;
    // Tokens.
    uint64_t tokens;
    // Choices per token.
    uint32_t top_k;
    // Where both arrays lie: SIDELANE_PLACE_...
    uint32_t place;
} sidelane_routing_t;

// Decision of a router. It may be read until the gate's next call, or until the gate is closed.
typedef struct {
    // sizeof(sidelane_decision_t).
    size_t size;
    // Experts that are left (-1: dropped) and their weights, to dispatch by.
    sidelane_routing_t routing;
    // Choices, [tokens, top_k], before dropping.
    const int32_t *choices;
    // Place of each choice among the rows of its expert, [tokens, top_k]; -1 where there is none.
    const int32_t *slots;
    // Choices of each expert, [experts], before any was dropped.
    const uint32_t *counts_before;
    // Choices of each expert that are left, [experts].
    const uint32_t *counts_after;
    // Rows per expert.
    uint32_t capacity;
    // The capacity that would have dropped nothing.
    uint32_t required;
} sidelane_decision_t;

// A loss that is least where all experts are chosen equally often, as data. Begin with that of a
// preset (sidelane_balance_preset()) and change the fields that differ.
typedef struct {
    // sizeof(sidelane_balance_t).
    size_t size;
    // Factor on all.
    float coefficient;
    // What shares are made of: SIDELANE_SCORE_...
    uint32_t score;
    // Which choices are counted: SIDELANE_MAP_...
    uint32_t map;
    // What counts are divided by: SIDELANE_SHARE_...
    uint32_t share;
    // What becomes of tokens that are not used: SIDELANE_UNUSED_...
    uint32_t unused;
    // Parts of the tokens; 0 and 1: all together. The loss is the mean of theirs.
    uint32_t parts;
    // How tokens are split: SIDELANE_PARTS_...
    uint32_t split;
    // 0.
    uint32_t reserved;
} sidelane_balance_t;

// Input of the loss. Arrays are read during the call alone.
typedef struct {
    // sizeof(sidelane_balance_input_t).
    size_t size;
    // The router's logits, [tokens, experts].
    const float *logits;
    // Tokens.
    uint64_t tokens;
    // [tokens, top_k]: the choices before dropping, -1 for none. SIDELANE_MAP_FRESH needs none:
    // NULL.
    const int32_t *choices;
    // [tokens]: 1 for tokens that count; or NULL, if all do.
    const uint8_t *token_mask;
    // [parts, experts]: counts of more than these tokens, as sidelane_balance_counts() gives them,
    // summed or averaged; or NULL. The loss is then the part of this rank's tokens.
    const double *total_counts;
    // How many tokens one of these counts is of, all parts together.
    double total_tokens;
    // Experts.
    uint32_t experts;
    // Choices per token.
    uint32_t top_k;
} sidelane_balance_input_t;

// Input of the importance loss. Arrays are read during the call alone.
typedef struct {
    // sizeof(sidelane_importance_input_t).
    size_t size;
    // The router's logits without noise, [tokens, experts].
    const float *logits;
    // The logits that chose experts, as sidelane_gate_noisy_logits() gives them, [tokens,
    // experts]; NULL: the clean logits chose.
    const float *noisy;
    // [tokens, top_k]: the choices before dropping. Tokens whose last one is -1 do not count.
    const int32_t *choices;
    // Tokens.
    uint64_t tokens;
    // Experts, 2 at least.
    uint32_t experts;
    // Choices per token.
    uint32_t top_k;
    // The standard deviation of the noise times the experts, above 0 (Tutel's gate_noise).
    float noise;
    // Factor on all.
    float coefficient;
} sidelane_importance_input_t;

// A router's decision, and how the loss changes with its weights. Arrays are read during the call
// alone.
typedef struct {
    // sizeof(sidelane_weights_input_t).
    size_t size;
    // The logits behind the weights, [tokens, experts]: noisy ones if noise enters the weights,
    // too.
    const float *logits;
    // [tokens, top_k]: the choices before dropping (sidelane_decision_t.choices).
    const int32_t *choices;
    // [tokens, top_k]: those that are left (sidelane_decision_t.routing.experts).
    const int32_t *experts;
    // [tokens, top_k]: the loss by each weight. The value at a dropped choice is ignored.
    const float *d_weights;
    // Tokens.
    uint64_t tokens;
} sidelane_weights_input_t;

// Settings of a layer: all ranks must pass the same. 0 is the default of every field but
// `experts`, `top_k` and `hidden`. A layer on a device refuses settings that it does not have, by
// name.
typedef struct {
    // sizeof(sidelane_ep_options_t).
    size_t size;
    // Number of experts. 0 if there is an expert map.
    uint32_t experts;
    // Choices per token.
    uint32_t top_k;
    // Elements of a row, which must be a multiple of 16 bytes.
    uint32_t hidden;
    // Their type: SIDELANE_DTYPE_...
    uint32_t dtype;
    // Order in which a token's rows are summed: SIDELANE_ORDER_...
    uint32_t sum_order;
    // Type of partial sums: SIDELANE_PARTIAL_...
    uint32_t partial_dtype;
    // How rows reach other nodes: SIDELANE_ROUTE_...
    uint32_t route;
    // How received rows lie: SIDELANE_LAYOUT_...
    uint32_t layout;
    // How receive memory is sized: SIDELANE_MODE_...
    uint32_t mode;
    // Rows of the budget, or slots.
    uint32_t mode_rows;
    // What becomes of rows without room: SIDELANE_OVERFLOW_...
    uint32_t overflow;
    // How rows go out: SIDELANE_STRATEGY_...
    uint32_t strategy;
    // Each expert's rows start at and are padded to a multiple of this. Default: 1.
    uint32_t align;
    // The most tokens of a rank in one call. Default: 4096.
    uint32_t max_tokens;
    // 1: combine multiplies each row with its routing weight.
    uint32_t weighted;
    // 1: dispatch sends records of e4m3 values and scales, which sidelane_ep_quantize() makes.
    uint32_t fp8;
    // 1: relays copy rows in few large copies (rank-major over pxn).
    uint32_t coalesce_relays;
    // Device, calls that the caller finishes: dispatches that may be alive at once. Default: 64.
    uint32_t max_in_flight;
    // Rows lie on the device of this stream, and calls go on the stream. NULL: rows lie on the
    // host.
    sidelane_stream_t *stream;
    // Device, likewise: bytes of the device's memory in which dispatches receive and experts
    // write. In a group of several nodes whose NICs do not reach the device, as much host memory
    // is pinned, too. 0: as much as two dispatches of `max_tokens` take with their outputs, each
    // with half as many rows again as even routing brings. A small instance takes more, up to
    // 256 MiB.
    uint64_t device_heap;
    // Device, a budget: whether CUDA graphs may hold the calls, SIDELANE_GRAPHS_... Slots are for
    // SIDELANE_ORDER_RANK and SIDELANE_ROUTE_DIRECT, and move `max_tokens` rows to each rank in
    // every call. Calls in fixed slots can always be captured.
    uint32_t graphs;
    // Device: blocks of each kernel, at most, so that work on other streams keeps its
    // multiprocessors meanwhile. No bit depends on it. 0: as many as the device has at work.
    uint32_t max_blocks;
    // Device, a group of one node: bytes to which its memory may grow where a dispatch lacks room.
    // 0: what two dispatches of any routing take, at most 4 times the default of `device_heap`;
    // memory whose size is set does not grow.
    uint64_t device_heap_limit;
} sidelane_ep_options_t;

// Which rank holds which expert, if not in contiguous blocks. An expert may have several replicas.
typedef struct {
    // How many experts each rank holds, `[ranks]`.
    const uint32_t *held;
    // Which, in the order of their local slots, those of rank 0 first: `[sum of held]`.
    const uint32_t *experts_held;
    // Ranks.
    uint32_t ranks;
    // Experts.
    uint32_t experts;
} sidelane_expert_map_t;

// Description of a layer.
typedef struct {
    // sizeof(sidelane_ep_info_t).
    size_t size;
    // This rank's position in the group.
    uint32_t rank;
    // Number of ranks.
    uint32_t ranks;
    // Number of experts.
    uint32_t experts;
    // Experts of this rank, replicas counted each.
    uint32_t local_experts;
    // Choices per token.
    uint32_t top_k;
    // Elements of a row that is combined.
    uint32_t hidden;
    // Their type.
    uint32_t dtype;
    // With fp8: scales of a record; 0 otherwise.
    uint32_t record_scales;
    // With fp8: bytes of a record, which are the columns of dispatched rows; 0 otherwise.
    uint64_t record_bytes;
    // With fp8: where in a record the scales begin, in bytes.
    uint64_t record_scales_offset;
    // Device: the stream of its calls, as the caller named it.
    void *cuda_stream;
    // Where its rows lie: SIDELANE_PLACE_...
    uint32_t place;
    // Device: its number.
    uint32_t device;
    // Executor of its calls: "host-stepper", "enqueuer" or "constant-program".
    char executor[24];
} sidelane_ep_info_t;

// A row-major matrix `[rows, columns]`, its rows without gaps. It is the caller's memory. On the
// host it is read or written during the call alone, unless a function says otherwise. On a device
// it stays there, and stays as it is, until the layer's stream has passed the call.
typedef struct {
    // The first element. May be NULL if there is none.
    void *data;
    // Rows.
    uint64_t rows;
    // Elements of a row.
    uint64_t columns;
    // Type of an element: SIDELANE_DTYPE_...
    uint32_t dtype;
    // Where the elements lie: SIDELANE_PLACE_... On a device they begin at a multiple of 16 bytes.
    uint32_t place;
} sidelane_tensor_t;

// The layout of a dispatch. The host may read the memory behind the pointers, except `status` and
// `dropped_mask`, until the handle is closed. Empty arrays have a count of 0, as have arrays whose
// sizes stay on the device.
typedef struct {
    // sizeof(sidelane_handle_info_t).
    size_t size;
    // Rows received, pads counted.
    uint64_t rows;
    // Tokens that this rank dispatched.
    uint64_t tokens;
    // Rows of each local expert, [local_experts]; rank-major, rows that chose it.
    const int64_t *tokens_per_expert;
    // Local experts.
    uint64_t local_experts;
    // Rows of each segment, pads and unused slots counted, [segments].
    const int64_t *padded_tokens_per_expert;
    // Segments of the rows: one per local expert; rank-major, one.
    uint64_t segments;
    // Host: routing weight of each row, [rows], 0 for pads; rank-major, of each row and choice,
    // [rows, top_k].
    const float *row_weights;
    // How many weights.
    uint64_t row_weight_count;
    // Rank-major: the local expert of each row and choice, [rows, top_k], -1 where there is none.
    const int32_t *row_experts;
    // How many ids; 0 unless rank-major.
    uint64_t row_expert_count;
    // In spans: for each row in visible order, where it lies, [index_count].
    const uint32_t *index_landing;
    // In spans: for each row as it lies, which it is in visible order, [index_count].
    const uint32_t *index_visible;
    // Rows of both indices; 0 where rows lie in visible order.
    uint64_t index_count;
    // Which of this rank's choices were dropped for want of room (1), [tokens, top_k].
    const uint8_t *dropped;
    // How many choices.
    uint64_t dropped_count;
    // Rows that each rank needed, [ranks].
    const uint32_t *required_rows;
    // Ranks.
    uint64_t ranks;
    // Device: outcome of the last call along the handle at this rank, for kernels: a word of
    // SIDELANE_CALL_..., written before the stream continues. In slots, values between
    // SIDELANE_CALL_OK and SIDELANE_CALL_WORLD_FAILED are errors found by a kernel;
    // sidelane_ep_check() returns them.
    const uint32_t *status;
    // Device, in slots: as `dropped`, for streams, [tokens, top_k]; each dispatch writes it anew.
    // NULL elsewhere.
    const uint8_t *dropped_mask;
} sidelane_handle_info_t;

// Received rows. The memory behind the pointers may be read and changed until the rows are closed.
// On a device all pointers are device addresses, and the rows are there for operations that are
// enqueued on the layer's stream behind the dispatch.
//
// In fixed slots on a device, a slot of each rank, by rank, lies at `data`. A slot begins with its
// header: uint32_t used rows, uint32_t tokens of the source; at `slot_experts_at` the local expert
// of each row and choice, int32_t [max_tokens, top_k], -1 for those at other ranks; at
// `slot_weights_at` their weights, float. At `slot_rows_at` the rows begin, [max_tokens, hidden].
// Unused parts are zero, unused experts -1.
typedef struct {
    // sizeof(sidelane_rows_info_t).
    size_t size;
    // The rows, without gaps. With fp8 each is a record: values first, then scales.
    void *data;
    // Number of rows, pads counted; with SIDELANE_GRAPHS_SLOTS, those of the budget; in fixed
    // slots, those of all slots.
    uint64_t rows;
    // Bytes of a row.
    uint64_t row_bytes;
    // Exact sizes and budgets: routing weight of each row, [rows]; 0 for pads. Rank-major, of each
    // row and choice, [rows, top_k].
    const float *weights;
    // The same: rows of each local expert, then these with pads, [2, local experts]. Rank-major,
    // rows that chose each, [local experts].
    const int64_t *counts;
    // The same: rows as they arrived, where engines relay (SIDELANE_ROUTE_PXN across nodes); else
    // NULL.
    const void *arrived;
    // The same: for each row which of `arrived` it is, -1 for pads, [rows]; NULL as `arrived` is.
    const int32_t *index;
    // Fixed slots on a device: bytes of a slot; 0 elsewhere.
    uint64_t slot_bytes;
    // Bytes from the start of a slot to its local experts.
    uint64_t slot_experts_at;
    // Bytes from the start of a slot to its weights.
    uint64_t slot_weights_at;
    // Bytes from the start of a slot to its rows.
    uint64_t slot_rows_at;
    // Exact sizes, rank-major: the local expert of each row and choice, [rows, top_k]; -1 where
    // there is none. NULL elsewhere.
    const int32_t *experts;
} sidelane_rows_info_t;

// What experts write. It may be written until the output is used up or closed.
//
// In fixed slots on a device it is [ranks, max_tokens, hidden]: row i of rank r is what this
// rank's experts make of row i of the slot of r, weighted and added up. Rows that a slot does not
// use may be left as they are.
typedef struct {
    // sizeof(sidelane_output_info_t).
    size_t size;
    // The rows, without gaps; on a device, its address there. Their contents are undefined at
    // first.
    void *data;
    // Number of rows, pads counted. What pad rows hold is never read.
    uint64_t rows;
    // Bytes of a row.
    uint64_t row_bytes;
} sidelane_output_info_t;

// A buffer of tokens to dispatch.
typedef struct {
    // sizeof(sidelane_tokens_info_t).
    size_t size;
    // The rows, without gaps. Their contents are undefined at first.
    void *data;
    // Number of rows.
    uint64_t rows;
    // Bytes of a row.
    uint64_t row_bytes;
} sidelane_tokens_info_t;

// A lane, and how many ranks it reaches.
typedef struct {
    // "own", "shm", "copy engine" (that of devices within a node), the lane between nodes, or
    // "relay": of ranks that are reached through others. Empty: no more lanes.
    char name[16];
    // Ranks.
    uint64_t ranks;
} sidelane_lane_t;

// Traffic of a rank.
typedef struct {
    // Bytes of rows copied or put within the node, own rows included.
    uint64_t intra_node_bytes;
    // Bytes of rows put to other nodes.
    uint64_t inter_node_bytes;
    // Bytes of messages, headers, and row metadata.
    uint64_t control_bytes;
    // Rows copied, zeros included.
    uint64_t rows;
    // Copies by which rows were moved.
    uint64_t copies;
    // Signals raised.
    uint64_t signals;
    // Bytes of the rows read by sums.
    uint64_t summed_bytes;
} sidelane_moved_t;

// Rows, by how far they go.
typedef struct {
    // From a rank to itself.
    uint64_t own;
    // To other ranks of its node.
    uint64_t local;
    // To other nodes.
    uint64_t remote;
} sidelane_hops_t;

// Requests to a stream, and to nets next to it.
typedef struct {
    // Calls that enqueued a batch of copies.
    uint64_t batches;
    // Copies, in batches or one by one.
    uint64_t copies;
    // Bytes of rows and of their metadata, zeros included.
    uint64_t bytes;
    // Of these, bytes that stayed at this rank.
    uint64_t own_bytes;
    // Copies that were enqueued one by one: the driver has no batches, or the stream takes none.
    uint64_t single_copies;
    // Copies within one device that multiprocessors make: single ones, and before CUDA 13.1 those
    // of batches, too.
    uint64_t copies_by_sms;
    // Memory operations: writes and waits.
    uint64_t memory_operations;
    // Kernels that summed rows for other nodes.
    uint64_t relay_sums;
    // Bytes that left the device by memory of the host, on the way to other nodes; not among
    // `bytes`.
    uint64_t staged_out_bytes;
    // Bytes that came in by memory of the host, zeros included; not among `bytes`.
    uint64_t staged_in_bytes;
    // Puts to other nodes.
    uint64_t inter_node_puts;
    // Their bytes, headers and messages among them.
    uint64_t inter_node_bytes;
    // Signals to other nodes.
    uint64_t inter_node_signals;
    // Puts by GPUDirect among them: NICs read rows from device memory and wrote them to that of
    // another.
    uint64_t gpu_direct_puts;
    // Their bytes.
    uint64_t gpu_direct_bytes;
} sidelane_enqueued_t;

// The name of a kernel; empty: no more kernels.
typedef struct {
    // It ends with a zero byte.
    char name[32];
} sidelane_kernel_name_t;

// Bytes of one call at this rank: of a dispatch, or of a return. The host counts the bytes that it
// moved, a device the requests to its stream; the other fields are zero.
typedef struct {
    // sizeof(sidelane_report_t).
    size_t size;
    // The lanes in use.
    sidelane_lane_t lanes[8];
    // Host: what this rank moved in the call.
    sidelane_moved_t moved;
    // Host: the part of it that this rank relayed.
    sidelane_moved_t relayed;
    // Host: traffic of the last combine or gradient along the handle; 0 before the first.
    sidelane_moved_t returned;
    // As planned: a row for each (token, expert) or, rank-major, each (token, rank).
    sidelane_hops_t logical;
    // As planned: rows that this rank puts, those of zeros included.
    sidelane_hops_t sent;
    // (token, rank) pairs whose rank is on another node.
    uint64_t remote_ranks;
    // (token, node) pairs whose node is another.
    uint64_t remote_nodes;
    // As planned: rows that this rank relays to the ranks of its node.
    uint64_t relayed_rows;
    // Bytes of a row that goes out.
    uint64_t row_bytes;
    // Bytes of a returned row.
    uint64_t combine_row_bytes;
    // Bytes that combines and gradients along the handle copied, because rows did not lie in one
    // of its outputs.
    uint64_t copied_bytes;
    // What carried the call out: as in sidelane_ep_info_t.
    char executor[24];
    // Device: requests to the stream.
    sidelane_enqueued_t enqueued;
    // Device: kernels that ran on the stream before rows were packed, or after they had landed.
    sidelane_kernel_name_t kernels[6];
    // Device, fixed slots: other ranks on this rank's own device.
    uint64_t same_device;
    // Device: why rows between nodes are staged in host memory, if they are: the lane that
    // registers host memory alone, "nic" (the NIC does not take the device's memory), "unordered"
    // (the device sees no order in the NICs' writes), "one queue" (CUDA_DEVICE_MAX_CONNECTIONS is
    // 1), "another rank".
    char host_staged[16];
    // Device: how NICs address device memory where rows between nodes move by GPUDirect: "dma-buf"
    // or "address".
    char registration[16];
    // Device: limit on the blocks of each kernel (sidelane_ep_options_t.max_blocks); 0: none.
    uint64_t max_blocks;
    // Device, calls that the caller finishes: bytes of it that each open handle takes, beside rows
    // and outputs.
    uint64_t handle_bytes;
} sidelane_report_t;

// Settings of a collective: all ranks must pass the same. 0 is the default of every field but
// `columns`.
typedef struct {
    // sizeof(sidelane_row_collective_options_t).
    size_t size;
    // Elements of a row, which must be a multiple of 16 bytes.
    uint32_t columns;
    // Their type: SIDELANE_DTYPE_... Bytes can be gathered, but not summed.
    uint32_t dtype;
    // Number of equal parts in which the rows of a rank come: gathered rows lie by part and then
    // by rank. Default: 1.
    uint32_t segments;
    // The most rows of a rank. Default: 4096.
    uint32_t max_rows;
    // How rows reach other nodes: SIDELANE_ROUTE_... With SIDELANE_ROUTE_PXN each crosses once per
    // node.
    uint32_t route;
    // Whether nodes sum first, over SIDELANE_ROUTE_PXN: SIDELANE_NODE_SUMS_...
    uint32_t node_sums;
} sidelane_row_collective_options_t;

// Number of rows of each rank, and so the place of its rows among all. It may be read until the
// shares are closed.
typedef struct {
    // sizeof(sidelane_row_partition_info_t).
    size_t size;
    // Rows of each rank, [ranks].
    const uint32_t *counts;
    // Ranks.
    uint64_t ranks;
    // Rows of all ranks.
    uint64_t rows;
} sidelane_row_partition_info_t;

// Settings of a communicator: all ranks must pass the same. 0 is the default of every field.
typedef struct {
    // sizeof(sidelane_communicator_options_t).
    size_t size;
    // Bytes of a round. The communicator takes about ten times as much of SIDELANE_SYMMETRIC.
    // Default: 512 KiB.
    uint64_t chunk;
    // All-reduces of at most this many bytes are one-shot: every rank sums them whole, with the
    // same bits. Default: 16 KiB.
    uint64_t one_shot_bytes;
    // How an all-reduce adds up: SIDELANE_ALGORITHM_...
    uint32_t algorithm;
    // 0.
    uint32_t reserved;
} sidelane_communicator_options_t;

// Settings of a whole layer: all ranks must pass the same, except weights, overlap, stream and
// max_blocks. 0 is the default of every field but `gate`, `experts`, `hidden` and `ffn`. Weights
// are on the host, and are copied.
//
// The weights of an expert are w1 and w3, [hidden, ffn], and w2, [ffn, hidden], one after another:
// a row x becomes (silu(x w1) * x w3) w2.
typedef struct {
    // sizeof(sidelane_moe_options_t).
    size_t size;
    // The router: its experts and choices are those of the layer.
    const sidelane_gate_config_t *gate;
    // Weights of the router, [hidden, experts]: logits are tokens times them. NULL: zeros.
    const float *router;
    // Weights of this rank's experts, [local experts, 3 * hidden * ffn].
    const float *experts;
    // Weights of an expert that all tokens pass, [3 * hidden * shared_ffn]. NULL: none.
    const float *shared;
    // A loss that balances experts. NULL: none.
    const sidelane_balance_t *balance;
    // Tensors lie on the device of this stream, and passes go on the stream. NULL: they lie on
    // the host.
    sidelane_stream_t *stream;
    // Device: bytes of its memory in which dispatches receive and experts write. 0: as much as two
    // passes of `max_tokens` take, each with half as many rows again as even routing brings.
    uint64_t device_heap;
    // Elements of a row, which must be a multiple of 16 bytes.
    uint32_t hidden;
    // Inner width of each expert.
    uint32_t ffn;
    // The same of the expert that all tokens pass.
    uint32_t shared_ffn;
    // Type of the elements: SIDELANE_DTYPE_...
    uint32_t dtype;
    // Order in which a token's rows are summed: SIDELANE_ORDER_...
    uint32_t sum_order;
    // How rows reach other nodes: SIDELANE_ROUTE_...
    uint32_t route;
    // Each expert's rows are padded to a multiple of this. Default: 1.
    uint32_t align;
    // The most tokens of a rank in one pass. Default: 4096.
    uint32_t max_tokens;
    // Parts of a pass's tokens, each dispatched and combined by itself. Default: 1.
    uint32_t chunks;
    // 1: transfers of one chunk are not beside the experts of others.
    uint32_t sequential;
    // Device: what makes the products, SIDELANE_PRODUCTS_...
    uint32_t products;
    // Device: tapes that may be alive besides that of the pass that runs. Default: 1.
    uint32_t tapes;
    // Device: blocks of each kernel, at most. 0: as many as the device has at work.
    uint32_t max_blocks;
    // Coefficient of the loss that keeps logits small. 0: none.
    float z_loss;
} sidelane_moe_options_t;

// Tokens of a forward pass, and inputs of their gate.
typedef struct {
    // sizeof(sidelane_moe_input_t).
    size_t size;
    // The tokens, [tokens, hidden].
    const sidelane_tensor_t *x;
    // Added to the layer's result, [tokens, hidden]. NULL: nothing.
    const sidelane_tensor_t *residual;
    // On the host, [experts], for the choice alone. NULL: none.
    const float *bias;
    // On the host, [tokens]: 1 for tokens that choose. NULL: all do.
    const uint8_t *token_mask;
    // Random numbers: the job's.
    uint64_t seed;
    // The step's.
    uint64_t step;
    // The rank's.
    uint32_t rank;
    // 1: a training pass, with noise.
    uint32_t training;
} sidelane_moe_input_t;

// Where the gradients of a pass go, in the layer's place.
typedef struct {
    // sizeof(sidelane_moe_gradients_t).
    size_t size;
    // Of the tokens, [tokens, hidden]. That of the residual is that of the output.
    const sidelane_tensor_t *x;
    // Of the router, by this rank's tokens, [hidden, experts].
    float *router;
    // Of this rank's experts, by the tokens of all ranks, in the order of their weights.
    float *experts;
    // Of the expert that all tokens pass, by this rank's tokens. NULL if there is none.
    float *shared;
} sidelane_moe_gradients_t;

// Decisions of a forward pass. Pointers live as long as the tape.
typedef struct {
    // sizeof(sidelane_tape_info_t).
    size_t size;
    // Choices that are left, and their weights, on the host.
    sidelane_routing_t routing;
    // Choices of each expert, [experts], before any was dropped.
    const uint32_t *counts_before;
    // Choices of each expert that are left, [experts].
    const uint32_t *counts_after;
    // The balancing loss of this rank's tokens; 0 if there is none.
    float balance_loss;
    // The loss on the size of logits; 0 if there is none.
    float z_loss;
} sidelane_tape_info_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library, as "0.1.0".
const char *sidelane_version(void);

// The name of a status, as "SIDELANE_ERROR_PLAN"; "unknown status" if it is none.
const char *sidelane_status_name(int32_t status);

// Message of the last call on this thread that did not return SIDELANE_OK, in a sentence. It may
// be read until the next such call on this thread. Never NULL.
const char *sidelane_last_message(void);

// Joins the job that the environment describes (sidelane launch, torchrun, SLURM, Open MPI).
// Collective over the job.
//
// `options` may be NULL. Each rank needs its own process: a child that was forked afterwards is
// refused.
//
// The caller guarantees: pointers are NULL or valid; `options` is as large as its size says.
sidelane_status_t sidelane_world_from_env(const sidelane_world_options_t *options, sidelane_world_t **world);

// Waits as a spare until a world of the job that the environment describes takes this process in
// (sidelane_world_grow), at most for `deadline_ms`. The environment names any rank of the job.
// Options must be those of the ranks, or this fails with SIDELANE_ERROR_SETTINGS_DIFFER. After an
// error of a growth that failed, call it again.
//
// The caller guarantees: pointers are NULL or valid; `options` is as large as its size says.
sidelane_status_t sidelane_world_spare(const sidelane_world_options_t *options,
                                       uint64_t deadline_ms,
                                       sidelane_world_t **world);

// Describes a world.
//
// The caller guarantees: `info` is NULL, or as large as its size says.
sidelane_status_t sidelane_world_info(sidelane_world_t *world, sidelane_world_info_t *info);

// Whether the world is alive: SIDELANE_OK, or SIDELANE_ERROR_WORLD and the cause.
sidelane_status_t sidelane_world_check(sidelane_world_t *world);

// Ends the world on every rank: all waits and calls end with an error that names this rank.
sidelane_status_t sidelane_world_cancel(sidelane_world_t *world);

// The survivors' next world, after this one has failed. Collective among the survivors. A world of
// fewer than `at_least` ranks does not begin: 1 takes any survivors, and with more than half of
// the ranks no network failure makes two worlds. Should another rank be lost before the new world
// is built, this fails, and the survivors call it again. The old world and its objects stay
// readable until they are closed.
//
// The caller guarantees: `rebuilt` is NULL or valid.
sidelane_status_t sidelane_world_rebuild(sidelane_world_t *world,
                                         uint64_t deadline_ms,
                                         uint32_t at_least,
                                         sidelane_world_t **rebuilt);

// A larger world, with the spares that ask for it, behind the ranks of this one. Collective among
// all ranks, between two steps. Rank 0 waits for a first spare at most for `deadline_ms`. The
// larger world begins with all ranks and all spares, and ends this one, or it does not begin: this
// one lives on after SIDELANE_ERROR_NO_SPARE, SIDELANE_ERROR_SPARE_LOST, SIDELANE_ERROR_NOT_GROWN,
// and the error of a rank that could not build its part. The old world and its objects stay
// readable until they are closed.
//
// The caller guarantees: `grown` is NULL or valid.
sidelane_status_t sidelane_world_grow(sidelane_world_t *world,
                                      uint64_t deadline_ms,
                                      sidelane_world_t **grown);

// For each of `ranks` ranks, its rank in the world before, and UINT32_MAX for a spare that joined
// this world.
//
// The caller guarantees: `previous` is NULL, or `ranks` numbers may be written there.
sidelane_status_t sidelane_world_previous_ranks(sidelane_world_t *world, uint32_t *previous, uint32_t ranks);

// Closes the handle. This rank leaves the world when every object made from it is closed, too.
// NULL is a no-op.
sidelane_status_t sidelane_world_close(sidelane_world_t *world);

// A group of `count` ranks of the world, in this order. Collective among them. Without ranks (NULL
// and 0), of all ranks.
//
// The caller guarantees: `ranks` is NULL or points to `count` numbers; `group` is NULL or valid.
sidelane_status_t sidelane_world_group(sidelane_world_t *world,
                                       const uint32_t *ranks,
                                       uint32_t count,
                                       sidelane_group_t **group);

// Describes a group.
//
// The caller guarantees: `info` is NULL, or as large as its size says.
sidelane_status_t sidelane_group_info(sidelane_group_t *group, sidelane_group_info_t *info);

// Closes the handle. Objects built on the group stay valid. NULL is a no-op.
sidelane_status_t sidelane_group_close(sidelane_group_t *group);

// Memory of `len` bytes at every member of a group, and a signal word per pair of members.
// Collective.
//
// The caller guarantees: `window` is NULL or valid.
sidelane_status_t sidelane_group_window(sidelane_group_t *group, uint64_t len, sidelane_window_t **window);

// Makes the caller's own memory a window. `memory` is the descriptor of a memfd that is sealed
// against shrinking (memfd_create(), ftruncate(), fcntl(F_ADD_SEALS, F_SEAL_SHRINK)), of one size
// at all members. The call duplicates it: the caller keeps its descriptor and its mappings, which
// show the peers' puts. Collective.
//
// The caller guarantees: `window` is NULL or valid; `memory` is an open descriptor, or -1.
sidelane_status_t sidelane_group_register(sidelane_group_t *group,
                                          int32_t memory,
                                          sidelane_window_t **window);

// Writes `len` bytes to `offset` of the part of `peer`. When it returns, `src` may be changed; the
// bytes may not have landed.
//
// The caller guarantees: `src` is NULL or points to `len` bytes.
sidelane_status_t sidelane_window_put(sidelane_window_t *window,
                                      uint32_t peer,
                                      uint64_t offset,
                                      const void *src,
                                      uint64_t len);

// Writes `len` bytes of this rank's own part, from `from` on, to `offset` of the part of `peer`.
// Does not wait. The bytes may be read until sidelane_window_quiet() returns: what is written
// there before that may arrive in their place.
sidelane_status_t sidelane_window_put_nbi(sidelane_window_t *window,
                                          uint32_t peer,
                                          uint64_t offset,
                                          uint64_t from,
                                          uint64_t len);

// As sidelane_window_put(), then sidelane_window_signal().
//
// The caller guarantees: as sidelane_window_put().
sidelane_status_t sidelane_window_put_signal(sidelane_window_t *window,
                                             uint32_t peer,
                                             uint64_t offset,
                                             const void *src,
                                             uint64_t len,
                                             uint64_t value);

// Raises this rank's word at `peer` to `value`, after all earlier puts to it. Values must grow,
// from 1 on.
sidelane_status_t sidelane_window_signal(sidelane_window_t *window, uint32_t peer, uint64_t value);

// Waits until the word that `peer` raises here is at least `value`: then all its earlier puts are
// visible.
sidelane_status_t sidelane_window_wait(sidelane_window_t *window, uint32_t peer, uint64_t value);

// Returns when everything that this rank has put or signalled so far has landed.
sidelane_status_t sidelane_window_quiet(sidelane_window_t *window);

// Returns when all members have entered. Then their earlier puts have landed. Collective.
sidelane_status_t sidelane_window_barrier(sidelane_window_t *window);

// Copies `len` bytes of this rank's own part to `into`.
//
// The caller guarantees: `into` is NULL, or `len` bytes may be written there.
sidelane_status_t sidelane_window_read(sidelane_window_t *window, uint64_t offset, void *into, uint64_t len);

// Copies `len` bytes to this rank's own part.
//
// The caller guarantees: `from` is NULL or points to `len` bytes.
sidelane_status_t sidelane_window_write(sidelane_window_t *window,
                                        uint64_t offset,
                                        const void *from,
                                        uint64_t len);

// Closes the window. Its bytes at this rank are free then. NULL is nothing.
sidelane_status_t sidelane_window_close(sidelane_window_t *window);

// The router of a system or model: megatron, deepspeed_top1, deepspeed_top2, deepspeed_topk,
// gshard, switch, tutel, deepseek_v3, mixtral, qwen3, olmoe.
//
// The caller guarantees: `preset` is NULL or a text; `config` is NULL, or as large as its size
// says.
sidelane_status_t sidelane_gate_preset(const char *preset,
                                       uint32_t experts,
                                       uint32_t top_k,
                                       sidelane_gate_config_t *config);

// A router. Local.
//
// The caller guarantees: `config` is NULL, or as large as its size says; `gate` is NULL or valid.
sidelane_status_t sidelane_gate_build(const sidelane_gate_config_t *config, sidelane_gate_t **gate);

// Decides for all tokens of a call. Local.
//
// The caller guarantees: `call` and `decision` are NULL, or as large as their size says; arrays
// are NULL or as large as documented.
sidelane_status_t sidelane_gate_route(sidelane_gate_t *gate,
                                      const sidelane_gate_call_t *call,
                                      sidelane_decision_t *decision);

// The logits that choose in a call, noise and all, to `noisy`, [tokens, experts]. Local.
//
// The caller guarantees: as sidelane_gate_route(); no other thread uses `noisy` meanwhile.
sidelane_status_t sidelane_gate_noisy_logits(sidelane_gate_t *gate,
                                             const sidelane_gate_call_t *call,
                                             float *noisy);

// Closes the gate. NULL is nothing.
sidelane_status_t sidelane_gate_close(sidelane_gate_t *gate);

// The loss that belongs to the router of a system or model (names as of sidelane_gate_preset()),
// with a coefficient of 1 and all tokens together.
//
// The caller guarantees: `preset` is NULL or a text; `balance` is NULL, or as large as its size
// says.
sidelane_status_t sidelane_balance_preset(const char *preset, sidelane_balance_t *balance);

// Adds the number of choices of each expert to `counts`, [parts, experts]: ranks add these up for
// `total_counts`.
//
// The caller guarantees: structs are NULL, or as large as their sizes say; arrays are NULL or as
// large as documented.
sidelane_status_t sidelane_balance_counts(const sidelane_balance_t *balance,
                                          const sidelane_balance_input_t *input,
                                          double *counts);

// Writes the loss to `loss`. Its gradient is added to `d_logits`, [tokens, experts], unless that
// is NULL. Without tokens the loss is 0. Further divisors of a system (ranks that share a loss,
// micro-batches) belong into the coefficient.
//
// The caller guarantees: as sidelane_balance_counts(); `loss` is NULL or valid, and no other
// thread uses `d_logits` meanwhile.
sidelane_status_t sidelane_balance_loss(const sidelane_balance_t *balance,
                                        const sidelane_balance_input_t *input,
                                        float *loss,
                                        float *d_logits);

// `coefficient` times the mean over tokens of (ln of the sum of e^logit)^2, to `loss`. Tokens with
// a 0 in `token_mask` ([tokens], or NULL) do not count. The gradient is added to `d_logits`,
// [tokens, experts], unless that is NULL.
//
// The caller guarantees: `loss` is NULL or valid; arrays are NULL or as large as documented, and
// no other thread uses `d_logits` meanwhile.
sidelane_status_t sidelane_z_loss(float coefficient,
                                  const float *logits,
                                  uint64_t tokens,
                                  uint32_t experts,
                                  const uint8_t *token_mask,
                                  float *loss,
                                  float *d_logits);

// Writes the loss that balances importance and load of a noisy gate (Shazeer's, as in Tutel) to
// `loss`. The gradient to the clean logits is added to `d_logits`, [tokens, experts], unless that
// is NULL.
//
// The caller guarantees: as sidelane_z_loss(); `input` is NULL, or as large as its size says.
sidelane_status_t sidelane_importance_loss(const sidelane_importance_input_t *input,
                                           float *loss,
                                           float *d_logits);

// Adds the gradient of the logits to `d_logits`, [tokens, experts]. It goes back from the gradient
// of the routing weights, which the gradients of combine and dispatch return, through scaling,
// normalization and scores of this gate. Choices have no gradient.
//
// The caller guarantees: as sidelane_z_loss(); `input` is NULL, or as large as its size says.
sidelane_status_t sidelane_gate_weights_backward(sidelane_gate_t *gate,
                                                 const sidelane_weights_input_t *input,
                                                 float *d_logits);

// Names a stream of the caller's, on a device by its number: a `cudaStream_t` or `CUstream`, NULL
// for the legacy default stream. Loads the driver, and uses the device's primary context, as the
// CUDA runtime does. Local.
//
// The caller guarantees: `cuda_stream` is NULL or a stream, which is not destroyed before the
// handle, every layer that uses it and every dispatch of these are closed or finished; `stream` is
// NULL or valid.
sidelane_status_t sidelane_stream_borrow(uint32_t device, void *cuda_stream, sidelane_stream_t **stream);

// Closes the handle; the stream stays the caller's. Layers that use it keep it until they are
// closed. NULL is nothing.
sidelane_status_t sidelane_stream_close(sidelane_stream_t *stream);

// Exact sizes and fixed slots on a device: enqueues the next calls on another stream of the
// device. With exact sizes they come behind all operations on the previous stream; in fixed slots
// the caller orders the streams by events. Local. Other layers refuse it by name.
sidelane_status_t sidelane_ep_set_stream(sidelane_ep_t *ep, sidelane_stream_t *stream);

// Waits until all operations in the layer's stream are done, and returns their outcome:
// SIDELANE_OK, the reason of the world's failure, or an error found by a kernel. If a live rank is
// silent for longer than the world's deadline, the world ends. On the host there is nothing to
// wait for.
sidelane_status_t sidelane_ep_synchronize(sidelane_ep_t *ep);

// Known errors, without waiting: SIDELANE_OK, the reason of the world's failure, or an error found
// by a kernel. Local.
sidelane_status_t sidelane_ep_check(sidelane_ep_t *ep);

// Builds a layer on a group. Collective. `expert_map` may be NULL: experts in contiguous blocks.
//
// With a stream in the options, rows lie on its device. Mode and graphs choose what carries the
// calls out:
//
//   SIDELANE_MODE_EXACT, _BUDGET   the caller's thread enqueues: expert-major rows
//   SIDELANE_MODE_BUDGET with      a constant program: expert-major rows, sums by rank
//     SIDELANE_GRAPHS_SLOTS
//   SIDELANE_MODE_SLOTS            a constant program: rank-major rows, sums by rank, `mode_rows`
//                                  equal to `max_tokens`
//
// The caller guarantees: pointers are NULL or valid; `options` is as large as its size says.
sidelane_status_t sidelane_ep_build(sidelane_group_t *group,
                                    const sidelane_ep_options_t *options,
                                    const sidelane_expert_map_t *expert_map,
                                    sidelane_ep_t **ep);

// Describes a layer.
//
// The caller guarantees: `info` is NULL, or as large as its size says.
sidelane_status_t sidelane_ep_info(sidelane_ep_t *ep, sidelane_ep_info_t *info);

// Moves experts to other ranks: later dispatches use this map. The caller moves the experts'
// weights. Collective; no handle of the layer may be open.
//
// The caller guarantees: `expert_map` is NULL or valid.
sidelane_status_t sidelane_ep_set_expert_map(sidelane_ep_t *ep, const sidelane_expert_map_t *expert_map);

// Masks ranks, for maintenance or to drain them: a flag for each rank of the group, 1 for an
// active one. In later dispatches a masked rank sends no rows and receives none. Choices of its
// experts go to replicas at active ranks or are dropped. Collective, masked ranks included, which
// live and make all calls with the others. No handle of the layer may be open; in fixed slots on a
// device, no dispatch may wait for its combine. On a device the call waits for the stream, and
// graphs that were captured before go by the new mask.
//
// A mask that a rank cannot use is refused on all ranks, and the old one stays.
//
// The caller guarantees: `active` is NULL, or has `ranks` flags.
sidelane_status_t sidelane_ep_mask(sidelane_ep_t *ep, const uint8_t *active, uint32_t ranks);

// Writes a flag for each rank of the group to `active`: 1 for an active rank. Local. `ranks` is
// the number of ranks.
//
// The caller guarantees: `active` is NULL, or has room for `ranks` flags.
sidelane_status_t sidelane_ep_active(sidelane_ep_t *ep, uint8_t *active, uint32_t ranks);

// Quantizes tokens, [tokens, hidden], to records, [tokens, record_bytes] of SIDELANE_DTYPE_BYTES:
// the rows that a layer with fp8 dispatches. Local. On a device they are there for what is
// enqueued next.
//
// The caller guarantees: pointers are NULL or valid; tensors are as large as they say, and no
// other thread writes to them during the call.
sidelane_status_t sidelane_ep_quantize(sidelane_ep_t *ep,
                                       const sidelane_tensor_t *tokens,
                                       const sidelane_tensor_t *records);

// A buffer of `count` rows to dispatch, which NICs read in place; a tensor may lie in it. Local.
//
// The caller guarantees: `tokens` is NULL or valid.
sidelane_status_t sidelane_ep_tokens(sidelane_ep_t *ep, uint32_t count, sidelane_tokens_t **tokens);

// Closes the layer. Open rows, outputs and handles stay valid. Graphs that hold its calls must
// have drained, and must not be launched again. Its memory is freed by a later build or close that
// finds the stream idle. NULL is a no-op.
sidelane_status_t sidelane_ep_close(sidelane_ep_t *ep);

// Sends every token to the ranks of its experts, and receives the rows of this rank's experts.
// Collective.
//
// `x` is [tokens, hidden], of records with fp8 [tokens, record_bytes]. Both results are the
// caller's to close.
//
// On a device the call is enqueued, and the rows are there for later operations on the stream. The
// call waits for the counts of all ranks, which give the sizes. In fixed slots it does not wait; a
// refused call is not enqueued and can be made again.
//
// The caller guarantees: pointers are NULL or valid; tensors and arrays are as large as they say,
// and no other thread writes to them meanwhile.
sidelane_status_t sidelane_ep_dispatch(sidelane_ep_t *ep,
                                       const sidelane_tensor_t *x,
                                       const sidelane_routing_t *routing,
                                       sidelane_rows_t **rows,
                                       sidelane_handle_t **handle);

// The layout of a dispatch, before its rows: how many come to each expert, and with which weights.
// No row moves. Collective. sidelane_ep_dispatch_cached() brings rows along it, as often as there
// are tokens for this routing, and takes the memory for them. The handle is the caller's to close.
//
// The caller guarantees: as sidelane_ep_dispatch().
sidelane_status_t sidelane_ep_prepare(sidelane_ep_t *ep,
                                      const sidelane_routing_t *routing,
                                      sidelane_handle_t **handle);

// Sends tokens along the layout of an earlier dispatch: no ids, no counts. Collective. `x` has as
// many tokens as that dispatch.
//
// The caller guarantees: as sidelane_ep_dispatch().
sidelane_status_t sidelane_ep_dispatch_cached(sidelane_ep_t *ep,
                                              const sidelane_tensor_t *x,
                                              sidelane_handle_t *handle,
                                              sidelane_rows_t **rows);

// Says how the rows of a dispatch lie.
//
// The caller guarantees: `info` is NULL, or as large as its size says.
sidelane_status_t sidelane_handle_info(sidelane_handle_t *handle, sidelane_handle_info_t *info);

// How the last call along the handle ended at this rank: the status word as the host sees it now.
// It is final once the stream has passed the call. On the host it is SIDELANE_CALL_OK: calls
// return their errors there.
//
// The caller guarantees: `status` is NULL or valid.
sidelane_status_t sidelane_handle_status(sidelane_handle_t *handle, uint32_t *status);

// Closes the handle. Rows and outputs of it that are open stay as they are. On a device the
// dispatch is no longer in flight when handle, rows and outputs are closed. NULL is nothing.
sidelane_status_t sidelane_handle_close(sidelane_handle_t *handle);

// Says where received rows lie.
//
// The caller guarantees: `info` is NULL, or as large as its size says.
sidelane_status_t sidelane_rows_info(sidelane_rows_t *rows, sidelane_rows_info_t *info);

// Closes rows: their memory goes back to the receive pool, and on a device to calls that are
// enqueued later. NULL is nothing.
sidelane_status_t sidelane_rows_close(sidelane_rows_t *rows);

// A buffer of the received rows' shape that combine takes without a copy: experts write into it.
// Local. On the host, after a combine that was refused, this is the buffer of that combine, as it
// was.
//
// The caller guarantees: `output` is NULL or valid.
sidelane_status_t sidelane_handle_output(sidelane_handle_t *handle, sidelane_output_t **output);

// Says where experts are to write.
//
// The caller guarantees: `info` is NULL, or as large as its size says.
sidelane_status_t sidelane_output_info(sidelane_output_t *output, sidelane_output_info_t *info);

// Closes an output that was not used up. NULL is nothing.
sidelane_status_t sidelane_output_close(sidelane_output_t *output);

// Says where tokens are to be written.
//
// The caller guarantees: `info` is NULL, or as large as its size says.
sidelane_status_t sidelane_tokens_info(sidelane_tokens_t *tokens, sidelane_tokens_info_t *info);

// Closes a buffer of tokens. NULL is nothing.
sidelane_status_t sidelane_tokens_close(sidelane_tokens_t *tokens);

// Exact sizes and budgets on a device: serves sidelane_heap_alloc() on the layer's device from its
// device heap, until the handle is closed. One at a time serves a device in a process. Tokens in
// such memory are sent as they lie where those of sidelane_ep_tokens() would; outputs of experts
// there are copied once, as from elsewhere. Local.
//
// The caller guarantees: `allocator` is NULL or valid.
sidelane_status_t sidelane_ep_heap_allocator(sidelane_ep_t *ep, sidelane_heap_allocator_t **allocator);

// Closes the handle: nothing more is allocated. Allocated memory stays until it is freed, also
// behind the end of its layer and its world. NULL is a no-op.
sidelane_status_t sidelane_heap_allocator_close(sidelane_heap_allocator_t *allocator);

// Allocates bytes of the device heap that serves a device, at a multiple of 512, for any stream.
// NULL if it cannot: sidelane_last_message() of this thread says why, and which setting to raise.
// Where only memory that streams have yet to leave is large enough, waits for these. Its type is
// that of a pluggable allocator of torch: createCustomAllocator(sidelane_heap_alloc,
// sidelane_heap_free).
void *sidelane_heap_alloc(ptrdiff_t bytes, int device, void *stream);

// Frees what sidelane_heap_alloc() gave. The memory is used again once the stream, a cudaStream_t
// or CUstream of the device, has done all that it was given so far. Work of other streams must be
// done, or the stream must wait for it. If that cannot be marked, the memory stays taken, and
// sidelane_last_message() of this thread says why. NULL is a no-op.
//
// The caller guarantees: `stream` is NULL or a stream.
void sidelane_heap_free(void *address, ptrdiff_t bytes, int device, void *stream);

// Returns expert outputs to their tokens and sums them into `out`, [tokens, hidden]. Collective.
//
// Either `output`, the buffer of sidelane_handle_output(), which peers read in place and which is
// used up, or `rows`, a tensor [rows, hidden] anywhere in the place of the layer, which is copied
// once; the other is NULL. If an argument cannot be used, `output` stays open. After any other
// error that leaves the world usable, sidelane_handle_output() on the host gives its buffer again,
// as it was.
//
// On a device the call is enqueued, and `out` is there for later operations on the stream. Errors
// of this rank's own arguments are returned here; sidelane_handle_return_report() returns the
// outcome on all ranks. A refused combine leaves zeros where `out` has room for them.
//
// The caller guarantees: pointers are NULL or valid; tensors are as large as they say, and no
// other thread uses them meanwhile.
sidelane_status_t sidelane_ep_combine(sidelane_ep_t *ep,
                                      sidelane_output_t *output,
                                      const sidelane_tensor_t *rows,
                                      sidelane_handle_t *handle,
                                      const sidelane_tensor_t *out);

// Fixed slots on a device, instead of a combine: the received rows have been read, and nothing
// returns. NULL for `handle` is the last dispatch. Collective. Other layers refuse it by name:
// their dispatches need no combine.
sidelane_status_t sidelane_ep_release(sidelane_ep_t *ep, sidelane_handle_t *handle);

// Gradient of dispatch: sums row gradients to their tokens, [tokens, hidden]. Collective.
//
// Row gradients are `output` or `rows`, as for sidelane_ep_combine(). With `row_weight_gradients`
// (one per received row or, rank-major, per row and choice: as many as `row_weights` of the
// handle) those return, too: `weight_gradients` is [tokens, top_k], 0 for dropped choices. Without
// them, both are NULL. On a device both are device addresses, at multiples of 16 bytes.
//
// The caller guarantees: as sidelane_ep_combine().
sidelane_status_t sidelane_ep_dispatch_backward(sidelane_ep_t *ep,
                                                sidelane_output_t *output,
                                                const sidelane_tensor_t *rows,
                                                const float *row_weight_gradients,
                                                sidelane_handle_t *handle,
                                                const sidelane_tensor_t *token_gradients,
                                                float *weight_gradients);

// Gradient of combine: brings token gradients, [tokens, hidden], to the rows that were summed.
// Collective.
//
// If the layer is weighted, rows are multiplied with their weight, and `weight_gradients`,
// [tokens, top_k], gets the gradients of the weights; otherwise it is NULL. On a device it is a
// device address, at a multiple of 16 bytes.
//
// The caller guarantees: as sidelane_ep_combine().
sidelane_status_t sidelane_ep_combine_backward(sidelane_ep_t *ep,
                                               const sidelane_tensor_t *gradients,
                                               sidelane_handle_t *handle,
                                               sidelane_rows_t **rows,
                                               float *weight_gradients);

// First half of sidelane_ep_dispatch(): announces memory and publishes counts, and does not wait.
// Until it is finished the layer takes no other call. On the host, what this rank does for other
// nodes is done in a thread of its own; on a device the dispatch is enqueued.
//
// Input that the library refuses is reported by the second half, on all ranks. In slots on a
// device it is refused here, and the other ranks hear of it from their streams
// (sidelane_ep_synchronize()).
//
// The caller guarantees: as sidelane_ep_dispatch(), and `x` and the arrays of `routing` stay as
// they are until the dispatch is finished or closed.
sidelane_status_t sidelane_ep_dispatch_start(sidelane_ep_t *ep,
                                             const sidelane_tensor_t *x,
                                             const sidelane_routing_t *routing,
                                             sidelane_pending_dispatch_t **pending);

// Second half of a dispatch. The host waits for the counts of all ranks, moves the rows, and waits
// for its own rows. A device waits for the counts alone, and in fixed slots not at all: rows are
// there for later operations on the stream. Collective. `pending` is consumed.
//
// The caller guarantees: `rows` and `handle` are NULL or valid.
sidelane_status_t sidelane_dispatch_finish(sidelane_pending_dispatch_t *pending,
                                           sidelane_rows_t **rows,
                                           sidelane_handle_t **handle);

// Second half with sizes that stay on the device: nothing waits. With a budget and
// SIDELANE_GRAPHS_SLOTS, the number of rows stands in sidelane_rows_info_t.counts, and the
// handle's status word says whether they came. So the call can be captured into a graph. `pending`
// is used up. Other layers but those in fixed slots have no such sizes: the call is then finished
// as far as the other ranks see it, and refused here by name.
//
// The caller guarantees: as sidelane_dispatch_finish().
sidelane_status_t sidelane_dispatch_unfinished(sidelane_pending_dispatch_t *pending,
                                               sidelane_rows_t **rows,
                                               sidelane_handle_t **handle);

// First half of sidelane_ep_combine(): offers this rank's rows, and does not wait for the others'.
// Until it is finished layer and handle take no other call, and on the host what this rank does
// for other nodes is done in a thread of its own.
//
// The caller guarantees: as sidelane_ep_combine().
sidelane_status_t sidelane_ep_combine_start(sidelane_ep_t *ep,
                                            sidelane_output_t *output,
                                            const sidelane_tensor_t *rows,
                                            sidelane_handle_t *handle,
                                            sidelane_pending_combine_t **pending);

// Second half of a combine, into `out`, [tokens, hidden]. The host waits until all ranks offer
// their rows, and sums; on a device the sums are there for later operations on the stream.
// Collective. `pending` is consumed. If `out` is invalid, the other ranks get their sums and this
// one gets none.
//
// The caller guarantees: as sidelane_ep_combine().
sidelane_status_t sidelane_combine_finish(sidelane_pending_combine_t *pending, const sidelane_tensor_t *out);

// Closes a dispatch that will not be finished: the other ranks cannot go on, so the world ends,
// whether rows lie on the host or on a device. NULL is nothing.
sidelane_status_t sidelane_pending_dispatch_close(sidelane_pending_dispatch_t *pending);

// Closes a combine that will not be finished: the other ranks cannot go on, so the world ends,
// whether rows lie on the host or on a device. NULL is nothing.
sidelane_status_t sidelane_pending_combine_close(sidelane_pending_combine_t *pending);

// Says how the bytes of a dispatch went.
//
// The caller guarantees: `report` is NULL, or as large as its size says.
sidelane_status_t sidelane_handle_report(sidelane_handle_t *handle, sidelane_report_t *report);

// Says how the last combine or gradient along the handle went. On a device it returns the refusal
// of the call, on any rank: its sums are zeros then. Ask before another combine along the
// handle is enqueued.
//
// The caller guarantees: `report` is NULL (then nothing is written), or as large as its size says.
sidelane_status_t sidelane_handle_return_report(sidelane_handle_t *handle, sidelane_report_t *report);

// Builds a collective on a group. Collective.
//
// The caller guarantees: pointers are NULL or valid; `options` is as large as its size says.
sidelane_status_t sidelane_row_collective_build(sidelane_group_t *group,
                                                const sidelane_row_collective_options_t *options,
                                                sidelane_row_collective_t **collective);

// Gathers the rows of all ranks, by rank, from this rank's, [rows, columns]. Ranks may have
// different numbers of rows, or none, and exchange these numbers: the shares. Collective. The
// caller closes both results.
//
// The caller guarantees: pointers are NULL or valid; `mine` is as large as it says, and no other
// thread writes to it during the call.
sidelane_status_t sidelane_all_gather(sidelane_row_collective_t *collective,
                                      const sidelane_tensor_t *mine,
                                      sidelane_rows_t **all,
                                      sidelane_row_partition_t **shares);

// Shares that all ranks know beforehand: `counts`, [ranks], the same on all. Local: nothing is
// exchanged.
//
// The caller guarantees: `counts` is NULL or points to `ranks` numbers; `shares` is NULL or valid.
sidelane_status_t sidelane_row_collective_shares(sidelane_row_collective_t *collective,
                                                 const uint32_t *counts,
                                                 uint32_t ranks,
                                                 sidelane_row_partition_t **shares);

// Gathers the rows of all ranks when all know the shares, so no counts are exchanged. Collective.
//
// The caller guarantees: as sidelane_all_gather().
sidelane_status_t sidelane_all_gather_cached(sidelane_row_collective_t *collective,
                                             const sidelane_tensor_t *mine,
                                             sidelane_row_partition_t *shares,
                                             sidelane_rows_t **all);

// Sums over all ranks of this rank's rows, to `sums`, [rows of this rank, columns]: from each
// rank's rows for all ranks, [rows of all, columns], in the layout of an all-gather along these
// shares. Collective.
//
// Either `output`, the buffer of sidelane_row_partition_output(), which is consumed, or `all`, a
// tensor anywhere, which is copied once; the other is NULL. If an argument is invalid, `output`
// stays open.
//
// The caller guarantees: pointers are NULL or valid; tensors are as large as they say, and no
// other thread uses them during the call.
sidelane_status_t sidelane_reduce_scatter(sidelane_row_collective_t *collective,
                                          sidelane_output_t *output,
                                          const sidelane_tensor_t *all,
                                          sidelane_row_partition_t *shares,
                                          const sidelane_tensor_t *sums);

// Closes the collective. Rows, outputs and shares that are open stay readable. NULL is nothing.
sidelane_status_t sidelane_row_collective_close(sidelane_row_collective_t *collective);

// Says how many rows each rank has.
//
// The caller guarantees: `info` is NULL, or as large as its size says.
sidelane_status_t sidelane_row_partition_info(sidelane_row_partition_t *shares,
                                              sidelane_row_partition_info_t *info);

// A buffer for rows of all ranks that a reduce-scatter takes without a copy. Local.
//
// The caller guarantees: `output` is NULL or valid.
sidelane_status_t sidelane_row_partition_output(sidelane_row_partition_t *shares, sidelane_output_t **output);

// Says how the rows of an all-gather went.
//
// The caller guarantees: `report` is NULL, or as large as its size says.
sidelane_status_t sidelane_row_partition_report(sidelane_row_partition_t *shares, sidelane_report_t *report);

// Closes shares. NULL is nothing.
sidelane_status_t sidelane_row_partition_close(sidelane_row_partition_t *shares);

// Builds a communicator on a group; `options` may be NULL. Collective.
//
// The caller guarantees: pointers are NULL or valid; `options` is as large as its size says.
sidelane_status_t sidelane_communicator_build(sidelane_group_t *group,
                                              const sidelane_communicator_options_t *options,
                                              sidelane_communicator_t **communicator);

// Sums `data` over all ranks, element by element, in place. Collective; all ranks have the same
// number of elements.
//
// The caller guarantees: pointers are NULL or valid; the tensor is as large as it says, and no
// other thread uses it during the call.
sidelane_status_t sidelane_communicator_all_reduce(sidelane_communicator_t *communicator,
                                                   const sidelane_tensor_t *data);

// `data` of rank `root` becomes that of all. Collective; as many elements on all ranks.
//
// The caller guarantees: as sidelane_communicator_all_reduce().
sidelane_status_t sidelane_communicator_broadcast(sidelane_communicator_t *communicator,
                                                  uint32_t root,
                                                  const sidelane_tensor_t *data);

// Sums part r of `send`, which has an equal part for each rank, over all ranks into `receive` of
// rank r. Collective.
//
// The caller guarantees: as sidelane_communicator_all_reduce(), of both tensors.
sidelane_status_t sidelane_communicator_reduce_scatter(sidelane_communicator_t *communicator,
                                                       const sidelane_tensor_t *send,
                                                       const sidelane_tensor_t *receive);

// Part r of `send` goes to rank r; part s of `receive` is from rank s. Both have an equal part for
// each rank. Collective.
//
// The caller guarantees: as sidelane_communicator_reduce_scatter().
sidelane_status_t sidelane_communicator_all_to_all(sidelane_communicator_t *communicator,
                                                   const sidelane_tensor_t *send,
                                                   const sidelane_tensor_t *receive);

// `send` of rank s becomes part s of `receive`, on all. Collective; as many elements on all ranks.
//
// The caller guarantees: as sidelane_communicator_reduce_scatter().
sidelane_status_t sidelane_communicator_all_gather(sidelane_communicator_t *communicator,
                                                   const sidelane_tensor_t *send,
                                                   const sidelane_tensor_t *receive);

// Sends `data` to a rank, which receives it by sidelane_communicator_receive() with as many
// elements. Messages of a pair keep their order. Returns when all bytes are in flight; `data` may
// then be changed. At most two chunks lie unread at the receiver: a longer message waits for it.
// Only this rank gets an error for its own wrong arguments.
//
// The caller guarantees: as sidelane_communicator_all_reduce().
sidelane_status_t sidelane_communicator_send(sidelane_communicator_t *communicator,
                                             uint32_t peer,
                                             const sidelane_tensor_t *data);

// Receives the next message of a rank, which must have as many elements of this type: otherwise it
// is dropped, and both ranks get an error.
//
// The caller guarantees: as sidelane_communicator_all_reduce().
sidelane_status_t sidelane_communicator_receive(sidelane_communicator_t *communicator,
                                                uint32_t peer,
                                                const sidelane_tensor_t *data);

// Sends to a rank and receives from it, concurrently: if both do so, neither waits for the other
// to receive first.
//
// The caller guarantees: as sidelane_communicator_reduce_scatter().
sidelane_status_t sidelane_communicator_exchange(sidelane_communicator_t *communicator,
                                                 uint32_t peer,
                                                 const sidelane_tensor_t *send,
                                                 const sidelane_tensor_t *receive);

// Waits until a rank has taken all messages that were sent to it.
sidelane_status_t sidelane_communicator_flush(sidelane_communicator_t *communicator, uint32_t peer);

// Closes the communicator. NULL is nothing.
sidelane_status_t sidelane_communicator_close(sidelane_communicator_t *communicator);

// Builds a whole layer on a group: gate, dispatch, SwiGLU experts, combine. Collective.
// `expert_map` may be NULL: experts in contiguous blocks.
//
// The caller guarantees: pointers are NULL or valid; structs are as large as their sizes say, and
// arrays as documented.
sidelane_status_t sidelane_moe_build(sidelane_group_t *group,
                                     const sidelane_moe_options_t *options,
                                     const sidelane_expert_map_t *expert_map,
                                     sidelane_moe_t **moe);

// Copies weights into a layer, between passes: arrays of the layer's place, in the order of the
// options; NULL leaves those that are there. Local. On a device they are copied by the stream.
// Nothing is copied if any array is refused.
//
// The caller guarantees: arrays are NULL or as large as the layer's weights; on a device they stay
// as they are until the stream has passed the call.
sidelane_status_t sidelane_moe_set_weights(sidelane_moe_t *moe,
                                           const float *router,
                                           const float *experts,
                                           const float *shared);

// Closes the layer. Tapes that are open stay, but no pass uses them any more. NULL is a no-op.
sidelane_status_t sidelane_moe_close(sidelane_moe_t *moe);

// residual + combined + shared, [tokens, hidden], to `out`, and the tape for the gradients, which
// is the caller's to close or to bring back. Collective.
//
// On a device the pass is enqueued, and `out` is there for later operations on the stream. The
// call waits for the choices of experts, and in each dispatch for its sizes.
//
// The caller guarantees: pointers are NULL or valid; structs, tensors and arrays are as large as
// they say, and no other thread uses `out` meanwhile.
sidelane_status_t sidelane_moe_forward(sidelane_moe_t *moe,
                                       const sidelane_moe_input_t *input,
                                       const sidelane_tensor_t *out,
                                       sidelane_tape_t **tape);

// Gradients of a forward pass from that of its output, [tokens, hidden]. `tape` is used up.
// Collective: ranks bring their tapes in one order.
//
// The caller guarantees: as sidelane_moe_forward().
sidelane_status_t sidelane_moe_backward(sidelane_moe_t *moe,
                                        sidelane_tape_t *tape,
                                        const sidelane_tensor_t *of_out,
                                        const sidelane_moe_gradients_t *gradients);

// Says what a forward pass decided.
//
// The caller guarantees: `info` is NULL, or as large as its size says.
sidelane_status_t sidelane_tape_info(sidelane_tape_t *tape, sidelane_tape_info_t *info);

// Closes the tape without gradients. NULL is nothing.
sidelane_status_t sidelane_tape_close(sidelane_tape_t *tape);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SIDELANE_H */
