// A stage's part of a step: frame in, llama_decode, frame out.
#include "linkcpp-hop.h"
#include "linkcpp-frame.h"

#include <algorithm>
#include <memory>
#include <vector>

using namespace linkcpp_frame;

namespace {

constexpr uint8_t  type_step    = 36;
constexpr uint8_t  type_outcome = 37;
constexpr uint32_t most_tokens  = 64; // larger steps compute for so long that Python's microseconds do not count

#pragma pack(push, 1)
struct step_part { // and behind it tokens, positions, sequences (i32), output flags (u8, padded), times (u32), boundary
    uint32_t n_tokens, n_bytes;
    uint16_t layer;
    uint8_t  codec, n_spent;
};
struct outcome_part { // and behind it times (u32), logits
    uint32_t n_rows, length;
    uint16_t layer;
    uint8_t  codec, n_spent;
};
#pragma pack(pop)
static_assert(sizeof(step_part) == 12 && sizeof(outcome_part) == 12, "the protocol's sizes");

struct step_view {
    frame_header header;
    step_part    part;
    const uint8_t * numbers;  // tokens, positions, sequences
    const uint8_t * flags;
    const uint8_t * spent;
    const uint8_t * boundary;
};

int32_t number_at(const uint8_t * numbers, size_t i) { return read_as<int32_t>(numbers + i * sizeof(int32_t)); }

} // namespace

struct linkcpp_hop {
    llama_context * context;
    linkcpp_hook  * hook;
    linkcpp_hop_sizes sizes;
    llama_batch batch;
    std::vector<uint8_t> head;

    linkcpp_hop(llama_context * context, linkcpp_hook * hook, const linkcpp_hop_sizes & sizes)
        : context(context), hook(hook), sizes(sizes), batch(llama_batch_init(most_tokens, 0, 1)) {}
    ~linkcpp_hop() { llama_batch_free(batch); }

    bool take(const uint8_t * frame, size_t size, step_view & step);
    void compose(const step_view & step, int32_t minor, linkcpp_hop_result & result);
    template <typename T> void push(const T & value) { push(&value, sizeof(value)); }
    void push(const void * data, size_t size) {
        head.insert(head.end(), (const uint8_t *) data, (const uint8_t *) data + size);
    }
};

// Whether the frame is a plain step for these layers; fills in the batch.
bool linkcpp_hop::take(const uint8_t * frame, size_t size, step_view & step) {
    if (size < sizeof(frame_header) + sizeof(step_part)) {
        return false;
    }
    step.header = read_as<frame_header>(frame);
    step.part   = read_as<step_part>(frame + sizeof(frame_header));
    const step_part & part = step.part;
    const uint32_t n = part.n_tokens;
    if (!is_plain(step.header, step.header.minor, type_step) || size != sizeof(frame_header) + step.header.length || n < 1 ||
        n > most_tokens || n > (uint32_t) sizes.n_batch || part.layer != sizes.first || part.codec != codec_f32 ||
        part.n_bytes % 4 || part.n_spent == UINT8_MAX || (!hook && part.n_bytes)) {
        return false;
    }
    step.numbers  = frame + sizeof(frame_header) + sizeof(step_part);
    step.flags    = step.numbers + 3 * sizeof(int32_t) * n;
    step.spent    = step.flags + (n + 3) / 4 * 4;
    step.boundary = step.spent + sizeof(uint32_t) * part.n_spent;
    if ((uint64_t) (step.boundary - frame) + part.n_bytes != size) {
        return false;
    }
    for (uint32_t i = 0; i < n; ++i) {
        const int32_t token = number_at(step.numbers, i);
        const int32_t position = number_at(step.numbers, n + i);
        const int32_t sequence = number_at(step.numbers, 2 * n + i);
        if (token < 0 || token >= sizes.n_vocab || position < 0 || sequence < 0 || sequence >= sizes.n_sequences || step.flags[i] > 1) {
            return false;
        }
        batch.token[i]     = token;
        batch.pos[i]       = position;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = sequence;
        batch.logits[i]    = sizes.is_end ? (int8_t) step.flags[i] : 0;
    }
    batch.n_tokens = (int32_t) n;
    return true;
}

void linkcpp_hop::compose(const step_view & step, int32_t minor, linkcpp_hop_result & result) {
    const step_part & part = step.part;
    const uint8_t n_spent = part.n_spent + 1;
    if (sizes.is_end) {
        result.body   = result.n_outputs ? llama_get_logits(context) : nullptr;
        result.n_body = sizeof(float) * result.n_outputs * (uint64_t) sizes.n_vocab;
    } else {
        result.body = linkcpp_hook_left(hook, &result.n_body);
    }
    head.clear();
    push(make_header(minor, sizes.is_end ? type_outcome : type_step, step.header.sequence));
    if (sizes.is_end) {
        push(outcome_part { (uint32_t) result.n_outputs, (uint32_t) sizes.n_vocab, (uint16_t) sizes.last, codec_f32, n_spent });
    } else {
        push(step_part { part.n_tokens, (uint32_t) result.n_body, (uint16_t) sizes.last, codec_f32, n_spent });
        push(step.numbers, (size_t) (step.spent - step.numbers));
    }
    push(step.spent, sizeof(uint32_t) * part.n_spent);
    push(result.spent_us);

    if (minor >= 0) {
        iovec pieces[2] = {
            { head.data() + sizeof(frame_header), head.size() - sizeof(frame_header) },
            { (void *) result.body, result.n_body },
        };
        auto header = read_as<frame_header>(head.data());
        seal(header, pieces, 2);
        memcpy(head.data(), &header, sizeof(header));
    }
    result.head   = head.data();
    result.n_head = head.size();
}

linkcpp_hop * linkcpp_hop_new(llama_context * context, linkcpp_hook * hook, const linkcpp_hop_sizes * sizes) {
    return new linkcpp_hop(context, hook, *sizes);
}

void linkcpp_hop_free(linkcpp_hop * hop) { delete hop; }

int32_t linkcpp_hop_step(linkcpp_hop * hop, const void * frame, uint64_t size, int32_t minor, bool rehearse, linkcpp_hop_result * result) {
    step_view step;
    if (!hop->take((const uint8_t *) frame, size, step)) {
        return LINKCPP_HOP_YOURS;
    }
    if (hop->hook) {
        linkcpp_hook_feed(hop->hook, step.boundary, step.part.n_bytes);
    }
    if (rehearse) {
        return LINKCPP_HOP_DONE;
    }
    result->n_tokens  = hop->batch.n_tokens;
    result->n_outputs = (int32_t) std::count(step.flags, step.flags + step.part.n_tokens, 1);
    const time_point begin = clock_type::now();
    result->status   = llama_decode(hop->context, hop->batch);
    result->spent_us = (uint32_t) std::min(microseconds(clock_type::now() - begin), 4e9f);
    if (result->status != 0 || (hop->hook && !linkcpp_hook_fed(hop->hook))) {
        return LINKCPP_HOP_FAILED;
    }
    hop->compose(step, minor, *result);
    return LINKCPP_HOP_DONE;
}
