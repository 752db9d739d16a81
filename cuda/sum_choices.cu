// Sums of a token's choices, where each has a row of its own:
//
//     group       = wire(+0 + weight * row + ...)     experts ascending; a product is rounded, then added
//     out[token]  = round(+0 + group + group + ...)   groups ascending
//
// all in f32. One group for all is `order = expert`; the group of an expert is its rank or its node
// for the other orders.
//
//     grid (tokens, parts of a row). The block first puts the rows of its token in order, a list of
//     them at a time.
#include "rows.h"

struct SumChoices {
    u64 out;      // [tokens, columns], of the type of rows or in f32
    u64 rows;     // [n_rows, columns]
    u64 own;      // [own_rows, columns]: rows that are counted on behind those
    u64 index;    // i32 [tokens, top_k]: the row of a choice, or -1
    u64 experts;  // i32 [tokens, top_k]; -1: dropped. Or 0: choices are in the order of the sum
    u64 weights;  // f32 [tokens, top_k], or 0 for none
    u64 group_of; // i32 [n_experts], or 0 for one group
    u64 status;   // u32
    u32 tokens, top_k, columns, n_rows, n_experts;
    u32 wire;     // F32 or, for bf16 alone, BF16: the type to which each group is rounded
    u32 own_rows, unused;
};

// Choices that are added between two barriers, and vectors that a thread has on their way at a
// time.
enum { LISTED = 64, ADDED = 4 };

struct SumChoicesBlock {
    u64 rows[LISTED];
    float weights[LISTED];
    i32 groups[LISTED];
    u32 count; // of all the token's rows
    u32 fault;
    u32 refused; // the status word was set before
};

// A choice as it is ordered: by group, expert, and its place among the token's choices. None has
// group -1.
struct Choice {
    i32 group, expert, row;
};

// Reads a choice of a token, and gives the code of what is wrong with it, or 0.
DEVICE u32 choice(const struct SumChoices *p, u32 token, u32 k, struct Choice *read) {
    u64 at = (u64)token * p->top_k + k;
    i32 expert = p->experts ? AT(const i32, p->experts)[at] : (i32)k, row = AT(const i32, p->index)[at];
    read->group = -1;
    read->expert = expert;
    read->row = row;
    if (expert == -1 || row == -1) return 0;
    if (expert < 0 || expert >= (i32)p->n_experts) return EXPERT_OUT_OF_RANGE;
    if (row < 0 || row >= (i32)(p->n_rows + p->own_rows)) return INDEX_OUT_OF_RANGE;
    i32 group = p->group_of ? AT(const i32, p->group_of)[expert] : 0;
    if (group < 0) return RANK_OUT_OF_RANGE;
    read->group = group;
    return 0;
}

// Lists the rows of a token that are `first` and following in order. Gives 0 if the token has a
// fault.
DEVICE int list(const struct SumChoices *p, struct SumChoicesBlock *s, u32 token, u32 first, u32 row_bytes) {
    __syncthreads();
    if (threadIdx.x == 0) s->count = s->fault = 0;
    __syncthreads();
    for (u32 k = threadIdx.x; k < p->top_k; k += THREADS) {
        struct Choice own, other;
        u32 fault = choice(p, token, k, &own), before = 0;
        if (fault) {
            report(p->status, fault, token);
            s->fault = 1;
        }
        if (own.group < 0) continue;
        atomicAdd(&s->count, 1u);
        for (u32 i = 0; i < p->top_k; i++) {
            choice(p, token, i, &other);
            if (other.group < 0 || other.group > own.group) continue;
            if (other.group < own.group || other.expert < own.expert || (other.expert == own.expert && i < k)) before++;
        }
        // Those before `first` have larger numbers once it is taken off.
        if (before - first < LISTED) {
            u32 row = (u32)own.row, near = row >= p->n_rows;
            s->rows[before - first] = (near ? p->own : p->rows) + (u64)(near ? row - p->n_rows : row) * row_bytes;
            s->weights[before - first] = p->weights ? AT(const float, p->weights)[(u64)token * p->top_k + k] : 1.0f;
            s->groups[before - first] = own.group;
        }
    }
    __syncthreads();
    return !s->fault;
}

// Ends a group: adds what it sums to. Before the first one that is +0.
DEVICE void close(const struct SumChoices *p, float *total, float *group, u32 columns, int type) {
    for (u32 i = 0; i < columns; i++) {
        total[i] += type == BF16 && p->wire == BF16 ? from_bf16(to_bf16(group[i])) : group[i];
        group[i] = 0;
    }
}

DEVICE void sum_choices(const struct SumChoices *p, int type, int out) {
    SHARED(struct SumChoicesBlock, s);
    u32 columns = 16 / width(type), row_bytes = p->columns * width(type), step = THREADS * columns;
    if (threadIdx.x == 0) s->refused = *AT(const u32, p->status) != 0;
    __syncthreads();
    int refused = s->refused != 0;
    for (u32 token = blockIdx.x; token < p->tokens; token += gridDim.x) {
        for (u32 begin = blockIdx.y * step; begin < p->columns; begin += gridDim.y * step) {
            u32 column = begin + threadIdx.x * columns;
            float total[8] = { 0, 0, 0, 0, 0, 0, 0, 0 }, sum[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
            int good = !refused, more = good;
            i32 group = -1;
            for (u32 first = 0; more; first += LISTED) {
                good = list(p, s, token, first, row_bytes);
                u32 left = good && s->count > first ? s->count - first : 0;
                more = left > LISTED;
                for (u32 i = 0; i < left && i < LISTED; i += ADDED) {
                    uint4 moved[ADDED];
                    for (u32 j = 0; j < ADDED; j++) {
                        moved[j] = zeros();
                        if (i + j < left && i + j < LISTED && column < p->columns)
                            moved[j] = *AT(const uint4, s->rows[i + j] + (u64)column * width(type));
                    }
                    for (u32 j = 0; j < ADDED; j++) {
                        if (i + j >= left || i + j >= LISTED) break;
                        if (s->groups[i + j] != group) close(p, total, sum, columns, type);
                        group = s->groups[i + j];
                        float values[8];
                        unpack(values, moved[j], type);
                        for (u32 c = 0; c < columns; c++) sum[c] += values[c] * s->weights[i + j];
                    }
                }
            }
            close(p, total, sum, columns, type);
            for (u32 i = 0; i < columns && !good; i++) total[i] = 0;
            u64 to = p->out + ((u64)token * p->columns + column) * width(out);
            for (u32 done = 0; done < columns && column < p->columns; done += 16 / width(out))
                *AT(uint4, to + done * width(out)) = rounded(total + done, out);
        }
    }
}

KERNEL(sum_choices_f32, struct SumChoices, p) { sum_choices(&p, F32, F32); }
KERNEL(sum_choices_bf16, struct SumChoices, p) { sum_choices(&p, BF16, BF16); }
KERNEL(sum_choices_f16, struct SumChoices, p) { sum_choices(&p, F16, F16); }
KERNEL(sum_choices_bf16_to_f32, struct SumChoices, p) { sum_choices(&p, BF16, F32); }
KERNEL(sum_choices_f16_to_f32, struct SumChoices, p) { sum_choices(&p, F16, F32); }
