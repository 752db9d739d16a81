/* Common parts of the programs over MPI: ranks, memory, time, and the socket to the bench.
 * README.md has the protocol. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static int rank, ranks;

static void fail(const char *what) {
    fprintf(stderr, "%s: rank %d cannot %s\n", program_invocation_short_name, rank, what);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void *take(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!memory) fail("allocate");
    memset(memory, 0, bytes);
    return memory;
}

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

/* Joins the others, and enters the folder of the inputs. */
static void join(int count, char **words) {
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (count != 2 || chdir(words[1])) fail("enter the folder of its inputs");
}

/* Introduces itself; returns the socket of its instructions. */
static int greet(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "socket"};
    int line = socket(AF_UNIX, SOCK_STREAM, 0);
    if (line < 0 || connect(line, (struct sockaddr *)&address, sizeof address)) fail("reach the bench");
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length;
    MPI_Get_library_version(version, &length);
    version[strcspn(version, ",\n")] = 0;
    uint32_t head[2] = {rank, strlen(version)};
    if (write(line, head, sizeof head) != sizeof head || write(line, version, head[1]) != head[1]) fail("greet the bench");
    return line;
}
