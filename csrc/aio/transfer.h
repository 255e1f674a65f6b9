// One transfer between memory and a file, whole or not at all: what both engines share.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

namespace async_io {

struct Transfer {
    int direct;  // past the page cache; the plain one again where that is not possible
    int plain;   // for what ends between the disk's blocks
    bool is_write;
    char* memory;
    int64_t bytes, offset;  // offset: where in the file `memory` begins
    int64_t block_bytes, depth;
    int64_t alignment;  // of `direct`, in the file: a power of two
    bool bounce;        // `memory` is not aligned as `direct` wants it
    bool single_submit, overlap_events;
};

// failed_at: byte of the transfer, -1 if all is done. error 0: the file ends there.
struct Outcome {
    int64_t failed_at = -1;
    int error = 0;

    bool failed() const { return failed_at >= 0; }
    void add(const Outcome& other) {  // the first byte that is missing is the one to tell
        if (other.failed() && (!failed() || other.failed_at < failed_at)) *this = other;
    }
};

static bool again(int error) { return error == EINTR || error == EAGAIN; }
// What a file system or a disk says that cannot do it past the page cache, or not there.
static bool not_direct(const Transfer& transfer, int error) {
    return transfer.direct != transfer.plain && (error == EINVAL || error == EOPNOTSUPP);
}

static ssize_t positioned(int file, bool is_write, char* memory, int64_t bytes, int64_t offset) {
    return is_write ? pwrite(file, memory, bytes, offset) : pread(file, memory, bytes, offset);
}

// Moves bytes begin..end through the page cache, which knows no blocks, and waits for them.
static Outcome move_plainly(const Transfer& transfer, int64_t begin, int64_t end) {
    while (begin < end) {
        const ssize_t count = positioned(transfer.plain, transfer.is_write, transfer.memory + begin, end - begin, transfer.offset + begin);
        if (count < 0 && again(errno)) continue;
        if (count < 0) return {begin, errno};
        if (count == 0) return {begin, transfer.is_write ? EIO : 0};
        begin += count;
    }
    return {};
}

// Memory that any disk can move: one piece per request in flight, kept by the thread.
class Bounce {
public:
    ~Bounce() { free(memory_); }
    char* of(int64_t bytes) {
        if (bytes > bytes_) {
            free(memory_);
            bytes_ = posix_memalign(&memory_, 4096, bytes) == 0 ? bytes : 0;
            if (!bytes_) memory_ = nullptr;
        }
        return static_cast<char*>(memory_);
    }

private:
    void* memory_ = nullptr;
    int64_t bytes_ = 0;
};

// The part of a transfer that one request moves.
struct Piece {
    int64_t begin = 0, end = 0;
    char* memory = nullptr;  // of `begin`: the transfer's own, or aligned beside it

    void take(const Transfer& transfer, char* bounce, int64_t from) {
        begin = from;
        end = from + transfer.block_bytes < transfer.bytes ? from + transfer.block_bytes : transfer.bytes;
        memory = transfer.bounce ? bounce : transfer.memory + begin;
        if (transfer.bounce && transfer.is_write) memcpy(memory, transfer.memory + begin, end - begin);
    }
    // Counts what a request has moved. True: the rest, if any, is for another like it.
    bool advance(const Transfer& transfer, int64_t count) {
        if (transfer.bounce && !transfer.is_write) memcpy(transfer.memory + begin, memory, count);
        begin += count;
        memory += count;
        return begin == end || (count > 0 && (transfer.direct == transfer.plain || count % transfer.alignment == 0));
    }
};

}  // namespace async_io
