// The MoE hook: two marked nodes per call, and an eval callback that stops only at them.
//
// DISPATCH is a view of the router weights whose extra sources keep the rows and the expert ids alive until the
// callback ran. COMBINE is a REPEAT of the right shape whose data the callback overwrites. Both are ordinary ggml
// ops, so every backend and graph reuse work unchanged; a marker in op_params tells them apart from others.
#include "linkcpp.h"
#include "linkcpp-context.h"
#include "linkcpp-graph.h"
#include "linkcpp-hop.h"
#include "linkcpp-loader.h"

#include "llama-arch.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include "ggml-cpp.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

namespace {

bool on_host(const ggml_tensor * t) {
    ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    return buffer && ggml_backend_buffer_is_host(buffer);
}

const float * host_floats(const ggml_tensor * t, std::vector<float> & staging) {
    if (on_host(t)) {
        return (const float *) t->data;
    }
    staging.resize(ggml_nelements(t));
    ggml_backend_tensor_get(t, staging.data(), 0, ggml_nbytes(t));
    return staging.data();
}

// selected_experts is a strided view of an argsort: gather it row by row
const int32_t * host_experts(const ggml_tensor * t, std::vector<int32_t> & staging) {
    const int64_t k = t->ne[0];
    const int64_t n = t->ne[1];
    staging.resize(k * n);
    for (int64_t row = 0; row < n; ++row) {
        if (on_host(t)) {
            memcpy(&staging[row * k], (const char *) t->data + row * t->nb[1], k * sizeof(int32_t));
        } else {
            ggml_backend_tensor_get(t, &staging[row * k], row * t->nb[1], k * sizeof(int32_t));
        }
    }
    return staging.data();
}

int32_t run_callback(linkcpp_hook & hook, ggml_tensor * t, const linkcpp_mark & m) {
    if (m.kind == linkcpp_boundary) {
        return linkcpp_stage_leave(hook, t, m);
    }
    linkcpp_event event = {};
    event.kind  = m.kind;
    event.layer = m.layer;
    event.call  = m.call;
    event.top_k = m.top_k;
    if (m.kind == LINKCPP_DISPATCH) {
        const ggml_tensor * rows = t->src[2];
        event.n_embd   = (int32_t) rows->ne[0];
        event.n_tokens = (int32_t) rows->ne[1];
        event.rows     = host_floats(rows, hook.rows);
        event.experts  = host_experts(t->src[1], hook.experts);
        event.weights  = host_floats(t, hook.weights);
        return hook.callback(&event, hook.user_data);
    }
    event.n_embd   = (int32_t) t->ne[0];
    event.n_tokens = (int32_t) t->ne[2];
    if (on_host(t)) {
        event.out = (float *) t->data;
        return hook.callback(&event, hook.user_data);
    }
    hook.out.resize(ggml_nelements(t));
    event.out = hook.out.data();
    const int32_t status = hook.callback(&event, hook.user_data);
    if (status == 0) {
        ggml_backend_tensor_set(t, hook.out.data(), 0, ggml_nbytes(t));
    }
    return status;
}

bool trampoline(ggml_tensor * t, bool ask, void * user_data) {
    linkcpp_mark m;
    if (!linkcpp_get_mark(t, m)) {
        return false;
    }
    return ask || run_callback(*(linkcpp_hook *) user_data, t, m) == 0;
}

void copy_name(char (&to)[LINKCPP_MAX_NAME], const char * from) {
    snprintf(to, sizeof(to), "%s", from);
}

// Capture the descriptor at the call site, where every architecture-specific decision has been made.
void capture(linkcpp_hook & hook, const llm_graph_context & graph, const linkcpp_moe_call & moe, int call, const ggml_tensor * cur) {
    for (const linkcpp_layer & known : hook.layers) {
        if (known.layer == moe.il && known.call == call) {
            return;
        }
    }
    linkcpp_layer layer = {};
    layer.layer             = moe.il;
    layer.call              = call;
    layer.n_embd            = (int32_t) cur->ne[0];
    layer.n_ff              = (int32_t) moe.down_exps->ne[0];
    layer.n_expert          = (int32_t) moe.down_exps->ne[2];
    layer.top_k             = (int32_t) moe.n_expert_used;
    layer.activation        = moe.type_op;
    layer.weight_before_ffn = graph.arch == LLM_ARCH_LLAMA4;
    layer.hyper_connections = (int32_t) graph.hparams.dsv4_hc_mult;
    layer.clamp             = graph.hparams.swiglu_clamp_exp[moe.il];
    layer.situ_beta         = graph.hparams.situ_beta;
    layer.situ_linear_beta  = graph.hparams.situ_linear_beta;
    copy_name(layer.architecture, llm_arch_name(graph.arch));

    const ggml_tensor * tensors[LINKCPP_N_ROLES] = {
        moe.up_exps,   moe.gate_exps,   moe.down_exps,   moe.gate_up_exps,
        moe.up_exps_b, moe.gate_exps_b, moe.down_exps_b, moe.gate_up_exps_b,
        moe.up_exps_s, moe.gate_exps_s, moe.down_exps_s,
    };
    for (int role = 0; role < LINKCPP_N_ROLES; ++role) {
        if (tensors[role]) {
            copy_name(layer.tensors[role], ggml_get_name(tensors[role]));
        }
    }
    for (int role = LINKCPP_UP; role <= LINKCPP_GATE_UP && graph.prec_policy; ++role) {
        const auto & precisions = graph.prec_policy->prec_src1;
        const auto it = precisions.find(tensors[role]);
        if (it != precisions.end()) {
            layer.precision |= ((int32_t) it->second & 0xf) << (4 * role);
        }
    }
    hook.layers.push_back(layer);
}

bool depends_on(const ggml_tensor * t, const std::unordered_set<const ggml_tensor *> & set) {
    if (t->view_src && set.count(t->view_src)) {
        return true;
    }
    for (const ggml_tensor * source : t->src) {
        if (source && set.count(source)) {
            return true;
        }
    }
    return false;
}

// A node whose effect is not its value: nothing may be moved across it.
bool has_side_effect(const ggml_tensor * t) {
    return t->op == GGML_OP_SET_ROWS || t->op == GGML_OP_CPY || t->op == GGML_OP_SET || linkcpp_is_kind(t, LINKCPP_DISPATCH);
}

// Move every combine behind the nodes that do not need it (the shared expert), so that they run during the trip.
void sink_combines(ggml_cgraph * gf) {
    ggml_tensor ** nodes = ggml_graph_nodes(gf);
    const int n = ggml_graph_n_nodes(gf);
    for (int at = 0; at < n; ++at) {
        if (!linkcpp_is_kind(nodes[at], LINKCPP_COMBINE)) {
            continue;
        }
        int end = at + 1;
        while (end < n && !has_side_effect(nodes[end])) {
            ++end;
        }
        std::unordered_set<const ggml_tensor *> waiting = { nodes[at] };
        std::vector<ggml_tensor *> early;
        std::vector<ggml_tensor *> late = { nodes[at] };
        for (int i = at + 1; i < end; ++i) {
            if (depends_on(nodes[i], waiting)) {
                waiting.insert(nodes[i]);
                late.push_back(nodes[i]);
            } else {
                early.push_back(nodes[i]);
            }
        }
        std::copy(late.begin(), late.end(), std::copy(early.begin(), early.end(), nodes + at));
        at = end - 1;
    }
}

} // namespace

linkcpp_hook * linkcpp_hook_of(const llama_cparams & cparams) {
    return cparams.cb_eval == trampoline ? (linkcpp_hook *) cparams.cb_eval_user_data : nullptr;
}

ggml_tensor * linkcpp_moe_remote(
        const llm_graph_context & graph, const linkcpp_moe_call & moe,
        ggml_tensor * cur, ggml_tensor * selected_experts, ggml_tensor * weights) {
    linkcpp_hook * hook = linkcpp_hook_of(graph.cparams);
    if (!hook || !hook->remote_experts) {
        return nullptr;
    }
    const int call = hook->calls[moe.il]++;
    capture(*hook, graph, moe, call, cur);

    ggml_context * ctx = graph.ctx0;
    const int64_t n_embd   = cur->ne[0];
    const int64_t n_tokens = cur->ne[1];
    const int64_t k        = moe.n_expert_used;
    if (moe.down_exps->ne[1] != n_embd) {
        throw std::runtime_error(format("layer %d: experts whose output is not as wide as their input", moe.il));
    }
    if (!ggml_is_contiguous(cur)) {
        cur = ggml_cont(ctx, cur);
    }
    if (!ggml_is_contiguous(weights)) {
        weights = ggml_cont(ctx, weights);
    }

    ggml_tensor * dispatch = ggml_reshape_2d(ctx, weights, k, n_tokens);
    dispatch->src[1] = selected_experts;
    dispatch->src[2] = cur;
    linkcpp_set_mark(dispatch, { LINKCPP_DISPATCH, moe.il, call, (int32_t) k });
    ggml_format_name(dispatch, "linkcpp_dispatch-%d", moe.il);
    ggml_build_forward_expand(graph.gf, dispatch);

    ggml_tensor * row = ggml_reshape_3d(ctx, cur, n_embd, 1, n_tokens);
    ggml_tensor * combine = ggml_repeat_4d(ctx, row, n_embd, hook->partial_sums ? 1 : k, n_tokens, 1);
    combine->src[1] = dispatch;
    linkcpp_set_mark(combine, { LINKCPP_COMBINE, moe.il, call, (int32_t) k });
    ggml_format_name(combine, "linkcpp_combine-%d", moe.il);
    ggml_build_forward_expand(graph.gf, combine);

    if (hook->partial_sums) {
        ggml_tensor * out = ggml_reshape_2d(ctx, combine, n_embd, n_tokens);
        graph.cb(out, "ffn_moe_out", moe.il);
        return out;
    }
    return graph.build_moe_reduce(combine, weights, k, moe.il);
}

void linkcpp_graph_finish(const llm_graph_context & graph) {
    linkcpp_hook * hook = linkcpp_hook_of(graph.cparams);
    if (hook) {
        linkcpp_stage_slice(*hook, graph);
        hook->calls.clear();
        hook->outputs.clear();
        hook->graph = graph.gf;
    }
    for (int i = 0; i < ggml_graph_n_nodes(graph.gf); ++i) {
        for (const ggml_tensor * source : ggml_graph_node(graph.gf, i)->src) {
            if (source && linkcpp_placeholder(source)) {
                throw std::runtime_error(format("this process does not hold the data of tensor '%s'", ggml_get_name(source)));
            }
        }
    }
    if (hook) {
        sink_combines(graph.gf);
    }
}

int32_t linkcpp_abi(void) { return LINKCPP_ABI; }

size_t linkcpp_sizeof(const char * name) {
    const std::map<std::string, size_t> sizes = {
        { "layer",          sizeof(linkcpp_layer) },
        { "event",          sizeof(linkcpp_event) },
        { "cut",            sizeof(linkcpp_cut) },
        { "hop_sizes",      sizeof(linkcpp_hop_sizes) },
        { "hop_result",     sizeof(linkcpp_hop_result) },
        { "context_params", sizeof(llama_context_params) },
        { "model_params",   sizeof(llama_model_params) },
        { "batch",          sizeof(llama_batch) },
    };
    const auto it = sizes.find(name);
    return it == sizes.end() ? 0 : it->second;
}

linkcpp_hook * linkcpp_hook_new(linkcpp_callback callback, void * user_data, bool remote_experts, bool partial_sums) {
    linkcpp_hook * hook = new linkcpp_hook;
    hook->callback     = callback;
    hook->user_data    = user_data;
    hook->remote_experts = remote_experts;
    hook->partial_sums = partial_sums;
    return hook;
}

void linkcpp_hook_free(linkcpp_hook * hook) { delete hook; }

void linkcpp_hook_attach(linkcpp_hook * hook, llama_context_params * params) {
    params->cb_eval           = trampoline;
    params->cb_eval_user_data = hook;
}

int32_t linkcpp_hook_layers(const linkcpp_hook * hook, linkcpp_layer * layers, int32_t capacity) {
    const int32_t n = (int32_t) hook->layers.size();
    std::copy_n(hook->layers.begin(), std::min(n, capacity), layers);
    return n;
}

size_t linkcpp_hook_graph(const linkcpp_hook * hook, char * text, size_t capacity) {
    std::string names;
    for (int i = 0; hook->graph && i < ggml_graph_n_nodes(hook->graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(hook->graph, i);
        names.append(ggml_op_name(node->op)).append(" ").append(ggml_get_name(node)).append("\n");
    }
    snprintf(text, capacity, "%s", names.c_str());
    return names.size();
}

void linkcpp_catch_up(llama_context * context) { context->memory_update(false); }

ggml_threadpool * linkcpp_threadpool_new(int32_t n_threads, uint32_t poll) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    auto * create = (ggml_threadpool * (*)(ggml_threadpool_params *)) ggml_backend_reg_get_proc_address(reg, "ggml_threadpool_new");
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    params.poll = poll;
    return create ? create(&params) : nullptr;
}

void linkcpp_threadpool_free(ggml_threadpool * pool) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    auto * release = (void (*)(ggml_threadpool *)) ggml_backend_reg_get_proc_address(reg, "ggml_threadpool_free");
    if (pool && release) {
        release(pool);
    }
}
