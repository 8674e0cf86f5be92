// The backbone's end of the native wire: a call's rows out to the workers that own the experts, their answers back.
#include "linkcpp-frame.h"

#include <algorithm>
#include <atomic>
#include <vector>

using namespace linkcpp_frame;

namespace {

constexpr size_t kept_samples = 8192;

struct star_worker {
    int     fd     = -1;
    int32_t minor  = 0;
    linkcpp_wire_patience patience = {};
    std::vector<uint8_t> received;
    size_t  have   = 0;
    // Other threads read these while the hook writes them.
    std::atomic<uint64_t> rows{0}, pairs{0}, bytes_out{0}, bytes_in{0};
};

struct star_share {
    int32_t worker;
    std::vector<int32_t>  rows;    // tokens, ascending
    std::vector<int32_t>  places;  // of its pairs in [n_tokens * top_k], in router order
    std::vector<float>    weights;
    std::vector<uint16_t> tail;    // counts, experts, padding
    std::vector<float>    packed;  // its rows, where they are not all
};

struct star_call {
    bool     pending = false;
    int32_t  layer, call, n_tokens, top_k, n_embd;
    uint64_t sequence;
    float    spent_us;
    std::vector<int32_t> experts;
    std::vector<float>   weights;
    size_t   n_shares;
};

} // namespace

struct linkcpp_star {
    linkcpp_callback fallback = nullptr;
    void * user_data          = nullptr;
    bool   partial_sums;

    bool     armed    = false;
    int32_t  max_rows = 0;
    std::chrono::milliseconds timeout{0};
    std::chrono::milliseconds gives_way{0};
    time_point python_was_asked;
    uint64_t sequence = 0;

    std::vector<star_worker> workers;
    std::vector<std::vector<std::vector<int32_t>>> routes; // [layer][call][expert] -> worker
    std::vector<star_share> shares;                        // of the current call, by worker; those behind n_shares are spare
    std::vector<star_share *> share_of;                    // [worker], null: none
    star_call call;

    bool has_rest = false;
    linkcpp_star_rest rest = {};

    std::vector<linkcpp_star_sample> samples;
    std::atomic<uint64_t> n_samples{0};

    linkcpp_star(int32_t n_workers, bool partial_sums)
        : partial_sums(partial_sums), workers(n_workers), shares(n_workers), share_of(n_workers), samples(kept_samples) {}

    const std::vector<int32_t> * route_of(const linkcpp_event & event) const;
    bool group(const linkcpp_event & event, const std::vector<int32_t> & owners);
    int  send(star_share & share, const linkcpp_event & event, time_point deadline);
    bool collect(const star_share & share, float * out, uint32_t & compute_us, time_point deadline);
    void leave(int32_t problem, int32_t error, int32_t worker, int32_t n_done, uint32_t compute_us, float waited_us);
    void record(float hook_us, uint32_t compute_us, uint32_t rows);
    int32_t dispatch(const linkcpp_event & event);
    int32_t combine(const linkcpp_event & event);
};

const std::vector<int32_t> * linkcpp_star::route_of(const linkcpp_event & event) const {
    if ((size_t) event.layer >= routes.size() || (size_t) event.call >= routes[event.layer].size()) {
        return nullptr;
    }
    const auto & owners = routes[event.layer][event.call];
    return owners.empty() ? nullptr : &owners;
}

// Sort the pairs by the worker that owns the expert; false where an expert has none.
bool linkcpp_star::group(const linkcpp_event & event, const std::vector<int32_t> & owners) {
    std::fill(share_of.begin(), share_of.end(), nullptr);
    const int32_t n_pairs = event.n_tokens * event.top_k;
    for (int32_t p = 0; p < n_pairs; ++p) {
        if ((size_t) event.experts[p] >= owners.size()) {
            return false;
        }
        share_of[owners[event.experts[p]]] = &shares[0]; // for now: it has one
    }
    call.n_shares = 0;
    for (size_t worker = 0; worker < workers.size(); ++worker) {
        if (share_of[worker]) {
            star_share & share = shares[call.n_shares++];
            share.worker = (int32_t) worker;
            share.rows.clear();
            share.places.clear();
            share.weights.clear();
            share.tail.clear();
            share_of[worker] = &share;
        }
    }
    for (int32_t p = 0; p < n_pairs; ++p) {
        star_share & share = *share_of[owners[event.experts[p]]];
        const int32_t row = p / event.top_k;
        if (share.rows.empty() || share.rows.back() != row) {
            share.rows.push_back(row);
            share.tail.push_back(0);
        }
        ++share.tail.back();
        share.places.push_back(p);
        share.weights.push_back(event.weights[p]);
    }
    for (size_t i = 0; i < call.n_shares; ++i) {
        star_share & share = shares[i];
        for (const int32_t place : share.places) {
            share.tail.push_back((uint16_t) event.experts[place]);
        }
        if (share.tail.size() % 2) {
            share.tail.push_back(0);
        }
    }
    return true;
}

int linkcpp_star::send(star_share & share, const linkcpp_event & event, time_point deadline) {
    star_worker & worker = workers[share.worker];
    const size_t row_bytes = sizeof(float) * event.n_embd;
    const float * rows = event.rows;
    if ((int32_t) share.rows.size() != event.n_tokens) {
        share.packed.resize(share.rows.size() * event.n_embd);
        for (size_t r = 0; r < share.rows.size(); ++r) {
            memcpy(&share.packed[r * event.n_embd], event.rows + (size_t) share.rows[r] * event.n_embd, row_bytes);
        }
        rows = share.packed.data();
    }
    struct { frame_header header; dispatch_part part; } head = {
        make_header(worker.minor, type_dispatch, call.sequence),
        { (uint16_t) event.layer, (uint8_t) event.call, partial_sums, codec_f32, {}, (uint32_t) share.rows.size(),
          (uint32_t) share.places.size(), (uint32_t) event.n_embd, 0 },
    };
    iovec pieces[4] = {
        { &head.part, sizeof(head.part) },
        { (void *) rows, share.rows.size() * row_bytes },
        { share.weights.data(), share.weights.size() * sizeof(float) },
        { share.tail.data(), share.tail.size() * sizeof(uint16_t) },
    };
    seal(head.header, pieces, 4);
    pieces[0] = { &head, sizeof(head) };
    const int error = send_all(worker.fd, pieces, 4, deadline);
    if (error == 0) {
        worker.have       = 0;
        worker.rows      += share.rows.size();
        worker.pairs     += share.places.size();
        worker.bytes_out += sizeof(frame_header) + head.header.length;
    }
    return error;
}

// Receive a share's answer into `out`; false leaves what came in the worker's buffer.
bool linkcpp_star::collect(const star_share & share, float * out, uint32_t & compute_us, time_point deadline) {
    star_worker & worker = workers[share.worker];
    const size_t n_replies = partial_sums ? share.rows.size() : share.places.size();
    const size_t n_floats  = n_replies * call.n_embd;
    const size_t size = sizeof(frame_header) + sizeof(result_part) + n_floats * sizeof(float);
    if (worker.received.size() < size) {
        worker.received.resize(size);
    }
    uint8_t * frame = worker.received.data();
    while (worker.have < size) {
        if (receive(worker.fd, frame, size, worker.have, worker.patience, &deadline) != got::bytes) {
            return false;
        }
        if (worker.have >= sizeof(frame_header)) {
            const auto header = read_as<frame_header>(frame);
            if (!is_plain(header, worker.minor, type_result) || header.sequence != call.sequence ||
                header.length != size - sizeof(header)) {
                return false;
            }
        }
    }
    const auto part = read_as<result_part>(frame + sizeof(frame_header));
    if (!is_intact(frame, read_as<frame_header>(frame)) || part.n_rows != n_replies ||
        part.n_embd != (uint32_t) call.n_embd || part.codec != codec_f32) {
        return false;
    }
    worker.bytes_in += size;
    compute_us = std::max(compute_us, part.compute_us);
    const float * values = (const float *) (frame + sizeof(frame_header) + sizeof(result_part));
    if (!partial_sums) {
        if ((int32_t) n_replies == call.n_tokens * call.top_k) {
            memcpy(out, values, n_floats * sizeof(float));
            return true;
        }
        for (const int32_t place : share.places) {
            memcpy(out + (size_t) place * call.n_embd, values, sizeof(float) * call.n_embd);
            values += call.n_embd;
        }
        return true;
    }
    for (const int32_t row : share.rows) {
        float * to = out + (size_t) row * call.n_embd;
        for (int32_t i = 0; i < call.n_embd; ++i) {
            to[i] += *values++;
        }
    }
    return true;
}

void linkcpp_star::leave(int32_t problem, int32_t error, int32_t worker, int32_t n_done, uint32_t compute_us, float waited_us) {
    armed = false;
    call.pending = false;
    has_rest = true;
    rest = {
        problem, error, worker, n_done, call.sequence, call.layer, call.call, call.n_tokens, call.top_k, call.n_embd,
        compute_us, call.spent_us, waited_us, call.experts.data(), call.weights.data(),
        workers[worker].received.data(), workers[worker].have,
    };
}

int32_t linkcpp_star::dispatch(const linkcpp_event & event) {
    const time_point begin = clock_type::now();
    call.pending = false;
    const bool gives = gives_way.count() > 0 && begin - python_was_asked > gives_way;
    const std::vector<int32_t> * owners = armed && !gives && event.n_tokens <= max_rows ? route_of(event) : nullptr;
    if (!owners || !group(event, *owners)) {
        python_was_asked = begin;
        return fallback(&event, user_data);
    }
    call.layer    = event.layer;
    call.call     = event.call;
    call.n_tokens = event.n_tokens;
    call.top_k    = event.top_k;
    call.n_embd   = event.n_embd;
    call.sequence = ++sequence;
    call.experts.assign(event.experts, event.experts + event.n_tokens * event.top_k);
    call.weights.assign(event.weights, event.weights + event.n_tokens * event.top_k);
    for (size_t i = 0; i < call.n_shares; ++i) {
        const int error = send(shares[i], event, begin + timeout);
        if (error != 0) {
            call.spent_us = microseconds(clock_type::now() - begin);
            leave(1, std::max(error, 0), shares[i].worker, (int32_t) i, 0, 0.0f);
            return fallback(&event, user_data);
        }
    }
    call.pending  = true;
    call.spent_us = microseconds(clock_type::now() - begin);
    return 0;
}

int32_t linkcpp_star::combine(const linkcpp_event & event) {
    if (!call.pending || call.layer != event.layer || call.call != event.call) {
        return fallback(&event, user_data);
    }
    const time_point begin = clock_type::now();
    call.pending = false;
    if (call.n_tokens != event.n_tokens || call.n_embd != event.n_embd || call.top_k != event.top_k) {
        leave(0, 0, shares[0].worker, 0, 0, 0.0f);
        return fallback(&event, user_data);
    }
    if (partial_sums) {
        std::fill_n(event.out, (size_t) event.n_tokens * event.n_embd, 0.0f);
    }
    uint32_t compute_us = 0;
    for (size_t i = 0; i < call.n_shares; ++i) {
        if (!collect(shares[i], event.out, compute_us, begin + timeout)) {
            leave(0, 0, shares[i].worker, (int32_t) i, compute_us, microseconds(clock_type::now() - begin));
            return fallback(&event, user_data);
        }
    }
    record(call.spent_us + microseconds(clock_type::now() - begin), compute_us, (uint32_t) call.n_tokens);
    return 0;
}

void linkcpp_star::record(float hook_us, uint32_t compute_us, uint32_t rows) {
    const uint64_t n = n_samples.load(std::memory_order_relaxed);
    samples[n % kept_samples] = { hook_us, compute_us, rows };
    n_samples.store(n + 1, std::memory_order_release);
}

linkcpp_star * linkcpp_star_new(int32_t n_workers, bool partial_sums) { return new linkcpp_star(n_workers, partial_sums); }

void linkcpp_star_fallback(linkcpp_star * star, linkcpp_callback fallback, void * user_data) {
    star->fallback  = fallback;
    star->user_data = user_data;
}

void linkcpp_star_free(linkcpp_star * star) { delete star; }

int32_t linkcpp_star_event(const linkcpp_event * event, void * user_data) {
    linkcpp_star & star = *(linkcpp_star *) user_data;
    switch (event->kind) {
        case LINKCPP_DISPATCH: return star.dispatch(*event);
        case LINKCPP_COMBINE:  return star.combine(*event);
        default:               return star.fallback(event, star.user_data);
    }
}

void linkcpp_star_route(linkcpp_star * star, bool first, int32_t layer, int32_t call, const int32_t * owners, int32_t n_expert) {
    if (first) {
        star->routes.clear();
    }
    star->routes.resize(std::max<size_t>(star->routes.size(), layer + 1));
    auto & calls = star->routes[layer];
    calls.resize(std::max<size_t>(calls.size(), call + 1));
    calls[call].assign(owners, owners + n_expert);
}

void linkcpp_star_link(linkcpp_star * star, int32_t worker, int32_t fd, int32_t minor) {
    star->workers[worker].fd    = fd;
    star->workers[worker].minor = minor;
}

void linkcpp_star_arm(linkcpp_star * star, int32_t timeout_ms, int32_t max_rows) {
    star->timeout      = std::chrono::milliseconds(timeout_ms);
    star->max_rows     = max_rows;
    star->armed        = true;
    star->call.pending = false;
    star->has_rest     = false;
    star->python_was_asked = clock_type::now();
}

void linkcpp_star_give_way(linkcpp_star * star, int32_t every_ms) { star->gives_way = std::chrono::milliseconds(every_ms); }

void linkcpp_star_disarm(linkcpp_star * star) {
    star->armed        = false;
    star->call.pending = false;
    star->has_rest     = false;
}

uint64_t linkcpp_star_number(linkcpp_star * star, bool next) { return next ? ++star->sequence : star->sequence; }

bool linkcpp_star_take(linkcpp_star * star, linkcpp_star_rest * rest) {
    if (!star->has_rest) {
        return false;
    }
    star->has_rest = false;
    *rest = star->rest;
    return true;
}

void linkcpp_star_counts_of(const linkcpp_star * star, int32_t worker, linkcpp_star_counts * counts) {
    const star_worker & of = star->workers[worker];
    *counts = { of.rows, of.pairs, of.bytes_out, of.bytes_in };
}

void linkcpp_star_record(linkcpp_star * star, float hook_us, uint32_t compute_us, uint32_t rows) {
    star->record(hook_us, compute_us, rows);
}

uint64_t linkcpp_star_samples(const linkcpp_star * star, linkcpp_star_sample * samples, int32_t capacity) {
    const uint64_t n = star->n_samples.load(std::memory_order_acquire);
    const uint64_t copied = std::min<uint64_t>({ n, (uint64_t) std::max(capacity, 0), kept_samples });
    for (uint64_t i = 0; i < copied; ++i) {
        samples[i] = star->samples[(n - copied + i) % kept_samples];
    }
    return n;
}
