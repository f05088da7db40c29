// SIMD vectors of 16 or 8 float32 elements, by GCC's and Clang's vector types, loaded from float32 or bfloat16.
// No torch header: a file that includes this compiles in a second or two, and works with any build of torch.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include <immintrin.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define WIDE 1
#if defined(__AVX512BF16__)
#define PAIRS 1
#endif
#endif

namespace {

#define UNROLLED _Pragma("GCC unroll 16")

#ifdef WIDE
constexpr int LANES = 16;
#else
constexpr int LANES = 8;  // vectors wider than a register would be spilled to memory
#endif
constexpr float NOTHING = -1e30f;  // score of a masked key; finite, so that the difference of two is 0, not NaN

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct bf16 {
    uint16_t bits;
};

inline Floats all(float x) { return x - Floats{}; }

inline Floats load(const float* p) {
    Floats x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// LANES elements, each in a word of 32 bits.
inline Words words_of(const bf16* p) {
    Halves x;
    std::memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, Words);
}

inline Floats load(const bf16* p) { return (Floats)(words_of(p) << 16); }

inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }

// Round to nearest, ties to even. The AVX-512 BF16 instruction flushes magnitudes below 2^-126 to zero.
inline void store(bf16* p, Floats x) {
#ifdef PAIRS
    const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(p, &half, sizeof half);
#else
    Words bits = (Words)x;
    bits += 0x7fff + ((bits >> 16) & 1);
    Halves half = __builtin_convertvector(bits >> 16, Halves);
    std::memcpy(p, &half, sizeof half);
#endif
}

inline float one(const float* p) { return *p; }

inline float one(const bf16* p) {
    uint32_t bits = (uint32_t)p->bits << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline void put(float* p, float x) { *p = x; }

inline void put(bf16* p, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof x);
    p->bits = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float sum(Floats x) {
#ifdef WIDE
    return _mm512_reduce_add_ps((__m512)x);
#else
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#endif
}

inline float largest(Floats x) {
#ifdef WIDE
    return _mm512_reduce_max_ps((__m512)x);
#else
    __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
#endif
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Sums of LANES vectors, one per lane.
inline Floats sums(const Floats* x) {
#ifdef WIDE
    __m512 fours[4];
    UNROLLED
    for (int i = 0; i < 4; i++) {
        __m512 a = (__m512)x[4 * i], b = (__m512)x[4 * i + 1], c = (__m512)x[4 * i + 2], d = (__m512)x[4 * i + 3];
        __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
        fours[i] = _mm512_add_ps(
            _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    }
    __m512 low = _mm512_add_ps(
        _mm512_shuffle_f32x4(fours[0], fours[1], 0x88), _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
    __m512 high = _mm512_add_ps(
        _mm512_shuffle_f32x4(fours[2], fours[3], 0x88), _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd));
    return (Floats)_mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
#else
    __m256 fours[2];  // each half of a register: sums of that half of four vectors
    UNROLLED
    for (int i = 0; i < 2; i++) {
        const Floats* four = x + 4 * i;
        fours[i] = _mm256_hadd_ps(_mm256_hadd_ps((__m256)four[0], (__m256)four[1]), _mm256_hadd_ps((__m256)four[2], (__m256)four[3]));
    }
    return (Floats)_mm256_add_ps(_mm256_permute2f128_ps(fours[0], fours[1], 0x20), _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
#endif
}

// e^x for x <= 0, to 2 units in the last place (the polynomial of Cephes' expf). NaN stays NaN.
inline Floats exponential(Floats x) {
#ifdef WIDE
    x = (Floats)_mm512_max_ps(_mm512_set1_ps(-87.0f), (__m512)x);  // the second operand is returned if it is NaN
    const Floats n = (Floats)_mm512_roundscale_ps((__m512)(x * 1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    x = x < all(-87.0f) ? all(-87.0f) : x;
    // rounding to nearest of a negative number: truncation of x - 0.5
    const Ints whole = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);
    const Floats n = __builtin_convertvector(whole, Floats);
#endif
    Floats r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + (r + 1.0f);
#ifdef WIDE
    return (Floats)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
    return y * (Floats)((whole + 127) << 23);
#endif
}

inline Floats silu(Floats x) {
    const Floats small = exponential(x < all(0.0f) ? x : -x);
    return x * (x < all(0.0f) ? small : all(1.0f)) / (1.0f + small);
}

}  // namespace
