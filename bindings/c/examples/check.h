// Reaction of the examples and tests to a failed call: print the message and exit. The library
// informs the other ranks.
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>

#include "sidelane.h"

#define CHECK(call)                                                                                \
    do {                                                                                           \
        sidelane_status_t status_ = (call);                                                        \
        if (status_ != SIDELANE_OK) {                                                              \
            fprintf(stderr, "%s:%d: %s\n  %s: %s\n", __FILE__, __LINE__, #call,                    \
                    sidelane_status_name(status_), sidelane_last_message());                       \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);              \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#endif
