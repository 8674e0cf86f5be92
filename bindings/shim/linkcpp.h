// linkcpp.h: the C interface of the shim that is compiled into libllama.
//
// Two halves. The *hook* belongs to a llama_context and hands the routed rows of every MoE call to a callback
// instead of computing them. The *experts* store belongs to a worker process and computes such rows with the very
// function that the engine itself uses. Everything is plain C so that ctypes can mirror it; linkcpp_sizeof() lets
// the mirror check itself.
#pragma once

#include "llama.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LINKCPP_ABI      3
#define LINKCPP_MAX_NAME 64

// What an expert tensor is for; the order of linkcpp_layer::tensors.
enum linkcpp_role {
    LINKCPP_UP, LINKCPP_GATE, LINKCPP_DOWN, LINKCPP_GATE_UP,
    LINKCPP_UP_BIAS, LINKCPP_GATE_BIAS, LINKCPP_DOWN_BIAS, LINKCPP_GATE_UP_BIAS,
    LINKCPP_UP_SCALE, LINKCPP_GATE_SCALE, LINKCPP_DOWN_SCALE,
    LINKCPP_N_ROLES,
};

// The layer descriptor: one build_moe_ffn call of one layer, as the architecture made it.
struct linkcpp_layer {
    int32_t layer;
    int32_t call;                // counts the calls of a layer from 0 (grovemoe makes two)
    int32_t n_embd;              // length of a routed row, in and out
    int32_t n_ff;                // expert width
    int32_t n_expert;            // experts of the up (or gate_up) tensor
    int32_t top_k;               // rows per token
    int32_t activation;          // llm_ffn_op_type
    int32_t weight_before_ffn;   // the router weight is applied to the row before the expert (llama4)
    int32_t hyper_connections;   // hparams.dsv4_hc_mult
    int32_t precision;           // 4 bits per weight role (up, gate, down, gate_up): ggml_prec of the activation
    float   clamp;               // hparams.swiglu_clamp_exp[layer]
    float   situ_beta;
    float   situ_linear_beta;
    char    architecture[LINKCPP_MAX_NAME];
    char    tensors[LINKCPP_N_ROLES][LINKCPP_MAX_NAME]; // empty: the architecture passes none
};

enum linkcpp_event_kind {
    LINKCPP_DISPATCH = 1,        // rows are ready: copy or send them before returning
    LINKCPP_COMBINE  = 2,        // fill `out` before returning
};

struct linkcpp_event {
    int32_t kind;
    int32_t layer;
    int32_t call;
    int32_t n_tokens;
    int32_t n_embd;
    int32_t top_k;
    const float   * rows;        // [n_tokens, n_embd]   (dispatch)
    const int32_t * experts;     // [n_tokens, top_k]    (dispatch)
    const float   * weights;     // [n_tokens, top_k]    (dispatch)
    float         * out;         // exact: [n_tokens, top_k, n_embd]; sum: [n_tokens, n_embd]   (combine)
};

// Returns 0 to go on; anything else ends llama_decode with status 2 before another node is computed.
typedef int32_t (*linkcpp_callback)(const struct linkcpp_event * event, void * user_data);

struct linkcpp_hook;             // one per llama_context; must outlive it
struct linkcpp_experts;          // one per worker process

LLAMA_API int32_t linkcpp_abi(void);
LLAMA_API size_t  linkcpp_sizeof(const char * name); // of a struct: "layer", "context_params", ...; 0: unknown

// --- hook ---

LLAMA_API struct linkcpp_hook * linkcpp_hook_new(linkcpp_callback callback, void * user_data, bool remote_experts, bool partial_sums);
LLAMA_API void    linkcpp_hook_free(struct linkcpp_hook * hook);
// Put the hook into the parameters of the context that is about to be created (cb_eval and its user data).
LLAMA_API void    linkcpp_hook_attach(struct linkcpp_hook * hook, struct llama_context_params * params);
// Copy up to `capacity` descriptors, in graph order; returns how many there are.
LLAMA_API int32_t linkcpp_hook_layers(const struct linkcpp_hook * hook, struct linkcpp_layer * layers, int32_t capacity);
// The node names of the last graph while its context lives, one per line ("op name"); returns the length without the final zero.
LLAMA_API size_t  linkcpp_hook_graph(const struct linkcpp_hook * hook, char * text, size_t capacity);

// A stage: the model was loaded with kv_overrides "linkcpp.stage.first"/".last" (layers [first, last)). Before
// llama_decode the boundary of the stage before it is fed here; the bytes must stay until it returns.
LLAMA_API void    linkcpp_hook_feed(struct linkcpp_hook * hook, const void * boundary, size_t n_bytes);
// Whether the last decode used up exactly what was fed.
LLAMA_API bool    linkcpp_hook_fed(const struct linkcpp_hook * hook);
// The boundary of the last decode for the stage behind, of all its micro-batches in order; valid until the next feed.
LLAMA_API const void * linkcpp_hook_left(const struct linkcpp_hook * hook, uint64_t * n_bytes);
// What a cut in front of layer `cut` would carry, from the last graph of a context that was made with
// linkcpp_hook_survey: bytes per token; or -1 and the layer whose cache both sides need, or -2: no such mark.
struct linkcpp_cut {
    int32_t cut;
    int32_t status;              // 0: legal, -1: a cache is used on both sides, -2: the architecture marks no output
    int32_t layer;               // of that cache
    int32_t n_tensors;
    int64_t n_bytes;             // of the whole micro-batch
    int32_t n_tokens;
};
LLAMA_API void    linkcpp_hook_survey(struct linkcpp_hook * hook);
LLAMA_API int32_t linkcpp_hook_cuts(const struct linkcpp_hook * hook, struct linkcpp_cut * cuts, int32_t capacity);

// Carry out the copies and shifts of sequences that the engine leaves for the next decode.
LLAMA_API void    linkcpp_catch_up(struct llama_context * context);

// A ggml thread pool that polls briefly and then parks, attached to the context for decode and prefill.
LLAMA_API struct ggml_threadpool * linkcpp_threadpool_new(int32_t n_threads, uint32_t poll);
LLAMA_API void    linkcpp_threadpool_free(struct ggml_threadpool * pool);

// --- experts ---

LLAMA_API struct linkcpp_experts * linkcpp_experts_new(int32_t n_threads, uint32_t poll, bool use_extra_bufts);
LLAMA_API void    linkcpp_experts_free(struct linkcpp_experts * experts);
// Words about the last failure on this thread's call.
LLAMA_API const char * linkcpp_experts_error(const struct linkcpp_experts * experts);
// Hold the experts `ids` (ascending) of a tensor whose outermost dimension counts experts.
// Reads exactly their bytes; with `map` nothing is read and the file is mapped. Returns bytes read, or -1.
LLAMA_API int64_t linkcpp_experts_load(struct linkcpp_experts * experts, const char * name, int32_t type,
        const int64_t * ne, int32_t n_dims, const int32_t * ids, int32_t n_ids,
        const char * path, uint64_t offset, bool map);
// Prepare a layer; returns its handle, or -1. Equal descriptors give the same handle.
LLAMA_API int32_t linkcpp_experts_layer(struct linkcpp_experts * experts, const struct linkcpp_layer * layer);
// Compute n_rows routed rows. counts[r] pairs belong to row r; experts and weights are the pairs in that order.
// out: one row per pair, or, with partial_sums, the weighted sum per row. Returns 0, or -1.
LLAMA_API int32_t linkcpp_experts_compute(struct linkcpp_experts * experts, int32_t handle, bool partial_sums,
        int32_t n_rows, const float * rows, const uint16_t * counts, const uint16_t * ids, const float * weights,
        float * out);

#ifdef __cplusplus
}
#endif
