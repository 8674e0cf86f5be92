// linkcpp-nextn.h: a model's own prediction layers (MTP, "nextn"), with C names for what the engine exports as C++.
//
// Two contexts take part. The one that computes the answer keeps the hidden row of each token; the other one, made
// with LLAMA_CONTEXT_TYPE_MTP, takes a token together with the hidden row of the token before it, and gives the
// logits of the token behind it and a hidden row to go on with.
#pragma once

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

// Length of a hidden row, or 0 for a context without any.
LLAMA_API int32_t linkcpp_nextn_length(const struct llama_context * ctx);
// Keep hidden rows from the next decode on: of each token, or with `wanted_only` of those whose logits are wanted.
LLAMA_API void    linkcpp_nextn_keep(struct llama_context * ctx, bool keep, bool wanted_only);
// Copy the first `n_rows` hidden rows of the last decode, in the order of its batch. False where there are none.
LLAMA_API bool    linkcpp_nextn_rows(struct llama_context * ctx, float * rows, int32_t n_rows);
// Choose which prediction layer the next decode computes, from 0. False where the model has no such layer.
LLAMA_API bool    linkcpp_nextn_choose(struct llama_context * ctx, int32_t layer);
// llama_decode of a batch of tokens with one hidden row each, [n_tokens, length].
LLAMA_API int32_t linkcpp_nextn_decode(struct llama_context * ctx, struct llama_batch batch, const float * hidden);

#ifdef __cplusplus
}
#endif
