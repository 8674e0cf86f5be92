#include "linkcpp-loader.h"

#include "llama-hparams.h"
#include "llama-model-loader.h"

#include "../../ggml/src/ggml-backend-impl.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace {

// A tensor must have an address; this much of memory stands for it.
constexpr size_t placeholder_bytes = 32;

const char * const key_names  = "linkcpp.manifest.names";
const char * const key_types  = "linkcpp.manifest.types";
const char * const key_shapes = "linkcpp.manifest.shapes";
const char * const key_skip   = "linkcpp.skip";
const char * const key_first  = "linkcpp.stage.first";
const char * const key_last   = "linkcpp.stage.last";
const char * const key_behind = "linkcpp.only.behind";

// `extra` of a loader's meta tensor is unused; this address in it marks a placeholder.
char mark;

bool is_expert_tensor(const std::string & name) {
    const size_t at = name.find(".ffn_");
    if (name.compare(0, 4, "blk.") != 0 || at == std::string::npos) {
        return false;
    }
    const std::string tail = name.substr(at + 5);
    for (const char * role : { "gate_up_", "up_", "gate_", "down_" }) {
        for (const char * kind : { "exps", "chexps" }) {
            const std::string stem = std::string(role) + kind;
            for (const char * suffix : { ".weight", ".bias", ".scale" }) {
                if (tail == stem + suffix) {
                    return true;
                }
            }
        }
    }
    return false;
}

int64_t integer_override(const llama_model_loader & loader, const char * key, int64_t otherwise) {
    const auto it = loader.kv_overrides.find(key);
    return it == loader.kv_overrides.end() ? otherwise : it->second.val_i64;
}

void free_base(ggml_backend_buffer_t buffer) { free(buffer->context); }
void * base(ggml_backend_buffer_t buffer) { return buffer->context; }
void memset_nothing(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {}
void set_nothing(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {}
void get_zeros(ggml_backend_buffer_t, const ggml_tensor *, void * data, size_t, size_t size) { memset(data, 0, size); }
void clear_nothing(ggml_backend_buffer_t, uint8_t) {}

const char * buft_name(ggml_backend_buffer_type_t) { return "linkcpp_placeholder"; }
size_t buft_alignment(ggml_backend_buffer_type_t) { return placeholder_bytes; }
size_t buft_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor *) { return placeholder_bytes; }
bool buft_is_host(ggml_backend_buffer_type_t) { return false; }

ggml_backend_buffer_t buft_alloc(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_i iface = {};
    iface.free_buffer   = free_base;
    iface.get_base      = base;
    iface.memset_tensor = memset_nothing;
    iface.set_tensor    = set_nothing;
    iface.get_tensor    = get_zeros;
    iface.clear         = clear_nothing;
    void * memory = aligned_alloc(placeholder_bytes, GGML_PAD(size + placeholder_bytes, placeholder_bytes));
    return memory ? ggml_backend_buffer_init(buft, iface, memory, size) : nullptr;
}

int64_t find_array(const gguf_context * metadata, const char * key, gguf_type type) {
    const int64_t kid = gguf_find_key(metadata, key);
    if (kid < 0 || gguf_get_kv_type(metadata, kid) != GGUF_TYPE_ARRAY || gguf_get_arr_type(metadata, kid) != type) {
        throw std::runtime_error(format("sliced file: %s is missing or has a wrong type", key));
    }
    return kid;
}

void enter_manifest(llama_model_loader & loader) {
    const gguf_context * metadata = loader.metadata;
    const int64_t names  = find_array(metadata, key_names,  GGUF_TYPE_STRING);
    const int64_t types  = find_array(metadata, key_types,  GGUF_TYPE_UINT32);
    const int64_t shapes = find_array(metadata, key_shapes, GGUF_TYPE_UINT64);
    const size_t n = gguf_get_arr_n(metadata, names);
    if (gguf_get_arr_n(metadata, types) != n || gguf_get_arr_n(metadata, shapes) != n * GGML_MAX_DIMS) {
        throw std::runtime_error("sliced file: the manifest's arrays differ in length");
    }
    if (loader.weights_map.empty()) {
        throw std::runtime_error("sliced file: it holds no tensor at all");
    }

    ggml_init_params params = { ggml_tensor_overhead() * (n + 1), nullptr, /*no_alloc =*/ true };
    ggml_context * ctx = ggml_init(params);
    loader.contexts.emplace_back(ctx);

    const uint32_t * type  = (const uint32_t *) gguf_get_arr_data(metadata, types);
    const uint64_t * shape = (const uint64_t *) gguf_get_arr_data(metadata, shapes);
    for (size_t i = 0; i < n; ++i) {
        const std::string name = gguf_get_arr_str(metadata, names, i);
        if (loader.weights_map.count(name)) {
            continue;
        }
        int64_t ne[GGML_MAX_DIMS];
        for (int dim = 0; dim < GGML_MAX_DIMS; ++dim) {
            ne[dim] = (int64_t) shape[i * GGML_MAX_DIMS + dim];
        }
        const int64_t limit = int64_t(1) << 31;
        if (type[i] >= GGML_TYPE_COUNT || ggml_blck_size((ggml_type) type[i]) == 0 || name.size() >= GGML_MAX_NAME ||
            ne[0] < 1 || ne[1] < 1 || ne[2] < 1 || ne[3] < 1 || ne[0] > limit || ne[1] > limit || ne[2] > limit || ne[3] > limit ||
            ne[0] % ggml_blck_size((ggml_type) type[i]) != 0) {
            throw std::runtime_error(format("sliced file: manifest entry %zu (%s) is damaged", i, name.c_str()));
        }
        ggml_tensor * tensor = ggml_new_tensor(ctx, (ggml_type) type[i], GGML_MAX_DIMS, ne);
        ggml_set_name(tensor, name.c_str());
        tensor->extra = &mark;
        // a copy of any entry: its file index is valid, and nothing is ever read at its offset
        llama_model_loader::llama_tensor_weight weight = loader.weights_map.begin()->second;
        weight.tensor = tensor;
        weight.offs   = 0;
        loader.weights_map.emplace(name, weight);
    }
}

} // namespace

void linkcpp_placeholders_find(llama_model_loader & loader) {
    if (gguf_find_key(loader.metadata, key_names) >= 0) {
        enter_manifest(loader);
    }
    const auto skip = loader.kv_overrides.find(key_skip);
    const bool skip_experts = skip != loader.kv_overrides.end() && strcmp(skip->second.val_str, "experts") == 0;
    const int64_t first = integer_override(loader, key_first, 0);
    const int64_t last  = integer_override(loader, key_last, INT64_MAX);
    const int64_t least = std::max(first, integer_override(loader, key_behind, 0));
    for (auto & [name, weight] : loader.weights_map) {
        int layer = -1;
        const bool elsewhere = sscanf(name.c_str(), "blk.%d.", &layer) == 1 && (layer < least || layer >= last);
        if (elsewhere || (skip_experts && is_expert_tensor(name))) {
            weight.tensor->extra = &mark;
        }
    }
}

void linkcpp_stage_range(const llama_model_loader & loader, llama_hparams & hparams) {
    if (!loader.kv_overrides.count(key_first) && !loader.kv_overrides.count(key_last)) {
        return;
    }
    const int64_t n_layer = hparams.n_layer();
    const int64_t first   = integer_override(loader, key_first, 0);
    const int64_t last    = integer_override(loader, key_last, n_layer);
    if (first < 0 || first >= last || last > n_layer) {
        throw std::runtime_error(format("a stage must be a range within layers 0 to %d", (int) n_layer));
    }
    hparams.stage_first = (uint32_t) first;
    hparams.stage_last  = last == n_layer ? UINT32_MAX : (uint32_t) last; // the last stage has the layers behind, too (MTP)
}

bool linkcpp_placeholders_any(const llama_model_loader & loader) {
    for (const auto & [_, weight] : loader.weights_map) {
        if (weight.tensor->extra == &mark) {
            return true;
        }
    }
    return false;
}

bool linkcpp_placeholder_wanted(const llama_model_loader & loader, const std::string & name) {
    const ggml_tensor * meta = loader.get_tensor_meta(name.c_str());
    return meta && meta->extra == &mark;
}

ggml_backend_buffer_type_t linkcpp_placeholder_buft() {
    static ggml_backend_buffer_type buft = {
        /*.iface   =*/ { buft_name, buft_alloc, buft_alignment, nullptr, buft_alloc_size, buft_is_host },
        /*.device  =*/ nullptr,
        /*.context =*/ nullptr,
    };
    return &buft;
}

bool linkcpp_placeholder(const ggml_tensor * tensor) {
    return tensor->buffer && ggml_backend_buffer_get_type(tensor->buffer) == linkcpp_placeholder_buft();
}
