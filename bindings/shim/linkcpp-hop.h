// linkcpp-hop.h: a step of a ring from its frame to the next stage's frame, without Python.
//
// docs/protocol.md has the bytes, and the Python codec (orchestrator/wire/ring_codec.py) is the reference. Native code
// takes only what is plain: a STEP of few tokens with an F32 boundary, for exactly these layers. The rest is Python's.
#pragma once

#include "linkcpp.h"

#ifdef __cplusplus
extern "C" {
#endif

struct linkcpp_hop;

struct linkcpp_hop_sizes {
    int32_t first, last;         // layers [first, last)
    int32_t is_end;              // behind them come logits, no boundary
    int32_t n_vocab;
    int32_t n_sequences;
    int32_t n_batch;             // most tokens of one step
};

// What a step became: the frame of a STEP or an OUTCOME in two parts, to be sent one behind the other.
struct linkcpp_hop_result {
    const void * head;           // header and fields
    const void * body;           // boundary or logits, where the engine has them: valid until the next decode
    uint64_t n_head, n_body;     // bytes
    int32_t  n_tokens;
    int32_t  n_outputs;
    uint32_t spent_us;           // in llama_decode
    int32_t  status;             // of llama_decode
};

enum linkcpp_hop_status {
    LINKCPP_HOP_DONE   = 0,
    LINKCPP_HOP_YOURS  = 1,      // not plain: nothing was done
    LINKCPP_HOP_FAILED = 2,      // the engine failed (status), or the boundary is not the one it needs (status 0)
};

// The hook may be null for a model that is not cut. Both outlive the hop.
LLAMA_API struct linkcpp_hop * linkcpp_hop_new(struct llama_context * context, struct linkcpp_hook * hook, const struct linkcpp_hop_sizes * sizes);
LLAMA_API void    linkcpp_hop_free(struct linkcpp_hop * hop);
// Run the step in a frame whose checksum was found right. `minor` is the version of the frame to be made; -1: it is not
// to be sent, and its length and checksum are left out. With `rehearse` do all but compute, for the sake of the
// processor's caches.
LLAMA_API int32_t linkcpp_hop_step(struct linkcpp_hop * hop, const void * frame, uint64_t size, int32_t minor, bool rehearse, struct linkcpp_hop_result * result);

#ifdef __cplusplus
}
#endif
