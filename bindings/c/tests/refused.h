// Expected results of calls in tests of refusals.
#ifndef REFUSED_H
#define REFUSED_H

#include <string.h>

#include "check.h"

extern uint32_t rank;

// A call must be refused so, and the message must contain these words.
#define REFUSED(call, expected, words)                                                             \
    do {                                                                                           \
        sidelane_status_t status_ = (call);                                                        \
        const char *said_ = sidelane_last_message();                                               \
        if (status_ != (expected) || !strstr(said_, (words))) {                                    \
            fprintf(stderr, "%s:%d: rank %u: %s\n  %s: %s\n  expected %s: ...%s...\n", __FILE__,   \
                    __LINE__, rank, #call, sidelane_status_name(status_), said_,                   \
                    sidelane_status_name(expected), (words));                                      \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

// One rank makes the mistake, the other gets its error.
#define REFUSED_ON_BOTH(call, status_1, words_1, status_0, words_0)                                \
    REFUSED(call, rank == 1 ? (status_1) : (status_0), rank == 1 ? (words_1) : (words_0))

#endif
