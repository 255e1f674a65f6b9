// io_uring by its system calls: no library is needed to build, and none when it runs.
#pragma once

#include <memory>
#include <sched.h>
#include <vector>

#include "aio/transfer.h"

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#define DS_HAS_IO_URING 1
#endif
#endif

namespace async_io {

#ifdef DS_HAS_IO_URING
}  // namespace async_io
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
namespace async_io {

// Names of later headers, numbers of the kernel's interface.
constexpr long SETUP = 425, ENTER = 426;
constexpr uint8_t OP_NOP = 0, OP_READ = 22, OP_WRITE = 23;

// A queue of requests and one of completions, both shared with the kernel. One thread uses it.
class Ring {
public:
    // Check `error()` before use.
    explicit Ring(unsigned entries) {
        io_uring_params about;
        memset(&about, 0, sizeof about);
        file_ = static_cast<int>(syscall(SETUP, entries, &about));
        if (file_ < 0) {
            error_ = errno;
            return;
        }
        entries_ = about.sq_entries;
        char* submissions = map(about.sq_off.array + about.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
        char* completions = map(about.cq_off.cqes + about.cq_entries * sizeof(io_uring_cqe), IORING_OFF_CQ_RING);
        char* requests = map(about.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
        if (error_) return;
        sq_tail_ = reinterpret_cast<unsigned*>(submissions + about.sq_off.tail);
        sq_mask_ = *reinterpret_cast<unsigned*>(submissions + about.sq_off.ring_mask);
        sq_array_ = reinterpret_cast<unsigned*>(submissions + about.sq_off.array);
        sqes_ = reinterpret_cast<io_uring_sqe*>(requests);
        cq_head_ = reinterpret_cast<unsigned*>(completions + about.cq_off.head);
        cq_tail_ = reinterpret_cast<unsigned*>(completions + about.cq_off.tail);
        cq_mask_ = *reinterpret_cast<unsigned*>(completions + about.cq_off.ring_mask);
        cqes_ = reinterpret_cast<io_uring_cqe*>(completions + about.cq_off.cqes);
    }
    ~Ring() {
        if (getpid() != process_) return;  // of a fork: the parent's memory and queues
        for (const Mapping& mapping : mappings_) munmap(mapping.memory, mapping.bytes);
        if (file_ >= 0) close(file_);
    }
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    int error() const { return error_; }
    bool fits(int64_t depth) const { return getpid() == process_ && depth <= entries_; }

    void prepare(uint8_t opcode, int file, void* memory, int64_t bytes, int64_t offset, uint64_t tag) {
        const unsigned tail = *sq_tail_;
        io_uring_sqe* request = &sqes_[tail & sq_mask_];
        memset(request, 0, sizeof *request);
        request->opcode = opcode;
        request->fd = file;
        request->addr = reinterpret_cast<uintptr_t>(memory);
        request->len = static_cast<unsigned>(bytes);
        request->off = static_cast<uint64_t>(offset);
        request->user_data = tag;
        sq_array_[tail & sq_mask_] = tail & sq_mask_;
        __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
        ++prepared_;
    }
    // Hands over what is prepared and waits for completions. Returns an error that will not pass.
    int enter(unsigned wait_for) {
        while (prepared_ || wait_for) {
            const long taken = syscall(ENTER, file_, prepared_, wait_for, wait_for ? IORING_ENTER_GETEVENTS : 0, nullptr, 0);
            if (taken >= 0) {
                prepared_ -= static_cast<unsigned>(taken);
                if (!prepared_) return 0;
            } else if (errno == EBUSY || errno == EAGAIN) {
                if (has_completed()) return 0;  // to be taken first
                sched_yield();
            } else if (errno != EINTR) {
                return errno;
            }
        }
        return 0;
    }
    // Takes back what the kernel has not seen; returns how many.
    unsigned withdraw() {
        const unsigned count = prepared_;
        __atomic_store_n(sq_tail_, *sq_tail_ - count, __ATOMIC_RELEASE);
        prepared_ = 0;
        return count;
    }
    bool has_completed() const { return *cq_head_ != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE); }
    io_uring_cqe take() {
        const io_uring_cqe completion = cqes_[*cq_head_ & cq_mask_];
        __atomic_store_n(cq_head_, *cq_head_ + 1, __ATOMIC_RELEASE);
        return completion;
    }

private:
    struct Mapping {
        void* memory;
        size_t bytes;
    };

    char* map(size_t bytes, int64_t offset) {
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_, offset);
        if (memory == MAP_FAILED) {
            error_ = errno;
            return nullptr;
        }
        mappings_.push_back({memory, bytes});
        return static_cast<char*>(memory);
    }

    int file_ = -1, error_ = 0;
    const pid_t process_ = getpid();
    unsigned entries_ = 0, prepared_ = 0;
    unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    unsigned sq_mask_ = 0, cq_mask_ = 0;
    io_uring_sqe* sqes_ = nullptr;
    io_uring_cqe* cqes_ = nullptr;
    std::vector<Mapping> mappings_;
};

// One transfer through a ring.
class UringRun {
public:
    UringRun(const Transfer& transfer, Ring& ring, char* bounce) : transfer_(transfer), ring_(ring), pieces_(transfer.depth) {
        for (int64_t slot = transfer.depth; slot--;) free_.push_back(slot);
        bounce_ = bounce;
    }
    Outcome run() {
        do {
            fill();
            const int64_t wait_for = transfer_.overlap_events ? flying_ > 0 : flying_;
            const int error = ring_.enter(static_cast<unsigned>(wait_for));
            if (error) give_up(error);
            while (ring_.has_completed()) {
                const io_uring_cqe completion = ring_.take();
                --flying_;
                completed(static_cast<int64_t>(completion.user_data), completion.res);
            }
        } while (flying_ || (next_ < transfer_.bytes && !outcome_.failed()));
        return outcome_;
    }

private:
    void fill() {
        // Without overlap a batch is complete before the next one begins.
        if (!transfer_.overlap_events && flying_) return;
        while (!free_.empty() && next_ < transfer_.bytes && !outcome_.failed()) {
            const int64_t slot = free_.back();
            free_.pop_back();
            pieces_[slot].take(transfer_, bounce_ + slot * transfer_.block_bytes, next_);
            next_ = pieces_[slot].end;
            start(slot);
        }
    }
    void start(int64_t slot) {
        const Piece& piece = pieces_[slot];
        ring_.prepare(transfer_.is_write ? OP_WRITE : OP_READ, transfer_.direct, piece.memory, piece.end - piece.begin, transfer_.offset + piece.begin, slot);
        ++flying_;
        if (!transfer_.single_submit) return;
        const int error = ring_.enter(0);
        if (error) give_up(error);
    }
    void completed(int64_t slot, int result) {
        Piece& piece = pieces_[slot];
        if (result < 0 && !again(-result) && !not_direct(transfer_, -result)) {
            outcome_.add({piece.begin, -result});
        } else if (!(result < 0 ? again(-result) : piece.advance(transfer_, result))) {
            outcome_.add(move_plainly(transfer_, piece.begin, piece.end));
        } else if (piece.begin < piece.end) {
            start(slot);
            return;
        }
        free_.push_back(slot);
    }
    // The memory is the kernel's until every request that it has taken is complete.
    void give_up(int error) {
        outcome_.add({0, error});
        flying_ -= ring_.withdraw();
        while (flying_) {
            if (!ring_.has_completed()) {
                sched_yield();
                continue;
            }
            ring_.take();
            --flying_;
        }
    }

    const Transfer& transfer_;
    Ring& ring_;
    std::vector<Piece> pieces_;
    std::vector<int64_t> free_;
    char* bounce_;
    int64_t next_ = 0, flying_ = 0;
    Outcome outcome_;
};

// The thread's ring, made anew for a deeper queue and after a fork; null if there is none to have.
static Ring* ring_of_thread(int64_t depth) {
    static thread_local std::unique_ptr<Ring> ring;
    if (!ring || !ring->fits(depth)) ring.reset(new Ring(static_cast<unsigned>(depth)));
    if (ring->error()) ring.reset();
    return ring.get();
}

// False: no ring is to be had any more, and nothing is done.
static bool run_uring(const Transfer& transfer, Outcome* outcome) {
    static thread_local Bounce bounce;
    Ring* ring = ring_of_thread(transfer.depth);
    char* memory = transfer.bounce ? bounce.of(transfer.depth * transfer.block_bytes) : transfer.memory;
    if (!ring || !memory) return false;
    *outcome = UringRun(transfer, *ring, memory).run();
    return true;
}

// Why the kernel, or a container's filter of system calls, has it not; 0 if it works.
static int probe_uring() {
    Ring ring(1);
    if (ring.error()) return ring.error();
    // A read of no descriptor: an older kernel, which does not know the request, says EINVAL.
    ring.prepare(OP_READ, -1, nullptr, 0, 0, 0);
    const int error = ring.enter(1);
    if (error) return error;
    return ring.take().res == -EBADF ? 0 : ENOSYS;
}

#else

static bool run_uring(const Transfer&, Outcome*) { return false; }
static int probe_uring() { return ENOSYS; }

#endif

}  // namespace async_io
