// Products of some rows of float32 activations with float32 weights as they stand [outside, inside], on a processor with AVX2
// but no AVX-512: no weight is copied, so nothing is made again when they change, and what follows is done in registers.
//
// The activations are turned first, 16 rows next to each other, so that lanes are rows: each output is a sum along a row of the
// weight in one lane, in the same order whatever is computed beside it. While some weights are multiplied the next are fetched.
// Threads are those of the OpenMP runtime that torch has loaded.

#include "vectors.h"

#ifndef WIDE

namespace {

constexpr int DEEP = 6, BROAD = 2;  // outputs and vectors of rows of a tile: 12 sums, 2 factors, 1 broadcast in 16 registers
constexpr int64_t PANEL = BROAD * LANES;
constexpr int64_t LINE = 16;  // numbers that memory gives at a time

struct Call {
    const float* x;  // turned
    int64_t rows, inside, outside;
    const float* weight;  // [outside, inside]
    const float* bias;    // [outside] or null
    const float* factor;  // [rows, outside] for TIMES, or null
    float* out;           // [rows, outside]; may be `factor`
    int64_t then;
};

// N outputs of V vectors of rows, of which the first is `row`. The last to use these weights fetches the next, or memory would wait
// for arithmetic and arithmetic for memory.
template <int N, int V, bool LAST>
inline void tile(const Call& call, const float* x, int64_t row, int64_t output) {
    Floats sums[N][V];
    UNROLLED
    for (int n = 0; n < N; n++)
        UNROLLED
        for (int v = 0; v < V; v++) sums[n][v] = Floats{};
    const float* weight = call.weight + output * call.inside;
    for (int64_t k = 0; k < call.inside; k++) {
        if (LAST && k % LINE == 0)
            UNROLLED
            for (int n = 0; n < N; n++) _mm_prefetch((const char*)(weight + N * call.inside + N * k + n * LINE), _MM_HINT_T0);
        Floats numbers[V];
        UNROLLED
        for (int v = 0; v < V; v++) numbers[v] = load(x + k * PANEL + v * LANES);
        UNROLLED
        for (int n = 0; n < N; n++) {
            const Floats factor = all(weight[n * call.inside + k]);
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
            if (call.then == SILU) y = silu(y);
            store(found[n] + v * LANES, y);
        }
    const int64_t count = call.rows - row < V * LANES ? call.rows - row : V * LANES;
    for (int64_t m = 0; m < count; m++) {
        const int64_t place = (row + m) * call.outside + output;
        UNROLLED
        for (int n = 0; n < N; n++) call.out[place + n] = call.then == TIMES ? found[n][m] * call.factor[place + n] : found[n][m];
    }
}

template <int N>
void outputs(const Call& call, int64_t output, int64_t count) {
    if (count < N) {
        if constexpr (N > 1) outputs<N - 1>(call, output, count);
        return;
    }
    int64_t row = 0;
    const auto x = [&] { return call.x + row * call.inside; };
    for (; row + PANEL < call.rows; row += PANEL) tile<N, BROAD, false>(call, x(), row, output);
    if (row + LANES < call.rows) return tile<N, BROAD, true>(call, x(), row, output);
    tile<N, 1, true>(call, x(), row, output);
}

}  // namespace

extern "C" {

// `x` [rows, inside] turned into `room` [rows / 16, inside, 16], which ends with zeros; by all threads of a parallel region.
void covey_live_turn(const void* x, int64_t rows, int64_t inside, void* room) {
    constexpr int64_t SOME = 128;
#pragma omp for schedule(static) collapse(2)
    for (int64_t row = 0; row < rows; row += PANEL)
        for (int64_t from = 0; from < inside; from += SOME) {
            const int64_t end = from + SOME < inside ? from + SOME : inside;
            float* to = (float*)room + row * inside;
            for (int64_t i = 0; i < PANEL; i++) {
                const float* mine = (const float*)x + (row + i) * inside;
                for (int64_t k = from; k < end; k++) to[k * PANEL + i] = row + i < rows ? mine[k] : 0.0f;
            }
        }
}

// By all threads of a parallel region that each call it: no thread waits for another at the end, and outputs of one size are
// computed by the same thread every time.
void covey_live_share(const void* x, int64_t rows, int64_t inside, int64_t outside, const void* weight, const float* bias,
                      const void* factor, void* out, int64_t then) {
    if (!rows) return;
    const Call call = {(const float*)x, rows, inside, outside, (const float*)weight, bias, (const float*)factor, (float*)out, then};
#pragma omp for schedule(static) nowait
    for (int64_t output = 0; output < outside; output += DEEP)
        outputs<DEEP>(call, output, outside - output < DEEP ? outside - output : DEEP);
}

// out = x times the weight, plus the bias; then SiLU of it, or it times `factor`.
void covey_live(const void* x, int64_t rows, int64_t inside, int64_t outside, const void* weight, const float* bias,
                const void* factor, void* out, void* room, int64_t then, int64_t threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        covey_live_turn(x, rows, inside, room);
        covey_live_share(room, rows, inside, outside, weight, bias, factor, out, then);
    }
}
}

#else
#error "written for processors without AVX-512"
#endif
