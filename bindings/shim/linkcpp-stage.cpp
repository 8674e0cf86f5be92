// A stage of a ring: the slice of the whole graph between two layer outputs.
//
// The graph is built as for the whole model, so layer numbers, attention patterns and RoPE factors stay right.
// What crosses a cut is found by liveness: every value computed in front of it that something behind it uses and
// that the graph's inputs alone cannot give again. On the way in such a value becomes an input leaf that is filled
// from the boundary; on the way out a node behind all of them stops the scheduler, and the callback copies them.
#include "linkcpp-context.h"
#include "linkcpp-graph.h"
#include "linkcpp-loader.h"

#include "llama-impl.h"

#include "../../ggml/src/ggml-impl.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

namespace {

constexpr int boundary_sources = GGML_MAX_SRC - 1; // of one boundary node; src[0] is what it reshapes

using tensor_list = std::vector<ggml_tensor *>;

bool is_layer_output(const char * name) {
    return strcmp(name, "l_out") == 0 || strcmp(name, "l_last") == 0 || strcmp(name, "nemotron_h_block_out") == 0;
}

ggml_tensor * root_of(ggml_tensor * t) { return t->view_src ? t->view_src : t; }

// "cache_k_l7" -> 7; -1 for what is no cache of a layer
int cache_layer(const ggml_tensor * t) {
    const char * name = ggml_get_name(t);
    const char * at = strstr(name, "_l");
    return strncmp(name, "cache_", 6) == 0 && at ? atoi(at + 2) : -1;
}

struct sliced_graph {
    tensor_list nodes;
    std::unordered_map<const ggml_tensor *, int> index;
    std::vector<bool> from_inputs; // per node: can it be computed from the graph's inputs alone, without weights and caches?

    explicit sliced_graph(ggml_cgraph * gf) {
        for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
            const ggml_tensor * t = ggml_graph_node(gf, i);
            nodes.push_back(ggml_graph_node(gf, i));
            index[t] = i;
            bool result = !t->view_src || recomputable(t->view_src);
            for (const ggml_tensor * source : t->src) {
                result = result && (!source || source == t || recomputable(source)); // a cast is its own source
            }
            from_inputs.push_back(result);
        }
    }

    // Sources come before their users, so their entries exist when this is asked.
    bool recomputable(const ggml_tensor * t) const {
        const auto it = index.find(t);
        return it == index.end() ? (t->flags & GGML_TENSOR_FLAG_INPUT) != 0 : from_inputs[it->second];
    }

    // Values of nodes in front of position `cut` that nodes behind it use, in graph order.
    tensor_list live(int cut) {
        tensor_list found;
        std::unordered_set<const ggml_tensor *> seen;
        for (size_t i = cut; i < nodes.size(); ++i) {
            auto use = [&](ggml_tensor * source) {
                ggml_tensor * root = source ? root_of(source) : nullptr;
                const auto it = root ? index.find(root) : index.end();
                if (it != index.end() && it->second < cut && !recomputable(root) && seen.insert(root).second) {
                    found.push_back(root);
                }
            };
            use(nodes[i]->view_src);
            for (ggml_tensor * source : nodes[i]->src) {
                use(source);
            }
        }
        std::sort(found.begin(), found.end(), [&](auto * a, auto * b) { return index.at(a) < index.at(b); });
        return found;
    }

    // A layer whose cache is touched on both sides of the cut, or -1.
    int shared_cache(int cut) const {
        std::unordered_set<int> front;
        for (int i = 0; i < (int) nodes.size(); ++i) {
            auto touch = [&](ggml_tensor * source) {
                const int layer = source ? cache_layer(root_of(source)) : -1;
                if (layer < 0) {
                    return -1;
                }
                if (i < cut) {
                    front.insert(layer);
                    return -1;
                }
                return front.count(layer) ? layer : -1;
            };
            int layer = touch(nodes[i]->view_src);
            for (int s = 0; s < GGML_MAX_SRC && layer < 0; ++s) {
                layer = touch(nodes[i]->src[s]);
            }
            if (layer >= 0) {
                return layer;
            }
        }
        return -1;
    }
};

// Fills the leaves that stand for the values of the stage before.
class boundary_input : public llm_graph_input_i {
public:
    boundary_input(linkcpp_hook & hook, tensor_list leaves) : hook(hook), leaves(std::move(leaves)) {}

    void set_input(const llama_ubatch *) override {
        for (ggml_tensor * leaf : leaves) {
            const size_t size = ggml_nbytes(leaf);
            if (hook.boundary_used + size > hook.boundary_size) {
                hook.boundary_short = true;
                return;
            }
            if (leaf->buffer) {
                ggml_backend_tensor_set(leaf, hook.boundary + hook.boundary_used, 0, size);
            }
            hook.boundary_used += size;
        }
    }

    bool can_reuse(const llm_graph_params &) override { return true; } // its sizes depend on the number of tokens only

private:
    linkcpp_hook & hook;
    tensor_list leaves;
};

int position_of(const linkcpp_hook & hook, int cut) {
    const auto it = hook.outputs.find(cut - 1);
    if (it == hook.outputs.end()) {
        throw std::runtime_error(format("no cut in front of layer %d: this architecture does not mark the output of layer %d", cut, cut - 1));
    }
    return it->second.n_nodes;
}

void survey(linkcpp_hook & hook, sliced_graph & graph, int n_layer, int n_tokens) {
    hook.cuts.clear();
    for (int cut = 1; cut < n_layer; ++cut) {
        linkcpp_cut result = { cut, 0, -1, 0, 0, n_tokens };
        const auto it = hook.outputs.find(cut - 1);
        if (it == hook.outputs.end()) {
            result.status = -2;
        } else if ((result.layer = graph.shared_cache(it->second.n_nodes)) >= 0) {
            result.status = -1;
        } else {
            for (const ggml_tensor * t : graph.live(it->second.n_nodes)) {
                result.n_tensors += 1;
                result.n_bytes   += (int64_t) ggml_nbytes(t);
            }
        }
        hook.cuts.push_back(result);
    }
}

// A no-op whose sources are the values that leave, so that they are alive when the scheduler stops at it.
void add_boundary(ggml_context * ctx, ggml_cgraph * gf, const tensor_list & leaving, int layer) {
    for (size_t first = 0; first < leaving.size(); first += boundary_sources) {
        const size_t n = std::min<size_t>(boundary_sources, leaving.size() - first);
        ggml_tensor * node = ggml_reshape_1d(ctx, leaving[first], ggml_nelements(leaving[first]));
        for (size_t i = 0; i < n; ++i) {
            node->src[1 + i] = leaving[first + i];
        }
        linkcpp_set_mark(node, { linkcpp_boundary, layer, 0, (int32_t) n });
        ggml_format_name(node, "linkcpp_boundary-%d", layer);
        ggml_build_forward_expand(gf, node);
    }
}

} // namespace

void linkcpp_graph_layer(const llm_graph_context & graph, ggml_tensor * cur, const char * name, int il) {
    linkcpp_hook * hook = linkcpp_hook_of(graph.cparams);
    const bool is_whole = graph.hparams.stage_first == 0 && graph.hparams.stage_last == UINT32_MAX;
    if (!hook || (is_whole && !hook->survey) || il < 0 || !is_layer_output(name)) {
        return;
    }
    // otherwise nodes of the next layer that do not depend on this one could lie in front of the cut
    ggml_build_forward_expand(graph.gf, cur);
    hook->outputs[il] = { cur, ggml_graph_n_nodes(graph.gf) };
}

void linkcpp_stage_slice(linkcpp_hook & hook, const llm_graph_context & context) {
    const int n_layer = (int) context.n_layer;
    const int first   = (int) context.hparams.stage_first;
    const bool is_end = context.hparams.stage_last >= (uint32_t) n_layer;
    if (first == 0 && is_end && !hook.survey) {
        return;
    }
    sliced_graph graph(context.gf);
    if (hook.survey) {
        survey(hook, graph, n_layer, (int) context.n_tokens);
        return;
    }
    const int last  = is_end ? n_layer : (int) context.hparams.stage_last;
    const int begin = first > 0 ? position_of(hook, first) : 0;
    const int end   = is_end ? (int) graph.nodes.size() : position_of(hook, last);
    tensor_list entering = first > 0 ? graph.live(begin) : tensor_list();
    tensor_list leaving  = is_end ? tensor_list() : graph.live(end);
    for (const tensor_list * crossing : { &entering, &leaving }) {
        for (const ggml_tensor * t : *crossing) {
            if (!ggml_is_contiguous(t)) {
                throw std::runtime_error(format("the value '%s' crosses a cut and is not contiguous", ggml_get_name(t)));
            }
        }
    }

    ggml_cgraph * gf = context.gf;
    tensor_list inputs; // set_inputs writes to all of them, whether the slice uses them or not
    for (int i = 0; i < gf->n_leafs; ++i) {
        if (gf->leafs[i]->flags & GGML_TENSOR_FLAG_INPUT) {
            inputs.push_back(gf->leafs[i]);
        }
    }
    for (ggml_tensor * t : entering) {
        t->op    = GGML_OP_NONE;
        t->flags = (t->flags | GGML_TENSOR_FLAG_INPUT) & ~GGML_TENSOR_FLAG_COMPUTE;
        std::fill(std::begin(t->src), std::end(t->src), nullptr);
    }
    ggml_graph_clear(gf);
    for (ggml_tensor * t : inputs) {
        // behind a node, because the allocator looks at the sizes of nodes and their sources, not at bare leaves
        ggml_build_forward_expand(gf, ggml_reshape_1d(context.ctx0, t, ggml_nelements(t)));
    }
    for (ggml_tensor * t : entering) {
        ggml_build_forward_expand(gf, t);
    }
    for (int i = begin; i < end; ++i) {
        ggml_build_forward_expand(gf, graph.nodes[i]);
    }
    llm_graph_result & result = *context.res;
    if (!is_end) {
        add_boundary(context.ctx0, gf, leaving, last);
        result.t_logits = result.t_embd = result.t_embd_pooled = result.t_h_nextn = nullptr;
    }
    if (!entering.empty()) {
        result.add_input(std::make_unique<boundary_input>(hook, std::move(entering)));
    }
    std::unordered_set<const ggml_tensor *> kept;
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        kept.insert(ggml_graph_node(gf, i));
    }
    auto & fused = result.fused_nodes;
    fused.erase(std::remove_if(fused.begin(), fused.end(), [&](const auto & node) { return !kept.count(node.tensor); }), fused.end());
}

int32_t linkcpp_stage_leave(linkcpp_hook & hook, const ggml_tensor * t, const linkcpp_mark & m) {
    if (hook.boundary_short) {
        return -1;
    }
    for (int i = 0; i < m.top_k; ++i) {
        const ggml_tensor * value = t->src[1 + i];
        const size_t at = hook.leaving.size();
        hook.leaving.resize(at + ggml_nbytes(value));
        ggml_backend_tensor_get(value, hook.leaving.data() + at, 0, ggml_nbytes(value));
    }
    return 0;
}

void linkcpp_hook_feed(linkcpp_hook * hook, const void * boundary, size_t n_bytes) {
    hook->boundary       = (const char *) boundary;
    hook->boundary_size  = n_bytes;
    hook->boundary_used  = 0;
    hook->boundary_short = false;
    hook->leaving.clear();
}

bool linkcpp_hook_fed(const linkcpp_hook * hook) {
    return !hook->boundary_short && hook->boundary_used == hook->boundary_size;
}

const void * linkcpp_hook_left(const linkcpp_hook * hook, uint64_t * n_bytes) {
    *n_bytes = hook->leaving.size();
    return hook->leaving.data();
}

void linkcpp_hook_survey(linkcpp_hook * hook) { hook->survey = true; }

int32_t linkcpp_hook_cuts(const linkcpp_hook * hook, linkcpp_cut * cuts, int32_t capacity) {
    const int32_t n = (int32_t) hook->cuts.size();
    std::copy_n(hook->cuts.begin(), std::min(n, capacity), cuts);
    return n;
}
