// Matmul of a few rows of float32 activations with float32 weights in place [out_features, in_features], for processors with AVX2
// but no AVX-512. No copy of a weight has to be refreshed.
//
// The activations are transposed first, 16 rows interleaved, so that SIMD lanes are rows. Each output is a sum along a row of the
// weight in one lane, so its order of addition does not depend on the batch. The next weights are prefetched during a tile.
// Threads are those of the OpenMP runtime that torch has loaded.

#include "vectors.h"

#ifndef WIDE

namespace {

constexpr int DEEP = 6, BROAD = 2;  // outputs x vectors of rows per tile: 12 sums, 2 factors and 1 broadcast fill 16 registers
constexpr int64_t PANEL = BROAD * LANES;
constexpr int64_t LINE = 16;  // floats per cache line

struct Call {
    const float* x;  // transposed
    int64_t rows, in_features, out_features;
    const float* weight;  // [out_features, in_features]
    const float* bias;    // [out_features] or null
    float* out;           // [rows, out_features]
};

// Tile of N outputs of V vectors of rows, from `row` on. The last tile that uses these weights prefetches the next ones, so that
// memory access and arithmetic overlap.
template <int N, int V, bool LAST>
inline void tile(const Call& call, const float* x, int64_t row, int64_t output) {
    Floats sums[N][V];
    UNROLLED
    for (int n = 0; n < N; n++)
        UNROLLED
        for (int v = 0; v < V; v++) sums[n][v] = Floats{};
    const float* weight = call.weight + output * call.in_features;
    for (int64_t k = 0; k < call.in_features; k++) {
        if (LAST && k % LINE == 0)
            UNROLLED
            for (int n = 0; n < N; n++) _mm_prefetch((const char*)(weight + N * call.in_features + N * k + n * LINE), _MM_HINT_T0);
        Floats numbers[V];
        UNROLLED
        for (int v = 0; v < V; v++) numbers[v] = load(x + k * PANEL + v * LANES);
        UNROLLED
        for (int n = 0; n < N; n++) {
            const Floats factor = all(weight[n * call.in_features + k]);
            UNROLLED
            for (int v = 0; v < V; v++) sums[n][v] += numbers[v] * factor;
        }
    }
    alignas(32) float found[N][V * LANES];
    UNROLLED
    for (int n = 0; n < N; n++)
        UNROLLED
        for (int v = 0; v < V; v++) {
            Floats y = sums[n][v];
            if (call.bias) y += call.bias[output + n];
            store(found[n] + v * LANES, y);
        }
    const int64_t count = call.rows - row < V * LANES ? call.rows - row : V * LANES;
    for (int64_t m = 0; m < count; m++) {
        const int64_t place = (row + m) * call.out_features + output;
        UNROLLED
        for (int n = 0; n < N; n++) call.out[place + n] = found[n][m];
    }
}

template <int N>
void outputs(const Call& call, int64_t output, int64_t count) {
    if (count < N) {
        if constexpr (N > 1) outputs<N - 1>(call, output, count);
        return;
    }
    int64_t row = 0;
    const auto x = [&] { return call.x + row * call.in_features; };
    for (; row + PANEL < call.rows; row += PANEL) tile<N, BROAD, false>(call, x(), row, output);
    if (row + LANES < call.rows) return tile<N, BROAD, true>(call, x(), row, output);
    tile<N, 1, true>(call, x(), row, output);
}

}  // namespace

extern "C" {

// `x` [rows, in_features] transposed into `scratch` [rows / 16, in_features, 16], padded with zeros. Called by all threads of a parallel region.
void covey_transpose_fp32(const void* x, int64_t rows, int64_t in_features, void* scratch) {
    constexpr int64_t SOME = 128;
#pragma omp for schedule(static) collapse(2)
    for (int64_t row = 0; row < rows; row += PANEL)
        for (int64_t from = 0; from < in_features; from += SOME) {
            const int64_t end = from + SOME < in_features ? from + SOME : in_features;
            float* to = (float*)scratch + row * in_features;
            for (int64_t i = 0; i < PANEL; i++) {
                const float* mine = (const float*)x + (row + i) * in_features;
                for (int64_t k = from; k < end; k++) to[k * PANEL + i] = row + i < rows ? mine[k] : 0.0f;
            }
        }
}

// Like `covey_matmul_fp32`, called by each thread of a parallel region, without a barrier at the end. For matmuls of one shape, an
// output is always computed by the same thread.
void covey_matmul_fp32_share(const void* x, int64_t rows, int64_t in_features, int64_t out_features, const void* weight, const float* bias,
                      void* out) {
    if (!rows) return;
    const Call call = {(const float*)x, rows, in_features, out_features, (const float*)weight, bias, (float*)out};
#pragma omp for schedule(static) nowait
    for (int64_t output = 0; output < out_features; output += DEEP)
        outputs<DEEP>(call, output, out_features - output < DEEP ? out_features - output : DEEP);
}

// out = x @ weight.T + bias
void covey_matmul_fp32(const void* x, int64_t rows, int64_t in_features, int64_t out_features, const void* weight, const float* bias,
                void* out, void* scratch, int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        covey_transpose_fp32(x, rows, in_features, scratch);
        covey_matmul_fp32_share(scratch, rows, in_features, out_features, weight, bias, out);
    }
}
}

#else
#error "written for processors without AVX-512"
#endif
