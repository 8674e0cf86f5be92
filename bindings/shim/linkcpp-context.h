// linkcpp-context.h: what the shim keeps per llama_context, and the marker that tells its nodes from others.
#pragma once

#include "linkcpp.h"

#include "llama-cparams.h"
#include "llama-graph.h"

#include <cstring>
#include <map>
#include <vector>

struct linkcpp_layer_output {
    ggml_tensor * tensor;
    int n_nodes;                       // nodes of the graph when it was named, itself included
};

struct linkcpp_hook {
    linkcpp_callback callback = nullptr;
    void * user_data          = nullptr;
    bool   remote_experts     = false;
    bool   partial_sums       = false;
    bool   survey             = false; // collect what each possible cut would carry

    std::vector<linkcpp_layer> layers; // in order of first appearance
    std::map<int, int> calls;          // layer -> calls so far in the graph that is being built
    std::map<int, linkcpp_layer_output> outputs; // layer -> its output in the graph that is being built
    std::vector<linkcpp_cut> cuts;
    ggml_cgraph * graph = nullptr;     // the last graph that was built; the context owns it

    const char * boundary = nullptr;   // what the stage before sent for this decode
    size_t boundary_size  = 0;
    size_t boundary_used  = 0;
    bool   boundary_short = false;     // it did not fit the graph: the step fails

    std::vector<float>   rows;         // staging for what is not host memory, or not contiguous
    std::vector<float>   weights;
    std::vector<float>   out;
    std::vector<int32_t> experts;
    std::vector<char>    leaving;      // what the stage behind needs of this decode
};

// The hook of a context, found in its parameters; nullptr for an ordinary context.
linkcpp_hook * linkcpp_hook_of(const llama_cparams & cparams);

// Cut the finished graph to the layers of this process (nothing to do for a whole model).
void linkcpp_stage_slice(linkcpp_hook & hook, const llm_graph_context & graph);

constexpr int32_t linkcpp_boundary = 3; // a kind of mark beside those of linkcpp_event_kind

struct linkcpp_mark {
    int32_t kind, layer, call, top_k;
};

// Collect the boundary at its node.
int32_t linkcpp_stage_leave(linkcpp_hook & hook, const ggml_tensor * t, const linkcpp_mark & m);

constexpr int32_t linkcpp_marker    = 0x6c6b6370; // "lkcp"
constexpr int     linkcpp_marker_at = 11;         // op_params[11..15]: marker, kind, layer, call, top_k

inline void linkcpp_set_mark(ggml_tensor * t, const linkcpp_mark & m) {
    const int32_t values[5] = { linkcpp_marker, m.kind, m.layer, m.call, m.top_k };
    memcpy(&t->op_params[linkcpp_marker_at], values, sizeof(values));
}

// Views inherit names but not op_params, so the marker cannot be confused.
inline bool linkcpp_get_mark(const ggml_tensor * t, linkcpp_mark & m) {
    if ((t->op != GGML_OP_RESHAPE && t->op != GGML_OP_REPEAT) || t->op_params[linkcpp_marker_at] != linkcpp_marker) {
        return false;
    }
    memcpy(&m, &t->op_params[linkcpp_marker_at + 1], sizeof(m));
    return true;
}

inline bool linkcpp_is_kind(const ggml_tensor * t, int32_t kind) {
    linkcpp_mark m;
    return linkcpp_get_mark(t, m) && m.kind == kind;
}
