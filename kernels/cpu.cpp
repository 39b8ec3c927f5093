// One decode step of attention on a CPU in float32: FASA on the split cache, and dense attention.
//
// Built and called by kernels/cpu.py, which also says what the arguments are; no header of PyTorch is needed. OpenMP's
// threads are PyTorch's own: its library is loaded already, and no second one is linked.

#include <algorithm>
#include <cmath>
#include <vector>

#include <omp.h>

#include "cpu_attend.h"
#include "cpu_choose.h"
#include "cpu_vectors.h"

namespace {

// Scores [N, BLOCK] of a block of tokens, whose leading dimensions lie as [width, BLOCK].
template <int N>
inline void score(const float* query, const float* lead, int64_t width, float* scores) {
    for (int at = 0; at < BLOCK; at += VECTORS * W) {
        Vec sums[N][VECTORS] = {};
        for (int64_t i = 0; i < width; ++i)
            for (int v = 0; v < VECTORS; ++v) {
                const Vec k = load(lead + i * BLOCK + at + v * W);
                for (int g = 0; g < N; ++g) sums[g][v] += query[g * width + i] * k;
            }
        for (int g = 0; g < N; ++g)
            for (int v = 0; v < VECTORS; ++v) store(scores + g * BLOCK + at + v * W, sums[g][v]);
    }
}

// The largest score of each lane and the sum of 2 ** (scale * (score - largest)), for each row of queries.
struct Lanes {
    Vec peak = all(LEAST), sum = {};

    void take(const float* scores, float scale) {
        Vec high = load(scores);
        for (int i = W; i < BLOCK; i += W) high = larger(high, load(scores + i));
        if (at_least(high - peak, FLT_MIN)) {  // seldom, after the first blocks
            high = larger(high, peak);
            sum *= exp2((peak - high) * scale);
            peak = high;
        }
        for (int i = 0; i < BLOCK; i += W) sum += exp2((load(scores + i) - peak) * scale);
    }
};

// log2 of the sum of 2 ** (scale * score) over all that `parts` of one row have seen, `apart` from each other.
float log_sum(const Lanes* parts, int count, int64_t apart, float scale) {
    float peak = LEAST, sum = 0;
    for (int p = 0; p < count; ++p) peak = std::max(peak, max_of(parts[p * apart].peak));
    for (int p = 0; p < count; ++p) sum += sum_of(parts[p * apart].sum * exp2((parts[p * apart].peak - peak) * scale));
    return peak * scale + std::log2(sum);
}
struct Fasa {  // the same fields as kernels/cpu.py's, which says what they are
    int64_t batch, heads, group, dim, width, k, sinks, recent, share, threads;
    float scale;
    float *ordered, *asked, *scores, *others, *values, *room;
    int64_t* slots;
    double seconds[3];
};
enum Share { NONE, MAX, SOFTMAX };

// The query in stored order, and the leading part of it: `asked`, what it asks for with the mask, then what that hides.
void arrange(const Fasa& f, const float* query, const int64_t* order, const float* mask) {
    const int64_t all_heads = f.batch * f.heads * f.group;
    for (int64_t h = 0; h < all_heads; ++h) {
        const int64_t* place = order + h / f.group % f.heads * f.dim;
        float* row = f.ordered + h * f.dim;
        for (int64_t i = 0; i < f.dim; ++i) row[i] = query[h * f.dim + place[i]];
        for (int64_t i = 0; i < f.width; ++i) {
            const float used = mask ? mask[h % (f.heads * f.group) * f.width + i] : 1.0f;
            f.asked[h * f.width + i] = row[i] * used;
            if (mask) f.asked[(all_heads + h) * f.width + i] = row[i] * (1.0f - used);
        }
    }
}

// Scores of the tokens of one block for one KV head; `last`: how many of them exist.
void score_group(const Fasa& f, const float* query, const float* block, int last, float* scores) {
    for (int64_t g = 0; g < f.group; g += GROUP)
        with_count(int(std::min<int64_t>(GROUP, f.group - g)), [&](auto count) {
            score<count()>(query + g * f.width, block, f.width, scores + g * BLOCK);
        });
    if (last < BLOCK)
        for (int64_t g = 0; g < f.group; ++g) std::fill(scores + g * BLOCK + last, scores + (g + 1) * BLOCK, LEAST);
}

void best_of_group(const float* scores, int64_t group, float* values) {
    for (int i = 0; i < BLOCK; i += W) {
        Vec best = load(scores + i);
        for (int64_t g = 1; g < group; ++g) best = larger(best, load(scores + g * BLOCK + i));
        store(values + i, best);
    }
}

// The sum over the group of the softmax; norms: log2 of what each row's exponentials sum up to.
void softmax_of_group(const float* scores, int64_t group, const float* norms, float scale, float* values) {
    for (int i = 0; i < BLOCK; i += W) {
        Vec sum = {};
        for (int64_t g = 0; g < group; ++g) sum += exp2(load(scores + g * BLOCK + i) * scale - norms[g]);
        store(values + i, sum);
    }
}

// Exact attention of the query heads that choose together, `count` of them from `first` on, over k slots.
void attend_slots(const Fasa& f, int64_t first, int64_t count, const float* tail, const int64_t* slots, float* out) {
    const int64_t rest = f.dim - f.width, stride = rest + f.dim, block = f.batch * f.heads * f.group * BLOCK;
    std::vector<Sums> sums(count, Sums(f.dim));
    std::vector<float> logits(count * BLOCK);
    for (int64_t start = 0; start < f.k; start += BLOCK, slots += BLOCK) {
        const int n = int(std::min<int64_t>(BLOCK, f.k - start));
        for (int t = 0; t < n; ++t) {
            for (int64_t i = 0; i < stride; i += 16) __builtin_prefetch(tail + slots[t] * stride + i);
            for (int64_t g = 0; g < count; ++g) {
                const int64_t at = slots[t] / BLOCK * block + (first + g) * BLOCK + slots[t] % BLOCK;
                logits[g * BLOCK + t] = f.scores[at] + (f.others ? f.others[at] : 0.0f);
            }
        }
        attend_group(f.ordered + first * f.dim + f.width, f.dim, count, {tail, stride, slots}, rest,
                     {tail + rest, stride, slots}, n, f.dim, f.scale, logits.data(), sums.data());
    }
    for (int64_t g = 0; g < count; ++g)
        for (int64_t i = 0; i < f.dim; ++i) out[(first + g) * f.dim + i] = sums[g].mixed[i] / sums[g].weight;
}
}  // namespace

extern "C" {

// The choice of one step, and if there is a tail exact attention over it.
void fasa_step(Fasa* fasa, const float* query, const int64_t* order, const float* mask, const float* lead,
               const float* tail, int64_t tokens, int64_t capacity, float* out) {
    const Fasa& f = *fasa;
    const int64_t rows = f.batch * f.heads, heads = rows * f.group, blocks = (tokens + BLOCK - 1) / BLOCK;
    const int64_t choices = f.share == NONE ? heads : rows, together = heads / choices;
    std::vector<Lanes> lanes(f.share == SOFTMAX ? f.threads * heads : 0);
    std::vector<float> norms(heads);
    arrange(f, query, order, mask);
#pragma omp parallel num_threads(f.threads)
    {
        const int64_t me = omp_get_thread_num(), threads = omp_get_num_threads();
        const int64_t start = blocks * me / threads, stop = blocks * (me + 1) / threads;
        double before = omp_get_wtime(), seconds[3] = {};
        const auto spent = [&](int stage) {
            const double now = omp_get_wtime();
            seconds[stage] += now - before;
            before = now;
        };
        for (int64_t b = start; b < stop; ++b)  // in the order in which memory lies
            for (int64_t row = 0; row < rows; ++row) {
                const float* block = lead + (b * rows + row) * f.width * BLOCK;
                const int64_t at = (b * heads + row * f.group) * BLOCK;
                const int last = int(std::min<int64_t>(BLOCK, tokens - b * BLOCK));
                score_group(f, f.asked + row * f.group * f.width, block, last, f.scores + at);
                if (f.others) score_group(f, f.asked + (heads + row * f.group) * f.width, block, last, f.others + at);
                if (f.share == MAX) best_of_group(f.scores + at, f.group, f.values + (b * rows + row) * BLOCK);
                if (f.share == SOFTMAX)
                    for (int64_t g = 0; g < f.group; ++g)
                        lanes[me * heads + row * f.group + g].take(f.scores + at + g * BLOCK, f.scale);
            }
#pragma omp barrier
        if (f.share == SOFTMAX) {
#pragma omp for schedule(static)
            for (int64_t h = 0; h < heads; ++h) norms[h] = log_sum(lanes.data() + h, int(threads), heads, f.scale);
            for (int64_t b = start; b < stop; ++b)
                for (int64_t row = 0; row < rows; ++row) {
                    float* values = f.values + (b * rows + row) * BLOCK;
                    softmax_of_group(f.scores + (b * heads + row * f.group) * BLOCK, f.group, &norms[row * f.group],
                                     f.scale, values);
                    if (b == blocks - 1) std::fill(values + (tokens - b * BLOCK), values + BLOCK, LEAST);
                }
#pragma omp barrier
        }
        spent(0);
        float* room = f.room + me * ROOM * blocks * BLOCK;
#pragma omp for schedule(dynamic, 1)
        for (int64_t c = 0; c < choices; ++c) {
            float* worth = (f.share == NONE ? f.scores : f.values) + c * BLOCK;
            int64_t* slots = f.slots + c * f.k;
            choose({worth, choices * BLOCK, tokens}, f.k, f.sinks, f.recent, room, slots);
            spent(1);
            if (tail)
                attend_slots(f, c * together, together,
                             tail + c * together / f.group * capacity * (2 * f.dim - f.width), slots, out);
            spent(2);
        }
        if (me == 0) std::copy(seconds, seconds + 3, fasa->seconds);
    }
}

// Exact attention over everything. key_row, value_row: numbers from one head of a sequence to the next.
void dense_step(const float* query, const float* keys, const float* values, int64_t rows, int64_t group, int64_t dim,
                int64_t tokens, int64_t key_row, int64_t value_row, float scale, float* out, int64_t threads) {
    const int64_t blocks = (tokens + BLOCK - 1) / BLOCK, heads = rows * group;
    std::vector<Sums> sums(threads * heads, Sums(dim));
#pragma omp parallel num_threads(threads)
    {
        const int64_t me = omp_get_thread_num(), all_threads = omp_get_num_threads();
        std::vector<float> logits(group * BLOCK);
        for (int64_t i = rows * blocks * me / all_threads; i < rows * blocks * (me + 1) / all_threads; ++i) {
            const int64_t row = i / blocks, start = i % blocks * BLOCK;
            std::fill(logits.begin(), logits.end(), 0.0f);
            attend_group(query + row * group * dim, dim, group, {keys + row * key_row + start * dim, dim, nullptr}, dim,
                         {values + row * value_row + start * dim, dim, nullptr},
                         int(std::min<int64_t>(BLOCK, tokens - start)), dim, scale, logits.data(),
                         &sums[me * heads + row * group]);
        }
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t h = 0; h < heads; ++h) {
            for (int64_t p = 1; p < all_threads; ++p) sums[h].add(sums[p * heads + h]);
            for (int64_t d = 0; d < dim; ++d) out[h * dim + d] = sums[h].mixed[d] / sums[h].weight;
        }
    }
}

// Write one token of every sequence at place `slot` of a split cache.
void split_append(const float* key, const float* value, const int64_t* order, float* lead, float* tail, int64_t rows,
                  int64_t heads, int64_t dim, int64_t width, int64_t capacity, int64_t slot) {
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t* place = order + row % heads * dim;
        float* block = lead + (slot / BLOCK * rows + row) * width * BLOCK + slot % BLOCK;
        float* rest = tail + (row * capacity + slot) * (2 * dim - width);
        for (int64_t i = 0; i < width; ++i) block[i * BLOCK] = key[row * dim + place[i]];
        for (int64_t i = width; i < dim; ++i) *rest++ = key[row * dim + place[i]];
        std::copy(value + row * dim, value + (row + 1) * dim, rest);
    }
}
}
