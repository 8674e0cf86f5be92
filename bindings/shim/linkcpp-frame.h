// linkcpp-frame.h: what both ends of a connection share: checksums, the fixed parts of frames, waiting on sockets.
#pragma once

#include "linkcpp-wire.h"

#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstring>

namespace linkcpp_frame {

uint32_t checksum(const void * data, size_t size, uint32_t before = 0);

// Frames: docs/protocol.md; both sides are little-endian, as the engine is.

constexpr uint8_t  major_version = 1;
constexpr uint8_t  type_dispatch = 6;
constexpr uint8_t  type_result   = 7;
constexpr uint8_t  codec_f32     = 0;

#pragma pack(push, 1)
struct frame_header {
    char     magic[4];
    uint8_t  major, minor, type, flags;
    uint32_t length;
    uint64_t sequence;
    uint32_t crc;
};
struct dispatch_part {
    uint16_t layer;
    uint8_t  call, contract, codec, zero[3];
    uint32_t n_rows, n_pairs, n_embd, padding;
};
struct result_part {
    uint32_t compute_us, n_rows, n_embd;
    uint8_t  codec, zero[3];
};
#pragma pack(pop)
static_assert(sizeof(frame_header) == 24 && sizeof(dispatch_part) == 24 && sizeof(result_part) == 16, "the protocol's sizes");

constexpr size_t checked = offsetof(frame_header, crc);

template <typename T> inline T read_as(const void * at) {
    T value;
    memcpy(&value, at, sizeof(value));
    return value;
}

inline frame_header make_header(int32_t minor, uint8_t type, uint64_t sequence) {
    frame_header header = { { 'L', 'K', 'C', 'P' }, major_version, (uint8_t) minor, type, 0, 0, sequence, 0 };
    return header;
}

inline bool is_plain(const frame_header & header, int32_t minor, uint8_t type) {
    return memcmp(header.magic, "LKCP", 4) == 0 && header.major == major_version && header.minor == minor &&
           header.type == type && header.flags == 0 && header.length % 4 == 0;
}

inline bool is_intact(const uint8_t * frame, const frame_header & header) {
    return checksum(frame + sizeof(header), header.length, checksum(frame, checked)) == header.crc;
}

// Fill in length and checksum of a frame whose payload is these pieces.
inline void seal(frame_header & header, const iovec * pieces, int n_pieces) {
    header.length = 0;
    for (int i = 0; i < n_pieces; ++i) {
        header.length += (uint32_t) pieces[i].iov_len;
    }
    header.crc = checksum(&header, checked);
    for (int i = 0; i < n_pieces; ++i) {
        header.crc = checksum(pieces[i].iov_base, pieces[i].iov_len, header.crc);
    }
}

// Waiting, as in orchestrator/transport/sockets.py: look for a while, then sleep.

using clock_type = std::chrono::steady_clock;
using time_point = clock_type::time_point;

inline float microseconds(clock_type::duration d) {
    return std::chrono::duration<float, std::micro>(d).count();
}

enum class got { bytes, nothing_more, late };

// Wait for bytes until the deadline; adds what came to `have`. An end of the stream or an error is nothing_more.
got receive(int fd, uint8_t * buffer, size_t capacity, size_t & have, linkcpp_wire_patience & patience, const time_point * deadline);

// Send all pieces, waiting for room until the deadline. Returns 0, an errno, or -1 where no data was taken in time.
int send_all(int fd, iovec * pieces, int n_pieces, time_point deadline);

} // namespace linkcpp_frame
