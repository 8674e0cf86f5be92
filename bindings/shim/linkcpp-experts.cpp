// The worker's half: a store of (tensor, expert) bytes and the computation of routed rows on them.
//
// Rows go through llm_graph_context::build_moe_experts, the code the engine itself runs. Two shapes cover every
// request: when all rows have the same number of pairs (decode, or a worker that owns everything) the rows keep
// their top-k, so an activation is quantised once; otherwise each pair becomes a row of its own with k = 1, so
// that an expert's weights are still read once per request.
#include "linkcpp.h"
#include "linkcpp-graph.h"

#include "llama-adapter.h"
#include "llama-arch.h"
#include "llama-impl.h"
#include "llama-model.h"

#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace linkcpp_store {

constexpr size_t alignment        = 64;
constexpr int    graph_nodes      = 96;  // build_moe_experts makes about a dozen
constexpr int    cached_pairs     = 64;  // graphs of up to this many pairs are kept
constexpr size_t cached_graphs    = 4096;

struct mapping {
    void * address = MAP_FAILED;
    size_t size    = 0;
    ggml_backend_buffer_ptr buffer;

    explicit mapping(const char * path) {
        const int fd = open(path, O_RDONLY | O_CLOEXEC);
        struct stat info;
        if (fd < 0 || fstat(fd, &info) != 0) {
            const std::string why = strerror(errno);
            if (fd >= 0) { close(fd); }
            throw std::runtime_error(format("cannot open %s: %s", path, why.c_str()));
        }
        size = (size_t) info.st_size;
        address = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
        close(fd);
        if (address == MAP_FAILED) {
            throw std::runtime_error(format("cannot map %s: %s", path, strerror(errno)));
        }
        madvise(address, size, MADV_RANDOM);
        buffer.reset(ggml_backend_cpu_buffer_from_ptr(address, size));
    }

    ~mapping() {
        buffer.reset();
        if (address != MAP_FAILED) {
            munmap(address, size);
        }
    }
};

struct expert_tensor {
    ggml_context_ptr ctx;
    ggml_backend_buffer_ptr buffer;  // empty when the data is mapped
    ggml_tensor * tensor = nullptr;
    std::vector<int32_t> slots;      // expert id -> index in the tensor, or -1
};

struct built_graph {
    std::vector<uint8_t> meta;
    ggml_context_ptr ctx;
    ggml_cgraph * gf      = nullptr;
    ggml_tensor * rows    = nullptr;
    ggml_tensor * ids     = nullptr;
    ggml_tensor * weights = nullptr;
    ggml_tensor * out     = nullptr;
};

struct prepared_layer {
    linkcpp_layer descriptor;
    ggml_tensor * tensors[LINKCPP_N_ROLES] = {};
    std::vector<int32_t> slots;
    std::unique_ptr<llm_graph_params> params; // hparams and cparams of a graph with just this layer
    llama_prec_policy precisions;
};

static void read_fully(int fd, void * to, size_t size, uint64_t offset, const char * path) {
    size_t done = 0;
    while (done < size) {
        const ssize_t n = pread(fd, (char *) to + done, size - done, (off_t) (offset + done));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            throw std::runtime_error(format("%s: %s", path, n == 0 ? "the file ends inside a tensor" : strerror(errno)));
        }
        done += (size_t) n;
    }
}

} // namespace linkcpp_store

using namespace linkcpp_store;

struct linkcpp_experts {
    std::mutex mutex;
    std::string error;

    ggml_backend_ptr backend;
    ggml_threadpool * pool = nullptr;
    std::vector<ggml_backend_buffer_type_t> extra_bufts;

    std::map<std::string, std::unique_ptr<mapping>> mappings;
    std::map<std::string, expert_tensor> tensors;
    std::vector<std::unique_ptr<prepared_layer>> layers;

    ggml_backend_buffer_ptr scratch; // inputs, intermediates and output of one graph at a time
    std::map<std::tuple<int32_t, int32_t, int32_t>, std::unique_ptr<built_graph>> graphs;

    std::vector<float>   gathered;   // rows repeated per pair
    std::vector<int32_t> local_ids;
    std::vector<float>   pair_rows;  // raw rows before they are summed

    linkcpp_experts(int32_t n_threads, uint32_t poll, bool use_extra_bufts);
    ~linkcpp_experts();

    int64_t load(const char * name, ggml_type type, const int64_t * ne, int n_dims, const int32_t * ids, int n_ids,
            const char * path, uint64_t offset, bool map);
    ggml_backend_buffer_type_t buffer_type_for(ggml_tensor * tensor, const std::string & name) const;
    int32_t prepare(const linkcpp_layer & descriptor);
    std::unique_ptr<built_graph> build(prepared_layer & layer, int32_t n_rows, int32_t k);
    void place(built_graph & graph);
    built_graph & graph_for(int32_t handle, int32_t n_rows, int32_t k, std::unique_ptr<built_graph> & temporary);
    void compute(int32_t handle, bool partial_sums, int32_t n_rows, const float * rows, const uint16_t * counts,
            const uint16_t * ids, const float * weights, float * out);
};

linkcpp_experts::linkcpp_experts(int32_t n_threads, uint32_t poll, bool use_extra_bufts) {
    ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    backend.reset(ggml_backend_dev_init(dev, nullptr));
    if (!backend) {
        throw std::runtime_error("the CPU backend does not start");
    }
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    auto * set_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    auto * set_pool = (void (*)(ggml_backend_t, ggml_threadpool *)) ggml_backend_reg_get_proc_address(reg, "ggml_backend_cpu_set_threadpool");
    pool = linkcpp_threadpool_new(n_threads, poll);
    if (!pool || !set_threads || !set_pool) {
        throw std::runtime_error("the CPU backend has no thread pool");
    }
    set_threads(backend.get(), n_threads);
    set_pool(backend.get(), pool);
    if (use_extra_bufts) {
        auto * get_extra = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts");
        for (ggml_backend_buffer_type_t * buft = get_extra ? get_extra(dev) : nullptr; buft && *buft; ++buft) {
            extra_bufts.push_back(*buft);
        }
    }
}

linkcpp_experts::~linkcpp_experts() {
    graphs.clear();
    backend.reset();
    linkcpp_threadpool_free(pool);
}

// As the loader does for the local path: an extra buffer type (repacking) if it can multiply with this tensor.
ggml_backend_buffer_type_t linkcpp_experts::buffer_type_for(ggml_tensor * tensor, const std::string & name) const {
    const bool is_weight = name.size() > 7 && name.compare(name.size() - 7, 7, ".weight") == 0;
    if (!is_weight) {
        return ggml_backend_cpu_buffer_type();
    }
    ggml_init_params params = { 8 * ggml_tensor_overhead(), nullptr, true };
    ggml_context_ptr ctx { ggml_init(params) };
    ggml_tensor * rows = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, tensor->ne[0], 1, 512);
    ggml_tensor * ids  = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 1, 512);
    ggml_tensor * op   = ggml_mul_mat_id(ctx.get(), tensor, rows, ids);
    for (ggml_backend_buffer_type_t buft : extra_bufts) {
        tensor->buffer = ggml_backend_buft_alloc_buffer(buft, 0);
        const bool supported = ggml_backend_dev_supports_op(ggml_backend_get_device(backend.get()), op);
        ggml_backend_buffer_free(tensor->buffer);
        tensor->buffer = nullptr;
        if (supported) {
            return buft;
        }
    }
    return ggml_backend_cpu_buffer_type();
}

int64_t linkcpp_experts::load(const char * name, ggml_type type, const int64_t * ne, int n_dims, const int32_t * ids, int n_ids,
        const char * path, uint64_t offset, bool map) {
    if (n_dims < 1 || n_dims > GGML_MAX_DIMS || n_ids < 1 || type < 0 || type >= GGML_TYPE_COUNT || ggml_blck_size(type) == 0) {
        throw std::runtime_error(format("%s: unusable type or shape", name));
    }
    const int64_t n_expert = ne[n_dims - 1];
    expert_tensor held;
    held.slots.assign(n_expert, -1);
    for (int i = 0; i < n_ids; ++i) {
        if (ids[i] < 0 || ids[i] >= n_expert || (i > 0 && ids[i] <= ids[i - 1])) {
            throw std::runtime_error(format("%s: expert ids must ascend from 0 to %d", name, (int) n_expert - 1));
        }
        held.slots[ids[i]] = map ? ids[i] : i;
    }

    ggml_init_params params = { 2 * ggml_tensor_overhead(), nullptr, true };
    held.ctx.reset(ggml_init(params));
    int64_t shape[GGML_MAX_DIMS] = { 1, 1, 1, 1 };
    std::copy_n(ne, n_dims, shape);
    // With a single expert ggml sees a matrix, and repacking buffers multiply by expert id only with stacks of them.
    const int n_slots = !map && !extra_bufts.empty() && n_ids == 1 && n_expert > 1 ? 2 : n_ids;
    shape[n_dims - 1] = map ? n_expert : n_slots;
    held.tensor = ggml_new_tensor(held.ctx.get(), type, GGML_MAX_DIMS, shape);
    ggml_set_name(held.tensor, name);

    int64_t n_read = 0;
    if (map) {
        auto & file = mappings[path];
        if (!file) {
            file = std::make_unique<mapping>(path);
        }
        if (offset + ggml_nbytes(held.tensor) > file->size) {
            throw std::runtime_error(format("%s: the file ends inside tensor %s", path, name));
        }
        ggml_backend_tensor_alloc(file->buffer.get(), held.tensor, (char *) file->address + offset);
    } else {
        const size_t expert_bytes = ggml_nbytes(held.tensor) / n_slots;
        ggml_backend_buffer_type_t buft = buffer_type_for(held.tensor, name);
        held.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(held.ctx.get(), buft));
        if (!held.buffer) {
            throw std::runtime_error(format("no memory for %zu bytes of %s", ggml_nbytes(held.tensor), name));
        }
        ggml_backend_buffer_set_usage(held.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        const bool direct = buft == ggml_backend_cpu_buffer_type();
        std::vector<char> staging(direct ? 0 : ggml_nbytes(held.tensor));
        char * to = direct ? (char *) held.tensor->data : staging.data();
        const int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0) {
            throw std::runtime_error(format("cannot open %s: %s", path, strerror(errno)));
        }
        try {
            for (int first = 0; first < n_ids;) {
                int last = first + 1; // one read per run of consecutive experts
                while (last < n_ids && ids[last] == ids[last - 1] + 1) {
                    ++last;
                }
                read_fully(fd, to + first * expert_bytes, (last - first) * expert_bytes, offset + ids[first] * expert_bytes, path);
                n_read += (last - first) * expert_bytes;
                first = last;
            }
        } catch (...) {
            close(fd);
            throw;
        }
        close(fd);
        if (!direct) {
            ggml_backend_tensor_set(held.tensor, staging.data(), 0, staging.size());
        }
    }
    tensors[name] = std::move(held);
    return n_read;
}

int32_t linkcpp_experts::prepare(const linkcpp_layer & descriptor) {
    for (size_t i = 0; i < layers.size(); ++i) {
        if (memcmp(&layers[i]->descriptor, &descriptor, sizeof(descriptor)) == 0) {
            return (int32_t) i;
        }
    }
    const llm_arch arch = llm_arch_from_string(std::string(descriptor.architecture, strnlen(descriptor.architecture, LINKCPP_MAX_NAME)));
    if (arch == LLM_ARCH_UNKNOWN) {
        throw std::runtime_error("the descriptor names an architecture that this engine does not know");
    }
    if (descriptor.layer < 0 || descriptor.layer >= LLAMA_MAX_LAYERS || descriptor.n_embd < 1 || descriptor.n_ff < 1 ||
        descriptor.top_k < 1 || descriptor.top_k > LLAMA_MAX_EXPERTS || descriptor.n_expert < 1 || descriptor.n_expert > LLAMA_MAX_EXPERTS) {
        throw std::runtime_error("the descriptor's sizes are out of range");
    }
    switch ((llm_ffn_op_type) descriptor.activation) {
        case LLM_FFN_SILU: case LLM_FFN_GELU: case LLM_FFN_RELU: case LLM_FFN_RELU_SQR: case LLM_FFN_SITU: case LLM_FFN_SWIGLU_OAI_MOE:
            break;
        default:
            throw std::runtime_error(format("the descriptor's activation %d is none of an expert", descriptor.activation));
    }

    auto layer = std::make_unique<prepared_layer>();
    layer->descriptor = descriptor;
    for (int role = 0; role < LINKCPP_N_ROLES; ++role) {
        const std::string name(descriptor.tensors[role], strnlen(descriptor.tensors[role], LINKCPP_MAX_NAME));
        if (name.empty()) {
            continue;
        }
        const auto it = tensors.find(name);
        if (it == tensors.end()) {
            throw std::runtime_error(format("layer %d: tensor %s is not held here", descriptor.layer, name.c_str()));
        }
        expert_tensor & held = it->second;
        if (layer->slots.empty()) {
            layer->slots = held.slots;
        } else if (layer->slots != held.slots) {
            throw std::runtime_error(format("layer %d: tensor %s holds other experts than its siblings", descriptor.layer, name.c_str()));
        }
        layer->tensors[role] = held.tensor;
    }
    ggml_tensor * const * t = layer->tensors;
    const ggml_tensor * first = t[LINKCPP_GATE_UP] ? t[LINKCPP_GATE_UP] : t[LINKCPP_UP];
    if (!first || !t[LINKCPP_DOWN]) {
        throw std::runtime_error(format("layer %d: the descriptor names no up or no down tensor", descriptor.layer));
    }
    const int64_t n_ff = t[LINKCPP_GATE_UP] ? first->ne[1] / 2 : first->ne[1];
    if (first->ne[0] != descriptor.n_embd || n_ff != descriptor.n_ff || t[LINKCPP_DOWN]->ne[0] != descriptor.n_ff ||
        t[LINKCPP_DOWN]->ne[1] != descriptor.n_embd || (int32_t) layer->slots.size() != descriptor.n_expert ||
        (t[LINKCPP_GATE] && (t[LINKCPP_GATE]->ne[0] != descriptor.n_embd || t[LINKCPP_GATE]->ne[1] != descriptor.n_ff))) {
        throw std::runtime_error(format("layer %d: the descriptor's sizes are not those of the tensors", descriptor.layer));
    }
    if (descriptor.activation == LLM_FFN_RELU_SQR && (t[LINKCPP_GATE] || t[LINKCPP_GATE_UP])) {
        throw std::runtime_error("a gated squared ReLU does not exist in this engine");
    }
    if ((descriptor.activation == LLM_FFN_SITU || descriptor.activation == LLM_FFN_SWIGLU_OAI_MOE) && !t[LINKCPP_GATE] && !t[LINKCPP_GATE_UP]) {
        throw std::runtime_error("this activation needs a gate");
    }
    for (int role = LINKCPP_UP; role <= LINKCPP_GATE_UP; ++role) {
        const int32_t precision = (descriptor.precision >> (4 * role)) & 0xf;
        if (precision && t[role]) {
            layer->precisions.prec_src1[t[role]] = (ggml_prec) precision;
        }
    }

    static const llama_adapter_loras no_loras;
    layer->params = std::make_unique<llm_graph_params>();
    llm_graph_params & params = *layer->params;
    params.arch = arch;
    llama_hparams & hparams = params.hparams;
    hparams.n_embd                = descriptor.n_embd;
    hparams.n_layer_all           = descriptor.layer + 1;
    hparams.n_expert              = descriptor.n_expert;
    hparams.situ_beta             = descriptor.situ_beta;
    hparams.situ_linear_beta      = descriptor.situ_linear_beta;
    hparams.dsv4_hc_mult          = descriptor.hyper_connections;
    hparams.n_head_arr.fill(1);
    hparams.n_head_kv_arr.fill(1);
    hparams.n_expert_used_arr.fill(1);
    hparams.swiglu_clamp_exp.fill(0.0f);
    hparams.swiglu_clamp_exp[descriptor.layer] = descriptor.clamp;
    params.loras       = &no_loras;
    params.prec_policy = &layer->precisions;
    layers.push_back(std::move(layer));
    return (int32_t) layers.size() - 1;
}

std::unique_ptr<built_graph> linkcpp_experts::build(prepared_layer & layer, int32_t n_rows, int32_t k) {
    auto built = std::make_unique<built_graph>();
    llm_graph_result result(graph_nodes);
    layer.params->res = &result;
    {
        llm_graph_context graph(*layer.params);
        ggml_context * ctx = graph.ctx0;
        built->rows    = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, layer.descriptor.n_embd, n_rows);
        built->ids     = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, k, n_rows);
        built->weights = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 1, k, n_rows);
        ggml_tensor * const * t = layer.tensors;
        const linkcpp_moe_call moe = {
            layer.descriptor.layer, (llm_ffn_op_type) layer.descriptor.activation, layer.descriptor.n_expert, k,
            t[LINKCPP_UP],   t[LINKCPP_UP_BIAS],   t[LINKCPP_UP_SCALE],
            t[LINKCPP_GATE], t[LINKCPP_GATE_BIAS], t[LINKCPP_GATE_SCALE],
            t[LINKCPP_DOWN], t[LINKCPP_DOWN_BIAS], t[LINKCPP_DOWN_SCALE],
            t[LINKCPP_GATE_UP], t[LINKCPP_GATE_UP_BIAS],
        };
        built->out = graph.build_moe_experts(built->rows, built->ids, built->weights, moe);
        ggml_build_forward_expand(graph.gf, built->out);
    }
    layer.params->res = nullptr;
    built->gf   = result.get_gf();
    built->ctx  = std::move(result.ctx_compute);
    built->meta = std::move(result.buf_compute_meta);
    place(*built);
    return built;
}

// Give every tensor of the graph its own place in the scratch buffer; graphs run one at a time and share it.
void linkcpp_experts::place(built_graph & graph) {
    auto needs_place = [](const ggml_tensor * t) { return !t->view_src && !t->data; };
    size_t size = 0;
    for (ggml_tensor * t = ggml_get_first_tensor(graph.ctx.get()); t; t = ggml_get_next_tensor(graph.ctx.get(), t)) {
        size += needs_place(t) ? GGML_PAD(ggml_nbytes(t), alignment) : 0;
    }
    if (!scratch || ggml_backend_buffer_get_size(scratch.get()) < size + alignment) {
        graphs.clear(); // their tensors point into the old buffer
        scratch.reset(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size + size / 2 + alignment));
        if (!scratch) {
            throw std::runtime_error(format("no memory for %zu bytes of intermediate results", size));
        }
    }
    char * at = (char *) GGML_PAD((uintptr_t) ggml_backend_buffer_get_base(scratch.get()), alignment);
    for (ggml_tensor * t = ggml_get_first_tensor(graph.ctx.get()); t; t = ggml_get_next_tensor(graph.ctx.get(), t)) {
        if (needs_place(t)) {
            ggml_backend_tensor_alloc(scratch.get(), t, at);
            at += GGML_PAD(ggml_nbytes(t), alignment);
        } else if (t->view_src) {
            ggml_backend_view_init(t);
        }
    }
}

built_graph & linkcpp_experts::graph_for(int32_t handle, int32_t n_rows, int32_t k, std::unique_ptr<built_graph> & temporary) {
    const auto key = std::make_tuple(handle, n_rows, k);
    const auto it = graphs.find(key);
    if (it != graphs.end()) {
        return *it->second;
    }
    temporary = build(*layers[handle], n_rows, k);
    if (int64_t(n_rows) * k > cached_pairs) {
        return *temporary;
    }
    if (graphs.size() >= cached_graphs) {
        graphs.clear();
    }
    return *(graphs[key] = std::move(temporary));
}

void linkcpp_experts::compute(int32_t handle, bool partial_sums, int32_t n_rows, const float * rows, const uint16_t * counts,
        const uint16_t * ids, const float * weights, float * out) {
    if (handle < 0 || handle >= (int32_t) layers.size() || n_rows < 1) {
        throw std::runtime_error("no such layer, or no rows");
    }
    prepared_layer & layer = *layers[handle];
    const size_t n_embd = layer.descriptor.n_embd;
    int64_t n_pairs = 0;
    bool uniform = true;
    for (int32_t r = 0; r < n_rows; ++r) {
        n_pairs += counts[r];
        uniform = uniform && counts[r] == counts[0];
    }
    if (n_pairs < 1) {
        throw std::runtime_error("no (token, expert) pair in the request");
    }
    local_ids.resize(n_pairs);
    for (int64_t p = 0; p < n_pairs; ++p) {
        const int32_t slot = ids[p] < layer.slots.size() ? layer.slots[ids[p]] : -1;
        if (slot < 0) {
            throw std::runtime_error(format("layer %d: expert %d is not held here", layer.descriptor.layer, (int) ids[p]));
        }
        local_ids[p] = slot;
    }

    const float * input = rows;
    if (!uniform) {
        gathered.resize(n_pairs * n_embd);
        float * to = gathered.data();
        for (int32_t r = 0; r < n_rows; ++r) {
            for (uint16_t i = 0; i < counts[r]; ++i, to += n_embd) {
                memcpy(to, rows + r * n_embd, n_embd * sizeof(float));
            }
        }
        input = gathered.data();
    }
    std::unique_ptr<built_graph> temporary;
    const int32_t graph_rows = uniform ? n_rows : (int32_t) n_pairs;
    built_graph & graph = graph_for(handle, graph_rows, uniform ? counts[0] : 1, temporary);
    memcpy(graph.rows->data, input, graph_rows * n_embd * sizeof(float));
    memcpy(graph.ids->data, local_ids.data(), n_pairs * sizeof(int32_t));
    if (layer.descriptor.weight_before_ffn) {
        memcpy(graph.weights->data, weights, n_pairs * sizeof(float));
    }
    const ggml_status status = ggml_backend_graph_compute(backend.get(), graph.gf);
    if (status != GGML_STATUS_SUCCESS) {
        throw std::runtime_error(format("the engine ended the computation with status %d", (int) status));
    }

    const float * raw = (const float *) graph.out->data;
    if (!partial_sums) {
        memcpy(out, raw, n_pairs * n_embd * sizeof(float));
        return;
    }
    for (int32_t r = 0; r < n_rows; ++r, out += n_embd) {
        std::fill_n(out, n_embd, 0.0f);
        for (uint16_t i = 0; i < counts[r]; ++i, raw += n_embd, ++weights) {
            const float weight = layer.descriptor.weight_before_ffn ? 1.0f : *weights;
            for (size_t j = 0; j < n_embd; ++j) {
                out[j] += weight * raw[j];
            }
        }
    }
}

// --- C interface: no exception crosses it ---

namespace {

template <typename F>
auto guarded(linkcpp_experts * experts, F && body) -> decltype(body()) {
    std::lock_guard<std::mutex> lock(experts->mutex);
    try {
        return body();
    } catch (const std::exception & error) {
        experts->error = error.what();
    } catch (...) {
        experts->error = "unknown failure";
    }
    return -1;
}

} // namespace

linkcpp_experts * linkcpp_experts_new(int32_t n_threads, uint32_t poll, bool use_extra_bufts) {
    try {
        return new linkcpp_experts(n_threads, poll, use_extra_bufts);
    } catch (const std::exception & error) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, error.what());
        return nullptr;
    }
}

void linkcpp_experts_free(linkcpp_experts * experts) { delete experts; }

const char * linkcpp_experts_error(const linkcpp_experts * experts) { return experts->error.c_str(); }

int64_t linkcpp_experts_load(linkcpp_experts * experts, const char * name, int32_t type, const int64_t * ne, int32_t n_dims,
        const int32_t * ids, int32_t n_ids, const char * path, uint64_t offset, bool map) {
    return guarded(experts, [&]() -> int64_t {
        return experts->load(name, (ggml_type) type, ne, n_dims, ids, n_ids, path, offset, map);
    });
}

int32_t linkcpp_experts_layer(linkcpp_experts * experts, const linkcpp_layer * layer) {
    return guarded(experts, [&]() -> int32_t { return experts->prepare(*layer); });
}

int32_t linkcpp_experts_compute(linkcpp_experts * experts, int32_t handle, bool partial_sums, int32_t n_rows,
        const float * rows, const uint16_t * counts, const uint16_t * ids, const float * weights, float * out) {
    return guarded(experts, [&]() -> int32_t {
        experts->compute(handle, partial_sums, n_rows, rows, counts, ids, weights, out);
        return 0;
    });
}
