// Checksums and sockets of the native wire.
#include "linkcpp-frame.h"

#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define LINKCPP_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define LINKCPP_CRC_TARGET
#endif

namespace {

// CRC-32C (Castagnoli, reflected).

constexpr uint32_t polynomial = 0x82f63b78;
constexpr size_t   stride     = 1024; // three strides are summed at once: the instruction takes three cycles

struct checksum_tables {
    uint32_t byte[256];
    uint32_t skip[4][256] = {}; // what a stride of zeros makes of each byte of a checksum

    checksum_tables() {
        for (uint32_t i = 0; i < 256; ++i) {
            uint32_t crc = i;
            for (int bit = 0; bit < 8; ++bit) {
                crc = crc & 1 ? (crc >> 1) ^ polynomial : crc >> 1;
            }
            byte[i] = crc;
        }
        // A checksum is linear in what came before: the bits of a byte can be skipped one by one and added up.
        for (int bit = 0; bit < 32; ++bit) {
            uint32_t crc = 1u << bit;
            for (size_t n = 0; n < stride; ++n) {
                crc = (crc >> 8) ^ byte[crc & 0xff];
            }
            for (uint32_t i = 0; i < 256; ++i) {
                skip[bit / 8][i] ^= i >> bit % 8 & 1 ? crc : 0;
            }
        }
    }

    uint32_t skip_stride(uint32_t crc) const {
        return skip[0][crc & 0xff] ^ skip[1][(crc >> 8) & 0xff] ^ skip[2][(crc >> 16) & 0xff] ^ skip[3][crc >> 24];
    }
};

const checksum_tables tables;

uint32_t sum_by_table(uint32_t crc, const uint8_t * data, size_t size) {
    for (; size; --size) {
        crc = (crc >> 8) ^ tables.byte[(crc ^ *data++) & 0xff];
    }
    return crc;
}

#ifdef LINKCPP_CRC_TARGET
LINKCPP_CRC_TARGET inline uint32_t sum_word(uint32_t crc, const uint8_t * data) {
    uint64_t word;
    memcpy(&word, data, sizeof(word));
#if defined(__x86_64__)
    return (uint32_t) _mm_crc32_u64(crc, word);
#else
    return __crc32cd(crc, word);
#endif
}

LINKCPP_CRC_TARGET uint32_t sum_by_instruction(uint32_t crc, const uint8_t * data, size_t size) {
    for (; size >= 3 * stride; data += 3 * stride, size -= 3 * stride) {
        uint32_t second = 0;
        uint32_t third  = 0;
        for (size_t at = 0; at < stride; at += 8) {
            crc    = sum_word(crc,    data + at);
            second = sum_word(second, data + stride + at);
            third  = sum_word(third,  data + 2 * stride + at);
        }
        crc = tables.skip_stride(tables.skip_stride(crc) ^ second) ^ third;
    }
    for (; size >= 8; data += 8, size -= 8) {
        crc = sum_word(crc, data);
    }
    return sum_by_table(crc, data, size);
}

bool has_instruction() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2");
#else
    return true;
#endif
}
const bool by_instruction = has_instruction();
#endif

constexpr auto    brief          = std::chrono::microseconds(5000);
constexpr auto    taken          = std::chrono::microseconds(100);
constexpr int32_t most_sleeps    = 64;

} // namespace

namespace linkcpp_frame {

uint32_t checksum(const void * data, size_t size, uint32_t before) {
    const uint32_t crc = ~before;
#ifdef LINKCPP_CRC_TARGET
    if (by_instruction) {
        return ~sum_by_instruction(crc, (const uint8_t *) data, size);
    }
#endif
    return ~sum_by_table(crc, (const uint8_t *) data, size);
}

static int remaining_ms(time_point deadline) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - clock_type::now()).count();
    return (int) std::max<int64_t>(0, std::min<int64_t>(left + 1, 1 << 30));
}

got receive(int fd, uint8_t * buffer, size_t capacity, size_t & have, linkcpp_wire_patience & patience, const time_point * deadline) {
    const time_point begin = clock_type::now();
    time_point now = begin;
    bool looks = patience.sleeps == 0;
    patience.sleeps -= patience.sleeps > 0;
    while (true) {
        const ssize_t n = recv(fd, buffer + have, capacity - have, MSG_DONTWAIT);
        if (n > 0) {
            have += (size_t) n;
            if (looks) {
                patience.penalty = 0;
            }
            if (!patience.sleeps && clock_type::now() - begin > brief) {
                patience.sleeps = 1;
            }
            return got::bytes;
        }
        if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
            return got::nothing_more;
        }
        if (looks) {
            sched_yield();
            const time_point before = std::exchange(now, clock_type::now());
            if (now - before > taken) {
                patience.penalty = std::clamp(2 * patience.penalty, 1, most_sleeps);
                patience.sleeps  = patience.penalty;
            }
            looks = now - before <= taken && now - begin <= brief && (!deadline || now < *deadline);
            continue;
        }
        pollfd waiting = { fd, POLLIN, 0 };
        const int ready = poll(&waiting, 1, deadline ? remaining_ms(*deadline) : -1);
        if (ready == 0) {
            return got::late;
        }
        if (ready < 0 && errno != EINTR) {
            return got::nothing_more;
        }
    }
}

int send_all(int fd, iovec * pieces, int n_pieces, time_point deadline) {
    while (n_pieces > 0) {
        msghdr message = {};
        message.msg_iov    = pieces;
        message.msg_iovlen = (size_t) n_pieces;
        ssize_t n = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EINTR) {
                continue;
            }
            if (errno != EAGAIN && errno != EWOULDBLOCK) {
                return errno;
            }
            pollfd waiting = { fd, POLLOUT, 0 };
            if (poll(&waiting, 1, remaining_ms(deadline)) == 0) {
                return -1;
            }
            continue;
        }
        for (; n_pieces > 0 && (size_t) n >= pieces->iov_len; ++pieces, --n_pieces) {
            n -= (ssize_t) pieces->iov_len;
        }
        if (n_pieces > 0) {
            pieces->iov_base = (char *) pieces->iov_base + n;
            pieces->iov_len -= (size_t) n;
        }
    }
    return 0;
}

} // namespace linkcpp_frame

uint32_t linkcpp_crc32c(const void * data, size_t size, uint32_t before) {
    return linkcpp_frame::checksum(data, size, before);
}
