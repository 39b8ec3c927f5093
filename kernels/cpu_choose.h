// The exact choice of the k best tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu_vectors.h"

namespace {

inline int64_t count_at_least(const float* a, int64_t n, float least) {
    int64_t count = 0, i = 0;
    for (; i + W <= n; i += W) count += __builtin_popcount(at_least(load(a + i), least));
    for (; i < n; ++i) count += a[i] >= least;
    return count;
}

// Floats as integers in the same order.
inline int32_t ordered(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

inline float unordered(int32_t bits) {
    bits ^= (bits >> 31) & 0x7fffffff;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// The k-th largest of n >= k numbers, or another number that as many are not less than. Finds it by halving an interval:
// counting runs at the speed of the caches, and nothing is moved. `room` takes 5 / 4 n numbers.
float kth(const float* a, int64_t n, int64_t k, float* room) {
    if (n >= 8 * k && n % (4 * W) == 0) {
        // of the largest of each four numbers k are not less than `least`: neither is what is looked for
        const int64_t quarter = n / 4;
        for (int64_t i = 0; i < quarter; i += W)
            store(room + i, larger(larger(load(a + i), load(a + i + quarter)),
                                   larger(load(a + i + 2 * quarter), load(a + i + 3 * quarter))));
        const float least = kth(room, quarter, k, room + quarter);
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i += W)
            for (uint32_t bits = at_least(load(a + i), least); bits; bits &= bits - 1)
                room[kept++] = a[i + __builtin_ctz(bits)];
        a = room, n = kept;
    }
    float low = a[0], high = a[0];
    for (int64_t i = 1; i < n; ++i) {
        low = a[i] < low ? a[i] : low;
        high = a[i] > high ? a[i] : high;
    }
    int64_t lower = ordered(low), upper = int64_t(ordered(high)) + 1;  // enough are >= lower, too few >= upper
    while (upper - lower > 1) {
        const int64_t middle = lower + (upper - lower) / 2;
        const int64_t count = count_at_least(a, n, unordered(int32_t(middle)));
        if (count == k) return unordered(int32_t(middle));
        (count > k ? lower : upper) = middle;
    }
    return unordered(int32_t(lower));
}

// Values of `tokens` tokens in blocks, `stride` numbers apart; behind the last token stands something less than any.
struct Blocks {
    float* first;
    int64_t stride, tokens;
    float& operator[](int64_t token) const { return first[token / BLOCK * stride + token % BLOCK]; }
};

// The k best tokens, ascending; of equal ones the oldest. The first `sinks` and the last `recent` are among them.
// room: ROOM numbers for each token of whole blocks.
void choose(Blocks values, int64_t k, int64_t sinks, int64_t recent, float* room, int64_t* slots) {
    const int64_t tokens = values.tokens, blocks = (tokens + BLOCK - 1) / BLOCK;
    const int64_t newest = std::max(sinks, tokens - recent);
    std::vector<float> covered;  // what the forced tokens were worth
    for (int64_t t = 0; t < tokens; ++t) {
        if (t == sinks) t = newest;
        if (t == tokens) break;
        covered.push_back(values[t]);
        values[t] = INFINITY;
    }
    float* peaks = room;  // W for each block: each is the largest of so many tokens
    for (int64_t b = 0; b < blocks; ++b) {
        const float* at = values.first + b * values.stride;
        Vec peak = load(at);
        for (int i = W; i < BLOCK; i += W) peak = larger(peak, load(at + i));
        store(peaks + b * W, peak);
    }
    float* kept = room + blocks * W;
    const float least = blocks * W >= 2 * k ? kth(peaks, blocks * W, k, kept) : -INFINITY;
    int64_t n = 0;
    for (int64_t b = 0; b < blocks; ++b) {
        if (!at_least(load(peaks + b * W), least)) continue;
        const float* at = values.first + b * values.stride;
        if (least == -INFINITY) {
            std::memcpy(kept + n, at, BLOCK * sizeof(float));
            n += BLOCK;
        } else {
            for (int i = 0; i < BLOCK; i += W)
                for (uint32_t bits = at_least(load(at + i), least); bits; bits &= bits - 1)
                    kept[n++] = at[i + __builtin_ctz(bits)];
        }
    }
    const float limit = n >= k ? kth(kept, n, k, kept + n) : -INFINITY;
    int64_t equal = k;  // how many of those that are worth just the limit
    for (int64_t i = 0; i < n; ++i) equal -= kept[i] > limit;
    int64_t found = 0;
    for (int64_t b = 0; b < blocks && found < k; ++b) {
        if (!at_least(load(peaks + b * W), limit)) continue;
        const float* at = values.first + b * values.stride;
        for (int i = 0; i < BLOCK; i += W)
            for (uint32_t bits = at_least(load(at + i), limit); bits; bits &= bits - 1) {
                const int lane = i + __builtin_ctz(bits);
                if (found == k || b * BLOCK + lane >= tokens) break;
                if (at[lane] > limit || equal-- > 0) slots[found++] = b * BLOCK + lane;
            }
    }
    while (found < k) slots[found++] = tokens - 1;  // the numbers are not numbers
    for (size_t i = 0; i < covered.size(); ++i) values[int64_t(i) < sinks ? i : newest + i - sinks] = covered[i];
}
}  // namespace
