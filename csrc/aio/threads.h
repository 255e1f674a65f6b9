// Positioned reads and writes, as many at once as the queue is deep: a thread for each.
#pragma once

#include <atomic>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "aio/transfer.h"

namespace async_io {

static Outcome move_piece(const Transfer& transfer, Piece& piece) {
    while (piece.begin < piece.end) {
        const ssize_t count = positioned(transfer.direct, transfer.is_write, piece.memory, piece.end - piece.begin, transfer.offset + piece.begin);
        if (count < 0 && again(errno)) continue;
        if (count < 0 && !not_direct(transfer, errno)) return {piece.begin, errno};
        // Nothing moved, or an end between blocks: only the page cache can say more of it.
        if (count <= 0 || !piece.advance(transfer, count)) return move_plainly(transfer, piece.begin, piece.end);
    }
    return {};
}

static Outcome run_threads(const Transfer& transfer) {
    const int64_t pieces = (transfer.bytes + transfer.block_bytes - 1) / transfer.block_bytes;
    std::atomic<int64_t> next{0};
    std::mutex lock;
    Outcome outcome;
    auto work = [&] {
        static thread_local Bounce bounce;
        char* memory = transfer.bounce ? bounce.of(transfer.block_bytes) : transfer.memory;
        for (int64_t number; (number = next++) < pieces;) {
            Piece piece;
            if (memory) piece.take(transfer, memory, number * transfer.block_bytes);
            const Outcome moved = memory ? move_piece(transfer, piece) : Outcome{0, ENOMEM};
            if (!moved.failed()) continue;
            next = pieces;
            const std::lock_guard<std::mutex> held(lock);
            outcome.add(moved);
        }
    };
    std::vector<std::thread> threads;
    try {
        while (static_cast<int64_t>(threads.size()) + 1 < transfer.depth && static_cast<int64_t>(threads.size()) + 1 < pieces) threads.emplace_back(work);
    } catch (const std::system_error&) {
        // No more threads in this process: those that there are do it, if only this one.
    }
    work();
    for (std::thread& thread : threads) thread.join();
    return outcome;
}

}  // namespace async_io
