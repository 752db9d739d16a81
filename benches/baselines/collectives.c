/* All-reduce, broadcast, all-to-all, all-gather and reduce-scatter over MPI.
 *
 * A baseline of `sidelane collectives --baselines`, which compiles it, starts it with mpirun and
 * instructs every process over a socket; README.md has the protocol. Between rounds a process
 * sleeps in read(2) and costs no core.
 */
#include "line.h"

enum { ALL_REDUCE, BROADCAST, ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER };
/* Words of the file `shape`; behind them, two for each run. */
enum { RANKS, RUNS, FIRST };
enum { MOST = 2 + 2 * 128, WRITE = 0x80 };

static uint32_t shape[MOST];
static float *input, *output;

/* Restores the tensors, where a call changes its input. Returns the number of result elements. */
static int reset(int kind, int elements) {
    if (kind == ALL_REDUCE || kind == BROADCAST) memcpy(output, input, elements * sizeof *input);
    return kind == REDUCE_SCATTER ? elements / ranks : elements;
}

static void call(int kind, int elements) {
    int share = elements / ranks;
    switch (kind) {
    case ALL_REDUCE: MPI_Allreduce(MPI_IN_PLACE, output, elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case BROADCAST: MPI_Bcast(output, elements, MPI_FLOAT, 0, MPI_COMM_WORLD); break;
    case ALL_TO_ALL: MPI_Alltoall(input, share, MPI_FLOAT, output, share, MPI_FLOAT, MPI_COMM_WORLD); break;
    case ALL_GATHER: MPI_Allgather(input, share, MPI_FLOAT, output, share, MPI_FLOAT, MPI_COMM_WORLD); break;
    case REDUCE_SCATTER: MPI_Reduce_scatter_block(input, output, share, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    default: fail("do what is asked");
    }
}

static void write_output(int elements) {
    char path[64];
    snprintf(path, sizeof path, "out.%d", rank);
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(output, sizeof *output, elements, file) != (size_t)elements || fclose(file)) fail("write its result");
}

int main(int count, char **words) {
    join(count, words);
    int file = open("shape", O_RDONLY);
    ssize_t bytes = file < 0 ? -1 : read(file, shape, sizeof shape);
    if (bytes < (ssize_t)(FIRST * sizeof *shape) || shape[RANKS] != (uint32_t)ranks) fail("read what to do");
    if (bytes != (ssize_t)((FIRST + 2 * shape[RUNS]) * sizeof *shape)) fail("read all of what to do");
    close(file);
    size_t most = 0;
    for (uint32_t run = 0; run < shape[RUNS]; run++)
        if (shape[FIRST + 2 * run + 1] > most) most = shape[FIRST + 2 * run + 1];
    input = take(most), output = take(most);
    for (size_t at = 0; at < most / sizeof *input; at++) input[at] = (float)((rank * 7 + at * 3) % 17) - 8.0f;
    int line = greet();
    unsigned char command;
    while (read(line, &command, 1) == 1) {
        uint32_t run = command & ~WRITE;
        if (run >= shape[RUNS]) fail("find such a run");
        int kind = shape[FIRST + 2 * run], elements = shape[FIRST + 2 * run + 1] / sizeof *input;
        int came = reset(kind, elements);
        MPI_Barrier(MPI_COMM_WORLD);
        uint64_t lap[2] = {now(), 0};
        call(kind, elements);
        lap[1] = now();
        if (command & WRITE) write_output(came);
        if (write(line, lap, sizeof lap) != sizeof lap) break;
    }
    MPI_Finalize();
    return 0;
}
