// linkcpp-wire.h: the two frames of the hot path, sent and received without Python.
//
// docs/protocol.md has their bytes, and the Python codec (orchestrator/wire) is the reference. Native code takes only
// what is plain: a sound DISPATCH of a known layer, a sound RESULT of the awaited size, rows as F32. Everything else
// (greetings, refusals, late or damaged frames, a peer that is gone or slow) it leaves as it is to Python, together
// with the bytes that have arrived.
#pragma once

#include "linkcpp.h"

#ifdef __cplusplus
extern "C" {
#endif

// "layer", "peer", "sample", "counts", "rest"; 0: unknown
LLAMA_API size_t   linkcpp_wire_sizeof(const char * name);
LLAMA_API uint32_t linkcpp_crc32c(const void * data, size_t size, uint32_t before);

// --- worker ---

// One described call of one layer; handle -1: not described, or nothing of it is held.
struct linkcpp_wire_layer {
    int32_t handle;              // of linkcpp_experts_layer
    int32_t n_embd;
    int32_t top_k;
    int32_t n_expert;
    const uint8_t * owned;       // [n_expert]
};

// How a connection waits: receives that sleep before the next that looks, and how many they will be the next time
// that somebody else wants the core.
struct linkcpp_wire_patience {
    int32_t sleeps, penalty;
};

// One backbone's connection. Python fills in the first part; `layers` is [n_layers * n_calls].
struct linkcpp_wire_peer {
    struct linkcpp_experts * experts;
    const struct linkcpp_wire_layer * layers;
    int32_t   n_layers;
    int32_t   n_calls;
    uint8_t * buffer;
    uint64_t  capacity;
    float   * out;               // results
    uint64_t  out_capacity;      // floats
    int32_t   fd;
    int32_t   minor;             // protocol version that was agreed
    int32_t   send_timeout_ms;
    struct linkcpp_wire_patience patience;

    uint64_t  have;              // bytes in the buffer; of the request, or of what is left to Python
    uint64_t  sequence;          // the request
    int32_t   layer, call;
    int32_t   partial_sums;
    int32_t   n_rows, n_pairs;
    uint32_t  compute_us;
    uint64_t  n_sent;            // bytes of the answer
};

enum linkcpp_wire_status {
    LINKCPP_WIRE_DONE     = 0,
    LINKCPP_WIRE_YOURS    = 1,   // not for native code: Python goes on with the bytes in the buffer, or reads itself
    LINKCPP_WIRE_COMPUTE  = 2,   // the computation failed; linkcpp_experts_error has the words, nothing was sent
    LINKCPP_WIRE_LOST     = 3,   // the peer is gone, or takes no data
};

// Wait without end for a request. DONE or YOURS.
LLAMA_API int32_t linkcpp_wire_await(struct linkcpp_wire_peer * peer);
// Compute the request and send the answer. DONE, COMPUTE or LOST.
LLAMA_API int32_t linkcpp_wire_answer(struct linkcpp_wire_peer * peer);

// --- backbone ---

struct linkcpp_star;

struct linkcpp_star_sample {
    float    hook_us;            // in dispatch and combine
    uint32_t compute_us;         // of the slowest worker
    uint32_t rows;
};

struct linkcpp_star_counts {
    uint64_t rows, pairs, bytes_out, bytes_in;
};

// A call that native code could not finish.
struct linkcpp_star_rest {
    int32_t  problem;            // 0: an answer is not what it should be, or is late; 1: a send failed
    int32_t  error;              // errno of the send; 0: no data was taken in time
    int32_t  worker;             // where it happened
    int32_t  n_done;             // shares whose answers are in `out` already
    uint64_t sequence;
    int32_t  layer, call, n_tokens, top_k, n_embd;
    uint32_t compute_us;         // of the shares that are done
    float    spent_us;           // in dispatch
    float    waited_us;          // in combine
    const int32_t * experts;     // [n_tokens, top_k]; valid until the next event
    const float   * weights;
    const uint8_t * received;    // of that worker
    uint64_t n_received;
};

LLAMA_API struct linkcpp_star * linkcpp_star_new(int32_t n_workers, bool partial_sums);
LLAMA_API void     linkcpp_star_free(struct linkcpp_star * star);
// What takes the events that are not for native code.
LLAMA_API void     linkcpp_star_fallback(struct linkcpp_star * star, linkcpp_callback fallback, void * user_data);
// The callback of a hook; its user data is the star.
LLAMA_API int32_t  linkcpp_star_event(const struct linkcpp_event * event, void * star);
// Who computes each expert of a call, by worker; forgets the routes of before when `first`.
LLAMA_API void     linkcpp_star_route(struct linkcpp_star * star, bool first, int32_t layer, int32_t call, const int32_t * owners, int32_t n_expert);
LLAMA_API void     linkcpp_star_link(struct linkcpp_star * star, int32_t worker, int32_t fd, int32_t minor);
// Hand a call to Python at least every so many milliseconds, so that it can end the step; 0: never.
LLAMA_API void     linkcpp_star_give_way(struct linkcpp_star * star, int32_t every_ms);
// Until disarmed, calls of up to max_rows rows are native. An unfinished call is forgotten by both.
LLAMA_API void     linkcpp_star_arm(struct linkcpp_star * star, int32_t timeout_ms, int32_t max_rows);
LLAMA_API void     linkcpp_star_disarm(struct linkcpp_star * star);
// Take the next number of a request, for Python; or look at the last one that was taken.
LLAMA_API uint64_t linkcpp_star_number(struct linkcpp_star * star, bool next);
// Whether a call was left unfinished; then it is Python's, and native code is disarmed.
LLAMA_API bool     linkcpp_star_take(struct linkcpp_star * star, struct linkcpp_star_rest * rest);
LLAMA_API void     linkcpp_star_counts_of(const struct linkcpp_star * star, int32_t worker, struct linkcpp_star_counts * counts);
// Note a call that Python carried out.
LLAMA_API void     linkcpp_star_record(struct linkcpp_star * star, float hook_us, uint32_t compute_us, uint32_t rows);
// The last calls, oldest first; returns how many there were in all.
LLAMA_API uint64_t linkcpp_star_samples(const struct linkcpp_star * star, struct linkcpp_star_sample * samples, int32_t capacity);

#ifdef __cplusplus
}
#endif
