// Vectors of floats, as wide as the processor's registers. Compilers' own types: an AVX-512 register, or two of others.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

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
}  // namespace
