// The head of a slot: `SlotHead` in crates/core/src/plan/buffers.rs.
#pragma once
#include "shim.h"

struct Head {
    u32 rows, tokens;
    u64 digest, call;
    u64 reserved[5];
};
