// linkcpp-graph.h: what the patched lines of llama-graph.cpp and llama-model.cpp call.
#pragma once

#include "llama-graph.h"

#include <cstdint>

// The arguments of one build_moe_ffn call that its expert half needs.
struct linkcpp_moe_call {
    int             il;
    llm_ffn_op_type type_op;
    int64_t         n_expert;
    int64_t         n_expert_used;
    ggml_tensor * up_exps;
    ggml_tensor * up_exps_b;
    ggml_tensor * up_exps_s;
    ggml_tensor * gate_exps;
    ggml_tensor * gate_exps_b;
    ggml_tensor * gate_exps_s;
    ggml_tensor * down_exps;
    ggml_tensor * down_exps_b;
    ggml_tensor * down_exps_s;
    ggml_tensor * gate_up_exps;
    ggml_tensor * gate_up_exps_b;
};

// Emit the dispatch and combine nodes and return the layer's routed output, or nullptr when no hook is attached.
ggml_tensor * linkcpp_moe_remote(
        const llm_graph_context & graph, const linkcpp_moe_call & moe,
        ggml_tensor * cur, ggml_tensor * selected_experts, ggml_tensor * weights);

// Called wherever an architecture names a tensor: notes the output of layer il.
void linkcpp_graph_layer(const llm_graph_context & graph, ggml_tensor * cur, const char * name, int il);

// After the whole graph is built: keep this stage's slice, refuse placeholders, sink combine nodes.
void linkcpp_graph_finish(const llm_graph_context & graph);
