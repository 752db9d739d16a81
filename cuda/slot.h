// The head of a slot: `SlotHead` in crates/core/src/plan/buffers.rs.
#pragma once
#include "shim.h"

struct Head {
    u32 rows, tokens;
    u64 digest, call;
    u64 reserved[5];
};

// In place of the rank of an expert: a mask leaves none, so choices of the expert are dropped.
enum { MASKED = -2 };
