// linkcpp-loader.h: tensors that this process does not hold (a sliced file, or experts that workers own).
//
// A placeholder has name, type and shape but no data. The loader asks here where it picks a buffer, prefetches and
// reads; any graph that uses a placeholder is refused by linkcpp_graph_finish.
#pragma once

#include "ggml-backend.h"

#include <string>

struct llama_model_loader;
struct llama_hparams;

// Enter the tensors of the file's manifest that the file itself lacks, and mark those the caller wants to skip
// (model parameter kv_overrides "linkcpp.skip" = "experts", layers outside the stage, and with "linkcpp.only.behind"
// = n the layers before n, for a process that computes prediction layers alone).
void linkcpp_placeholders_find(llama_model_loader & loader);
bool linkcpp_placeholders_any(const llama_model_loader & loader);
bool linkcpp_placeholder_wanted(const llama_model_loader & loader, const std::string & name);

// Take the stage [first, last) from the model parameters (kv_overrides "linkcpp.stage.first" and ".last").
void linkcpp_stage_range(const llama_model_loader & loader, llama_hparams & hparams);

// A buffer type whose tensors take no memory.
ggml_backend_buffer_type_t linkcpp_placeholder_buft();
bool linkcpp_placeholder(const ggml_tensor * tensor);
