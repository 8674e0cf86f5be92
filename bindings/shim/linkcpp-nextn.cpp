#include "linkcpp-nextn.h"

#include "llama-ext.h"

#include <cstring>

int32_t linkcpp_nextn_length(const llama_context * ctx) {
    const llama_model * model = llama_get_model(ctx);
    return llama_model_n_layer_nextn(model) > 0 ? llama_model_n_embd_out(model) : 0;
}

void linkcpp_nextn_keep(llama_context * ctx, bool keep, bool wanted_only) {
    llama_set_embeddings_nextn(ctx, keep, wanted_only);
}

bool linkcpp_nextn_rows(llama_context * ctx, float * rows, int32_t n_rows) {
    llama_synchronize(ctx);
    const float * found = llama_get_embeddings_nextn(ctx);
    if (!found || n_rows < 0 || n_rows > (int32_t) llama_n_batch(ctx)) {
        return false;
    }
    memcpy(rows, found, sizeof(float) * n_rows * llama_model_n_embd_out(llama_get_model(ctx)));
    return true;
}

bool linkcpp_nextn_choose(llama_context * ctx, int32_t layer) {
    // the graph would end the process
    if (layer < 0 || layer >= llama_model_n_layer_nextn(llama_get_model(ctx))) {
        return false;
    }
    llama_set_nextn_layer_offset(ctx, layer);
    return true;
}

int32_t linkcpp_nextn_decode(llama_context * ctx, llama_batch batch, const float * hidden) {
    batch.embd = const_cast<float *>(hidden);
    return llama_decode(ctx, batch);
}
