// Matmul of small blocks that fit in the cache: of float32 elements or, with AVX-512 BF16, of pairs of adjacent bfloat16 elements.
// A word is one float32 or one pair; sums are in float32.

#pragma once

#include "vectors.h"

namespace {

#ifdef WIDE
constexpr int DEEP = 6, BROAD = 4;  // rows x vectors per tile: 24 sums, 4 factors and 1 broadcast fill 32 registers
#else
constexpr int DEEP = 6, BROAD = 2;  // 12 sums, 2 factors and 1 broadcast fill 16 registers
#endif

inline Floats taken(const float* p) { return load(p); }
inline Floats everywhere(float x) { return all(x); }
inline Floats more(Floats sum, Floats one, Floats factor) { return sum + one * factor; }

#ifdef PAIRS
struct Pair {
    uint32_t bits;
};

inline __m512bh taken(const Pair* p) { return (__m512bh)_mm512_loadu_si512(p); }
inline __m512bh everywhere(Pair x) { return (__m512bh)_mm512_set1_epi32((int)x.bits); }
inline Floats more(Floats sum, __m512bh one, __m512bh factor) { return (Floats)_mm512_dpbf16_ps((__m512)sum, one, factor); }
#endif

// Matrix A; the element at (row, k) is at row * by_row + k * by_k.
template <class W>
struct Rows {
    const W* data;
    int64_t by_row, by_k;
};

// Matrix B in vectors; vector j of row k is at k * by_k + j * by_vector.
template <class W>
struct Vectors {
    const W* data;
    int64_t by_k, by_vector;
};

// Matrix C, overwritten or added to.
struct Target {
    float* data;
    int64_t by_row;
    bool adds;
};

template <int M, int N, class W>
inline void tile(Rows<W> a, Vectors<W> b, Target c, int64_t depth) {
    Floats sums[M][N];
    UNROLLED
    for (int m = 0; m < M; m++)
        UNROLLED
        for (int n = 0; n < N; n++) sums[m][n] = c.adds ? load(c.data + m * c.by_row + n * LANES) : Floats{};
    for (int64_t k = 0; k < depth; k++) {
        decltype(taken(b.data)) factors[N];
        UNROLLED
        for (int n = 0; n < N; n++) factors[n] = taken(b.data + k * b.by_k + n * b.by_vector);
        UNROLLED
        for (int m = 0; m < M; m++) {
            const auto one = everywhere(a.data[m * a.by_row + k * a.by_k]);
            UNROLLED
            for (int n = 0; n < N; n++) sums[m][n] = more(sums[m][n], one, factors[n]);
        }
    }
    UNROLLED
    for (int m = 0; m < M; m++)
        UNROLLED
        for (int n = 0; n < N; n++) store(c.data + m * c.by_row + n * LANES, sums[m][n]);
}

template <int M, int N, class W>
void band(Rows<W> a, Vectors<W> b, Target c, int64_t vectors, int64_t depth) {
    for (; vectors >= N; vectors -= N) {
        tile<M, N>(a, b, c, depth);
        b.data += N * b.by_vector;
        c.data += N * LANES;
    }
    if constexpr (N > 1)
        if (vectors) band<M, N / 2>(a, b, c, vectors, depth);
}

template <int M, class W>
void last_band(Rows<W> a, Vectors<W> b, Target c, int64_t rows, int64_t vectors, int64_t depth) {
    if (rows == M) return band<M, BROAD>(a, b, c, vectors, depth);
    if constexpr (M > 1) last_band<M - 1>(a, b, c, rows, vectors, depth);
}

// C [rows, LANES * vectors] (+)= A [rows, depth] times B [depth, LANES * vectors], `depth` in words.
template <class W>
void multiply(Rows<W> a, Vectors<W> b, Target c, int64_t rows, int64_t vectors, int64_t depth) {
    for (; rows >= DEEP; rows -= DEEP) {
        band<DEEP, BROAD>(a, b, c, vectors, depth);
        a.data += DEEP * a.by_row;
        c.data += DEEP * c.by_row;
    }
    if (rows) last_band<DEEP - 1>(a, b, c, rows, vectors, depth);
}

}  // namespace
