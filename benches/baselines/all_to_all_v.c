/* Dispatch and combine over MPI: permute, all-to-all-v, sort by expert; back: unsort,
 * all-to-all-v, sum.
 *
 *   tokens  -copy->  by (rank, expert)  -MPI_Alltoallv->  by (source, expert)  -copy->  by expert
 *   tokens  <-sum--  by (rank, expert)  <-MPI_Alltoallv-  by (source, expert)  <-copy-  by expert
 *
 * A baseline of `sidelane bench --baselines`, which compiles it, starts it with mpirun and
 * instructs every process over a socket; README.md has the protocol. Between rounds a process
 * sleeps in read(2) and costs no core.
 */
#include "line.h"

#include <sys/stat.h>

/* Words of the file `shape`. */
enum { RANKS, TOKENS, HIDDEN, TOP_K, EXPERTS, WORDS };

static int tokens, hidden, top_k, experts, per_rank;
static uint16_t *x, *sent, *came, *rows, *y, *returned, *out;
static int32_t *ids;
static int *send_counts, *send_at, *recv_counts, *recv_at;
/* Rows for each (rank, expert there), as sent, and for each (source, own expert), as received. */
static int *sent_of, *came_of;
/* Index in `sent` of the row of each choice, ascending by expert within a token; and its token's
 * choices in that order. */
static int *place;
static int received;

/* A file of this rank, in the folder that the bench has made. */
static const char *own(const char *name) {
    static char path[64];
    snprintf(path, sizeof path, "%s.%d", name, rank);
    return path;
}

static void *read_file(const char *name, size_t *bytes) {
    struct stat about;
    int file = open(name, O_RDONLY);
    if (file < 0 || fstat(file, &about)) fail("open its input");
    char *to = take(about.st_size);
    for (off_t done = 0; done < about.st_size;) {
        ssize_t got = read(file, to + done, about.st_size - done);
        if (got <= 0) fail("read its input");
        done += got;
    }
    close(file);
    *bytes = about.st_size;
    return to;
}

static void write_file(const char *name, const void *from, size_t bytes) {
    FILE *file = fopen(own(name), "wb");
    if (!file || fwrite(from, 1, bytes, file) != bytes || fclose(file)) fail("write its result");
}

static float wide(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

/* To nearest, ties to even. */
static uint16_t narrow(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

/* The permutation, as a router's layer makes it in every step: choices by expert, then by token. */
static void permute(void) {
    int next[experts];
    memset(sent_of, 0, experts * sizeof *sent_of);
    for (int choice = 0; choice < tokens * top_k; choice++) sent_of[ids[choice]]++;
    for (int expert = 0, at = 0; expert < experts; at += sent_of[expert++]) next[expert] = at;
    for (int choice = 0; choice < tokens * top_k; choice++) place[choice] = next[ids[choice]]++;
    for (int to = 0, at = 0; to < ranks; to++) {
        send_counts[to] = 0;
        for (int expert = 0; expert < per_rank; expert++) send_counts[to] += sent_of[to * per_rank + expert];
        send_at[to] = at;
        at += send_counts[to];
    }
    size_t row = hidden * sizeof *x;
    for (int token = 0; token < tokens; token++)
        for (int choice = 0; choice < top_k; choice++)
            memcpy(sent + (size_t)place[token * top_k + choice] * hidden, x + (size_t)token * hidden, row);
}

/* Copies runs of rows between the order of arrival and that of experts. */
static void sort_rows(uint16_t *by_expert, uint16_t *by_source, int back) {
    size_t at = 0;
    for (int expert = 0; expert < per_rank; expert++)
        for (int source = 0; source < ranks; source++) {
            size_t from = recv_at[source], count = came_of[source * per_rank + expert];
            for (int before = 0; before < expert; before++) from += came_of[source * per_rank + before];
            size_t bytes = count * hidden * sizeof *x;
            if (back) memcpy(by_source + from * hidden, by_expert + at * hidden, bytes);
            else memcpy(by_expert + at * hidden, by_source + from * hidden, bytes);
            at += count;
        }
}

static MPI_Datatype row_type;

static void dispatch(void) {
    permute();
    MPI_Alltoall(sent_of, per_rank, MPI_INT, came_of, per_rank, MPI_INT, MPI_COMM_WORLD);
    received = 0;
    for (int from = 0; from < ranks; from++) {
        recv_counts[from] = 0;
        for (int expert = 0; expert < per_rank; expert++) recv_counts[from] += came_of[from * per_rank + expert];
        recv_at[from] = received;
        received += recv_counts[from];
    }
    MPI_Alltoallv(sent, send_counts, send_at, row_type, came, recv_counts, recv_at, row_type, MPI_COMM_WORLD);
    sort_rows(rows, came, 0);
}

static void combine(void) {
    sort_rows(y, came, 1);
    MPI_Alltoallv(came, recv_counts, recv_at, row_type, returned, send_counts, send_at, row_type, MPI_COMM_WORLD);
    for (int token = 0; token < tokens; token++) {
        const uint16_t *row[top_k];
        /* Places ascend with experts. */
        for (int choice = 0; choice < top_k; choice++) {
            int at = choice;
            const uint16_t *from = returned + (size_t)place[token * top_k + choice] * hidden;
            for (; at > 0 && row[at - 1] > from; at--) row[at] = row[at - 1];
            row[at] = from;
        }
        uint16_t *to = out + (size_t)token * hidden;
        enum { BLOCK = 64 };
        for (int begin = 0; begin < hidden; begin += BLOCK) {
            int end = begin + BLOCK < hidden ? begin + BLOCK : hidden;
            float sum[BLOCK] = {0};
            for (int choice = 0; choice < top_k; choice++)
                for (int i = begin; i < end; i++) sum[i - begin] += wide(row[choice][i]);
            for (int i = begin; i < end; i++) to[i] = narrow(sum[i - begin]);
        }
    }
}

int main(int count, char **words) {
    join(count, words);
    size_t bytes;
    int32_t *shape = read_file("shape", &bytes);
    tokens = shape[TOKENS], hidden = shape[HIDDEN], top_k = shape[TOP_K], experts = shape[EXPERTS];
    if (bytes != WORDS * sizeof *shape || shape[RANKS] != ranks || experts % ranks) fail("do what is asked");
    per_rank = experts / ranks;
    ids = read_file(own("ids"), &bytes);
    x = read_file(own("x"), &bytes);
    y = read_file(own("y"), &bytes);
    size_t mine = (size_t)tokens * top_k * hidden * sizeof *x, most = bytes;
    sent = take(mine), returned = take(mine), came = take(most), rows = take(most);
    out = take((size_t)tokens * hidden * sizeof *x);
    sent_of = take(experts * sizeof(int)), came_of = take(experts * sizeof(int));
    place = take((size_t)tokens * top_k * sizeof(int));
    send_counts = take(ranks * sizeof(int)), send_at = take(ranks * sizeof(int));
    recv_counts = take(ranks * sizeof(int)), recv_at = take(ranks * sizeof(int));
    MPI_Type_contiguous(hidden * sizeof *x, MPI_BYTE, &row_type);
    MPI_Type_commit(&row_type);
    int line = greet();
    char command;
    while (read(line, &command, 1) == 1) {
        MPI_Barrier(MPI_COMM_WORLD);
        uint64_t lap[2] = {now(), 0};
        if (command == 'd') dispatch();
        else if (command == 'c') combine();
        else {
            write_file("rows", rows, (size_t)received * hidden * sizeof *x);
            write_file("out", out, (size_t)tokens * hidden * sizeof *x);
        }
        lap[1] = now();
        if (write(line, lap, sizeof lap) != sizeof lap) break;
    }
    MPI_Finalize();
    return 0;
}
