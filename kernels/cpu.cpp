// One decode step of attention on a CPU in float32: FASA on the split cache, and dense attention.
//
// Built and called by kernels/cpu.py, which also says what the arguments are; no header of PyTorch is needed. OpenMP's
// threads are PyTorch's own: its library is loaded already, and no second one is linked.
// GCC's and clang's vector types give one AVX-512 register, or as many smaller ones as it takes.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include <omp.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16, VECTORS = 4;  // floats of a vector; vectors that are multiplied by those of a query at a time
#else
constexpr int W = 8, VECTORS = 2;
#endif
constexpr int BLOCK = 64;  // tokens of a block, as kernels/cpu.py has it
constexpr int GROUP = 4;   // query heads whose sums stay in registers together
constexpr int ROOM = 3;    // numbers for each token, to choose in
constexpr float LEAST = -FLT_MAX / 4;  // less than any score, and still a number after scaling

typedef float Vec __attribute__((vector_size(4 * W)));
typedef float Loose __attribute__((vector_size(4 * W), aligned(4)));  // anywhere in memory
typedef int32_t Int __attribute__((vector_size(4 * W)));

inline Vec load(const float* at) { return *reinterpret_cast<const Loose*>(at); }
inline void store(float* at, Vec v) { *reinterpret_cast<Loose*>(at) = v; }
inline Vec all(float x) { return Vec{} + x; }

inline Vec larger(Vec a, Vec b) {  // one instruction, where compilers make two of a > b ? a : b
#if defined(__AVX512F__)
    return reinterpret_cast<Vec>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
    return reinterpret_cast<Vec>(_mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
    return a > b ? a : b;
#endif
}

inline float sum_of(Vec v) {
    typedef float Four __attribute__((vector_size(16)));
    Four parts[W / 4];
    std::memcpy(parts, &v, sizeof v);
    for (int i = 1; i < W / 4; ++i) parts[0] += parts[i];
    return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
}

inline float max_of(Vec v) {
    float largest = v[0];
    for (int i = 1; i < W; ++i) largest = v[i] > largest ? v[i] : largest;
    return largest;
}

// 2 ** x for x <= 126 or so, to 1e-7 of itself; what would be less than 2 ** -126 is that.
inline Vec exp2(Vec x) {
    x = larger(x, all(-126.0f));
    const Vec shifted = x + 12582912.0f;  // 1.5 * 2 ** 23: the integer part stands in the lowest bits then
    const Vec f = x - (shifted - 12582912.0f);
    Vec p = all(1.32765e-3f);  // of all polynomials of this degree the closest, |f| being at most a half
    p = p * f + 9.67554e-3f;
    p = p * f + 5.550713e-2f;
    p = p * f + 2.402212e-1f;
    p = p * f + 6.9314697e-1f;
    p = p * f + 1.0f;
    return reinterpret_cast<Vec>(reinterpret_cast<Int>(p) + (reinterpret_cast<Int>(shifted) << 23));
}

// Bit i is set where v[i] >= least.
inline uint32_t at_least(Vec v, float least) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(v), _mm512_set1_ps(least), _CMP_GE_OQ);
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps(reinterpret_cast<__m256>(v), _mm256_set1_ps(least), _CMP_GE_OQ));
#else
    uint32_t bits = 0;
    for (int i = 0; i < W; ++i) bits |= uint32_t(v[i] >= least) << i;
    return bits;
#endif
}

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

// Adds weights [N, BLOCK] times n rows to N sums.
template <int N>
inline void mix(const float* weights, Table values, int n, int64_t dim, Sums* sums) {
    int64_t i = 0;
    for (; i + VECTORS * W <= dim; i += VECTORS * W) {
        Vec mixed[N][VECTORS];
        for (int g = 0; g < N; ++g)
            for (int v = 0; v < VECTORS; ++v) mixed[g][v] = load(&sums[g].mixed[i + v * W]);
        for (int t = 0; t < n; ++t) {
            const float* row = values[t] + i;
            for (int v = 0; v < VECTORS; ++v) {
                const Vec x = load(row + v * W);
                for (int g = 0; g < N; ++g) mixed[g][v] += weights[g * BLOCK + t] * x;
            }
        }
        for (int g = 0; g < N; ++g)
            for (int v = 0; v < VECTORS; ++v) store(&sums[g].mixed[i + v * W], mixed[g][v]);
    }
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
    mix<N>(logits, values, n, dim, sums);
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
