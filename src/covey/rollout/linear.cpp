// Products of bfloat16 activations with packed bfloat16 weights on a processor that multiplies pairs of them (AVX-512 BF16),
// for any number of rows: nothing is built or kept by the number of rows, and what follows a product is done in registers.
//
// A packed weight is panels of 16 outputs: for each pair of inputs, 16 pairs, one a lane. Sums are in float32.
// Threads are those of the OpenMP runtime that torch has loaded.

#include "vectors.h"

#ifdef PAIRS

namespace {

constexpr int DEEP = 6, BROAD = 4;  // rows and panels of a tile: 24 sums, 4 factors, 1 broadcast in 32 registers
constexpr int64_t TALL = 192;       // rows, at most, that meet a column of panels before the next column is read

enum Then { NOTHING_MORE, SILU, TIMES };

struct Call {
    const bf16* x;  // [rows, inside]
    int64_t rows, inside, outside;
    const bf16* weight;  // [outside / 16, inside / 2, 16, 2]
    const float* bias;   // [outside] or null
    const bf16* factor;  // [rows, outside] for TIMES, or null
    bf16* out;           // [rows, outside]; may be `factor`
    int64_t then;
};

inline Floats silu(Floats x) {
    const Floats small = exponential(x < all(0.0f) ? x : -x);
    return x * (x < all(0.0f) ? small : all(1.0f)) / (1.0f + small);
}

// Outputs of M rows in N panels.
template <int M, int N>
void tile(const Call& call, int64_t row, int64_t panel) {
    __m512 sums[M][N];
    UNROLLED
    for (int m = 0; m < M; m++)
        UNROLLED
        for (int n = 0; n < N; n++) sums[m][n] = _mm512_setzero_ps();
    const bf16* x = call.x + row * call.inside;
    const bf16* weight = call.weight + panel * LANES * call.inside;
    for (int64_t k = 0; k < call.inside; k += 2) {
        __m512bh factors[N];
        UNROLLED
        for (int n = 0; n < N; n++)
            factors[n] = (__m512bh)_mm512_loadu_si512(weight + (n * call.inside + k) * LANES);
        UNROLLED
        for (int m = 0; m < M; m++) {
            int32_t pair;
            std::memcpy(&pair, x + m * call.inside + k, sizeof pair);
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
            const int64_t place = (row + m) * call.outside + (panel + n) * LANES;
            if (call.bias) y += load(call.bias + (panel + n) * LANES);
            if (call.then == SILU) y = silu(y);
            if (call.then == TIMES) y *= load(call.factor + place);
            store(call.out + place, y);
        }
}

template <int M, int N>
void last_rows(const Call& call, int64_t row, int64_t count, int64_t panel) {
    if (count == M) return tile<M, N>(call, row, panel);
    if constexpr (M > 1) last_rows<M - 1, N>(call, row, count, panel);
}

template <int N>
void column(const Call& call, int64_t from, int64_t to, int64_t panel) {
    for (; from + DEEP <= to; from += DEEP) tile<DEEP, N>(call, from, panel);
    if (from < to) last_rows<DEEP - 1, N>(call, from, to - from, panel);
}

}  // namespace

extern "C" {

// out = x times the weight, plus the bias; then SiLU of it, or it times `factor`.
void covey_linear(const void* x, int64_t rows, int64_t inside, int64_t outside, const void* weight, const float* bias,
                  const void* factor, void* out, int64_t then, int64_t threads) {
    const Call call = {(const bf16*)x, rows, inside, outside, (const bf16*)weight, bias, (const bf16*)factor, (bf16*)out, then};
    const int64_t panels = outside / LANES, columns = (panels + BROAD - 1) / BROAD, bands = (rows + DEEP - 1) / DEEP;
    const int64_t blocks = (rows + TALL - 1) / TALL, height = (bands + blocks - 1) / blocks * DEEP;
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2) if (threads > 1)
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t i = 0; i < columns; i++) {
            const int64_t from = block * height, to = from + height < rows ? from + height : rows;
            switch (panels - BROAD * i) {
                case 1: column<1>(call, from, to, BROAD * i); break;
                case 2: column<2>(call, from, to, BROAD * i); break;
                case 3: column<3>(call, from, to, BROAD * i); break;
                default: column<BROAD>(call, from, to, BROAD * i);
            }
        }
}
}

#endif
