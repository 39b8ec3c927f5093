// Exact attention over rows of keys and values, block by block, for query heads that read the same rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "cpu_vectors.h"

namespace {

// What attention of some query heads has summed up of the tokens so far: `weight` times values, by the largest logit.
struct Sums {
    float peak = LEAST, weight = 0;
    std::vector<float> mixed;
    explicit Sums(int64_t dim) : mixed(dim) {}

    // Scale to another largest logit, which is no smaller (logits are those of powers of two).
    void raise(float to) {
        if (to <= peak) return;
        const float factor = std::exp2(peak - to);
        for (float& x : mixed) x *= factor;
        weight *= factor;
        peak = to;
    }
    void add(Sums& other) {
        raise(other.peak);
        other.raise(peak);
        weight += other.weight;
        for (size_t i = 0; i < mixed.size(); ++i) mixed[i] += other.mixed[i];
    }
};

// Rows of keys or values, `stride` numbers apart: those of `slots`, or one behind the other.
struct Table {
    const float* first;
    int64_t stride;
    const int64_t* slots;
    const float* operator[](int64_t i) const { return first + (slots ? slots[i] : i) * stride; }
};

// Adds the products of N queries [N, width], `apart` numbers from each other, with M rows to out [N, BLOCK].
template <int N, int M>
inline void add_products(const float* query, int64_t apart, Table rows, int64_t start, int64_t width, float* out) {
    const float* row[M];
    for (int m = 0; m < M; ++m) row[m] = rows[start + m];
    Vec sums[M][N] = {};
    int64_t i = 0;
    for (; i + W <= width; i += W)
        for (int g = 0; g < N; ++g) {
            const Vec q = load(query + g * apart + i);
            for (int m = 0; m < M; ++m) sums[m][g] += q * load(row[m] + i);
        }
    for (int m = 0; m < M; ++m)
        for (int g = 0; g < N; ++g) {
            float s = sum_of(sums[m][g]);
            for (int64_t j = i; j < width; ++j) s += query[g * apart + j] * row[m][j];
            out[g * BLOCK + start + m] += s;
        }
}

// Adds weights [N, BLOCK] times n rows to N sums, V vectors at a time, from dimension i on; returns where that ends.
// ahead: rows to be fetched meanwhile, null for none.
template <int N, int V>
inline int64_t mix(const float* weights, Table values, int n, int64_t i, int64_t dim, const float* ahead, Sums* sums) {
    for (; i + V * W <= dim; i += V * W) {
        Vec mixed[N][V];
        for (int g = 0; g < N; ++g)
            for (int v = 0; v < V; ++v) mixed[g][v] = load(&sums[g].mixed[i + v * W]);
        for (int t = 0; t < n; ++t) {
            const float* row = values[t] + i;
            for (int v = 0; v < V; ++v) {
                const Vec x = load(row + v * W);
                if (ahead) __builtin_prefetch(ahead + t * dim + i + v * W);
                for (int g = 0; g < N; ++g) mixed[g][v] += weights[g * BLOCK + t] * x;
            }
        }
        for (int g = 0; g < N; ++g)
            for (int v = 0; v < V; ++v) store(&sums[g].mixed[i + v * W], mixed[g][v]);
    }
    return i;
}

template <int N>
inline void mix_all(const float* weights, Table values, int n, int64_t dim, const float* ahead, Sums* sums) {
    int64_t i = 0;
    if (dim >= 2 * VECTORS * W) {  // long rows as they lie in memory, and half of the queries at a time
        constexpr int half = N - N / 2;
        i = mix<half, 2 * VECTORS>(weights, values, n, 0, dim, ahead, sums);
        if constexpr (N > half)
            mix<N - half, 2 * VECTORS>(weights + half * BLOCK, values, n, 0, dim, nullptr, sums + half);
    }
    i = mix<N, VECTORS>(weights, values, n, i, dim, ahead, sums);
    for (; i < dim; ++i)
        for (int g = 0; g < N; ++g)
            for (int t = 0; t < n; ++t) sums[g].mixed[i] += weights[g * BLOCK + t] * values[t][i];
}

// Exact attention of N queries over n <= BLOCK rows. logits [N, BLOCK]: what other dimensions add to the products with
// `keys`; overwritten. scale: of the logits, times log2(e).
template <int N>
void attend(const float* query, int64_t apart, Table keys, int64_t width, Table values, int n, int64_t dim, float scale,
            float* logits, Sums* sums) {
    int t = 0;
    for (; t + VECTORS <= n; t += VECTORS) add_products<N, VECTORS>(query, apart, keys, t, width, logits);
    for (; t < n; ++t) add_products<N, 1>(query, apart, keys, t, width, logits);
    for (int g = 0; g < N; ++g) {
        float* row = logits + g * BLOCK;
        std::fill(row + n, row + BLOCK, LEAST);
        for (int i = 0; i < BLOCK; i += W) store(row + i, load(row + i) * scale);
        Vec peak = load(row);
        for (int i = W; i < BLOCK; i += W) peak = larger(peak, load(row + i));
        sums[g].raise(max_of(peak));
        Vec weight = {};
        for (int i = 0; i < BLOCK; i += W) {
            const Vec e = exp2(load(row + i) - sums[g].peak);
            weight += e;
            store(row + i, e);
        }
        sums[g].weight += sum_of(weight);
    }
    // the keys of the next block, which this core would otherwise wait for
    mix_all<N>(logits, values, n, dim, keys.slots ? nullptr : keys[n], sums);
}

// Calls f with each N of up to GROUP, as a constant.
template <class F>
inline void with_count(int n, F&& f) {
    switch (n) {
        case 1: return f(std::integral_constant<int, 1>());
        case 2: return f(std::integral_constant<int, 2>());
        case 3: return f(std::integral_constant<int, 3>());
        default: return f(std::integral_constant<int, 4>());
    }
}

// `attend` for a whole group of query heads.
void attend_group(const float* query, int64_t apart, int64_t group, Table keys, int64_t width, Table values, int n,
                  int64_t dim, float scale, float* logits, Sums* sums) {
    for (int64_t g = 0; g < group; g += GROUP)
        with_count(int(std::min<int64_t>(GROUP, group - g)), [&](auto count) {
            attend<count()>(query + g * apart, apart, keys, width, values, n, dim, scale, logits + g * BLOCK, sums + g);
        });
}
}  // namespace
