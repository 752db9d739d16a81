// Place choices: what goes with a rank's own rows, once it is known where these land. Choices that
// have one of them find its output there, and its metadata goes there as `regroup` places rows.
//
// The sources of the runs ascend, and no run is empty.
#include "rows.h"

struct PlaceChoices {
    u64 rows;     // i32 [choices]: the packed row of each, or -1; of own rows afterwards `behind` + where it lands
    u64 from;     // u32 [entries, words]: metadata of packed rows
    u64 metadata; // u32 [places, words]: metadata of landed rows
    struct RowRuns list; // own rows, as `regroup` takes them
    u32 choices, words, behind, unused;
};

KERNEL(place_choices, struct PlaceChoices, p) {
    const struct RowRun *runs = AT(const struct RowRun, p.list.runs);
    u32 self = blockIdx.x * THREADS + threadIdx.x, all = gridDim.x * THREADS;
    i32 *rows = AT(i32, p.rows);
    for (u64 i = self; i < p.choices; i += all) {
        u32 row = (u32)rows[i], low = 0, high = p.list.count;
        while (high - low > 1) {
            u32 middle = low + (high - low) / 2;
            if (runs[middle].first <= row) low = middle;
            else high = middle;
        }
        // Rows below the first run are larger numbers, and so is -1.
        if (row - runs[low].first < runs[low].count) rows[i] = (i32)(p.behind + runs[low].to + (row - runs[low].first));
    }
    struct Ahead ahead = begin_runs(&p.list);
    for (u64 i = self; i < (u64)p.list.rows * p.words; i += all) {
        u32 row = (u32)(i / p.words), word = (u32)(i % p.words);
        find_run(&p.list, row, &ahead);
        i32 entry = source_of(&p.list, &ahead.run, 0, row);
        u32 to = place_of(&ahead.run, row);
        if (to >= p.list.places) continue;
        AT(u32, p.metadata)[(u64)to * p.words + word] = entry < 0 ? 0 : AT(const u32, p.from)[(u64)entry * p.words + word];
    }
}
