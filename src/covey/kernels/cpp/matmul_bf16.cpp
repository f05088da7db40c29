// Matmul of bfloat16 activations with bfloat16 weights in VNNI pairs (AVX-512 BF16), for any number of rows: one code for all
// shapes. The epilogue runs in registers.
//
// A weight in VNNI pairs consists of panels of 16 outputs: for each pair of inputs 16 pairs, one per lane. Sums are in float32.
// Threads are those of the OpenMP runtime that torch has loaded.

#include "vectors.h"

#ifdef PAIRS

namespace {

constexpr int DEEP = 6, BROAD = 4;  // rows x panels per tile: 24 sums, 4 factors and 1 broadcast fill 32 registers
constexpr int64_t TALL = 192;       // most rows multiplied by a column of panels before the next column is read
constexpr int64_t LINE = 64;        // bytes per cache line

struct Call {
    const bf16* x;  // [rows, in_features]
    int64_t rows, in_features, out_features;
    const bf16* weight;  // [out_features / 16, in_features / 2, 16, 2]
    const float* bias;   // [out_features] or null
    const bf16* factor;  // [rows, out_features] for EPILOGUE_MUL, or null
    void* out;           // [rows, out_features]; may be `factor`
    int64_t epilogue;
};

// Prefetch during a tile: `bytes` at `from`, `lines` cache lines per pair of inputs.
struct Ahead {
    const char* from;
    int64_t bytes, lines;
};

// Tile of M rows and N panels.
template <int M, int N>
void tile(const Call& call, int64_t row, int64_t panel, const Ahead& ahead) {
    __m512 sums[M][N];
    UNROLLED
    for (int m = 0; m < M; m++)
        UNROLLED
        for (int n = 0; n < N; n++) sums[m][n] = _mm512_setzero_ps();
    const bf16* x = call.x + row * call.in_features;
    const bf16* weight = call.weight + panel * LANES * call.in_features;
    const char *fetched = ahead.from, *end = fetched + ahead.bytes;
    for (int64_t k = 0; k < call.in_features; k += 2) {
        if (fetched < end)
            for (int64_t i = 0; i < ahead.lines; i++, fetched += LINE) _mm_prefetch(fetched, _MM_HINT_T0);
        __m512bh factors[N];
        UNROLLED
        for (int n = 0; n < N; n++)
            factors[n] = (__m512bh)_mm512_loadu_si512(weight + (n * call.in_features + k) * LANES);
        UNROLLED
        for (int m = 0; m < M; m++) {
            int32_t pair;
            std::memcpy(&pair, x + m * call.in_features + k, sizeof pair);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            UNROLLED
            for (int n = 0; n < N; n++) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], both, factors[n]);
        }
    }
    UNROLLED
    for (int m = 0; m < M; m++)
        UNROLLED
        for (int n = 0; n < N; n++) {
            Floats y = (Floats)sums[m][n];
            const int64_t place = (row + m) * call.out_features + (panel + n) * LANES;
            if (call.bias) y += load(call.bias + (panel + n) * LANES);
            if (call.epilogue == EPILOGUE_SILU) y = silu(y);
            if (call.epilogue == EPILOGUE_MUL) y *= load(call.factor + place);
            if (call.epilogue == EPILOGUE_FP32_ACCUMULATE) y += load((float*)call.out + place);
            if (call.epilogue >= EPILOGUE_FP32_OUT)
                store((float*)call.out + place, y);
            else
                store((bf16*)call.out + place, y);
        }
}

template <int M, int N>
void band(const Call& call, int64_t row, int64_t count, int64_t panel, const Ahead& ahead) {
    if (count == M) return tile<M, N>(call, row, panel, ahead);
    if constexpr (M > 1) band<M - 1, N>(call, row, count, panel, ahead);
}

// A column of panels for bands of rows of nearly equal height. The first band reads the column from memory; the others find it in
// the cache and prefetch the next column, `bytes` long, so that memory access and arithmetic overlap.
template <int N>
void column(const Call& call, int64_t from, int64_t to, int64_t panel, int64_t bytes) {
    const int64_t rows = to - from, bands = (rows + DEEP - 1) / DEEP, pairs = call.in_features / 2;
    const char* next = (const char*)(call.weight + (panel + N) * LANES * call.in_features);
    // too few bands: the prefetch would delay their own loads
    const int64_t fetching = bands < (pairs > 512 ? 5 : 3) ? 0 : bands - 1;
    const int64_t lines = fetching ? (bytes / LINE + fetching * pairs - 1) / (fetching * pairs) : 0;
    for (int64_t b = 0; b < bands; b++) {
        const int64_t begin = from + rows * b / bands, end = from + rows * (b + 1) / bands;
        const int64_t done = (b - 1) * lines * pairs * LINE, left = b && fetching && done < bytes ? bytes - done : 0;
        band<DEEP, N>(call, begin, end - begin, panel, {next + (left ? done : 0), left, lines});
    }
}

// -- layouts: VNNI pairs, transposed -------------------------------------------------------------------------------------

constexpr int64_t BOTH = 2 * LANES;  // rows or columns of a transposed block

// Transpose 16 x 16 words of 32 bits.
inline void transpose(__m512i* x) {
    __m512i y[LANES];
    UNROLLED
    for (int i = 0; i < LANES; i += 2) y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    UNROLLED
    for (int i = 0; i < LANES; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]), x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]), x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    UNROLLED
    for (int j = 0; j < 4; j++) {
        const __m512i a = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88), b = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88), d = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
        y[j] = _mm512_shuffle_i32x4(a, c, 0x88), y[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
        y[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88), y[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
    std::memcpy(x, y, sizeof y);
}

// 16 bfloat16 elements, each in a word of 32 bits.
inline __m512i words(const bf16* x) { return (__m512i)words_of(x); }
inline __m512i words(const float* x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)load(x))); }

// 16 pairs of adjacent bfloat16 elements; zeros from pair `count` on.
inline __m512i neighbours(const bf16* x, int64_t count) {
    return count < LANES ? _mm512_maskz_loadu_epi32((1u << count) - 1, x) : _mm512_loadu_si512(x);
}
inline __m512i neighbours(const float* x, int64_t count) {
    const uint32_t there = count < LANES ? (1u << 2 * count) - 1 : ~0u;
    const __m512 low = _mm512_maskz_loadu_ps(there, x), high = _mm512_maskz_loadu_ps(there >> LANES, x + LANES);
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// Elements of rows `row` and `row + 1` in 16 columns, paired; zeros for rows beyond the last.
template <class T>
inline __m512i pair(const T* x, int64_t rows, int64_t columns, int64_t row, int64_t column) {
    if (row >= rows) return _mm512_setzero_si512();
    const T* at = x + row * columns + column;
    const __m512i first = words(at);
    return row + 1 < rows ? _mm512_or_si512(first, _mm512_slli_epi32(words(at + columns), 16)) : first;
}

// The same in 32 columns, a whole cache line per row: half of it might be evicted before it is used.
inline void pair(const bf16* x, int64_t rows, int64_t columns, int64_t row, int64_t column, __m512i& low, __m512i& high) {
    const bf16* at = x + row * columns + column;
    const __m512i zeros = _mm512_setzero_si512();
    const __m512i first = row < rows ? _mm512_loadu_si512(at) : zeros, second = row + 1 < rows ? _mm512_loadu_si512(at + columns) : zeros;
    const __m512i order = _mm512_cvtepu16_epi32(_mm256_set_epi16(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    const __m512i both = _mm512_or_si512(order, _mm512_slli_epi32(_mm512_add_epi32(order, _mm512_set1_epi32(BOTH)), 16));
    low = _mm512_permutex2var_epi16(first, both, second);
    high = _mm512_permutex2var_epi16(first, _mm512_add_epi16(both, _mm512_set1_epi16(LANES)), second);
}

template <class T>
void pair_rows(const T* x, int64_t rows, int64_t columns, int64_t length, bf16* out, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t from = 0; from < length; from += BOTH) {
        const int64_t end = from + BOTH < length ? from + BOTH : length;
        int64_t column = 0;
        if constexpr (sizeof(T) == sizeof(bf16))
            for (; column + BOTH <= columns; column += BOTH)
                for (int64_t row = from; row < end; row += 2) {
                    __m512i low, high;
                    pair(x, rows, columns, row, column, low, high);
                    _mm512_storeu_si512(out + column * length + row * LANES, low);
                    _mm512_storeu_si512(out + (column + LANES) * length + row * LANES, high);
                }
        for (; column < columns; column += LANES)
            for (int64_t row = from; row < end; row += 2)
                _mm512_storeu_si512(out + column * length + row * LANES, pair(x, rows, columns, row, column));
    }
}

template <class T>
void pair_columns(const T* x, int64_t rows, int64_t columns, bf16* out, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < rows; row += LANES)
        for (int64_t column = 0; column < columns; column += BOTH) {
            __m512i square[LANES];
            const int64_t left = (columns - column) / 2, count = left < LANES ? left : LANES;
            UNROLLED
            for (int i = 0; i < LANES; i++) square[i] = neighbours(x + (row + i) * columns + column, count);
            transpose(square);
            for (int64_t i = 0; i < count; i++) _mm512_storeu_si512(out + row * columns + (column + 2 * i) * LANES, square[i]);
        }
}

}  // namespace

extern "C" {

// `out` [columns / 16, length / 2, 16, 2]: pairs of rows, zeros from `rows` on. `length` is even, `columns` a multiple of 16.
void covey_pair_rows(const void* x, int64_t is_float, int64_t rows, int64_t columns, int64_t length, void* out, int64_t threads) {
    if (is_float) return pair_rows((const float*)x, rows, columns, length, (bf16*)out, threads);
    pair_rows((const bf16*)x, rows, columns, length, (bf16*)out, threads);
}

// `out` [rows / 16, columns / 2, 16, 2]: pairs of columns. `columns` is even, `rows` a multiple of 16.
void covey_pair_columns(const void* x, int64_t is_float, int64_t rows, int64_t columns, void* out, int64_t threads) {
    if (is_float) return pair_columns((const float*)x, rows, columns, (bf16*)out, threads);
    pair_columns((const bf16*)x, rows, columns, (bf16*)out, threads);
}

// `out` [columns, length]: `x` transposed, zeros from `rows` on. `length` is a multiple of 32, `columns` of 16.
void covey_transpose_bf16(const void* x, int64_t rows, int64_t columns, int64_t length, void* out, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t from = 0; from < length; from += BOTH) {
        const auto store_transposed = [&](int64_t column, __m512i* square) {
            transpose(square);
            UNROLLED
            for (int i = 0; i < LANES; i++) _mm512_storeu_si512((bf16*)out + (column + i) * length + from, square[i]);
        };
        int64_t column = 0;
        for (; column + BOTH <= columns; column += BOTH) {
            __m512i square[LANES], next[LANES];
            for (int i = 0; i < LANES; i++) pair((const bf16*)x, rows, columns, from + 2 * i, column, square[i], next[i]);
            store_transposed(column, square);
            store_transposed(column + LANES, next);
        }
        for (; column < columns; column += LANES) {
            __m512i square[LANES];
            UNROLLED
            for (int i = 0; i < LANES; i++) square[i] = pair((const bf16*)x, rows, columns, from + 2 * i, column);
            store_transposed(column, square);
        }
    }
}

// Like `covey_matmul_bf16`, called by each thread of a parallel region, without a barrier at the end. For matmuls of one shape, an
// output is always computed by the same thread.
void covey_matmul_bf16_share(const void* x, int64_t rows, int64_t in_features, int64_t out_features, const void* weight, const float* bias,
                        const void* factor, void* out, int64_t epilogue) {
    const Call call = {(const bf16*)x, rows, in_features, out_features, (const bf16*)weight, bias, (const bf16*)factor, out, epilogue};
    const int64_t panels = out_features / LANES, columns = (panels + BROAD - 1) / BROAD, bands = (rows + DEEP - 1) / DEEP;
    const int64_t blocks = (rows + TALL - 1) / TALL;
#pragma omp for schedule(static) collapse(2) nowait
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t i = 0; i < columns; i++) {
            const int64_t from = bands * block / blocks * DEEP, end = bands * (block + 1) / blocks * DEEP;
            const int64_t to = end < rows ? end : rows;
            const int64_t after = panels - BROAD * (i + 1);
            const int64_t bytes = after > 0 ? (after < BROAD ? after : BROAD) * LANES * in_features * sizeof(bf16) : 0;
            switch (panels - BROAD * i) {
                case 1: column<1>(call, from, to, BROAD * i, bytes); break;
                case 2: column<2>(call, from, to, BROAD * i, bytes); break;
                case 3: column<3>(call, from, to, BROAD * i, bytes); break;
                default: column<BROAD>(call, from, to, BROAD * i, bytes);
            }
        }
}

// out = epilogue(x @ weight.T + bias); the epilogue is SiLU, or a product with `factor`.
void covey_matmul_bf16(const void* x, int64_t rows, int64_t in_features, int64_t out_features, const void* weight, const float* bias,
                  const void* factor, void* out, int64_t epilogue, int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    covey_matmul_bf16_share(x, rows, in_features, out_features, weight, bias, factor, out, epilogue);
}
}

#else
#error "the compiler does not know AVX-512 BF16"
#endif
