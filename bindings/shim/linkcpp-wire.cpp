// The worker's end of the native wire: a request from its first byte to the answer's last.
#include "linkcpp-frame.h"

#include <algorithm>
#include <utility>

using namespace linkcpp_frame;

size_t linkcpp_wire_sizeof(const char * name) {
    const std::pair<const char *, size_t> sizes[] = {
        { "layer",  sizeof(linkcpp_wire_layer) },
        { "peer",   sizeof(linkcpp_wire_peer) },
        { "sample", sizeof(linkcpp_star_sample) },
        { "counts", sizeof(linkcpp_star_counts) },
        { "rest",   sizeof(linkcpp_star_rest) },
    };
    for (const auto & [known, size] : sizes) {
        if (strcmp(known, name) == 0) {
            return size;
        }
    }
    return 0;
}

namespace {

struct dispatch_view {
    const float    * rows;
    const float    * weights;
    const uint16_t * counts;
    const uint16_t * experts;
};

dispatch_view view_of(const uint8_t * frame, const dispatch_part & part) {
    const uint8_t * rows    = frame + sizeof(frame_header) + sizeof(dispatch_part);
    const uint8_t * weights = rows + sizeof(float) * part.n_rows * part.n_embd;
    const uint8_t * counts  = weights + sizeof(float) * part.n_pairs;
    return { (const float *) rows, (const float *) weights, (const uint16_t *) counts, (const uint16_t *) counts + part.n_rows };
}

const linkcpp_wire_layer * layer_of(const linkcpp_wire_peer & peer, int32_t layer, int32_t call) {
    if (layer >= peer.n_layers || call >= peer.n_calls) {
        return nullptr;
    }
    const linkcpp_wire_layer & found = peer.layers[layer * peer.n_calls + call];
    return found.handle < 0 ? nullptr : &found;
}

// Whether the whole frame in the buffer is a request that can be computed; fills in the request.
bool take_request(linkcpp_wire_peer & peer, const frame_header & header) {
    if (header.length < sizeof(dispatch_part) || !is_intact(peer.buffer, header)) {
        return false;
    }
    const auto part = read_as<dispatch_part>(peer.buffer + sizeof(header));
    const linkcpp_wire_layer * layer = layer_of(peer, part.layer, part.call);
    if (!layer || part.contract > 1 || part.codec != codec_f32 || part.n_rows < 1 || part.n_pairs < part.n_rows ||
        part.n_embd != (uint32_t) layer->n_embd) {
        return false;
    }
    const uint64_t size = sizeof(part) + 4ull * part.n_rows * part.n_embd + 6ull * part.n_pairs + 2ull * part.n_rows;
    const uint64_t n_replies = part.contract ? part.n_rows : part.n_pairs;
    if (header.length != size + size % 4 || n_replies * part.n_embd > peer.out_capacity) {
        return false;
    }
    const dispatch_view view = view_of(peer.buffer, part);
    uint64_t total = 0;
    for (uint32_t r = 0; r < part.n_rows; ++r) {
        if (view.counts[r] < 1 || view.counts[r] > layer->top_k) {
            return false;
        }
        total += view.counts[r];
    }
    if (total != part.n_pairs) {
        return false;
    }
    for (uint32_t p = 0; p < part.n_pairs; ++p) {
        if (view.experts[p] >= layer->n_expert || !layer->owned[view.experts[p]]) {
            return false;
        }
    }
    peer.sequence     = header.sequence;
    peer.layer        = part.layer;
    peer.call         = part.call;
    peer.partial_sums = part.contract;
    peer.n_rows       = (int32_t) part.n_rows;
    peer.n_pairs      = (int32_t) part.n_pairs;
    return true;
}

} // namespace

int32_t linkcpp_wire_await(linkcpp_wire_peer * peer) {
    size_t have = 0;
    // Once a frame has begun, Python minds how long the rest may take.
    const auto patience = std::chrono::milliseconds(20);
    time_point deadline;
    bool begun = false;
    while (true) {
        const got came = receive(peer->fd, peer->buffer, peer->capacity, have, peer->patience, begun ? &deadline : nullptr);
        peer->have = have;
        if (came != got::bytes) {
            return LINKCPP_WIRE_YOURS;
        }
        if (have < sizeof(frame_header)) {
            return LINKCPP_WIRE_YOURS;
        }
        const auto header = read_as<frame_header>(peer->buffer);
        const size_t size = sizeof(header) + (size_t) header.length;
        if (!is_plain(header, peer->minor, type_dispatch) || size > peer->capacity || have > size) {
            return LINKCPP_WIRE_YOURS;
        }
        if (have == size) {
            return take_request(*peer, header) ? LINKCPP_WIRE_DONE : LINKCPP_WIRE_YOURS;
        }
        if (!begun) {
            begun = true;
            deadline = clock_type::now() + patience;
        }
    }
}

int32_t linkcpp_wire_answer(linkcpp_wire_peer * peer) {
    const auto part = read_as<dispatch_part>(peer->buffer + sizeof(frame_header));
    const dispatch_view view = view_of(peer->buffer, part);
    const linkcpp_wire_layer & layer = *layer_of(*peer, peer->layer, peer->call);

    const time_point begin = clock_type::now();
    const int32_t status = linkcpp_experts_compute(peer->experts, layer.handle, peer->partial_sums != 0, peer->n_rows,
        view.rows, view.counts, view.experts, view.weights, peer->out);
    const time_point end = clock_type::now();
    if (status != 0) {
        return LINKCPP_WIRE_COMPUTE;
    }
    const uint32_t n_replies = peer->partial_sums ? part.n_rows : part.n_pairs;
    peer->compute_us = (uint32_t) std::min(microseconds(end - begin), 4e9f);

    struct { frame_header header; result_part part; } head = {
        make_header(peer->minor, type_result, peer->sequence),
        { peer->compute_us, n_replies, part.n_embd, codec_f32, {} },
    };
    iovec pieces[2] = {
        { &head.part, sizeof(head.part) },
        { peer->out, sizeof(float) * n_replies * part.n_embd },
    };
    seal(head.header, pieces, 2);
    pieces[0] = { &head, sizeof(head) };
    peer->n_sent = sizeof(head) + pieces[1].iov_len;
    const int error = send_all(peer->fd, pieces, 2, end + std::chrono::milliseconds(peer->send_timeout_ms));
    return error == 0 ? LINKCPP_WIRE_DONE : LINKCPP_WIRE_LOST;
}
